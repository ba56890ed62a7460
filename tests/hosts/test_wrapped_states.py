# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a plain loop whose model has wrapped modules, and states that lack experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ds_moe_ext
from tests.hosts import jobs
from tests.ranks import pool_of

BLOCK = {"enabled": True, "strategy": "ep", "report": {"enabled": False}}
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": lambda module: torch.compile(module, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "nothing": lambda module: module,
}


def started(wrapper: str, *, is_before: bool = False) -> Any:
    """An attached model of which each block is wrapped, before that or behind it."""
    torch.manual_seed(0)
    model: Any = jobs.model_of(jobs.Job("toy"))

    def wrap() -> None:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = WRAPPERS[wrapper](block)

    if is_before:
        wrap()
    moe = ds_moe_ext.attach(model, BLOCK)
    if not is_before:
        wrap()
    moe.watch(torch.optim.AdamW(model.parameters()))
    return moe


def flat(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """All tensors, by dotted names."""
    found = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value
        found.update(flat(value, f"{prefix}{key}."))
    return found


def saved(rank: int, world_size: int, wrapper: str, is_before: bool) -> dict[str, Tensor]:
    return flat(started(wrapper, is_before=is_before).state_dict())


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("wrapper", ["compile", "checkpoint"])
def test_experts_are_saved_by_their_numbers(wrapper: str, is_before: bool) -> None:
    plain, wrapped = (pool_of(2).run(saved, each, is_before) for each in ("nothing", wrapper))
    for ours, others in zip(wrapped, plain):
        assert ours.keys() == others.keys()
        assert all(torch.equal(ours[name], others[name]) for name in others)
    experts = [{name for name in rank if ".experts." in name} for rank in wrapped]
    assert experts[0] and experts[0].isdisjoint(experts[1])


def loaded(rank: int, world_size: int, wrapper: str) -> bool:
    """Whether experts, and what the optimizer keeps of them, are what was loaded."""
    state = started("nothing").state_dict()
    for each in flat(state).values():
        each.add_(1)
    moe = started(wrapper)
    moe.load_state_dict(state)
    now, wanted = flat(moe.state_dict()), flat(state)
    return now.keys() == wanted.keys() and all(torch.equal(now[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("wrapper", ["compile", "checkpoint"])
def test_experts_are_loaded_by_their_numbers(wrapper: str) -> None:
    assert all(pool_of(2).run(loaded, wrapper))


def refused(rank: int, world_size: int) -> list[str]:
    """What is reported states that lack an expert."""
    moe = started("nothing")
    errors = []

    def tried(call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError) as error:
            call()
        errors.append(str(error.value))

    for part in ("model", "optimizer"):
        state = moe.state_dict()
        entries = state["model"] if part == "model" else state["optimizer"]["state"]
        del entries[next(name for name in entries if ".experts.up" in name)]
        tried(partial(moe.load_state_dict, state))

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        del state[f"{prefix}up_EFD.0"]

    moe.model.blocks[0].experts.register_state_dict_post_hook(drop)
    tried(moe.state_dict)
    return errors


def test_a_state_without_an_expert_is_refused() -> None:
    for in_model, in_optimizer, saving in pool_of(2).run(refused):
        for reported in (in_model, in_optimizer):
            assert "the state to load has no blocks.0.experts.up_EFD." in reported
        assert "blocks.0.experts.up_EFD.0 of an expert is missing from the state dict" in saving


def exported(rank: int, world_size: int, wrapper: str) -> dict[str, Tensor]:
    return ds_moe_ext.full_state_dict(started(wrapper).model)


def test_checkpointed_blocks_are_exported_by_the_names_of_the_stock_model() -> None:
    for wrapped, plain in zip(
        *(pool_of(2).run(exported, each) for each in ("checkpoint", "nothing"))
    ):
        assert wrapped.keys() == plain.keys()
        assert all(torch.equal(wrapped[name], plain[name]) for name in plain)
