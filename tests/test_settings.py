# SPDX-License-Identifier: Apache-2.0
"""The JSON block: what is read, and what is refused in one sentence. Pure."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ds_moe_ext.strategies.esp
from ds_moe_ext.moe.codecs import BFloat16
from ds_moe_ext.moe.gate import NoisyTopK
from ds_moe_ext.moe.hooks import Hooked
from ds_moe_ext.planning.strategy import Overlay, Strategy
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.settings import (
    ReportSettings,
    Settings,
    TraceSettings,
    read_file,
    read_settings,
)
from tests.strategies_for_tests import Chunked

CHUNKED = "tests.strategies_for_tests:Chunked"


@dataclass(frozen=True)
class Picky(ExpertParallel):
    """A strategy of a user's own with a rule, an open type, a choice and a derived field."""

    level: int
    name: str | None = None
    depth: Literal[1, 2, "all"] = 1
    extra: Any = None
    stages: list = field(default_factory=list)
    rate: float = 1.0
    twice: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.level > 9:
            raise ValueError(f"level {self.level} is past\t9: take a smaller one")


class Plain:
    """Not a dataclass."""


@dataclass(frozen=True)
class NoBase:
    """Not a strategy."""


@dataclass(frozen=True)
class Planless(Strategy):
    """Without a plan."""


PICKY = "tests.test_settings:Picky"
AN_INSTANCE = ExpertParallel()


def block(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "ds_moe_ext": keys}


# What is read.


@pytest.mark.parametrize("document", [{}, {"ds_moe_ext": None}, {"train_batch_size": 8}])
def test_absent_block_is_off(document: dict[str, Any]) -> None:
    settings, strategy = read_settings(document)
    assert settings == Settings()
    assert not settings.enabled
    assert strategy is None


def test_disabled_block_is_read_but_gives_no_strategy() -> None:
    settings, strategy = read_settings(block(enabled=False, strategy="ep", expert_parallel_size=4))
    assert settings == Settings(expert_parallel_size=4)
    assert strategy is None


def test_defaults() -> None:
    settings, strategy = read_settings(block(enabled=True))
    assert strategy == ExpertParallel()
    assert settings == Settings(
        enabled=True,
        strategy="ep",
        expert_parallel_size=None,
        expert_sharding_size=None,
        capacity_factor=None,
        gate=None,
        hooks=Hooked(),
        moe_layer_pattern=None,
        options={},
        report=ReportSettings(enabled=True, path=None, trace_step=5, max_steps=400),
        trace=TraceSettings(path=None, first_step=5, num_steps=1),
        debug=False,
    )


def test_every_key() -> None:
    document = json.loads(
        """{"ds_moe_ext": {
            "enabled": true, "strategy": "ep", "expert_parallel_size": 8,
            "expert_sharding_size": 1, "capacity_factor": 1.25, "moe_layer_pattern": "layers.[02]",
            "gate": {"type": "noisy_top_k", "top_k": 2}, "options": {}, "ep": {}, "debug": true,
            "hooks": ["bf16"],
            "report": {"enabled": false, "path": "out", "trace_step": 0, "max_steps": 2},
            "trace": {"path": "t.json", "first_step": 0, "num_steps": 3}}}"""
    )
    settings, strategy = read_settings(document)
    assert strategy == ExpertParallel()
    assert settings == Settings(
        enabled=True,
        expert_parallel_size=8,
        expert_sharding_size=1,
        capacity_factor=1.25,
        gate=NoisyTopK(top_k=2),
        hooks=Hooked(codecs=(BFloat16(),)),
        moe_layer_pattern="layers.[02]",
        report=ReportSettings(enabled=False, path="out", trace_step=0, max_steps=2),
        trace=TraceSettings(path="t.json", first_step=0, num_steps=3),
        debug=True,
    )


def test_null_wherever_it_means_automatic() -> None:
    settings, strategy = read_settings(
        block(
            enabled=True,
            expert_parallel_size=None,
            expert_sharding_size=None,
            capacity_factor=None,
            moe_layer_pattern=None,
            ep=None,
            report={"path": None, "trace_step": None},
            trace={"path": None},
        )
    )
    assert settings == Settings(enabled=True, report=ReportSettings(trace_step=None))
    assert strategy == ExpertParallel()


def test_integer_is_read_as_a_float_where_a_number_is_wanted() -> None:
    settings, _ = read_settings(block(capacity_factor=2))
    assert settings.capacity_factor == 2.0
    assert isinstance(settings.capacity_factor, float)


def test_strategy_of_the_users_own() -> None:
    settings, strategy = read_settings(
        block(enabled=True, strategy=CHUNKED, options={"forward": 2, "backward": 3})
    )
    assert strategy == Chunked(forward=2, backward=3)
    assert settings.options == {"forward": 2, "backward": 3}


def test_blocks_of_strategies_that_are_not_chosen_may_stay() -> None:
    document = block(enabled=True, ep={}, strategy=CHUNKED, options={"forward": 1, "backward": 1})
    assert read_settings(document)[1] == Chunked(forward=1, backward=1)


@pytest.mark.parametrize(
    "options",
    [
        {"level": 3},
        {"level": 3, "name": None, "depth": "all"},
        {"level": 3, "depth": 2, "extra": {"any": ["thing", None]}, "stages": [1, 2], "rate": 2},
    ],
)
def test_types_that_a_users_strategy_may_have(options: dict[str, Any]) -> None:
    _, strategy = read_settings(block(enabled=True, strategy=PICKY, options=options))
    assert strategy == Picky(**options)


def test_other_keys_of_the_document_are_not_ours() -> None:
    document = {"zero_optimization": {"stage": "auto"}, "x": [float("nan")], "ds_moe_ext": {}}
    assert read_settings(document) == (Settings(), None)


CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.json")), ids=lambda path: path.name)
def test_shipped_configs_are_read(path: Path) -> None:
    document = json.loads(path.read_text())
    settings, strategy = read_settings(document)
    assert settings.enabled == document.get("ds_moe_ext", {}).get("enabled", False)
    assert (strategy is not None) == settings.enabled


# What is refused.


@dataclass(frozen=True)
class Bad:
    """A malformed document, and what its one error must contain."""

    document: Any
    key: str  # where it is wrong, as a path
    shown: str  # the offending value or key
    remedy: str


ANYTHING = (
    None,
    True,
    False,
    0,
    1,
    -3,
    1.5,
    math.nan,
    "",
    "8",
    "auto",
    "true",
    "null",
    [],
    [1],
    ["ep"],
    [{}],
    {},
    {"a": 1},
)

IS_BOOL = "must be true or false"
IS_TEXT = "must be a string"
IS_TEXT_OR_NULL = "must be a string or null"
IS_INTEGER = "must be an integer"
IS_INTEGER_OR_NULL = "must be an integer or null"
IS_NUMBER_OR_NULL = "must be a number or null"
IS_OBJECT = "must be an object"
IS_LIST = "must be a list"

KEYS = {
    ("enabled",): IS_BOOL,
    ("strategy",): IS_TEXT,
    ("balance",): IS_TEXT_OR_NULL,
    ("sequence_parallel",): IS_BOOL,
    ("hardware",): IS_TEXT_OR_NULL,
    ("expert_parallel_size",): IS_INTEGER_OR_NULL,
    ("expert_sharding_size",): IS_INTEGER_OR_NULL,
    ("capacity_factor",): IS_NUMBER_OR_NULL,
    ("moe_layer_pattern",): IS_TEXT_OR_NULL,
    ("options",): IS_OBJECT,
    ("report",): IS_OBJECT,
    ("report", "enabled"): IS_BOOL,
    ("report", "path"): IS_TEXT_OR_NULL,
    ("report", "trace_step"): IS_INTEGER_OR_NULL,
    ("report", "max_steps"): IS_INTEGER,
    ("trace",): IS_OBJECT,
    ("trace", "path"): IS_TEXT_OR_NULL,
    ("trace", "first_step"): IS_INTEGER,
    ("trace", "num_steps"): IS_INTEGER,
    ("waits",): IS_OBJECT,
    ("waits", "log_after_s"): IS_INTEGER,
    ("waits", "log_every_s"): IS_INTEGER,
    ("waits", "silent_after_s"): IS_INTEGER,
    ("waits", "ends_after_s"): IS_INTEGER_OR_NULL,
    ("checkpoint",): IS_OBJECT,
    ("checkpoint", "checksums"): IS_BOOL,
    ("debug",): IS_BOOL,
    ("ep",): IS_OBJECT,
    ("gate",): IS_OBJECT,
    ("hooks",): IS_LIST,
}
"""Every key and the rule that its error names."""

FITS = {
    IS_BOOL: lambda value: isinstance(value, bool),
    IS_TEXT: lambda value: isinstance(value, str),
    IS_INTEGER: lambda value: isinstance(value, int) and not isinstance(value, bool),
    IS_OBJECT: lambda value: isinstance(value, dict),
    IS_LIST: lambda value: isinstance(value, list),
    IS_NUMBER_OR_NULL: lambda value: (
        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    ),
}
FITS[IS_TEXT_OR_NULL] = lambda value: value is None or FITS[IS_TEXT](value)
FITS[IS_INTEGER_OR_NULL] = lambda value: value is None or FITS[IS_INTEGER](value)

MAY_BE_ABSENT = {("ep",), ("gate",), ("hooks",)}  # null in place of them is the same as none


def at(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A document with one key set."""
    for key in reversed(path):
        value = {key: value}
    return {"ds_moe_ext": value}


def of_wrong_type() -> Iterator[Bad]:
    for path, rule in KEYS.items():
        for value in ANYTHING:
            if FITS[rule](value) or (value is None and path in MAY_BE_ABSENT):
                continue
            yield Bad(at(path, value), ".".join(("ds_moe_ext", *path)), f"is {value!r}", rule)
    for value in ANYTHING:
        if not isinstance(value, dict):
            yield Bad(value, "the document", f"is {value!r}", IS_OBJECT)
        if not isinstance(value, dict) and value is not None:
            yield Bad({"ds_moe_ext": value}, "ds_moe_ext", f"is {value!r}", IS_OBJECT)


def mistyped() -> Iterator[Bad]:
    for path in KEYS:
        *parents, key = path
        where = ".".join(("ds_moe_ext", *parents))
        typos = {
            key[:-1],  # the last letter forgotten
            key[0] + key[2:],  # the second
            key + "s",
            key[:2] + key[1:],  # a letter twice
            key.replace("_", "-"),
            key.replace("_", ""),
            key.replace("expert_", "experts_"),
        }
        for typo in sorted(typos - {key}):
            if len(key) > 2:  # "ep": one letter is nobody's typo
                remedy = f"did you mean '{key}'?"
                yield Bad(at((*parents, typo), None), where, repr(typo), remedy)


def unknown() -> Iterator[Bad]:
    for key in ("zzz", "", "ZERO", "0", "gpus"):
        yield Bad(at((key,), 1), "ds_moe_ext", repr(key), "known: auto, balance, capacity_factor,")
        yield Bad(
            at(("report", key), 1), "ds_moe_ext.report", repr(key), "known: enabled, max_steps,"
        )
        yield Bad(at(("trace", key), 1), "ds_moe_ext.trace", repr(key), "known: first_step,")
        yield Bad(
            at(("ep", key), 1), "ds_moe_ext.ep", repr(key), "known: cuda_graphs, order, send_once"
        )
    yield Bad({"ds_moe_ext": {1: 2}}, "ds_moe_ext", "1", "known:")
    yield Bad(block(epp={}), "ds_moe_ext", "'epp'", "did you mean 'ep'?")
    # An error stands where it is, also beside a good strategy and in a disabled block.
    yield Bad(block(enabled=True, repport={}), "ds_moe_ext", "'repport'", "did you mean 'report'?")
    yield Bad(block(report={"path": ""}), "ds_moe_ext.report.path", "is ''", "not a folder; name")
    yield Bad(block(enabled=False, trace={"pth": 1}), "trace", "'pth'", "did you mean 'path'?")


def out_of_range() -> Iterator[Bad]:
    least = {
        ("expert_parallel_size",): 1,
        ("expert_sharding_size",): 1,
        ("report", "trace_step"): 0,
        ("report", "max_steps"): 2,
        ("trace", "first_step"): 0,
        ("trace", "num_steps"): 1,
    }
    for path, value in least.items():
        for low in (value - 1, value - 2, -(10**30)):
            key = ".".join(("ds_moe_ext", *path))
            yield Bad(at(path, low), key, f"is {low};", f"must be at least {value}")
    for name, remedy in (("zzz", "known:"), ("fsdp", "'fssdp'?"), ("esp", "known:")):
        document = at(("balance",), name) | {}
        document["ds_moe_ext"]["strategy"] = "esp"
        yield Bad(document, "ds_moe_ext.balance", f"is {name!r}", remedy)
    yield Bad(
        at(("balance",), "fssdp"), "ds_moe_ext.balance", "is 'fssdp'", "set strategy to 'esp'"
    )
    for factor in (0, 0.0, -0.0, -1, -1.5, math.nan, math.inf, -math.inf, 10**400, -(10**400)):
        shown = "inf" if abs(factor) > 1e308 else f" is {float(factor)};"
        path = ("capacity_factor",)
        yield Bad(at(path, factor), "ds_moe_ext.capacity_factor", shown, "must be above 0")


def of_automatic_values() -> Iterator[Bad]:
    """The literal "auto" where null is meant: the error says so."""
    for path, rule in KEYS.items():
        if rule in (IS_INTEGER_OR_NULL, IS_NUMBER_OR_NULL):
            key = ".".join(("ds_moe_ext", *path))
            yield Bad(at(path, "auto"), key, "'auto'", "write null (or leave the key out)")


def of_patterns() -> Iterator[Bad]:
    for pattern in ("(", "[a", "*", "(?P<x", "a{2,1}", "\\", "(?<n>a)", "line\n("):
        yield Bad(
            at(("moe_layer_pattern",), pattern),
            "ds_moe_ext.moe_layer_pattern",
            repr(pattern),
            "not a regular expression",
        )


def of_strategies() -> Iterator[Bad]:
    key = "ds_moe_ext.strategy"
    for name in ("e", "eep", "EP", "fssd", "", "automatic", "expert_parallel", "tests.no_colon"):
        near = {"e": "'ep'", "eep": "'ep'", "fssd": "'fssdp'", "automatic": "auto"}.get(name, "ep")
        yield Bad(block(strategy=name), key, repr(name), near)
        yield Bad(block(strategy=name, options={"a": 1}), key, repr(name), near)
    for path in (
        "no_such_module_at_all:Chunked",
        "tests.no_such_module:Chunked",
        "tests.strategies_for_tests:Chunkd",
        "tests.strategies_for_tests:",
        ":Chunked",
        ":",
        ".strategies_for_tests:Chunked",
        "tests.strategies_for_tests:Chunked:x",
        "tests strategies:Chunked",
        "tests.strategies_for_tests.Chunked:uses",
        "\0:\n",
    ):
        yield Bad(block(strategy=path), key, repr(path), "give the importable module")
    for path in (
        "tests.test_settings:Plain",
        "tests.test_settings:AN_INSTANCE",
        "tests.test_settings:CHUNKED",
        "json:loads",
        "math:pi",
    ):
        yield Bad(block(strategy=path), key, repr(path), "not a dataclass; make it one")
    for path in ("tests.test_settings:NoBase", "tests.test_settings:Planless"):
        yield Bad(block(strategy=path), key, repr(path), "derive it from ds_moe_ext.Strategy")
        over = block(strategy="esp", balance=path)
        yield Bad(over, "ds_moe_ext.balance", repr(path), "give it a plan(self, job)")


def of_numbers_too_large() -> Iterator[Bad]:
    most = f"it must be at most {2**63 - 1}"
    for name, key in (("fssdp", "overlap_degree"), ("zebra", "attention_size")):
        yield Bad(block(**{name: {key: 2**63}}), f"ds_moe_ext.{name}.{key}", str(2**63), most)
        yield Bad(block(**{name: {key: 10**400}}), f"ds_moe_ext.{name}.{key}", "1000000", most)
    yield Bad(block(expert_parallel_size=2**63), "ds_moe_ext.expert_parallel", str(2**63), most)
    for key in ("attention_size", "expert_size", "num_micro_batches"):
        where = f"ds_moe_ext.zebra.{key}"
        yield Bad(block(zebra={key: 2**40}), where, str(2**40), "give at most 1048576")
        yield Bad(block(zebra={key: 1e30}), where, "1e+30", "must be an integer or null")


def of_options() -> Iterator[Bad]:
    key = "ds_moe_ext.options"
    yield Bad(block(options={"a": 1}), key, "'ep'", "go into the block ds_moe_ext.ep")
    yield Bad(block(strategy="ep", options={"forward": 1}), key, "'ep'", "block ds_moe_ext.ep")

    def chunked(**options: Any) -> dict[str, Any]:
        return block(strategy=CHUNKED, options=options)

    def picky(**options: Any) -> dict[str, Any]:
        return block(enabled=True, strategy=PICKY, options={"level": 1, **options})

    yield Bad(block(strategy=CHUNKED), key, "'forward'", "add it")
    yield Bad(chunked(), key, "'forward'", "add it")
    yield Bad(chunked(forward=1), key, "'backward'", "add it")
    yield Bad(chunked(backward=1), key, "'forward'", "add it")
    yield Bad(chunked(forwrd=1, backward=1), key, "'forwrd'", "did you mean 'forward'?")
    yield Bad(chunked(forward=1, backward=1, x=1), key, "'x'", "known: backward, forward")
    for value in (None, True, "2", "auto", 1.0, [1], {}):
        document = chunked(forward=value, backward=1)
        yield Bad(document, f"{key}.forward", repr(value), "must be an integer")
        yield Bad(picky(level=value), f"{key}.level", repr(value), "must be an integer")
    for value in (True, False, 3, 1.0, "1", None, [1], {}):
        yield Bad(picky(depth=value), f"{key}.depth", repr(value), "must be 1 or 2 or 'all'")
    for value in (None, "x", 1, {}):
        yield Bad(picky(stages=value), f"{key}.stages", repr(value), "must be a list")
    for value in (None, "1.0", True, []):
        yield Bad(picky(rate=value), f"{key}.rate", repr(value), "must be a number")
    for value in (1, True, [], {}):
        yield Bad(picky(name=value), f"{key}.name", repr(value), "must be a string or null")
    yield Bad(picky(twice=2), key, "'twice'", "known: cuda_graphs, depth")


BAD = (
    *(of_wrong_type, mistyped, unknown, out_of_range, of_automatic_values, of_patterns),
    *(of_strategies, of_options, of_numbers_too_large),
)


def refusal_of(document: Any) -> str:
    """The text of the one ValueError; of an enabled block, where nothing is reported of that."""
    block = document.get("ds_moe_ext") if isinstance(document, dict) else None
    if isinstance(block, dict):
        document = {**document, "ds_moe_ext": {"enabled": True, **block}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError) as caught:
            read_settings(document)
    assert type(caught.value) is ValueError
    assert len(caught.value.args) == 1
    return str(caught.value)


@pytest.mark.parametrize("bad", BAD)
def test_refused_in_one_sentence(bad: Callable[[], Iterator[Bad]]) -> None:
    for each in bad():
        message = refusal_of(each.document)
        assert len(message.splitlines()) == 1, message
        assert each.key in message and each.shown in message and each.remedy in message, message


def test_what_is_tried_covers_every_key() -> None:
    tried = {each.key for bad in BAD for each in bad()}
    assert tried >= {".".join(("ds_moe_ext", *path)) for path in KEYS}


def test_the_hint_to_write_null_stands_only_where_null_is_allowed() -> None:
    for path, rule in KEYS.items():
        if not FITS[rule]("auto"):
            message = refusal_of(at(path, "auto"))
            assert ("write null" in message) == FITS[rule](None), message


@pytest.mark.parametrize(("name", "hint"), [("nope", r"\(known: .*fssdp"), ("fssd", "mean 'fssdp")])
def test_a_name_that_is_none_of_ours_is_reported_with_them(name: str, hint: str) -> None:
    with pytest.raises(
        ValueError, match=f"given, which cannot be read .* configs/strategies .*{hint}"
    ):
        read_file(name, "given")


def test_what_a_users_strategy_says_is_passed_through() -> None:
    message = refusal_of(block(strategy=PICKY, options={"level": 10}))
    assert message == "level 10 is past\t9: take a smaller one"


def test_a_solver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    document = block(esp={"solver": "paper"})
    read_settings(document)
    monkeypatch.setattr(ds_moe_ext.strategies.esp, "find_spec", lambda package: None)
    message = refusal_of(document)
    assert "ds_moe_ext.esp.solver is 'paper'" in message and "pip install scipy" in message


def test_nothing_is_imported_where_it_is_not_enabled() -> None:
    keys = {
        "strategy": "no_such_module:Mine",
        "options": {"level": 3},
        "gate": {"type": "no_such_module:Gate"},
        "hooks": ["no_such_module:Hook", {"type": "no_such_module:Other"}],
    }
    settings, strategy = read_settings(block(**{**keys, "enabled": False}))
    assert strategy is None and not settings.enabled
    assert "no_such_module" in refusal_of(block(**{**keys, "enabled": True}))
    assert "'forward'" in refusal_of(block(enabled=True, strategy=CHUNKED))
    # What needs no code is read as ever.
    assert "ds_moe_ext.hooks[0]" in refusal_of(block(**{**keys, "enabled": False, "hooks": [3]}))


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "x" * 5000},
        {"strategy": ["a"] * 3000},
        {"report": {"path": {"a": "b" * 9000}}},
        {"moe_layer_pattern": "(" * 4000},
        {"y" * 5000: 1},
        {"gate": {"type": "z" * 5000}},
        {"hooks": ["q" * 5000]},
    ],
    ids=lambda keys: next(iter(keys))[:12],
)
def test_a_long_value_makes_a_short_error(keys: dict[str, Any]) -> None:
    message = refusal_of(block(**keys))
    assert len(message) < 1100 and message.startswith("ds_moe_ext")
    assert next(iter(keys))[:100] in message


KEY = st.sampled_from(
    [*sorted({key for path in KEYS for key in path}), "forward", "backward", "", "zz", CHUNKED]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["ep", "auto", CHUNKED, PICKY])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=4),
    max_leaves=12,
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEY, JSON, max_size=6))
def test_any_block_is_read_or_refused(keys: dict[str, Any]) -> None:
    try:
        settings, strategy = read_settings({"ds_moe_ext": keys})
    except ValueError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert message.startswith("ds_moe_ext")
    else:
        assert settings.enabled == (keys.get("enabled") is True)
        assert (strategy is not None) == settings.enabled


def test_without_a_balance_pipelines_lie_over_the_block_of_ep() -> None:
    block = {"enabled": True, "strategy": "esp", "ep": {"send_once": True}}
    _, strategy = read_settings({"ds_moe_ext": block})
    assert isinstance(strategy, Overlay) and strategy.placing == ExpertParallel(send_once=True)
    refused = {**block, "ep": {"static_capacity": 8}}
    with pytest.raises(ValueError, match=r"ep\.static_capacity is 8, but strategy 'esp' cuts"):
        read_settings({"ds_moe_ext": refused})
