"""What a script may ask of a model with replaced layers."""

from __future__ import annotations

from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed.export import gathered_state


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all experts, as the stock class loads it. Collective.

    Args:
        model: ``engine.module``.
    """
    return gathered_state(model)
