"""What a run leaves behind: one record, written as JSON and as a page.

Shape letters: I recorded steps, L layers, E experts, C cells.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

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
        home_E: cell that is home to each expert.
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
    """One task of the traced step on this rank; seconds from the start of the step."""

    name: str  # gate, order, dispatch, expert, combine, restore, ...
    lane: str
    phase: str  # "forward" or "backward"
    layer: str
    chunk: str  # finest chunks covered, as "0" or "0-2"
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The end of a run, as rank 0 saw it.

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
        timeline: the tasks of one step, for the drawing; empty when nothing was traced.
        versions: package versions.
    """

    strategy: str
    world_size: int
    num_cells: int
    layers: tuple[LayerRecord, ...]
    steps_I: tuple[int, ...]
    rows_ILE: np.ndarray
    cell_rows_ILC: np.ndarray
    seconds_by_kind: dict[str, float]
    timeline: tuple[Span, ...]
    versions: dict[str, str]

    def balance_IL(self) -> np.ndarray:
        """Rows of the busiest cell over the mean, float ``[I, L]``; 1 is perfect."""
        return balance_L(self.cell_rows_ILC)

    def balance_by_layer(self) -> dict[str, float]:
        """Mean over the recorded steps of ``balance_IL``, by layer name."""
        if not self.steps_I:
            return {layer.name: 1.0 for layer in self.layers}
        mean_L = self.balance_IL().mean(axis=0)
        return {layer.name: float(mean) for layer, mean in zip(self.layers, mean_L)}

    def to_json(self) -> str:
        """The record as JSON text."""
        data = {
            **dataclasses.asdict(self),
            "rows_ILE": self.rows_ILE.tolist(),
            "cell_rows_ILC": self.cell_rows_ILC.tolist(),
            "balance_by_layer": self.balance_by_layer(),
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        data.pop("balance_by_layer")
        layers = tuple(
            LayerRecord(**{**layer, "home_E": tuple(layer["home_E"])}) for layer in data["layers"]
        )
        num_experts = max((layer.num_experts for layer in layers), default=0)
        rows = np.asarray(data["rows_ILE"], dtype=np.int64)
        cell_rows = np.asarray(data["cell_rows_ILC"], dtype=np.int64)
        return cls(
            **{
                **data,
                "layers": layers,
                "steps_I": tuple(data["steps_I"]),
                "rows_ILE": rows.reshape(len(data["steps_I"]), len(layers), num_experts),
                "cell_rows_ILC": cell_rows.reshape(
                    len(data["steps_I"]), len(layers), data["num_cells"]
                ),
                "timeline": tuple(Span(**span) for span in data["timeline"]),
            }
        )

    def write(self, folder: Path) -> None:
        """Write ``report.json`` and ``report.html`` into ``folder``."""
        from ds_moe_ext.report.page import page_of

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(self.to_json(), encoding="utf-8")
        (folder / "report.html").write_text(page_of(self), encoding="utf-8")
