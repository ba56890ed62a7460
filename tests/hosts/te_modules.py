# SPDX-License-Identifier: Apache-2.0
"""What the stand-in does as the real modules do, on them alone: run by ``test_te_stand_in.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformer_engine.common import recipe
from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding, GroupedLinear, fp8_autocast

SPLITS = [3, 0, 5]
torch.manual_seed(3)
ROWS = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)


def made(**named: bool) -> GroupedLinear:
    return GroupedLinear(
        3, 4, 6, bias=False, params_dtype=torch.float64, device="cpu", init_method=_init, **named
    )


def _init(weight: Tensor) -> None:
    weight.data.copy_(torch.arange(weight.numel(), dtype=torch.float64).view_as(weight) / 10)


def grads(linear: GroupedLinear, is_first: bool | None = None) -> list[Tensor | None]:
    for weight in linear.parameters():
        weight.grad = None
    linear(ROWS, SPLITS, is_first_microbatch=is_first).sum().backward()
    return [weight.grad for weight in linear.parameters()]


def fused_gradients_are_set_first_and_then_added() -> None:
    exact = grads(made())
    linear = made(fuse_wgrad_accumulation=True)
    for weight in linear.parameters():
        weight.main_grad = torch.full_like(weight, 7)
    assert grads(linear, is_first=True) == [None] * 3
    for times in (1, 2):
        for weight, grad in zip(linear.parameters(), exact):
            torch.testing.assert_close(weight.main_grad, times * grad)
        linear.weight2.grad_added_to_main_grad = False
        found = grads(linear, is_first=False)
        assert linear.weight2.grad_added_to_main_grad
        assert found[2] is not None and found[2].isnan().all()


def delayed_gradients_come_with_backward_dw() -> None:
    exact, called = grads(made()), []
    assert made()(ROWS[:0], [0, 0, 0]).shape == (0, 6)
    linear = made(delay_wgrad_compute=True)
    linear.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(linear.weight0.grad))
    assert all(grad is not None and grad.isnan().all() for grad in grads(linear))
    linear.backward_dw()
    torch.testing.assert_close([weight.grad for weight in linear.parameters()], exact)
    assert len(called) == 1


def replicas_in_fp8_are_made_in_the_first_micro_batch() -> None:
    linear, exact = made(), made()(ROWS, SPLITS)
    with torch.no_grad(), fp8_autocast(fp8_recipe=recipe.Float8CurrentScaling()):
        before = linear(ROWS, SPLITS, is_first_microbatch=True)
        assert not torch.equal(before, exact)
        torch.testing.assert_close(before, exact, rtol=0.1, atol=0.3)
        linear.weight0 += 1
        torch.testing.assert_close(linear(ROWS, SPLITS, is_first_microbatch=False), before)
        changed = linear(ROWS, SPLITS, is_first_microbatch=True)
        assert not torch.equal(changed[:3], before[:3]) and torch.equal(changed[3:], before[3:])
        torch.testing.assert_close(linear(ROWS, SPLITS), changed)
    assert set(linear._fp8_workspaces) == {"weight0", "weight1", "weight2"}


def more_gemms_need_quantizers_of_their_own() -> None:
    linear = made()
    with fp8_autocast(fp8_recipe=recipe.MXFP8BlockScaling()):
        linear(ROWS, SPLITS)
        linear.weight3, linear.bias3 = linear.weight0.detach().clone(), linear.bias0
        linear.num_gemms = 4
        with pytest.raises(IndexError):
            linear(ROWS, [*SPLITS[:2], 2, 3])
        linear.fp8_initialized = linear.fp8_meta_tensors_initialized = False
        linear(ROWS, [*SPLITS[:2], 2, 3])
    assert len(linear.quantizers["scaling_fwd"]) == 12
    assert len(linear.quantizers["scaling_bwd"]) == 8


def tensors_of_a_module_take_part_as_weights() -> None:
    """A tensor that is no parameter, under the name of one more weight."""
    (first, second, third), linear = grads(made()), made(fuse_wgrad_accumulation=True)
    state = linear.state_dict()
    more = linear.weight2.detach().clone().requires_grad_()
    linear.weight3, linear.bias3, linear.num_gemms = more, linear.bias0, 4
    for weight in (*linear.parameters(), more):
        weight.main_grad = torch.zeros_like(weight)
    linear(ROWS, [*SPLITS[:2], 2, 3]).sum().backward()
    found = [linear.weight0.main_grad, linear.weight1.main_grad]
    torch.testing.assert_close(
        [*found, linear.weight2.main_grad + more.main_grad], [first, second, third]
    )
    assert more.grad is None and linear.state_dict().keys() == state.keys()


def extra_state_has_what_delayed_scaling_keeps() -> None:
    linear, other = made(), made()
    assert linear.get_extra_state().numel() == 0
    with fp8_autocast(fp8_recipe=recipe.DelayedScaling(amax_history_len=2)):
        linear(ROWS, SPLITS).sum().backward()
    other.load_state_dict(linear.state_dict())
    for way, size in (("scaling_fwd", 9), ("scaling_bwd", 6)):
        assert other.fp8_meta[way].amax_history.shape == (2, size)
        assert torch.equal(other.fp8_meta[way].scale, linear.fp8_meta[way].scale)


def padding_is_taken_away_again() -> None:
    with fp8_autocast(fp8_recipe=recipe.MXFP8BlockScaling()):
        padded, splits = Fp8Padding(3)(ROWS, SPLITS)
        assert splits == [32, 0, 32] and len(padded) == 64
        assert torch.equal(Fp8Unpadding(3)(padded, SPLITS), ROWS)


if __name__ == "__main__":
    fused_gradients_are_set_first_and_then_added()
    delayed_gradients_come_with_backward_dw()
    replicas_in_fp8_are_made_in_the_first_micro_batch()
    more_gemms_need_quantizers_of_their_own()
    tensors_of_a_module_take_part_as_weights()
    extra_state_has_what_delayed_scaling_keeps()
    padding_is_taken_away_again()
