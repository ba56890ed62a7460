# SPDX-License-Identifier: Apache-2.0
"""HECATE's planner as a function: which experts get replicas on which ranks, and what that evens
out. Planners are numpy in, placements out; they need no ranks and no GPU.
The same from a shell: ds-moe-ext plan sparse-materialization --in job.json (docs/planners.md).
"""

from __future__ import annotations

import numpy as np

from ds_moe_ext import NearestReplica
from ds_moe_ext.core.placement import even_owners
from ds_moe_ext.planning.fssdp_planner import materialize

NUM_EXPERTS, NUM_RANKS, RANKS_PER_NODE = 16, 8, 4
ROWS = 4096  # of each rank


def main() -> None:
    """Plan one layer and print it."""
    share_E = 1.0 / np.arange(1, NUM_EXPERTS + 1)  # Zipf: few experts draw most rows
    rows_CE = np.tile((ROWS * share_E / share_E.sum()).astype(np.int64), (NUM_RANKS, 1))
    node_C = np.arange(NUM_RANKS) // RANKS_PER_NODE
    (owner,) = even_owners([NUM_EXPERTS], NUM_RANKS)
    (target,) = materialize(
        [owner],
        [rows_CE.sum(axis=0)],
        overlap_degree=4,  # copies whose sending attention hides
        replicas_per_ep_rank=2,  # replicas that a rank has memory for
        node_C=node_C,
    )
    for expert in np.flatnonzero(target.num_holders_E > 1):
        print(f"expert {expert} computes on ranks {np.flatnonzero(target.holds_EC[expert])}")
    for name, placement in (("at the owner", owner), ("with replicas", target)):
        computed_C = NearestReplica(placement, node_C).computed_C(rows_CE)
        busiest = computed_C.max() / computed_C.mean()
        print(f"{name}: the busiest rank computes {busiest:.2f} times the mean")


if __name__ == "__main__":
    main()
