"""Visits: a token's row goes once to each cell that has some of its experts.

A *visit* is one (token, cell) pair: the row that travels for all choices of the token there. Which
visit each row at the experts is of is told to that cell; the rest is index work, on the device.
Shape letters: T tokens, K choices a token, F finest chunks, C cells, U visits that leave this rank,
V visits that arrive, R rows at the experts, G groups, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_moe_ext.placement import Placement
from ds_moe_ext.rows import block_index, on_device, starts_of
from ds_moe_ext.schedule.task import Cut, Span


class Goals(NamedTuple):
    """Where the tokens of a rank go; known before the ranks have counted.

    Attributes:
        cell_TK: cell of each choice, int64; ``C`` of those that were dropped.
        goes_TC1: whether a token has a choice in a cell; one column more, of those that were
            dropped.
    """

    cell_TK: Tensor
    goes_TC1: Tensor

    @classmethod
    def of(cls, expert_TK: Tensor, target: Placement) -> Goals:
        """Of chosen experts, -1 where there is none, with one holder each."""
        cell_TK = _cell_E1(target, expert_TK.device)[expert_TK]
        shape = len(expert_TK), target.num_cells + 1
        goes = torch.zeros(shape, dtype=torch.bool, device=expert_TK.device)
        return cls(cell_TK, goes.scatter_(1, cell_TK, 1))

    def by_chunk(self, cut: Cut) -> Tensor:
        """Visits of each chunk to each cell, int64 ``[F, C]``."""
        if cut.num_chunks == 1:
            return self.goes_TC1[:, :-1].sum(dim=0, keepdim=True)
        lengths = np.diff(np.asarray(cut.bounds)).tolist()
        return torch.stack([part[:, :-1].sum(dim=0) for part in self.goes_TC1.split(lengths)])


@lru_cache(maxsize=1024)  # a placement a layer
def _cell_E1(target: Placement, device: torch.device) -> Tensor:
    """The cell of each expert, and of no expert ``C``, which -1 finds."""
    return on_device(np.append(target.owner_E, target.num_cells), device)


class Groups(NamedTuple):
    """Rows that are added up: in the order in which they are listed, so that the bits are always
    the same.

    Attributes:
        row_N: rows of the first group, of the second, and so on, int64.
        start_G: where each group begins, int64.
    """

    row_N: Tensor
    start_G: Tensor

    @classmethod
    def of(cls, group_N: Tensor, num_groups: int) -> Groups:
        """Of rows whose groups are known, int32."""
        group_N, row_N = group_N.sort(stable=True)
        number_G = torch.arange(num_groups, dtype=group_N.dtype, device=group_N.device)
        return cls(row_N, torch.searchsorted(group_N, number_G))

    def sums(self, rows_ND: Tensor, weight_N: Tensor | None = None) -> Tensor:
        """The sum of each group, ``[G, D]``; zeros of an empty one.

        Args:
            rows_ND: all rows.
            weight_N: of each; sums are then in the wider type of both, and rounded once.
        """
        if not rows_ND.shape[0]:
            return rows_ND.new_zeros(len(self.start_G), rows_ND.shape[1])
        wide_ND = rows_ND
        if weight_N is not None:
            dtype = torch.promote_types(rows_ND.dtype, weight_N.dtype)
            wide_ND, weight_N = rows_ND.to(dtype), weight_N.to(dtype).index_select(0, self.row_N)
        sum_GD = torch.nn.functional.embedding_bag(
            self.row_N, wide_ND, self.start_G, mode="sum", per_sample_weights=weight_N
        )
        return sum_GD.to(rows_ND.dtype)


@dataclass(frozen=True, eq=False)
class SpanVisits:
    """Visits of the tokens of one span; in send order by cell and token, in that of arrival by
    sender and token.

    Attributes:
        goes_TC: whether a token has an expert in a cell.
        sent_C: visits to each cell.
        received_C: visits from each cell.
        visit_R: visit of each row at the experts, in the order of arrival, int32; rows in slot
            order.
    """

    goes_TC: Tensor
    sent_C: tuple[int, ...]
    received_C: tuple[int, ...]
    visit_R: Tensor

    @cached_property
    def token_U(self) -> Tensor:
        """The token of each visit that leaves, int32."""
        num_tokens, num_cells = self.goes_TC.shape
        token_T = torch.arange(num_tokens, dtype=torch.int32, device=self.goes_TC.device)
        goes_X = self.goes_TC.T.flatten()
        # From 1 on; what does not go, goes to 0.
        place_X = goes_X.cumsum(dim=0) * goes_X
        listed = token_T.new_empty(1 + sum(self.sent_C))
        return listed.scatter_(0, place_X, token_T.repeat(num_cells))[1:]

    @cached_property
    def by_token(self) -> Groups:
        """Visits that left, token by token, in the order of cells."""
        return Groups.of(self.token_U, len(self.goes_TC))

    @cached_property
    def by_visit(self) -> Groups:
        """Rows at the experts, visit by visit, in the order of slots."""
        return Groups.of(self.visit_R, sum(self.received_C))

    def tensors(self) -> list[Tensor]:
        """All that were made so far."""
        made = (own if isinstance(own, Groups) else (own,) for own in vars(self).values())
        return [x for own in made for x in own if isinstance(x, Tensor)]


@dataclass(frozen=True, eq=False)
class Visits:
    """Of one layer's pass.

    Attributes:
        goals: of this rank's tokens.
        cut: of them.
        num_CFC: visits from each cell, of each chunk, to each cell, of this rank's place, on the
            host.
        cell: this rank's.
        visit_R: as in ``SpanVisits``, of all tokens; None until the cells have told each other.
    """

    goals: Goals
    cut: Cut
    num_CFC: np.ndarray
    cell: int
    visit_R: Tensor | None = None

    def between(self) -> np.ndarray:
        """Visits of each chunk from each cell to each, int64 ``[F, C, C]``."""
        return self.num_CFC.swapaxes(0, 1)

    def number_TK(self) -> Tensor:
        """Each choice's visit, in the order in which all visits of its cell arrive there, int32."""
        goes_TC1, device = self.goals.goes_TC1, self.goals.goes_TC1.device
        before_C1 = np.append(self.num_CFC[: self.cell].sum(axis=(0, 1)), 0)
        number_TC1 = goes_TC1.cumsum(dim=0) + on_device(before_C1 - 1, device)
        return number_TC1.gather(1, self.goals.cell_TK).int()

    def on(self, span: Span, visit_R: Tensor) -> SpanVisits:
        """Those of a span, whose rows are of these among all visits."""
        chunks = slice(span.start, span.stop)
        received_CF = self.num_CFC[:, :, self.cell]
        if span.stop - span.start < self.cut.num_chunks:
            starts_CF = starts_of(received_CF)[:, chunks]
            own_V = block_index(starts_CF, received_CF[:, chunks], visit_R.device)
            place = visit_R.new_empty(int(received_CF.sum()))
            nth_V = torch.arange(len(own_V), dtype=place.dtype, device=place.device)
            place.scatter_(0, own_V, nth_V)
            visit_R = place.index_select(0, visit_R)
        first, length = self.cut.first(span), self.cut.length(span)
        goes_TC = self.goals.goes_TC1[first : first + length, :-1]
        return SpanVisits(
            goes_TC,
            sent_C=tuple(self.num_CFC[self.cell, chunks].sum(axis=0).tolist()),
            received_C=tuple(received_CF[:, chunks].sum(axis=1).tolist()),
            visit_R=visit_R,
        )

    def tensors(self) -> list[Tensor]:
        """What it holds on the device."""
        return [*self.goals, *([] if self.visit_R is None else [self.visit_R])]
