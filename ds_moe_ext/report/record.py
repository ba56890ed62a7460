# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: one record, and its form as JSON; ``page`` draws it.

Shape letters: I recorded steps, L layers, E experts, C cells.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ds_moe_ext.load import balance_L


@dataclass(frozen=True)
class LayerRecord:
    """One replaced MoE layer.

    Attributes:
        name: dotted module name in the user's model.
        kind: what was found there, as ``MixtralExperts`` or ``deepspeed.moe``.
        num_experts: experts ``E`` of the layer.
        top_k: choices a token, 0 when the host's gate did not say before the first step.
        home_E: cell that is home to each expert, at the end of the run.
        expert_bytes: bytes of expert weights on this rank.
    """

    name: str
    kind: str
    num_experts: int
    top_k: int
    home_E: tuple[int, ...]
    expert_bytes: int


@dataclass(frozen=True)
class Span:
    """One task of the traced step on this rank; seconds from the start of the step.

    ``bound_by`` is the position in the timeline of the task that it waited for last; None if there
    was none, or that is not known.
    """

    name: str  # gate, order, dispatch, expert, combine, restore, ...
    lane: str
    phase: str  # "forward" or "backward"
    layer: str
    chunk: str  # finest chunks covered, as "0" or "0-2"
    start_s: float
    end_s: float
    bound_by: int | None = None


@dataclass(frozen=True)
class TracedRecord:
    """A step whose tasks were kept.

    Attributes:
        timeline: they; empty when nothing was traced.
        traced_s: how long the step was, the host's own work and its optimizer's included; 0 if that
            is not known.
    """

    timeline: tuple[Span, ...] = ()
    traced_s: float = 0.0


@dataclass(frozen=True)
class Move:
    """Experts of one layer that changed their homes between two steps."""

    step: int  # the first with the new homes; where records are thinned, the last recorded before
    layer: int  # its index among the layers of the run
    num_experts: int


@dataclass(frozen=True, eq=False)
class AddedRecord:
    """Copies that were made after the gate, as rows were known.

    Attributes:
        copies_ILE: of each expert, in any pass of the step, int64 ``[I, L, E]``, padded with zeros.
        num_passes: of the last step; each may have made others.
        to: cells with such a copy of each expert in that step, by layer and expert, each with the
            number of passes that had it.
    """

    copies_ILE: np.ndarray
    num_passes: int
    to: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]


@dataclass(frozen=True, eq=False)
class PlacementRecord:
    """Where experts were, in a run that copied or moved some.

    Attributes:
        copies_ILE: copies of each expert beyond its home, as planned before the step, int64
            ``[I, L, E]``, padded with zeros.
        home_cell_rows_ILC: rows that each cell would have computed, had every expert computed at
            its home of that step only, int64 ``[I, L, C]``.
        moves: changes of homes, in the order of steps; in thinned records those up to the next
            recorded step together.
        last_step: the last step, recorded or not.
        copied_to: cells with a copy of each expert beside its home in that step, by layer and
            expert, as planned.
        added: copies that were not planned; None if there were none, or that is not known.
    """

    copies_ILE: np.ndarray
    home_cell_rows_ILC: np.ndarray
    moves: tuple[Move, ...]
    last_step: int
    copied_to: tuple[tuple[tuple[int, ...], ...], ...]
    added: AddedRecord | None = None

    @property
    def all_copies_ILE(self) -> np.ndarray:
        """Planned and added, int64 ``[I, L, E]``."""
        return self.copies_ILE if self.added is None else self.copies_ILE + self.added.copies_ILE


@dataclass(frozen=True, eq=False)
class LooksRecord:
    """What was predicted of rows, and where they went, in the steps and layers that were looked at.

    Attributes:
        predicted_IL: balance of the rows that the plan was made for, by its own share, float ``[I,
            L]``; nan where it was made for none, or not looked at.
        by_paper_IL: balance of the rows that came, with the same copies but by the paper's own
            rule; nan where no other was followed, or not looked at.
        left_IL: rows that another cell computed than they came from; nan where not looked at.
        crossed_IL: and one on another node.
        num_nodes: that the cells are on.
    """

    predicted_IL: np.ndarray
    by_paper_IL: np.ndarray
    left_IL: np.ndarray
    crossed_IL: np.ndarray
    num_nodes: int


@dataclass(frozen=True)
class TermRecord:
    """One term of the strategy's model of costs, in the steps that were checked.

    Attributes:
        name: for a person.
        said_s: seconds a layer and step by the model, mean over layers and steps.
        found_s: seconds that it took.
        error: mean of the relative errors.
        steps: that were checked; empty if that is not known.
    """

    name: str
    said_s: float
    found_s: float
    error: float
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChoiceRecord:
    """A strategy that another one chose.

    Attributes:
        step: from which on it planned.
        name: of it.
        told: why.
        expected_s: seconds of a step under each candidate, as they were expected then, by name;
            empty if that is not known.
    """

    step: int
    name: str
    told: str
    expected_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PaceRecord:
    """How a run went on: a point for each step at which the ranks told each other, thinned evenly.

    Shape letter: G points. What is not known is nan.

    Attributes:
        steps_G: optimizer step that had just ended.
        step_s_G: median seconds of a step since the point before, on the slowest rank.
        tokens_per_s_G: of all ranks together, by ``step_s_G`` and the tokens of that step.
        loss_G: of that step, mean over micro-batches and ranks, where the host hands it over.
        exposed_s_G: seconds of the last timed step in which exchanges of rows went on, or copies of
            experts were waited for, and nothing was computed in the layers; mean over the ranks.
        waited_s_G: of that step's exchanges of rows: until the last of the ranks that exchange had
            come; mean over the ranks.
        sent_s_G: and from then on: the rows were on their way.
        allocated_G: most bytes of device memory in tensors so far, on the fullest rank.
        reserved_G: most that torch's allocator held, likewise.
        resident_G: most bytes of a process in the host's memory, likewise.
    """

    steps_G: tuple[int, ...]
    step_s_G: np.ndarray
    tokens_per_s_G: np.ndarray
    loss_G: np.ndarray
    exposed_s_G: np.ndarray
    waited_s_G: np.ndarray
    sent_s_G: np.ndarray
    allocated_G: np.ndarray
    reserved_G: np.ndarray
    resident_G: np.ndarray


@dataclass(frozen=True)
class DeviceRecord:
    """What ranks computed on.

    Attributes:
        name: "cpu", or the name of a GPU.
        num_cores: of rank 0's machine.
    """

    name: str
    num_cores: int


class BadScores(NamedTuple):
    """The first scores of a run that were no finite numbers.

    Attributes:
        step: in which.
        layer: place of the first layer in it that had some.
        rank: one that had them.
    """

    step: int
    layer: int
    rank: int


@dataclass(frozen=True, eq=False)
class RanksRecord:
    """What each rank took and needed, of the ranks that run the same layers.

    Shape letters: R these ranks, K kinds of task. Times are means of the timed steps; exchanges are
    those of the last timed step before each point of ``pace``, thinned or not.

    Attributes:
        ranks_R: numbers of the ranks in the world, ascending: under pipelines a stage has some.
        allocated_R: most bytes of device memory in tensors so far, int64; 0 without a device.
        reserved_R: most that torch's allocator held, likewise.
        resident_R: most bytes of the process in the host's memory, int64.
        kinds_K: ``phase:kind``, as in ``RunRecord.seconds_by_kind``.
        seconds_KR: seconds a step in each kind of task, float ``[K, R]``; waiting is in it.
        exposed_s_R: seconds a step, as ``PaceRecord.exposed_s_G``.
        waited_s_R: likewise; a rank that waits little is one for which others wait.
        sent_s_R: likewise.
        num_last_R: exchanges of rows to which the rank came last, int64.
        num_exchanges: of each rank.
        pace: the run over its steps.
        ep_rank_R: place of each among those that it exchanges rows with; empty if that is not
            known.
        device: what they compute on; None if that is not known.
        bad_scores: None where all were finite.
    """

    ranks_R: tuple[int, ...]
    allocated_R: np.ndarray
    reserved_R: np.ndarray
    resident_R: np.ndarray
    kinds_K: tuple[str, ...]
    seconds_KR: np.ndarray
    exposed_s_R: np.ndarray
    waited_s_R: np.ndarray
    sent_s_R: np.ndarray
    num_last_R: np.ndarray
    num_exchanges: int
    pace: PaceRecord
    ep_rank_R: tuple[int, ...] = ()
    device: DeviceRecord | None = None
    bad_scores: BadScores | None = None


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run up to now, as rank 0 saw it.

    Attributes:
        strategy: JSON name of the strategy.
        world_size: ranks.
        num_cells: cells ``C`` of the expert-parallel grid.
        layers: the replaced layers, in model order.
        steps_I: optimizer step of each recorded step.
        rows_ILE: rows routed to each expert, int64 ``[I, L, E]``, summed over the senders; layers
            with fewer experts than others are padded with zeros.
        cell_rows_ILC: rows that each cell computed, int64 ``[I, L, C]``.
        seconds_by_kind: mean seconds a step that this rank spent in each kind of task, by
            ``phase:kind``, over the steps that were timed.
        versions: package versions.
        placements: where experts were; None in a run that copied and moved none.
        terms: how good the strategy's model of costs was, if it has one and was checked.
        looks: what was predicted of rows and where they went; None if that is not known.
        choices: which strategy planned from when on, where one chose between several.
        ranks: what each rank took and needed; None before they told each other.
        traced: one step, for the drawing.
    """

    strategy: str
    world_size: int
    num_cells: int
    layers: tuple[LayerRecord, ...]
    steps_I: tuple[int, ...]
    rows_ILE: np.ndarray
    cell_rows_ILC: np.ndarray
    seconds_by_kind: dict[str, float]
    versions: dict[str, str]
    placements: PlacementRecord | None = None
    terms: tuple[TermRecord, ...] = ()
    looks: LooksRecord | None = None
    choices: tuple[ChoiceRecord, ...] = ()
    ranks: RanksRecord | None = None
    traced: TracedRecord = TracedRecord()

    @property
    def timeline(self) -> tuple[Span, ...]:
        """The tasks of the traced step."""
        return self.traced.timeline

    @property
    def traced_s(self) -> float:
        """How long that step was."""
        return self.traced.traced_s

    def balance_IL(self) -> np.ndarray:
        """Rows of the busiest cell over the mean of those that are home to experts, float
        ``[I, L]``; 1 is perfect."""
        return balance_L(self._at_homes(self.cell_rows_ILC))

    def _at_homes(self, cell_rows_ILC: np.ndarray) -> np.ndarray:
        """Without the cells that are home to no expert of any layer."""
        homes = sorted({cell for layer in self.layers for cell in layer.home_E})
        return cell_rows_ILC[..., homes] if homes else cell_rows_ILC

    def balance_by_layer(self) -> dict[str, float]:
        """Mean over the recorded steps of ``balance_IL``, by layer name."""
        if not self.steps_I:
            return {layer.name: 1.0 for layer in self.layers}
        mean_L = self.balance_IL().mean(axis=0)
        return {layer.name: float(mean) for layer, mean in zip(self.layers, mean_L)}

    def home_balance_IL(self) -> np.ndarray:
        """``balance_IL`` had every expert computed at its home only, float ``[I, L]``."""
        if self.placements is None:
            return self.balance_IL()
        return balance_L(self._at_homes(self.placements.home_cell_rows_ILC))

    def to_json(self) -> str:
        """The record as JSON text."""
        data = dataclasses.asdict(self)
        data |= {**data.pop("traced"), "balance_by_layer": self.balance_by_layer()}
        return json.dumps(data, default=_listed)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        data.pop("balance_by_layer")
        timeline = tuple(Span(**span) for span in data.pop("timeline"))
        traced_s = data.pop("traced_s", 0.0)
        layers = tuple(
            LayerRecord(**{**layer, "home_E": tuple(layer["home_E"])}) for layer in data["layers"]
        )
        num_experts = max((layer.num_experts for layer in layers), default=0)
        shape_IL = len(data["steps_I"]), len(layers)
        shape_ILE, shape_ILC = (*shape_IL, num_experts), (*shape_IL, data["num_cells"])
        placements, looks, ranks = (data.get(key) for key in ("placements", "looks", "ranks"))
        return cls(
            **{
                **data,
                "layers": layers,
                "steps_I": tuple(data["steps_I"]),
                "rows_ILE": _integers(data["rows_ILE"], shape_ILE),
                "cell_rows_ILC": _integers(data["cell_rows_ILC"], shape_ILC),
                "traced": TracedRecord(timeline, traced_s),
                "terms": tuple(
                    TermRecord(**{**term, "steps": tuple(term.get("steps", ()))})
                    for term in data.get("terms", ())
                ),
                "placements": placements and _placements_of(placements, shape_ILE, shape_ILC),
                "looks": looks and _looks_of(looks, shape_IL),
                "choices": tuple(ChoiceRecord(**each) for each in data.get("choices", ())),
                "ranks": ranks and _ranks_of(ranks, len(layers)),
            }
        )


Shape = tuple[int, int, int]


def _listed(array: np.ndarray) -> list[Any]:
    """For JSON, which knows no nan, and nothing infinite."""
    if np.issubdtype(array.dtype, np.floating):
        array = np.array([x if np.isfinite(x) else None for x in array.flat]).reshape(array.shape)
    listed: list[Any] = array.tolist()
    return listed


def _integers(nested: list[Any], shape: Shape) -> np.ndarray:
    return np.asarray(nested, dtype=np.int64).reshape(shape)


def _placements_of(data: Mapping[str, Any], shape_ILE: Shape, shape_ILC: Shape) -> PlacementRecord:
    added = data.get("added")
    return PlacementRecord(
        copies_ILE=_integers(data["copies_ILE"], shape_ILE),
        home_cell_rows_ILC=_integers(data["home_cell_rows_ILC"], shape_ILC),
        moves=tuple(Move(**move) for move in data["moves"]),
        last_step=data["last_step"],
        copied_to=tuple(tuple(tuple(cells) for cells in experts) for experts in data["copied_to"]),
        added=added and _added_of(added, shape_ILE),
    )


def _added_of(data: Mapping[str, Any], shape_ILE: Shape) -> AddedRecord:
    to = tuple(
        tuple(tuple((cell, number) for cell, number in cells) for cells in experts)
        for experts in data["to"]
    )
    return AddedRecord(_integers(data["copies_ILE"], shape_ILE), data["num_passes"], to)


def _looks_of(data: Mapping[str, Any], shape_IL: tuple[int, int]) -> LooksRecord:
    def table(name: str) -> np.ndarray:
        return np.array(data[name], dtype=np.float64).reshape(shape_IL)

    return LooksRecord(
        predicted_IL=table("predicted_IL"),
        by_paper_IL=table("by_paper_IL"),
        left_IL=table("left_IL"),
        crossed_IL=table("crossed_IL"),
        num_nodes=data["num_nodes"],
    )


def _ranks_of(data: Mapping[str, Any], num_layers: int) -> RanksRecord:
    pace, device, bad = data["pace"], data.get("device"), data.get("bad_scores")
    bad = bad and BadScores(*bad)
    if bad and bad.layer not in range(num_layers):
        raise ValueError(f"ranks.bad_scores names layer {bad.layer} of {num_layers}")
    unknown = [None] * len(pace["steps_G"])  # in files of earlier versions
    shape_KR = len(data["kinds_K"]), len(data["ranks_R"])
    return RanksRecord(
        ranks_R=tuple(data["ranks_R"]),
        bad_scores=bad,
        allocated_R=np.asarray(data["allocated_R"], dtype=np.int64),
        reserved_R=np.asarray(data["reserved_R"], dtype=np.int64),
        resident_R=np.asarray(data["resident_R"], dtype=np.int64),
        kinds_K=tuple(data["kinds_K"]),
        seconds_KR=_floats(data["seconds_KR"]).reshape(shape_KR),
        exposed_s_R=_floats(data["exposed_s_R"]),
        waited_s_R=_floats(data["waited_s_R"]),
        sent_s_R=_floats(data["sent_s_R"]),
        num_last_R=np.asarray(data["num_last_R"], dtype=np.int64),
        num_exchanges=data["num_exchanges"],
        pace=PaceRecord(
            tuple(pace["steps_G"]),
            step_s_G=_floats(pace["step_s_G"]),
            tokens_per_s_G=_floats(pace["tokens_per_s_G"]),
            loss_G=_floats(pace["loss_G"]),
            exposed_s_G=_floats(pace["exposed_s_G"]),
            waited_s_G=_floats(pace["waited_s_G"]),
            sent_s_G=_floats(pace["sent_s_G"]),
            allocated_G=_floats(pace.get("allocated_G", unknown)),
            reserved_G=_floats(pace.get("reserved_G", unknown)),
            resident_G=_floats(pace.get("resident_G", unknown)),
        ),
        ep_rank_R=tuple(data.get("ep_rank_R", ())),
        device=device and DeviceRecord(**device),
    )


def _floats(nested: list[Any]) -> np.ndarray:
    """Null is nan."""
    return np.array(nested, dtype=np.float64)
