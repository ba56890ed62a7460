# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest
import torch

# Without it cuBLAS may choose other algorithms when several streams are busy; bits would differ.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
