# SPDX-License-Identifier: Apache-2.0
"""Hardware files: what they mean, what is read, what is refused. Pure."""

from __future__ import annotations

import json
import math
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
    ranks_per_node_of,
    read_hardware,
    shipped_for,
)

FOLDER = Path(__file__).parents[1] / "configs" / "hardware"
FILES = sorted(FOLDER.glob("*.json"))
GPU = Device(name="a GPU")
FAST, SLOW, MEASURED = (Link(bytes_per_s=rate) for rate in (100e9, 12.5e9, 11e9))

positive = st.floats(1e-9, 1e15)
links = st.builds(Link, bytes_per_s=positive, latency_s=st.floats(0, 1), r_squared=st.none())
maybe_links = st.none() | links
products = st.builds(
    Product, multiply_adds_per_s=positive, start_s=st.floats(0, 1), r_squared=st.floats(-1, 1)
)
collectives = st.builds(
    Collectives, all_to_all=maybe_links, all_reduce=maybe_links, copy=maybe_links
)
clusters = st.builds(
    Hardware,
    name=st.text(),
    source=st.text(),
    num_nodes=st.integers(1, 1000),
    ranks_per_node=st.integers(1, 64),
    device=st.builds(
        Device,
        name=st.text(),
        memory_bytes=st.none() | st.integers(1, 2**50),
        flops_per_s=st.builds(Flops, fp32=st.none() | positive, bf16=st.none() | positive),
        products=st.builds(Products, fp32=st.none() | products, bf16=st.none() | products),
    ),
    intra=maybe_links,
    inter=maybe_links,
    intra_collectives=collectives,
    inter_collectives=collectives,
    copy=maybe_links,
)


def cluster(**known: Any) -> Hardware:
    return Hardware(
        **{"name": "ours", "source": "a test", "num_nodes": 2, "ranks_per_node": 4, "device": GPU}
        | known
    )


# What it means.


@settings(deadline=None, derandomize=True)
@given(links, st.integers(0, 10**12))
def test_a_link_takes_as_long_as_the_window_that_its_bytes_fit_in(link: Link, size: int) -> None:
    within = link.bytes_within(link.seconds(size))
    assert within == pytest.approx(size, rel=1e-6, abs=link.latency_s * link.bytes_per_s * 1e-6)


def test_nothing_fits_into_less_than_the_latency() -> None:
    assert Link(bytes_per_s=1e9, latency_s=1e-3).bytes_within(0.5e-3) == 0.0


def test_overlap_degree_of_the_spec() -> None:
    """HECATE, H7: 5 ms, 12.5 GB/s, an expert of 4,718,592 bytes."""
    num_hidden = SLOW.bytes_within(5e-3) / 4_718_592
    assert num_hidden == pytest.approx(13.245, abs=1e-3)
    late = Link(bytes_per_s=12.5e9, latency_s=94e-6)  # rule 50
    assert late.bytes_within(5e-3) / 4_718_592 == pytest.approx(13.245 - 0.249, abs=1e-3)


def test_nodes_of_ep_ranks() -> None:
    ours = cluster()
    assert ours.num_ranks == 8
    np.testing.assert_array_equal(ours.node_of_ep_ranks(8), [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(ours.node_of_ep_ranks(6), [0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(ours.node_of_ep_ranks(4, etp_size=2), [0, 0, 1, 1])


def test_replicas_wait_for_the_slow_level_and_what_was_measured_counts() -> None:
    stated = cluster(intra=FAST, inter=SLOW)
    assert stated.copy_link(8) == SLOW
    assert stated.copy_link(4) == FAST
    between = Collectives(copy=MEASURED)
    measured = cluster(intra=FAST, inter=SLOW, inter_collectives=between)
    assert measured.copy_link(8) == MEASURED
    assert measured.copy_link(4) == FAST
    over_all = Link(bytes_per_s=10e9)
    measured = cluster(intra=FAST, inter=SLOW, inter_collectives=between, copy=over_all)
    assert measured.copy_link(8) == over_all
    within = Collectives(copy=MEASURED)
    assert cluster(intra=FAST, intra_collectives=within, copy=over_all).copy_link(4) == MEASURED


def test_a_lone_rank_needs_no_link() -> None:
    assert cluster().copy_link(1).seconds(2**40) < 1e-5
    assert cluster(intra=FAST).copy_link(1) == FAST


def test_what_is_not_known_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"between nodes, but 8 ranks with 4 .* key 'inter'"):
        cluster(intra=FAST).copy_link(8)
    with pytest.raises(ValueError, match=r"within a node, but 3 ranks .* key 'intra'"):
        cluster(inter=SLOW).copy_link(3)


def test_ranks_of_a_node_by_host_names() -> None:
    assert ranks_per_node_of(["a"]) == 1
    assert ranks_per_node_of(["a", "a", "a"]) == 3
    assert ranks_per_node_of(["b", "b", "a", "a"]) == 2
    assert ranks_per_node_of(["a", "b", "c"]) == 1


@pytest.mark.parametrize("hosts", ["aab", "abb", "aabbb", "aabbaa", "abab", "aabc"])
def test_uneven_hosts_are_refused(hosts: str) -> None:
    with pytest.raises(ValueError, match="the same number on each host, one host after another"):
        ranks_per_node_of(list(hosts))


def test_products_measured_go_before_a_peak() -> None:
    measured = Product(multiply_adds_per_s=100e12, start_s=1e-6, r_squared=0.999)
    gpu = Device(
        name="a GPU",
        flops_per_s=Flops(bf16=300e12, fp16=250e12),
        products=Products(bf16=measured),
    )
    assert gpu.product("bf16") == measured
    assert gpu.product("fp16") == Product(multiply_adds_per_s=125e12)
    assert gpu.product("fp32") is None
    assert measured.seconds(200e12) == pytest.approx(2 + 1e-6)
    with pytest.raises(ValueError, match="number_type is 'int8'; choose fp32, tf32, fp16, bf16"):
        gpu.product("int8")


# The files.


@settings(deadline=None, derandomize=True)
@given(clusters)
def test_what_is_written_is_read(hardware: Hardware) -> None:
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_what_is_not_known_is_not_written() -> None:
    written = json.loads(cluster(inter=SLOW).to_json())
    assert set(written) == {"name", "source", "num_nodes", "ranks_per_node", "device", "inter"}
    assert written["device"] == {"name": "a GPU"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_known_clusters(path: Path) -> None:
    hardware = read_hardware(path)
    assert len(hardware.source) > 40, "a source says where the numbers come from"
    assert hardware.copy_link(hardware.num_ranks).bytes_per_s > 1e9
    levels = (hardware.intra_collectives, hardware.inter_collectives)
    assert all(link.r_squared is None for link in (hardware.intra, hardware.inter) if link)
    for level in levels:
        assert level.copy is None or level.copy.bytes_per_s <= hardware.copy_link(10**6).bytes_per_s


def test_every_paper_has_a_file() -> None:
    papers = {path.stem.partition("_")[0] for path in FILES}
    assert {"hecate", "fsmoe", "proprophet", "hetermoe"} <= papers


def test_a_device_has_one_file_at_most() -> None:
    names = [name for file in FILES for name in read_hardware(file).stands_for]
    assert len(names) == len(set(names))
    found = shipped_for("NVIDIA H100 80GB HBM3")
    assert found is not None and found.resolve() == FOLDER / "dgx_h100.json"
    found = shipped_for("NVIDIA A100-SXM4-40GB")  # AWS's, whose cards are slower than DGX's
    assert found is not None and found.stem == "hecate_b"
    assert shipped_for("NVIDIA H100 PCIe") is None  # its links are others


def test_clusters_of_hecate() -> None:
    """Spec, section 6.1: 100 and 400 Gb/s a node, 8 GPUs of 32 and 40 GB."""
    a, b = (read_hardware(FOLDER / f"hecate_{name}.json") for name in "ab")
    assert (a.copy_link(32).bytes_per_s, b.copy_link(32).bytes_per_s) == (100e9 / 8, 400e9 / 8)
    assert (a.num_ranks, b.num_ranks) == (32, 32)
    assert (a.device.flops_per_s.fp16, b.device.flops_per_s.fp16) == (125e12, 312e12)


@pytest.mark.parametrize(
    ("name", "where", "what", "alpha_ms", "beta_ms"),
    [
        ("fsmoe_a", "inter", "all_to_all", 0.28746, 2.3201e-6),
        ("fsmoe_a", "inter", "all_reduce", 0.51137, 4.9512e-6),
        ("fsmoe_a", "intra", "all_gather", 0.33789, 2.3478e-7),
        ("fsmoe_a", "intra", "reduce_scatter", 0.39538, 2.2171e-7),
        ("fsmoe_b", "inter", "all_to_all", 0.175, 1.224e-6),
        ("fsmoe_b", "inter", "all_reduce", 0.0837, 2.396e-6),
        ("fsmoe_b", "intra", "all_gather", 0.032, 6.72e-7),
        ("fsmoe_b", "intra", "reduce_scatter", 0.0391, 6.68e-7),
    ],
)
def test_lines_of_fsmoe(name: str, where: str, what: str, alpha_ms: float, beta_ms: float) -> None:
    """Spec, section 8.1: milliseconds, by elements of four bytes."""
    hardware = read_hardware(FOLDER / f"{name}.json")
    level = hardware.inter_collectives if where == "inter" else hardware.intra_collectives
    link = getattr(level, what)
    for num_elements in (0, 10_000_000):
        wanted_s = (alpha_ms + beta_ms * num_elements) / 1e3
        assert link.seconds(4 * num_elements) == pytest.approx(wanted_s, rel=1e-4)


# What is refused.


def product(**changed: float) -> dict[str, Any]:
    """A device with one measured product."""
    return {"name": "x", "products": {"fp16": {"multiply_adds_per_s": 1, **changed}}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"interr": {"bytes_per_s": 1}}, "hardware has no key 'interr'; did you mean 'inter'"),
        ({"inter": {"bytes_per_s": 1, "latency": 2}}, "hardware.inter has no key 'latency'; did"),
        ({"inter": {}}, "hardware.inter needs the key 'bytes_per_s'; add it"),
        ({"inter": 3}, "hardware.inter is 3, but must be an object"),
        ({"inter": {"bytes_per_s": "fast"}}, "hardware.inter.bytes_per_s is 'fast', but must be a"),
        ({"inter": {"bytes_per_s": 0}}, "bytes_per_s is 0.0; it must be above 0 and finite"),
        ({"inter": {"bytes_per_s": math.inf}}, "bytes_per_s is inf; it must be above 0 and fin"),
        ({"inter": {"bytes_per_s": math.nan}}, "bytes_per_s is nan; it must be above 0 and fin"),
        ({"inter": {"bytes_per_s": 1, "latency_s": -1}}, "latency_s is -1.0; it must be at least"),
        ({"inter": {"bytes_per_s": 1, "r_squared": 2}}, "r_squared is 2.0; it must be at most 1"),
        ({"num_nodes": 0}, "num_nodes is 0; it must be above 0"),
        ({"stands_for": "a GPU"}, "hardware.stands_for is 'a GPU', but must be a list"),
        ({"stands_for": ["a GPU", 3]}, "stands_for[1] is 3, but must be a string"),
        ({"num_nodes": 1.5}, "hardware.num_nodes is 1.5, but must be an integer"),
        ({"device": {"name": "x", "memory_bytes": -4}}, "memory_bytes is -4; it must be above 0"),
        (
            {"device": {"name": "x", "flops_per_s": {"fp322": 1}}},
            "no key 'fp322'; did you mean",
        ),
        ({"device": {"name": "x", "flops_per_s": {"fp16": -1}}}, "fp16 is -1.0; it must be above"),
        ({"device": product(multiply_adds_per_s=0)}, "product's multiply_adds_per_s is 0.0; it mu"),
        ({"device": product(start_s=-1)}, "a product's start_s is -1.0; it must be at least 0"),
        ({"device": product(r_squared=2)}, "a product's r_squared is 2.0; it must be at most 1"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(json.loads(cluster().to_json()) | changed))
    with pytest.raises(ValueError) as raised:
        read_hardware(path)
    assert expected in str(raised.value)
    assert str(path) in str(raised.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json' cannot be read .* ds-moe-ext profile"):
        read_hardware(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json': Expecting"):
        read_hardware(tmp_path / "broken.json")
