# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's MoE layers: found in a model, adopted in place.

A layer keeps its router, losses, shared experts, latent projections and recomputation. Its
dispatcher is replaced by one that hands everything on to the experts, and the class of its experts
is swapped for a subclass whose forward runs the layer's program, so that parameters, names, state
dicts and isinstance stay as they are.

Shape letters: T tokens, K choices a token, E experts, D model width, F hidden width, R rows.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as moe_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.host_layer import (
    Adopted,
    ExpertShape,
    Found,
    RoutedOf,
    Slot,
    Wanted,
    shape_of,
    stated,
    weights_of,
)
from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.steps.host import Passes, Schedules
from ds_moe_ext.moe.expert import on_shard
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import RunRows
from ds_moe_ext.moe.layer import RoutedExperts
from ds_moe_ext.moe.sharding import Along, Shard
from ds_moe_ext.strategies.settings import BLOCK


def find_layers(
    model: nn.Module, wanted: Wanted, guests: Callable[..., MegatronExperts] | None = None
) -> Iterator[Found]:
    """The MoE layers, in the order of their modules, which is that in which they run. Where the
    model is a list of chunks, each is a stack of its own: passes through others come between.
    ``guests`` adopts layers that Megatron runs itself; None where our program does."""
    for name, module in model.named_modules():
        if isinstance(module, MoELayer) and wanted(name):
            chunk = int(name.split(".")[0]) if isinstance(model, nn.ModuleList) else 0
            yield _found(name, module, chunk, guests)


def trained_on_any(
    found: Sequence[Found], reported: Sequence[Sequence[ExpertShape]]
) -> list[Found]:
    """The same layers, whose weights count as trained where any rank trains one: all
    experts of some ranks may be frozen. ``reported`` is what an expert of each is like, on the
    ranks that have experts."""
    if any(len(experts) != len(found) for experts in reported):
        return list(found)  # which is compared with those of the others
    layers = []
    for each, *experts in zip(found, *reported):
        trained = [any(weight[3] for weight in weights) for weights in zip(*experts)]
        shape = tuple((*weight[:3], learns) for weight, learns in zip(each.expert, trained))
        layers.append(replace(each, expert=shape))
    return layers


def _found(
    name: str, layer: Any, chunk: int, guests: Callable[..., MegatronExperts] | None
) -> Found:
    kept = layer.experts
    if isinstance(kept, Elsewhere):
        form, kind, expert, function = Form(), kept.kind, kept.expert, kept.function
    else:
        form = form_of(name, kept, by_host=guests is not None)
        kind, function = type(kept).__name__, function_of(kept)
        expert = shape_of_one(name, kept, form)
    choices = Choices.of(name, layer)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        if isinstance(layer.experts, Runs):
            raise ValueError(
                f"{name} is already run by ds_moe_ext: get_megatron_optimizer was called twice "
                "for this model; call it once, or build a new model"
            )
        if held.tolist() != list(layer.local_expert_indices):
            raise ValueError(
                f"this rank would own experts {held.tolist()} of {name}, but Megatron built "
                f"it with experts {list(layer.local_expert_indices)}"
            )
        routed = routed_of(on_shard(function, shard))
        cls: type = type(layer.experts)
        hosted: MegatronExperts
        if guests is not None:
            hosted = guests(layer, form, shard, routed)
            layer.experts.__class__ = hosted_class(cls, RunsGuests)
        else:
            hosted = HostedExperts(layer.experts, form, shard, routed, choices)
            layer.experts.__class__ = hosted_class(cls)
            layer.token_dispatcher = Dispatcher(layer.token_dispatcher.shared_experts)
        hosted.numbers = held.tolist()
        layer.experts.hosted = hosted
        return Adopted(hosted, {p: (p,) for slot in hosted.slots() for p in slot.parameters}, ())

    return Found(
        name=name,
        kind=kind,
        num_experts=layer.config.num_moe_experts,
        expert=expert,
        num_ep_ranks=layer.ep_group.size(),
        may_drop=choices.may_drop,
        split=lambda num_shards: ways_of(layer.config),
        adopt=adopt,
        stack=chunk,
        routing=stated(choices.config),
    )


# Megatron-core's modules of experts: where the weights of each lie, and what they compute.


class Form:
    """How a class of Megatron's keeps its experts; of this one, experts are on other ranks."""

    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        """This rank's experts; ``names`` are of Megatron's parameters, see ``weight_names``."""
        return []

    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        """Take these slots in place of the present ones."""
        assert not slots, "a rank without experts has no module for them"

    def key(self, key: str, slot: int) -> str:
        """Of a state that is the first slot's, that of another one."""
        raise AssertionError("a rank without experts has no state of them")

    @contextmanager
    def extended(
        self, experts: Any, names: Sequence[str], more: Sequence[Sequence[Tensor]]
    ) -> Iterator[None]:
        """Inside the block the module has more slots behind its own, with these weights, which are
        no parameters of it."""
        assert not more, "a rank without experts has no module for them"
        yield


class Sequential(Form):
    """``SequentialMLP``: a module each."""

    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        return [
            Slot(tuple(expert.get_parameter(name) for name in names), expert)
            for expert in experts.local_experts
        ]

    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        held = experts.local_experts  # the same list: Megatron keeps hooks by module
        del held[:]
        held.extend(slot.module for slot in slots if slot.module is not None)
        experts.num_local_experts = len(slots)

    def key(self, key: str, slot: int) -> str:
        return key.replace("local_experts.0.", f"local_experts.{slot}.", 1)

    @contextmanager
    def extended(
        self, experts: Any, names: Sequence[str], more: Sequence[Sequence[Tensor]]
    ) -> Iterator[None]:
        own = experts.local_experts
        guests: list[nn.Module] = vars(experts).setdefault("guests_of_ds_moe_ext", [])
        while len(guests) < len(more):
            guests.append(module_like(own[0]))
        for guest, weights in zip(guests, more):
            for name, weight in zip(names, weights):
                path, _, key = name.rpartition(".")
                setattr(guest.get_submodule(path), key, weight)
            for module, like in zip(guest.modules(), own[0].modules()):
                module.training = like.training
                if hasattr(like, FIRST):  # Transformer Engine casts weights anew then
                    setattr(module, FIRST, getattr(like, FIRST))
        experts._modules["local_experts"] = [*own, *guests[: len(more)]]
        experts.num_local_experts = len(own) + len(more)
        try:
            yield
        finally:
            experts._modules["local_experts"] = own
            experts.num_local_experts = len(own)


FIRST = "is_first_microbatch"
FUSED = "_with_fused_impl"  # of ``TEGroupedMLP``, in versions that have fused ops
HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    "_load_state_dict_post_hooks",
)


def module_like(expert: nn.Module) -> nn.Module:
    """A module that computes as an expert of Megatron's does, without parameters and hooks: they
    are attributes that somebody sets."""
    memo: dict[int, Any] = {}
    for module in expert.modules():
        memo.update((id(vars(module)[hooks]), OrderedDict()) for hooks in HOOKS)
        memo.update((id(p), None) for p in module._parameters.values() if p is not None)
        memo.update((id(value), value) for value in _groups(vars(module)))
        config = getattr(module, "config", None)
        memo[id(config)] = config
    made = deepcopy(expert, memo)
    for module, like in zip(made.modules(), expert.modules()):
        for name, parameter in like._parameters.items():
            if parameter is not None:
                del module._parameters[name]
    return made


def _groups(values: Mapping[Any, Any]) -> Iterator[dist.ProcessGroup]:
    """Process groups among values, and in mappings among these, as fp8's."""
    for value in values.values():
        if isinstance(value, dist.ProcessGroup):
            yield value
        elif isinstance(value, dict):
            yield from _groups(value)


class Grouped(Form):
    """``TEGroupedMLP``: the two linear modules have a parameter each for every expert."""

    def slots(self, experts: Any, names: Sequence[str]) -> list[Slot]:
        return [
            Slot(tuple(experts.get_parameter(f"{name}{slot}") for name in names))
            for slot in range(experts.num_local_experts)
        ]

    def hold(self, experts: Any, slots: Sequence[Slot], names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            path, _, key = name.rpartition(".")
            linear = experts.get_submodule(path)
            for slot in range(experts.num_local_experts):
                delattr(linear, f"{key}{slot}")
            for slot, held in enumerate(slots):
                linear.register_parameter(f"{key}{slot}", held.parameters[number])
            linear.num_gemms = len(slots)
        experts.num_local_experts = len(slots)

    def key(self, key: str, slot: int) -> str:
        number = slot or ("" if key.endswith("_extra_state") else 0)
        return f"{key.removesuffix('0')}{number}"

    @contextmanager
    def extended(
        self, experts: Any, names: Sequence[str], more: Sequence[Sequence[Tensor]]
    ) -> Iterator[None]:
        num_own, is_fused = int(experts.num_local_experts), getattr(experts, FUSED, False)
        named = [name.rpartition(".") for name in names]
        linears = {path: experts.get_submodule(path) for path, _, _ in named}
        # Not by ``setattr``, for which a module looks at all that it has.
        added: dict[str, dict[str, Any]] = {path: {} for path in linears}
        for number, weights in enumerate(more, num_own):
            for (path, _, key), weight in zip(named, weights):
                added[path][f"{key}{number}"] = weight
            if len(linears) == len(named):  # Transformer Engine has empty tensors for biases then
                for path, linear in linears.items():
                    added[path][f"bias{number}"] = getattr(linear, "bias0", None)
        for path, linear in linears.items():
            vars(linear).update(added[path])
        if is_fused:  # into one op, that was made of the parameters
            setattr(experts, FUSED, False)
        try:
            _resize(experts, linears.values(), num_own + len(more))
            yield
        finally:
            _resize(experts, linears.values(), num_own)
            if is_fused:
                setattr(experts, FUSED, True)
            for path, linear in linears.items():
                for key in added[path]:
                    vars(linear).pop(key, None)


def _resize(experts: Any, linears: Iterable[Any], num_slots: int) -> None:
    """Let a ``TEGroupedMLP`` compute so many slots. Quantizers of Transformer Engine are made anew
    where there are some for fewer GEMMs; what is saved says how many there are of parameters."""
    experts.num_local_experts = num_slots
    for name in ("quantization_padding", "quantization_unpadding"):
        if hasattr(experts, name):
            getattr(experts, name).num_gemms = num_slots
    for linear in linears:
        linear.num_gemms = num_slots
        meta = getattr(linear, "fp8_meta", {})
        if "num_gemms" in meta:
            meta["num_gemms"] = num_slots
            made = len(linear.quantizers.get("scaling_bwd") or ())
            if 0 < made < 2 * num_slots:  # two for each: gradients of outputs and inputs
                linear.fp8_meta_tensors_initialized = linear.fp8_initialized = False


FORMS: dict[str, Form] = {"SequentialMLP": Sequential(), "TEGroupedMLP": Grouped()}
"""By the name of Megatron's own class, for not every version has all."""

COMPUTES = ("forward", "bias_act_func")
"""Methods of Megatron's classes whose work is done by our program."""


def form_of(name: str, experts: nn.Module, *, by_host: bool = False) -> Form:
    """How these experts are kept: as the class of Megatron's that they are of keeps them. Raises
    ValueError where that is not known; or, unless the host runs them, where they compute
    otherwise."""
    known = (cls for cls in type(experts).__mro__ if cls.__name__ in FORMS)
    stock = next((cls for cls in known if getattr(moe_experts, cls.__name__, None) is cls), None)
    kind = f"{type(experts).__module__}.{type(experts).__qualname__}"
    if stock is None:
        raise ValueError(
            f"the experts of {name} are a {kind}, which ds_moe_ext does not support; it "
            f"supports {' and '.join(FORMS)} of Megatron-core: leave out "
            "--moe-use-legacy-grouped-gemm and your own specs, or the layer with "
            "ds_moe_ext.moe_layer_pattern"
        )
    if by_host:
        return FORMS[stock.__name__]
    own = _overridden(experts, stock)
    if not own and "local_experts" in experts._modules:
        alone = (
            _overridden(expert, MLP) for expert in experts.get_submodule("local_experts").children()
        )
        own = next(filter(None, alone), "")
    if own:
        raise ValueError(
            f"the experts of {name} are a {kind} with a {own}, which ds_moe_ext would not run; use "
            f"Megatron's {stock.__name__}, or leave the layer out with "
            "ds_moe_ext.moe_layer_pattern"
        )
    return FORMS[stock.__name__]


def _overridden(module: nn.Module, stock: type) -> str:
    """What a module computes by other means than Megatron's class; empty if nothing."""
    if not isinstance(module, stock):
        return f"{type(module).__qualname__} in the place of an {stock.__name__}"
    below = takewhile(lambda cls: cls is not stock, type(module).__mro__)
    for holder in (module, *(cls for cls in below if not issubclass(cls, Runs))):
        for method in COMPUTES:
            if method in vars(holder):
                return f"{method} of its own"
    return ""


def weight_names(config: Any) -> tuple[str, ...]:
    """Of the parameters of one expert, as it takes them."""
    parts = ("weight", "bias") if config.add_bias_linear else ("weight",)
    return tuple(f"{linear}.{part}" for linear in ("linear_fc1", "linear_fc2") for part in parts)


def shape_of_one(name: str, experts: Any, form: Form) -> ExpertShape:
    """What an expert of a layer is like. Raises ValueError where its linear modules are not
    Megatron's."""
    names = weight_names(experts.config)
    try:
        slots = [slot.parameters for slot in form.slots(experts, names)]
    except AttributeError as error:
        raise ValueError(
            f"experts of {name} lack {' or '.join(names)} ({error}): their linear modules are "
            "wrapped or changed, as by adapters (LoRA); do not wrap experts, or leave the "
            "layer out with ds_moe_ext.moe_layer_pattern"
        ) from error
    trained = [any(p.requires_grad for p in column) for column in zip(*slots)]
    return shape_of(zip(names, slots[0], trained))


def ways_of(config: Any) -> tuple[Along, ...]:
    """How Megatron's expert tensor parallelism splits each of them: the hidden width, of gate and
    of up where there are both."""
    into = Along(0, 2 if config.gated_linear_unit else 1)
    if not config.add_bias_linear:
        return into, Along(1)
    return into, into, Along(1), Along(0, adds=True)


def function_of(experts: Any) -> FeedForwardExperts:
    """What they compute, without the scores: those are applied to what comes out."""
    config = experts.config
    return FeedForwardExperts(activation_of(experts, config), has_bias=bool(config.add_bias_linear))


class MegatronExperts:
    """One layer's experts on this rank, whoever runs it; an ``attachment.host_layer.Hosted``."""

    def __init__(self, experts: Any, form: Form, shard: Shard, routed: RoutedExperts) -> None:
        self.experts, self.form, self.shard = experts, form, shard
        self.weight_names = weight_names(experts.config)
        self.routed = routed
        self.run: RunRows = routed
        # Called before weights are read, which the host may still be gathering; and before
        # parameters are read by their names.
        self.ready: Callable[[], None] = lambda: None
        self.named: Callable[[], None] = lambda: None
        self.numbers: list[int] = []  # of this rank's experts, at first
        self.passes = Passes(Schedules())

    @property
    def training(self) -> bool:
        return bool(self.experts.training)

    stacks = ()  # parameters are Megatron's

    def slots(self) -> list[Slot]:
        return self.form.slots(self.experts, self.weight_names)

    def hold(self, slots: Sequence[Slot]) -> None:
        """Take these slots in place of the present ones."""
        self.form.hold(self.experts, slots, self.weight_names)

    def saved(self, stock: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What Megatron's own ``sharded_state_dict`` says of them. It numbers experts as if ranks
        had equally many: where they have not, it is asked for one after another."""
        experts, num_experts = self.experts, self.experts.config.num_moe_experts
        num_own, ep_group = len(self.numbers), getattr(experts, "ep_group", None)
        first = 0 if ep_group is None else ep_group.rank() * num_own
        is_even = ep_group is None or ep_group.size() * num_own == num_experts
        if is_even and self.numbers == list(range(first, first + num_own)):
            return stock()
        slots, state = self.slots(), dict[str, Any]()
        try:
            for number, (slot, expert) in enumerate(zip(slots, self.numbers, strict=True)):
                self.hold([slot])
                with _numbered(experts, _OneExpert(expert, num_experts)):
                    state |= {self.form.key(key, number): part for key, part in stock().items()}
        finally:
            self.hold(slots)
        return state

    def weights(self) -> tuple[Tensor, ...]:
        """Weights of the first slot's expert in name order, then of the second's, and so on."""
        self.ready()
        return weights_of(self.slots())


class _OneExpert(NamedTuple):
    """In the place of a group of EP ranks that have an expert each."""

    number: int  # of the expert
    num_experts: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.num_experts


@contextmanager
def _numbered(experts: Any, group: _OneExpert) -> Iterator[None]:
    """Experts are numbered by this group, inside the block."""
    collections = {
        id(owner): owner
        for module in experts.modules()
        if (owner := vars(module).get("_pg_collection")) is not None
    }
    with ExitStack() as stack:
        stack.enter_context(during(experts, ep_group=group))
        for owner in collections.values():
            stack.enter_context(during(owner, ep=group))
        yield


class HostedExperts(MegatronExperts):
    """Experts that our program computes, in the layer's forward."""

    def __init__(
        self, experts: Any, form: Form, shard: Shard, routed: RoutedExperts, choices: Choices
    ) -> None:
        super().__init__(experts, form, shard, routed)
        self.choices = choices

    def __call__(self, x_TD: Tensor, routing_map: Tensor, probs: Tensor) -> Tensor:
        """``[T, D]`` to ``[T, D]``, by Megatron's map and probabilities, ``[T, E]``. Collective
        over the EP ranks."""
        self.routed.rows.begin(is_training=self.training)
        self.passes.begins(is_training=self.training)
        expert_TK, score_TK = self.choices(routing_map, probs)
        self.routed.rows.saw_scores(score_TK)
        if self.choices.config.moe_apply_probs_on_input:  # of the only choice
            x_TD = (score_TK * x_TD).to(x_TD.dtype)
            score_TK = torch.ones_like(score_TK)
        y_TD = self.run(x_TD, expert_TK, score_TK, self.weights())
        self.passes.watch(y_TD)
        return y_TD


class Runs:
    """Put before a class of Megatron's: its parameters are saved as if nothing had moved."""

    hosted: Any  # a ``MegatronExperts``

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's own, for experts that are where it put them."""
        self.hosted.named()
        stock = super().sharded_state_dict  # type: ignore[misc]
        return self.hosted.saved(partial(stock, *args, **kwargs))


class RunsGuests(Runs):
    """Its forward is Megatron's own, with the slots of guests."""

    def forward(self, x: Tensor, *given: Any) -> Any:
        """As Megatron's dispatcher calls it."""
        return self.hosted(super().forward, x, *given)  # type: ignore[misc]

    def backward_dw(self, *given: Any, **named: Any) -> None:
        """Gradients of weights that were put off."""
        self.hosted.backward_dw(partial(super().backward_dw, *given, **named))  # type: ignore[misc]


class RunsHosted(Runs):
    """Its forward runs the layer's program."""

    def forward(self, x_TD: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """In the place of rows of this rank's experts, as our dispatcher hands it over, all."""
        return self.hosted(x_TD, routing_map, probs), None


@cache  # not one class for every instance
def hosted_class(cls: type, runs: type = RunsHosted) -> type:
    """The class that instances get; its name stays, for those who look at it."""
    return type(cls.__name__, (runs, cls), {"__module__": cls.__module__})


# Their activation, as Megatron computes it: fused functions of its do not all that plain ones do.


def activation_of(experts: Any, config: Any) -> Callable[[Tensor], Tensor]:
    """What lies between the two linear modules of an expert; gate and up lie behind each other."""
    if getattr(config, "use_te_activation_func", False):
        owner = experts if hasattr(experts, "activation_func") else experts.local_experts[0]
        by_engine: Callable[[Tensor], Tensor] = owner.activation_func
        return by_engine
    plain: Callable[[Tensor], Tensor] = config.activation_func
    if not config.gated_linear_unit:
        return plain
    clamp = None if forgets_clamp(config) else getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", None) or 0.0
    if plain is torch.nn.functional.silu and clamp is None and not offset:
        return silu_gated
    return Gated(plain, clamp, offset)


def forgets_clamp(config: Any) -> bool:
    """Whether Megatron's fused SwiGLU leaves out the clamp that was asked for: up to some version
    it has no parameter for one. Of a ``TransformerConfig``."""
    if getattr(config, "activation_func_clamp_value", None) is None:
        return False
    is_swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    if not is_swiglu or not config.bias_activation_fusion:
        return False
    taken = inspect.signature(weighted_bias_swiglu_impl).parameters
    return not any("clamp" in name for name in taken)


@dataclass(frozen=True)
class Gated:
    """Megatron's gated linear unit: ``activation(gate) * (up + offset)``, ``[R, 2F] -> [R, F]``."""

    activation: Callable[[Tensor], Tensor]
    clamp: float | None  # gate at most this, up at most this in size
    offset: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(min=-self.clamp, max=self.clamp)
        return self.activation(gate) * (up + self.offset)


# What a router chose, in the form in which our layers take it: experts and scores ``[T, K]``
# from its map and probabilities ``[T, E]``.


STOCK = "megatron.core."


@dataclass(frozen=True, eq=False)
class Choices:
    """How the choices of one layer are read."""

    name: str
    config: Any  # of the router; read in each pass: an evaluation has other capacities and padding
    is_own: bool  # the router is not Megatron's, and may choose fewer or more than it was asked to
    may_drop: bool  # the layer's program takes choices that were dropped

    @classmethod
    def of(cls, name: str, layer: Any) -> Choices:
        """Of a ``MoELayer``, which may drop choices where it was built to, or by its own router."""
        config = getattr(layer.router, "config", layer.config)
        is_own = has_own_routing(layer.router)
        return cls(name, config, is_own, is_own or config.moe_expert_capacity_factor is not None)

    def __call__(self, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and scores; -1 where a choice was dropped.

        The host does not wait for the device, but where the router is the user's own: nothing else
        says that it chose more than there is room for. Raises ValueError where choices would be
        dropped, by the router or here, that must not be.
        """
        config, top_k = self.config, self.config.moe_router_topk
        self._check_capacity(routing_map.shape[1])
        if self.is_own:
            self._check_number(routing_map)
        if config.moe_pad_expert_input_to_capacity:
            routing_map = routing_map & (probs != 0)  # without the rows that only fill up
        expert_TK = routing_map.byte().topk(top_k, dim=1).indices
        score_TK = probs.gather(1, expert_TK)
        if self.is_own or (self.may_drop and config.moe_expert_capacity_factor is not None):
            expert_TK = expert_TK.masked_fill(~routing_map.gather(1, expert_TK), -1)
        return expert_TK, score_TK

    def _check_capacity(self, num_experts: int) -> None:
        factor, top_k = self.config.moe_expert_capacity_factor, self.config.moe_router_topk
        if self.may_drop or factor is None or factor >= num_experts / top_k:
            return
        raise ValueError(
            f"{BLOCK}: the capacity factor of {self.name} is {factor} in this pass, but was "
            "None when its optimizer was made, so its program drops no tokens; give "
            "--moe-expert-capacity-factor from the start, or here at least "
            f"{num_experts / top_k:g} ({num_experts} experts, {top_k} choices), which drops "
            "nothing"
        )

    def _check_number(self, routing_map: Tensor) -> None:
        most = int(routing_map.sum(1).max()) if len(routing_map) else 0
        if most > self.config.moe_router_topk:
            raise ValueError(
                f"{BLOCK}: the router of {self.name}, which is not Megatron's, chose {most} "
                "experts for a token, but the layer takes at most --moe-router-topk "
                f"{self.config.moe_router_topk} of them; give --moe-router-topk {most} or more (a "
                "token may have fewer choices)"
            )


def has_own_routing(router: Any) -> bool:
    """Whether code other than Megatron's chooses: by a class below its router, or instead."""
    methods = (getattr(router, name, None) for name in ("forward", "routing"))
    return not all((getattr(m, "__module__", None) or "").startswith(STOCK) for m in methods)


# Megatron's dispatcher has six phases, called in this order in versions 0.13 and up; ours hands
# everything on to the experts, whose program does all of them.


class _Pass(threading.local):
    """What a pass keeps between phases. Under zebra parallelism several are under way at once, each
    in a thread of its own."""

    shape: torch.Size
    routing_map: Tensor


class Dispatcher:
    """In the place of a ``MoETokenDispatcher``."""

    def __init__(self, shared_experts: Any | None) -> None:
        self.shared_experts = shared_experts  # that the replaced one ran beside its phases, if any
        self._pass = _Pass()

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep what later phases are not given."""
        self._pass.shape, self._pass.routing_map = hidden.shape, routing_map
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden)
        return hidden.reshape(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing travels yet."""
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts are called with: the map stands where Megatron counts rows."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden)
        return hidden, self._pass.routing_map, probs

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Asked for by versions 0.19 and up: none, what experts give is nobody's buffer."""
        return None, None

    def combine_preprocess(self, output: Tensor) -> Tensor:
        """Everything is back already."""
        return output

    def token_combine(self, output: Tensor, *options: Any, **named: Any) -> Tensor:
        """Everything is back already."""
        return output

    def combine_postprocess(self, output: Tensor) -> Tensor:
        """In the shape that came in, with what shared experts add."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        output = output.view(self._pass.shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


class Elsewhere(nn.Module):
    """In the place of experts that were built here, and are on other ranks."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.config = experts.config
        self.kind = type(experts).__name__
        self.expert: ExpertShape = shape_of_one("a layer", experts, form_of("a layer", experts))
        self.function: FeedForwardExperts = function_of(experts)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing: the ranks that have them report them."""
        return {}


def leave_experts(layer: Any, kept: Sequence[int] = ()) -> None:
    """Drop experts of a layer that has been built, but as many as ``kept``, their numbers."""
    if kept:
        form, names = form_of("a layer", layer.experts), weight_names(layer.config)
        form.hold(layer.experts, form.slots(layer.experts, names)[: len(kept)], names)
    else:
        layer.experts = Elsewhere(layer.experts)
    layer.local_expert_indices = list(kept)
    layer.num_local_experts = len(kept)
