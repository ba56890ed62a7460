# SPDX-License-Identifier: Apache-2.0
"""Zebra on two clusters, against seconds that were added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_moe_ext.core.hardware import Hardware, Link
from ds_moe_ext.planning.model_shape import OnItsWay, Training
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.planning.zebra_price import price_zebra
from tests.pricing.models import cluster, tiny

TOKENS = 6
EVEN_LE = np.full((1, 4), 12)


def one_rank(multiply_adds_per_s: float, memory_bytes: int = 2**33) -> Hardware:
    hardware = cluster(multiply_adds_per_s, num_nodes=1, ranks_per_node=1)
    device = replace(hardware.device, memory_bytes=memory_bytes, memory_bytes_per_s=1e12)
    return replace(hardware, device=device, inter=Link(bytes_per_s=1e12))


def test_two_stripes_of_one_layer() -> None:
    """Experts on the slower device take all of the time; nothing that travels takes any."""
    new, old = one_rank(1000.0), one_rank(1e9)
    training = Training(num_ranks=2, length=TOKENS, hides_gradients=True)
    model = tiny(num_hidden_layers=1)
    price = price_zebra([new, old], model, training, EVEN_LE, passes=0)
    assert price.shape.attention_ranks == price.shape.expert_ranks == 1
    assert price.shape.num_stripes == 2 and price.num_groups == 1
    # 12 tokens have 2 rows each, forward and twice that in backward.
    rows_s = 3 * 12 * 2 * 96 / 1000
    (moved,) = price.moved_L
    assert moved == 3 and price.step_s == pytest.approx(rows_s * (1 - moved / 4), rel=1e-3)
    skewed_LE = np.array([[12, 0, 0, 36]])  # one expert rank has them all, whichever they are
    again = price_zebra([old, new], model, training, skewed_LE, passes=0)
    assert again.step_s == pytest.approx(price.step_s)


def test_rows_that_weigh_a_quarter_are_rows_on_links_four_times_as_fast() -> None:
    def step_s(bytes_per_s: float, on_its_way: OnItsWay | None = None) -> float:
        link = Link(bytes_per_s=bytes_per_s)
        clusters = [replace(one_rank(speed), inter=link) for speed in (1e6, 1e9)]
        training = Training(num_ranks=2, length=TOKENS, hides_gradients=True)
        price = price_zebra(clusters, tiny(), training, EVEN_LE, passes=0, on_its_way=on_its_way)
        return price.step_s

    quarter = OnItsWay(RowBytes(between=8 / 4, within=8.0), 0.0)
    assert step_s(10.0, quarter) == pytest.approx(step_s(40.0))
    assert step_s(10.0) > 1.1 * step_s(40.0)


def test_what_cannot_be() -> None:
    training = Training(num_ranks=2, length=TOKENS)
    with pytest.raises(ValueError, match="does not fit"):
        price_zebra(
            [one_rank(1.0, 2**31), one_rank(2.0, 2**31)], tiny(), training, EVEN_LE, passes=0
        )
    three = replace(one_rank(1.0), num_nodes=3)
    with pytest.raises(ValueError, match="1 attention ranks and 3 expert ranks make no groups"):
        price_zebra([three, one_rank(2.0)], tiny(), training, EVEN_LE, passes=0)
