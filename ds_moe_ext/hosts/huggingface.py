# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers, version 5: the experts modules of its MoE blocks.

Nearly all families keep ``gate_up_proj`` and ``down_proj`` (or ``up_proj``) with the experts as
first dim, and say by attributes how they are stored: these are found by that, whatever their names.
Four are known by name, for they call or keep experts otherwise; and adapters of peft may stand
around experts.

Shape letters: T tokens, E experts, K choices of a token, R rows, D model width, F expert width; of
an adapter O and I the dims of a weight, Q LoRA's r.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ds_moe_ext.hosts.attachment.experts import (
    ExpertsDescription,
    check_not_adapted,
    check_not_parametrized,
    class_of,
    found_experts,
    is_registered,
    shell,
)
from ds_moe_ext.hosts.attachment.host_layer import (
    Adopted,
    Found,
    InOne,
    Interleaved,
    OneEach,
    RoutedOf,
    Stored,
    Wanted,
    set_module,
)
from ds_moe_ext.hosts.attachment.modules import named_modules
from ds_moe_ext.moe.expert import ModuleExperts
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.sharding import LowRank, Shard


def find(model: nn.Module, wanted: Wanted) -> Iterator[Found]:
    """The experts modules of Hugging Face's MoE blocks, in model order."""
    for name, module in named_modules(model):
        if _is_experts(module) and wanted(outermost_name(name)):
            check_not_parametrized(model, name)
            yield _found(model, name, module)


def adapted(model: nn.Module) -> Iterator[str]:
    """Names of the layers whose experts have adapters."""
    for name, module in named_modules(model):
        layer = outermost_name(name)
        if layer != name and _is_experts(module):
            yield layer


def _found(model: nn.Module, name: str, module: nn.Module) -> Found:
    wrappers = wrappers_of(model, name)
    if wrappers:
        block = model.get_submodule(outermost_name(name).rpartition(".")[0])
        is_other = _is_of_other_family(module) or is_llama4_block(block)
        if is_other or not is_known(wrappers):
            check_not_adapted(model, name)
        return found_adapted(model, name, module, _describe(name, module))
    if _is_of_other_family(module):
        _check_call(name, module)  # a class of that name on the Hub may be another
    if is_dbrx(module):
        return found_dbrx(model, name, module)
    if is_longcat_flash(module):
        return found_longcat_flash(model, name, module, _activation(module, is_gated=True))
    if is_switch(module):
        return found_switch(model, name, module)
    block = model.get_submodule(name.rpartition(".")[0])
    if is_llama4_block(block):
        return found_llama4(model, block, name, _describe_llama4(module))
    return found_experts(model, name, module, _describe(name, module))


def _is_experts(module: nn.Module) -> bool:
    if not class_of(module).__module__.startswith(("transformers.", "transformers_modules.")):
        return False
    if is_registered(module):  # who did so knows better
        return False
    if _is_of_other_family(module):
        return True
    computed = is_parametrized(module, "down_proj")
    down: Any = module.down_proj if computed else module._parameters.get("down_proj")
    return down is not None and down.dim() == 3 and hasattr(module, "num_experts")


def _is_of_other_family(module: nn.Module) -> bool:
    return any(is_one(module) for is_one in (is_dbrx, is_longcat_flash, is_switch))


def _describe(name: str, module: nn.Module) -> ExpertsDescription:
    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} is a {kind} that normalises after each expert, which ds_moe_ext does not "
            "support yet; leave this layer out with ds_moe_ext.moe_layer_pattern"
        )
    _check_call(name, module)
    up_name = "gate_up_proj" if "gate_up_proj" in module._parameters else "up_proj"
    names = [up_name, "down_proj"]
    has_bias = f"{up_name}_bias" in module._parameters
    if has_bias:
        names = [up_name, f"{up_name}_bias", "down_proj", "down_proj_bias"]
    unknown = sorted({key for key, _ in module.named_parameters()}.difference(names))
    if unknown:
        raise ValueError(
            f"{name} is a {kind} with weights that ds_moe_ext does not know: {', '.join(unknown)}; "
            "leave this layer out with ds_moe_ext.moe_layer_pattern"
        )
    if up_name == "gate_up_proj" and not hasattr(module, "_apply_gate"):
        raise ValueError(
            f"{name} is a {kind} without _apply_gate, which transformers' decorator "
            "use_experts_implementation gives its classes, so that ds_moe_ext cannot know how gate "
            f"and up lie in gate_up_proj; decorate {kind}, describe it with "
            "ds_moe_ext.register_experts, or leave the layer out with ds_moe_ext.moe_layer_pattern"
        )
    up, down = module.get_parameter(up_name), module.get_parameter("down_proj")
    return ExpertsDescription(
        num_experts=down.shape[0],
        weight_names=tuple(names),
        function=FeedForwardExperts(
            _activation(module, is_gated=up_name == "gate_up_proj"),
            # Not transposed: up [E, F', D] and down [E, D, F].
            is_transposed=bool(getattr(module, "is_transposed", up.shape[2] != down.shape[1])),
            has_bias=has_bias,
        ),
    )


def _describe_llama4(module: nn.Module) -> ExpertsDescription:
    """It has no decorator, but what that would say is always the same."""
    weights: Any = module
    return ExpertsDescription(
        num_experts=weights.num_experts,
        weight_names=("gate_up_proj", "down_proj"),
        function=FeedForwardExperts(_activation(module, is_gated=True), is_transposed=True),
    )


def _check_call(name: str, module: nn.Module) -> None:
    """Names show what the arguments are: ids and scores are both ``[T, K]``."""
    taken = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(taken) >= 3 and IDS.search(taken[1]) and SCORES.search(taken[2]):
        return
    kind = type(module).__name__
    raise ValueError(
        f"{name} is a {kind} that is called as experts({', '.join(taken)}), not as "
        "experts(hidden, expert_ids, scores); leave the layer out with "
        "ds_moe_ext.moe_layer_pattern, which keeps it unchanged, or let the model call "
        "experts like this, with a class registered with ds_moe_ext.register_experts"
    )


IDS = re.compile("ind|ids|experts")

SCORES = re.compile("weight|score|prob")


def _activation(module: nn.Module, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """What stands between the two matrices; ours where it computes the same."""
    # Not at the top: the host may be there without transformers.
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    code: Any = shell(module)  # settings and methods, without the weights
    if not is_gated:
        activation: Callable[[Tensor], Tensor] = code.act_fn
        return activation
    gated: Any = getattr(code, "_apply_gate", None) or MethodType(_default_apply_gate, code)
    is_silu = isinstance(getattr(code, "act_fn", None), (nn.SiLU, SiLUActivation))
    is_default = getattr(gated, "__func__", None) is _default_apply_gate
    return silu_gated if is_silu and is_default else gated


# DBRX: three matrices a layer, in each of which those of all experts lie one below the other,
# without a dim of experts.


DBRX_NAMES = ("w1", "v1", "w2")

DBRX_KEPT = tuple(f"mlp.{name}" for name in DBRX_NAMES)


def is_dbrx(module: nn.Module) -> bool:
    return class_of(module).__name__ == "DbrxExperts"


def found_dbrx(model: nn.Module, name: str, module: nn.Module) -> Found:
    experts: Any = module
    unknown = {key for key, _ in module.named_parameters()}.difference(DBRX_KEPT)
    if unknown:
        raise ValueError(
            f"{name} has experts of DBRX with weights that ds_moe_ext does not know: "
            f"{', '.join(sorted(unknown))}; let them have {', '.join(DBRX_KEPT)} and no more "
            "(adapters of experts are not supported), or leave the layer out with "
            "ds_moe_ext.moe_layer_pattern"
        )
    described = ExpertsDescription(
        num_experts=experts.num_experts,
        weight_names=DBRX_NAMES,
        function=ModuleExperts(_DbrxExpert(experts.mlp.activation_fn), DBRX_NAMES),
        kept_as=tuple(InOne(each, experts.num_experts, is_flat=True) for each in DBRX_KEPT),
    )
    return found_experts(model, name, module, described)


class _DbrxExpert(nn.Module):
    """One expert, whose weights come with each call: each of them ``[F, D]``."""

    w1: Tensor
    v1: Tensor
    w2: Tensor

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        for name in DBRX_NAMES:
            self.register_parameter(name, None)

    def forward(self, rows_RD: Tensor) -> Tensor:
        gate_RF, up_RF = rows_RD.matmul(self.w1.T), rows_RD.matmul(self.v1.T)
        return (self.activation(gate_RF) * up_RF).matmul(self.w2)


# Llama 4: its block weighs rows before they compute, and gives each of them all rows. Rows of
# experts that a token did not choose are zeros there, as their scores are. A hook of the router
# leaves the scores of those chosen, so that the same block makes rows of these alone, R = K * T
# rows, choices first.


def is_llama4_block(module: nn.Module) -> bool:
    """Whether it is Llama 4's MoE block, which has a router and experts."""
    return class_of(module).__name__ == "Llama4TextMoe"


def found_llama4(
    model: nn.Module, block: nn.Module, name: str, described: ExpertsDescription
) -> Found:
    """The layer of such a block, whose experts have this name."""
    router, experts = block.get_submodule("router"), block.get_submodule("experts")
    whole = found_experts(model, name, experts, described)
    top_k: Any = block.top_k

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted, chosen = whole.adopt(held, shard, routed_of), _Llama4Choices(top_k)
        router.register_forward_hook(chosen.keep)
        block.get_submodule("experts").register_forward_pre_hook(chosen.add_to)
        return adopted

    return replace(whole, adopt=adopt)


class _Llama4Choices:
    """What a block's router chose, until its experts ask."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._ids_R1: Tensor | None = None

    def keep(self, router: nn.Module, given: Any, made: tuple[Tensor, Tensor]) -> Any:
        """Scores ``[T, K]`` in place of ``[T, E]``, of which the others are zeros."""
        scores_TE, logits_TE = made
        scores_TK, ids_TK = scores_TE.topk(self._top_k, dim=1)
        self._ids_R1 = ids_TK.t().reshape(-1, 1)
        return scores_TK, logits_TE

    def add_to(self, experts: nn.Module, given: tuple[Tensor]) -> tuple[Tensor, ...]:
        """Rows ``[R, D]`` with the expert of each, and scores of one, for they are weighed."""
        (rows_RD,), ids_R1 = given, self._ids_R1
        assert ids_R1 is not None, "the router runs before the experts"
        self._ids_R1 = None
        return rows_RD, ids_R1, rows_RD.new_ones(ids_R1.shape)


# LongCat-Flash: the last experts are the identity, and have no weights. A token stays where it is
# for these: it is added by its score, and travels to the others alone.


def is_longcat_flash(module: nn.Module) -> bool:
    """Whether it is LongCat-Flash's, with an expert that is not the identity."""
    is_one = class_of(module).__name__ == "LongcatFlashExperts"
    return is_one and module._parameters.get("down_proj") is not None


def found_longcat_flash(
    model: nn.Module, name: str, module: nn.Module, activation: Callable[[Tensor], Tensor]
) -> Found:
    """The layer of such experts, ``activation`` of which joins gate and up."""
    experts: Any = module
    number, idle = experts.num_routed_experts, experts.zero_expert_num
    described = ExpertsDescription(
        num_experts=number,
        weight_names=("gate_up_proj", "down_proj"),
        function=FeedForwardExperts(activation),
        kept_as=(InOne("gate_up_proj", number, num_unused=idle), InOne("down_proj", number)),
    )
    whole = found_experts(model, name, module, described)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted = whole.adopt(held, shard, routed_of)
        hosted: Any = adopted.hosted
        hosted.register_forward_pre_hook(partial(_keep_at_owner, number))
        hosted.register_forward_hook(_add_own)
        return adopted

    return replace(whole, adopt=adopt, may_drop=True)


def _keep_at_owner(number: int, experts: nn.Module, given: tuple[Tensor, ...]) -> Any:
    """Choices of the identity are marked as dropped."""
    hidden_TD, ids_TK, score_TK = given
    return hidden_TD, ids_TK.masked_fill(ids_TK >= number, -1), score_TK


def _add_own(experts: nn.Module, given: tuple[Tensor, ...], made_TD: Tensor) -> Tensor:
    hidden_TD, ids_TK, score_TK = given
    score_T1 = score_TK.masked_fill(ids_TK >= 0, 0).sum(dim=-1, keepdim=True)
    own_TD: Tensor = (hidden_TD * score_T1).to(made_TD.dtype)
    return made_TD + own_TD


# Switch Transformers: a module each, and one choice a token, which may be dropped. The block
# shows a token's expert by a row of zeros and a one; of zeros alone where the expert is over its
# capacity.


SWITCH_NAMES = ("wi", "wo")


def is_switch(module: nn.Module) -> bool:
    """Whether it is Switch Transformers', whose experts are of their own class."""
    if class_of(module).__name__ != "SwitchTransformersExperts":
        return False
    kinds = {type(expert).__name__ for expert in module.children()}
    return kinds == {"SwitchTransformersDenseActDense"}


def found_switch(model: nn.Module, name: str, module: nn.Module) -> Found:
    experts: Any = module
    _check_alike(name, module)
    numbers = range(experts.num_experts)
    first: Any = experts["expert_0"]
    described = ExpertsDescription(
        num_experts=experts.num_experts,
        weight_names=SWITCH_NAMES,
        function=FeedForwardExperts(_SwitchActivation(first.act, first.dropout)),
        kept_as=tuple(
            OneEach(tuple(f"expert_{number}.{each}.weight" for number in numbers))
            for each in SWITCH_NAMES
        ),
        within=(first.dropout,),
    )
    whole = found_experts(model, name, module, described)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted = whole.adopt(held, shard, routed_of)
        hosted: Any = adopted.hosted
        hosted.register_forward_pre_hook(_as_ids)
        return adopted

    return replace(whole, adopt=adopt, may_drop=True)


def _check_alike(name: str, module: nn.Module) -> None:
    lines = [
        {key: (tuple(p.shape), p.dtype, p.requires_grad) for key, p in each.named_parameters()}
        for each in module.children()
    ]
    wanted = {f"{each}.weight" for each in SWITCH_NAMES}
    if any(each.keys() != wanted or each != lines[0] for each in lines):
        raise ValueError(
            f"{name} has experts of Switch Transformers that are not alike: each needs wi.weight "
            "and wo.weight and no more, of one shape and type, all trained or all frozen (adapters "
            "of experts are not supported); or leave the layer out with "
            "ds_moe_ext.moe_layer_pattern"
        )


@dataclass(frozen=True, eq=False)
class _SwitchActivation:
    """What stands between the two matrices; modules, so that dropout is on in training only."""

    activation: nn.Module
    dropout: nn.Module

    def __call__(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.dropout(self.activation(hidden))
        return made


def ids_of(chosen_TKE: Tensor) -> Tensor:
    """Expert ids ``[T, K]``, -1 where a token is dropped."""
    best_TK, ids_TK = chosen_TKE.max(dim=-1)
    return torch.where(best_TK > 0, ids_TK, -1)


def _as_ids(experts: nn.Module, given: tuple[Tensor, ...]) -> Any:
    hidden_TD, chosen_TKE, score_TK = given
    return hidden_TD, ids_of(chosen_TKE), score_TK


# Adapters of peft on stacked weights of experts, which its ``ParamWrapper`` stands around. Of an
# adapted weight it keeps one matrix A of all experts, ``[E * Q, I]``, an expert below the other,
# and one matrix B, ``[O, Q * E]``, whose columns are of one expert after the other in turns. What
# takes the place of the experts has an expert's parts of both as weights of it, beside those that
# they change; the wrappers stay around it without any.


INNER = "base_layer"
"""What a wrapper calls the module that it stands around."""


def outermost_name(name: str) -> str:
    """Name of what stands around a module: its own, where that is nothing of peft's."""
    return re.sub(rf"(\.{INNER})+$", "", name)


def wrappers_of(model: nn.Module, name: str) -> list[Any]:
    """The wrappers around a module, the outermost first."""
    outer = outermost_name(name)
    depth = (len(name) - len(outer)) // len(f".{INNER}")
    return [model.get_submodule(outer + f".{INNER}" * number) for number in range(depth)]


def is_known(wrappers: Sequence[nn.Module]) -> bool:
    """Whether each is peft's ``ParamWrapper``, which LoRA has for parameters."""
    loaded = sys.modules.get("peft.tuners.lora.layer")  # it is not needed, nor brought
    kind = getattr(loaded, "ParamWrapper", None)
    return kind is not None and all(type(wrapper) is kind for wrapper in wrappers)


def found_adapted(
    model: nn.Module, name: str, module: nn.Module, description: ExpertsDescription
) -> Found:
    """A layer with adapters to replace."""
    layer, wrappers = outermost_name(name), wrappers_of(model, name)
    adapters = [_Adapter.of(layer, wrapper, number) for number, wrapper in enumerate(wrappers)]
    for adapter in adapters:
        adapter.check(description)
    outer, kind = wrappers[0], f"{type(module).__name__} with LoRA"
    described = _with_adapters(description, adapters)
    plain = found_experts(model, layer, outer, described, kind=kind)

    def adopt(held: Tensor, shard: Shard, routed_of: RoutedOf) -> Adopted:
        adopted = plain.adopt(held, shard, routed_of)
        inner: Any = adopted.hosted
        for adapter in reversed(adapters):
            adapter.switch.base_layer = inner
            inner = adapter.switch
        set_module(model, layer, inner)
        _save_with_states_only(model)
        return adopted

    return replace(plain, adopt=adopt)


@dataclass(frozen=True, eq=False)
class _Adapter:
    """One wrapper."""

    layer: str  # name of the outermost one
    wrapper: Any  # peft's module
    place: int  # of the wrapper, the outermost at 0
    name: str  # of its adapter, as peft calls it
    switch: Any  # the wrapper without its weights, which stays: peft switches it off and on

    @classmethod
    def of(cls, layer: str, wrapper: Any, place: int) -> _Adapter:
        names = list(wrapper.lora_A)
        if len(names) != 1:
            raise _refused(
                layer,
                wrapper,
                f"has {len(names)} adapters ({', '.join(names)})",
                "ds_moe_ext distributes the parts of one adapter over ranks",
                "keep one of them, with delete_adapter of the model",
            )
        return cls(layer, wrapper, place, names[0], _switch_of(layer, wrapper))

    @property
    def parameter(self) -> str:
        """Name of the weight that it changes."""
        return str(self.wrapper.parameter_name)

    def check(self, description: ExpertsDescription) -> None:
        """Raises ValueError where it cannot go along with experts."""
        wrapper, num_experts = self.wrapper, description.num_experts
        if wrapper.merged:
            raise _refused(
                self.layer,
                wrapper,
                "is merged into them",
                "its factors would be added a second time",
                "call unmerge_adapter of the model, or merge_and_unload to have none",
            )
        weight = wrapper.get_param()
        is_stack = self.parameter in description.weight_names and weight.dim() == 3
        if not is_stack or wrapper.num_experts != num_experts or num_experts == 1:
            raise _refused(
                self.layer,
                wrapper,
                f"is of a parameter of {weight.dim()} dims that peft takes for "
                f"{wrapper.num_experts} matrices",
                f"each of {num_experts} experts needs its own factors",
                "leave it out of target_parameters",
            )

    def strength(self) -> float:
        """What its product is multiplied by now."""
        is_on = not self.switch.disable_adapters and self.name in self.switch.active_adapters
        return float(self.switch.scaling[self.name]) if is_on else 0.0

    def stored(self, num_experts: int) -> tuple[Stored, Stored]:
        """How peft keeps both factors."""
        within = f"{INNER}." * self.place
        return (
            InOne(f"{within}lora_A.{self.name}.weight", num_experts, is_flat=True),
            Interleaved(f"{within}lora_B.{self.name}.weight", num_experts),
        )


def _with_adapters(
    description: ExpertsDescription, adapters: Sequence[_Adapter]
) -> ExpertsDescription:
    """The experts as the outermost wrapper has them, with the factors behind their weights."""
    within = f"{INNER}." * len(adapters)
    names, kept = list(description.weight_names), list[Stored]()
    kept += [InOne(f"{within}{name}") for name in names]
    low_ranks = []
    for adapter in adapters:
        low_ranks.append(
            LowRank(
                weight=description.weight_names.index(adapter.parameter),
                down=len(names),
                up=len(names) + 1,
                # Older releases of peft take every weight for one that is stored [I, O].
                is_transposed=not getattr(adapter.wrapper, "_did_swap_in_out_features", False),
                strength=adapter.strength,
            )
        )
        names += [f"{adapter.parameter}_lora_{factor}_{adapter.name}" for factor in "AB"]
        kept += adapter.stored(description.num_experts)
    return replace(
        description,
        weight_names=tuple(names),
        kept_as=tuple(kept),
        inside=within.removesuffix("."),
        low_ranks=tuple(low_ranks),
    )


def _refused(layer: str, wrapper: Any, what: str, why: str, remedy: str) -> ValueError:
    return ValueError(
        f"the adapter of peft on {wrapper.parameter_name!r} of {layer} {what}, but {why}; "
        f"{remedy}, or leave this layer out with ds_moe_ext.moe_layer_pattern"
    )


def _switch_of(layer: str, wrapper: Any) -> Any:
    """The wrapper without what it stands around and without weights: it changes nothing, but says
    which adapters are on, and how strong; and peft finds by it which weights to save."""
    switch = copy.copy(wrapper)
    switch.__dict__ = dict(vars(wrapper))
    switch._modules = {
        name: type(inner)() for name, inner in wrapper._modules.items() if name != INNER
    }

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(
            f"the adapters of {layer} cannot be merged or unloaded here: ds_moe_ext has "
            "distributed the experts over ranks; load the output of save_pretrained or "
            "ds_moe_ext.full_state_dict into the stock model, and merge there"
        )

    switch.merge = switch.unmerge = switch.unload_and_optionally_merge_module = refuse
    return switch


def _save_with_states_only(model: nn.Module) -> None:
    """Let peft not save a rank's own experts for all: the model's own state has no others."""
    loaded = sys.modules.get("peft.peft_model")
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.PeftModel):
            saver: Any = module
            if hasattr(saver.save_pretrained, "__self__"):  # still its class's
                saver.save_pretrained = _needing_state(saver.save_pretrained)


def _needing_state(save_pretrained: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save_pretrained)
    def save(*given: Any, **named: Any) -> None:
        if named.get("state_dict") is None:
            raise ValueError(
                "save_pretrained was called without state_dict, but this rank has the "
                "adapters of its own experts only; call "
                "ds_moe_ext.full_state_dict(engine.module) on all ranks, and pass the result "
                "as state_dict"
            )
        save_pretrained(*given, **named)

    return save
