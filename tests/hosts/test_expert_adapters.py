# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts, by peft's ``target_parameters``: they train as in stock on one rank, are
saved, and go on in another layout; what cannot go along is refused."""

from __future__ import annotations

import functools
import importlib.util
import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_moe_ext
from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment.host_layer import any_name
from tests.hosts import families, jobs, test_sharded, test_torch
from tests.hosts.copied_runs import worst
from tests.hosts.jobs import Job, Result
from tests.hosts.processes import ROOT, answers, run_script
from tests.hosts.test_peft import adapted
from tests.hosts.varied import VARIED
from tests.hosts.zebra_runs import zebra
from tests.marks import slow
from tests.ranks import pool_of, preload

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed"
)
preload("deepspeed", "transformers")

UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
TARGETS: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": [UP, DOWN]}
DRAWN = (("revised", 0.4), ("rematerialized", 0.4), ("carried", 0.5), ("shard_every", 2))
STAYING = (*DRAWN[:3], ("shard_every", 0))
COPIED = (("overlap_degree", 2), ("replicas_per_rank", 2))
MOVING = (*COPIED, ("reshard_interval", 2), ("resharding", "paper"))
WHOLE_STEPS = (("slice_gradients", False),)
ROLES: dict[str, Any] = {"strategy": "zebra", "keys": zebra(Job()).keys}


def with_adapters(work: Callable[..., Any], *given: Any, targets: dict[str, Any] = TARGETS) -> Any:
    """Do it with models that have adapters."""
    build = jobs.model_of
    with mock.patch.object(jobs, "model_of", lambda job: adapted(build(job), **targets)):
        return work(*given)


def train(rank: int, world_size: int, job: Job, targets: dict[str, Any] = TARGETS) -> Any:
    return with_adapters(jobs.train, rank, world_size, job, targets=targets)


def run(world_size: int, job: Job, targets: dict[str, Any] = TARGETS) -> Result:
    result: Result = pool_of(world_size).run(train, job, targets)[0]
    return result


def stock(job: Job, target: str = "") -> Result:
    """On one rank without us, of one target or all."""
    plain = {"strategy": "ep", "keys": (), "balance": None, "balance_keys": ()}
    alike: dict[str, Any] = {"evaluate": False, "evaluate_within": False}
    return _stock(replace(job, block=False, ep_ranks=None, etp_size=None, **plain, **alike), target)


@functools.cache
def _stock(job: Job, target: str) -> Result:
    return run(1, job, {"target_parameters": [target]} if target else TARGETS)


# What is learnt.


FLOAT64 = Job("mixtral", 0, dtype="float64", steps=4, num_experts=8, num_layers=3)


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        slow(2, {"strategy": "ep"}),
        slow(2, {"strategy": "prophet"}),
        slow(2, {"strategy": "fssdp", "keys": MOVING}),
        slow(2, {"strategy": VARIED, "keys": DRAWN}),
        (2, {"strategy": "esp", "etp_size": 2, "keys": WHOLE_STEPS}),
        slow(4, {"strategy": VARIED, "keys": DRAWN}),
        slow(4, {"strategy": "ep", "ep_ranks": 2}),
        slow(4, {"strategy": "esp", "etp_size": 2, "keys": (("degree", 2),)}),
        slow(
            4,
            {
                "strategy": "esp",
                "etp_size": 2,
                "keys": WHOLE_STEPS,
                "balance": VARIED,
                "balance_keys": DRAWN,
            },
        ),
        slow(2, {"strategy": "auto"}),
        slow(4, {"strategy": VARIED, "keys": DRAWN, "num_experts": 2}),  # fewer than ranks
        slow(2, {"strategy": "prophet", "evaluate": True, "evaluate_within": True}),
    ],
    ids=str,
)
def test_learns_what_stock_learns(ranks: int, keys: dict[str, Any]) -> None:
    """In float64, of all weights."""
    job = replace(FLOAT64, **keys)
    ours, plain = run(ranks, job), stock(job)
    assert len(set(plain.losses)) == FLOAT64.steps
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert worst(ours.state, plain.state, FLOAT64) <= 1e-12


@pytest.mark.slow  # test_huggingface.py has these families without adapters
@pytest.mark.parametrize(
    ("family", "target", "keys"),
    [
        ("gpt_oss", "", {"strategy": VARIED, "keys": DRAWN}),  # transposed, with biases
        ("mixtral", DOWN, {"strategy": "ep"}),
        ("mixtral", UP, {"strategy": VARIED, "keys": DRAWN}),
        ("mixtral", DOWN, {"strategy": "fssdp", "keys": MOVING}),
        ("gpt_oss", "", {"strategy": "esp", "etp_size": 2}),
        ("gpt_oss", "", ROLES),
        ("mixtral", DOWN, ROLES),
        ("qwen3_moe", "", {"strategy": "ep"}),
        ("qwen3_moe", "", {"strategy": VARIED, "keys": DRAWN}),
    ],
    ids=str,
)
def test_other_experts_and_one_target(family: str, target: str, keys: dict[str, Any]) -> None:
    job = Job(family, 0, dtype="float64", steps=3)
    targets = {"target_parameters": [target]} if target else TARGETS
    ours, plain = run(2, replace(job, **keys), targets), stock(job, target)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert worst(ours.state, plain.state, job) <= 1e-12


@pytest.mark.slow  # adapters are weights of experts: test_configurations.py computes those again
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": VARIED, "keys": (*DRAWN[:2], ("carried", 1.0), ("layers", 1.0))},
        {"strategy": "ep"},
    ],
    ids=str,
)
def test_activations_that_are_computed_again(keys: dict[str, Any], use_reentrant: bool) -> None:
    job = replace(FLOAT64, use_reentrant=use_reentrant)
    ours, plain = run(2, replace(job, **keys)), stock(job)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert worst(ours.state, plain.state, job) <= 1e-12


GRADIENT: dict[str, Any] = {"steps": 1, "optimizer": "object", "sgd": True, "learning_rate": 1e2}


@pytest.mark.parametrize(
    ("ranks", "stage", "keys"),
    [
        slow(2, 1, {"strategy": "ep"}),
        slow(2, 2, {"strategy": VARIED, "keys": DRAWN}),
        slow(2, 3, {"strategy": "ep"}),
        (2, 3, {"strategy": VARIED, "keys": STAYING}),
        slow(2, 2, {"strategy": "esp", "etp_size": 2}),
        slow(4, 3, {"strategy": "ep", "ep_ranks": 2}),
        slow(4, 1, {"strategy": "ep", "ep_ranks": 2, "parameters": "groups"}),
        slow(4, 3, {"strategy": "esp", "etp_size": 2, "ep_ranks": 1, "keys": WHOLE_STEPS}),
        slow(2, 2, {"strategy": "ep"}),
        slow(2, 1, {"strategy": "fssdp", "keys": MOVING}),
        slow(2, 1, {"strategy": "prophet"}),
        slow(2, 1, ROLES),
        slow(2, 2, ROLES),
        slow(2, 3, {"strategy": "prophet"}),
    ],
    ids=str,
)
def test_gradients_equal_one_rank(ranks: int, stage: int, keys: dict[str, Any]) -> None:
    job = Job("mixtral", 0, num_experts=8, num_layers=3, **GRADIENT)
    ours, plain = run(ranks, replace(job, stage=stage, **keys)), stock(job)
    assert worst(ours.state, plain.state, job) <= 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (4, {"strategy": VARIED, "keys": STAYING, "stage": 3, "ep_ranks": 2}),
        (2, {"strategy": "fssdp", "keys": MOVING, "stage": 2, "offload": (("device", "cpu"),)}),
        (2, {"strategy": "ep", "stage": 1, "dtype": "bfloat16"}),
        (2, {**ROLES, "stage": 1, "dtype": "bfloat16"}),
        (2, {"strategy": "fssdp", "keys": MOVING, "stage": 2, "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_curves_clipped(ranks: int, keys: dict[str, Any]) -> None:
    job = Job("mixtral", 1, num_experts=8, steps=8, clip=0.05, dtype=keys.get("dtype", "float32"))
    ours, plain = run(ranks, replace(job, **keys)), stock(job)
    rel = 5e-3 if "dtype" in keys else 1e-5
    assert ours.losses == pytest.approx(plain.losses, rel=rel)
    assert ours.norms == pytest.approx(plain.norms, rel=10 * rel)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_factors_may_learn_at_rates_of_their_own(stage: int) -> None:
    """By groups of the user's optimizer, as of LoRA+."""
    job = Job("mixtral", stage, steps=4, optimizer="object")
    ours = pool_of(2).run(at_two_rates, job)[0]
    plain = pool_of(1).run(at_two_rates, replace(job, stage=0, block=False))[0]
    assert worst(ours.state, plain.state, job) <= 1e-5


def at_two_rates(rank: int, world_size: int, job: Job) -> Result | None:
    build, models = jobs.model_of, list[nn.Module]()

    def model_of(job: Job) -> nn.Module:
        models.append(adapted(build(job), **TARGETS))
        return models[-1]

    def optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        named = dict(models[-1].named_parameters())
        both = [[p for n, p in named.items() if ("lora_B" in n) == is_up] for is_up in (0, 1)]
        rates = zip(both, (1e-3, 1e-2))
        return torch.optim.AdamW([{"params": own, "lr": rate} for own, rate in rates])

    with (
        mock.patch.object(jobs, "model_of", model_of),
        mock.patch.object(jobs, "_torch_optimizer", optimizer),
    ):
        return jobs.train(rank, world_size, job)


@pytest.mark.slow
def test_a_model_built_under_zero_init() -> None:
    job = Job("mixtral", 3, steps=4)
    ours, plain = pool_of(2).run(built_under_init, job)[0], stock(replace(job, stage=0))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert worst(ours.state, plain.state, job) <= 1e-5


def built_under_init(rank: int, world_size: int, job: Job) -> Result | None:
    model = adapted(test_sharded.built_under_init(job, world_size), **TARGETS)
    with mock.patch.object(jobs, "model_of", lambda _: model):
        return jobs.train(rank, world_size, job)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("strategy", ["ep", "fssdp"])
def test_a_loop_of_ones_own(wrap: str, strategy: str) -> None:
    """In plain PyTorch, in float64."""
    loop = test_torch.Loop("mixtral", wrap, block={"strategy": strategy, **test_torch.MOVING})
    plain = pool_of(1).run(in_plain_pytorch, test_torch.Loop("mixtral", is_ours=False))[0]
    for learnt in pool_of(2).run(in_plain_pytorch, loop):
        assert learnt.losses == pytest.approx(plain.losses, rel=1e-12)
        assert learnt.norms == pytest.approx(plain.norms, rel=1e-10)


def in_plain_pytorch(rank: int, world_size: int, loop: test_torch.Loop) -> test_torch.Learnt:
    learnt: test_torch.Learnt = with_adapters(test_torch.train, rank, world_size, loop)
    return learnt


@pytest.mark.parametrize(
    ("sizes", "keys", "named"),
    [
        ((1, 1), {"moved": [1, 0, 2]}, {}),
        ((1, 2), {}, {"balance": "fssdp"}),
        slow((1, 1), {"moved": [1, 0, 2], "recompute_experts": True}, {"use_reentrant": False}),
        slow((2, 2), {"moved": [1, 0, 2]}, {"balance": "ep"}),
    ],
    ids=str,
)
def test_roles_learn_what_stock_learns(
    sizes: tuple[int, int], keys: dict[str, Any], named: dict[str, Any]
) -> None:
    """Experts on the expert ranks, moved ones and replicas."""
    job = replace(FLOAT64, micro_batches=4 if sum(sizes) < 3 else 12)
    ours, plain = run(sum(sizes), replace(zebra(job, *sizes, **keys), **named)), stock(job)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-12)
    assert worst(ours.state, plain.state, job) <= 1e-12


# What a rank has, saves and switches.


def step(engine: Any, rank: int, world_size: int) -> None:
    for number in range(rank, jobs.MICRO_BATCHES, world_size):
        engine.backward(jobs.loss_of(engine, jobs.micro_batch(0, number)))
        engine.step()


def held(rank: int, world_size: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    engine = with_adapters(jobs.engine_of, Job(strategy="prophet"), world_size)
    experts = ((n, p) for n, p in engine.module.named_parameters() if "layers.0.mlp.experts" in n)
    return {name.rpartition(".")[2]: (tuple(p.shape), p.requires_grad) for name, p in experts}


def test_a_rank_keeps_the_adapters_of_its_own_experts() -> None:
    for own in pool_of(2).run(held):  # two of four experts each, r is 2
        assert own == {
            "gate_up_proj": ((2, 96, 32), False),
            "down_proj": ((2, 32, 48), False),
            "gate_up_proj_lora_A_default": ((2, 2, 32), True),
            "gate_up_proj_lora_B_default": ((2, 96, 2), True),
            "down_proj_lora_A_default": ((2, 2, 48), True),
            "down_proj_lora_B_default": ((2, 32, 2), True),
        }


def saved(rank: int, world_size: int, job: Job, folder: str) -> tuple[float, float, float]:
    """Train a step and let peft save; the losses with adapters, without, and with them again."""
    engine = with_adapters(jobs.engine_of, job, world_size)
    step(engine, rank, world_size)
    state = ds_moe_ext.full_state_dict(engine.module)
    if rank == 0:
        engine.module.save_pretrained(folder, state_dict=state)
    engine.eval()
    losses, tokens = [], jobs.micro_batch(7, 0)
    with torch.no_grad():
        losses.append(float(jobs.loss_of(engine, tokens)))
        with engine.module.disable_adapter():
            losses.append(float(jobs.loss_of(engine, tokens)))
        losses.append(float(jobs.loss_of(engine, tokens)))
    return losses[0], losses[1], losses[2]


@pytest.mark.parametrize(
    "keys", [{"strategy": "fssdp", "keys": MOVING}, slow({"stage": 3}), slow(ROLES)], ids=str
)
def test_peft_saves_its_own_file_and_switches_adapters(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    job = Job(learning_rate=1e-2)
    ours, _ = pool_of(2).run(saved, replace(job, **keys), str(tmp_path / "ours"))
    (plain,) = pool_of(1).run(saved, replace(job, block=False), str(tmp_path / "stock"))
    assert ours == pytest.approx(plain, rel=1e-5)
    assert plain[0] == plain[2] and abs(plain[0] - plain[1]) > 1e-3
    folders = tmp_path / "ours", tmp_path / "stock"
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5)
    loaded = PeftModel.from_pretrained(jobs.model_of(job), str(tmp_path / "ours")).eval()
    with torch.no_grad():
        tokens = jobs.micro_batch(7, 0)
        loss = float(loaded(input_ids=tokens, labels=tokens.roll(-1, 1)).loss)
    assert loss == pytest.approx(ours[0], rel=1e-5)


def misused(rank: int, world_size: int) -> list[str]:
    """What is reported calls that cannot do what they say."""
    lines = []
    engine = with_adapters(jobs.engine_of, Job(strategy="prophet"), world_size)
    model: Any = engine.module

    def switched() -> None:
        jobs.loss_of(engine, jobs.micro_batch(0, 0))
        with model.disable_adapter():
            jobs.loss_of(engine, jobs.micro_batch(0, 0))

    for call in (lambda: model.save_pretrained("nowhere"), model.merge_adapter, switched):
        with pytest.raises(ValueError) as caught:
            call()
        lines.append(str(caught.value))
    return lines


def test_what_would_do_something_else_is_an_error() -> None:
    for unsaved, unmerged, switched in pool_of(2).run(misused):
        assert "pass the result as state_dict" in unsaved
        assert "cannot be merged or unloaded here" in unmerged
        assert "do it in model.eval()" in switched and "(2.0, 2.0)" in switched


def joined(rank: int, world_size: int) -> str:
    job = Job(strategy="esp", etp_size=2, keys=WHOLE_STEPS)
    engine = with_adapters(jobs.engine_of, job, world_size)
    engine.eval()
    with pytest.raises((ValueError, RuntimeError)) as caught, ds_moe_ext.joined(engine):
        jobs.loss_of(engine, jobs.micro_batch(0, 0))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_split_experts_run_them_together() -> None:
    assert all("gathers in every pass" in reported for reported in pool_of(2).run(joined))


# Going on.


@pytest.mark.parametrize(
    ("source", "goals"),
    [
        (("fssdp", MOVING, 1), [("ep", (), 2)]),
        slow(("ep", (), 0), [("fssdp", MOVING, 1), ("prophet", (), 3)]),
        slow(("esp", WHOLE_STEPS, 2), [("ep", (), 1), ("esp", WHOLE_STEPS, 0)]),
        slow(("ep", (), 3), [("esp", WHOLE_STEPS, 1), ("ep", (), 0)]),
        slow((*ROLES.values(), 1), [("ep", (), 1), (*ROLES.values(), 0)]),
        slow(("ep", (), 0), [(*ROLES.values(), 2)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("leaves_frozen_out", [False, slow(True)])
def test_another_layout_goes_on(
    source: Any, goals: list[Any], leaves_frozen_out: bool, tmp_path: Path
) -> None:
    """Without the frozen experts too, as the Trainer saves where peft is used."""
    job = Job("mixtral", steps=4, optimizer="object", folder=str(tmp_path), num_experts=8)
    plain = stock(replace(job, stage=0, folder=None))
    saves = pool_of(2).run(
        train_and_save, laid_out(replace(job, save_at=2), *source), leaves_frozen_out
    )[0]
    assert saves.losses == pytest.approx(plain.losses, rel=1e-6)
    lax = (("load_module_strict", not leaves_frozen_out),)
    for goal in goals:
        goes_on = run(2, laid_out(replace(job, resume=True, load_arguments=lax), *goal))
        assert goes_on.losses == pytest.approx(plain.losses[2:], rel=1e-6)
        assert worst(goes_on.state, plain.state, job) <= 1e-4


def laid_out(job: Job, strategy: str, keys: Any, stage: int) -> Job:
    etp_size = 2 if strategy == "esp" else None
    return replace(job, strategy=strategy, keys=keys, stage=stage, etp_size=etp_size)


def train_and_save(rank: int, world_size: int, job: Job, leaves_frozen_out: bool) -> Any:
    from deepspeed.runtime.engine import DeepSpeedEngine

    save = DeepSpeedEngine.save_checkpoint

    def save_checkpoint(engine: Any, folder: str) -> None:
        save(engine, folder, exclude_frozen_parameters=leaves_frozen_out)

    with mock.patch.object(DeepSpeedEngine, "save_checkpoint", save_checkpoint):
        return train(rank, world_size, job)


@pytest.mark.slow  # another does, above
def test_the_same_layout_goes_on_exactly(tmp_path: Path) -> None:
    job = replace(FLOAT64, strategy="ep", folder=str(tmp_path), num_layers=2)
    whole, rest = run(2, replace(job, save_at=2)), run(2, replace(job, resume=True))
    assert rest.losses == whole.losses[2:]
    assert all(torch.equal(rest.state[name], weight) for name, weight in whole.state.items())


TRAINER = """
    import json
    import sys

    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    from tests.hosts import families
    from tests.hosts.test_peft import adapted

    rows = torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for config, output, resumes in json.loads(sys.argv[1]):
        set_seed(0)
        own = Trainer(
            model=adapted(families.build("mixtral"), target_parameters=targets),
            args=TrainingArguments(
                output_dir=output,
                deepspeed=config,
                per_device_train_batch_size=2,
                max_steps=4,
                save_steps=2,
                logging_steps=1,
                learning_rate=1e-2,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=data,
        )
        own.train(resume_from_checkpoint=output + "/checkpoint-2" if resumes else None)
        losses = [entry["loss"] for entry in own.state.log_history if "loss" in entry]
        print("answer:", json.dumps(losses))
        own.save_model(output + "/saved")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # or gloo's threads may outlive the interpreter
"""


@pytest.mark.slow
def test_the_trainer_trains_saves_and_resumes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    ours = {**plain, "ds_moe_ext": {"enabled": True, "report": {"enabled": False}}}
    script, asked = tmp_path / "script.py", []
    script.write_text(textwrap.dedent(TRAINER))
    for name, document, resumes in (("a", plain, False), ("b", ours, False), ("b", ours, True)):
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps(document))
        asked.append((str(config), str(tmp_path / name), resumes))
    for rank in run_script(script, json.dumps(asked), world_size=2, path=(ROOT,)):
        stock_losses, losses, resumed = (json.loads(answer) for answer in answers(rank))
        assert losses == pytest.approx(stock_losses, rel=1e-4)
        assert resumed == losses
    files = [load_file(tmp_path / name / "saved/adapter_model.safetensors") for name in "ab"]
    assert files[0].keys() == files[1].keys() and any("experts" in name for name in files[0])
    for name, weight in files[0].items():
        torch.testing.assert_close(files[1][name], weight, rtol=1e-3, atol=1e-4)


# What is refused.


def twice(model: nn.Module) -> nn.Module:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[UP, DOWN])
    whole: Any = adapted(model, **TARGETS)
    whole.add_adapter("another", config)
    return model


def merged(model: nn.Module) -> nn.Module:
    whole: Any = adapted(model, **TARGETS)
    whole.merge_adapter()
    return model


def of_biases(model: nn.Module) -> nn.Module:
    return adapted(model, target_parameters=["mlp.experts.gate_up_proj_bias"])


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("mixtral", twice, ("has 2 adapters (default, another)", "delete_adapter")),
        ("mixtral", merged, ("is merged into them", "unmerge_adapter")),
        ("gpt_oss", of_biases, ("of a parameter of 2 dims", "leave it out of target_parameters")),
    ],
    ids=["twice", "merged", "biases"],
)
def test_adapters_that_cannot_go_along(
    family: str, change: Callable[[nn.Module], nn.Module], expected: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        list(huggingface.find(change(families.build(family)), any_name))
    assert all(part in str(caught.value) for part in (*expected, "ds_moe_ext.moe_layer_pattern"))


def test_parts_of_factors_must_be_whole() -> None:
    (first, *_) = huggingface.find(adapted(families.build("mixtral"), **TARGETS), any_name)
    with pytest.raises(ValueError, match=r"2 wide.*multiple of 4"):
        first.split(4)


def test_what_is_not_adapted_is_found_as_before() -> None:
    model = adapted(families.build("mixtral"), target_modules=["q_proj"])
    (first, *_) = huggingface.find(model, any_name)
    assert first.num_factors == 0 and len(first.expert) == len(first.computed) == 2
    weight: Tensor = model.get_parameter(f"{first.name}.gate_up_proj")
    assert first.expert[0][1] == tuple(weight.shape[1:])
