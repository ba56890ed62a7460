# SPDX-License-Identifier: Apache-2.0
"""Attributes of DeepSpeed's objects that are others while something runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def during(owner: Any, **others: Any) -> Iterator[None]:
    """A block in which attributes of an object are these; methods that its class has come back."""
    before = {name: getattr(owner, name) for name in others if name in vars(owner)}
    for name, value in others.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in others:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
