# SPDX-License-Identifier: Apache-2.0
"""Rows of each slot times the slot's matrix: one grouped GEMM where there is one.

Shape letters: R rows, S slots, D width in, F width out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_moe_ext.moe.slot_rows import SlotRows


def grouped_linear(
    rows_RD: Tensor, slots: SlotRows, weight_SDF: Tensor, bias_SF: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each slot by the slot's matrix: ``[R, D] x [S, D, F] -> [R, F]``.

    One grouped GEMM where the device and the dtype have it; else one GEMM a slot.
    """
    rows_RD = rows_RD.to(weight_SDF.dtype)
    if rows_RD.shape[0] and has_grouped_mm(rows_RD, weight_SDF):
        out_RF = torch.nn.functional.grouped_mm(rows_RD, weight_SDF, offs=slots.end_S)
    elif weight_SDF.shape[0] == 1:
        out_RF = rows_RD @ weight_SDF[0]
    else:
        parts = rows_RD.split(slots.on_host())
        out_RF = torch.cat([part @ weight for part, weight in zip(parts, weight_SDF.unbind())])
    if bias_SF is None:
        return out_RF
    length_S = slots.end_S.diff(prepend=slots.end_S.new_zeros(1))
    return out_RF + bias_SF.repeat_interleave(length_S, dim=0, output_size=slots.num_rows)


_IS_THERE = "grouped_mm" in dir(torch.nn.functional)  # not before torch 2.10
_GROUPED_GEMM_MAJORS = (9, 10)  # compute capabilities: Hopper, Blackwell of data centres


def has_grouped_mm(rows_RD: Tensor, weight_SDF: Tensor) -> bool:
    """Whether the device and the type have one grouped GEMM for them, if there are rows."""
    if not _IS_THERE:
        return False
    num_aligned = 16 // weight_SDF.element_size()  # the kernels want rows of 16 bytes
    if weight_SDF.shape[1] % num_aligned or weight_SDF.shape[2] % num_aligned:
        return False
    if rows_RD.is_cuda:
        # A view into a flat buffer may begin anywhere. Other GPUs have no such kernel: torch would
        # make the host wait in every call, we do once.
        return (
            weight_SDF.dtype == torch.bfloat16
            and weight_SDF.data_ptr() % 16 == 0
            and weight_SDF.stride(0) % num_aligned == 0
            and torch.cuda.get_device_capability(rows_RD.device)[0] in _GROUPED_GEMM_MAJORS
        )
    return weight_SDF.dtype in (torch.float32, torch.bfloat16)


def rounded_up(rows_RD: Tensor) -> Tensor:
    """Rows of a CPU, with zeros behind them.

    oneDNN compiles a bfloat16 kernel for every new shape, which costs as much as some hundred rows.
    With their number rounded up to four binary digits, shapes recur; it grows by 4 % on average.
    """
    if rows_RD.dtype != torch.bfloat16:
        return rows_RD
    num_rows = rows_RD.shape[0]
    return with_rows(rows_RD, num_rows + -num_rows % (1 << max(num_rows.bit_length() - 4, 0)))


def with_rows(rows_RD: Tensor, num_rows: int) -> Tensor:
    """As many rows, the missing ones of zeros."""
    missing = num_rows - rows_RD.shape[0]
    return torch.nn.functional.pad(rows_RD, (0, 0, 0, missing)) if missing else rows_RD
