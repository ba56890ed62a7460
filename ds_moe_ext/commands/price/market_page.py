# SPDX-License-Identifier: Apache-2.0
"""The page of what was priced: one HTML file that needs nothing else to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_moe_ext.commands.price.market import Market
from ds_moe_ext.commands.price.timelines import class_names, stage_tasks, traced_tasks
from ds_moe_ext.commands.price.words import (
    MEMORY,
    ON_PAGE,
    about,
    assumed,
    figures_of,
    grid_text,
    parts_of,
    plan_words,
    verdict,
    zebra_words,
)
from ds_moe_ext.planning.candidates import Priced
from ds_moe_ext.report import timeline
from ds_moe_ext.report.charts import Stack, colours_of, stacked_bars
from ds_moe_ext.report.markup import Html, facts_line, joined, legend, note, section, table
from ds_moe_ext.report.page import html_document
from ds_moe_ext.report.units import bytes_text, ratio_text, seconds_text
from ds_moe_ext.schedule.task import EXPERT

_ABOUT_PARTS = (
    "computed: compute time with even load; imbalance: extra compute time of the busiest EP "
    "rank of each layer; sending: exposed communication; host: devices wait for the host; "
    "end: exposed gradient reduction, and the optimizer."
)
_ABOUT_BUBBLE = " In a pipeline these are of the slowest stage; bubble: it waits for other stages."


def write_page(path: Path, market: Market, pays: Sequence[str]) -> None:
    path.write_text(page_of(market, pays), "utf-8")


def page_of(market: Market, pays: Sequence[str]) -> Html:
    """One self-contained HTML page of what was priced, one way at least, and of where ways pay."""
    parts = [_header(market), _ways(market), _seconds(market), _memory(market), _balance(market)]
    parts += [_plans(market, pays), *_timelines(market), _rests_on(market)]
    return html_document(f"Price of {market.case.shape.name}", parts)


def _header(market: Market) -> Html:
    reported = verdict(market)
    return Html(
        '<header><h1>Price of <code>{}</code></h1>{}<p class="verdict">{}.</p>{}</header>'
    ).format(
        market.case.shape.name,
        facts_line(about(market).split("; ")),
        reported[0].upper() + reported[1:],
        legend(),
    )


def _marks(market: Market, priced: Priced) -> list[str]:
    """What a way is to the reader."""
    is_what = ("fastest", market.best), ("yours", market.own_best), ("best ep", market.base)
    return [what for what, which in is_what if which is priced]


def _name(market: Market, priced: Priced) -> Html:
    """A way, with its marks."""
    marks = joined(Html(" <mark>{}</mark>").format(what) for what in _marks(market, priced))
    return Html("{} <small>{}</small>{}").format(
        priced.way.shown, grid_text(priced.way.grid), marks
    )


def _ways(market: Market) -> Html:
    named = [
        {"strategy and grid": _name(market, each), **figures_of(market, each, ON_PAGE)}
        for each in market.priced
    ]
    is_pipeline = market.case.training.parallel.pipeline > 1
    ways = note(_ABOUT_PARTS + _ABOUT_BUBBLE * is_pipeline)
    ways += table([*named[0]], [[*row.values()] for row in named])
    return section("Configurations, fastest first", ways)


def _stacks(
    market: Market, parts: Sequence[Sequence[float]], reported: Sequence[str]
) -> list[Stack]:
    return [
        Stack(
            ", ".join([f"{each.way.shown} {grid_text(each.way.grid)}", *_marks(market, each)]),
            of_it,
            text,
            is_faint=not market.fits(each),
        )
        for each, of_it, text in zip(market.priced, parts, reported)
    ]


def _seconds(market: Market) -> Html:
    names = parts_of(market)
    parts = [[each.mean(part) for part in names.values()] for each in market.priced]
    lines = [seconds_text(each.step_s) for each in market.priced]
    bars = stacked_bars(_stacks(market, parts, lines), list(names), seconds_text)
    return section("Step time by cause", bars)


def _memory(market: Market) -> Html:
    parts = [[vars(each.memory)[name] for name in MEMORY] for each in market.priced]
    lines = [bytes_text(int(each.memory.total)) for each in market.priced]
    has = market.case.hardware.device.memory_bytes
    limit = None if has is None else (has, f"device memory, {bytes_text(has)}")
    bars = stacked_bars(
        _stacks(market, parts, lines), MEMORY, lambda part: bytes_text(int(part)), limit=limit
    )
    return section("Memory of the fullest rank", bars)


def _balance(market: Market) -> Html:
    parts = [[1.0, each.mean("balance") - 1] for each in market.priced]
    lines = [ratio_text(each.mean("balance")) for each in market.priced]
    names = ("the mean EP rank", "extra on the busiest EP rank")
    bars = stacked_bars(_stacks(market, parts, lines), names, ratio_text)
    rows = note("Routed tokens of the busiest EP rank over the mean, averaged over layers.")
    return section("Balance", rows + bars)


def _plans(market: Market, pays: Sequence[str]) -> Html:
    reported = joined(
        Html("<h3>{}</h3><p>{}</p>").format(name[0].upper() + name[1:], plan_words(each))
        for name, each in market.named
    )
    reported += joined(Html("<h3>Zebra</h3><p>{}</p>").format(line) for line in zebra_words(market))
    if pays:
        reported += Html("<h3>Where it pays</h3>") + _paragraphs(pays)
    return section("The plans in words", reported)


def _paragraphs(lines: Iterable[str]) -> Html:
    return joined(Html("<p>{}</p>").format(line) for line in lines)


def _timelines(market: Market) -> list[Html]:
    """Of the named ways: the pipeline's stages, the busiest EP ranks and the idlest, and one layer
    of the busiest."""
    drawn = []
    for name, each in market.named:
        body = Html("")
        if stage_passes := stage_tasks(each):
            colours = colours_of(task.name for task in stage_passes)
            body += note("The passes per step, a row a pipeline stage.")
            body += timeline.overview(timeline.Step(stage_passes), colours)
        title = Html("Timeline of {}: {}").format(name, _name(market, each))
        drawn.append(section(title, body + _timeline(each)))
    return drawn


def _timeline(priced: Priced) -> Html:
    names = class_names(priced)
    drawn = [traced_tasks(priced, number) for number in range(len(names))]
    busy_s = [sum(t.length_s for t in tasks if t.name == EXPERT.name) for tasks in drawn]
    shown = sorted(range(len(names)), key=busy_s.__getitem__)
    shown = [shown[-1]] + ([shown[0]] if len(shown) > 1 else [])
    colours = colours_of(task.name for number in shown for task in drawn[number])
    busiest = drawn[shown[0]]
    simulated = (
        "One simulated pass of a step, one line per stream, with the percentage of time that "
        "the stream is busy."
    )
    body = note(simulated + timeline.hidden(busiest) + timeline.critical(busiest))
    for number in shown:
        step = timeline.Step(drawn[number])
        body += Html("<h3>{}</h3>{}").format(names[number], timeline.overview(step, colours))
    passes = timeline.passes_of(busiest)
    layers = sorted({one.layer for one in passes}, key=lambda layer: int(layer.split()[-1]))
    middle = layers[len(layers) // 2]
    its = [one.own for one in passes if one.layer == middle]
    body += Html("<h3>{}, {}</h3>").format(middle, names[shown[0]])
    return body + timeline.layer_chart(its, colours)


def _rests_on(market: Market) -> Html:
    refused = (
        f"{each.way.shown} on {grid_text(each.way.grid)} cannot be: {each.why}"
        for each in market.refused
    )
    sources = (f"{each.name}: {each.source}" for each in market.case.clusters)
    return section("Assumptions", _paragraphs([*assumed(market), *refused, *sources]))
