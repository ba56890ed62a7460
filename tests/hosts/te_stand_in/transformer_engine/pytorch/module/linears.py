# SPDX-License-Identifier: Apache-2.0
"""Linear, alone and behind a norm, and a linear for each split of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.distributed import communicate
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.norms import normalize
from transformer_engine.pytorch.signatures import takes

LINEAR = (
    "parallel_mode=None, parameters_split=None, device='cuda', ub_overlap_ag=False, "
    "ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, "
    "ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None"
)
NORMED = (
    "parallel_mode=None, return_layernorm_output=False, return_layernorm_output_gathered=False, "
    "parameters_split=None, zero_centered_gamma=False, device='cuda', ub_overlap_ag=False, "
    "ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, "
    "ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None"
)
COMMON = (
    "sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, "
    "get_rng_state_tracker=None"
)
BIAS = "bias=True, return_bias=False, params_dtype=None"


class Linear(TransformerEngineBaseModule):
    @takes(
        f"self, in_features, out_features, {COMMON}, rng_tracker_name=None, init_method=None, "
        f"{BIAS}, {LINEAR}, save_original_input=False, name=None"
    )
    def __init__(self, asked: Any) -> None:
        self.build(asked)

    def build(self, asked: Any) -> None:
        """All of the construction, behind the signature."""
        super().__init__()
        assert asked.parameters_split is None, "only one weight here"
        self.take(asked)
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        self.add_norm(asked)
        self.add_parameters(asked, [""])
        self.gemm_bias_unfused_add = self.parallel_mode == "row" and self.apply_bias

    def add_norm(self, asked: Any) -> None: ...

    def normalized(self, rows: Tensor) -> Tensor:
        return rows

    def _get_weight_tensors(self) -> list[Tensor]:
        return [self.weight]

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        self.prepare(inp)
        rows = communicate(self.normalized(inp), self, "column")
        size, adds = rows.shape[:-1].numel(), self.apply_bias and not self.gemm_bias_unfused_add
        out = communicate(self.multiply(rows, [size], [""], is_first_microbatch, adds), self, "row")
        if self.gemm_bias_unfused_add:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out

    def backward_dw(self) -> None:
        self.store_wgrads([""])


class LayerNormLinear(Linear):
    """Not a Linear there."""

    @takes(
        f"self, in_features, out_features, eps=1e-5, {COMMON}, init_method=None, bias=True, "
        f"normalization='LayerNorm', return_bias=False, params_dtype=None, {NORMED}"
    )
    def __init__(self, asked: Any) -> None:
        assert not asked.return_layernorm_output, "not here"
        self.build(asked)

    def add_norm(self, asked: Any) -> None:
        self.eps, self.normalization = asked.eps, asked.normalization
        self.zero_centered_gamma, self.layer_norm_bias = asked.zero_centered_gamma, None
        names = ["weight"] if asked.normalization == "RMSNorm" else ["weight", "bias"]
        for name in names:
            value = 1.0 - asked.zero_centered_gamma if name == "weight" else 0.0
            made = {"device": asked.device, "dtype": asked.params_dtype}
            param: Any = nn.Parameter(torch.full((asked.in_features,), value, **made))
            param.sequence_parallel = self.sequence_parallel
            vars(self).pop(f"layer_norm_{name}", None)
            self.register_parameter(f"layer_norm_{name}", param)

    def normalized(self, rows: Tensor) -> Tensor:
        scale = self.layer_norm_weight + self.zero_centered_gamma
        return normalize(rows, scale, self.layer_norm_bias, self.eps)


class GroupedLinear(TransformerEngineBaseModule):
    @takes(
        f"self, num_gemms, in_features, out_features, {COMMON}, rng_tracker_name=None, "
        f"init_method=None, {BIAS}, parallel_mode=None, device='cuda', ub_overlap_rs=False, "
        "ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, save_original_input=False, "
        "name=None"
    )
    def __init__(self, asked: Any) -> None:
        super().__init__()
        self.num_gemms = asked.num_gemms
        self.take(asked)
        if self.tp_size > 1 and self.use_bias:
            raise ValueError("GroupedLinear doesn't support bias when TP > 1.")
        self.add_parameters(asked, self._numbers())

    def _numbers(self) -> list[str]:
        return [str(number) for number in range(self.num_gemms)]

    def _get_weight_tensors(self) -> list[Tensor]:
        return [getattr(self, f"weight{number}") for number in self._numbers()]

    def forward(
        self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        self.prepare(inp, self.num_gemms)
        args = (list(m_splits), self._numbers(), is_first_microbatch, self.apply_bias)
        out = self.multiply(inp, *args)
        biases = [getattr(self, f"bias{number}") for number in self._numbers()]
        return (out, biases) if self.return_bias else out

    def backward_dw(self) -> None:
        self.store_wgrads(self._numbers())
