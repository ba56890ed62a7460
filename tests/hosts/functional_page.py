# SPDX-License-Identifier: Apache-2.0
"""The page of what Megatron-LM's functional cases with experts do on a CPU, with us and without."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

from tests.hosts.functional_cases import Case, cases, of_megatron, refusals
from tests.hosts.functional_runs import Found, key_of, run_all, verdicts
from tests.hosts.functional_toys import NUM_EXPERTS, NUM_RANKS, Reduced, Toy, reduced

HEAD = """# Megatron-LM's functional cases with experts, run on a CPU

Written by `python -m tests.hosts.functional_runs CHECKOUT [BRIDGE]`; not by hand. {count} training
cases with experts of Megatron-LM at {commit}, with the flags of their files, by the installed
megatron-core {version}:

{summary}

Each case is reduced to a toy, by the rules of `tests/hosts/functional_toys.py`: hidden size 32, 4
heads, 2 to 4 layers, vocabulary 64, sequences of 16 tokens, at most {experts} experts and top-4, no
dropout, embeddings untied, weights drawn anew, float64 (float32 with the flex dispatcher, bfloat16
where two micro-batches are interleaved). Every size of tensor, pipeline, context, expert and expert
tensor parallelism above 1 is 2; where this needs more than {ranks} ranks, pipeline stages are left
out, then context parallelism. Transformer Engine and HybridEP are stand-ins in torch
([on stand-ins](../../docs/megatron.md#on-stand-ins-not-on-a-gpu)). Attention stays within a
context parallel rank's part, and routers prefer the same experts in every run, so that replicas
are worth it.

Three steps; losses, gradient norms, gradients of the first step and weights are compared with those
of stock Megatron: losses to 1e-12 in float64, 1e-5 in float32 and bfloat16, norms to ten times,
weights to a thousand times that. With replicas in bfloat16 or fp8 (marked ~) only losses are
compared, to 0.5 %, and norms, to 5 %: fp8 itself changes losses of a stock toy by 0.4 %. "By
chance" is a strategy of the tests with replicas of half of all experts in every step, in Megatron's
own layer too. In brackets: replicas in all layers and steps, on the rank that had most; without
expert parallelism there is nobody to copy to.

Muon needs a package that is not installed; under megatron-core 0.16.1 we refuse it at start, so
that its cases run with Adam alone. Mamba layers need CUDA: of models that have them, layers with
attention and with experts run. Checkpoints are not resumed, and flags of data, tokenizers,
schedules and logs not used.
"""

BRIDGE = """
## Megatron-Bridge's performance recipes, by their flags

Read, not run: what each recipe with expert parallelism sets (Megatron-Bridge {commit}) is asked of
the tables of refused flags, as `python -m tests.hosts.bridge_recipes CHECKOUT` does.
"""


def write(checkout: Path, page: Path, results: Path, bridge: Path | None = None) -> None:
    """Run what was not run yet, and write the page; with recipes of a checkout of
    Megatron-Bridge, if there is one."""
    trained = [case for case in cases(checkout) if case.trains]
    small = {case.name: reduced(case) for case in trained}
    toys = {key_of(one.toy): one.toy for one in small.values() if one.toy}
    found = run_all(list(toys.values()), results)
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for case in trained:
        rows[_row(case, small[case.name], found)].append(case.name)
    head = HEAD.format(
        count=len(trained),
        commit=_commit(checkout),
        version=_version(),
        summary=_summary(rows),
        experts=NUM_EXPERTS,
        ranks=NUM_RANKS,
    )
    lines = [
        head,
        "| cases | reduced to; left out | stock | `ep` | `fssdp` | by chance | refused |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row, own in rows.items():
        lines.append(f"| {'<br>'.join(own)} | {' | '.join(row)} |")
    if bridge is not None:  # by itself, as what it imports has Megatron's names
        command = (sys.executable, "-m", "tests.hosts.bridge_recipes", str(bridge))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines += [BRIDGE.format(commit=_commit(bridge)), done.stdout.strip()]
    page.write_text("\n".join(lines) + "\n")


def _row(case: Case, small: Reduced, found: dict[str, Found]) -> tuple[str, ...]:
    """All cells but the name."""
    refused = _refused(case)
    if small.toy is None:
        return ("", f"cannot on a CPU: {small.cannot}", "", "", "", refused)
    one = found[key_of(small.toy)]
    said = verdicts(small.toy, one)
    cells = [said.get(name, "") for name in ("stock", "ep", "fssdp", "varied")]
    for place, name in enumerate(("fssdp", "varied"), start=2):
        if cells[place] == "equal":
            about = "~" if small.toy.is_rounded else ""
            cells[place] = f"{about}equal ({one[name]['replicas']})"
    left = f"; without {', '.join(small.dropped)}" if small.dropped else ""
    return (_described(small.toy) + left, *cells, refused)


def _refused(case: Case) -> str:
    """By flags, of strategies that copy; what `ep` refuses as well is said."""
    by_ep = {one.what for one in refusals(case, of_megatron("ep"))}
    met = refusals(case, of_megatron("fssdp"))
    texts = [
        f"{one.what}: {one.reason}" + ("" if one.what in by_ep else " (not under `ep`)")
        for one in met
    ]
    return "; ".join(texts)


def _described(toy: Toy) -> str:
    run, flags = toy.run, dict(toy.run.config)
    sizes = {"TP": run.tp, "PP": run.pp, "VPP": run.vpp or 1, "CP": run.cp, "EP": run.ep}
    said = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    said += [f"ETP {run.etp}"] if run.etp != run.tp else []
    said += [str(flags["moe_token_dispatcher_type"]), run.experts, f"top-{run.topk}"]
    said += [str(flags["fp8_recipe"])] if "fp8" in flags else []
    said += [run.dtype] if run.dtype != "float64" else []
    return f"{toy.world_size} ranks: " + ", ".join(said)


def _summary(rows: dict[tuple[str, ...], list[str]]) -> str:
    counts: Counter[str] = Counter()
    for (said, stock, ep, fssdp, varied, refused), names in rows.items():
        counts["runs"] += len(names) * (stock == "runs")
        counts["without"] += len(names) * (stock == "runs" and "; without" in said)
        counts["ep"] += len(names) * (ep == "equal")
        counts["fssdp"] += len(names) * ("equal" in fssdp)
        counts["varied"] += len(names) * ("equal" in varied)
        counts["alone"] += len(names) * fssdp.endswith("(0)")
        counts["refused"] += len(names) * bool(refused)
        counts["cannot"] += len(names) * stock.startswith("cannot")
    return textwrap.fill(
        f"Stock runs {counts['runs']} of them, {counts['without']} without what the table names; "
        f"{counts['ep']} are equal under `ep`, {counts['fssdp']} under `fssdp`, {counts['varied']} "
        f"with replicas by chance ({counts['alone']} of each without expert parallelism, and so "
        f"without replicas); {counts['cannot']} a CPU cannot run. {counts['refused']} have a "
        "flag that is refused where experts are copied; those of them that a CPU can run are run "
        "without it.",
        width=100,
    )


def _commit(checkout: Path) -> str:
    asked = ("git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD")
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def _version() -> str:
    from importlib.metadata import version

    return version("megatron-core")
