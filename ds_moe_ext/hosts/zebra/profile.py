# SPDX-License-Identifier: Apache-2.0
"""How many experts of each layer move to attention ranks, measured as a run starts.

HeterMoE's profiler and Algorithm 1 (spec rules 28 to 38). The first attention rank runs the model
without experts; it and the first expert rank run an expert; every rank says how much memory it has.
All ranks then know the same numbers and choose by them.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.replacement import Blueprint, Finder
from ds_moe_ext.hosts.steps.training_run import teller
from ds_moe_ext.hosts.zebra.profile_exchange import (
    AllButExperts,
    ExpertHere,
    RankHere,
    Seen,
    agreed,
    free_bytes_of,
    least_free_bytes,
)
from ds_moe_ext.hosts.zebra.rehearsal import Scene, rehearse_dense, rehearse_experts
from ds_moe_ext.moe.hooks import row_bytes
from ds_moe_ext.planning.zebra_costs import LayerTimes, ZebraShape, card_of
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
from ds_moe_ext.strategies.zebra import WHERE, Profile, Zebra

HEAD_COPIES = 2  # what head and loss keep, and its gradient


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the host will train.

    Attributes:
        scene: where, and in which types.
        micro_batch: samples of a rank.
        weight_bytes: of a weight and what belongs to it.
    """

    scene: Scene
    micro_batch: int
    weight_bytes: WeightBytes


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
    strategy = blueprint.strategy
    if not isinstance(strategy, Zebra) or strategy.profile is None:
        return blueprint
    tell = teller(blueprint.settings, dist.get_rank())
    moved = [0] * len(blueprint.found)
    attention, expert = (len(cells) for cells in _cells(strategy))
    if attention % expert and expert % attention:
        tell(
            f"zebra: no experts move, and nothing was measured: of {attention} attention and "
            f"{expert} expert ranks neither number divides the other (rule 28)"
        )
    else:
        rehearsal = _Rehearsal.of(blueprint, strategy, strategy.profile, training)
        seen = rehearsal.measure(model, tuple(finders))
        training.scene.clear()
        choice = rehearsal.choose(seen)
        moved = list(choice.moved_L)
        tell(_seen_text(rehearsal, seen, choice))
        tell(_choice_text(rehearsal, seen, choice))
    return replace(blueprint, strategy=replace(strategy, moved=moved, profile=None))


def _cells(strategy: Zebra) -> tuple[Sequence[int], Sequence[int]]:
    return strategy.roles.attention_cells, strategy.roles.expert_cells


# Measuring and choosing.


@dataclass(frozen=True, eq=False)
class _Rehearsal:
    """What is measured, and for which group.

    Attributes:
        blueprint: what was asked for.
        strategy: its strategy.
        profile: and what that says of measuring.
        training: how the host will train.
        group: ranks and experts.
        num_stripes: of an attention rank.
        num_samples: of a stripe.
    """

    blueprint: Blueprint
    strategy: Zebra
    profile: Profile
    training: Training
    group: ZebraGroup
    num_stripes: int
    num_samples: int

    @classmethod
    def of(
        cls, blueprint: Blueprint, strategy: Zebra, profile: Profile, training: Training
    ) -> _Rehearsal:
        attention, expert = (len(cells) for cells in _cells(strategy))
        batch = training.micro_batch * (attention + expert)
        num_stripes = strategy.num_micro_batches or default_stripes(attention, expert, batch)
        shape = ZebraShape(attention_ranks=attention, expert_ranks=expert, num_stripes=num_stripes)
        num_samples = profile.samples or shape.stripe_samples(batch)
        group = ZebraGroup(
            num_experts=_experts_of_all_layers(blueprint),
            num_layers=len(blueprint.found),
            attention_ranks=attention,
            expert_ranks=expert,
        )
        return cls(blueprint, strategy, profile, training, group, num_stripes, num_samples)

    @property
    def num_tokens(self) -> int:
        """Of a stripe."""
        return self.num_samples * self.profile.sequence_length

    def measure(self, model: nn.Module, finders: Sequence[Finder]) -> Seen:
        """Collective."""
        rank = dist.get_rank()
        first_attention, first_expert = (cells[0] for cells in _cells(self.strategy))
        here = agreed(lambda: self._here(model, finders, rank == first_attention))
        dense = here[first_attention].dense
        assert dense is not None
        computes = rank in (first_attention, first_expert)
        experts = agreed(lambda: self._expert(model, finders, dense, computes))
        there, on_attention = experts[first_expert], experts[first_attention]
        assert there.seconds is not None and on_attention.seconds is not None
        is_attention = [self.strategy.roles.is_attention(other) for other in range(len(here))]
        free = least_free_bytes(here)
        return Seen(
            dense=dense,
            experts=there.seconds,
            on_attention=on_attention.seconds,
            rows_bytes=max(there.rows_bytes, on_attention.rows_bytes),
            attention_free_bytes=min(own for own, is_in in zip(free, is_attention) if is_in),
            expert_free_bytes=min(own for own, is_in in zip(free, is_attention) if not is_in),
        )

    def _here(self, model: nn.Module, finders: Sequence[Finder], runs: bool) -> RankHere:
        device = self.training.scene.device
        weights = [*model.parameters()]
        there = [weight.nbytes for weight in weights if weight.device.type == device.type]
        free_bytes = free_bytes_of(device)
        return RankHere(
            node=socket.gethostname(),
            free_bytes=free_bytes,
            model_bytes=sum(there),
            is_shared=device.type == "cpu",
            dense=self._dense(model, finders) if runs else None,
        )

    def _dense(self, model: nn.Module, finders: Sequence[Finder]) -> AllButExperts:
        found = rehearse_dense(
            model,
            self.blueprint,
            finders,
            self.training.scene,
            tokens=(self.num_samples, self.profile.sequence_length),
            num_repeats=self.profile.num_repeats,
        )
        num_replicas = self.group.attention_ranks * self._num_groups
        weights = self.training.weight_bytes
        state = weights.of(found.num_trained, found.num_frozen, num_replicas)
        kept = self.num_stripes * found.blocks_bytes + HEAD_COPIES * found.others_bytes
        return AllButExperts(
            blocks=found.blocks,
            head_s=max(0.0, found.whole.median_s - found.blocks.median_s),
            bytes=state + kept,
            top_k=found.top_k,
            width=found.width,
            row_dtype=found.row_dtype,
        )

    def _expert(
        self, model: nn.Module, finders: Sequence[Finder], dense: AllButExperts, computes: bool
    ) -> ExpertHere:
        if not computes:
            return ExpertHere()
        found = rehearse_experts(
            model,
            self.blueprint,
            finders,
            self.training.scene,
            self._rows(dense),
            num_repeats=self.profile.num_repeats,
            recomputes=self.strategy.recompute_experts,
        )
        return ExpertHere(seconds=found.seconds, rows_bytes=found.kept_bytes)

    def _rows(self, dense: AllButExperts) -> Tensor:
        """Like those of one expert rank, a layer and a stripe: ``B = M T k / N``."""
        group = self.group
        num_rows = group.attention_ranks * self.num_tokens * dense.top_k / group.expert_ranks
        return torch.empty(
            max(1, round(num_rows)), dense.width, dtype=dense.row_dtype, device="meta"
        )

    @property
    def _num_groups(self) -> int:
        grid = self.blueprint.grid
        return grid.world_size // grid.size

    def choose(self, seen: Seen) -> Choice:
        """The same on every rank.

        Raises:
            ValueError: the model does not fit.
        """
        hardware, hooks = self.blueprint.hardware, self.blueprint.settings.hooks
        row_1D = torch.zeros(
            1, seen.dense.width, dtype=seen.dense.row_dtype, device=self.training.scene.device
        )
        stripes = Stripes(
            num_stripes=self.num_stripes,
            num_tokens=self.num_tokens,
            head_s=seen.dense.head_s,
            top_k=seen.dense.top_k,
            row_bytes=row_bytes(hooks, row_1D).between,
            link=None if hardware is None or hardware.inter is None else card_of(hardware),
        )
        squeeze = VARIANTS[self.profile.variant]
        try:
            return choose_moved(self.group, self.times(seen), stripes, self._memory(seen), squeeze)
        except ValueError as error:
            raise ValueError(
                f"{WHERE}.profile found too little memory: {error}; or set {WHERE}.moved in its "
                "place if you know better"
            ) from error

    def times(self, seen: Seen) -> LayerTimes:
        """Of one layer and stripe."""
        return LayerTimes(
            attention_s=seen.dense.blocks.median_s / self.group.num_layers,
            expert_s=seen.experts.median_s,
            expert_on_attention_s=seen.on_attention.median_s,
        )

    def _memory(self, seen: Seen) -> Memory:
        weights = self.blueprint.found[0].expert
        trained = sum(_numel(shape) for _, shape, _, is_trained in weights if is_trained)
        frozen = sum(_numel(shape) for _, shape, _, is_trained in weights if not is_trained)
        return Memory(
            expert_bytes=self.training.weight_bytes.of(trained, frozen, self._num_groups),
            rows_bytes=seen.rows_bytes,
            dense_bytes=seen.dense.bytes,
            expert_free_bytes=seen.expert_free_bytes,
            attention_free_bytes=seen.attention_free_bytes,
        )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _experts_of_all_layers(blueprint: Blueprint) -> int:
    """Experts of a layer, where all layers are alike, as Algorithm 1 takes them to be."""
    alike = {(found.num_experts, found.expert) for found in blueprint.found}
    if len(alike) > 1:
        counts = ", ".join(f"{found.name}: {found.num_experts}" for found in blueprint.found)
        raise ValueError(
            f"{WHERE}.profile takes layers with equally many experts of one shape, but here are "
            f"{len(alike)} kinds of layers ({counts}); set {WHERE}.moved in its place"
        )
    return blueprint.found[0].num_experts


# What a person is told.


def _seen_text(rehearsal: _Rehearsal, seen: Seen, choice: Choice) -> str:
    """What was measured."""
    num_layers = rehearsal.group.num_layers
    dense = seen.dense.blocks
    attention = Timed(dense.median_s / num_layers, dense.std_s / num_layers)
    bounds = choice.bounds
    return (
        f"zebra: {rehearsal.num_samples} x {rehearsal.profile.sequence_length} tokens through one "
        f"layer, forward and backward: attention {_timed_text(attention)}, experts "
        f"{_timed_text(seen.experts)} on an expert rank, {_timed_text(seen.on_attention)} on an "
        f"attention rank; expert ranks have no room for {bounds.least} experts, each attention "
        f"rank has room for {bounds.most}"
    )


def _timed_text(timed: Timed) -> str:
    return f"{seconds_text(timed.median_s)} (std {seconds_text(timed.std_s)})"


def _choice_text(rehearsal: _Rehearsal, seen: Seen, choice: Choice) -> str:
    """What follows."""
    before, after = seconds_text(choice.before_s), seconds_text(choice.after_s)
    if not any(choice.proposed_L):
        why = _why_none(rehearsal, seen, choice)
        return f"zebra: no experts move: {why}; a step takes {before}, simulated"
    if not any(choice.moved_L):
        return (
            f"zebra: no experts move: with {list(choice.proposed_L)}, by Algorithm 1, a step "
            f"takes {after} in place of {before}, simulated; more stripes "
            f"({WHERE}.num_micro_batches) make it pay sooner"
        )
    per_rank = rehearsal.group.num_experts // rehearsal.group.expert_ranks
    return (
        f"zebra: each expert rank leaves {list(choice.moved_L)} of the {per_rank} experts that it "
        f"has of each layer to attention ranks; a step takes {after} in place of {before}, "
        f"simulated ({choice.after_s / choice.before_s - 1:+.1%})"
    )


def _why_none(rehearsal: _Rehearsal, seen: Seen, choice: Choice) -> str:
    """By Algorithm 1."""
    if rehearsal.times(seen).gather_s <= 0:
        return "attention takes longer than they do"
    if choice.bounds.most < rehearsal.group.chunk.per_attention_rank:
        return "attention ranks have no memory for them"
    return "they are too large for the bubbles that they would fill"
