# SPDX-License-Identifier: Apache-2.0
"""What ``ds-moe-ext verify`` told this process; both of its runs draw the same, also where the
script sets no seed."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from ds_moe_ext._autoload import VERIFY
from ds_moe_ext.verification.trial import Trial


def trial_of_this_run() -> Trial:
    """Which of the two runs this is."""
    return Trial.from_text(os.environ[VERIFY])


def seed(number: int) -> None:
    """Of all generators that there are."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def apply() -> None:
    """Called when torch has been imported."""
    seed(trial_of_this_run().seed)
