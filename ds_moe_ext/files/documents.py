# SPDX-License-Identifier: Apache-2.0
"""JSON as people write it into files; what cannot be read is told in few words.

Callers put the name of the file and the remedy around these: ``{name}, which ... ({error}); ...``.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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
        return json.loads(decoded, parse_constant=parse_constant, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError("its objects lie in each other too deeply: recursion") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """An object of JSON.

    Raises:
        ValueError: a key stands twice in it.
    """
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"an object has a key twice: {key!r}")
        values[key] = value
    return values
