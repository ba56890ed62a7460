# SPDX-License-Identifier: Apache-2.0
"""JSON with comments, as DeepSpeed reads its own: by ``hjson``, where that is installed.

DeepSpeed brings it; commands that only read a job's file go without both.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

from ds_moe_ext.files.documents import parsed, unique_keys

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
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError("its objects lie in each other too deeply: recursion") from error
