# SPDX-License-Identifier: Apache-2.0
"""The version of what is installed, as ``setup.cfg`` says it."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("ds-moe-ext")
