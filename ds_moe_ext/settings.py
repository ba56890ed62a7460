"""The ``ds_moe_ext`` block of a JSON file, read strictly into records.

The records are the schema: a field is a key, its type the rule, its default the default. What is
wrong is one ``ValueError`` that names the key, the value, the rule and the remedy. Null means
automatic.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ds_moe_ext.strategies import ep, fssdp  # noqa: F401  register themselves
from ds_moe_ext.strategies.base import Strategy, class_at, registered

BLOCK = "ds_moe_ext"


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What the run leaves behind.

    Attributes:
        enabled: print a table at the start and a summary at the end.
        path: folder for report.json and report.html; null writes no files.
        trace_step: optimizer step whose tasks are drawn as a timeline; null for none.
        max_steps: steps kept for the heatmap; a longer run is thinned evenly.
    """

    enabled: bool = True
    path: str | None = None
    trace_step: int | None = 5
    max_steps: int = 400

    def __post_init__(self) -> None:
        _at_least("report.trace_step", self.trace_step, 0)
        _at_least("report.max_steps", self.max_steps, 2)


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """A Chrome/Perfetto trace of steps.

    Attributes:
        path: file to write; null traces nothing.
        first_step: first optimizer step in it.
        num_steps: steps in it.
    """

    path: str | None = None
    first_step: int = 5
    num_steps: int = 1

    def __post_init__(self) -> None:
        _at_least("trace.first_step", self.first_step, 0)
        _at_least("trace.num_steps", self.num_steps, 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The block.

    Attributes:
        enabled: replace the MoE layers of the model.
        strategy: registered name, or ``"package.module:Class"`` of the user's own.
        expert_parallel_size: cells that the experts of a layer are spread over; null chooses.
        expert_sharding_size: ranks of a cell that split each expert; null chooses.
        capacity_factor: rows that an expert takes from one rank, over the mean; null drops none.
        moe_layer_pattern: regular expression on module names: replace only what it finds.
        hardware: file that describes the cluster, as ``ds-moe-ext profile`` writes it; null
            measures in the first steps what the strategy needs to know.
        options: keys of a strategy of the user's own.
        report: what the run leaves behind.
        trace: a trace of steps.
        debug: check on every new plan that all ranks agree.
    """

    enabled: bool = False
    strategy: str = "ep"
    expert_parallel_size: int | None = None
    expert_sharding_size: int | None = None
    capacity_factor: float | None = None
    moe_layer_pattern: str | None = None
    hardware: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    report: ReportSettings = field(default_factory=ReportSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)
    debug: bool = False

    def __post_init__(self) -> None:
        _at_least("expert_parallel_size", self.expert_parallel_size, 1)
        _at_least("expert_sharding_size", self.expert_sharding_size, 1)
        if self.expert_sharding_size not in (None, 1):
            raise ValueError(
                f"{BLOCK}.expert_sharding_size is {self.expert_sharding_size}, but strategy "
                f"{self.strategy!r} keeps every expert whole on one rank; set it to 1 or null"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"{BLOCK}.capacity_factor is {self.capacity_factor}; it must be above 0 and "
                "finite, or null to drop no rows"
            )
        if self.moe_layer_pattern is not None:
            _compiles("moe_layer_pattern", self.moe_layer_pattern)
        if self.options and self.strategy in registered():
            raise ValueError(
                f"{BLOCK}.options has no effect with the built-in strategy {self.strategy!r}; its "
                f"keys go into the block {BLOCK}.{self.strategy}"
            )


def read_settings(document: Mapping[str, Any]) -> tuple[Settings, Strategy | None]:
    """Read the block of a whole JSON document, as of DeepSpeed or of our own.

    All strategy blocks are checked, also of those that are not chosen, so that a mistake shows
    before it matters.

    Returns:
        The settings, and the chosen strategy; None for the strategy where the block is absent or
        not enabled.

    Raises:
        ValueError: what is wrong, in one sentence.
    """
    _is_object("the document", document)
    block = document.get(BLOCK)
    if block is None:
        return Settings(), None
    _is_object(BLOCK, block)
    names = {f.name for f in dataclasses.fields(Settings)}
    for key in block:
        if key not in names and key not in registered():
            raise ValueError(
                f"{BLOCK} has no key {key!r}; {_nearest(key, {*names, *registered()})}"
            )
    settings = _read(Settings, {k: v for k, v in block.items() if k in names}, BLOCK)
    blocks: dict[str, Strategy] = {
        name: _read(cls, {} if block.get(name) is None else block[name], f"{BLOCK}.{name}")
        for name, cls in registered().items()
    }
    strategy = _chosen(settings, blocks)
    return settings, strategy if settings.enabled else None


def _chosen(settings: Settings, blocks: Mapping[str, Strategy]) -> Strategy:
    name = settings.strategy
    if ":" in name:
        strategy: Strategy = _read(class_at(name), settings.options, f"{BLOCK}.options")
        return strategy
    if name not in blocks:
        raise ValueError(
            f"{BLOCK}.strategy is {name!r}, which is unknown; {_nearest(name, blocks)}"
        )
    return blocks[name]


RecordT = TypeVar("RecordT")


def _read(cls: type[RecordT], values: Any, where: str) -> RecordT:
    """A record from a JSON object, every value checked against its field's type."""
    _is_object(where, values)
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    names = [f.name for f in fields]
    for key in values:
        if key not in names:
            raise ValueError(f"{where} has no key {key!r}; {_nearest(key, names)}")
    missing = [
        f.name
        for f in fields
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where} needs the key {missing[0]!r}; add it")
    read = {k: _value(hints[k], v, f"{where}.{k}") for k, v in values.items()}
    return cls(**read)


def _value(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return _read(option, value, where)
        if _fits(option, value):
            return _as_float(value) if option is float else value
    wanted = " or ".join(_in_json(option) for option in options)
    raise ValueError(f"{where} is {value!r}, but must be {wanted}{_hint_for(value, options)}")


def _hint_for(value: Any, options: tuple[Any, ...]) -> str:
    is_automatic = value == "auto" and type(None) in options
    return "; write null (or leave the key out) for automatic" if is_automatic else ""


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _fits(option: Any, value: Any) -> bool:
    plain = typing.get_origin(option) or option
    if plain is Any:
        return True
    if plain is typing.Literal:
        return any(type(c) is type(value) and c == value for c in typing.get_args(option))
    if isinstance(value, bool):
        return plain is bool
    if plain is float:
        return isinstance(value, (int, float))
    return isinstance(plain, type) and isinstance(value, plain)


_JSON_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
}


def _in_json(option: Any) -> str:
    if option is type(None):
        return "null"
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    return _JSON_NAMES.get(typing.get_origin(option) or option, "an object")


def _is_object(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}, but must be an object: {{...}}")


def _at_least(key: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{BLOCK}.{key} is {value}; it must be at least {least}")


def _compiles(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{BLOCK}.{key} is {pattern!r}, which is no regular expression ({error}); mend it"
        ) from error


def _nearest(word: object, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
