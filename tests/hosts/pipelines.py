# SPDX-License-Identifier: Apache-2.0
"""Training jobs under DeepSpeed's ``PipelineModule``: the model of ``jobs`` as a list of layers.

Stages see the micro-batches of a step in order; a data parallel rank has every so-many-th of them,
as in ``jobs``. Shape letters: B rows of a batch, T positions, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.hosts import jobs
from tests.hosts.jobs import LENGTH, VOCABULARY, Job

D = 32


@dataclass(frozen=True)
class Pipeline:
    """A job as a pipeline."""

    job: Job
    num_stages: int = 2
    checkpoint_interval: int = 0
    is_reentrant: bool = True  # by DeepSpeed's own function
    is_tied: bool = True
    carries_aux: bool = False
    evaluates: bool = False


class Result(NamedTuple):
    losses: list[float]  # of each step
    norms: list[float]
    state: dict[str, Tensor]  # all parameters at the end, of all stages
    evaluations: list[float]
    replicas: int  # of experts, over all layers and steps


class Embedding(nn.Embedding):
    """Of tokens; its weight is the head's too."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, D)
        nn.init.normal_(self.weight, std=0.5)


class Positions(nn.Module):
    """Learned positions."""

    def __init__(self, *, carries_aux: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(LENGTH, D))
        self.carries_aux = carries_aux

    def forward(self, x_BTD: Tensor) -> Any:
        y_BTD = x_BTD + self.weight
        return (y_BTD, y_BTD.new_zeros(1).requires_grad_()) if self.carries_aux else y_BTD


class GptBlock(nn.Module):
    """A block of ``gpt_moe``."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        from gpt_moe import Block, GptMoeConfig, MoeSettings

        moe = MoeSettings(job.num_experts, job.top_k, ep_size=1, drop_tokens=job.drop_tokens)
        config = GptMoeConfig(VOCABULARY, LENGTH, 1, D, 4, 48, moe, 1, initializer_range=0.1)
        self.block = Block(config, has_experts=True)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self.block(given)[0]
        x_BTD, aux = given
        y_BTD, own = self.block(x_BTD)
        return y_BTD, aux + own.to(aux.dtype)


class MixtralBlock(nn.Module):
    """A decoder layer of Hugging Face's Mixtral, with the positions that its model would give."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        from transformers.models.mixtral import modeling_mixtral as mixtral

        config = jobs.mixtral_config(job)
        self.layer = mixtral.MixtralDecoderLayer(config, 0)
        self.rotary = mixtral.MixtralRotaryEmbedding(config)
        for parameter in self.layer.mlp.experts.parameters():
            nn.init.normal_(parameter, std=0.1)
        nn.init.normal_(self.layer.mlp.gate.weight, std=0.1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        positions = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
        made = self.layer(x_BTD, position_embeddings=self.rotary(x_BTD, positions))
        return made if isinstance(made, Tensor) else made[0]


class Norm(nn.Module):
    """Before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self.norm(given)
        return self.norm(given[0]), given[1]


class Head(nn.Module):
    """With a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(VOCABULARY, D))

    def forward(self, given: Any) -> Any:
        return head(self, given)


def head(module: Any, given: Any) -> Any:
    """Logits, with the weight of a module."""
    if isinstance(given, Tensor):
        return functional.linear(given, module.weight)
    return functional.linear(given[0], module.weight), given[1]


def loss_of(coefficient: float, made: Any, labels_BT: Tensor) -> Tensor:
    """Cross-entropy, and what blocks add."""
    logits_BTV, aux = (made, None) if isinstance(made, Tensor) else made
    loss = functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
    return loss if aux is None else loss + coefficient * aux.sum()


def model_of(pipeline: Pipeline) -> Any:
    """Collective. The same weights however many stages there are."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    job = pipeline.job
    block = {"gpt_moe": GptBlock, "mixtral": MixtralBlock}[job.family]
    blocks = [LayerSpec(block, job) for _ in range(job.num_layers)]
    first, last = LayerSpec(Embedding), LayerSpec(Head)
    if pipeline.is_tied:
        first = TiedLayerSpec("embedding", Embedding)
        last = TiedLayerSpec("embedding", Embedding, forward_fn=head)
    positions = LayerSpec(Positions, carries_aux=pipeline.carries_aux)
    return PipelineModule(
        layers=[first, positions, *blocks, LayerSpec(Norm), last],
        num_stages=pipeline.num_stages,
        loss_fn=partial(loss_of, job.aux_coefficient),
        seed_layers=True,
        seed_fn=torch.manual_seed,
        partition_method=f"type:{block.__name__}",
        activation_checkpoint_interval=pipeline.checkpoint_interval,
        activation_checkpoint_func=deepspeed.checkpointing.checkpoint
        if pipeline.is_reentrant
        else partial(checkpoint, use_reentrant=False),
        checkpointable_layers=[block.__name__],
    )


def batches(step: int, rank: int, num_ranks: int, job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of a data parallel rank."""
    for number in range(rank, job.micro_batches, num_ranks):
        tokens_BT = jobs.micro_batch(step, number)
        yield tokens_BT, tokens_BT.roll(-1, 1)


def engine_of(pipeline: Pipeline, world_size: int) -> Any:
    """Collective."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    forget_groups()
    deepspeed.init_distributed("gloo")
    job = pipeline.job
    torch.manual_seed(0)
    model = model_of(pipeline)
    if job.dtype == "float64":
        model.double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    document = jobs.document_of(job, world_size // pipeline.num_stages)
    if job.sgd and job.optimizer == "json":
        document["optimizer"] = {"type": "SGD", "params": {"lr": job.learning_rate}}
    made = jobs._torch_optimizer(job, parameters) if job.optimizer == "object" else None
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if made else parameters,
        optimizer=made,
        config=document,
    )
    if job.dtype == "float64":
        engine.allreduce_gradients = lambda bucket_size: jobs.reduce_in_float64(engine)
    return engine


def forget_groups() -> None:
    """DeepSpeed keeps groups and the mpu of a process's last engine, for all that follow."""
    from deepspeed.utils import groups

    for kept in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    ):
        kept.clear()
    groups.mpu = None


def train(rank: int, world_size: int, pipeline: Pipeline) -> Result | None:
    """Run the job; rank 0 returns the result."""
    job = pipeline.job
    with ExitStack() as stack:
        stack.callback(forget_groups)
        if job.dtype == "float64":
            stack.enter_context(jobs.float64_everywhere())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(
                torch.float64
            )  # in which stages report to each other their losses
        return _trained(rank, world_size, pipeline)


def _trained(rank: int, world_size: int, pipeline: Pipeline) -> Result | None:
    import torch.distributed as dist

    from ds_moe_ext import full_state_dict

    job = pipeline.job
    engine = engine_of(pipeline, world_size)
    place, num_places = engine.grid.get_data_parallel_id(), engine.dp_world_size
    start, losses, norms, evaluations = 0, [], [], []
    if job.resume:
        engine.load_checkpoint(job.folder, **dict(job.load_arguments))
        start = engine.global_steps
    for step in range(start, job.steps):
        losses.append(float(engine.train_batch(batches(step, place, num_places, job))))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if pipeline.evaluates:
            given = batches(100 + step, place, num_places, job)
            evaluations.append(float(engine.eval_batch(given)))
        if job.save_at == step + 1:
            engine.save_checkpoint(job.folder)
    own = {k: v.detach().clone() for k, v in full_state_dict(engine.module).items()}
    lines: list[Any] = [None] * world_size
    dist.all_gather_object(lines, (own, _num_replicas(engine)))
    state = {name: weight for states, _ in lines for name, weight in states.items()}
    replicas = sum(number for _, number in lines[::num_places])
    return Result(losses, norms, state, evaluations, replicas) if rank == 0 else None


def why_refused(rank: int, world_size: int, pipeline: Pipeline) -> str:
    """What a start says that is refused."""
    try:
        engine_of(pipeline, world_size)
    except ValueError as error:
        return str(error)
    finally:
        forget_groups()
    return ""


def train_with_report(rank: int, world_size: int, pipeline: Pipeline) -> None:
    """Let the report be written into the job's folder."""
    from unittest import mock

    from ds_moe_ext.hosts.steps.training_run import run_of
    from ds_moe_ext.report.report_files import ReportFiles

    report = {"enabled": True, "path": pipeline.job.folder}
    document = jobs.document_of(pipeline.job, world_size // pipeline.num_stages)
    document["ds_moe_ext"]["report"] = report
    try:
        with mock.patch.object(jobs, "document_of", lambda *_: document):
            engine = engine_of(pipeline, world_size)
        place, num_places = engine.grid.get_data_parallel_id(), engine.dp_world_size
        for step in range(pipeline.job.steps):
            engine.train_batch(batches(step, place, num_places, pipeline.job))
    finally:
        forget_groups()
    run = run_of(engine)
    if run.files is not None:
        ReportFiles(run.files.folder).write(run.recorder.record())


def _num_replicas(engine: Any) -> int:
    from ds_moe_ext.hosts.steps.training_run import recorder_of
    from ds_moe_ext.report.summary import outcomes_by_layer

    recorder = recorder_of(engine)
    record = None if recorder is None else recorder.record()
    if record is None or record.placements is None:
        return 0
    return round(sum(o.replicas for o in outcomes_by_layer(record)) * len(record.steps_I))
