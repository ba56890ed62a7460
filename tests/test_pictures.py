# SPDX-License-Identifier: Apache-2.0
"""The pictures of the docs are what their script draws."""

from __future__ import annotations

import pictures


def test_the_step_is_as_drawn() -> None:
    assert pictures.SVG.read_text(encoding="utf-8") == pictures.picture(), (
        "run: python docs/pictures.py"
    )
