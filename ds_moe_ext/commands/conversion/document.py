# SPDX-License-Identifier: Apache-2.0
"""A model's config as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def needed(document: Document, *names: str) -> Any:
    """The value of the first of these keys that is there.

    Raises:
        ValueError: none is.
    """
    for name in names:
        if document.get(name) is not None:
            return document[name]
    raise ValueError(f"the model's config has no {' or '.join(names)}; add it")
