# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's performance recipes of models with experts, and what we say to their flags.

``python -m tests.hosts.bridge_recipes CHECKOUT`` prints a table. Each recipe's own Python is
executed with stand-ins for all that it imports, except recipes and their tables of precisions;
no model is made.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.hosts.functional_cases import Case, of_megatron, refusals

SOURCE = "src/megatron/bridge"
OWN = ("perf_recipes", "recipes", "training/mixed_precision.py")  # executed as they are
PARTS = ("model", "mixed_precision", "comm_overlap", "ddp", "dist")  # of a recipe, that have flags


class Anything:
    """A class, function, object or enumeration of a package that is not there."""

    def __init__(self, name: str = "", **given: Any) -> None:
        vars(self).update(given, _name=name)

    @property
    def name(self) -> str:
        return str(vars(self)["_name"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Anything(name))

    def __call__(self, *given: Any, **named: Any) -> Anything:
        return Anything(self.name, **named)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()  # as a class to derive from

    def __instancecheck__(self, other: Any) -> bool:
        return False

    def __gt__(self, other: Any) -> bool:
        return False

    __lt__ = __ge__ = __le__ = __gt__

    def __getitem__(self, key: Any) -> Anything:
        return Anything(self.name)

    def __or__(self, other: Any) -> Anything:
        return self

    __ror__ = __or__


class Bridge(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules below ``megatron``: recipes in a checkout, stand-ins for the rest."""

    def __init__(self, checkout: Path) -> None:
        self.root = checkout / SOURCE

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".", maxsplit=1)[0] not in ("megatron", "transformers"):
            return None
        inside = "/".join(name.split(".")[2:])
        for file in (f"{inside}/__init__.py", f"{inside}.py"):
            if file.startswith(OWN) and (self.root / file).exists():
                return importlib.util.spec_from_file_location(name, self.root / file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = _attribute


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name)


def recipes(checkout: Path) -> Iterator[tuple[str, str, Case]]:
    """Model and GPU of every recipe with expert parallelism, and what it sets."""
    sys.meta_path.insert(0, Bridge(checkout))
    for path in sorted((checkout / SOURCE / "perf_recipes").glob("*/*/[!_]*.py")):
        family, gpu = path.parts[-3:-1]
        name = f"megatron.bridge.perf_recipes.{family}.{gpu}.{path.stem}"
        for own, made in vars(importlib.import_module(name)).items():
            if own[0] == "_" or not own.endswith("_config") or made.__module__ != name:
                continue
            case = Case(own, dict(_flags(made())))
            if int(case.arguments.get("expert_model_parallel_size") or 1) > 1:
                yield path.stem, gpu, case


def _flags(recipe: Any) -> Iterator[tuple[str, Any]]:
    for part in PARTS:
        for name, value in getattr(getattr(recipe, part, None), "__dict__", {}).items():
            if name[0] != "_" and value is not None and not isinstance(value, Anything):
                yield name, value


def table(found: Sequence[tuple[str, str, Case]]) -> list[str]:
    """By model, how many recipes are not refused, and the flags of the others, in Markdown."""
    rows: dict[str, list[tuple[str, Case]]] = defaultdict(list)
    for model, gpu, case in found:
        rows[model].append((gpu, case))
    lines = ["| model | recipes | not refused: `ep` | `fssdp` | `fssdp`, by GPU | refused |"]
    lines.append("|---|---|---|---|---|---|")
    for model, own in [*rows.items(), ("all", [one for each in rows.values() for one in each])]:
        met = [refusals(case, of_megatron("fssdp")) for _, case in own]
        by_ep = sum(not refusals(case, of_megatron("ep")) for _, case in own)
        every = Counter(gpu for gpu, _ in own)
        free = Counter(gpu for (gpu, _), refused in zip(own, met) if not refused)
        by_gpu = ", ".join(f"{gpu} {free[gpu]}/{count}" for gpu, count in sorted(every.items()))
        flags = Counter(one.what for each in met for one in each)
        said = ", ".join(f"`{what}` {count}" for what, count in flags.most_common())
        cells = (model, len(own), by_ep, free.total(), by_gpu, said)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(list(recipes(Path(sys.argv[1]))))))
