"""Which layers of a model would be replaced."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from ds_moe_ext.hosts.deepspeed.startup import FINDERS
from ds_moe_ext.hosts.found import any_name


def layers_table(model: str) -> Table:
    """The layers of a model, built without memory.

    Args:
        model: path of a Hugging Face config.json or its folder, or ``"package.module:function"``.

    Raises:
        ValueError: it names no model.
    """
    with torch.device("meta"):
        built = _built(model)
    table = Table(title=f"layers of {type(built).__name__} to replace", title_justify="left")
    for heading in ("layer", "kind", "experts", "parameters"):
        table.add_column(heading)
    for found in (found for finder in FINDERS for found in finder(built, any_name)):
        module = built.get_submodule(found.name)
        count = sum(p.numel() for p in module.parameters())
        table.add_row(found.name, found.kind, str(found.num_experts), f"{count:,}")
    if not table.row_count:
        table.add_row("none found", "", "", "")
    return table


def _built(model: str) -> nn.Module:
    if ":" in model and not Path(model).exists():
        module, _, name = model.partition(":")
        sys.path.insert(0, str(Path.cwd()))  # a person's own module is where they are
        try:
            build = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--model is {model!r}, which cannot be imported: {error}") from error
        built = build()
    elif Path(model).exists():
        from transformers import AutoConfig, AutoModelForCausalLM

        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    else:
        raise ValueError(
            f"--model is {model!r}, which is neither a file or folder nor 'package.module:function'"
        )
    if not isinstance(built, nn.Module):
        raise ValueError(f"--model is {model!r}, which gives no module but {built!r}")
    return built
