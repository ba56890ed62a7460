# SPDX-License-Identifier: Apache-2.0
"""Sketches, what is compared of two runs, and how the command ends where they cannot be."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_moe_ext._autoload import HOSTS, VERIFIERS, VERIFY, _patches_of
from ds_moe_ext.cli import main
from ds_moe_ext.verification import (
    CHUNK,
    Comparison,
    Kind,
    LayerSeen,
    Precision,
    RankRecord,
    Stage,
    compare,
    sketch,
    sketch_at,
)
from tests.test_house import imported, sources

T, K, E, D = 600, 2, 8, 4


def test_a_sketch_tells_how_far_tensors_are_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 300, 70, generator=generator, dtype=torch.float64)
    ratio = (sketch(a) - sketch(b)).norm() / (a - b).norm()
    assert 0.7 < ratio < 1.3
    torch.testing.assert_close(sketch(a + b), sketch(a) + sketch(b), rtol=0, atol=1e-10)
    one = a.clone()
    one[123, 45] += 1e-9
    assert (sketch(one) - sketch(a)).norm() == pytest.approx(1e-9, rel=1e-3)
    place = torch.arange(a.numel())
    torch.testing.assert_close(sketch_at(place, a.flatten()), sketch(a), rtol=0, atol=1e-10)


def test_a_sketch_of_many_elements_is_that_of_its_chunks() -> None:
    many = torch.ones(CHUNK + 5)
    place = torch.arange(CHUNK, CHUNK + 5)
    parts = sketch(many[:CHUNK]) + sketch_at(place, many[CHUNK:])
    assert torch.equal(sketch(many), parts)


def _seen(score_TK: torch.Tensor, expert_TK: torch.Tensor, factor: float = 1.0) -> LayerSeen:
    place_TK = torch.arange(T)[:, None] * E + expert_TK
    x_TD = torch.arange(T * D, dtype=torch.float64).sin()
    return LayerSeen(
        input=sketch(x_TD).numpy(),
        choices=sketch_at(place_TK, torch.ones(T * K)).numpy(),
        score_sizes=sketch(score_TK.sort(dim=1, descending=True).values).numpy(),
        scores=sketch_at(place_TK, score_TK).numpy(),
        output=sketch(x_TD * factor).numpy(),
        num_choices=np.array(T * K),
    )


def _record() -> RankRecord:
    generator = torch.Generator().manual_seed(1)
    score_TK = torch.rand(T, K, generator=generator, dtype=torch.float64)
    expert_TK = torch.stack((torch.arange(T) % 4, torch.arange(T) % 4 + 4), dim=1)
    gradient = sketch(torch.randn(50, generator=generator)).numpy()
    return RankRecord(
        losses_I=np.array([4.0, 3.0, 2.0]),
        norms_I=np.array([7.0]),
        num_steps=3,
        num_ranks=2,
        weights={"embedding": gradient, "gate": gradient},
        layers={"first": _seen(score_TK, expert_TK), "second": _seen(score_TK, expert_TK)},
        gradients={
            Kind.DENSE: {"embedding": gradient},
            Kind.GATE: {"gate": gradient},
            Kind.EXPERT: {"first.up.0": gradient, "first.up.1": gradient},
        },
    )


def _compared(on: RankRecord) -> Comparison:
    return compare([_record()] * 2, [_record(), on], Precision.FLOAT32.tolerances())


def test_what_is_equal_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.npz"
    _record().write(path)
    comparison = _compared(RankRecord.read(path))
    assert comparison.first is None and not comparison.num_ties
    assert all(each.error == 0 for each in comparison.compared)
    assert [each.stage for each in comparison.compared if each.name == "second"] == [
        *(Stage.INPUT, Stage.CHOICES, Stage.SCORES, Stage.OUTPUT),
    ]


def test_the_first_difference_is_reported_not_what_follows() -> None:
    record = _record()
    wrong = {name: _seen_times(seen, 1.5) for name, seen in record.layers.items()}
    grown = {Kind.EXPERT: {"first.up.1": record.gradients[Kind.EXPERT]["first.up.1"] * 2}}
    on = replace(record, layers=wrong, gradients={**record.gradients, **grown})
    first = _compared(on).first
    assert first is not None and (first.stage, first.name) == (Stage.OUTPUT, "first")
    on = replace(record, gradients={**record.gradients, **grown})
    first = _compared(on).first
    assert first is not None and first.stage is Stage.GRADIENTS
    assert first.name == "first.up.0"  # has gone, which is worse than one that is one and a half


def _seen_times(seen: LayerSeen, factor: float) -> LayerSeen:
    assert seen.output is not None
    return replace(seen, output=seen.output * factor)


def test_ties_are_reported_from_another_choice() -> None:
    """A token that takes another expert with the same score, and one with another score."""
    generator = torch.Generator().manual_seed(1)
    score_TK = torch.rand(T, K, generator=generator, dtype=torch.float64)
    expert_TK = torch.stack((torch.arange(T) % 4, torch.arange(T) % 4 + 4), dim=1)
    expert_TK[7, 1] = (expert_TK[7, 1] + 1) % 4 + 4
    record = _record()
    tied = _seen(score_TK, expert_TK)
    comparison = _compared(replace(record, layers={**record.layers, "first": tied}))
    assert comparison.first is None and comparison.num_ties == 1
    score_TK[7, 1] /= 2
    other = _seen(score_TK, expert_TK)
    first = _compared(replace(record, layers={**record.layers, "first": other})).first
    assert first is not None and (first.stage, first.name) == (Stage.CHOICES, "first")


def test_weights_batches_and_curves_have_causes_of_their_own() -> None:
    record = _record()
    moved = {"embedding": record.weights["embedding"] * 2, "gate": record.weights["gate"]}
    first = _compared(replace(record, weights=moved)).first
    assert first is not None and (first.stage, first.name) == (Stage.WEIGHTS, "embedding")
    assert "without a seed" in first.stage.cause
    first = _compared(replace(record, losses_I=np.array([4.0, 3.0, 2.1]))).first
    assert first is not None and (first.stage, first.name) == (Stage.CURVE, "step 3")
    assert "moved experts" in first.stage.cause
    first = _compared(replace(record, norms_I=np.array([8.0]))).first
    assert first is not None and first.stage is Stage.NORM
    less = {"embedding": record.weights["embedding"]}
    gradients = {**record.gradients, Kind.GATE: {}}
    comparison = compare(
        [replace(record, gradients=gradients)] * 2,
        [replace(record, gradients=gradients)] * 2,
        Precision.FLOAT32.tolerances(),
    )
    assert comparison.uncompared[0].startswith("gradients of gates")
    on = replace(record, weights=less, gradients=gradients)
    comparison = compare([record] * 2, [on] * 2, Precision.FLOAT32.tolerances())
    assert comparison.first is None and comparison.uncompared == ("gate, which one run has",)


@pytest.mark.parametrize(
    ("arguments", "stated"),
    [
        ((), "verify was given no command"),
        (("--steps", "0", "--", "true"), "--steps is 0; give 1 or more"),
        (("--tolerance", "-1", "--", "true"), "--tolerance is -1.0; give a relative difference"),
        (("--tolerance", "nan", "--", "true"), "--tolerance is nan; give a relative difference"),
        (("--out", "/proc/x", "--", "true"), "--out is '/proc/x', where nothing can be written ("),
        (
            ("--", sys.executable, "-S", "-c", "import nothing_of_this_name"),
            "exit code 1 when off, as your host runs without ds_moe_ext",
        ),
        (("--", sys.executable, "-S", "-c", "print(1)"), "no step of deepspeed.initialize's"),
    ],
)
def test_what_cannot_be_compared_is_reported(
    arguments: tuple[str, ...],
    stated: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = ("--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["ds-moe-ext", "verify", *out, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert stated in capsys.readouterr().err


def test_nobody_else_loads_what_verifies() -> None:
    """Its patches and what watches are loaded by name, where the variable is set."""
    ours = ("hosts.verification", "patches.verify_")
    for module, nodes in sources().items():
        if not module.startswith(ours):
            names = [name for _, name in imported(nodes)]
            assert not [name for name in names if name.partition(".")[2].startswith(ours)]
    assert VERIFY not in os.environ
    assert [module for host in VERIFIERS for module in _patches_of(host)] == [HOSTS["deepspeed"]]
