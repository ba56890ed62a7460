# SPDX-License-Identifier: Apache-2.0
"""The structure that must hold: who imports whom, who communicates, what is HTML."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "ds_moe_ext"

LAYERS = """
_ds_moe_ext_autoload < _autoload < older_names < strict files version < schedule < core < planning
< moe < strategies < report verification < hosts < patches < commands testing
< cli run profile_run <
"""
"""Rooms, the lowest first: folders or files of the package, itself last. No import goes up."""
PURE = """
strict older_names files.documents schedule.task schedule.orders schedule.simulator schedule.step
schedule.stripes core.placement core.share core.row_levels core.row_levels_twin core.transfer
core.hardware planning.loads planning.load_files planning.load_models planning.prices
planning.layer_costs planning.exchange_costs planning.zebra_costs planning.zebra_planner
planning.fssdp_planner planning.prophet_planner planning.priced_plans planning.pipeline_degrees
planning.layer_pipelines
"""
"""Rooms of arithmetic: numpy, or C by ``compiled``, but no torch, clock or environment."""
IMPURE = {"os", "time", "random", "datetime", "socket", "subprocess", "threading"}
PURE_PACKAGES = (sys.stdlib_module_names | {"numpy", "scipy"}) - IMPURE
IMPORTED_BY = {
    "deepspeed|megatron|transformers|accelerate": "hosts patches commands.model_layers",
    rf"{PACKAGE}\.strategies\.(?!settings)\w+": "strategies hosts.zebra testing",  # or ask a member
    "markupsafe": "report.markup",
}
"""What a pattern matches is imported by these rooms only."""
COMMUNICATION = {
    "ProcessGroup|Store|HashStore|TCPStore": "",
    "checkpoint|tensor": "files hosts commands.conversion",  # sharded tensors and their files
    "get_rank|get_world_size|is_\\w+": "core.comm core.layout hosts patches",
    r"new_\w*group\w*|\w+_group|(init_)?device_mesh": "core.layout hosts.megatron.active_settings",
    ".*": "core.comm hosts.megatron.active_settings",
}
"""Names of torch.distributed, and the rooms that may use them; the first that matches counts."""
DISTRIBUTED = "torch.distributed"

Nodes = tuple[ast.AST, ...]
Findings = Iterator[tuple[Any, str]]


def module_of(path: Path) -> str:
    """Dotted name under the package; "" for the package itself."""
    parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
    return ".".join(parts[1:] if parts[0] == PACKAGE else parts)


PATHS = {
    module_of(path): path
    for pattern in ("*.py", f"{PACKAGE}/**/*.py", "patches/**/*.py")
    for path in ROOT.glob(pattern)
}
ROWS = {room: row for row, rooms in enumerate(LAYERS.split("<")) for room in rooms.split() or [""]}


@cache
def sources() -> dict[str, Nodes]:
    return {m: tuple(ast.walk(ast.parse(path.read_text()))) for m, path in PATHS.items()}


def row_of(module: str) -> int:
    """By the longest name that it lies in; one without a row lies above all."""
    room = module
    while room and room not in ROWS:
        room = room.rpartition(".")[0]
    return ROWS[room] if room or not module else len(ROWS)


def lies_in(module: str, rooms: str) -> bool:
    return any(f"{module}.".startswith(f"{room}.") for room in rooms.split()) or not rooms


def imported(nodes: Nodes) -> Findings:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def our_module(name: str) -> str | None:
    """The module of ours that a dotted name is or lies in; None if it is another's."""
    package, _, inner = name.partition(".")
    while inner and inner not in PATHS:
        inner = inner.rpartition(".")[0]
    return inner if package == PACKAGE else None


def imports_are_allowed(module: str, nodes: Nodes) -> Findings:
    if row_of(module) == len(ROWS) and len(nodes) > 1:
        yield nodes[1], f"{module} has no row in LAYERS of tests/test_house.py; give it one"
    for node, name in imported(nodes):
        other = our_module(name)
        if other is not None and row_of(other) > row_of(module):
            yield node, f"imports {name}, which lies above it"
        for pattern, rooms in IMPORTED_BY.items():
            if re.match(rf"({pattern})(\.|$)", name) and not lies_in(module, rooms):
                yield node, f"imports {name}, which is for {rooms}"
        pure = (
            lies_in(other, f"{PURE} core.compiled")
            if other
            else name.split(".")[0] in PURE_PACKAGES
        )
        if lies_in(module, PURE) and not pure:
            yield node, f"imports {name}, which is not pure"


def communication_has_two_rooms(module: str, nodes: Nodes) -> Findings:
    used = [(node, name) for node, name in imported(nodes) if name.startswith(f"{DISTRIBUTED}.")]
    imports = [node for node, name in imported(nodes) if name == DISTRIBUTED]
    aliases = {DISTRIBUTED, *(alias.asname or alias.name for i in imports for alias in i.names)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            used.append((node, f"{DISTRIBUTED}.{node.attr}"))
    for node, name in used:
        part = name.split(".")[2]
        rooms = next(r for names, r in COMMUNICATION.items() if re.fullmatch(names, part))
        if not lies_in(module, rooms):
            yield node, f"uses {name}, which is for {rooms}"


def markup_is_literal(module: str, nodes: Nodes) -> Findings:
    """What becomes HTML unescaped stands in the code, and is not formatted before."""
    fine: set[ast.AST] = set()
    for node in () if lies_in(module, "report.markup") else nodes:
        match node:
            case ast.Call(ast.Name("Html") as func, [ast.Constant(str())], []):
                fine.add(func)
            case ast.Attribute(ast.Name("Html") as value):
                fine.add(value)
            case ast.AnnAssign(annotation=hint) | ast.arg(annotation=ast.AST() as hint):
                fine.update(ast.walk(hint))
            case ast.FunctionDef(returns=ast.AST() as hint):
                fine.update(ast.walk(hint))
            case ast.Name("Html") if node not in fine:
                yield node, "makes markup of no literal; use format, which escapes"


RULES = (imports_are_allowed, communication_has_two_rooms, markup_is_literal)
WRONG = (
    "nowhere: import torch",
    "planning.x: def f(): from transformers.models import mixtral",
    "hosts.x: from ds_moe_ext.strategies.zebra import Zebra",
    "planning.prices.x: import time",
    "hosts.x: import torch.distributed as d; d.all_reduce(a)",
    "core.comm: from torch import distributed as d; d.new_group([0])",
    "report.x: map(Html, a)",
)
RIGHT = (
    "moe.x: from ds_moe_ext.moe.gate import SoftmaxTopK; import torch",
    "planning.prices.x: import numpy; from ds_moe_ext.core.placement import Placement",
    "hosts.x: import deepspeed; import torch.distributed as d; d.get_rank(); a: d.ProcessGroup",
    "report.x: Html('<b>{}</b>').format(a); b: list[Html] = []",
)


def test_every_module() -> None:
    checks = [(rule, *source) for rule in RULES for source in sources().items()]
    wrong = [f"{m}:{node.lineno}: {what}" for rule, m, n in checks for node, what in rule(m, n)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("sample", WRONG + RIGHT)
def test_rules_bite(sample: str) -> None:
    module, _, text = sample.partition(": ")
    nodes = tuple(ast.walk(ast.parse(text)))
    assert any(True for rule in RULES for _ in rule(module, nodes)) is (sample in WRONG)


def test_no_import_cycles() -> None:
    needs = {
        module: {other for _, name in imported(nodes) if (other := our_module(name)) is not None}
        for module, nodes in sources().items()
    }
    while needs:
        leaves = {module for module, others in needs.items() if not others & set(needs)}
        assert leaves, f"these import each other: {sorted(needs)}"
        needs = {module: others for module, others in needs.items() if module not in leaves}


def test_the_page_of_the_house_has_these_rooms_and_files() -> None:
    page = (ROOT / "docs" / "house.md").read_text()
    table = page.split("| rooms |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in reversed(table)]
    assert rows == [row.split() for row in LAYERS.split("<")]
    named = re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py)?)`", page)
    assert not [p for p in named if not (ROOT / p).exists() and not (ROOT / PACKAGE / p).exists()]
