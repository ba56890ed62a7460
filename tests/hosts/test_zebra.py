"""Strategy zebra under the real DeepSpeed engine learns what ``ep`` learns: float64, Adam.

Where stripes cut a rank's batch, balance losses and capacities are those of the pieces, as they are
of smaller micro-batches; the jobs that do so have neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_moe_ext.hosts.attach import Blueprint
from tests.hosts import families
from tests.hosts.copied_runs import check_equal, plain
from tests.hosts.jobs import Job, Result, document_of, model_of, train
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of

NUM_EXPERTS = {2: 4, 3: 6, 4: 4, 6: 12, 8: 8}
"""By ranks: a number that the ranks divide, and the expert ranks too."""


def job_of(world_size: int, family: str = "mixtral", **named: Any) -> Job:
    """Each rank accumulates two micro-batches."""
    job = Job(
        family,
        0,
        dtype="float64",
        steps=3,
        clip=0.5,
        micro_batches=2 * world_size,
        num_experts=NUM_EXPERTS[world_size],
    )
    return replace(job, **named)


def result_of(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


def check(attention: int, experts: int, job: Job, *, groups: int = 1, **keys: Any) -> None:
    """The job is the same with roles as without."""
    world_size = groups * (attention + experts)
    ours = result_of(world_size, zebra(job, attention, experts, **keys))
    check_equal(ours, plain(world_size, job), job, tolerance=1e-11)


SHAPES = [
    (1, 1, 1, None),
    (1, 1, 1, [0, 1]),
    (2, 2, 1, [0, 1]),
    (1, 1, 2, [1, 0]),
    slow(2, 2, 1, None),
    slow(2, 2, 1, [2, 0]),
    (1, 2, 1, [1, 2]),
    slow(1, 2, 1, None),
    (2, 1, 1, [2, 0]),
    slow(2, 1, 1, None),
    slow(1, 3, 1, None),
    slow(2, 4, 1, [1, 0]),
    slow(2, 4, 1, None),
    slow(4, 2, 1, [2, 0]),
    slow(4, 2, 1, None),
    slow(2, 2, 2, [1, 2]),
    slow(1, 1, 4, [2, 4]),
]


@pytest.mark.parametrize(("attention", "experts", "groups", "moved"), SHAPES)
def test_shapes(attention: int, experts: int, groups: int, moved: list[int] | None) -> None:
    """Ranks of either role, several groups, with experts of attention ranks and without."""
    world_size = groups * (attention + experts)
    job = job_of(world_size, aux_coefficient=0.0 if attention > experts else 0.02)
    if experts == 3:
        job = replace(job, num_experts=12)
    check(attention, experts, job, groups=groups, moved=moved)


@pytest.mark.parametrize("num_stripes", [1, 4, slow(2), slow(3)])
def test_stripes(num_stripes: int) -> None:
    """One that holds both batches; and some that are a part of one."""
    job = job_of(2, aux_coefficient=0.0)
    check(1, 1, job, num_micro_batches=num_stripes, moved=[0, 1])


@pytest.mark.parametrize(
    ("attention", "experts", "num_stripes"),
    [slow(2, 1, 1), slow(2, 1, 2), slow(1, 2, 4), slow(2, 2, 1), slow(2, 2, 3), slow(2, 2, 4)],
)
def test_stripes_of_several_batches(attention: int, experts: int, num_stripes: int) -> None:
    """Stripes end within batches, and an expert rank's batch goes to two attention ranks."""
    job = job_of(attention + experts, aux_coefficient=0.0)
    check(attention, experts, job, num_micro_batches=num_stripes)


@pytest.mark.parametrize(
    ("recomputes", "use_reentrant"), [(True, False), slow(True, None), slow(False, False)]
)
@pytest.mark.parametrize("family", ["mixtral", slow("gpt_moe"), slow("toy")])
def test_computing_again(family: str, recomputes: bool, use_reentrant: bool | None) -> None:
    """On expert ranks, and by the user on attention ranks."""
    job = job_of(2, family, use_reentrant=use_reentrant)
    check(1, 1, job, recompute_experts=recomputes, num_micro_batches=2)


FAMILIES = [
    "gpt_moe",
    "qwen2_moe",
    "deepseek_v3",
    *(slow(n) for n in families.NAMES if n not in ("qwen2_moe", "deepseek_v3", "mixtral")),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    num_layers = families.MOE_LAYERS.get(family, 2)
    check(1, 1, job_of(2, family), moved=[1, 0][:num_layers])


TOYS = [
    "toy, frozen experts",  # expert ranks train nothing
    "toy, experts alone",  # attention ranks train nothing
    slow("toy"),
    slow("toy, uneven layers"),
    slow("toy, paired"),
    slow("toy, two pools"),
    slow("toy, some experts frozen"),
    slow("toy, top alone"),
]


@pytest.mark.parametrize("family", TOYS)
def test_unusual_models(family: str) -> None:
    check(1, 1, job_of(2, family))


def test_weights_with_one_gradient() -> None:
    """With one stripe a gradient is found once; two weights have the same tensor of it."""
    check(1, 1, job_of(2, "toy, paired"), num_micro_batches=1)


@pytest.mark.slow
def test_experts_of_uneven_layers_move() -> None:
    check(1, 1, job_of(2, "toy, uneven layers"), moved=[0, 3, 3, 1])


@pytest.mark.parametrize("num_layers", [slow(3), slow(4)])
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_deeper_models(family: str, num_layers: int) -> None:
    moved = [0, 1, 2, 1][:num_layers]
    check(2, 2, job_of(4, family, num_layers=num_layers), moved=moved)


@pytest.mark.parametrize("family", ["mixtral", slow("gpt_moe")])
def test_capacity(family: str) -> None:
    """Over a piece; here a piece is a batch."""
    check(1, 1, job_of(2, family, capacity_factor=0.8), num_micro_batches=2)


def test_evaluation() -> None:
    """Between steps, and between a forward and its backward; it leaves no trace."""
    check(1, 1, job_of(2, evaluate=True, evaluate_within=True), moved=[0, 1])


def test_no_accumulation() -> None:
    check(1, 1, job_of(2, micro_batches=2, learning_rate=1e-2))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_moe"])
def test_long_run(family: str) -> None:
    job = job_of(4, family, steps=30)
    ours = result_of(4, zebra(job, 2, 2, moved=[0, 1]))
    theirs = plain(4, job)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.losses[-1] < ours.losses[0]


# Before anything is built.


def drawn(job: Job, monkeypatch: pytest.MonkeyPatch) -> Blueprint | None:
    """What the job's document asks for of its model, on two ranks."""
    from ds_moe_ext.hosts.deepspeed.startup import blueprint_of

    monkeypatch.setenv("WORLD_SIZE", "2")
    return blueprint_of(document_of(job, 2), model_of(job), None)


def test_experts_of_several_pools_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are by layer, though widths differ."""
    job = zebra(job_of(2, "toy, two pools"), 1, 1, moved=[0, 1, 3, 2])
    blueprint = drawn(job, monkeypatch)
    assert blueprint is not None
    held = [len(home.experts_of(0)) for home in blueprint.homes()]
    assert held == [0, 1, 3, 2]


def test_expert_ranks_that_give_up_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="moved"):
        drawn(zebra(job_of(2), 1, 1, moved=[4, 4]), monkeypatch)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"moved": [1]}, "moved has 1 numbers, but there are 2 MoE layers"),
        ({"moved": [0, 5]}, "moved has 5"),
        ({"moved": [0, -1]}, "integers from 0"),
        ({"num_micro_batches": 0}, "num_micro_batches"),
        ({"attention_size": 2, "expert_size": 2}, r"2 attention \+ 2 expert ranks"),
        ({"attention_size": None}, "attention_size is None"),
    ],
)
def test_keys_that_cannot_work(
    keys: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=says):
        blueprint = drawn(zebra(job_of(2), **{"attention": 1, "experts": 1, **keys}), monkeypatch)
        assert blueprint is not None
        blueprint.homes()


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"zero_optimization": {"stage": 3}}, "stage is 3"),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous_grad"),
        ({"zero_optimization": {"stage": 1, "reduce_scatter": False}}, "reduce_scatter is false"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer is set",
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "optimizer.type"),
        ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, "legacy_fusion"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
    ],
)
def test_what_does_not_go_with_roles(
    document: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = zebra(job_of(2, extra=tuple(document.items()), optimizer="object"), 1, 1)
    with pytest.raises(ValueError, match=says):
        drawn(job, monkeypatch)


def test_a_gate_and_balance_do_not_go_with_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = (("type", "gshard"),)
    with pytest.raises(ValueError, match="gate"):
        drawn(zebra(job_of(2, gate=gate), 1, 1), monkeypatch)
    with pytest.raises(ValueError, match="balance"):
        drawn(zebra(job_of(2, balance="esp"), 1, 1), monkeypatch)
