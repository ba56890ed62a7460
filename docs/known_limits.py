# SPDX-License-Identifier: Apache-2.0
"""Write docs/known_limits.md: what is refused at start, from the rows that refuse it; and what only
shows while a run goes on, from rows of its own.

python docs/known_limits.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_moe_ext.hosts.attachment.block_hooks import MIXED
from ds_moe_ext.hosts.attachment.notices import Refusal
from ds_moe_ext.hosts.attachment.replacement import SEVERAL_OWNERS
from ds_moe_ext.hosts.deepspeed import refusals as deepspeed
from ds_moe_ext.hosts.megatron import refusals as megatron
from ds_moe_ext.hosts.megatron.checkpoint import UNMOVABLE
from ds_moe_ext.hosts.plain import plain_host as plain
from ds_moe_ext.hosts.steps import optimizers
from ds_moe_ext.hosts.steps.host import UNLIKE

PAGE = Path(__file__).parents[1] / "docs/known_limits.md"

INTRODUCTION = """\
# Known limits

Each row is refused at start, by an error that says the same; the last section only shows while a
run trains. `python docs/known_limits.py` makes this page of the rows that refuse. What composes:
[strategies](strategies/README.md).

Only what you wrote is refused. Where a key is null (the default) and a row of "where experts move"
or "where dense gradients are sliced" applies, the run goes on without, and a line at start says
why. Two exceptions are known too late. In plain PyTorch the optimizer comes after the sizes: one
that takes norms of whole weights needs `expert_sharding_size` 1 under `esp`. And gradients that
[slices cannot take](strategies/esp.md#slices-of-dense-gradients): set `slice_gradients` to false.
"""


@dataclass(frozen=True)
class Limit:
    """What ends in an error while a run goes on.

    Attributes:
        what: as a user does it.
        reason: why it does not go.
        remedy: what to do.
    """

    what: str
    reason: str
    remedy: str


WHILE_IT_TRAINS = (
    Limit(
        "two backward passes through one forward pass of a replaced layer, under any host: with "
        "retain_graph=True, or torch.autograd.grad(..., retain_graph=True) before backward",
        "the first frees what the layer saved, and exchanges rows that a second would exchange "
        "again; the error names the layer",
        "run one backward a forward: add the losses up before it, or run the forward again",
    ),
    Limit(
        "a replaced layer that the last micro-batch of a step passes by (layer drop), where "
        "experts are copied and gradients accumulated; under Megatron-core and in DeepSpeed's "
        "pipelines, which count a layer's passes, also one that another passes by",
        "gradients of replicas wait for the last micro-batch, and go to the owner as that comes "
        "back through the layer; the error comes at the optimizer's step and names it",
        "let every micro-batch use every MoE layer, train without replicas (ep, or "
        "replicas_per_rank 0), or take an optimizer step for each micro-batch",
    ),
    Limit(
        "engine.compile(compiled_autograd_enabled=True) of DeepSpeed",
        "Dynamo goes into the backward of the replaced layers then, which exchanges rows between "
        "ranks, and fails there with an error of its own",
        "use engine.compile() without it, which compiles forward and backward of all that lies "
        "between",
    ),
)


@dataclass(frozen=True)
class Section:
    """Rows that are asked together.

    Attributes:
        title: of the section.
        rows: in the order in which they are asked.
    """

    title: str
    rows: Sequence[Refusal | Limit]

    def __str__(self) -> str:
        lines = [f"## {self.title}", "", "| asked for | why not | what to do |", "|---|---|---|"]
        asked: dict[tuple[str, str], list[str]] = {}  # in one row what has one reason and remedy
        for row in self.rows:
            asked.setdefault((row.reason, row.remedy), []).append(row.what)
        lines += [f"| {'<br>'.join(whats)} | {' | '.join(why)} |" for why, whats in asked.items()]
        return "\n".join(lines)


SECTIONS = (
    Section("Under DeepSpeed", deepspeed.UNSUPPORTED),
    Section("Under DeepSpeed, at ZeRO 3", deepspeed.AT_STAGE_3),
    Section(
        "Where experts move (`reshard_interval` above 0)",
        (deepspeed.OWNERS_AT_STAGE_3, SEVERAL_OWNERS, MIXED, UNLIKE),
    ),
    Section("Under DeepSpeed, where ranks have roles (`zebra`)", deepspeed.WITH_ROLES),
    Section(
        "Under DeepSpeed, where dense gradients are sliced (`slice_gradients` true)",
        deepspeed.UNSLICED,
    ),
    Section(
        "Under Megatron-core",
        (*megatron.SETTINGS, *megatron.STEPPING, *megatron.GUESTS),
    ),
    Section(
        "Under Megatron-core, where experts are copied (`fssdp`, `prophet`)", megatron.REPLICAS
    ),
    Section(
        "Under Megatron-core, where our program runs the layers (`esp`, `zebra`, hooks)",
        megatron.REFUSALS,
    ),
    Section(
        "Under Megatron-core, where experts move (`reshard_interval` above 0)",
        (*UNMOVABLE, *megatron.SUMMED),
    ),
    Section(
        "Under Megatron-core, where ranks have roles (`zebra`)",
        (
            *megatron.BLOCKS,
            *megatron.DIVIDED,
            *megatron.WITH_ROLES,
            *megatron.ARGUMENTS,
        ),
    ),
    Section("In plain PyTorch", plain.REFUSALS),
    Section("Optimizers", optimizers.OPTIMIZERS),
    Section("While it trains", WHILE_IT_TRAINS),
)


def page() -> str:
    return "\n\n".join((INTRODUCTION.rstrip(), *map(str, SECTIONS))) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
