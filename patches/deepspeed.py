# SPDX-License-Identifier: Apache-2.0
"""The patches to DeepSpeed. Each does nothing where the JSON block is absent or not enabled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ds_moe_ext.hosts.deepspeed import (
    buckets,
    checkpoint,
    dropped_gradients,
    engine,
    engine_record,
    export,
    parameter_groups,
    pipeline,
    role_engine,
    shards,
    startup,
    zero_0,
    zero_3,
)
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.patches.patch import Patch, apply_all
from ds_moe_ext.schedule.watch import WATCH

VERSIONS = ">=0.19.7,<0.20"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


def _check_first(original: Any) -> Any:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with startup.initializing():
            checked = startup.check_initialize(original, args, kwargs)
            return original(*checked.args, **checked.kwargs)

    return initialize


def _refuse_block(original: Any) -> Any:
    @functools.wraps(original)
    def init_inference(*args: Any, **kwargs: Any) -> Any:
        startup.check_inference(_arguments(original, args, kwargs))
        return original(*args, **kwargs)

    return init_inference


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
        with role_engine.own_groups(self):
            original(self, model)
        engine.count_experts(self)

    return _configure_distributed_model


def _check_groups_first(original: Any) -> Any:
    @functools.wraps(original)
    def _do_optimizer_sanity_check(self: Any, basic_optimizer: Any) -> Any:
        engine.check_optimizer(self, basic_optimizer)
        return original(self, basic_optimizer)

    return _do_optimizer_sanity_check


def _has_experts_apart(engine: Any) -> bool:
    """Whether experts are reduced over other ranks than dense weights, as we said."""
    return run_of(engine) is not None or role_engine.has_roles(engine)


def _of_parts(original: Any) -> Any:
    @functools.wraps(original)
    def configure(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        run, is_sharded = run_of(self), self.zero_optimization_partition_weights()
        if run is not None and optimizer is not None:
            parameter_groups.check_ranks_alike(optimizer, run, is_sharded=is_sharded)
        if run is not None and is_sharded:
            with parameter_groups.not_parted(self):
                made = original(self, optimizer, *args, **kwargs)
            zero_3.launch_when_whole(run)
            shards.share_groups(made)
            return made
        if optimizer is None or not _has_experts_apart(self):
            return original(self, optimizer, *args, **kwargs)
        with parameter_groups.parted(self, optimizer) as parted:
            return original(self, parted, *args, **kwargs)

    return configure


def _clip_exactly(original: Any) -> Any:
    @functools.wraps(original)
    def clip_fp32_gradients(self: Any) -> Any:
        is_clipped = role_engine.clip(self) or engine.clip_by_global_norm(self)
        return None if is_clipped else original(self)

    return clip_fp32_gradients


def _then_record(original: Any) -> Any:
    @functools.wraps(original)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        engine.after_step(self)
        return result

    return _take_model_step


def _then_tell(original: Any) -> Any:
    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        dropped_gradients.dropped(self)
        return result

    return zero_grad


def _around(ours: Callable[[Any, Any, Any], Any]) -> Callable[[Any], Any]:
    """A wrap of a method: ours gets the engine, the arguments by name and the original."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return ours(self, _arguments(original, (self, *args), kwargs), original)

        return method

    return wrap


def _answering(answer: Any) -> Callable[[Any], Any]:
    """A wrap of a method that has nothing to do on an engine with replaced layers."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return answer if run_of(self) else original(self, *args, **kwargs)

        return method

    return wrap


def _no_expert_files(original: Any) -> Any:
    loads = original.__func__  # of a staticmethod

    @functools.wraps(loads)
    def load_moe_state_dict(*args: Any, **kwargs: Any) -> None:
        if not checkpoint.is_replaced(_arguments(loads, args, kwargs)["model"]):
            loads(*args, **kwargs)

    return staticmethod(load_moe_state_dict)


def _then_slice(original: Any) -> Any:
    @functools.wraps(original)
    def _configure_optimizer(self: Any, client_optimizer: Any, *args: Any) -> None:
        is_apart = _has_experts_apart(self)
        with parameter_groups.undivided(self, client_optimizer) if is_apart else nullcontext():
            original(self, client_optimizer, *args)
        role_engine.join(self)
        engine.clip_halves_by_global_norm(self)
        engine_record.share(self)
        slices = engine_record.record_of(self).slices
        if slices is not None and not self.zero_optimization():
            zero_0.slice_gradients(self, slices)

    return _configure_optimizer


def _then_see(original: Any) -> Any:
    @functools.wraps(original)
    def process_gradients(self: Any, param: Any, i: Any) -> None:
        original(self, param, i)
        buckets.saw_ready(self, param, i)

    return process_gradients


def _unless_waiting(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_independent_p_g_buckets_and_remove_grads(self: Any, param: Any, i: Any) -> None:
        if not buckets.waits(self, param, i):
            original(self, param, i)

    return reduce_independent_p_g_buckets_and_remove_grads


def _unless_averaged(original: Any) -> Any:
    @functools.wraps(original)
    def allreduce_bucket(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
        means = buckets.means_of(self, bucket)
        return original(self, bucket, *args, **kwargs) if means is None else means

    return allreduce_bucket


def _waiting_last(original: Any) -> Any:
    @functools.wraps(original)
    def independent_gradient_partition_epilogue(self: Any) -> Any:
        buckets.reduce_waiting(self)
        return original(self)

    return independent_gradient_partition_epilogue


def _unless_last(original: Any) -> Any:
    @functools.wraps(original)
    def reduce_independent_p_g_buckets_and_remove_grads(self: Any, param: Any) -> None:
        if not zero_3.waits(self, param):
            original(self, param)

    return reduce_independent_p_g_buckets_and_remove_grads


def _last_at_the_end(original: Any) -> Any:
    @functools.wraps(original)
    def independent_gradient_partition_epilogue(self: Any) -> Any:
        zero_3.reduce_waiting(self)
        return original(self)

    return independent_gradient_partition_epilogue


def _among_own_role(original: Any) -> Any:
    @functools.wraps(original)
    def buffered_allreduce_fallback(self: Any, *args: Any, **kwargs: Any) -> None:
        with role_engine.own_groups(self):
            original(self, *args, **kwargs)

    return buffered_allreduce_fallback


def _only_unaveraged(original: Any) -> Any:
    @functools.wraps(original)
    def _reduce_non_expert_gradients(self: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
        original(self, zero_0.unaveraged(self, grads), *args, **kwargs)

    return _reduce_non_expert_gradients


def _scaled_as_dense(original: Any) -> Any:
    @functools.wraps(original)
    def _reduce_expert_gradients(self: Any, expert_grads: Any, *args: Any, **kwargs: Any) -> None:
        average = functools.partial(original, self, expert_grads, *args, **kwargs)
        if run_of(self):
            zero_0.average_experts(self, expert_grads, average)
        else:
            average()

    return _reduce_expert_gradients


def _telling(name: str, hear: Callable[..., None] | None = None) -> Callable[[Any], Any]:
    """A wrap of a method: other ranks are told of its errors, and ours hears what it is given."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if run_of(self) is None:
                return original(self, *args, **kwargs)
            if hear is not None:
                hear(self, *args, **kwargs)
            with WATCH.host_pass(f"engine.{name}"):
                return original(self, *args, **kwargs)

        return method

    return wrap


def _arguments(function: Any, given: Any, named: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*given, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


def _save_whole(original: Any) -> Any:
    @functools.wraps(original)
    def save_16bit_model(self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        with export.whole_state(self):
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
            "refuse-block",
            "deepspeed:init_inference",
            "it would refuse the block in words of a library",
            _refuse_block,
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
            "check-groups",
            f"{ENGINE}._do_optimizer_sanity_check",
            "groups of which a rank has nothing are dropped, though a schedule counts them",
            _check_groups_first,
        ),
        *(
            (
                f"{kind}-of-parts",
                f"{ENGINE}._configure_{kind}_optimizer",
                "what flattens a group wants experts and dense weights in groups of their own",
                _of_parts,
            )
            for kind in ("zero", "bf16", "fp16")
        ),
        (
            "exact-clip",
            f"{ENGINE}.clip_fp32_gradients",
            "at ZeRO 0 DeepSpeed clips by the mean of the ranks' norms",
            _clip_exactly,
        ),
        *(
            (
                f"tell-of-{name}",
                f"{ENGINE}.{name}",
                "ranks that wait for one that has failed are told",
                _telling(name, hear),
            )
            for name, hear in (("forward", engine.begin_forward), ("step", None))
        ),
        (
            "tell-of-backward",
            f"{ENGINE}.backward",
            "ranks that wait for one that has failed are told; the report has losses; at ZeRO 0 "
            "experts of a second one in the same micro-batch are averaged as dense weights are",
            _telling("backward", engine.begin_backward),
        ),
        (
            "count-passes",
            f"{PIPELINE}.train_batch",
            "a pipeline's passes overlap, and its engine says of none that it is the last",
            _around(pipeline.train_batch),
        ),
        (
            "tell-of-eval_batch",
            f"{PIPELINE}.eval_batch",
            "ranks that wait for one that has failed are told",
            _telling("eval_batch"),
        ),
        (
            "record-step",
            f"{ENGINE}._take_model_step",
            "loads are recorded once an optimizer step",
            _then_record,
        ),
        *(
            (
                f"drop-with-{name}",
                f"{optimizer}.zero_grad",
                "gradients of copies that wait for the last micro-batch are dropped with others",
                _then_tell,
            )
            for name, optimizer in (("zero-1", ZERO), ("zero-3", ZERO_3), ("bf16", BF16))
        ),
        (
            "slice-gradients",
            f"{ENGINE}._configure_optimizer",
            "what reduces gradients is told their slices; ranks of two roles clip by one norm",
            _then_slice,
        ),
        (
            "see-ready",
            f"{ZERO}.process_gradients",
            "ZeRO 1 without overlap_comm looks at gradients after backward only",
            _then_see,
        ),
        (
            "unless-waiting",
            f"{ZERO}.reduce_independent_p_g_buckets_and_remove_grads",
            "ranks with unequal experts would fill buckets at different moments",
            _unless_waiting,
        ),
        (
            "unless-averaged",
            f"{ZERO}.allreduce_bucket",
            "what slices averaged goes through ZeRO's own code, but not over the network again",
            _unless_averaged,
        ),
        (
            "waiting-last",
            f"{ZERO}.independent_gradient_partition_epilogue",
            "what no slice took is reduced at the end, and experts when all others have been",
            _waiting_last,
        ),
        (
            "unless-last",
            f"{ZERO_3}.reduce_independent_p_g_buckets_and_remove_grads",
            "grids of ranks with plans of their own would fill buckets at different moments",
            _unless_last,
        ),
        (
            "last-at-the-end",
            f"{ZERO_3}.independent_gradient_partition_epilogue",
            "experts are reduced when all others have been",
            _last_at_the_end,
        ),
        (
            "among-own-role",
            f"{ENGINE}.buffered_allreduce_fallback",
            "DeepSpeed has one mpu for all engines of a process; one with roles has its own",
            _among_own_role,
        ),
        (
            "only-unaveraged",
            f"{ENGINE}._reduce_non_expert_gradients",
            "at ZeRO 0 the engine averages what no slice did",
            _only_unaveraged,
        ),
        (
            "scaled-as-dense",
            f"{ENGINE}._reduce_expert_gradients",
            "at ZeRO 0 DeepSpeed counts sequence parallel ranks for experts, not for dense weights",
            _scaled_as_dense,
        ),
        (
            "save-experts",
            f"{ENGINE}._save_moe_checkpoint",
            "experts and all states of the optimizer are written by name, for any layout to read",
            _around(checkpoint.save),
        ),
        (
            "no-zero-files",
            f"{ENGINE}._save_zero_checkpoint",
            "what a rank's ZeRO file would have is written by name",
            _answering(None),
        ),
        (
            "load-experts",
            f"{ENGINE}._load_checkpoint",
            "every rank reads what it needs; what does not fit is refused before anything changes",
            _around(checkpoint.load),
        ),
        (
            "no-zero-load",
            f"{ENGINE}._load_zero_checkpoint",
            "there are no ZeRO files; the states have been read",
            _answering(True),
        ),
        (
            "no-expert-files",
            f"{ENGINE}.load_moe_state_dict",
            "there are no files of single experts; they have been read",
            _no_expert_files,
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
