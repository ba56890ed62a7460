# SPDX-License-Identifier: Apache-2.0
"""Tables of rows in ``.npz`` files.

Shape letters: I steps, L layers, C or R senders (ranks), E experts.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from ds_moe_ext.loads.loads import Loads, check_size

OURS = "rows_ILCE", "steps_I"
OTHERS = "counts_IRLE", "iteration_I"


def write_table(path: Path, loads: Loads) -> None:
    """Write ``rows_ILCE``, ``steps_I`` and ``top_k``, 0 if that is not known."""
    with path.open("wb") as file:
        np.savez_compressed(
            file, rows_ILCE=loads.rows_ILCE, steps_I=loads.steps_I, top_k=loads.top_k or 0
        )


def read_table(path: Path) -> Loads:
    """Read what ``write_table`` wrote, or ``counts_IRLE`` and ``iteration_I``.

    Raises:
        ValueError: the file is no such table.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            rows, steps = OTHERS if OTHERS[0] in names else OURS
            wanted = [name for name in (rows, steps, "top_k") if name in names]
            if wanted[:2] != [rows, steps]:
                raise ValueError(f"it holds {sorted(names)}, but needs {rows} and {steps}")
            tables = {name: _array(archive, name) for name in wanted}
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{path} is no table of loads ({error}); name an .npz file that has rows_ILCE, counts "
            "by step, layer, sender and expert, and steps_I"
        ) from error
    rows_ILCE = tables[rows]
    if rows == OTHERS[0]:
        rows_ILCE = rows_ILCE.swapaxes(1, 2)
    top_k = int(tables.get("top_k", 0)) or None
    return Loads(rows_ILCE, tables[steps], str(path), top_k)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One of numbers, whose size is looked at before there is memory for it."""
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{name} is of version {version} of numpy's format, not (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        dims = {"rows_ILCE": 4, "counts_IRLE": 4, "top_k": 0}.get(name, 1)
        if len(shape) != dims or dtype.kind not in "iu":
            raise ValueError(
                f"{name} is {dtype} of shape {list(shape)}, not whole numbers of {dims} dims"
            )
        check_size(shape, name)
    with archive.open(f"{name}.npy") as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
