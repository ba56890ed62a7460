# SPDX-License-Identifier: Apache-2.0
"""The other gates against numbers by hand, plain formulas, and a dense layer.

Shape letters: W ranks, T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import (
    GATES,
    Choice,
    CosineTopK,
    ExpertChoice,
    Gate,
    NoisyTopK,
    SigmoidTopK,
    SoftmaxTopK,
    SoftMixture,
    balance_loss,
    capacity_of,
    cosines,
    drop_over_capacity,
    z_loss,
)
from ds_moe_ext.moe.layer import LayerOptions, MoELayer, RoutedExperts
from ds_moe_ext.planning.strategy import Job, LayerContext
from ds_moe_ext.testing import dense_experts, relative_error
from tests.ranks import pool_of
from tests.strategies_for_tests import Chunked

# The spec's golden example G6; our weights are its transposed.
X_TD = torch.tensor([[1, 0], [0, 2], [1, 1], [2, -1]], dtype=torch.float64)
WEIGHT_ED = torch.tensor([[1, 0], [0, 1], [-1, 0.5]], dtype=torch.float64)


def by_expert(choice: Choice, num_experts: int) -> Tensor:
    """Scores, ``[T, E]``; zero where an expert is not chosen."""
    used_TK = choice.expert_TK >= 0
    zero_TE = choice.score_TK.new_zeros(len(choice.expert_TK), num_experts)
    score_TK = choice.score_TK.where(used_TK, 0)
    return zero_TE.scatter_add(1, choice.expert_TK.clamp(min=0), score_TK)


def near(ours: Tensor, numbers: list[list[float]]) -> bool:
    return torch.allclose(ours, torch.tensor(numbers, dtype=ours.dtype), rtol=0, atol=5e-7)


# Numbers by hand.


def test_noisy_top_2_by_hand_in_evaluation() -> None:
    choice = NoisyTopK(top_k=2)(X_TD, (WEIGHT_ED, WEIGHT_ED))
    assert near(
        by_expert(choice, 3),
        [[0.731059, 0.268941, 0], [0, 0.731059, 0.268941], [0.5, 0.5, 0], [0.952574, 0.047426, 0]],
    )


def test_noisy_top_2_by_hand_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_E = torch.tensor([1, -1, 0.5], dtype=torch.float64)
    monkeypatch.setattr(torch, "randn_like", drawn_E.expand_as)
    noise_ED = torch.tensor([[0.5, 0], [0, 0.5], [0, 0]], dtype=torch.float64)
    choice = NoisyTopK(top_k=2)(X_TD, (WEIGHT_ED, noise_ED), is_training=True)
    assert choice.expert_TK.tolist() == [[0, 2], [2, 0], [0, 1], [0, 1]]
    assert near(choice.score_TK[:1], [[0.932611, 0.067389]])


def test_sigmoid_top_1_by_hand() -> None:
    choice = SigmoidTopK(top_k=1)(X_TD, (WEIGHT_ED,))
    assert choice.expert_TK[[0, 1, 3], 0].tolist() == [0, 1, 0]
    assert int(choice.expert_TK[2, 0]) in (0, 1)  # a tie
    assert near(choice.score_TK, [[0.731059], [0.880797], [0.731059], [0.880797]])


def test_cosines_by_hand() -> None:
    projection_PD = torch.tensor([[1, 0], [1, 1]], dtype=torch.float64)
    expert_EP = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    expected = [
        [0.707107, 0.707107, 1],
        [0, 1, 0.707107],
        [0.447214, 0.894427, 0.948683],
        [0.894427, 0.447214, 0.948683],
    ]
    assert near(cosines(X_TD @ projection_PD.T, expert_EP), expected)
    weights = projection_PD, expert_EP, torch.zeros(1, dtype=torch.float64)
    choice = CosineTopK(top_k=2)(X_TD, weights)
    assert choice.expert_TK[1:].tolist() == [[1, 2], [2, 1], [2, 0]]
    ratio_T = choice.score_TK[:, 0] / choice.score_TK[:, 1]
    assert near(ratio_T.log()[None], [[0.292893, 0.292893, 0.054256, 0.054256]])


def test_expert_choice_by_hand() -> None:
    """Four tokens, three experts, 1.5 experts a token: each expert keeps two."""
    gate = ExpertChoice(top_k=1, capacity_factor=1.5)
    choice = gate(X_TD, (WEIGHT_ED,))
    score_TE = by_expert(choice, 3)
    tied = score_TE[[0, 2], 0].sort().values  # expert 0 keeps token 3, and token 0 or 2
    assert near(tied[None], [[0, 0.268941]])
    assert near(score_TE[[1, 3], :1], [[0], [0.731059]])
    assert near(score_TE[:, 1:], [[0, 0], [0.731059, 0.817574], [0.268941, 0.182426], [0, 0]])
    assert choice.expert_TK[1, :2].tolist() == [2, 1]  # best first
    assert float(choice.losses[0]) == 1


# What each promises.


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_noise_comes_from_the_default_generator_in_training_only() -> None:
    x_TD, weights = rand(40, 5), (rand(6, 5), torch.zeros(6, 5, dtype=torch.float64))
    gate = NoisyTopK(top_k=2)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = (gate(x_TD, weights, is_training=True) for _ in range(2))
        torch.manual_seed(3)
        again = gate(x_TD, weights, is_training=True)
        state = torch.get_rng_state()
        evaluated = gate(x_TD, weights)
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.score_TK, again.score_TK)
    assert not torch.equal(first.expert_TK, second.expert_TK)
    plain = SoftmaxTopK(top_k=2)(x_TD, weights)
    assert all(map(torch.equal, evaluated, plain))


def test_noise_tries_all_experts_alike() -> None:
    """Logits of zero: 4000 tokens over 4 experts, 1000 each, to five standard deviations."""
    weights = torch.zeros(4, 1), torch.zeros(4, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        choice = NoisyTopK(top_k=1)(torch.ones(4000, 1), weights, is_training=True)
    rows_E = choice.expert_TK.flatten().bincount(minlength=4)
    assert (rows_E - 1000).abs().max() < 5 * math.sqrt(4000 * 0.25 * 0.75)


def test_sigmoid_losses_stay_finite_where_sigmoids_vanish() -> None:
    weight_ED = torch.full((3, 1), -200.0).requires_grad_()
    choice = SigmoidTopK(top_k=1)(torch.ones(2, 1), (weight_ED,))
    assert choice.score_TK.tolist() == [[0.0], [0.0]]
    choice.losses.sum().backward()
    assert choice.losses.isfinite().all() and weight_ED.grad.isfinite().all()


def test_cosine_does_not_see_a_tokens_length() -> None:
    x_TD, weights = rand(20, 5), (rand(3, 5), rand(6, 3), torch.tensor([0.7]).double())
    for renormalize in (True, False):
        gate = CosineTopK(top_k=2, renormalize=renormalize)
        short, long = gate(x_TD, weights), gate(x_TD * 100, weights)
        assert torch.equal(short.expert_TK, long.expert_TK)
        assert torch.allclose(short.score_TK, long.score_TK, rtol=1e-12, atol=0)


def test_cosine_without_renormalization_is_softmax_over_all() -> None:
    x_TD, projection_PD, expert_EP = rand(20, 5), rand(3, 5), rand(6, 3)
    weights = projection_PD, expert_EP, torch.tensor([math.log(4)], dtype=torch.float64)
    choice = CosineTopK(top_k=1, renormalize=False)(x_TD, weights)
    score_TE = (4 * cosines(x_TD @ projection_PD.T, expert_EP)).softmax(dim=1)
    assert torch.allclose(choice.score_TK, score_TE.max(dim=1, keepdim=True).values, atol=1e-12)


def test_cosine_of_nothing_is_zero_and_has_a_gradient() -> None:
    x_TD = torch.zeros(1, 5, requires_grad=True)
    choice = CosineTopK(top_k=2)(x_TD, (rand(3, 5), rand(6, 3), torch.zeros(1)))
    assert choice.score_TK.tolist() == [[0.5, 0.5]]
    (choice.score_TK[0, 0] + choice.losses.sum()).backward()
    assert x_TD.grad.abs().max() < 1e6


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.3, 1.0, 2.5]))
def test_experts_choose_as_the_plain_loop(
    num_tokens: int, num_experts: int, top_k: int, factor: float
) -> None:
    x_TD, weight_ED = rand(num_tokens, 4, seed=num_tokens), rand(num_experts, 4)
    gate = ExpertChoice(top_k=top_k, capacity_factor=factor)
    choice = gate(x_TD, (weight_ED,))
    rows = min(num_tokens, math.ceil(top_k * factor * num_tokens / num_experts - 1e-9))
    expected_TE = torch.zeros(num_tokens, num_experts, dtype=torch.float64)
    for e in range(num_experts):
        logit_T = x_TD @ weight_ED[e]
        kept = sorted(range(num_tokens), key=lambda t: -float(logit_T[t]))[:rows]
        expected_TE[kept, e] = logit_T[kept].exp() / logit_T[kept].exp().sum()
    assert torch.allclose(by_expert(choice, num_experts), expected_TE, rtol=1e-12, atol=1e-15)
    used_TK = choice.expert_TK >= 0
    assert int(used_TK.sum()) == rows * num_experts
    most = max((expected_TE > 0).sum(dim=1).tolist(), default=1)
    assert choice.expert_TK.shape == (num_tokens, most)
    assert (choice.score_TK[~used_TK] == 0).all()
    assert (choice.score_TK.diff(dim=1) <= 0).all()  # best first, unused ones last


def test_a_kept_token_stays_though_its_score_vanishes() -> None:
    """Each of three experts keeps two of three tokens, with scores 1 and 0."""
    logit_TE = torch.tensor([[1e3, 1e3, -9e3], [0, -9e3, 1e3], [-9e3, 0, 0]])
    choice = ExpertChoice(top_k=2)(torch.eye(3), (logit_TE.T,))
    assert choice.expert_TK.tolist() == [[0, 1], [2, 0], [1, 2]]
    assert choice.score_TK.tolist() == [[1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize(
    ("gate", "keys", "expected"),
    [
        (
            ExpertChoice,
            {"capacity_factor": 0.0},
            r"capacity_factor 0\.0 leaves experts no tokens; give",
        ),
        (ExpertChoice, {"top_k": 0}, "top_k is 0; a token needs 1 expert or more"),
        (SigmoidTopK, {"top_k": -1}, "top_k is -1"),
        (CosineTopK, {"most": 0.0}, r"most 0\.0 and projection_size 256 leave no logits; give"),
        (CosineTopK, {"projection_size": 0}, "projection_size 0 leave no logits"),
        (SoftMixture, {"top_k": 2}, "SoftMoE does not choose; leave it out"),
        (SoftMixture, {"slots_per_expert": 0}, "slots_per_expert is 0; it must be 1 or more"),
    ],
)
def test_what_leaves_nothing_to_do_is_refused(
    gate: type[Gate], keys: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        gate(**keys)


@pytest.mark.parametrize("gate", [gate() for gate in GATES.values()], ids=list(GATES))
def test_first_weights_choose_finitely(gate: Gate) -> None:
    """As hosts make them: filled in place, in the gate's order."""
    weights = []
    for wanted in gate.weights(6, 5):
        weights.append(torch.full(wanted.shape, math.nan))
        wanted.fill(weights[-1])
    choice = gate.with_top_k(2)(rand(8, 5).float(), tuple(weights), is_training=True)
    assert choice.score_TK.isfinite().all() and choice.losses.isfinite().all()


# SoftMoE.


def doubled(
    x_ND: Tensor, expert_N1: Tensor, score_N1: Tensor, weights: tuple[Tensor, ...]
) -> Tensor:
    return 2 * x_ND


def test_soft_by_hand() -> None:
    """The spec's G6: one slot an expert, experts that double; then twice the same sequence."""
    soft, seen = SoftMixture(), []

    def run(x_ND: Tensor, expert_N1: Tensor, *others: Any) -> Tensor:
        seen.append((x_ND, expert_N1.flatten().tolist()))
        return doubled(x_ND, expert_N1, *others)

    slots = [[1.462117, -0.193176], [0.388144, 1.492653], [0.301628, 1.579169]]
    expected = [
        [2.189612, 0.757919],
        [0.927324, 2.724099],
        [1.725103, 1.486046],
        [2.799129, -0.191004],
    ]
    for count in (1, 2):
        x_TD = X_TD.repeat(count, 1)
        choice = soft(x_TD, (WEIGHT_ED,))
        y_TD = soft.around(run, lambda n=count: n)(x_TD, choice.expert_TK, choice.score_TK, ())
        assert near(seen[-1][0], slots * count) and seen[-1][1] == [0, 1, 2] * count
        assert near(y_TD, expected * count)
    assert float(choice.losses[0]) == 1


def soft_formula(x: Tensor, phi: Tensor, *weights: Tensor, slots: int) -> Tensor:
    """Of one sequence ``[L, D]``."""
    logit_LS = x @ phi.T
    inputs_SD = logit_LS.softmax(dim=0).T @ x
    expert_S1 = torch.arange(len(phi))[:, None] // slots
    outputs_SD = dense_experts(inputs_SD, expert_S1, torch.ones_like(inputs_SD[:, :1]), *weights)
    return logit_LS.softmax(dim=1) @ outputs_SD


def soft_layer(rank: int, world_size: int, slots: int) -> list[float]:
    """Errors of output and gradients, of two sequences a rank; experts' summed over ranks."""
    strategy = Chunked(forward=2, backward=3)
    layout = ParallelLayout.build(Grid(world_size, world_size), strategy.uses())
    owner = Placement.block(E, world_size)
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    function = FeedForwardExperts(silu_gated)
    routed = RoutedExperts(strategy, LayerContext(plan, layout, 0), function)
    soft = SoftMixture(slots_per_expert=slots)
    mine = owner.experts_of(rank)
    own = [weight[e].clone().requires_grad_() for e in mine for weight in experts()]
    ours = [rand(2 * T, D, seed=rank), rand(E * slots, D, seed=50)]
    ours = [t.requires_grad_() for t in ours]
    choice = soft(ours[0], (ours[1],))
    y_TD = soft.around(routed, lambda: 2)(ours[0], choice.expert_TK, choice.score_TK, tuple(own))
    y_TD.square().sum().backward()
    of_experts = [weight.requires_grad_() for weight in experts()]
    for other in range(world_size):
        x, phi = rand(2 * T, D, seed=other), rand(E * slots, D, seed=50)
        theirs = [t.requires_grad_() for t in (x, phi)]
        parts = [soft_formula(part, phi, *of_experts, slots=slots) for part in x.split(T)]
        torch.cat(parts).square().sum().backward()
        if other == rank:
            pairs = [(y_TD, torch.cat(parts)), *((a.grad, b.grad) for a, b in zip(ours, theirs))]
    grads = [torch.stack([w.grad for w in own[i::2]]) for i in range(2)]
    pairs += [(grad, whole.grad[mine]) for grad, whole in zip(grads, of_experts)]
    return [relative_error(*pair) for pair in pairs]


@pytest.mark.parametrize(("world_size", "slots"), [(1, 1), (2, 1), (2, 3)])
def test_soft_layer_equals_the_formula(world_size: int, slots: int) -> None:
    """With a strategy that cuts the slots into chunks, other ones in backward."""
    for errors in pool_of(world_size).run(soft_layer, slots):
        assert len(errors) == 5 and max(errors) <= 1e-12, errors


def test_a_slots_logits_make_an_experts() -> None:
    """Their softmax is what the expert's slots weigh together."""
    logit_TS = rand(7, 6)
    by_expert_TE = SoftMixture(slots_per_expert=2).by_expert(logit_TS).softmax(dim=-1)
    together_TE = logit_TS.softmax(dim=-1).view(7, 3, 2).sum(dim=-1)
    assert torch.allclose(by_expert_TE, together_TE, rtol=1e-12, atol=0)


# All of them.


@dataclass(frozen=True)
class Case:
    """A gate and its formula."""

    gate: Gate
    shapes: tuple[tuple[int, ...], ...]
    formula: Callable[[Tensor, tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor, Tensor]]


T, E, D, F, P, K = 22, 6, 8, 5, 3, 2


def kept(h: Tensor, k: int) -> Tensor:
    return h >= h.sort(dim=1).values[:, -k:][:, :1]


def softmax_of_kept(h_TE: Tensor) -> Tensor:
    return h_TE.where(kept(h_TE, K), -math.inf).softmax(dim=1)


def noisy(x: Tensor, weights: tuple[Tensor, ...], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x @ weights[0].T + z * softplus(x @ weights[1].T)
    return softmax_of_kept(h), h.softmax(dim=1), h


def sigmoid(x: Tensor, weights: tuple[Tensor, ...], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x @ weights[0].T
    scores = h.sigmoid()
    return scores * kept(h, K), scores / scores.sum(dim=1, keepdim=True), h


def cosine(x: Tensor, weights: tuple[Tensor, ...], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    token, expert = x @ weights[0].T, weights[1]
    h = token @ expert.T / token.norm(dim=1)[:, None] / expert.norm(dim=1) * weights[2].exp()
    return softmax_of_kept(h), h.softmax(dim=1), h


def chosen(x: Tensor, weights: tuple[Tensor, ...], z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x @ weights[0].T
    rows = math.ceil(K * len(x) / E)
    scores = h.T.where(kept(h.T, rows), -math.inf).softmax(dim=1).T
    return scores, torch.full_like(h, 1 / E), h  # even: a loss of one


CASES = {
    "noisy": Case(NoisyTopK(top_k=K), ((E, D), (E, D)), noisy),
    "sigmoid": Case(SigmoidTopK(top_k=K), ((E, D),), sigmoid),
    "cosine": Case(CosineTopK(top_k=K), ((P, D), (E, P), (1,)), cosine),
    "expert choice": Case(ExpertChoice(top_k=K), ((E, D),), chosen),
}


def weights_of(case: Case) -> tuple[Tensor, ...]:
    return tuple(rand(*shape, seed=i) for i, shape in enumerate(case.shapes))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    case = CASES[name]

    def scores_and_losses(x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of the noise
            choice = case.gate(x_TD, weights, is_training=True)
        return choice.score_TK, choice.losses

    inputs = (rand(7, D, seed=9), *weights_of(case))
    assert torch.autograd.gradcheck(scores_and_losses, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("name", CASES)
def test_types_and_no_tokens(name: str) -> None:
    case = CASES[name]
    gate = case.gate
    for dtype in (torch.bfloat16, torch.float32):
        choice = gate(rand(T, D).to(dtype), tuple(w.float() for w in weights_of(case)))
        assert choice.score_TK.dtype == choice.losses.dtype == torch.float32
        assert choice.expert_TK.dtype == torch.int64
    nothing = gate(rand(0, D), weights_of(case))
    assert nothing.expert_TK.shape == nothing.score_TK.shape
    assert nothing.expert_TK.shape[1] >= 1
    assert nothing.losses.tolist() == [0.0, 0.0]


def tokens(rank: int) -> tuple[Tensor, Tensor]:
    """Hidden states and the gradient of the output, of a rank; not as many on each."""
    x, grad = rand(2, T + 5 * rank, D, seed=100 + rank)
    return x, grad


def experts() -> tuple[Tensor, Tensor]:
    return rand(E, 2 * F, D, seed=20) * 0.3, rand(E, D, F, seed=21) * 0.3


def dense(case: Case, world_size: int, *, is_training: bool) -> list[list[Tensor]]:
    """Output, gradient of x and losses of each rank; then gradients of gate and experts."""
    weights = [w.requires_grad_() for w in (*weights_of(case), *experts())]
    results = []
    for rank in range(world_size):
        x, grad = tokens(rank)
        x.requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(7 + rank)
            z_TE = torch.randn(len(x), E, dtype=x.dtype) * is_training
        scores, probability, h = case.formula(x, tuple(weights[:-2]), z_TE)
        everyone_TE = torch.arange(E).expand(len(x), E)
        y = dense_experts(x, everyone_TE, scores, *weights[-2:])
        rows_E = (scores > 0).sum(dim=0).to(x.dtype)
        share_E = rows_E / rows_E.sum()
        balance = E * (share_E * probability.mean(dim=0)).sum()
        losses = torch.stack((balance, h.exp().sum(dim=1).log().square().mean()))
        (torch.sum(y * grad) + losses @ losses.new_tensor([0.3, 0.1])).backward()
        results.append([y.detach(), x.grad, losses.detach()])
    return [*results, [w.grad for w in weights]]


def sharded(
    rank: int, world_size: int, name: str, *, is_training: bool, is_checkpointed: bool = False
) -> list[Tensor]:
    case = CASES[name]
    strategy = Chunked(forward=2, backward=3)
    layout = ParallelLayout.build(Grid(world_size, world_size), strategy.uses())
    owner = Placement.block(E, world_size)
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    mine = owner.experts_of(rank)
    layer = MoELayer(
        nn.ParameterList(weights_of(case)),
        nn.ParameterList([weight[expert] for expert in mine for weight in experts()]),
        gate=lambda x_TD, weights: case.gate(x_TD, weights, is_training=layer.training),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        options=LayerOptions(gate_may_drop=True),
    ).train(is_training)
    x, grad = tokens(rank)
    x.requires_grad_()
    torch.manual_seed(7 + rank)
    out = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
    (torch.sum(out.y * grad) + 0.3 * out.balance_loss + 0.1 * out.z_loss).backward()
    losses = torch.stack((out.balance_loss, out.z_loss)).detach()
    of_experts = [p.grad for p in layer.expert_weights]
    of_gate = [p.grad for p in layer.gate_weights]
    slots = [torch.stack(of_experts[::2]), torch.stack(of_experts[1::2])]
    return [out.y.detach(), x.grad, losses, *of_gate, *slots]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("name", "is_training"), [*((name, True) for name in CASES), ("noisy", False)]
)
def test_layer_equals_dense(name: str, is_training: bool, world_size: int) -> None:
    *of_ranks, of_weights = dense(CASES[name], world_size, is_training=is_training)
    ranks = pool_of(world_size).run(sharded, name, is_training=is_training)
    pairs = [pair for ours, theirs in zip(ranks, of_ranks) for pair in zip(ours[:3], theirs)]
    by_weight = list(zip(*(ours[3:] for ours in ranks)))
    summed = [sum(parts) for parts in by_weight[:-2]]
    joined = [torch.cat(parts) for parts in by_weight[-2:]]
    pairs += zip((*summed, *joined), of_weights)
    errors = [relative_error(ours, theirs) for ours, theirs in pairs]
    assert len(errors) == 3 * world_size + len(of_weights)
    assert max(errors) <= 1e-12, errors


def test_noise_is_the_same_when_activations_are_computed_again() -> None:
    pool = pool_of(2)
    once = pool.run(sharded, "noisy", is_training=True)
    twice = pool.run(sharded, "noisy", is_training=True, is_checkpointed=True)
    for ours, again in zip(once, twice):
        assert all(map(torch.equal, ours, again))


# Gates against plain formulas and numbers by hand.


T_GATE, E_GATE, D_GATE = 7, 6, 5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(T_GATE, D_GATE, generator=generator, dtype=torch.float64)
    weight_ED = torch.randn(E_GATE, D_GATE, generator=generator, dtype=torch.float64)
    return x_TD.to(dtype), weight_ED.to(dtype)


@pytest.mark.parametrize("top_k", [1, 2, E_GATE])
def test_mixtral(top_k: int) -> None:
    """Softmax over the chosen logits alone: the same as renormalised softmax over all."""
    x_TD, weight_ED = inputs()
    choice = SoftmaxTopK(top_k=top_k)(x_TD, (weight_ED,))
    logit_TK, expert_TK = (x_TD @ weight_ED.T).topk(top_k, dim=1)
    assert torch.equal(choice.expert_TK, expert_TK)
    assert torch.allclose(choice.score_TK, logit_TK.softmax(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("top_k", [1, 2, E_GATE])
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
    uniform_TE = torch.full((E_GATE, E_GATE), 1 / E_GATE)
    expert_TK = torch.arange(E_GATE)[:, None]
    assert float(balance_loss(uniform_TE, expert_TK)) == pytest.approx(1.0)
    one_TE = torch.eye(E_GATE)[[3] * E_GATE]
    assert float(balance_loss(one_TE, torch.full((E_GATE, 2), 3))) == pytest.approx(E_GATE)


def test_z_loss_by_hand() -> None:
    # Log-partitions: ln (1 + 3) and ln (8 + 8).
    logit_TE = torch.tensor([[1.0, 3.0], [8.0, 8.0]], dtype=torch.float64).log()
    expected = (math.log(4) ** 2 + math.log(16) ** 2) / 2
    assert float(z_loss(logit_TE)) == pytest.approx(expected)


def test_losses_of_no_tokens_are_zero() -> None:
    choice = SoftmaxTopK(top_k=2)(torch.zeros(0, D_GATE), (torch.zeros(E_GATE, D_GATE),))
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
