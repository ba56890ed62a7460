# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext doctor``: is it loaded, which patches are in, which layers would be replaced."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import _ds_moe_ext_autoload
from ds_moe_ext import _autoload
from ds_moe_ext.report.units import wide_console


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help=(
            "show whether it is loaded, which patches are applied, and which layers of a "
            "model it would replace"
        ),
    )
    parser.add_argument(
        "--model",
        help="a Hugging Face config.json (or its folder), a file like those of configs/models, a "
        "name there, or 'package.module:function' that returns a model: list the layers that would "
        "be replaced",
    )
    parser.set_defaults(run=lambda given: examine(given.model))


def examine(model: str | None) -> int:
    """Print what is loaded and patched; or a line of it, and the layers of a model. 0 if all is
    well.

    With a model, hosts that it does not load are left out: their imports take most of the time.
    """
    console = wide_console()
    console.print(_loading())
    layers, hosts = None, list(PATCHED)
    if model is not None:
        from ds_moe_ext.commands import model_layers  # loads torch

        layers = model_layers.layers_table(model)
        hosts = [host for host in PATCHED if host.module in sys.modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what else Megatron would like
        well = _are_in(hosts, console, is_brief=model is not None)
    if layers is not None:
        console.print(layers)
    return 0 if well else 1


def _are_in(hosts: Sequence[PatchedHost], console: Console, *, is_brief: bool) -> bool:
    """Print which patches are in, and whether all are."""
    well = True
    for host in hosts:
        version = _version(host)
        if version is None:
            console.print(f"{host.name}: {host.absent}")
            continue
        title = f"{host.name} {version}{host.when}"
        rows = _patch_rows(host)
        if is_brief and not any(row.failure for row in rows):
            console.print(f"{title}: all {len(rows)} patches are applied", highlight=False)
            continue
        table = Table("patch", "state", "target", "why", title=title, title_justify="left")
        for row in rows:
            table.add_row(row.id, "out" if row.failure else "in", row.target, row.reason)
        console.print(table)
        for failure in dict.fromkeys(row.failure for row in rows if row.failure):
            console.print(failure, soft_wrap=True, markup=False)
            well = False
    return well


def _loading() -> str:
    names = [e.name for e in importlib.metadata.entry_points(group="torch.backends")]
    if _ds_moe_ext_autoload.PACKAGE not in names:
        return (
            "autoload: the entry point is not installed; pip install ds-moe-ext, or import "
            "ds_moe_ext in the script"
        )
    for variable in _autoload.switched_off_by():
        return f"autoload: off, by {variable}=0"
    # None where the package is found by an editable install alone.
    spec = PathFinder.find_spec(_ds_moe_ext_autoload.PACKAGE, [os.getcwd(), *sys.path])
    if spec is not None and (other := _ds_moe_ext_autoload.shadow(spec)):
        return f"autoload: off for scripts of this folder: {other}"
    return "autoload: on, by torch's entry points"


class PatchedHost(NamedTuple):
    """A host that the doctor looks at."""

    name: str  # for a person; of the distribution, where that knows the version
    module: str  # that is there where the host is
    patches: str  # module of ours with its patches
    versioned: str = ""  # module that knows the version; empty asks the installed distribution
    when: str = ""  # they are applied, where not whenever the host is imported
    absent: str = "not installed"  # reported where it is not there


PATCHED = (
    PatchedHost("accelerate", "accelerate", "ds_moe_ext.patches.accelerate"),
    PatchedHost("transformers", "transformers.trainer", "ds_moe_ext.patches.transformers"),
    PatchedHost("deepspeed", "deepspeed", "ds_moe_ext.patches.deepspeed"),
    PatchedHost(
        "Megatron-core",
        "megatron.core",
        "ds_moe_ext.patches.megatron",
        "megatron.core",
        ", patched where --ds-moe-ext-config is given",
    ),
    PatchedHost(
        "Megatron-LM",
        "megatron.training",
        "ds_moe_ext.patches.megatron_training",
        "megatron.core",
        absent="not on PYTHONPATH",
    ),
)


def _version(host: PatchedHost) -> str | None:
    """Of the host; None where it is not there."""
    try:
        if not host.versioned:
            return importlib.metadata.version(host.name)
        if importlib.util.find_spec(host.module) is None:
            return None
    except (importlib.metadata.PackageNotFoundError, ImportError):  # nor what it lies in
        return None
    version: str = importlib.import_module(host.versioned).__version__
    return version


class PatchRow(NamedTuple):
    """One line of the doctor's table."""

    id: str
    failure: str  # empty where the patch is in
    target: str = ""
    reason: str = ""


def _patch_rows(host: PatchedHost) -> list[PatchRow]:
    try:
        importlib.import_module(host.module)
        module = importlib.import_module(host.patches)
    except Exception as error:
        return [PatchRow("all", repr(error))]
    try:
        module.apply()
        failure = ""
    except Exception as error:
        failure = str(error)
    return [
        PatchRow(p.id, "" if p.is_applied else failure, p.target, p.reason) for p in module.PATCHES
    ]
