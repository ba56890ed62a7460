# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext plan mixed-cluster``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_moe_ext.core.hardware import Flops, Link, read_hardware
from ds_moe_ext.core.layout import Roles
from ds_moe_ext.hosts.steps.training_run import kinds_line
from ds_moe_ext.planning.candidates import Reached
from ds_moe_ext.planning.load_files import read_loads
from ds_moe_ext.planning.model_shape import Training, of_config
from ds_moe_ext.planning.zebra_price import ZebraPrice, price_zebra
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.settings import BLOCK, read_settings
from ds_moe_ext.strategies.zebra import Zebra
from tests.commands import Done, done
from tests.pricing.models import TINY, cluster

MODEL = {**TINY, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
LENGTH, MICRO_BATCH = 128, 4
ASKED = f"--model model.json --length {LENGTH} --micro-batch {MICRO_BATCH} --loads balanced"
BOTH = "--hardware old.json new.json"
FLAGS = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --moe-ffn-hidden-size 128
--num-attention-heads 2 --num-experts 4 --moe-router-topk 2 --swiglu --bf16 --vocab-size 100
--seq-length 128 --micro-batch-size 4 --global-batch-size 64 --untie-embeddings-and-output-weights
"""


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs the command where there are a model, four new ranks and four old ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, speed, per_node in (("new", 4e9, 1), ("old", 3e9, 1), ("pair", 3e9, 2)):
        of = replace(
            cluster(num_nodes=4 // per_node, ranks_per_node=per_node),
            device=replace(
                cluster().device,
                name=f"{name} GPU",
                memory_bytes=2**33,
                memory_bytes_per_s=1e9,
                flops_per_s=Flops(bf16=speed),
            ),
            inter=Link(bytes_per_s=1e9),
        )
        Path(f"{name}.json").write_text(of.to_json())
    Path("model.json").write_text(json.dumps(MODEL))
    Path("three.json").write_text(json.dumps({**MODEL, "num_local_experts": 3}))
    Path("one.json").write_text(
        json.dumps({**MODEL, "num_local_experts": 1, "num_experts_per_tok": 1})
    )
    Path("two.json").write_text(json.dumps({**MODEL, "num_local_experts": 2}))
    Path("flags.sh").write_text(FLAGS)
    before = {
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        BLOCK: {"enabled": True, "strategy": "fssdp", "expert_parallel_size": 4, "debug": True},
    }
    Path("job.json").write_text(json.dumps(before))

    def run(arguments: str) -> Done:
        return done(monkeypatch, capsys, "plan", *arguments.split())

    return run


def priced(*sends_once: bool) -> ZebraPrice:
    """By the price itself, from the same files."""
    clusters = [Reached().of(read_hardware(name)) for name in ("old.json", "new.json")]
    training = Training(num_ranks=8, length=LENGTH, micro_batch=MICRO_BATCH)
    sizes = {"ranks": 8, "experts": 4, "layers": 2, "tokens": training.tokens, "top_k": 2}
    rows = read_loads("balanced", **sizes, steps=4).rows_ILCE[-1].sum(axis=1)
    shape = of_config(MODEL, "model")
    passes = Reached().passes
    return price_zebra(clusters, shape, training, rows, passes=passes, sends_once=sends_once)


def test_from_files_to_a_run(plan: Callable[..., Done]) -> None:
    """The block is what the settings take, with the roles that were printed, and prices are
    ``price_zebra``'s."""
    written = "--hosts old1,old2,old3,old4 new1,new2,new3,new4 --out out/ds.json --hostfile hosts"
    ended = plan(f"mixed-cluster job.json {ASKED} {BOTH} {written}")
    assert ended.returncode == 0, ended.stderr
    found, text = priced(False, True), ended.stdout
    assert found.step_s < priced(False).step_s
    shape = found.shape
    size = shape.expert_ranks
    assert found.attention == 1 and size == shape.attention_ranks == 4 // found.num_groups
    assert re.match(r"use zebra: [\d.]+ times as fast|zebra does not pay", text)
    cells = (re.split(" *│ *", line) for line in text.splitlines())
    table = {row[1]: row[2:] for row in cells if len(row) > 4}
    assert table["zebra"][0] == f"{1e3 * found.step_s:,.1f}"
    assert table["DistEP, the same roles in turns"][0] == f"{1e3 * found.dist_s:,.1f}"
    assert any(name.startswith("EP on all 8 GPUs, ") for name in table)
    assert any(name.startswith("EP on 4 new GPU alone, ") for name in table)
    assert f"M : N = {size} : {size}: attention on new GPU, experts on old GPU" in text
    assert f"moved = {list(found.moved_L)}\n" in text
    document = json.loads(Path("out/ds.json").read_text())
    assert document["optimizer"] == {"type": "Adam"} and document[BLOCK]["debug"] is True
    assert "expert_parallel_size" not in document[BLOCK]
    assert f"{json.dumps({BLOCK: document[BLOCK]})}\n" in text
    _, strategy = read_settings(document)
    assert isinstance(strategy, Zebra)
    placing = strategy.placing
    assert isinstance(placing, ExpertParallel) and placing.send_once == (found.once_to > 0) is True
    assert "travels once to each rank with experts of its own" in text
    strategy = strategy.settled(list, document["train_micro_batch_size_per_gpu"])
    assert strategy.roles == Roles.first(size, size)
    assert strategy.num_micro_batches == shape.num_stripes
    assert strategy.profile is not None and strategy.profile.sequence_length == LENGTH
    tables: list[str] = []
    for keys in ({"static_capacity": 99}, {"send_once": False}):
        Path("job.json").write_text(json.dumps({**document, BLOCK: {"enabled": True, "ep": keys}}))
        ended = plan(f"mixed-cluster job.json {ASKED} {BOTH} --out keys.json")
        assert ended.returncode == 0 and "travels once" not in ended.stdout
        assert json.loads(Path("keys.json").read_text())[BLOCK]["ep"] == keys
        tables.append(ended.stdout.partition("└")[0])
    assert tables[0] == tables[1]  # where rows must be of one expert each, none is sent once
    unset = {**document, BLOCK: {"enabled": True, "ep": {"static_capacity": None}}}
    Path("job.json").write_text(json.dumps(unset))
    assert "travels once" in plan(f"mixed-cluster job.json {ASKED} {BOTH}").stdout
    balanced = {**document, BLOCK: {"enabled": True, "strategy": "esp", "balance": "fssdp"}}
    Path("job.json").write_text(json.dumps(balanced))
    ended = plan(f"mixed-cluster job.json {ASKED} {BOTH} --out keys.json")
    block = json.loads(Path("keys.json").read_text())[BLOCK]
    is_kept = block["zebra"]["expert_size"] > 1
    said = "replicas among expert ranks, which shorten a step, are not priced"
    assert said in ended.stdout if is_kept else "left out" in ended.stdout
    assert block.get("balance") == ("fssdp" if is_kept else None) and "ep" not in block
    in_groups = [range(first, first + size) for first in range(1, 5, size)]
    hosts = [f"{name}{n} slots=1" for own in in_groups for name in ("new", "old") for n in own]
    assert Path("hosts").read_text().splitlines() == hosts


def test_megatron_s_flags(plan: Callable[..., Done]) -> None:
    """Stripes are micro-batches there. Two tensor parallel ranks count for one of them, and what
    the old GPUs cannot multiply in goes."""
    for name, of, has in (
        ("half", "old", Flops(fp16=3e9)),
        ("both", "new", Flops(bf16=4e9, fp16=4e9)),
    ):
        read = read_hardware(f"{of}.json")
        device = replace(read.device, flops_per_s=has)
        Path(f"{name}.json").write_text(replace(read, device=device).to_json())
    both = "--hardware half.json both.json"
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    Path("tensor.sh").write_text(f"{FLAGS} {tensor} --expert-tensor-parallel-size 1")
    ended = plan(f"mixed-cluster tensor.sh --loads balanced {both} --recomputes --out block.json")
    assert ended.returncode == 0, ended.stderr
    assert "number type: fp16, since one of the devices has no bf16" in ended.stdout
    assert re.search(
        r"--global-batch-size 64 --fp16 --recompute-granularity full --recompute-method uniform "
        r"--recompute-num-layers 1 --ds-moe-ext-config block.json; leave out --bf16, "
        r"--expert-model-parallel-size\n",
        ended.stdout,
    )
    zebra = json.loads(Path("block.json").read_text())[BLOCK]["zebra"]
    assert zebra["attention_size"] % 2 == 0 and zebra["recompute_experts"]
    ended = plan(f"mixed-cluster flags.sh --loads balanced {BOTH} --out block.json")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(Path("block.json").read_text())
    assert set(document) == {BLOCK}
    zebra = document[BLOCK]["zebra"]
    _, strategy = read_settings(document)
    assert strategy is not None and strategy.roles is not None
    strategy.first_owners([4, 4], (), strategy.roles.size)  # which refuses what cannot be moved
    assert sum(zebra["moved"]) > 0 == 4 % zebra["attention_size"]
    found = re.search(r"flags: --micro-batch-size (\d+) --global-batch-size (\d+)", ended.stdout)
    assert found is not None
    stripe, batch = map(int, found.groups())
    # Eight ranks with 4 samples a pass, and two passes of them.
    assert batch == 64 and 2 * 4 * stripe * zebra["num_micro_batches"] == batch
    assert f"moved = {zebra['moved']}\n" in ended.stdout


def test_groups_and_hosts(plan: Callable[..., Done]) -> None:
    """Two experts make two groups: hosts of each follow each other; but not where groups divide
    nodes."""
    asked = ASKED.replace("model.json", "two.json")
    ended = plan(f"mixed-cluster {asked} {BOTH} --hosts a,b,c,d e,f,g,h --hostfile hosts")
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"(\d) groups, M : N = (\d) : (\d)", ended.stdout)
    assert found is not None
    num_groups, attention, expert = map(int, found.groups())
    assert num_groups > 1 and attention == expert == 4 // num_groups
    names = "".join(line.split()[0] for line in Path("hosts").read_text().splitlines())
    assert names == {2: "efabghcd", 4: "eafbgchd"}[num_groups]
    one = asked.replace("two.json", "one.json")
    nodes = "--hardware pair.json new.json --hosts a,b e,f,g,h"
    ended = plan(f"mixed-cluster {one} {nodes}")
    assert ended.returncode == 0, ended.stderr
    assert "EP on all 8 GPUs: not priced: nodes of 2 and 1 ranks" in ended.stdout
    assert "ranks: hosts in the order e,f,g,h,a,b; devices whose name has 'new GPU'" in ended.stdout
    ended = plan(f"mixed-cluster {one} {nodes} --hostfile hosts --out ds.json")
    slots = [line.split() for line in Path("hosts").read_text().splitlines()]
    assert slots == [[name, "slots=1"] for name in "efgh"] + [[name, "slots=2"] for name in "ab"]
    _, strategy = read_settings(json.loads(Path("ds.json").read_text()))
    assert isinstance(strategy, Zebra)
    devices = ["new GPU"] * 4 + ["old GPU"] * 4
    assert strategy.settled(lambda: devices, 4).roles == Roles(
        (0,), (1,), order=(0, 4, 1, 5, 2, 6, 3, 7)
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"{ASKED} --hardware new.json", "--hardware has devices new GPU; give two files"),
        (f"{ASKED} --hardware new.json new.json", "devices new GPU, new GPU; give two"),
        (f"--loads balanced {BOTH}", "--model is missing; name a config.json"),
        (f"{ASKED} {BOTH} --hosts a,b c,d", "--hosts is 'a,b c,d', but the clusters have 4 and 4"),
        (f"{ASKED} {BOTH} --hosts a,b,c,d a,e,f,g", "name each node once"),
        (f"{ASKED} {BOTH} --in job.json", "--in is 'job.json', but mixed-cluster takes files"),
    ],
)
def test_what_is_wrong(arguments: str, expected: str, plan: Callable[..., Done]) -> None:
    ended = plan(f"mixed-cluster {arguments}")
    assert ended.returncode == 2 and expected in ended.stderr and ended.stdout == ""


def test_what_cannot_be(plan: Callable[..., Done]) -> None:
    """It still says what plain expert parallelism takes, and writes nothing."""
    ended = plan(f"mixed-cluster {ASKED.replace('model.json', 'three.json')} {BOTH} --nodes 3 4")
    assert ended.returncode == 1
    assert "4 attention ranks and 3 expert ranks make no groups in which 3 experts" in ended.stdout
    stage_3 = json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    Path("job.json").write_text(stage_3)
    ended = plan(f"mixed-cluster job.json {ASKED} {BOTH} --out not.json")
    assert ended.returncode == 1
    assert ended.stdout.startswith(
        "zebra is not possible: roles exclude ZeRO 3; use stage 0, 1 or 2"
    )
    assert "EP on 4 new GPU alone" in ended.stdout and not Path("not.json").exists()


def test_other_algorithms_take_a_job(plan: Callable[..., Done]) -> None:
    ended = plan("prophet --model model.json")
    assert ended.returncode == 2
    assert "model is 'model.json', which only mixed-cluster takes" in ended.stderr
    ended = plan("mixed-clusters --model model.json")
    assert ended.returncode == 2 and "did you mean 'mixed-cluster'?" in ended.stderr
    ended = plan("prophet")
    assert ended.returncode == 2 and "prophet has no job; give its file by --in" in ended.stderr


def test_the_verdict_is_over_all_strategies(plan: Callable[..., Done]) -> None:
    """A strategy beside EP has a row where it is faster, and the verdict names the fastest row."""
    ended = plan(f"mixed-cluster {ASKED} {BOTH} --loads zipf:1.2")
    assert ended.returncode == 0, ended.stderr
    cells = (re.split(" *│ *", line) for line in ended.stdout.splitlines())
    step_s = {row[1]: float(row[2].replace(",", "")) for row in cells if len(row) > 4}
    zebra_s = step_s.pop("zebra")
    fastest, best_s = min(step_s.items(), key=lambda each: each[1])
    assert not fastest.startswith("EP on") and any(name.startswith("EP on") for name in step_s)
    pays = zebra_s < best_s
    times = re.search(r"([\d.]+) times as fast", ended.stdout)
    assert times is not None and fastest in ended.stdout.splitlines()[0]
    assert ended.stdout.startswith("use zebra") == pays
    assert float(times[1]) == pytest.approx(max(zebra_s / best_s, best_s / zebra_s), abs=0.02)


def test_a_number_type_that_the_trainer_fills_in(plan: Callable[..., Done]) -> None:
    """It is chosen as where there is no job: the first that both devices have."""
    fp16 = replace(read_hardware("old.json"), name="half")
    Path("half.json").write_text(
        replace(fp16, device=replace(fp16.device, flops_per_s=Flops(fp16=3e9))).to_json()
    )
    both = replace(read_hardware("new.json"), name="both")
    flops = Flops(bf16=4e9, fp16=4e9)
    Path("both.json").write_text(
        replace(both, device=replace(both.device, flops_per_s=flops)).to_json()
    )
    filled = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    Path("job.json").write_text(json.dumps(filled))
    ended = plan(f"mixed-cluster job.json {ASKED} --hardware half.json both.json --out ds.json")
    assert ended.returncode == 0, ended.stderr
    assert "number type: fp16, since one of the devices has no bf16" in ended.stdout
    assert json.loads(Path("ds.json").read_text())["fp16"] == {"enabled": True}


def test_a_run_names_the_command() -> None:
    """Where its ranks have two kinds of device, and no roles; with a block that gives them some."""

    def line(block: dict[str, Any], devices: list[str]) -> str:
        strategy = read_settings({BLOCK: {"enabled": True, **block}})[1]
        assert strategy is not None
        return kinds_line(strategy, devices, {6})

    auto = {"strategy": "auto"}
    said = line(auto, ["Tesla T4", "NVIDIA A100-SXM4-80GB"] * 4)
    assert "have NVIDIA A100-SXM4-80GB and Tesla T4" in said and "exchange roles" not in said
    document, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
    zebra = read_settings(document)[1]
    assert isinstance(zebra, Zebra) and (zebra.attention_size, zebra.expert_size) == (2, 2)
    assert zebra.attention_device == "NVIDIA A100-SXM4-80GB"  # 6 experts do not divide by 4
    said = line(auto, ["T4", "T5", "T5"])
    assert "exchange roles if T5 is faster" in said and "ds-moe-ext plan mixed-cluster" in said
    roles = {"strategy": "zebra", "zebra": {"attention_size": 1, "expert_size": 2}}
    assert line(auto, ["T4", "T4"]) == line(roles, ["T4", "A100", "T4"]) == ""
