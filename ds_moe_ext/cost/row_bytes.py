# SPDX-License-Identifier: Apache-2.0
"""What a row weighs on its way. Pure."""

from __future__ import annotations

from typing import NamedTuple


class RowBytes(NamedTuple):
    """Bytes of one row on one trip, the mean of forward and backward, there and back.

    Attributes:
        between: from cell to cell.
        within: of a cell that splits its experts.
    """

    between: float
    within: float
