# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for rows on a GPU, and their launch without Triton's own dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

ALIGNED = 16  # bytes, to which Triton compiles kernels of their own
MOST = 2**31 - 1  # of numbers of 32 bits, for which Triton compiles likewise


class Kernel:
    """A kernel that is launched again and again."""

    # whether that works with this Triton; of all kernels. Else each call is Triton's, as on ROCm,
    # for which it asks how large a tensor's memory is, too.
    is_direct: ClassVar[bool] = torch.version.hip is None

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        *numbers: int,
        **constants: int | bool,
    ) -> None:
        """In the current stream of the tensors' device.

        Args:
            grid: programs along each axis.
            tensors: on one device, in the order in which the function takes them.
            numbers: likewise.
            constants: likewise.
        """
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton asks for no tensor's, but for the current one
                return self.launch(grid, tensors, *numbers, **constants)
        key = device, *[each.dtype for each in tensors], *constants.values()
        compiled = self._compiled.get(key)
        is_plain = _is_plain(tensors, numbers)
        if compiled is not None and is_plain and Kernel.is_direct:
            try:
                compiled[grid](*tensors, *numbers, *constants.values())
            except Exception:  # another Triton may want other arguments; its own way will show
                Kernel.is_direct = False
            else:
                return
        compiled = self._jitted[grid](*tensors, *numbers, **constants)
        if is_plain and compiled is not None:  # an interpreter compiles nothing
            self._compiled[key] = compiled


def _is_plain(tensors: Sequence[Tensor], numbers: Sequence[int]) -> bool:
    """Whether the call is of the kind for which a kernel is kept."""
    places = 0
    for each in tensors:
        places |= each.data_ptr()
    return not places % ALIGNED and (not numbers or max(numbers) <= MOST)


# What lies between a layer's products, a kernel each, by Triton: torch does it in several
# passes.


try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds for CPUs come without it
    HAS_TRITON = False
else:
    HAS_TRITON = True

BLOCK = 1024  # columns of a row that a program computes at once
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def has_kernels(*tensors: Tensor) -> bool:
    """Whether there are kernels for such tensors, where they are."""
    for each in tensors:
        if not each.is_cuda or each.dtype not in _DTYPES:
            return False
    return are_there(tensors[0].device)


def are_there(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return HAS_TRITON and device.type == "cuda" and _compiles(device)


@cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton can compile for a device; it wants a C compiler, too."""
    given_RF = torch.ones(1, 2, device=device)
    try:
        compiled = silu_product(given_RF)
    except Exception as error:  # of whatever kind: torch's operations do the same
        first_line = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"Triton compiles no kernels for {device} ({type(error).__name__}: {first_line}), "
            "so slower torch operations run between the experts' products; is there a C "
            "compiler on PATH?",
            stacklevel=2,
        )
        return False
    if not torch.equal(compiled, silu_product(given_RF)):  # launched directly, as all that follow
        Kernel.is_direct = False
    return True


def silu_product(gate_up_RF: Tensor) -> Tensor:
    """``silu(gate) * up`` of the halves, ``[R, 2F] -> [R, F]``."""
    gate_up_RF = gate_up_RF.contiguous()
    num_rows, width = gate_up_RF.shape[0], gate_up_RF.shape[1] // 2
    product_RF = gate_up_RF.new_empty(num_rows, width)
    if product_RF.numel():
        grid = num_rows, _blocks(width), 1
        _SILU_PRODUCT.launch(grid, (gate_up_RF, product_RF), WIDTH=width, BLOCK=BLOCK)
    return product_RF


def silu_product_grad(gate_up_RF: Tensor, grad_RF: Tensor) -> Tensor:
    """Of gate and up, ``[R, 2F]``, given that of their product, ``[R, F]``."""
    gate_up_RF, grad_RF = gate_up_RF.contiguous(), grad_RF.contiguous()
    num_rows, width = grad_RF.shape
    grad_gate_up_RF = torch.empty_like(gate_up_RF)
    if grad_RF.numel():
        grid, tensors = (num_rows, _blocks(width), 1), (gate_up_RF, grad_RF, grad_gate_up_RF)
        _SILU_PRODUCT_GRAD.launch(grid, tensors, WIDTH=width, BLOCK=BLOCK)
    return grad_gate_up_RF


def _blocks(length: int, size: int = BLOCK) -> int:
    """That cover the columns of a row, or rows."""
    return -(-length // size)


def sums_by_token(rows_ND: Tensor, row_N: Tensor, weight_TK: Tensor | None, top_k: int) -> Tensor:
    """Rows of each token, times their weights, added up in the order of its choices, ``[T, D]``.

    Args:
        rows_ND: in any order; some may be no choice's.
        row_N: where the row of each choice lies, int64; ``N`` where it has none, which counts as
            zeros.
        weight_TK: None for sums without weights, which are rounded once.
        top_k: choices a token.
    """
    rows_ND, width = rows_ND.contiguous(), rows_ND.shape[1]
    num_tokens = row_N.numel() // top_k
    sums_TD = rows_ND.new_empty(num_tokens, width)
    if sums_TD.numel():
        weights = rows_ND if weight_TK is None else weight_TK.contiguous()
        _SUMS_BY_TOKEN.launch(
            (num_tokens, _blocks(width), 1),
            (rows_ND, row_N, weights, sums_TD),
            rows_ND.shape[0],
            WIDTH=width,
            TOP_K=top_k,
            IS_WEIGHED=weight_TK is not None,
            # Of 16 bits where weights are of the same, too: each summand is rounded then.
            IS_WIDE=weight_TK is None or _are_wide(rows_ND, weights),
            BLOCK=BLOCK,
        )
    return sums_TD


def _are_wide(one: Tensor, other: Tensor) -> bool:
    return torch.promote_types(one.dtype, other.dtype) == torch.float32


def sums_by_token_grads(
    rows_ND: Tensor,
    token_N: Tensor,
    choice_N: Tensor,
    weight_TK: Tensor,
    grad_TD: Tensor,
    *,
    is_full: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of weighed ``sums_by_token``: of rows ``[N, D]`` and of weights ``[T, K]``.

    Args:
        rows_ND: as they were added.
        token_N: of each row, int64; of no choice's ``T``.
        choice_N: of each row, its place in the flattened weights, int64; of no choice's ``T * K``.
        weight_TK: as they were.
        grad_TD: of the sums.
        is_full: each choice has a row.
    """
    rows_ND, grad_TD = rows_ND.contiguous(), grad_TD.contiguous()
    make = weight_TK.new_empty if is_full else weight_TK.new_zeros
    grad_ND, grad_TK = torch.empty_like(rows_ND), make(weight_TK.shape)
    if rows_ND.numel():
        weights = weight_TK.contiguous()
        _SUMS_BY_TOKEN_GRADS.launch(
            (rows_ND.shape[0], 1, 1),
            (rows_ND, token_N, choice_N, weights, grad_TD, grad_ND, grad_TK),
            weights.numel(),
            WIDTH=rows_ND.shape[1],
            BLOCK=BLOCK,
        )
    return grad_ND, grad_TK


def index_of_blocks(table_2X: Tensor, num_blocks: int, num_rows: int) -> Tensor:
    """Each row's own number and the shift of the block that it lies in, int32 ``[R]``."""
    index_R = table_2X.new_empty(num_rows)
    if num_rows:
        _INDEX_OF_BLOCKS.launch(
            (_blocks(num_rows, ROWS), 1, 1),
            (table_2X, index_R),
            num_blocks,
            num_rows,
            STEPS=num_blocks.bit_length(),
            ROWS=ROWS,
        )
    return index_R


ROWS = 256  # that a program finds at once

if HAS_TRITON:
    # No annotations but constexpr: Triton reads them.

    @triton.jit
    def _silu_product(  # type: ignore[no-untyped-def]
        gate_up, product, WIDTH: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        place = gate_up + row * 2 * WIDTH + column
        gate = tl.load(place, mask=mask, other=0.0)
        up = tl.load(place + WIDTH, mask=mask, other=0.0)
        wide = gate.to(tl.float32)
        silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
        out = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
        tl.store(product + row * WIDTH + column, out, mask=mask)

    @triton.jit
    def _silu_product_grad(  # type: ignore[no-untyped-def]
        gate_up, grad, grad_gate_up, WIDTH: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        place = row * 2 * WIDTH + column
        gate = tl.load(gate_up + place, mask=mask, other=0.0)
        up = tl.load(gate_up + place + WIDTH, mask=mask, other=0.0)
        own = tl.load(grad + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        wide = gate.to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-wide))
        silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
        of_up = (own * silu.to(tl.float32)).to(gate.dtype)
        of_silu = (own * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
        of_gate = (of_silu * sigmoid * (1.0 + wide * (1.0 - sigmoid))).to(gate.dtype)
        tl.store(grad_gate_up + place, of_gate, mask=mask)
        tl.store(grad_gate_up + place + WIDTH, of_up, mask=mask)

    @triton.jit(do_not_specialize=["num_rows"])
    def _sums_by_token(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        rows,
        row_of,
        weights,
        sums,
        num_rows,
        WIDTH: tl.constexpr,
        TOP_K: tl.constexpr,
        IS_WEIGHED: tl.constexpr,
        IS_WIDE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for number in range(TOP_K):
            choice = token * TOP_K + number
            row = tl.load(row_of + choice)
            is_there = column < tl.where(row < num_rows, WIDTH, 0)
            own = tl.load(rows + row * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
            if IS_WEIGHED:
                own = own * tl.load(weights + choice).to(tl.float32)
            total += own
            if not IS_WIDE:
                total = total.to(rows.dtype.element_ty).to(tl.float32)
        tl.store(sums + token * WIDTH + column, total.to(rows.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["num_choices"])
    def _sums_by_token_grads(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        rows,
        token_of,
        choice_of,
        weights,
        grads,
        grad_rows,
        grad_weights,
        num_choices,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        token, choice = tl.load(token_of + row), tl.load(choice_of + row)
        is_chosen = choice < num_choices
        weight = tl.load(weights + choice, mask=is_chosen, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < WIDTH
            own = tl.load(rows + row * WIDTH + column, mask=mask, other=0.0)
            is_there = column < tl.where(is_chosen, WIDTH, 0)
            grad = tl.load(grads + token * WIDTH + column, mask=is_there, other=0.0).to(tl.float32)
            total += (own.to(tl.float32) * grad).to(own.dtype).to(tl.float32)
            out = (grad * weight).to(own.dtype)
            tl.store(grad_rows + row * WIDTH + column, out, mask=mask)
        total_weight = tl.sum(total).to(weights.dtype.element_ty)
        tl.store(grad_weights + choice, total_weight, mask=is_chosen)

    @triton.jit(do_not_specialize=["num_blocks", "num_rows"])
    def _index_of_blocks(  # type: ignore[no-untyped-def]  # noqa: PLR0917
        table, index, num_blocks, num_rows, STEPS: tl.constexpr, ROWS: tl.constexpr
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_row = row < num_rows
        # The first block that ends behind the row is one of those from low to before high.
        low = tl.zeros((ROWS,), dtype=tl.int32)
        high = low + num_blocks
        for _ in range(STEPS):
            is_open = is_row & (low < high)
            middle = (low + high) // 2
            end = tl.load(table + num_blocks + middle, mask=is_open, other=0)
            is_later = end <= row
            low = tl.where(is_open & is_later, middle + 1, low)
            high = tl.where(is_open & (end > row), middle, high)
        shift = tl.load(table + low, mask=is_row, other=0)
        tl.store(index + row, row + shift, mask=is_row)

    _SILU_PRODUCT, _SILU_PRODUCT_GRAD = Kernel(_silu_product), Kernel(_silu_product_grad)
    _SUMS_BY_TOKEN, _SUMS_BY_TOKEN_GRADS = Kernel(_sums_by_token), Kernel(_sums_by_token_grads)
    _INDEX_OF_BLOCKS = Kernel(_index_of_blocks)
