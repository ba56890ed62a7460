# SPDX-License-Identifier: Apache-2.0
"""Draw ``docs/pictures/step.svg``: one MoE layer on four EP ranks, without and with replicas.

A toy: Zipf loads of eight experts, two an owner; the planner of ``fssdp`` chooses replicas. Times
are the constants below, and one routed token takes the same time on every rank.
python docs/pictures.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ds_moe_ext import NearestReplica
from ds_moe_ext.core.placement import even_owners
from ds_moe_ext.planning.fssdp_planner import materialize

SVG = Path(__file__).parent / "pictures" / "step.svg"
NUM_EXPERTS, NUM_RANKS, TOKENS = 8, 4, 4096  # routed tokens of each rank
ATTENTION, EXCHANGE, EXPERTS = 60, 24, 80  # units; experts' is the mean over ranks
COLORS = {
    "attention": "#9fb3c8",
    "dispatch": "#f2c14e",
    "experts": "#3a7d44",
    "combine": "#f2c14e",
    "waiting": "#e8e8e8",
}
LEFT, BAR, GAP, SCALE = 92, 22, 8, 1.7


def experts_C(num_replicas: int) -> np.ndarray:
    """Units that each rank spends on its experts, with so many replicas a rank at most."""
    share_E = 1.0 / np.arange(1, NUM_EXPERTS + 1)
    rows_CE = np.tile((TOKENS * share_E / share_E.sum()).astype(np.int64), (NUM_RANKS, 1))
    (owner,) = even_owners([NUM_EXPERTS], NUM_RANKS)
    target = owner
    node_C = np.zeros(NUM_RANKS, dtype=np.int64)
    if num_replicas:
        (target,) = materialize(
            [owner],
            [rows_CE.sum(axis=0)],
            overlap_degree=NUM_EXPERTS,
            replicas_per_ep_rank=num_replicas,
            node_C=node_C,
        )
    computed_C = NearestReplica(target, node_C).computed_C(rows_CE)
    return EXPERTS * computed_C / computed_C.mean()


def bars(busy_C: np.ndarray, top: float) -> Iterator[str]:
    """One row a rank; combine starts when the busiest rank has computed."""
    for rank, busy in enumerate(busy_C):
        y, x = top + rank * (BAR + GAP), float(LEFT)
        yield text(LEFT - 10, y + 15, f"EP rank {rank}", "end")
        for name, units in (
            ("attention", ATTENTION),
            ("dispatch", EXCHANGE),
            ("experts", busy),
            ("waiting", busy_C.max() - busy),
            ("combine", EXCHANGE),
        ):
            width = units * SCALE
            if units > 0.5:
                yield (
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
                    f'fill="{COLORS[name]}"/>'
                )
            x += width


def text(x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{weight}>{words}</text>'


def picture() -> str:
    """The whole file."""
    panels: Sequence[tuple[str, int]] = (("without replicas (ep)", 0), ("with replicas (fssdp)", 1))
    parts, top = [], 26.0
    for title, num_replicas in panels:
        busy_C = experts_C(num_replicas)
        end = ATTENTION + 2 * EXCHANGE + busy_C.max()
        balance = busy_C.max() / busy_C.mean()
        parts.append(text(LEFT, top - 8, f"{title}: busiest rank {balance:.2f} x mean", bold=True))
        parts += bars(busy_C, top)
        bottom = top + NUM_RANKS * (BAR + GAP)
        x = LEFT + end * SCALE
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom}" stroke="#222"/>'
        )
        parts.append(text(x + 6, top + 15, f"{end:.0f} units"))
        top = bottom + 36
    x = LEFT
    for name in ("attention", "dispatch", "experts", "waiting"):
        label = "dispatch, combine" if name == "dispatch" else name
        parts.append(
            f'<rect x="{x}" y="{top - 24:.0f}" width="12" height="12" fill="{COLORS[name]}"/>'
        )
        parts.append(text(x + 17, top - 14, label))
        x += 40 + 7 * len(label)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {top:.0f}" '
        'font-family="sans-serif" font-size="13" role="img">'
    )
    title = "<title>One MoE layer on four EP ranks, without and with replicas</title>"
    back = f'<rect width="720" height="{top:.0f}" fill="#fff"/>'
    return "\n".join((head, title, back, *parts, "</svg>")) + "\n"


if __name__ == "__main__":
    SVG.write_text(picture(), encoding="utf-8")
