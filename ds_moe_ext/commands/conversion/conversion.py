# SPDX-License-Identifier: Apache-2.0
"""One conversion: which form a folder has, open, check, write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from ds_moe_ext.commands.conversion import deepspeed, huggingface, megatron, tables
from ds_moe_ext.commands.conversion.description import (
    Document,
    document_of,
    model_of,
    read_document,
)
from ds_moe_ext.commands.conversion.megatron import flags_of, model_of_arguments
from ds_moe_ext.commands.conversion.model import AnyModel, Table
from ds_moe_ext.commands.conversion.stored import Maker, Pieces, Source
from ds_moe_ext.commands.conversion.tables import cells, decoder_of
from ds_moe_ext.files.whole_files import why_unwritable
from ds_moe_ext.report.units import say


class Form(Enum):
    """How a checkpoint is kept."""

    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    HUGGINGFACE = "huggingface"


@dataclass(frozen=True)
class Asked:
    """What a conversion is asked for."""

    source: Path  # folder
    target: Path  # folder, which must not have anything
    goal: Form  # form of the target
    given: Form | None = None  # form of the source; None asks its folder
    described: Path | None = None  # of the model; None asks the source
    dtype: torch.dtype | None = None  # of the weights; None leaves them


def convert(asked: Asked, console: Console) -> AnyModel:
    """Write a checkpoint's weights in another form, and say what was done; the model that it is of.

    Raises:
        ValueError: what cannot be converted, and why.
    """
    form = form_of(asked.source, asked.given)
    if form is asked.goal:
        raise ValueError(f"{asked.source} already has form {form.value}")
    if asked.target.exists() and not asked.target.is_dir():
        raise ValueError(f"{asked.target} is not a folder; name a new one")
    if asked.target.exists() and any(asked.target.iterdir()):
        raise ValueError(f"{asked.target} is not empty; name a new folder")
    with ExitStack() as files, Progress(console=console, transient=True) as progress:
        opened = _WAYS[form].open(asked, files)
        model, document = opened.model, opened.document
        if asked.goal is Form.HUGGINGFACE:
            document = {**document_of(model), **document}
        table = _WAYS[asked.goal].table(model)
        total = sum(1 for _ in cells(model, table))
        task = progress.add_task(f"{form.value} to {asked.goal.value}", total=total)
        pieces = Pieces(opened.source, model)
        maker = Maker(model, pieces, asked.dtype, lambda: progress.advance(task))
        if reason := why_unwritable(asked.target / "file", makes_folders=True):
            raise ValueError(
                f"TARGET is {str(asked.target)!r}, where nothing can be written ({reason}); name "
                "another folder, new or empty"
            )
        _WAYS[asked.goal].write(asked.target, maker, document)
    _report(console, asked, opened)
    return model


@dataclass(frozen=True)
class _Opened:
    """A source and the model that it is of."""

    source: Source  # to read
    model: AnyModel  # that it is of
    document: Document  # its config, as far as it was given
    has_states: bool  # of an optimizer


def _open_huggingface(asked: Asked, files: ExitStack) -> _Opened:
    document = read_document(asked.described or asked.source)
    model = model_of(document)
    source = huggingface.open_source(asked.source, model, files)
    return _Opened(source, model, document, has_states=False)


def _open_deepspeed(asked: Asked, files: ExitStack) -> _Opened:
    tag = deepspeed.tag_of(asked.source)
    if asked.described is None:
        raise ValueError(
            f"{tag} does not name its model; add --model: its Hugging Face config.json, or a "
            "file like those of configs/models"
        )
    document = read_document(asked.described)
    model = model_of(document)
    return _Opened(deepspeed.open_source(tag, model), model, document, has_states=True)


def _open_megatron(asked: Asked, files: ExitStack) -> _Opened:
    folder = megatron.iteration_of(asked.source)
    document: Document = {} if asked.described is None else read_document(asked.described)
    if document:
        model = decoder_of(model_of(document))
    else:
        model = model_of_arguments(megatron.arguments(folder))
    source = megatron.open_source(folder, model)
    return _Opened(source, model, document, megatron.has_optimizer(folder))


@dataclass(frozen=True)
class _Way:
    """How a form is known, read and written."""

    is_here: Callable[[Path], bool]  # whether a folder looks like it
    open: Callable[[Asked, ExitStack], _Opened]  # a source
    table: Callable[[AnyModel], Table]  # names of what is written
    write: Callable[[Path, Maker, Document], None]  # into a folder, given the config of the model


_WAYS = {
    Form.MEGATRON: _Way(
        megatron.is_here,
        _open_megatron,
        lambda model: tables.in_megatron(decoder_of(model)),
        lambda folder, maker, _: megatron.write(folder, maker),
    ),
    Form.DEEPSPEED: _Way(
        deepspeed.is_here,
        _open_deepspeed,
        lambda model: tables.in_deepspeed(model).both,
        lambda folder, maker, _: deepspeed.write(folder, maker),
    ),
    Form.HUGGINGFACE: _Way(
        huggingface.is_here,
        _open_huggingface,
        lambda model: tables.in_huggingface(model).files,
        huggingface.write,
    ),
}


def form_of(folder: Path, reported: Form | None) -> Form:
    """That of a folder of a checkpoint, which may be stated (``reported``); a ValueError where it
    is not that one, or of none, or of several."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder of a checkpoint")
    found = [form for form, way in _WAYS.items() if way.is_here(folder)]
    if reported in found:
        return reported
    signs = (
        f"megatron has {megatron.TRACKER} or {megatron.BACKENDS}, deepspeed {deepspeed.LATEST} or "
        f"{deepspeed.LAYOUT_FILE}, huggingface config.json and *.safetensors"
    )
    if reported is not None:
        raise ValueError(f"{folder} is no checkpoint of form {reported.value}: {signs}")
    if len(found) != 1:
        names = " and ".join(form.value for form in found) or "none of the forms"
        raise ValueError(f"{folder} looks like {names}: {signs}; choose one with --from")
    return found[0]


def _report(console: Console, asked: Asked, opened: _Opened) -> None:
    def log_line(line: str) -> None:
        say(console, line)

    model = opened.model
    log_line(
        f"wrote {asked.target}: {model.family.value}, {model.num_layers} layers, "
        f"{model.num_moe_layers} of them with {model.num_experts} experts"
    )
    if opened.has_states:
        log_line("weights only: states of the optimizer, schedules and counters are not converted")
    if asked.goal is Form.MEGATRON:
        log_line("pretrain_gpt.py loads it with --ckpt-format torch_dist --load and")
        for line in flags_of(decoder_of(model)):
            log_line(f"  {line}")
    if asked.goal is Form.DEEPSPEED:
        log_line("an engine loads it with load_checkpoint(folder, load_module_only=True)")
