"""``torch.load`` of files that others wrote: of classes only those that tensors need.

What hosts pickle beside weights, such as enums of Megatron and settings of DeepSpeed, becomes an
``Unknown``; so that neither host need be there, and nothing of the file is executed.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_KNOWN = {
    "collections": ("OrderedDict", "defaultdict"),
    "torch._utils": ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch": ("Size", "device", *(n for n, v in vars(torch).items() if isinstance(v, torch.dtype))),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "builtins": ("set", "frozenset", "list", "dict", "tuple", "int", "float", "complex", "slice"),
}


class Unknown:
    """Stands for an object of a class that is not loaded."""

    def __new__(cls, *_: Any, **__: Any) -> Unknown:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """A list's way to be unpickled."""

    def extend(self, items: Any) -> None:
        """Likewise."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if name in _KNOWN.get(module, ()) else Unknown


def load(path: Path) -> Any:
    """What a file of ``torch.save`` has; tensors are read from it when they are used.

    Raises:
        ValueError: it cannot be read.
    """
    module = ModuleType("pickle of known classes")
    vars(module).update(Unpickler=_Unpickler)
    try:
        return torch.load(
            path, map_location="cpu", mmap=True, weights_only=False, pickle_module=module
        )
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is damaged; copy it "
            "again, or choose another checkpoint"
        ) from error
