# SPDX-License-Identifier: Apache-2.0
"""How a run routes tokens, beside how that one did from whose checkpoint it goes on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.attachment.routing_facts import TOP_K, TOP_KS, Facts, differences


class SavedRouting:
    """Compares both, and warns on the first rank.

    Where no attribute of the host says how many choices a token has, the first pass shows it: then
    it is compared behind the first step.

    Args:
        layers: of the run.
        is_first: whether this rank warns.
    """

    def __init__(self, layers: Sequence[AttachedLayer], *, is_first: bool) -> None:
        self._layers, self._is_first = layers, is_first
        self._awaited: Mapping[str, Facts] = {}
        self._where = ""

    def facts(self) -> dict[str, Facts]:
        """Of each layer, by its name; what is not known yet is left out."""
        return {layer.name: _facts(layer) for layer in self._layers}

    def compare(self, saved: Mapping[str, Facts] | None, where: str) -> None:
        """Behind a load.

        Args:
            saved: of each layer; None where the checkpoint does not say.
            where: it lies.
        """
        own, self._where = self.facts(), where
        known = {name: theirs for name, theirs in (saved or {}).items() if name in own}
        self._awaited = {
            name: {TOP_K: theirs[TOP_K]}
            for name, theirs in known.items()
            if TOP_K in theirs and TOP_K not in own[name]
        }
        self._warn(differences(known, own))

    def after_step(self) -> None:
        """Compare what is known by now and was not when the checkpoint was loaded."""
        if self._awaited:
            awaited, self._awaited = self._awaited, {}
            self._warn(differences(awaited, self.facts()))

    def _warn(self, told: str) -> None:
        if told and self._is_first:
            warnings.warn(
                f"{self._where} was saved by a model that routes tokens otherwise: {told}; losses "
                "go on as those of another model; build the model as it was, or go on if you mean "
                "it",
                stacklevel=2,
            )


def _facts(layer: AttachedLayer) -> Facts:
    seen = layer.routed.rows.top_k  # 0 before the first pass
    is_stated = any(name in layer.routing for name in TOP_KS)
    return layer.routing if is_stated or not seen else {**layer.routing, TOP_K: seen}
