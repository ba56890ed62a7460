# SPDX-License-Identifier: Apache-2.0
"""Modules that look like experts, but that nothing here knows how to replace: never in silence."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence

from torch import nn

from ds_moe_ext.attachment.dynamo import named_modules
from ds_moe_ext.attachment.host_layer import Wanted
from ds_moe_ext.settings import BLOCK


def unknown_experts(model: nn.Module, known: Collection[str], wanted: Wanted) -> list[str]:
    """Modules with weights that have "expert" in their name or class; shared experts are dense.

    Args:
        known: names of the layers that are replaced.
        wanted: whether a layer of a name is to be replaced.

    Returns:
        One text for all modules of a class that differ in the numbers of their name only.
    """
    seen: list[str] = [*known]
    counts: Counter[tuple[str, str]] = Counter()
    for name, module in named_modules(model):
        kind = type(module).__name__
        told = f"{name.rpartition('.')[2]} {kind}".lower()
        if "expert" not in told or "shared" in told or next(module.parameters(), None) is None:
            continue
        if not wanted(name) or any(
            _lies_in(name, other) or _lies_in(other, name) for other in seen
        ):
            continue
        seen.append(name)
        counts[re.sub(r"\b\d+\b", "*", name), kind] += 1
    return [f"{name} ({kind}, {count})" for (name, kind), count in counts.items()]


def _lies_in(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def warn_of_unknown(unknown: Sequence[str]) -> None:
    """Tell that some stay as they are."""
    if unknown:
        warnings.warn(
            f"{BLOCK}: these look like experts, but are of classes that ds_moe_ext does not know, "
            f"so that they stay as they are: {', '.join(unknown)}; teach it their classes with "
            f"ds_moe_ext.register_experts, or exclude them with {BLOCK}.moe_layer_pattern",
            stacklevel=2,
        )
