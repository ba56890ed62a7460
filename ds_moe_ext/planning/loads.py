# SPDX-License-Identifier: Apache-2.0
"""Loads of experts: rows of every step, and a window that predicts the next one. Pure.

``LoadWindow`` remembers the last steps of a run, ``Loads`` has all steps of one, as made
(``Sizes``) or read, and ``figures_of`` says how uneven they are and how they move. Ranks must agree
on every plan, so planners count in whole rows, in which no order of summation and no rounding can
differ. Shape letters: I steps, L layers, C senders, E experts of a layer (of the largest, where
layers differ), Y experts of all layers.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_moe_ext.strict import at_least

REMEMBERED = 5  # steps, where the window chooses its forecast: HECATE's mean
FAST = 0.03
"""Drift at which loads move for certain."""
MOVED = 1.1
"""Times the drift between two steps, above which they have moved since another one: what these two
differ by is, in a run that has settled, which rows happened to come."""
STEADY_STEPS = 10
"""That a plan is kept at most while loads do not move: of a real run that has settled, one of
thirty steps ago is as good as one of ten (docs/planners.md)."""


@dataclass(frozen=True)
class Outcome:
    """How the forecast of one step came out."""

    num_steps: int  # whose mean it was
    astray: int  # rows that went to other experts than it predicted, of all layers; whole ones
    rows: int  # all of them


class LoadWindow:
    """The rows of the last ``num_steps`` steps, of all layers, whose mean predicts the next step;
    None: the last step alone or the mean of the last five.

    Routing moves slowly: between steps ten apart the shares of a real run's experts differ by 0.03
    in total variation, on average (HECATE and Pro-Prophet both build on it). What a mean gains is
    noise, what it costs is that it comes late: early in training the last step alone is the better
    forecast, later the mean. A window may choose: the one that would have predicted the newest step
    better. It goes by what it remembers alone, so that a window made of the same steps chooses
    alike.
    """

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = REMEMBERED if num_steps is None else num_steps
        if self._num_steps < 1:
            raise ValueError(f"a window of {num_steps} steps remembers nothing; give 1 or more")
        self._chooses = num_steps is None
        self._steps: deque[tuple[np.ndarray, ...]] = deque(maxlen=self._num_steps)
        self._experts: deque[np.ndarray] = deque(maxlen=self._num_steps)  # [Y], of all senders
        self._totals: tuple[np.ndarray, ...] = ()  # of the remembered steps
        self._predicted: tuple[np.ndarray, ...] | None = None
        self._goes_by_last = False
        self.outcome: Outcome | None = None  # of the newest step's forecast; None of the first's

    def push(self, rows: Sequence[np.ndarray]) -> None:
        """Remember one step, int64 ``[C, E]`` of each layer; the oldest is forgotten."""
        if self._steps and _shapes(self._steps[-1]) != _shapes(rows):
            raise ValueError(
                f"a step of shapes {_shapes(rows)} does not fit the window's "
                f"{_shapes(self._steps[-1])}; start a new window when layers or ranks change"
            )
        most = np.iinfo(np.int32).max // self._num_steps - 1
        tables = tuple(_narrow(rows_CE, most) for rows_CE in rows)
        if self._num_steps == 1:
            self._totals = ()  # the step alone predicts
        elif not self._steps:
            self._totals = tuple(np.add(rows_CE, np.int32(0)) for rows_CE in tables)
        elif len(self) < self._num_steps:
            self._totals = tuple(map(np.add, self._totals, tables))
        else:
            self._totals = tuple(map(_exchanged, self._totals, self._steps[0], tables))
        self._steps.append(tables)
        self._predicted = None
        self._compare(np.concatenate([rows_CE.sum(axis=0, dtype=np.int64) for rows_CE in tables]))

    def _compare(self, came_Y: np.ndarray) -> None:
        """Hold forecasts against a step that came, by the rows of each expert.

        The five steps before it were known when it was predicted, but of these the oldest is now
        forgotten: what shall predict the next is chosen by what both can say without that one.
        """
        if self._experts:
            steps = [self._experts[-1]] if self._goes_by_last else list(self._experts)
            number = len(steps)
            off = int(np.abs(sum(steps[1:], steps[0]) - number * came_Y).sum())
            # A row that went astray is missed by one expert, and is one too many at another.
            self.outcome = Outcome(number, off // (2 * number), int(came_Y.sum()))
        self._experts.append(came_Y)
        if not self._chooses or len(self) < 3:  # of one step before, both say the same
            return
        *others, last_Y, _ = self._experts
        number = len(others) + 1
        by_last = int(np.abs(last_Y - came_Y).sum())
        by_mean = int(np.abs(sum(others, last_Y) - number * came_Y).sum())  # times their number
        self._goes_by_last = number * by_last < by_mean

    @property
    def drift(self) -> float:
        """Part of the newest step's rows that went to other experts than those of the step before;
        1 where that is not remembered."""
        return drift(*list(self._experts)[-2:]) if len(self._experts) > 1 else 1.0

    @property
    def newest_Y(self) -> np.ndarray:
        """Rows of each expert in the newest step, of all senders, int64."""
        return self._experts[-1]

    def has_moved(self, since_Y: np.ndarray) -> bool:
        """Whether loads have moved, or may have, since these were the newest."""
        if len(self._experts) < 2:
            return True
        return has_moved(since_Y, *list(self._experts)[-2:])

    def after(self, rows: Sequence[np.ndarray]) -> LoadWindow:
        """The window that remembers one more step; takes what ``push`` takes."""
        window = copy.copy(self)
        window._steps, window._experts = self._steps.copy(), self._experts.copy()
        window.push(rows)
        return window

    def __len__(self) -> int:
        return len(self._steps)

    def steps(self) -> np.ndarray:
        """The remembered steps, the oldest first, int64 ``[I, L, C, E]``, with zeros where layers
        have fewer experts; all 0 long if none."""
        if not self._steps:
            return np.zeros((0, 0, 0, 0), dtype=np.int64)
        shapes = _shapes(self._steps[0])
        most = max(num_experts for _, num_experts in shapes)
        steps_ILCE = np.zeros((len(self), len(shapes), shapes[0][0], most), dtype=np.int64)
        for step_LCE, rows in zip(steps_ILCE, self._steps):
            for layer_CE, rows_CE in zip(step_LCE, rows):
                layer_CE[:, : rows_CE.shape[1]] = rows_CE
        return steps_ILCE

    def predicted(self) -> tuple[np.ndarray, ...]:
        """Mean rows of the remembered steps, rounded, ``[C, E]`` of each layer, int32 where they
        fit, else int64; those of the last, where that is chosen."""
        if not self._steps:
            raise ValueError("the window is empty; push a step before asking for a prediction")
        if self._predicted is None and (self._goes_by_last or len(self) == 1):
            self._predicted = tuple(np.add(rows_CE, np.int32(0)) for rows_CE in self._steps[-1])
        elif self._predicted is None:
            # Layer by layer: what is in between stays in the cache.
            self._predicted = tuple(_rounded_mean(total, len(self)) for total in self._totals)
        return self._predicted


def drift(before_E: np.ndarray, after_E: np.ndarray) -> float:
    """Part of the rows that went to other experts than before, of the loads of two steps: from
    whole numbers by one division, so that every processor says the same."""
    num_rows = int(after_E.sum())
    # A row that went elsewhere is missed by one expert, and is one more at another.
    return int(np.abs(after_E - before_E).sum()) / (2 * num_rows) if num_rows else 0.0


def has_moved(since_E: np.ndarray, before_E: np.ndarray, now_E: np.ndarray) -> bool:
    """Whether loads have moved since a step, by what the last two of steps differ by."""
    moved = drift(since_E, now_E)
    return moved >= FAST or moved > MOVED * drift(before_E, now_E)


def _shapes(rows: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    return [rows_CE.shape for rows_CE in rows]


def _narrow(rows_CE: np.ndarray, most: int) -> np.ndarray:
    """The same in 16 bits without a sign where they fit, in 32 where numbers up to so many do: a
    quarter or half of the memory to keep and to read."""
    largest = rows_CE.max(initial=0)
    if rows_CE.min(initial=0) >= 0 and largest <= np.iinfo(np.uint16).max:
        return rows_CE.astype(np.uint16)
    return rows_CE.astype(np.int32 if largest <= most else np.int64)


def _exchanged(total: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A sum that has a new table in the place of an old one: whole numbers, and exact."""
    exchanged: np.ndarray = total - old
    fits = np.can_cast(new.dtype, exchanged.dtype)
    exchanged = np.add(exchanged, new, out=exchanged if fits else None)
    return exchanged


def _rounded_mean(total: np.ndarray, number: int) -> np.ndarray:
    """Of whole numbers, as wide as they are; halves go to the even one."""
    if number % 2 and total.dtype == np.int32:  # no halves; a quarter of the time
        rounded = total + np.int32(number // 2)
        rounded //= np.int32(number)
        return rounded
    mean = total / number
    np.rint(mean, out=mean)
    return mean.astype(total.dtype)


def balance_L(ep_rank_rows_LC: np.ndarray) -> np.ndarray:
    """Rows of the busiest EP rank over the mean, ``[..., L]`` from ``[..., L, C]``; 1 is perfect,
    and where nothing was routed."""
    mean_L = ep_rank_rows_LC.mean(axis=-1)
    return np.where(mean_L > 0, ep_rank_rows_LC.max(axis=-1) / np.maximum(mean_L, 1e-12), 1.0)


def check_loads(loads: Sequence[np.ndarray], num_experts: Sequence[int], *, factor: int) -> None:
    """Refuse loads that planners cannot count with."""
    if [load_E.shape for load_E in loads] != [(count,) for count in num_experts]:
        raise ValueError(
            f"loads have shapes {[load_E.shape for load_E in loads]}, but the layers have "
            f"{list(num_experts)} experts; give each layer one load an expert"
        )
    most = np.iinfo(np.int64).max // factor
    if all(load_E.dtype.kind in "iu" for load_E in loads):
        all_Y = np.concatenate(loads)
        if all_Y.size and 0 <= all_Y.min() <= all_Y.max() <= most:
            return
    for layer, load_E in enumerate(loads):
        if load_E.dtype.kind not in "iu":
            raise ValueError(
                f"the loads of layer {layer} are {load_E.dtype}, but planners count whole rows; "
                "give the sum over a window of steps, not its mean"
            )
        if load_E.size and not 0 <= load_E.min() <= load_E.max() <= most:
            raise ValueError(
                f"the loads of layer {layer} go from {load_E.min()} to {load_E.max()}; give rows "
                f"from 0 to {most}"
            )


def hottest_first(loads: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Experts of each layer by falling load, the lower index first among equals."""
    most = max(map(len, loads))
    rows_LE = np.full((len(loads), most), -1, dtype=np.int64)
    for layer, load_E in enumerate(loads):
        rows_LE[layer, : len(load_E)] = load_E
    key_LE = np.arange(most) - rows_LE * most  # a quarter of the time of a stable argsort
    key_LE.sort(axis=1)
    order_LE = key_LE % most
    return order_LE, (order_LE - key_LE) // most


def per_layer(number: np.ndarray | int, num_layers: int) -> np.ndarray:
    """One number for all layers or one each, as int64 ``[L]``; refuses negative ones."""
    number_L = np.broadcast_to(number, num_layers)
    if number_L.min() < 0:
        raise ValueError(f"{number_L.min()} experts cannot be copied; give 0 or more")
    return number_L


MOST_ROWS = 2**31 - 1  # of a sender, in a layer and step: products of two fit into int64
MOST_ENTRIES = 2**28  # of a table: 2 GiB


@dataclass(frozen=True, eq=False)
class Loads:
    """Rows of every step.

    A token has ``top_k`` different experts, so a sender of ``T`` tokens has ``T * top_k`` rows and
    sends an expert ``T`` of them at most. Any counts that keep this are those of some tokens.
    """

    rows_ILCE: np.ndarray  # rows that each sender sent to each expert, int64 ``[I, L, C, E]``
    steps_I: np.ndarray  # number of each step, rising, int64 ``[I]``
    source: str  # where they come from, for a person
    top_k: int | None = None  # choices a token; None if that is not known

    def __post_init__(self) -> None:
        for name in ("rows_ILCE", "steps_I"):
            array = np.asarray(vars(self)[name])
            if array.dtype.kind not in "iu":
                raise ValueError(
                    f"{self.source}: {name} is {array.dtype}, but rows are counted; give whole "
                    "numbers"
                )
            whole = array.astype(np.int64, copy=False).view()
            whole.setflags(write=False)
            object.__setattr__(self, name, whole)
        shape = self.rows_ILCE.shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(
                f"{self.source}: rows_ILCE has shape {list(shape)}; give rows by step, layer, "
                "sender and expert, one of each at least"
            )
        if self.steps_I.shape != shape[:1] or (np.diff(self.steps_I) <= 0).any():
            raise ValueError(
                f"{self.source}: steps_I is {self.steps_I.tolist()}; give one number for each of "
                f"the {shape[0]} steps, rising"
            )
        least, most = self.rows_ILCE.min(), self.rows_ILCE.max()
        rows_ILC = self.rows_ILCE.sum(axis=-1)
        if not 0 <= least <= most <= rows_ILC.max() <= MOST_ROWS:
            raise ValueError(
                f"{self.source}: experts have from {least} to {most} rows, senders up to "
                f"{rows_ILC.max()}; give counts from 0, and {MOST_ROWS} a sender at most"
            )
        if self.top_k is not None:
            self._check_top_k(rows_ILC, self.top_k)

    def _check_top_k(self, rows_ILC: np.ndarray, top_k: int) -> None:
        if not 1 <= top_k <= self.rows_ILCE.shape[-1]:
            raise ValueError(
                f"{self.source}: top_k is {top_k}, but there are {self.rows_ILCE.shape[-1]} "
                "experts; give 1 to that many"
            )
        if (rows_ILC % top_k).any():
            raise ValueError(
                f"{self.source}: a sender has {rows_ILC[rows_ILC % top_k > 0][0]} rows, which are "
                f"no whole tokens of {top_k} choices; give another top_k"
            )
        over_ILC = self.rows_ILCE.max(axis=-1) > rows_ILC // top_k
        if over_ILC.any():
            raise ValueError(
                f"{self.source}: a sender of {rows_ILC[over_ILC][0] // top_k} tokens sends an "
                f"expert {self.rows_ILCE.max(axis=-1)[over_ILC][0]} rows, but a token has {top_k} "
                "different experts; give another top_k"
            )

    def tokens_ILC(self) -> np.ndarray:
        """Tokens of each sender, int64 ``[I, L, C]``; rows, if ``top_k`` is not known."""
        tokens_ILC: np.ndarray = self.rows_ILCE.sum(axis=-1) // (self.top_k or 1)
        return tokens_ILC

    def runs(self) -> list[np.ndarray]:
        """Rows ``[I, L, C, E]`` of each run of evenly spaced steps."""
        gaps = np.diff(self.steps_I)
        if not gaps.size:
            return [self.rows_ILCE]
        return np.split(self.rows_ILCE, np.flatnonzero(gaps > np.median(gaps)) + 1)


def check_size(shape: tuple[int, ...], where: str) -> None:
    """Refuse tables past what memory is for."""
    entries = math.prod(shape)
    if entries > MOST_ENTRIES:
        raise ValueError(
            f"{where} has {' x '.join(map(str, shape))} = {entries} counts, but {MOST_ENTRIES} are "
            "read or made at most; take fewer steps or layers"
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every generator is given: how large loads shall be."""

    # senders ``C``; they own experts in index order, equally many each
    ranks: int = 8
    experts: int = 64  # ``E`` of each layer
    layers: int = 4  # ``L``
    tokens: int = 4096  # of a rank in a step, in the mean
    top_k: int = 2  # different experts that a token chooses
    steps: int = 12  # ``I``

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            at_least(name, value, 1)
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k}, but there are {self.experts} experts; a token chooses "
                "different ones: lower top_k or raise experts"
            )
        check_size(self.shape, "the table of rows by step, layer, rank and expert")
        if 2 * self.tokens * self.top_k > MOST_ROWS:  # ragged sources have more than the mean
            raise ValueError(
                f"tokens is {self.tokens}, with {self.top_k} choices each too many rows to count; "
                f"give {MOST_ROWS // (2 * self.top_k)} at most"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(I, L, C, E)``."""
        return self.steps, self.layers, self.ranks, self.experts

    @property
    def experts_per_rank(self) -> int:
        """Those at their owners there."""
        if self.experts % self.ranks:
            raise ValueError(
                f"{self.experts} experts do not divide over {self.ranks} ranks, of which this "
                f"workload makes some hot; choose a number of ranks that divides {self.experts}"
            )
        return self.experts // self.ranks


@dataclass(frozen=True, eq=False)
class Figures:
    """Of every step and layer, float."""

    # rows of the busiest rank over the mean, experts at their owners in index order, equally many
    # on each rank or one more; 1 is perfect
    by_rank_IL: np.ndarray
    hottest_IL: np.ndarray  # rows of the hottest expert over the mean
    unused_IL: np.ndarray  # part of the experts without rows
    # total variation from each step to the next, ``[..., L]``, of steps as far apart as most are;
    # empty where there is one
    moved_L: np.ndarray


def figures_of(loads: Loads) -> Figures:
    """Those of loads, summed over senders."""
    rows_ILE = loads.rows_ILCE.sum(axis=2)
    _, _, num_ranks, num_experts = loads.rows_ILCE.shape
    rank_E = np.arange(num_experts) * num_ranks // num_experts
    by_rank_ILC = rows_ILE @ (rank_E[:, None] == np.arange(num_ranks)).astype(np.int64)
    share_ILE = rows_ILE / np.maximum(rows_ILE.sum(axis=-1, keepdims=True), 1)
    ends = np.cumsum([len(run) for run in loads.runs()])[:-1]
    moved = [np.abs(np.diff(run, axis=0)).sum(axis=-1) / 2 for run in np.split(share_ILE, ends)]
    return Figures(
        balance_L(by_rank_ILC),
        balance_L(rows_ILE),
        (rows_ILE == 0).mean(axis=-1),
        np.concatenate(moved),
    )
