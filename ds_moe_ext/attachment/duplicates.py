# SPDX-License-Identifier: Apache-2.0
"""Why a replaced layer is not copied by Python, as ``copy.deepcopy`` and pickle do.

Its program has process groups, which cannot be copied, and its forward is bound to the module that
it was made for: a copy would run the original's weights.
"""

from __future__ import annotations


def no_duplicate(name: str) -> TypeError:
    """What a user is told who copies a model, as for averaged weights, or pickles it.

    Args:
        name: of the layer.
    """
    return TypeError(
        f"{name} is run by ds_moe_ext, on experts that lie on all ranks, and can be neither copied "
        "(copy.deepcopy, AveragedModel) nor pickled (torch.save of a model); for averaged weights "
        "copy the model before its layers are replaced, and average into that what all ranks get "
        "of ds_moe_ext.full_state_dict(model); to save, use that or a checkpoint"
    )
