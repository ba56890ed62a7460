# SPDX-License-Identifier: Apache-2.0
"""A profile at the start of a run: what it leaves alone, what it chooses, what it says.

Ranks are late by a clock of the tests, so that what is chosen does not depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.core.layout import world
from ds_moe_ext.planning.zebra_costs import LayerTimes
from ds_moe_ext.planning.zebra_planner import Stripes, Timed, ZebraGroup, step_seconds
from ds_moe_ext.report.units import seconds_text
from tests.hosts import jobs
from tests.hosts.copied_runs import worst
from tests.hosts.jobs import Job
from tests.ranks import pool_of

PROFILE = {"sequence_length": jobs.LENGTH, "num_repeats": 3}
SLOW_S = 0.02
MIXTRAL = Job("mixtral")


@dataclass(frozen=True)
class Case:
    """Ranks that have attention and experts; which are late, by how much; bytes that are free."""

    job: Job = MIXTRAL
    attention: int = 1
    expert: int = 1
    profile: tuple[tuple[str, Any], ...] = tuple(PROFILE.items())
    late_attention_s: float = 0.0
    late_expert_s: float = 0.0
    seconds: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    free_bytes: tuple[int, int] | None = None
    bfloat16: bool = False
    hooks: tuple[str, ...] = ()
    hardware: str | None = None  # its file; rows are sent once then

    @property
    def job_with_keys(self) -> Job:
        keys = {
            "attention_size": self.attention,
            "expert_size": self.expert,
            "profile": dict(self.profile),
        }
        return replace(self.job, strategy="zebra", keys=tuple(keys.items()))


class Outcome(NamedTuple):
    moved: list[int] | None  # None where it failed
    reported: list[str]
    changes: list[str]  # of the model and of random numbers


@contextmanager
def late(case: Case, rank: int) -> Iterator[None]:
    """Expert functions take longer on expert ranks, attention modules on attention ranks, by a
    clock on which all else takes a millisecond."""
    from transformers.models.mixtral.modeling_mixtral import MixtralAttention

    from ds_moe_ext.moe.feed_forward import FeedForwardExperts
    from ds_moe_ext.planning.bench import HostClock

    late_s = 0.0

    def delayed(function: Any, seconds: float) -> Any:
        def called(*given: Any, **named: Any) -> Any:
            nonlocal late_s
            late_s += seconds
            return function(*given, **named)

        return called

    def seconds(_: HostClock, ready: Callable[[], object], work: Callable[[], object]) -> float:
        nonlocal late_s
        ready()
        late_s = 0.0
        work()
        return 1e-3 + late_s

    is_attention = rank % (case.attention + case.expert) < case.attention
    with ExitStack() as stack:
        if case.late_attention_s or case.late_expert_s:
            stack.enter_context(mock.patch.object(HostClock, "seconds", seconds))
        for cls, name, delay_s, here in (
            (FeedForwardExperts, "__call__", case.late_expert_s, not is_attention),
            (MixtralAttention, "forward", case.late_attention_s, is_attention),
        ):
            if here and delay_s:
                function = delayed(getattr(cls, name), delay_s)
                stack.enter_context(mock.patch.object(cls, name, function))
        yield


def profiled_on(rank: int, world_size: int, case: Case, num_ranks: int | None = None) -> Outcome:
    """Profile a model as the engine does, and compare it with what it was."""
    from ds_moe_ext.hosts.attachment.replacement import draw
    from ds_moe_ext.hosts.deepspeed.startup import FINDERS
    from ds_moe_ext.hosts.zebra import profile
    from ds_moe_ext.hosts.zebra.rehearsal import Scene
    from ds_moe_ext.planning.zebra_planner import WeightBytes
    from ds_moe_ext.strategies.settings import read_settings

    job = case.job_with_keys
    model = jobs.model_of(job)
    document = jobs.document_of(job, world_size)
    document["ds_moe_ext"]["hooks"] = [*case.hooks]
    if case.hardware is not None:
        document["ds_moe_ext"] |= {"hardware": case.hardware, "ep": {"send_once": True}}
    settings, strategy = read_settings(document)
    assert strategy is not None
    blueprint = draw(settings, strategy, model, FINDERS, num_ranks or world_size)
    training = profile.Training(
        scene=Scene(torch.device("cpu"), torch.bfloat16 if case.bfloat16 else None),
        micro_batch=jobs.ROWS,
        weight_bytes=WeightBytes(weight=2, gradient=2, optimizer=12, zero_stage=0),
    )
    is_attention = rank % (case.attention + case.expert) < case.attention
    lines: list[str] = []
    before = Traces.of(model)
    with ExitStack() as stack:
        stack.enter_context(late(case, rank))
        stack.enter_context(
            mock.patch.object(profile, "line_logger", lambda settings, rank: lines.append)
        )
        if case.seconds is not None:
            timed = [Timed(seconds, 0.5) for seconds in case.seconds[not is_attention]]
            stack.enter_context(mock.patch.object(Scene, "timed", side_effect=timed))
        if case.free_bytes is not None:
            free = case.free_bytes[not is_attention]
            free *= world_size  # of the node, which the ranks share
            stack.enter_context(mock.patch.object(profile, "free_bytes_of", lambda device: free))
        try:
            strategy = profile.profiled(blueprint, model, FINDERS, training).strategy
        except ValueError as error:
            return Outcome(None, [str(error)], before.changes(Traces.of(model)))
    return Outcome(strategy.moved, lines, before.changes(Traces.of(model)))


@dataclass(frozen=True, eq=False)
class Traces:
    """All that a profile might change."""

    tensors: dict[str, Tensor]
    places: dict[str, int]  # of their memory
    modules: dict[str, tuple[int, bool, int]]
    gradients: list[str]
    random: Tensor

    @classmethod
    def of(cls, model: nn.Module) -> Traces:
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return cls(
            {name: tensor.detach().clone() for name, tensor in own.items()},
            {name: tensor.data_ptr() for name, tensor in own.items()},
            {
                name: (id(module), module.training, len(module._forward_pre_hooks))
                for name, module in model.named_modules()
            },
            [name for name, parameter in model.named_parameters() if parameter.grad is not None],
            torch.get_rng_state(),
        )

    def changes(self, after: Traces) -> list[str]:
        changed = [
            name
            for name, tensor in self.tensors.items()
            if tensor.dtype != after.tensors[name].dtype
            or not torch.equal(tensor, after.tensors[name])
        ]
        changed += [] if self.places == after.places else ["memory"]
        changed += [] if self.modules == after.modules else ["modules"]
        changed += [] if torch.equal(self.random, after.random) else ["random numbers"]
        return changed + after.gradients


def outcomes(case: Case) -> list[Outcome]:
    """Of all ranks, which chose alike and left their models as they were."""
    found = pool_of(case.attention + case.expert).run(profiled_on, case)
    assert [outcome.changes for outcome in found] == [[]] * len(found)
    assert [outcome.moved for outcome in found] == [found[0].moved] * len(found)
    assert [outcome.reported for outcome in found] == [found[0].reported] * len(found)
    return found


def test_what_is_measured_is_reported_and_chosen_by() -> None:
    """Two layers take 8 s of attention, the model 10 s, an expert rank's rows 9 s there and 3 s on
    an attention rank. A layer's bubble is 9 - 4 s, a chunk squeezes 9/4 + 3/4: one, then two."""
    moved, reported, _ = outcomes(Case(seconds=((8.0, 10.0, 3.0), (9.0,))))[0]
    assert moved == [1, 2]
    measured, chosen = reported
    assert "attention 4 s (std 250 ms)," in measured
    assert "experts 9 s (std 500 ms) on an expert rank, 3 s (std 500 ms) on an att" in measured
    group = ZebraGroup(num_experts=4, num_layers=2, attention_ranks=1, expert_ranks=1)
    times = LayerTimes(attention_s=4, expert_s=9, expert_on_attention_s=3)
    stripes = Stripes(num_stripes=2, num_tokens=32, head_s=2, top_k=2, row_bytes=128)
    before, after = (seconds_text(step_seconds(group, times, stripes, o)) for o in ((0, 0), (1, 2)))
    assert "leaves [1, 2] of the 4 experts that it has of each layer to" in chosen
    assert f"a step takes {after} in place of {before}, simulated (-" in chosen


def _row_bytes(rank: int, world_size: int, case: Case) -> tuple[float, int]:
    from ds_moe_ext.hosts.zebra import profile

    with mock.patch.object(profile, "choose_moved", wraps=profile.choose_moved) as chosen:
        profiled_on(rank, world_size, case)
    stripes = chosen.call_args.args[2]
    return float(stripes.row_bytes), stripes.once_to


def test_rows_weigh_what_they_travel_as() -> None:
    """32 numbers in float32, or as int8; once to each rank where they are sent once."""
    case = Case(seconds=((8.0, 10.0, 3.0), (9.0,)))
    assert pool_of(2).run(_row_bytes, case) == [(128, 0)] * 2
    assert pool_of(2).run(_row_bytes, replace(case, hooks=("int8",))) == [(36, 0)] * 2
    once = replace(case, hardware="hetermoe_c1_t4")
    assert pool_of(2).run(_row_bytes, once) == [(128, 1)] * 2


@pytest.mark.parametrize(("variant", "expected"), [("corrected", [0, 2]), ("printed", [2, 2])])
def test_the_variant_counts(variant: str, expected: list[int]) -> None:
    """Two attention ranks: n1 = 1, n2 = 2. The bubble is 5 s; a chunk squeezes 2 x 9/4 + 3/4, and
    as printed 9/4 + 2 x 3/4."""
    profile = (*PROFILE.items(), ("variant", variant))
    case = Case(attention=2, profile=profile, seconds=((8.0, 8.0, 3.0), (9.0,)))
    assert outcomes(case)[0].moved == expected


def profiled_by_hand(
    rank: int, world_size: int, case: Case
) -> tuple[Outcome, list[tuple[int, ...]]]:
    """Profile with numbers for what a model takes; and the shapes of what experts compute."""
    from ds_moe_ext.hosts.zebra import profile
    from ds_moe_ext.hosts.zebra.rehearsal import Dense, Experts, Parts

    shapes: list[tuple[int, ...]] = []

    def experts(first: Any, scene: Any, rows_RD: Tensor, **_: Any) -> Any:
        shapes.append(tuple(rows_RD.shape))
        return Experts(seconds=Timed(1.0, 0.0), kept_bytes=400)

    parts = Parts(
        blocks=Timed(8.0, 0.0),
        whole=Timed(8.0, 0.0),
        blocks_bytes=1000,
        others_bytes=100,
        num_trained=50,
        num_frozen=10,
    )
    dense = Dense(parts, top_k=2, width=32, row_dtype=torch.float32)
    with (
        mock.patch.object(profile, "rehearse_dense", lambda *given, **named: dense),
        mock.patch.object(profile, "rehearse_experts", experts),
    ):
        return profiled_on(rank, world_size, case), shapes


@pytest.mark.parametrize(("spare_bytes", "expected"), [(1, 5), (-10, 4)])
def test_room_on_attention_ranks_by_hand(spare_bytes: int, expected: int) -> None:
    """50 trained weights take 16 bytes and 10 frozen ones 2. Blocks keep 1000 bytes in each of two
    stripes, the head 100 with its gradient. An expert takes 16 bytes a weight, and keeps a quarter
    of 400 bytes in each stripe. What the model takes now will be free."""
    needed = 50 * 16 + 10 * 2 + 2 * 1000 + 2 * 100 + 5 * (3 * 32 * 48 * 16 + 2 * 100)
    there = sum(parameter.nbytes for parameter in jobs.model_of(MIXTRAL).parameters())
    free_bytes = math.ceil((needed + spare_bytes) / 0.9) - there
    found = pool_of(2).run(profiled_by_hand, Case(free_bytes=(free_bytes, 10**9)))
    assert [f"has room for {expected}" in outcome.reported[0] for outcome, _ in found] == [True] * 2


@pytest.mark.parametrize(("attention", "expert", "num_rows"), [(2, 1, 64), (1, 2, 32)])
def test_the_first_rank_of_each_role_computes_an_expert_ranks_rows(
    attention: int, expert: int, num_rows: int
) -> None:
    """Three stripes: of 3 x 2 samples each has one on each of two attention ranks, two on one. An
    expert rank gets two rows of each of the 2 x 16 tokens, or those of half of 1 x 32."""
    found = pool_of(3).run(profiled_by_hand, Case(attention=attention, expert=expert))
    computes = [rank in (0, attention) for rank in range(3)]
    assert [shapes for _, shapes in found] == [[(num_rows, 32)] if own else [] for own in computes]


def test_slow_experts_move() -> None:
    moved, reported, _ = outcomes(Case(late_expert_s=SLOW_S))[0]
    assert moved is not None
    assert len(moved) == 2
    assert sum(moved) >= 4  # nearly all of the 8: what they take there is next to nothing
    measured, chosen = reported
    assert f"{jobs.ROWS} x {jobs.LENGTH} tokens" in measured
    assert "(std " in measured
    assert f"leaves {moved} of the 4 experts" in chosen
    assert "simulated (-" in chosen


@pytest.mark.parametrize(("attention", "expert", "multiple"), [(2, 1, 2), (1, 2, 1)])
def test_they_move_in_chunks(attention: int, expert: int, multiple: int) -> None:
    """n2 = 2 experts of the one expert rank for two attention ranks; 1 of each of two."""
    moved, *_ = outcomes(Case(attention=attention, expert=expert, late_expert_s=SLOW_S))[0]
    assert moved is not None
    assert sum(moved) > 0
    assert all(number % multiple == 0 for number in moved)


def test_none_move_where_attention_is_slower() -> None:
    profile = (*PROFILE.items(), ("samples", 3))
    moved, reported, _ = outcomes(Case(late_attention_s=SLOW_S, profile=profile))[0]
    assert moved == [0, 0]
    assert f"3 x {jobs.LENGTH} tokens" in reported[0]
    assert "no experts move: attention takes longer" in reported[1]


@pytest.mark.parametrize(
    "job",
    [
        Job("mixtral", use_reentrant=False),
        Job("mixtral", gate=(("type", "softmax_top_k"), ("top_k", 2))),
        Job("gpt_moe"),
        Job("deepseek_v3"),
        Job("toy, shared experts"),
        Job("toy, frozen experts"),
    ],
    ids=lambda job: f"{job.family}{' gate' if job.gate else ''}",
)
def test_models_stay_as_they_are(job: Job) -> None:
    moved, reported, _ = outcomes(Case(job, bfloat16=True))[0]
    assert moved is not None, reported


@pytest.mark.parametrize(
    ("expert_s", "free_bytes", "why"),
    [
        (9.0, (-(10**9), 10**9), "attention ranks have no memory for experts"),
        (4.5, (10**9, 10**9), "experts are too large for the pipeline bubbles, or too few"),
    ],
)
def test_why_none_move(expert_s: float, free_bytes: tuple[int, int], why: str) -> None:
    case = Case(seconds=((8.0, 8.0, 3.0), (expert_s,)), free_bytes=free_bytes)
    moved, reported, _ = outcomes(case)[0]
    assert moved == [0, 0]
    assert f"no experts move: {why}; a step takes" in reported[1]


def test_what_fits_nowhere_else_moves() -> None:
    """An expert has 3 x 32 x 48 weights of 16 bytes. Memory for 5 of 8 on the expert rank: 3 move,
    though attention takes longer."""
    expert_bytes = 3 * 32 * 48 * 16
    case = Case(late_attention_s=SLOW_S, free_bytes=(10**9, int(5.9 * expert_bytes / 0.9)))
    moved, reported, _ = outcomes(case)[0]
    assert moved is not None
    assert sum(moved) in {3, 4}  # rows that are kept, and the model that goes, may make it one more
    assert f"no room for {sum(moved)} experts" in reported[0]


def test_a_model_that_does_not_fit_is_refused_on_all_ranks() -> None:
    moved, reported, _ = outcomes(Case(free_bytes=(0, 0)))[0]
    assert moved is None
    assert "does not fit" in reported[0]
    assert "set ds_moe_ext.zebra.moved" in reported[0]


def test_what_fails_on_one_rank_is_reported_on_all() -> None:
    """Learned positions end at 16 tokens."""
    case = Case(Job("gpt_moe"), profile=(*PROFILE.items(), ("sequence_length", 17)))
    moved, reported, _ = outcomes(case)[0]
    assert moved is None
    assert "rank 0: IndexError" in reported[0]
    assert "set ds_moe_ext.zebra.moved in its place" in reported[0]


def test_unlike_layers_are_refused() -> None:
    _, reported, _ = outcomes(Case(Job("toy, uneven layers")))[0]
    assert "4 kinds of layers" in reported[0]


def test_nothing_is_measured_where_neither_number_divides_the_other() -> None:
    with world("gloo"):
        found = profiled_on(0, 1, Case(attention=3, expert=2), 5)
    assert found.moved == [0, 0]
    assert "neither of 3 attention and 2 expert ranks divides the other" in found.reported[0]


# Under an engine.


def trained_after_profile(rank: int, world_size: int, case: Case) -> tuple[Any, list[int], str]:
    """Train, with late ranks in the profile only."""
    from ds_moe_ext.hosts.deepspeed import engine

    chosen: list[list[int]] = []

    def watched(blueprint: Any, model: nn.Module, *given: Any) -> Any:
        with late(case, rank):
            after = profiled(blueprint, model, *given)
        chosen.append(after.strategy.moved)
        dtypes.append({str(parameter.dtype) for parameter in model.parameters()})
        return after

    dtypes: list[set[str]] = []
    profiled = engine.profiled
    with mock.patch.object(engine, "profiled", watched):
        result = jobs.train(rank, world_size, case.job_with_keys)
    return result, *chosen, *map(str, dtypes)


def test_a_profiled_run_equals_expert_parallelism() -> None:
    job = Job("mixtral", 0, dtype="float64", steps=2, clip=0.5)
    found = pool_of(2).run(trained_after_profile, Case(job, late_expert_s=SLOW_S))
    (profiled, moved, dtypes), (_, moved_there, _) = found
    assert moved == moved_there
    assert sum(moved) > 0
    assert dtypes == "{'torch.float64'}"
    expected = pool_of(2).run(jobs.train, job)[0]
    assert profiled.losses == pytest.approx(expected.losses, rel=1e-12)
    assert worst(profiled.state, expected.state, job) < 1e-11


def test_a_run_in_half_precision_takes_the_profile() -> None:
    job = Job("mixtral", 1, dtype="bfloat16", steps=1)
    found = pool_of(2).run(trained_after_profile, Case(job, late_expert_s=SLOW_S))
    (result, moved, dtypes), _ = found
    assert sum(moved) > 0
    assert dtypes == "{'torch.float32'}"  # the engine casts later
    assert all(map(torch.isfinite, map(torch.tensor, result.losses)))


# Parts.


def test_memory_of_a_node_is_shared_by_its_ranks() -> None:
    """The model that is there now will have left; a device is nobody else's."""
    from ds_moe_ext.hosts.zebra.profile import RankHere, least_free_bytes

    def here(node: str, *, is_shared: bool) -> RankHere:
        return RankHere(node=node, free_bytes=100, model_bytes=7, is_shared=is_shared, dense=None)

    a, b, c = here("a", is_shared=True), here("b", is_shared=True), here("a", is_shared=False)
    assert least_free_bytes([a, a, b]) == [57, 57, 107]
    assert least_free_bytes([c, c]) == [107, 107]


def test_what_backward_needs_is_counted_once() -> None:
    """A linear layer keeps its input, and so does a second one; weights do not count."""
    from ds_moe_ext.hosts.zebra.rehearsal import Scene

    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.zeros(5, 8, requires_grad=True)
    weights = [*first.parameters(), *second.parameters()]
    kept = Scene(torch.device("cpu"), None).kept_bytes(lambda: (first(x), second(x)), weights)
    assert kept == x.nbytes


@pytest.mark.parametrize("forward_takes", ["pixels", "input_ids, mask"])
def test_only_models_of_tokens_are_profiled(forward_takes: str) -> None:
    from ds_moe_ext.hosts.zebra.rehearsal import token_inputs

    model = nn.Embedding(4, 2)
    model.forward = eval(f"lambda {forward_takes}: None")
    with pytest.raises(ValueError, match=rf"Embedding takes {forward_takes}, but"):
        token_inputs(model, (1, 4), torch.device("cpu"))


@pytest.mark.parametrize("recomputes", [False, True])
def test_experts_that_compute_again_keep_their_rows_alone(recomputes: bool) -> None:
    from ds_moe_ext.hosts.attachment.replacement import draw
    from ds_moe_ext.hosts.deepspeed.startup import FINDERS
    from ds_moe_ext.hosts.zebra.rehearsal import Scene, first_expert, rehearse_experts
    from ds_moe_ext.moe.feed_forward import FeedForwardExperts
    from ds_moe_ext.strategies.settings import read_settings

    job = Case().job_with_keys
    model = jobs.model_of(job)
    settings, strategy = read_settings(jobs.document_of(job, 2))
    assert strategy is not None
    blueprint = draw(settings, strategy, model, FINDERS, 2)
    rows_RD, scene = torch.empty(10, 32, device="meta"), Scene(torch.device("cpu"), None)
    compute, calls = FeedForwardExperts.__call__, []

    def counted(*given: Any) -> Tensor:
        calls.append(given[1].shape)
        return compute(*given)

    with mock.patch.object(FeedForwardExperts, "__call__", counted):
        found = rehearse_experts(
            partial(first_expert, model, blueprint, FINDERS, scene),
            scene,
            rows_RD,
            num_repeats=2,
            recomputes=recomputes,
        )
    assert found.kept_bytes >= 10 * 32 * 4
    assert (found.kept_bytes == 10 * 32 * 4) == recomputes
    assert calls == [(10, 32)] * (8 if recomputes else 5)  # 2 warm-ups, 2 times; once for memory


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"moved": [1, 1], "profile": PROFILE}, "moved is .* set one of them to null"),
        ({"profile": {"sequence_length": 0}}, "sequence_length is 0; it must be at least 1"),
        ({"profile": {**PROFILE, "samples": 0}}, "samples is 0; it must be at least 1"),
        ({"profile": {**PROFILE, "variant": "paper"}}, "must be 'corrected' or 'printed'"),
        ({"profile": {**PROFILE, "repeats": 3}}, "no key 'repeats'; did you mean 'num_repeats'"),
    ],
)
def test_wrong_keys(block: dict[str, Any], message: str) -> None:
    from ds_moe_ext.strategies.settings import read_settings

    with pytest.raises(ValueError, match=message):
        read_settings({"ds_moe_ext": {"enabled": True, "strategy": "zebra", "zebra": block}})
