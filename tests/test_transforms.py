# SPDX-License-Identifier: Apache-2.0
"""Transforms at the six places: equal to dense experts with the same ones, and what is refused.

Shape letters: T tokens, N rows, D model width, B numbers of a row on its way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_moe_ext
from ds_moe_ext import testing
from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.codecs import Codec, Int8
from ds_moe_ext.moe.dispatch import Dispatch, Wire
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.hooked import read_hooks
from ds_moe_ext.moe.hooks import Hooked
from ds_moe_ext.moe.layer import LayerOptions, MoELayer, RoutedExperts
from ds_moe_ext.moe.refusals import check_transforms
from ds_moe_ext.moe.replica_memory import Codecs, replica_bytes
from ds_moe_ext.moe.transforms import Transform, applied
from ds_moe_ext.planning.strategy import Job, LayerContext, Strategy
from ds_moe_ext.schedule.task import DISPATCH
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.prophet import ProProphet
from ds_moe_ext.strategies.settings import read_settings
from ds_moe_ext.strategies.zebra import Zebra
from ds_moe_ext.testing import TOLERANCE, Case, relative_error
from tests.hosts import toy
from tests.marks import slow
from tests.ranks import pool_of
from tests.test_hooks import InHalves

HERE = "tests.test_transforms"


def matrix(rows: int, columns: int) -> Tensor:
    """Always the same of a size, float64."""
    return torch.sin(torch.arange(1.0, rows * columns + 1, dtype=torch.float64)).view(rows, columns)


@dataclass(frozen=True, kw_only=True)
class Mixed(Transform):
    """``tanh`` of sums, to another width. Says its adjoint itself, if it is reported to."""

    width: int
    by_hand: bool = False

    def forward(self, rows_ND: Tensor) -> Tensor:
        return torch.tanh(rows_ND @ matrix(rows_ND.shape[1], self.width)) + 0.1

    def adjoint(self, rows_ND: Tensor, grad_NB: Tensor) -> Tensor:
        if not self.by_hand:
            return super().adjoint(rows_ND, grad_NB)
        mix_DB = matrix(rows_ND.shape[1], self.width)
        return (grad_NB * (1 - torch.tanh(rows_ND @ mix_DB) ** 2)) @ mix_DB.T


@dataclass(frozen=True, kw_only=True)
class Halved(Transform):
    """Means of pairs."""

    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.unflatten(1, (-1, 2)).mean(dim=2)


@dataclass(frozen=True, kw_only=True)
class Doubled(Transform):
    """Each number and its square: what autograd needs of rows, and not what it can do without."""

    def forward(self, rows_ND: Tensor) -> Tensor:
        return torch.cat((rows_ND, rows_ND**2), dim=1)


@dataclass(frozen=True, kw_only=True)
class Curved(Transform):
    """As wide as it was."""

    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND + 0.3 * torch.sin(rows_ND)


D = testing.D
OF_DISPATCH = (
    Mixed(at="before_dispatch", width=4, by_hand=True),
    Curved(at="before_dispatch"),
    Mixed(at="after_dispatch", width=D),
)
ALL = (
    Curved(at="before_moe_start"),
    *OF_DISPATCH,
    Halved(at="before_combine"),
    Doubled(at="after_combine"),
    Curved(at="before_moe_end"),
)


def of_place(transforms: tuple[Transform, ...], *places: str) -> Any:
    """A function of those at these places, as autograd sees it."""

    def function(rows_ND: Tensor) -> Tensor:
        for place in places:
            for transform in transforms:
                if transform.at == place:
                    rows_ND = transform.forward(rows_ND)
        return rows_ND

    return function


def dense_gate(transforms: tuple[Transform, ...], top_k: int) -> Any:
    return lambda x_TD, weights: SoftmaxTopK(top_k=top_k)(
        of_place(transforms, "before_moe_start")(x_TD), weights
    )


DENSE = testing.dense_experts


def dense(
    transforms: tuple[Transform, ...],
    x_TD: Tensor,
    expert_TK: Tensor,
    score_TK: Tensor,
    *weights: Tensor,
) -> Tensor:
    """Dense experts with transforms, choice by choice."""
    there = of_place(transforms, "before_moe_start", "before_dispatch", "after_dispatch")(x_TD)
    back = of_place(transforms, "before_combine", "after_combine")
    one_T1 = torch.ones_like(score_TK[:, :1])
    rows = [
        back(DENSE(there, expert_TK[:, k : k + 1], one_T1, *weights)) * score_TK[:, k : k + 1]
        for k in range(expert_TK.shape[1])
    ]
    return of_place(transforms, "before_moe_end")(torch.stack(rows).sum(dim=0))


def _train(rank: int, num_ranks: int, strategy: Strategy, case: Case, hooks: Hooked) -> Any:
    options = LayerOptions(hooks=hooks)

    def layer(*args: Any, **kwargs: Any) -> MoELayer:
        return MoELayer(*args, **kwargs, options=options)

    with mock.patch.object(testing, "MoELayer", layer):
        return testing._train(rank, num_ranks, strategy, case)


def largest_error(
    strategy: Strategy, case: Case, transforms: tuple[Transform, ...] = ALL, *codecs: Codec
) -> tuple[float, int]:
    """Of outputs, gradients of inputs and of all weights; and replicas of experts in all steps."""
    laid = testing._laid(strategy, case)
    assert not isinstance(laid, str), laid
    seen = pool_of(case.num_ranks).run(_train, laid, case, Hooked((), codecs, transforms))
    with (
        mock.patch.object(testing, "SoftmaxTopK", lambda top_k: dense_gate(transforms, top_k)),
        mock.patch.object(testing, "dense_experts", lambda *given: dense(transforms, *given)),
    ):
        return max(error for _, error in testing._errors(case, seen)), sum(
            step.num_replicas for step in seen[0]
        )


ONE, TWO, FOUR = Case(num_ranks=1), Case(num_ranks=2), Case(num_ranks=4)
CHUNKED = Case(num_ranks=4, degrees=(2, 3))
SPLIT = Case(num_ranks=2, degrees=(2, 2), etp_size=2)
SPLIT_CHUNKED = Case(num_ranks=4, degrees=(3, 2), num_micro_batches=2, etp_size=2)
FSSDP = FullySharded(calibrate=True, overlap_degree=2, replicas_per_rank=3)


def _name(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Strategy) else str(value)


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        slow(ExpertParallel(), ONE),
        slow(ExpertParallel(), TWO),
        slow(ExpertParallel(), FOUR),
        slow(ExpertParallel(), CHUNKED),
        slow(ExpertParallel(), Case(num_ranks=1, degrees=(2, 3))),
        slow(ExpertParallel(), SPLIT),
        (ExpertParallel(), SPLIT_CHUNKED),
        slow(FSSDP, ONE),
        slow(FSSDP, TWO),
        (FSSDP, FOUR),
        slow(FSSDP, Case(num_ranks=4, num_micro_batches=2, checkpoints=True)),
        slow(FSSDP, SPLIT_CHUNKED),
        slow(ProProphet(), ONE),
        slow(ProProphet(), TWO),
        (ProProphet(), FOUR),
        slow(ProProphet(), SPLIT_CHUNKED),
    ],
    ids=_name,
)
def test_equal_to_dense_experts_with_the_same(strategy: Strategy, case: Case) -> None:
    error, num_replicas = largest_error(strategy, case)
    assert error <= TOLERANCE
    makes_replicas = not isinstance(strategy, ExpertParallel) and case.num_ranks == 4
    assert bool(num_replicas) == makes_replicas or case.etp_size > 1 or case.num_ranks < 4


@pytest.mark.parametrize("case", [FOUR, slow(CHUNKED)], ids=str)
def test_rows_sent_once_are_transformed_on_their_way_there(case: Case) -> None:
    once = ExpertParallel(send_once=True)
    error, _ = largest_error(once, case, OF_DISPATCH)
    assert error <= TOLERANCE


@pytest.mark.parametrize("strategy", [FSSDP, slow(ProProphet())], ids=_name)
@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [(InHalves, 0.0, TOLERANCE), slow(Int8, 1e-3, 0.02)],
)
def test_replicas_of_experts_travel_encoded(
    strategy: Strategy, codec: type[Codec], least: float, most: float
) -> None:
    """Exactly, by an exact codec of other shape and type, and else with its error."""
    for there, back in ((True, False), (False, True), (True, True)):
        only = codec(dispatch=False, combine=False, replicas=there, replica_gradients=back)
        error, num_replicas = largest_error(strategy, FOUR, (), only)
        assert least <= error <= most
        assert num_replicas


def test_an_expert_on_its_way_weighs_what_it_travels_as() -> None:
    like = torch.zeros(4, 8), torch.zeros(4)
    plain, coded = 4 * 36, 4 * (8 + 4) + (4 + 4)
    assert replica_bytes(like, Codecs()) == plain
    assert replica_bytes(like, Codecs(weights=Int8())) == (coded + plain) / 2
    assert replica_bytes(like, Codecs(Int8(), Int8())) == coded


@dataclass(frozen=True, kw_only=True)
class Dithered(Int8):
    """Rounds up or down by chance."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        return super().encode(rows_ND + 0.01 * torch.rand_like(rows_ND))


@dataclass(frozen=True, kw_only=True)
class Seeded(Dithered):
    """By the same chance each time."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return super().encode(rows_ND)


def _refused_at_start(rank: int, world_size: int) -> list[str]:
    """What is reported of codecs of replicas, and of their gradients alone; nothing of those
    taken."""
    lines = []
    for name, replicas in ((Dithered, True), (Dithered, False), (Seeded, True)):
        hook = {"type": f"{HERE}:{name.__name__}", "replicas": replicas, "replica_gradients": True}
        block = {"enabled": True, "strategy": "fssdp", "hooks": [hook]}
        model = toy.build("toy, two experts a layer")
        try:
            ds_moe_ext.attach(model, {**block, "report": {"enabled": False}})
            lines.append("")
        except ValueError as error:
            lines.append(str(error))
    return lines


def test_replicas_that_might_be_others_in_backward_are_refused_at_start() -> None:
    for refused, *taken in pool_of(2).run(_refused_at_start):
        assert refused.startswith("ds_moe_ext.hooks: Dithered(")
        assert (
            "encodes the same rows in two ways" in refused and "set 'replicas' to false" in refused
        )
        assert taken == ["", ""]


def layer_of(strategy: Strategy, world_size: int, hooks: Hooked) -> MoELayer:
    layout = ParallelLayout.build(Grid(world_size, world_size, 1), strategy.uses())
    take_back = Placement.block(4, world_size)
    (plan,) = strategy.plan(Job.at_start([take_back], layout.node_C))
    slots = len(take_back.experts_of(layout.index("ep")))
    return MoELayer(
        nn.ParameterList([matrix(4, D)]),
        nn.ParameterList([part for _ in range(slots) for part in (matrix(6, D), matrix(D, 3))]),
        gate=SoftmaxTopK(top_k=2),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        options=LayerOptions(hooks=hooks),
    )


@dataclass(frozen=True, kw_only=True)
class Cut(Transform):
    """Each token as two of half the width."""

    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.reshape(2 * rows_ND.shape[0], -1)


@dataclass(frozen=True, kw_only=True)
class Joined(Transform):
    """Two tokens as one of twice the width."""

    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.reshape(rows_ND.shape[0] // 2, -1)


CUT, JOINED = Cut(at="before_moe_start"), Joined(at="before_moe_end")


def _reshaped(rank: int, world_size: int) -> float:
    """Of the layer on tokens that are cut in two, from that on halves."""
    x_TD = matrix(5 + rank, 2 * D).requires_grad_()
    halves_TD = x_TD.detach().reshape(-1, D).requires_grad_()
    grad_TD = matrix(5 + rank, 2 * D).cos()
    whole, plain = (
        layer_of(ExpertParallel(), world_size, Hooked(transforms=own))
        for own in ((CUT, JOINED), ())
    )
    y_TD, expected_TD = whole(x_TD).y, plain(halves_TD).y
    y_TD.backward(grad_TD)
    expected_TD.backward(grad_TD.view_as(expected_TD))
    pairs = [(y_TD, expected_TD), (x_TD.grad, halves_TD.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(whole.parameters(), plain.parameters())]
    return max(relative_error(ours.view_as(theirs), theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens_are_reshaped_at_the_start_and_the_end(world_size: int) -> None:
    assert max(pool_of(world_size).run(_reshaped)) <= TOLERANCE


# What is refused.


@dataclass(frozen=True, kw_only=True)
class Weighted(Transform):
    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND * nn.Parameter(torch.ones(()))


@dataclass(frozen=True, kw_only=True)
class InPlace(Transform):
    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.mul_(2)


@dataclass(frozen=True, kw_only=True)
class Loses(Transform):
    def forward(self, rows_ND: Tensor) -> Tensor:
        return rows_ND[1:]


HALVED = Halved(at="before_dispatch")
WRONG: tuple[tuple[tuple[Transform, ...], str], ...] = (
    ((HALVED,), r"rows of 6 numbers .* are 3 .* behind after_dispatch; .*add what makes them so"),
    ((Halved(at="before_combine"),), "are 3 .* behind after_combine"),
    ((Weighted(at="before_dispatch"),), "has weights of its own.*let the model compute this"),
    ((InPlace(at="after_combine"),), "changed its input in place.*a tensor of their own"),
    ((Loses(at="before_combine"),), r"makes \(0, 6\) of \(1, 6\).*every row must stay one"),
    ((Joined(at="before_moe_end"),), "for an input of .*add what makes it so at before_moe_end"),
)


def _failed(
    rank: int, world_size: int, transforms: tuple[Transform, ...]
) -> tuple[str, str] | None:
    layer = layer_of(ExpertParallel(), world_size, Hooked(transforms=transforms))
    try:
        layer(matrix(6, D).requires_grad_()).y.sum().backward()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(("transforms", "reported"), WRONG, ids=str)
def test_wrong_ones_are_refused(transforms: tuple[Transform, ...], reported: str) -> None:
    (failed,) = pool_of(1).run(_failed, transforms)
    assert failed is not None
    assert re.search(reported, failed[1]), failed


def test_a_router_of_the_hosts_has_chosen_for_the_tokens_that_there_were() -> None:
    (results,) = pool_of(1).run(_behind_a_router)
    assert "make 12 tokens of 6" in results and "router" in results


def _behind_a_router(rank: int, world_size: int) -> str:
    strategy, options = ExpertParallel(), LayerOptions(hooks=Hooked(transforms=(CUT, JOINED)))
    layer = layer_of(strategy, world_size, Hooked()).routed
    experts = RoutedExperts(strategy, layer.layer_context, layer.function, options=options)
    ids = torch.zeros(6, 2, dtype=torch.int64)
    with pytest.raises(ValueError) as caught:
        experts(matrix(6, 2 * D), ids, torch.ones(6, 2, dtype=torch.float64), ())
    return str(caught.value)


@dataclass(frozen=True, kw_only=True)
class Dispatching(ExpertParallel):
    """Dispatches itself."""

    def stages(self, layer_context: LayerContext) -> Any:
        return {DISPATCH: Dispatch(Wire(None), Wire(None))}


REFUSED: tuple[tuple[Strategy, str], ...] = (
    (ExpertParallel(send_once=True), "send_once is true.*at before_dispatch and after_dispatch"),
    (Dispatching(), "stages of its own for dispatch"),
)


@pytest.mark.parametrize(("strategy", "reported"), REFUSED, ids=str)
def test_what_a_strategy_cannot_do_is_refused_by_name(strategy: Strategy, reported: str) -> None:
    (message,) = pool_of(1).run(_refused, strategy)
    assert re.search(reported, message), message


def _refused(rank: int, world_size: int, strategy: Strategy) -> str:
    with pytest.raises(ValueError) as caught:
        layer_of(strategy, world_size, Hooked(transforms=ALL))
    return str(caught.value)


def test_roles_have_no_place_for_them() -> None:
    with pytest.raises(ValueError, match=r"Zebra gives the ranks roles.*choose another strategy"):
        check_transforms({}, Zebra(), mock.Mock(), Hooked(transforms=ALL))


def test_they_are_read_by_name() -> None:
    hooks = read_hooks(
        [
            {"type": f"{HERE}:Mixed", "at": "before_dispatch", "width": 4},
            "int8",
            {"type": f"{HERE}:Mixed", "at": "after_dispatch", "width": D},
        ],
        "hooks",
    )
    assert [each.at for each in hooks.transforms] == ["before_dispatch", "after_dispatch"]
    assert applied(hooks.transforms, torch.ones(2, D, dtype=torch.float64)).shape == (2, D)


def refusals() -> Iterator[tuple[Any, str, str]]:
    yield {"type": f"{HERE}:Curved"}, "hooks[0]", "'at'"
    yield {"type": f"{HERE}:Curved", "at": "before"}, "hooks", "'before_moe_start', 'before_disp"
    yield {"type": f"{HERE}:Curved", "at": "before_combine", "a": 1}, "hooks[0]", "'a'"


@pytest.mark.parametrize(("value", "key", "reported"), list(refusals()))
def test_a_wrong_place_is_refused_in_one_sentence(value: Any, key: str, reported: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_settings({"ds_moe_ext": {"enabled": True, "hooks": [value]}})
    message = str(caught.value)
    assert message.startswith(f"ds_moe_ext.{key}") and reported in message
    assert len(message.splitlines()) == 1
