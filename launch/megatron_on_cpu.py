# SPDX-License-Identifier: Apache-2.0
"""Megatron-core and Megatron-LM on a machine without CUDA: for tests and smoke runs only.

``torchrun ... launch/megatron_on_cpu.py SCRIPT ARGUMENT ...`` (or ``-m MODULE ARGUMENT ...``) runs
a script as it is, with all shims in place; ``install()`` does the same in a process of one's own.
Each shim is a record that says what breaks without it. One set serves 0.14 to 0.20. Where CUDA is
available only what is broken there too, without Transformer Engine, is changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing.spawn
import runpy
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import typing_extensions
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
Apply = Callable[[Any], None]


@dataclass(frozen=True)
class Shim:
    """One thing that Megatron expects of CUDA, and what stands in its place."""

    id: str  # short name, for tables
    # where Megatron 0.16.1 (or the version named) stops without it, file:line; below
    # ``megatron/core``, or below ``megatron`` where it begins with training or legacy
    breaks: str
    reason: str  # why
    modules: tuple[str, ...]  # those that it changes
    apply: Apply  # changes one of them, by ``_replace``

    @property
    def is_needed(self) -> bool:
        """Whether it is here: Megatron's own slips are on every device."""
        return self.reason.startswith(UPSTREAM) or not torch.cuda.is_available()


UPSTREAM = "upstream: "  # how reasons begin that say nothing of CUDA
TRITON_KERNELS = (
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.paged_stash",
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.ssm.ops.",
)
"""Names of modules, or how they begin."""

SHIMS: list[Shim] = []
_undo = contextlib.ExitStack()  # what puts everything back


def shim(breaks: str, reason: str, *modules: str) -> Callable[[Apply], Apply]:
    """Make a shim of a function that changes a module: torch if none is named."""

    def add(apply: Apply) -> Apply:
        SHIMS.append(Shim(apply.__name__, breaks, reason, modules or ("torch",), apply))
        return apply

    return add


def _replace(owner: Any, name: str, new: Any) -> None:
    """Set an attribute until ``remove`` is called."""
    if name in vars(owner):
        _undo.callback(setattr, owner, name, vars(owner)[name])
    else:  # inherited, or new
        _undo.callback(delattr, owner, name)
    setattr(owner, name, new)


def _does(answer: Any = None) -> Callable[..., Any]:
    """A function that only answers; a new one each time, as torch._dynamo wants no two names of
    torch for one function."""
    return lambda *arguments, **named: answer


# torch.cuda.


@shim(
    "utils.py:631, tensor_parallel/mappings.py:91, transformer/moe/router.py:90",
    "about 175 tensors are made on torch.cuda.current_device()",
)
def current_device(module: Any) -> None:
    _replace(module.cuda, "current_device", _does(CPU))


@shim("tensor_parallel/random.py:55,235", "seeding and fork() read CUDA's generator")
def generator_state(module: Any) -> None:
    def get_rng_state(device: Any = "cuda") -> Tensor:
        return torch.get_rng_state()

    _replace(module.cuda, "get_rng_state", get_rng_state)
    _replace(module.cuda.random, "get_rng_state", get_rng_state)


@shim(
    "tensor_parallel/random.py:237,422",
    "silently: fork() seeds a generator that draws nothing here",
)
def seeding(module: Any) -> None:
    _replace(module.cuda, "manual_seed", torch.manual_seed)


class Stream:
    """The only queue there is: what is ordered is done at once."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """A point in that queue: always passed."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


@shim(
    "transformer/moe/token_dispatcher.py:445,871, transformer/moe/shared_experts.py:123",
    "the dispatcher and shared experts use side streams; combined 1F1B record_stream",
)
def streams(module: Any) -> None:
    stream = Stream()
    _replace(module.cuda, "Stream", Stream)
    _replace(module.cuda, "Event", Event)
    _replace(module.cuda, "current_stream", _does(stream))
    # Optimizers ask in builds for CUDA, before torch 2.13 by the second.
    _replace(module.accelerator, "current_stream", _does(stream))
    _replace(module.cuda, "is_current_stream_capturing", _does(False))
    _replace(module.cuda, "default_stream", _does(stream))
    _replace(module.cuda, "stream", _does(contextlib.nullcontext()))
    _replace(module.cuda, "set_stream", _does())
    _replace(module.Tensor, "record_stream", _does())


@shim(
    "pipeline_parallel/p2p_communication.py:398, training/training.py:2255", "waits for the device"
)
def synchronize(module: Any) -> None:
    _replace(module.cuda, "synchronize", _does())


@shim("pipeline_parallel/utils.py:212", "marks ranges for Nsight")
def nvtx(module: Any) -> None:
    _replace(module.cuda.nvtx, "range_push", _does())
    _replace(module.cuda.nvtx, "range_pop", _does())
    _replace(module.cuda.nvtx, "range", _does(contextlib.nullcontext()))


@shim(
    "training/initialize.py:312,349,399", "with no device no groups are made and nothing is seeded"
)
def one_device(module: Any) -> None:
    _replace(module.cuda, "device_count", _does(1))
    _replace(module.cuda, "set_device", _does())


@shim("training/arguments.py:853", "--moe-grouped-gemm asks for the device's capability")
def capability(module: Any) -> None:
    _replace(module.cuda, "get_device_capability", _does((9, 0)))


# torch.


def _on_cpu(value: Any) -> Any:
    """A device named "cuda..." as the CPU; anything else as it is."""
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return CPU if is_cuda else value


class CudaMeansCpu(TorchFunctionMode):
    """Every ``device="cuda"`` that is written out in a call to torch is the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if "device" in named:
            named = {**named, "device": _on_cpu(named["device"])}
        if func is Tensor.to:
            args = tuple(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        return func(*args, **named)


@shim(
    "pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:90, optimizer/optimizer.py:473",
    "about 80 literal device='cuda' and .cuda()",
)
def device_names(module: Any) -> None:
    stock = module.autograd._engine_run_backward

    def run_backward(*arguments: Any, **named: Any) -> Any:
        with CudaMeansCpu():  # modes are off in what they handle, so in all of backward
            return stock(*arguments, **named)

    _undo.enter_context(CudaMeansCpu())  # of this thread, which is where backward runs on CPU
    _replace(module.autograd, "_engine_run_backward", run_backward)
    _replace(module.Tensor, "cuda", lambda self, *arguments, **named: self)
    _replace(module.nn.Module, "cuda", lambda self, *arguments, **named: self)


@shim(
    "optimizer/clip_grads.py:167, optimizer/distrib_optimizer.py:361",
    "optimizers compare tensor.type() with 'torch.cuda.FloatTensor'",
)
def type_names(module: Any) -> None:
    stock = Tensor.type

    def type_of(self: Tensor, dtype: Any = None, *arguments: Any, **named: Any) -> Any:
        if dtype is None:
            name = stock(self)  # comes through here twice under a TorchFunctionMode
            is_reported = name.startswith("torch.cuda.")
            return name if is_reported else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return stock(self, dtype, *arguments, **named)

    _replace(module.Tensor, "type", type_of)


@shim(
    "tensor_parallel/mappings.py:150",
    "gloo gathers equal sizes only; expert tensor parallelism gathers rows",
)
def uneven_all_gather(module: Any) -> None:
    stock = module.distributed.all_gather

    def all_gather(
        outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or len({output.shape for output in outputs}) == 1:
            return stock(outputs, tensor, group=group, async_op=async_op)
        longest = max(len(output) for output in outputs)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        found = [torch.empty_like(padded) for _ in outputs]
        stock(found, padded, group=group)
        for output, rows in zip(outputs, found):
            output.copy_(rows[: len(output)])
        return None

    _replace(module.distributed, "all_gather", all_gather)


@shim("jit.py:21", "torch.compile takes seconds here, and a C++ compiler")
def no_compiler(module: Any) -> None:
    _undo.enter_context(module.compiler.set_stance("force_eager"))


# megatron.core.


@shim(
    "tensor_parallel/random.py:77",
    "silently: the setter is queued for when CUDA starts, so fork() does not fork",
    "megatron.core.tensor_parallel.random",
)
def generator_set(module: Any) -> None:
    def set_state(state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    _replace(module, "_set_cuda_rng_state", set_state)


@shim(
    "transformer/moe/moe_utils.py:1192,1225 (to 0.16)",
    f"{UPSTREAM}NameError te_general_gemm without Transformer Engine",
    "megatron.core.transformer.moe.moe_utils",
)
def router_gemm(module: Any) -> None:
    if "te_general_gemm" not in vars(module):
        _replace(module, "te_general_gemm", None)


@shim(
    "transformer/moe/moe_utils.py:1093",
    "CPU tensors are handed on as they are, but all_to_all_single wants integers",
    "megatron.core.transformer.moe.token_dispatcher",
)
def split_sizes(module: Any) -> None:
    stock = module.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, Tensor):
            return tensor.numpy()
        return stock(tensor, as_numpy=as_numpy, record_stream=record_stream)

    _replace(module, "maybe_move_tensor_to_cpu", move)


@shim(
    "transformer/torch_norm.py:32",
    "torch's norms are refused, but tensor parallel MoE needs sequence parallelism",
    "megatron.core.transformer.torch_norm",
)
def norm_under_sequence_parallel(module: Any) -> None:
    def new(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *rest: Any, **named: Any
    ) -> torch.nn.Module:
        is_layer_norm = config.normalization == "LayerNorm"
        norm = (torch.nn.LayerNorm if is_layer_norm else torch.nn.RMSNorm)(hidden_size, eps=eps)
        for parameter in norm.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return norm

    _replace(module.WrappedTorchNorm, "__new__", new)


@shim(
    "transformer/moe/grouped_gemm_util.py:16 (to 0.16)",
    "legacy GroupedMLP uses a wheel for CUDA; here a loop (bfloat16 only, as upstream asks)",
    "megatron.core.transformer.moe.grouped_gemm_util",
)
def grouped_gemm(module: Any) -> None:
    def gmm(rows: Tensor, weights: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        parts = torch.split(rows, batch_sizes.tolist())
        return torch.cat([part @ (w.t() if trans_b else w) for part, w in zip(parts, weights)])

    _replace(module, "ops", types.SimpleNamespace(gmm=gmm))
    _replace(module, "grouped_gemm_is_available", _does(True))
    _replace(module, "assert_grouped_gemm_is_available", _does())


# megatron.training.


@shim("training (from 0.18)", "typing.override is of Python 3.12")
def typing_override(module: Any) -> None:
    if "override" not in vars(typing):
        _replace(typing, "override", typing_extensions.override)


@shim(
    "training/initialize.py:25 (0.16), transformer/moe/paged_stash.py (0.18), ssm/ops",
    "kernels import triton, which is not there without CUDA, whether they are used or not",
    *TRITON_KERNELS,
)
def no_triton(module: Any) -> None:
    """Done while they are imported: see ``_load``."""


@shim(
    "training/initialize.py:62",
    "pretrain() never passes allow_no_cuda",
    "megatron.training.training",
)
def no_cuda_allowed(module: Any) -> None:
    initialize = functools.partial(module.initialize_megatron, allow_no_cuda=True)
    _replace(module, "initialize_megatron", initialize)


@shim(
    "legacy/fused_kernels/__init__.py:21 (to 0.17)",
    "runs nvcc -V, whether kernels are asked for or not",
    "megatron.legacy.fused_kernels",
)
def no_nvcc(module: Any) -> None:
    _replace(module, "load", _does())


@shim(
    "training/utils.py:448",
    "asked for under TP and CP; not by torch.cuda.get_device_properties, which inductor calls too",
    "megatron.training.utils",
    "megatron.training.arguments",
)
def architecture(module: Any) -> None:
    if "get_device_arch_version" in vars(module):
        _replace(module, "get_device_arch_version", _does(9))


# When.


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module that shims change, and changes it when it is loaded: so
    neither the order of imports nor that of other import hooks matters."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_ours = any(name in shim.modules for shim in SHIMS) or name.startswith(TRITON_KERNELS)
        if not is_ours:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # this module's own
            loader.exec_module = functools.partial(_load, loader.exec_module)
        return spec


def _load(stock: Callable[[ModuleType], None], module: ModuleType) -> None:
    stubs: dict[str, Any] = {}
    is_kernel = module.__name__.startswith(TRITON_KERNELS) and "triton" not in sys.modules
    if is_kernel and importlib.util.find_spec("triton") is None:
        stubs = {"triton": mock.MagicMock(__version__="3.0"), "triton.language": mock.MagicMock()}
    sys.modules.update(stubs)  # no longer than that: other packages ask whether triton is there
    try:
        stock(module)
    finally:
        for name in stubs:
            del sys.modules[name]
    _change(module.__name__)


def _change(name: str, without: Collection[str] = ()) -> None:
    for shim in SHIMS:
        if name in shim.modules and shim.is_needed and shim.id not in without:
            shim.apply(sys.modules[name])


def _is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install(without: Collection[str] = ()) -> None:
    """Put all shims in place that are needed, once: modules are changed now, or when they are
    imported.

    Args:
        without: ids of shims that loaded modules are to do without.
    """
    if _is_installed():
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    _undo.callback(lambda: sys.meta_path.remove(finder))
    for name in dict.fromkeys(name for shim in SHIMS for name in shim.modules):
        if name in sys.modules:
            _change(name, without)


def remove() -> None:
    """Put back what was there before ``install``."""
    _undo.close()


def _name_this_file_as_main() -> None:
    """Let spawned children import this file as their main module instead of the script: saving in
    torch_dist form spawns a queue's server (dist_checkpointing/strategies/filesystem_async.py:55),
    and the script would be imported there for nothing, without shims."""
    stock = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        reported = stock(name)
        reported.pop("init_main_from_name", None)
        return {**reported, "init_main_from_path": __file__}

    _replace(multiprocessing.spawn, "get_preparation_data", get_preparation_data)


def main(arguments: Sequence[str]) -> None:
    """Run ``SCRIPT ...`` or ``-m MODULE ...`` as ``__main__`` with all shims in place."""
    is_module = bool(arguments) and arguments[0] == "-m"
    if len(arguments) < 1 + is_module:
        raise SystemExit("usage: megatron_on_cpu.py SCRIPT [ARGUMENT ...] | -m MODULE ...")
    target, *rest = arguments[is_module:]
    sys.argv = [target, *rest]
    # As python does: the script's folder instead of this one's, or for a module the current one.
    sys.path[0] = str(Path.cwd() if is_module else Path(target).resolve().parent)
    install()
    _name_this_file_as_main()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    import megatron_on_cpu  # the script becomes __main__, where torch.compile would look for ours

    megatron_on_cpu.main(sys.argv[1:])
