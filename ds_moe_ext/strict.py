# SPDX-License-Identifier: Apache-2.0
"""JSON, read strictly into records. Pure.

The records are the schema: a field is a key, its type the rule, its default the default. What is
wrong is one ``ValueError`` that names the key, the value, the rule and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ds_moe_ext import older_names

AUTOMATIC = "auto"  # what people write where null is meant
MOST = 2**63 - 1  # of integers


class Bounds(typing.NamedTuple):
    """Of a number, both included: ``Annotated[int, Bounds(1, 8)]`` is the type of such a field."""

    least: float = 0
    most: float = math.inf

    def check(self, value: float, where: str) -> None:
        """Refuse a number that lies outside; ``where`` is its key."""
        if not self.least <= value <= self.most:
            kind = _JSON_NAMES[type(value)]
            to = f"of at least {self.least}"
            limit = to if self.most == math.inf else f"from {self.least} to {self.most}"
            raise ValueError(f"{where} is {reprlib.repr(value)}; it must be {kind} {limit}")


ANY = Bounds(-math.inf)

NOT_A_KEY = types.MappingProxyType({"is_key": False})
"""Metadata of a field that JSON does not set."""

RecordT = TypeVar("RecordT")
T = TypeVar("T")


def read_record(cls: type[RecordT], values: Any, where: str) -> RecordT:
    """A record from a JSON object, every value checked against its field's type, in lists and
    objects too. ``Annotated[T, read]`` is read by ``read(value, where)``, and of
    ``Annotated[T, Bounds(...)]`` a number is held against its bounds.

    Args:
        cls: a dataclass; its fields may be records themselves.
        values: what ``json`` read.
        where: dotted name of the object, for errors.

    Raises:
        ValueError: an unknown or missing key, a value of the wrong type, or what ``cls`` refuses.
    """
    check_object(where, values)
    hints = _hints_of(typing.cast(type, cls))
    fields = fields_of(cls)
    names = [f.name for f in fields]
    older = older_names.renamed(values, names, where)
    values = {**values, **{new: values[old] for new, old in older.items()}}
    for old in older.values():
        del values[old]
    for key in values:
        if key not in names:
            raise ValueError(f"{where} has no key {key!r}; {nearest(key, names)}")
    missing = [
        f.name
        for f in fields
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where} needs the key {missing[0]!r}; add it")
    read = {k: _value(hints[k], v, f"{where}.{older.get(k, k)}") for k, v in values.items()}
    return cls(**read)


@functools.cache  # a start reads a hundred records
def _hints_of(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def fields_of(cls: type) -> list[dataclasses.Field[Any]]:
    """Those of a dataclass that JSON sets."""
    fields = dataclasses.fields(cls)
    return [f for f in fields if f.init and f.metadata.get("is_key", True)]


def _value(hint: Any, value: Any, where: str) -> Any:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        bounds = ANY
        if typing.get_origin(option) is typing.Annotated:
            option, rule = typing.get_args(option)  # noqa: PLW2901
            if not isinstance(rule, Bounds):
                return rule(value, where)
            bounds = rule
        is_record = dataclasses.is_dataclass(option) and isinstance(option, type)
        if is_record and (isinstance(value, Mapping) or len(options) == 1):
            return read_record(option, value, where)
        if _fits(option, value):
            read = _as_float(value) if option is float else _within(option, value, where)
            if bounds != ANY:
                bounds.check(read, where)
            return read
    wanted = " or ".join(_in_json(option) for option in options)
    raise ValueError(f"{where} is {value!r}, but must be {wanted}{_hint_for(value, options)}")


def _within(option: Any, value: Any, where: str) -> Any:
    """A value that fits, and what is in it if it is a list or an object whose type says of what."""
    kinds = typing.get_args(option)
    if _is_tuple(option):
        return _tuple(option, value, where)
    if isinstance(value, list) and kinds:
        return [_value(kinds[0], each, f"{where}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, Mapping) and kinds:
        return {key: _value(kinds[1], each, f"{where}[{key!r}]") for key, each in value.items()}
    return value


def _is_tuple(option: Any) -> bool:
    plain = typing.get_origin(option) or option
    return isinstance(plain, type) and issubclass(plain, tuple)


def _tuple(option: Any, value: Sequence[Any], where: str) -> Any:
    """Of one type and any length, or a type an entry; a ``NamedTuple`` likewise."""
    is_named = typing.get_origin(option) is None
    kinds = tuple(_hints_of(option).values()) if is_named else typing.get_args(option)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        names = f": {', '.join(_hints_of(option))}" if is_named else ""
        raise ValueError(f"{where} is {value!r}, but must have {len(kinds)} entries{names}")
    read = [
        _value(kind, each, f"{where}[{at}]") for at, (kind, each) in enumerate(zip(kinds, value))
    ]
    return option(*read) if is_named else tuple(read)


def _hint_for(value: Any, options: tuple[Any, ...]) -> str:
    is_automatic = value == AUTOMATIC and type(None) in options
    return "; write null (or leave the key out) for automatic" if is_automatic else ""


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


def _fits(option: Any, value: Any) -> bool:
    plain = typing.get_origin(option) or option
    if plain is Any:
        return True
    if _is_tuple(plain):
        return isinstance(value, list)
    if plain is typing.Literal:
        return any(type(c) is type(value) and c == value for c in typing.get_args(option))
    if isinstance(value, (bool, str)):  # though they are an integer and a sequence
        return plain is type(value)
    if plain is float:
        return isinstance(value, (int, float))
    return isinstance(plain, type) and isinstance(value, plain)


_JSON_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    Sequence: "a list",
}


def _in_json(option: Any) -> str:
    if option is type(None):
        return "null"
    if typing.get_origin(option) is typing.Annotated:
        return _in_json(typing.get_args(option)[0])
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(option))
    if _is_tuple(option):
        return "a list"
    return _JSON_NAMES.get(typing.get_origin(option) or option, "an object")


def check_object(where: str, value: Any) -> None:
    """Refuse what is no JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}, but must be an object: {{...}}")


def shortened(message: str, most: int) -> str:
    """A message without its middle, where it is too long: its beginning names the key, its end the
    remedy."""
    if len(message) <= most:
        return message
    half = most // 2
    return f"{message[:half]} ... ({len(message) - 2 * half:,} characters) ... {message[-half:]}"


def nearest(word: object, known: Iterable[str]) -> str:
    """The end of an error about an unknown word."""
    known = sorted(known)
    return _guess(word, known) or _all_of(known)


def nearest_and_all(
    word: str, known: Iterable[str], synonyms: Mapping[str, str] = types.MappingProxyType({})
) -> str:
    """The end of an error about an unknown name from a list that a person may not know."""
    known = sorted(known)
    guess = f"did you mean {synonyms[word]!r}?" if word in synonyms else _guess(word, known)
    return f"{guess} {_all_of(known)}".lstrip()


def _guess(word: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


def _all_of(known: Sequence[str]) -> str:
    names = map(repr, known) if any("," in name for name in known) else known
    return f"known: {', '.join(names) or 'none'}"


def one_of(key: str, value: object, known: Collection[str]) -> None:
    """Refuse a word that nobody knows."""
    if value not in known:
        raise ValueError(f"{key} is {value!r}, which is unknown; {nearest(value, known)}")


def in_json(key: str, value: Any) -> str:
    """What a person writes to set a key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return json.dumps(value)


def at_least(key: str, value: int | None, least: int) -> None:
    """Refuse a number below its bound, or past those of arrays; null is automatic."""
    if value is not None and value < least:
        raise ValueError(f"{key} is {value}; it must be at least {least}")
    if value is not None and value > MOST:
        raise ValueError(f"{key} is {reprlib.repr(value)}; it must be at most {MOST}")


def all_at_least(where: str, record: object, **least: int) -> None:
    """Refuse numbers of a record below their bounds, by key; ``where`` is its dotted name."""
    for key, bound in least.items():
        at_least(f"{where}.{key}", vars(record)[key], bound)


def named(
    name: Any, where: str, known: Mapping[str, T], class_at: Callable[[str, str], T], own: str
) -> T:
    """What JSON names: one of ours by its name, or a user's own by its path.

    Args:
        name: as JSON gives it.
        where: dotted name of the key, for errors.
        known: ours.
        class_at: a user's own, from its path and ``where``.
        own: how one's own is named, the end of an error.

    Raises:
        ValueError: it is no text, or neither.
    """
    if not isinstance(name, str):
        raise ValueError(f"{where} is {name!r}, but must be a string")
    if ":" in name:
        return class_at(name, where)
    if name not in known:
        raise ValueError(f"{where} is {name!r}, which is unknown; {nearest(name, known)}{own}")
    return known[name]


def found_at(path: str, where: str, example: str) -> Any:
    """What of a user's own is at ``"package.module:Name"``.

    Raises:
        ValueError: nothing is, or it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"{where} is {path!r}, which cannot be imported ({error!r}); give the importable "
            f"module and the class in it, as {example}"
        ) from error
