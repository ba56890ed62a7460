# SPDX-License-Identifier: Apache-2.0
"""Entry point of torch: imports the package where ``import ds_moe_ext`` would find it.

A user's file or folder of the package's name may lie beside a script. It stays what ``import
ds_moe_ext`` gives, and ``import torch`` must work all the same; so the entry point is in a module
of a name that nobody else uses, outside of the package and installed beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from importlib.machinery import ModuleSpec

PACKAGE = "ds_moe_ext"
FOLDER = os.path.join(os.path.dirname(os.path.realpath(__file__)), PACKAGE)


def autoload() -> None:
    """Called by torch at the end of its import."""
    if os.environ.get("DS_MOE_EXT_AUTOLOAD") == "0":
        return
    try:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is not None and (other := shadow(spec)):
            warnings.warn(f"{PACKAGE} is off: {other}", stacklevel=2)
        else:
            importlib.import_module(PACKAGE)  # which attaches it
    except Exception as error:
        warnings.warn(
            f"{PACKAGE} cannot be imported and is off: {error!r}; install it again, or set "
            "DS_MOE_EXT_AUTOLOAD=0",
            stacklevel=2,
        )


def shadow(spec: ModuleSpec) -> str:
    """What is found in place of the package, and what to do; empty where the package is."""
    if spec.origin and os.path.dirname(os.path.realpath(spec.origin)) == FOLDER:
        return ""
    found = spec.origin or ", ".join(spec.submodule_search_locations or ())
    return (
        f"{found} has its name, and Python finds that before the package in {FOLDER}; rename it, "
        "or set DS_MOE_EXT_AUTOLOAD=0 to run without the package"
    )
