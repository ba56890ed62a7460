# SPDX-License-Identifier: Apache-2.0
"""Loads of a finished run, from the ``report.json`` that it left.

It has each expert's rows, summed over the ranks that sent them: of a rank alone nothing is known.
Read as if the cells of the grid had sent equally many each.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ds_moe_ext.files.documents import read_document
from ds_moe_ext.loads.loads import Loads, check_size
from ds_moe_ext.loads.redivision import redivided


def read_report(path: Path) -> Loads:
    """Loads of the steps that a report has.

    Raises:
        ValueError: the file is no report, or one without steps.
    """
    try:
        document = read_document(path)
        steps_I, num_cells = document["steps_I"], document["num_cells"]
        top_ks = [layer["top_k"] for layer in document["layers"]]
        if not (steps_I and top_ks and isinstance(num_cells, int) and num_cells > 0):
            raise ValueError("it has no steps, layers or cells")
        rows_ILE = np.asarray(document["rows_ILE"])
        if rows_ILE.ndim != 3:
            raise ValueError(f"its rows_ILE have {rows_ILE.ndim} dims, not 3")
        check_size((*rows_ILE.shape[:2], num_cells, rows_ILE.shape[2]), "rows_ILE")
        loads = Loads(rows_ILE[:, :, None], np.asarray(steps_I), str(path))
        loads = dataclasses.replace(loads, top_k=_top_k(rows_ILE, num_cells, top_ks))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no report.json of a run with loads ({error}); name that of a finished run"
        ) from error
    return redivided(loads, ranks=num_cells)


def _top_k(rows_ILE: np.ndarray, num_cells: int, top_ks: list[Any]) -> int | None:
    """That of all layers, where the rows are those of whole tokens: not where some were dropped."""
    top_k: Any = top_ks[0]
    if not isinstance(top_k, int) or top_k < 1 or any(other != top_k for other in top_ks):
        return None
    rows_IL = rows_ILE.sum(axis=2)
    are_whole = not (rows_IL % (top_k * num_cells)).any()
    return top_k if are_whole and (rows_ILE.max(axis=2) * top_k <= rows_IL).all() else None
