# SPDX-License-Identifier: Apache-2.0
"""The shape of a zebra group as a job in JSON: good input, and every kind of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from ds_moe_ext.commands.plan import plan_text

CONFIGS = Path(__file__).parents[1] / "configs" / "hardware"
L40S, T4 = (str(CONFIGS / f"hetermoe_c1_{name}.json") for name in ("l40s", "t4"))

MODEL = {
    "num_layers": 4,
    "num_experts": 12,
    "top_k": 2,
    "width": 4,
    "expert_width": 8,
    "length": 1,
}
MEASURED: dict[str, Any] = {
    "model": MODEL,
    "attention": {"attention_s": 0.5, "expert_s": 0.8},
    "expert": {"attention_s": 1.5, "expert_s": 1},
    "samples_per_attention_rank": 8,
    "ratios": [[3, 3], [2, 3], [2, 5]],
    "stripes": [2, 8],
    "link": {"bytes_per_s": 160},
}
DESCRIBED: dict[str, Any] = {
    **MEASURED,
    "model": {**MODEL, "width": 1024, "expert_width": 3584, "length": 8192, "kv_share": 0.25},
    "attention": {"hardware": L40S, "attention_efficiency": 0.2, "expert_efficiency": 0.3},
    "link": None,
    "expert": {
        "hardware": T4,
        "attention_efficiency": 0.1,
        "expert_efficiency": 0.25,
        "reserved_bytes": 2**34 - 10 * 176.2e6,
    },
}


def planned(job: dict[str, Any]) -> Any:
    return json.loads(plan_text("zebra-ratio", json.dumps(job).encode()))


def test_times_given() -> None:
    plan = planned(MEASURED)
    ranks = [(s["attention_ranks"], s["expert_ranks"], s["stripes"]) for s in plan["shapes"]]
    assert ranks == [(3, 3, 2), (3, 3, 8), (2, 3, 2), (2, 3, 8), (2, 5, 2), (2, 5, 8)]
    assert [shape["fits"] for shape in plan["shapes"]] == [True] * 4 + [False] * 2
    assert plan["shapes"][-1]["price"] is None
    assert "num_experts is 12, which 5 expert ranks do not divide" in plan["shapes"][-1]["why"]
    assert plan["best"] == plan["shapes"][1]
    price = plan["best"]["price"]
    assert price["moved_per_expert_rank"] == [1, 1, 1, 1]
    assert price["tokens_per_s"] == approx(24 / price["step_s"])
    for side in ("attention", "expert"):
        idle_s = price["step_s"] * (1 - price[f"{side}_use"])
        assert price[f"{side}_bubble_s"] == approx(idle_s)
    # 8 tokens on a rank, 4 layers, forward and three times that; three of 12 experts moved.
    assert price["step_s"] * price["expert_use"] == approx(4 * (1 + 3) * 8 * 0.75)
    assert price["step_s"] * price["attention_use"] == approx(4 * 4 * (8 * 0.5 + 8 * 0.8 / 4))


def test_groups_of_a_cluster() -> None:
    job = {**MEASURED, "ratios": [[3, 3], [1, 1]], "attention_devices": 5, "expert_devices": 6}
    plan = planned(job)
    assert [shape["num_groups"] for shape in plan["shapes"]] == [1, 1, 5, 5]
    assert plan["best"] == plan["shapes"][-1]
    none = planned({**job, "attention_devices": 2, "expert_devices": 2, "ratios": [[3, 3]]})
    assert none["best"] is None
    assert none["shapes"][0]["fits"]


def test_hardware_files() -> None:
    """By the work of a token over the datasheet's rate, and memory for 10 experts on each T4."""
    plan = planned({**DESCRIBED, "ratios": [[2, 6], [4, 4], [3, 2]], "stripes": [8]})
    six, four, two = plan["shapes"]
    price = six["price"]
    attention_s = 2 * (2.5 * 1024**2 + 8192 * 1024) / (0.2 * 362e12)
    expert_s = 2 * 2 * 3 * 1024 * 3584 / (0.25 * 65e12)
    tokens = 8 * 8192
    expert_ranks = tokens * 2 / 6 * 4 * (1 + 3) * expert_s
    moved = sum(price["moved_per_expert_rank"])
    busy_s = price["step_s"] * price["expert_use"]
    assert busy_s == approx(expert_ranks * (1 - moved / (4 * 2)))
    at_least = tokens * 4 * (1 + 3) * attention_s
    assert price["step_s"] * price["attention_use"] >= at_least
    # 48 experts: 6 T4s hold 60, 4 hold 40, so that two of each have to move.
    assert six["fits"] and four["fits"]
    assert sum(four["price"]["moved_per_expert_rank"]) >= 2
    assert not two["fits"]
    assert "2 expert ranks with room for 10 experts each lack room for 28 of 48" in two["why"]


def test_the_slower_of_two_cards_is_the_link() -> None:
    without = planned(DESCRIBED)
    assert without == planned({**DESCRIBED, "link": {"bytes_per_s": 2.5e9}})
    assert without != planned({**DESCRIBED, "link": {"bytes_per_s": 25e9}})


def test_a_head_takes_time() -> None:
    headed = {**MEASURED, "attention": {**MEASURED["attention"], "head_s": 1}, "ratios": [[3, 3]]}
    more = [
        planned(job)["shapes"][1]["price"]["step_s"]
        for job in (headed, {**MEASURED, "ratios": [[3, 3]]})
    ]
    assert more[0] > more[1] + 3 * 8 * 0.5


def changed(where: str, value: Any, job: dict[str, Any] = MEASURED) -> dict[str, Any]:
    """A job with one value of one object, or one of its own, given another."""
    key, _, inner = where.partition(".")
    return {**job, key: {**job[key], inner: value} if inner else value}


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("ratio", [[1, 1]], "input has no key 'ratio'; did you mean 'ratios'"),
        ("model.layers", 4, "input.model has no key 'layers'"),
        ("model.width", 0, "width is 0; it must be above 0"),
        ("model.width", 2**25, r"model.width is 33554432; it must be an integer from 0 to"),
        ("model.top_k", 13, "top_k is 13, but a layer has 12 experts"),
        ("attention.attention_s", 0, "attention.attention_s is 0.0; it must be a number from"),
        ("attention.expert_s", None, "attention.expert_s is missing; give attention_s and"),
        ("attention.expert_efficiency", 1, "attention.expert_efficiency is 1.0 beside"),
        ("ratios", [], r"ratios has 0 pairs; give from 1 to 128"),
        ("ratios", [[1, 1]] * 129, r"ratios has 129 pairs"),
        ("ratios", [[1, 1, 1]], r"ratios\[0\] is \[1, 1, 1\], but must have 2 entries: att"),
        ("stripes", [], "stripes has 0 numbers"),
        ("stripes", [3], r"stripes\[0\] is 3, which is not a power of two"),
        ("stripes", [16], r"stripes\[0\] is 16; it must be an integer from 1 to 8"),
        ("link", None, "link is null, but a class has no hardware file"),
        ("attention_devices", 4, "attention_devices is 4 and expert_devices None; give both"),
        ("backward", 0, "backward is 0.0; it must be above 0"),
        ("weight_bytes", 0, "weight_bytes is 0.0; it must be a number from 1"),
    ],
)
def test_what_is_wrong_is_said(where: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        planned(changed(where, value))


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("expert.hardware", "none.json", "none.json"),
        ("expert.number_type", "bf16", "device 'NVIDIA T4' has no rate for number_type 'bf16'"),
        ("expert.number_type", "int8", "number_type is 'int8'; choose fp32, tf32, fp16, bf16"),
        ("expert.expert_efficiency", None, "expert.expert_efficiency is missing"),
        ("expert.attention_s", 1, "expert.attention_s is 1.0 beside attention_efficiency"),
    ],
)
def test_what_is_wrong_with_files_is_said(where: str, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        planned(changed(where, value, DESCRIBED))


def test_devices_are_counted() -> None:
    job = {**MEASURED, "attention_devices": 0, "expert_devices": 4}
    with pytest.raises(ValueError, match="attention_devices is 0; it must be an integer"):
        planned(job)
