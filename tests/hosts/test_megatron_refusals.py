# SPDX-License-Identifier: Apache-2.0
"""What cannot be done under Megatron-core is an error as early as can be, and says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import nn

from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts.attachment.notices import OWNERS, refuse, settle
from ds_moe_ext.hosts.megatron import active_settings, refusals
from ds_moe_ext.planning.strategy import Job, Plan, Strategy
from ds_moe_ext.strategies.fssdp import FullySharded
from tests.hosts import megatron_jobs, megatron_toy
from tests.hosts.megatron_jobs import Training, megatron, train
from tests.hosts.megatron_toy import MegatronRun, transformer_config
from tests.ranks import pool_of

ONE = MegatronRun(steps=1, num_layers=1)
Spoil = Callable[[nn.Module], None]


def block(strategy: str = "ep", **keys: Any) -> dict[str, Any]:
    return {"enabled": True, "strategy": strategy, "report": {"enabled": False}, **keys}


class Flag(NamedTuple):
    """A flag that is refused."""

    fields: dict[str, Any]
    expected: str


FILLED = {"moe_apply_probs_on_input": True, "moe_pad_expert_input_to_capacity": True}
FLAGS = (
    Flag({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
    Flag({"delay_wgrad_compute": True}, "--delay-wgrad-compute"),
    Flag({"enable_cuda_graph": True}, "--cuda-graph-impl with MoE scopes"),
    Flag({"external_cuda_graph": True}, "--cuda-graph-impl with MoE scopes"),
    Flag({"cuda_graph_impl": "local"}, "all of a layer"),
    Flag(
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "moe_router"]},
        r"\(\['moe_router'\]\)",
    ),
    Flag({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex"),
    Flag({"fp8": "hybrid"}, r"--fp8-format \(hybrid\)"),
    Flag({"fp4": "e2m1"}, r"--fp4-format \(e2m1\)"),
    Flag({"moe_router_padding_for_quantization": True}, "--moe-router-padding-for-quantization"),
    Flag({"moe_router_padding_for_fp8": True}, "--moe-router-padding-for-quantization"),
    Flag(
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act"]},
        "--recompute-modules moe_act",
    ),
    Flag(
        {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
        "--offload-modules expert_fc1 or moe_act",
    ),
    Flag({"activation_func_fp8_input_store": True}, "--activation-func-fp8-input-store"),
    Flag({"add_bias_linear": True, "expert_tensor_parallel_size": 2}, "--disable-bias-linear"),
    Flag({**FILLED, "add_bias_linear": True}, "--moe-apply-probs-on-input with .* biases"),
    Flag({"use_kitchen": True}, "--use-kitchen"),
    Flag({"quant_recipe": object()}, "--use-kitchen or a quantization recipe"),
    Flag({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
    Flag({"moe_single_grouped_weight": True}, "--moe-single-grouped-weight"),
)

NOT_IN_EVERY_VERSION = {
    "moe_router_padding_for_fp8",  # to 0.14
    "moe_single_grouped_weight",  # after 0.16
}

ALLOWED: tuple[dict[str, Any], ...] = (
    {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]},
    {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    {"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm"]},
    {"add_bias_linear": True},
    FILLED,
)


def refused_fields(
    rank: int, world_size: int, asked: Sequence[dict[str, Any]]
) -> list[tuple[str, list[str]]]:
    """Of each, what the error says, empty for none; and fields that Megatron does not have."""
    lines = []
    for fields in asked:
        config = transformer_config(ONE)
        unknown = [name for name in fields if name not in vars(config)]
        vars(config).update(fields)  # Megatron would check them together with others
        message = ""
        try:
            refuse(refusals.REFUSALS, config)
        except ValueError as error:
            message = str(error)
        lines.append((message, unknown))
    return lines


def test_every_flag_that_is_refused_is_named_with_a_remedy() -> None:
    found = pool_of(1).run(refused_fields, [flag.fields for flag in FLAGS])[0]
    for flag, (message, unknown) in zip(FLAGS, found):
        assert set(unknown) <= NOT_IN_EVERY_VERSION, flag
        with pytest.raises(ValueError, match=flag.expected):
            raise ValueError(message)
        assert message.startswith("ds_moe_ext is enabled, but Megatron was given --") or (
            message.startswith("ds_moe_ext is enabled, but Megatron was given biases")
        )
        assert "; " in message
    text = " ".join(message for message, _ in found)
    assert all(refusal.remedy in text for refusal in refusals.REFUSALS)


def test_what_is_near_to_a_refused_flag_is_not_refused() -> None:
    found = pool_of(1).run(refused_fields, ALLOWED)[0]
    assert [message for message, _ in found] == [""] * len(ALLOWED)


def refused(
    rank: int,
    world_size: int,
    run: MegatronRun,
    settings: dict[str, Any],
    spoil: Spoil | None = None,
) -> str:
    """What the error says that ends a run on this rank; empty if nothing did."""
    try:
        with nullcontext() if spoil is None else spoiled(spoil):
            train(rank, world_size, run, settings)
    except ValueError as error:
        return str(error)
    return ""


def assert_refused(
    expected: str,
    run: MegatronRun,
    settings: dict[str, Any],
    spoil: Spoil | None = None,
    world_size: int = 1,
) -> None:
    """All ranks raise, so that none waits for another."""
    for message in pool_of(world_size).run(refused, run, settings, spoil):
        with pytest.raises(ValueError, match=expected):
            raise ValueError(message)


def test_a_layer_is_refused_where_it_is_built() -> None:
    fields = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    run = replace(ONE, config=tuple(fields.items()), experts="te_grouped")
    assert_refused("--recompute-modules moe_act", run, block(megatron={"layer": "program"}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (block(expert_parallel_size=2), "expert_parallel_size is 2, but .*-model-parallel-size 1"),
        (block("esp", expert_sharding_size=2), "sharding_size is 2, but .*-tensor-parallel-size 1"),
        (block(moe_layer_pattern="none"), "no rank has an MoE layer .*'none'; give --num-experts"),
        (block(gate={"type": "softmax_top_k"}), "gate is .*--moe-router-load-balancing-type"),
        (block(capacity_factor=1.5), "capacity_factor is 1.5: .*--moe-expert-capacity-factor"),
        (block(sequence_parallel=True), "sequence_parallel is True: .*use --sequence-parallel"),
    ],
)
def test_settings_that_say_other_than_megatron(settings: dict[str, Any], expected: str) -> None:
    assert_refused(expected, ONE, settings)


def test_moving_experts_needs_one_owner_an_expert() -> None:
    settings = block("fssdp", fssdp={"reshard_interval": 3})
    expected = (
        "interval is 3, but each expert has 2 .*expert-model-parallel-size.*interval to 0 or null"
    )
    assert_refused(expected, ONE, settings, world_size=2)


def test_biases_that_megatron_sums_by_their_slots_are_not_moved() -> None:
    run = replace(ONE, tp=2, etp=1, ep=2, bias=True)
    moves = block("fssdp", fssdp={"reshard_interval": 3})
    expected = (
        r"interval is 3, but .*\(2, and 1 for experts\): .* --disable-bias-linear, or .*or null"
    )
    assert_refused(expected, run, moves, world_size=2)


@pytest.mark.parametrize(
    ("run", "every"),
    [
        (replace(ONE, tp=2, etp=1, ep=2, bias=True), 0),
        (replace(ONE, tp=2, etp=1, ep=2), 100),
        (replace(ONE, ep=2, bias=True), 100),
    ],
)
def test_experts_stay_by_themselves_where_biases_are_summed(run: MegatronRun, every: int) -> None:
    assert pool_of(1).run(moving_every, run)[0] == every


def test_a_model_without_moe_layers() -> None:
    run = replace(ONE, pp=2, num_layers=2, config=(("moe_layer_freq", [0, 0]),))
    assert_refused("no rank has an MoE layer; give --num-experts", run, block(), world_size=2)


def moving_every(rank: int, world_size: int, run: MegatronRun) -> int:
    """Steps between new owners of a run that was not given how many."""
    lines: list[str] = []
    config = transformer_config(run)
    settled = settle(OWNERS, FullySharded(), refusals.SUMMED, config, lines.append)
    assert bool(lines) == (settled != FullySharded())
    return settled.intervals().shard_every


# Models that are not as Megatron-LM makes them.


@contextmanager
def spoiled(spoil: Spoil) -> Iterator[None]:
    """Something is done to each part of a model when it has been made."""

    def model_chunks(run: MegatronRun, config: Any) -> list[nn.Module]:
        chunks = megatron_toy.model_chunks(run, config)
        for chunk in chunks:
            spoil(chunk)
        return chunks

    with mock.patch.object(megatron_jobs, "model_chunks", model_chunks):
        yield


def frozen_for_a_while(chunk: nn.Module) -> None:
    """The optimizer is made for some of the weights, as Muon's is."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_("experts" not in name)


def reclassed(chunk: nn.Module, **members: Any) -> None:
    """The experts' class is one below Megatron's, with these members."""
    for module in chunk.modules():
        if type(module).__name__ == "SequentialMLP":
            module.__class__ = type("MyExperts", (type(module),), members)


def other_experts(chunk: nn.Module) -> None:
    """The experts' class is of the user's own, and computes by itself."""
    reclassed(chunk, forward=lambda self, *given: given[0])


def wrapped_forward(chunk: nn.Module) -> None:
    """Somebody has put another forward on the experts."""
    for module in chunk.modules():
        if type(module).__name__ == "SequentialMLP":
            module.forward = module.forward


def other_mlp(chunk: nn.Module) -> None:
    """One expert is of another class."""
    for name, module in chunk.named_modules():
        if name.endswith("local_experts.1"):
            module.__class__ = type("MyMLP", (type(module),), {"forward": lambda self, x: (x, x)})


def foreign_experts(chunk: nn.Module) -> None:
    """A class that is not Megatron's has the name of one."""
    for module in chunk.modules():
        if type(module).__name__ == "SequentialMLP":
            module.__class__ = type("SequentialMLP", (nn.Module,), {})


def as_below(rank: int, world_size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Losses with experts of a class below Megatron's that computes as Megatron's does, and of
    stock Megatron."""
    run = replace(ONE, steps=2, dtype="float64")
    with spoiled(reclassed):
        ours = train(rank, world_size, run, block())
    return ours.losses, train(rank, world_size, run).losses


def test_a_class_below_megatrons_is_adopted() -> None:
    ((ours, stock),) = pool_of(1).run(as_below)
    assert ours == pytest.approx(stock, rel=1e-12)


def adapted_experts(chunk: nn.Module) -> None:
    """A linear module of an expert is within another, as adapters do it."""
    for name, module in chunk.named_modules():
        if name.endswith("local_experts.0"):
            module.linear_fc1 = nn.ModuleDict({"to_wrap": module.linear_fc1})


def optimized(chunk: nn.Module) -> None:
    """An optimizer is made for a model; its own will be a second one."""
    from megatron.core import optimizer

    config = optimizer.OptimizerConfig(optimizer="adam", lr=1.0)
    optimizer.get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)


def unwrapped(rank: int, world_size: int) -> str:
    """What is reported of a model in no wrapper, or in another."""
    from ds_moe_ext.hosts.megatron.engine import check_wrapped

    try:
        check_wrapped([nn.Linear(1, 1)])
    except ValueError as error:
        return str(error)
    return ""


def test_other_wrappers() -> None:
    (results,) = pool_of(1).run(unwrapped)
    assert "wrapped in Linear; expert weights must be in Megatron's Distributed" in results
    assert "leave --use-megatron-fsdp and --use-torch-fsdp2 out" in results


@dataclass(frozen=True, kw_only=True)
class Backwards(Strategy):
    """Experts live in another order than Megatron builds them in."""

    def first_owners(self, *given: Any) -> tuple[Placement, ...]:
        owners = super().first_owners(*given)
        return tuple(Placement.owned_by(h.owner_E[::-1].copy(), h.num_ep_ranks) for h in owners)

    def plan(self, job: Job) -> tuple[Plan, ...]:
        return tuple(map(Plan.at_owner, job.owners))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (frozen_for_a_while, "was trained when the model was wrapped, .* --optimizer muon; use"),
        (
            foreign_experts,
            "which .* supports SequentialMLP and TEGroupedMLP of Megatron-core: leave",
        ),
        (other_experts, r"\.MyExperts with a forward of its own, .* use Megatron's SequentialMLP"),
        (wrapped_forward, r"\.SequentialMLP with a forward of its own, which .* would not run"),
        (other_mlp, r"\.SequentialMLP with a forward of its own, which .* would not run"),
        (
            adapted_experts,
            r"experts of .*\.mlp lack linear_fc1.weight or .* as by adapters \(LoRA\)",
        ),
        (optimized, "is already run by ds_moe_ext: get_megatron_optimizer was called twice"),
    ],
)
def test_models_that_cannot_be_adopted(spoil: Spoil, expected: str) -> None:
    assert_refused(expected, ONE, block(megatron={"layer": "program"}), spoil)


def test_first_owners_are_where_megatron_built_the_experts() -> None:
    expected = r"would own experts \[.*\] of .*, but Megatron built it with experts \["
    settings = block(f"{__name__}:Backwards")
    assert_refused(expected, replace(ONE, ep=2), settings, world_size=2)


# Training that never started.


def unreported(rank: int, world_size: int) -> list[str]:
    """What is stated where no optimizer of Megatron's is made, in training, evaluation, and
    training by Megatron's when settings are no longer in use."""
    lines = []
    with megatron(ONE, block()):
        training = Training(replace(ONE, optimizer="none"))
        for forward in (training.compute, training.evaluate):
            try:
                forward(0)
                lines.append("")
            except ValueError as error:
                lines.append(str(error))
    with megatron(ONE):
        Training(replace(ONE, optimizer="none")).compute(0)
    return lines


def test_a_model_that_is_trained_without_having_been_started() -> None:
    trained, evaluated = pool_of(1).run(unreported)[0]
    assert "in megatron.core.optimizer.get_megatron_optimizer, which was not called" in trained
    assert evaluated == ""


def late(rank: int, world_size: int) -> str:
    """What is stated where settings come between a model and its optimizer."""
    from ds_moe_ext.patches.megatron import forget, use

    with megatron(ONE):
        chunks = megatron_toy.model_chunks(ONE, transformer_config(ONE))
        use({"ds_moe_ext": block()})
        try:
            optimized(chunks[0])
        except ValueError as error:
            return str(error)
        finally:
            forget()
    return ""


def test_settings_that_come_behind_the_model() -> None:
    (stated,) = pool_of(1).run(late)
    assert "decoder.layers.0.mlp was built before ds_moe_ext.use was called" in stated
    assert "call use before the model is built" in stated


def left_alone(rank: int, world_size: int) -> tuple[int, ...]:
    """Hooks before the forward of each MoE layer of a model that was started for one of two."""
    with megatron(ONE, block(moe_layer_pattern=r"layers\.1")):
        training = Training(replace(ONE, num_layers=2))
        training.compute(0)
        (chunk,) = training.chunks
        layers = [m for m in chunk.modules() if type(m).__name__ == "MoELayer"]
        return tuple(len(layer._forward_pre_hooks) for layer in layers)


def test_layers_that_are_left_to_megatron_are_trained_by_it() -> None:
    assert pool_of(1).run(left_alone)[0] == (0, 0)


# What a flag or a call may name.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "which has no block 'ds_moe_ext'; add one, or leave the flag out"),
        (
            '{"ds-moe-ext": {}}',
            "no block 'ds_moe_ext'; unknown key 'ds-moe-ext' in .* did",
        ),
        ("[]", "whose JSON is not an object; make it one"),
        ("{", "which cannot be read as JSON .* as those in configs/strategies are"),
    ],
)
def test_documents_that_cannot_be_read(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected):
        active_settings.read(path)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        active_settings.read(tmp_path / "missing.json")


def test_a_block_that_is_not_enabled_asks_for_nothing_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"set ds_moe_ext.enabled to true, or leave the flag out"):
        assert active_settings.read({"ds_moe_ext": {"enabled": False, "strategy": "fssdp"}}) is None


def test_a_second_block_by_nearly_our_name_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = {"ds_moe_ext": {"enabled": True}, "ds_moe_exts": {}}
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match="unknown key 'ds_moe_exts'") as caught:
        assert active_settings.read(document) is not None
    assert len(caught) == 1
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert active_settings.read(document) is not None


def reported(rank: int, world_size: int) -> str:
    """What is shown as a run starts whose ranks have all experts."""
    settings = block("fssdp", report={"enabled": True})
    with redirect_stdout(StringIO()) as shown, megatron(ONE, settings):
        Training(ONE)
    return shown.getvalue()


def test_one_ep_rank_has_nobody_to_copy_to() -> None:
    first, second = pool_of(2).run(reported)
    assert (
        "ds_moe_ext: every rank has all experts, so there are no replicas; raise "
        "--expert-model-parallel-size for fssdp to have an effect\n"
    ) in first
    assert "ds_moe_ext" not in second
