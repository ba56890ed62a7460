# SPDX-License-Identifier: Apache-2.0
"""What ``ds-moe-ext verify`` told this process; both of its runs draw the same, also where the
script sets no seed."""

from __future__ import annotations

import os
import random
from contextlib import AbstractContextManager

import numpy as np
import torch

from ds_moe_ext._autoload import VERIFY
from ds_moe_ext.verification.trial import Trial


def trial_of_this_run() -> Trial:
    """Which of the two runs this is."""
    return Trial.from_text(os.environ[VERIFY])


def undrawn() -> AbstractContextManager[None]:
    """Behind the block torch's generators are as before, whatever a start draws in it: the script
    goes on alike in both runs, by its own seeds if it sets any."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices)


def apply() -> None:
    """Seed all generators; called when torch has been imported, before the script does."""
    seed = trial_of_this_run().seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
