# SPDX-License-Identifier: Apache-2.0
"""The stages of a day on GPUs, as data: commands, how their figures are read, what they need.

Commands run in the repository's root by bash. ``$HERE`` is the row's own folder, for a while;
``$OUT`` is what stays, ``$MEGATRON_LM`` a checkout of Megatron-LM. Without a GPU the same commands
have tiny sizes, and run over gloo on two ranks: a rehearsal, whose figures say nothing.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ds_moe_ext.commands import cluster_profile
from ds_moe_ext.core.hardware import read_hardware

# Figures: how each is read from what a command left in its folder.

JSON = "figures.json"
PRINTED = "printed.txt"
MIB = 2**20
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
TEST = re.compile(r"\btests/\S+::.*?(?= (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b|$)")
BAD = ("FAILED", "ERROR")
ITERATION_MS = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True)
class Figure:
    """One figure."""

    what: str  # it is
    value: float | str  # the median where there are several; a text where nothing was measured
    unit: str = ""  # of the value
    low: float | None = None  # the least
    high: float | None = None  # the largest
    count: int = 1  # values behind it


Reader = Callable[[Path], Iterable[Figure]]
"""Figures from the folder of a row."""


def spread(what: str, values: Sequence[float], unit: str, scale: float = 1.0) -> Figure:
    """Median, least and largest of values, each multiplied by a scale."""
    three = min(values), statistics.median(values), max(values)
    low, middle, high = (float(f"{scale * each:.5g}") for each in three)
    return Figure(what, middle, unit, low, high, len(values))


def _left_out(skipped: Mapping[str, str]) -> Iterator[Figure]:
    for name, reason in skipped.items():
        yield Figure(name, f"not run: {reason}")


def _document(folder: Path, name: str = JSON) -> Any:
    return json.loads((folder / name).read_text("utf-8"))


def read_nothing(folder: Path) -> Iterator[Figure]:
    """For what is only printed."""
    yield from ()


def read_texts(folder: Path) -> Iterator[Figure]:
    """Names and values, as of versions."""
    for name, text in _document(folder).items():
        yield Figure(name, text)


def read_tests(folder: Path) -> Iterator[Figure]:
    """Outcomes of pytest, from its lines, which are there for a run that was stopped, too."""
    found, bad = Counter[str](), []
    for line in (folder / PRINTED).read_text("utf-8", "replace").splitlines():
        test, outcome = TEST.search(line), OUTCOME.search(line)
        if line.startswith(("FAILED ", "ERROR ")) or test is None or outcome is None:
            continue  # the summary names them again
        found[outcome[1]] += 1
        if outcome[1] in BAD:
            bad.append(test[0].strip())
    for name, number in found.items():
        yield Figure(name.lower(), number, "tests")
    for name in bad:
        yield Figure("failed", name)


def read_engines(folder: Path) -> Iterator[Figure]:
    """Steps of contenders that take turns (``bench/rotation.py``)."""
    document = _document(folder)
    seconds, tokens = document["seconds_a_step"], document["tokens_a_step"]
    first = next(iter(seconds))
    for name, own in seconds.items():
        yield spread(f"{name}: a step", own, "ms", 1e3)
        yield spread(f"{name}: speed", [tokens / each for each in own], "tokens/s")
        if name != first:
            ratios = [each / ours for each, ours in zip(own, seconds[first])]
            yield spread(f"{name}: a step over that of {first}", ratios, "x")
        if document.get("busy"):
            yield Figure(f"{name}: device busy", round(document["busy"][name], 4), "of a step")
    yield from _left_out(document["skipped"])


def read_layers(folder: Path) -> Iterator[Figure]:
    """One layer (``bench/layer_speed.py``)."""
    for result in _document(folder)["results"]:
        measured = result["measured"]
        first = next(iter(measured))
        for name, own in measured.items():
            yield spread(f"{name}: forward and backward", own["device_s"], "ms", 1e3)
            if name != first:
                ratios = [a / b for a, b in zip(own["device_s"], measured[first]["device_s"])]
                yield spread(f"{name}: over {first}", ratios, "x")
            if own["peak_bytes"] is not None:
                yield Figure(f"{name}: memory", round(own["peak_bytes"] / MIB, 1), "MiB")
        yield from _left_out(result["skipped"])


def read_devices(folder: Path) -> Iterator[Figure]:
    """Whether a GPU waits for its host (``bench/device_path.py``)."""
    for result in _document(folder)["results"]:
        for name, own in result["found"].items():
            wall_ms, issued_ms, kernels_ms = own["wall_ms"], own["issued_ms"], own["kernels_ms"]
            yield spread(f"{name}: a layer", wall_ms, "ms")
            yield spread(f"{name}: host issues it in", issued_ms, "ms")
            yield spread(f"{name}: between steps", own["between_ms"], "ms")
            if not math.isnan(kernels_ms):
                busy = [kernels_ms / wall for wall in wall_ms]
                yield Figure(f"{name}: kernels run", round(kernels_ms, 4), "ms")
                yield spread(f"{name}: device busy", busy, "of a step")
                waits = statistics.median(issued_ms) > kernels_ms
                yield Figure(f"{name}: bound by", "host" if waits else "device")
        yield from _left_out(result["skipped"])


def read_exchanges(folder: Path) -> Iterator[Figure]:
    """Rows and copies by size (``bench/exchange_speed.py``)."""
    document = _document(folder)
    for result in document["results"]:
        what = f"{result['way']} of {result['bytes'] / MIB:.4g} MiB"
        yield spread(f"{what}: time", result["seconds"], "ms", 1e3)
        rates = [result["bytes"] / each for each in result["seconds"]]
        yield spread(f"{what}: rate", rates, "GB/s", 1e-9)
    yield from _left_out(document["skipped"])


def read_cluster(folder: Path) -> Iterator[Figure]:
    """Lines that ``ds-moe-ext profile`` fitted; r² stands for the spread."""
    hardware = read_hardware(folder / "hardware.json")
    for where, what, link in cluster_profile.links(hardware):
        fit = "" if link.r_squared is None else f", r² {link.r_squared:.4f}"
        yield Figure(f"{what} {where}: rate{fit}", link.bytes_per_s / 1e9, "GB/s")
        yield Figure(f"{what} {where}: latency", link.latency_s * 1e6, "us")
    for what, product in cluster_profile.products(hardware):
        yield Figure(what, 2 * product.multiply_adds_per_s / 1e12, "TFLOP/s")
    if hardware.device.memory_bytes_per_s is not None:
        yield Figure("memory, read and written", hardware.device.memory_bytes_per_s / 1e9, "GB/s")


NUM_WARM_UPS = 12
"""Steps of a run in which costs are measured and kernels are made."""


def read_trained(folder: Path) -> Iterator[Figure]:
    """A run of ``pretrain_deepspeed.py``, beside what ``ds-moe-ext price`` says of it."""
    summary = _document(folder, "run/summary.json")
    seconds, peak_bytes = summary["seconds_s"][NUM_WARM_UPS:], summary["peak_bytes"]
    yield spread("a step, measured", seconds, "ms", 1e3)
    speeds = [summary["tokens_per_step"] / each for each in seconds]
    yield spread("speed, measured", speeds, "tokens/s")
    yield Figure("memory of the fullest rank, measured", peak_bytes / 2**30, "GiB")
    yield Figure("loss, first step", summary["losses"][0], "nats")
    yield Figure("loss, last step", summary["losses"][-1], "nats")
    balances = list(summary["balance_by_layer"].values())
    if balances:
        yield spread("rows of the busiest rank over the mean, by layer", balances, "x")
    path = folder / "price.json"
    if path.is_file():
        own = next((way for way in _document(folder, path.name)["ways"] if way["is_own"]), None)
        if own is not None:
            yield Figure("a step, priced", 1e3 * own["step_s"], "ms")
            ratio = own["step_s"] / statistics.median(seconds)
            yield Figure("a step, priced over measured", round(ratio, 4), "x")
            parts = own["memory_bytes"]
            priced_bytes = parts["total"] - parts["runtime"]  # which torch does not count
            yield Figure("memory of the fullest rank, priced", priced_bytes / 2**30, "GiB")
            ratio = priced_bytes / peak_bytes
            yield Figure("memory, priced over measured", round(ratio, 4), "x")


def read_pretrain_gpt(folder: Path) -> Iterator[Figure]:
    """Iterations that Megatron-LM's script printed."""
    printed = (folder / PRINTED).read_text("utf-8", "replace")
    times_ms = [float(found) for found in ITERATION_MS.findall(printed)][NUM_WARM_UPS:]
    if times_ms:
        yield spread("an iteration", times_ms, "ms")


# Stages.

ROOT = Path(__file__).parents[2]
LIMIT_S = 480.0  # of a row; a lent machine may take a command back after ten minutes
GPU_TESTS = {
    **dict.fromkeys(("comm", "direct_launch", "graphs", "ranges", "sync"), 1),
    **dict.fromkeys(("kernels", "streams", "layer"), 2),
}
"""Files of tests/gpu, and in how many parts each runs."""
NUM_PARTS = 16  # in which the slow parity rows run
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where the day is."""

    devices: int  # GPUs that torch sees here
    ranks: int  # one a GPU, of all machines; two in a rehearsal
    launch: str | None = None  # starts ranks, see ``torchrun``; None for those of this machine
    checkout: Path | None = None  # of Megatron-LM
    device: str = "GPU"  # what the GPUs are called

    def __str__(self) -> str:
        return f"{self.devices} x {self.device}, {self.ranks} rank(s)"

    @property
    def is_rehearsal(self) -> bool:
        return self.devices == 0

    def pick(self, real: T, tiny: T) -> T:
        """The second in a rehearsal."""
        return tiny if self.is_rehearsal else real

    def torchrun(self, ranks: int | None = None) -> str:
        """What starts a script on so many ranks of this machine, or on one a GPU everywhere."""
        here = "torchrun --standalone --nproc_per_node"
        start = f"{here} {ranks or self.ranks}" if ranks or not self.launch else self.launch
        return f"{start} launch/shared_gpus.py"

    def shares(self, ranks: int) -> bool:
        """Whether so many ranks of this machine are more than its GPUs."""
        return 0 < self.devices < ranks


Need = Callable[[Place], str]
"""Why a place cannot run a row; empty if it can."""


def gpus(number: int = 1) -> Need:
    """So many GPUs here."""
    return lambda place: "" if place.devices >= number else f"needs {number} GPU(s)"


def package(name: str) -> Need:
    """An installed package."""
    return lambda place: "" if find_spec(name) else f"{name} is not installed"


def megatron_lm(place: Place) -> str:
    """A checkout."""
    return "" if place.checkout else "no checkout of Megatron-LM is named; give --megatron FOLDER"


@dataclass(frozen=True)
class Row:
    """One command."""

    stage: str  # that it belongs to
    name: str  # in the stage, also of its folder
    command: str  # for bash, see the module
    read: Reader = read_nothing  # reads the figures from its folder
    needs: Sequence[Need] = ()  # it runs where all are met
    # JSON files that it finds in its folder
    documents: Mapping[str, Any] = field(default_factory=dict)
    # several ranks share a GPU: what is computed counts, what it takes does not
    is_shared: bool = False
    limit_s: float = LIMIT_S  # it is stopped then

    @property
    def id(self) -> str:
        return f"{self.stage}/{self.name}"


def rows_of(place: Place) -> list[Row]:
    """All rows, in the order in which they run: the cheap and the most wanted first."""
    return [row for stage in STAGES.values() for row in stage(place)]


def environment(place: Place) -> Iterator[Row]:
    command = "python3 launch/gpu_day/gpu_day.py --machine $HERE/figures.json"
    yield Row("environment", "versions", command, read_texts)
    yield Row("environment", "doctor", "ds-moe-ext doctor")
    if place.is_rehearsal:
        # Once, here: a row that is stopped while it compiles leaves a lock for all that follow.
        yield Row("environment", "collectives", "python3 launch/quickstart.py compile")


def tests(place: Place) -> Iterator[Row]:
    for file, num_parts in place.pick(GPU_TESTS, {"comm": 1}).items():
        shared = file == "comm" and place.shares(4)
        for number in range(1, num_parts + 1):
            command = f"pytest -vv tests/gpu/test_{file}.py --part {number}/{num_parts}"
            name = f"{file}, part {number} of {num_parts}"
            yield Row("tests", name, command, read_tests, is_shared=shared)


def parity(place: Place) -> Iterator[Row]:
    """Quick configurations under DeepSpeed on 2 to 4 ranks, against what stock learns."""
    rows = "pytest -vv -n 2 --timeout 300 tests/hosts/test_configurations.py"
    ranks_on, num_parts = place.pick(("cuda", 2), ("cpu", 16))
    for number in place.pick((1, 2), (1,)):
        command = f"RANKS_ON={ranks_on} {rows} --part {number}/{num_parts}"
        name = f"quick rows, part {number} of {num_parts}"
        yield Row("parity", name, command, read_tests, is_shared=place.shares(4))


def slow_parity(place: Place) -> Iterator[Row]:
    """All other configurations: last, for a day that has time left."""
    for number in range(1, NUM_PARTS + 1):
        command = (
            "RANKS_ON=cuda pytest -vv -m slow -n 2 --timeout 300 "
            f"tests/hosts/test_configurations.py --part {number}/{NUM_PARTS}"
        )
        name = f"slow rows, part {number} of {NUM_PARTS}"
        shared = place.shares(4)
        yield Row("slow_parity", name, command, read_tests, [gpus()], is_shared=shared)


TE_LAYER = "Megatron, Transformer Engine's GroupedLinear"
CONTENDERS = (
    *("ours: experts of a Hugging Face block", "Hugging Face grouped_mm", "DeepSpeed AutoEP"),
    *("DeepSpeed AutoEP, fused options", "Megatron, grouped GEMM", TE_LAYER),
    "dense FFN of the same FLOPs",
)


def _layer(place: Place, shape: str, only: Sequence[str]) -> str:
    sizes = place.pick("--repetitions 12", "--tokens 128 --repetitions 3")
    names = " ".join(f'"{name}"' for name in only)
    bench = "python3 launch/bench/layer_speed.py"
    return f"{bench} --shapes {shape} {sizes} --only {names} --json $HERE/figures.json"


def layer(place: Place) -> Iterator[Row]:
    """One layer, forward and backward, beside the others' and the dense ceiling."""
    shapes = place.pick(("qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v3_of_8"), ("small",))
    # Without the wheel, Megatron has its experts one after the other: too slow at real sizes.
    only = place.pick(CONTENDERS, ("Megatron, expert by expert", *CONTENDERS))
    for shape in shapes:
        yield Row("layer", shape, _layer(place, shape, only), read_layers)


def device_path(place: Place) -> Iterator[Row]:
    """One GPU that stands for one of eight ranks: how much of a step it is busy."""
    sizes = place.pick(
        "--rounds 6 --hardware configs/hardware/dgx_h100.json",
        "--layers 2 --tokens 128 --rounds 2 --warm_ups 2",
    )
    real = (("qwen3_30b_a3b", " --attention"), ("qwen3_30b_a3b", ""), ("mixtral_8x7b", ""))
    for shape, attention in place.pick(real, (("small", " --attention"),)):
        command = (
            f"python3 launch/bench/device_path.py --shapes {shape}{attention} {sizes} "
            "--json $HERE/figures.json"
        )
        name = shape + (", with attention" if attention else "")
        yield Row("device_path", name, command, read_devices)


def links(place: Place) -> Iterator[Row]:
    """What links and the device reach: a hardware file, and rows and copies by size."""
    start, quick = place.torchrun(), place.pick("", " --quick")
    command = f"{start} -m ds_moe_ext.profile_run{quick} --out $HERE/hardware.json"
    command += " && cp $HERE/hardware.json $OUT/"
    yield Row("links", "hardware", command, read_cluster)
    sizes = place.pick(
        "--mib 1 4 16 64 256 --expert_mib 9 84 336",  # Qwen3-30B's, DeepSeek-V3's, Mixtral 8x7B's
        "--mib 0.25 1 --expert_mib 0.5 --repetitions 5",
    )
    alone = place.ranks == 1
    command = (
        f"{place.torchrun(2) if alone else start} launch/bench/exchange_speed.py {sizes} "
        "--json $HERE/figures.json"
    )
    shared = place.shares(2 if alone else place.devices)
    yield Row("links", "exchanges", command, read_exchanges, is_shared=shared)


STRATEGIES = ("ep", "fssdp", "prophet", "esp", "auto")
TURNS = (("ep", "fssdp", "prophet"), ("ep", "esp", "auto"))
"""Strategies that share a process, and its GPU's memory, with stock contenders."""
BYTES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
"""Of models that read text as bytes."""


def _file(path: str) -> Any:
    return json.loads((ROOT / path).read_text("utf-8"))


def _qwen3(place: Place, **keys: Any) -> dict[str, Any]:
    """Layers of Qwen3-30B-A3B: one on one GPU, which holds five contenders, else two."""
    name = place.pick("public/qwen3_30b_a3b", "qwen3_moe_tiny")
    model: dict[str, Any] = _file(f"configs/models/{name}.json")
    layers = {"num_hidden_layers": 1 if place.ranks == 1 else 2}
    return {**model, "config": {**model["config"], **BYTES, **layers, **keys}}


def deepspeed(place: Place) -> Iterator[Row]:
    """DeepSpeed's engine at ZeRO 1, 2 and 3, beside AutoEP and Hugging Face."""
    sizes = place.pick(
        "--micro_batch_size 4 --micro_batches 4 --sequence_length 4096 --rounds 5 "
        "--steps_per_round 1 --profiled 2",
        "--micro_batch_size 1 --micro_batches 2 --sequence_length 32 --rounds 2 "
        "--steps_per_round 1",
    )
    for stage in (1, 2, 3):
        # Slices of gradients are not for weights that ZeRO 3 shards.
        keys = {"esp": {"slice_gradients": False}} if stage == 3 else {}
        for names in place.pick(TURNS, TURNS[stage % 2 :][:1]):
            command = (
                f"{place.torchrun()} launch/bench/deepspeed_speed.py --model $HERE/model.json "
                f"{sizes} --zero_stage {stage} --strategies {' '.join(names)} "
                f"--block {shlex.quote(json.dumps(keys))} --json $HERE/figures.json"
            )
            name, model = f"ZeRO {stage}, {' '.join(names)}", {"model.json": _qwen3(place)}
            yield Row("deepspeed", name, command, read_engines, documents=model)


def _megatron(place: Place, names: Sequence[str], *flags: str) -> tuple[str, dict[str, Any]]:
    """Megatron-core's own modules; of Qwen3's sizes in Mixtral's form, which the script builds."""
    model: dict[str, Any] = _file("configs/models/mixtral_tiny.json")
    sizes = "--seq-length 32 --micro-batch-size 1 --rounds 2 --steps-per-round 1"
    if not place.is_rehearsal:
        qwen3 = _qwen3(place)["config"]
        kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
        width, experts = qwen3["moe_intermediate_size"], qwen3["num_experts"]
        model["config"] |= {
            **{name: qwen3[name] for name in kept},
            "intermediate_size": width,
            "num_local_experts": experts,
            "num_experts_per_tok": qwen3["num_experts_per_tok"],
            "max_position_embeddings": 4096,
        }
        sizes = "--seq-length 4096 --micro-batch-size 4 --rounds 5 --steps-per-round 2"
    command = (
        f"{place.torchrun()} launch/bench/megatron_speed.py --model $HERE/model.json --bf16 "
        f"--use-distributed-optimizer --expert-model-parallel-size {place.ranks} {sizes} "
        f"--strategies {' '.join(names)} --json $HERE/figures.json"
    )
    return " ".join((command, *flags)), {"model.json": model}


def megatron(place: Place) -> Iterator[Row]:
    """Megatron's engine beside its own MoE, and Megatron-LM's script where a checkout is given."""
    for names in TURNS:
        command, documents = _megatron(place, names)
        yield Row("megatron", " ".join(names), command, read_engines, documents=documents)
    sizes = place.pick(
        "--hidden-size 2048 --ffn-hidden-size 768 --num-attention-heads 32 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --num-experts 128 --moe-router-topk 8 "
        "--bf16 --use-distributed-optimizer --train-iters 40",
        "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --num-experts 4 --moe-router-topk 2 --distributed-backend gloo "
        "--train-iters 20",
    )
    for name in ("stock", *STRATEGIES):
        ours = "" if name == "stock" else f" --ds-moe-ext-config configs/strategies/{name}.json"
        command = (
            "PYTHONPATH=$MEGATRON_LM CUDA_DEVICE_MAX_CONNECTIONS=1 "
            f"{place.torchrun()} launch/megatron_on_cpu.py -m ds_moe_ext.run "
            f"$MEGATRON_LM/pretrain_gpt.py --num-layers 2 --global-batch-size {4 * place.ranks} "
            f"--expert-model-parallel-size {place.ranks} {sizes} --lr 1e-4 --swiglu "
            "--no-bias-swiglu-fusion --disable-bias-linear --attention-dropout 0 "
            "--hidden-dropout 0 --untie-embeddings-and-output-weights --transformer-impl local "
            "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion "
            "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
            "--moe-aux-loss-coeff 0.01 --mock-data --tokenizer-type NullTokenizer "
            f"--vocab-size 4097 --log-interval 1 --eval-iters 1 --eval-interval 1000{ours}"
        )
        needs = [megatron_lm]
        yield Row("megatron", f"pretrain_gpt, {name}", command, read_pretrain_gpt, needs)


def run(place: Place) -> Iterator[Row]:
    """200 steps whose router nothing balances: each strategy's steps, memory and price."""
    steps, length, micro_batch = place.pick((200, 4096, 4), (16, 32, 2))
    dtype = place.pick("bf16", "fp32")
    model = _qwen3(place, router_aux_loss_coef=0.0)
    rank_counts = (1, 2) if place.ranks == 1 else (place.ranks,)
    for ranks in rank_counts:
        # Two ranks on one GPU: copies and memory are real, time is not.
        shared = ranks > place.ranks
        start = place.torchrun(ranks) if shared else place.torchrun()
        for name in STRATEGIES:
            job: dict[str, Any] = _file("configs/hosts/deepspeed_zero1.json")
            job["train_micro_batch_size_per_gpu"] = micro_batch
            job["bf16"] = {"enabled": dtype == "bf16"}
            block = {"enabled": True, "strategy": name, "expert_parallel_size": ranks}
            job["ds_moe_ext"] = {**block, "report": {"path": None}}
            train = (
                f"{start} launch/pretrain_deepspeed.py --model $HERE/model.json "
                f"--deepspeed_config $HERE/job.json --steps {steps} --sequence_length {length} "
                "--output $HERE/run"
            )
            price = (
                "ds-moe-ext price $HERE/job.json --model $HERE/model.json --hardware "
                f"$OUT/hardware.json --length {length} --micro-batch {micro_batch} "
                f"--micro-batches 1 --loads $HERE/run/report.json --strategies {name} "
                "--json $HERE/price.json"
            )
            command = train if shared else f"{train} && {price}"
            documents = {"model.json": model, "job.json": job}
            title = f"{name}, 2 ranks on one GPU" if shared else name
            yield Row("run", title, command, read_trained, (), documents, shared)


def transformer_engine(place: Place) -> Iterator[Row]:
    needs = [package("transformer_engine"), gpus()]
    command = _layer(place, "qwen3_30b_a3b", (TE_LAYER,))
    yield Row("transformer_engine", "layer", command, read_layers, needs)
    command, model = _megatron(place, ("ep",), "--moe-grouped-gemm")
    yield Row("transformer_engine", "megatron", command, read_engines, needs, model)


def apex(place: Place) -> Iterator[Row]:
    """Megatron takes Apex's optimizer and norms where they are installed."""
    command, model = _megatron(place, ("ep",))
    needs = [package("apex"), gpus()]
    yield Row("apex", "megatron", command, read_engines, needs, model)


STAGES: Mapping[str, Callable[[Place], Iterator[Row]]] = {
    stage.__name__: stage
    for stage in (
        *(environment, tests, layer, device_path, links, deepspeed, run, megatron),
        *(parity, transformer_engine, apex, slow_parity),
    )
}
"""By name, in order."""
