# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft on stacked weights of experts, which its ``ParamWrapper`` stands around.

Of an adapted weight it keeps one matrix A of all experts, ``[E * Q, I]``, an expert below the
other, and one matrix B, ``[O, Q * E]``, whose columns are of one expert after the other in turns.
What takes the place of the experts has an expert's parts of both as weights of it, beside those
that they change; the wrappers stay around it without any. Shape letters: E experts, O and I the
dims of a weight, Q LoRA's r.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.experts import ExpertsDescription, found_experts
from ds_moe_ext.hosts.attachment.host_layer import (
    Adopted,
    Found,
    InOne,
    InTurns,
    RoutedOf,
    Stored,
    set_module,
)
from ds_moe_ext.moe.sharding import LowRank, Shard

INNER = "base_layer"
"""What a wrapper calls the module that it stands around."""


def outermost(name: str) -> str:
    """Name of what stands around a module: its own, where that is nothing of peft's."""
    return re.sub(rf"(\.{INNER})+$", "", name)


def wrappers_of(model: nn.Module, name: str) -> list[Any]:
    """The wrappers around a module, the outermost first.

    Args:
        name: of the module within.
    """
    outer = outermost(name)
    depth = (len(name) - len(outer)) // len(f".{INNER}")
    return [model.get_submodule(outer + f".{INNER}" * number) for number in range(depth)]


def is_known(wrappers: Sequence[nn.Module]) -> bool:
    """Whether each is peft's ``ParamWrapper``, which LoRA has for parameters."""
    loaded = sys.modules.get("peft.tuners.lora.layer")  # it is not needed, nor brought
    kind = getattr(loaded, "ParamWrapper", None)
    return kind is not None and all(type(wrapper) is kind for wrapper in wrappers)


def found(model: nn.Module, name: str, module: nn.Module, description: ExpertsDescription) -> Found:
    """A layer with adapters to replace.

    Args:
        name: of the experts within.
        module: these.
        description: of these.

    Raises:
        ValueError: an adapter cannot go along.
    """
    layer, wrappers = outermost(name), wrappers_of(model, name)
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
    """One wrapper.

    Attributes:
        layer: name of the outermost one.
        wrapper: peft's module.
        place: of the wrapper, the outermost at 0.
        name: of its adapter, as peft calls it.
        switch: the wrapper without its weights, which stays: peft switches it off and on.
    """

    layer: str
    wrapper: Any
    place: int
    name: str
    switch: Any

    @classmethod
    def of(cls, layer: str, wrapper: Any, place: int) -> _Adapter:
        names = list(wrapper.lora_A)
        if len(names) != 1:
            raise _refused(
                layer,
                wrapper,
                f"has {len(names)} adapters ({', '.join(names)})",
                "ds_moe_ext spreads the parts of one over ranks",
                "leave one of them, by delete_adapter of the model",
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
                f"of {num_experts} experts each must have factors of its own",
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
            InTurns(f"{within}lora_B.{self.name}.weight", num_experts),
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
            f"the adapters of {layer} cannot be merged or unloaded here: ds_moe_ext has spread the "
            "experts over ranks; load what save_pretrained or ds_moe_ext.full_state_dict gives "
            "into the stock model, and merge them there"
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
                "save_pretrained was called without state_dict, but this rank has the adapters of "
                "its own experts alone; call ds_moe_ext.full_state_dict(engine.module) on all "
                "ranks, and pass what it gives as state_dict"
            )
        save_pretrained(*given, **named)

    return save
