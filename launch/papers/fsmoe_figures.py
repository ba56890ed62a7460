# SPDX-License-Identifier: Apache-2.0
"""FSMoE's tables and figures (spec 8), by its schedules, our planner and simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from statistics import mean

import numpy as np

from ds_moe_ext.core.hardware import Collectives, Link
from ds_moe_ext.schedule.orders import PIPELINES
from papers.figure import Claim, Figure, Paper, Row, Tolerance
from papers.fsmoe_grid import (
    CLUSTERS,
    ELEMENT_BYTES,
    ROUTE_S,
    A,
    B,
    Cluster,
    PricedLayer,
    Shape,
    grid,
    linear,
    per_unit,
)
from papers.fsmoe_layers import (
    OVER,
    QUANTA,
    Interference,
    Plan,
    Sums,
    closed_s,
    simulated_s,
    summed,
)

DEGREES = tuple(range(1, 9))
INTERFERENCE = Interference(collectives=0.35, compute=0.2)  # chosen on A (spec 8.5)
MEANS = Tolerance(absolute=0.05)
DS_MOE = "DS-MoE"
NAMES = {
    "fsmoe": "FSMoE",
    "fsmoe_no_iio": "FSMoE-No-IIO",
    "tutel_improved": "Tutel-Improved",
    "pipemoe_lina": "PipeMoE+Lina",
    "tutel": "Tutel",
    "fsmoe_unsliced": "FSMoE, not sliced",
    "default": "one chunk",
}


# Table 2.

GPT2_XL = Shape(
    batch=4, kv_heads=32, length=1024, width=1600, hidden_ratio=4, capacity=2.4, num_products=2
)
MIXTRAL_7B = replace(GPT2_XL, kv_heads=8, width=4096, hidden_ratio=3.5, num_products=3)
MIXTRAL_22B = replace(MIXTRAL_7B, kv_heads=32 * 8 / 48, width=6144, hidden_ratio=16384 / 6144)

_OPERATIONS = ("A2A", "AllGather", "ReduceScatter", "AllReduce", "experts", "attention")
_MEASURED_MS: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("A", "GPT2-XL"): (6.9, 4.6, 5.4, 5.26, 3.1, 1.7),
    ("A", "Mixtral-7B"): (19.5, 12.3, 13.7, 26.45, 15.6, 4.1),
    ("B", "GPT2-XL"): (11.2, 15.5, 15.7, 7.3, 6.7, 4.5),
    ("B", "Mixtral-7B"): (28.3, 39.6, 40.8, 32.1, 58.5, 9.5),
}
_FITTED = {("A", "attention"), ("B", "experts")}


def operation_s(layer: PricedLayer) -> tuple[float, ...]:
    """Seconds of ``_OPERATIONS`` in a layer's forward, gradients beside them."""
    _, exchange_s, gather_s, scatter_s, expert_s = map(float, layer.forward.cut(np.array(1)))
    return (
        2 * exchange_s,
        gather_s + layer.dense_gather_s,
        scatter_s + layer.dense_scatter_s,
        layer.all_reduce.seconds(layer.gradient_elements),
        expert_s,
        layer.attention_s,
    )


def table_2() -> Figure:
    shapes = {"GPT2-XL": GPT2_XL, "Mixtral-7B": MIXTRAL_7B}
    return Figure(
        name="Table 2",
        title="operations of a layer, forward, ms (B = 4, L = 1024)",
        rows=tuple(
            Row(
                name=f"{cluster}, {model}, {operation}",
                paper=paper_ms,
                ours=1e3 * alone_s,
                is_held=(cluster, operation) not in _FITTED,
            )
            for (cluster, model), measured in _MEASURED_MS.items()
            for operation, paper_ms, alone_s in zip(
                _OPERATIONS, measured, operation_s(CLUSTERS[cluster].priced(shapes[model], 1))
            )
        ),
        tolerance=Tolerance(relative=0.15),
        assumed=(
            "k f = 2.4 of both models; attention of A and experts of B are fitted to this table, "
            "and so not held; the spec has no tolerance here, 15 % is ours",
        ),
        because="on A the lines of the authors' code exceed what they measured in the model "
        "(exchanges, the gather of GPT2-XL, Mixtral's experts); the AllReduce of GPT2-XL is that "
        "of three of attention's four matrices (spec 10, no. 9); B's attention is assumed, and "
        "its AllReduce of Mixtral is longer than the printed line",
    )


# Table 5.

PAPER_UNEQUAL = 912  # layers of B whose degrees differ


@cache
def grid_sums(cluster: str, choices: int, slowed: bool) -> Sums:
    """Of all 1458 layers."""
    of = CLUSTERS[cluster]
    return summed(
        of,
        list(grid(of.lengths)),
        choices=choices,
        degrees=DEGREES,
        interference=INTERFERENCE if slowed else None,
    )


def table_5(cluster: Cluster) -> Figure:
    def rows(choices: int, slowed: bool) -> tuple[Row, ...]:
        sums = grid_sums(cluster.name, choices, slowed)
        reported = f"k = {choices}{'' if slowed else ', no interference'}"
        return tuple(
            Row(
                name=f"{text} over Tutel, {reported}",
                paper=cluster.paper.get(name),
                ours=sums.speed[name],
                is_held=choices == 1 and slowed,
            )
            for name, text in NAMES.items()
            if name != OVER
        )

    sums = grid_sums(cluster.name, 1, True)
    speeds = [sums.speed[name] for name in ("fsmoe", "fsmoe_no_iio", "tutel_improved", "tutel")]
    return Figure(
        name=f"Table 5, {cluster.name}",
        title="mean speed over Tutel on 1458 layers",
        rows=(*rows(1, True), *rows(2, True), *rows(1, False)),
        tolerance=MEANS,
        claims=(
            Claim(
                "FSMoE > No-IIO > Tutel-Improved > Tutel",
                all(more > less for more, less in pairwise(speeds)),
            ),
        ),
        assumed=("k is not stated: 1 is held, as the authors' script suggests",),
        is_fitted=cluster is A,
    )


def degrees_differ() -> Figure:
    return Figure(
        name="Section 2.3",
        title="layers of B whose best degrees differ between forward and backward",
        rows=tuple(
            Row(
                name=f"k = {choices}",
                paper=PAPER_UNEQUAL,
                ours=grid_sums("B", choices, False).num_unequal,
                is_held=choices == 1,
            )
            for choices in (1, 2)
        ),
        tolerance=Tolerance(absolute=150),
    )


# Models, figures 6 to 8 and table 6.

MODELS = {
    "GPT2-XL": replace(GPT2_XL, batch=1, capacity=1.2),
    "Mixtral-7B": replace(MIXTRAL_7B, batch=1, capacity=1.2),
    "Mixtral-22B": replace(MIXTRAL_22B, batch=1, capacity=1.2),
}
CASES = (
    *((A, name, 1024) for name in MODELS),
    *((B, name, 256) for name in ("GPT2-XL", "Mixtral-7B")),
)


def step_s(cluster: Cluster, model: str, length: int) -> dict[str, float]:
    """Of one layer under each schedule, and DS-MoE."""
    shape = replace(MODELS[model], length=length)
    layer = cluster.priced(shape, choices=2)
    taken = {
        name: simulated_s(
            PIPELINES[name], layer, Plan.of(PIPELINES[name], layer, DEGREES), INTERFERENCE
        )
        for name in NAMES
    }
    return taken | {DS_MOE: ds_moe_s(cluster, layer)}


def ds_moe_s(cluster: Cluster, layer: PricedLayer) -> float:
    """All ranks of an ETP group send all its rows, and gather none: no EP rank shares the
    exchange."""
    exchange = layer.forward.all_to_all
    nothing = per_unit(0, 0)
    forward = replace(
        layer.forward,
        all_to_all=replace(exchange, n=exchange.n * cluster.hardware.ranks_per_node),
        all_gather=nothing,
        reduce_scatter=nothing,
    )
    unshared = replace(layer, forward=forward)
    pipeline = PIPELINES["default"]
    return closed_s(unshared, Plan.of(pipeline, unshared, (1,)))


def mean_speed(cases: tuple[tuple[Cluster, str, int], ...], over: str) -> float:
    """Of FSMoE over another, mean over models."""
    taken = [step_s(*case) for case in cases]
    return mean(of[over] / of["fsmoe"] for of in taken)


OVER_DS = (
    "DS-MoE is DeepSpeed's layer in one chunk whose ranks of an ETP group each send all of its "
    "rows; the paper does not say how it is set up"
)


def figure_6() -> Figure:
    paper = {"tutel": 1.19, "tutel_improved": 1.12, "pipemoe_lina": 1.14, "fsmoe_no_iio": 1.07}
    taken = {f"{case[0].name}, {case[1]}": step_s(*case) for case in CASES}
    over_ds = [of[DS_MOE] / of["fsmoe"] for of in taken.values()]
    order = ("fsmoe", "fsmoe_no_iio", "tutel_improved", "tutel")
    return Figure(
        name="Figure 6",
        title="FSMoE's mean speed over the others on models",
        rows=(
            *(
                Row(
                    name=f"over {NAMES[name]}",
                    paper=value,
                    ours=mean(of[name] / of["fsmoe"] for of in taken.values()),
                )
                for name, value in paper.items()
            ),
            Row(name="over DS-MoE, the least", paper=1.28, ours=min(over_ds), is_held=False),
            Row(name="over DS-MoE, the most", paper=3.01, ours=max(over_ds), is_held=False),
            *(
                Row(
                    name=f"{case}, over {NAMES.get(name, name)}",
                    paper=None,
                    ours=of[name] / of["fsmoe"],
                )
                for case, of in taken.items()
                for name in ("tutel", DS_MOE)
            ),
        ),
        tolerance=MEANS,
        claims=(
            Claim(
                "FSMoE > No-IIO > Tutel-Improved > Tutel on every model",
                all(of[less] < of[more] for of in taken.values() for less, more in pairwise(order)),
            ),
        ),
        assumed=(OVER_DS,),
        because="layers are priced alone: without embedding, head, optimizer and host time, which "
        "all schedules share, ratios are farther from 1; and a layer's gradients fill no piece of "
        "30 MB, so that Lina's are summed at the end like Tutel's",
    )


def of_ranks(num_ranks: int) -> Cluster:
    """A of fewer ranks: rates of the authors' code; starts are those of 48 ranks, for want."""
    rates = {16: (1.3057e-9, 2.9157e-9), 32: (1.8543e-9, 3.4951e-9)}
    if num_ranks not in rates:
        return A
    measured = A.hardware.inter_collectives
    exchange, reduce = (
        Link(bytes_per_s=ELEMENT_BYTES / beta_s, latency_s=linear(link).alpha_s)
        for beta_s, link in zip(rates[num_ranks], (measured.all_to_all, measured.all_reduce))
    )
    return replace(A, between_ep_ranks=Collectives(all_to_all=exchange, all_reduce=reduce))


def figure_7() -> Figure:
    by_length = {512: (2.17, 1.17), 1024: (2.72, 1.19), 2048: (3.14, 1.17)}
    by_ranks = {16: (2.25, 1.20), 32: (2.27, 1.16), 48: (2.72, 1.19)}
    cases: dict[str, tuple[Cluster, int, tuple[float, float]]] = {
        f"L = {length}": (A, length, paper) for length, paper in by_length.items()
    }
    cases |= {f"P = {ranks}": (of_ranks(ranks), 1024, paper) for ranks, paper in by_ranks.items()}
    rows = []
    for name, (cluster, length, (over_ds, over_tutel)) in cases.items():
        models = tuple((cluster, model, length) for model in MODELS)
        tutel, ds_moe = (mean_speed(models, over) for over in ("tutel", DS_MOE))
        rows.append(Row(name=f"{name}, over Tutel", paper=over_tutel, ours=tutel))
        rows.append(Row(name=f"{name}, over DS-MoE", paper=over_ds, ours=ds_moe, is_held=False))
    over_ds_moe = [row.ours for row in rows if not row.is_held]
    return Figure(
        name="Figure 7",
        title="FSMoE's mean speed on A, by length (48 ranks) and number of ranks (L = 1024)",
        rows=tuple(rows),
        tolerance=MEANS,
        claims=(
            Claim(
                "over DS-MoE more for longer samples",
                all(less < more for less, more in pairwise(over_ds_moe[:3])),
            ),
        ),
        assumed=(
            OVER_DS,
            "rates of 16 and 32 ranks are in the authors' code, starts only of 48; E = nodes",
        ),
        because="as figure 6",
    )


def table_6() -> Figure:
    taken = step_s(B, "GPT2-XL", 256)
    paper = {
        "GShard": (968.1, 707.7),
        "X-MoE": (1064.0, 746.9),
        "Sigmoid": (986.6, 721.0),
        "EC": (909.9, 685.5),
    }
    return Figure(
        name="Table 6",
        title="DS-MoE's time over FSMoE's, GPT2-XL on B, by gate",
        rows=(
            *(
                Row(name=gate, paper=ds_ms / ms, ours=taken[DS_MOE] / taken["fsmoe"])
                for gate, (ds_ms, ms) in paper.items()
            ),
            Row(
                name="FSMoE, 48 layers, ms (GShard)",
                paper=paper["GShard"][1],
                ours=48e3 * taken["fsmoe"],
                is_held=False,
            ),
        ),
        tolerance=Tolerance(relative=0.1),
        claims=(
            Claim("FSMoE is faster under every gate", taken["fsmoe"] < taken[DS_MOE]),
            Claim("gates differ", False),  # by how they are priced, which is alike
        ),
        assumed=(OVER_DS, "the spec has no tolerance here, 10 % is ours"),
        because="gates have no prices of their own, so that all rows are alike, and a step has "
        "more than its layers: the rest of it, which both systems share, is not priced",
    )


def figure_8() -> Figure:
    paper = {"tutel": 1.16, "tutel_improved": 1.10, "pipemoe_lina": 1.12, "fsmoe_no_iio": 1.05}
    cases = CASES[:3]
    return Figure(
        name="Figure 8",
        title="FSMoE's mean speed on A in two pipeline stages",
        rows=tuple(
            Row(name=f"over {NAMES[name]}", paper=value, ours=mean_speed(cases, name))
            for name, value in paper.items()
        ),
        tolerance=MEANS,
        assumed=(
            "GPipe's bubbles stretch all schedules alike, and so leave ratios as they are; number "
            "and size of micro-batches are not stated: those of figure 6, each with its reduction",
        ),
        because="as figure 6; and gradients are summed once for all micro-batches, not for each",
    )


_FIGURES: tuple[Callable[[], Figure], ...] = (
    table_2,
    partial(table_5, A),
    partial(table_5, B),
    degrees_differ,
    figure_6,
    figure_7,
    figure_8,
    table_6,
)

FSMOE = Paper(
    name="FSMoE",
    title="FSMoE: flexible and scalable training of sparse mixture-of-experts models",
    inputs=(
        "collectives: figure 5, by the constants of the authors' code where its caption confuses "
        "them (configs/hardware/fsmoe_a.json, fsmoe_b.json)",
        "the 1458 layers: table 4; models: section 6.4, k = 2, f = 1.2, B = 1",
    ),
    assumed=(
        *(f"cluster {cluster.name}: {cluster.text}" for cluster in CLUSTERS.values()),
        "experts and attention take twice as long in backward; "
        f"gate and order take {1e3 * ROUTE_S:g} ms in each direction",
        "the grid's heads are key-value heads beside 32 query heads; a capacity of * is 1 with "
        "even loads",
        "layers are equal: each reduces the gradients of one attention, (2 + 2 heads / 32) M^2 "
        "over the ranks of an ETP group; the one queue is that of the MoE part's collectives, "
        "beside which reductions run under the dense part, gate and order",
        f"gradients that no window hides move in {QUANTA} parts; Lina's pieces of 30 MB run "
        "whole, under the dense part and then the experts, where they fit",
        "degrees, 1 to 8, and slices are planned without interference; with it, collectives "
        "between and within ETP groups slow each other by gamma, computation and collectives by "
        "delta, both together by the product",
    ),
    fitted=(
        f"gamma = {INTERFERENCE.collectives}, delta = {INTERFERENCE.compute} and k = 1 of the "
        "grid: on table 5, A; B and all models have the same",
        "attention of A and experts of B: on table 2",
    ),
    left_out=(
        "figure 5 (fits of the collectives): is an input",
        "the seconds of figure 6, of which the paper prints pictures alone",
    ),
    figures=_FIGURES,
)
