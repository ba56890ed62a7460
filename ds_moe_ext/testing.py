# SPDX-License-Identifier: Apache-2.0
"""A strategy against the dense reference: ``check(MyStrategy())``, on a CPU, in a minute.

Every case trains two layers for a few steps on gloo ranks that are started here: before anything is
known, by measured costs, by what the first plans lead to, and from new owners. Outputs, the
gradient of the input and those of all weights must be those of plain autograd on one rank, in
float64::

    python -m ds_moe_ext.testing my_package.my_module:MyStrategy --options '{"degree": 2}'

In a script, call ``check`` under ``if __name__ == "__main__":``, as everywhere where Python starts
processes. Shape letters: T tokens, K choices, E experts, C EP ranks, D model width, F expert width.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import operator
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.layout import Grid, ParallelLayout, world
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.core.share import Rule
from ds_moe_ext.hosts.attachment.block_hooks import Launch
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import MoELayer
from ds_moe_ext.moe.replicas import in_order
from ds_moe_ext.moe.sharding import Along, Shard
from ds_moe_ext.planning.prices import Prices
from ds_moe_ext.planning.strategy import (
    CostGroup,
    Job,
    Overlay,
    Past,
    Plan,
    Strategy,
    followers,
    replicates,
)
from ds_moe_ext.strategies.esp import ExpertSharding, TwoDegrees
from ds_moe_ext.strategies.settings import BLOCK, read_settings

TOLERANCE = 1e-12  # of float64, relative to the largest of the reference
HERE = "127.0.0.1"
TIMEOUT_S = 120.0
GRACE_S = 10.0  # for the other ranks, when one has failed

# The dense reference.


def dense_experts(
    x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor, up_EFD: Tensor, down_EDF: Tensor
) -> Tensor:
    """SwiGLU experts on all tokens, weighed; ``expert_TK`` is -1 where a choice was dropped."""
    gate_up = torch.einsum("td,efd->tef", x_TD, up_EFD)
    gate, up = gate_up.chunk(2, dim=-1)
    y_TED = torch.einsum("tef,edf->ted", nn.functional.silu(gate) * up, down_EDF)
    index = expert_TK.clamp(min=0)[..., None].expand(-1, -1, x_TD.shape[1])
    y_TKD = y_TED.gather(1, index) * (expert_TK >= 0)[..., None]
    return (y_TKD * score_TK[..., None]).sum(dim=1)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest reference value."""
    if reference.numel() == 0:
        assert ours.shape == reference.shape
        return 0.0
    ours, reference = ours.detach(), reference.detach()
    scale = reference.abs().max().clamp(min=1e-30)
    return float((ours - reference).abs().max() / scale)


# Ranks.


class Ranks:
    """Processes on this machine, which run one function at a time, all together.

    Started by a forkserver that has torch loaded: a fork inherits it, and the server itself never
    runs a torch operation, so that its children may.

    Args:
        world_size: how many.
        begin: called in each before they meet, with its rank, how many there are, and the port on
            which their store listens.
        between: called in each when all have ended a job.
        preload: modules that the server loads, if it has not been started yet.
        backend: of their process group.
    """

    def __init__(
        self,
        world_size: int,
        *,
        begin: Callable[[int, int, int], None] | None = None,
        between: Callable[[], None] | None = None,
        preload: Sequence[str] = ("torch", "torch._dynamo", "numpy", "ds_moe_ext.testing"),
        backend: str = "gloo",
    ) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        # They meet at a store that listens already, on a port that the system chose: one that is
        # looked up first and opened later may be taken in between.
        self._store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        start = _Start(world_size, self._store.port, begin, between, backend)
        self._ends, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, start), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a module-level function as ``function(rank, world_size, ...)`` on every rank.

        Raises:
            AssertionError: a rank raised, died or did not answer; the ranks are then gone.
        """
        for rank, end in enumerate(self._ends):
            end.send(functools.partial(function, rank, self.world_size, *args, **kwargs))
        try:
            answers = self._answers()
        except BaseException:  # a timeout's, or Ctrl-C: the ranks are in the middle of the job
            self.close()
            raise
        failures = [f"rank {r}: {value}" for r, (good, value) in answers.items() if not good]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))  # the first that failed first
        for end in self._ends:
            end.send(None)  # all have ended the job
        return [answers[rank][1] for rank in range(self.world_size)]

    def _answers(self) -> dict[int, tuple[bool, Any]]:
        """By rank. When one has failed the others are soon given up: they may wait for it."""
        waiting = {end: rank for rank, end in enumerate(self._ends)}
        answers: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), max(until - time.monotonic(), 0.0))
            if not ready:
                late = "did not answer in time; it may wait for another rank"
                return answers | dict.fromkeys(waiting.values(), (False, late))
            for end in ready:
                assert isinstance(end, Connection)
                rank = waiting.pop(end)
                try:
                    answers[rank] = end.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = False, "died"
                if not answers[rank][0]:
                    until = min(until, time.monotonic() + GRACE_S)
        return answers

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class _Start(NamedTuple):
    """What a rank begins with; see ``Ranks``."""

    world_size: int
    port: int
    begin: Callable[[int, int, int], None] | None
    between: Callable[[], None] | None
    backend: str


def _serve(rank: int, jobs: Connection, start: _Start) -> None:
    torch.set_num_threads(1)
    if start.begin is not None:
        start.begin(rank, start.world_size, start.port)
    store = TCPStore(HERE, start.port, start.world_size, is_master=False)
    timeout = timedelta(seconds=TIMEOUT_S)
    with world(start.backend, rank, start.world_size, store=store, timeout=timeout):
        while True:
            try:
                job = jobs.recv()
            except EOFError:
                return
            if job is None:
                if start.between is not None:
                    start.between()
                continue
            try:
                jobs.send((True, job()))
            except BaseException:
                jobs.send((False, traceback.format_exc()))


# Cases.


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a strategy is tried."""

    num_ranks: int  # gloo ranks
    num_micro_batches: int = 1  # of a step
    checkpoints: bool = False  # every layer runs again in backward (activation checkpointing)
    # chunks forward and backward, under ``esp``; None: without it
    degrees: tuple[int, int] | None = None
    etp_size: int = 1  # ranks that split every expert, under ``esp``
    hot: float = 2.0  # how much more one expert is chosen; another one in each step

    def __str__(self) -> str:
        lines = [f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"]
        if self.num_micro_batches > 1:
            lines.append(f"{self.num_micro_batches} micro-batches")
        if self.checkpoints:
            lines.append("activation checkpointing")
        if self.degrees is not None:
            lines.append(f"under esp in {self.degrees[0]} and {self.degrees[1]} chunks")
        if self.etp_size > 1:
            lines.append(f"experts split by {self.etp_size}")
        return ", ".join(lines)


CASES = (
    Case(num_ranks=1),
    Case(num_ranks=2),
    Case(num_ranks=3, hot=20.0),
    Case(num_ranks=4),
    Case(num_ranks=2, num_micro_batches=2),
    Case(num_ranks=4, num_micro_batches=2, checkpoints=True),
    Case(num_ranks=4, degrees=(2, 3)),
    Case(num_ranks=2, degrees=(3, 2), num_micro_batches=2, checkpoints=True),
    Case(num_ranks=4, degrees=(2, 1), num_micro_batches=2, etp_size=2),
)
NUM_EXPERTS, NUM_LAYERS, NUM_STEPS = 12, 2, 4
D, F, TOP_K = 6, 8, 2
MEASURED = {
    "prices": Prices(
        row_s=1e-3,
        row_bytes=8.0 * D,
        copy_s=4e-3,
        inter_bytes_per_s=1e9,
        intra_bytes_per_s=1e9,
    ),
    "expert_bytes": 3 * D * F * 8,
    "row_bytes_per_s": 1e9,
    "copy_bytes_per_s": 1e9,
}
"""Costs by which replicas pay."""


def _weights(layer: int, step: int, hot: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down: others in each step, so that stale replicas are found."""
    generator = torch.Generator().manual_seed(100 * step + layer)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate_ED = rand(NUM_EXPERTS, D)
    gate_ED[5 * step % NUM_EXPERTS, -1] += hot  # the last input is always one
    return gate_ED, rand(NUM_EXPERTS, 2 * F, D) * 0.3, rand(NUM_EXPERTS, D, F) * 0.3


def _tokens(rank: int, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    """What goes in, and the gradient of what comes out, ``[T, D]`` each."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    x, grad = torch.randn(2, 9 + 2 * rank, D, generator=generator, dtype=torch.float64)
    x[:, -1] = 1.0
    return x, grad


class Seen(NamedTuple):
    """What one rank has of one step."""

    outputs: list[Tensor]  # of each micro-batch
    inputs: list[Tensor]  # gradients of what went in, likewise
    # gradients of each layer's gate, up and down; those of experts of this rank only
    weights: list[tuple[Tensor, Tensor, Tensor]]
    experts: list[Tensor]  # of each layer that this rank owns, ascending
    shard: Shard  # the part of them that it has
    num_replicas: int = 0  # of experts, in all EP ranks, by the plans of the step
    num_moved: int = 0  # experts that have left their owners before it


def _dense(case: Case, step: int) -> tuple[list[Seen], list[tuple[Tensor, ...]]]:
    """What the ranks should have, and the gradients of all weights, by layer."""
    layers = [_weights(layer, step, case.hot) for layer in range(NUM_LAYERS)]
    for weight in (weight for weights in layers for weight in weights):
        weight.requires_grad_()
    ranks = []
    for rank in range(case.num_ranks):
        outputs, inputs = [], []
        for micro_batch in range(case.num_micro_batches):
            x, grad = _tokens(rank, step, micro_batch)
            y = x.requires_grad_()
            for gate_ED, up, down in layers:
                choice = SoftmaxTopK(top_k=TOP_K)(y, (gate_ED,))
                y = y + dense_experts(y, choice.expert_TK, choice.score_TK, up, down)
            torch.sum(y * grad).backward()
            outputs.append(y.detach())
            inputs.append(_grad_of(x))
        ranks.append(Seen(outputs, inputs, [], [], Shard()))
    return ranks, [tuple(map(_grad_of, weights)) for weights in layers]


def _grad_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


# What a rank does.


class _Block(nn.Module):
    """A transformer block with nothing but its MoE layer, which is notified when the block
    begins."""

    def __init__(self, layer: MoELayer, shard: Shard) -> None:
        super().__init__()
        self.layer, self.shard = layer, shard
        self.routed = layer.routed
        self.launch: Launch | None = None

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self.layer.expert_weights)

    def hold(self, weights: tuple[Tensor, Tensor, Tensor]) -> None:
        """Take these gate weights, and this rank's of these experts."""
        gate_ED, *experts = weights
        parts = [self.shard.of(i, weight, first_dim=1) for i, weight in enumerate(experts)]
        mine = self.experts
        self.layer.gate_weights = nn.ParameterList([gate_ED])
        self.layer.expert_weights = nn.ParameterList(part[e] for e in mine for part in parts)

    @property
    def experts(self) -> Tensor:
        layer_context = self.routed.layer_context
        return torch.from_numpy(
            layer_context.plan.owner.experts_of(layer_context.layout.index("ep"))
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        assert self.launch is not None
        self.launch.begin(x_TD)
        y: Tensor = x_TD + self.layer(x_TD).y
        return y

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        slots = [_grad_of(weight) for weight in self.layer.expert_weights]
        like = self.routed.replicas.like if self.routed.replicas else slots[:2]
        up, down = (
            torch.stack(slots[i::2]) if slots else like[i].new_zeros(0, *like[i].shape)
            for i in range(2)
        )
        return _grad_of(self.layer.gate_weights[0]), up, down


def _train(rank: int, num_ranks: int, strategy: Strategy, case: Case) -> list[Seen]:
    """All steps of a case on one rank."""
    strategy = strategy.settled(lambda: ["cpu"] * num_ranks, None)
    grid = Grid(num_ranks, num_ranks // case.etp_size, case.etp_size)
    layout = ParallelLayout.build(grid, strategy.uses(), ranks_per_node=2)
    cost_groups = (CostGroup(layers=tuple(range(NUM_LAYERS))),)
    owners = strategy.first_owners([NUM_EXPERTS] * NUM_LAYERS, cost_groups, grid.num_ep_ranks)
    job = Job.at_start(owners, layout.node_C, cost_groups)
    job = replace(job, accumulates=case.num_micro_batches > 1)
    plans = _planned(strategy, job)
    blocks = [_block(strategy, plan, layout, number) for number, plan in enumerate(plans)]
    for block, after in zip(blocks, (*blocks[1:], None)):
        block.launch = Launch(block, after)  # type: ignore[arg-type]  # all that it asks for
    if replicates(strategy):
        in_order(block.routed.replicas for block in blocks if block.routed.replicas)
    seen = []
    for step in range(NUM_STEPS):
        before = job.owners
        if step:
            job, plans = _next(strategy, job, blocks, step)
        _take(blocks, plans)
        for number, block in enumerate(blocks):
            block.hold(_weights(number, step, case.hot))
        moved = (old.owner_E != new.owner_E for old, new in zip(before, job.owners))
        seen.append(
            _step(blocks, case, rank, step)._replace(
                num_replicas=sum(_num_replicas(block) for block in blocks),
                num_moved=sum(int(moved_E.sum()) for moved_E in moved),
            )
        )
        for block in blocks:
            block.routed.after_step()
    layout.close()
    return seen


def _block(strategy: Strategy, plan: Plan, layout: ParallelLayout, number: int) -> _Block:
    size = layout.grid.etp_size
    shard = Shard((Along(0, num_blocks=2), Along(1)), layout.index("esp"), size)
    layer = MoELayer(
        nn.ParameterList(),
        nn.ParameterList(),
        gate=SoftmaxTopK(top_k=TOP_K),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        layer=number,
    )
    if replicates(strategy):
        of_one = (torch.zeros(2 * F, D), torch.zeros(D, F))
        parts = (shard.of(i, weight.double()) for i, weight in enumerate(of_one))
        layer.routed.allow_replicas(tuple(part.requires_grad_() for part in parts))
    return _Block(layer, shard)


def _next(
    strategy: Strategy, job: Job, blocks: Sequence[_Block], step: int
) -> tuple[Job, tuple[Plan, ...]]:
    """The job and the plans of a step, as between the steps of a run: first costs become known,
    then plans lead to others, then experts move."""
    rows = tuple(block.routed.rows.take().routed_CE for block in blocks)
    known_s = (1.0,) * NUM_LAYERS
    choice = blocks[0].routed.layer_context.plan.choice
    job = replace(
        job,
        past=Past(step, job.rows, rows, choice) if strategy.intervals().choose_every else None,
        rows=rows,
        cost_groups=tuple(replace(cost_group, **MEASURED) for cost_group in job.cost_groups),  # type: ignore[arg-type]
        window_s=known_s,
        back_window_s=known_s,
        free_bytes=2**30,
    )
    follow = any(block.routed.layer_context.plan.successor is not None for block in blocks)
    if step == 2 and follow:
        pairs = zip((block.routed for block in blocks), rows)
        return job, tuple(routed.successor(rows_CE) for routed, rows_CE in pairs)
    if step == 3 and strategy.intervals().shard_every:
        job = replace(job, owners=strategy.owners(job))
    return job, _planned(strategy, job)


def _planned(strategy: Strategy, job: Job) -> tuple[Plan, ...]:
    """The strategy's plans, if they can be right."""
    plans = strategy.plan(job)
    if len(plans) != len(job.owners):
        raise ValueError(f"plan gives {len(plans)} plans for {len(job.owners)} layers")
    for layer, (plan, owner, rows_CE) in enumerate(zip(plans, job.owners, job.rows)):
        for fault in _faults(plan, owner, rows_CE if rows_CE.any() else _some_rows(rows_CE)):
            raise ValueError(f"the plan of layer {layer} cannot be right: {fault}")
    return plans


def _some_rows(rows_CE: np.ndarray) -> np.ndarray:
    """As many rows as there might be, before any are known."""
    return np.arange(rows_CE.size).reshape(rows_CE.shape) * 7 % 11


def _faults(plan: Plan, owner: Placement, rows_CE: np.ndarray) -> Iterator[str]:
    if not np.array_equal(plan.owner.holds_EC, owner.holds_EC):
        yield "its owner is not that of the job; only owners() moves experts"
    yield from _faults_of_target(plan.target, owner, plan.share, rows_CE)
    if plan.revise is not None:
        target, share = plan.revise(rows_CE)
        stated = _faults_of_target(target, plan.target, share, rows_CE)
        yield from (f"what revise gives: {fault}" for fault in stated)


def _faults_of_target(
    target: Placement, least: Placement, rule: Rule, rows_CE: np.ndarray
) -> Iterator[str]:
    missing = np.argwhere(least.holds_EC & ~target.holds_EC)
    if missing.size:
        yield f"its target lacks expert {missing[0][0]} in EP rank {missing[0][1]}, which has it"
    num_ep_ranks = len(rows_CE)
    rows_CFE = np.stack((rows_CE // 3, rows_CE - rows_CE // 3), axis=1)  # as if in two chunks
    share = rule.of_rows(rows_CE)
    sent_SFEC = np.stack([share.rows_from(s, rows_CFE[s]) for s in range(num_ep_ranks)])
    if (sent_SFEC < 0).any() or (sent_SFEC.sum(axis=-1) != rows_CFE).any():
        yield "rows_from of its share does not hand out all rows of each expert, and once each"
    stray = np.argwhere(sent_SFEC.any(axis=(0, 1)) & ~target.holds_EC)
    if stray.size:
        expert, ep_rank = stray[0]
        yield f"its share sends rows of expert {expert} to EP rank {ep_rank}, without a replica"
    for holder in range(num_ep_ranks):
        expected = share.rows_to(holder, rows_CFE)
        for sender, chunk, expert in np.argwhere(expected != sent_SFEC[..., holder]):
            yield (
                f"by rows_from of its share EP rank {sender} sends EP rank {holder} "
                f"{sent_SFEC[sender, chunk, expert, holder]} of "
                f"{rows_CFE[sender, chunk, expert]} rows of expert {expert}, but by rows_to that "
                f"one expects {expected[sender, chunk, expert]}"
            )
    between_FCC = sent_SFEC.sum(axis=2).transpose(1, 0, 2)
    if not np.array_equal(share.rows_between(rows_CFE), between_FCC):
        yield "rows_between of its share is not what rows_from sums up to"
    computed_C = np.stack([share.rows_from(s, rows_CE[s][None]) for s in range(num_ep_ranks)])
    if not np.array_equal(share.computed_C(rows_CE), computed_C.sum(axis=(0, 1, 2))):
        yield "computed_C of its share is not what rows_from sums up to"


def _num_replicas(block: _Block) -> int:
    """In all EP ranks, also those that ``revise`` adds, as if the step had been one pass."""
    plan = block.routed.layer_context.plan
    target, _ = plan.destination_of(block.routed.rows.so_far_CE)
    return int((target.holds_EC & ~plan.owner.holds_EC).sum())


def _take(blocks: Sequence[_Block], plans: Sequence[Plan]) -> None:
    for block, plan, after in zip(blocks, plans, followers(plans, [0] * len(plans))):
        block.routed.take(plan, after)
        texts = gather_objects(block.routed.describe(), None)
        if len(set(texts)) > 1:
            other = next(rank for rank, text in enumerate(texts) if text != texts[0])
            raise ValueError(
                f"ranks plan layer {block.routed.layer_context.layer} otherwise, but plans must be "
                f"equal: rank 0 has\n{texts[0]}\nrank {other} has\n{texts[other]}"
            )


def _step(blocks: Sequence[_Block], case: Case, rank: int, step: int) -> Seen:
    outputs, inputs = [], []
    for micro_batch in range(case.num_micro_batches):
        for block in blocks:
            if block.routed.replicas is not None:
                is_last = functools.partial(operator.eq, micro_batch, case.num_micro_batches - 1)
                block.routed.replicas.is_last_pass = is_last
        x, grad = _tokens(rank, step, micro_batch)
        y = x.requires_grad_()
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False) if case.checkpoints else block(y)
        torch.sum(y * grad).backward()
        outputs.append(y.detach())
        inputs.append(_grad_of(x))
    weights = [block.gradients() for block in blocks]
    return Seen(outputs, inputs, weights, [b.experts for b in blocks], blocks[0].shard)


# What differs.


class Difference(NamedTuple):
    """A tensor that is not the reference's."""

    case: str  # in which
    what: str  # which tensor, and where
    error: float  # the largest difference, relative to the largest of the reference


def _errors(case: Case, ranks: Sequence[Sequence[Seen]]) -> Iterator[tuple[str, float]]:
    """Of every tensor, by name; those of weights as their ranks' sums."""
    for step in range(NUM_STEPS):
        dense, weights = _dense(case, step)
        for rank, (steps, theirs) in enumerate(zip(ranks, dense)):
            for number in range(case.num_micro_batches):
                where = f"of rank {rank}, step {step}, micro-batch {number}"
                ours = steps[step]
                yield (
                    f"output {where}",
                    relative_error(ours.outputs[number], theirs.outputs[number]),
                )
                error = relative_error(ours.inputs[number], theirs.inputs[number])
                yield f"gradient of the input {where}", error
        for layer, gradients in enumerate(weights):
            sums = _summed([steps[step] for steps in ranks], layer, gradients)
            for name, ours_sum, gradient in zip(("gate", "up", "down"), sums, gradients):
                worst = int((ours_sum - gradient).abs().flatten(1).amax(dim=1).argmax())
                where = f"of layer {layer}, step {step} (most of expert {worst})"
                yield f"gradient of {name} {where}", relative_error(ours_sum, gradient)


def _summed(ranks: Sequence[Seen], layer: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of all experts, from those of each rank's."""
    gate, *experts = (torch.zeros_like(gradient) for gradient in like)
    for seen in ranks:
        gate += seen.weights[layer][0]
        for number, (total, own) in enumerate(zip(experts, seen.weights[layer][1:])):
            dim = seen.shard.alongs[number].dim + 1
            for start, own_start, length in seen.shard.stretches(number, total.shape[dim]):
                part = own.narrow(dim, own_start, length)
                total.narrow(dim, start, length).index_add_(0, seen.experts[layer], part)
    return [gate, *experts]


def check(
    strategy: Strategy,
    cases: Iterable[Case] = CASES,
    *,
    ranks_of: Callable[[int], Ranks] | None = None,
) -> None:
    """Hold a strategy against the dense reference, and print how it went, a line a case.

    What a rank needs is sent to it: the strategy's class must be one that a module has.

    Args:
        strategy: an instance.
        cases: in which; those that are laid over it are left out where that is refused.
        ranks_of: has so many ranks ready; None starts them, and ends them behind.

    Raises:
        ValueError: its ranks would not all do the same.
        AssertionError: something differs; its text is a table of what does, and how much.
    """
    if strategy.has_roles:
        raise ValueError(
            f"{type(strategy).__qualname__} has roles: check holds strategies whose ranks all run "
            "the model; train a model with it, as tests/hosts/test_zebra.py does"
        )
    own: dict[int, Ranks] = {}

    def ready(world_size: int) -> Ranks:
        if world_size not in own or not own[world_size].is_alive:
            own[world_size] = Ranks(world_size)
        return own[world_size]

    try:
        found = list(_differences(strategy, cases, ranks_of or ready))
    finally:
        for ranks in own.values():
            ranks.close()
    if found:
        lines = (
            f"{difference.error:9.1e}  {difference.what}  ({difference.case})"
            for difference in found
        )
        raise AssertionError(
            f"{type(strategy).__qualname__} is not equal to the dense reference; relative errors "
            f"above {TOLERANCE}:\n" + "\n".join(lines)
        )


def _differences(
    strategy: Strategy, cases: Iterable[Case], ranks_of: Callable[[int], Ranks]
) -> Iterator[Difference]:
    for case in cases:
        laid = _laid(strategy, case)
        if isinstance(laid, str):
            print(f"{case}: left out, {laid}")
            continue
        try:
            seen = ranks_of(case.num_ranks).run(_train, laid, case)
        except AssertionError as error:
            print(f"{case}: FAILED")
            yield Difference(str(case), f"a rank failed: {_shortened(str(error))}", float("inf"))
            continue
        errors = dict(_errors(case, seen))
        wrong = {what: error for what, error in errors.items() if not error <= TOLERANCE}
        verdict = f"{len(wrong)} of {len(errors)} tensors DIFFER" if wrong else "equal"
        replicas, moved = map(sum, zip(*((step.num_replicas, step.num_moved) for step in seen[0])))
        print(
            f"{case}: {verdict}, largest relative error {max(errors.values()):.1e}; "
            f"{replicas} replicas and {moved} moves of experts in {NUM_STEPS} steps"
        )
        yield from (Difference(str(case), what, error) for what, error in wrong.items())


def _shortened(failures: str) -> str:
    """The first failure in full, and the last lines of the others, which may follow from it."""
    first, *others = re.split(r"\n(?=rank \d+: )", failures)
    reported = (text.strip().partition(": ") for text in others)
    lasts = (f"{rank}: {text.splitlines()[-1]}" for rank, _, text in reported)
    return "\n".join((first.rstrip(), *lasts))


def _laid(strategy: Strategy, case: Case) -> Strategy | str:
    """The strategy as a case wants it, or why it cannot be."""
    if case.degrees is None or isinstance(strategy, Overlay):
        return strategy
    degree = TwoDegrees(forward=case.degrees[0], backward=case.degrees[1])
    try:
        return ExpertSharding(degree=degree, slice_gradients=False, placing=strategy)
    except ValueError as error:
        return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ds_moe_ext.testing NAME``: 0 if all is equal, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m ds_moe_ext.testing",
        description="Compare a strategy with the dense reference, in float64 on a CPU.",
    )
    parser.add_argument("strategy", help="my_package.my_module:MyStrategy, or a registered name")
    parser.add_argument("--options", type=json.loads, default={}, help="its keys, as JSON")
    given = parser.parse_args(arguments)
    block: dict[str, Any] = {"enabled": True, "strategy": given.strategy}
    where = "options" if ":" in given.strategy else given.strategy
    sys.path.insert(0, "")  # as the interpreter itself has it
    try:
        keys = {where: given.options} if given.options else {}
        _, strategy = read_settings({BLOCK: block | keys})
        assert strategy is not None, "it is enabled"
        check(strategy)
    except (ValueError, AssertionError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Or every rank would run this module anew, and warn of it.
    __spec__ = None  # type: ignore[assignment]
    # Ranks know its classes by the module's name, not as those of __main__.
    raise SystemExit(import_module("ds_moe_ext.testing").main())
