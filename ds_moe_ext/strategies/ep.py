# SPDX-License-Identifier: Apache-2.0
"""Plain expert parallelism: each expert at its owner alone. The base case of all
strategies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds_moe_ext.planning.strategy import Job, Keys, Plan, Strategy, register
from ds_moe_ext.schedule.task import INTER, Stream
from ds_moe_ext.strict import all_at_least, one_of

KEY = "ds_moe_ext.ep"
INDEX, ONE_HOT = "index", "one_hot"  # orders, by their JSON names


@register("ep")
@dataclass(frozen=True, kw_only=True)
class ExpertParallel(Strategy):
    """Nothing is planned."""

    # rows that each rank sends to each expert in every pass: fewer are padded with zeros, more are
    # dropped. No counts travel then, and the host waits for nothing. Null sends the rows that there
    # are.
    static_capacity: int | None = None
    # each token's row travels once to each rank that has some of its experts, where the outputs are
    # weighed and added up before one row comes back; else a row travels for each choice
    send_once: bool = False
    # "index", or "one_hot": padded rows are put in place by products with a mask
    order: str = INDEX
    # a layer's forward and backward are recorded as CUDA graphs and replayed, so that the host
    # issues each by one call. Only where each rank has all experts (``expert_parallel_size`` 1).
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        all_at_least(KEY, self, static_capacity=1)
        one_of(f"{KEY}.order", self.order, (INDEX, ONE_HOT))
        if self.order == ONE_HOT and self.static_capacity is None:
            raise ValueError(
                f'{KEY}.order is "{ONE_HOT}", but {KEY}.static_capacity is null: a mask needs '
                f'a fixed number of places; set static_capacity, or order to "{INDEX}"'
            )

    @property
    def orders_by_masks(self) -> bool:
        return self.order == ONE_HOT

    def uses(self) -> tuple[tuple[str, Stream], ...]:
        return (("ep", INTER),)  # no replicas

    @property
    def expected(self) -> str:
        return "experts compute at their owners; all ranks wait for the busiest one"

    def plan(self, job: Job) -> tuple[Plan, ...]:
        plans = map(Plan.at_owner, job.owners)
        return tuple(replace(plan, sends_once=self.send_once) for plan in plans)

    @property
    def keys(self) -> Keys:
        return Keys(
            static_capacity=f"{KEY}.static_capacity",
            sends_once=f"{KEY}.send_once",
            cuda_graphs=f"{KEY}.cuda_graphs",
        )

    def notices(self, job: Job) -> tuple[str, ...]:
        stated = []
        if self.send_once and job.node_C.size == 1:
            stated.append(
                f"{KEY}.send_once has no effect: one EP rank has all experts, so no token is sent"
            )
        elif self.send_once:
            stated.append(
                "send once: each token is sent once to an EP rank, or to a node where rows go by "
                "nodes (2dh, without codecs), however many of its experts are there, and one "
                "result comes back"
            )
        if self.cuda_graphs:
            from ds_moe_ext.schedule.graphs import WARM_UPS  # with torch

            stated.append(
                "CUDA graphs: on a GPU forward and backward of each MoE layer are recorded "
                f"after {WARM_UPS} passes and replayed; each layer keeps the memory of one "
                "pass, including gradients of all its experts, for each batch in progress. "
                f"{KEY}.cuda_graphs has no effect on a CPU"
            )
        if self.static_capacity is not None:
            sent = max(self.static_capacity * owner.num_experts for owner in job.owners)
            masks = ", put in place by products with masks (order)" if self.orders_by_masks else ""
            stated.append(
                f"static capacity: in every pass each rank sends {self.static_capacity} tokens "
                f"to each expert, at most {sent:,} a layer, padded with zeros; tokens above "
                f"that are dropped{masks}"
            )
        return tuple(stated)
