# SPDX-License-Identifier: Apache-2.0
"""What a host can do and ds_moe_ext cannot go along with: a row each.

docs/known_limits.md is made of these rows, by docs/known_limits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ds_moe_ext.settings import BLOCK

ENABLED = f"{BLOCK} is enabled"


@dataclass(frozen=True)
class Refusal:
    """One thing that does not work.

    Attributes:
        what: as a user writes it: a key with its value, a flag, an argument.
        asked: from what was given to how an error says that this was asked for; empty, if it was
            not.
        reason: why not.
        remedy: what to do.
    """

    what: str
    asked: Callable[[Any], str]
    reason: str
    remedy: str


def refuse(
    refusals: Iterable[Refusal], given: Any, context: str = ENABLED, or_else: str = ""
) -> None:
    """Check what was given.

    Args:
        refusals: what is refused, the first of them first.
        given: as their ``asked`` takes it.
        context: what makes it impossible.
        or_else: another remedy for all of them.

    Raises:
        ValueError: it asks for what cannot be done.
    """
    for refusal in refusals:
        asked = refusal.asked(given)
        if asked:
            other = or_else and f", or {or_else}"
            raise ValueError(f"{context}, but {asked}: {refusal.reason}; {refusal.remedy}{other}")
