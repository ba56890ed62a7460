"""What an operation costs by its size: a start and a price a unit (FSMoE, eq. 1; spec 2.1). Pure.

Units are what the fit counted: elements of a message, or multiply-adds of an expert. Nothing here
depends on the unit of time: all costs of one plan in milliseconds give a plan in milliseconds.
Shape letter: R pipeline degrees, the numbers of chunks that a layer's tokens are cut into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ds_moe_ext.planners.prices import check_costs


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """One operation on one layer: ``alpha_s + units * beta_s`` seconds for each call.

    Attributes:
        alpha_s: seconds to start a call.
        beta_s: seconds of one unit.
        n: units of the whole layer, which its chunks share equally.

    Raises:
        ValueError: a number below zero or not finite.
    """

    alpha_s: float
    beta_s: float
    n: float

    def __post_init__(self) -> None:
        check_costs(vars(self))

    def chunk_seconds(self, degree_R: np.ndarray) -> np.ndarray:
        """Seconds of one of ``r`` chunks, float ``[R]``."""
        return self.alpha_s + self.n * self.beta_s / degree_R

    def doubled(self) -> LinearCost:
        """Twice the seconds for the same units."""
        return replace(self, alpha_s=2 * self.alpha_s, beta_s=2 * self.beta_s)
