# SPDX-License-Identifier: Apache-2.0
"""Whether a GPU waits for its host: layers of real sizes on one GPU that stands for one of many.

`python launch/bench/device_path.py --shapes qwen3_30b_a3b mixtral_8x7b --only ep fssdp`
`... --rounds 6 --hardware configs/hardware/dgx_h100.json --attention`: as in docs/results.md

The ways of `host_path.py`, whose collectives return at once (`fake_world.py`): what is left is what
a rank computes, and what issues it. They take turns, a step each. Of a step, a layer:

- wall: from its begin until the device has gone back through all of it;
- kernels: how long at least one of them ran, by torch's profiler, in steps of their own;
- busy: kernels over wall. What is missing the GPU has waited for: its host, or counts on their way;
- issued: how long the host took, its waits among it;
- between: how long it took then, where a model would have its optimizer.

``--attention`` puts Qwen3-MoE's of Hugging Face before the experts of each block, with the norm of
its tokens, in the model's own size; else a step is nothing but MoE layers.

Loads are as of a run that has settled: tokens change places, so that as many choose an expert as
before. A static capacity is 1.25 times the mean; where ``--ranks 1`` has all experts, passes may be
replayed, too (``"ep, CUDA graphs"``).

Costs that planners go by are measured in a run's first steps, which take longer: these warm up.
Collectives that take no time make replicas look cheap; ``--hardware`` names a cluster in their
place.

With a network in between a device has as much to compute and longer to wait for rows.

``--device cpu`` runs the same steps without a GPU, and says nothing of kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from fake_world import WAYS, Batch, Block, Ours, Sizes, Way, fake_world
from host_path import no_collector, passes
from layer_speed import SHAPES, Problem, Shape, auto_ep_layer
from rich.console import Console
from rich.table import Table
from rotation import covered_us, kernels_of, rotated
from torch import Tensor, nn

from ds_moe_ext.hosts.steps.costs import WATCHED

NUM_PROFILED = 2
AFTER_BACKWARD = 2  # the moment of `passes`
AUTO_EP = "DeepSpeed AutoEP"
COUNTED = (
    *("ep", "ep, static capacity", "esp, degree 2", "fssdp", "prophet"),
    *("esp, degree 2, over fssdp", "esp, degree 2, over prophet", AUTO_EP),
)
"""If no others are named."""


HEADS = {"mixtral_8x7b": (32, 8), "qwen3_30b_a3b": (32, 4), "small": (4, 2)}
"""Of queries, and of keys and values."""
HEAD_WIDTH = 128


class Attention(nn.Module):
    """With its norm, ``[T, D] -> [T, D]``: all tokens are one sequence's."""

    def __init__(self, sizes: Sizes, shape: str) -> None:
        from transformers.models.qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

        super().__init__()
        num_heads, num_pairs = HEADS[shape]
        config = Qwen3MoeConfig(
            hidden_size=sizes.width,
            num_attention_heads=num_heads,
            num_key_value_heads=num_pairs,
            head_dim=HEAD_WIDTH,
            attn_implementation="sdpa",
        )
        self.norm = qwen3.Qwen3MoeRMSNorm(sizes.width)
        self.attention = qwen3.Qwen3MoeAttention(config, layer_idx=0)
        place_1T = torch.arange(sizes.tokens, device=sizes.device)[None]
        turn = qwen3.Qwen3MoeRotaryEmbedding(config).to(sizes.device)
        like_11 = torch.zeros(1, 1, dtype=sizes.dtype, device=sizes.device)
        self._turned = turn(like_11, place_1T)
        self.to(sizes.device, sizes.dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        y_1TD, _ = self.attention(self.norm(x_TD)[None], self._turned, attention_mask=None)
        y_TD: Tensor = y_1TD[0]
        return y_TD


class AutoEpExperts(nn.Module):
    """One AutoEP layer, which is reported the choices as ours is. Collective."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape = Shape(sizes.width, sizes.expert_width, sizes.experts, sizes.top_k, sizes.tokens)
        problem = Problem.of(shape, sizes.tokens, device=sizes.device, dtype=sizes.dtype)
        self.layer = auto_ep_layer({}, problem, ep_size=dist.get_world_size())
        self.layer.set_deepspeed_parallelism()
        self.layer.router = nn.Module()

    def forward(self, x_TD: Tensor, expert_TK: Tensor, score_TK: Tensor) -> Tensor:
        from deepspeed.moe.ep_count import count_tokens_per_expert

        counts_E = count_tokens_per_expert(expert_TK, self.layer.num_experts)
        self.layer.router.forward = lambda *given: (score_TK, expert_TK, counts_E)
        out = self.layer(x_TD[None])
        return (out[0] if isinstance(out, tuple) else out).view_as(x_TD)


class AutoEp(Ours):
    """DeepSpeed's layers in the place of ours. Collective."""

    def __init__(self, sizes: Sizes) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        self.name, self._has_own_streams = AUTO_EP, True
        self._blocks = nn.ModuleList([Block(AutoEpExperts(sizes)) for _ in range(sizes.layers)])
        self.model = nn.ModuleDict({"blocks": self._blocks})

    def after_step(self, number: int) -> None:
        """Nothing is planned."""


@dataclass(frozen=True)
class Measured:
    """One contender's, milliseconds a layer and step."""

    wall_ms: Sequence[float]  # of each step
    issued_ms: Sequence[float]  # of each step, by the host
    between_ms: Sequence[float]  # behind each step
    kernels_ms: float  # in which a kernel ran, at the median; NaN without a GPU
    num_kernels: float  # launched, likewise

    @property
    def busy(self) -> float:
        """The part of a step in which a kernel ran."""
        return self.kernels_ms / statistics.median(self.wall_ms)


GRAPHS = Way("ep, CUDA graphs", {"strategy": "ep", "ep": {"cuda_graphs": True}})
"""A CPU has none."""
PADDED = "ep, static capacity"


NAMED = {way.name: way for way in (*WAYS, GRAPHS)}


def build(name: str, sizes: Sizes, hardware: Path | None) -> Ours:
    """With rows padded to 1.25 times their mean where they are, and on a cluster that is named.
    Collective."""
    if name == AUTO_EP:
        return AutoEp(sizes)
    block = dict(NAMED[name].block)
    if name == PADDED:
        mean = sizes.tokens * sizes.top_k / sizes.experts
        block["ep"] = {**block["ep"], "static_capacity": math.ceil(1.25 * mean)}
    if hardware is not None:
        block["hardware"] = str(hardware)
    return Ours(replace(NAMED[name], block=block), sizes)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def take_step(contender: Ours, batch: Batch, number: int) -> tuple[float, float, float]:
    """Milliseconds of a step, in which it was issued, and what came behind it. Collective."""
    contender.model.zero_grad(set_to_none=True)
    synchronize()
    with contender.turn():
        start_s = time.perf_counter()
        for part, _ in enumerate(passes(contender, batch, number)):
            if part == AFTER_BACKWARD:
                issued_s = time.perf_counter()
                synchronize()
                end_s = time.perf_counter()
        synchronize()
    behind_s = time.perf_counter() - end_s
    return 1e3 * (end_s - start_s), 1e3 * (issued_s - start_s), 1e3 * behind_s


def measure(
    contenders: Sequence[Ours], sizes: Sizes, warm_ups: int, rounds: int
) -> dict[str, Measured]:
    """All of them, turn by turn. Collective."""
    num_profiled = NUM_PROFILED if sizes.device.type == "cuda" else 0
    seen: dict[str, list[tuple[float, float, float]]] = {each.name: [] for each in contenders}
    profiled: dict[str, list[tuple[float, float]]] = {each.name: [] for each in contenders}
    with no_collector():
        for number in range(warm_ups + rounds + num_profiled):
            batch = Batch.of(sizes, number + 1, is_settled=True)
            for contender in rotated(contenders, number):
                if number >= warm_ups + rounds:
                    events = kernels_of(partial(take_step, contender, batch, number + 1))
                    profiled[contender.name].append((covered_us(events) / 1e3, len(events)))
                    continue
                times = take_step(contender, batch, number + 1)
                if number >= warm_ups:
                    seen[contender.name].append(times)
    found = {}
    for name, steps in seen.items():
        wall, issued, between = ([ms / sizes.layers for ms in column] for column in zip(*steps))
        kernels, launches = zip(*(profiled[name] or [(math.nan, math.nan)]))
        found[name] = Measured(
            wall,
            issued,
            between,
            statistics.median(kernels) / sizes.layers,
            statistics.median(launches) / sizes.layers,
        )
    return found


def table_of(title: str, found: Mapping[str, Measured]) -> Table:
    """As a person reads it."""
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for column in (
        "wall ms",
        "kernels ms",
        "busy",
        "issued ms",
        "between ms",
        "kernels",
        "x first",
    ):
        table.add_column(column, justify="right")
    first = next(iter(found.values()))
    for name, each in found.items():
        ratio = statistics.median(a / b for a, b in zip(each.wall_ms, first.wall_ms))
        table.add_row(
            name,
            f"{statistics.median(each.wall_ms):.2f}",
            f"{each.kernels_ms:.2f}",
            f"{each.busy:.0%}",
            f"{statistics.median(each.issued_ms):.2f}",
            f"{statistics.median(each.between_ms):.2f}",
            f"{each.num_kernels:.0f}",
            f"{ratio:.2f}",
        )
    return table


def main() -> None:
    """Measure each shape, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["small"])
    add("--only", nargs="+", choices=(*NAMED, AUTO_EP), default=list(COUNTED))
    add("--ranks", type=int, default=8)
    add("--rank", type=int, default=3, help="for which of them the process stands")
    add("--layers", type=int, default=4)
    add("--tokens", type=int, default=4096, help="of a rank")
    add("--warm_ups", type=int, default=WATCHED[-1].stop + 1)
    add("--attention", action="store_true", help="before the experts of each block")
    add("--hardware", type=Path, help="cluster by which planners count, as of configs/hardware")
    add("--rounds", type=int, default=6)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="JSON file for the results")
    given = parser.parse_args()
    device = torch.device(given.device)
    device_name = platform.machine()
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        device_name = torch.cuda.get_device_name()
    console, results = Console(width=None if sys.stdout.isatty() else 120), []
    with fake_world(given.ranks, given.rank % given.ranks):
        for name in given.shapes:
            shape = SHAPES[name]
            sizes = Sizes(
                given.layers,
                shape.num_experts,
                given.tokens,
                shape.top_k,
                shape.width,
                shape.expert_width,
                torch.bfloat16,
                device,
            )
            contenders, skipped = [], {}
            for contender in given.only:
                try:
                    built = build(contender, sizes, given.hardware)
                    if given.attention:
                        built.attend([Attention(sizes, name) for _ in range(sizes.layers)])
                    take_step(built, Batch.of(sizes, 0, is_settled=True), 0)
                    contenders.append(built)
                except Exception as error:
                    skipped[contender] = f"{type(error).__name__}: {error}"
                    console.print(f"not run: {contender}: {skipped[contender]}", markup=False)
            found = measure(contenders, sizes, given.warm_ups, given.rounds)
            title = f"{name}, {given.tokens} tokens, one of {given.ranks} ranks"
            console.print(table_of(f"{title}: a layer, {device_name}", found))
            measured = {k: asdict(v) for k, v in found.items()}
            results.append({"shape": name, "found": measured, "skipped": skipped})
            del contenders, built
            torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps({"command": sys.argv, "results": results}))


if __name__ == "__main__":
    main()
