# SPDX-License-Identifier: Apache-2.0
"""Signatures of the real one in short; not a file of the real one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def takes(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function with this signature, that is handed all arguments as one record; of a class where
    it begins with self, which it is handed first."""
    asked = inspect.signature(eval(f"lambda {signature}: None"))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            bound = asked.bind(*given, **named)
            bound.apply_defaults()
            own = [bound.arguments.pop("self")] if "self" in bound.arguments else []
            return function(*own, SimpleNamespace(**bound.arguments))

        call.__signature__ = asked  # type: ignore[attr-defined]
        return call

    return decorate
