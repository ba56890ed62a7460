# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext convert``: a checkpoint's weights in the form of another host."""

from __future__ import annotations

import argparse
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

FORMS = ("megatron", "deepspeed", "huggingface")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_convert(commands: Any) -> None:
    """Add ``convert`` to the commands of a parser."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint's weights in the form of Megatron, DeepSpeed or Hugging Face",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="folder of a checkpoint")
    add("target", metavar="TARGET", type=Path, help="folder to write, new or empty")
    add("--from", dest="given", choices=FORMS, help="form of SOURCE; default: as it looks")
    add("--to", dest="goal", choices=FORMS, required=True, help="form of TARGET")
    add(
        "--model",
        dest="described",
        metavar="FILE",
        type=Path,
        help="a Hugging Face config.json (or its folder), a file like those of configs/models, or "
        "a name there; a deepspeed SOURCE needs it, others say themselves",
    )
    add("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    parser.set_defaults(run=convert)


def convert(given: argparse.Namespace) -> int:
    """Do it.

    Raises:
        ValueError: what cannot be converted, and why.
    """
    from rich.console import Console  # other commands do without

    from ds_moe_ext.commands.conversion import conversion

    asked = conversion.Asked(
        source=given.source,
        target=given.target,
        goal=conversion.Form(given.goal),
        given=None if given.given is None else conversion.Form(given.given),
        described=given.described,
        dtype=given.dtype and resolve_name(f"torch:{given.dtype}"),
    )
    conversion.convert(asked, Console())
    return 0
