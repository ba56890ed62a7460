# SPDX-License-Identifier: Apache-2.0
"""A checkpoint for this rank, read into host memory and checked, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.host_layer import Slot
from ds_moe_ext.hosts.attachment.modules import plain
from ds_moe_ext.hosts.deepspeed import dcp_folder, shards
from ds_moe_ext.hosts.deepspeed.checkpoint_contents import (
    ABOUT,
    OPTIMIZER,
    SCALARS,
    Named,
    base_optimizer,
    is_stepped,
    named_parameters,
    remembered_name,
)
from ds_moe_ext.hosts.deepspeed.layout_file import FOLDER, SAVE, SavedLayout
from ds_moe_ext.hosts.deepspeed.pipeline import num_stages
from ds_moe_ext.hosts.deepspeed.regions import Fragment, read_fragments
from ds_moe_ext.hosts.deepspeed.state_places import ADAMS, OptimizerStates
from ds_moe_ext.hosts.deepspeed.tensor_parallel import TensorParallel
from ds_moe_ext.hosts.steps.expert_moves import MASTER, Expert, ParameterStates
from ds_moe_ext.hosts.steps.training_run import Run


class Asked(NamedTuple):
    """What a call of ``load_checkpoint`` asks for.

    Attributes:
        folder: of the checkpoint.
        is_strict: no weight may be missing.
        weights_alone: and no counters, nor where experts live.
        with_optimizer: the optimizer's states too.
    """

    folder: Path
    is_strict: bool
    weights_alone: bool
    with_optimizer: bool

    @classmethod
    def of(cls, engine: Any, arguments: Mapping[str, Any]) -> Asked:
        """From the arguments of DeepSpeed's ``_load_checkpoint``."""
        alone = arguments["load_module_only"]
        return cls(
            folder=Path(arguments["load_dir"]) / str(arguments["tag"]),
            is_strict=arguments["load_module_strict"],
            weights_alone=alone,
            with_optimizer=bool(
                arguments["load_optimizer_states"] and not alone and engine.optimizer is not None
            ),
        )


class Seats(NamedTuple):
    """Where experts shall lie.

    Attributes:
        homes: of each layer.
        slots: of this rank's experts.
    """

    homes: tuple[Placement, ...]
    slots: dict[Expert, Slot]


@dataclass(frozen=True, eq=False)
class Loaded:
    """What is to become of an engine.

    Attributes:
        layout: of the run that saved.
        seats: of its experts.
        weights: of experts, all that this rank has of them, by the parameter of their seat.
        states: of all that is trained, and of experts; empty if they were not asked for.
        options: of the parameter groups, by parameter; empty likewise.
        settings: of the optimizer's wrapper, by its name; empty likewise.
        remembered_ILCE: see ``Planning.resume``.
    """

    layout: SavedLayout
    seats: Seats
    weights: Mapping[nn.Parameter, Tensor]
    states: Mapping[nn.Parameter, ParameterStates]
    options: Mapping[nn.Parameter, Mapping[str, Any]]
    settings: Mapping[str, Mapping[str, Any]]
    remembered_ILCE: np.ndarray


def read(engine: Any, run: Run, asked: Asked) -> Loaded:
    """Read what this rank needs. Collective.

    Raises:
        ValueError: on all ranks, with what is wrong on the first that finds something; nothing has
            been changed.
    """

    def reads(step: Callable[[], T]) -> T:
        return agreed(asked.folder, step)

    num_experts = _num_experts_of_all_stages(run)
    layout = reads(lambda: _checked_layout(engine, num_experts, asked))
    place, num_places = dist.get_rank(), dist.get_world_size()
    reads(lambda: layout.check(asked.folder, place=place, num_places=num_places))
    if layout.save is None:
        run.planning.tell(
            f"{asked.folder} was saved before saves had an id and files a checksum: whether all of "
            "it is of one save, and whole, is not known; save anew"
        )
    seats = _seats(engine, run, layout, asked)
    return reads(lambda: _Reading(engine, run, asked, seats).loaded(layout))


T = TypeVar("T")


def agreed(folder: Path, step: Callable[[], T]) -> T:
    """Do it on all ranks or fail on all: one that failed alone would leave the others waiting.
    Collective.

    Args:
        folder: of the checkpoint.
        step: to do.

    Raises:
        ValueError: on all ranks, with what the first that failed told.
    """
    results: list[T] = []
    text, cause = "", None
    try:
        results.append(step())
    except Exception as error:
        is_told = isinstance(error, ValueError)
        text = str(error) if is_told else f"the checkpoint {folder} cannot be read: {error!r}"
        cause = error
    wrong = next(filter(None, gather_objects(text, None)), None)
    if wrong is not None:
        raise ValueError(wrong) from cause
    return results[0]


# The layout.


def _checked_layout(engine: Any, own: Mapping[str, int], asked: Asked) -> SavedLayout:
    if engine.load_universal_checkpoint():
        raise ValueError(
            "checkpoint.load_universal is true, which is not supported with replaced experts; set "
            "it to false and load a regular checkpoint: it may have been saved by any number of "
            "ranks"
        )
    layout = SavedLayout.read(asked.folder)
    size = TensorParallel.of(engine.mpu).size
    if layout.tensor_parallel_size != size:
        raise ValueError(
            f"the checkpoint {asked.folder} was saved by {layout.tensor_parallel_size} tensor "
            f"parallel rank(s), but this run has {size}, which have other parts of the dense "
            f"weights; run with {layout.tensor_parallel_size}"
        )
    _check_names(engine, asked, layout)
    theirs = layout.num_experts
    if theirs != own:
        names = [name for name in {**theirs, **own} if theirs.get(name) != own.get(name)]
        differ = "; ".join(
            f"{name} has {theirs.get(name, 'none')} there and {own.get(name, 'none')} here"
            for name in names
        )
        raise ValueError(
            f"the checkpoint {asked.folder} has other num_experts than this run: {differ}; build "
            "the model with as many, and replace the same layers"
        )
    name = base_optimizer(engine).__class__.__name__
    is_same = layout.optimizer == name or {layout.optimizer, name} <= ADAMS
    if asked.with_optimizer and not is_same:
        raise ValueError(
            f"the checkpoint {asked.folder} has states of {layout.optimizer}, but this run steps "
            f"with {name}, to which they mean other things; use {layout.optimizer}, or "
            "load_optimizer_states=False"
        )
    layout.check_homes(asked.folder)
    return layout


def _check_names(engine: Any, asked: Asked, layout: SavedLayout) -> None:
    """Of DeepSpeed's files, which it reads by their number."""
    where = asked.folder.parent, asked.folder.name
    path = Path(engine._get_ckpt_name(*where))
    is_own = layout.pipeline_stages == num_stages(engine.module)
    if is_own and not path.exists():
        raise ValueError(f"{asked.folder} has no {path.name}: copy the whole folder again")
    names = [Path(found).name for found in engine._get_all_ckpt_names(*where)]
    number, parts = layout.tensor_parallel_size, "tensor parallel rank(s)"
    if layout.pipeline_stages > 1:
        number, parts = layout.pipeline_stages, "pipeline stages"
    if len(names) != number:
        raise ValueError(
            f"{asked.folder} has {' and '.join(names)}, but was saved by {number} {parts}, which "
            "have a file each; leave no file of another save there, and none out"
        )


def _num_experts(run: Run) -> dict[str, int]:
    return {layer.name: layer.routed.site.plan.home.num_experts for layer in run.layers}


def _num_experts_of_all_stages(run: Run) -> dict[str, int]:
    """Collective."""
    told = gather_objects(_num_experts(run), None)
    return {name: number for theirs in told for name, number in theirs.items()}


def _is_of_these_cells(run: Run, layout: SavedLayout) -> bool:
    """Whether the same cells route the same layers, in the same order."""
    has_these_cells = layout.expert_parallel_size == run.blueprint.grid.num_cells
    own = _num_experts(run)
    return has_these_cells and [name for name in layout.num_experts if name in own] == list(own)


# Where experts shall lie.


def _seats(engine: Any, run: Run, layout: SavedLayout, asked: Asked) -> Seats:
    """As they were saved, if this run may have them so; as they are otherwise. Collective.

    With the same seats a run goes on to the last digit, in which even the order of slots counts:
    norms are summed in it.
    """
    mover = run.mover
    homes = run.planning.job.homes
    present = Seats(homes, mover.slots(homes))
    if asked.weights_alone or not run.blueprint.moves_experts:
        return present
    is_alike = _is_of_these_cells(run, layout)
    saved = agreed(
        asked.folder,
        lambda: _saved_seats(engine, run, layout, present) if is_alike else None,
    )
    fit = gather_objects("" if saved is None else "fits", None)
    return saved if saved is not None and all(fit) else present


def _saved_seats(engine: Any, run: Run, layout: SavedLayout, present: Seats) -> Seats | None:
    num_cells = run.blueprint.grid.num_cells
    homes = tuple(
        Placement.owned_by(np.array(layout.homes[layer.name]), num_cells) for layer in run.layers
    )
    slots: dict[Expert, Slot] = {}
    for pool in run.blueprint.pools:
        free = {
            slot_name(engine, slot): slot
            for expert, slot in present.slots.items()
            if expert.layer in pool.layers
        }
        for layer in pool.layers:
            names = layout.slots[run.layers[layer].name]
            cell = run.layers[layer].routed.site.layout.index("ep")
            for number in homes[layer].experts_of(cell).tolist():
                slot = free.pop(names[number], None)
                if slot is None:
                    return None
                slots[Expert(layer, number)] = slot
        if free:
            return None
    return Seats(homes, slots)


def slot_name(engine: Any, slot: Slot) -> str:
    """What the slot's first weight was called when the engine was made: it keeps its place in the
    optimizer, whatever expert comes to lie in it."""
    if not slot.stacks:
        return plain(engine.param_names[slot.parameters[0]])
    return f"{plain(engine.param_names[slot.stacks[0]])}.{slot.number}"


# Tensors.


class _Reading:
    """One rank's reading.

    Args:
        engine: DeepSpeed's.
        run: its replaced layers.
        asked: what for.
        seats: where its experts shall lie.
    """

    def __init__(self, engine: Any, run: Run, asked: Asked, seats: Seats) -> None:
        self._run, self._asked, self._seats = run, asked, seats
        self._remembered, self._num_stages = remembered_name(run), num_stages(engine.module)
        self._named = named_parameters(engine, run, seats.slots)
        self._states = OptimizerStates(engine)
        self._path = asked.folder / FOLDER
        self._contents = dcp_folder.contents(self._path)
        self._kinds: dict[str, set[str]] = {}  # of states, by parameter
        for key in self._contents.shapes:
            name, _, kind = key.rpartition("/")
            self._kinds.setdefault(name, set()).add(kind)

    def loaded(self, layout: SavedLayout) -> Loaded:
        wanted = {p: names for p, names in self._named.items() if self._is_wanted(p, names)}
        objects = self._objects(wanted)
        layout.check_save(self._path, objects.get(SAVE))
        for parameter, names in wanted.items():
            self._check(parameter, names, objects)
        weights = self._weights({p: names for p, names in wanted.items() if names.is_expert})
        remembers = layout.pipeline_stages == self._num_stages
        for name in (OPTIMIZER, self._remembered)[: 1 + remembers]:
            if name not in objects:
                raise ValueError(f"{self._path} has no {name!r}: copy the whole folder again")
        remembered = objects[self._remembered] if remembers else np.zeros(0)
        if not _is_of_these_cells(self._run, layout):
            remembered = remembered[:0]
        if not self._asked.with_optimizer:
            return Loaded(layout, self._seats, weights, {}, {}, {}, remembered)
        states = self._parameter_states(wanted, objects)
        try:
            self._states.check(states)
        except ValueError as error:
            raise ValueError(
                f"the states in {self._asked.folder} do not fit this run's optimizer: {error}; or "
                "load the checkpoint with load_optimizer_states=False"
            ) from error
        options = {p: objects[f"{names.kind}/{ABOUT}"]["options"] for p, names in wanted.items()}
        given = {p: theirs for p, theirs in options.items() if theirs is not None}
        settings = objects[OPTIMIZER]
        return Loaded(layout, self._seats, weights, states, given, settings, remembered)

    def _is_wanted(self, parameter: nn.Parameter, names: Named) -> bool:
        """Other dense weights are the host's; a frozen expert may have been left out on saving."""
        if names.is_expert:
            may_lack = not (self._asked.is_strict or parameter.requires_grad)
            return not may_lack or names.name in self._kinds
        return self._asked.with_optimizer and is_stepped(self._states, parameter)

    def _objects(self, wanted: Mapping[nn.Parameter, Named]) -> dict[str, Any]:
        names = {OPTIMIZER, self._remembered, SAVE}
        for each in wanted.values():
            names |= {f"{each.name}/{SCALARS}", f"{each.kind}/{ABOUT}"}
        return dcp_folder.load(self._path, {}, names & self._contents.objects)

    def _check(self, parameter: nn.Parameter, names: Named, objects: Mapping[str, Any]) -> None:
        """Of one parameter."""
        about = objects.get(f"{names.kind}/{ABOUT}")
        if about is None or MASTER not in self._kinds.get(names.name, ()):
            raise ValueError(
                f"the checkpoint {self._asked.folder} has nothing of {names.name}, which this run "
                "has: it was not in the model, or not trained; build the model as it was"
                + ("" if names.is_expert else ", or load with load_optimizer_states=False")
            )
        if about["shape"] != names.shape:
            raise ValueError(
                f"the checkpoint {self._asked.folder} has {names.name} of shape {about['shape']}, "
                f"but this run of shape {names.shape}; build the model as it was"
            )

    def _weights(self, experts: Mapping[nn.Parameter, Named]) -> dict[nn.Parameter, Tensor]:
        """All of this rank's, though its optimizer may keep a fragment of them only."""
        masters = {p: f"{names.name}/{MASTER}" for p, names in experts.items()}
        read = self._read(
            {
                masters[p]: Fragment(names.region, 0, shards.shape_of(p).numel(), p.dtype)
                for p, names in experts.items()
            }
        )
        return {p: read[master].view(shards.shape_of(p)) for p, master in masters.items()}

    def _parameter_states(
        self, wanted: Mapping[nn.Parameter, Named], objects: Mapping[str, Any]
    ) -> dict[nn.Parameter, ParameterStates]:
        keys = {
            p: {kind: f"{names.name}/{kind}" for kind in self._kinds[names.name]}
            for p, names in wanted.items()
        }
        own = {p: self._states.of(p) for p in wanted}
        read = self._read(
            {
                key: Fragment(names.region, own[p].start, own[p].stop, own[p].tensors[MASTER].dtype)
                for p, names in wanted.items()
                for key in keys[p].values()
            }
        )
        return {
            p: ParameterStates(
                start=own[p].start,
                stop=own[p].stop,
                tensors={kind: read[key] for kind, key in keys[p].items()},
                scalars=objects.get(f"{names.name}/{SCALARS}", {}),
            )
            for p, names in wanted.items()
        }

    def _read(self, wanted: Mapping[str, Fragment]) -> dict[str, Tensor]:
        return read_fragments(self._path, self._contents.shapes, wanted)


def check_module(engine: Any, given: Mapping[str, Any], asked: Asked) -> None:
    """Whether the module would take a state.

    Raises:
        ValueError: names that it lacks or does not have, or another shape.
    """
    own = engine.module.state_dict()
    shapes = {name: each.shape for name, each in own.items() if isinstance(each, Tensor)}
    named = engine.module.named_parameters(remove_duplicate=False)
    shapes |= {name: shards.shape_of(p) for name, p in named}
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if asked.is_strict and (missing or unknown):
        raise ValueError(
            f"the checkpoint {asked.folder} has no {missing or 'other names'} and this model no "
            f"{unknown or 'other names'}; build the model as it was, or load with "
            "load_module_strict=False"
        )
    for name in own.keys() & given.keys():
        if name in shapes and shapes[name] != given[name].shape:
            raise ValueError(
                f"the checkpoint {asked.folder} has {name} of shape {tuple(given[name].shape)}, "
                f"but this model of shape {tuple(shapes[name])}; build the model as it was"
            )
