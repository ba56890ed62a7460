# SPDX-License-Identifier: Apache-2.0
"""Patches to Hugging Face's Trainer: what ``zebra`` cannot give it is stated before it is
missed."""

from __future__ import annotations

from functools import partial
from typing import Any

from ds_moe_ext.patches.patch import Patch, apply_all, by

VERSIONS = ">=5.5,<6"
TRAINER = "transformers.trainer:Trainer"


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if self.compute_metrics is not None and not self.args.prediction_loss_only:
        _refuse_logits(self, "compute_metrics was given to the Trainer", "leave it out")


def _predict(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.args.prediction_loss_only:
        _refuse_logits(self, "the Trainer's predict was called", "use evaluate")
    return original(self, *args, **kwargs)


def _refuse_logits(trainer: Any, what: str, remedy: str) -> None:
    """Raise ValueError under zebra, of what wants logits."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    from ds_moe_ext.strategies.settings import BLOCK, read_settings

    settings, strategy = read_settings(plugin.deepspeed_config)
    if strategy is not None and strategy.has_roles:
        raise ValueError(
            f"{BLOCK}.strategy is {settings.strategy!r}, but {what}, which wants logits: "
            "attention ranks run the batches of all ranks, and scalars alone come back; "
            f"{remedy}, or set prediction_loss_only=True"
        )


PATCHES = (
    Patch(
        "refuse-metrics",
        f"{TRAINER}.__init__",
        VERSIONS,
        "under zebra compute_metrics would get no logits, which is stated at start",
        by(_init),
    ),
    Patch(
        "refuse-predictions",
        f"{TRAINER}.predict",
        VERSIONS,
        "under zebra there are no predictions but losses",
        by(_predict),
    ),
)

apply = partial(apply_all, PATCHES)
"""Apply both, or none and say why."""
