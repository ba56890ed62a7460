# SPDX-License-Identifier: Apache-2.0
"""Write the table of expected gains of docs/choosing.md, by `ds-moe-ext price`: minutes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ds_moe_ext.commands.price.market import HOST_BOUND

PAGE = Path(__file__).with_name("choosing.md")
JOB = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "ds_moe_ext": {"enabled": True, "strategy": "fssdp"},
}
FLAGS = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128
--num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --swiglu
--vocab-size 129280 --untie-embeddings-and-output-weights
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 16
--decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 8
--expert-tensor-parallel-size 1
--seq-length 4096 --micro-batch-size 1 --global-batch-size 4096 --recompute-granularity full
--bf16 --grad-reduce-in-bf16 --use-distributed-optimizer --overlap-grad-reduce
"""
COLUMNS = {
    "Mixtral 8x7B, 64 H100": ("job.json --model mixtral_8x7b --recomputes", "dgx_h100", 8),
    "Mixtral 8x7B, 32 A100": ("job.json --model mixtral_8x7b --recomputes", "dgx_a100", 4),
    "Qwen3-30B-A3B, 64 H100": ("job.json --model qwen3_30b_a3b --recomputes", "dgx_h100", 8),
    "Qwen3-30B-A3B, 32 A100": ("job.json --model qwen3_30b_a3b --recomputes", "dgx_a100", 4),
    "DeepSeek-V3, 256 H100": ("flags.sh", "dgx_h100", 32),
}
"""Job, hardware and nodes."""
STRATEGIES = ("ep", "fssdp", "prophet", "esp", "esp over fssdp", "esp over prophet")
BEGIN, END = "<!-- priced -->", "<!-- /priced -->"


def priced(job: str, hardware: str, nodes: int) -> dict[str, Any]:
    """What the command writes to its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(JOB))
        (Path(folder) / "flags.sh").write_text(FLAGS)
        line = f"price {job} --hardware {hardware} --nodes {nodes} --json all.json"
        main = "from ds_moe_ext.cli import main; main()"
        command = [sys.executable, "-c", main, *line.split()]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads((Path(folder) / "all.json").read_text())
    return found


def cells(document: dict[str, Any]) -> dict[str, str]:
    """Of each strategy the fastest way that fits: seconds or gain, the gain with even loads, and
    whether devices wait for their host."""
    found: dict[str, str] = {}
    even = document["gains_by_loads"]["balanced"]
    for way in document["ways"]:  # the fastest first
        name = way["strategy"].partition(", ")[0]
        if not way["fits"] or name in found:
            continue
        gain = even.get(way["strategy"])
        bound = " (h)" if way["host_s"] > HOST_BOUND * way["step_s"] else ""
        found[name] = (
            f"{way['gain']:.2f}; {gain:.2f}{bound}"
            if name != "ep"
            else (f"{way['step_s']:.2f} s{bound}")
        )
    return found


def table() -> str:
    """In Markdown."""
    columns = [cells(priced(*asked)) for asked in COLUMNS.values()]
    rows = [f"| | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in STRATEGIES:
        shown = " | ".join(column.get(name, "") for column in columns)
        rows.append(f"| `{name}` | {shown} |")
    return "\n".join(rows)


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    inner = f"{BEGIN}\n{table()}\n{END}"
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: inner, text, flags=re.S), "utf-8")
