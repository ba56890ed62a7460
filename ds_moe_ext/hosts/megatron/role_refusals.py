# SPDX-License-Identifier: Apache-2.0
"""What ds_moe_ext does not do under Megatron-core where ranks have roles: by the flag's name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from ds_moe_ext.hosts.attachment.notices import Refusal, refuse
from ds_moe_ext.hosts.megatron.refusals import field_of, flag, graphed
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings

_SEVERAL = "several micro-batches are under way at once"


WITH_ROLES = (
    flag(
        "--recompute-granularity",
        field_of("recompute_granularity"),
        "Megatron's checkpoints cannot be cut where experts compute",
        "leave it out; the number of stripes bounds the micro-batches under way",
    ),
    flag(
        "--moe-shared-expert-overlap",
        field_of("moe_shared_expert_overlap"),
        f"it keeps what it has begun in the layer, but {_SEVERAL}",
        "leave it out",
    ),
    flag(
        "--calculate-per-token-loss",
        field_of("calculate_per_token_loss"),
        "expert ranks do not count tokens",
        "leave it out",
    ),
    flag(
        "--mtp-num-layers",
        field_of("mtp_num_layers"),
        "layers that predict more tokens run outside of the model's blocks",
        "leave it out",
    ),
    flag(
        "gradient accumulation fusion",
        field_of("gradient_accumulation_fusion"),
        "gradients are handed over when the backward of a stage is done",
        "use --no-gradient-accumulation-fusion",
    ),
    flag(
        "--fp16",
        field_of("fp16"),
        "the ranks of the two roles would skip steps each by their own scale",
        "use --bf16",
    ),
    flag(
        "--cuda-graph-impl",
        graphed,
        f"a graph's buffers hold one micro-batch, but {_SEVERAL}",
        "leave it out",
    ),
    flag(
        "--cpu-offloading",
        lambda config: (
            getattr(config, "cpu_offloading", False)
            or getattr(config, "fine_grained_activation_offloading", False)
        ),
        f"it takes activations for those of one micro-batch, but {_SEVERAL}",
        "leave it out",
    ),
)


@dataclass(frozen=True)
class Block:
    """Our block of a run with roles.

    Attributes:
        settings: all but the strategy.
        strategy: with its roles.
    """

    settings: Settings
    strategy: Strategy


def _is_set(key: str, value: Callable[[Block], object], reason: str, remedy: str) -> Refusal:
    def asked(block: Block) -> str:
        return f"{BLOCK}.{key} is {value(block)!r}" if value(block) else ""

    return Refusal(f"{BLOCK}.{key}", asked, reason, remedy)


def _other_group(block: Block) -> object:
    size, roles = block.settings.expert_parallel_size, block.strategy.roles
    return size if roles is not None and size not in (None, roles.size) else None


BLOCKS = (
    _is_set(
        "moe_layer_pattern",
        lambda block: block.settings.moe_layer_pattern,
        "expert ranks have no other layers",
        "leave it out",
    ),
    _is_set(
        "expert_sharding_size",
        lambda block: (
            block.settings.expert_sharding_size not in (None, 1)
            and block.settings.expert_sharding_size
        ),
        "every rank of a ZP group is a cell",
        "leave it out",
    ),
    _is_set(
        "expert_parallel_size",
        _other_group,
        "a ZP group has as many cells as there are ranks of both roles",
        "leave it out",
    ),
)


def refuse_with_roles(settings: Settings, strategy: Strategy) -> None:
    """Check the block of a run with roles.

    Raises:
        ValueError: it asks for what only other strategies, or DeepSpeed, can do.
    """
    block = Block(settings, strategy)
    refuse(BLOCKS, block, context=f"{BLOCK}.strategy is {settings.strategy!r} under Megatron")


_ALONE = "each role would decide alone when to stop, and the other would wait"

ARGUMENTS = (
    flag(
        "--exit-signal-handler",
        field_of("exit_signal_handler"),
        _ALONE,
        "leave it out",
    ),
    flag(
        "--exit-duration-in-mins",
        field_of("exit_duration_in_mins"),
        _ALONE,
        "use --exit-interval or --train-iters",
    ),
    flag(
        "--log-straggler",
        field_of("log_straggler"),
        f"it times one micro-batch, but {_SEVERAL}",
        "leave it out",
    ),
    flag(
        "--save without --ckpt-format torch_dist",
        lambda given: (
            getattr(given, "save", None)
            and getattr(given, "ckpt_format", "torch_dist") != "torch_dist"
        ),
        "a file a rank cannot say that each role has a part of the model",
        "use --ckpt-format torch_dist",
    ),
    flag(
        "--async-save",
        lambda given: getattr(given, "save", None) and getattr(given, "async_save", False),
        "the two roles save together",
        "leave it out",
    ),
)


def refuse_arguments() -> None:
    """Check the arguments of Megatron-LM's scripts, where such a script runs.

    Raises:
        ValueError: it was asked for what does not go with roles.
    """
    script = sys.modules.get("megatron.training.global_vars")
    parsed = getattr(script, "_GLOBAL_ARGS", None)
    if parsed is not None:
        refuse(ARGUMENTS, parsed)
