# SPDX-License-Identifier: Apache-2.0
"""How many experts of each layer move to attention ranks, measured as a run starts.

HeterMoE's profiler and Algorithm 1 (spec rules 28 to 38). The first attention rank, with those that
divide the model or its sequences with it, runs the model without experts; it and the first expert
rank run an expert (``rehearsal``); every rank says how much memory it has. All ranks then know the
same numbers and choose by them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.hosts.attachment.replacement import Blueprint, Finder
from ds_moe_ext.hosts.steps.training_run import line_logger
from ds_moe_ext.hosts.zebra.rehearsal import (
    Dense,
    Experts,
    Scene,
    first_expert,
    rehearse_dense,
    rehearse_experts,
)
from ds_moe_ext.moe.expert import ExpertFunction
from ds_moe_ext.moe.hooked import row_bytes
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.planning.zebra_costs import LayerTimes, ZebraShape, card_of, once_to
from ds_moe_ext.planning.zebra_planner import (
    VARIANTS,
    Choice,
    Memory,
    Stripes,
    Timed,
    WeightBytes,
    ZebraGroup,
    choose_moved,
)
from ds_moe_ext.report.units import seconds_text
from ds_moe_ext.schedule.stripes import default_stripes
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.zebra import WHERE, Profile, Zebra

HEAD_REPLICAS = 2  # what head and loss keep, and its gradient

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the host will train."""

    scene: Scene  # where, and in which types
    micro_batch: int | None  # of one batch, in samples; None where only ``profile.samples`` says
    weight_bytes: WeightBytes  # of a weight and what belongs to it
    tensor_size: int = 1  # neighbours that divide dense weights
    sequence_size: int = 1  # neighbours that divide the sequence of each sample
    # Where micro-batches are stripes already, how many; None: a rank's batch is cut into stripes.
    num_stripes: int | None = None
    sequence_length: int | None = None  # that the host was given; None: it was given none
    group: dist.ProcessGroup | None = None  # the ranks that have these layers; None: all

    @property
    def batch_size(self) -> int:
        """Neighbours that read one batch; each sends its share of the tokens to experts."""
        return self.tensor_size * self.sequence_size


class Rehearsal(NamedTuple):
    """What a host can measure of its model."""

    dense: Callable[..., Dense]  # called with ``tokens`` and ``num_repeats``
    first: Callable[[], tuple[ExpertFunction, tuple[Tensor, ...]]]  # an expert and its weights
    together: bool = False  # all attention ranks meet in collectives, so that all run it


def wants_profile(strategy: Strategy) -> bool:
    """Whether the experts that move are to be chosen by what is measured."""
    return isinstance(strategy, Zebra) and strategy.profile is not None


def profiled(
    blueprint: Blueprint, model: nn.Module, finders: Iterable[Finder], training: Training
) -> Blueprint:
    """The same, with the experts that move by what is measured, where that is asked for.

    Collective. The model is not changed, nor are random numbers.

    Args:
        blueprint: what was asked for.
        model: before its layers are replaced.
        finders: that found them.
        training: how the host will train.

    Raises:
        ValueError: on every rank: it cannot be measured, or the model does not fit.
    """
    of_model = model, blueprint, tuple(finders), training.scene
    own = Rehearsal(partial(rehearse_dense, *of_model), partial(first_expert, *of_model))
    return profiled_by(own, blueprint, model, training)


def profiled_by(
    rehearsal: Rehearsal, blueprint: Blueprint, model: nn.Module, training: Training
) -> Blueprint:
    """The same, as a host can measure it. Collective over ``training.group``."""
    strategy = blueprint.strategy
    if not isinstance(strategy, Zebra) or strategy.profile is None:
        return blueprint
    log = line_logger(blueprint.settings, rank_in(training.group))
    moved = [0] * len(blueprint.found)
    attention, expert = len(strategy.roles.attention_ep_ranks), len(strategy.roles.expert_ep_ranks)
    if attention % expert and expert % attention:
        log(
            f"zebra: no experts move, and nothing was measured: neither of {attention} "
            f"attention and {expert} expert ranks divides the other (rule 28)"
        )
    else:
        profiler = _Profiler.of(blueprint, strategy, strategy.profile, training)
        seen = profiler.measure(model, rehearsal)
        training.scene.clear()
        choice = profiler.choose(seen)
        moved = list(choice.moved_L)
        log(_seen_text(profiler, seen, choice))
        log(_choice_text(profiler, seen, choice))
    return replace(blueprint, strategy=replace(strategy, moved=moved, profile=None))


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This rank among those of a group, in whatever world it is; None: in the world."""
    return dist.get_rank() if group is None else group.rank()


# Measuring and choosing.


class RankHere(NamedTuple):
    """What a rank reports first."""

    node: str
    free_bytes: int  # of its device, or of its node, before anything was brought there
    model_bytes: int  # weights of the model that are there already
    is_shared: bool  # the ranks of a node share that memory
    dense: Dense | None  # of the first attention ranks, which run one batch


class Seen(NamedTuple):
    """What all ranks know then."""

    dense: Dense  # of the first attention rank
    experts: Timed  # an expert rank's rows on an expert rank
    on_attention: Timed  # the same rows on an attention rank
    rows_bytes: int  # that they keep for backward
    attention_free_bytes: int  # of the attention rank that has least
    expert_free_bytes: int  # of the expert rank that has least


@dataclass(frozen=True, eq=False)
class _Profiler:
    """What is measured, and for which group."""

    blueprint: Blueprint  # what was asked for
    strategy: Zebra  # of it
    profile: Profile  # what that says of measuring
    training: Training
    group: ZebraGroup
    num_stripes: int  # of an attention rank
    num_samples: int  # of a stripe
    length: int  # tokens of a sample

    @classmethod
    def of(
        cls, blueprint: Blueprint, strategy: Zebra, profile: Profile, training: Training
    ) -> _Profiler:
        attention, expert = (
            len(strategy.roles.attention_ep_ranks),
            len(strategy.roles.expert_ep_ranks),
        )
        length, num_stripes = profile.sequence_length or training.sequence_length, 0
        num_samples = profile.samples or training.micro_batch
        for key, size in (("sequence_length", length), ("samples", num_samples)):
            if size is None:
                raise ValueError(
                    f"{WHERE}.profile.{key} is null, which needs a script of Megatron-LM whose "
                    "flags say it; set it"
                )
        assert length is not None and num_samples is not None
        if training.num_stripes is not None:
            num_stripes = training.num_stripes
        elif training.micro_batch is not None:
            batch = training.micro_batch * (attention + expert)
            num_stripes = strategy.num_micro_batches or default_stripes(attention, expert, batch)
            ranks = {"attention_ranks": attention, "expert_ranks": expert}
            shape = ZebraShape(**ranks, num_stripes=num_stripes)
            num_samples = profile.samples or shape.stripe_samples(batch)
        alike = {(found.num_experts, found.expert) for found in blueprint.found}
        if len(alike) > 1:  # Algorithm 1 takes all layers to be alike
            counts = ", ".join(f"{found.name}: {found.num_experts}" for found in blueprint.found)
            raise ValueError(
                f"{WHERE}.profile takes layers with equally many experts of one shape, but here "
                f"are {len(alike)} kinds of layers ({counts}); set {WHERE}.moved in its place"
            )
        group = ZebraGroup(
            num_experts=blueprint.found[0].num_experts,
            num_layers=len(blueprint.found),
            attention_ranks=attention,
            expert_ranks=expert,
        )
        return cls(blueprint, strategy, profile, training, group, num_stripes, num_samples, length)

    @property
    def num_tokens(self) -> int:
        """Of a stripe, that an attention rank sends to experts."""
        return max(1, self.num_samples * self.length // self.training.batch_size)

    def measure(self, model: nn.Module, rehearsal: Rehearsal) -> Seen:
        """Collective."""
        among, roles = self.training.group, self.strategy.roles
        places = np.argsort(self.blueprint.grid.ranks, axis=None).tolist()  # of ranks, ascending
        is_attention = [place % roles.size in roles.attention_ep_ranks for place in places]
        first, last = roles.attention_ep_ranks[0], roles.expert_ep_ranks[0]
        firsts, rank = (places.index(first), places.index(last)), rank_in(among)
        unit = range(first, first + self.training.batch_size)
        runs = is_attention[rank] if rehearsal.together else places[rank] in unit
        here = _agreed(lambda: self._here(model, rehearsal if runs else None), among)
        dense = here[firsts[0]].dense
        assert dense is not None
        experts = _agreed(lambda: self._expert(rehearsal, dense) if rank in firsts else None, among)
        on_attention, there = (experts[each] for each in firsts)
        assert there is not None and on_attention is not None
        free = least_free_bytes(here)
        return Seen(
            dense=dense,
            experts=there.seconds,
            on_attention=on_attention.seconds,
            rows_bytes=max(there.kept_bytes, on_attention.kept_bytes),
            attention_free_bytes=min(own for own, is_in in zip(free, is_attention) if is_in),
            expert_free_bytes=min(own for own, is_in in zip(free, is_attention) if not is_in),
        )

    def _here(self, model: nn.Module, rehearsal: Rehearsal | None) -> RankHere:
        scene, num_repeats = self.training.scene, self.profile.num_repeats
        there = [p.nbytes for p in model.parameters() if p.device.type == scene.device.type]
        free_bytes, dense = free_bytes_of(scene.device), None
        if rehearsal is not None:
            tokens = self.num_samples, self.length // self.training.sequence_size
            dense = rehearsal.dense(tokens=tokens, num_repeats=num_repeats)
        is_shared = scene.device.type == "cpu"
        return RankHere(socket.gethostname(), free_bytes, sum(there), is_shared, dense)

    def _expert(self, rehearsal: Rehearsal, dense: Dense) -> Experts:
        """On rows like those of one expert rank, a layer and a stripe: ``B = M T k / N``."""
        group = self.group
        num_rows = group.attention_ranks * self.num_tokens * dense.top_k / group.expert_ranks
        shape = max(1, round(num_rows)), dense.width
        return rehearse_experts(
            rehearsal.first,
            self.training.scene,
            torch.empty(shape, dtype=dense.row_dtype, device="meta"),
            num_repeats=self.profile.num_repeats,
            recomputes=self.strategy.recompute_experts,
        )

    def choose(self, seen: Seen) -> Choice:
        """The same on every rank. Raises ValueError where the model does not fit."""
        hardware, dense, device = self.blueprint.hardware, seen.dense, self.training.scene.device
        row_1D = torch.zeros(1, dense.width, dtype=dense.row_dtype, device=device)
        stripes = Stripes(
            num_stripes=self.num_stripes,
            num_tokens=self.num_tokens,
            head_s=max(0.0, dense.parts.whole.median_s - dense.parts.blocks.median_s),
            top_k=dense.top_k,
            row_bytes=row_bytes(self.blueprint.settings.hooks, row_1D).between,
            link=None if hardware is None or hardware.inter is None else card_of(hardware),
        )
        placing, sizes = (
            self.strategy.placing,
            (self.group.attention_ranks, self.group.expert_ranks),
        )
        if isinstance(placing, ExpertParallel) and placing.send_once and hardware is not None:
            on_node = 1 if self.blueprint.settings.hooks.codecs else hardware.ranks_per_node
            stripes = replace(stripes, once_to=once_to(on_node, *sizes))
        squeeze = VARIANTS[self.profile.variant]
        try:
            return choose_moved(self.group, self.times(seen), stripes, self._memory(seen), squeeze)
        except ValueError as error:
            raise ValueError(
                f"{WHERE}.profile found too little memory: {error}; or set {WHERE}.moved instead"
            ) from error

    def times(self, seen: Seen) -> LayerTimes:
        """Of one layer and stripe."""
        return LayerTimes(
            attention_s=seen.dense.parts.blocks.median_s / self.group.num_layers,
            expert_s=seen.experts.median_s,
            expert_on_attention_s=seen.on_attention.median_s,
        )

    def _memory(self, seen: Seen) -> Memory:
        of_weights, dense = self.training.weight_bytes, seen.dense.parts
        num_groups = self.blueprint.grid.world_size // self.blueprint.grid.size
        num_replicas = self.group.attention_ranks * num_groups // self.training.tensor_size
        numels = {True: 0, False: 0}
        for _, shape, _, is_trained in self.blueprint.found[0].expert:
            numels[is_trained] += torch.Size(shape).numel()
        kept = self.num_stripes * dense.blocks_bytes + HEAD_REPLICAS * dense.others_bytes
        return Memory(
            expert_bytes=of_weights.of(numels[True], numels[False], num_groups),
            rows_bytes=seen.rows_bytes,
            dense_bytes=of_weights.of(dense.num_trained, dense.num_frozen, num_replicas) + kept,
            expert_free_bytes=seen.expert_free_bytes,
            attention_free_bytes=seen.attention_free_bytes,
        )


def _agreed(measure: Callable[[], RecordT], group: dist.ProcessGroup | None) -> list[RecordT]:
    """What every rank has measured, in the order of the ranks. Collective over them. Raises
    ValueError, on every rank, where one of them failed."""
    try:
        own: RecordT | str = measure()
    except Exception as error:
        own = f"{type(error).__name__}: {error}"
    gathered = gather_objects(own, group)
    faults = [f"rank {rank}: {each}" for rank, each in enumerate(gathered) if isinstance(each, str)]
    if faults:
        raise ValueError(
            f"{WHERE}.profile could not be measured ({'; '.join(faults)}); set {WHERE}.moved in "
            "its place, a number for each MoE layer"
        )
    return [each for each in gathered if not isinstance(each, str)]


def free_bytes_of(device: torch.device) -> int:
    """What the device could still give; of a CPU, what the node could."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free_bytes + cached)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(available.split()[1])


def least_free_bytes(here: Sequence[RankHere]) -> list[int]:
    """Memory of each rank for training. The ranks of a node share that of a CPU; and the model
    leaves it what it takes there now."""
    nodes = [own.node for own in here]
    shares = [nodes.count(own.node) if own.is_shared else 1 for own in here]
    return [own.free_bytes // share + own.model_bytes for own, share in zip(here, shares)]


# What a person is notified of.


def _seen_text(profiler: _Profiler, seen: Seen, choice: Choice) -> str:
    """What was measured."""
    num_layers = profiler.group.num_layers
    dense = seen.dense.parts.blocks
    attention = Timed(dense.median_s / num_layers, dense.std_s / num_layers)
    bounds, size = choice.bounds, profiler.training.batch_size
    together = f" (of {size} ranks together)" if size > 1 else ""
    return (
        f"zebra: {profiler.num_samples} x {profiler.length} tokens through one "
        f"layer, forward and backward: attention {_timed_text(attention)}{together}, experts "
        f"{_timed_text(seen.experts)} on an expert rank, {_timed_text(seen.on_attention)} on an "
        f"attention rank; expert ranks have no room for {bounds.least} experts, each attention "
        f"rank has room for {bounds.most}"
    )


def _timed_text(timed: Timed) -> str:
    return f"{seconds_text(timed.median_s)} (std {seconds_text(timed.std_s)})"


def _choice_text(profiler: _Profiler, seen: Seen, choice: Choice) -> str:
    """What follows."""
    before, after = seconds_text(choice.before_s), seconds_text(choice.after_s)
    if not any(choice.proposed_L):
        if profiler.times(seen).gather_s <= 0:
            why = "attention takes longer than the experts"
        elif choice.bounds.most < profiler.group.chunk.per_attention_rank:
            why = "attention ranks have no memory for experts"
        else:
            why = "experts are too large for the pipeline bubbles, or too few"
        return f"zebra: no experts move: {why}; a step takes {before}, simulated"
    if not any(choice.moved_L):
        return (
            f"zebra: no experts move: with {list(choice.proposed_L)}, by Algorithm 1, a step "
            f"takes {after} instead of {before}, simulated; with more stripes "
            f"({WHERE}.num_micro_batches) moves pay sooner"
        )
    per_rank = profiler.group.num_experts // profiler.group.expert_ranks
    return (
        f"zebra: each expert rank leaves {list(choice.moved_L)} of the {per_rank} experts that it "
        f"has of each layer to attention ranks; a step takes {after} in place of {before}, "
        f"simulated ({choice.after_s / choice.before_s - 1:+.1%})"
    )
