# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: one record, and its form as JSON; ``page`` draws it.

Shape letters: I recorded steps, L layers, E experts, C EP ranks.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from ds_moe_ext import older_names
from ds_moe_ext.files.documents import parsed
from ds_moe_ext.planning.loads import balance_L
from ds_moe_ext.strict import MOST, NOT_A_KEY, check_object, read_record

# Kinds of numbers, each with the rule that a file is read by (``strict.read_record``). They end at
# the largest integer of an array, so that sums of a few stay finite.


def _at_least(least: float, kind: type = float) -> Callable[[Any, str], Any]:
    rule = f"{'an integer' if kind is int else 'a number'} from {least:g} to {MOST}"

    def read(value: Any, where: str) -> Any:
        if type(value) not in (int, kind) or not least <= value <= MOST:
            raise ValueError(f"{where} is {value!r}, but must be {rule}")
        return kind(value)

    return read


Read = Callable[[Any, str], np.ndarray]


def _integers(nested: Any, where: str) -> np.ndarray:
    value = _array(nested, where)
    if value.size and not np.issubdtype(value.dtype, np.signedinteger):
        raise ValueError(f"{where} has entries that are not 64-bit integers")
    _refuse(value, value < 0, where, f"an integer from 0 to {MOST}")
    if value.sum(dtype=np.float64) >= MOST:
        raise ValueError(f"{where} adds up to {MOST} or more")
    return value.astype(np.int64)


def _numbers(*, may_lack: bool = False, may_be_any: bool = False) -> Read:
    """Null and NaN stand for what is not known, where numbers ``may_lack``."""

    def read(nested: Any, where: str) -> np.ndarray:
        value = _array(nested, where)
        if value.dtype == object:
            flat = [math.nan if each is None else each for each in value.flat]
            if any(type(each) not in (int, float) for each in flat):
                raise ValueError(f"{where} has entries that are not numbers")
            value = np.array(flat, dtype=np.float64).reshape(value.shape)
        if not np.issubdtype(value.dtype, np.number):
            raise ValueError(f"{where} has entries that are not numbers")
        is_right = (value >= 0) & (value <= MOST) | may_be_any
        rule = f"a number from 0 to {MOST}{', or null' if may_lack else ''}"
        _refuse(value, ~(is_right | (np.isnan(value) & may_lack)), where, rule)
        return value.astype(np.float64)

    return read


def _array(nested: Any, where: str) -> np.ndarray:
    if not isinstance(nested, list):
        raise ValueError(f"{where} is {nested!r}, but must be a list")
    try:
        return np.array(nested)
    except ValueError as error:
        raise ValueError(f"{where} has lists of different lengths") from error


def _refuse(value: np.ndarray, is_wrong: np.ndarray, where: str, rule: str) -> None:
    if is_wrong.any():
        at = tuple(np.argwhere(is_wrong)[0].tolist())
        index = "".join(f"[{place}]" for place in at)
        raise ValueError(f"{where}{index} is {value[at]}, but must be {rule}")


Count = Annotated[int, _at_least(0, int)]
Positive = Annotated[int, _at_least(1, int)]
Amount = Annotated[float, _at_least(0)]  # seconds, or a ratio
Moment = Annotated[float, _at_least(-float(MOST))]  # seconds from a start
Counts = Annotated[np.ndarray, _integers]
Amounts = Annotated[np.ndarray, _numbers()]
KnownAmounts = Annotated[np.ndarray, _numbers(may_lack=True)]
Losses = Annotated[np.ndarray, _numbers(may_lack=True, may_be_any=True)]

# The record.


@dataclass(frozen=True)
class LayerRecord:
    """One replaced MoE layer."""

    name: str  # dotted module name in the user's model
    kind: str  # what was found there, as MixtralExperts or deepspeed.moe
    num_experts: Count  # experts E of the layer
    top_k: Count  # choices a token, 0 when the host's gate did not say before the first step
    owner_E: tuple[Count, ...]  # EP rank that owns each expert, at the end of the run
    expert_bytes: Count  # bytes of expert weights on this rank


@dataclass(frozen=True)
class TracedTask:
    """One task of the traced step on this rank; seconds from the start of the step.

    ``bound_by`` is the position in the timeline of the task that it waited for last; None if there
    was none, or that is not known.
    """

    name: str  # gate, order, dispatch, expert, combine, restore, ...
    stream: str
    phase: str  # "forward" or "backward"
    layer: str
    chunk: str  # finest chunks covered, as "0" or "0-2"
    start_s: Moment
    end_s: Moment
    bound_by: Count | None = None

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TracedRecord:
    """A step whose tasks were kept."""

    timeline: tuple[TracedTask, ...] = ()  # they; empty when nothing was traced
    # how long the step was, the host's own work and its optimizer's included; 0 if that is not
    # known
    traced_s: Amount = 0.0


@dataclass(frozen=True)
class Move:
    """Experts of one layer that changed their owners between two steps."""

    # the first with the new owners; where records are thinned, the last recorded before
    step: Count
    layer: Count  # its index among the layers of the run
    num_experts: Count


@dataclass(frozen=True, eq=False)
class AddedRecord:
    """Replicas that were made after the gate, as rows were known."""

    # of each expert, in any pass of the step, int64 [I, L, E], padded with zeros
    replicas_ILE: Counts
    num_passes: Count  # of the last step; each may have made others
    # EP ranks with such a replica of each expert in that step, by layer and expert, each with the
    # number of passes that had it
    to: tuple[tuple[tuple[tuple[Count, Count], ...], ...], ...]


@dataclass(frozen=True, eq=False)
class PlacementRecord:
    """Where experts were, in a run that copied or moved some."""

    # replicas of each expert beyond its owner, as planned before the step, int64 [I, L, E], padded
    # with zeros
    replicas_ILE: Counts
    # rows that each EP rank would have computed, had every expert computed at its owner of that
    # step only, int64 [I, L, C]
    owner_ep_rank_rows_ILC: Counts
    # changes of owners, in the order of steps; in thinned records those up to the next recorded
    # step together
    moves: tuple[Move, ...]
    last_step: Count  # the last step, recorded or not
    # EP ranks with a replica of each expert beside its owner in that step, by layer and expert, as
    # planned
    copied_to: tuple[tuple[tuple[Count, ...], ...], ...]
    # replicas that were not planned; None if there were none, or that is not known
    added: AddedRecord | None = None

    @property
    def all_replicas_ILE(self) -> np.ndarray:
        """Planned and added, int64 ``[I, L, E]``."""
        return (
            self.replicas_ILE if self.added is None else self.replicas_ILE + self.added.replicas_ILE
        )


@dataclass(frozen=True, eq=False)
class LooksRecord:
    """What was predicted of rows and where they went, in the steps and layers looked at."""

    # balance of the rows that the plan was made for, by its own share, float [I, L]; nan where it
    # was made for none, or not looked at
    predicted_IL: KnownAmounts
    # balance of the rows that came, with the same replicas but by the paper's own rule; nan where
    # no other was followed, or not looked at
    by_paper_IL: KnownAmounts
    # rows that another EP rank computed than they came from; nan where not looked at
    left_IL: KnownAmounts
    crossed_IL: KnownAmounts  # and one on another node
    num_nodes: Positive  # that the EP ranks are on


@dataclass(frozen=True)
class TermRecord:
    """One term of the strategy's model of costs, in the steps that were checked."""

    name: str  # for a person
    predicted_s: Amount  # seconds a layer and step by the model, mean over layers and steps
    found_s: Amount  # seconds that it took
    error: Amount  # mean of the relative errors
    steps: tuple[Count, ...] = ()  # that were checked; empty if that is not known


@dataclass(frozen=True)
class ChoiceRecord:
    """A strategy that another one chose."""

    step: Count  # from which on it planned
    name: str  # of it
    reported: str  # why
    # seconds of a step under each candidate, as they were expected then, by name; empty if that is
    # not known
    expected_s: dict[str, Amount] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PaceRecord:
    """How a run went on: a point for each step at which the ranks exchanged reports, thinned
    evenly.

    Shape letter: G points. What is not known is nan."""

    steps_G: tuple[Count, ...]  # optimizer step that had just ended
    step_s_G: KnownAmounts  # median seconds of a step since the point before, on the slowest rank
    tokens_per_s_G: KnownAmounts  # of all ranks together, by step_s_G and the tokens of that step
    loss_G: Losses  # of that step, mean over micro-batches and ranks, where the host hands it over
    # seconds of the last timed step in which exchanges of rows went on, or replicas of experts were
    # waited for, and nothing was computed in the layers; mean over the ranks
    exposed_s_G: KnownAmounts
    # of that step's exchanges of rows: until the last of the ranks that exchange had come; mean
    # over the ranks
    waited_s_G: KnownAmounts
    sent_s_G: KnownAmounts  # and from then on: the rows were on their way
    allocated_G: KnownAmounts  # most bytes of device memory in tensors so far, on the fullest rank
    reserved_G: KnownAmounts  # most that torch's allocator held, likewise
    resident_G: KnownAmounts  # most bytes of a process in the host's memory, likewise


@dataclass(frozen=True)
class DeviceRecord:
    """What ranks computed on."""

    name: str  # "cpu", or the name of a GPU
    num_cores: Count  # of rank 0's machine


class BadScores(NamedTuple):
    """The first scores of a run that were no finite numbers."""

    step: Count  # in which
    layer: Count  # place of the first layer in it that had some
    rank: Count  # one that had them


@dataclass(frozen=True, eq=False)
class RanksRecord:
    """What each rank took and needed, of the ranks that run the same layers.

    Shape letters: R these ranks, K kinds of task. Times are means of the timed steps; exchanges are
    those of the last timed step before each point of ``pace``, thinned or not."""

    # numbers of the ranks in the world, ascending: under pipelines a stage has some
    ranks_R: tuple[Count, ...]
    allocated_R: Counts  # most bytes of device memory in tensors so far, int64; 0 without a device
    reserved_R: Counts  # most that torch's allocator held, likewise
    resident_R: Counts  # most bytes of the process in the host's memory, int64
    kinds_K: tuple[str, ...]  # phase:kind, as in RunRecord.seconds_by_kind
    seconds_KR: Amounts  # seconds a step in each kind of task, float [K, R]; waiting is in it
    exposed_s_R: Amounts  # seconds a step, as PaceRecord.exposed_s_G
    waited_s_R: Amounts  # likewise; a rank that waits little is one for which others wait
    sent_s_R: Amounts  # likewise
    num_last_R: Counts  # exchanges of rows to which the rank came last, int64
    num_exchanges: Count  # of each rank
    pace: PaceRecord  # the run over its steps
    # place of each among those that it exchanges rows with; empty if that is not known
    ep_rank_R: tuple[Count, ...] = ()
    device: DeviceRecord | None = None  # what they compute on; None if that is not known
    bad_scores: BadScores | None = None  # None where all were finite


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run up to now, as rank 0 saw it."""

    strategy: str  # JSON name of the strategy
    world_size: Positive  # ranks
    num_ep_ranks: Positive  # EP ranks C of the expert-parallel grid
    layers: tuple[LayerRecord, ...]  # the replaced layers, in model order
    steps_I: tuple[Count, ...]  # optimizer step of each recorded step
    # rows routed to each expert, int64 [I, L, E], summed over the senders; layers with fewer
    # experts than others are padded with zeros
    rows_ILE: Counts
    ep_rank_rows_ILC: Counts  # rows that each EP rank computed, int64 [I, L, C]
    # mean seconds a step that this rank spent in each kind of task, by phase:kind, over the steps
    # that were timed
    seconds_by_kind: dict[str, Amount]
    versions: dict[str, str]  # package versions
    # where experts were; None in a run that copied and moved none
    placements: PlacementRecord | None = None
    # how good the strategy's model of costs was, if it has one and was checked
    terms: tuple[TermRecord, ...] = ()
    # what was predicted of rows and where they went; None if that is not known
    looks: LooksRecord | None = None
    # which strategy planned from when on, where one chose between several
    choices: tuple[ChoiceRecord, ...] = ()
    # what each rank took and needed; None before they exchanged reports
    ranks: RanksRecord | None = None
    # one step, for the drawing
    traced: TracedRecord = field(default=TracedRecord(), metadata=NOT_A_KEY)

    @property
    def timeline(self) -> tuple[TracedTask, ...]:
        """The tasks of the traced step."""
        return self.traced.timeline

    @property
    def traced_s(self) -> float:
        return self.traced.traced_s

    def balance_IL(self) -> np.ndarray:
        """Rows of the busiest EP rank over the mean of those that own experts, float
        ``[I, L]``; 1 is perfect."""
        return balance_L(self._at_owners(self.ep_rank_rows_ILC))

    def _at_owners(self, ep_rank_rows_ILC: np.ndarray) -> np.ndarray:
        """Without the EP ranks that own no expert of any layer."""
        owners = sorted({ep_rank for layer in self.layers for ep_rank in layer.owner_E})
        return ep_rank_rows_ILC[..., owners] if owners else ep_rank_rows_ILC

    def balance_by_layer(self) -> dict[str, float]:
        """Mean over the recorded steps of ``balance_IL``, by layer name."""
        if not self.steps_I:
            return {layer.name: 1.0 for layer in self.layers}
        mean_L = self.balance_IL().mean(axis=0)
        return {layer.name: float(mean) for layer, mean in zip(self.layers, mean_L)}

    def owner_balance_IL(self) -> np.ndarray:
        """``balance_IL`` had every expert computed at its owner only, float ``[I, L]``."""
        if self.placements is None:
            return self.balance_IL()
        return balance_L(self._at_owners(self.placements.owner_ep_rank_rows_ILC))

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        data |= {**data.pop("traced"), "balance_by_layer": self.balance_by_layer()}
        return json.dumps(older_names.on_disk(data), default=_listed)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what ``to_json`` wrote, or that of an earlier version.

        Raises:
            ValueError: a value that no run has, with its key.
        """
        document = parsed(text)
        check_object(_FILE, document)
        data = older_names.from_disk(document)
        data.pop("balance_by_layer", None)
        traced = {name: data.pop(name) for name in ("timeline", "traced_s") if name in data}
        record = dataclasses.replace(
            read_record(cls, _with_memory(data), _FILE),
            traced=read_record(TracedRecord, traced, _FILE),
        )
        return _checked(record)


_FILE = "report"  # in errors


def _with_memory(data: dict[str, Any]) -> dict[str, Any]:
    """Earlier versions did not report what memory was needed over the steps."""
    match data:
        case {"ranks": {"pace": {"steps_G": list(steps)}}}:
            names = "allocated_G", "reserved_G", "resident_G"
            unknown = dict.fromkeys(names, [None] * len(steps))
            ranks = data["ranks"]
            return {**data, "ranks": {**ranks, "pace": {**unknown, **ranks["pace"]}}}
    return data


def _checked(record: RunRecord) -> RunRecord:
    """With tables of the shapes that the run has, which lists without entries do not show."""
    ranks, placements, layers = record.ranks, record.placements, record.layers
    sizes = {"I": len(record.steps_I), "L": len(layers), "C": record.num_ep_ranks}
    sizes |= {"E": max((layer.num_experts for layer in layers), default=0)}
    _check_ascending("report.steps_I", record.steps_I)
    for at, layer in enumerate(layers):
        _check_length(f"report.layers[{at}].home_E", layer.owner_E, layer.num_experts)
        _check_below(f"report.layers[{at}].home_E", layer.owner_E, record.num_ep_ranks)
    _check_traced_tasks("report.timeline", record.timeline)
    if placements is not None:
        _check_below("report.placements.moves", [m.layer for m in placements.moves], len(layers))
        _check_replicas("report.placements.copied_to", placements.copied_to, record)
    if placements is not None and placements.added is not None:
        to = [[[ep_rank for ep_rank, _ in late] for late in of] for of in placements.added.to]
        _check_replicas("report.placements.added.to", to, record)
    if ranks is not None:
        sizes |= {"R": len(ranks.ranks_R), "K": len(ranks.kinds_K), "G": len(ranks.pace.steps_G)}
        _check_ascending("report.ranks.ranks_R", ranks.ranks_R)
        _check_ascending("report.ranks.pace.steps_G", ranks.pace.steps_G)
        if ranks.ep_rank_R:
            _check_length("report.ranks.ep_rank_R", ranks.ep_rank_R, sizes["R"])
        bad = ranks.bad_scores
        if bad is not None and bad.layer >= len(layers):
            raise ValueError(f"report.ranks.bad_scores[1] names layer {bad.layer} of {len(layers)}")
    return _shaped(_FILE, record, sizes)


PartT = TypeVar("PartT")
_WITH_ARRAYS = (PlacementRecord, AddedRecord, LooksRecord, RanksRecord, PaceRecord)


def _shaped(where: str, part: PartT, sizes: Mapping[str, int]) -> PartT:
    """A record with its arrays in the shapes that their names end in, and the records in it."""
    changed: dict[str, Any] = {}
    for name, value in vars(part).items():
        key = f"{where}.{older_names.in_files(name)}"
        if isinstance(value, np.ndarray):
            shape = tuple(sizes[letter] for letter in name.rpartition("_")[2])
            if value.shape != shape and (value.size or 0 not in shape):
                raise ValueError(
                    f"{key} has shape {list(value.shape)}, but this run needs {list(shape)}"
                )
            changed |= {name: value.reshape(shape)}
        elif isinstance(value, _WITH_ARRAYS):
            changed |= {name: _shaped(key, value, sizes)}
    found: PartT = dataclasses.replace(part, **changed)  # type: ignore[type-var]
    return found


def _check_length(key: str, values: Sequence[Any], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{key} has {len(values)} entries, but must have {length}")


def _check_below(key: str, values: Sequence[int], number: int) -> None:
    for at, value in enumerate(values):
        if value >= number:
            raise ValueError(f"{key}[{at}] names {value}, but must be below {number}")


def _check_ascending(key: str, values: Sequence[int]) -> None:
    for at, (before, value) in enumerate(pairwise(values), start=1):
        if value <= before:
            raise ValueError(f"{key}[{at}] is {value}, but must be more than {before}, before it")


def _check_replicas(key: str, to: Sequence[Sequence[Sequence[int]]], record: RunRecord) -> None:
    """EP ranks by layer and expert."""
    _check_length(key, to, len(record.layers))
    for at, (layer, of_layer) in enumerate(zip(record.layers, to)):
        _check_length(f"{key}[{at}]", of_layer, layer.num_experts)
        for expert, ep_ranks in enumerate(of_layer):
            _check_below(f"{key}[{at}][{expert}]", ep_ranks, record.num_ep_ranks)


def _check_traced_tasks(key: str, traced_tasks: Sequence[TracedTask]) -> None:
    """A chain of tasks that waited for each other has an end."""
    ends: set[int] = set()  # of tasks whose chain has one
    for at, task in enumerate(traced_tasks):
        if task.end_s < task.start_s:
            raise ValueError(f"{key}[{at}].end_s is {task.end_s}, before start_s {task.start_s}")
        chain: dict[int, None] = {}
        by: int | None = at
        while by is not None and by not in ends:
            if by in chain or by >= len(traced_tasks):
                raise ValueError(
                    f"{key}[{[*chain][-1]}].bound_by is {by}, but must be a task of "
                    f"{len(traced_tasks)} that does not wait for this one"
                )
            chain |= {by: None}
            by = traced_tasks[by].bound_by
        ends |= chain.keys()


def _listed(array: np.ndarray) -> list[Any]:
    """For JSON, which knows no nan, and nothing infinite."""
    if np.issubdtype(array.dtype, np.floating):
        array = np.array([x if np.isfinite(x) else None for x in array.flat]).reshape(array.shape)
    listed: list[Any] = array.tolist()
    return listed
