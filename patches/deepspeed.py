"""The patches to DeepSpeed. Each does nothing where the JSON block is absent or not enabled."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ds_moe_ext.hosts.deepspeed import checkpoint, engine, startup
from ds_moe_ext.patches.record import Patch, apply_all

VERSIONS = ">=0.19.2,<0.20"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"


def _check_first(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        startup.check_initialize(original, args, kwargs)
        return original(*args, **kwargs)

    return initialize


def _then_replace(original: Any) -> Any:
    @functools.wraps(original)
    def _configure_expert_parallel(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        sources = original(self, model, *args, **kwargs)
        engine.replace_layers(self, model, sources)
        return sources

    return _configure_expert_parallel


def _then_count(original: Any) -> Any:
    @functools.wraps(original)
    def _configure_distributed_model(self: Any, model: Any) -> Any:
        original(self, model)
        engine.count_experts(self)

    return _configure_distributed_model


def _mark_first(original: Any) -> Any:
    @functools.wraps(original)
    def _do_optimizer_sanity_check(self: Any, basic_optimizer: Any) -> Any:
        engine.mark_expert_groups(self, basic_optimizer)
        return original(self, basic_optimizer)

    return _do_optimizer_sanity_check


def _clip_exactly(original: Any) -> Any:
    @functools.wraps(original)
    def clip_fp32_gradients(self: Any) -> Any:
        return None if engine.clip_by_global_norm(self) else original(self)

    return clip_fp32_gradients


def _then_record(original: Any) -> Any:
    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        engine.after_step(self)
        return result

    return _take_model_step


def _drop_experts(original: Any) -> Any:
    @functools.wraps(original)
    def _get_non_moe_state_dict(self: Any, full_state_dict: Any) -> Any:
        return checkpoint.without_experts(self, original(self, full_state_dict))

    return _get_non_moe_state_dict


def _save_experts(original: Any) -> Any:
    @functools.wraps(original)
    def _save_moe_checkpoint(self: Any, save_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint.save_experts(self, save_dir, tag)
        return original(self, save_dir, tag, *args, **kwargs)

    return _save_moe_checkpoint


def _load_experts(original: Any) -> Any:
    loads = original.__func__  # of a staticmethod

    @functools.wraps(loads)
    def load_moe_state_dict(*args: Any, **kwargs: Any) -> None:
        loads(*args, **kwargs)
        checkpoint.load_experts(_arguments(loads, args, kwargs), _name_of_file())

    return staticmethod(load_moe_state_dict)


def _name_of_file() -> Any:
    from deepspeed.runtime.engine import DeepSpeedEngine

    return DeepSpeedEngine._get_expert_ckpt_name


def _check_layout(original: Any) -> Any:
    @functools.wraps(original)
    def _load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint.check_layout(self, _arguments(original, (self, *args), kwargs))
        return original(self, *args, **kwargs)

    return _load_checkpoint


def _arguments(function: Any, given: Any, named: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*given, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


def _save_whole(original: Any) -> Any:
    @functools.wraps(original)
    def save_16bit_model(self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        with checkpoint.whole_state(self):
            return original(self, save_dir, *args, **kwargs)

    return save_16bit_model


PATCHES = tuple(
    Patch(id, target, VERSIONS, reason, wrap)
    for id, target, reason, wrap in (
        (
            "check-first",
            "deepspeed:initialize",
            "the block is checked before any process group is made",
            _check_first,
        ),
        (
            "replace-layers",
            f"{ENGINE}._configure_expert_parallel",
            "the place where AutoEP replaces layers; the engine then mends client optimizers",
            _then_replace,
        ),
        (
            "count-experts",
            f"{ENGINE}._configure_distributed_model",
            "the engine knows only its own MoE classes",
            _then_count,
        ),
        (
            "mark-expert-groups",
            f"{ENGINE}._do_optimizer_sanity_check",
            "ZeRO 1 and 2 refuse a user's optimizer whose groups mix experts and dense weights",
            _mark_first,
        ),
        (
            "exact-clip",
            f"{ENGINE}.clip_fp32_gradients",
            "at ZeRO 0 DeepSpeed clips by the mean of the ranks' norms",
            _clip_exactly,
        ),
        (
            "record-step",
            f"{ENGINE}._take_model_step",
            "loads are recorded once an optimizer step",
            _then_record,
        ),
        (
            "drop-experts",
            f"{ENGINE}._get_non_moe_state_dict",
            "experts go into files of their own",
            _drop_experts,
        ),
        (
            "save-experts",
            f"{ENGINE}._save_moe_checkpoint",
            "every rank's experts are written, not rank 0's alone",
            _save_experts,
        ),
        (
            "load-experts",
            f"{ENGINE}.load_moe_state_dict",
            "every rank reads its own experts",
            _load_experts,
        ),
        (
            "check-layout",
            f"{ENGINE}._load_checkpoint",
            "DeepSpeed loads another expert_parallel_size without a word, and trains differently",
            _check_layout,
        ),
        (
            "save-whole",
            f"{ENGINE}.save_16bit_model",
            "an exported model has all experts",
            _save_whole,
        ),
    )
)


def apply() -> None:
    """Apply all, or none and say why."""
    apply_all(PATCHES)
