# SPDX-License-Identifier: Apache-2.0
"""JSON as people write it into files, and the files of ``configs/`` by their names.

What cannot be read is reported in few words; callers put the name of the file and the remedy around
them: ``{name}, which ... ({error}); ...``.
"""

from __future__ import annotations

import importlib
import json
import re
import stat
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_INSTALLED, _CLONE = _PACKAGE / "configs", _PACKAGE.parent / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _CLONE


def names_of(kind: str) -> dict[str, Path]:
    """Of JSON files of ``configs/``, each with where it lies.

    Args:
        kind: a folder there: ``"hardware"``, ``"hosts"``, ``"loads"``, ``"models"`` or
            ``"strategies"``.
    """
    return {file.stem: file for file in sorted((CONFIGS / kind).rglob("*.json"))}


def file_of(kind: str, given: str | Path) -> Path:
    """The file that a person means by a path or a name, as ``dgx_h100``: one of their own or, where
    they have none, one of ours of this kind; ``given`` as it is where nobody has it."""
    own, ours = Path(given), names_of(kind).get(str(given))
    return own if ours is None or own.exists() else ours


def read_document(path: str | Path) -> Any:
    """What is in a JSON file.

    Raises:
        ValueError: why it cannot be read.
    """
    return parsed(bytes_of(path))


def bytes_of(path: str | Path) -> bytes:
    """What is in a file. A pipe is none: reading it would wait for somebody to write.

    Raises:
        ValueError: why it cannot be read.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError("it is a pipe or a device, no regular file")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(error.strerror) from error


def parsed(text: bytes | str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """A JSON document, every key of its objects once.

    Args:
        text: the document.
        parse_constant: makes something of "NaN", "Infinity" and "-Infinity"; None floats.

    Raises:
        ValueError: why it is none.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        return json.loads(decoded, parse_constant=parse_constant, object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise ValueError("its objects lie in each other too deeply: recursion") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"an object has a key twice: {key!r}")
        values[key] = value
    return values


# JSON with comments, as DeepSpeed reads its own: by hjson, which DeepSpeed brings.

_COMMENTS = re.compile(r"(\s+|(//|#)[^\n]*(\n|$)|/\*.*?\*/)*", re.DOTALL)


def is_json(text: str) -> bool:
    """Whether a file begins as JSON does, behind comments."""
    begins = _COMMENTS.match(text)
    return text[begins.end() if begins else 0 :].startswith(("{", "["))


def parsed_as_hjson(text: str) -> Any:
    """A document as DeepSpeed takes it, every key of its objects once.

    Raises:
        ValueError: why it is none.
    """
    try:
        return parsed(text)
    except ValueError as error:
        if find_spec("hjson") is None:
            raise ValueError(
                f"{error}; comments are read where hjson is installed, as with DeepSpeed"
            ) from error
    try:
        return importlib.import_module("hjson").loads(text, object_pairs_hook=_unique_keys)
    except RecursionError as error:
        raise ValueError("its objects lie in each other too deeply: recursion") from error
