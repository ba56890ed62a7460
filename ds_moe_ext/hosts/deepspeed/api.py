"""What a script may ask of an engine with replaced layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed.engine import run_of
from ds_moe_ext.hosts.deepspeed.export import gathered_state
from ds_moe_ext.report.recorder import Recorder


def recorder_of(engine: Any) -> Recorder | None:
    """The recorder of a DeepSpeed engine; None where ``ds_moe_ext`` is not enabled in its JSON."""
    run = run_of(engine)
    return None if run is None else run.recorder


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with all experts, as the stock class loads it. Collective.

    Args:
        model: ``engine.module``.
    """
    return gathered_state(model)
