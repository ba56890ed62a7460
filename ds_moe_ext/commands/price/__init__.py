# SPDX-License-Identifier: Apache-2.0
"""``ds-moe-ext price``: what a job would take under every strategy.

``inputs`` reads the job, ``market`` prices its candidates, ``words`` and ``market_page`` show them,
``command`` is the command. It imports ``planning`` and ``report``. ``plan mixed-cluster`` reads its
job as ``price`` does: both have the arguments of ``add_job``.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_job(add: Callable[..., Any], *, required: bool = True) -> None:
    """Add what says which model is trained, on what and how.

    Args:
        add: a parser's ``add_argument``.
        required: ``--hardware`` must be given.
    """
    add("--model", type=Path, help="a Hugging Face config.json, or a name of configs/models")
    add(
        "--hardware",
        nargs="+",
        required=required,
        help="a file, or a name of configs/hardware, as dgx_h100; one for each kind of node",
    )
    add("--nodes", type=int, nargs="+", help="nodes of each cluster (default: as in its file)")
    add(
        "--loads",
        default="zipf:0.6",
        help="a workload, a name of configs/loads or a file: see loads",
    )
    add("--length", type=int, help="tokens per sample")
    add("--micro-batch", type=int, help="samples per rank and pass")
    add("--micro-batches", type=int, help="passes per step")
    add(
        "--recomputes",
        action=argparse.BooleanOptionalAction,
        help="recompute activations in backward",
    )
