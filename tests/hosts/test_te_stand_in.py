# SPDX-License-Identifier: Apache-2.0
"""Megatron's layers of Transformer Engine, on the stand-in, and the stand-in beside the real one.

``TRANSFORMER_ENGINE_SOURCE`` names a source tree of the real one (the folder that has
``transformer_engine``), of any version from 2.10: nothing of it is imported.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.hosts.megatron_jobs import Trained, merged, train
from tests.hosts.megatron_skewed import Seen
from tests.hosts.megatron_toy import MegatronRun
from tests.hosts.processes import ROOT, run_script
from tests.ranks import pool_of

FOLDER = Path(__file__).parent
STAND_IN = FOLDER / "te_stand_in"
RUN = MegatronRun(dtype="float64", steps=2, num_microbatches=2, swiglu=True)
GROUPED = replace(RUN, experts="te_grouped")


Job = MegatronRun | tuple[MegatronRun, dict[str, Any]]


def trained(folder: Path, world_size: int, *jobs: Job) -> list[list[Trained]]:
    """By Transformer Engine's layers: of each run, with our settings or without, what each rank has
    found."""
    pairs = [job if isinstance(job, tuple) else (job, None) for job in jobs]
    found = by_engine(folder, world_size, [(*pair, ()) for pair in pairs])
    return [[one.trained for one in ranks] for ranks in found]


def by_engine(
    folder: Path, world_size: int, jobs: list[tuple[MegatronRun, Any, tuple[float, ...]]]
) -> list[list[Seen]]:
    """The same, of experts that are so busy."""
    asked = folder / "runs.pickle"
    asked.write_bytes(pickle.dumps(jobs))
    path = (STAND_IN, ROOT, ROOT / "launch")
    run_script(FOLDER / "te_script.py", str(asked), world_size=world_size, path=path)
    ranks = [pickle.loads(asked.with_suffix(f".{r}").read_bytes()) for r in range(world_size)]
    return [list(found) for found in zip(*ranks)]


def assert_same(found: list[Trained], expected: list[Trained], by: float = 1e-12) -> None:
    torch.testing.assert_close(found[0].losses, expected[0].losses, rtol=by, atol=0)
    torch.testing.assert_close(found[0].norms, expected[0].norms, rtol=by, atol=0)
    for kind in ("gradients", "weights"):
        here, there = (
            {_local_name(name): tensor for name, tensor in merged(shares).items()}
            for shares in ([vars(one)[kind] for one in run] for run in (found, expected))
        )
        assert here.keys() == there.keys()
        for name, tensor in there.items():
            torch.testing.assert_close(here[name], tensor, rtol=100 * by, atol=by, msg=name)


def _local_name(name: str) -> str:
    """What the local layers call a norm that stands in front of a linear."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")


def with_flags(run: MegatronRun, **config: Any) -> MegatronRun:
    return replace(run, config=tuple(config.items()))


def quantized(recipe: str, run: MegatronRun = GROUPED, **config: Any) -> MegatronRun:
    return with_flags(run, fp8="hybrid", fp8_recipe=recipe, **config)


def test_modules_do_as_the_real_ones() -> None:
    run_script(FOLDER / "te_modules.py", path=(STAND_IN,))


@pytest.mark.slow  # two ranks do in test_megatron_guests.py
def test_one_rank_trains_as_with_local_layers(tmp_path: Path) -> None:
    fused = {"moe_permute_fusion": True, "moe_router_fusion": True}
    act = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    found = trained(tmp_path, 1, GROUPED, RUN, with_flags(GROUPED, **fused, **act))
    expected = pool_of(1).run(train, RUN, keep=True)
    for run in found:
        assert_same(run, expected)


@pytest.mark.slow
def test_fp8_rounds_and_recomputes_the_same(tmp_path: Path) -> None:
    act = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    fp8 = [quantized("tensorwise"), quantized("tensorwise", RUN), quantized("delayed")]
    blocks = [quantized("mxfp8"), replace(quantized("mxfp8"), recompute="full")]
    exact, *rounded = trained(tmp_path, 1, GROUPED, *fp8, *blocks, quantized("mxfp8", **act))
    for found in rounded:
        assert found[0].losses != exact[0].losses
        torch.testing.assert_close(found[0].losses, exact[0].losses, rtol=0.02, atol=0)
    for one, other in ((1, 0), (2, 0), (4, 3)):
        assert_same(rounded[one], rounded[other])


@pytest.mark.slow
def test_other_layers_train_as_local_ones(tmp_path: Path) -> None:
    named = {"num_query_groups": 2, "normalization": "RMSNorm", "qk_layernorm": True}
    other = replace(with_flags(RUN, **named), shared_ffn=32)
    biased = replace(GROUPED, bias=True, swiglu=False)
    found = trained(tmp_path, 1, replace(other, experts="te_grouped"), biased)
    for run, local in zip(found, (other, biased)):
        assert_same(run, pool_of(1).run(train, local, keep=True))


@pytest.mark.slow
def test_expert_parallel_ranks_train_as_with_local_layers(tmp_path: Path) -> None:
    (found,) = trained(tmp_path, 2, replace(GROUPED, ep=2))
    assert_same(found, pool_of(2).run(train, replace(RUN, ep=2), keep=True))


@pytest.mark.slow
def test_our_strategies_learn_what_these_layers_do_alone(tmp_path: Path) -> None:
    run = replace(GROUPED, ep=2, optimizer="distributed", steps=3)
    common = {"enabled": True, "debug": True, "report": {"enabled": False}}
    settings: list[dict[str, Any]] = [
        {**common, "strategy": "ep"},
        {**common, "strategy": "fssdp", "fssdp": {"replicas_per_rank": 2}},
        {**common, "strategy": "prophet", "prophet": {"planner": "shadow", "split": "half"}},
    ]
    jobs: list[Job] = [(run, each) for each in settings]
    expected, *found = trained(tmp_path, 2, run, *jobs)
    for ours in found:
        torch.testing.assert_close(ours[0].losses, expected[0].losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours[0].norms, expected[0].norms, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_a_schedule_of_two_micro_batches_learns_the_same(tmp_path: Path) -> None:
    plain = replace(GROUPED, dtype="bfloat16", ep=2, num_microbatches=4)
    combined = with_flags(plain, overlap_moe_expert_parallel_comm=True)
    later = with_flags(plain, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    delayed = replace(later, ddp=(("delay_wgrad_compute", True),), overlap_grad_reduce=True)
    expected, *found = trained(tmp_path, 2, plain, combined, delayed)
    for run in found:
        assert_same(run, expected)


@pytest.mark.slow
def test_gradients_that_are_summed_in_place_are_the_same(tmp_path: Path) -> None:
    plain = replace(GROUPED, dtype="float32", ep=2)
    fused = with_flags(plain, gradient_accumulation_fusion=True)
    runs = (plain, fused, replace(fused, experts="sequential"), replace(fused, dtype="bfloat16"))
    expected, *found, half = trained(tmp_path, 2, *runs)
    for run in found:
        assert_same(run, expected, by=1e-5)
    torch.testing.assert_close(half[0].losses, expected[0].losses, rtol=0.01, atol=0)


@pytest.mark.slow
def test_tensor_parallel_ranks_train_as_one_with_local_layers(tmp_path: Path) -> None:
    (found,) = trained(tmp_path, 2, replace(GROUPED, tp=2, etp=1, ep=2))
    expected = pool_of(1).run(train, RUN, keep=True)
    torch.testing.assert_close(found[0].losses, expected[0].losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[0].norms, expected[0].norms, rtol=1e-12, atol=0)


# Beside the real one.


class Place(NamedTuple):
    """A class there: its file, and the attributes of instances that we set or read."""

    path: str
    attributes: str = ""


BASE = "fp8 fp8_calibration fp8_initialized fp8_meta fp8_meta_tensors_initialized quantizers "
BASE += "_fp8_workspaces primary_weights_in_fp8 activation_dtype wgrad_store tp_size "
BASE += "wgrad_accumulation_and_reduce_hooks"
LINEAR = "in_features out_features fuse_wgrad_accumulation use_bias return_bias apply_bias "
LINEAR += "parallel_mode sequence_parallel tp_size wgrad_store weight_names bias_names ub_name "
PLACES = {
    "TransformerEngineBaseModule": Place("module/base.py", BASE),
    "WeightGradStore": Place("module/_common.py", "context enabled"),
    "Linear": Place("module/linear.py", f"{LINEAR} save_original_input gemm_bias_unfused_add"),
    "LayerNormLinear": Place("module/layernorm_linear.py", f"{LINEAR} eps normalization"),
    "GroupedLinear": Place(
        "module/grouped_linear.py",
        LINEAR.replace("weight_names bias_names", "")
        + "num_gemms save_original_input _offsets _num_fp8_tensors_per_gemm",
    ),
    "Fp8Padding": Place("module/fp8_padding.py", "num_gemms align_size"),
    "Fp8Unpadding": Place("module/fp8_unpadding.py", "num_gemms align_size"),
    "RMSNorm": Place("module/rmsnorm.py"),
    "LayerNorm": Place("module/layernorm.py"),
    "DotProductAttention": Place("attention/dot_product_attention/dot_product_attention.py"),
    "CudaRNGStatesTracker": Place("distributed.py", "states_"),
}
ASKED = {  # by name, of what is called, the arguments that Megatron and the stand-in give
    "fp8_autocast": "enabled calibrating fp8_recipe fp8_group _graph",
    "fp8_model_init": "enabled recipe preserve_high_precision_init_val",
    "get_dummy_wgrad": "shape dtype zero",
}
OWN = {"take", "add_parameters", "prepare", "multiply", "store_wgrads"}  # of the stand-in alone
OWN |= {"build", "add_norm", "normalized", "get_weight_workspace"}  # a function since 2.15
OF_WEIGHTS = "main_grad get_main_grad __fsdp_param__ grad_added_to_main_grad zero_out_wgrad "
OF_WEIGHTS += "overwrite_main_grad skip_backward_post_hook"
SOURCE = os.environ.get("TRANSFORMER_ENGINE_SOURCE")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def classes_and_functions(folder: Path) -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef]]:
    for path in sorted(folder.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield path, node


def parameters(function: ast.FunctionDef) -> dict[str, str | None]:
    """Names in order, with the defaults as they are written; from a string where we say so."""
    taken = [d for d in function.decorator_list if isinstance(d, ast.Call)]
    arguments = function.args
    if taken and isinstance(taken[0].func, ast.Name) and taken[0].func.id == "takes":
        signature = _text(taken[0].args[0])
        arguments = ast.parse(f"lambda {signature}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [
        ast.unparse(default) for default in arguments.defaults
    ]
    return dict(zip(names, defaults))


def _text(node: ast.expr) -> str:
    """The signature's text, with the constants of the file that it is made of."""
    constants = {}
    for name in ("linears", "norms"):
        for line in parsed(PYTORCH / "module" / f"{name}.py").body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                constants[line.targets[0].id] = ast.literal_eval(line.value)
    return str(eval(compile(ast.Expression(node), "signature", "eval"), constants))


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


PYTORCH = STAND_IN / "transformer_engine" / "pytorch"


@pytest.fixture(scope="module")
def real() -> Path:
    if SOURCE is None:
        pytest.skip("TRANSFORMER_ENGINE_SOURCE names no source tree")
    return Path(SOURCE) / "transformer_engine" / "pytorch"


def theirs(real: Path, name: str) -> ast.ClassDef:
    nodes = parsed(real / PLACES[name].path).body
    return next(n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name)


@pytest.mark.slow
def test_signatures_are_those_of_the_real_one(real: Path) -> None:
    seen = set()
    base = methods(theirs(real, "TransformerEngineBaseModule"))
    for _, node in classes_and_functions(PYTORCH):
        if not isinstance(node, ast.ClassDef) or node.name not in PLACES:
            continue
        seen.add(node.name)
        there = {**base, **methods(theirs(real, node.name))}
        for name, method in methods(node).items():
            is_checked = name in there and not (name.startswith("_") and name != "__init__")
            assert is_checked or name in OWN or name.startswith("_") or _of_ops(node, name), name
            if is_checked and not _of_ops(node, name):
                given, wanted = parameters(method), parameters(there[name])
                asked = f"{node.name}.{name}"
                assert given.keys() <= wanted.keys(), asked
                assert [key for key in wanted if key in given] == list(given), asked
                assert all(given[key] in (None, wanted[key]) for key in given), asked
    assert seen == PLACES.keys()


def _of_ops(node: ast.ClassDef, name: str) -> bool:
    """Norms have these of the ops that they are there."""
    return "Norm" in node.name and node.name != "LayerNormLinear" and name != "__init__"


@pytest.mark.slow
def test_functions_have_the_arguments_that_are_given(real: Path) -> None:
    found = {node.name: node for _, node in classes_and_functions(real) if node.name in ASKED}
    for name, asked in ASKED.items():
        node = found[name]
        assert isinstance(node, ast.FunctionDef)
        assert set(asked.split()) <= parameters(node).keys(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if place.attributes])
def test_attributes_are_set_there_and_here(real: Path, name: str) -> None:
    there = ast.unparse(theirs(real, name))
    here = "\n".join(path.read_text() for path in PYTORCH.rglob("*.py"))
    for attribute in PLACES[name].attributes.split():
        assert re.search(rf"self\.{attribute}\b", there), attribute
        assert re.search(rf"\b{attribute}\b", here), attribute


@pytest.mark.slow
def test_weights_are_asked_for_the_same(real: Path) -> None:
    for path in ("module/grouped_linear.py", "module/linear.py"):
        there = (real / path).read_text()
        for attribute in OF_WEIGHTS.split():
            assert attribute in there, (path, attribute)


@pytest.mark.slow
def test_quantizers_lie_where_they_do_there(real: Path) -> None:
    grouped = (real / "module" / "grouped_linear.py").read_text()
    flat = re.sub(r"\s+", " ", grouped)
    assert re.search(
        r'"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1', flat
    )
    assert re.search(r'"fwd": 3, "bwd": 2', flat)
    assert re.search(r'f"weight\{i\}"', flat)  # names of parameters and of replicas in fp8
    base = (real / "module" / "base.py").read_text()
    assert 'self.fp8_meta["num_gemms"] * 3 if fwd else self.fp8_meta["num_gemms"] * 2' in base
