# SPDX-License-Identifier: Apache-2.0
"""What all linears have: fp8's quantizers and replicas of weights, parameters, products.

Methods without an underscore that are not of the real one: ``take``, ``add_parameters``,
``prepare``, ``multiply``, ``store_wgrads``.
"""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, RecipeState


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """NaN, where the real one has what lay in memory."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


class WeightGradStore:
    """Products of a backward that are left for later."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context: Any = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensor_list: list[Any], func: Callable[..., Any]) -> None:
        self.context.put([tensor_list, func])

    def pop(self) -> tuple[Any, list[Any]]:
        tensor_list, func = self.context.get(block=False)
        return func(*tensor_list), tensor_list


class TransformerEngineBaseModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8, self.fp8_calibration, self.fp8_initialized = False, False, False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, Any] = {"scaling_fwd": {}, "scaling_bwd": {}}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.FP8_PARAMETERS
        self._fp8_workspaces: dict[str, Tensor] = {}
        self._offsets = {"input": 0, "weight": 1, "output": 2, "grad_output": 0, "grad_input": 1}
        self._num_fp8_tensors_per_gemm = {"fwd": 3, "bwd": 2}
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []
        self.wgrad_store: Any = None

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group, self.tp_group_initialized = tp_group, True

    # fp8.

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        key, mode = ("scaling_fwd", "forward") if fwd else ("scaling_bwd", "backward")
        before = self.fp8_meta.get(key)
        if self.fp8_meta_tensors_initialized and type(before.recipe) is type(recipe):
            return
        self.fp8_meta[key] = RecipeState(
            recipe, mode, self.fp8_meta["num_gemms"] * (3 if fwd else 2)
        )
        self.quantizers[key] = self.fp8_meta[key].make_quantizers()

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        self.set_meta_tensor(True, recipe)
        self.set_meta_tensor(False, recipe)
        self.fp8_meta_tensors_initialized = True

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        state, meta = FP8GlobalStateManager, self.fp8_meta
        self.fp8, self.fp8_calibration = state.is_fp8_enabled(), state.is_fp8_calibration()
        meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        if not meta["fp8_checkpoint"]:
            self.fp8_initialized = False
        elif not self.fp8_initialized or meta["recipe"] != state.get_fp8_recipe():
            if "recipe" in meta and type(meta["recipe"]) is not type(state.get_fp8_recipe()):
                self._fp8_workspaces.clear()
            meta.update(recipe=state.get_fp8_recipe(), num_gemms=num_gemms)
            meta["fp8_group"] = state.get_fp8_group()
            self.init_fp8_meta_tensors(meta["recipe"])
            self.fp8_initialized = True

    def get_weight_workspace(
        self, *, tensor: Tensor, quantizer: Any, cache_name: str | None, update_workspace: bool
    ) -> Tensor:
        if cache_name is None:
            return quantizer.quantize(tensor)
        if update_workspace or cache_name not in self._fp8_workspaces:
            self._fp8_workspaces[cache_name] = quantizer.quantize(tensor)
        return self._fp8_workspaces[cache_name]

    def get_extra_state(self) -> Tensor:
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8 or self.fp8_calibration):
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": self.fp8_meta["recipe"]}
        for way in ("fwd", "bwd") if state["recipe"].delayed() else ():
            state[f"scale_{way}"] = self.fp8_meta[f"scaling_{way}"].scale.clone()
            state[f"amax_history_{way}"] = self.fp8_meta[f"scaling_{way}"].amax_history.clone()
        plain = (bool, int, float, str, tuple, list)
        extra = {key: value for key, value in self.fp8_meta.items() if isinstance(value, plain)}
        state["extra_fp8_variables"] = extra
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is None or state.numel() == 0:
            return
        reported = pickle.loads(state.detach().cpu().numpy().tobytes())
        self.fp8_meta.update(reported["extra_fp8_variables"], recipe=reported["recipe"])
        self.init_fp8_meta_tensors(reported["recipe"])
        for way in ("fwd", "bwd") if reported["recipe"].delayed() else ():
            self.fp8_meta[f"scaling_{way}"].scale.copy_(reported[f"scale_{way}"])
            self.fp8_meta[f"scaling_{way}"].amax_history.copy_(reported[f"amax_history_{way}"])

    # Construction.

    def take(self, asked: Any) -> None:
        """What was asked, as attributes: sizes are those of this tensor parallel rank."""
        for key in ("in_features", "out_features", "fuse_wgrad_accumulation", "return_bias"):
            vars(self)[key] = vars(asked)[key]
        self.get_rng_state_tracker, self.ub_name = asked.get_rng_state_tracker, asked.ub_name
        self.use_bias, self.apply_bias = asked.bias, asked.bias and not asked.return_bias
        for key in ("rng_tracker_name", "save_original_input", "symmetric_ar_type", "name"):
            if key in vars(asked):
                vars(self)[key] = vars(asked)[key]
        self.wgrad_store = WeightGradStore(asked.delay_wgrad_compute)
        self.tp_size = asked.tp_size if asked.tp_group is None else asked.tp_group.size()
        if asked.tp_group is not None or self.tp_size == 1:
            self.set_tensor_parallel_group(asked.tp_group)
        self.parallel_mode = asked.parallel_mode
        if self.parallel_mode == "column":
            self.out_features //= self.tp_size
        elif self.parallel_mode == "row":
            self.in_features //= self.tp_size
        self.sequence_parallel = self.tp_size > 1 and asked.sequence_parallel

    def add_parameters(self, asked: Any, suffixes: Sequence[str]) -> None:
        """A weight and a bias for each suffix; the bias may be an empty tensor."""
        made: dict[str, Any] = {"device": asked.device, "dtype": asked.params_dtype}
        tracker, name = asked.get_rng_state_tracker, vars(self).get("rng_tracker_name")
        dim = 1 if self.parallel_mode == "row" else 0
        parallel = {"tensor_model_parallel": True, "partition_stride": 1}
        later = {"skip_backward_post_hook": True} if asked.delay_wgrad_compute else {}
        for suffix in suffixes:
            weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **made))
            fork = nullcontext() if tracker is None else tracker().fork(*([name] if name else []))
            with fork:
                (asked.init_method or nn.init.normal_)(weight)
            vars(weight).update(parallel, partition_dim=dim, **later)
            self.register_parameter(f"weight{suffix}", weight)
            if not self.use_bias:
                setattr(self, f"bias{suffix}", torch.empty(0, **made))
                continue
            bias = nn.Parameter(torch.zeros(self.out_features, **made))
            if self.parallel_mode == "column":
                vars(bias).update(parallel, partition_dim=0)
            elif self.parallel_mode == "row":
                vars(bias).update(sequence_parallel=self.sequence_parallel)
            vars(bias).update(later)
            self.register_parameter(f"bias{suffix}", bias)

    # Products.

    def prepare(self, inp: Tensor, num_gemms: int = 1) -> None:
        for name, param in self.named_parameters():
            assert param.dtype == inp.dtype, f"input is {inp.dtype}, {name!r} {param.dtype}"
        self.activation_dtype = inp.dtype
        self.init_fp8_metadata(num_gemms=num_gemms)

    def multiply(
        self,
        rows: Tensor,
        m_splits: list[int],
        suffixes: Sequence[str],
        is_first_microbatch: bool | None,
        adds_bias: bool,
    ) -> Tensor:
        """Each split of rows by its weight."""
        of = {}
        for kind in ("input", "weight", "grad_output") if self.fp8 else ():
            way = "bwd" if kind == "grad_output" else "fwd"
            stride, offset = self._num_fp8_tensors_per_gemm[way], self._offsets[kind]
            made = self.quantizers[f"scaling_{way}"]
            of[kind] = [made[offset + stride * number] for number in range(len(suffixes))]
        how = SimpleNamespace(
            module=self,
            quantizers=of,
            names=[f"weight{suffix}" for suffix in suffixes],
            is_first=is_first_microbatch,
            adds_bias=adds_bias,
        )
        biases = [getattr(self, f"bias{suffix}") for suffix in suffixes]
        return Products.apply(rows, m_splits, how, *self._get_weight_tensors(), *biases)

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], None]
    ) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def store_wgrads(self, suffixes: Sequence[str]) -> None:
        """The products that were delayed; gradients are set, not added."""
        if not self.wgrad_store.delay_wgrad_compute():
            return
        grad_biases, (_, _, outs) = self.wgrad_store.pop()
        for suffix, out, grad in zip(suffixes, outs, grad_biases):
            weight, bias = getattr(self, f"weight{suffix}"), getattr(self, f"bias{suffix}")
            if not self.fuse_wgrad_accumulation:
                weight.grad = out.to(weight.dtype)
            if self.use_bias and bias.grad is None:
                bias.grad = grad
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class Products(torch.autograd.Function):
    """Splits of rows, each by a weight: ``_Linear`` and ``_GroupedLinear`` there."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, m_splits: list[int], how: Any, *tensors: Tensor) -> Tensor:
        weights, biases = tensors[: len(m_splits)], tensors[len(m_splits) :]
        inputs: Sequence[Tensor] = torch.split(inp.reshape(-1, inp.shape[-1]), m_splits)
        used: Sequence[Tensor] = weights
        if how.quantizers:
            inputs = [q.quantize(part) for q, part in zip(how.quantizers["input"], inputs)]
            used = [
                how.module.get_weight_workspace(
                    tensor=weight,
                    quantizer=quantizer,
                    cache_name=None if how.is_first is None else name,
                    update_workspace=how.is_first is None or how.is_first,
                )
                for weight, quantizer, name in zip(weights, how.quantizers["weight"], how.names)
            ]
        added = biases if how.adds_bias else [None] * len(weights)
        parts = [nn.functional.linear(*given) for given in zip(inputs, used, added)]
        ctx.save_for_backward(*inputs, *used)
        ctx.how, ctx.m_splits, ctx.shape, ctx.weights = how, m_splits, inp.shape, weights
        return torch.cat(parts).view(*inp.shape[:-1], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        how, module, weights, number = ctx.how, ctx.how.module, ctx.weights, len(ctx.m_splits)
        inputs, used = ctx.saved_tensors[:number], ctx.saved_tensors[number:]
        exact = torch.split(grad_output.reshape(-1, grad_output.shape[-1]), ctx.m_splits)
        grads: Sequence[Tensor] = exact
        if how.quantizers:
            grads = [q.quantize(part) for q, part in zip(how.quantizers["grad_output"], exact)]
        dgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = torch.cat([grad @ weight for grad, weight in zip(grads, used)]).view(ctx.shape)
        fused = module.fuse_wgrad_accumulation
        overwrites = how.is_first or vars(weights[0]).get("overwrite_main_grad", False)

        def multiply(inputs: Any, grads: Any, outs: Any) -> list[Tensor]:
            for part, grad, out in zip(inputs, grads, outs):
                product = grad.to(out.dtype).t() @ part.to(out.dtype)
                out.copy_(product) if overwrites or not fused else out.add_(product)
            return [grad.sum(0) for grad in exact]

        wgrads: list[Any] = [None] * number
        biases: list[Any] = [None] * number
        if weights[0].requires_grad:  # decides for all
            if not fused:
                outs = [torch.full_like(weight, torch.nan) for weight in used]
            elif hasattr(weights[0], "__fsdp_param__"):
                outs = [weight.get_main_grad() for weight in weights]
            else:
                outs = [weight.main_grad for weight in weights]
            if module.wgrad_store.delay_wgrad_compute():
                module.wgrad_store.put([inputs, grads, outs], multiply)
            else:
                found = multiply(inputs, grads, outs)
                biases = found if how.adds_bias else biases
            wgrads = [_handed(w, out) for w, out in zip(weights, outs)] if fused else outs
        return dgrad, None, None, *wgrads, *biases


def _handed(weight: Any, out: Tensor) -> Tensor | None:
    """Autograd's gradient where it is in main_grad: what makes Megatron's hooks run."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(out.shape), weight.dtype, getattr(weight, "zero_out_wgrad", False))
