# SPDX-License-Identifier: Apache-2.0
"""Hooks: how often each is called and with what, that they change nothing, and what codecs cost.

Shape letters: W ranks, T tokens, N rows, D model width, E experts, F expert width.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.moe.codecs import BFloat16, Codec, Int8
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.hooked import read_hooks
from ds_moe_ext.moe.hooks import Batch, Hook, Hooked, Hooks, Moe
from ds_moe_ext.moe.layer import LayerOptions, MoELayer, RoutedExperts
from ds_moe_ext.moe.sharding import Along, Shard
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.planning.strategy import Job, Strategy
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.esp import ExpertSharding, TwoDegrees
from ds_moe_ext.strategies.settings import read_settings
from ds_moe_ext.testing import relative_error
from tests.hosts import jobs
from tests.marks import slow
from tests.ranks import pool_of

D, F, E, T, TOP_K = 16, 24, 4, 22, 2


@dataclass(frozen=True)
class Case:
    """How a layer runs."""

    degrees: tuple[int, int] = (1, 1)
    etp_size: int = 1
    schedule: str = "fsmoe"
    way: str = "direct"  # between EP ranks, of two a node
    has_own_gate: bool = True
    send_once: bool = False


@dataclass(frozen=True)
class Called:
    """One call of a hook, without the data."""

    hook: str
    moe: Moe
    shape: tuple[int, ...]
    chunk_range: tuple[int, int] | None
    is_backward: bool
    requires_grad: bool


class Notes(Hooks):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[Called] = []

    def _note(self, hook: str, moe: Moe, batch: Batch) -> None:
        data, chunk_range = batch.data, batch.chunk_range
        given = None if chunk_range is None else tuple(chunk_range)
        self.calls.append(
            Called(hook, moe, tuple(data.shape), given, batch.is_backward, data.requires_grad)
        )

    def before_moe_start_hook(self, moe: Moe, batch: Batch) -> None:
        self._note("before_moe_start_hook", moe, batch)

    def before_dispatch_hook(self, moe: Moe, batch: Batch) -> None:
        self._note("before_dispatch_hook", moe, batch)

    def after_dispatch_hook(self, moe: Moe, batch: Batch) -> None:
        self._note("after_dispatch_hook", moe, batch)

    def before_combine_hook(self, moe: Moe, batch: Batch) -> None:
        self._note("before_combine_hook", moe, batch)

    def after_combine_hook(self, moe: Moe, batch: Batch) -> None:
        self._note("after_combine_hook", moe, batch)

    def before_moe_end_hook(self, moe: Moe, batch: Batch) -> None:
        self._note("before_moe_end_hook", moe, batch)


class ForwardNotes(Notes):
    """Without gradients."""

    in_backward = False


@dataclass(frozen=True, kw_only=True)
class Same(Codec):
    """Travels as it is."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        return rows_ND

    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return arrived_RB


@dataclass(frozen=True, kw_only=True)
class InHalves(Codec):
    """Exact, but of other shape and type: each float64 as two int32. Gradients travel negated."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.contiguous().view(torch.int32).unflatten(1, (-1, 2))

    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return arrived_RB.flatten(1).view(like_ND.dtype)

    def encode_grad(self, rows_ND: Tensor) -> Tensor:
        return -rows_ND

    def decode_grad(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return -arrived_RB


class Results(dict[str, Tensor]):
    """Output and gradients of a layer."""

    def error_of(self, other: Results) -> float:
        return max(relative_error(value, other[name]) for name, value in self.items())


def strategy_of(case: Case) -> Strategy:
    forward, backward = case.degrees
    degree = TwoDegrees(forward=forward, backward=backward)
    esp = ExpertSharding(degree=degree, schedule=case.schedule, all_to_all=case.way)
    return esp.over(ExpertParallel(send_once=case.send_once))


def layer_of(world_size: int, case: Case, options: LayerOptions) -> MoELayer:
    strategy = strategy_of(case)
    layout = ParallelLayout.build(
        Grid(world_size, world_size // case.etp_size, case.etp_size),
        strategy.uses(),
        ranks_per_node=2 * case.etp_size,
    )
    owner = Placement.block(E, layout.grid.num_ep_ranks)
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    generator = torch.Generator().manual_seed(0)
    shapes = ((E, D), (E, 2 * F, D), (E, D, F))
    gate_ED, *weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4 for shape in shapes
    )
    shard = Shard((Along(0, num_blocks=2), Along(1)), layout.index("esp"), case.etp_size)
    parts = [shard.of(number, weight, first_dim=1) for number, weight in enumerate(weights)]
    return MoELayer(
        nn.ParameterList([gate_ED]),
        nn.ParameterList(
            [part[expert] for expert in owner.experts_of(layout.index("ep")) for part in parts]
        ),
        gate=SoftmaxTopK(top_k=TOP_K),
        function=FeedForwardExperts(silu_gated),
        strategy=strategy,
        plan=plan,
        layout=layout,
        layer=3,
        options=options,
    )


def behind_a_gate(layer: MoELayer, case: Case, options: LayerOptions, x_TD: Tensor) -> Tensor:
    """The layer's experts, as a host calls them behind its own gate."""
    choice = SoftmaxTopK(top_k=TOP_K)(x_TD, tuple(layer.gate_weights))
    layer_context, function = layer.routed.layer_context, layer.routed.function
    experts = RoutedExperts(strategy_of(case), layer_context, function, options=options)
    return experts(x_TD, choice.expert_TK, choice.score_TK, tuple(layer.expert_weights))


def trained(rank: int, world_size: int, case: Case, hooks: Hooked) -> tuple[Results, list[Called]]:
    """One forward and backward."""
    options = LayerOptions(hooks=hooks, name="blocks.3")
    layer = layer_of(world_size, case, options)
    generator = torch.Generator().manual_seed(7 + rank)
    x_TD, grad_TD = torch.randn(2, T, D, generator=generator, dtype=torch.float64)
    x_TD.requires_grad_()
    y_TD = layer(x_TD).y if case.has_own_gate else behind_a_gate(layer, case, options, x_TD)
    y_TD.backward(grad_TD)
    results = Results(y=y_TD.detach(), x=x_TD.grad)
    for number, weight in enumerate(layer.parameters()):
        results[f"weight {number}"] = weight.grad
    calls = [call for hook in hooks.observers if isinstance(hook, Notes) for call in hook.calls]
    return results, calls


def run(world_size: int, case: Case, *hooks: Any) -> list[tuple[Results, list[Called]]]:
    observers = tuple(hook for hook in hooks if not isinstance(hook, Codec))
    codecs = tuple(hook for hook in hooks if isinstance(hook, Codec))
    return pool_of(world_size).run(_run, case, observers, codecs)


def _run(
    rank: int, world_size: int, case: Case, observers: tuple[type[Hooks], ...], codecs: Any
) -> tuple[Results, list[Called]]:
    return trained(rank, world_size, case, Hooked(tuple(cls() for cls in observers), codecs))


# Observers.

CHUNK_HOOKS = (
    "before_dispatch_hook",
    "after_dispatch_hook",
    "before_combine_hook",
    "after_combine_hook",
)
CASES = (
    (2, Case()),
    (2, Case(degrees=(3, 2))),
    (2, Case(degrees=(2, 4), has_own_gate=False)),
    (2, Case(degrees=(2, 1), etp_size=2)),
    (4, Case(degrees=(3, 3), etp_size=2)),
    (4, Case(degrees=(2, 3), etp_size=2, schedule="tutel")),
    (1, Case(degrees=(2, 2))),
)


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_hooks_are_called_once_in_order_and_see_what_is_there(world_size: int, case: Case) -> None:
    """Spec, property 10: 1, r, r, r, r, 1; and r of backward between."""
    answers = run(world_size, case, Notes)
    for (results, calls), (without, _) in zip(answers, run(world_size, case)):
        assert results.error_of(without) == 0
        assert {call.moe for call in calls} == {Moe(3, "blocks.3")}
        assert not any(call.requires_grad for call in calls)
        ends = [call for call in calls if call.chunk_range is None]
        assert [call.hook for call in ends] == ["before_moe_start_hook", "before_moe_end_hook"]
        assert [call.shape for call in ends] == [(T, D)] * 2 and calls[0] == ends[0]
    tokens, rows = world_size * T, world_size * T * TOP_K
    for is_backward, degree in zip((False, True), case.degrees):
        chunks = math.lcm(*case.degrees) // degree
        lengths: Counter[str] = Counter()
        for _, calls in answers:
            own = [c for c in calls if c.chunk_range is not None and c.is_backward == is_backward]
            assert {c.chunk_range for c in own} == {
                (i * chunks, (i + 1) * chunks) for i in range(degree)
            }
            for chunk_range in {call.chunk_range for call in own}:
                assert [call.hook for call in own if call.chunk_range == chunk_range] == list(
                    CHUNK_HOOKS
                )
            for call in own:
                assert call.shape[1:] == (D,)
                lengths[call.hook] += call.shape[0]
        assert lengths == {
            "before_dispatch_hook": rows if is_backward else tokens,
            "after_dispatch_hook": rows * case.etp_size,
            "before_combine_hook": rows * case.etp_size,
            "after_combine_hook": tokens if is_backward else rows,
        }


def test_gradients_are_shown_only_to_those_who_want_them() -> None:
    for _, calls in run(2, Case(degrees=(2, 2)), ForwardNotes):
        assert len(calls) == 2 + 4 * 2
        assert not any(call.is_backward for call in calls)


def doubles(hook: str) -> type[Hooks]:
    """An observer that does at one hook what it must not."""

    def double(self: Hooks, moe: Moe, batch: Batch) -> None:
        batch.data.mul_(2)

    return type("Doubles", (Hooks,), {hook: double})


def _refused(rank: int, world_size: int, case: Case, hook: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        trained(rank, world_size, case, Hooked((doubles(hook)(),)))
    return str(caught.value)


@pytest.mark.parametrize("hook", [hook.value for hook in Hook])
def test_an_observer_that_changes_data_is_refused(hook: str) -> None:
    (message,) = pool_of(1).run(_refused, Case(degrees=(2, 2)), hook)
    assert f"Doubles.{hook} has changed the data of layer 3 'blocks.3'" in message
    assert "clone what you want to change" in message


def test_in_inference_mode_hooks_are_called() -> None:
    notes = Notes()
    with torch.inference_mode():
        data = torch.zeros(2, D)
        Hooked((notes,)).notify(Hook.BEFORE_MOE_END, Moe(0), Batch(data))
    assert len(notes.calls) == 1


# Codecs in layers.

CODED = (
    (2, Case(degrees=(3, 2))),
    (2, Case(schedule="default")),
    (4, Case(degrees=(2, 3), etp_size=2)),
    (4, Case(degrees=(2, 2), etp_size=2, schedule="tutel")),
    (2, Case(etp_size=2)),
    (4, Case(degrees=(2, 3), send_once=True)),
    (4, Case(degrees=(2, 1), send_once=True, way="2dh")),
    (4, Case(degrees=(3, 2), way="2dh")),
    (4, Case(degrees=(1, 2), way="1dh")),
)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [slow(*each) if number in (0, 1, 4, 7) else each for number, each in enumerate(CODED)],
)
@pytest.mark.parametrize(
    "codec", [slow(Same()), InHalves(), slow(InHalves(gradients=False))], ids=str
)
def test_an_exact_codec_changes_nothing(world_size: int, case: Case, codec: Codec) -> None:
    pairs = zip(run(world_size, case, codec), run(world_size, case))
    for (coded, _), (plain, _) in pairs:
        assert coded.error_of(plain) <= 1e-12


@pytest.mark.parametrize(("codec", "bound"), [(BFloat16(), 2**-8), (Int8(), 1 / 254)], ids=str)
@pytest.mark.parametrize(("world_size", "case"), [slow(*CODED[0]), slow(*CODED[1]), CODED[2]])
def test_errors_of_a_layer(world_size: int, case: Case, codec: Codec, bound: float) -> None:
    """Largest error over the largest value, of output and all gradients. Each comes of up to four
    stripe passes; the gate's gradient adds up the errors of rows, hence twice as much."""
    pairs = zip(run(world_size, case, codec), run(world_size, case))
    errors = [coded.error_of(plain) for (coded, _), (plain, _) in pairs]
    assert bound / 10 < max(errors) < 8 * bound


IN_EP_RANKS = (
    (2, Case(degrees=(2, 1), etp_size=2)),
    (4, Case(degrees=(2, 3), etp_size=2)),
    (4, Case(degrees=(2, 2), etp_size=2, schedule="tutel")),
)


@pytest.mark.parametrize(("world_size", "case"), [slow(*IN_EP_RANKS[0]), *IN_EP_RANKS[1:]])
def test_an_exact_codec_within_ep_ranks_changes_nothing(world_size: int, case: Case) -> None:
    codec = InHalves(etp=True)
    for (coded, _), (plain, _) in zip(run(world_size, case, codec), run(world_size, case)):
        assert coded.error_of(plain) <= 1e-12


@pytest.mark.parametrize(("codec", "bound"), [(BFloat16, 2**-8), (Int8, 1 / 254)])
def test_errors_of_a_layer_encoded_within_ep_ranks(codec: type[Codec], bound: float) -> None:
    """Of each summand, too: somewhat more than between EP ranks alone."""
    world_size, case = IN_EP_RANKS[1]
    plain = [results for results, _ in run(world_size, case)]
    errors = [
        max(coded.error_of(each) for (coded, _), each in zip(run(world_size, case, own), plain))
        for own in (codec(), codec(etp=True))
    ]
    assert bound / 10 < errors[0] < 8 * bound
    assert bound / 10 < errors[1] < 12 * bound
    assert errors[0] != errors[1]


def _row_bytes(rank: int, world_size: int, case: Case, hooks: Hooked) -> RowBytes:
    layer = layer_of(world_size, case, LayerOptions(hooks=hooks))
    layer(torch.ones(T, D, dtype=torch.float64))
    return layer.routed.row_bytes


def test_layers_know_what_their_rows_weigh() -> None:
    """Means of four trips, of float64."""
    case = Case(etp_size=2)
    whole, coded = 8 * D, D + 4
    for codecs, expected in (
        ((), (whole, whole)),
        ((Int8(),), (coded, whole)),
        ((Int8(etp=True),), (coded, coded)),
        ((Int8(gradients=False, etp=True),), ((coded + whole) / 2,) * 2),
        ((Int8(combine=False),), ((coded + whole) / 2, whole)),
        ((BFloat16(combine=False), Int8(dispatch=False)), ((2 * D + coded) / 2, whole)),
    ):
        (found, _) = pool_of(2).run(_row_bytes, case, Hooked(codecs=codecs))
        assert found == expected


@pytest.mark.parametrize("codec", [Int8(dispatch=False), Int8(combine=False)], ids=str)
def test_one_direction_alone_is_encoded(codec: Codec) -> None:
    """The output is off by the error of the rows' way that is encoded; the gradient by its own."""
    case = Case(degrees=(2, 2))
    both, one, plain = run(2, case, Int8()), run(2, case, codec), run(2, case)
    for (all_coded, _), (coded, _), (exact, _) in zip(both, one, plain):
        for name in ("y", "x"):
            assert not torch.equal(coded[name], exact[name])
            assert not torch.equal(coded[name], all_coded[name])


@pytest.mark.parametrize("are_encoded", [False, True])
def test_gradients_travel_encoded_or_plain(are_encoded: bool) -> None:
    """What the experts learn depends on the rows that come, here exact, and on the gradients."""
    case = Case(degrees=(2, 2), has_own_gate=False)
    codec = Int8(dispatch=False, gradients=are_encoded)
    for (coded, _), (exact, _) in zip(run(2, case, codec), run(2, case)):
        assert not torch.equal(coded["y"], exact["y"])
        for name in ("weight 1", "weight 2"):  # of experts
            assert (relative_error(coded[name], exact[name]) <= 1e-12) != are_encoded


def test_where_nothing_travels_nothing_is_encoded() -> None:
    ((coded, _),) = run(1, Case(degrees=(2, 2)), Int8())
    ((plain, _),) = run(1, Case(degrees=(2, 2)))
    assert coded.error_of(plain) == 0


@dataclass(frozen=True, kw_only=True)
class LosesRows(Same):
    def encode(self, rows_ND: Tensor) -> Tensor:
        return rows_ND[1:]


@dataclass(frozen=True, kw_only=True)
class Widens(Same):
    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return torch.cat((arrived_RB, arrived_RB), dim=1)


@dataclass(frozen=True, kw_only=True)
class Retypes(Same):
    def decode(self, arrived_RB: Tensor, like_ND: Tensor) -> Tensor:
        return arrived_RB.half()


@pytest.mark.parametrize("codec", [LosesRows(), Widens(), Retypes()], ids=str)
def test_a_codec_that_breaks_rows_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=rf"{type(codec).__name__}.*must keep the number of rows"):
        codec.of_rows.around(lambda rows: rows, torch.zeros(3, D))


# Codecs alone.


def there_and_back(codec: Codec, rows_ND: Tensor) -> Tensor:
    return codec.of_rows.around(lambda encoded: encoded, rows_ND)


ROWS = st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(-30, 30), st.integers(0, 99))
DTYPES = st.sampled_from([torch.float32, torch.float64])


def drawn(shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Rows ``[N, D]``, each of its own order of magnitude around 10 to the third of them."""
    num_rows, width, exponent, seed = shape
    generator = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    scale_N1 = 10.0 ** (exponent + torch.randint(-3, 4, (num_rows, 1), generator=generator))
    return (rows_ND * scale_N1).to(dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ROWS, DTYPES)
def test_error_of_bfloat16(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Half of the last of 8 bits: 2^-8 of each number."""
    rows_ND = drawn(shape, dtype)
    error_ND = (there_and_back(BFloat16(), rows_ND) - rows_ND).abs()
    assert (error_ND <= rows_ND.abs() * 2**-8).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ROWS, DTYPES)
def test_error_of_int8(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Half a step, of 127 to the largest of the row; and the rounding of float32."""
    rows_ND = drawn(shape, dtype)
    error_ND = (there_and_back(Int8(), rows_ND) - rows_ND).abs()
    largest_N1 = rows_ND.abs().amax(dim=1, keepdim=True)
    assert (error_ND <= largest_N1 / 254 * (1 + 2**-15)).all()


def test_error_of_int8_in_bfloat16() -> None:
    """What is decoded is rounded once more."""
    rows_ND = drawn((50, 64, 0, 1), torch.bfloat16)
    error_ND = (there_and_back(Int8(), rows_ND) - rows_ND).abs().double()
    largest_N1 = rows_ND.abs().amax(dim=1, keepdim=True).double()
    assert (error_ND <= largest_N1 * (1 / 254 + 2**-8)).all()


def test_mean_errors_of_normal_rows() -> None:
    """As docs/hooks.md gives them: root of the mean square, over that of the rows."""
    rows_ND = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))

    def error(codec: Codec) -> float:
        return float((there_and_back(codec, rows_ND) - rows_ND).norm() / rows_ND.norm())

    assert error(BFloat16()) == pytest.approx(0.0017, rel=0.05)
    assert error(Int8()) == pytest.approx(0.0079, rel=0.05)


def test_bytes_of_a_row() -> None:
    rows_ND = torch.randn(3, D)
    assert BFloat16().encode(rows_ND).nbytes == 3 * 2 * D
    assert Int8().encode(rows_ND).nbytes == 3 * (D + 4)


def test_rows_of_zeros_and_what_is_not_finite() -> None:
    zero_ND = torch.zeros(2, D)
    for codec in (BFloat16(), Int8()):
        assert torch.equal(there_and_back(codec, zero_ND), zero_ND)
        for number in (math.inf, -math.inf, math.nan):
            rows_ND = torch.ones(2, D)
            rows_ND[0, 3] = number
            decoded_ND = there_and_back(codec, rows_ND)
            assert not decoded_ND[0].isfinite().all()
            assert decoded_ND[1].isfinite().all()


# By name.

HERE = "tests.test_hooks"


@dataclass(frozen=True)
class Every(Hooks):
    """An observer with a key."""

    steps: int = 10
    in_backward: bool = False


def test_hooks_are_read_by_name() -> None:
    hooked = read_hooks(
        [
            {"type": "int8", "combine": False},
            f"{HERE}:Notes",
            {"type": f"{HERE}:Every", "steps": 5},
            {"type": f"{HERE}:Same", "dispatch": False},
        ],
        "hooks",
    )
    notes, every = hooked.observers
    assert isinstance(notes, Notes)
    assert every == Every(steps=5)
    assert (hooked.of_dispatch, hooked.of_combine) == (Int8(combine=False), Same(dispatch=False))


def test_the_block_takes_them() -> None:
    document = {"ds_moe_ext": {"enabled": True, "hooks": ["bf16"]}}
    assert read_settings(document)[0].hooks == Hooked(codecs=(BFloat16(),))
    for none in (None, []):
        assert read_settings({"ds_moe_ext": {"hooks": none}})[0].hooks == Hooked()


def test_what_an_observer_may_do_is_reported() -> None:
    hooks = read_hooks(["int8", f"{HERE}:Counts"], "hooks")
    assert hooks.rule.startswith("hooks: Counts may read and clone tensors")
    assert Hooked(codecs=(Int8(),)).rule == ""


def refusals() -> Iterator[tuple[Any, str, str, str]]:
    yield "int8", "hooks", "is 'int8'", "must be a list"
    yield [3], "hooks[0]", "is 3", "must be an object"
    yield ["bf16", {"combine": True}], "hooks[1]", "'type'", "add it: 'bf16', 'int8'"
    yield [{"type": None}], "hooks[0].type", "is None", "must be a string"
    yield ["int9"], "hooks[0]", "is 'int9'", "did you mean 'int8'?"
    yield ["zip"], "hooks[0]", "is 'zip'", "hooks of your own are 'my_package.my_module:MyHooks'"
    yield [{"type": "int8", "combin": 1}], "hooks[0]", "'combin'", "did you mean 'combine'?"
    yield [{"type": "int8", "combine": 1}], "hooks[0].combine", "is 1", "must be true or false"
    yield ["no.such:Hook"], "hooks[0]", "'no.such:Hook'", "give the importable module"
    yield [f"{HERE}:Note"], "hooks[0]", "Note'", "give the importable module"
    yield ["json:JSONDecoder"], "hooks[0]", "is not a hook", "derive it from ds_moe_ext.moe.hooks"
    yield [f"{HERE}:HERE"], "hooks[0]", "is not a hook", "derive it from"
    yield ["ds_moe_ext.moe.codecs:Codec"], "hooks[0]", "is not a hook", "let it encode and decode"
    yield [{"type": f"{HERE}:Notes", "a": 1}], "hooks[0]", "no key 'a'", "make"
    yield [f"{HERE}:Needy"], "hooks[0]", "cannot be made", "make it a dataclass"
    yield ["bf16", "int8"], "hooks", "both encode the rows of dispatch", "set 'dispatch' to false"
    both = [{"type": "bf16", "dispatch": False}, "int8"]
    yield both, "hooks", "both encode the rows of combine", "set 'combine' to false"


class Needy(Hooks):
    """Cannot be made from JSON."""

    def __init__(self, path: str) -> None:
        self.path = path


@pytest.mark.parametrize(("values", "key", "shown", "remedy"), list(refusals()))
def test_refused_in_one_sentence(values: Any, key: str, shown: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_settings({"ds_moe_ext": {"enabled": True, "hooks": values}})
    message = str(caught.value)
    assert message.startswith(f"ds_moe_ext.{key}")
    assert shown in message
    assert remedy in message
    assert len(message.splitlines()) == 1


def test_examples_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "hooks.md").read_text()
    scope: dict[str, Any] = {"__name__": HERE}
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(example, scope)
    rows_ND = torch.randn(20, D, generator=torch.Generator().manual_seed(0))
    assert relative_error(there_and_back(scope["Float8"](), rows_ND), rows_ND) < 2**-4
    observers = (scope["Sizes"](),)
    Hooked(observers).notify(Hook.AFTER_DISPATCH, Moe(1, "a"), Batch(rows_ND))
    assert capsys.readouterr().out == "1 a None 20\n"


# Under a DeepSpeed engine.


SEEN: Counter[tuple[str, int, bool]] = Counter()
"""By a rank: calls of ``Counts``, by module, width and direction."""


class Counts(Hooks):
    """Counts chunks that arrive."""

    def after_dispatch_hook(self, moe: Moe, batch: Batch) -> None:
        SEEN[moe.name, batch.data.shape[1], batch.is_backward] += 1


def _trained(
    rank: int, world_size: int, job: jobs.Job, hooks: tuple[Any, ...]
) -> tuple[jobs.Result | None, Counter[tuple[str, int, bool]]]:
    def document_of(job: jobs.Job, world_size: int) -> dict[str, Any]:
        document = _document_of(job, world_size)
        document["ds_moe_ext"]["hooks"] = list(hooks)
        return document

    SEEN.clear()
    with mock.patch.object(jobs, "document_of", document_of):
        return jobs.train(rank, world_size, job), Counter(SEEN)


_document_of = jobs.document_of


def engine_run(job: jobs.Job, *hooks: Any) -> tuple[jobs.Result, Counter[tuple[str, int, bool]]]:
    result, seen = pool_of(2).run(_trained, job, hooks)[0]
    return result, seen


STRATEGIES = {
    "esp": (("degree", 2), ("slice_gradients", False)),
    "fssdp": (("replicas_per_rank", 1),),
    "prophet": (),
}


@pytest.mark.parametrize("strategy", [slow("esp"), "fssdp", slow("prophet")])
def test_an_engine_trains_alike_with_observers_and_exact_codecs(strategy: str) -> None:
    job = jobs.Job("mixtral", 0, dtype="float64", steps=4, strategy=strategy)
    job = replace(job, keys=STRATEGIES[strategy])
    plain, _ = engine_run(job)
    hooked, seen = engine_run(job, f"{HERE}:Counts", f"{HERE}:InHalves")
    assert hooked.losses == pytest.approx(plain.losses, rel=1e-12)
    degree = dict(job.keys).get("degree", 1)
    chunks = 4 * 2 * degree  # steps, micro-batches of a rank, chunks
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert seen == {(name, 32, back): chunks for name in names for back in (False, True)}


@pytest.mark.parametrize("name", [slow("bf16"), "int8"])
def test_an_engine_trains_with_compressed_rows(name: str) -> None:
    job = jobs.Job("mixtral", 1, clip=0.5, steps=8)
    plain, _ = engine_run(job)
    coded, _ = engine_run(job, name)
    assert coded.losses != plain.losses
    assert coded.losses == pytest.approx(plain.losses, rel=5e-3)
    assert coded.norms == pytest.approx(plain.norms, rel=0.05)


def _warnings(rank: int, world_size: int, job: jobs.Job, *hooks: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trained(rank, world_size, job, hooks or ("int8",))
    return [str(each.message) for each in caught if "ds_moe_ext.hooks" in str(each.message)]


def test_a_codec_without_effect_is_reported_once() -> None:
    """All experts are on each rank: rows travel nowhere."""
    results = pool_of(2).run(_warnings, jobs.Job("mixtral", 1, steps=1, ep_ranks=1))
    assert [len(messages) for messages in results] == [1, 0]
    assert "has no effect: there is one EP rank" in results[0][0]
    assert "raise expert_parallel_size" in results[0][0]


def test_keys_of_a_codec_without_effect_are_reported() -> None:
    """No rank splits experts, and `ep` copies none."""
    everywhere = {"type": "int8", "etp": True, "replicas": True}
    results, _ = pool_of(2).run(_warnings, jobs.Job("mixtral", 1, steps=1), everywhere)
    in_etp_groups, of_replicas = results
    assert "'etp' of" in in_etp_groups and "raise expert_sharding_size" in in_etp_groups
    assert "strategy 'ep' makes no replicas" in of_replicas
