# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe: ``patches/`` is the package ``ds_moe_ext.patches``, as once installed."""

from __future__ import annotations

from typing import Any

from griffe import Extension, GriffeLoader, Module


class Patches(Extension):
    """Puts the folder where ``package_dir`` of setup.cfg puts it."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        """Add it to our package, which names functions of it as its own."""
        if pkg.name == "ds_moe_ext":
            pkg.set_member("patches", loader.load("patches"))
