# SPDX-License-Identifier: Apache-2.0
"""Split experts beside tensor parallel attention: FSMoE's ten steps under a real DeepSpeed engine.

Losses, gradient norms and the gradients of the first step equal those of the undivided model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.hosts import jobs
from tests.hosts.jobs import micro_batch
from tests.marks import slow
from tests.ranks import pool_of


class Case(NamedTuple):
    tensor_parallel: int = 2
    etp_size: int = 2
    sequence_parallel: bool = False
    stage: int = 1
    micro_batches: int = 4  # of a step, over all replicas of the model
    steps: int = 6
    folder: str | None = None
    resumes: bool = False  # from the folder, where half of the steps were saved
    roles: bool = False  # half of the ranks have experts only
    measures: bool = False  # which experts move is chosen by a profile


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]


def _train(rank: int, world_size: int, case: Case) -> Run:
    from deepspeed.utils import groups

    try:
        return _trained(rank, world_size, case)
    finally:
        groups.mpu = None  # or the engines of later tests would take it for theirs


def _trained(rank: int, world_size: int, case: Case) -> Run:
    import deepspeed
    import torch.distributed as dist

    from tests.hosts import tensor_parallel as tp

    size = case.tensor_parallel
    mpu = tp.Mpu.of(size) if size > 1 else None
    ranks = tp.Ranks(mpu.model, size, dist.get_rank(mpu.model)) if mpu else None
    model = tp.build(ranks, has_own_tokens=case.sequence_parallel)
    replicas, here = world_size // size, rank // size
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        mpu=mpu,
        config=_document(case, replicas),
    )
    if case.resumes:
        engine.load_checkpoint(case.folder)
    losses, norms = [], []
    for step in range(engine.global_steps, case.steps):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(here, case.micro_batches, replicas):
            tokens = micro_batch(step, number)
            loss = engine(input_ids=tokens, labels=tokens.roll(-1, 1)).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / case.micro_batches / size)
        norms.append(float(engine.get_global_grad_norm()))
        if case.folder and not case.resumes and 2 * (step + 1) == case.steps:
            engine.save_checkpoint(case.folder)
    return Run(losses, norms)


SPLIT = {
    "strategy": "esp",
    "esp": {"degree": {"forward": 2, "backward": 3}, "slice_gradients": False},
}
SIZES: dict[str, Any] = {"attention_size": 2, "expert_size": 2}


def _document(case: Case, replicas: int) -> dict[str, Any]:
    profile = {"sequence_length": 8, "num_repeats": 2} if case.measures else None
    by_roles = {"strategy": "zebra", "zebra": SIZES | {"profile": profile}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micro_batches // replicas,
        "gradient_clipping": 0.5,
        "zero_optimization": jobs.zero(case.stage),
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "ds_moe_ext": {
            "enabled": True,
            **(by_roles if case.roles else SPLIT | {"expert_sharding_size": case.etp_size}),
            "sequence_parallel": case.sequence_parallel,
            "report": {"enabled": False},
            "debug": True,
        },
    }


@pytest.fixture(scope="module")
def undivided() -> Run:
    run: Run = pool_of(1).run(_train, Case(1, 1))[0]
    return run


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        slow(4, Case(2, 2)),
        slow(4, Case(2, 2, sequence_parallel=True)),
        slow(4, Case(1, 2)),
        (4, Case(2, 2, sequence_parallel=True, stage=2)),
        slow(4, Case(2, 2, stage=3)),
        slow(4, Case(2, 1, stage=3)),
        slow(4, Case(2, 4, sequence_parallel=True)),
        slow(4, Case(4, 2)),
        slow(4, Case(2, 1)),
        slow(8, Case(2, 2)),
        slow(8, Case(2, 4)),
        slow(8, Case(2, 2, sequence_parallel=True)),
        slow(8, Case(4, 4, sequence_parallel=True)),
        slow(8, Case(1, 2, micro_batches=8)),
        slow(8, Case(1, 4, micro_batches=8)),
        slow(4, Case(2, 1, roles=True)),
        slow(4, Case(2, 1, roles=True, measures=True)),
        slow(4, Case(2, 1, roles=True, sequence_parallel=True, stage=2)),
        slow(8, Case(2, 1, roles=True, stage=0)),
    ],
)
def test_ten_steps_equal_the_undivided_model(world_size: int, case: Case, undivided: Run) -> None:
    """DP 2, MP 2, EP 2 and ESP 2 on four ranks, and larger layouts."""
    reference = undivided
    if case.micro_batches != Case().micro_batches:
        reference = pool_of(1).run(_train, Case(1, 1, micro_batches=case.micro_batches))[0]
    for ours in pool_of(world_size).run(_train, case):
        assert ours.losses == pytest.approx(reference.losses, rel=2e-5)
        assert ours.norms == pytest.approx(reference.norms, rel=1e-4)


@pytest.mark.parametrize("stage", [slow(1), slow(3)])
def test_checkpoints_keep_every_ranks_part(stage: int, tmp_path: Path) -> None:
    """Dense weights have one name on all tensor parallel ranks, and other values."""
    case = Case(2, 2, sequence_parallel=stage == 1, stage=stage, folder=str(tmp_path))
    whole = pool_of(4).run(_train, case)[0]
    half = case.steps // 2
    resumed = pool_of(4).run(_train, case._replace(resumes=True))[0]
    assert resumed.losses == whole.losses[half:]
    assert resumed.norms == whole.norms[half:]
    with pytest.raises(AssertionError, match="2 tensor parallel rank"):
        pool_of(4).run(
            _train, case._replace(tensor_parallel=1, sequence_parallel=False, resumes=True)
        )
