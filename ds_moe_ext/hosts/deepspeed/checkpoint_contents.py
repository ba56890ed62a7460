# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps of an engine, and by which names.

Everything has a name that says nothing of ranks, slots or ZeRO stages, so that any later run finds
it. ``NAME`` is a dense weight's own name, and of an expert ``<layer>.<weight>.<number>``; ``KIND``
leaves out the number, for what all experts of a layer have in common:

    NAME/master     the weight as the optimizer steps it; the module has it rounded
    NAME/exp_avg    and every other state, by the optimizer's name for it
    NAME/scalars    what the optimizer keeps once, such as ``step``
    KIND/about      shape, and options of the parameter group, such as ``lr``
    optimizer       settings of DeepSpeed's wrapper, such as the loss scale
    remembered      rows of the steps that predict the next; of a pipeline's stage by its layers
    ds_moe_ext_save id of the save, see ``layout_file``

An expert's tensors have the shape of its weight, whichever part of it a rank has; dense ones are
flat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from torch import Tensor, nn

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.host_layer import Slot
from ds_moe_ext.hosts.attachment.modules import plain
from ds_moe_ext.hosts.deepspeed import dcp_folder, rank_groups, zero_3
from ds_moe_ext.hosts.deepspeed.dcp_folder import Fragment, Part, Region, read_fragments
from ds_moe_ext.hosts.deepspeed.layout_file import FOLDER, SAVE, SavedLayout
from ds_moe_ext.hosts.deepspeed.parameter_groups import (
    ADAMS,
    OF_A_PART,
    OptimizerStates,
    base_optimizer,
)
from ds_moe_ext.hosts.deepspeed.rank_groups import TensorParallel, num_stages
from ds_moe_ext.hosts.steps.expert_moves import MASTER, Expert, ParameterStates
from ds_moe_ext.hosts.steps.training_run import Run

SCALARS, ABOUT = "scalars", "about"

OPTIMIZER, REMEMBERED = "optimizer", "remembered"


class Named(NamedTuple):
    """What a parameter is called in a checkpoint, and which part of what is kept there it is."""

    name: str  # its own
    kind: str  # the part of it that all experts of a layer share
    shape: tuple[int, ...]  # of the weight, whole
    region: Region  # what this rank has of it, as its tensors are kept
    is_expert: bool  # whether it is one's weight


def named_parameters(
    engine: Any, run: Run, slots: Mapping[Expert, Slot]
) -> dict[nn.Parameter, Named]:
    """All parameters of this rank that have elements, if its experts lie in these slots."""
    tensor_parallel = TensorParallel.of(engine.mpu)  # whose ranks have others by the same name
    before = f"part {tensor_parallel.rank} of " if tensor_parallel.size > 1 else ""
    named = dict[nn.Parameter, Named]()
    for name, p in engine.module.named_parameters():
        own, called = zero_3.shape_of(p), before + plain(name)
        named[p] = Named(called, called, tuple(own), Region.all_of((own.numel(),)), False)
    for expert, slot in slots.items():
        layer, shard = run.layers[expert.layer], run.layers[expert.layer].hosted.shard
        for index, (weight, p) in enumerate(zip(layer.hosted.weight_names, slot.parameters)):
            own = zero_3.shape_of(p)
            kind, shape = f"{layer.name}.{weight}", shard.whole_shape(index, own)
            region = Region.of_shard(shard, index, own)
            named[p] = Named(f"{kind}.{expert.number}", kind, shape, region, True)
    stacks = {stack for slot in slots.values() for stack in slot.stacks}
    return {
        p: names for p, names in named.items() if zero_3.shape_of(p).numel() and p not in stacks
    }


def remembered_name(run: Run) -> str:
    """Where rows are kept that predict the next: those of a pipeline's stage are of its layers."""
    first = run.layers[0]
    if not first.routed.layer_context.layout.beside:
        return REMEMBERED
    return f"{REMEMBERED} of {', '.join(layer.name for layer in run.layers)}"


def kept_of(
    engine: Any, named: Mapping[nn.Parameter, Named], *, excludes_frozen: bool = False
) -> tuple[dict[str, Part], dict[str, Any]]:
    """All that this rank's optimizer keeps, and its experts; frozen dense weights are the
    host's."""
    states = OptimizerStates(engine)
    parts, objects = dict[str, Part](), {OPTIMIZER: wrapper_settings(engine)}
    for parameter, names in named.items():
        if not names.is_expert and not is_stepped(states, parameter):
            continue
        if rank_groups.is_of_another_stage(engine.module, parameter):
            continue
        if names.is_expert and excludes_frozen and not parameter.requires_grad:
            continue
        own, options = states.of(parameter), states.options(parameter)
        if own.start < own.stop:
            for state, tensor in own.tensors.items():
                parts[f"{names.name}/{state}"] = names.region.part(tensor, own.start)
            objects[f"{names.name}/{SCALARS}"] = dict(own.scalars)
        objects[f"{names.kind}/{ABOUT}"] = {
            "shape": names.shape,
            "options": options and {k: v for k, v in options.items() if k not in OF_A_PART},
        }
    return parts, objects


def is_stepped(states: OptimizerStates, parameter: nn.Parameter) -> bool:
    """Whether the optimizer changes it: a plain one may have been given what is frozen too."""
    return parameter.requires_grad and states.options(parameter) is not None


def wrapper_settings(engine: Any) -> dict[str, Any]:
    """What DeepSpeed's wrapper of the optimizer keeps beside tensors and their layout, under a name
    that shows which wrapper may take it."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, DeepSpeedOptimizer):
        return {}
    state = type(optimizer).state_dict(optimizer)
    settings = {k: v for k, v in state.items() if not isinstance(v, (Tensor, list, tuple, dict))}
    return {wrapper_name(engine): settings}


def wrapper_name(engine: Any) -> str:
    """Wrappers of one name keep the same settings, and mean the same by them."""
    return f"{type(engine.optimizer).__name__}{' with a loss scale' * has_scale(engine)}"


def has_scale(engine: Any) -> bool:
    """Whether its optimizer scales losses: float16 weights, or ``engine.skip_together``."""
    return bool(engine.fp16_enabled() or getattr(engine.optimizer, "dynamic_loss_scale", False))


# Reading: into host memory, and checked, before anything is changed.


class Asked(NamedTuple):
    """What a call of ``load_checkpoint`` asks for."""

    folder: Path  # of the checkpoint
    is_strict: bool  # no weight may be missing
    weights_alone: bool  # and no counters, nor where experts live
    with_optimizer: bool  # the optimizer's states too
    with_schedule: bool  # and that of the learning rate's schedule

    @classmethod
    def of(cls, engine: Any, arguments: Mapping[str, Any]) -> Asked:
        """From the arguments of DeepSpeed's ``_load_checkpoint``."""
        alone, states = arguments["load_module_only"], arguments["load_optimizer_states"]
        return cls(
            folder=Path(arguments["load_dir"]) / str(arguments["tag"]),
            is_strict=arguments["load_module_strict"],
            weights_alone=alone,
            with_optimizer=bool(states and not alone and engine.optimizer is not None),
            with_schedule=bool(arguments["load_lr_scheduler_states"] and not alone),
        )


class ExpertSlots(NamedTuple):
    """Where experts shall lie."""

    owners: tuple[Placement, ...]  # of each layer
    slots: dict[Expert, Slot]  # of this rank's experts


@dataclass(frozen=True, eq=False)
class Loaded:
    """What is to become of an engine; states, options and settings are empty where they were not
    asked for."""

    layout: SavedLayout  # of the run that saved
    expert_slots: ExpertSlots  # of its experts
    weights: Mapping[nn.Parameter, Tensor]  # of experts, all that this rank has of them
    remembered_ILCE: np.ndarray  # see ``Planning.resume``
    states: Mapping[nn.Parameter, ParameterStates] = field(default_factory=dict)
    options: Mapping[nn.Parameter, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by wrapper


def read(engine: Any, run: Run, asked: Asked) -> Loaded:
    """Read what this rank needs. Collective.

    Raises:
        ValueError: on all ranks, with what is wrong on the first that finds something; nothing has
            been changed.
    """

    def reads(step: Callable[[], T]) -> T:
        return agreed(asked.folder, step)

    # Of all stages.
    gathered = gather_objects(_num_experts(run), None)
    num_experts = {name: number for theirs in gathered for name, number in theirs.items()}
    layout = reads(lambda: _checked_layout(engine, num_experts, asked))
    place, num_places = dist.get_rank(), dist.get_world_size()
    reads(lambda: layout.check(asked.folder, place=place, num_places=num_places))
    if layout.save is None:
        run.planning.log(
            f"{asked.folder} was saved by a version without save ids and checksums, so its "
            "integrity cannot be checked; save a new one"
        )
    expert_slots = _expert_slots(engine, run, layout, asked)
    return reads(lambda: _Reading(engine, run, asked, expert_slots).loaded(layout))


T = TypeVar("T")


def agreed(folder: Path, step: Callable[[], T]) -> T:
    """Do it on all ranks or fail on all: one that failed alone would leave the others waiting.
    Collective.

    Raises:
        ValueError: on all ranks, with what the first that failed states.
    """
    results: list[T] = []
    text, cause = "", None
    try:
        results.append(step())
    except Exception as error:
        is_reported = isinstance(error, ValueError)
        text = str(error) if is_reported else f"the checkpoint {folder} cannot be read: {error!r}"
        cause = error
    wrong = next(filter(None, gather_objects(text, None)), None)
    if wrong is not None:
        raise ValueError(wrong) from cause
    return results[0]


def _checked_layout(engine: Any, own: Mapping[str, int], asked: Asked) -> SavedLayout:
    if engine.load_universal_checkpoint():
        raise ValueError(
            "checkpoint.load_universal is true, which is not supported with replaced experts; "
            "set it to false and load a regular checkpoint: any number of ranks may have "
            "saved it"
        )
    folder, layout = asked.folder, SavedLayout.read(asked.folder)
    size = TensorParallel.of(engine.mpu).size
    if layout.tensor_parallel_size != size:
        raise ValueError(
            f"the checkpoint {folder} was saved by {layout.tensor_parallel_size} tensor "
            f"parallel rank(s), but this run has {size}, which split the dense weights "
            f"differently; run with {layout.tensor_parallel_size}"
        )
    # DeepSpeed reads its files by their number.
    path = Path(engine._get_ckpt_name(folder.parent, folder.name))
    if layout.pipeline_stages == num_stages(engine.module) and not path.exists():
        raise ValueError(f"{folder} has no {path.name}: copy the whole folder again")
    names = [Path(each).name for each in engine._get_all_ckpt_names(folder.parent, folder.name)]
    number, parts = layout.tensor_parallel_size, "tensor parallel rank(s)"
    if layout.pipeline_stages > 1:
        number, parts = layout.pipeline_stages, "pipeline stages"
    if len(names) != number:
        raise ValueError(
            f"{folder} has {' and '.join(names)}, but was saved by {number} {parts}, each with "
            "its own file; the folder must hold the files of one save, all of them"
        )
    theirs = layout.num_experts
    differ = [name for name in {**theirs, **own} if theirs.get(name) != own.get(name)]
    if differ:
        text = "; ".join(
            f"{name} has {theirs.get(name, 'none')} there and {own.get(name, 'none')} here"
            for name in differ
        )
        raise ValueError(
            f"the checkpoint {folder} has other num_experts than this run: {text}; build the "
            "model with the same number, and replace the same layers"
        )
    name = base_optimizer(engine).__class__.__name__
    is_same = layout.optimizer == name or {layout.optimizer, name} <= ADAMS
    if asked.with_optimizer and not is_same:
        raise ValueError(
            f"the checkpoint {folder} has states of {layout.optimizer}, but this run uses "
            f"{name}, which cannot read them; use {layout.optimizer}, or "
            "load_optimizer_states=False"
        )
    layout.check_owners(folder)
    return layout


def _num_experts(run: Run) -> dict[str, int]:
    return {layer.name: layer.routed.layer_context.plan.owner.num_experts for layer in run.layers}


def _is_of_these_ep_ranks(run: Run, layout: SavedLayout) -> bool:
    """Whether the same EP ranks route the same layers, in the same order."""
    has_these_ep_ranks = layout.expert_parallel_size == run.blueprint.grid.num_ep_ranks
    own = _num_experts(run)
    return has_these_ep_ranks and [name for name in layout.num_experts if name in own] == list(own)


def _expert_slots(engine: Any, run: Run, layout: SavedLayout, asked: Asked) -> ExpertSlots:
    """As they were saved, if this run may have them so; as they are otherwise. Collective.

    With the same places a run goes on to the last digit, in which even the order of slots counts:
    norms are summed in it.
    """
    owners = run.planning.job.owners
    present = ExpertSlots(owners, run.mover.slots(owners))
    if asked.weights_alone or not run.blueprint.moves_experts:
        return present
    is_alike = _is_of_these_ep_ranks(run, layout)
    saved = agreed(
        asked.folder,
        lambda: _saved_slots(engine, run, layout, present) if is_alike else None,
    )
    fit = gather_objects("" if saved is None else "fits", None)
    return saved if saved is not None and all(fit) else present


def _saved_slots(
    engine: Any, run: Run, layout: SavedLayout, present: ExpertSlots
) -> ExpertSlots | None:
    num_ep_ranks = run.blueprint.grid.num_ep_ranks
    owners = tuple(
        Placement.owned_by(np.array(layout.owners[layer.name]), num_ep_ranks)
        for layer in run.layers
    )
    slots: dict[Expert, Slot] = {}
    for cost_group in run.blueprint.cost_groups:
        free = {
            slot_name(engine, slot): slot
            for expert, slot in present.slots.items()
            if expert.layer in cost_group.layers
        }
        for layer in cost_group.layers:
            names = layout.slots[run.layers[layer].name]
            ep_rank = run.layers[layer].routed.layer_context.layout.index("ep")
            for number in owners[layer].experts_of(ep_rank).tolist():
                slot = free.pop(names[number], None)
                if slot is None:
                    return None
                slots[Expert(layer, number)] = slot
        if free:
            return None
    return ExpertSlots(owners, slots)


def slot_name(engine: Any, slot: Slot) -> str:
    """What the slot's first weight was called when the engine was made: it keeps its place in the
    optimizer, whatever expert comes to lie in it."""
    if not slot.stacks:
        return plain(engine.param_names[slot.parameters[0]])
    return f"{plain(engine.param_names[slot.stacks[0]])}.{slot.number}"


class _Reading:
    """One rank's reading of tensors."""

    def __init__(self, engine: Any, run: Run, asked: Asked, expert_slots: ExpertSlots) -> None:
        self._run, self._asked, self._expert_slots = run, asked, expert_slots
        self._num_stages = num_stages(engine.module)
        self._named = named_parameters(engine, run, expert_slots.slots)
        self._states = OptimizerStates(engine)
        self._path = asked.folder / FOLDER
        self._contents = dcp_folder.contents(self._path)
        self._kinds: dict[str, set[str]] = {}  # of states, by parameter
        for key in self._contents.shapes:
            name, _, kind = key.rpartition("/")
            self._kinds.setdefault(name, set()).add(kind)

    def loaded(self, layout: SavedLayout) -> Loaded:
        wanted = {p: names for p, names in self._named.items() if self._is_wanted(p, names)}
        remembered_by = remembered_name(self._run)
        names = {OPTIMIZER, remembered_by, SAVE}
        for each in wanted.values():
            names |= {f"{each.name}/{SCALARS}", f"{each.kind}/{ABOUT}"}
        objects = dcp_folder.load(self._path, {}, names & self._contents.objects)
        layout.check_save(self._path, objects.get(SAVE))
        for each in wanted.values():
            self._check(each, objects.get(f"{each.kind}/{ABOUT}"))
        weights = self._weights({p: each for p, each in wanted.items() if each.is_expert})
        remembers = layout.pipeline_stages == self._num_stages
        for name in (OPTIMIZER, remembered_by)[: 1 + remembers]:
            if name not in objects:
                raise ValueError(f"{self._path} has no {name!r}: copy the whole folder again")
        remembered = objects[remembered_by] if remembers else np.zeros(0)
        if not _is_of_these_ep_ranks(self._run, layout):
            remembered = remembered[:0]
        if not self._asked.with_optimizer:
            return Loaded(layout, self._expert_slots, weights, remembered)
        states = self._parameter_states(wanted, objects)
        try:
            self._states.check(states)
        except ValueError as error:
            raise ValueError(
                f"the states in {self._asked.folder} do not fit this run's optimizer: {error}; or "
                "load the checkpoint with load_optimizer_states=False"
            ) from error
        options = {p: objects[f"{each.kind}/{ABOUT}"]["options"] for p, each in wanted.items()}
        given = {p: theirs for p, theirs in options.items() if theirs is not None}
        return Loaded(
            layout, self._expert_slots, weights, remembered, states, given, objects[OPTIMIZER]
        )

    def _is_wanted(self, parameter: nn.Parameter, names: Named) -> bool:
        """Other dense weights are the host's; a frozen expert may have been left out on saving."""
        if names.is_expert:
            may_lack = not (self._asked.is_strict or parameter.requires_grad)
            return not may_lack or names.name in self._kinds
        return self._asked.with_optimizer and is_stepped(self._states, parameter)

    def _check(self, names: Named, about: Mapping[str, Any] | None) -> None:
        """Of one parameter."""
        if about is None or MASTER not in self._kinds.get(names.name, ()):
            raise ValueError(
                f"the checkpoint {self._asked.folder} has no {names.name}, which this run has: "
                "it was not in the model, or not trained; build the model as it was saved"
                + ("" if names.is_expert else ", or load with load_optimizer_states=False")
            )
        if about["shape"] != names.shape:
            raise ValueError(
                f"the checkpoint {self._asked.folder} has {names.name} of shape {about['shape']}, "
                f"but this run of shape {names.shape}; build the model as it was"
            )

    def _weights(self, experts: Mapping[nn.Parameter, Named]) -> dict[nn.Parameter, Tensor]:
        """All of this rank's, though its optimizer may keep a fragment of them only."""
        shapes = {p: zero_3.shape_of(p) for p in experts}
        fragments = {
            f"{names.name}/{MASTER}": Fragment(names.region, 0, shapes[p].numel(), p.dtype)
            for p, names in experts.items()
        }
        read = read_fragments(self._path, self._contents.shapes, fragments)
        return {p: read[f"{each.name}/{MASTER}"].view(shapes[p]) for p, each in experts.items()}

    def _parameter_states(
        self, wanted: Mapping[nn.Parameter, Named], objects: Mapping[str, Any]
    ) -> dict[nn.Parameter, ParameterStates]:
        own = {p: self._states.of(p) for p in wanted}
        fragments = {
            f"{each.name}/{kind}": Fragment(
                each.region, own[p].start, own[p].stop, own[p].tensors[MASTER].dtype
            )
            for p, each in wanted.items()
            for kind in self._kinds[each.name]
        }
        read = read_fragments(self._path, self._contents.shapes, fragments)
        return {
            p: ParameterStates(
                start=own[p].start,
                stop=own[p].stop,
                tensors={kind: read[f"{each.name}/{kind}"] for kind in self._kinds[each.name]},
                scalars=objects.get(f"{each.name}/{SCALARS}", {}),
            )
            for p, each in wanted.items()
        }


def check_module(engine: Any, given: Mapping[str, Any], asked: Asked) -> None:
    """Whether the module would take a state."""
    own = engine.module.state_dict()
    shapes = {name: each.shape for name, each in own.items() if isinstance(each, Tensor)}
    named = engine.module.named_parameters(remove_duplicate=False)
    shapes |= {name: zero_3.shape_of(p) for name, p in named}
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
