# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-LM's functional cases with experts on a CPU, with us and without.

``python -m tests.hosts.functional_runs CHECKOUT [BRIDGE]`` writes ``megatron_cases.md`` beside it.
Each toy that cases are reduced to runs once, several in a process; what was found is kept in
RESULTS, by toy, and not run again. A process that is given a file runs its toys as one of the
ranks.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from tests.hosts import megatron_toy
from tests.hosts.functional_toys import Toy
from tests.hosts.megatron_skewed import NEVER, Seen, num_replicas, worst
from tests.hosts.processes import ROOT, started

RESULTS = Path(tempfile.gettempdir()) / "functional_runs.json"
PAGE = ROOT / "tests/hosts/megatron_cases.md"
BLOCK = {"enabled": True, "report": {"enabled": False}, "megatron": {"layer": "host"}}
FSSDP = {"overlap_degree": 2, "replicas_per_rank": 2, "reshard_interval": 0}
VARIED = {"strategy": "tests.hosts.varied:Varied", "options": {"layers": 1.0, "replicas": 0.5}}
BLOCKS: dict[str, dict[str, Any]] = {
    "ep": {**BLOCK, "strategy": "ep"},
    "fssdp": {**BLOCK, "strategy": "fssdp", "fssdp": FSSDP, "debug": True},
    "varied": {**BLOCK, **VARIED},  # replicas by chance in every step
}
CASES = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}  # of the environment of all cases
EXACT = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5}
KERNELS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
ROUNDED = 5e-3  # of a loss, in 16 or 8 bits
TOYS_A_PROCESS = 4
COLLECTIVE_S = 90
TOY_S = 150
GRACE_S = 20

Found = dict[str, Any]


def key_of(toy: Toy) -> str:
    return hashlib.sha256(repr(toy).encode()).hexdigest()[:12]


# On the ranks.


def skew_of(num_experts: int) -> torch.Tensor:
    """What is added to logits: the first experts get many tokens, the last none."""
    found = torch.zeros(num_experts)
    found[0], found[1 % num_experts] = 2.0, 1.0
    if num_experts > 2:
        found[-1] = NEVER
    return found


def skew(chunk: nn.Module) -> None:
    """Let every router of a chunk prefer the same experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in chunk.modules():
        if isinstance(router, TopKRouter):
            vars(router)["gating"] = _preferring(router.gating)


def _preferring(gating: Any) -> Any:
    def preferring(*given: Any, **named: Any) -> Any:
        logits = gating(*given, **named)
        return logits + skew_of(logits.shape[-1]).to(logits.dtype)

    return preferring


def layer_spec(toy: Toy) -> Any:
    """What makes the specification of a stage's layers."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    def made(run: Any, config: Any, vp_stage: int | None) -> Any:
        if toy.is_hybrid:
            return mamba_stack_spec
        if getattr(config, "experimental_attention_variant", None):
            of_variant = variants.get_transformer_block_with_experimental_attention_variant_spec
            return of_variant(config, vp_stage)
        return get_gpt_decoder_block_spec(config, toy.by_engine, vp_stage=vp_stage)

    return made


def model_of(toy: Toy) -> Any:
    """GPTModel with the toy's arguments, and layers that predict more tokens where asked for; or a
    model of several kinds of layers."""
    from megatron.core.models import gpt
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.mamba import MambaModel

    stock = gpt.GPTModel

    def made(config: Any, spec: Any, *rest: Any, vp_stage: int | None, **named: Any) -> Any:
        if toy.is_hybrid:
            return MambaModel(config, spec, *rest, **named, **dict(toy.model))
        if config.mtp_num_layers:
            named["mtp_block_spec"] = get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=toy.by_engine, vp_stage=vp_stage
            )
        return stock(config, spec, *rest, vp_stage=vp_stage, **named, **dict(toy.model))

    return made


@contextmanager
def as_asked(toy: Toy) -> Iterator[None]:
    """Models are made as the toy says, inside the block."""
    from megatron.core import transformer
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.models import gpt
    from megatron.core.ssm import gated_delta_net

    from tests.hosts.test_megatron_context import in_parts

    with ExitStack() as stack:
        named: list[tuple[Any, str, Any]] = [
            (megatron_toy, "layer_spec", layer_spec(toy)),
            (gpt, "GPTModel", model_of(toy)),
            (gated_delta_net, "HAVE_FLA", True),  # its rule in torch is taken where deterministic
            (gated_delta_net, "l2norm", lambda x: nn.functional.normalize(x, dim=-1)),
        ]
        if dict(toy.run.config).get("multi_latent_attention"):
            latent = transformer.MLATransformerConfig
            named.append((transformer, "TransformerConfig", latent))
        for owner, name, put in named:
            stack.enter_context(mock.patch.object(owner, name, put, create=True))
        if toy.run.cp > 1:
            stack.enter_context(in_parts(TEDotProductAttention if toy.by_engine else None))
        yield


def run_toy(rank: int, world_size: int, toy: Toy) -> Found:
    """Stock, and each block beside it: an error, or how far they are apart."""
    from megatron.core.activations import squared_relu

    from tests.hosts.megatron_skewed import train_skewed

    config = dict(toy.run.config)
    if "activation_func" in config:
        config["activation_func"] = squared_relu
    run = replace(toy.run, config=tuple(config.items()))

    def trained(block: dict[str, Any] | None) -> Seen | str:
        try:
            return train_skewed(rank, world_size, run, block, prepare=skew)
        except Exception:
            return traceback.format_exc()[-3000:]
        finally:
            leave_groups()

    with as_asked(toy):
        stock = trained(None)
        if isinstance(stock, str):
            return {"stock": stock}
        found: Found = {"stock": list(stock.trained.losses)}
        for name, block in BLOCKS.items():
            ours = trained(block)
            found[name] = {"error": ours} if isinstance(ours, str) else apart(ours, stock)
    return found


def leave_groups() -> None:
    """Megatron leaves its groups behind, and gloo's have threads that wake all the time."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def apart(ours: Seen, stock: Seen) -> dict[str, float]:
    """Relative differences, and the number of replicas."""
    found: dict[str, float] = {"replicas": num_replicas([ours])}
    for kind in ("losses", "norms"):
        pairs = zip(vars(ours.trained)[kind], vars(stock.trained)[kind], strict=True)
        found[kind] = max(abs(own - its) / abs(its) if its else abs(own) for own, its in pairs)
    for kind in ("gradients", "weights"):
        found[kind] = worst(vars(ours.trained)[kind], vars(stock.trained)[kind])
    return found


def be_a_rank(asked: Path) -> None:
    """Run each toy of a pickled list; leave what this rank has found of each beside the file."""
    import megatron_on_cpu

    megatron_on_cpu.install()
    sys.modules[KERNELS] = mock.MagicMock()  # of inference; Mamba's layers import them
    from tests.hosts.flex_stand_in import flex

    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with flex():
        for number, toy in enumerate(pickle.loads(asked.read_bytes())):
            found = run_toy(rank, world_size, toy)
            asked.with_suffix(f".{number}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


# In front of them.


def run_toys(toys: list[Toy]) -> Iterator[Found]:
    """What each of several toys of one number of ranks has found, up to one that hangs or ends the
    process."""
    size = toys[0].world_size
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "toys.pickle"
        asked.write_bytes(pickle.dumps(toys))
        path = (ROOT / "tests/hosts/te_stand_in", ROOT, ROOT / "launch")
        with started(Path(__file__), str(asked), world_size=size, path=path, **CASES) as ranks:
            ends = time.monotonic() + TOY_S * len(toys)
            while time.monotonic() < ends and any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):  # the others wait for it
                    ends = min(ends, time.monotonic() + GRACE_S)
                time.sleep(1)
            for rank in ranks:
                rank.kill()
            codes = [rank.wait() for rank in ranks]
            printed = "".join(rank.communicate()[0] for rank in ranks)
        for number in range(len(toys)):
            files = [asked.with_suffix(f".{number}.{rank}") for rank in range(size)]
            if not all(file.exists() for file in files):
                yield {"stock": f"ended: {printed[-3000:]} {codes}"}
                return
            yield _merged([json.loads(file.read_text()) for file in files])


def _merged(ranks: list[Found]) -> Found:
    """Of all ranks the first error, or the largest difference."""
    found = ranks[0]
    for other in ranks[1:]:
        if isinstance(other["stock"], str) or isinstance(found["stock"], str):
            return found if isinstance(found["stock"], str) else other
        for name in BLOCKS:
            if "error" not in found[name]:
                same = "error" not in other[name]
                largest = {
                    key: max(found[name][key], other[name].get(key, 0)) for key in found[name]
                }
                found[name] = largest if same else other[name]
    return found


def run_all(toys: list[Toy], results: Path) -> dict[str, Found]:
    """What each toy has found, of those that ran before from ``results``."""
    known: dict[str, Found] = json.loads(results.read_text()) if results.exists() else {}
    for size in sorted({toy.world_size for toy in toys}):
        while left := [t for t in toys if t.world_size == size and key_of(t) not in known]:
            for toy, found in zip(left, run_toys(left[:TOYS_A_PROCESS])):
                known[key_of(toy)] = found
                results.write_text(json.dumps(known, indent=1))
                print(key_of(toy), verdicts(toy, found), flush=True)
    return known


def verdicts(toy: Toy, found: Found) -> dict[str, str]:
    """In a word or two: stock, ep, fssdp and replicas by chance."""
    if isinstance(found["stock"], str):
        return {"stock": "fails: " + found["stock"].strip().splitlines()[-1][:160]}
    said = {"stock": "runs"}
    for name in BLOCKS:
        said[name] = _verdict(toy, found[name], is_exact=name == "ep" or not toy.is_rounded)
    return said


def _verdict(toy: Toy, found: dict[str, Any], is_exact: bool) -> str:
    if "error" in found:
        return "fails: " + found["error"].strip().splitlines()[-1][:160]
    bound = EXACT[toy.run.dtype]
    allowed = dict(losses=bound, norms=10 * bound, gradients=bound, weights=1000 * bound)
    if not is_exact:
        allowed = {"losses": ROUNDED, "norms": 10 * ROUNDED}
    over = [
        f"{kind} {found[kind]:.0e}" for kind, most in allowed.items() if not found[kind] <= most
    ]
    return f"differs: {', '.join(over)}" if over else "equal"


if __name__ == "__main__":
    if Path(sys.argv[1]).is_file():
        be_a_rank(Path(sys.argv[1]))
    else:
        from tests.hosts.functional_page import write

        write(Path(sys.argv[1]), PAGE, RESULTS, *map(Path, sys.argv[2:]))
