# SPDX-License-Identifier: Apache-2.0
"""Two runs compared: what ``ds-moe-ext verify`` finds, and where it comes from. Pure.

What each run computes is held against the other in the order in which it came to be, so that the
first difference is the cause of the rest. Shape letters: I steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ds_moe_ext.verification.rank_record import SIZE, Kind, LayerSeen, RankRecord, Sketches
from ds_moe_ext.verification.trial import Tolerances


class Stage(Enum):
    """What is compared, in the order in which a step makes it; with the likely cause of a
    difference that nothing before explains."""

    WEIGHTS = (
        "weights at start",
        "the script draws them without a seed, or loads others; call torch.manual_seed before the "
        "model is made",
    )
    INPUT = (
        "input of MoE layers",
        "the batches differ, or something before this layer is random: let the script seed its "
        "data order, and set dropout to 0",
    )
    CHOICES = (
        "chosen experts",
        "the gate chooses otherwise than the host's, and not by ties: a gate of the block "
        "(`gate`), or a capacity that drops choices",
    )
    SCORES = (
        "scores",
        "the gate weighs otherwise than the host's: a gate of the block (`gate`) that normalises "
        "or scales its scores in another way",
    )
    OUTPUT = (
        "output of MoE layers",
        "the experts compute something else of the same rows: a function given to "
        "register_experts that is not what the class computes (its activation, the order of its "
        "weights), scores applied twice or not at all, or rows that the block drops "
        "(`capacity_factor`) or changes on their way (`hooks`)",
    )
    GRADIENTS = (
        "gradients",
        "the forward pass agrees, so it is the way back: an expert's function whose gradient is "
        "not its own, or an error of ds_moe_ext: please report it, with this name",
    )
    NORM = (
        "norm of the reduced gradients",
        "what each rank computes agrees, so it is how gradients are summed or averaged over ranks: "
        "please report it; not so at ZeRO 0 with experts that DeepSpeed itself spreads, where it "
        "takes a mean of norms",
    )
    FIRST_LOSS = (
        "loss of the first step",
        "MoE layers agree, so it is what stands beside them: a balance loss of the gate",
    )
    CURVE = (
        "losses of later steps",
        "the first step agrees, gradients too, so it is what steps do: the optimizer, clipping, "
        "experts that move or are copied; more so if the difference begins at one step",
    )

    def __init__(self, words: str, cause: str) -> None:
        self.words, self.cause = words, cause


KINDS = {Kind.DENSE: "dense weights", Kind.GATE: "gates", Kind.EXPERT: "experts"}

SAME = 1e-10
"""Of weights, which are equal: a GPU adds their sketches in any order."""
MOST_TIES = 0.01
"""Share of a layer's choices that may be ties."""
NEGLIGIBLE = 1e-3
"""Gradients below this share of the median are held against it: they are rounding only."""


@dataclass(frozen=True)
class Compared:
    """One thing that both runs have.

    Attributes:
        stage: what it is.
        name: of the layer or parameter, and of the kind of the latter.
        error: norm of the difference over that of the run that is off.
        tolerance: up to which it is rounding.
        factor: on is about so many times off; None where it is not a multiple.
    """

    stage: Stage
    name: str
    error: float
    tolerance: float
    factor: float | None = None
    kind: Kind | None = None

    @property
    def is_equal(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, eq=False)
class Comparison:
    """Of both runs.

    Attributes:
        off_I: loss of each step, mean over ranks.
        on_I: likewise.
        compared: in the order of the stages.
        num_ties: choices between experts of equal scores that fell differently.
        uncompared: what one of the runs does not have or show, for a person.
    """

    off_I: np.ndarray
    on_I: np.ndarray
    compared: tuple[Compared, ...]
    num_ties: int
    uncompared: tuple[str, ...] = field(default=())

    @property
    def first(self) -> Compared | None:
        """That differs; of parameters, the worst."""
        wrong = [each for each in self.compared if not each.is_equal]
        if not wrong or wrong[0].stage is not Stage.GRADIENTS:
            return wrong[0] if wrong else None
        return max((each for each in wrong if each.stage is Stage.GRADIENTS), key=_error)

    @property
    def worst(self) -> Iterator[tuple[str, int, Compared]]:
        """Of each stage, or kind of gradient, what it is, how many were compared, and the worst."""
        for stage in Stage:
            for kind in (None, *Kind):
                of = [each for each in self.compared if (each.stage, each.kind) == (stage, kind)]
                if of:
                    words = stage.words + ("" if kind is None else f" of {KINDS[kind]}")
                    yield words, len(of), max(of, key=_error)


def _error(compared: Compared) -> float:
    return compared.error


def compare(
    off: Sequence[RankRecord], on: Sequence[RankRecord], tolerances: Tolerances
) -> Comparison:
    """Hold one run against the other.

    Args:
        off: of each rank.
        on: likewise, as many.
        tolerances: what is rounding.
    """
    layers = _Layers(off, on, tolerances.first_step)
    of_layers = list(layers.compared())
    tolerance = layers.tolerance  # which ties have widened
    only = {name for r in off for name in r.weights} ^ {name for r in on for name in r.weights}
    off_I, on_I = _losses(off), _losses(on)
    return Comparison(
        off_I,
        on_I,
        (
            *_weights(off, on),
            *of_layers,
            *(each for each in _gradients(off, on, tolerance) if each.name not in only),
            *_norm(off, on, tolerance),
            *_curve(off_I, on_I, tolerances._replace(first_step=tolerance)),
        ),
        layers.num_ties,
        (*(f"{name}, which one run has" for name in sorted(only)), *_unseen(off)),
    )


def _norm(
    off: Sequence[RankRecord], on: Sequence[RankRecord], tolerance: float
) -> Iterator[Compared]:
    """Of the first step, where every rank is told it."""
    if all(len(record.norms_I) for record in (*off, *on)):
        norms = [record.norms_I for record in off], [record.norms_I for record in on]
        yield _held(Stage.NORM, "step 1", *norms, tolerance=tolerance)


def _curve(off_I: np.ndarray, on_I: np.ndarray, tolerances: Tolerances) -> Iterator[Compared]:
    """Of each step; the first by itself."""
    for i, (off, on) in enumerate(zip(off_I.tolist(), on_I.tolist())):
        error = abs(on - off) / max(abs(off), 1e-30)
        stage = Stage.CURVE if i else Stage.FIRST_LOSS
        yield Compared(
            stage, f"step {i + 1}", error, tolerances.curve if i else tolerances.first_step
        )


def _unseen(ranks: Sequence[RankRecord]) -> Iterator[str]:
    """What a host does not show."""
    for kind, words in KINDS.items():
        if not any(record.gradients[kind] for record in ranks):
            yield f"gradients of {words}, which are frozen, or which the host keeps to itself"


def _weights(off: Sequence[RankRecord], on: Sequence[RankRecord]) -> Iterator[Compared]:
    """Of each parameter, on the ranks that have it in both runs."""
    for name in dict.fromkeys(name for record in off for name in record.weights):
        pairs = [
            (a.weights[name], b.weights[name])
            for a, b in zip(off, on)
            if name in a.weights and name in b.weights
        ]
        if pairs:
            yield _held(Stage.WEIGHTS, name, *zip(*pairs), tolerance=SAME)


class _Layers:
    """The layers in turn. A tie lets what comes behind it differ by more than rounding.

    Attributes:
        tolerance: of what comes next.
        num_ties: so far.
    """

    def __init__(
        self, off: Sequence[RankRecord], on: Sequence[RankRecord], tolerance: float
    ) -> None:
        self._pairs, self.tolerance, self.num_ties = list(zip(off, on)), tolerance, 0

    def compared(self) -> Iterator[Compared]:
        for name in dict.fromkeys(name for record, _ in self._pairs for name in record.layers):
            pairs = [
                (off.layers[name], on.layers[name])
                for off, on in self._pairs
                if name in off.layers and name in on.layers
            ]
            yield from self._of_layer(name, pairs)

    def _of_layer(
        self, name: str, pairs: Sequence[tuple[LayerSeen, LayerSeen]]
    ) -> Iterator[Compared]:
        yield from self._of(Stage.INPUT, name, [(off.input, on.input) for off, on in pairs])
        choices = list(
            self._of(Stage.CHOICES, name, [(off.choices, on.choices) for off, on in pairs])
        )
        sizes = list(
            self._of(Stage.SCORES, name, [(off.score_sizes, on.score_sizes) for off, on in pairs])
        )
        flipped = _flipped(pairs)
        is_tied = 0 < flipped <= MOST_TIES and all(each.is_equal for each in sizes)
        if is_tied:
            self.num_ties += max(1, round(flipped * _num_choices(pairs)))
            self.tolerance += 4 * flipped**0.5
        else:
            yield from choices
            yield from self._of(Stage.SCORES, name, [(off.scores, on.scores) for off, on in pairs])
        yield from self._of(Stage.OUTPUT, name, [(off.output, on.output) for off, on in pairs])

    def _of(
        self,
        stage: Stage,
        name: str,
        pairs: Sequence[tuple[np.ndarray | None, np.ndarray | None]],
    ) -> Iterator[Compared]:
        shown = [(off, on) for off, on in pairs if off is not None and on is not None]
        if shown:
            off, on = zip(*shown)
            yield _held(stage, name, off, on, tolerance=self.tolerance)


def _flipped(pairs: Sequence[tuple[LayerSeen, LayerSeen]]) -> float:
    """Share of the choices that fell on another expert: each takes a one away and sets one."""
    squares = [
        float(((on.choices - off.choices) ** 2).sum())
        for off, on in pairs
        if off.choices is not None and on.choices is not None
    ]
    return sum(squares) / 2 / max(1, _num_choices(pairs))


def _num_choices(pairs: Sequence[tuple[LayerSeen, LayerSeen]]) -> int:
    return sum(int(off.num_choices) for off, _ in pairs if off.num_choices is not None)


def _held(
    stage: Stage,
    name: str,
    off: Sequence[np.ndarray],
    on: Sequence[np.ndarray],
    *,
    tolerance: float,
    least: float = 0.0,
    kind: Kind | None = None,
) -> Compared:
    """One thing of all ranks."""
    a, b = np.concatenate(off), np.concatenate(on)
    difference, size = np.linalg.norm(b - a), np.linalg.norm(a)
    if difference == 0.0:
        return Compared(stage, name, 0.0, tolerance, kind=kind)
    factor = float(a @ b / (a @ a)) if size else 0.0
    is_multiple = bool(size) and np.linalg.norm(b - factor * a) < 0.05 * difference
    error = float(difference) / (max(float(size), least) or float(difference))
    return Compared(stage, name, error, tolerance, factor if is_multiple else None, kind)


def _gradients(
    off: Sequence[RankRecord], on: Sequence[RankRecord], tolerance: float
) -> Iterator[Compared]:
    """Of each parameter, summed over the ranks that have some of it; not of kinds that the run that
    is off does not show."""
    sums = {
        kind: (_summed([r.gradients[kind] for r in off]), _summed([r.gradients[kind] for r in on]))
        for kind in Kind
    }
    norms = [float(np.linalg.norm(total)) for a, _ in sums.values() for total in a.values()]
    least = NEGLIGIBLE * float(np.median(norms)) if norms else 0.0
    zeros = np.zeros(SIZE)
    for kind, (of_off, of_on) in sums.items():
        for name in dict.fromkeys((*of_off, *of_on)) if of_off else ():
            yield _held(
                Stage.GRADIENTS,
                name,
                [of_off.get(name, zeros)],
                [of_on.get(name, zeros)],
                tolerance=tolerance,
                least=least,
                kind=kind,
            )


def _summed(ranks: Sequence[Sketches]) -> Mapping[str, np.ndarray]:
    totals: dict[str, np.ndarray] = {}
    for sketches in ranks:
        for name, sketch in sketches.items():
            totals[name] = totals[name] + sketch if name in totals else sketch
    return totals


def _losses(ranks: Sequence[RankRecord]) -> np.ndarray:
    """Mean over the ranks that see one."""
    seen = [record.losses_I for record in ranks if len(record.losses_I)]
    return np.mean(seen, axis=0) if seen else np.zeros(0)
