# SPDX-License-Identifier: Apache-2.0
"""Small files of text beside tensors; what is wrong with one is told with its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_moe_ext.files.unpickle import damaged


def text_of(path: Path) -> str:
    """What a file of one word has.

    Raises:
        ValueError: it cannot be read, or has another thing.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    if not text.isprintable() or not text or len(text) > 255:
        raise damaged(path, ValueError("it has no name of a folder"))
    return text


def object_of(path: Path, *keys: str) -> Mapping[str, Any]:
    """What a file of JSON has.

    Raises:
        ValueError: it cannot be read, is no object or lacks one of the keys.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    lacking = [key for key in keys if not isinstance(document, Mapping) or key not in document]
    if lacking or not isinstance(document, Mapping):
        raise damaged(path, ValueError(f"it has no {' and '.join(lacking) or 'keys'}"))
    return document
