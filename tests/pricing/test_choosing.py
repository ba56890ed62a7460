# SPDX-License-Identifier: Apache-2.0
"""The prices of docs/choosing.md are those of the command that stands beside them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from ds_moe_ext import cli

PAGE = (Path(__file__).parents[2] / "docs/choosing.md").read_text()
COLUMNS = {
    ("mixtral_8x7b", "dgx_h100", 8): 1,
    ("mixtral_8x7b", "dgx_a100", 4): 2,
    ("qwen3_30b_a3b", "dgx_h100", 8): 3,
    ("qwen3_30b_a3b", "dgx_a100", 4): 4,
}
"""Model, hardware and nodes of the table's columns; DeepSeek-V3's are flags of Megatron."""


def reported(column: int) -> dict[str, str]:
    """What the page says, by strategy."""
    rows = re.findall(r"^\| (`.*)\|$", PAGE.partition("## Expected gain")[2], re.M)
    ep_ranks = [[ep_rank.strip(" *") for ep_rank in row.split("|")] for row in rows[:6]]
    return {row[0].replace("`", ""): row[column] for row in ep_ranks}


@pytest.mark.slow
@pytest.mark.parametrize("of", COLUMNS)
def test_prices_of_the_page(
    of: tuple[str, str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hardware, nodes = of
    (job,) = re.findall(r"where `job.json` is\n\n```json\n(.*?)```", PAGE, re.S)
    (tmp_path / "job.json").write_text(job)
    monkeypatch.chdir(tmp_path)
    line = f"price job.json --model {model} --hardware {hardware} --nodes {nodes} --recomputes"
    monkeypatch.setattr(sys, "argv", ["ds-moe-ext", *line.split(), "--json", "all.json"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    best: dict[str, str] = {}
    for way in json.loads((tmp_path / "all.json").read_text())["ways"]:  # the fastest first
        if way["fits"] and way["strategy"] not in best:
            gain = "" if way["strategy"] == "ep" else f", {way['gain']:.2f} x"
            best[way["strategy"]] = f"{way['step_s']:.2f}{gain}"
    assert best == reported(COLUMNS[of])
