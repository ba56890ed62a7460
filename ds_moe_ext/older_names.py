# SPDX-License-Identifier: Apache-2.0
"""Names that were others before: what is written with the older ones goes on, after one notice.

Three tables, and one place where each is looked up. ``KEYS`` are of JSON blocks that a person
writes (``strict.read_record``), ``MEMBERS`` of the public classes (``accepts_older``), ``PUBLIC``
of the package (``ds_moe_ext.__getattr__``). Files on disk keep the older names (``on_disk``), and
are read by either.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

ClassT = TypeVar("ClassT", bound=type)

KEYS = {
    "attention_cells": "attention_ep_ranks",
    "cell": "etp",
    "copies": "replicas",
    "copies_per_rank": "replicas_per_rank",
    "copy_bytes": "replica_bytes",
    "copy_gradients": "replica_gradients",
    "home": "owner",
    "sum_copies_in_float32": "sum_replicas_in_float32",
    "told_after_s": "log_after_s",
    "told_every_s": "log_every_s",
}
PUBLIC = {
    "LocalElseHome": "LocalElseOwner",
    "NearestCopy": "NearestReplica",
    "Rhythm": "Intervals",
}
MEMBERS = {
    **KEYS,
    "added_trips": "added_transfers",
    "allow_copies": "allow_replicas",
    "cell_row_bytes": "etp_row_bytes",
    "cell_size": "etp_size",
    "copies_s": "replicas_s",
    "describe_homes": "describe_owners",
    "first_homes": "first_owners",
    "has_copies": "has_replicas",
    "has_host_lane": "has_host_stream",
    "has_uneven_homes": "has_uneven_owners",
    "homes": "owners",
    "lane": "stream",
    "max_cells": "max_ep_ranks",
    "measured_pools": "measured_cost_groups",
    "num_cells": "num_ep_ranks",
    "pool_of": "cost_group_of",
    "pools": "cost_groups",
    "remarks": "notices",
    "rhythm": "intervals",
    "span": "chunk_range",
    "sums_copies_in_float32": "sums_replicas_in_float32",
    "weighs_copies": "weighs_replicas",
    "with_copies": "with_replicas",
    "with_homes_that_stay": "with_owners_that_stay",
}
FIELDS = {  # of records in files, and tasks, as report.json, layouts and prices have them
    "cell_gather": "etp_gather",
    "cell_rows_ILC": "ep_rank_rows_ILC",
    "cell_scatter": "etp_scatter",
    "copies": "replicas",
    "copies_ILE": "replicas_ILE",
    "home_E": "owner_E",
    "home_cell_rows_ILC": "owner_ep_rank_rows_ILC",
    "homes": "owners",
    "lane": "stream",
    "num_cells": "num_ep_ranks",
    "said_s": "predicted_s",
    "send_home": "send_to_owner",
    "told": "reported",
}
_TASKS = ("cell_gather", "cell_scatter", "send_home")
_ON_DISK = {new: old for old, new in FIELDS.items()}


@functools.cache  # once
def _notice(old: str, new: str, where: str) -> None:
    warnings.warn(f"{where}: {old} is the older name of {new}; write {new}", stacklevel=4)


def public(name: str) -> str:
    if name in PUBLIC:
        _notice(name, PUBLIC[name], "ds_moe_ext")
    return PUBLIC.get(name, name)


def renamed(values: Mapping[str, Any], names: Collection[str], where: str) -> Mapping[str, str]:
    """Of the keys of a JSON object that are no ``names``, but their older ones: by the name of now.
    Where a person has written one it is noticed; files of ours may have them."""
    found: dict[str, str] = {}
    for key in values:
        new = _OLDER.get(key, key) if isinstance(key, str) else key
        if key not in names and new in names and new not in values:
            found[new] = key
            if key in KEYS:
                _notice(f"{where}.{key}", new, "configuration")
    return found


_OLDER = {**FIELDS, **KEYS}


def on_disk(value: Any, names: Mapping[str, str] = _ON_DISK) -> Any:
    """A document with the names that files have."""
    if isinstance(value, dict):
        return {_spelled(key, names): on_disk(each, names) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_disk(each, names) for each in value]
    return _task(value, names) if isinstance(value, str) else value


def in_files(name: str) -> str:
    """A field's name as files have it."""
    return _ON_DISK.get(name, name)


def from_disk(value: Any) -> Any:
    """Its tasks by their names of now; keys are looked up where records are read."""
    return on_disk(value, {old: FIELDS[old] for old in _TASKS})


def _spelled(key: Any, names: Mapping[str, str]) -> Any:
    return names[key] if key in names else _task(key, names)


def _task(name: Any, names: Mapping[str, str]) -> Any:
    """Of a task, or of its phase and kind, as ``forward:expert``."""
    if not isinstance(name, str):
        return name
    phase, colon, kind = name.rpartition(":")
    is_task = kind in _TASKS or kind in map(FIELDS.get, _TASKS)
    return f"{phase}{colon}{names[kind]}" if is_task and kind in names else name


def accepts_older(cls: ClassT) -> ClassT:
    """Let a public class be made, read and derived from by the older names of its members."""
    made: Callable[..., None] = cls.__init__  # type: ignore[misc]
    derived = cls.__init_subclass__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for old in MEMBERS.keys() & kwargs.keys():
            if hasattr(type(self), MEMBERS[old]) or MEMBERS[old] in _fields(type(self)):
                _notice(old, MEMBERS[old], cls.__qualname__)
                kwargs[MEMBERS[old]] = kwargs.pop(old)
        made(self, *args, **kwargs)

    def read(self: Any, name: str) -> Any:
        new = MEMBERS.get(name)
        if new is None or not (hasattr(type(self), new) or new in _fields(type(self))):
            raise AttributeError(f"{type(self).__qualname__!r} object has no attribute {name!r}")
        _notice(name, new, cls.__qualname__)
        return getattr(self, new)

    def derive(sub: type, **kwargs: Any) -> None:
        derived(**kwargs)
        for old in MEMBERS.keys() & vars(sub).keys():
            if hasattr(cls, MEMBERS[old]) and MEMBERS[old] not in vars(sub):
                _notice(old, MEMBERS[old], sub.__qualname__)
                setattr(sub, MEMBERS[old], vars(sub)[old])

    if "__init__" in vars(cls):
        cls.__init__ = init  # type: ignore[misc]
    cls.__getattr__ = read  # type: ignore[attr-defined]
    cls.__init_subclass__ = classmethod(derive)  # type: ignore[assignment]
    return cls


def _fields(cls: type) -> Collection[str]:
    return getattr(cls, "__dataclass_fields__", ())
