# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with replaced experts against the stock models: output and every gradient."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext import ExpertsDescription, FeedForwardExperts, register_experts
from ds_moe_ext.testing import relative_error
from tests.hosts import families
from tests.hosts.families import tokens_of
from tests.hosts.replaced import replace_experts, stacked
from tests.marks import slow
from tests.ranks import pool_of

Errors = dict[str, float]


@dataclass(frozen=True)
class Case:
    family: str
    dtype: torch.dtype = torch.float32
    pattern: str | None = None
    ep_ranks: int | None = None


def compare(rank: int, world_size: int, case: Case) -> Errors:
    """Relative errors of one rank's model with replaced experts, by name."""
    from ds_moe_ext import full_state_dict

    stock, ours = (families.build(case.family, case.dtype) for _ in range(2))
    stock.set_experts_implementation("eager")
    names = {name for name, _ in stock.named_parameters()}
    layers = replace_experts(
        ours, moe_layer_pattern=case.pattern, expert_parallel_size=case.ep_ranks
    )
    assert stacked(dict(ours.named_parameters())).keys() == names

    own = tokens_of(rank)
    got, expected = (model(input_ids=own, labels=own) for model in (ours, stock))
    errors = errors_of_outputs(got, expected)
    got.loss.backward()
    held = {layer.name: layer.routed.layer_context for layer in layers}
    theirs = stock_grads(stock, rank, same_grid(rank, world_size, case.ep_ranks), set(held))
    ours_grads = grads_of(ours)
    assert ours_grads.keys() == theirs.keys()
    for name, grad in ours_grads.items():
        wanted, layer_context = theirs[name], held.get(name.rpartition(".")[0])
        if layer_context is not None:
            wanted = wanted[layer_context.plan.owner.experts_of(layer_context.layout.index("ep"))]
        errors[f"gradient of {name}"] = relative_error(grad, wanted)

    whole = families.build(case.family, case.dtype, seed=1)
    whole.load_state_dict(full_state_dict(ours), strict=True)
    whole.set_experts_implementation("eager")
    assert torch.equal(whole(input_ids=own).logits, stock(input_ids=own).logits)
    return errors


def errors_of_outputs(got: Any, expected: Any) -> Errors:
    assert got.keys() == expected.keys()
    errors = {
        key: relative_error(got[key], expected[key])
        for key in ("logits", "loss", "aux_loss")
        if expected.get(key) is not None
    }
    pairs = zip(got.get("router_logits") or (), expected.get("router_logits") or ())
    return errors | {f"router_logits {i}": relative_error(*pair) for i, pair in enumerate(pairs)}


def same_grid(rank: int, world_size: int, ep_ranks: int | None) -> range:
    """Ranks of the same expert-parallel grid: their rows reach this rank's experts."""
    ep_ranks = ep_ranks or world_size
    return range(rank // ep_ranks * ep_ranks, (rank // ep_ranks + 1) * ep_ranks)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    """By name; those of a replaced layer's slots as one, as the stock model has them."""
    return stacked({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def stock_grads(model: nn.Module, rank: int, peers: range, replaced: set[str]) -> dict[str, Tensor]:
    """Of the rank's own batch for dense parameters; summed over the grid's for experts."""
    total: dict[str, Tensor] = {}
    for other in peers:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens_of(other), labels=tokens_of(other)).loss.backward()
        for name, grad in grads_of(model).items():
            if name.rpartition(".")[0] in replaced:
                total[name] = total[name] + grad if name in total else grad
            elif other == rank:
                total[name] = grad
    return total


def check(world_size: int, case: Case, tolerance: float) -> list[Errors]:
    ranks: list[Errors] = pool_of(world_size).run(compare, case)
    for errors in ranks:
        assert max(errors.values()) <= tolerance, errors
    return ranks


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "family", ["mixtral", *(slow(name) for name in families.NAMES if name != "mixtral")]
)
def test_equals_stock(family: str, world_size: int) -> None:
    errors = check(world_size, Case(family), 1e-5)[0]
    assert {"logits", "loss"} <= errors.keys()
    if not family.startswith(("deepseek", "llama4")):  # which have no auxiliary loss
        assert {"aux_loss", "router_logits 0", "router_logits 1"} <= errors.keys()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("family", families.NAMES)
def test_equals_stock_in_float64(family: str, world_size: int) -> None:
    """To the last digits, unless the family scores in float32 whatever its weights are."""
    (keeps,) = pool_of(1).run(scores_in_float64, family)
    check(world_size, Case(family, torch.float64), 1e-13 if keeps else 2e-6)


def scores_in_float64(rank: int, world_size: int, family: str) -> bool:
    model = families.build(family, torch.float64)
    model.set_experts_implementation("eager")
    seen: list[torch.dtype] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[-1].dtype))
    model(input_ids=tokens_of(0))
    assert len(seen) == families.MOE_LAYERS[family]
    return all(dtype == torch.float64 for dtype in seen)


@pytest.mark.parametrize("ep_ranks", [None, 2, 1])
def test_four_ranks_equal_stock(ep_ranks: int | None) -> None:
    """Four EP ranks; two grids of two; four ranks with all experts each."""
    check(4, Case("mixtral", ep_ranks=ep_ranks), 1e-5)


def test_pattern_replaces_some_layers_only() -> None:
    check(2, Case("mixtral", pattern=r"layers\.1\."), 1e-5)
    assert (
        pool_of(2).run(classes_of_experts, r"layers\.1\.")
        == [["MixtralExperts", "HostedExperts"]] * 2
    )


def classes_of_experts(rank: int, world_size: int, pattern: str) -> list[str]:
    model = families.build("mixtral")
    layers = replace_experts(model, moe_layer_pattern=pattern)
    assert [layer.name for layer in layers] == ["model.layers.1.mlp.experts"]
    return [type(layer.mlp.experts).__name__ for layer in model.model.layers]


def test_evaluation_equals_stock() -> None:
    for error in pool_of(2).run(compare_in_evaluation):
        assert error <= 1e-5


def compare_in_evaluation(rank: int, world_size: int) -> float:
    stock, ours = (families.build("qwen3_moe").eval() for _ in range(2))
    replace_experts(ours)
    assert not any(module.training for module in ours.modules())
    with torch.no_grad():
        return relative_error(*(m(input_ids=tokens_of(rank)).logits for m in (ours, stock)))


def test_frozen_experts_stay_frozen() -> None:
    for error in pool_of(2).run(compare_with_frozen_experts):
        assert error <= 1e-5


def compare_with_frozen_experts(rank: int, world_size: int) -> float:
    """Worst error of a dense gradient, where experts have none."""
    stock, ours = (families.build("mixtral") for _ in range(2))
    for model in (stock, ours):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".experts." not in name)
    replace_experts(ours)
    for model in (stock, ours):
        model(input_ids=tokens_of(rank), labels=tokens_of(rank)).loss.backward()
    ours_grads, theirs = grads_of(ours), grads_of(stock)
    assert ours_grads.keys() == theirs.keys()
    assert not any(".experts." in name for name in ours_grads)
    return max(relative_error(grad, theirs[name]) for name, grad in ours_grads.items())


def test_what_a_user_put_on_a_parameter_stays() -> None:
    """Optimizers and schedules look at such marks; DeepSpeed's own Muon does."""
    assert all(pool_of(2).run(marks_stay))


def marks_stay(rank: int, world_size: int) -> bool:
    model = families.build("mixtral")
    for number, parameter in enumerate(model.parameters()):
        parameter.my_mark = number
    marks = [p.my_mark for p in model.parameters()]
    replace_experts(model)
    return list(dict.fromkeys(p.my_mark for p in model.parameters())) == marks


def test_experts_that_two_layers_share_stay_shared() -> None:
    for errors in pool_of(2).run(compare_with_shared_experts):
        assert max(errors.values()) <= 1e-5, errors


def compare_with_shared_experts(rank: int, world_size: int) -> Errors:
    stock, ours = (families.build("mixtral") for _ in range(2))
    for model in (stock, ours):
        model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    (layer,) = replace_experts(ours)
    assert ours.model.layers[1].mlp.experts is ours.model.layers[0].mlp.experts
    own = tokens_of(rank)
    got, expected = (model(input_ids=own, labels=own) for model in (ours, stock))
    errors = errors_of_outputs(got, expected)
    got.loss.backward()
    theirs = stock_grads(stock, rank, range(world_size), {layer.name})
    held = layer.routed.layer_context.plan.owner.experts_of(rank)
    for name, grad in grads_of(ours).items():
        wanted = theirs[name][held] if ".experts." in name else theirs[name]
        errors[name] = relative_error(grad, wanted)
    return errors


# Experts of a user's own.


class ReluExperts(nn.Module):
    """Two matrices with a bias between, under names of their own."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.empty(num_experts, width, 2 * width))
        self.into_bias = nn.Parameter(torch.empty(num_experts, 2 * width))
        self.out = nn.Parameter(torch.empty(num_experts, 2 * width, width))
        self.out_bias = nn.Parameter(torch.empty(num_experts, width))

    def forward(self, hidden: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        y_TD = torch.zeros_like(hidden)
        for expert in range(self.into.shape[0]):
            token, choice = torch.where(expert_ids == expert)
            inner = torch.relu(hidden[token] @ self.into[expert] + self.into_bias[expert])
            out = (inner @ self.out[expert] + self.out_bias[expert]) * scores[token, choice, None]
            y_TD = y_TD.index_add(0, token, out)
        return y_TD


@register_experts(ReluExperts)
def describe(experts: nn.Module) -> ExpertsDescription:
    return ExpertsDescription(
        num_experts=experts.into.shape[0],
        weight_names=("into", "into_bias", "out", "out_bias"),
        function=FeedForwardExperts(torch.relu, is_transposed=True, has_bias=True),
    )


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 8, bias=False)
        self.experts = ReluExperts(8, 16)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x_TD: Tensor) -> Tensor:
        scores, ids = self.router(x_TD).softmax(-1).topk(3)
        return x_TD + self.experts(x_TD, ids, scores)


def test_registered_experts_equal_the_users_own() -> None:
    for errors in pool_of(2).run(compare_own_experts):
        assert max(errors) <= 1e-5, errors


def compare_own_experts(rank: int, world_size: int) -> list[float]:
    x_WTD = torch.randn(world_size, 20, 16, generator=torch.Generator().manual_seed(3))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(OwnModel())
    stock, ours = models
    (layer,) = replace_experts(ours)
    y_TD, expected_TD = ours(x_WTD[rank]), stock(x_WTD[rank])
    y_TD.square().sum().backward()
    for other in range(world_size):
        stock(x_WTD[other]).square().sum().backward()
    held = layer.routed.layer_context.plan.owner.experts_of(rank)
    return [
        relative_error(y_TD, expected_TD),
        *(
            relative_error(grads_of(ours)[f"experts.{name}"], grad[held])
            for name, grad in ((n, p.grad) for n, p in stock.experts.named_parameters())
        ),
    ]


# Every experts class of the installed transformers, and those that are refused.


class AnyConfig:
    """Answers for whatever a model's configuration is asked; sizes that fit together."""

    _experts_implementation = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name.split("_") or name == "hidden_activation":
            return "silu"
        if "limit" in name or "alpha" in name:
            return 1.5
        if "experts" in name and "tok" not in name:
            return 4
        return 16 if name == "hidden_size" else 12


def experts_classes() -> Iterator[type[nn.Module]]:
    """Classes of the installed transformers that keep ``down_proj`` of all experts as one."""
    import transformers

    declares = re.compile(r"self\.down_proj = nn\.Parameter")
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if not declares.search(path.read_text()):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for cls in vars(module).values():
            own = inspect.isclass(cls) and cls.__module__ == module.__name__
            if own and declares.search(inspect.getsource(cls)):
                yield cls


@pytest.mark.slow
def test_every_experts_class_equals_stock_or_is_left_alone() -> None:
    """A class that we took for what it is not would train wrongly and say nothing."""
    (errors,) = pool_of(1).run(errors_by_class)
    assert len(errors) > 30
    refused = {name for name, error in errors.items() if error is None}
    assert refused <= {
        "InklingSharedExperts",  # every token goes through all
        "Llama4TextExperts",  # takes rows by expert
        "MuseSparkExperts",  # normalises after each expert
    }
    wrong = {name: error for name, error in errors.items() if error is not None and error > 1e-5}
    assert not wrong


def errors_by_class(rank: int, world_size: int) -> dict[str, float | None]:
    return {cls.__name__: error_of_class(cls) for cls in experts_classes()}


def error_of_class(cls: type[nn.Module]) -> float | None:
    """Worst error of output and gradients; None if the class is refused."""
    torch.manual_seed(0)
    stock = nn.ModuleDict({"experts": cls(AnyConfig())})
    ours = nn.ModuleDict({"experts": cls(AnyConfig())})
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(stock.state_dict())
    try:
        replace_experts(ours)
    except ValueError:
        return None
    width = stock["experts"].down_proj.shape[1 if not is_transposed(stock["experts"]) else 2]
    hidden_TD = torch.randn(10, width)
    ids_TK = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    results = []
    for model in (ours, stock):
        x_TD = hidden_TD.clone().requires_grad_()
        scores_TK = torch.linspace(0.1, 0.9, 20).view(10, 2).requires_grad_()
        y_TD = model["experts"](x_TD, ids_TK, scores_TK)
        y_TD.square().sum().backward()
        results.append([y_TD, x_TD.grad, scores_TK.grad, *grads_of(model).values()])
    pairs = zip(*results, strict=True)  # of LongCat-Flash's weights not those that nothing reads
    return max(relative_error(mine, theirs[: len(mine)]) for mine, theirs in pairs)


def test_all_experts_of_a_family_are_known() -> None:
    """Shared experts, routers and the like are not taken for experts that stay as they are."""
    assert pool_of(1).run(unknown_of_families) == [{key: [] for key in families.NAMES}]


def unknown_of_families(rank: int, world_size: int) -> dict[str, list[str]]:
    from ds_moe_ext.hosts import huggingface
    from ds_moe_ext.hosts.attachment.host_layer import any_name
    from ds_moe_ext.hosts.attachment.modules import unknown_experts

    models = {name: families.build(name) for name in families.NAMES}
    return {
        name: unknown_experts(model, [f.name for f in huggingface.find(model, any_name)], any_name)
        for name, model in models.items()
    }


def is_transposed(experts: nn.Module) -> bool:
    return bool(getattr(experts, "is_transposed", False))


def refusal(rank: int, world_size: int, path: str, extra: str | None = None) -> str:
    """The error that replacing a model's only experts gives."""
    module, _, name = path.rpartition(".")
    experts = getattr(importlib.import_module(module), name)(AnyConfig())
    if extra is not None:
        experts.register_parameter(extra, nn.Parameter(torch.ones(4, 1, 1)))
    with pytest.raises(ValueError) as caught:
        replace_experts(nn.ModuleDict({"experts": experts}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "extra", "expected"),
    [
        ("llama4.modeling_llama4.Llama4TextExperts", None, "as experts(hidden_states), not"),
        ("muse_spark.modeling_muse_spark.MuseSparkExperts", None, "normalises after each expert"),
        ("mixtral.modeling_mixtral.MixtralExperts", "gate_up_proj_scale_inv", "scale_inv"),
    ],
)
def test_families_that_cannot_work_are_refused(path: str, extra: str | None, expected: str) -> None:
    if importlib.util.find_spec(f"transformers.models.{path.partition('.')[0]}") is None:
        pytest.skip("this transformers does not have it")
    (error,) = pool_of(1).run(refusal, f"transformers.models.{path}", extra)
    assert expected in error
    assert "\n" not in error
    assert "moe_layer_pattern" in error or "register_experts" in error


@pytest.mark.slow
@pytest.mark.parametrize("folder", os.environ.get("DS_MOE_EXT_TRANSFORMERS", "").split(os.pathsep))
def test_other_transformers(folder: str) -> None:
    """The tests above under other versions, unpacked in folders that the environment names."""
    if not folder:
        pytest.skip("DS_MOE_EXT_TRANSFORMERS names no folder")
    environment = {key: v for key, v in os.environ.items() if key != "DS_MOE_EXT_TRANSFORMERS"}
    environment["PYTHONPATH"] = folder
    found = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(folder)
    chosen = "not other_transformers and not test_every"
    command = [sys.executable, "-m", "pytest", __file__, "-m", "", "-k", chosen]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
