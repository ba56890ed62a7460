# SPDX-License-Identifier: Apache-2.0
"""Lines of a pipeline: by hardware files, and the costs of a layer from them. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_moe_ext.core.hardware import (
    Collectives,
    Device,
    Flops,
    Hardware,
    Link,
    Product,
    Products,
    read_hardware,
)
from ds_moe_ext.planning.exchange_costs import (
    LayerRows,
    PipelineLines,
    Usage,
    described_lines,
    layer_costs,
)
from ds_moe_ext.planning.pipeline_degrees import best_degree
from ds_moe_ext.planning.prices import FREE, AllReduce, Line

FOLDER = Path(__file__).parents[2] / "configs" / "hardware"
GPU = Device(name="a GPU", flops_per_s=Flops(bf16=300e12, fp16=200e12))
WIRES = {
    "intra": Link(bytes_per_s=100e9, latency_s=1e-6),
    "inter": Link(bytes_per_s=10e9, latency_s=5e-6),
}


def cluster(**known: Any) -> Hardware:
    sizes = {"name": "ours", "source": "a test", "num_nodes": 2, "ranks_per_node": 4}
    return Hardware(**{**sizes, "device": GPU, **WIRES, **known})


def usage(num_ep_ranks: int, etp_size: int, **changed: Any) -> Usage:
    usual = {
        "num_ranks": num_ep_ranks * etp_size,
        "dense_ranks_per_node": 1,
        "number_type": "bf16",
        "row_multiply_adds": 3e6,
        "num_products": 2,
        "element_bytes": 2,
        "expert_bytes": 0,
    }
    return Usage(num_ep_ranks=num_ep_ranks, etp_size=etp_size, **{**usual, **changed})


# Costs of a layer.

lines = st.builds(Line, alpha_s=st.floats(0, 1e-2), beta_s=st.floats(0, 1e-6))
all_lines = st.builds(
    PipelineLines,
    all_to_all=lines,
    all_gather=lines,
    reduce_scatter=lines,
    expert=lines,
    all_reduce=lines,
)


@settings(deadline=None, derandomize=True)
@given(
    all_lines,
    st.integers(0, 10**5),
    st.integers(1, 8),
    st.integers(1, 10**4),
    st.integers(1, 16),
)
def test_a_chunk_costs_what_its_units_cost(
    ours: PipelineLines, sent: int, etp_size: int, row_bytes: int, degree: int
) -> None:
    def seconds(line: Line, units: float) -> float:
        return line.alpha_s + line.beta_s * units / degree

    gathered = etp_size * sent
    costs = layer_costs(
        ours, LayerRows(sent=sent, gathered=gathered, row_bytes=row_bytes, etp_row_bytes=row_bytes)
    )
    _, *found_s = (float(each) for each in costs.cut(np.array(degree)))
    expert_s = seconds(ours.expert, gathered)
    rows_s = [
        seconds(ours.all_to_all, sent * row_bytes),
        seconds(ours.all_gather, gathered * row_bytes),
        seconds(ours.reduce_scatter, gathered * row_bytes),
    ]
    assert found_s == pytest.approx([*rows_s, expert_s])
    _, *back_s = (float(each) for each in costs.in_backward().cut(np.array(degree)))
    assert back_s == pytest.approx([*rows_s, 2 * expert_s])


def test_gradients_are_reduced_by_elements() -> None:
    ours = described_lines(cluster(), usage(2, 4))
    assert ours.gradients == AllReduce(ours.all_reduce.alpha_s, ours.all_reduce.beta_s)
    assert ours.gradients.seconds(1000) == pytest.approx(5e-6 + 1000 * ours.all_reduce.beta_s)


def test_seconds_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beta_s is -1.0; costs are finite and not below zero"):
        Line(beta_s=-1.0)


def test_golden_layer_of_testbed_a() -> None:
    """Spec, G5: F = 2.4 of 4096 tokens, M = 1600, H = 6400, eight ranks an EP rank, six EP
    ranks."""
    hardware = read_hardware(FOLDER / "fsmoe_a.json")
    ours = described_lines(hardware, usage(6, 8, number_type="fp32", element_bytes=4))
    row_multiply_adds = 2 * 1600 * 6400 / 8
    fitted = Line(alpha_s=0.70623e-3, beta_s=7.6571e-14 * row_multiply_adds)
    rows = LayerRows(
        sent=2.4 * 4096 / 8, gathered=2.4 * 4096, row_bytes=4 * 1600, etp_row_bytes=4 * 1600
    )
    forward = layer_costs(replace(ours, expert=fitted), rows)
    whole = forward.cut(np.array([1]))
    found_ms = [1e3 * float(seconds[0]) for seconds in whole[1:]]
    assert found_ms == pytest.approx([4.849, 4.031, 3.883, 2.633], rel=1e-3)
    plans = [best_degree(costs, 0.0, 8) for costs in (forward, forward.in_backward())]
    assert [plan.degree for plan in plans] == [4, 3]
    assert [1e3 * plan.time_s for plan in plans] == pytest.approx([13.951, 14.834], rel=1e-3)
    assert ours.all_reduce.beta_s == pytest.approx(4.9512e-9, rel=1e-4)


# From hardware files.


def assert_line(found: Line, alpha_s: float, beta_s: float) -> None:
    assert (found.alpha_s, found.beta_s) == pytest.approx((alpha_s, beta_s), rel=1e-12)


def test_links_where_nothing_was_measured() -> None:
    """Two nodes of four ranks: half of what four ranks give leaves over one link of 10 GB/s."""
    ours = described_lines(cluster(), usage(2, 4))
    assert_line(ours.all_to_all, 5e-6, 4 / 2 / 10e9)
    assert_line(ours.all_gather, 1e-6, 3 / 4 / 100e9)
    assert ours.reduce_scatter == ours.all_gather
    assert_line(ours.all_reduce, 5e-6, 2 * 2 * 4 / 2 / 10e9)
    assert_line(ours.expert, 0, 3e6 / 150e12)
    assert {line.r_squared for line in vars(ours).values()} == {None}
    together = described_lines(cluster(), usage(2, 4, dense_ranks_per_node=4))
    assert together.all_reduce.beta_s == pytest.approx(ours.all_reduce.beta_s / 4)


def test_ep_ranks_of_one_node() -> None:
    ours = described_lines(cluster(inter=None), usage(2, 2, dense_ranks_per_node=4))
    assert_line(ours.all_to_all, 1e-6, 1 / 2 / 100e9)
    assert_line(ours.all_gather, 1e-6, 1 / 2 / 100e9)
    assert_line(ours.all_reduce, 1e-6, 2 * 2 * 3 / 4 / 100e9)
    assert described_lines(cluster(), usage(2, 2)).all_reduce == FREE, "each has its own weights"


def test_one_rank_has_nothing_to_send() -> None:
    bare = cluster(intra=None, inter=None)
    alone = described_lines(bare, usage(1, 1))
    assert [alone.all_to_all, alone.all_gather, alone.reduce_scatter, alone.all_reduce] == [
        FREE
    ] * 4
    assert FREE.over(1e9).chunk_seconds(np.array([4])) == [0.0]
    whole_ep_ranks = described_lines(cluster(), usage(8, 1))
    assert (whole_ep_ranks.all_gather, whole_ep_ranks.reduce_scatter) == (FREE, FREE)
    assert whole_ep_ranks.all_to_all.beta_s == pytest.approx(4 / 2 / 10e9), "half leaves its node"


def test_what_was_measured_goes_before_links() -> None:
    def link(latency_s: float) -> Link:
        return Link(bytes_per_s=1e9, latency_s=latency_s, r_squared=0.999)

    measured = cluster(
        intra_collectives=Collectives(all_gather=link(1e-3), reduce_scatter=link(2e-3)),
        inter_collectives=Collectives(all_to_all=link(3e-3), all_reduce=link(4e-3)),
        device=Device(
            name="a GPU",
            flops_per_s=Flops(bf16=300e12),
            products=Products(
                bf16=Product(multiply_adds_per_s=100e12, start_s=7e-6, r_squared=0.998)
            ),
        ),
    )
    ours = described_lines(measured, usage(2, 4))
    found = (ours.all_gather, ours.reduce_scatter, ours.all_to_all)
    assert found == tuple(Line(alpha_s=n * 1e-3, beta_s=1e-9, r_squared=0.999) for n in (1, 2, 3))
    assert ours.all_reduce == Line(alpha_s=4e-3, beta_s=2e-9, r_squared=0.999)
    assert ours.expert == Line(alpha_s=2 * 7e-6, beta_s=3e6 / 100e12, r_squared=0.998)


@pytest.mark.parametrize(
    ("lacks", "asked", "expected"),
    [
        (
            {"inter": None},
            usage(2, 4),
            "what all_reduce costs; .* 'inter_collectives.all_reduce' or",
        ),
        (
            {"intra": None},
            usage(2, 4),
            "what all_gather costs; .* 'intra_collectives.all_gather' or",
        ),
        (
            {"intra": None},
            usage(4, 1),
            "what all_to_all costs; .* 'intra_collectives.all_to_all' or",
        ),
        (
            {},
            usage(2, 4, number_type="fp32"),
            "'device.products.fp32' or 'device.flops_per_s.fp32'",
        ),
        ({}, usage(2, 4, number_type="fp8"), "number_type is 'fp8'; choose fp32, tf32, fp16, bf16"),
        (
            {},
            usage(1, 8),
            "EP ranks of 8 ranks do not fit into the nodes of hardware 'ours', .* have 4",
        ),
    ],
)
def test_what_the_file_lacks_is_named(lacks: dict[str, Any], asked: Usage, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        described_lines(cluster(**lacks), asked)
