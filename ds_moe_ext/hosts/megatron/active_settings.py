# SPDX-License-Identifier: Apache-2.0
"""The settings that this process runs Megatron by."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ds_moe_ext.hosts.attachment import startup_check
from ds_moe_ext.hosts.attachment.notices import refuse
from ds_moe_ext.hosts.attachment.startup_check import Description, Start, is_first
from ds_moe_ext.hosts.megatron.flag import FLAG
from ds_moe_ext.hosts.megatron.refusals import SETTINGS
from ds_moe_ext.hosts.megatron.role_refusals import refuse_with_roles
from ds_moe_ext.hosts.megatron.worlds import Worlds
from ds_moe_ext.hosts.zebra.early_refusals import refuse_early
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.settings import BLOCK, Settings, misspelt, read_file, read_settings

USE = "ds_moe_ext.use"
NOTHING: Description = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Chosen:
    """What was asked for.

    Attributes:
        source: where from, for a person.
        settings: the block.
        strategy: the chosen strategy.
        told: what of it must be the same on all ranks.
        worlds: of the ranks, where the strategy gives them roles and they have been parted.
        start: in which ranks compare what they were asked for.
    """

    source: str
    settings: Settings
    strategy: Strategy
    told: Description
    worlds: Worlds | None = None
    start: Start = field(default_factory=lambda: Start(USE))

    def whole_world(self) -> AbstractContextManager[None]:
        """The world is that of all ranks, inside the block."""
        return nullcontext() if self.worlds is None else self.worlds.together()

    def agree(self, more: Description = NOTHING) -> None:
        """Compare with other ranks what was asked for, once. Collective, over all ranks.

        Args:
            more: beside it.

        Raises:
            ValueError: on all ranks, where something differs.
        """
        version = importlib.import_module("megatron.core").__version__
        self.start.agree({**self.told, **startup_check.versions("megatron-core", version), **more})

    def tell(self, error: Exception) -> None:
        """Let other ranks know why this one cannot start."""
        with self.whole_world():
            Start(USE).tell(error)


_CHOSEN: list[Chosen] = []  # of this process: one or none


def chosen() -> Chosen | None:
    """What this process runs by; None where nothing was asked for."""
    return _CHOSEN[0] if _CHOSEN else None


def worlds() -> Worlds | None:
    """Of the ranks of this launch; None where they have not been parted."""
    asked = chosen()
    return None if asked is None else asked.worlds


def set_chosen(asked: Chosen | None) -> None:
    """Run by this from now on."""
    _CHOSEN[:] = [] if asked is None else [asked]


def read(given: str | Path | Mapping[str, Any]) -> Chosen | None:
    """What a document asks for; None where its block is not enabled.

    Args:
        given: a JSON file, or what is in it.

    Raises:
        ValueError: the document is malformed, or asks for what cannot be done under Megatron.
    """
    source, document = read_document(given)
    told = misspelt(document)
    if BLOCK not in document:
        raise ValueError(
            f"{FLAG} names {source}, which has no block {BLOCK!r}; "
            + (told or "add one, or leave the flag out")
        )
    if told and is_first():
        warnings.warn(f"{FLAG} names {source}: {told}", stacklevel=3)
    settings, strategy = read_settings(document)
    if strategy is None:
        warnings.warn(
            f"{FLAG} names {source}, whose block {BLOCK} is not enabled: Megatron trains its MoE "
            f"layers as ever; set {BLOCK}.enabled to true, or leave the flag out",
            stacklevel=3,
        )
        return None
    refuse(SETTINGS, settings)
    if strategy.has_roles:
        refuse_early(settings, strategy)
        refuse_with_roles(settings, strategy)
    return Chosen(source, settings, strategy, startup_check.settings_of(settings, document[BLOCK]))


def read_document(given: str | Path | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(given, Mapping):
        return "a document", given
    path = Path(given)
    document = read_file(path, f"{FLAG} is {str(path)!r}")
    if not isinstance(document, Mapping):
        raise ValueError(f"{FLAG} names {str(path)!r}, whose JSON is no object; make it one")
    return str(path), document
