# SPDX-License-Identifier: Apache-2.0
"""What the host computes between two layers, as it is timed."""

from __future__ import annotations

import pytest
import torch

from ds_moe_ext.moe.observation import TasksSeen, Windows


@pytest.mark.parametrize("computes", [True, False])
def test_windows_of_two_steps(computes: bool) -> None:
    """A block that is a layer alone has none in backward; what is left of a step is not timed in
    the next."""
    seen = TasksSeen(is_wanted=True)
    windows = Windows(1, (seen,))
    for _ in range(2):
        block_input = torch.ones(2, requires_grad=True) * 1.0
        windows.block_begins(block_input)
        x = block_input * 2 if computes else block_input
        windows.layer_begins(x)
        x.sum().backward()
        names = [str(timed.task) for timed in seen.take()]
        assert names == ["attention[1,0]", "attention'[1,0]"][: 1 + computes]
