# SPDX-License-Identifier: Apache-2.0
"""Zebra on two clusters, against seconds that were added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ds_moe_ext.core.hardware import Hardware, Link
from ds_moe_ext.planning.model_shape import OnItsWay, Training
from ds_moe_ext.planning.prices import RowBytes
from ds_moe_ext.planning.zebra_price import ZebraPrice, price_zebra
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
    # DistEP has one stripe and moves nothing.
    assert price.dist_s == pytest.approx(rows_s, rel=1e-3)
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


def test_groups_are_of_whole_nodes() -> None:
    """And of fewer ranks where experts do not divide otherwise."""
    training = Training(num_ranks=4, length=TOKENS, micro_batch=4, hides_gradients=True)

    def price(ranks_per_node: int, rows_LE: np.ndarray = EVEN_LE, **model: int) -> ZebraPrice:
        clusters = [
            replace(one_rank(speed), num_nodes=2 // ranks_per_node, ranks_per_node=ranks_per_node)
            for speed in (1e6, 2e6)
        ]
        return price_zebra(clusters, tiny(**model), training, rows_LE, passes=0)

    whole = price(2)
    assert (whole.shape.attention_ranks, whole.num_groups, whole.attention) == (2, 1, 1)
    either = price(1)  # two groups of one and one would be as good a shape
    assert either.step_s <= whole.step_s
    odd = price(2, np.full((1, 3), 16), num_local_experts=3)  # which two ranks do not divide
    assert (odd.shape.attention_ranks, odd.shape.expert_ranks, odd.num_groups) == (1, 1, 2)


def test_more_stripes_where_there_are_samples() -> None:
    """Each overlaps better, and none has fewer than a sample."""
    clusters = [one_rank(1e6), one_rank(1.5e6)]

    def stripes(micro_batch: int) -> int:
        training = Training(
            num_ranks=2, length=TOKENS, micro_batch=micro_batch, hides_gradients=True
        )
        price = price_zebra(clusters, tiny(), training, EVEN_LE, passes=0)
        assert price.step_s < price.dist_s
        return price.shape.num_stripes

    assert stripes(1) == 2 and stripes(8) == 16


def test_the_busiest_expert_rank_s_card_counts() -> None:
    clusters = [
        replace(one_rank(speed), num_nodes=2, inter=Link(bytes_per_s=10.0)) for speed in (1e6, 2e6)
    ]
    training = Training(num_ranks=4, length=TOKENS, hides_gradients=True)
    even, skewed = (
        price_zebra(clusters, tiny(), training, np.array([rows_E]), passes=0)
        for rows_E in ([12, 12, 12, 12], [24, 12, 6, 6])
    )
    assert skewed.dist_s / even.dist_s == pytest.approx(1.5, rel=0.02)


def test_rows_go_once_where_that_is_faster() -> None:
    """To a node where roles have whole ones of as many ranks, and rows have no codec."""
    training = Training(num_ranks=4, length=TOKENS, hides_gradients=True)
    coded = OnItsWay(RowBytes(between=8.0, within=8.0), 0.0)

    def price(*per_node: int, on_its_way: OnItsWay | None = None) -> int:
        clusters = [
            replace(
                one_rank(speed),
                num_nodes=2 // ranks,
                ranks_per_node=ranks,
                inter=Link(bytes_per_s=10.0 * ranks),
            )
            for ranks, speed in zip(per_node, (1e6, 2e6), strict=True)
        ]
        asked = clusters, tiny(), training, EVEN_LE
        both = price_zebra(*asked, passes=0, on_its_way=on_its_way, sends_once=(False, True))
        never = price_zebra(*asked, passes=0, on_its_way=on_its_way)
        assert never.once_to == 0 and both.step_s <= never.step_s
        assert (both.step_s < never.step_s) == (both.once_to > 0)
        return both.once_to

    assert (price(2, 2), price(1, 1), price(1, 2)) == (2, 1, 1)
    assert price(2, 2, on_its_way=coded) == 1


def test_what_cannot_be() -> None:
    training = Training(num_ranks=2, length=TOKENS)
    with pytest.raises(ValueError, match="does not fit"):
        price_zebra(
            [one_rank(1.0, 2**31), one_rank(2.0, 2**31)], tiny(), training, EVEN_LE, passes=0
        )
    three = replace(one_rank(1.0), num_nodes=3)
    with pytest.raises(ValueError, match="1 attention ranks and 3 expert ranks make no groups"):
        price_zebra([three, one_rank(2.0)], tiny(), training, EVEN_LE, passes=0)
    slow = price_zebra([one_rank(1.0), one_rank(1e14)], tiny(), training, EVEN_LE, passes=0)
    assert sum(slow.moved_L) == 7  # of 8: the expert rank keeps one
    with pytest.raises(ValueError, match=r"an attention rank wants .* bytes besides experts"):
        small = [one_rank(1.0), one_rank(2.0, 2**31 + 100)]
        price_zebra(small, tiny(), training, EVEN_LE, passes=0)
    with pytest.raises(ValueError, match=r"since 1 attention ranks have memory for no more; take"):
        small = [one_rank(1.0, 2**31), one_rank(2.0, 2**31 + 9000)]
        price_zebra(small, tiny(), training, EVEN_LE, passes=0)
    with pytest.raises(
        ValueError, match=r"1 expert ranks lack memory for 8 of 8 experts.*at most 0 may"
    ):
        full = [one_rank(1.0, 2**31), one_rank(2.0)]
        full = [replace(full[0]), replace(full[1], num_nodes=3)]
        three = Training(num_ranks=4, length=TOKENS, micro_batch=3)
        price_zebra(full, tiny(), three, EVEN_LE, passes=0, is_megatron=True)
