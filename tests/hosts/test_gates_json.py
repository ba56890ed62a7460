# SPDX-License-Identifier: Apache-2.0
"""Gates that JSON names, in the routers of real engines. Shape letters: T tokens, E experts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.hosts.attachment.router_gates import routers_of, warn_if_causal
from ds_moe_ext.hosts.huggingface import find
from ds_moe_ext.moe.gate import (
    Choice,
    ExpertChoice,
    Gate,
    GateWeight,
    NoisyTopK,
    SigmoidTopK,
    SoftmaxTopK,
    SoftMixture,
    balance_loss,
    projection,
    z_loss,
)
from ds_moe_ext.strategies.settings import read_settings
from ds_moe_ext.testing import relative_error
from tests.hosts import families, toy
from tests.hosts.copied_runs import check_equal
from tests.hosts.jobs import Job, Result, engine_of, loss_of, micro_batch, train
from tests.hosts.replaced import replace_experts
from tests.marks import slow
from tests.ranks import pool_of

Keys = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class ReluTopK(Gate):
    """A gate of a user's own: what ``docs/gates.md`` shows."""

    floor: float = 0.0

    def choose(self, logit_TE: Tensor) -> Choice:
        logit_TK, expert_TK = logit_TE.topk(self.num_choices, dim=-1)
        losses = balance_loss(logit_TE.softmax(dim=-1), expert_TK), z_loss(logit_TE)
        return Choice(expert_TK, logit_TK.clamp(min=self.floor), torch.stack(losses))


@dataclass(frozen=True, kw_only=True)
class Misnamed(ReluTopK):
    """Its weight has a name that something else has."""

    name: str = "my_experts"  # DeepSpeed would take it for an expert's

    def weights(self, num_experts: int, width: int) -> tuple[GateWeight, ...]:
        return (projection(self.name, num_experts, width),)


def of_type(name: str, **keys: Any) -> Keys:
    return (("type", name), *keys.items())


NOISY = of_type("noisy_top_k")
COSINE = of_type("cosine_top_k", projection_size=16)
GATES = {
    "softmax": of_type("softmax_top_k"),
    "softmax over all": of_type("softmax_top_k", top_k=1, renormalize=False),
    "sigmoid": of_type("sigmoid_top_k", top_k=None),
    "cosine": COSINE,
    "expert choice": of_type("expert_choice", capacity_factor=1.25),
    "soft": of_type("soft"),
    "two soft slots": of_type("soft", slots_per_expert=2),
    "a user's": of_type("tests.hosts.test_gates_json:ReluTopK", floor=0.1),
}
FAMILIES = ["mixtral", "gpt_moe"]


def job_of(family: str, gate: Keys, **fields: Any) -> Job:
    return Job(family, 0, dtype="float64", gate=gate, **{"steps": 3, "clip": 0.5, **fields})


@functools.cache
def run(world_size: int, job: Job) -> Result:
    result: Result = pool_of(world_size).run(train, job)[0]
    return result


def of_gates(result: Result) -> dict[str, Tensor]:
    names = (".gate.", ".wg.")
    return {k: v for k, v in result.state.items() if any(name in k for name in names)}


# What trains.


QUICK = {("mixtral", "expert choice"), ("mixtral", "a user's")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        case if (case := (family, name)) in QUICK else slow(*case)
        for family in FAMILIES
        for name in GATES
    ],
)
def test_four_ranks_equal_one(family: str, name: str) -> None:
    """A micro-batch lies on one rank in both, so experts choose among the same tokens."""
    job = job_of(family, GATES[name])
    ours = run(4, job)
    check_equal(ours, run(1, job), job, tolerance=1e-11)
    start = of_gates(run(1, replace(job, steps=0)))
    assert {key.rpartition(".")[2] for key in start} == WEIGHTS.get(name, {"weight"})
    for key, weight in of_gates(ours).items():
        assert not torch.equal(weight, start[key]), f"{key} was not trained"


WEIGHTS = {"cosine": {"projection", "direction", "sharpness"}}


@pytest.mark.parametrize("name", ["expert choice", slow("two soft slots"), slow("cosine")])
def test_split_experts_take_any_gate(name: str) -> None:
    """Two EP ranks of two ranks against two grids of two EP ranks, by DeepSpeed's own reduction."""
    job = Job("mixtral", 1, gate=GATES[name], steps=3, ep_ranks=2)
    split = replace(job, strategy="esp", etp_size=2)
    assert run(4, split).losses == pytest.approx(run(4, job).losses, rel=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "parameters"),
    [("object", "list"), slow("object", "groups"), slow("callable", "list"), slow("json", "list")],
)
@pytest.mark.parametrize("stage", [slow(1), 2])
@pytest.mark.parametrize("gate", [NOISY, COSINE], ids=["noisy", "cosine"])
def test_new_weights_join_the_users_optimizer(
    gate: Keys, stage: int, parameters: str, optimizer: str
) -> None:
    """Made before we came; noise starts at zero, but all of them move."""
    job = Job("mixtral", stage, gate=gate, steps=2, optimizer=optimizer, parameters=parameters)
    start, trained = of_gates(run(2, replace(job, steps=0))), of_gates(run(2, job))
    assert start.keys() == trained.keys()
    for key in start:
        assert not torch.equal(start[key], trained[key]), f"{key} was not trained"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "cosine"),
        slow("gpt_moe", "cosine"),
        slow("gpt_moe", "soft"),
        slow("mixtral", "soft"),
    ],
)
def test_resumed_run_goes_on_exactly(family: str, name: str, tmp_path: Path) -> None:
    job = Job(family, 1, gate=GATES[name], steps=4, save_at=2, folder=str(tmp_path))
    straight = run(2, job)
    resumed = run(2, replace(job, save_at=None, resume=True))
    assert resumed.losses == straight.losses[2:]
    assert all(torch.equal(resumed.state[key], straight.state[key]) for key in straight.state)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_trains(family: str, name: str) -> None:
    job = Job(family, 1, gate=GATES[name], steps=6)
    assert run(2, replace(job, dtype="bfloat16")).losses == pytest.approx(
        run(1, job).losses, rel=2e-2
    )


def losses_in_modes(rank: int, world_size: int, job: Job) -> tuple[list[float], list[float]]:
    """Of one micro-batch, thrice in training and thrice in evaluation."""
    engine = engine_of(replace(job, dtype="float32"), world_size)
    losses = []
    for is_training in (True, False):
        engine.train(is_training)
        with torch.no_grad():
            losses.append([float(loss_of(engine, micro_batch(0, 0))) for _ in range(3)])
    return losses[0], losses[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_is_there_in_training_only(family: str) -> None:
    for training, evaluation in pool_of(2).run(losses_in_modes, job_of(family, NOISY)):
        assert len(set(training)) == 3
        assert len(set(evaluation)) == 1


# What hosts have of it.


OWN_GATES = {
    "mixtral": True,
    "qwen2_moe": False,
    "qwen3_moe": True,
    "qwen3_5_moe": True,
    "olmoe": False,
    "deepseek_v2": False,
}
"""Families whose own gate is softmax over those kept (true), or over all."""


def errors_of_own_gate(rank: int, world_size: int, family: str) -> dict[str, float]:
    """Of outputs, and of the router's gradient."""
    stock, ours = (families.build(family) for _ in range(2))
    replace_experts(ours, gate=SoftmaxTopK(renormalize=OWN_GATES[family]))
    tokens = families.tokens_of(rank)
    got, expected = (model(input_ids=tokens, labels=tokens) for model in (ours, stock))
    keys = [k for k in ("logits", "aux_loss") if expected.get(k) is not None]
    errors = {key: relative_error(got[key], expected[key]) for key in keys}
    pairs = zip(got.get("router_logits") or (), expected.get("router_logits") or ())
    errors |= {f"router {i}": relative_error(*pair) for i, pair in enumerate(pairs)}
    for output in (got, expected):
        output.loss.backward()
    for (name, mine), (_, theirs) in zip(routers(ours), routers(stock), strict=True):
        errors[name] = relative_error(mine.weight.grad, theirs.weight.grad)
    return errors


def routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [item for item in model.named_modules() if item[0].endswith("mlp.gate")][-1:]


@pytest.mark.parametrize("family", OWN_GATES)
def test_a_familys_own_gate_from_us_changes_nothing(family: str) -> None:
    """Nor the logits that its recorders see, nor the load-balance loss made from them."""
    (errors,) = pool_of(1).run(errors_of_own_gate, family)
    assert len(errors) == (2 if family.startswith("deepseek") else 5)
    assert max(errors.values()) <= 1e-5, errors


def recorded(rank: int, world_size: int, gate: Gate) -> tuple[bool, list[Tensor], Tensor]:
    model = families.build("mixtral")
    classes = [type(layer.mlp.gate) for layer in model.model.layers]
    replace_experts(model, gate=gate)
    stays = classes == [type(layer.mlp.gate) for layer in model.model.layers]
    tokens = families.tokens_of(rank)
    out = model(input_ids=tokens, labels=tokens)
    return stays, [logits.detach() for logits in out.router_logits], out.aux_loss.detach()


@pytest.mark.parametrize(
    "gate",
    [NoisyTopK(), SigmoidTopK(top_k=3), ExpertChoice(), SoftMixture(slots_per_expert=3)],
    ids=lambda gate: type(gate).__name__,
)
def test_recorders_see_a_logit_for_each_expert(gate: Gate) -> None:
    for stays, logits, aux_loss in pool_of(2).run(recorded, gate):
        assert stays
        num_tokens = families.ROWS * families.LENGTH
        assert [tuple(each.shape) for each in logits] == [(num_tokens, 8)] * 2
        assert 1.9 < float(aux_loss) < 8 * 2  # 2 would be even


def marks_of_gates(rank: int, world_size: int) -> list[tuple[str, int, bool]]:
    model = families.build("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.my_mark = 7
    model.model.layers[1].mlp.gate.weight.requires_grad_(False)
    replace_experts(model, gate=NoisyTopK())
    return [(n, p.my_mark, p.requires_grad) for n, p in model.named_parameters() if ".gate." in n]


def test_new_weights_are_marked_as_the_routers_is() -> None:
    (marks,) = pool_of(1).run(marks_of_gates)
    gate = "model.layers.{}.mlp.gate.{}"
    assert marks == [
        (gate.format(0, "weight"), 7, True),
        (gate.format(0, "noise"), 7, True),
        (gate.format(1, "weight"), 7, False),
        (gate.format(1, "noise"), 7, False),
    ]


def mixes_within_sequences(rank: int, world_size: int, family: str) -> float:
    """Largest difference between two sequences together and one at a time, in layer outputs."""
    engine = engine_of(Job(family, 0, gate=GATES["two soft slots"]), world_size)
    seen: list[Tensor] = []
    last = engine.module.lm_head if family == "mixtral" else engine.module.head
    last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    tokens = micro_batch(0, 0)
    with torch.no_grad():
        for rows in (tokens, tokens[:1], tokens[1:]):
            loss_of(engine, rows)
    together, *each = seen
    assert len(each) == 2 and not torch.allclose(*each)
    return relative_error(together, torch.cat(each))


@pytest.mark.parametrize("family", FAMILIES)
def test_soft_mixes_the_tokens_of_each_sequence_alone(family: str) -> None:
    for error in pool_of(2).run(mixes_within_sequences, family):
        assert error <= 1e-5


# What is warned of.


def messages(function: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in seen]


def test_causal_models_are_warned_of_gates_that_look_ahead() -> None:
    causal, bare = families.build("mixtral"), nn.ModuleDict({"attention": nn.Linear(2, 2)})
    for gate in (ExpertChoice(), SoftMixture()):
        (message,) = messages(lambda gate=gate: warn_if_causal(gate, causal))
        assert f"ds_moe_ext.gate is {type(gate).__name__}(" in message
        assert "looks at future tokens" in message and "MixtralForCausalLM is causal" in message
        assert not messages(lambda gate=gate: warn_if_causal(gate, bare))
    assert not messages(lambda: warn_if_causal(SigmoidTopK(), causal))
    assert not messages(lambda: warn_if_causal(None, causal))
    assert messages(lambda: warn_if_causal(ExpertChoice(), causal.model))  # by its attention


def warned(rank: int, world_size: int, job: Job) -> list[str]:
    return [m for m in messages(lambda: engine_of(job, world_size)) if "future tokens" in m]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_warns_once(family: str) -> None:
    job = Job(family, 0, gate=GATES["expert choice"])
    assert [len(messages) for messages in pool_of(2).run(warned, job)] == [1, 0]


# What is refused.


def with_gate(model: nn.Module, **children: Any) -> nn.Module:
    """Mixtral's first block, with other children."""
    block = model.model.layers[0].mlp
    for name, child in children.items():
        setattr(block, name, child)
    return model


class TwoInputs(nn.Module):
    """A router that wants more than hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 32))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden


class Failing(TwoInputs):
    """One that needs two tokens."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return hidden[1]


def sharing() -> nn.Module:
    model = families.build("mixtral")
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], Gate, str]] = {
    "bias": (
        lambda: families.build("gpt_oss"),
        SoftmaxTopK(),
        r"model\.layers\.0\.mlp\.experts cannot take: its GptOssTopKRouter has the weights "
        r"\['weight', 'bias'\], not one 'weight' of \[experts, D\]",
    ),
    "linear": (
        lambda: with_gate(families.build("mixtral"), gate=nn.Linear(32, 8, bias=False)),
        SigmoidTopK(top_k=2),
        "its Linear does not return logits, scores and expert ids",
    ),
    "none": (
        lambda: with_gate(families.build("mixtral"), gate=None),
        SoftmaxTopK(),
        "MixtralSparseMoeBlock has no gate or router beside the experts",
    ),
    "two inputs": (
        lambda: with_gate(families.build("mixtral"), gate=TwoInputs()),
        SoftmaxTopK(),
        "its TwoInputs is called with more than hidden states",
    ),
    "failing": (
        lambda: with_gate(families.build("mixtral"), gate=Failing()),
        SoftmaxTopK(),
        r"its Failing fails for one token \(IndexError",
    ),
    "shared": (sharing, SoftmaxTopK(), "2 blocks share its experts, with a router each"),
    "misnamed": (
        lambda: families.build("mixtral"),
        Misnamed(),
        "its weight 'my_experts' has 'expert' in its name, .* give it another name",
    ),
    "taken": (
        lambda: families.build("mixtral"),
        Misnamed(name="top_k"),
        "MixtralTopKRouter has a 'top_k' already: give the gate's weight another name",
    ),
    "too many": (lambda: families.build("mixtral"), NoisyTopK(top_k=9), "top_k is 9, of 8 experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_routers_that_cannot_take_a_gate_are_refused(name: str) -> None:
    build, gate, expected = REFUSED[name]
    model = build()
    with pytest.raises(ValueError, match=expected) as caught:
        routers_of(model, find(model, lambda name: True), gate)
    message = str(caught.value)
    assert message.startswith(f"ds_moe_ext.gate is {gate}, which model.layers.0.mlp.experts")
    assert "set ds_moe_ext.gate to null" in message and "moe_layer_pattern" in message


def test_experts_of_a_users_own_without_a_router_of_the_contract_are_refused() -> None:
    from ds_moe_ext.hosts.attachment.experts import find_registered

    model = toy.build("toy")
    with pytest.raises(ValueError, match=r"blocks\.0\.experts cannot take: its Linear does not"):
        routers_of(model, find_registered(model, lambda name: True), SoftmaxTopK())


def test_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_moe_ext.hosts.deepspeed.startup import blueprint_of

    monkeypatch.setenv("WORLD_SIZE", "2")
    document = {"ds_moe_ext": {"enabled": True, "gate": dict(NOISY)}}
    with pytest.raises(ValueError, match="its GptOssTopKRouter has the weights"):
        blueprint_of(document, families.build("gpt_oss"), None)


def used_tokens(rank: int, world_size: int) -> str:
    engine = engine_of(Job("gpt_moe", 0, gate=GATES["softmax"]), world_size)
    with pytest.raises(ValueError) as caught:
        engine.module.blocks[0].ffn(torch.zeros(2, 4, 32), torch.ones(8))
    return str(caught.value)


def test_used_tokens_are_refused() -> None:
    (message,) = pool_of(1).run(used_tokens)
    assert "used_token was passed to deepspeed.moe, which ds_moe_ext.gate does not" in message


# What JSON says.


def gate_of(values: Any, **block: Any) -> Gate | None:
    keys = {"enabled": True, "gate": values, **block}
    return read_settings({"ds_moe_ext": keys})[0].gate


def test_gates_are_read() -> None:
    assert gate_of(None) is None
    assert gate_of({"type": "softmax_top_k"}) == SoftmaxTopK()
    assert gate_of({"type": "noisy_top_k", "top_k": None}) == NoisyTopK()
    assert gate_of({"type": "soft", "slots_per_expert": 4}) == SoftMixture(slots_per_expert=4)
    factor = {"type": "expert_choice", "top_k": 2, "capacity_factor": 2}
    assert gate_of(factor) == ExpertChoice(top_k=2, capacity_factor=2.0)
    assert gate_of(dict(GATES["a user's"])) == ReluTopK(floor=0.1)
    assert gate_of(dict(NOISY), capacity_factor=1.5) == NoisyTopK()


@dataclass(frozen=True)
class NoGate:
    """Not derived from Gate."""


class Undeclared(ReluTopK):
    """Not a dataclass of its own."""


HERE = "tests.hosts.test_gates_json"
MALFORMED: list[tuple[Any, str]] = [
    ("noisy_top_k", "ds_moe_ext.gate is 'noisy_top_k', but must be an object"),
    ({"top_k": 2}, "ds_moe_ext.gate needs the key 'type'; add it: 'softmax_top_k', 'noisy_top_k'"),
    ({"type": 3}, "ds_moe_ext.gate.type is 3, but must be a string"),
    ({"type": "noisy_topk"}, "'noisy_topk', which is unknown; did you mean 'noisy_top_k'"),
    (
        {"type": "softmax_top_k", "topk": 2},
        "ds_moe_ext.gate has no key 'topk'; did you mean 'top_k'",
    ),
    ({"type": "soft", "renormalize": True}, "no key 'renormalize'; known: slots_per_expert, top_k"),
    ({"type": "noisy_top_k", "top_k": "2"}, "gate.top_k is '2', but must be an integer or null"),
    ({"type": "noisy_top_k", "top_k": 0}, "ds_moe_ext.gate: top_k is 0; a token needs 1 expert"),
    ({"type": "soft", "top_k": 2}, "ds_moe_ext.gate: top_k is 2, but SoftMoE does not choose"),
    ({"type": "no.such:Gate"}, "'no.such:Gate', which cannot be imported (ModuleNotFoundError"),
    ({"type": f"{HERE}:NoGate"}, "which is not a gate; derive it from ds_moe_ext.moe.gate.Gate"),
    ({"type": "ds_moe_ext.moe.gate:Gate"}, "which is not a gate; derive it"),
    ({"type": f"{HERE}:Undeclared"}, "which is not a dataclass; make it one"),
]


@pytest.mark.parametrize(("values", "expected"), MALFORMED, ids=[str(v)[:40] for v, _ in MALFORMED])
def test_malformed_gates_are_refused(values: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        gate_of(values)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["expert_choice", "soft"])
def test_capacity_has_no_effect_on_even_gates(name: str) -> None:
    with pytest.raises(ValueError, match=r"capacity_factor is 1\.5, but ds_moe_ext\.gate is .*out"):
        gate_of({"type": name}, capacity_factor=1.5)
