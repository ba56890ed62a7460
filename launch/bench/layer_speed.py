# SPDX-License-Identifier: Apache-2.0
"""Time one MoE layer, forward and backward, beside what a user has today.

One process, one device; all contenders take turns, repetition by repetition::

    python launch/bench/layer_speed.py --shapes small --dtype fp32          # a laptop, seconds
    python launch/bench/layer_speed.py --shapes mixtral_8x7b qwen3_30b_a3b  # a GPU
    python launch/bench/layer_speed.py --what gates orders --dtype fp32     # gates, orders

Results take 12 repetitions on a GPU (the kernels' first shapes compile), 30 to 60 on a CPU.

Before anything is timed, contenders that compute the same function get the same weights, and their
outputs and input gradients are compared. Shape letters: T tokens, K choices a token, E experts,
D model width, F expert width.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rotation import rotated
from torch import Tensor, nn

from ds_moe_ext.core.layout import Grid, ParallelLayout
from ds_moe_ext.core.placement import Placement
from ds_moe_ext.hosts import huggingface
from ds_moe_ext.hosts.attachment.host_layer import any_name
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.gate import SoftmaxTopK
from ds_moe_ext.moe.layer import MoELayer, RoutedExperts
from ds_moe_ext.moe.sharding import WHOLE
from ds_moe_ext.planning.strategy import Job, LayerContext
from ds_moe_ext.strategies.ep import ExpertParallel

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder alone

import megatron_on_cpu
from console import versions_of

OURS, CEILING = "ours: MoELayer", "dense FFN of the same FLOPs"


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, and how many tokens fill a GPU with it."""

    width: int
    expert_width: int
    num_experts: int
    top_k: int
    num_tokens: int

    def num_flops(self, num_tokens: int) -> float:
        """Of the experts' matrix products, forward and backward."""
        return 3 * 6.0 * num_tokens * self.top_k * self.width * self.expert_width


SHAPES = {
    "mixtral_8x7b": Shape(4096, 14336, 8, 2, 8192),
    "qwen3_30b_a3b": Shape(2048, 768, 128, 8, 8192),
    # What a rank of 8 has: 32 of 256 experts, and as many rows as it sends.
    "deepseek_v3_of_8": Shape(7168, 2048, 32, 8, 8192),
    "small": Shape(256, 512, 8, 2, 1024),
}


@dataclass(frozen=True, eq=False)
class Problem:
    """The weights that contenders share, and what goes through them."""

    shape: Shape
    gate_ED: Tensor  # router
    up_EFD: Tensor  # gate and up projections joined, ``[E, 2F, D]``
    down_EDF: Tensor  # down projections
    x_TD: Tensor  # tokens
    grad_TD: Tensor  # gradient of the output

    @classmethod
    def of(
        cls, shape: Shape, num_tokens: int, *, device: torch.device, dtype: torch.dtype
    ) -> Problem:
        """Random weights."""
        generator = torch.Generator(device).manual_seed(1)

        def rand(*size: int, scale: float = 1.0) -> Tensor:
            out = torch.empty(size, device=device, dtype=dtype)
            return out.normal_(0.0, scale, generator=generator)

        e, d, f = shape.num_experts, shape.width, shape.expert_width
        gate_ED, x_TD = rand(e, d, scale=d**-0.5), rand(num_tokens, d)
        up_EFD, down_EDF = rand(e, 2 * f, d, scale=d**-0.5), rand(e, d, f, scale=f**-0.5)
        return cls(shape, gate_ED, up_EFD, down_EDF, x_TD, rand(num_tokens, d))


Layer = Callable[[Tensor], Tensor]  # [T, D] -> [T, D]


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to compute the layer."""

    name: str  # shown in the table
    layer: Layer  # called with ``x``
    parameters: tuple[nn.Parameter, ...]  # whose gradients are cleared before each repetition
    # computes the same function of the same weights, so that results are compared
    is_exact: bool = True


def ours(problem: Problem) -> Contender:
    """All six sub-modules in one program, an EP rank, strategy ep."""
    shape, layer_context = problem.shape, one_ep_rank(problem.shape.num_experts)
    up_EFD, down_EDF = problem.up_EFD.clone(), problem.down_EDF.clone()
    layer = MoELayer(
        nn.ParameterList([problem.gate_ED.clone()]),
        nn.ParameterList([weight for pair in zip(up_EFD, down_EDF) for weight in pair]),
        gate=SoftmaxTopK(top_k=shape.top_k),
        function=FeedForwardExperts(silu_gated),
        strategy=ExpertParallel(),
        plan=layer_context.plan,
        layout=layer_context.layout,
    )
    return Contender(OURS, lambda x: layer(x).y, tuple(layer.parameters()))


def one_ep_rank(num_experts: int) -> LayerContext:
    strategy, owner = ExpertParallel(), Placement.block(num_experts, 1)
    layout = ParallelLayout.build(Grid(1, 1), strategy.uses())
    (plan,) = strategy.plan(Job.at_start([owner], layout.node_C))
    return LayerContext(plan, layout, 0)


def ours_in_hugging_face(problem: Problem) -> Contender:
    """Hugging Face's block with its own router; its experts replaced as the plug-in does it."""
    block = _mixtral_block(problem, "grouped_mm")
    layer_context = one_ep_rank(problem.shape.num_experts)
    for found in list(huggingface.find(block, any_name)):
        held = torch.arange(found.num_experts)
        found.adopt(
            held, WHOLE, lambda function: RoutedExperts(ExpertParallel(), layer_context, function)
        )
    return _hugging_face_contender("ours: experts of a Hugging Face block", block)


def hugging_face(implementation: str, problem: Problem) -> Contender:
    """Mixtral's block as transformers runs it."""
    block = _mixtral_block(problem, implementation)
    return _hugging_face_contender(f"Hugging Face {implementation}", block)


def _hugging_face_contender(name: str, block: nn.Module) -> Contender:
    return Contender(name, lambda x: block(x[None])[0], tuple(block.parameters()))


def _mixtral_config(shape: Shape, implementation: str) -> Any:
    from transformers.models.mixtral import MixtralConfig

    config = MixtralConfig(
        hidden_size=shape.width,
        intermediate_size=shape.expert_width,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    return config


def _mixtral_block(problem: Problem, implementation: str) -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = _mixtral_config(problem.shape, implementation)
    with torch.device(problem.x_TD.device):
        block: Any = MixtralSparseMoeBlock(config).to(problem.x_TD.dtype)
    with torch.no_grad():
        block.gate.weight.copy_(problem.gate_ED)
        block.experts.gate_up_proj.copy_(problem.up_EFD)
        block.experts.down_proj.copy_(problem.down_EDF)
    return block


def auto_ep_layer(settings: Mapping[str, str], problem: Problem, *, ep_size: int) -> Any:
    """DeepSpeed AutoEP's layer, converted from a Mixtral block by DeepSpeed's own replacement: of
    the first rank of those that divide the experts."""
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    # AutoEP finds blocks by name.
    host = nn.Module()
    host.model = nn.Module()
    host.model.layers = nn.ModuleList([nn.Module()])
    host.model.layers[0].mlp = _mixtral_block(problem, "grouped_mm")
    host.config = _mixtral_config(problem.shape, "grouped_mm")
    block_settings = {"enabled": True, "preset_model": "mixtral", **settings}
    converter = AutoEP(host, parse_autoep_config(block_settings))
    (spec,) = converter.ep_parser()
    converter.replace_moe_layer(spec, ep_size=ep_size, ep_rank=0)
    return host.model.layers[0].mlp


def auto_ep(name: str, settings: Mapping[str, str], problem: Problem) -> Contender:
    """DeepSpeed AutoEP on one rank."""
    layer = auto_ep_layer(settings, problem, ep_size=1)

    def call(x: Tensor) -> Tensor:
        out = layer(x[None])
        return (out[0] if isinstance(out, tuple) else out).view_as(x)

    return Contender(name, call, tuple(layer.parameters()))


class SwiGlu(nn.Module):
    """One expert: gate and up joined, activation, down."""

    def __init__(self, width: int, expert_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * expert_width, bias=False)
        self.down = nn.Linear(expert_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu_gated(self.up(x)))
        return out


def dense(problem: Problem) -> Contender:
    """All ``T * K`` rows through one expert: the matrix products, and nothing of routing."""
    shape, x_TD = problem.shape, problem.x_TD
    with torch.device(x_TD.device):
        ffn = SwiGlu(shape.width, shape.expert_width).to(x_TD.dtype)
    rows_ND = x_TD.repeat(shape.top_k, 1).requires_grad_()
    num_tokens = x_TD.shape[0]

    def call(x: Tensor) -> Tensor:
        # x is not read: to copy it K times is no part of the ceiling.
        out: Tensor = ffn(rows_ND)
        return out.view(shape.top_k, num_tokens, shape.width)

    return Contender(CEILING, call, tuple(ffn.parameters()), is_exact=False)


Builder = Callable[[Problem], Contender]
FUSED = {"gate_up_impl": "fused", "combine_impl": "fused_weighted_sum"}
BUILDERS: Mapping[str, Builder] = {
    OURS: ours,
    "ours: experts of a Hugging Face block": ours_in_hugging_face,
    "Hugging Face grouped_mm": partial(hugging_face, "grouped_mm"),
    "DeepSpeed AutoEP": partial(auto_ep, "DeepSpeed AutoEP", {}),
    "DeepSpeed AutoEP, fused options": partial(auto_ep, "DeepSpeed AutoEP, fused options", FUSED),
    CEILING: dense,
}


# Megatron-core's layer, by each of its three ways to compute experts.

DEVICE_NAMES = ("device_names",)  # the shim that looks at every call of torch: for building only


@dataclass(frozen=True)
class Way:
    """How Megatron computes experts."""

    package: str  # that it needs
    keys: Mapping[str, Any]  # of TransformerConfig
    fill: Callable[[Any, Problem], None]  # replicas a problem's weights into the layer's experts


def fill_sequential(experts: Any, problem: Problem) -> None:
    """Of a SequentialMLP."""
    for expert, up_FD, down_DF in zip(experts.local_experts, problem.up_EFD, problem.down_EDF):
        expert.linear_fc1.weight.copy_(up_FD)
        expert.linear_fc2.weight.copy_(down_DF)


def fill_grouped(experts: Any, problem: Problem) -> None:
    """Of a GroupedMLP: inputs before outputs, expert by expert."""
    experts.weight1.view(-1, *problem.up_EFD.mT.shape[1:]).copy_(problem.up_EFD.mT)
    experts.weight2.view(-1, *problem.down_EDF.mT.shape[1:]).copy_(problem.down_EDF.mT)


def fill_te(experts: Any, problem: Problem) -> None:
    """Of a TEGroupedMLP."""
    for number, (up_FD, down_DF) in enumerate(zip(problem.up_EFD, problem.down_EDF)):
        experts.linear_fc1.get_parameter(f"weight{number}").copy_(up_FD)
        experts.linear_fc2.get_parameter(f"weight{number}").copy_(down_DF)


GROUPED = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True, "bf16": True}
"""It asks for bf16, whatever the weights are."""
TE = {"moe_grouped_gemm": True, "moe_permute_fusion": True}
WAYS = {
    "Megatron, expert by expert": Way("megatron.core", {}, fill_sequential),
    "Megatron, grouped GEMM": Way("grouped_gemm", GROUPED, fill_grouped),
    "Megatron, Transformer Engine's GroupedLinear": Way("transformer_engine", TE, fill_te),
}


def megatron_layer(name: str, problem: Problem) -> Contender:
    """The layer of a name in ``WAYS``."""
    way = WAYS[name]
    if find_spec(way.package) is None:
        raise ImportError(f"{way.package} is not installed")
    megatron_on_cpu.install()
    try:
        layer = _build(way, problem)
        with torch.no_grad():
            layer.router.weight.copy_(problem.gate_ED)
            way.fill(layer.experts, problem)
    finally:
        megatron_on_cpu.remove()
    megatron_on_cpu.install(without=DEVICE_NAMES)  # for passes of it: its backward, too

    def call(x_TD: Tensor) -> Tensor:
        y: Tensor = layer(x_TD[:, None])[0][:, 0]
        return y

    # In bfloat16 its router may choose other experts.
    return Contender(name, call, tuple(layer.parameters()), problem.x_TD.dtype == torch.float32)


def _build(way: Way, problem: Problem) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
    shape = problem.shape
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.width,
        num_attention_heads=1,
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.expert_width,
        moe_router_topk=shape.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        params_dtype=problem.x_TD.dtype,
        perform_initialization=False,
        **{"bf16": problem.x_TD.dtype == torch.bfloat16, **way.keys},
    )
    spec = get_moe_module_spec(
        use_te=way.package == "transformer_engine",
        num_experts=shape.num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=config.moe_use_legacy_grouped_gemm,
    )
    return MoELayer(config, spec.submodules, layer_number=1).to(problem.x_TD.device)


MEGATRON: Mapping[str, Builder] = {name: partial(megatron_layer, name) for name in WAYS}
"""By name."""


# Measuring.

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
PACKAGES = ("torch", "transformers", "deepspeed", "megatron-core", "transformer-engine", "triton")
FLUSH_BYTES = 256 * 2**20  # more than any GPU's L2 cache
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
AHEAD_CYCLES = 20_000_000  # about 10 ms in which the host issues work while the device spins


def step(contender: Contender, x_TD: Tensor, grad_TD: Tensor) -> Tensor:
    """Forward and backward; gradients end up in ``.grad``."""
    y = contender.layer(x_TD)
    y.backward(grad_TD.expand_as(y))
    return y.detach()


def cleared(contender: Contender, problem: Problem) -> Tensor:
    """Free all gradients and give a fresh input."""
    for parameter in contender.parameters:
        parameter.grad = None
    return problem.x_TD.detach().requires_grad_()


@dataclass(frozen=True)
class Measured:
    """One contender's times, in seconds, and what its gradients and outputs are worth."""

    device_s: tuple[float, ...]  # forward and backward on the device, each repetition
    # until the host has issued them; on a CPU the processor time of all threads, which other
    # programs on the machine disturb less
    host_s: tuple[float, ...]
    # allocated at the peak, beyond what was there before the step; None on a CPU
    peak_bytes: int | None
    # largest difference from the first's over its largest value; None where not comparable
    y_error: float | None
    x_grad_error: float | None  # likewise, of the input gradient

    @property
    def median_s(self) -> float:
        return statistics.median(self.device_s)

    def over(self, other: Measured) -> tuple[float, float, float]:
        """Its time over another's, turn by turn: the three quartiles."""
        ratios = [own / others for own, others in zip(self.device_s, other.device_s)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high


class Clock:
    """Times work on one device.

    On CUDA the device spins first, so that the host is ahead of it: what counts is how long the
    device takes, with the gaps that a contender's own waits for the device tear.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object]) -> tuple[float, float]:
        """Of the device, and of the host."""
        if not self.is_cuda:
            start_s, start_of_threads_s = time.perf_counter(), time.process_time()
            work()
            return time.perf_counter() - start_s, time.process_time() - start_of_threads_s
        self._flush.zero_()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        start_s = time.perf_counter()
        work()
        host_s = time.perf_counter() - start_s
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, host_s

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        """Memory allocated at the peak of ``work``, beyond what was allocated before."""
        if not self.is_cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@contextmanager
def reasons(name: str, skipped: dict[str, str]) -> Iterator[None]:
    """Note why a contender cannot run, and go on with the others."""
    try:
        yield
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        skipped[name] = f"{type(error).__name__}: {first_line}"


def gather(
    builders: Mapping[str, Builder], problem: Problem
) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run here, each warmed up once, and why the others cannot."""
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    for name, build in builders.items():
        with reasons(name, skipped):
            contender = build(problem)
            step(contender, cleared(contender, problem), problem.grad_TD)
            cleared(contender, problem)
            contenders.append(contender)
    first = next(iter(builders))
    if first in skipped:
        raise RuntimeError(f"{first} cannot run: {skipped[first]}")
    return contenders, skipped


def errors(contenders: Sequence[Contender], problem: Problem) -> dict[str, tuple[float, float]]:
    """Differences of outputs and input gradients from the first's, over the largest value."""
    found: dict[str, tuple[float, float]] = {}
    reference: tuple[Tensor, Tensor] | None = None
    for contender in contenders:
        if not contender.is_exact:
            continue
        x = cleared(contender, problem)
        y = step(contender, x, problem.grad_TD)
        assert x.grad is not None
        reference = reference or (y, x.grad)
        y_error, x_error = (_error(a, b) for a, b in zip((y, x.grad), reference))
        found[contender.name] = (y_error, x_error)
        cleared(contender, problem)
    return found


def _error(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).abs().max() / reference.abs().max())


def measure(
    contenders: Sequence[Contender], problem: Problem, repetitions: int, console: Console
) -> dict[str, Measured]:
    """Let contenders take turns; each turn starts with another one."""
    clock = Clock(problem.x_TD.device)
    differences = errors(contenders, problem)
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contenders}
    peaks: dict[str, int | None] = {}
    for turn in track(range(-2, repetitions), "repetitions", console=console, transient=True):
        for contender in rotated(contenders, turn):
            x = cleared(contender, problem)
            work = partial(step, contender, x, problem.grad_TD)
            if turn == -2:
                peaks[contender.name] = clock.peak_bytes(work)
            elif turn >= 0:
                times[contender.name].append(clock.seconds(work))
            else:
                work()
            cleared(contender, problem)
    measured = {}
    for contender in contenders:
        device_s, host_s = zip(*times[contender.name])
        y_error, x_error = differences.get(contender.name, (None, None))
        measured[contender.name] = Measured(
            device_s, host_s, peaks[contender.name], y_error, x_error
        )
    return measured


def table_of(title: str, measured: Mapping[str, Measured], num_flops: float) -> Table:
    """The results as a person reads them."""
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    for column in (
        "median ms", "min", "max", "host ms", "x first", "quartiles", "of ceiling", "TFLOP/s",
        "peak MiB", "y error", "x.grad error",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    first = next(iter(measured.values()))
    ceiling_s = measured[CEILING].median_s if CEILING in measured else None
    for name, m in measured.items():
        low, middle, high = m.over(first)
        table.add_row(
            name,
            *(f"{s * 1e3:.2f}" for s in (m.median_s, min(m.device_s), max(m.device_s))),
            f"{statistics.median(m.host_s) * 1e3:.2f}",
            f"{middle:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{ceiling_s / m.median_s:.0%}" if ceiling_s else "-",
            f"{num_flops / m.median_s / 1e12:.2f}" if ceiling_s else "-",
            f"{m.peak_bytes / 2**20:,.0f}" if m.peak_bytes is not None else "-",
            *("-" if e is None else f"{e:.1e}" for e in (m.y_error, m.x_grad_error)),
        )
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["small"])
    add(
        "--only",
        nargs="+",
        help="contenders, by their names in the table; the first is always there",
    )
    add("--tokens", type=int, help="tokens in the batch; default: 8192, for small 1024")
    add("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    add("--repetitions", type=int, default=20)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--json", type=Path, help="file for the results")
    return parser.parse_args()


def _chosen(builders: Mapping[str, Builder], only: Sequence[str] | None) -> Mapping[str, Builder]:
    first = next(iter(builders))
    unknown = [name for name in only or () if name not in builders]
    if unknown:
        raise SystemExit(f"--only {unknown[0]!r} is none of: {', '.join(builders)}")
    return {name: own for name, own in builders.items() if not only or name in (first, *only)}


def start_one_rank(device: torch.device) -> None:
    """A world of one rank: DeepSpeed's layers and our layout ask for groups."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        import deepspeed
    except ImportError:
        return  # its contenders will say so
    with redirect_stdout(sys.stderr):
        deepspeed.init_distributed(backend, auto_mpi_discovery=False)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as CUDA's allocator does: else chance decides who pays for
    pages that are given back to the system and asked for again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)


def main() -> int:
    """Measure each shape; 1 if contenders of the same function disagree."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dtype = DTYPES[arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    if device.type == "cpu":
        keep_freed_memory()
    start_one_rank(device)
    console, results, disagree = Console(width=None if sys.stdout.isatty() else 150), [], []
    builders = {**BUILDERS, **MEGATRON}
    for name in arguments.shapes:
        shape = SHAPES[name]
        num_tokens = arguments.tokens or shape.num_tokens
        problem = Problem.of(shape, num_tokens, device=device, dtype=dtype)
        contenders, skipped = gather(_chosen(builders, arguments.only), problem)
        measured = measure(contenders, problem, arguments.repetitions, console)
        title = f"{name}, {num_tokens} tokens, {dtype}, {device}"
        console.print(table_of(title, measured, shape.num_flops(num_tokens)))
        for contender, reason in skipped.items():
            console.print(f"[yellow]not run: {contender}: {reason}[/]")
        disagree += [
            f"{name}: {contender}: y {m.y_error:.1e}, x.grad {m.x_grad_error:.1e}"
            for contender, m in measured.items()
            if m.y_error is not None and max(m.y_error, m.x_grad_error or 0) > TOLERANCES[dtype]
        ]
        rows = {contender: asdict(m) for contender, m in measured.items()}
        about = {"shape": name, "tokens": num_tokens}
        results.append({**about, "measured": rows, "skipped": skipped})
    if arguments.json:
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        setup = {"command": sys.argv, "device": device_name, "versions": versions_of(PACKAGES)}
        arguments.json.write_text(json.dumps({**setup, "dtype": str(dtype), "results": results}))
    for line in disagree:
        console.print(
            f"[red]differs from the first by more than {TOLERANCES[dtype]:.0e}: {line}[/]"
        )
    dist.destroy_process_group()
    return int(bool(disagree))


if __name__ == "__main__":
    sys.exit(main())
