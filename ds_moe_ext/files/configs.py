# SPDX-License-Identifier: Apache-2.0
"""The files of ``configs/`` by their names; they come with the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_INSTALLED, _CLONE = _PACKAGE / "configs", _PACKAGE.parent / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _CLONE


def names_of(kind: str) -> dict[str, Path]:
    """Of one folder's JSON files, each with where it lies.

    Args:
        kind: ``"hardware"``, ``"hosts"``, ``"models"`` or ``"strategies"``.
    """
    return {file.stem: file for file in sorted((CONFIGS / kind).rglob("*.json"))}


def file_of(kind: str, given: str | Path) -> Path:
    """The file that a person means: one of their own or, where they have none, one of ours.

    Args:
        kind: folder of ``configs/`` that has ours.
        given: a path, or a name, as ``dgx_h100``.

    Returns:
        Where it lies; ``given`` as it is where nobody has it.
    """
    own, ours = Path(given), names_of(kind).get(str(given))
    return own if ours is None or own.exists() else ours
