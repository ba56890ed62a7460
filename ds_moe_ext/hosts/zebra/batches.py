# SPDX-License-Identifier: Apache-2.0
"""How attention ranks run the batches of a whole ZP group, and every rank has its own loss.

Expert ranks are given batches too, by samplers that know nothing of roles. Attention ranks take
them, in pieces; see ``schedule/stripes.py``. What the model returns for a piece is weighted
by its samples and goes back to the rank whose batch it is of: a loss is taken to be a mean over
samples.
Shape letters: C ranks of the group, in its order; V scalars of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_moe_ext.core.comm import (
    Parcel,
    Traffic,
    all_gather_counts,
    as_bytes,
    exchange,
    gather_objects,
    sum_in_place,
)
from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.zebra.call_arguments import (
    Arguments,
    Batch,
    Call,
    Signature,
    check_alike,
    names_of_batches,
)
from ds_moe_ext.hosts.zebra.outcomes import Outcome, Template, digest_of
from ds_moe_ext.schedule.stripes import GroupStripes, OwnStripes, Samples, stripes_of


@dataclass(frozen=True, eq=False)
class Shared:
    """The batches of a group, shared among its attention ranks.

    Attributes:
        num_samples_C: samples of each rank's batch.
        pieces: those of all attention ranks, by their order in the group.
        calls: of this rank, for each stripe; every stripe of an expert rank is empty.
        traffic: what it took to bring the samples here.
    """

    num_samples_C: tuple[int, ...]
    pieces: GroupStripes
    calls: tuple[tuple[Call, ...], ...]
    traffic: Traffic


@dataclass(frozen=True, eq=False)
class Returned:
    """What the model says of a rank's own batch.

    Attributes:
        template: what an output looks like, the same on every rank.
        scalars: of this rank, ``[]`` each, of the types in which the model returned them.
    """

    template: Template
    scalars: tuple[Tensor, ...]

    @property
    def loss(self) -> Tensor:
        """The loss of this rank's batch, without a graph."""
        return self.scalars[self.template.loss]

    def output(self, loss: Tensor, guarded: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
        """The output in the user's type.

        Args:
            loss: the tensor to be its loss.
            guarded: applied to the other scalars that had a gradient.
        """
        pairs = zip(self.scalars, self.template.learnt)
        scalars = [guarded(scalar) if learnt else scalar for scalar, learnt in pairs]
        scalars[self.template.loss] = loss
        return self.template.rebuild(scalars)


class BatchExchange:
    """Moves the batches of a ZP group to its attention ranks, and what became of them back.

    Args:
        group: the ranks of the ZP group, for tensors on the device; ``connect`` it first.
        control: the same ranks over gloo, for what hosts must know.
        place: of this rank in both.
        roles: of the group's ranks.
        num_stripes: of each attention rank; fewer where a batch has not so many samples.
        device: where the model computes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        *,
        place: int,
        roles: Roles,
        num_stripes: int,
        device: torch.device,
    ) -> None:
        self.group = group
        self.control = control
        self.place = place
        self.roles = roles
        self.num_stripes = num_stripes
        self.device = device
        self._template: Template | None = None  # the last one, the same on every rank

    def share(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str) -> Shared:
        """Bring every sample of the group to the attention rank that runs it. Collective.

        A tensor is cut along its first dim if that is, on every rank, as long as the first dim of
        the rank's first tensor; its other dims may differ between ranks. Other tensors, of equal
        shapes, go with their batch. All else must be alike.

        Args:
            args: what this rank's model was called with, by position.
            kwargs: by name.
            mode: what the pass is for; the same on every rank.

        Raises:
            ValueError: on every rank: the calls are not alike, or cannot be cut.
        """
        own = Arguments.of(args, kwargs)
        told = gather_objects(own.signature(mode).to_text(), self.control)
        signatures = [Signature.from_text(text) for text in told]
        names = names_of_batches(signatures)
        check_alike(signatures, names)
        num_samples_C = tuple(signature.num_samples for signature in signatures)
        pieces = self._pieces(num_samples_C)
        stripes = dict(zip(self.roles.attention_cells, pieces))
        here, traffic = self._bring(own, signatures, names, stripes)
        calls = tuple(
            tuple(own.call(piece, piece.weight(num_samples_C), here) for piece in stripe)
            for stripe in stripes.get(self.place, ((),) * len(pieces[0]))
        )
        return Shared(num_samples_C, pieces, calls, traffic)

    def return_scalars(self, shared: Shared, outcomes: Sequence[Sequence[Outcome]]) -> Returned:
        """Give every rank the scalars of its own batch. Collective.

        Each is the sum over the batch's pieces of weight times value, in float64.

        Args:
            shared: what ``share`` returned.
            outcomes: of each of its calls, stripe by stripe.

        Raises:
            ValueError: on every rank: outputs differ in structure, or cannot be pickled.
        """
        known = list(chain.from_iterable(outcomes))
        template = self._agree([outcome.template for outcome in known])
        num_ranks, num_scalars = len(shared.num_samples_C), len(template.dtypes)
        table_CV = torch.zeros(num_ranks, num_scalars, dtype=torch.float64, device=self.device)
        for call, outcome in zip(chain.from_iterable(shared.calls), known, strict=True):
            values_V = torch.stack([scalar.detach().double() for scalar in outcome.scalars])
            table_CV[call.piece.sender].add_(values_V, alpha=call.weight)
        sum_in_place(table_CV, self.group)
        own_V = table_CV[self.place].unbind()
        scalars = tuple(value.to(dtype) for value, dtype in zip(own_V, template.dtypes))
        return Returned(template, scalars)

    def _pieces(self, num_samples_C: Sequence[int]) -> GroupStripes:
        """The pieces of every stripe; senders are places in the group."""
        order = (*self.roles.attention_cells, *self.roles.expert_cells)
        attention_size = len(self.roles.attention_cells)
        pieces = stripes_of(
            [num_samples_C[place] for place in order],
            attention_size,
            min(self.num_stripes, sum(num_samples_C) // attention_size),
        )
        return tuple(
            tuple(
                tuple(replace(piece, sender=order[piece.sender]) for piece in stripe)
                for stripe in stripes
            )
            for stripes in pieces
        )

    def _bring(
        self,
        own: Arguments,
        signatures: Sequence[Signature],
        names: Sequence[str],
        stripes: Mapping[int, OwnStripes],
    ) -> tuple[dict[int, tuple[int, Batch]], Traffic]:
        """Exchange what attention ranks take on. Collective.

        Returns:
            For each sender, its first sample that is here now, and what is here of its batch.
        """
        batch = own.batch(names)
        landed = {
            span: batch.landing(span.num_samples, signatures[span.sender].leaves)
            for span in _spans(stripes.get(self.place, ()), self.place)
        }
        leaving = {
            cell: batch.part(span.start, span.stop)
            for cell in stripes
            for span in _spans(stripes[cell], cell)
            if span.sender == self.place
        }
        traffic = self._exchange(landed, leaving)
        here = {span.sender: (span.start, parts) for span, parts in landed.items()}
        return here | {self.place: (0, batch)}, traffic

    def _exchange(self, landed: Mapping[Samples, Batch], leaving: Mapping[int, Batch]) -> Traffic:
        """Fill what is to land, by sender, with what leaves, by receiver. Collective."""
        receives = [
            (as_bytes(tensor), span.sender)
            for span, batch in landed.items()
            for tensor in batch.tensors()
        ]
        sends = [
            (as_bytes(tensor), cell)
            for cell, batch in leaving.items()
            for tensor in batch.tensors()
        ]
        traffic = Traffic()
        for group, on_host in ((self.group, False), (self.control, True)):
            traffic += exchange(_on(receives, on_host), _on(sends, on_host), group)
        return traffic

    def _agree(self, templates: Sequence[Template]) -> Template:
        """What an output looks like; the first attention rank tells when that changes."""
        texts = sorted({template.text for template in templates})
        digest = digest_of(texts[0]) if len(texts) == 1 else 0
        digests_C = all_gather_counts(torch.tensor([digest]), self.control)[:, 0].tolist()
        first, *others = (digests_C[cell] for cell in self.roles.attention_cells)
        if first == 0 or any(other != first for other in others):
            told = gather_objects(" and ".join(texts), self.control)
            raise ValueError(
                "the model returned outputs that differ in more than the values of tensors: "
                + "; ".join(f"place {place}: {text}" for place, text in enumerate(told) if text)
                + "; let it return the same fields for all samples, and numbers as 0-dim tensors"
            )
        if self._template is None or digest_of(self._template.text) != first:
            self._template = self._tell(templates)
        return self._template

    def _tell(self, templates: Sequence[Template]) -> Template:
        teller = self.roles.attention_cells[0]
        text = templates[0].to_text() if self.place == teller else ""
        return Template.from_text(gather_objects(text, self.control)[teller])


def _spans(stripes: OwnStripes, cell: int) -> list[Samples]:
    """What an attention rank runs of each other rank's batch, in one."""
    spans: dict[int, Samples] = {}
    for piece in chain.from_iterable(stripes):
        spans[piece.sender] = replace(spans.get(piece.sender, piece), stop=piece.stop)
    return [span for sender, span in spans.items() if sender != cell]


def _on(parcels: Sequence[Parcel], on_host: bool) -> list[Parcel]:
    return [(part, peer) for part, peer in parcels if part.is_cpu == on_host and part.numel()]
