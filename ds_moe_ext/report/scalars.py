# SPDX-License-Identifier: Apache-2.0
"""Numbers of the latest step, by name, for the monitor of whoever trains."""

from __future__ import annotations

import math

from ds_moe_ext.report.rank_figures import Point
from ds_moe_ext.report.recorder import Recorder

FAMILY = "ds_moe_ext"


def scalars_of(recorder: Recorder, news: Point | None) -> dict[str, float]:
    """What is known of the latest step.

    Args:
        recorder: of the run.
        news: what ranks have told each other since the last time; None for nothing.
    """
    balance_L = recorder.latest_balance_L()
    found = {
        "balance/mean": float(balance_L.mean()),
        "balance/busiest_layer": float(balance_L.max()),
        **{
            f"balance/of/{layer.name}": float(balance)
            for layer, balance in zip(recorder.layers, balance_L)
        },
        "copies": float(recorder.latest_copies()),
    }
    choice = recorder.latest_choice()
    if choice is not None:
        found |= {"expected_step_s": choice.expected_s}
    if news is not None:
        found |= {
            "step_s": news.step_s,
            "tokens_per_s": news.tokens_per_s,
            "exposed_s": news.exposed_s,
            "exposed_share": news.exposed_s / news.step_s,
            "waited_s": news.waited_s,
            "sent_s": news.sent_s,
        }
    return {f"{FAMILY}/{name}": value for name, value in found.items() if math.isfinite(value)}
