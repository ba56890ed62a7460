# SPDX-License-Identifier: Apache-2.0
"""One checkpoint of both roles, as stock Megatron would write it of attention ranks alone.

Megatron's distributed format knows weights by name and experts by number, so that each role says
what it has. An attention rank lacks the optimizer of the experts, an expert rank that of all else;
what these have beside tensors by name, as learning rates, is told by the other role.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer import ChainedOptimizer

from ds_moe_ext.core.comm import gather_objects
from ds_moe_ext.hosts.megatron.worlds import Worlds
from ds_moe_ext.strategies.settings import BLOCK


class Absent:
    """In a chain of Megatron's optimizers, one whose weights are on the ranks of the other role.

    Args:
        config: of the chain.
    """

    is_stub_optimizer = True

    def __init__(self, config: Any) -> None:
        self.config = config
        self.model_chunks: list[Any] = []
        self.param_groups: list[Any] = []
        self.optimizer = self

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """It has nothing to tell."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """It is not here."""


def tell_of_both(optimizer: Any, chunk: Any, worlds: Worlds, control: dist.ProcessGroup) -> None:
    """Let a role's optimizer save and load as one of all weights would.

    Args:
        optimizer: Megatron's chain, of this rank's weights.
        chunk: the model in its DDP.
        worlds: the ranks.
        control: all of them, over gloo.
    """
    own, absent = optimizer.chained_optimizers[-1], Absent(optimizer.config)
    mine = 0 if worlds.is_attention else 1  # Megatron chains dense weights before experts
    both = ChainedOptimizer([own, absent] if mine == 0 else [absent, own])

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[int, Any]:
        state: dict[int, Any] = both.sharded_state_dict(*args, **kwargs)
        _, plain = extract_matching_values(state[mine], _is_sharded)
        told = gather_objects((mine, plain) if worlds.is_first else None, control)
        theirs = dict(each for each in told if each is not None)
        return {mine: state[mine], 1 - mine: theirs[1 - mine]}

    optimizer.sharded_state_dict = sharded_state_dict
    optimizer.load_state_dict = both.load_state_dict
    optimizer.state_dict = _refuse
    chunk.state_dict_for_save_checkpoint = _refuse


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedBase)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"{BLOCK}.strategy gives ranks roles, and a part of the model each, which a "
        "checkpoint with a file a rank cannot say; use --ckpt-format torch_dist"
    )


def save_together(
    save: Callable[..., Any], worlds: Worlds, state: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call ``dist_checkpointing.save`` on the ranks of both roles. What both have, as states of
    generators, is told by attention ranks.

    Raises:
        ValueError: it is to go on in the background.
    """
    if kwargs.get("async_sharded_save"):
        raise ValueError(
            f"{BLOCK}.strategy gives ranks roles, which save together: leave --async-save out"
        )
    keys = {value.key for value in nested_values(state) if _is_sharded(value)}
    told = gather_objects(keys if worlds.is_attention else set(), worlds.whole)
    if not worlds.is_attention:
        theirs: set[str] = set().union(*told)
        _, state = extract_matching_values(state, lambda v: _is_sharded(v) and v.key in theirs)
    with worlds.together():
        return save(state, *args, **kwargs)
