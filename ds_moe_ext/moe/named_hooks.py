"""Which hooks a JSON list names, read strictly."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from ds_moe_ext.class_path import found_at
from ds_moe_ext.moe.codecs import BFloat16, Codec, Int8
from ds_moe_ext.moe.hooks import Hooked, Hooks
from ds_moe_ext.strict import check_object, nearest, read_record

CODECS: Mapping[str, type[Codec]] = {"bf16": BFloat16, "int8": Int8}
"""By the name that JSON gives."""

EXAMPLE = "'my_package.my_module:MyHooks'"


def read_hooks(values: Any, where: str) -> Hooked:
    """Observers and codecs from a JSON list.

    Args:
        values: what ``json`` read: names, or objects with the name as ``type`` and beside it the
            keys of what is named, which are the fields of its dataclass.
        where: dotted name of the list, for errors.

    Raises:
        ValueError: something is no hook, has no such key, or two codecs are for the same rows.
    """
    if not isinstance(values, list):
        raise ValueError(f"{where} is {values!r}, but must be a list")
    found = [_read(value, f"{where}[{number}]") for number, value in enumerate(values)]
    observers = tuple(hook for hook in found if isinstance(hook, Hooks))
    codecs = tuple(hook for hook in found if isinstance(hook, Codec))
    try:
        return Hooked(observers, codecs)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read(value: Any, where: str) -> Hooks | Codec:
    if isinstance(value, str):
        name, keys, where_name = value, {}, where
    else:
        check_object(where, value)
        keys, where_name = dict(value), f"{where}.type"
        if "type" not in keys:
            raise ValueError(f"{where} needs the key 'type'; add it: {_known()}")
        name = keys.pop("type")
    cls = _named(name, where_name)
    if dataclasses.is_dataclass(cls):
        return read_record(cls, keys, where)
    if keys:
        raise ValueError(
            f"{where} has no key {next(iter(keys))!r}; make {name} a dataclass: its fields are its "
            "JSON keys"
        )
    try:
        return cls()
    except TypeError as error:
        raise ValueError(
            f"{where} is {name!r}, which cannot be made ({error}); make it a dataclass: its fields "
            "are its JSON keys"
        ) from error


def _known() -> str:
    return f"{', '.join(map(repr, CODECS))}, or {EXAMPLE}"


def _named(name: Any, where: str) -> type[Hooks] | type[Codec]:
    if not isinstance(name, str):
        raise ValueError(f"{where} is {name!r}, but must be a string")
    if ":" in name:
        return _class_at(name, where)
    if name not in CODECS:
        raise ValueError(
            f"{where} is {name!r}, which is unknown; {nearest(name, CODECS)}; hooks of your own "
            f"are {EXAMPLE}"
        )
    return CODECS[name]


def _class_at(path: str, where: str) -> type[Hooks] | type[Codec]:
    cls = found_at(path, where, EXAMPLE)
    if not (isinstance(cls, type) and issubclass(cls, (Hooks, Codec))) or inspect.isabstract(cls):
        raise ValueError(
            f"{where} is {path!r}, which is no hook; derive it from ds_moe_ext.moe.hooks.Hooks, or "
            "from ds_moe_ext.moe.codecs.Codec and let it encode and decode"
        )
    return cls
