# SPDX-License-Identifier: Apache-2.0
"""A stand-in for APEX's, which adds a linear's weight gradient where gradients are summed."""

from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    rows, grads = (x.flatten(0, -2).to(main_grad.dtype) for x in (total_input, grad_output))
    main_grad.add_(grads.t() @ rows)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
