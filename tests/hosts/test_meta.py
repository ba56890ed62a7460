# SPDX-License-Identifier: Apache-2.0
"""Models built on the meta device: what ranks make of them is what one rank makes, and the model's
own initialiser would have drawn; no rank has all experts at any time."""

from __future__ import annotations

import ctypes
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import ds_moe_ext
from ds_moe_ext import ExpertsDescription, FeedForwardExperts, OneEach, register_experts
from ds_moe_ext.commands.conversion.conversion import Asked, Form, convert
from ds_moe_ext.hosts import meta_model
from ds_moe_ext.moe.feed_forward import silu_gated
from ds_moe_ext.testing import dense_experts
from tests.hosts import divided_runs, families, jobs
from tests.hosts.divided_runs import Case, Learnt, Way
from tests.hosts.jobs import Job, Result
from tests.hosts.zebra_runs import Numbers
from tests.marks import slow
from tests.ranks import pool_of, preload

preload("deepspeed", "transformers", "accelerate")

WIDE = 0.3  # of initial weights: experts that hardly compute would hide that they differ
EXACT = Job(dtype="float64", stage=0, steps=4)


@contextmanager
def built(way: str) -> Iterator[None]:
    """A block in which models are built for real, or without elements in either way."""
    if way == "accelerate":
        from accelerate import init_empty_weights

        with init_empty_weights():
            yield
    else:
        with torch.device("meta") if way == "meta" else nullcontext():
            yield


def model_of(job: Job, way: str, ties: bool = False) -> nn.Module:
    from transformers import MixtralForCausalLM

    torch.manual_seed(0)
    config = jobs.mixtral_config(job)
    config.initializer_range, config.tie_word_embeddings = WIDE, ties
    with built(way):
        model = MixtralForCausalLM(config)
    if job.dtype == "float64":
        model.set_experts_implementation("eager")  # grouped GEMM has no float64
    return model


class Trained(NamedTuple):
    """What rank 0 returns of a job."""

    result: Result
    buffers: dict[str, Tensor]
    is_tied: bool


def train(rank: int, world_size: int, job: Job, way: str, ties: bool = False) -> Trained | None:
    torch.manual_seed(rank)
    model: Any = model_of(job, way, ties)
    torch.manual_seed(10 if rank else 0)  # what follows draws rank 0's numbers on all
    with mock.patch.object(jobs, "model_of", lambda _: model):
        result = jobs.train(rank, world_size, job)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    return result and Trained(result, dict(model.named_buffers()), is_tied)


def trained(num_ranks: int, job: Job, way: str = "meta", ties: bool = False) -> Trained:
    ranks: list[Trained] = pool_of(num_ranks).run(train, job, way, ties)
    return ranks[0]


alone = functools.cache(functools.partial(trained, 1))


def assert_alike(ours: Result, theirs: Result, tolerance: float) -> None:
    for mine, other in zip(ours.losses, theirs.losses, strict=True):
        assert abs(mine - other) <= tolerance * abs(other)
    assert ours.state.keys() == theirs.state.keys()
    for name, weight in theirs.state.items():
        torch.testing.assert_close(ours.state[name], weight, rtol=tolerance, atol=tolerance)


ROLES = (("attention_size", 1), ("expert_size", 1), ("moved", Numbers([0, 1])))
PROFILED = (*ROLES[:2], ("profile", {"sequence_length": 16, "num_repeats": 1}))
TWO_EACH = (("attention_size", 2), ("expert_size", 2))
FSSDP = (("replicas_per_rank", 2), ("reshard_interval", 2))


@pytest.mark.parametrize(
    ("num_ranks", "way", "more"),
    [
        (2, "meta", {}),
        slow(2, "accelerate", {}),
        slow(2, "accelerate", {"optimizer": "object"}),
        slow(2, "meta", {"optimizer": "object", "parameters": "groups"}),
        slow(2, "meta", {"ep_ranks": 1}),
        slow(4, "meta", {"ep_ranks": 2}),
        slow(2, "meta", {"strategy": "fssdp", "keys": FSSDP}),
        slow(2, "meta", {"strategy": "prophet"}),
        slow(2, "meta", {"strategy": "esp", "etp_size": 2}),
        slow(4, "meta", {"strategy": "esp", "etp_size": 2, "balance": "fssdp"}),
        slow(2, "meta", {"gate": (("type", "sigmoid_top_k"),)}),
        # Of the ranks of two roles each makes what it keeps.
        (2, "meta", {"strategy": "zebra", "keys": ROLES}),
        slow(2, "accelerate", {"strategy": "zebra", "keys": ROLES, "optimizer": "object"}),
        slow(4, "meta", {"strategy": "zebra", "keys": ROLES}),
        slow(2, "meta", {"strategy": "zebra", "keys": PROFILED}),
        slow(4, "meta", {"strategy": "zebra", "keys": TWO_EACH, "balance": "fssdp"}),
        slow(2, "meta", {"strategy": "zebra", "keys": ROLES, "gate": (("type", "sigmoid_top_k"),)}),
    ],
)
def test_experts_do_not_depend_on_ranks_or_strategies(
    num_ranks: int, way: str, more: dict[str, Any]
) -> None:
    alike = {key: more[key] for key in ("gate", "optimizer", "parameters") if key in more}
    theirs = alone(replace(EXACT, **alike)).result
    assert_alike(trained(num_ranks, replace(EXACT, **more), way).result, theirs, 1e-10)


def made_dense(rank: int, world_size: int, job: Job) -> int:
    """Elements of the dense weights that a rank has made."""
    with mock.patch.object(meta_model, "_blank", wraps=meta_model._blank) as blank:
        train(rank, world_size, job, "meta")
    made = [call.args[0].tensor for call in blank.call_args_list]
    return sum(tensor.numel() for tensor in made if isinstance(tensor, nn.Parameter))


def test_expert_ranks_make_no_dense_weights() -> None:
    job = replace(EXACT, strategy="zebra", keys=ROLES, stage=1, dtype="float32")
    on_attention_rank, on_expert_rank = pool_of(2).run(made_dense, job)
    assert on_expert_rank == 0 < on_attention_rank


@pytest.mark.slow
@pytest.mark.parametrize("way", ["meta", "accelerate"])
def test_tied_weights_stay_tied(way: str) -> None:
    job = replace(EXACT, optimizer="object")
    ours, theirs = trained(2, job, way, ties=True), trained(1, job, ties=True)
    assert ours.is_tied and theirs.is_tied
    assert_alike(ours.result, theirs.result, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "more",
    [{}, {"strategy": "fssdp"}, {"dtype": "bfloat16"}, {"strategy": "zebra", "keys": ROLES}],
)
def test_stages(stage: int, more: dict[str, Any]) -> None:
    if stage == 3 and more.get("strategy") == "zebra":
        pytest.skip("refused")
    job = Job(stage=stage, steps=4, **more)
    alike = replace(job, strategy="ep", keys=(), stage=1)
    tolerance = 2e-2 if job.dtype == "bfloat16" else 2e-4
    theirs = trained(1, alike).result.losses
    for mine, other in zip(trained(2, job).result.losses, theirs, strict=True):
        assert abs(mine - other) <= tolerance * other


def divided(rank: int, world_size: int, case: Case) -> Learnt:
    torch.manual_seed(0)
    model = model_of(case.job, "meta")
    torch.manual_seed(0)
    with mock.patch.object(divided_runs, "model_of", lambda _: model):
        return divided_runs.train(rank, world_size, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "stage", "early"),
    [
        (Way.AUTOTP, 1, False),
        (Way.AUTOTP, 1, True),
        (Way.AUTOTP, 3, False),
        (Way.ULYSSES, 1, False),
    ],
)
def test_models_that_are_divided_later(way: Way, stage: int, early: bool) -> None:
    job = Job(stage=1, steps=3, sgd=True, learning_rate=0.1, aux_coefficient=0.0)
    (whole,) = pool_of(1).run(divided, Case(job))
    for own in pool_of(4).run(divided, Case(replace(job, stage=stage), way, 2, early)):
        assert own.losses == pytest.approx(whole.losses, rel=1e-5)


# What the model's own initialiser draws.


def differing(rank: int, world_size: int, family: str, way: str) -> list[str]:
    """Weights and buffers that are not as those of a model that was built for real."""
    build = functools.partial(families.made, family)
    torch.manual_seed(1)
    real = build()
    with built(way):
        model = build()
    job = Job(stage=0, optimizer="object", sgd=True)
    with mock.patch.object(jobs, "model_of", lambda _: model):
        engine = jobs.engine_of(job, world_size)
    ours, theirs = ds_moe_ext.full_state_dict(engine.module), real.state_dict()
    assert rank or ours.keys() == theirs.keys()
    # Experts of LongCat-Flash that nothing computes with are zeros in what is exported.
    wrong = [
        name
        for name, weight in theirs.items()
        if not rank
        and not (family == "longcat_flash" and name.endswith("gate_up_proj"))
        and not is_drawn_alike(ours[name], weight)
    ]
    buffers = dict(engine.module.named_buffers())
    for name, buffer in real.named_buffers():
        own = buffers[name]
        if own.dtype != buffer.dtype or not torch.equal(own.to(buffer.device), buffer):
            wrong.append(name)
    return wrong


def is_drawn_alike(ours: Tensor, theirs: Tensor) -> bool:
    """Equal where all elements of theirs are; else of a mean and a spread that eight standard
    errors of the difference allow."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    mine, other = ours.double(), theirs.double()
    spread, number = float(other.std(correction=0)), other.numel()
    if spread == 0:
        return torch.equal(mine, other)
    allowed = 8 * (2 / number) ** 0.5
    is_central = abs(float(mine.mean() - other.mean())) <= allowed * spread
    return is_central and abs(float(mine.std(correction=0)) / spread - 1) <= allowed


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("deepseek_v3", "meta"),
        *(slow(family, "meta") for family in (*families.NAMES, *families.OTHERS)),
        *(slow(family, "accelerate") for family in ("mixtral", "deepseek_v3", "gpt_oss")),
    ],
)
def test_values_are_of_the_models_own_initialiser(family: str, way: str) -> None:
    assert pool_of(2).run(differing, family, way) == [[], []]


# What is loaded.


@pytest.mark.parametrize(
    ("way", "more"),
    [
        ("meta", {}),
        slow("accelerate", {}),
        slow("meta", {"stage": 0, "strategy": "fssdp"}),
        slow("meta", {"stage": 3}),
        slow("meta", {"dtype": "bfloat16"}),
    ],
)
def test_a_checkpoint_says_all(way: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Whatever was drawn, and all that no checkpoint has is there: bit for bit."""
    job = Job(folder=str(tmp_path), steps=3, save_at=1, **more)
    trained(2, replace(job, steps=1), "real")
    again = replace(job, resume=True, save_at=None)
    ours, theirs = trained(2, again, way), trained(2, again, "real")
    assert ours.result.losses == theirs.result.losses
    assert ours.result.norms == theirs.result.norms
    for mine, other in ((ours.result.state, theirs.result.state), (ours.buffers, theirs.buffers)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in other.items())


def loaded(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], Tensor]:
    """State and logits of an engine whose model was built without elements."""
    with torch.device("meta"):
        model = families.made("mixtral")
    with mock.patch.object(jobs, "model_of", lambda _: model):
        engine = jobs.engine_of(Job(stage=1), world_size)
    engine.load_checkpoint(folder, load_module_only=True)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=families.tokens_of(0)).logits
    return dict(ds_moe_ext.full_state_dict(engine.module)), logits


@pytest.mark.slow
def test_weights_of_hugging_face(tmp_path: Path) -> None:
    model = families.build("mixtral").eval()
    model.save_pretrained(tmp_path / "hf")
    convert(
        Asked(tmp_path / "hf", tmp_path / "ds", Form.DEEPSPEED, described=None), Console(quiet=True)
    )
    state, logits = pool_of(2).run(loaded, str(tmp_path / "ds"))[0]
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], weight) for name, weight in expected.items())
    with torch.no_grad():
        stock = model(input_ids=families.tokens_of(0)).logits
    torch.testing.assert_close(logits, stock)


# What a rank has in memory.


def most_bytes(rank: int, world_size: int, way: str) -> tuple[int, int]:
    """By how much the memory of a process grew at most in a start, and what all experts are."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{"vocab_size": 64, "hidden_size": 512, "intermediate_size": 1024},
        **{"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 16},
    )
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier jobs of the process have left free
    Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
    before = resident("VmRSS")
    with built(way):
        model = MixtralForCausalLM(config)
    size = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    with mock.patch.object(jobs, "model_of", lambda _: model):
        engine = jobs.engine_of(Job(stage=0, optimizer="object", sgd=True), world_size)
    assert engine is not None
    return resident("VmHWM") - before, size


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.slow
def test_no_rank_has_all_experts() -> None:
    """403 MB of experts, of which each of four ranks has 101, and while a layer's slots are stacked
    those of one layer twice; and dense weights of 25 MB."""
    for most, size in pool_of(4).run(most_bytes, "meta"):
        assert size == 8 * 8 * 3 * 512 * 1024 * 4
        assert most < 0.6 * size, (most, size)
    assert all(most > 0.9 * size for most, size in pool_of(4).run(most_bytes, "real"))


# Experts of a user's own, in plain PyTorch.


class Own(nn.Module):
    """Its initialiser looks at the shape of all weights, and fills expert by expert."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up_EFD = nn.Parameter(torch.empty(num_experts, 24, 16))
        self.down_EDF = nn.Parameter(torch.empty(num_experts, 16, 12))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for expert in range(self.num_experts):
            nn.init.trunc_normal_(self.up_EFD[expert], std=0.3, a=-0.6, b=0.6)
            with torch.no_grad():
                self.up_EFD[expert, :12].mul_(2).add_(0.1)
        nn.init.xavier_normal_(self.down_EDF)
        nn.init.constant_(self.down_EDF[1:3, :, 5], 0.5)

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        return dense_experts(x_TD, expert_TK, score_TK, self.up_EFD, self.down_EDF)


@register_experts(Own)
def _own(experts: Own) -> ExpertsDescription:
    names = ("up_EFD", "down_EDF")
    return ExpertsDescription(experts.num_experts, names, FeedForwardExperts(silu_gated))


class Listed(nn.ModuleList):
    """A module for each expert."""

    def __init__(self, num_experts: int = 4) -> None:
        pair = (
            {"up": nn.Linear(16, 24, False), "down": nn.Linear(12, 16, False)} for _ in range(4)
        )
        super().__init__(map(nn.ModuleDict, pair))


@register_experts(Listed)
def _listed(experts: Listed) -> ExpertsDescription:
    kept = tuple(
        OneEach(tuple(f"{number}.{name}.weight" for number in range(len(experts))))
        for name in ("up", "down")
    )
    function = FeedForwardExperts(silu_gated)
    return ExpertsDescription(len(experts), ("up", "down"), function, kept_as=kept)


class Block(nn.Module):
    """A router, experts and a norm."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(16), nn.Linear(16, 4), experts

    def forward(self, x_TD: Tensor) -> Tensor:
        score_TK, expert_TK = self.router(self.norm(x_TD)).softmax(dim=-1).topk(2)
        made: Tensor = self.experts(x_TD, expert_TK, score_TK)
        return x_TD + made


def attached(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    """Names and values of all weights of this rank, experts by their numbers."""
    torch.manual_seed(5)
    with torch.device("meta"):
        model = nn.Sequential(*(Block({"own": Own, "listed": Listed}[kind]()) for _ in range(2)))
    state, printed = torch.get_rng_state(), StringIO()
    with redirect_stdout(printed):
        ds_moe_ext.attach(model, {"enabled": True, "report": {"path": None}})
    generator = torch.Generator().set_state(state)
    torch.randint(2**62, (1,), generator=generator)
    assert torch.equal(torch.get_rng_state(), generator.get_state()), "one number was drawn"
    expected = (
        "the model came on the meta device: 8 dense weights and 0 buffers were made alike on every"
    )
    assert rank or expected in printed.getvalue().replace("\n", " "), printed.getvalue()
    found = {name: p.detach() for name, p in model.named_parameters() if "experts" not in name}
    for number, each in enumerate(model):
        hosted: Any = each.experts
        held = hosted.routed.layer_context.plan.owner.experts_of(rank)
        for expert, slot in zip(held, hosted.slots(), strict=True):
            for name, weight in zip(hosted.weight_names, slot.parameters):
                found[f"{number}.{expert}.{name}"] = weight.detach()
    return found


@pytest.mark.parametrize("kind", ["own", slow("listed")])
def test_experts_of_ones_own(kind: str) -> None:
    (whole,) = pool_of(1).run(attached, kind)
    halves = pool_of(2).run(attached, kind)
    assert halves[0].keys() | halves[1].keys() == whole.keys()
    for half in halves:
        assert len([name for name in half if name[2].isdigit()]) == 2 * 2 * 2
        assert all(torch.equal(weight, whole[name]) for name, weight in half.items())
    if kind == "own":
        for expert in range(4):
            up, down = (whole[f"0.{expert}.{name}"] for name in ("up_EFD", "down_EDF"))
            assert up[12:].abs().max() <= 0.6 < up[:12].abs().max() <= 1.3
            assert bool((down[:, 5] == 0.5).all()) == (expert in (1, 2))
            fans = 16 * 12 + 4 * 12  # of the weight of all experts
            assert abs(float(down[:, :5].std()) / (2 / fans) ** 0.5 - 1) < 0.5
    drawn = [whole[name] for name in whole if name.endswith(("up_EFD", "up"))]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])


# What is lost, and what is refused.


def warned(rank: int, world_size: int, way: str) -> list[str]:
    """What is reported of a layer of transformers that somebody drew anew."""
    with built(way):
        model = families.made("mixtral")
        nn.init.normal_(model.model.layers[1].self_attn.q_proj.weight)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ds_moe_ext.attach(model, {"enabled": True, "report": {"enabled": False}})
    return [str(each.message) for each in caught if "meta device" in str(each.message)]


def test_values_that_are_lost_are_reported() -> None:
    (results,) = pool_of(1).run(warned, "meta")
    assert "values written to model.layers.1.self_attn.q_proj.weight are lost" in results[0]
    assert len(results) == 1
    assert pool_of(1).run(warned, "real") == [[]]


class WithBuffer(Block):
    def __init__(self) -> None:
        super().__init__(Own())
        self.register_buffer("table", torch.arange(4), persistent=False)


class WithAttribute(Block):
    def __init__(self) -> None:
        super().__init__(Own())
        self.table = torch.arange(4)


class WithWeight(Block):
    def __init__(self) -> None:
        super().__init__(Own())
        self.scale = nn.Parameter(torch.ones(16))


class Redrawn(Block):
    def __init__(self) -> None:
        super().__init__(Own())
        nn.init.normal_(self.router.weight, std=0.5)


class Orthogonal(Own):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.up_EFD)
        nn.init.orthogonal_(self.down_EDF)


class Half(Own):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.up_EFD)
        nn.init.normal_(self.down_EDF[:, :8])


class Bare(Own):
    def reset_parameters(self) -> None:
        pass


class Failing(Own):
    def __init__(self) -> None:
        super().__init__()
        self.is_built = True

    def reset_parameters(self) -> None:
        if "is_built" in vars(self):
            raise RuntimeError("nothing to read here")


for _kind in (Orthogonal, Half, Bare, Failing):
    register_experts(_kind)(_own)


def half_real() -> nn.Module:
    block = Block(Own())
    block.experts.up_EFD = nn.Parameter(torch.zeros(4, 24, 16, device="cpu"))
    return block


REFUSED: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a buffer": (WithBuffer, ("nothing initialises 0.table (of a WithBuffer)", "init_empty")),
    "an attribute": (WithAttribute, ("the attribute 'table' of 0", "init_empty_weights")),
    "a weight": (WithWeight, ("nothing initialises 0.scale (of a WithWeight)", "on the CPU")),
    "redrawn": (Redrawn, ("wrote to 0.router.weight behind the reset_parameters", "_init_weights")),
    "orthogonal": (lambda: Block(Orthogonal()), ("'down_EDF' of its Orthogonal", "orthogonal")),
    "a half": (lambda: Block(Half()), ("leaves part of 'down_EDF'", "on the CPU")),
    "bare": (lambda: Block(Bare()), ("initialises 'up_EFD' of its Bare; write a", "zeros_")),
    "failing": (lambda: Block(Failing()), ("initialiser of Failing fails", "nothing to read")),
    "half real": (half_real, ("of 0.experts down_EDF lies on the meta device, and the other",)),
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    """By what was wrong, the error."""
    found = {}
    block = {"enabled": True, "report": {"enabled": False}}
    for name, (make, _) in REFUSED.items():
        with torch.device("meta"):
            model = nn.Sequential(make())
        with pytest.raises(ValueError) as caught:
            ds_moe_ext.attach(model, block)
        found[name] = str(caught.value)
    with torch.device("meta") if rank == 0 else nullcontext():
        model = nn.Sequential(Block(Own()))
    if world_size > 1:
        with pytest.raises(ValueError) as caught:
            ds_moe_ext.attach(model, block)
        found["ranks"] = str(caught.value)
    return found


def test_what_cannot_be_initialised_is_refused() -> None:
    for found in pool_of(2).run(refused):
        ranks = found.pop("ranks")
        assert "on the meta device is 6 on rank 0 and 0 on rank 1" in ranks
        for name, (_, expected) in REFUSED.items():
            assert all(part in found[name] for part in expected), found[name]
