# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext price``, from a shell."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ds_moe_ext.commands.price.inputs import read_clusters, read_job, training_of
from ds_moe_ext.commands.price.market import Case, Market, chosen_strategies, priced_market, ways_of
from ds_moe_ext.commands.price.market_page import page_of
from ds_moe_ext.commands.price.words import PARTS, block_words, grid_text, print_market, verdict
from ds_moe_ext.core.hardware import Flops
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.files import documents
from ds_moe_ext.planning.load_files import read_loads, write_loads
from ds_moe_ext.planning.model_shape import Training, of_config
from ds_moe_ext.report.charts import chart_files
from tests.commands import status
from tests.pricing.models import TINY, cluster
from tests.pricing.test_model_shape import DEEPSEEK, FLAGS, MIXTRAL, QWEN

ROOT = Path(__file__).parents[2]
README = {"enabled": True, "strategy": "fssdp"}
JOB = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "ds_moe_ext": README,
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "hidden_size": 32, "vocab_size": 100}))
    device = replace(cluster(1e9).device, memory_bytes=16 * 2**30, memory_bytes_per_s=1e9)
    hardware = replace(cluster(), device=device)
    (tmp_path / "two.json").write_text(hardware.to_json())
    fast = replace(hardware, device=replace(device, name="of 4e+09", flops_per_s=Flops(bf16=8e9)))
    (tmp_path / "fast.json").write_text(fast.to_json())
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    return status(monkeypatch, "price", *arguments)


@pytest.fixture
def priced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> Callable[..., str]:
    """Prices by these arguments, and says what was printed."""

    def price(*arguments: str) -> str:
        assert run(monkeypatch, files, *arguments) == 0
        return capsys.readouterr().out

    return price


ASKED = ("--model", "tiny.json", "--hardware", "two.json", "--length", "64")


def test_a_job_is_priced_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    wanted = ("--html", "out/page.html", "--trace", "out/trace.json", "--json", "out/all.json")
    assert (
        run(monkeypatch, files, "job.json", *ASKED, "--loads", "zipf:1.2", "--pays", *wanted) == 0
    )
    stated = capsys.readouterr().out
    assert "tiny: 0.0 billion weights, 2 layers of 4 experts, 2 a token" in stated
    assert "1,024 tokens a step, 2 x 2 samples of 64 a rank, bf16, ZeRO 1" in stated
    assert "fastest: " in stated and "memory of the fullest rank, GiB of 16" in stated
    assert all(heading in stated for heading in ("tokens/s", *PARTS, "GiB a rank"))  # in a pipe
    assert "…" not in stated and "step time by cause" not in stated
    assert stated.count(" pays by load: ") in (1, 2) and "by tokens of a rank in a pass: " in stated

    numbers = json.loads((files / "out/all.json").read_text())
    ways = numbers["ways"]
    assert {each["strategy"] for each in ways} >= {"ep", "fssdp", "prophet", "esp"}
    assert sorted(each["step_s"] for each in ways) == [each["step_s"] for each in ways]
    parts = ("computed_s", "imbalance_s", "exposed_s", "host_s", "end_s")
    for each in ways:
        assert sum(each[part] for part in parts) == pytest.approx(each["step_s"])
        memory = dict(each["memory_bytes"])
        assert memory.pop("total") == sum(memory.values())
    (base,) = (each for each in ways if each["is_base"])
    assert base["gain"] == 1 and base["strategy"] == "ep"
    assert sum(each["is_fastest"] for each in ways) == 1
    assert numbers["pays"]

    events = json.loads((files / "out/trace.json").read_text())["traceEvents"]
    (best,) = (each for each in ways if each["is_fastest"])
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"EP rank {ep_rank}" for ep_rank in range(best["expert_parallel_size"])}
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"attention", "expert", "issue"}

    page = (files / "out/page.html").read_text()
    assert not Parsed.of(page).left_open
    assert not re.search(r"(src|href)=.?http", page)
    for title in ("Step time by cause", "Memory of the fullest rank", "Timeline of"):
        assert title in page
    assert len(chart_files(page)) >= 3


def test_rows_are_priced_as_they_travel(priced: Callable[..., str], files: Path) -> None:
    """As int8: 36 bytes for the 64 of a row of 32 in bfloat16."""
    exposed_s = []
    for name, hooks in (("plain", []), ("coded", ["int8"])):
        document = {**JOB, "ds_moe_ext": {**README, "hooks": hooks}}
        (files / f"{name}.json").write_text(json.dumps(document))
        priced(f"{name}.json", *ASKED, "--strategies", "ep", "--json", f"{name}_out.json")
        ways = json.loads((files / f"{name}_out.json").read_text())["ways"]
        (base,) = (each for each in ways if each["is_base"])
        exposed_s.append(base["exposed_s"])
    assert 0.5 < exposed_s[1] / exposed_s[0] < 0.8


def test_replicas_are_priced_as_they_travel(priced: Callable[..., str], files: Path) -> None:
    """As int8, gate and up 16 times 36 bytes, down 32 times 12: 960 for the 1536 of an expert.
    Where all EP ranks have all experts nothing else travels."""
    keys = {"expert_parallel_size": 4, "fssdp": {"overlap_degree": 4, "reshard_interval": 0}}
    there = {"type": "int8", "dispatch": False, "combine": False, "replicas": True}
    exposed_s = []
    for name, hooks in (("plain", []), ("coded", [{**there, "replica_gradients": True}])):
        document = {**JOB, "ds_moe_ext": {**README, **keys, "hooks": hooks}}
        (files / f"{name}.json").write_text(json.dumps(document))
        asked = (f"{name}.json", *ASKED, "--strategies", "fssdp", "--loads", "zipf:1.2")
        priced(*asked, "--json", f"{name}_out.json")
        ways = json.loads((files / f"{name}_out.json").read_text())["ways"]
        (own,) = (each for each in ways if each["strategy"] == "fssdp")
        assert own["memory_bytes"]["copies"] == 2 * 2 * 3 * 1536  # as they are, and gradients
        exposed_s.append(own["exposed_s"])
    assert exposed_s[1] / exposed_s[0] == pytest.approx(960 / 1536, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "device", "share"),
    [(1, "none", 0.0), (1, "cpu", 1.0), (3, "cpu", 0.25)],  # a ratio is of stage 3 alone
)
def test_states_in_host_memory_are_not_on_the_device(
    priced: Callable[..., str], files: Path, stage: int, device: str, share: float
) -> None:
    reported, bytes_of, offload = [], [], {"device": device, "ratio": 0.25}
    for name, zero in (("all", {}), ("part", {"offload_optimizer": offload})):
        document = {**JOB, "zero_optimization": {"stage": stage, **zero}}
        (files / f"{name}.json").write_text(json.dumps(document))
        asked = (f"{name}.json", *ASKED, "--strategies", "ep", "--json", f"{name}_out.json")
        reported.append(priced(*asked))
        way, *_ = json.loads((files / f"{name}_out.json").read_text())["ways"]
        bytes_of.append(way["memory_bytes"]["optimizer"])
    assert bytes_of[1] == bytes_of[0] * (1 - share)
    assert (f"{share:.0%} of the optimizer's states are in host memory" in reported[1]) == (
        share > 0
    )
    assert "host memory" not in reported[0]


def test_a_class_of_one_s_own_is_priced(
    priced: Callable[..., str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name alone, beside the class of the job's file, whose options are its own; and with a
    pipeline over it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copy(ROOT / "examples/own_strategy.py", files / "priced_alone.py")
    shutil.copy(ROOT / "examples/own_strategy.py", files / "priced_own.py")
    own = {"strategy": "priced_own:Busiest", "options": {"num_copied": 2}}
    (files / "own.json").write_text(json.dumps({**JOB, "ds_moe_ext": {"enabled": True, **own}}))
    asked = "ep,priced_alone:Busiest,esp over priced_alone:Busiest"
    priced("own.json", *ASKED, "--strategies", asked, "--json", "out.json")
    ways = json.loads((files / "out.json").read_text())["ways"]
    names = (*asked.split(","), "priced_own:Busiest")
    assert {each["strategy"] for each in ways} == set(names)
    replicas = {
        each["strategy"]: each["copies"] for each in ways if each["expert_parallel_size"] > 2
    }
    assert replicas["priced_own:Busiest"] > replicas["priced_alone:Busiest"] > replicas["ep"] == 0
    priced("job.json", *ASKED, "--strategies", "priced_alone:Busiest")


def test_a_routing_trace_as_megatron_writes_it_is_priced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """Of two ranks, on a cluster of four, whose ranks each have half as many samples."""
    loads = read_loads("hot_rank", ranks=2, experts=4, layers=2, tokens=256, top_k=2, steps=5)
    write_loads(files / "trace.jsonl", loads)
    one_way = ("--strategies", "ep", "--loads", "trace.jsonl", "--json", "all.json")
    assert run(monkeypatch, files, "job.json", *ASKED, *one_way) == 0
    stated = capsys.readouterr().out
    assert "loads: trace.jsonl" in stated
    ways = json.loads((files / "all.json").read_text())["ways"]
    assert ways[0]["balance"] > 1.2  # busiest EP rank over mean


class Parsed(HTMLParser):
    """Tags that are open."""

    VOID = ("meta", "br", "img", "wbr", "input", "link")

    def __init__(self) -> None:
        super().__init__()
        self.left_open: list[str] = []

    @classmethod
    def of(cls, page: str) -> Parsed:
        parsed = cls()
        parsed.feed(page)
        return parsed

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.left_open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.left_open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass


def test_clusters_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    asked = ("--model", "tiny.json", "--length", "64", "--strategies", "fssdp")
    both = ("--hardware", "two.json", "fast.json", "--nodes", "2", "1")
    assert run(monkeypatch, files, "job.json", *asked, *both) == 0
    stated = capsys.readouterr().out
    assert "2 nodes of 2 of 1e+09 beside 1 nodes of 2 of 4e+09" in stated
    assert "6 ranks" in stated and "each computes experts at its own speed" in stated
    assert "zebra, 1 group of 2 attention and 4 expert ranks: " in stated
    assert run(monkeypatch, files, "job.json", *asked, *both[:3], "--nodes", "2") == 2
    assert "--nodes has 1 numbers, but --hardware 2 clusters" in capsys.readouterr().err


def write_flags(path: Path, given: dict[str, Any]) -> None:
    flags = (f"--{name}" + ("" if value is True else f" {value}") for name, value in given.items())
    path.write_text("# a run\n" + " \\\n  ".join(flags) + "\n")


def test_megatron_s_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    given = {**FLAGS, "num-layers": 3, "moe-layer-freq": "([0]*1+[1]*2)", "num-experts": 4}
    given |= {"moe-router-topk": 2, "bf16": True, "use-distributed-optimizer": True}
    given |= {"micro-batch-size": 1, "global-batch-size": 8, "seq-length": 64}
    given |= {"expert-model-parallel-size": 2, "recompute-granularity": "full"}
    given |= {"ds-moe-ext-config": "ours.json"}
    write_flags(files / "flags.sh", given)
    (files / "ours.json").write_text(json.dumps({"ds_moe_ext": {**README, "strategy": "prophet"}}))
    assert run(monkeypatch, files, "flags.sh", "--hardware", "two.json", "--strategies", "ep") == 0
    stated = capsys.readouterr().out
    assert (
        "2 layers of 4 experts" in stated and "2 x 1 samples of 64 a rank, bf16, ZeRO 1" in stated
    )
    assert "layers run again in backward" in stated
    (own,) = (
        line
        for line in stated.splitlines()
        if "yours" in line and "prophet" in line and "│" in line
    )
    assert "2 EP" in own  # and the next lines: ranks, 2 owners


def test_pipeline_stages_of_divided_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """Two interleaved stages of four ranks, which share each sample."""
    given = {**FLAGS, "num-layers": 4, "moe-layer-freq": 1, "num-experts": 4, "bf16": True}
    given |= {"moe-router-topk": 2, "seq-length": 64, "global-batch-size": 4}
    given |= {"tensor-model-parallel-size": 2, "sequence-parallel": True}
    given |= {"context-parallel-size": 2, "pipeline-model-parallel-size": 2}
    given |= {"num-layers-per-virtual-pipeline-stage": 1, "expert-model-parallel-size": 2}
    write_flags(files / "flags.sh", given)
    wanted = ("--html", "out/page.html", "--trace", "out/trace.json", "--json", "out/all.json")
    asked = ("flags.sh", "--hardware", "two.json", "--nodes", "4", "--strategies", "esp", "--pays")
    assert run(monkeypatch, files, *asked, *wanted) == 0
    stated = " ".join(capsys.readouterr().out.split())
    layout = "tensor parallelism 2, context 2, 2 pipeline stages of 2 layers in 2 chunks each"
    assert layout in stated and "256 tokens a step, 4 x 1 samples of 64" in stated
    assert "bubble" in stated and " is the busiest, " in stated
    numbers = json.loads((files / "out/all.json").read_text())
    # Experts are split as dense weights are, where nobody says otherwise.
    own = [each for each in numbers["ways"] if each["is_own"]]
    assert [(each["expert_parallel_size"], each["expert_sharding_size"]) for each in own] == [
        (2, 2)
    ]
    parts = ("computed_s", "imbalance_s", "exposed_s", "host_s", "end_s", "bubble_s")
    for each in numbers["ways"]:
        assert each["bubble_s"] > 0
        assert sum(each[part] for part in parts) == pytest.approx(each["step_s"])
    events = json.loads((files / "out/trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    stages = [names[f"pipeline stage {stage}"] for stage in range(2)]
    ran = [sum(e["ph"] == "X" and e["pid"] == stage for e in events) for stage in stages]
    assert ran == [2 * 2 * 4] * 2  # chunks, micro-batches, both ways
    page = (files / "out/page.html").read_text()
    assert not Parsed.of(page).left_open
    assert "a row a pipeline stage" in page and "bubble: it waits for other stages" in page


def test_a_cluster_that_nothing_can_be_priced_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """Each way says why, and no page is written."""
    asked = ("--model", "tiny.json", "--hardware", "hetermoe_c1_l40s", "--html", "page.html")
    assert run(monkeypatch, files, "job.json", *asked, "--strategies", "ep") == 1
    stated = capsys.readouterr().out
    assert ("no configuration is possible") in stated and stated.count(
        "add 'device.flops_per_s.bf16'"
    ) == 2
    assert not (files / "page.html").exists()


@pytest.mark.parametrize(
    "held",
    [
        b'// as DeepSpeed reads it\n{"train_batch_size": 8, // of all ranks\n # more\n}',
        b'\xef\xbb\xbf{"train_batch_size": 8}',
        '{"train_batch_size": 8}'.encode("utf-16"),
    ],
    ids=["comments", "a BOM", "UTF-16"],
)
def test_forms_of_a_job_s_json(held: bytes, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(held)
    assert read_job(tmp_path / "job.json").samples == 8


def test_without_hjson_comments_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(documents, "find_spec", lambda _: None)
    (tmp_path / "job.json").write_text("{} // nothing")
    with pytest.raises(ValueError, match="comments are read where hjson is installed"):
        read_job(tmp_path / "job.json")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ((), 12, True)),
        ({"transformer-impl": "local"}, ((), 12, False)),
        ({"recompute-granularity": "selective"}, (("core_attn",), 12, True)),
        ({"moe-layer-recompute": True}, (("moe",), 12, True)),
        (
            {"recompute-granularity": "selective", "recompute-modules": "moe_act layernorm"},
            (("layernorm", "moe_act"), 12, True),
        ),
        (
            {
                "use-precision-aware-optimizer": True,
                "exp-avg-dtype": "bf16",
                "exp-avg-sq-dtype": "fp8",
            },
            ((), 4 + 2 + 1, True),
        ),
    ],
)
def test_what_megatron_keeps(
    tmp_path: Path, flags: dict[str, Any], expected: tuple[tuple[str, ...], int, bool]
) -> None:
    write_flags(tmp_path / "job.sh", {**FLAGS, **flags})
    asked = read_job(tmp_path / "job.sh")
    assert asked.shape is not None
    training = training_of(asked, asked.shape, 4, {})
    assert (training.again, training.state_bytes, training.is_fused) == expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("comma.json", *ASKED), r"'comma.json' cannot be read \(.*line 1.*name a DeepSpeed JSON"),
        (("empty.json", *ASKED), r"'empty.json' has neither JSON nor flags; name a DeepSpeed JSON"),
        (
            ("list.json", *ASKED),
            r"'list.json' is a JSON list, not an object; name a DeepSpeed JSON",
        ),
        (
            ("job.json", *ASKED, "--nodes", "0"),
            r"--nodes has 0; give each .* number of nodes, 1",
        ),
        (("none.json", *ASKED), r"'none.json' cannot be read .* name a DeepSpeed JSON"),
        (("job.json", *ASKED[2:]), r"does not have the model's sizes; name its config.json"),
        (("job.json", "--model", "mixtrl_tiny", *ASKED[2:]), r"did you mean 'mixtral_tiny'"),
        (
            ("job.json", *ASKED[:3], "dgx_h800"),
            r"'dgx_h800' cannot be .* did you mean 'dgx_h200'\? known: dgx_a100",
        ),
        (
            ("job.json", *ASKED, "--strategies", "fsdp"),
            r"'fsdp', which is not priced; did you mean 'fssdp'\? known: ep, .* class of your own",
        ),
        (
            ("job.json", *ASKED, "--strategies", "json:dumps"),
            r"strategy is 'json:dumps', which is not a dataclass",
        ),
        (("job.json", *ASKED, "--loads", "zip:1"), r"'zip:1' is neither the name of loads"),
        (
            ("job.json", *ASKED, "--loads", "uniform"),
            r"'uniform' is neither .* did you mean 'balanced'\? known: balanced, burst",
        ),
        (("job.json", *ASKED, "--length", "0"), r"length is 0; give at least 1"),
        (("layout.sh", *ASKED[2:]), r"says --pipeline-model-parallel-layout, which is not priced"),
        (("alone.sh", *ASKED[2:]), r"without --sequence-parallel, which Megatron .* add it"),
        (("heads.sh", *ASKED[2:]), r"says --num-attention-heads 128, which .* 3 does not divide"),
        (("ring.sh", *ASKED[2:]), r"says --cp-comm-type a2a, which is not priced; only p2p is"),
        (("parts.sh", *ASKED[2:]), r"stage 2, but 4 layers do not divide into 4 pipeline stages"),
        (("ranks.sh", *ASKED[2:]), r"which 4 ranks in groups of 8 of 1 each do not divide"),
        (("ep_ranks.sh", *ASKED[2:]), r"8 EP ranks of 1 rank\(s\) do not divide 2 ranks"),
        (("stages.sh", *ASKED[2:]), r"3 layers do not divide over 2 pipeline stages; give another"),
        (("again.sh", *ASKED[2:]), r"modules that run again have 'act', .* choose among core_attn"),
        (("moments.sh", *ASKED[2:]), r"says --exp-avg-dtype int8; give one of fp32, bf16, fp16"),
        (
            ("auto.json", *ASKED),
            r"autotp_size is 2, and AutoTP is not priced; set it to 1",
        ),
        (
            ("words.sh", *ASKED[2:]),
            r"says 'words', which belongs to no flag; give Megatron's flags",
        ),
        (
            ("odd.json", *ASKED),
            r"has 10 samples, which 4 ranks of 1 each do not divide; give other",
        ),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: Path,
    arguments: tuple[str, ...],
    error: str,
) -> None:
    (files / "comma.json").write_text('{"bf16": {,}')
    (files / "empty.json").write_text("\n")
    (files / "list.json").write_text("[]")
    pipeline = {"pipeline-model-parallel-size": 4}
    halves = {"pipeline-model-parallel-size": 2, "bf16": True}
    for name, flags in (
        ("layout", {"pipeline-model-parallel-layout": "Et|tL"}),
        ("alone", {"tensor-model-parallel-size": 2}),
        ("heads", {"tensor-model-parallel-size": 3, "sequence-parallel": True}),
        ("ring", {"context-parallel-size": 2, "cp-comm-type": "a2a"}),
        ("parts", {**pipeline, "num-layers-per-virtual-pipeline-stage": 2}),
        ("ranks", {"context-parallel-size": 8, "global-batch-size": 1}),
        ("ep_ranks", {**pipeline, "expert-model-parallel-size": 8, "seq-length": 8, **halves}),
        ("stages", {"pipeline-model-parallel-size": 2, "num-layers": 3}),
        ("again", {"recompute-granularity": "selective", "recompute-modules": "act"}),
        ("moments", {"use-precision-aware-optimizer": True, "exp-avg-dtype": "int8"}),
    ):
        write_flags(files / f"{name}.sh", {**FLAGS, "num-layers": 4, "moe-layer-freq": 1, **flags})
    (files / "auto.json").write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}}))
    (files / "words.sh").write_text("words")
    (files / "odd.json").write_text(json.dumps({"train_batch_size": 10}))
    assert run(monkeypatch, files, *arguments) == 2
    stated = " ".join(capsys.readouterr().err.split())
    assert re.search(error, stated), stated


def market_of(
    config: dict[str, Any], hardware: list[str], nodes: list[int], **training: Any
) -> Market:
    shape, clusters = of_config(config, "it"), read_clusters(hardware, nodes)
    num_ranks = sum(each.num_ranks for each in clusters)
    sizes = {"length": 4096, "micro_batches": 4, "recomputes": True, **training}
    case = Case(tuple(clusters), shape, Training(num_ranks=num_ranks, **sizes))
    chosen = chosen_strategies({"ds_moe_ext": README}, "ep")
    return priced_market(case, "zipf:0.6", chosen, every_grid=False, to=Console(quiet=True))


CLUSTERS = [
    pytest.param(["dgx_h100"], [8], id="h100"),
    pytest.param(["dgx_a100"], [4], id="a100"),
    pytest.param(["dgx_h100", "dgx_a100"], [2, 2], id="mixed"),
]
SHORT = {
    "mixtral": {**MIXTRAL, "num_hidden_layers": 2},
    "qwen": {**QWEN, "num_hidden_layers": 2},
    "deepseek": {**DEEPSEEK, "num_hidden_layers": 3, "first_k_dense_replace": 1},
}


def with_memory(market: Market, num_bytes: float) -> Market:
    """The same on devices with so much memory."""
    clusters = [
        replace(each, device=replace(each.device, memory_bytes=int(num_bytes)))
        for each in market.case.clusters
    ]
    return replace(market, case=replace(market.case, clusters=tuple(clusters)))


def test_what_does_not_fit_is_never_the_fastest() -> None:
    """The fastest way of plenty of memory is not among those that fit into less."""
    market = market_of(SHORT["mixtral"], ["dgx_h100"], [8])
    fastest = market.priced[0]
    needs = sorted(each.memory.total for each in market.priced)
    assert needs[0] < fastest.memory.total
    plenty = with_memory(market, 2 * needs[-1])
    assert plenty.best is fastest and plenty.too_large is None
    assert verdict(plenty).startswith("fastest: ") and "does not fit" not in verdict(plenty)

    less = with_memory(market, fastest.memory.total - 1)
    assert less.best is not None and less.fits(less.best) and less.too_large is fastest
    assert verdict(less).startswith(f"fastest that fits into memory: {less.best.way.shown} on ")
    assert verdict(less).endswith("would be faster, but does not fit")
    assert f"{fastest.way.shown} on {grid_text(fastest.way.grid)} (" in verdict(less)

    none = with_memory(market, needs[0] - 1)
    assert none.best is None and none.traced is not None
    assert verdict(none).startswith("nothing fits into memory: ")
    assert block_words(none) == [] and "the fastest" not in dict(none.named)
    to = Console(record=True, width=200, file=io.StringIO())
    print_market(none, (), to)
    assert "│ >" not in to.export_text() and "to run the fastest" not in to.export_text()
    page = page_of(none, ())
    assert "<mark>fastest</mark>" not in page and not Parsed.of(page).left_open


@pytest.mark.parametrize(
    ("config", "hardware", "nodes"),
    [
        pytest.param(
            config,
            *cluster.values,
            id=f"{name}-{cluster.id}",
            marks=[] if row == column else [pytest.mark.slow],
        )
        for row, (name, config) in enumerate(SHORT.items())
        for column, cluster in enumerate(CLUSTERS)
    ],
)
def test_readme_s_block_is_never_behind(
    config: dict[str, Any], hardware: list[str], nodes: list[int]
) -> None:
    """By its own price, on the best of its grids."""
    market = market_of(config, hardware, nodes)
    assert market.base is not None and market.own_best is not None
    assert market.fits(market.base) and market.fits(market.own_best)
    on_grid = {each.way.grid: each.step_s for each in market.priced if each.way.name == "ep"}
    for own in (each for each in market.priced if each.way.name == "fssdp"):
        assert own.step_s <= on_grid[own.way.grid] * 1.001


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "nodes"), CLUSTERS)
@pytest.mark.parametrize("config", [MIXTRAL, QWEN, DEEPSEEK], ids=["mixtral", "qwen", "deepseek"])
def test_readme_s_block_is_never_behind_with_whole_models(
    config: dict[str, Any], hardware: list[str], nodes: list[int]
) -> None:
    market = market_of(config, hardware, nodes)
    assert market.base is not None and market.own_best is not None
    assert market.own_best.step_s <= market.base.step_s * 1.001


# What is set beside what.


def ways(block: dict[str, Any], asked: str = "all", *, every_grid: bool = False) -> set[Any]:
    chosen = chosen_strategies({"ds_moe_ext": {**README, **block}}, asked)
    found = ways_of(chosen, cluster(num_nodes=2, ranks_per_node=4), 8, 16, every_grid=every_grid)
    return {(way.name, way.grid.num_ep_ranks, way.grid.etp_size) for _, way in found}


def test_strategies_and_few_grids() -> None:
    found = ways({})
    assert {name for name, *_ in found} == {
        "fssdp", "ep", "prophet", "esp", "esp over fssdp", "esp over prophet"
    }  # fmt: skip
    assert {each[1:] for each in found if each[0] == "ep"} == {(4, 1), (8, 1)}
    assert {each[1:] for each in found if each[0] == "esp"} == {(4, 1), (8, 1), (1, 4), (2, 4)}
    over = {each[1:] for each in found if each[0] == "esp over fssdp"}
    assert over == {(4, 1), (8, 1), (2, 4)}  # in an EP rank there is nothing to copy


def test_all_grids_and_given_ones() -> None:
    found = ways({}, "ep", every_grid=True)
    assert {each[1:] for each in found if each[0] == "ep"} == {(2, 1), (4, 1), (8, 1)}
    given = ways({"expert_parallel_size": 2}, "ep")
    assert {each[1:] for each in given if each[0] == "fssdp"} == {(2, 1)}
    assert {each[1:] for each in given if each[0] == "ep"} == {(4, 1), (8, 1)}
    assert ways({"strategy": "esp", "expert_sharding_size": 2}, "ep", every_grid=True) >= {
        ("esp", 2, 2), ("esp", 4, 2)
    }  # fmt: skip
    assert {name for name, *_ in ways({"strategy": "zebra"}, "ep")} == {"ep"}


def test_owners_that_move_need_one_owner(files: Path) -> None:
    """Where experts have several owners they stay, and a key that moves them is refused."""
    asked = read_job(files / "job.json")
    shape, clusters = of_config(TINY, "tiny"), [cluster(1e9)]
    training = training_of(asked, shape, 4, {"length": 8})
    chosen = chosen_strategies({"ds_moe_ext": {**README, "fssdp": {"reshard_interval": 5}}}, "ep")
    case = Case(tuple(clusters), shape, training)
    market = priced_market(case, "balanced", chosen, every_grid=False, to=Console(quiet=True))
    (refused,) = market.refused
    assert refused.way.grid == Grid(4, 2) and "fssdp.reshard_interval moves experts" in refused.why
    assert {each.way.grid for each in market.priced if each.way.name == "fssdp"} == {Grid(4, 4)}
