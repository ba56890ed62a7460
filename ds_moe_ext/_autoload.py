# SPDX-License-Identifier: Apache-2.0
"""How a script that knows nothing of us gets us: an import hook, installed when torch loads.

torch imports the package at the end of its own import (entry point group ``torch.backends``, in the
module ``_ds_moe_ext_autoload`` beside the package), and the package calls ``autoload``. It only
puts a finder on ``sys.meta_path`` that patches a host when the host is imported; nothing else is
loaded before that, and nothing that goes wrong here can break ``import torch``.

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
    "transformers.trainer": "ds_moe_ext.patches.transformers",
    "megatron.training.arguments": "ds_moe_ext.patches.megatron_training",
}
"""Host module -> the module whose ``apply()`` patches it."""


GUARDS = {"deepspeed": "ds_moe_ext.hosts.deepspeed.guard"}
"""Host package -> the module that makes a run fail which asks for us when we could not attach."""


VERIFY = "DS_MOE_EXT_VERIFY"
"""Set by ``ds-moe-ext verify`` in the runs that it starts, and by nobody else."""

VERIFIERS = {
    "torch": "ds_moe_ext.hosts.verification.recording",
    "deepspeed": "ds_moe_ext.patches.verify_deepspeed",
    "ds_moe_ext.patches.megatron": "ds_moe_ext.patches.verify_megatron",
    "ds_moe_ext.hosts.plain.training_loop": "ds_moe_ext.patches.verify_torch",
}
"""Module -> the one whose ``apply()`` lets it be watched, in such a run."""


OWN_SWITCH = "DS_MOE_EXT_AUTOLOAD"
SWITCHES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", OWN_SWITCH)  # torch's is read by torch


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find a host, and watches for the end of its import."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._busy or not _patches_of(name):
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        _patch_after(spec, name)
        return spec


def _patches_of(host: str) -> list[str]:
    """The modules that patch it, in this order."""
    tables = (HOSTS, VERIFIERS) if VERIFY in os.environ else (HOSTS,)
    return [table[host] for table in tables if host in table]


def _patch(host: str) -> None:
    try:
        for module in _patches_of(host):
            importlib.import_module(module).apply()
    except Exception as error:
        warnings.warn(
            f"ds_moe_ext could not attach to {host} and is off: {error!r}; "
            "'ds-moe-ext doctor' shows more",
            stacklevel=2,
        )
        if host in GUARDS:
            importlib.import_module(GUARDS[host]).refuse_if_asked(sys.modules[host], error)


class _SpecToWatch(importlib.machinery.ModuleSpec):
    """The spec of a module that is half way through its import, as when ``import deepspeed`` is
    what imports torch: the import system sets ``_initializing`` to False at the very end."""

    @property
    def _initializing(self) -> bool:
        return bool(vars(self)["_initializing"])

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            for host in vars(self).pop(_WAITING):
                _patch_when_whole(host)


_WAITING = "_ds_moe_ext_hosts"  # attribute of a watched spec: hosts to patch when it is whole


def _patch_after(spec: importlib.machinery.ModuleSpec, host: str) -> None:
    """Patch a host when the import of a module ends."""
    spec.__class__ = _SpecToWatch
    vars(spec)[_WAITING] = {host, *vars(spec).get(_WAITING, ())}


def _patch_when_whole(host: str) -> None:
    """Patch a host as soon as neither it nor a module of ours, which the patches may need and which
    may be what imports the host, is half way through its import."""
    if sys.modules.get(host) is None:
        return
    own = [name for name in [*sys.modules] if name.startswith("ds_moe_ext.") and name != __name__]
    for name in (host, *own):
        module = sys.modules[name]  # None where somebody forbids its import
        spec = module and module.__spec__
        if spec and vars(spec).get("_initializing"):
            _patch_after(spec, host)
            return
    _patch(host)


def install() -> None:
    """Patch the hosts: those already imported now, the others when their import ends."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for host in (*HOSTS, *VERIFIERS):
        if _patches_of(host):
            _patch_when_whole(host)


def switched_off_by() -> list[str]:
    """The environment variables that switch autoloading off."""
    return [variable for variable in SWITCHES if os.environ.get(variable) == "0"]


def autoload() -> None:
    """Attach to the hosts, unless that is switched off."""
    try:
        if OWN_SWITCH not in switched_off_by():
            install()
    except Exception as error:
        warnings.warn(f"ds_moe_ext did not load and is off: {error!r}", stacklevel=2)
