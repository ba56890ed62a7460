# SPDX-License-Identifier: Apache-2.0
"""Write docs/known_limits.md: what is refused at start, from the rows that refuse it.

python docs/known_limits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_moe_ext.attachment.refusal import Refusal
from ds_moe_ext.hosts.deepspeed import refusals as deepspeed
from ds_moe_ext.hosts.deepspeed import slices
from ds_moe_ext.hosts.megatron import refusals as megatron
from ds_moe_ext.hosts.megatron import role_refusals as megatron_roles
from ds_moe_ext.hosts.plain import plain_host as plain
from ds_moe_ext.steps import optimizer_kinds
from ds_moe_ext.zebra.early_refusals import EARLY

PAGE = Path(__file__).parents[1] / "docs/known_limits.md"

INTRODUCTION = """\
# Known limits

What is refused at start, by an error that says the same: each row is what a user asks for, why it
does not go with replaced experts, and what to do. This page is made of the rows that refuse
(`python docs/known_limits.py`), and a test compares the two. What composes with what otherwise is
in [composition.md](composition.md).
"""


@dataclass(frozen=True)
class Section:
    """Rows that are asked together.

    Attributes:
        title: of the section.
        rows: in the order in which they are asked.
    """

    title: str
    rows: Sequence[Refusal]

    def __str__(self) -> str:
        lines = [f"## {self.title}", "", "| asked for | why not | what to do |", "|---|---|---|"]
        lines += [f"| {row.what} | {row.reason} | {row.remedy} |" for row in self.rows]
        return "\n".join(lines)


SECTIONS = (
    Section("Under DeepSpeed", deepspeed.UNSUPPORTED),
    Section("Under DeepSpeed, at ZeRO 3", deepspeed.AT_STAGE_3),
    Section("Under DeepSpeed, where ranks have roles (`zebra`)", deepspeed.WITH_ROLES),
    Section("Under DeepSpeed, where `esp` slices dense gradients", slices.UNSLICED),
    Section(
        "Under Megatron-core",
        (*megatron.SETTINGS, *megatron.REFUSALS, *megatron.STEPPING),
    ),
    Section("Under Megatron-core, where experts move", (*megatron.MOVING, *megatron.SUMMED)),
    Section(
        "Under Megatron-core, where ranks have roles (`zebra`)",
        (*EARLY, *megatron_roles.BLOCKS, *megatron_roles.WITH_ROLES, *megatron_roles.ARGUMENTS),
    ),
    Section("In plain PyTorch", plain.REFUSALS),
    Section("Optimizers", optimizer_kinds.OPTIMIZERS),
)


def page() -> str:
    return "\n\n".join((INTRODUCTION.rstrip(), *map(str, SECTIONS))) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
