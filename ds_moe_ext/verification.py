# SPDX-License-Identifier: Apache-2.0
"""Two runs held against each other: ``ds-moe-ext verify``.

The command gives the ranks of each run a ``Trial``, in an environment variable: what to do.
Each rank leaves a ``RankRecord``, in which a tensor is 64 numbers (``sketch``): neither run keeps
its tensors. ``compare`` holds what one run computes against the other in the order in which it came
to be, so that the first difference is the cause of the rest. Shape letters: I steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # the command does without torch
    from torch import Tensor


class Tolerances(NamedTuple):
    """Relative differences that rounding makes."""

    first_step: float  # of all that a step computes from equal weights and batches
    curve: float  # of losses behind that, which part by flips of choices


class Precision(Enum):
    """In which type both runs compute."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    AS_IS = "as-is"

    def tolerances(self, first_step: float | None = None) -> Tolerances:
        """By measurement; or around what a user lets pass in the first step."""
        known = _TOLERANCES[self]
        if first_step is None:
            return known
        return Tolerances(first_step, max(known.curve, 10 * first_step))


_TOLERANCES = {
    Precision.FLOAT32: Tolerances(1e-4, 1e-3),
    Precision.FLOAT64: Tolerances(1e-10, 1e-6),
    Precision.AS_IS: Tolerances(5e-2, 2e-2),
}


@dataclass(frozen=True)
class Trial:
    """One of the two runs."""

    folder: str  # absolute, where each rank leaves its record
    is_on: bool  # the block is as it is; else the host runs without us
    num_steps: int  # of the optimizer; all ranks leave behind the last
    precision: Precision  # of both runs
    seed: int  # of all generators, as the process starts and as training does

    def to_text(self) -> str:
        return json.dumps({**asdict(self), "precision": self.precision.value})

    @classmethod
    def from_text(cls, text: str) -> Trial:
        reported = json.loads(text)
        return cls(**{**reported, "precision": Precision(reported["precision"])})

    def file_of(self, rank: int) -> Path:
        """Where a rank leaves its record."""
        return Path(self.folder) / f"rank_{rank}.npz"


# What a rank saw.

SIZE = 64
"""Numbers of a sketch."""

Sketches = Mapping[str, np.ndarray]
"""By name, float64 ``[64]`` each, as ``sketch`` makes them."""


class Kind(Enum):
    """What a parameter is of."""

    DENSE = "dense"
    GATE = "gates"
    EXPERT = "experts"


@dataclass(frozen=True, eq=False)
class LayerSeen:
    """The first pass through an MoE layer; None where the host does not show it.

    Shape letters: T tokens, K choices, E experts, D model width.
    """

    input: np.ndarray | None = None  # sketch of the rows ``[T, D]``
    choices: np.ndarray | None = None  # of the map of chosen experts ``[T, E]``, ones and zeros
    # of the scores ``[T, K]``, largest first, whoever they are of
    score_sizes: np.ndarray | None = None
    scores: np.ndarray | None = None  # of the scores ``[T, E]``, zero where not chosen
    output: np.ndarray | None = None  # of the rows ``[T, D]``
    num_choices: np.ndarray | None = None  # ``T x K``, 0-dim


@dataclass(frozen=True, eq=False)
class RankRecord:
    """Of one rank."""

    # mean over the micro-batches of each step; none on a rank that sees no loss
    losses_I: np.ndarray
    # of all reduced gradients, as the host shows; of the first step alone, or none
    norms_I: np.ndarray
    num_steps: int  # of the optimizer
    num_ranks: int  # of the run
    weights: Sketches  # dense weights before the first step
    layers: Mapping[str, LayerSeen]  # MoE layers, in the order in which they ran
    gradients: Mapping[Kind, Sketches]  # of the first step, of this rank's rows, by kind

    def write(self, path: Path) -> None:
        """Leave it in a file; the folder is there."""
        arrays = {"losses": self.losses_I, "norms": self.norms_I}
        arrays |= {"num_steps": np.array(self.num_steps), "num_ranks": np.array(self.num_ranks)}
        arrays |= {f"weight|{name}": array for name, array in self.weights.items()}
        for name, seen in self.layers.items():
            found = {field: array for field, array in vars(seen).items() if array is not None}
            arrays |= {f"layer|{name}|{field}": array for field, array in found.items()}
        for kind, sketches in self.gradients.items():
            arrays |= {f"{kind.value}|{name}": array for name, array in sketches.items()}
        with path.open("wb") as file:  # of names with any character
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        with np.load(path) as stored:
            arrays = {tuple(key.split("|")): stored[key] for key in stored.files}
        seen: dict[str, dict[str, np.ndarray]] = {}
        for key, array in arrays.items():
            if len(key) > 2:
                seen.setdefault(key[1], {})[key[2]] = array
        return cls(
            losses_I=arrays["losses",],
            norms_I=arrays["norms",],
            num_steps=int(arrays["num_steps",]),
            num_ranks=int(arrays["num_ranks",]),
            weights=_of("weight", arrays),
            layers={name: LayerSeen(**fields) for name, fields in seen.items()},
            gradients={kind: _of(kind.value, arrays) for kind in Kind},
        )


def _of(word: str, arrays: Mapping[tuple[str, ...], np.ndarray]) -> Sketches:
    return {key[1]: array for key, array in arrays.items() if key[0] == word and len(key) == 2}


# A tensor in 64 numbers: a count sketch. Each element is added, with a sign, to one of 64 sums; sum
# and sign follow from its index alone. So the sketch of a sum is the sum of the sketches, and the
# norm of a difference of two sketches is about that of the difference of the tensors: within a
# tenth, as a rule. What is equal has equal sketches.

CHUNK = 1 << 22  # elements at once, for the sake of memory


def sketch(values: Tensor) -> Tensor:
    """Of a dense tensor of any shape: float64 ``[64]``, on its device."""
    import torch  # which the command does without

    flat = values.detach().reshape(-1)
    total = torch.zeros(SIZE, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        index = torch.arange(start, start + part.numel(), device=flat.device)
        _add(total, index, part)
    return total


def sketch_at(index: Tensor, values: Tensor) -> Tensor:
    """Of a tensor that is zero but at these places.

    Args:
        index: int64, places in the flat tensor.
        values: as many.
    """
    import torch  # which the command does without

    total = torch.zeros(SIZE, dtype=torch.float64, device=values.device)
    _add(total, index.reshape(-1), values.detach().reshape(-1))
    return total


def _add(total: Tensor, index: Tensor, values: Tensor) -> None:
    mixed = (index * 2654435761) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    signs = 1.0 - 2.0 * ((mixed >> 25) & 1).double()
    total.index_add_(0, mixed >> 26, values.double() * signs)


# The comparison.


class Stage(Enum):
    """What is compared, in the order in which a step makes it; with the likely cause of a
    difference that nothing before explains."""

    WEIGHTS = (
        "weights at start",
        "the script initialises weights without a seed, or loads different ones; call "
        "torch.manual_seed before the model is made",
    )
    INPUT = (
        "input of MoE layers",
        "the batches differ, or something before this layer is random: let the script seed its "
        "data order, and set dropout to 0",
    )
    CHOICES = (
        "chosen experts",
        "the gate chooses other experts than the host's, beyond ties: a gate of the block "
        "(`gate`), or a capacity that drops choices",
    )
    SCORES = (
        "scores",
        "the gate weights differ from the host's: a gate of the block (`gate`) that "
        "normalises or scales its scores in another way",
    )
    OUTPUT = (
        "output of MoE layers",
        "the experts compute something else from the same tokens: a function given to "
        "register_experts that is not what the class computes (its activation, the order of "
        "its weights), scores applied twice or not at all, or tokens that the block drops "
        "(`capacity_factor`) or changes (`hooks`)",
    )
    GRADIENTS = (
        "gradients",
        "the forward pass agrees, so the cause is in backward: a wrong gradient of an "
        "expert's function, or a bug in ds_moe_ext: please report it with this name",
    )
    NORM = (
        "norm of the reduced gradients",
        "each rank's gradients agree, so the cause is the reduction over ranks: please report "
        "it (except at ZeRO 0 with DeepSpeed's own expert parallelism, which averages norms)",
    )
    FIRST_LOSS = (
        "loss of the first step",
        "MoE layers agree, so the cause is outside them: a balance loss of the gate",
    )
    CURVE = (
        "losses of later steps",
        "the first step and its gradients agree, so the cause is the update: the optimizer, "
        "clipping, moved experts or replicas, especially if the difference begins at one step",
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
    """One thing that both runs have."""

    stage: Stage  # what it is
    name: str  # of the layer or parameter, and of the kind of the latter
    error: float  # norm of the difference over that of the run that is off
    tolerance: float  # up to which it is rounding
    factor: float | None = None  # on is about so many times off; None where it is not a multiple
    kind: Kind | None = None

    @property
    def is_equal(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, eq=False)
class Comparison:
    """Of both runs."""

    off_I: np.ndarray  # loss of each step, mean over ranks
    on_I: np.ndarray  # likewise
    compared: tuple[Compared, ...]  # in the order of the stages
    num_ties: int  # choices between experts of equal scores that fell differently
    # what one of the runs does not have or show, for a person
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
    """Hold one run against the other."""
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
    """Of the first step, where every rank is given it."""
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
            yield f"gradients of {words}, which are frozen, or which the host does not expose"


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
        def held(stage: Stage, field: str) -> list[Compared]:
            shown = _shown(pairs, field)
            tolerance = self.tolerance
            return [_held(stage, name, *zip(*shown), tolerance=tolerance)] if shown else []

        yield from held(Stage.INPUT, "input")
        choices, sizes = held(Stage.CHOICES, "choices"), held(Stage.SCORES, "score_sizes")
        num_choices = sum(int(off.num_choices) for off, _ in pairs if off.num_choices is not None)
        # Each choice that fell on another expert takes a one away and sets one.
        squares = [float(((on - off) ** 2).sum()) for off, on in _shown(pairs, "choices")]
        flipped = sum(squares) / 2 / max(1, num_choices)
        if 0 < flipped <= MOST_TIES and all(each.is_equal for each in sizes):
            self.num_ties += max(1, round(flipped * num_choices))
            self.tolerance += 4 * flipped**0.5
        else:
            yield from choices
            yield from held(Stage.SCORES, "scores")
        yield from held(Stage.OUTPUT, "output")


def _shown(
    pairs: Sequence[tuple[LayerSeen, LayerSeen]], field: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of what both runs show of a layer."""
    found = [(vars(off)[field], vars(on)[field]) for off, on in pairs]
    return [(off, on) for off, on in found if off is not None and on is not None]


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
