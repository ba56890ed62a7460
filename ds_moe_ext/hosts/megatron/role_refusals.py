"""What ds_moe_ext does not do under Megatron-core where ranks have roles: by the flag's name."""

from __future__ import annotations

import sys

from ds_moe_ext.hosts.megatron.refusals import Refusal, field_of, graphed, refuse_config
from ds_moe_ext.moe.hooks import NO_HOOKS
from ds_moe_ext.settings import BLOCK, Settings
from ds_moe_ext.strategies.zebra import Zebra

_SEVERAL = "several micro-batches are under way at once"


WITH_ROLES = (
    Refusal(
        "--recompute-granularity",
        field_of("recompute_granularity"),
        "Megatron's checkpoints cannot be cut where experts compute",
        "leave it out; zebra.num_micro_batches bounds the micro-batches under way",
    ),
    Refusal(
        "--moe-shared-expert-overlap",
        field_of("moe_shared_expert_overlap"),
        f"it keeps what it has begun in the layer, but {_SEVERAL}",
        "leave it out",
    ),
    Refusal(
        "--calculate-per-token-loss",
        field_of("calculate_per_token_loss"),
        "expert ranks do not count tokens",
        "leave it out",
    ),
    Refusal(
        "--mtp-num-layers",
        field_of("mtp_num_layers"),
        "layers that predict more tokens run outside of the model's blocks",
        "leave it out",
    ),
    Refusal(
        "gradient accumulation fusion",
        field_of("gradient_accumulation_fusion"),
        "gradients are handed over when the backward of a stage is done",
        "use --no-gradient-accumulation-fusion",
    ),
    Refusal(
        "--fp16",
        field_of("fp16"),
        "the ranks of the two roles would skip steps each by their own scale",
        "use --bf16",
    ),
    Refusal(
        "--cuda-graph-impl",
        graphed,
        f"a graph's buffers hold one micro-batch, but {_SEVERAL}",
        "leave it out",
    ),
    Refusal(
        "--cpu-offloading",
        lambda config: (
            vars(config).get("cpu_offloading")
            or vars(config).get("fine_grained_activation_offloading")
        ),
        f"it takes activations for those of one micro-batch, but {_SEVERAL}",
        "leave it out",
    ),
)


def refuse_zebra(settings: Settings, strategy: Zebra) -> None:
    """Check the block of a run with roles.

    Raises:
        ValueError: it asks for what only other strategies, or DeepSpeed, can do.
    """
    if strategy.attention_device is not None:
        raise ValueError(
            f"{BLOCK}.zebra.attention_device is {strategy.attention_device!r}, but under Megatron "
            "roles are given before devices are known; set it to null, and give attention_size, "
            "expert_size and, where attention ranks are not the first, attention_cells"
        )
    if None in (strategy.attention_size, strategy.expert_size):
        raise ValueError(
            f"{BLOCK}.zebra.attention_size is {strategy.attention_size} and expert_size "
            f"{strategy.expert_size}; under Megatron set both"
        )
    size = strategy.roles.size
    refused = (
        ("zebra.moved", strategy.moved, "attention ranks have no experts here", "leave it out"),
        ("zebra.profile", strategy.profile, "it measures under DeepSpeed only", "leave it out"),
        (
            "moe_layer_pattern",
            settings.moe_layer_pattern,
            "expert ranks have no other layers",
            "leave it out",
        ),
        ("hooks", settings.hooks != NO_HOOKS, "rows of roles have none", "leave it out"),
        (
            "expert_sharding_size",
            settings.expert_sharding_size not in (None, 1),
            "every rank of a ZP group is a cell",
            "leave it out",
        ),
        (
            "expert_parallel_size",
            settings.expert_parallel_size not in (None, size),
            f"a ZP group has {size} ranks",
            f"leave it out, or make it {size}",
        ),
    )
    for key, is_set, reason, remedy in refused:
        if is_set:
            raise ValueError(
                f"{BLOCK}.{key} is set, but with strategy {settings.strategy!r} under Megatron "
                f"{reason}; {remedy}"
            )


_ALONE = "each role would decide alone when to stop, and the other would wait"

ARGUMENTS = (
    Refusal(
        "--exit-signal-handler",
        field_of("exit_signal_handler"),
        _ALONE,
        "leave it out",
    ),
    Refusal(
        "--exit-duration-in-mins",
        field_of("exit_duration_in_mins"),
        _ALONE,
        "use --exit-interval or --train-iters",
    ),
    Refusal(
        "--log-straggler",
        field_of("log_straggler"),
        f"it times one micro-batch, but {_SEVERAL}",
        "leave it out",
    ),
    Refusal(
        "--save without --ckpt-format torch_dist",
        lambda given: (
            vars(given).get("save") and vars(given).get("ckpt_format", "torch_dist") != "torch_dist"
        ),
        "a file a rank cannot say that each role has a part of the model",
        "use --ckpt-format torch_dist",
    ),
    Refusal(
        "--async-save",
        lambda given: vars(given).get("save") and vars(given).get("async_save"),
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
    parsed = None if script is None else vars(script).get("_GLOBAL_ARGS")
    if parsed is not None:
        refuse_config(parsed, ARGUMENTS)
