# SPDX-License-Identifier: Apache-2.0
"""Jobs that ranks run: Mixtral, by DeepSpeed's AutoTP or its Ulysses sequence parallelism.

All ranks of a copy of the model see the same micro-batches: whole ones under AutoTP, each a part of
the sequence under Ulysses. So every job sees the same global batch, however it is divided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tests.hosts.copied_runs import Watch, num_copied, watching
from tests.hosts.jobs import (
    LENGTH,
    ROWS,
    Job,
    document_of,
    float64_everywhere,
    micro_batch,
    model_of,
    reduce_in_float64,
)


class Way(Enum):
    """How the ranks of one copy of the model divide it."""

    NONE = "none"
    AUTOTP = "autotp"
    ULYSSES = "ulysses"


class Case(NamedTuple):
    """A job, and how it is divided."""

    job: Job
    way: Way = Way.NONE
    size: int = 1
    early: bool = False


class Learnt(NamedTuple):
    losses: list[float]  # mean over a step's micro-batches
    norms: list[float]
    state: dict[str, Tensor]  # whole, of any rank
    num_copied: int  # in the plans of all steps


def train(rank: int, world_size: int, case: Case) -> Learnt:
    """Run the job."""
    watch, is_wide = Watch(), case.job.dtype == "float64"
    wide = float64_everywhere() if is_wide else nullcontext()
    with _attention_as_it_was(), _no_groups_left(), watching(watch), wide:
        learnt = _trained(rank, world_size, case)
    return learnt._replace(num_copied=sum(num_copied(watch.steps)))


def _trained(rank: int, world_size: int, case: Case) -> Learnt:
    import torch.distributed as dist

    from ds_moe_ext import full_state_dict

    job, replicas, here = case.job, world_size // case.size, rank // case.size
    engine = _engine_of(case, replicas)
    engine.enable_backward_allreduce = job.dtype != "float64"
    if job.resume:
        engine.load_checkpoint(job.folder)
    losses, norms = [], []
    for step in range(engine.global_steps, job.steps):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(here, job.micro_batches, replicas):
            loss = _LOSSES[case.way](engine, micro_batch(step, number), rank % case.size, case.size)
            engine.backward(loss)
            if job.dtype == "float64" and engine.is_gradient_accumulation_boundary():
                reduce_in_float64(engine)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        shared = case.size if case.way is Way.AUTOTP else 1  # who have the same loss
        losses.append(float(total) / job.micro_batches / shared)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if job.save_at == step + 1:
            engine.save_checkpoint(job.folder)
    state = {name: weight.clone() for name, weight in full_state_dict(engine.module).items()}
    return Learnt(losses, norms, state, 0)


def _engine_of(case: Case, replicas: int) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = model_of(case.job)
    if case.job.dtype == "float64":
        model.double()
    document, mpu = document_of(case.job, replicas), None
    if case.way is Way.AUTOTP:
        document["tensor_parallel"] = {"preset_model": "mixtral"}
        if case.early:
            model = deepspeed.tp_model_init(model, case.size, torch.float32)
        else:
            document["tensor_parallel"]["autotp_size"] = case.size
    if case.way is Way.ULYSSES:
        mpu = _sequence_groups(model, case.size)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=case.job.learning_rate) if case.job.sgd else None
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, mpu=mpu, config=document
    )
    return engine


def _sequence_groups(model: Any, size: int) -> Any:
    from deepspeed.comm import init_distributed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    init_distributed(dist_backend="gloo")
    # DeepSpeed asks a config for it, and Mixtral's has None.
    shape = model.config
    shape.head_dim = shape.hidden_size // shape.num_attention_heads
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=size,
        micro_batch_size=ROWS,
        seq_length=LENGTH,
        seq_length_is_variable=False,
    )


def _whole_loss(engine: Any, tokens: Tensor, *_: int) -> Tensor:
    loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
    return loss


def _loss_of_part(engine: Any, tokens: Tensor, place: int, size: int) -> Tensor:
    """This rank's summands of the mean over all positions, which DeepSpeed adds up."""
    own = slice(place * LENGTH // size, (place + 1) * LENGTH // size)
    positions = torch.arange(LENGTH).expand_as(tokens)
    labels = functional.pad(tokens[:, 1:], (0, 1), value=-100)[:, own].contiguous()
    loss: Tensor = engine(
        input_ids=tokens[:, own],
        position_ids=positions[:, own],
        labels=tokens[:, own],
        shift_labels=labels,
        num_items_in_batch=torch.tensor(float(ROWS * (LENGTH - 1))),
    ).loss
    return loss


_LOSSES: dict[Way, Callable[..., Tensor]] = {
    Way.NONE: _whole_loss,
    Way.AUTOTP: _whole_loss,
    Way.ULYSSES: _loss_of_part,
}


@contextmanager
def _attention_as_it_was() -> Iterator[None]:
    """Ulysses puts itself in the place of transformers' attention, for all that follows."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = stock


@contextmanager
def _no_groups_left() -> Iterator[None]:
    """DeepSpeed's groups are of the process: the engines of later tests would take them for
    theirs."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.tensor_parallel import init_utils
    from deepspeed.utils import groups

    try:
        yield
    finally:
        groups.mpu = groups._TENSOR_MODEL_PARALLEL_GROUP = None
        init_utils._TP_MODEL_INIT_ARGS = None
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
