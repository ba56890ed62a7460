# SPDX-License-Identifier: Apache-2.0
"""How experts can be split is found by trying; and how large EP ranks are. No ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_moe_ext.core.hardware import Device, Flops, Hardware, Link, read_hardware, shipped_for
from ds_moe_ext.core.layout import Grid
from ds_moe_ext.hosts.attachment import grid as grid_sizes
from ds_moe_ext.hosts.attachment.experts import find_registered, ways_to_split
from ds_moe_ext.hosts.attachment.grid import (
    NOTHING,
    Needs,
    Sized,
    _shape,
    grid_of,
    prices_of_ep_ranks,
)
from ds_moe_ext.hosts.attachment.host_layer import any_name
from ds_moe_ext.hosts.attachment.replacement import on_grid, owners_line
from ds_moe_ext.hosts.attachment.startup_check import UNKNOWN, Cluster, ranks_on_this_node
from ds_moe_ext.hosts.huggingface import find
from ds_moe_ext.moe.codecs import BFloat16, Codec, Int8
from ds_moe_ext.moe.expert import ModuleExperts
from ds_moe_ext.moe.feed_forward import FeedForwardExperts, silu_gated
from ds_moe_ext.moe.hooks import Hooked
from ds_moe_ext.moe.sharding import Along
from ds_moe_ext.planning.strategy import Strategy
from ds_moe_ext.strategies.ep import ExpertParallel
from ds_moe_ext.strategies.fssdp import FullySharded
from ds_moe_ext.strategies.settings import read_settings
from tests.hosts import families, toy

D, F = 6, 8


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def interleaved(gate_up: Tensor) -> Tensor:
    """As in gpt-oss: gate and up take turns."""
    return nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]


ROWS, COLUMNS = Along(0), Along(1)


@pytest.mark.parametrize(
    ("function", "shapes", "alongs"),
    [
        (FeedForwardExperts(nn.functional.gelu), [(F, D), (D, F)], (ROWS, COLUMNS)),
        (FeedForwardExperts(silu_gated), [(2 * F, D), (D, F)], (Along(0, 2), COLUMNS)),
        (
            FeedForwardExperts(silu_gated, is_transposed=True),
            [(D, 2 * F), (F, D)],
            (Along(1, 2), ROWS),
        ),
        (
            FeedForwardExperts(nn.functional.gelu, has_bias=True),
            [(F, D), (F,), (D, F), (D,)],
            (ROWS, ROWS, COLUMNS, Along(0, adds=True)),
        ),
        (
            FeedForwardExperts(silu_gated, has_bias=True),
            [(2 * F, D), (2 * F,), (D, F), (D,)],
            (Along(0, 2), Along(0, 2), COLUMNS, Along(0, adds=True)),
        ),
    ],
)
def test_feed_forward(
    function: Any, shapes: list[tuple[int, ...]], alongs: tuple[Along, ...]
) -> None:
    found = ways_to_split("layer", function, drawn(*shapes), 2)
    # One block is two where its halves are cut anyway: both are right for plain weights.
    assert [(a.dim, a.adds) for a in found] == [(a.dim, a.adds) for a in alongs]
    if function.activation is silu_gated:
        assert found == alongs


def test_gate_and_up_in_turns() -> None:
    """As in gpt-oss. Two halves may each be cut, if the columns behind them are cut alike."""
    function = FeedForwardExperts(interleaved)
    up, down = ways_to_split("layer", function, drawn((2 * F, D), (D, F)), 2)
    assert (up.dim, down.dim) == (0, 1)
    assert up.num_blocks == down.num_blocks


def test_a_module_of_the_users() -> None:
    """Biases are zeros as they start; how they are split shows all the same."""
    module = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D)).double()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    names = tuple(name for name, _ in module.named_parameters())
    found = ways_to_split("layer", ModuleExperts(module, names), [*module.parameters()], 2)
    assert [(a.dim, a.adds) for a in found] == [(0, False), (0, False), (1, False), (0, True)]


class NormAfter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(self.down(self.up(x).relu()), (D,))


@pytest.mark.parametrize("num_shards", [2, 3])
def test_what_does_not_add_up_is_refused(num_shards: int) -> None:
    module = NormAfter()
    function = ModuleExperts(module, ("up.weight", "down.weight"))
    with pytest.raises(ValueError, match=r"experts of blocks\.3, .* cannot be split") as caught:
        ways_to_split("blocks.3", function, [*module.parameters()], num_shards)
    assert f"expert_sharding_size is {num_shards}" in str(caught.value)
    assert "set it to 1" in str(caught.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_published_families(family: str) -> None:
    (first, *_) = find(families.build(family), any_name)
    assert first.split(2) == (Along(0, 2), COLUMNS)


# Sizes.


@pytest.fixture
def mixtral() -> Any:
    return list(find(families.build("mixtral"), any_name))


Chosen = Callable[..., Sized]


@pytest.fixture
def chosen(mixtral: Any, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """What is chosen for so many ranks, of which a launcher says how many are on a node."""

    def choose(
        world_size: int,
        ranks_here: int | None = None,
        *,
        found: Any = mixtral,
        cluster: Cluster = UNKNOWN,
        needs: Needs = NOTHING,
        **block: Any,
    ) -> Sized:
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_STEP_NUM_TASKS"):
            monkeypatch.delenv(name, raising=False)
        if ranks_here is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
        document = {"ds_moe_ext": {"enabled": True, "strategy": "esp", **block}}
        settings, strategy = read_settings(document)
        assert strategy is not None
        if settings.hardware is not None:
            cluster = Cluster(read_hardware(settings.hardware))
        return grid_of(settings, strategy, found, world_size, cluster, needs=needs)

    return choose


@pytest.mark.parametrize(
    ("reported", "ranks"),
    [
        ({"LOCAL_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 4),  # mpirun torchrun
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "32"}, 32),
        ({"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "12(x2),8"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, None),  # launchers
        ({}, None),
    ],
)
def test_launchers_tell_of_nodes(
    reported: dict[str, str], ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("LOCAL", "OMPI", "SLURM"))]:
        monkeypatch.delenv(name)
    for name, value in {"WORLD_SIZE": "32", **reported}.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_this_node() == ranks


def test_open_sizes_go_by_what_a_host_needs(chosen: Chosen) -> None:
    needs = Needs(whole="the optimizer is Lamb")
    grid, why = chosen(4, 2, needs=needs)
    assert grid.etp_size == 1 and "experts stay whole, because the optimizer is Lamb" in why
    assert chosen(4, 2, needs=needs, expert_sharding_size=2).grid.etp_size == 2
    assert chosen(3, strategy="fssdp").grid.num_ep_ranks == 3
    even = chosen(3, strategy="fssdp", needs=Needs(even="it wants it"))
    assert even.grid.num_ep_ranks == 1 and even.why.endswith(
        "because it wants it; each expert has 3 owners"
    )


Sizes = Callable[..., tuple[int, int]]


@pytest.fixture
def sized(chosen: Chosen) -> Sizes:
    def sizes(*ranks: int, **block: Any) -> tuple[int, int]:
        grid = chosen(*ranks, **block).grid
        return grid.num_ep_ranks, grid.etp_size

    return sizes


def test_ep_ranks_are_nodes_where_there_are_several(sized: Sizes) -> None:
    assert sized(4, 2) == (2, 2)
    assert sized(8, 4) == (2, 4)
    assert sized(8, 4, expert_sharding_size=2) == (4, 2)
    assert sized(8, 4, expert_parallel_size=2) == (2, 4)


def test_experts_stay_whole_elsewhere(sized: Sizes) -> None:
    assert sized(4) == sized(4, 4) == sized(4, 2, expert_sharding_size=1) == (4, 1)
    assert sized(10, 5) == (2, 1)  # experts cannot be split into five parts
    assert sized(4, 2, strategy="ep") == (4, 1)
    assert sized(4, 2, expert_parallel_size=4) == (4, 1)  # nodes would be two EP ranks


def experts_of(*num_experts: int) -> list[Any]:
    """Layers of a model with so many experts each."""
    return list(find_registered(toy.Toy(toy.Shape(num_experts)), any_name))


@pytest.mark.parametrize(
    ("num_experts", "world_size", "ranks_here", "num_ep_ranks"),
    [
        ((8,), 64, 8, 8),  # a grid in every node
        ((8,), 64, None, 8),  # no launcher gives of nodes
        ((64,), 64, None, 64),
        ((64,), 64, 8, 8),
        ((8,), 64, 1, 8),  # nodes of one rank hold no grid
        ((4,), 10, 5, 2),  # nor do nodes of five
        ((2, 6, 3, 5), 8, None, 2),
        ((6,), 4, 4, 4),  # unevenly, but everywhere
        ((5,), 7, None, 1),
    ],
)
def test_copied_experts_leave_no_rank_without(
    chosen: Chosen,
    num_experts: tuple[int, ...],
    world_size: int,
    ranks_here: int | None,
    num_ep_ranks: int,
) -> None:
    found = experts_of(*num_experts)
    grid, why = chosen(world_size, ranks_here, found=found, strategy="fssdp")
    assert (grid.num_ep_ranks, grid.etp_size) == (num_ep_ranks, 1)
    ep_ranks = f"{num_ep_ranks} EP rank{'s' if num_ep_ranks > 1 else ''}, "
    assert why.startswith(f"expert_parallel_size is null: {ep_ranks}")
    stays = {"fssdp": {"heterogeneous_sharding": False, "reshard_interval": 5}}
    assert chosen(world_size, ranks_here, found=found, strategy="fssdp", **stays).grid == grid
    asked = chosen(world_size, ranks_here, found=found, strategy="fssdp", expert_parallel_size=1)
    assert asked.grid.num_ep_ranks == 1 and not asked.why


def test_experts_that_move_have_one_owner(chosen: Chosen) -> None:
    moves = {"strategy": "fssdp", "fssdp": {"reshard_interval": 5}}
    grid, why = chosen(64, 8, found=experts_of(8), **moves)
    assert grid.num_ep_ranks == 64
    assert why.endswith("all 64 EP ranks, because experts that move have one owner")


def test_what_was_chosen_is_reported_in_a_line(chosen: Chosen) -> None:
    _, why = chosen(64, 8, found=experts_of(8), strategy="fssdp")
    assert why == (
        "expert_parallel_size is null: 8 EP ranks, the largest at which each owns experts of "
        "all layers (blocks.0.experts has 8); each expert has 8 owners"
    )
    _, why = chosen(16, 8, found=experts_of(16), strategy="fssdp")
    assert "8 EP ranks, so that tokens and replicas stay in a node of 8 ranks" in why
    assert 'to spread experts over more, set {"ds_moe_ext": {"expert_parallel_size": 16}}' in why
    nodes = {"found": experts_of(2), "strategy": "esp", "balance": "fssdp"}
    grid, why = chosen(16, 4, **nodes)
    assert (grid.num_ep_ranks, grid.etp_size) == (2, 4)
    assert why == (
        "expert_sharding_size is null: the 4 ranks of a node split each expert; "
        "expert_parallel_size is null: 2 EP ranks, the largest at which each owns experts of "
        "all layers (blocks.0.experts has 2); each expert has 2 owners"
    )
    assert chosen(1, found=experts_of(8), strategy="fssdp").why == ""


def described(tmp_path: Path, **links: float) -> dict[str, str]:
    """A block that names a cluster: two nodes of eight, whose links have these rates."""
    device = Device(
        name="a device", memory_bytes_per_s=3e12, flops_per_s=Flops(fp32=1e14, bf16=1e15)
    )
    rates = {name: Link(bytes_per_s=rate) for name, rate in links.items()}
    hardware = Hardware(
        name="two nodes", source="a test", num_nodes=2, ranks_per_node=8, device=device, **rates
    )
    (tmp_path / "hardware.json").write_text(hardware.to_json())
    return {"strategy": "fssdp", "hardware": str(tmp_path / "hardware.json")}


def test_ep_ranks_are_chosen_by_price_where_the_cluster_is_described(
    chosen: Chosen, tmp_path: Path
) -> None:
    few_weights, many_weights = (
        [replace(experts_of(16)[0], expert=(("up", (256, width), "torch.float32", True),))]
        for width in (512, 262144)
    )
    slow = described(tmp_path, intra=4e11, inter=1e9)
    grid, why = chosen(16, 8, found=few_weights, **slow)
    assert grid.num_ep_ranks == 8
    assert "8 EP ranks, by the predicted cost of a layer on two nodes: it takes " in why
    assert re.search(r"ms a step, with 16 EP ranks [1-9][\d.]* times as long \(4,096 tokens", why)
    # Experts so large, and rows so few, that summing their gradients costs more than sending rows.
    assert chosen(16, 8, found=many_weights, **slow).grid.num_ep_ranks == 16


def test_experts_are_split_by_price_where_the_cluster_is_described(
    chosen: Chosen, mixtral: Any, tmp_path: Path
) -> None:
    """Rows are gathered slowly over slow links; over fast ones a hot expert computes in parts."""
    slow = {**described(tmp_path, intra=1e9, inter=1e9), "strategy": "esp"}
    grid, why = chosen(16, 8, found=mixtral, **slow)
    assert grid.etp_size == 1
    assert re.search(
        r"expert_sharding_size is null: experts stay whole, by the predicted cost of a layer "
        r"on two nodes: it takes [\d.e+]+ times as long where the 8 ranks of a node split "
        r"each; ",
        why,
    )
    fast = {**described(tmp_path, intra=1e13, inter=1e13), "strategy": "esp"}
    large = (("up", (4096, 43008), "torch.bfloat16", True),)
    grid, why = chosen(16, 8, found=[replace(layer, expert=large) for layer in mixtral], **fast)
    assert grid.etp_size == 8
    assert "8 ranks of a node split each expert; with whole experts a layer takes 1." in why


def test_a_cluster_that_says_too_little_leaves_it_to_the_rule(
    chosen: Chosen, tmp_path: Path
) -> None:
    grid, why = chosen(16, 8, found=experts_of(16), **described(tmp_path))
    assert grid.num_ep_ranks == 8
    assert "two nodes cannot price other sizes: hardware 'two nodes' does not" in why


def test_a_cluster_stands_for_any_number_of_nodes(chosen: Chosen, tmp_path: Path) -> None:
    fast = described(tmp_path, intra=4e11, inter=4e11)
    assert ("by the predicted cost of a layer on two nodes") in chosen(
        64, 8, found=experts_of(64), **fast
    ).why
    assert ("by the predicted cost of a layer on two nodes") in chosen(
        12, 4, found=experts_of(12), **fast
    ).why


def test_each_grid_is_priced_once(
    chosen: Chosen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced = []

    def prices_of_ep_ranks(*given: Any, **named: Any) -> Any:
        priced.extend((size, given[4].etp_size) for size in given[3])
        return one(*given, **named)

    one = grid_sizes.prices_of_ep_ranks
    monkeypatch.setattr(grid_sizes, "prices_of_ep_ranks", prices_of_ep_ranks)
    slow = {**described(tmp_path, intra=1e9, inter=1e9), "strategy": "esp", "balance": "fssdp"}
    why = chosen(32, 2, found=experts_of(32), **slow).why
    assert "expert_sharding_size is null" in why and "by the predicted cost of a layer" in why
    assert len(priced) == len(set(priced)) > 2


@dataclass(frozen=True, kw_only=True)
class ForGpus(BFloat16):
    """As kernels are that know no CPU."""

    def encode(self, rows_ND: Tensor) -> Tensor:
        assert rows_ND.is_cuda
        return super().encode(rows_ND)


def test_ep_ranks_are_priced_by_rows_and_replicas_as_they_travel(tmp_path: Path) -> None:
    hardware = read_hardware(described(tmp_path, intra=1e9, inter=1e9)["hardware"])
    shapes = ("up", (4096, 1024)), ("down", (1024, 2048))
    expert = tuple((name, shape, "torch.float32", True) for name, shape in shapes)
    found = [replace(experts_of(16)[0], expert=expert)]

    def layer_s(strategy: Strategy, *codecs: Codec) -> float:
        grid, hooks = Grid(16, 1), Hooked(codecs=codecs)
        (price,) = prices_of_ep_ranks(strategy, found, hardware, (16,), grid, hooks=hooks)
        return price.layer_s

    ep, fssdp = ExpertParallel(), FullySharded(overlap_degree=16, replicas_per_rank=16)
    assert 0.25 < layer_s(ep, Int8()) / layer_s(ep) < 0.5
    assert layer_s(ep, ForGpus()) == layer_s(ep)
    replicas = Int8(dispatch=False, combine=False, replicas=True, replica_gradients=True)
    assert layer_s(fssdp, replicas) < layer_s(fssdp)


@pytest.mark.parametrize(
    ("shapes", "width", "expert_width"),
    [
        (((96, 64), (64, 48)), 64, 48),  # gate and up in one
        (((64, 96), (48, 64)), 64, 48),  # and the other way round
        (((512, 64), (64, 256)), 64, 256),
        (((48, 64), (64, 48), (48, 64)), 48, 64),  # which of the two is not known
    ],
)
def test_the_width_of_a_model_is_that_of_all_matrices_of_an_expert(
    shapes: tuple[tuple[int, int], ...], width: int, expert_width: int
) -> None:
    expert = tuple(
        (f"{number}", each, "torch.bfloat16", True) for number, each in enumerate(shapes)
    )
    shape, number_type = _shape([replace(experts_of(16)[0], expert=expert)])
    assert (shape.width, shape.expert_width, number_type) == (width, expert_width, "bf16")


H100 = shipped_for("NVIDIA H100 80GB HBM3")


def test_what_sizes_were_chosen_by_is_reported_where_they_were_open(chosen: Chosen) -> None:
    assert H100 is not None
    by_name = Cluster(read_hardware(H100), "it is taken for that")
    grid, why = chosen(16, 8, found=experts_of(16), strategy="fssdp", cluster=by_name)
    assert "by the predicted cost of a layer on DGX H100, 4 nodes" in why
    assert "; it is taken for that; ds-moe-ext profile measures your cluster, and ds_moe" in why
    unknown = Cluster(None, "nobody knows it")
    grid, why = chosen(16, 8, found=experts_of(16), strategy="fssdp", cluster=unknown)
    assert grid == chosen(16, 8, found=experts_of(16), strategy="fssdp").grid
    assert "; nobody knows it; ds-moe-ext profile measures your cluster, and ds_moe_ext.ha" in why
    sure: list[dict[str, Any]] = [
        {"found": experts_of(8)},  # no more EP ranks than fill a node
        {"found": experts_of(16), "expert_parallel_size": 16},
        {"found": experts_of(16), "fssdp": {"reshard_interval": 5}},
    ]
    for block in sure:
        reported = chosen(16, 8, strategy="fssdp", cluster=unknown, **block).why
        assert "nobody knows it" not in reported
    # Whether experts are split was open.
    assert "nobody knows it" in chosen(8, 4, expert_parallel_size=1, cluster=unknown).why


@pytest.mark.parametrize("strategy", ["ep", "fssdp", "prophet", "esp", "auto"])
@pytest.mark.parametrize(
    ("num_experts", "world_size", "ranks_here"),
    [(8, 64, 8), (8, 64, None), (2, 4, 4), (256, 64, 8), (256, 64, None), (3, 4, 4), (5, 7, 7)],
)
def test_the_rule_leaves_no_rank_idle_and_says_where_nothing_can_be_copied(
    chosen: Chosen, strategy: str, num_experts: int, world_size: int, ranks_here: int | None
) -> None:
    found = experts_of(num_experts)
    grid, why = chosen(world_size, ranks_here, found=found, strategy=strategy)
    settings, made = read_settings({"ds_moe_ext": {"enabled": True, "strategy": strategy}})
    assert made is not None
    blueprint = on_grid(settings, made, found, grid)
    assert all(owner.is_everywhere for owner in blueprint.owners())
    replicas = made.intervals().weighs_replicas
    is_reported = "every rank has all experts, so there are no replicas" in owners_line(blueprint)
    assert is_reported == (grid.num_ep_ranks == 1 and replicas)
    assert f"{grid.num_ep_ranks} EP rank" in why


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"expert_sharding_size": 3}, ("is 3", "world size 4", "[1, 2, 4]")),
        ({"strategy": "fssdp", "expert_sharding_size": 2}, ("is 2", "'fssdp'", "strategy 'esp'")),
        ({"strategy": "auto", "expert_sharding_size": 2}, ("is 2", "'auto'", "strategy 'esp'")),
        (
            {"expert_sharding_size": 2, "expert_parallel_size": 4},
            ("expert_parallel_size is 4", "in EP ranks of 2 ranks", "[1, 2]"),
        ),
    ],
)
def test_sizes_that_do_not_fit(
    sized: Sizes, block: dict[str, Any], expected: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match=expected[0]) as caught:
        sized(4, **block)
    assert all(part in str(caught.value) for part in expected)
