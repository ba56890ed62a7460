"""Classes of a user's own, by the path that JSON names them with."""

from __future__ import annotations

import pkgutil
from typing import Any


def found_at(path: str, where: str, example: str) -> Any:
    """What is at ``"package.module:Name"``.

    Args:
        path: as JSON gives it.
        where: dotted name of the key, for errors.
        example: of a path that would do.

    Raises:
        ValueError: nothing is, or it cannot be imported.
    """
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(
            f"{where} is {path!r}, which cannot be imported ({error!r}); give the importable "
            f"module and the class in it, as {example}"
        ) from error
