# SPDX-License-Identifier: Apache-2.0
"""Experts of a host as ours: what an experts module holds and computes (``ExpertsDescription``),
what takes its place (``HostedExperts``), and how ranks of an ETP group split an expert."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ds_moe_ext.hosts.attachment.host_layer import (
    ROUTERS,
    Adopted,
    Found,
    InOne,
    RoutedOf,
    Slot,
    Stored,
    Wanted,
    keep_marks,
    set_module,
    shape_of,
    stated,
)
from ds_moe_ext.hosts.attachment.modules import eager, named_modules, no_duplicate, warn_of_hooks
from ds_moe_ext.moe.expert import ExpertFunction, on_shard
from ds_moe_ext.moe.feed_forward import unstacked
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.sharding import WHOLE, Along, LowRank, Shard, with_low_ranks
from ds_moe_ext.moe.slot_rows import SlotRows
from ds_moe_ext.schedule.task import INTRA


@dataclass(frozen=True, eq=False)
class ExpertsDescription:
    """What one experts module holds and computes.

    Attributes:
        num_experts: experts ``E``.
        weight_names: its parameters, each ``[E, ...]``, in the order that ``function`` takes those
            of one expert.
        function: ``(rows [R, D] by slot, rows of each slot, weights) -> rows [R, D]``.
        kept_as: how the module keeps each of these weights (``InOne``, ``OneEach``), where that is
            not as one parameter of the name, ``[E, ...]``; ``weight_names`` are then how a run and
            its checkpoints call them.
        within: modules without weights that ``function`` calls, as dropout: they train and evaluate
            with the layer.
        inside: where in the module what takes its place is put, dotted, as inside of wrappers that
            stay; empty: in its own place. Its state has names from the module all the same.
        low_ranks: what is added to some of the weights where they are used, as adapters do; the
            factors of it stand behind all others in ``weight_names``, and ``function`` gets none.
    """

    num_experts: int
    weight_names: tuple[str, ...]
    function: ExpertFunction
    kept_as: tuple[Stored, ...] = ()
    within: tuple[nn.Module, ...] = ()
    inside: str = ""
    low_ranks: tuple[LowRank, ...] = ()

    @property
    def num_factors(self) -> int:
        """Of the weights, the last ones, those that only change others."""
        return 2 * len(self.low_ranks)

    @property
    def stored(self) -> tuple[Stored, ...]:
        """How the module keeps each weight."""
        return self.kept_as or tuple(InOne(name) for name in self.weight_names)


Describe = Callable[[Any], ExpertsDescription]
_DESCRIBE: dict[type, Describe] = {}


def register_experts(cls: type[nn.Module]) -> Callable[[Describe], Describe]:
    """Register how to replace an experts module of the user's own; see ``ExpertsDescription``.

    ``cls`` must be called as ``experts(hidden, expert_ids, scores)``::

        @register_experts(MyExperts)
        def describe(experts):
            return ExpertsDescription(
                experts.num_experts, ("up", "down"), FeedForwardExperts(silu_gated))

    Raises:
        ValueError: it is given no class of modules, or no function to describe them.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(
            f"register_experts was given {cls!r}, which is not a module class; give the class "
            "of your experts module, and decorate a function that describes it"
        )

    def add(describe: Describe) -> Describe:
        if not callable(describe):
            raise ValueError(
                f"register_experts({cls.__name__}) was put on {describe!r}, which cannot be "
                "called; put it above a function from such a module to an ExpertsDescription"
            )
        _DESCRIBE[cls] = describe
        return describe

    return add


def is_registered(module: nn.Module) -> bool:
    """Whether its class was given to ``register_experts``."""
    return class_of(module) in _DESCRIBE


def find_registered(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The modules of registered classes, in model order."""
    for name, module in named_modules(model):
        describe = _DESCRIBE.get(class_of(module))
        if describe is not None and wanted(name):
            check_own_weights(model, name)
            yield found_experts(model, name, module, describe(module))


def class_of(module: nn.Module) -> type:
    """As it was written: torch gives a module whose weights are parametrized a class of its own."""
    return type(module).__bases__[0] if is_parametrized(module) else type(module)


def found_experts(
    model: nn.Module,
    name: str,
    module: nn.Module,
    description: ExpertsDescription,
    *,
    kind: str = "",
) -> Found:
    """A layer to replace, from a module and its description; ``kind`` is what messages call
    it, if not the module's class."""

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        warn_of_hooks(name, module, description.inside)
        routed = routed_of(on_shard(description.function, shard))
        hosted = HostedExperts(module, description, held, shard, routed)
        set_module(model, name, hosted)
        sources = {
            parameter: (stored.of(module, expert),)
            for expert, slot in zip(held.tolist(), hosted.slots())
            for parameter, stored in zip(slot.parameters, description.stored)
        }
        return Adopted(hosted, sources, tuple(module.parameters()))

    if not description.num_experts:
        raise ValueError(f"{name} has no experts; give its model one at least, or leave it out")
    block = model.get_submodule(name.rpartition(".")[0])
    first = [stored.first(module) for stored in description.stored]
    num = description.num_experts
    trained = [
        any(p.requires_grad for p in {stored.of(module, expert) for expert in range(num)})
        for stored in description.stored
    ]
    return Found(
        name=name,
        kind=kind or type(module).__name__,
        num_experts=description.num_experts,
        expert=shape_of(zip(description.weight_names, first, trained)),
        num_ep_ranks=1,
        may_drop=False,
        split=cache(lambda num_shards: _ways_to_split(name, description, first, num_shards)),
        adopt=adopt,
        stored=description.stored,
        num_factors=description.num_factors,
        routing=stated(block, *(block._modules.get(name) for name in ROUTERS)),
    )


class HostedExperts(nn.Module):
    """This rank's experts, run by a strategy; each expert's weights are parameters of their own.

    Parameters are named ``<weight>.<slot>``, as ``gate_up_proj.0``. They are laid out weight by
    weight, so that one weight of all slots stays one piece of memory in a flat buffer too. Where a
    host has them stacked, each weight of all slots is one parameter ``[S, ...]`` by its name.
    """

    def __init__(
        self,
        source: nn.Module,  # the host's; its weights are copied, it is not kept
        description: ExpertsDescription,
        held: Tensor,  # experts that this rank owns, int64 ``[S]``, in slot order
        shard: Shard,  # the part of them that it has
        routed: RoutedExperts,
    ) -> None:
        super().__init__()
        self.num_experts = description.num_experts
        self.weight_names = description.weight_names
        self.stored = description.stored
        self.within = nn.ModuleList(description.within)
        self.inside, self.low_ranks = description.inside, description.low_ranks
        self._strengths: tuple[float, ...] = ()  # with which they were used last
        self.routed = routed
        self.run: RunRows = routed
        self.shard = shard
        self._views: dict[str, list[nn.Parameter]] = {}  # of each stack, by its name
        columns = [
            _own_slots(source, stored, held, shard, number)
            for number, stored in enumerate(self.stored)
        ]
        self.hold([Slot(tuple(parameters)) for parameters in zip(*columns)])
        self.train(source.training)
        self.forward = eager(self.forward)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise no_duplicate(self.routed.name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By which Python pickles, and copies."""
        raise no_duplicate(self.routed.name)

    def slots(self) -> list[Slot]:
        if not self._views:
            return [Slot(tuple(parameters)) for parameters in self._by_slot()]
        # Views are of where the stacks lie now: hosts give parameters other memory and types.
        for stack, views in zip(stacks := self._likened(), self._views.values()):
            if views[0].data_ptr() != stack.data_ptr():
                for view, own in zip(views, stack.data):
                    view.data = own
        by_slot = zip(*(self._views[name] for name in self.weight_names))
        return [Slot(own, stacks=stacks, number=number) for number, own in enumerate(by_slot)]

    def _by_slot(self) -> Iterator[tuple[nn.Parameter, ...]]:
        lists: list[Any] = [self._modules[name] for name in self.weight_names]
        return zip(*(parameters._parameters.values() for parameters in lists))

    @property
    def stacks(self) -> tuple[nn.Parameter, ...]:
        """The parameters where each is a weight of all slots, ``[S, ...]``; else none."""
        found: Mapping[str, Any] = self._parameters  # asked in every pass: get_parameter takes long
        return tuple([found[name] for name in self._views])

    def stack(self) -> dict[nn.Parameter, nn.Parameter]:
        """Make one parameter of each weight of all slots, for experts that stay in theirs: what a
        host does for each parameter it does once. Returns one of the old ones for each new one."""
        slots, made = self.slots(), dict[nn.Parameter, nn.Parameter]()
        columns = zip(*(slot.parameters for slot in slots))
        for name, own in zip(self.weight_names, columns):
            together = torch.stack([parameter.data for parameter in own])
            stack = nn.Parameter(together, requires_grad=own[0].requires_grad)
            keep_marks(stack, own[0])
            for view in own:  # of what the host makes of it; until then they keep no memory
                view.data = together.new_empty(1).expand_as(view)
            delattr(self, name)
            self.register_parameter(name, stack)
            self._views[name] = list(own)
            made[stack] = own[0]
        return made

    def _likened(self) -> tuple[nn.Parameter, ...]:
        """The stacks, whose views are of their type and on their device, but lie anywhere: a view
        would keep memory that a host takes from a stack between passes."""
        for stack, views in zip(stacks := self.stacks, self._views.values()):
            first = views[0]
            if first.dtype != stack.dtype or first.device != stack.device:
                for view in views:
                    view.data = stack.data.new_empty(1).expand_as(view)
            if first.requires_grad != stack.requires_grad:
                for view in views:
                    view.requires_grad_(stack.requires_grad)
        return stacks

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        if self._views:
            assert [slot.number for slot in slots] == list(range(len(slots))), "stacked slots stay"
            return
        for index, name in enumerate(self.weight_names):
            self.add_module(name, nn.ParameterList([slot.parameters[index] for slot in slots]))

    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the first slot's expert in name order, then of the second's, and so on; or one
        of all slots for each name. As experts use them: with what adapters add. Collective over the
        ETP group where its ranks split experts that have adapters."""
        if not self._views and not self.low_ranks:
            return tuple(chain.from_iterable(self._by_slot()))
        stacks: Sequence[Tensor] = self._likened()
        if self.low_ranks:
            self._check_adapters()
            if not self._views:
                stacks = [torch.stack(column) for column in zip(*self._by_slot())]
                if not stacks:  # no expert of this layer is owned here
                    return ()
            ep_rank = (
                None
                if self.shard.is_whole
                else self.routed.layer_context.layout.group("esp", INTRA)
            )
            stacks = with_low_ranks(stacks, self.low_ranks, self.shard, ep_rank)
        if self.routed.takes_stacks and self._views:
            return tuple(stacks)
        return tuple(chain.from_iterable(zip(*map(unstacked, stacks))))

    def _check_adapters(self) -> None:
        """Raises ValueError where their weights would not be those that other ranks compute with,
        or ranks would wait for each other."""
        routed, before = self.routed, self._strengths
        self._strengths = tuple(each.strength() for each in self.low_ranks)
        is_copied = routed.replicas is not None and self.training
        if is_copied and before not in ((), self._strengths):
            raise ValueError(
                f"adapters of {routed.name} were switched or rescaled during training "
                f"(strength {before}, now {self._strengths}); replicas on other ranks keep "
                "their weights for a step, so do it in model.eval(), or use a strategy "
                "without replicas (ep)"
            )
        if (
            not self.shard.is_whole
            and routed.joined_passes is not None
            and routed.joined_passes.is_open
        ):
            raise ValueError(
                f"{routed.name} has adapters, whose parts an ETP group gathers in every pass, "
                "so its ranks must run each pass together: do not use ds_moe_ext.joined or "
                "generate without synced_gpus, or set ds_moe_ext.expert_sharding_size to 1"
            )

    def forward(self, hidden: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``. Collective over the EP ranks."""
        self.routed.rows.begin(is_training=self.training)
        is_flat = hidden.dim() == 2  # as it is: autograd would record two views of itself
        x_TD = hidden if is_flat else hidden.reshape(-1, hidden.shape[-1])
        weights = () if self.routed.is_begun else self.weights()
        self.routed.rows.saw_scores(scores)
        y_TD = self.run(x_TD, expert_ids.long(), scores, weights)
        return y_TD if is_flat else y_TD.view_as(hidden)


def _own_slots(
    source: nn.Module, stored: Stored, held: Tensor, shard: Shard, number: int
) -> list[nn.Parameter]:
    """A parameter for each held expert, or this rank's part of it; they are views of one piece of
    memory, and of all experts' weights none is kept."""
    whole = stored.whole(source)
    own_S = shard.of(number, whole.index_select(0, held.to(whole.device)), first_dim=1)
    parameters = []
    for expert, own in zip(held.tolist(), own_S):
        old = stored.of(source, expert)
        parameter = nn.Parameter(own, requires_grad=old.requires_grad)
        keep_marks(parameter, old)
        parameters.append(parameter)
    return parameters


def shell(module: nn.Module) -> nn.Module:
    """The module without its parameters: its methods and settings go on working, and the weights
    that were there may be freed."""
    empty = copy.copy(module)
    empty.__dict__ = dict(vars(module))  # whatever the class's own way to copy it
    empty._parameters = dict.fromkeys(module._parameters)
    return empty


_LEAVE_OUT = "or leave this layer out with ds_moe_ext.moe_layer_pattern"


def check_own_weights(model: nn.Module, name: str) -> None:
    """Experts that go to other ranks take with them what they have, and nothing else: raises
    ValueError where an expert's weight is computed from others, which an adapter or torch keeps."""
    check_not_parametrized(model, name)
    check_not_adapted(model, name)


def check_not_parametrized(model: nn.Module, name: str) -> None:
    """The same of what torch computes."""
    for inner, module in model.get_submodule(name).named_modules(prefix=name):
        if is_parametrized(module):
            weights = ", ".join(f"{inner}.{weight}" for weight in module.parametrizations)
            raise ValueError(
                f"{weights} is parametrized: torch computes it from other weights at each use, "
                "but ds_moe_ext distributes experts as separate parameters; remove it with "
                f"torch.nn.utils.parametrize.remove_parametrizations, {_LEAVE_OUT}"
            )


def check_not_adapted(model: nn.Module, name: str) -> None:
    """The same of adapters."""
    layer, *wrapped = name.split(".base_layer")  # as all adapters of peft have what they adapt
    if wrapped:
        names = [layer + ".base_layer" * depth for depth in range(len(wrapped))]
        adapters = [model.get_submodule(each) for each in names]
        targets = [getattr(adapter, "parameter_name", None) for adapter in adapters]
        weights = " and ".join(f"{target!r}" for target in targets if target) or "its weights"
        raise ValueError(
            f"{layer} has an adapter of peft ({type(adapters[0]).__name__}) on {weights}, "
            "which it changes at each use, but ds_moe_ext distributes experts as separate "
            "parameters and supports only LoRA on stacked expert parameters of transformers; "
            "leave experts out of target_parameters and target_modules (adapters elsewhere, "
            f"as of attention, are fine), {_LEAVE_OUT}"
        )


def _ways_to_split(
    name: str, description: ExpertsDescription, weights: Sequence[Tensor], num_shards: int
) -> tuple[Along, ...]:
    """See ``ways_to_split``; factors follow the weights that they change."""
    own = weights[: len(weights) - description.num_factors]
    alongs = list(ways_to_split(name, description.function, own, num_shards))
    for each in description.low_ranks:
        width = weights[each.down].shape[0]
        if width % num_shards:
            raise ValueError(
                f"ds_moe_ext.expert_sharding_size is {num_shards}, but factors of the adapters of "
                f"{name} are {width} wide (peft's r), of which each rank of an ETP group has a "
                f"part; let r be a multiple of {num_shards}, or set expert_sharding_size to 1"
            )
        alongs += each.ways_to_split(alongs[each.weight])
    return tuple(alongs)


NUM_ROWS = 3
TOLERANCE = 1e-3  # of the largest output; a wrong way is wrong by about all of it

MATRIX = (Along(0, 2), Along(0), Along(1), Along(1, 2))
VECTOR = (Along(0, 2), Along(0), Along(0, adds=True))


def ways_to_split(
    name: str, function: ExpertFunction, weights: Sequence[Tensor], num_shards: int
) -> tuple[Along, ...]:
    """How each weight of an expert is split into parts, by the whole weights of one; values are
    drawn for biases, and for weights that are a shape alone. Raises ValueError where no way does
    it."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for weight in weights:
        # All elements are one where a host has the weight elsewhere. These would add up however
        # they are split; so do biases, which often start as zeros.
        is_shape_alone = weight.is_meta or not any(weight.stride())
        own, device = weight.detach(), weight.device
        if weight.dim() == 1 or is_shape_alone:
            own = torch.randn(weight.shape, generator=generator, device="cpu")
            device = torch.device("cpu") if weight.is_meta else device
        drawn.append(own.to(device, torch.promote_types(weight.dtype, torch.float32)))
    for width in dict.fromkeys(size for weight in weights for size in weight.shape):
        rows_RD = torch.randn(NUM_ROWS, width, generator=generator).to(drawn[0])
        whole = _output(function, WHOLE, rows_RD, drawn)
        if whole is None or whole.shape != rows_RD.shape or not whole.isfinite().all():
            continue
        choices = [  # in which every weight divides, the likely ones first
            [
                along
                for along in (VECTOR if weight.dim() == 1 else MATRIX)
                if weight.shape[along.dim] % (along.num_blocks * num_shards) == 0
            ]
            for weight in drawn
        ]
        for alongs in product(*choices):
            shards = [Shard(alongs, index, num_shards) for index in range(num_shards)]
            parts = [_output(function, shard, rows_RD, drawn) for shard in shards]
            if _adds_up(parts, whole):
                return alongs
    shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
    raise ValueError(
        f"ds_moe_ext.expert_sharding_size is {num_shards}, but the experts of {name}, with "
        f"weights of shapes {shapes}, cannot be split into {num_shards} parts whose outputs "
        f"add up: their hidden width must be a multiple of {num_shards}, and only sums may "
        "follow the second product; set it to 1, or leave the layer out with "
        "ds_moe_ext.moe_layer_pattern"
    )


def _output(
    function: ExpertFunction, shard: Shard, rows_RD: Tensor, weights: Sequence[Tensor]
) -> Tensor | None:
    """Of the expert's part; None where shapes do not fit."""
    slots = SlotRows.of(np.array([rows_RD.shape[0]]), rows_RD.device)
    parts = tuple(shard.of(number, weight) for number, weight in enumerate(weights))
    try:
        with torch.no_grad():
            return on_shard(function, shard)(rows_RD, slots, parts)
    except (RuntimeError, ValueError, IndexError):
        return None


def _adds_up(parts: Sequence[Tensor | None], whole: Tensor) -> bool:
    given = [part for part in parts if part is not None and part.shape == whole.shape]
    if len(given) < len(parts):
        return False
    error = (torch.stack(given).sum(dim=0) - whole).abs().max()
    return bool(error <= TOLERANCE * whole.abs().max()) and bool(whole.abs().max() > 0)
