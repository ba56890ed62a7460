# SPDX-License-Identifier: Apache-2.0
"""A run as strategies and prices see it, from what describes its cluster and model. Pure.

``DescribedRun`` has a model on a cluster: what ranks compute and send between experts (windows),
what rows and replicas cost (``cost_group``, ``pipelines``), what a rank needs memory for, and under
which ``conditions`` a step runs. A pipeline stage's part of a model is a run of its own
(``stages``). Shape letters: L layers, C EP ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ds_moe_ext.core.hardware import Hardware, Product
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.planning.exchange_costs import (
    LayerRows,
    PipelineLines,
    Usage,
    described_line,
    described_lines,
)
from ds_moe_ext.planning.exchange_costs import layer_costs as costs_of_layer
from ds_moe_ext.planning.layer_costs import BACKWARD, FORWARD
from ds_moe_ext.planning.layer_pipelines import Measured, MeasuredLayer
from ds_moe_ext.planning.layer_seconds import HostTimes, TaskCosts, host_of, issued
from ds_moe_ext.planning.model_shape import (
    LAYER_NORM,
    MLP,
    MOE,
    MOE_ACTIVATION,
    SHARED,
    UP_PROJECTION,
    ModelShape,
    OnItsWay,
    Training,
)
from ds_moe_ext.planning.prices import Line, Prices, RowBytes
from ds_moe_ext.planning.step_price import Conditions, Pass, most_kept
from ds_moe_ext.planning.strategy import CostGroup, Job, Plan

RUNTIME = 2 << 30  # bytes of the device's own runtime and of communicators
# hidden states that a layer's dense part keeps for backward, as Hugging Face writes it, with fused
# attention
KEPT_DENSE = 16
KEPT_FUSED = 4  # likewise of Megatron-core's: what two norms take and give
LOGIT_BYTES = 6  # of one logit: as computed, and in 32 bits for the loss
STEP_BYTES = 6  # read and written of a weight when it is stepped, beside states: itself, gradient
SHARE_OF_FREE = 0.7  # of free memory that replicas may take, as in a run


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of the fullest rank."""

    weights: float  # as they compute
    gradients: float  # of these
    optimizer: float  # weights in 32 bits and two states, but for those in host memory
    activations: float  # kept for backward
    replicas: float = 0.0  # of experts, and their gradients
    runtime: float = RUNTIME  # what the device and its communicators take

    @property
    def total(self) -> float:
        return sum(vars(self).values())


class Activations(NamedTuple):
    """Bytes of one pass: hidden states of dense parts, rows there and back, hidden ones of
    experts."""

    kept: float  # from its forward to its backward
    passing: float  # more, of a layer that runs again


def stage_memory(
    uses: Sequence[MemoryUse], passes: Sequence[Activations], order: Iterable[Pass]
) -> MemoryUse:
    """Of the chunks of a pipeline stage together."""
    kept = most_kept(order, [each.kept for each in passes])
    return MemoryUse(
        weights=sum(each.weights for each in uses),
        gradients=sum(each.gradients for each in uses),
        optimizer=sum(each.optimizer for each in uses),
        activations=kept + max(each.passing for each in passes),
    )


def copied_bytes_C(
    plans: Sequence[Plan], expert_bytes_L: Sequence[int], *, accumulates: bool
) -> np.ndarray:
    """Replicas of experts and their gradients on each EP rank when it has most, int64 ``[C]``.

    All layers' replicas, or one layer's where they are freed after forward, or two layers' where
    the block before carries them besides; of gradients those of as few layers, but where they wait
    for the last micro-batch those of as many as have replicas.
    """
    replicas_LC = np.array([(p.target.holds_EC & ~p.owner.holds_EC).sum(axis=0) for p in plans])
    most_first_LC = -np.sort(-replicas_LC * np.array(expert_bytes_L)[:, None], axis=0)
    at_once = 2 if any(plan.carried is not None for plan in plans) else 1
    frees = all(plan.rematerialize for plan in plans if plan.has_replicas)
    held_C: np.ndarray = most_first_LC[: at_once if frees else None].sum(axis=0)
    return held_C + (held_C if accumulates else most_first_LC[:at_once].sum(axis=0))


def passing_line(hardware: Hardware, num_ranks: int, at_once: int) -> Line:
    """By bytes that one rank sends to its next one in a ring."""
    if num_ranks <= hardware.ranks_per_node:
        link, sharers = hardware.intra or hardware.copy_link(num_ranks), 1
    else:
        link = hardware.inter or hardware.copy_link(num_ranks)
        sharers = min(hardware.ranks_per_node, at_once)
    return Line(alpha_s=link.latency_s, beta_s=sharers / link.bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class DescribedRun:
    """A model trained on a cluster by a grid of ranks; or a pipeline stage's part of one. What the
    hardware file does not say is a ``ValueError``."""

    hardware: Hardware  # as it is reckoned with (``reached``)
    shape: ModelShape  # of the model, or of the part
    training: Training  # how
    grid: Grid  # of the ranks of a stage
    passes: int = 16  # as of ``Reached``
    own_host: HostTimes | None = None  # what issuing takes; None: as of the cluster's devices
    # what rows and replicas weigh as they travel; None: what they do in memory
    on_its_way: OnItsWay | None = None
    # clusters that it was joined of, where their devices are unlike (``mixed_cluster``), reckoned
    # with likewise: each computes experts at its own speed
    mixed: tuple[Hardware, ...] = ()

    @cached_property
    def host(self) -> HostTimes:
        return self.own_host or host_of(self.hardware)

    @property
    def node_C(self) -> np.ndarray:
        return self.hardware.node_of_ep_ranks(self.grid.num_ep_ranks, self.grid.etp_size)

    @cached_property
    def product(self) -> Product:
        """The line of matrix products, of the slowest device."""
        return self._product(self.hardware)

    def _product(self, hardware: Hardware) -> Product:
        kind = self.training.number_type
        line = hardware.device.product(kind)
        if line is None:
            raise ValueError(
                f"hardware {hardware.name!r} does not say how fast its device multiplies in "
                f"{kind}; add 'device.flops_per_s.{kind}' to its file, or measure it with "
                "ds-moe-ext profile"
            )
        return line

    @cached_property
    def memory_rate(self) -> float:
        """Bytes a second of a device's memory."""
        rate = self.hardware.device.memory_bytes_per_s
        if rate is None:
            raise ValueError(
                f"hardware {self.hardware.name!r} does not say how fast its device's memory is; "
                "add 'device.memory_bytes_per_s' to its file"
            )
        return rate

    # What ranks compute and send between the experts.

    @cached_property
    def window_s(self) -> tuple[float, ...]:
        """Forward before each MoE layer, float ``[L]``."""
        return tuple(map(sum, zip(self._computed_s, self._sent_s[0])))

    @cached_property
    def back_window_s(self) -> tuple[float, ...]:
        """The same in backward."""
        computed_s = (self.backward_rounds * s for s in self._computed_s)
        return tuple(map(sum, zip(computed_s, map(self._again_s, self._before), self._sent_s[1])))

    @property
    def backward_rounds(self) -> int:
        """Times of forward that backward takes: one more where forward is computed again."""
        return BACKWARD + self.training.recomputes

    @property
    def expert_rounds(self) -> int:
        """The same of experts, which selective recomputation may run again alone."""
        return BACKWARD + (self.training.recomputes or MOE in self.training.again)

    def _again_s(self, layers: Sequence[int]) -> float:
        """Of the dense modules of some layers that run again in backward alone."""
        training = self.training
        if training.recomputes or not training.again:
            return 0.0
        work = sum(self.shape.again_work(each, training.again, training.length) for each in layers)
        return training.tokens * work / self.product.multiply_adds_per_s

    def dense_s(self, layers: Sequence[int]) -> float:
        """Forward of the dense parts of some layers, one pass of one rank."""
        work = sum(self.shape.dense_work(layer, self.training.length) for layer in layers)
        touched = len(layers) * self.passes * self.row_bytes
        tokens = self.training.tokens
        return tokens * (work / self.product.multiply_adds_per_s + touched / self.memory_rate)

    @cached_property
    def _before(self) -> list[range]:
        """Layers whose dense parts run before the experts of each MoE layer."""
        return [self.shape.layers_before(number) for number in range(len(self.shape.moe_layers))]

    @cached_property
    def _computed_s(self) -> tuple[float, ...]:
        """Forward of what is dense before each MoE layer, float ``[L]``."""
        return tuple(map(self.dense_s, self._before))

    @cached_property
    def _sent_s(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What the same sends, forward and backward."""
        embedding_s = [self._embedding_s, *[0.0] * len(self._before)]
        forward_s, backward_s = (
            tuple(sent_s(each) + s for each, s in zip(self._before, embedding_s))
            for sent_s in (self._forward_sent_s, self._backward_sent_s)
        )
        return forward_s, backward_s

    def _forward_sent_s(self, layers: Sequence[int]) -> float:
        """By tensor and context parallelism, the dense parts of some layers."""
        return sum(map(self._tensor_s, layers)) + len(layers) * self._ring_s(FORWARD)

    def _backward_sent_s(self, layers: Sequence[int]) -> float:
        """The same, forward once more where they run again."""
        back_s = sum(map(self._tensor_s, layers)) + len(layers) * self._ring_s(BACKWARD)
        return back_s + self._forward_sent_s(layers) if self.training.recomputes else back_s

    def _tensor_s(self, layer: int) -> float:
        shape = self.shape
        has_mlp = shape.shared_width if layer in shape.moe_layers else shape.dense_width
        gathered = [
            *(shape.divided.gathered_widths or (shape.width,)),
            *[shape.width] * bool(has_mlp),
        ]
        scattered = [shape.width] * (2 if has_mlp else 1)
        return sum(self._collective_s("all_gather", width) for width in gathered) + sum(
            self._collective_s("reduce_scatter", width) for width in scattered
        )

    def _collective_s(self, what: str, width: int) -> float:
        """Of so many numbers of each token of the tensor parallel group."""
        size = self.training.parallel.tensor
        line = described_line(self.hardware, what, size, num_members=size)
        num_bytes = size * self.training.tokens * width * self.training.element_bytes
        return line.alpha_s + line.beta_s * num_bytes

    def _ring_s(self, rounds: int) -> float:
        """What attention does not hide: backward computes twice as much, and passes gradients of
        keys and values on with these."""
        parallel, training, shape = self.training.parallel, self.training, self.shape
        if parallel.context == 1:
            return 0.0
        line = passing_line(self.hardware, parallel.sharers, parallel.tensor)
        width = shape.divided.key_value_width or sum(shape.head_width)
        turn_s = line.beta_s * training.tokens * width * training.element_bytes
        work = training.tokens * shape.attention_work(training.length) / parallel.context
        hidden_s = work / self.product.multiply_adds_per_s
        turns = parallel.context - 1
        return turns * max(line.alpha_s + rounds * (turn_s - hidden_s), 0.0)

    @property
    def _embedding_s(self) -> float:
        """Each way: sums of its parts are scattered."""
        if not self.shape.vocabulary.has_embedding:
            return 0.0
        return self._collective_s("reduce_scatter", self.shape.width)

    @property
    def head_s(self) -> float:
        """Forward of what follows the last experts: layers without, head and loss."""
        shape, tokens = self.shape, self.training.tokens
        if not shape.vocabulary.has_head:
            return self.dense_s(shape.layers_after)
        head = tokens * shape.vocabulary.size * shape.width / self.product.multiply_adds_per_s
        loss = tokens * shape.vocabulary.size * 4 * 2 / self.memory_rate
        return self.dense_s(shape.layers_after) + head + loss

    @property
    def head_sent_s(self) -> tuple[float, float]:
        """What that sends, forward and backward; tokens are gathered for the parts of the head."""
        shape, layers, ends_s = self.shape, self.shape.layers_after, 0.0
        if shape.vocabulary.has_head:
            ends_s = self._collective_s("all_gather", shape.width)
        if not shape.moe_layers:
            ends_s += self._embedding_s
        return self._forward_sent_s(layers) + ends_s, self._backward_sent_s(layers) + ends_s

    # What rows and replicas cost.

    @property
    def row_bytes(self) -> int:
        return self.shape.width * self.training.element_bytes

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert that one rank has."""
        whole = self.shape.expert_weights * self.training.element_bytes
        return whole // self.grid.etp_size

    @property
    def slots(self) -> int:
        """Experts of a layer that an EP rank owns, at most."""
        return -(-self.shape.num_experts // self.grid.num_ep_ranks)

    @property
    def _travelling(self) -> OnItsWay:
        in_memory = OnItsWay(RowBytes(self.row_bytes, self.row_bytes), self.expert_bytes)
        return self.on_its_way or in_memory

    @cached_property
    def cost_group(self) -> CostGroup:
        grid, sent = self.grid, self._travelling
        copy, inter, intra = self.hardware.ep_rank_links(grid.size, grid.etp_size)
        row_s_C = self._row_s_C()
        return CostGroup(
            layers=tuple(range(len(self.shape.moe_layers))),
            prices=Prices(
                row_s=float(row_s_C.mean()),
                row_bytes=sent.row.between,
                copy_s=sent.copy / copy.bytes_per_s,
                inter_bytes_per_s=inter.bytes_per_s,
                intra_bytes_per_s=intra.bytes_per_s,
            ),
            row_s_C=tuple(row_s_C.tolist()) if row_s_C.max() > row_s_C.min() else (),
            expert_bytes=self.expert_bytes,
            state_bytes=self.training.state_bytes * self.shape.expert_weights // grid.etp_size,
            copy_latency_s=copy.latency_s,
            replica_bytes=sent.copy,
            etp_row_bytes=sent.row.within,
            top_k=self.shape.top_k,
        )

    def _row_s_C(self) -> np.ndarray:
        """Seconds of a row in each EP rank: of the slowest grid, where there are several, and of an
        EP rank's slowest rank."""
        work = (1 + self.expert_rounds) * self.shape.expert_weights / self.grid.etp_size
        row_s_R = np.concatenate(
            [
                np.full(each.num_ranks, work / self._product(each).multiply_adds_per_s)
                for each in self.mixed or (self.hardware,)
            ]
        )[: self.grid.world_size]
        by_grid = row_s_R.reshape(-1, self.grid.num_ep_ranks, self.grid.etp_size).max(axis=2)
        slowest: np.ndarray = by_grid[int(by_grid.sum(axis=1).argmax())]
        return slowest

    @cached_property
    def lines(self) -> PipelineLines:
        grid, tensor = self.grid, self.training.parallel.tensor
        usage = Usage(
            num_ranks=grid.world_size,
            num_ep_ranks=grid.num_ep_ranks,
            etp_size=grid.etp_size,
            dense_ranks_per_node=max(
                min(self.hardware.ranks_per_node, grid.world_size) // tensor, 1
            ),
            number_type=self.training.number_type,
            row_multiply_adds=self.shape.expert_weights / grid.etp_size,
            num_products=self.shape.products * self.slots,
            element_bytes=self.training.gradient_bytes,
            expert_bytes=self.slots * self.expert_bytes,
        )
        return described_lines(self.hardware, usage)

    def pipelines(self, rows: Sequence[np.ndarray]) -> Measured:
        """For planners of pipelines, by the rows of one pass, int64 ``[C, E]`` of each layer."""
        shape, grid, sent = self.shape, self.grid, self._travelling.row

        def dense_weights(layers: Sequence[int]) -> int:
            return sum(shape.dense_weights(each, self.training.parallel.tensor) for each in layers)

        def costs(rows_CE: np.ndarray) -> LayerRows:
            even = float(rows_CE.sum()) / grid.num_ep_ranks
            return LayerRows(
                sent=even / grid.etp_size,
                gathered=even,
                row_bytes=sent.between,
                etp_row_bytes=sent.within,
            )

        layers = tuple(
            MeasuredLayer(
                costs_of_layer(self.lines, costs(rows_CE)), back_window_s, dense_weights(before)
            )
            for rows_CE, back_window_s, before in zip(rows, self.back_window_s, self._before)
        )
        head = shape.vocabulary.size * shape.width // self.training.parallel.tensor
        return Measured(
            layers,
            head * shape.vocabulary.has_head + dense_weights(shape.layers_after),
            self.lines.gradients,
            self.training.element_bytes,
            issued(self.host, is_split=grid.etp_size > 1),
        )

    # What is asked for.

    def job(self, owners: Sequence[Placement], used: MemoryUse) -> Job:
        """What strategies plan by, without rows; in a stage whose ranks use so much memory."""
        free = (self.hardware.device.memory_bytes or 0) - used.total
        return replace(
            Job.at_start(owners, self.node_C, (self.cost_group,)),
            window_s=self.window_s,
            back_window_s=self.back_window_s,
            free_bytes=max(int(SHARE_OF_FREE * free), 0) // self.training.parallel.chunks,
            accumulates=self.training.micro_batches > 1,
        )

    @cached_property
    def stages(self) -> list[list[StageChunk]]:
        """What each pipeline stage has, ``[stage][chunk]``."""
        parallel, shape = self.training.parallel, self.shape
        if parallel.pipeline == 1:
            return [[StageChunk(slice(None), self)]]

        def chunk(layers: range) -> StageChunk:
            part = shape.part(layers)
            before = sum(layer < layers.start for layer in shape.moe_layers)
            own = slice(before, before + len(part.moe_layers))
            return StageChunk(own, replace(self, shape=part))

        return [list(map(chunk, chunks)) for chunks in parallel.layers(shape.num_layers)]

    @property
    def send_s(self) -> float:
        """From a pipeline stage to the next, all its ranks at once."""
        training = self.training
        line = passing_line(self.hardware, training.num_ranks, training.stage_ranks)
        return line.alpha_s + line.beta_s * training.tokens * self.row_bytes

    def memory(self, most_rows: float) -> MemoryUse:
        """Of the rank with most experts and rows, without replicas; ``most_rows`` are those that an
        EP rank computes in one layer."""
        training, stage = self.training, self.training.zero_stage
        element, replicas = training.element_bytes, self.grid.world_size // self.grid.size
        experts, dense_replicas = self._held_experts, training.dense_replicas
        dense = self.shape.held_dense_weights(training.parallel.tensor)
        held = dense / (dense_replicas if stage >= 3 else 1) + experts
        if stage >= 3 and training.recomputes and experts:  # else layers keep theirs whole
            a_layer = experts / len(self.shape.moe_layers)
            held += (experts - a_layer) * (1 / replicas - 1)
        reduced, stepped = (
            dense / (dense_replicas if stage >= least else 1)
            + experts / (replicas if stage >= least else 1)
            for least in (2, 1)
        )
        stepped *= 1 - training.offloaded_states
        return MemoryUse(
            weights=held * element,
            gradients=reduced * training.gradient_bytes,
            optimizer=stepped * (training.state_bytes - 4 * (element == 4)),
            activations=sum(self.activations(most_rows)),
        )

    def activations(self, most_rows: float) -> Activations:
        """Of one pass. Arguments as of ``memory``."""
        shape, training, tokens = self.shape, self.training, self.training.tokens
        num_moe = len(shape.moe_layers)
        numbers = num_moe, shape.num_layers - num_moe
        logits = tokens * shape.vocabulary.size * LOGIT_BYTES if shape.vocabulary.has_head else 0
        whole = self._kept_of_layers(most_rows, ())
        if training.recomputes:  # what a layer takes is kept, and one layer as it runs again
            passing = max(layer for layer, number in zip(whole, numbers) if number)
            return Activations(shape.num_layers * tokens * self.row_bytes + logits, passing)
        kept = self._kept_of_layers(most_rows, training.again)
        restored = (all_of - left for all_of, left, number in zip(whole, kept, numbers) if number)
        in_layers = sum(number * layer for number, layer in zip(numbers, kept))
        return Activations(in_layers + logits, max(restored))

    def _kept_of_layers(self, most_rows: float, again: Sequence[str]) -> tuple[float, float]:
        """Bytes of a MoE layer and of one without experts that wait for backward.

        Fused attention keeps no scores (Korthikanti et al. 2022, section 4.1, without the part that
        grows with the square of the length). Where Megatron-core runs the layer, a routed token is
        kept as it came, behind the first product and behind the activation, which its probability
        has multiplied already, so that what comes back is not kept.
        """
        shape, training, tokens = self.shape, self.training, self.training.tokens
        element = training.element_bytes
        inner = shape.products * shape.expert_width / self.grid.etp_size
        shared, mlp = shape.products * shape.shared_width, shape.products * shape.dense_width
        if not training.is_fused:
            dense = KEPT_DENSE * shape.width
            rows = most_rows * (2 * shape.width + inner) + tokens * shape.top_k * shape.width
        else:
            always, projected = shape.attention_kept
            dense = KEPT_FUSED * shape.width + always + projected * (UP_PROJECTION not in again)
            if LAYER_NORM in again:  # Transformer Engine fuses the first one, but of latent vectors
                dense -= shape.width * (2 if projected else 1)
            freed = shape.expert_width / self.grid.etp_size * (MOE_ACTIVATION in again)
            rows = most_rows * (shape.width + inner - freed) * (MOE not in again)
        of_shared = tokens * shared * (SHARED not in again and MOE not in again)
        of_mlp = tokens * mlp * (MLP not in again)
        return (
            element * (tokens * dense + rows + of_shared),
            element * (tokens * dense + of_mlp),
        )

    def conditions(self, sliced: int = 0) -> Conditions:
        """Of a step whose layers reduce so many elements of dense gradients beside their rows."""
        link = self.hardware.copy_link(self.grid.size)
        tasks = TaskCosts(
            exchange_start_s=link.latency_s if self.grid.num_ep_ranks > 1 else 0.0,
            weight_s=self.expert_bytes / self.memory_rate,
            expert_start_s=self.shape.products * self.product.start_s,
            row_move_s=2 * self.row_bytes / self.memory_rate,
            etp_gather=self.lines.all_gather,
            etp_scatter=self.lines.reduce_scatter,
            all_reduce=self.lines.gradients,
            backward_rounds=self.expert_rounds,
        )
        return Conditions(
            grid=self.grid,
            tasks=tasks,
            host=self.host.with_forward_again() if self.training.recomputes else self.host,
            head_s=self.head_s,
            head_again_s=self.dense_s(self.shape.layers_after) * (self.backward_rounds - BACKWARD)
            + self._again_s(self.shape.layers_after),
            head_sent_s=self.head_sent_s,
            window_sent_s=sum(map(sum, self._sent_s)),
            end_s=self.end_s(sliced),
            micro_batches=self.training.micro_batches,
        )

    def end_s(self, sliced: int) -> float:
        """Behind the last backward: gradients that nothing hid, and the optimizer."""
        return self.dense_end_s(sliced) + self.expert_end_s

    def dense_end_s(self, sliced: int) -> float:
        """Of what is not of experts."""
        elements = self.shape.held_dense_weights(self.training.parallel.tensor)
        reduced_s = 0.0
        if not self.training.hides_gradients:
            reduced_s = self.lines.gradients.seconds(max(elements - sliced, 0))
        return reduced_s + self._stepped_s(elements, self.training.dense_replicas)

    @property
    def expert_end_s(self) -> float:
        """Of experts, whose gradients are summed over their owners in different grids."""
        owners, reduced_s = self.grid.world_size // self.grid.size, 0.0
        if owners > 1:
            # In rings along the ranks: of those that hold the same on one node, one sends to
            # another.
            line = passing_line(self.hardware, self.grid.world_size, self.grid.size)
            sent = self._held_experts * self.training.gradient_bytes * 2 * (owners - 1) / owners
            reduced_s = line.alpha_s + sent * line.beta_s
        if self.training.hides_gradients:  # but for those of the layer whose backward comes last
            reduced_s /= len(self.shape.moe_layers) or 1
        return reduced_s + self._stepped_s(self._held_experts, owners)

    def _stepped_s(self, elements: float, num_replicas: int) -> float:
        """The optimizer's step of weights that so many ranks have."""
        own = elements / (num_replicas if self.training.zero_stage >= 1 else 1)
        return (2 * self.training.state_bytes + STEP_BYTES) * own / self.memory_rate

    @property
    def _held_experts(self) -> float:
        """Weights of experts that a rank has."""
        whole = len(self.shape.moe_layers) * self.slots * self.shape.expert_weights
        return whole / self.grid.etp_size


class StageChunk(NamedTuple):
    """What a pipeline stage has of the model, in one piece."""

    moe_layers: slice  # places of its MoE layers among all
    run: DescribedRun  # it alone
