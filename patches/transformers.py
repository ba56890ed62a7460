"""The patch to Hugging Face's Trainer: what ``zebra`` cannot give it is said at start."""

from __future__ import annotations

import functools
from typing import Any

from ds_moe_ext.patches.record import Patch, apply_all


def _refuse_metrics(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is None or self.compute_metrics is None or self.args.prediction_loss_only:
            return
        from ds_moe_ext.settings import BLOCK, read_settings
        from ds_moe_ext.strategies.zebra import Zebra

        _, strategy = read_settings(plugin.deepspeed_config)
        if isinstance(strategy, Zebra):
            raise ValueError(
                f"{BLOCK}.strategy is 'zebra', but the Trainer was given compute_metrics, which "
                "wants logits: attention ranks run the batches of all ranks, and scalars alone "
                "come back; leave compute_metrics out, or set prediction_loss_only=True"
            )

    return __init__


PATCHES = (
    Patch(
        "refuse-metrics",
        "transformers.trainer:Trainer.__init__",
        ">=5,<6",
        "under zebra compute_metrics would get no logits, which is said at start",
        _refuse_metrics,
    ),
)


def apply() -> None:
    """Apply it, or say why not."""
    apply_all(PATCHES)
