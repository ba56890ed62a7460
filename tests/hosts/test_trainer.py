# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with our block in its DeepSpeed JSON; the script knows nothing of us."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ds_moe_ext.testing import relative_error
from tests.hosts import families
from tests.hosts.processes import ROOT, answers, run_script
from tests.marks import slow
from tests.ranks import Pool, preload

preload("accelerate")


def trained(rank: int, world_size: int, asked: list[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    """What a script does that knows nothing of us, and what it logs: a run for each configuration,
    with its output and whether it resumes."""
    from transformers import Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    rows = torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]

    def trainer(config: str, output: str) -> Any:
        set_seed(0)
        return Trainer(
            model=families.build("mixtral"),
            args=TrainingArguments(
                output_dir=output,
                deepspeed=config,
                per_device_train_batch_size=2,
                per_device_eval_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=5,
                save_steps=3,
                save_total_limit=1,
                logging_steps=1,
                learning_rate=1e-2,
                max_grad_norm=0.5,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=data,
            eval_dataset=data[:8],
        )

    lines = []
    for config, output, resumes in asked:
        own = trainer(config, output)
        own.train(resume_from_checkpoint=get_last_checkpoint(output) if resumes else None)
        logged = own.state.log_history
        weight = own.model.model.layers[0].mlp.experts.gate_up_proj
        lines.append(
            {
                "losses": [entry["loss"] for entry in logged if "loss" in entry],
                "norms": [float(entry["grad_norm"]) for entry in logged if "grad_norm" in entry],
                "evaluation": own.evaluate()["eval_loss"],
                "experts": getattr(weight, "ds_shape", weight.shape)[0],
            }
        )
        own.save_model(output + "/saved")
        torch.distributed.barrier()
    return lines


def trained_from_nothing(
    rank: int, world_size: int, config: str, output: str
) -> tuple[list[str], float, float]:
    """The same with a model on the meta device: weights that are there still, the loss of an
    evaluation, and that of the stock class with what was saved."""
    from transformers import MixtralForCausalLM, Trainer, TrainingArguments, set_seed

    rows = torch.randint(0, 64, (20, 12), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    set_seed(0)
    with torch.device("meta"):
        model = families.build("mixtral")
    own = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=output,
            deepspeed=config,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=10,
            max_steps=3,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    own.train()
    own.model.config.output_router_logits = False  # whose loss is of a batch, and not of all rows
    loss = own.evaluate()["eval_loss"]
    own.save_model(output + "/saved")
    torch.distributed.barrier()
    saved = MixtralForCausalLM.from_pretrained(output + "/saved")
    with torch.no_grad():
        stock = float(saved(input_ids=rows, labels=rows, output_router_logits=False).loss)
    left = [name for name, each in own.model.named_parameters() if each.is_meta]
    return left, loss, stock


@pytest.mark.slow
def test_trains_a_model_on_the_meta_device(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "ds_moe_ext": {"enabled": True},
    }
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(document))
    pool = Pool(2)
    try:
        results = pool.run(trained_from_nothing, str(config), str(tmp_path / "out"))
    finally:
        pool.close()
    for left, loss, stock in results:
        assert left == [] and loss == pytest.approx(stock, rel=1e-4)


METRICS = """
    import torch
    from transformers import Trainer, TrainingArguments

    from tests.hosts import families

    sizes = {"attention_size": 1, "expert_size": 1}
    document = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1},
        "ds_moe_ext": {"enabled": True, "strategy": "zebra", "zebra": sizes},
    }


    def trainer(loss_only, **given):
        arguments = TrainingArguments(
            output_dir="unused",
            deepspeed=document,
            prediction_loss_only=loss_only,
            report_to=[],
            use_cpu=True,
        )
        return Trainer(families.build("mixtral"), arguments, **given)


    def metrics(given):
        return {}


    trainer(True, compute_metrics=metrics)
    try:
        trainer(False, compute_metrics=metrics)
    except ValueError as error:
        print("answer:", error)
    try:
        trainer(False).predict([])
    except ValueError as error:
        print("answer:", error)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_what_wants_logits_is_refused_under_zebra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(METRICS))
    (printed,) = run_script(script, path=(ROOT,))
    refused, predicted = answers(printed)
    assert "strategy is 'zebra', but compute_metrics was given to the Trainer" in refused
    assert "predict was called, which wants logits" in predicted
    assert all("prediction_loss_only=True" in message for message in (refused, predicted))


class Run(NamedTuple):
    """What each rank logged, and the folder of the model that was saved."""

    ranks: list[dict[str, Any]]
    saved: Path


class Runs(NamedTuple):
    """Of the same ranks, one after the other."""

    stock: Run
    ours: Run
    resumed: Run  # ours, from its own checkpoint


@pytest.fixture(scope="module", params=[1, slow(3)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trained on two ranks, at a stage of ZeRO."""
    folder = tmp_path_factory.mktemp("trainer")
    plain: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": request.param,
            "offload_optimizer": {"device": "none"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    documents = {"stock": plain, "ours": {**plain, "ds_moe_ext": {"enabled": True}}}
    asked = []
    for name, resumes in (("stock", False), ("ours", False), ("ours", True)):
        config = folder / f"{name}.json"
        config.write_text(json.dumps(documents[name]))
        asked.append((str(config), str(folder / name), resumes))
    pool = Pool(2)  # which is gone with what the Trainer leaves
    try:
        results = zip(*pool.run(trained, asked), strict=True)
    finally:
        pool.close()
    folders = (Path(output) / "saved" for _, output, _ in asked)
    return Runs(*(Run(list(ranks), saved) for ranks, saved in zip(results, folders, strict=True)))


def test_trains_as_without_us(runs: Runs) -> None:
    """Losses and norms of every step, and the loss of the evaluation that follows."""
    stock, ours, _ = runs
    assert [rank["experts"] for rank in ours.ranks] == [4, 4]
    assert [rank["experts"] for rank in stock.ranks] == [8, 8]
    assert len(ours.ranks[0]["losses"]) == 5
    for one, other in zip(ours.ranks, stock.ranks):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
        assert one["norms"] == pytest.approx(other["norms"], rel=1e-3)
        assert one["evaluation"] == pytest.approx(other["evaluation"], rel=1e-4)


def test_saved_model_has_all_experts(runs: Runs) -> None:
    """What ``save_model`` wrote loads into the stock class and is what the stock run saved."""
    from transformers import MixtralForCausalLM

    own, theirs = (MixtralForCausalLM.from_pretrained(run.saved) for run in (runs.ours, runs.stock))
    untrained = families.build("mixtral")
    state, expected = own.state_dict(), theirs.state_dict()
    assert state.keys() == expected.keys()
    for name, weight in state.items():
        assert weight.shape == expected[name].shape
        assert relative_error(weight, expected[name]) <= 1e-3, name
        assert not torch.equal(weight, untrained.state_dict()[name])


def test_resumes_from_its_own_checkpoint(runs: Runs) -> None:
    """The run wrote a checkpoint after three steps, and goes on from there to the same losses."""
    for one, other in zip(runs.resumed.ranks, runs.ours.ranks):
        assert one["losses"] == other["losses"]
        assert one["evaluation"] == other["evaluation"]
