# SPDX-License-Identifier: Apache-2.0
"""The patches to DeepSpeed. Each does nothing where the JSON block is absent or not enabled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ds_moe_ext.hosts.attachment.modules import during
from ds_moe_ext.hosts.deepspeed import (
    checkpoint,
    engine,
    gradients,
    parameter_groups,
    rank_groups,
    startup,
    zero_3,
)
from ds_moe_ext.hosts.steps.training_run import run_of
from ds_moe_ext.patches.patch import Patch, apply_all, by
from ds_moe_ext.schedule.watch import WATCH

VERSIONS = ">=0.19.7,<0.20"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


# Each gets the original and its arguments.


def _initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
    with startup.initializing():
        checked = startup.check_initialize(original, args, kwargs)
        return original(*checked.args, **checked.kwargs)


def _init_inference(original: Any, *args: Any, **kwargs: Any) -> Any:
    startup.check_inference(_arguments(original, args, kwargs))
    return original(*args, **kwargs)


def _configure_expert_parallel(
    original: Any, self: Any, model: Any, *args: Any, **named: Any
) -> Any:
    sources = original(self, model, *args, **named)
    engine.replace_layers(self, model, sources)
    return sources


def _configure_distributed_model(original: Any, self: Any, model: Any) -> Any:
    with rank_groups.own_groups(self):
        original(self, model)
    engine.count_experts(self)


def _has_experts_apart(engine: Any) -> bool:
    """Whether experts are reduced over other ranks than dense weights, as we stated."""
    return run_of(engine) is not None or rank_groups.has_roles(engine)


def _configure_wrapper(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Of an optimizer: what flattens its groups gets them in parts."""
    run, is_sharded = run_of(self), self.zero_optimization_partition_weights()
    if run is not None and optimizer is not None:
        parameter_groups.check_ranks_alike(optimizer, run, is_sharded=is_sharded)
    if run is not None and is_sharded:
        # ZeRO 3 parts groups itself, by the ranks that share a weight; given MoE layers, it
        # wants DeepSpeed's own.
        with during(self, has_moe_layers=False):
            made = original(self, optimizer, *args, **kwargs)
        zero_3.launch_when_whole(run)
        zero_3.share_second_groups(made)
        return made
    if optimizer is None or not _has_experts_apart(self):
        return original(self, optimizer, *args, **kwargs)
    with parameter_groups.parted(self, optimizer) as parted:
        return original(self, parted, *args, **kwargs)


def _configure_optimizer(original: Any, self: Any, client_optimizer: Any, *args: Any) -> None:
    is_apart = _has_experts_apart(self)
    undivided = parameter_groups.undivided(self, client_optimizer) if is_apart else nullcontext()
    with rank_groups.own_groups(self), undivided:
        original(self, client_optimizer, *args)
    rank_groups.join_roles(self)
    engine.clip_halves_by_global_norm(self)
    engine.skip_together(self)
    gradients.share_record(self)
    slices = gradients.record_of(self).slices
    if slices is not None and not self.zero_optimization():
        gradients.slice_gradients(self, slices)


def _clip_fp32_gradients(original: Any, self: Any) -> None:
    if not (rank_groups.clip_with_roles(self) or engine.clip_by_global_norm(self)):
        original(self)


def _put_into_bucket(original: Any, self: Any, *given: Any) -> None:
    if not gradients.waits(self, *given):
        original(self, *given)


def _allreduce_bucket(original: Any, self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Any:
    means = gradients.means_of(self, bucket)
    return original(self, bucket, *args, **kwargs) if means is None else means


def _reduce_dense(original: Any, self: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
    original(self, gradients.unaveraged(self, grads), *args, **kwargs)


def _reduce_experts(original: Any, self: Any, grads: Any, *args: Any, **kwargs: Any) -> None:
    average = functools.partial(original, self, grads, *args, **kwargs)
    if run_of(self):
        gradients.average_experts(self, grads, average)
    else:
        average()


def _load_moe_state_dict(original: Any, *args: Any, **kwargs: Any) -> None:
    if not checkpoint.is_replaced(_arguments(original, args, kwargs)["model"]):
        original(*args, **kwargs)


# And those made for several.


def _before(do: Callable[..., Any]) -> Callable[..., Any]:
    def ours(original: Any, *args: Any, **kwargs: Any) -> Any:
        do(*args, **kwargs)
        return original(*args, **kwargs)

    return ours


def _behind(do: Callable[..., Any]) -> Callable[..., Any]:
    def ours(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        do(*args, **kwargs)
        return result

    return ours


def _within(block: Callable[[Any], Any]) -> Callable[..., Any]:
    def ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with block(self):
            return original(self, *args, **kwargs)

    return ours


def _around(do: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """It gets the engine, the arguments by name and the original."""

    def ours(original: Any, *args: Any, **kwargs: Any) -> Any:
        return do(args[0], _arguments(original, args, kwargs), original)

    return ours


def _answering(answer: Any) -> Callable[..., Any]:
    """Of a method that has nothing to do on an engine with replaced layers."""

    def ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return answer if run_of(self) else original(self, *args, **kwargs)

    return ours


def _telling(name: str, hear: Callable[..., None] | None = None) -> Callable[..., Any]:
    """Other ranks are notified of its errors, and ours hears what it is given."""

    def ours(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if run_of(self) is None:
            return original(self, *args, **kwargs)
        if hear is not None:
            hear(self, *args, **kwargs)
        with WATCH.host_pass(f"engine.{name}"):
            return original(self, *args, **kwargs)

    return ours


def _arguments(function: Any, given: Any, named: Any) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*given, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


PATCHES = tuple(
    Patch(id, target, VERSIONS, reason, by(ours))
    for id, target, reason, ours in (
        (
            "check-first",
            "deepspeed:initialize",
            "the block is checked before any process group is made",
            _initialize,
        ),
        (
            "refuse-block",
            "deepspeed:init_inference",
            "it would refuse the block in words of a library",
            _init_inference,
        ),
        (
            "replace-layers",
            f"{ENGINE}._configure_expert_parallel",
            "the place where AutoEP replaces layers; the engine then mends client optimizers",
            _configure_expert_parallel,
        ),
        (
            "keep-roles",
            f"{ENGINE}._configure_tensor_parallel",
            "AutoTP puts groups of all ranks in the place of an mpu that has roles",
            _within(rank_groups.keeps_roles),
        ),
        (
            "count-experts",
            f"{ENGINE}._configure_distributed_model",
            "the engine knows only its own MoE classes",
            _configure_distributed_model,
        ),
        (
            "check-groups",
            f"{ENGINE}._do_optimizer_sanity_check",
            "groups of which a rank has nothing are dropped, though a schedule counts them",
            _before(engine.check_optimizer),
        ),
        *(
            (
                f"{kind}-of-parts",
                f"{ENGINE}._configure_{kind}_optimizer",
                "what flattens a group wants experts and dense weights in groups of their own",
                _configure_wrapper,
            )
            for kind in ("zero", "bf16", "fp16")
        ),
        (
            "exact-clip",
            f"{ENGINE}.clip_fp32_gradients",
            "at ZeRO 0 DeepSpeed clips by the mean of the ranks' norms",
            _clip_fp32_gradients,
        ),
        *(
            (
                f"log-of-{name}",
                f"{ENGINE}.{name}",
                "ranks that wait for one that has failed are notified",
                _telling(name, hear),
            )
            for name, hear in (("forward", engine.begin_forward), ("step", None))
        ),
        (
            "log-of-backward",
            f"{ENGINE}.backward",
            "ranks that wait for one that has failed are notified; the report has losses; at ZeRO "
            "0 experts of a second one in the same micro-batch are averaged as dense weights are",
            _telling("backward", engine.begin_backward),
        ),
        (
            "count-passes",
            f"{PIPELINE}.train_batch",
            "a pipeline's passes overlap, and its engine says of none that it is the last",
            _around(engine.train_batch),
        ),
        (
            "log-of-eval_batch",
            f"{PIPELINE}.eval_batch",
            "ranks that wait for one that has failed are notified",
            _telling("eval_batch"),
        ),
        *(
            (
                f"of-both-roles-{name}",
                f"{PIPELINE}.{name}",
                "losses are of the batches of all ranks, gradients are averaged over one role",
                _within(rank_groups.whole_stage),
            )
            for name in ("_aggregate_total_loss", "_reduce_outputs")
        ),
        (
            "record-step",
            f"{ENGINE}._take_model_step",
            "loads are recorded once an optimizer step",
            _behind(engine.after_step),
        ),
        *(
            (
                f"drop-with-{name}",
                f"{optimizer}.zero_grad",
                "gradients of copies that wait for the last micro-batch are dropped with others",
                _behind(gradients.dropped),
            )
            for name, optimizer in (("zero-1", ZERO), ("zero-3", ZERO_3), ("bf16", BF16))
        ),
        (
            "slice-gradients",
            f"{ENGINE}._configure_optimizer",
            "what reduces gradients is given their slices; ranks of two roles clip by one norm",
            _configure_optimizer,
        ),
        (
            "see-ready",
            f"{ZERO}.process_gradients",
            "ZeRO 1 without overlap_comm looks at gradients after backward only",
            _behind(gradients.saw_ready),
        ),
        (
            "unless-waiting",
            f"{ZERO}.reduce_independent_p_g_buckets_and_remove_grads",
            "ranks with unequal experts would fill buckets at different moments",
            _put_into_bucket,
        ),
        (
            "unless-averaged",
            f"{ZERO}.allreduce_bucket",
            "what slices averaged goes through ZeRO's own code, but not over the network again",
            _allreduce_bucket,
        ),
        (
            "waiting-last",
            f"{ZERO}.independent_gradient_partition_epilogue",
            "what no slice took is reduced at the end, and experts when all others have been",
            _before(gradients.reduce_waiting),
        ),
        (
            "unless-last",
            f"{ZERO_3}.reduce_independent_p_g_buckets_and_remove_grads",
            "grids of ranks with plans of their own would fill buckets at different moments",
            _put_into_bucket,
        ),
        (
            "last-at-the-end",
            f"{ZERO_3}.independent_gradient_partition_epilogue",
            "experts are reduced when all others have been",
            _before(gradients.reduce_waiting),
        ),
        (
            "among-own-role",
            f"{ENGINE}.buffered_allreduce_fallback",
            "DeepSpeed has one mpu for all engines of a process; one with roles has its own",
            _within(rank_groups.own_groups),
        ),
        (
            "only-unaveraged",
            f"{ENGINE}._reduce_non_expert_gradients",
            "at ZeRO 0 the engine averages what no slice did",
            _reduce_dense,
        ),
        (
            "scaled-as-dense",
            f"{ENGINE}._reduce_expert_gradients",
            "at ZeRO 0 DeepSpeed counts sequence parallel ranks for experts, not for dense weights",
            _reduce_experts,
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
            _load_moe_state_dict,
        ),
        (
            "save-whole",
            f"{ENGINE}.save_16bit_model",
            "an exported model has all experts",
            _within(checkpoint.whole_state),
        ),
    )
)

apply = functools.partial(apply_all, PATCHES)
"""Apply all, or none and say why."""
