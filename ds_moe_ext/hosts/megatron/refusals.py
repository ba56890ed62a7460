# SPDX-License-Identifier: Apache-2.0
"""What ds_moe_ext does not do under Megatron-core, found at start and reported by the flag's name.

Each table has rows ``(flag, what asks for it, reason, remedy)``. What asks is the name of a field
of Megatron's config, or a function of the config; versions without the field have not been asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.attachment.notices import Refusal, refuse
from ds_moe_ext.moe.hooks import NO_HOOKS
from ds_moe_ext.planning.exchange_costs import Way as Exchange
from ds_moe_ext.planning.strategy import Overlay, Strategy, replicates
from ds_moe_ext.strategies.settings import BLOCK, HOST, Settings

Row = tuple[str, str | Callable[[Any], object], str, str]


def _refusals(*rows: Row) -> tuple[Refusal, ...]:
    """Of flags of Megatron's, asked of a config."""
    return tuple(Refusal(name, _given(name, asks), *texts) for name, asks, *texts in rows)


def _given(name: str, asks: str | Callable[[Any], object]) -> Callable[[Any], str]:
    def asked(config: Any) -> str:
        value = getattr(config, asks, None) if isinstance(asks, str) else asks(config)
        shown = "" if value is True else f" ({value})"
        return f"Megatron was given {name}{shown}" if value else ""

    return asked


def _any_of(*names: str) -> Callable[[Any], object]:
    return lambda config: next(filter(None, (getattr(config, name, None) for name in names)), None)


def _all_of(*names: str) -> Callable[[Any], object]:
    return lambda config: all(getattr(config, name, False) for name in names)


def graphed(config: Any) -> list[str]:
    """Parts of layers that are in CUDA graphs."""
    is_whole = _any_of("enable_cuda_graph", "external_cuda_graph")(config)
    if not is_whole and getattr(config, "cuda_graph_impl", "none") in ("none", None):
        return []
    scopes: Any = _any_of("cuda_graph_modules", "cuda_graph_scope")(config)
    if is_whole or not scopes:
        return ["all of a layer"]
    scopes = [scopes] if isinstance(scopes, str) else scopes
    return [str(getattr(scope, "name", scope)) for scope in scopes]


def _recomputed(config: Any, *modules: str) -> list[str]:
    """Those of these modules that are recomputed by themselves."""
    is_selective = getattr(config, "recompute_granularity", None) == "selective"
    chosen = (getattr(config, "recompute_modules", None) or ()) if is_selective else ()
    return [module for module in modules if module in chosen]


def _offloaded(config: Any) -> object:
    if not getattr(config, "fine_grained_activation_offloading", False):
        return None
    modules = getattr(config, "offload_modules", None) or ()
    return [module for module in modules if module in ("expert_fc1", "moe_act")]


def _split_biases(config: Any) -> object:
    size = getattr(config, "expert_tensor_parallel_size", None) or 1
    return getattr(config, "add_bias_linear", False) and size > 1


_OUT = "leave it out"
# Rows of two tables.
_FOR_INFERENCE: Row = (
    "--transformer-impl inference_optimized",
    lambda config: getattr(config, "transformer_impl", None) == "inference_optimized",
    "its MoE layers are for inference, and dispatch tokens themselves",
    "use --transformer-impl transformer_engine or local to train",
)
_ONE_TENSOR: Row = (
    "--moe-single-grouped-weight",
    "moe_single_grouped_weight",
    "the weights of a rank's experts are one tensor, so a single expert cannot get a replica "
    "or move",
    _OUT,
)


class Way(NamedTuple):
    """Who runs the MoE layers, and why, for a person."""

    by_host: bool
    why: str


DENSE = ("attn", "mamba", "mlp")
"""Scopes of CUDA graphs without MoE layers."""
PREPROCESS = "moe_preprocess"
"""The scope in which a dispatcher takes the router's choices."""

OWN_ORDER = ("schedules", "stages")
"""Members by which a strategy says itself how a layer runs."""
WITHIN = ("send_once", "calibrate", "rematerialize", "repair")
"""Keys of strategies that ask for something within a layer that Megatron's has not."""


def way_of(settings: Settings, strategy: Strategy, config: Any) -> Way:
    """Who runs the MoE layers of a ``TransformerConfig``. Pure. Raises ValueError where a key asks
    for the host, which cannot."""
    asked, why = settings.megatron.layer, _why_program(settings, strategy, config)
    if asked == HOST and why:
        raise ValueError(
            f"{BLOCK}.megatron.layer is {HOST!r}, but {why}, which Megatron's own layer does "
            "not support; leave out megatron.layer, or the other setting"
        )
    if asked is not None:
        return Way(asked == HOST, f"{BLOCK}.megatron.layer is {asked!r}")
    return Way(not why, why or f"strategy {settings.placing!r} only places experts")


def _why_program(settings: Settings, strategy: Strategy, config: Any) -> str:
    """Why Megatron's own layer does not serve, a clause; empty if it does."""
    if settings.hooks != NO_HOOKS:
        return "hooks see tokens inside a layer"
    if replicates(strategy) and getattr(config, "moe_pad_expert_input_to_capacity", False):
        return "--moe-pad-expert-input-to-capacity pads all slots, including those of replicas"
    each = (strategy, *getattr(strategy, "contenders", {}).values())
    return next(filter(None, map(partial(_schedules, settings), each)), "")


def _schedules(settings: Settings, strategy: Strategy) -> str:
    """By what a strategy says more than where experts compute; empty if by nothing."""
    name, cls = settings.strategy, type(strategy)
    if strategy.has_roles:
        return f"strategy {name!r} gives ranks roles"
    own = any(getattr(cls, member) is not getattr(Strategy, member) for member in OWN_ORDER)
    if own or isinstance(strategy, Overlay):
        return f"strategy {name!r} schedules the tasks of a layer"
    is_padded = strategy.static_capacity is not None
    if is_padded or strategy.cuda_graphs or strategy.ways != (Exchange.DIRECT,):
        return f"keys of strategy {name!r} set how tokens are sent"
    asked = (key for key in WITHIN if getattr(strategy, key, None))
    return next((f"{settings.placing}.{key} is {getattr(strategy, key)}" for key in asked), "")


def _alike(
    reason: str, *rows: tuple[str, str | Callable[[Any], object]], remedy: str = _OUT
) -> tuple[Refusal, ...]:
    """Flags that are refused for one reason."""
    return _refusals(*((*row, reason, remedy) for row in rows))


REFUSALS = (
    *_alike(
        "only Megatron's own layer supports it, and ours runs here",
        ("--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm"),
        ("--delay-wgrad-compute", "delay_wgrad_compute"),
        (
            "--cuda-graph-impl with MoE scopes",
            lambda config: [part for part in graphed(config) if part not in DENSE],
        ),
        (
            "--moe-token-dispatcher-type flex",
            lambda config: config.moe_token_dispatcher_type == "flex",
        ),
        ("--fp8-format", "fp8"),
        ("--fp4-format", "fp4"),
        (
            "--moe-router-padding-for-quantization",
            _any_of("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
        ),
        ("--recompute-modules moe_act", lambda config: bool(_recomputed(config, "moe_act"))),
        ("--offload-modules expert_fc1 or moe_act", _offloaded),
        ("--activation-func-fp8-input-store", "activation_func_fp8_input_store"),
        (
            "biases of experts (no --disable-bias-linear) with --expert-tensor-parallel-size above "
            "1",
            _split_biases,
        ),
        (
            "--moe-apply-probs-on-input with --moe-pad-expert-input-to-capacity and biases of "
            "experts (no --disable-bias-linear)",
            _all_of(
                "moe_apply_probs_on_input", "moe_pad_expert_input_to_capacity", "add_bias_linear"
            ),
        ),
        (
            "--moe-mlp-glu-interleave-size",
            lambda config: (
                config.gated_linear_unit and getattr(config, "moe_mlp_glu_interleave_size", None)
            ),
        ),
        (
            "--overlap-dispatch-backward-with-experts-wgrad",
            "overlap_dispatch_backward_with_experts_wgrad",
        ),
        (
            "--mtp-use-repeated-layer with --mtp-num-layers above 1",
            lambda config: (
                getattr(config, "mtp_use_repeated_layer", False)
                and (config.mtp_num_layers or 0) > 1
            ),
        ),
        ("--use-kitchen or a quantization recipe", _any_of("use_kitchen", "quant_recipe")),
    ),
    *_refusals(_FOR_INFERENCE, _ONE_TENSOR),
)
"""Of a ``TransformerConfig``, where our program runs the layers."""

GUESTS = _refusals(
    (
        "--cuda-graph-impl with MoE scopes other than moe_router and moe_preprocess",
        lambda config: [p for p in graphed(config) if p not in (*DENSE, "moe_router", PREPROCESS)],
        "a graph of experts needs a fixed number of tokens",
        "use --cuda-graph-scope attn moe_router, or none",
    ),
    _FOR_INFERENCE,
)
"""Of a ``TransformerConfig``, where Megatron runs the layers."""


def _delayed_scaling(config: Any) -> object:
    recipe = str(getattr(config, "fp8_recipe", None) or "delayed")
    return bool(getattr(config, "fp8", None)) and recipe.rpartition(".")[2] == "delayed"


REPLICAS = _refusals(
    (
        f"--cuda-graph-scope {PREPROCESS}",
        lambda config: PREPROCESS in graphed(config),
        "a replayed graph would send tokens by the plan of the step that it was captured in",
        "use --cuda-graph-scope attn moe_router, or none",
    ),
    (
        "--fp8-recipe delayed",
        _delayed_scaling,
        "its scaling history belongs to a slot, which holds another expert in the next step",
        "use --fp8-recipe tensorwise, blockwise or mxfp8",
    ),
    (
        "--fp8-param-gather",
        "fp8_param",
        "replicas of 8-bit weights are not supported yet",
        _OUT,
    ),
    _ONE_TENSOR,
)
"""The same, where experts are copied."""


def refuse_flags(settings: Settings, strategy: Strategy, config: Any) -> None:
    """Raises ValueError where a ``TransformerConfig`` asks for what whoever runs the layers cannot
    do."""
    if not way_of(settings, strategy, config).by_host:
        refuse(REFUSALS, config)
        return
    refuse(GUESTS, config)
    if replicates(strategy):
        refuse(REPLICAS, config, or_else="use strategy 'ep'")


STEPPING = _refusals(
    (
        "--optimizer-cuda-graph",
        "optimizer_cuda_graph",
        "a graph is replayed without notice of steps",
        _OUT,
    )
)
"""Of an optimizer's config."""

_UNMOVED = "optimizer states then cannot move with their experts"

MOVING = _refusals(
    ("--use-precision-aware-optimizer", "use_precision_aware_optimizer", _UNMOVED, _OUT),
    ("--optimizer-cpu-offload", "optimizer_cpu_offload", _UNMOVED, _OUT),
)
"""Of an optimizer's config, where experts move."""


def _summed_biases(config: Any) -> object:
    tensor = getattr(config, "tensor_model_parallel_size", None) or 1
    of_experts = getattr(config, "expert_tensor_parallel_size", None) or tensor
    is_biased = getattr(config, "add_bias_linear", False)
    return f"{tensor}, and {of_experts} for experts" if is_biased and tensor != of_experts else ""


SUMMED = _refusals(
    (
        "biases of experts (no --disable-bias-linear) with --tensor-model-parallel-size other than "
        "--expert-tensor-parallel-size",
        _summed_biases,
        "Megatron sums gradients of their last bias over tensor parallel ranks slot by slot, "
        "although these hold different experts",
        "use --disable-bias-linear",
    )
)
"""Of a ``TransformerConfig``, where experts move."""


def _own_flag(key: str, flag: str) -> Refusal:
    """A key of ours, where Megatron has a flag of its own."""

    def asked(settings: Settings) -> str:
        value = getattr(settings, key)
        return f"{BLOCK}.{key} is {value}" if value else ""

    remedy = f"leave it out, and use {flag}"
    return Refusal(f"{BLOCK}.{key}", asked, "under Megatron its own flag sets this", remedy)


SETTINGS = (
    _own_flag("gate", "--moe-router-load-balancing-type and its like"),
    _own_flag("capacity_factor", "--moe-expert-capacity-factor"),
    _own_flag("sequence_parallel", "--sequence-parallel"),
)
"""Of our block."""


# Where ranks have roles.


_ONE = "it keeps the state of one micro-batch, but several run at once"

WITH_ROLES = (
    *_alike(
        _ONE,
        ("--cuda-graph-impl", graphed),
        (
            "--cpu-offloading",
            _any_of("cpu_offloading", "fine_grained_activation_offloading"),
        ),
        (
            "use_te_rng_tracker with sequence_parallel of your own config",
            _all_of("use_te_rng_tracker", "sequence_parallel"),
        ),
        ("--hybrid-context-parallel", "hybrid_context_parallel"),
    ),
    *_alike(
        "it counts on one backward pass through a layer, which comes in parts here",
        ("gradient_accumulation_fusion of your own config", "gradient_accumulation_fusion"),
    ),
)
"""Of a ``TransformerConfig``."""


class Divided(NamedTuple):
    """How a sample is divided among attention ranks."""

    roles: Roles  # of a ZP group
    sizes: Mapping[str, Any]  # that Megatron was given, by its names; None or none is its default

    @property
    def tp(self) -> int:
        return self.sizes.get("tensor_model_parallel_size") or 1


def _beyond_group(asked: Divided) -> str:
    cp, size = asked.sizes.get("context_parallel_size") or 1, len(asked.roles.attention_ep_ranks)
    return f"{asked.tp} x {cp}, of {size} attention ranks" if size % (asked.tp * cp) else ""


def _split_experts(asked: Divided) -> object:
    size = asked.sizes.get("expert_tensor_parallel_size") or 1
    return size if size > 1 else None


DIVIDED = _alike(
    "attention ranks of one ZP group have parts of a sample, and expert ranks have whole experts",
    (
        "--tensor-model-parallel-size times --context-parallel-size that does not divide "
        "zebra.attention_size",
        _beyond_group,
    ),
    ("--expert-tensor-parallel-size above 1", _split_experts),
    remedy="choose sizes whose product divides attention_size, and --expert-tensor-parallel-size 1",
)
"""Of what ``Divided`` says."""


class Block(NamedTuple):
    """Our block of a run with roles: all but the strategy, and that."""

    settings: Settings
    strategy: Strategy


def by_device(strategy: Strategy) -> bool:
    """Whether roles follow from the names of devices, which are not known yet."""
    return getattr(strategy, "attention_device", None) is not None


def _unlike_roles(key: str, own: Callable[[Strategy], object], unless: str = "") -> Refusal:
    """A key that may be null, or the value that roles give it."""

    def asked(block: Block) -> str:
        value = getattr(block.settings, key)
        return "" if value in (None, own(block.strategy)) else f"{BLOCK}.{key} is {value!r}"

    return Refusal(f"{BLOCK}.{key}{unless}", asked, "zebra's sizes say which ranks have what", _OUT)


BLOCKS = (
    _unlike_roles("moe_layer_pattern", lambda strategy: None),
    _unlike_roles("expert_sharding_size", lambda strategy: 1, " above 1"),
    _unlike_roles(
        "expert_parallel_size",
        lambda strategy: getattr(strategy.roles, "size", None),
        " other than attention_size + expert_size",
    ),
)


def refuse_with_roles(settings: Settings, strategy: Strategy) -> None:
    """Raises ValueError where the block of a run with roles, which are known, asks for what only
    other strategies, or DeepSpeed, can do."""
    context = f"{BLOCK}.strategy is {settings.strategy!r} under Megatron"
    refuse(BLOCKS, Block(settings, strategy), context=context)


ARGUMENTS = _refusals(
    (
        "--save without --ckpt-format torch_dist",
        lambda given: (
            getattr(given, "save", None)
            and getattr(given, "ckpt_format", "torch_dist") != "torch_dist"
        ),
        "both roles write one checkpoint, together",
        "use --ckpt-format torch_dist",
    ),
)
"""Of the arguments of Megatron-LM's scripts, not validated yet."""


def script_variables(*names: str) -> list[Any]:
    """Of a script of Megatron-LM, each None where there is none, or it has not been set."""
    script = sys.modules.get("megatron.training.global_vars")
    return [getattr(script, name, None) for name in names]
