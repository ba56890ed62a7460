# SPDX-License-Identifier: Apache-2.0
"""How large generated loads shall be."""

from __future__ import annotations

from dataclasses import dataclass

from ds_moe_ext.loads.loads import MOST_ROWS, check_size
from ds_moe_ext.strict import at_least


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What every generator is told.

    Attributes:
        ranks: senders ``C``; experts are at home on them in index order, equally many on each.
        experts: ``E`` of each layer.
        layers: ``L``.
        tokens: of a rank in a step, in the mean.
        top_k: different experts that a token chooses.
        steps: ``I``.

    Raises:
        ValueError: sizes that no loads have.
    """

    ranks: int = 8
    experts: int = 64
    layers: int = 4
    tokens: int = 4096
    top_k: int = 2
    steps: int = 12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            at_least(name, value, 1)
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k is {self.top_k}, but there are {self.experts} experts; a token chooses "
                "different ones: lower top_k or raise experts"
            )
        check_size(self.shape, "the table of rows by step, layer, rank and expert")
        if 2 * self.tokens * self.top_k > MOST_ROWS:  # ragged sources have more than the mean
            raise ValueError(
                f"tokens is {self.tokens}, with {self.top_k} choices each too many rows to count; "
                f"give {MOST_ROWS // (2 * self.top_k)} at most"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(I, L, C, E)``."""
        return self.steps, self.layers, self.ranks, self.experts

    @property
    def experts_per_rank(self) -> int:
        """Those at home there.

        Raises:
            ValueError: they do not divide.
        """
        if self.experts % self.ranks:
            raise ValueError(
                f"{self.experts} experts do not divide over {self.ranks} ranks, of which this "
                f"workload makes some hot; choose a number of ranks that divides {self.experts}"
            )
        return self.experts // self.ranks
