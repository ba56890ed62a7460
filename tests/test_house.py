# SPDX-License-Identifier: Apache-2.0
"""The structure that must hold, by ``ast``: who imports whom, and what may not exist.

A rule is a generator over one source file; what it yields is wrong there. No rule counts lines of
code, and each is shown to bite on a sample. STYLE.md, section 9, has the reasons.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "ds_moe_ext"

LAYERS = (
    ("_ds_moe_ext_autoload",),  # beside the package; imports it by name
    ("_autoload",),  # names the patches, and imports nothing of ours
    ("strict", "files", "version"),
    ("schedule",),  # tasks, their orders, who runs them
    ("core",),  # plain records and sums; what moves data between ranks
    ("planning",),  # policies and prices
    ("moe",),
    ("strategies",),
    ("report", "verification"),
    ("hosts",),
    ("patches",),
    ("commands", "testing"),
    ("cli", "run", "profile_run"),  # what is started
    ("",),  # the package's public names
)
"""Rooms, the lowest first: a folder or a file of the package. Imports go up this list only."""

PURE = ("strict", "core.placement", "core.share", "core.row_levels", "core.row_levels_twin")
PURE += ("core.transfer", "core.hardware", "files.configs", "files.documents")
PURE += ("planning.loads", "planning.load_files", "planning.load_models", "planning.prices")
PURE += ("planning.layer_costs", "planning.exchange_costs", "planning.zebra_costs")
PURE += ("planning.zebra_planner", "planning.fssdp_planner", "planning.prophet_planner")
PURE += ("planning.priced_plans", "planning.pipeline_degrees", "planning.layer_pipelines")
PURE += ("schedule.task", "schedule.orders", "schedule.simulator", "schedule.step")
PURE += ("schedule.stripes",)
BINDING = "core.compiled"
"""Brings code in C, which is as pure."""
FOREIGN = ("hosts", "patches", "commands.model_layers")
"""Rooms whose code meets objects of a host, of a model or of an optimizer."""
REACHES = ("hosts", "patches", "commands.model_layers")
"""Of these, where an object may lack an attribute, or has it by a name that is computed."""

HOST_PACKAGES = {"deepspeed", "megatron", "transformers", "accelerate"}


@dataclass(frozen=True)
class Source:
    """One file of ours.

    Attributes:
        path: from the repository's root.
        text: what is in it.
    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Dotted name under the package; "" for the package itself."""
        parts = Path(self.path).with_suffix("").parts
        parts = parts[1:] if parts[0] == PACKAGE else parts
        return ".".join(part for part in parts if part != "__init__")

    def lies_in(self, *packages: str) -> bool:
        return any(self.module == p or self.module.startswith(p + ".") for p in packages)


SOURCES = tuple(
    Source(str(path.relative_to(ROOT)), path.read_text())
    for pattern in ("*.py", f"{PACKAGE}/**/*.py", "patches/**/*.py")
    for path in sorted(ROOT.glob(pattern))
)
OURS = {source.module for source in SOURCES}

Finding = tuple[ast.AST | None, str]
Rule = Callable[[Source], Iterator[Finding]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


# Imports.


def imported(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, str]]:
    """Every imported module or name, dotted."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def our_module(name: str, modules: set[str]) -> str | None:
    """The module of ours that a dotted name is or lies in; None if it is another's."""
    package, _, inner = name.partition(".")
    if package != PACKAGE:
        return None
    while inner and inner not in modules:
        inner = inner.rpartition(".")[0]
    return inner


def layer_of(module: str) -> int | None:
    """Number of its row; the longest name that matches counts."""
    matches = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or (name and module.startswith(name + "."))
    ]
    return max(matches)[1] if matches else None


@rule
def imports_go_down(source: Source) -> Iterator[Finding]:
    own = layer_of(source.module)
    if own is None and source.text.strip():
        yield None, f"{source.module} has no row in LAYERS of tests/test_house.py; give it one"
    for node, name in imported(source.nodes):
        module = our_module(name, OURS | {source.module})
        if own is None or module is None:
            continue
        theirs = layer_of(module)
        if theirs is None or theirs > own:
            yield node, f"imports {module or PACKAGE}, which lies above it"


LATE = {
    "": "types only: what is named there is loaded when it is used",
    "commands.convert": "other commands do without torch",
    "commands.doctor": "the layers of a model are those of hosts, which it loads",
    "commands.price.command": "other commands do without torch",
    "commands.cluster_profile": "other commands do without torch",
    "patches.accelerate": "accelerate goes without DeepSpeed too",
    "patches.megatron": "loads Megatron's models, which have to be patched first",
    "patches.megatron_training": "loads Megatron-core, where the flag is used",
    "patches.verify_megatron": "loads Megatron's models, which have to be patched first",
    "hosts.verification.of_hosts": "each host's are loaded where that host runs",
    "patches.transformers": "strategies are loaded where the block is read",
}
"""Modules that import ours when a function runs, and why."""


@rule
def imports_stand_at_the_top(source: Source) -> Iterator[Finding]:
    if source.module not in LATE:
        for statement in source.tree.body:
            below = tuple(node for node in ast.walk(statement) if node is not statement)
            for node, name in imported(below):
                if our_module(name, OURS) is not None:
                    yield node, f"imports {name} late; at the top, or with a reason in LATE"


@rule
def hosts_are_known_in_hosts_only(source: Source) -> Iterator[Finding]:
    if not source.lies_in("hosts", "patches", "commands.model_layers"):
        for node, name in imported(source.nodes):
            if name.partition(".")[0] in HOST_PACKAGES:
                yield node, f"imports {name}"


PURE_PACKAGES = (sys.stdlib_module_names | {"numpy", "scipy"}) - {
    *("os", "time", "random", "datetime", "socket", "subprocess", "threading", "multiprocessing"),
}


@rule
def pure_modules_stay_pure(source: Source) -> Iterator[Finding]:
    if source.lies_in(*PURE):
        for node, name in imported(source.nodes):
            module = our_module(name, OURS | {source.module})
            if module is None:
                if name.partition(".")[0] not in PURE_PACKAGES:
                    yield node, f"imports {name}"
            elif not Source(f"{PACKAGE}/{module.replace('.', '/')}.py", "").lies_in(*PURE, BINDING):
                yield node, f"imports {module}, which is not pure"


# Communication.

TYPES = {"ProcessGroup", "Store", "HashStore", "TCPStore"}
QUERIES = {"get_rank", "get_world_size", "is_initialized", "is_available"}
MAKES_GROUPS = {
    *("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"),
    *("init_process_group", "destroy_process_group", "init_device_mesh", "device_mesh"),
}
STORES = {"checkpoint", "tensor"}
"""Moves data to and from files; is how torch keeps what it has sharded."""
DISTRIBUTED = "torch.distributed"


def distributed_names(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Every name of torch.distributed that is used."""
    aliases = {DISTRIBUTED}
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == DISTRIBUTED and alias.asname:
                    aliases.add(alias.asname)
                elif alias.name.startswith(DISTRIBUTED + "."):
                    yield node, alias.name.split(".")[2]
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and node.module == DISTRIBUTED:
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DISTRIBUTED + "."):
            yield node, (node.module or "").split(".")[2]
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            yield node, node.attr


WORLDS = "hosts.megatron.active_settings"  # makes the default groups of both roles


@rule
def communication_has_two_files(source: Source) -> Iterator[Finding]:
    for node, name in distributed_names(source):
        if name in TYPES or (
            name in STORES and source.lies_in("files", "hosts", "commands.conversion")
        ):
            continue
        if name in QUERIES:
            if not source.lies_in("core.comm", "core.layout", *FOREIGN):
                yield node, f"asks torch.distributed.{name}; take it from the layout"
        elif name in MAKES_GROUPS:
            if not source.lies_in("core.layout", WORLDS):
                yield node, f"torch.distributed.{name} makes groups, which layout.py does"
        elif not source.lies_in("core.comm", WORLDS):
            yield node, f"torch.distributed.{name} moves data, which comm.py does"


# Strategies.


def text_of(node: ast.AST) -> str:
    """Of a constant; none of docstrings of several lines."""
    return node.value if isinstance(node, ast.Constant) and "\n" not in node.value else ""


KNOWS_STRATEGIES = ("strategies", "hosts.zebra", "testing")
NAMES_ONE = re.compile(r"\b(esp|fssdp|prophet|zebra)\.[a-z]|'(esp|fssdp|prophet|zebra)'")


@rule
def strategies_are_asked_not_named(source: Source) -> Iterator[Finding]:
    """What others must know of a strategy is a member of ``Strategy``: its keys, too. Docstrings
    of several lines may name one."""
    if source.lies_in(*KNOWS_STRATEGIES):
        return
    for node, name in imported(source.nodes):
        if name.startswith(f"{PACKAGE}.strategies."):
            yield node, f"imports {name}; ask the strategy, by a member"
    for node in source.nodes:
        if is_text(node) and (found := NAMES_ONE.search(text_of(node))):
            yield node, f"names {found[0]}; let the strategy say it (Strategy.keys)"


# Hidden state and silence.


@rule
def no_global(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield node, f"global {', '.join(node.names)}"


@rule
def no_environment(source: Source) -> Iterator[Finding]:
    places = "hosts", BINDING
    places += "_autoload", "_ds_moe_ext_autoload"
    if source.lies_in(*places):
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
            yield node, f"reads {ast.unparse(node)}"
    for node, name in imported(source.nodes):
        if name in {"os.environ", "os.getenv", "os.putenv"}:
            yield node, f"reads {name}"


@rule
def no_work_at_import(source: Source) -> Iterator[Finding]:
    if source.module == "":
        return  # the package attaches itself to the hosts; that is what importing it is for
    for node in source.tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, f"calls {ast.unparse(node.value)} when it is imported"


@rule
def no_mutable_class_attributes(source: Source) -> Iterator[Finding]:
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(
                    statement.value, mutable
                ):
                    yield statement, f"class {node.name} shares {ast.unparse(statement)}"


@rule
def no_silent_except(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node, "bare except"
        elif ast.unparse(node.type) in {"Exception", "BaseException"} and all(
            isinstance(s, (ast.Pass, ast.Continue))
            or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            for s in node.body
        ):
            yield node, "swallows every error"


MARKUP = "report.markup"
"""Has the type of text that is HTML."""


@rule
def markup_is_literal(source: Source) -> Iterator[Finding]:
    """What becomes HTML unescaped stands in the code, and is not formatted before."""
    if source.lies_in(MARKUP) or not re.search("Html|markupsafe", source.text):
        return
    for node, name in imported(source.nodes):
        if name.partition(".")[0] == "markupsafe":
            yield node, f"imports {name}; take Html of {MARKUP}"
    fine: set[ast.AST] = set()
    for node in source.nodes:
        match node:
            case ast.Call(func, [text], []) if is_text(text):
                fine.add(func)
            case ast.Attribute(value):
                fine.add(value)
            case ast.AnnAssign(annotation=hint) | ast.arg(annotation=ast.AST() as hint):
                fine.update(ast.walk(hint))
            case ast.FunctionDef(returns=ast.AST() as hint):
                fine.update(ast.walk(hint))
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == "Html" and node not in fine:
            yield node, "makes markup of no literal; use format, which escapes"


# Data and choices.


@rule
def no_reaching_by_name(source: Source) -> Iterator[Finding]:
    """``getattr`` and its like are for objects that are not ours: a host's and its model's in
    hosts, patches and attach (adapters, a user's own router); what a user's forward returns in
    zebra.batches; the engine that a run lives with in steps.training_run; what the doctor is asked
    to look at. Whatever is ours has its attributes, by their names."""
    if not source.lies_in(*REACHES):
        for node in source.nodes:
            if isinstance(node, ast.Name) and node.id in {
                *("getattr", "hasattr", "setattr", "delattr"),
            }:
                yield node, node.id


AS_STORED = {
    "_autoload": "a property keeps its value under its own name",
    "patches.patch": "a staticmethod stays one, and no lazy module is woken",
}
"""Modules that read what is stored past how it is reached, and why."""


@rule
def no_reaching_past_attributes(source: Source) -> Iterator[Finding]:
    """``vars(x)["a"]`` knows no property, slot, class default or lazy module: say ``x.a``, or
    ``getattr`` where that is allowed. All of ``vars(x)`` at once is fine, as to look a field of a
    record of ours up by a name that came in."""
    if source.lies_in(*AS_STORED):
        return
    for node in source.nodes:
        match node:
            case ast.Attribute(attr="__dict__", ctx=ast.Load()):
                yield node, ast.unparse(node)
            case ast.Subscript(value, key, ctx) if is_vars(value):
                is_known = is_text(key) or source.lies_in(*REACHES)
                if is_known or not isinstance(ctx, ast.Load):
                    yield node, ast.unparse(node)
            case ast.Compare(ast.Constant(str(key)), _, [value]) if is_vars(value):
                if not key.startswith("__"):
                    yield node, ast.unparse(node)
            case ast.Attribute(value, "get" | "pop" | "setdefault") if is_vars(value):
                yield node, ast.unparse(node)


def is_vars(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and bool(node.args)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_texts(node: ast.AST) -> bool:
    return isinstance(node, (ast.Tuple, ast.List, ast.Set)) and any(map(is_text, node.elts))


@rule
def no_choices_by_string(source: Source) -> Iterator[Finding]:
    places = "settings", "files", "_autoload", "_ds_moe_ext_autoload", *FOREIGN
    if source.lies_in(*places):  # where text comes in
        return
    for node in source.nodes:
        if isinstance(node, ast.MatchValue) and is_text(node.value):
            yield node, f"case {ast.unparse(node)}"
        if not isinstance(node, ast.Compare):
            continue
        sides = (node.left, *node.comparators)
        if any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides):
            continue  # a torch.device names its kind by a string, and only so
        if any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides):
            continue
        for op, side in zip(node.ops, sides[1:]):
            by_equality = isinstance(op, (ast.Eq, ast.NotEq)) and any(map(is_text, sides))
            by_member = isinstance(op, (ast.In, ast.NotIn)) and is_texts(side)
            if by_equality or by_member:
                yield node, ast.unparse(node)


@rule
def no_dict_as_record(source: Source) -> Iterator[Finding]:
    if source.lies_in("_autoload", *FOREIGN):  # whose dicts are a host's and Python's own
        return
    for node in source.nodes:
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and is_text(node.slice)
        ):
            yield node, f"sets {ast.unparse(node)}"


def is_dataclass(node: ast.ClassDef) -> bool:
    names = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(ast.unparse(name).rpartition(".")[2] == "dataclass" for name in names)


@rule
def no_god_config(source: Source) -> Iterator[Finding]:
    is_named_by_others = source.lies_in("settings", *FOREIGN)
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and is_dataclass(node):
            fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
            if len(fields) > 15:
                yield node, f"dataclass {node.name} has {len(fields)} fields"
        if is_named_by_others:
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            for argument in given:
                if argument.arg in {"config", "args", "cfg"}:
                    yield node, f"parameter {argument.arg}: pass what is needed"


# Shape of the tree.

DUMPING_GROUNDS = {
    *("util", "utils", "common", "helper", "helpers", "misc", "tool", "tools"),
}


@rule
def no_dumping_grounds(source: Source) -> Iterator[Finding]:
    for part in Path(source.path).with_suffix("").parts:
        if part.strip("_") in DUMPING_GROUNDS:
            yield None, f"{part}: say what it is for"


@rule
def packages_are_empty(source: Source) -> Iterator[Finding]:
    if Path(source.path).name == "__init__.py" and source.text.strip():
        num_lines = len(source.text.splitlines())
        others = [s for s in source.tree.body if not isinstance(s, (ast.Expr, ast.Assign))]
        if source.module != "" and others:
            yield (
                others[0],
                "a package's __init__.py says what it is for, and has constants at most",
            )
        elif num_lines > 64:
            yield None, f"the public names take {num_lines} lines; let them be 64"


@rule
def no_mixins(source: Source) -> Iterator[Finding]:
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Mixin"):
            yield node, f"class {node.name}"


# The tests.


def findings(rule: Rule, source: Source) -> list[str]:
    return [
        f"{source.path}:{1 if node is None else node.lineno}: {what}"  # type: ignore[attr-defined]
        for node, what in rule(source)
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    wrong = [finding for source in SOURCES for finding in findings(rule, source)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_whole_tree_is_read() -> None:
    assert {"", "settings", "schedule.task", "moe.layer", "patches.patch"} <= OURS


def test_no_import_cycles() -> None:
    """What a function imports when it runs counts like the rest."""
    imports = {
        source.module: {
            module
            for _, name in imported(source.nodes)
            if (module := our_module(name, OURS)) is not None
        }
        for source in SOURCES
    }
    while imports:
        leaves = {module for module, needs in imports.items() if not needs & set(imports)}
        assert leaves, f"these import each other: {sorted(imports)}"
        imports = {module: needs for module, needs in imports.items() if module not in leaves}


def loaded(source: Source) -> Iterator[str]:
    for statement in source.tree.body:
        nodes = (statement,) if isinstance(statement, (ast.Import, ast.ImportFrom)) else ()
        for _, name in imported(nodes):
            module = our_module(name, OURS)
            if module:
                yield module


def test_the_page_of_the_house_has_these_rooms() -> None:
    """docs/house.md lists them from the roof down, a row of LAYERS in each row of its table."""
    page = (ROOT / "docs" / "house.md").read_text()
    table = page.split("| rooms |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [tuple(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table]
    assert [row or ("",) for row in reversed(rows)] == list(LAYERS)


def test_the_page_of_the_house_names_files_that_are_there() -> None:
    named = re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py)?)`", (ROOT / "docs" / "house.md").read_text())
    assert len(named) > 30
    lost = [p for p in named if not (ROOT / p).exists() and not (ROOT / PACKAGE / p).exists()]
    assert not lost


def test_a_file_name_means_one_thing() -> None:
    """Only where hosts, or formats of them, do the same job do their files share a name."""
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        path = Path(source.path)
        if path.stem != "__init__" and not source.lies_in("hosts.megatron", *OF_HOSTS):
            places.setdefault(path.stem, []).append(source.path)
    assert not [paths for paths in places.values() if len(paths) > 1]


OF_HOSTS = ("hosts.huggingface", "convert.deepspeed", "convert.megatron")
"""Named as what they are about, which others are about too."""


def test_no_deep_inheritance() -> None:
    """A class of ours extends a class of ours at most once, beside an interface (an ABC)."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
    }
    bases = {name: its for name, its in bases.items() if "ABC" not in its}
    deep = [
        f"{name} < {base} < {', '.join(bases[base] & set(bases))}"
        for name, its in bases.items()
        for base in its & set(bases)
        if bases[base] & set(bases)
    ]
    assert not deep


BITES = {
    markup_is_literal: (
        ("report/x.py", "Html(a)"),
        ("report/x.py", "Html(f'<b>{a}</b>')"),
        ("report/x.py", "Html('<b>' + a)"),
        ("report/x.py", "map(Html, a)"),
        ("report/x.py", "a = Html\na(b)"),
        ("commands/x.py", "from markupsafe import Markup"),
    ),
    imports_go_down: (
        ("moe/x.py", "from ds_moe_ext.strategies import ep"),
        ("moe/x.py", "def f():\n    import ds_moe_ext.report.page"),
        ("placement.py", "from ds_moe_ext.schedule.task import Span"),
        ("schedule/task.py", "from ds_moe_ext.planners import degree"),
        ("cost/x.py", "from ds_moe_ext.planners import degree"),
        ("moe/x.py", "from ds_moe_ext import register"),
        ("settings.py", "from ds_moe_ext.patches.deepspeed import apply"),
        ("nowhere.py", "a = 1"),
    ),
    imports_stand_at_the_top: (
        ("report/record.py", "def f():\n    from ds_moe_ext.report.page import page_of"),
        ("moe/x.py", "if a:\n    import ds_moe_ext.core.placement"),
    ),
    hosts_are_known_in_hosts_only: (
        ("moe/x.py", "import deepspeed"),
        ("report/x.py", "def f():\n    from transformers.models import mixtral"),
        ("cli.py", "import megatron.core as core"),
    ),
    pure_modules_stay_pure: (
        ("planners/x.py", "import torch"),
        ("cost/x.py", "import torch"),
        ("schedule/task.py", "import time"),
        ("planners/x.py", "from ds_moe_ext.core.layout import Grid"),
        ("placement.py", "def f():\n    import os"),
    ),
    communication_has_two_files: (
        ("moe/x.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("moe/x.py", "import torch\ntorch.distributed.barrier()"),
        ("moe/x.py", "from torch.distributed import get_rank"),
        ("moe/x.py", "from torch.distributed.nn.functional import all_to_all"),
        ("hosts/x.py", "import torch.distributed as dist\ndist.new_group([0])"),
        ("hosts/x.py", "from torch import distributed as d\nd.all_gather(a, b)"),
        ("layout.py", "import torch.distributed as dist\ndist.broadcast(x, 0)"),
        ("comm.py", "import torch.distributed as dist\ndist.new_group([0])"),
        ("layout.py", "from torch.distributed.tensor import DTensor"),
    ),
    strategies_are_asked_not_named: (
        ("hosts/x.py", "from ds_moe_ext.strategies.zebra import Zebra"),
        ("steps/x.py", "def f():\n    from ds_moe_ext.strategies import esp"),
        ("hosts/x.py", "raise ValueError(f'set {BLOCK}.esp.slice_gradients to false')"),
        ("attachment/x.py", "a = \"or use strategy 'esp'\""),
    ),
    no_global: (("moe/x.py", "def f():\n    global a\n    a = 1"),),
    no_environment: (
        ("moe/x.py", "import os\nos.environ['A']"),
        ("patches/x.py", "import os\nos.getenv('A')"),
        ("cli.py", "from os import environ"),
    ),
    no_work_at_import: (("moe/x.py", "print(1)"), ("report/x.py", "import a\na.setup()")),
    no_mutable_class_attributes: (
        ("moe/x.py", "class A:\n    kinds = []"),
        ("hosts/x.py", "class A:\n    kinds: dict[str, int] = {}"),
    ),
    no_silent_except: (
        ("hosts/x.py", "try:\n    f()\nexcept:\n    raise"),
        ("hosts/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
        (
            "moe/x.py",
            "for i in a:\n    try:\n        f()\n    except BaseException:\n        continue",
        ),
    ),
    no_reaching_by_name: (
        ("moe/x.py", "getattr(a, 'b')"),
        ("cli.py", "if hasattr(a, 'b'): pass"),
        ("settings.py", "list(map(setattr, a, b, c))"),
        ("steps/x.py", "getattr(a, 'b', None)"),
        ("zebra/x.py", "hasattr(a, 'b')"),
    ),
    no_reaching_past_attributes: (
        ("hosts/x.py", "a.__dict__['b'] = 1"),
        ("hosts/x.py", "a.__dict__.get(B)"),
        ("moe/x.py", "vars(a)['b']"),
        ("strict.py", "vars(a)[b] = c"),
        ("hosts/x.py", "vars(a)[b]"),
        ("patches/x.py", "vars(a).get('b')"),
        ("moe/x.py", "'b' in vars(a)"),
    ),
    no_choices_by_string: (
        ("moe/x.py", "a == 'b'"),
        ("moe/x.py", "'b' != a"),
        ("report/x.py", "a in ('b', 'c')"),
        ("report/x.py", "a not in {'b'}"),
        ("cli.py", "match a:\n    case 'b':\n        pass"),
    ),
    no_dict_as_record: (
        ("moe/x.py", "a['b'] = 1"),
        ("report/x.py", "a.b['c'] += 1"),
        ("cli.py", "a['b'], c = d"),
    ),
    no_god_config: (
        (
            "hosts/x.py",
            "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    a{i}: int\n" for i in range(16)),
        ),
        ("moe/x.py", "def f(config): pass"),
        ("report/x.py", "def f(a, *, cfg=None): pass"),
        ("cli.py", "lambda args: 1"),
    ),
    no_dumping_grounds: (("moe/utils.py", ""), ("common/x.py", ""), ("_helpers.py", "")),
    packages_are_empty: (
        ("moe/__init__.py", "from ds_moe_ext.moe.gate import SoftmaxTopK"),
        ("__init__.py", "a = 1\n" * 65),
    ),
    no_mixins: (("moe/x.py", "class RouterMixin: pass"),),
}
"""Samples that a rule must find fault with, once each at least."""

PASSES = {
    strategies_are_asked_not_named: (
        ("settings.py", "from ds_moe_ext.strategies import ep"),
        ("moe/x.py", "layout.group('esp', INTRA)"),
    ),
    imports_go_down: (
        ("moe/x.py", "from ds_moe_ext.moe.gate import SoftmaxTopK"),
        ("strategy.py", "from ds_moe_ext.schedule.stages import Stage"),
        ("patches/x.py", "from ds_moe_ext.hosts import attach"),
        ("__init__.py", "from ds_moe_ext import _autoload"),
    ),
    imports_stand_at_the_top: (
        ("commands/doctor.py", "def f():\n    from ds_moe_ext.commands import model_layers"),
        ("hosts/x.py", "def f():\n    import deepspeed"),
    ),
    hosts_are_known_in_hosts_only: (("hosts/x.py", "import deepspeed"),),
    pure_modules_stay_pure: (
        ("planners/x.py", "import numpy as np\nfrom ds_moe_ext.core.placement import Placement"),
        ("moe/x.py", "import torch"),
    ),
    communication_has_two_files: (
        ("moe/x.py", "import torch.distributed as dist\ngroup: dist.ProcessGroup"),
        ("hosts/x.py", "import torch.distributed as dist\ndist.get_rank()"),
        ("comm.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("layout.py", "import torch.distributed as dist\ndist.new_group([0])"),
    ),
    markup_is_literal: (
        ("report/x.py", "Html('<b>{}</b>').format(a)"),
        ("report/x.py", "def f(a: Html, b: Sequence[Html]) -> Html: return Html.escape(c)"),
        ("report/x.py", "a: list[Html] = []"),
    ),
    no_environment: (("hosts/x.py", "import os\nos.environ['A']"),),
    no_work_at_import: (
        ("moe/x.py", "A = tuple(b)\n@c(1)\ndef f(): g()"),
        ("__init__.py", "_autoload.autoload()"),
    ),
    no_silent_except: (
        ("moe/x.py", "try:\n    f()\nexcept KeyError:\n    pass"),
        ("moe/x.py", "try:\n    f()\nexcept Exception as e:\n    raise ValueError from e"),
    ),
    no_reaching_by_name: (
        ("hosts/x.py", "getattr(a, 'b')"),
        ("__init__.py", "def __getattr__(n): ..."),
    ),
    no_reaching_past_attributes: (
        ("attachment/x.py", "a.__dict__ = dict(vars(b))"),
        ("attachment/x.py", "vars(a).update(vars(b))"),
        ("moe/x.py", "vars(self)[name]"),
        ("moe/x.py", "tuple(vars(a).values())"),
        ("hosts/x.py", "name in vars(a)"),
        ("moe/x.py", "'__dataclass_params__' in vars(a)"),
    ),
    no_choices_by_string: (
        ("settings.py", "a == 'b'"),
        ("moe/x.py", "a.type == 'cuda'"),
        ("moe/x.py", "':' in a"),
        ("moe/x.py", "a in {b: 'c'}"),
    ),
    no_dict_as_record: (("hosts/x.py", "a['b'] = 1"), ("moe/x.py", "a[b] = c['d']")),
    no_god_config: (("hosts/x.py", "def f(config): pass"), ("moe/x.py", "def f(*args): pass")),
    packages_are_empty: (("moe/__init__.py", ""), ("__init__.py", "a = 1\n" * 64)),
}
"""Samples that a rule must let pass."""


def sample(path: str, text: str) -> Source:
    return Source(path if path.startswith("patches/") else f"{PACKAGE}/{path}", text)


def test_every_rule_bites() -> None:
    assert set(BITES) == set(RULES)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *case) for rule, cases in BITES.items() for case in cases],
)
def test_what_is_wrong_is_found(rule: Rule, path: str, text: str) -> None:
    assert findings(rule, sample(path, text))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [(rule, *case) for rule, cases in PASSES.items() for case in cases],
)
def test_what_is_right_is_not(rule: Rule, path: str, text: str) -> None:
    assert findings(rule, sample(path, text)) == []


def test_every_source_names_its_licence() -> None:
    folders = [ROOT / name for name in (PACKAGE, "patches", "launch", "docs", "examples", "tests")]
    endings = ("py", "sh", "c", "css", "js")
    for path in (path for folder in folders for e in endings for path in folder.rglob(f"*.{e}")):
        head = path.read_text()[:120]
        assert not head or "SPDX-License-Identifier: Apache-2.0" in head, path
