# SPDX-License-Identifier: Apache-2.0
"""Passes that are replayed as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from ds_moe_ext.schedule.graphs import WARM_UPS
from tests.gpu.test_sync import no_waiting
from tests.test_graphs import (
    ALONE,
    PADDED,
    UNRECORDED,
    Batch,
    Like,
    alike,
    check_replays,
    forward,
    routed_by,
    step,
    weights_of,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
STRATEGIES = {"padded": PADDED, "an EP rank": ALONE}
LIKES = {"padded": (torch.bfloat16, torch.float32, torch.float64), "an EP rank": (torch.bfloat16,)}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, dtypes in LIKES.items() for dtype in dtypes]
)
def test_replayed_passes_are_those_of_the_program(name: str, dtype: torch.dtype) -> None:
    check_replays(STRATEGIES[name], Like(CUDA, dtype))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_replayed_pass_waits_for_nothing(name: str) -> None:
    like = Like(CUDA, torch.bfloat16)
    weights, routed = weights_of(like), routed_by(STRATEGIES[name])
    batches = [Batch(number, like=like) for number in range(WARM_UPS + 1)]
    for batch in batches:
        step(routed, batch, weights)
    x_TD, expert_TK, score_TK, grad_TD = Batch(99, like=like).drawn()
    with no_waiting(CUDA):
        routed.rows.begin(is_training=True)
        y_TD = routed(x_TD, expert_TK, score_TK, weights)
        torch.autograd.grad(y_TD, (x_TD, score_TK, *weights), grad_TD)
    assert routed.graph_use.num_replayed == 2


def test_batches_under_way_on_streams_of_their_own() -> None:
    like = Like(CUDA, torch.bfloat16)
    weights, routed = weights_of(like), routed_by(PADDED)
    plain = routed_by(UNRECORDED)
    for number in range(WARM_UPS):
        step(routed, Batch(number, like=like), weights)
    streams = [torch.cuda.Stream(CUDA) for _ in range(2)]
    for number in range(4):
        batches = [Batch(10 * number + each, like=like) for each in range(2)]
        runs = []
        for batch, stream in zip(batches, streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                runs.append(forward(routed, batch, weights))
        torch.cuda.synchronize()
        for batch, (y_TD, leaves, grad_TD) in zip(batches, runs):
            grads = torch.autograd.grad(y_TD, (*leaves, *weights), grad_TD)
            torch.cuda.synchronize()
            assert alike([y_TD.detach(), *grads], step(plain, batch, weights))
        streams.reverse()
