# SPDX-License-Identifier: Apache-2.0
"""A patch: five facts and a function. It applies or raises, and can be undone."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

Wrap = Callable[[Any], Any]  # the original -> what stands in its place


def by(ours: Callable[..., Any]) -> Wrap:
    """A wrap of a function or method: ours gets the original and its arguments."""

    def wrap(original: Any) -> Any:
        if isinstance(original, staticmethod):
            return staticmethod(wrap(original.__func__))

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return ours(original, *args, **kwargs)

        return replacement

    return wrap


CHECKOUTS = {"megatron": "megatron.core"}
"""Package -> its module that knows its version: a checkout may stand before what is installed."""


class PatchError(RuntimeError):
    """A host is not as a patch expects it."""


@dataclass(frozen=True)
class Patch:
    """One change to a host, made when the host is loaded."""

    id: str  # short name, for tables and errors
    target: str  # ``"package.module:attribute"`` or ``"package.module:Class.attribute"``
    versions: str  # of the host's distribution, as in a requirement
    reason: str  # why it is needed
    wrap: Wrap  # makes the replacement from the original. Never a copy of the original's body.
    _undo: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)

    @property
    def distribution(self) -> str:
        """The host's distribution."""
        return self.target.partition(".")[0].partition(":")[0]

    @property
    def is_applied(self) -> bool:
        return bool(self._undo)

    def apply(self) -> None:
        """Put the replacement in place; once, however often it is called.

        Raises:
            PatchError: the host's version is out of range, or the target is not there.
        """
        if self.is_applied:
            return
        version = self._version()
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise PatchError(
                f"patch {self.id!r} is for {self.distribution}{self.versions}, but {version} is "
                "installed; install a version in that range, or a newer ds-moe-ext"
            )
        owner, name, original = self._resolve()
        replacement = self.wrap(original)
        for holder in (owner, *_importers(owner, name, original)):
            setattr(holder, name, replacement)
            self._undo.append(functools.partial(setattr, holder, name, original))

    def undo(self) -> None:
        """Put the original back."""
        while self._undo:
            self._undo.pop()()

    def _version(self) -> str:
        core = CHECKOUTS.get(self.distribution)
        if core is None:
            return importlib.metadata.version(self.distribution)
        version: str = importlib.import_module(core).__version__
        return version

    def _resolve(self) -> tuple[Any, str, Any]:
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            owner = importlib.import_module(module)
            for parent in parents:
                owner = getattr(owner, parent)
            original = vars(owner)[name]  # as stored: a staticmethod stays one
        except (ImportError, AttributeError, KeyError) as error:
            raise PatchError(
                f"patch {self.id!r} wants {self.target}, which is not there ({error!r}); this "
                f"version of {self.distribution} is not the one it was written for"
            ) from error
        return owner, name, original


def _importers(owner: Any, name: str, original: Any) -> list[ModuleType]:
    """Other modules that imported a function by its name: they would go on calling the original."""
    if not isinstance(owner, ModuleType):
        return []
    modules = [module for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
    return [m for m in modules if m is not owner and vars(m).get(name) is original]


def apply_all(patches: tuple[Patch, ...]) -> None:
    """Apply all or none."""
    try:
        for patch in patches:
            patch.apply()
    except PatchError:
        for patch in patches:
            patch.undo()
        raise
