# SPDX-License-Identifier: Apache-2.0
"""How many of Megatron-LM's own training cases with experts we refuse, and that each has a reason.

``MEGATRON_LM`` names a checkout of main. ``python -m tests.hosts.functional_cases CHECKOUT`` prints
the table.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hosts.functional_cases import FOLDER, Case, cases, of_megatron, refusals, table
from tests.hosts.functional_runs import run_toys, verdicts
from tests.hosts.functional_toys import NUM_RANKS, layout, reduced

CHECKOUT = os.environ.get("MEGATRON_LM")
NOT_REFUSED = 62  # at least, of 70 in d98e8a64dd
RUN = (  # cases whose toys need two ranks
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
    "moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4",
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
)


def written(checkout: Path, name: str, arguments: str) -> None:
    folder = checkout / FOLDER / name
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text("MODEL_ARGS:\n" + arguments)


def test_cases_and_their_flags_are_read(tmp_path: Path) -> None:
    common = "  --num-experts: 8\n  --train-iters: 50\n  --disable-bias-linear: true\n"
    written(tmp_path, "moe/plain", common)
    act = '  --recompute-granularity: selective\n  --recompute-modules: "[mlp moe_act]"\n'
    written(tmp_path, "moe/recomputed", common + act + "  --fp8-format: hybrid\n")
    written(tmp_path, "moe/inferring", "  --num-experts: 8\n")
    written(tmp_path, "gpt/dense", "  --train-iters: 50\n")
    written(tmp_path, "moe/wrapped", common + "  --use-megatron-fsdp: true\n")
    found = cases(tmp_path)
    assert [(case.name, case.trains) for case in found] == [
        ("moe/inferring", False),
        ("moe/plain", True),
        ("moe/recomputed", True),
        ("moe/wrapped", True),
    ]
    assert found[2].config().recompute_modules == ["mlp", "moe_act"]
    assert found[2].config().fp8 == "hybrid" and not found[2].config().add_bias_linear
    assert [one.what for one in refusals(found[3], [])] == ["--use-megatron-fsdp"]


def test_flags_meet_the_tables() -> None:
    plain = Case("plain", {"--num-experts": 8, "--disable-bias-linear": True})
    assert not refusals(plain, of_megatron())
    used = {**plain.arguments, "--moe-single-grouped-weight": True, "--fp8-format": False}
    met = refusals(Case("packed", used), of_megatron())
    assert [one.what for one in met] == ["--moe-single-grouped-weight"]


def test_cases_are_reduced_by_rules() -> None:
    flags = {
        "--num-experts": 64,
        "--moe-router-topk": 6,
        "--moe-router-load-balancing-type": "none",
    }
    sizes = {"--tensor-model-parallel-size": 4, "--expert-model-parallel-size": 8}
    small = reduced(Case("some", {**flags, **sizes, "--swiglu": True, "--norm-epsilon": "1e-6"}))
    assert small.toy is not None and not small.dropped and small.toy.world_size == NUM_RANKS
    run, config = small.toy.run, dict(small.toy.run.config)
    assert (run.tp, run.ep, run.etp, run.num_experts, run.topk, run.swiglu) == (2, 2, 2, 8, 4, True)
    assert config["layernorm_epsilon"] == 1e-6 and config["moe_router_topk"] == 4
    one = layout({"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 8})
    assert one == ({"tp": 1, "pp": 2, "cp": 1, "ep": 2, "etp": 1}, [])
    all_of = {f"{way}_model_parallel_size": 2 for way in ("tensor", "pipeline", "expert")}
    assert layout(all_of)[1] == ["pipeline stages"]
    graphs = {**flags, "--cuda-graph-impl": "transformer_engine", "--cuda-graph-modules": "attn"}
    assert reduced(Case("graphs", graphs)).dropped == ("CUDA graphs",)
    assert "FSDP" in reduced(Case("wrapped", {**flags, "--use-megatron-fsdp": True})).cannot


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout")
def test_some_cases_learn_the_same() -> None:
    toys = [reduced(case).toy for case in cases(Path(str(CHECKOUT))) if case.name in RUN]
    assert len(toys) == len(RUN) and all(toy and toy.world_size == 2 for toy in toys)
    asked = [toy for toy in toys if toy is not None]
    for toy, found in zip(asked, run_toys(asked), strict=True):
        said = {"stock": "runs", "ep": "equal", "fssdp": "equal", "varied": "equal"}
        assert verdicts(toy, found) == said
        assert found["fssdp"]["replicas"] > 0


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout")
def test_few_training_cases_are_refused() -> None:
    found = [case for case in cases(Path(str(CHECKOUT))) if case.trains]
    assert len(found) >= 60
    print(table(found, of_megatron()))
    assert sum(not refusals(case, of_megatron()) for case in found) >= NOT_REFUSED
