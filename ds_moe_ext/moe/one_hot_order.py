# SPDX-License-Identifier: Apache-2.0
"""GShard's order: tokens are brought to their experts' buffers, and back, by products with a mask.

The same rows in the same places as by an index (Tutel's way, ``Route``), for as many products as
the mask has elements times the width. Lepikhin et al. 2021, Algorithm 2; FSMoE section 3.1. Shape
letters: T tokens, K choices a token, N rows of all buffers, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ds_moe_ext.moe.route import Route


@dataclass(frozen=True, eq=False)
class OneHotRoute(Route):
    """A route of padded buffers. A row that is not finite makes all of a product so."""

    @cached_property
    def mask_NT(self) -> Tensor:
        """Which token each row is of, bool ``[N, T]``; padding is of none."""
        return one_hot(self.token_N, self.num_tokens + 1)[:, :-1].bool()

    @property
    def is_indexed(self) -> bool:
        return False

    def of_tokens(self, x_TD: Tensor) -> Tensor:
        return self.mask_NT.to(x_TD.dtype) @ x_TD

    def sum_by_token(self, rows_ND: Tensor, weight_TK: Tensor | None = None) -> Tensor:
        if weight_TK is None:
            return self.mask_NT.to(rows_ND.dtype).T @ rows_ND
        dtype = torch.promote_types(rows_ND.dtype, weight_TK.dtype)
        weight_NT = self.mask_NT * self.of_choices(weight_TK.to(dtype))[:, None]
        return (weight_NT.T @ rows_ND.to(dtype)).to(rows_ND.dtype)
