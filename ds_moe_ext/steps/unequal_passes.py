# SPDX-License-Identifier: Apache-2.0
"""Passes that not all ranks run alike: evaluation and generation, on some ranks or at any length.

See ``moe/turns.py``. A model's own ``generate`` is such a block on all ranks that call it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_moe_ext.attachment.block_hooks import Launch, launches
from ds_moe_ext.attachment.replacement import AttachedLayer
from ds_moe_ext.layout import GRID, group_among
from ds_moe_ext.moe.turns import Serve, Turns
from ds_moe_ext.schedule.task import INTER
from ds_moe_ext.settings import BLOCK
from ds_moe_ext.steps.training_run import Run, run_of
from ds_moe_ext.watch import WATCH, Waiting


@contextmanager
def joined(engine: Any) -> Iterator[None]:
    """Let every rank call the model as often as it wants, inside the block. Collective.

    For evaluation and generation: there are no gradients inside. A rank that leaves the block
    serves the others' experts until all have left it. Where ``ds_moe_ext`` is not enabled it does
    nothing but switch gradients off::

        with ds_moe_ext.joined(engine):
            if rank == 0:
                engine.module.generate(...)

    Args:
        engine: of DeepSpeed.

    Raises:
        ValueError: under strategy zebra, where ranks that have experts only cannot run the model,
            and where ZeRO shards weights.
    """
    run = run_of(engine)
    with torch.no_grad(), _nothing() if run is None else _joined(run, engine.device):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _joined(run: Run, device: torch.device) -> Iterator[None]:
    if run.blueprint.strategy.roles is not None:
        raise ValueError(
            f"{BLOCK}.strategy is {run.blueprint.settings.strategy!r}, under which ranks "
            "cannot run the model alone, nor generate; let all ranks evaluate together with "
            "labels, or save the model and generate from what was saved"
        )
    if run.blueprint.why_together:
        raise ValueError(
            f"ds_moe_ext.joined was called, but {run.blueprint.why_together}; let all ranks call "
            "the model equally often, generate with synced_gpus=True, or use stage 0, 1 or 2"
        )
    if run.blueprint.grid.size == 1:
        yield
        return
    turns = _turns_of(run.layers, device)
    turns.depth += 1
    try:
        yield
        if turns.depth == 1:
            turns.serve_until_all_are_done()
    except BaseException as error:
        WATCH.failed(error, "a block of ds_moe_ext.joined")
        for layer in run.layers:  # ranks may have left it in different layers
            layer.routed.turns = None
        raise
    finally:
        turns.depth -= 1


def _turns_of(layers: Sequence[AttachedLayer], device: torch.device) -> Turns:
    """Made when it is first needed: its communicator costs threads. Collective then."""
    first = layers[0].routed
    if first.turns is None:
        layout = first.site.layout
        WATCH.at(lambda: "the beginning of a block of ds_moe_ext.joined, or of generate")
        with Waiting(layout.group(GRID, INTER)):
            group = group_among(layout.lists_along(GRID), backend="gloo")
        servers = [_server(*pair, device) for pair in zip(layers, launches(layers))]
        turns = Turns(group, servers)
        for layer in layers:
            layer.routed.turns = turns
    assert first.turns is not None
    return first.turns


def _server(layer: AttachedLayer, launch: Launch, device: torch.device) -> Serve:
    """Runs a layer without rows."""

    def serve(turns: Turns) -> None:
        if layer.routed.copies is not None:
            launch.begin(None)
        likeness = turns.agree_on_rows(None)
        with likeness.autocast(device):
            layer.routed(*likeness.nothing(device), layer.hosted.weights())

    return serve


def join_generate(model: nn.Module, run: Run, device: torch.device) -> None:
    """Let ``generate`` of a Hugging Face model be a joined block; not where the caller says by
    ``synced_gpus`` how ranks keep in step, nor where they must: there it is on."""
    loaded = sys.modules.get("transformers.generation.utils")
    if loaded is None:
        return
    for module in model.modules():
        if isinstance(module, loaded.GenerationMixin):
            module.generate = _generating(module.generate, run, device)


def _generating(original: Any, run: Run, device: torch.device) -> Any:
    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if run.blueprint.why_together:
            kwargs.setdefault("synced_gpus", True)
        if kwargs.get("synced_gpus") is not None:
            return original(*args, **kwargs)
        with torch.no_grad(), _joined(run, device):
            return original(*args, **kwargs)

    return generate
