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

CHECKOUT = os.environ.get("MEGATRON_LM")
NOT_REFUSED = 49  # at least, of 70 in d98e8a64dd


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


@pytest.mark.slow
@pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout")
def test_few_training_cases_are_refused() -> None:
    found = [case for case in cases(Path(str(CHECKOUT))) if case.trains]
    assert len(found) >= 60
    print(table(found, of_megatron()))
    assert sum(not refusals(case, of_megatron()) for case in found) >= NOT_REFUSED
