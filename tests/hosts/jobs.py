# SPDX-License-Identifier: Apache-2.0
"""Training jobs that ranks run: a real DeepSpeed engine on a tiny model.

Every job sees the same global batch, whatever the number of ranks: micro-batch ``i`` of a step goes
to rank ``i % world_size``, and one rank accumulates what several share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hosts import families

MICRO_BATCHES = 4  # a step, over all ranks
VOCABULARY, LENGTH, ROWS = 64, 16, 2


@dataclass(frozen=True)
class Job:
    family: str = "mixtral"
    stage: int = 1
    block: bool = True  # the ds_moe_ext block
    ep_ranks: int | None = None
    strategy: str = "ep"
    keys: tuple[tuple[str, Any], ...] = ()  # of the strategy's block
    etp_size: int | None = None
    balance: str | None = None
    balance_keys: tuple[tuple[str, Any], ...] = ()  # of its block
    hardware: str | None = None
    capacity_factor: float | None = None
    gate: tuple[tuple[str, Any], ...] = ()  # keys of a gate of ours; the host's without
    hooks: tuple[tuple[tuple[str, Any], ...], ...] = ()  # keys of each
    num_experts: int = 4
    num_layers: int = 2  # of mixtral and gpt_moe; likewise the next
    aux_coefficient: float = 0.02  # of the balance loss
    micro_batches: int = MICRO_BATCHES
    use_reentrant: bool | None = None  # of activation checkpointing; None does none
    dtype: str = "float32"
    steps: int = 10
    clip: float = 0.0
    optimizer: str = "json"  # json, object, callable
    parameters: str = "list"  # list, generator, groups
    sgd: bool = False
    learning_rate: float = 3e-3
    epsilon: float = 1e-8  # of Adam in JSON
    ep_size: int = 1  # that a native MoE is built with
    top_k: int = 2  # of a native MoE
    drop_tokens: bool = False
    offload: tuple[tuple[str, Any], ...] = ()  # keys of ZeRO's offload_optimizer
    torch_adam: bool = True  # else DeepSpeed's own
    extra: tuple[tuple[str, Any], ...] = ()
    save_at: int | None = None
    folder: str | None = None
    resume: bool = False
    load_arguments: tuple[tuple[str, Any], ...] = ()
    no_sync: bool = False  # reduce in the last micro-batch only
    evaluate: bool = False  # run an evaluation between the steps
    evaluate_within: bool = False  # and between each forward and its backward


class Result(NamedTuple):
    losses: list[float]  # mean over the step's micro-batches
    norms: list[float]
    state: dict[str, Tensor]  # all parameters at the end


def model_of(job: Job) -> nn.Module:
    torch.manual_seed(0)
    model = _MODELS.get(job.family, _toy)(job)
    if job.use_reentrant is not None:
        _checkpoint_activations(model, job.use_reentrant)
    return model


def _checkpoint_activations(model: nn.Module, use_reentrant: bool) -> None:
    if "blocks" in model._modules:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


def mixtral_config(job: Job) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=job.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=job.num_experts,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        router_aux_loss_coef=job.aux_coefficient,
        sliding_window=None,
        attn_implementation="sdpa",
    )


def _mixtral(job: Job) -> nn.Module:
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM(mixtral_config(job))
    if job.dtype == "float64":
        model.set_experts_implementation("eager")  # grouped GEMM has no float64
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def _gpt_moe(job: Job) -> nn.Module:
    from gpt_moe import GptMoe, GptMoeConfig, MoeSettings

    moe = MoeSettings(
        num_experts=job.num_experts,
        k=job.top_k,
        ep_size=job.ep_size,
        drop_tokens=job.drop_tokens,
    )
    shape = GptMoeConfig(
        vocab_size=VOCABULARY,
        sequence_length=LENGTH,
        num_layers=job.num_layers,
        hidden_size=32,
        num_heads=4,
        ffn_hidden_size=48,
        moe=moe,
        moe_every=1,
        aux_loss_coef=job.aux_coefficient,
    )
    return GptMoe(shape)


def _of_family(job: Job) -> nn.Module:
    model = families.build(job.family)
    if job.dtype == "float64":
        model.set_experts_implementation("eager")
    return model


def _toy(job: Job) -> nn.Module:
    from tests.hosts import toy

    return toy.build(job.family)


_MODELS: dict[str, Callable[[Job], nn.Module]] = {
    **dict.fromkeys((*families.NAMES, *families.OTHERS), _of_family),
    "mixtral": _mixtral,
    "gpt_moe": _gpt_moe,
}


def micro_batch(step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)


def _balance_block(job: Job) -> dict[str, Any]:
    if job.balance is None:
        return {}
    return {"options" if ":" in job.balance else job.balance: dict(job.balance_keys)}


def zero(stage: int) -> dict[str, Any]:
    """At stage 3 a model so small would stay whole, by default, or be gathered at once."""
    if stage < 3:
        return {"stage": stage}
    return {
        "stage": stage,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 10_000,
    }


def document_of(job: Job, world_size: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": job.micro_batches // world_size,
        "gradient_clipping": job.clip,
        "zero_optimization": zero(job.stage),
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        **dict(job.extra),
    }
    if job.offload:
        document["zero_optimization"]["offload_optimizer"] = dict(job.offload)
    if job.optimizer == "json":
        document["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": job.learning_rate,
                "eps": job.epsilon,
                "torch_adam": job.torch_adam,
            },
        }
    if job.dtype == "bfloat16":
        document["bf16"] = {"enabled": True}
    if job.dtype == "float16":
        document["fp16"] = {"enabled": True, "initial_scale_power": 20}
    if job.block:
        document["ds_moe_ext"] = {
            "enabled": True,
            "expert_parallel_size": job.ep_ranks,
            "expert_sharding_size": job.etp_size,
            "strategy": job.strategy,
            "balance": job.balance,
            "options" if ":" in job.strategy else job.strategy: dict(job.keys),
            **_balance_block(job),
            "hardware": job.hardware,
            "capacity_factor": job.capacity_factor,
            "gate": dict(job.gate) or None,
            "hooks": [dict(hook) for hook in job.hooks],
            "report": {"enabled": False},
            "debug": True,
        }
    return document


def engine_of(job: Job, world_size: int) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = model_of(job)
    if job.dtype == "float64":
        model.double()
    parameters: Any = {
        "list": lambda: list(model.parameters()),
        "generator": model.parameters,
        "groups": lambda: [{"params": list(model.parameters()), "weight_decay": 0.0}],
    }[job.parameters]()
    optimizer = {
        "json": lambda: None,
        "object": lambda: _torch_optimizer(job, parameters),
        "callable": lambda: lambda given: _torch_optimizer(job, given),
    }[job.optimizer]()
    if job.optimizer == "object":
        parameters = None
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=optimizer,
        config=document_of(job, world_size),
    )
    return engine


def _torch_optimizer(job: Job, parameters: Any) -> torch.optim.Optimizer:
    cls = torch.optim.SGD if job.sgd else torch.optim.AdamW
    return cls(parameters, lr=job.learning_rate)


def loss_of(engine: Any, tokens: Tensor) -> Tensor:
    tokens = tokens.to(engine.device)
    labels = tokens if "Mixtral" in type(engine.module).__name__ else tokens.roll(-1, 1)
    loss: Tensor = engine(input_ids=tokens, labels=labels).loss
    return loss


def reduce_in_float64(engine: Any) -> None:
    """What DeepSpeed does at ZeRO 0, but it refuses to do it in float64: all gradients of a group
    at once."""
    import torch.distributed as dist
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    group = engine.seq_data_parallel_group
    grads: dict[Any, list[Tensor]] = {}
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        is_expert = is_moe_param(parameter)
        over = groups._get_expert_data_parallel_group(parameter.group_name) if is_expert else group
        if parameter.grad is None:  # of an expert without rows; DeepSpeed does the same
            parameter.grad = torch.zeros_like(parameter)
        grads.setdefault(over, []).append(parameter.grad)
    for over, own in grads.items():
        flat = torch.cat([grad.flatten() for grad in own])
        dist.all_reduce(flat, group=over)
        flat /= dist.get_world_size(group) / engine.sequence_parallel_size
        for grad, part in zip(own, flat.split([grad.numel() for grad in own])):
            grad.copy_(part.view_as(grad))


def _evaluate(engine: Any, step: int) -> None:
    """A forward without backward; it must leave no trace."""
    engine.eval()
    with torch.no_grad():
        loss_of(engine, micro_batch(step, 99))
    engine.train()


def train(rank: int, world_size: int, job: Job) -> Result | None:
    """Run the job; rank 0 returns the result."""
    with ExitStack() as stack:
        if job.dtype == "float64":
            stack.enter_context(float64_everywhere())
        if job.dtype == "float16":
            stack.enter_context(_float16_on_a_cpu())
        return _trained(rank, world_size, job)


@contextmanager
def _float16_on_a_cpu() -> Iterator[None]:
    """DeepSpeed does not let a CPU train in float16, though torch can."""
    from deepspeed.accelerator import get_accelerator

    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    cls = type(get_accelerator())
    with (
        mock.patch.object(cls, "is_fp16_supported", lambda _: True),
        mock.patch.object(cls, "supported_dtypes", lambda _: dtypes),
    ):
        yield


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Routers and norms compute in float32 on purpose; for a comparison to the last digit both
    sides of it compute in float64."""
    to = Tensor.to

    def to_double(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *(torch.float64 if a is torch.float32 else a for a in args), **kwargs)

    with (
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(Tensor, "to", to_double),
    ):
        yield


def _trained(rank: int, world_size: int, job: Job) -> Result | None:
    import torch.distributed as dist

    from ds_moe_ext import full_state_dict

    engine = engine_of(job, world_size)
    engine.enable_backward_allreduce = job.dtype != "float64"
    start = 0
    if job.resume:
        engine.load_checkpoint(job.folder, **dict(job.load_arguments))
        start = engine.global_steps
    losses, norms = [], []
    for step in range(start, job.steps):
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        for number in range(rank, job.micro_batches, world_size):
            is_last = number + world_size >= job.micro_batches
            with engine.no_sync() if job.no_sync and not is_last else nullcontext():
                loss = loss_of(engine, micro_batch(step, number))
                if job.evaluate_within:
                    _evaluate(engine, step)
                engine.backward(loss)
            if job.dtype == "float64" and engine.is_gradient_accumulation_boundary():
                reduce_in_float64(engine)
            engine.step()
            total += loss.detach().double()
        if job.evaluate:
            _evaluate(engine, step)
        dist.all_reduce(total)
        losses.append(float(total) / job.micro_batches)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if job.save_at == step + 1:
            engine.save_checkpoint(job.folder)
    state = full_state_dict(engine.module)
    if rank != 0:
        return None
    return Result(losses, norms, {k: v.detach().cpu().clone() for k, v in state.items()})
