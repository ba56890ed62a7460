# SPDX-License-Identifier: Apache-2.0
"""Dense gradients reduced in slices within backward, under real DeepSpeed engines.

The model is dense; between its blocks stand windows that do in backward what an MoE layer does:
they reduce a slice in the stream between EP ranks, while backward waits, and begin another beside
what follows. Shape letters: B rows of a batch, D model width.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_moe_ext.hosts.attachment.notices import SLICES, settle
from ds_moe_ext.hosts.deepspeed.gradients import GradientSlices
from ds_moe_ext.hosts.deepspeed.refusals import UNSLICED
from ds_moe_ext.schedule.executor import streams_for
from ds_moe_ext.schedule.task import COMPUTE, INTER
from ds_moe_ext.strategies.esp import ExpertSharding
from tests.hosts import jobs
from tests.hosts.jobs import Job
from tests.hosts.tensor_parallel import Mpu
from tests.hosts.varied import VARIED
from tests.marks import slow
from tests.ranks import pool_of

KEY = ExpertSharding().keys.slices_gradients

B, D, BLOCKS = 4, 8, 3

Sizes = Callable[[int, int], tuple[int, int]]
"""``(pass, window) -> elements to reduce in the window and to begin after it``."""


class Windows:
    """What the layers of a model ask of their slices."""

    def __init__(self, sizes: Sizes, *, is_inline: bool = False) -> None:
        self.slices: Any = None
        self.sizes = sizes
        self.is_inline = is_inline
        self.passes = 0

    def run(self, window: int) -> None:
        """As an MoE layer's program does: two streams, and the caller waits for both."""
        if self.slices is None:
            return
        within, beside = self.sizes(self.passes, window)
        streams = streams_for(torch.device("cpu"), overlaps=not self.is_inline)
        reduced = streams.submit(INTER, lambda: self.slices.reduce(within), ())
        begun = streams.submit(COMPUTE, lambda: self.slices.begin(beside), [reduced])
        streams.join([reduced, begun])


class _Window(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, windows: Windows, window: int) -> Tensor:
        ctx.windows, ctx.window = windows, window
        return x_BD.view_as(x_BD)

    @staticmethod
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor, None, None]:
        ctx.windows.run(ctx.window)
        return grad_BD, None, None


class Dense(nn.Module):
    """Blocks with a window between each two, and before the first."""

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.windows = windows
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(D, 3)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BD = self.first(x_BD)
        for window, block in enumerate(self.blocks):
            x_BD = _Window.apply(x_BD, self.windows, window)
            x_BD = x_BD + block(x_BD)
        return self.head(_Window.apply(x_BD, self.windows, BLOCKS)).square().mean()


NUM_ELEMENTS = sum(p.numel() for p in Dense(Windows(lambda *_: (0, 0))).parameters())


@dataclass(frozen=True)
class Case:
    stage: int = 2
    overlap: bool = False
    accumulate: int = 1
    clip: float = 0.0
    dtype: str = "float32"
    sums: str | None = None  # data_types.grad_accum_dtype
    travels: str | None = None  # communication_data_type
    bucket: int = 10**6
    sizes: str = "planned"
    piece_bytes: int | None = None
    steps: int = 8
    no_sync: bool = False  # reduce in the last micro-batch only, where each is a boundary
    coalesce: bool = False  # reduce once after all micro-batches
    managed: bool = True
    tensor_parallel: int = 1
    is_inline: bool = False  # windows run in the thread of backward, not in streams
    zero: tuple[tuple[str, Any], ...] = ()

    @property
    def passes(self) -> int:
        """Reductions of all gradients, a step."""
        is_once = self.coalesce or (self.stage < 2 and self.managed)
        return 1 if is_once else self.accumulate


def _random(passes: int, window: int) -> tuple[int, int]:
    dice = random.Random(100 * passes + window)
    return dice.choice((0, 1, dice.randrange(400), 10**9)), dice.choice((0, 1, 77, 10**9))


SIZES: dict[str, Sizes] = {
    "planned": lambda passes, window: (128, 100),
    "none": lambda passes, window: (0, 0),
    "one": lambda passes, window: (1, 1),
    "odd": lambda passes, window: (37, 13),
    "all in windows": lambda passes, window: (10**9, 0),
    "all beside": lambda passes, window: (0, 10**9),
    "random": _random,
}


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: list[Tensor]
    reduced: list[Any]  # so far, after each step


def engine_of(case: Case, windows: Windows, is_sliced: bool) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Dense(windows)
    if case.dtype == "float64":
        model.double()
    zero = {"stage": case.stage, "overlap_comm": case.overlap, "reduce_bucket_size": case.bucket}
    document = {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": 1 if case.no_sync or case.coalesce else case.accumulate,
        "managed_gradient_accumulation": case.managed,
        "gradient_clipping": case.clip,
        "zero_optimization": {**zero, **dict(case.zero)},
        "bf16": {"enabled": case.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": case.sums},
        "communication_data_type": case.travels,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    }
    with sliced(windows, case.piece_bytes) if is_sliced else nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=document,
            mpu=Mpu.of(case.tensor_parallel) if case.tensor_parallel > 1 else None,
        )
    return engine


@contextmanager
def sliced(
    windows: Windows, piece_bytes: int | None = None, *, blocks: str | None = None
) -> Iterator[None]:
    """Engines get slices where their layers are replaced."""
    from ds_moe_ext.hosts.deepspeed import engine as replacing
    from ds_moe_ext.hosts.deepspeed import gradients

    replace_layers = replacing.replace_layers

    def replace_then_slice(engine: Any, model: nn.Module, sources: Any) -> None:
        replace_layers(engine, model, sources)
        windows.slices = GradientSlices.of(engine, piece_bytes, key=KEY)
        gradients.begin_record(engine).slices = windows.slices
        for window, block in enumerate(model.get_submodule(blocks).children() if blocks else ()):
            block.register_full_backward_hook(lambda *_, window=window: windows.run(window))

    with mock.patch.object(replacing, "replace_layers", replace_then_slice):
        yield


def batch(rank: int, number: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(B, D, generator=generator).to(dtype)


def train(rank: int, world_size: int, case: Case, is_sliced: bool) -> Trained:
    from deepspeed.utils import groups

    windows = Windows(SIZES[case.sizes], is_inline=case.is_inline)
    engine = engine_of(case, windows, is_sliced)
    dtype = next(engine.module.parameters()).dtype
    losses, norms, reduced = [], [], []
    for step in range(case.steps):
        with engine.coalesce_grad_reduction() if case.coalesce else nullcontext():
            for micro in range(case.accumulate):
                is_last = micro == case.accumulate - 1
                with engine.no_sync() if case.no_sync and not is_last else nullcontext():
                    loss = engine(batch(rank, step * case.accumulate + micro, dtype))
                    engine.backward(loss)
                windows.passes += 1
                if not (case.coalesce or case.no_sync):
                    engine.step()
                losses.append(float(loss.detach()))
        if case.coalesce or case.no_sync:
            engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        reduced.append(windows.slices and windows.slices.reduced)
    groups.mpu = None  # or later engines would take it for theirs
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    return Trained(losses, norms, weights, reduced)


def both(rank: int, world_size: int, case: Case) -> tuple[Trained, Trained]:
    return train(rank, world_size, case, False), train(rank, world_size, case, True)


def check(case: Case, world_size: int, *, rel: float) -> list[Trained]:
    """Train with and without slices; the sliced runs of all ranks."""
    sliced = []
    for plain, got in pool_of(world_size).run(both, case):
        assert got.losses == pytest.approx(plain.losses, rel=rel, abs=0.0)
        assert got.norms == pytest.approx(plain.norms, rel=rel, abs=0.0)
        assert case.stage == 0 or max(plain.norms) > 0.0
        for weight, expected in zip(got.weights, plain.weights):
            torch.testing.assert_close(weight, expected, rtol=rel, atol=0.0)
        totals = [reduced.elements for reduced in got.reduced]
        passes = range(case.passes, case.passes * case.steps + 1, case.passes)
        assert totals == [NUM_ELEMENTS * number for number in passes]
        sliced.append(got)
    return sliced


QUICK = ((1, True, 2), (2, False, 1))
ENGINES = [
    case if (case := (stage, overlap, accumulate)) in QUICK else slow(*case)
    for stage in (0, 1, 2)
    for overlap in (False, True)
    for accumulate in (1, 2)
    if stage or not overlap
]


@pytest.mark.parametrize("stage, overlap, accumulate", ENGINES)
def test_two_ranks_train_bit_equal(stage: int, overlap: bool, accumulate: int) -> None:
    """A sum of two is the same in any cut, so that every bit has to be."""
    case = Case(stage, overlap, accumulate, clip=0.05, bucket=500)
    for got in check(case, 2, rel=0.0):
        reduced = got.reduced[-1]
        assert reduced.within_moe and reduced.beside_dense and reduced.tail


@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("stage, overlap", [slow(1, False), (2, True)])
def test_any_sizes_are_taken_once(sizes: str, stage: int, overlap: bool) -> None:
    """None, single elements, cuts within a gradient, and more than is ready."""
    got, _ = check(Case(stage, overlap, sizes=sizes, steps=4), 2, rel=0.0)
    reduced = got.reduced[-1]
    assert bool(reduced.within_moe) == (sizes not in {"none", "all beside"})
    assert bool(reduced.beside_dense) == (sizes not in {"none", "all in windows"})
    assert bool(reduced.num_slices) == (sizes != "none")


@pytest.mark.parametrize("stage", [slow(0), 2])
def test_slices_without_streams(stage: int) -> None:
    """A slice that was begun still runs in a stream: the next one waits for it."""
    check(Case(stage, sizes="planned", is_inline=True, steps=4), 2, rel=0.0)


BFLOAT16 = Case(dtype="bfloat16", clip=0.05, steps=4)
TYPES = [
    slow(replace(BFLOAT16, stage=0)),
    slow(replace(BFLOAT16, stage=0, travels="fp32")),
    slow(replace(BFLOAT16, stage=1)),
    slow(replace(BFLOAT16, stage=1, overlap=True, accumulate=2)),
    slow(replace(BFLOAT16)),
    slow(replace(BFLOAT16, sums="fp32", accumulate=2)),
    replace(BFLOAT16, sums="fp32", travels="fp32", overlap=True),
    slow(replace(BFLOAT16, stage=1, travels="fp32")),
    slow(Case(stage=1, dtype="float64", clip=0.05, steps=4)),
    Case(stage=2, travels="bf16", steps=4),
]


@pytest.mark.parametrize("case", TYPES, ids=lambda c: f"{c.stage}-{c.dtype}-{c.sums}-{c.travels}")
def test_any_types_train_bit_equal(case: Case) -> None:
    check(replace(case, sizes="random"), 2, rel=0.0)


ZERO = [
    ("reduce_bucket_size", 100),
    ("use_multi_rank_bucket_allreduce", False),
    ("round_robin_gradients", True),
    ("ignore_unused_parameters", False),
]
CROSSED = ("reduce_bucket_size", "round_robin_gradients")
"""Which are quick with ``overlap_comm``; the others without."""


@pytest.mark.parametrize(
    "stage, overlap, key, value",
    [
        case if overlap == (key in CROSSED) and stage == 2 else slow(*case)
        for key, value in ZERO
        for stage in (1, 2)
        for overlap in (False, True)
        if (case := (stage, overlap, key, value))
    ],
)
def test_settings_of_zero(stage: int, overlap: bool, key: str, value: Any) -> None:
    """Among them buckets that are smaller than a gradient."""
    check(Case(stage, overlap, steps=2, clip=0.05, zero=((key, value),)), 2, rel=0.0)


@pytest.mark.slow  # two do quickly
@pytest.mark.parametrize("stage, overlap", [(1, False), (1, True), (2, False), (2, True)])
def test_four_ranks_train_bit_equal(stage: int, overlap: bool) -> None:
    """In which order four summands are added depends on the cut; but in float32 a sum of four that
    have the digits of bfloat16 is exact in any order."""
    case = replace(BFLOAT16, stage=stage, overlap=overlap, travels="fp32", sizes="random")
    for got in check(replace(case, accumulate=2, bucket=500, steps=4), 4, rel=0.0):
        assert got.reduced[-1].within_moe


@pytest.mark.parametrize("stage", [slow(0), slow(1), 2])
def test_dense_weights_of_tensor_parallel_ranks(stage: int) -> None:
    """Each is reduced over the ranks that have the same; here the others get other batches too."""
    check(Case(stage, sizes="random", steps=2, tensor_parallel=2), 4, rel=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_three_ranks_train_bit_equal(stage: int) -> None:
    """A third is not the same in every type, nor by a factor as by a divisor."""
    check(replace(BFLOAT16, stage=stage, travels="fp32", sizes="random"), 3, rel=0.0)


@pytest.mark.slow  # two do quickly
@pytest.mark.parametrize("case", [Case(2, True), Case(1), Case(1, True)])
def test_four_ranks_to_the_last_digits(case: Case) -> None:
    check(replace(case, clip=0.05, sizes="random", steps=2), 4, rel=1e-5)


BOUNDARIES = [
    slow(Case(0, False, 2, no_sync=True)),
    Case(1, False, 2, no_sync=True),
    slow(Case(1, False, 2, coalesce=True)),
    Case(1, True, 2, coalesce=True),
    Case(2, False, 2, coalesce=True),
    slow(Case(1, False, 2, managed=False)),
    Case(2, False, 2, managed=False),
]


@pytest.mark.parametrize("case", BOUNDARIES)
def test_any_way_to_accumulate(case: Case) -> None:
    """Gradients that are not reduced yet are in no slice."""
    got, _ = check(replace(case, steps=3, clip=0.05), 2, rel=0.0)
    is_within = case.no_sync or (case.stage == 2 and not case.coalesce)
    assert bool(got.reduced[-1].within_moe) == is_within


OFFLOADED = Case(clip=0.05, bucket=500, zero=(("offload_optimizer", {"device": "cpu"}),))


@pytest.mark.slow
@pytest.mark.parametrize("sums", [None, "fp32"])
@pytest.mark.parametrize("stage, overlap, accumulate", ENGINES[2:])
def test_gradients_on_their_way_to_host_memory(
    stage: int, overlap: bool, accumulate: int, sums: str | None
) -> None:
    case = replace(OFFLOADED, stage=stage, overlap=overlap, accumulate=accumulate, sums=sums)
    check(case if sums is None else replace(case, dtype="bfloat16"), 2, rel=0.0)


@pytest.mark.parametrize("sizes", ["all beside", "random"])
def test_fixed_pieces(sizes: str) -> None:
    """What does not fill a piece waits for more, and the tail has the rest."""
    for travels, itemsize in ((None, 4), ("bf16", 2)):
        case = Case(sizes=sizes, piece_bytes=64 * itemsize, travels=travels, steps=2)
        got, _ = check(case, 2, rel=0.0)
        in_slices = got.reduced[-1].within_moe + got.reduced[-1].beside_dense
        assert in_slices == 64 * got.reduced[-1].num_slices > 0


WAIT_S = 20.0


def overlapping(rank: int, world_size: int, case: Case) -> tuple[Trained, Trained, list[int]]:
    """Train, but the first slice begun does not end before a gradient of the block that follows
    has become ready; nor does backward go on from there before the slice has begun."""
    from ds_moe_ext.hosts.deepspeed import gradients

    begun, may_end = threading.Event(), threading.Event()
    ready: list[int] = []
    sum_in_place, add = gradients.sum_in_place, gradients.GradientSlices.add

    def held(total: Tensor, group: Any) -> Tensor:
        begun.set()
        assert may_end.wait(WAIT_S), "backward waited for what it had begun"
        return sum_in_place(total, group)

    def seen(self: gradients.GradientSlices, gradient: gradients.Gradient) -> None:
        add(self, gradient)
        if self.reduced.beside_dense and not may_end.is_set():
            assert begun.wait(WAIT_S), "the slice did not begin beside backward"
            ready.append(self.ready_elements)
            if len(ready) == 3:
                may_end.set()

    with (
        mock.patch.object(gradients, "sum_in_place", held),
        mock.patch.object(gradients.GradientSlices, "add", seen),
    ):
        got = train(rank, world_size, case, True)
    return train(rank, world_size, case, False), got, ready


@pytest.mark.parametrize("stage, overlap", [(1, False), (2, False), (2, True)])
def test_dense_slices_run_beside_backward(stage: int, overlap: bool) -> None:
    case = Case(stage, overlap, sizes="all beside", steps=1)
    for plain, got, ready in pool_of(2).run(overlapping, case):
        # Three gradients of the block became ready while the slice was under way.
        assert ready == [D, D + 4 * D * D, D + 4 * D * D + 4 * D]
        assert got.norms == plain.norms
        assert all(map(torch.equal, got.weights, plain.weights))


def kept_within(rank: int, world_size: int, stage: int) -> list[int]:
    """Elements that ZeRO has taken back at each window of a backward, in which all is sliced."""
    kept: list[int] = []

    def sizes(passes: int, window: int) -> tuple[int, int]:
        zero = engine.optimizer
        numbers = [n for n, is_reduced in enumerate(zero.params_already_reduced) if is_reduced]
        kept.append(sum(zero.param_dict[n].numel() for n in numbers))
        others = [n for n in numbers if not zero.is_param_in_current_partition[n]]
        assert stage == 1 or all(zero.param_dict[n].grad is None for n in others)
        return 10**9, 0

    windows = Windows(sizes)
    engine = engine_of(Case(stage), windows, True)
    engine.backward(engine(batch(rank, 0, torch.float32)))
    return kept


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_go_back_within_backward(stage: int) -> None:
    """ZeRO 2 has each rank keep its part only; slices do not put that off to the end."""
    head, block = 3 * D + 3, 2 * D + 8 * D * D + 5 * D
    for kept in pool_of(2).run(kept_within, stage):
        assert kept == [0, head, head + block, head + 2 * block]


def sent_by_deepspeed(rank: int, world_size: int, stage: int) -> int:
    """Elements that DeepSpeed all-reduces in a backward in which windows take all there is."""
    from deepspeed import comm

    sizes: list[int] = []
    all_reduce = comm.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    engine = engine_of(Case(stage), Windows(SIZES["all in windows"]), True)
    with mock.patch.object(comm, "all_reduce", noted):
        engine.backward(engine(batch(rank, 0, torch.float32)))
    return sum(sizes)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_is_sent_twice(stage: int) -> None:
    """What becomes ready after the last window is left to DeepSpeed: the first weights."""
    assert pool_of(2).run(sent_by_deepspeed, stage) == [D * D + D] * 2


def with_experts(rank: int, world_size: int, job: Job, is_sliced: bool) -> tuple[Any, Any]:
    """A job whose blocks reduce gradients after their backward."""
    windows = Windows(SIZES["random"])
    with sliced(windows, blocks="blocks") if is_sliced else nullcontext():
        result = jobs.train(rank, world_size, job)
    return result, windows.slices and windows.slices.reduced


UNEVEN = {"strategy": VARIED, "keys": (("replicas", 0.3), ("shard_every", 1))}


@pytest.mark.slow  # sharded gradients are in test_configurations.py, quickly
@pytest.mark.parametrize(
    "stage, overlap, strategy",
    [
        *((0, False, {}), (1, False, {}), (2, True, {})),
        *((1, True, UNEVEN), (2, False, UNEVEN)),
    ],
)
def test_experts_are_not_sliced(stage: int, overlap: bool, strategy: dict[str, Any]) -> None:
    """They are reduced as they were, and last where ranks have unequal numbers of them; one may be
    larger than a bucket."""
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 100}
    extra = (("zero_optimization", zero),)
    job = Job(family="toy", steps=3, stage=stage, clip=0.05, extra=extra, **strategy)
    (expected, _), _ = pool_of(2).run(with_experts, job, False)
    (got, reduced), _ = pool_of(2).run(with_experts, job, True)
    assert got.losses == expected.losses and got.norms == expected.norms
    assert got.state.keys() == expected.state.keys()
    assert all(torch.equal(got.state[name], expected.state[name]) for name in expected.state)
    dense = sum(v.numel() for name, v in expected.state.items() if ".experts." not in name)
    passes = 2 if stage == 2 else 1  # of two micro-batches
    assert reduced.elements == dense * passes * job.steps
    assert reduced.within_moe and reduced.beside_dense and reduced.tail


class Twice(nn.Module):
    """A weight whose gradient becomes ready twice."""

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x_BD: Tensor) -> Tensor:
        for _ in range(2):
            x_BD = checkpoint(self.linear, x_BD.requires_grad_(), use_reentrant=True)
        return x_BD.square().mean()


def ready_twice(rank: int, world_size: int, stage: int) -> str:
    with mock.patch(f"{__name__}.Dense", Twice):
        engine = engine_of(Case(stage), Windows(SIZES["none"]), True)
    with pytest.raises(RuntimeError) as error:
        engine.backward(engine(batch(rank, 0, torch.float32)))
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_is_ready_twice(stage: int) -> None:
    for message in pool_of(2).run(ready_twice, stage):
        assert "shape (8, 8) became ready twice" in message or "shape (8,)" in message
        assert "set use_reentrant to false" in message


def less_than_nothing(rank: int, world_size: int) -> str:
    engine = engine_of(Case(1), Windows(lambda *_: (-100, 0)), True)
    with pytest.raises(ValueError) as error:
        engine.backward(engine(batch(rank, 0, torch.float32)))
    return str(error.value)


def test_slices_of_less_than_nothing_are_refused() -> None:
    for message in pool_of(2).run(less_than_nothing):
        assert "a slice of -100 dense gradients; slices (reductions of a Plan) have 0" in message


def one_rank_leaves_out(rank: int, world_size: int) -> str:
    engine = engine_of(Case(0), Windows(SIZES["planned"]), True)
    with pytest.raises(RuntimeError) as error:
        for number in range(2):
            if rank == number == 1:
                engine.module.blocks[1].forward = torch.zeros_like
            engine.backward(engine(batch(rank, number, torch.float32)))
            engine.step()
    return f"after {engine.global_steps} steps: {error.value}"


def test_ranks_that_use_other_weights() -> None:
    """DeepSpeed alone could do it at ZeRO 0: in slices other gradients would be summed."""
    for message in pool_of(2).run(one_rank_leaves_out):
        assert message.startswith("after 1 steps: ranks have gradients of different dense weights")


def refused(rank: int, world_size: int, case: Case) -> str:
    """What an error says where slices are asked for; where nobody asks, they are left out."""
    engine, lines = engine_of(case, Windows(SIZES["none"]), False), list[str]()
    assert not settle(SLICES, ExpertSharding(), UNSLICED, engine, lines.append).slices_gradients
    assert len(lines) == 1
    with pytest.raises(ValueError) as error:
        settle(SLICES, ExpertSharding(slice_gradients=True), UNSLICED, engine, lines.append)
    return str(error.value)


@pytest.mark.parametrize(
    "case, expected",
    [
        (Case(3), "zero_optimization.stage is 3"),
        (Case(1, dtype="bfloat16", sums="fp32"), "use stage 2, or leave out data_types"),
        (Case(1, zero=(("contiguous_gradients", False),)), "contiguous_gradients is false"),
        (Case(2, zero=(("reduce_scatter", False),)), "reduce_scatter is false"),
    ],
)
def test_what_cannot_be_sliced_is_refused(case: Case, expected: str) -> None:
    for message in pool_of(2).run(refused, case):
        assert message.startswith("ds_moe_ext.esp.slice_gradients is true, but ")
        assert expected in message
        assert message.endswith("or set ds_moe_ext.esp.slice_gradients to false or null")


class _Engine:
    enable_backward_allreduce = True
    inside_no_sync_ctxt = False


def test_an_engine_is_not_kept_alive() -> None:
    engine = _Engine()
    slices = GradientSlices(engine, cast(Any, None))
    parameter = nn.Parameter(torch.ones(1))
    assert slices.is_awaited(parameter)
    del engine
    assert not slices.is_awaited(parameter)
