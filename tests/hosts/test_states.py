# SPDX-License-Identifier: Apache-2.0
"""States of a parameter are found under every optimizer of DeepSpeed's, and may move to another.

The model of these tests keeps each expert's weights in a slot and gathers all slots in every pass,
so that a table alone says which expert a slot has.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import configure_moe_param_groups
from deepspeed.ops.adam import FusedAdam
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_moe_ext.hosts.deepspeed.parameter_groups import OptimizerStates
from ds_moe_ext.hosts.steps.expert_moves import MASTER, Group, ParameterStates
from tests.marks import slow
from tests.ranks import pool_of

NUM_EXPERTS, WIDTH, HIDDEN = 4, 5, 3  # odd sizes: fragments end inside a weight
SHAPES = ((HIDDEN, WIDTH), (HIDDEN,))  # of an expert's weights


@dataclass(frozen=True)
class Case:
    wrapper: str  # that DeepSpeed chooses
    stage: int
    dtype: str = "float32"
    optimizer: str = "AdamW"
    settings: tuple[tuple[str, Any], ...] = ()  # of zero_optimization
    is_fused: bool = False  # DeepSpeed takes the optimizer for its FusedAdam
    accumulates_in_float32: bool = False
    num_ep_ranks: int = 2

    def __str__(self) -> str:
        extra = "".join(f"-{name}" for name, _ in self.settings)
        return f"{self.wrapper}-{self.stage}-{self.dtype}-{self.optimizer}{extra}"


ZERO = "DeepSpeedZeroOptimizer"
CASES = [
    Case("AdamW", 0),
    Case("SGD", 0, optimizer="SGD"),
    Case("Adagrad", 0, optimizer="Adagrad"),
    Case("FP16_UnfusedOptimizer", 0, "bfloat16"),
    Case("FP16_UnfusedOptimizer", 0, "float16"),
    Case("FP16_Optimizer", 0, "bfloat16", is_fused=True),
    Case("FP16_Optimizer", 0, "float16", is_fused=True),
    Case("BF16_Optimizer", 1, "bfloat16", accumulates_in_float32=True),
    *(Case(ZERO, stage, dtype) for stage in (1, 2) for dtype in ("float32", "bfloat16", "float16")),
    Case(ZERO, 1, optimizer="SGD"),
    Case(ZERO, 2, optimizer="NAdam"),
    Case(ZERO, 2, "bfloat16", settings=(("offload_optimizer", {"device": "cpu"}),)),
    Case(ZERO, 1, settings=(("round_robin_gradients", True), ("parameter_alignment", True))),
]
OPTIONS = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}


class GatherSlots(torch.autograd.Function):
    """A weight of all ranks' slots, ``[ranks x slots, ...]``; each rank's gradients are summed."""

    @staticmethod
    def forward(ctx: Any, *own_S: Tensor) -> Tensor:
        ctx.dtype = own_S[0].dtype
        stacked = torch.stack([own.detach().float() for own in own_S])
        ctx.first = dist.get_rank() * len(own_S)
        parts = [torch.empty_like(stacked) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, stacked)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        num_own = total.shape[0] // dist.get_world_size()
        return tuple(total[ctx.first : ctx.first + num_own].to(ctx.dtype))


class Slots(MoE):
    """Experts in slots: of ``num_ep_ranks`` 2 each rank has half of them, of 1 each rank has
    all."""

    def __init__(self, num_ep_ranks: int) -> None:
        nn.Module.__init__(self)
        self.num_ep_ranks, self.num_experts = num_ep_ranks, NUM_EXPERTS
        self.place_E = list(range(NUM_EXPERTS))
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        whole = [torch.randn(NUM_EXPERTS, *shape) for shape in SHAPES]
        kept = slice(dist.get_rank() * self.num_slots, None) if num_ep_ranks > 1 else slice(None)
        self.weights = nn.ModuleList(
            nn.ParameterList(map(nn.Parameter, weight[kept][: self.num_slots])) for weight in whole
        )
        for parameter in self.weights.parameters():
            parameter.allreduce = False
            parameter.group_name = f"ep_size_{num_ep_ranks}"

    @property
    def num_slots(self) -> int:
        return NUM_EXPERTS // self.num_ep_ranks

    def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
        from deepspeed.utils import groups

        groups._create_expert_and_data_parallel(self.num_ep_ranks)

    def own(self) -> Iterator[tuple[int, tuple[nn.Parameter, ...]]]:
        """This rank's experts: number and parameters."""
        first = dist.get_rank() * self.num_slots if self.num_ep_ranks > 1 else 0
        for slot, parameters in enumerate(zip(*self.weights)):
            yield self.place_E.index(first + slot), parameters

    def forward(self, x: Tensor) -> Tensor:
        up, bias = (
            GatherSlots.apply(*slots) if self.num_ep_ranks > 1 else torch.stack(list(slots)).float()
            for slots in self.weights
        )
        score = self.gate(x.to(self.gate.weight.dtype)).float().softmax(-1)
        y = torch.zeros(len(x), HIDDEN)
        for expert, place in enumerate(self.place_E):
            y = y + score[:, expert, None] * torch.tanh(x @ up[place].T + bias[place])
        return y.square().sum()


def trust_in_float16(job: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed does not let a CPU train in float16, though torch can."""

    @functools.wraps(job)
    def trusting(*args: Any) -> Any:
        from deepspeed.accelerator import get_accelerator

        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        cls = type(get_accelerator())
        with (
            mock.patch.object(cls, "is_fp16_supported", lambda _: True),
            mock.patch.object(cls, "supported_dtypes", lambda _: dtypes),
        ):
            return job(*args)

    return trusting


def engine_of(case: Case) -> Any:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = Slots(case.num_ep_ranks)
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,  # a norm is summed in the order of the slots
        "zero_optimization": {"stage": case.stage, **dict(case.settings)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if case.dtype == "bfloat16":
        document["bf16"] = {"enabled": True}
    if case.dtype == "float16":
        document["fp16"] = {"enabled": True, "loss_scale": 128}
    if case.accumulates_in_float32:
        document["data_types"] = {"grad_accum_dtype": "fp32"}
    cls = vars(torch.optim)[case.optimizer]
    with (
        mock.patch("deepspeed.runtime.engine.FusedAdam", cls if case.is_fused else FusedAdam),
        mock.patch("deepspeed.runtime.bf16_optimizer.see_memory_usage"),  # which takes a second
    ):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            optimizer=lambda parameters: cls(
                configure_moe_param_groups(parameters), lr=0.01, **OPTIONS.get(case.optimizer, {})
            ),
            config=document,
        )
    assert type(engine.optimizer).__name__ == case.wrapper
    return engine


def train(engine: Any, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        loss = engine(torch.randn(2, WIDTH))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


Contents = dict[int, tuple[ParameterStates, ...]]  # of experts, weight by weight


def own_contents(engine: Any) -> Contents:
    states = OptimizerStates(engine)
    return {
        expert: tuple(states.of(parameter).clone() for parameter in parameters)
        for expert, parameters in engine.module.own()
    }


def all_contents(engine: Any) -> Contents:
    """Of the experts of all ranks. Collective."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own_contents(engine))
    return {expert: content for rank in ranks for expert, content in rank.items()}


def move(engine: Any, place_E: list[int]) -> None:
    """Give experts other places. Collective."""
    contents = all_contents(engine)
    engine.module.place_E = place_E
    OptimizerStates(engine).write(
        {
            parameter: given
            for expert, parameters in engine.module.own()
            for parameter, given in zip(parameters, contents[expert])
        }
    )


def numbers_of(contents: Contents) -> dict[tuple[Any, ...], Tensor]:
    return {
        (expert, index, name): torch.as_tensor(value)
        for expert, content in contents.items()
        for index, states in enumerate(content)
        for name, value in (*states.tensors.items(), *states.scalars.items())
    }


def assert_equal(got: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def weights_agree(engine: Any) -> bool:
    """This rank's experts are their masters, rounded."""
    states = OptimizerStates(engine)
    return all(
        torch.equal(
            parameter.data.view(-1), states.of(parameter).tensors[MASTER].to(parameter.dtype)
        )
        for _, parameters in engine.module.own()
        for parameter in parameters
    )


MOVES = {
    "one rank": [1, 0, 2, 3],
    "across ranks": [2, 1, 0, 3],
    "all": [3, 0, 1, 2],
}


@trust_in_float16
def trained_with_moves(rank: int, world_size: int, case: Case, moves: dict[int, list[int]]) -> Any:
    engine = engine_of(case)
    losses, agree = [], []
    for step in range(4):
        if step in moves:
            move(engine, moves[step])
            agree.append(weights_agree(engine))
        losses += train(engine, [step])
    return losses, numbers_of(all_contents(engine)), all(agree)


QUICK = (
    *(Case("AdamW", 0), Case("FP16_UnfusedOptimizer", 0, "float16")),
    Case("FP16_Optimizer", 0, "bfloat16", is_fused=True),
    Case("BF16_Optimizer", 1, "bfloat16", accumulates_in_float32=True),
    *(Case(ZERO, 1, "float16"), Case(ZERO, 2, "float32"), Case(ZERO, 1, optimizer="SGD")),
    Case(ZERO, 2, "bfloat16", settings=(("offload_optimizer", {"device": "cpu"}),)),
    Case(ZERO, 1, settings=(("round_robin_gradients", True), ("parameter_alignment", True))),
)


@pytest.mark.parametrize("case", [c if c in QUICK else slow(c) for c in CASES], ids=str)
def test_experts_that_move_train_on_bit_by_bit(case: Case) -> None:
    """Before the first step, after it, and once more; on one rank and across ranks."""
    moves = dict(zip((0, 1, 3), MOVES.values()))
    straight = pool_of(2).run(trained_with_moves, case, {})
    moved = pool_of(2).run(trained_with_moves, case, moves)
    for (losses, contents, agree), (straight_losses, straight_contents, _) in zip(moved, straight):
        assert agree
        assert losses == straight_losses
        assert_equal(contents, straight_contents)


@trust_in_float16
def copied_to_another_engine(rank: int, world_size: int, case: Case) -> Any:
    """Losses of an engine, and of a new one that took over its states after two steps."""
    engine = engine_of(case)
    train(engine, range(2))
    states = OptimizerStates(engine)
    kept = [states.of(parameter).clone() for parameter in engine.module.parameters()]
    expected = train(engine, range(2, 4))
    other = engine_of(case)
    for parameter in other.module.parameters():
        nn.init.zeros_(parameter)
    OptimizerStates(other).write(dict(zip(other.module.parameters(), kept)))
    if case.stage:
        other.optimizer.update_lp_params()  # brings the other ranks' fragments of dense weights
    got = train(other, range(2, 4))
    return got, expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_engine_takes_over_states(case: Case) -> None:
    """It has none yet, and makes them as its optimizer would."""
    for got, expected in pool_of(2).run(copied_to_another_engine, case):
        assert got == expected


@trust_in_float16
def weights_and_states(rank: int, world_size: int, case: Case) -> Any:
    """Of all parameters on a rank that has all experts."""
    engine = engine_of(replace(case, num_ep_ranks=1))
    train(engine, range(2))
    states = OptimizerStates(engine)
    return [(p.data.clone(), states.of(p).clone()) for p in engine.module.parameters()]


@pytest.mark.parametrize("case", [case for case in CASES if case.stage], ids=str)
def test_ranks_with_the_same_experts_keep_fragments_that_tile(case: Case) -> None:
    num_split = 0
    for ranks in zip(*pool_of(2).run(weights_and_states, case)):
        weight = ranks[0][0].view(-1)
        parts = sorted((states for _, states in ranks), key=lambda states: states.start)
        own = [range(states.start, states.stop) for states in parts]
        num_split += all(own)
        assert [element for part in own for element in part] == list(range(weight.numel()))
        assert parts[0].tensors.keys() == parts[1].tensors.keys() > {MASTER}
        for name in parts[0].tensors:
            assert [len(states.tensors[name]) for states in parts] == list(map(len, own))
        master = torch.cat([states.tensors[MASTER] for states in parts])
        assert torch.equal(master.to(weight.dtype), weight)
    assert num_split


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(1, 5))
def test_places_tile_every_parameter(numels: list[int], padding: int, num_ranks: int) -> None:
    """Whatever the sizes, the padding between parameters, and the ranks that share the buffer; and
    the views into a stack as a parameter in its place."""
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    views_of = {
        parameter: [nn.Parameter(view) for view in parameter.data.split(2)]
        for parameter in parameters[::2]
    }
    offsets = list(accumulate((numel + padding for numel in numels), initial=0))
    buffer = torch.zeros(num_ranks * -(-offsets[-1] // num_ranks))
    for index, (numel, offset) in enumerate(zip(numels, offsets), start=1):
        buffer[offset : offset + numel] = index
    for rank, held in enumerate(buffer.chunk(num_ranks)):
        group = Group(held, rank * len(held), parameters, offsets)
        for parameter, place in group.places(views_of):
            if parameter in views_of:
                assert place.stop - place.start <= parameter.numel()
                continue
            parameter.data[place.start : place.stop] += place.of(held)
    for index, parameter in enumerate(parameters, start=1):
        assert torch.equal(parameter.data, torch.full_like(parameter.data, index))


# One process, an optimizer of torch's as at ZeRO 0.


def stepped(optimizer: torch.optim.Optimizer, times: int = 1) -> OptimizerStates:
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return OptimizerStates(SimpleNamespace(optimizer=optimizer))


def test_states_are_views_in_place() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    kept = stepped(optimizer).of(weight)
    assert (kept.start, kept.stop, kept.tensors.keys()) == (
        0,
        6,
        {MASTER, "exp_avg", "exp_avg_sq"},
    )
    assert {name: float(value) for name, value in kept.scalars.items()} == {"step": 1.0}
    kept.tensors["exp_avg"].fill_(7)
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full((2, 3), 7.0))


def test_before_the_first_step_there_is_the_weight_alone() -> None:
    weight = nn.Parameter(torch.arange(3.0))
    kept = stepped(torch.optim.AdamW([weight]), times=0).of(weight)
    assert kept.tensors.keys() == {MASTER} and not kept.scalars
    assert torch.equal(kept.tensors[MASTER], torch.arange(3.0))


def test_frozen_weights_have_no_states() -> None:
    frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
    states = stepped(torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    kept = states.of(frozen)
    assert kept.tensors.keys() == {MASTER} and not kept.scalars
    states.write({frozen: replace(kept, tensors={MASTER: torch.ones(3)})})
    assert torch.equal(frozen, torch.ones(3))


def test_engine_without_optimizer_has_weights_alone() -> None:
    weight = nn.Parameter(torch.arange(3.0))
    kept = OptimizerStates(SimpleNamespace(optimizer=None)).of(weight)
    assert kept.tensors.keys() == {MASTER}


def test_options_are_those_of_the_parameters_group() -> None:
    decayed, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.AdamW(
        [{"params": [other], "weight_decay": 0.0}, {"params": [decayed], "weight_decay": 0.1}]
    )
    states = stepped(optimizer)
    assert states.options(decayed) is optimizer.param_groups[1]
    assert states.options(other) is optimizer.param_groups[0]
    assert states.options(nn.Parameter(torch.zeros(2))) is None


def test_a_weight_without_dims() -> None:
    """Its states have none either, and are states all the same; its number of steps is not."""
    weight = nn.Parameter(torch.tensor(2.0))
    kept = stepped(torch.optim.AdamW([weight])).of(weight)
    assert kept.tensors.keys() == {MASTER, "exp_avg", "exp_avg_sq"}
    assert kept.scalars.keys() == {"step"}


def test_what_was_there_is_replaced_by_what_is_written() -> None:
    """States of a weight that has been stepped, by those of one that has not."""
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights)
    new = stepped(optimizer, times=0).of(weights[1]).clone()
    states = stepped(optimizer)
    states.write({weights[0]: new})
    assert states.of(weights[0]).tensors.keys() == {MASTER} and not states.of(weights[0]).scalars
    assert torch.equal(weights[0], torch.zeros(3))
    assert states.of(weights[1]).tensors.keys() == {MASTER, "exp_avg", "exp_avg_sq"}


def test_none_is_no_state() -> None:
    """So SGD may say that there is no momentum yet."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = None
    states = stepped(optimizer, times=0)
    kept = states.of(weight)
    assert kept.tensors.keys() == {MASTER}
    states.write(
        {
            weight: replace(
                kept, tensors={MASTER: torch.ones(3), "momentum_buffer": 2 * torch.ones(3)}
            )
        }
    )
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((3,), 2.0))


class Factored(torch.optim.SGD):
    """Keeps the mean of each row, as Adafactor does."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["row"] = parameter.grad.mean(1)


def test_states_without_a_part_for_each_element_are_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"Factored keeps 'row' \(\(2,\)\).* such as AdamW"):
        stepped(Factored([weight])).of(weight)


def test_other_wrappers_are_refused() -> None:
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    with pytest.raises(ValueError, match="of a DeepSpeedOptimizer cannot be moved"):
        OptimizerStates(SimpleNamespace(optimizer=DeepSpeedOptimizer()))


@trust_in_float16
def refused_writes(rank: int, world_size: int, case: Case) -> list[str]:
    """Messages; and nothing is changed."""
    engine = engine_of(case)
    train(engine, range(2))
    states = OptimizerStates(engine)
    parameter = next(iter(engine.module.own()))[1][0]
    kept = states.of(parameter).clone()
    other = {name: tensor + 1 for name, tensor in kept.tensors.items()}
    wrong = [
        replace(kept, tensors=other, stop=kept.stop - 1),
        replace(kept, tensors={name: tensor[1:] for name, tensor in other.items()}),
        replace(kept, tensors={name: other[name] for name in other if name != MASTER}),
        replace(kept, tensors=other, scalars={"step": 9.0}),
        replace(kept, tensors={MASTER: other[MASTER]}, scalars={}),
    ]
    messages = []
    for given_states in wrong:
        with pytest.raises(ValueError) as error:
            states.write({parameter: given_states})
        messages.append(str(error.value))
    assert_equal(numbers_of({0: (states.of(parameter),)}), numbers_of({0: (kept,)}))
    return messages


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    (messages, _) = pool_of(2).run(refused_writes, Case(ZERO, 1))
    for message, part in zip(
        messages,
        (
            "of elements 0 to 14 were given, but this rank keeps 0 to 15",
            "has shape (14,)",
            "lack 'master'",
            "'step': 9.0} of one parameter",
            "a parameter group cannot keep {'master': None} of one parameter",
        ),
    ):
        assert part in message
