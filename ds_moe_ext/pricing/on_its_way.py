# SPDX-License-Identifier: Apache-2.0
"""What a described model's rows and copies weigh as they travel. Pure."""

from __future__ import annotations

from typing import NamedTuple

from ds_moe_ext.cost.row_bytes import RowBytes


class OnItsWay(NamedTuple):
    """Bytes that travel.

    Attributes:
        row: of one row on one trip.
        copy: of what one rank has of an expert, the mean of there and, as gradients, back.
    """

    row: RowBytes
    copy: float
