"""How a script that knows nothing of us gets us: an import hook, installed when torch loads.

torch calls ``autoload`` at the end of its own import (entry point group ``torch.backends``). It
only puts a finder on ``sys.meta_path`` that patches a host when the host is imported; nothing else
is loaded before that, and nothing that goes wrong here can break ``import torch``.

Off: ``DS_MOE_EXT_AUTOLOAD=0`` (ours alone) or ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` (all of torch's).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

HOSTS = {
    "accelerate": "ds_moe_ext.patches.accelerate",
    "deepspeed": "ds_moe_ext.patches.deepspeed",
}
"""Host package -> the module whose ``apply()`` patches it."""


GUARDS = {"deepspeed": "ds_moe_ext.hosts.deepspeed.guard"}
"""Host package -> the module that makes a run fail which asks for us when we could not attach."""


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a host, and watches for the end of its import."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in HOSTS or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        spec.__class__ = _SpecToWatch
        return spec


def _patch(host: str) -> None:
    try:
        importlib.import_module(HOSTS[host]).apply()
    except Exception as error:
        warnings.warn(
            f"ds_moe_ext could not attach to {host} and is off: {error!r}; "
            "'ds-moe-ext doctor' tells more",
            stacklevel=2,
        )
        if host in GUARDS:
            importlib.import_module(GUARDS[host]).refuse_if_asked(sys.modules[host], error)


class _SpecToWatch(importlib.machinery.ModuleSpec):
    """The spec of a host that is half way through its import, as when ``import deepspeed`` is what
    imports torch: the import system sets ``_initializing`` to False at the very end."""

    @property
    def _initializing(self) -> bool:
        return bool(vars(self)["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = importlib.machinery.ModuleSpec
            if self.name in sys.modules:
                _patch(self.name)


def install() -> None:
    """Patch the hosts: those already imported now, the others when their import ends."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for host in HOSTS.keys() & sys.modules.keys():
        spec = sys.modules[host].__spec__
        if spec is not None and vars(spec).get("_initializing"):
            if type(spec) is importlib.machinery.ModuleSpec:
                spec.__class__ = _SpecToWatch
        else:
            _patch(host)


def autoload() -> None:
    """Entry point of torch."""
    try:
        if os.environ.get("DS_MOE_EXT_AUTOLOAD", "1") != "0":
            install()
    except Exception as error:
        warnings.warn(f"ds_moe_ext did not load and is off: {error!r}", stacklevel=2)
