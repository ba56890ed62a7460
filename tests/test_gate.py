# SPDX-License-Identifier: Apache-2.0
"""Gates against plain formulas and numbers by hand.

Shape letters: T tokens, K choices, E experts, D width.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_moe_ext.moe.gate import (
    SoftmaxTopK,
    balance_loss,
    capacity_of,
    drop_over_capacity,
    z_loss,
)

T, E, D = 7, 6, 5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(T, D, generator=generator, dtype=torch.float64)
    weight_ED = torch.randn(E, D, generator=generator, dtype=torch.float64)
    return x_TD.to(dtype), weight_ED.to(dtype)


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_mixtral(top_k: int) -> None:
    """Softmax over the chosen logits alone: the same as renormalised softmax over all."""
    x_TD, weight_ED = inputs()
    choice = SoftmaxTopK(top_k=top_k)(x_TD, (weight_ED,))
    logit_TK, expert_TK = (x_TD @ weight_ED.T).topk(top_k, dim=1)
    assert torch.equal(choice.expert_TK, expert_TK)
    assert torch.allclose(choice.score_TK, logit_TK.softmax(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("top_k", [1, 2, E])
def test_qwen3_without_norm_topk_prob(top_k: int) -> None:
    x_TD, weight_ED = inputs()
    choice = SoftmaxTopK(top_k=top_k, renormalize=False)(x_TD, (weight_ED,))
    score_TK, expert_TK = (x_TD @ weight_ED.T).softmax(dim=1).topk(top_k, dim=1)
    assert torch.equal(choice.expert_TK, expert_TK)
    assert torch.equal(choice.score_TK, score_TK)
    assert (choice.score_TK.sum(dim=1) < 1 + 1e-12).all()


def test_a_choice_by_hand() -> None:
    """Logits ln 4, ln 2, ln 1, ln 1: probabilities 1/2, 1/4, 1/8, 1/8."""
    weight_ED = torch.tensor([[4.0], [2.0], [1.0], [1.0]], dtype=torch.float64).log()
    x_TD = torch.ones(2, 1, dtype=torch.float64)
    choice = SoftmaxTopK(top_k=2)(x_TD, (weight_ED,))
    assert choice.expert_TK.tolist() == [[0, 1], [0, 1]]
    expected_TK = torch.tensor([[2 / 3, 1 / 3]] * 2, dtype=torch.float64)
    assert torch.allclose(choice.score_TK, expected_TK)
    # Half of the rows go to each of experts 0 and 1: 4 (1/2 x 1/2 + 1/2 x 1/4) = 3/2.
    # The log-partition is ln 8.
    assert choice.losses.tolist() == pytest.approx([1.5, math.log(8) ** 2])


def test_scores_are_float32_at_least() -> None:
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        x_TD, weight_ED = inputs(dtype)
        choice = SoftmaxTopK(top_k=2)(x_TD, (weight_ED.float(),))
        assert choice.score_TK.dtype == expected
        assert choice.losses.dtype == expected
        assert choice.expert_TK.dtype == torch.int64


def test_choices_are_the_best_where_probabilities_vanish() -> None:
    """Of logits 500, 0, 100, 200, 300 all but the first have probability 0 in float32."""
    weight_ED = torch.tensor([[500.0], [0.0], [100.0], [200.0], [300.0]])
    for renormalize in (True, False):
        gate = SoftmaxTopK(top_k=4, renormalize=renormalize)
        choice = gate(torch.ones(1, 1), (weight_ED,))
        assert choice.expert_TK.tolist() == [[0, 4, 3, 2]]
        assert choice.score_TK.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_gradients_reach_the_gates_weights() -> None:
    x_TD, weight_ED = inputs()

    def losses_and_scores(x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
        choice = SoftmaxTopK(top_k=2)(x_TD, (weight_ED,))
        return choice.score_TK, choice.losses

    assert torch.autograd.gradcheck(
        losses_and_scores, (x_TD.requires_grad_(), weight_ED.requires_grad_())
    )


def test_balance_loss_by_hand() -> None:
    probability_TE = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    # Means: 0.4, 0.8 / 3, 1 / 3. First choices 0, 0, 2: shares 2/3, 0, 1/3.
    # 3 (2/3 x 0.4 + 1/3 x 1/3) = 0.8 + 1/3.
    top_1 = torch.tensor([[0], [0], [2]])
    assert float(balance_loss(probability_TE, top_1)) == pytest.approx(0.8 + 1 / 3)
    # Two choices 01, 01, 21: shares 2/6, 3/6, 1/6.
    # 3 (1/3 x 0.4 + 1/2 x 0.8 / 3 + 1/6 x 1/3) = 0.4 + 0.4 + 1/6.
    top_2 = torch.tensor([[0, 1], [0, 1], [2, 1]])
    assert float(balance_loss(probability_TE, top_2)) == pytest.approx(0.8 + 1 / 6)


def test_balance_loss_is_one_when_uniform_and_most_when_all_go_to_one() -> None:
    uniform_TE = torch.full((E, E), 1 / E)
    expert_TK = torch.arange(E)[:, None]
    assert float(balance_loss(uniform_TE, expert_TK)) == pytest.approx(1.0)
    one_TE = torch.eye(E)[[3] * E]
    assert float(balance_loss(one_TE, torch.full((E, 2), 3))) == pytest.approx(E)


def test_z_loss_by_hand() -> None:
    # Log-partitions: ln (1 + 3) and ln (8 + 8).
    logit_TE = torch.tensor([[1.0, 3.0], [8.0, 8.0]], dtype=torch.float64).log()
    expected = (math.log(4) ** 2 + math.log(16) ** 2) / 2
    assert float(z_loss(logit_TE)) == pytest.approx(expected)


def test_losses_of_no_tokens_are_zero() -> None:
    choice = SoftmaxTopK(top_k=2)(torch.zeros(0, D), (torch.zeros(E, D),))
    assert choice.losses.tolist() == [0.0, 0.0]
    assert choice.score_TK.shape == (0, 2)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "factor", "capacity"),
    [
        (16, 4, 1.0, 4),
        (16, 4, 1.25, 5),
        (17, 4, 1.0, 5),  # 4.25 rounded up
        (3, 8, 1.0, 1),
        (3, 8, 0.1, 1),
        (0, 8, 1.0, 0),
        (16, 4, 2, 8),
        (2 * 4 * 1024, 6, 1.2, 1639),  # the spec's G7: choices x samples x length
        (1 * 2 * 4, 2, 2, 8),
        (2 * 1 * 10, 4, 1.2, 6),
    ],
)
def test_capacity(num_rows: int, num_experts: int, factor: float, capacity: int) -> None:
    assert capacity_of(num_rows, num_experts, factor) == capacity


def test_first_choices_of_all_tokens_come_before_second_choices() -> None:
    expert_TK = torch.tensor([[0, 1], [1, 0], [0, 1], [2, 0], [0, 2]])
    # First choices by token: 0 1 0 2 0, the third 0 (token 4) is over 2.
    # Second choices by token: 1 (the second 1), 0 (over), 1 (over), 0 (over), 2 (the second 2).
    assert drop_over_capacity(expert_TK, 3, 2).tolist() == [
        [0, 1],
        [1, -1],
        [0, -1],
        [2, -1],
        [-1, 2],
    ]
    assert drop_over_capacity(expert_TK, 3, 5).tolist() == expert_TK.tolist()
    assert drop_over_capacity(expert_TK, 3, 0).tolist() == [[-1, -1]] * 5


def test_rows_that_a_gate_dropped_take_no_room() -> None:
    expert_TK = torch.tensor([[-1, 0], [0, -1], [0, 1], [-1, -1]])
    # First choices: - 0 0 -, second: 0 (over) - 1 -.
    assert drop_over_capacity(expert_TK, 2, 2).tolist() == [[-1, -1], [0, -1], [0, 1], [-1, -1]]


def plainly(expert_TK: list[list[int]], num_experts: int, capacity: int) -> list[list[int]]:
    rows_E = [0] * num_experts
    kept = [list(choices) for choices in expert_TK]
    for k in range(len(kept[0]) if kept else 0):
        for choices in kept:
            if choices[k] < 0:
                continue
            rows_E[choices[k]] += 1
            if rows_E[choices[k]] > capacity:
                choices[k] = -1
    return kept


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(0, 6))
def test_drop_over_capacity_is_the_plain_loop(
    data: st.DataObject, top_k: int, num_experts: int, capacity: int
) -> None:
    choice = st.integers(-1, num_experts - 1)
    rows = st.lists(choice, min_size=top_k, max_size=top_k)
    expert_TK = data.draw(st.lists(rows, max_size=12))
    tensor = torch.tensor(expert_TK, dtype=torch.int64).reshape(-1, top_k)
    kept = drop_over_capacity(tensor, num_experts, capacity)
    assert kept.tolist() == plainly(expert_TK, num_experts, capacity)
