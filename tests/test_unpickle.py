# SPDX-License-Identifier: Apache-2.0
"""Members of enums as Python 3.11 before 3.11.4 pickles them, by ``getattr``: read as others write
them, and nothing else by that name."""

from __future__ import annotations

import io
import pickle
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from ds_moe_ext.files.unpickle import check_object, load_object, load_table


class Colour(Enum):
    RED = 3


class Tricky:
    """Pickled as the attribute of something."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


class _OldPickler(pickle.Pickler):
    def reducer_override(self, thing: object) -> Any:
        if isinstance(thing, Enum):
            return getattr, (type(thing), thing.name)
        return NotImplemented


def saved(thing: object) -> io.BytesIO:
    stream = io.BytesIO()
    module: Any = ModuleType("pickle of Python 3.11.2")
    module.Pickler = _OldPickler
    torch.save(thing, stream, pickle_module=module)
    stream.seek(0)
    return stream


def test_tables_have_members_of_enums() -> None:
    members = [_MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT, WriteItemType.TENSOR]
    stream = io.BytesIO()
    _OldPickler(stream).dump(members)
    assert b"getattr" in stream.getvalue()
    stream.seek(0)
    assert load_table(stream) == members


def test_states_have_members_of_known_enums() -> None:
    stream = saved({"colour": Colour.RED})
    check_object("a state", stream, [Colour])
    stream.seek(0)
    assert load_object(stream, [Colour]) == {"colour": Colour.RED}
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"Colour.*is not run"):
        load_object(stream)


@pytest.mark.parametrize("name", ["__init__", "mro", "__subclasses__"])
@pytest.mark.parametrize("owner", [Metadata, WriteItemType])
def test_nothing_else_is_got(owner: type, name: str) -> None:
    stream = io.BytesIO(pickle.dumps(Tricky(owner, name)))
    with pytest.raises((pickle.UnpicklingError, KeyError), match=r"is no enum|__|mro"):
        load_table(stream)
    with pytest.raises((pickle.UnpicklingError, KeyError), match=r"is no enum|__|mro"):
        load_object(saved(Tricky(owner, name)), [owner])
