# SPDX-License-Identifier: Apache-2.0
"""Which passes of ranks belong together."""

from __future__ import annotations

import numpy as np
import pytest

from ds_moe_ext.moe.order import check_kinds, kind_of

TRAINING = kind_of(2, is_training=True, is_graded=True)
EVALUATION = kind_of(2, is_training=False, is_graded=False)
RECOMPUTED = kind_of(2, is_training=True, is_graded=False)  # by reentrant checkpointing
LATER = kind_of(3, is_training=True, is_graded=True)


@pytest.mark.parametrize(
    "kinds", [[TRAINING, TRAINING], [TRAINING, RECOMPUTED], [EVALUATION, RECOMPUTED], [LATER] * 3]
)
def test_these_do(kinds: list[int]) -> None:
    check_kinds(np.array(kinds))


@pytest.mark.parametrize(
    ("kinds", "reported"),
    [
        ([TRAINING, EVALUATION], "place 0: layer 2, training; place 1: layer 2, evaluation"),
        ([TRAINING, RECOMPUTED, LATER], "place 1: layer 2, other; place 2: layer 3, training"),
    ],
)
def test_these_do_not(kinds: list[int], reported: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        check_kinds(np.array(kinds))
    assert reported in str(caught.value) and "ds_moe_ext.joined(engine)" in str(caught.value)
