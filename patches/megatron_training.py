# SPDX-License-Identifier: Apache-2.0
"""The patch to Megatron-LM's training scripts: a flag. Without it nothing else is changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from ds_moe_ext.hosts.megatron import FLAG
from ds_moe_ext.patches.patch import Patch, PatchError, apply_all, by


class _Use(argparse.Action):
    """Takes the settings into use as the flag is parsed: before any model is built."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        from ds_moe_ext.patches.megatron import use

        try:
            use(str(values))
        except (ValueError, PatchError) as error:
            parser.exit(2, f"{error}\n")  # in one line, without all flags of Megatron
        setattr(namespace, self.dest, values)


def add_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Give a parser the flag."""
    parser.add_argument_group("ds_moe_ext").add_argument(
        FLAG,
        action=_Use,
        metavar="FILE",
        help="JSON file with a ds_moe_ext block: how MoE layers are trained",
    )
    return parser


def _add_megatron_arguments(original: Any, parser: Any) -> Any:
    return add_flag(original(parser))


def _validate_args(original: Any, args: Any, *given: Any, **named: Any) -> Any:
    from ds_moe_ext.hosts.megatron import active_settings

    parted = active_settings.worlds()
    if parted is not None:
        from ds_moe_ext.hosts.megatron import roles

        roles.settle_arguments(parted, args)
    return original(args, *given, **named)


PATCHES = (
    Patch(
        "flag",
        "megatron.training.arguments:add_megatron_arguments",
        ">=0.12",  # what the flag asks for is checked against the version when it is given
        "pretrain_gpt.py and its like know --ds-moe-ext-config",
        by(_add_megatron_arguments),
    ),
    Patch(
        "expert-arguments",
        "megatron.training.arguments:validate_args",
        ">=0.12",
        "where ranks have roles, those of experts count samples without tensor and context "
        "parallelism, which attention ranks alone have; fusion and background saves are off",
        by(_validate_args),
    ),
)

apply = partial(apply_all, PATCHES)
"""Apply it, or say why not."""
