# SPDX-License-Identifier: Apache-2.0
"""The ``ds_moe_ext`` block of a JSON file, read strictly into records.

``read_settings`` gives ``Settings`` and the chosen strategy. The records are the schema, as
``strict`` has it; null means automatic.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_moe_ext.files.documents import file_of, names_of, read_document
from ds_moe_ext.moe.hooks import NO_HOOKS, Hooked
from ds_moe_ext.planning.strategy import Choosing, Overlay, Strategy, class_at, registered
from ds_moe_ext.schedule.watch import Patience
from ds_moe_ext.strategies import auto, ep, esp, fssdp, prophet, zebra  # noqa: F401  register themselves
from ds_moe_ext.strict import (
    all_at_least,
    check_object,
    fields_of,
    nearest,
    one_of,
    read_record,
    shortened,
)

if TYPE_CHECKING:
    from ds_moe_ext.moe.gate import Gate
else:
    Gate = Any  # torch is loaded where a block names a gate or hooks

BLOCK = "ds_moe_ext"
MOST_CHARACTERS = 1000  # of an error
NEAR = 0.8
"""Share of letters in common above which a key was meant to be the block's; no name in DeepSpeed's
own code has 0.7."""


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What the run leaves behind."""

    enabled: bool = True  # print a table at the start and a summary at the end
    path: str | None = None  # folder for report.json and report.html; null writes no files
    trace_step: int | None = 5  # optimizer step whose tasks are drawn as a timeline; null for none
    max_steps: int = 400  # steps kept for the heatmap; a longer run is thinned evenly
    # seconds between two writings of the files while the run goes on, at least; null writes them at
    # its end only
    write_every_s: int | None = 300
    # let the host's own monitor (TensorBoard, W&B, ...) have scalars, where it is on
    monitor: bool = True

    def __post_init__(self) -> None:
        if self.path == "":
            raise ValueError(
                f"{BLOCK}.report.path is '', which is not a folder; name one ('.' is where the "
                "job starts), or write null for no files"
            )
        all_at_least(f"{BLOCK}.report", self, trace_step=0, max_steps=2, write_every_s=0)


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """A Chrome/Perfetto trace of steps."""

    path: str | None = None  # file to write; null traces nothing
    first_step: int = 5  # first optimizer step in it
    num_steps: int = 1  # steps in it

    def __post_init__(self) -> None:
        all_at_least(f"{BLOCK}.trace", self, first_step=0, num_steps=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How checkpoints are kept."""

    # write the CRC-32 of each file beside its length; loading compares what is there
    checksums: bool = True


HOST, PROGRAM = "host", "program"  # who runs a layer, by their JSON names


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """What concerns Megatron-core alone."""

    # who runs an MoE layer: "host", Megatron itself, with replicas of experts as guests in its
    # layer; or "program", this package in its place. Null: the host where the strategy only says
    # where experts compute
    layer: str | None = None

    def __post_init__(self) -> None:
        if self.layer is not None:
            one_of(f"{BLOCK}.megatron.layer", self.layer, (HOST, PROGRAM))


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What is reported, kept and checked of a run, whatever its strategy."""

    report: ReportSettings = field(default_factory=ReportSettings)  # what the run leaves behind
    trace: TraceSettings = field(default_factory=TraceSettings)  # a trace of steps
    # how long waits for other ranks may last before something is logged
    waits: Patience = field(default_factory=Patience)
    # how checkpoints are kept
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    debug: bool = False  # check on every new plan that all ranks agree


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """The block."""

    enabled: bool = False  # replace the MoE layers of the model
    strategy: str = "ep"  # registered name, or ``"package.module:Class"`` of the user's own
    # strategy that decides where experts compute, where ``strategy`` is one that lays a pipeline
    # (esp) or roles (zebra) over it; null leaves them at their owners
    balance: str | None = None
    # EP ranks that the experts of a layer are spread over; null chooses
    expert_parallel_size: int | None = None
    # ranks of an ETP group that split each expert; null chooses
    expert_sharding_size: int | None = None
    # under tensor parallelism, each rank's hidden states at the MoE layers are a part of the
    # sequence; false: all ranks have the same, and share the work
    sequence_parallel: bool = False
    # rows that an expert takes from one rank, over the mean; null drops none
    capacity_factor: float | None = None
    gate: Gate | None = None  # which experts a token goes to; null leaves that to the host's router
    # what is done to the layers' rows, who is notified of them, and what they travel as; null for
    # nothing, nobody, as is
    hooks: Hooked = NO_HOOKS
    # regular expression on module names: replace only what it finds
    moe_layer_pattern: str | None = None
    # file that describes the cluster, as ``ds-moe-ext profile`` writes it; null measures in the
    # first steps what the strategy needs to know
    hardware: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # keys of a strategy of the user's own
    # under Megatron-core alone
    megatron: MegatronSettings = field(default_factory=MegatronSettings)

    def __post_init__(self) -> None:
        all_at_least(BLOCK, self, expert_parallel_size=1, expert_sharding_size=1)
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"{BLOCK}.capacity_factor is {self.capacity_factor}; it must be above 0 and "
                "finite, or null to drop no tokens"
            )
        if self.capacity_factor is not None and self.gate is not None and self.gate.is_even:
            raise ValueError(
                f"{BLOCK}.capacity_factor is {self.capacity_factor}, but {BLOCK}.gate is "
                f"{self.gate}, which gives every expert the same number of tokens; leave "
                "capacity_factor out"
            )
        try:
            re.compile(self.moe_layer_pattern or "")
        except (OverflowError, RecursionError, re.error) as error:
            raise ValueError(
                f"{BLOCK}.moe_layer_pattern is {self.moe_layer_pattern!r}, which is not a "
                f"regular expression ({error}); mend it"
            ) from error
        if self.options and self.placing in registered():
            raise ValueError(
                f"{BLOCK}.options has no effect with the built-in strategy {self.placing!r}; its "
                f"keys go into the block {BLOCK}.{self.placing}"
            )

    @property
    def placing(self) -> str:
        """The strategy that decides where experts compute."""
        return self.balance or self.strategy


def read_file(path: str | Path, reported: str) -> Any:
    """A JSON file that a user gives for its block, or one of ``configs/strategies`` by its name;
    ``reported`` says what was given, the beginning of an error."""
    try:
        return read_document(file_of("strategies", path))
    except ValueError as error:
        raise ValueError(
            f"{reported}, which cannot be read as JSON ({error}); name a file with a {BLOCK!r} "
            "block, as those in configs/strategies are "
            f"({nearest(str(path), names_of('strategies'))})"
        ) from error


def read_settings(document: Mapping[str, Any]) -> tuple[Settings, Strategy | None]:
    """Read the block of a whole JSON document, as of DeepSpeed or of our own.

    All strategy blocks are checked, also of those that are not chosen, so that a mistake shows
    before it matters. Code that a block names is imported where it is enabled alone.

    Returns:
        The settings, and the chosen strategy; None for the strategy where the block is absent or
        not enabled.
    """
    try:
        return _read(document)
    except ValueError as error:
        if len(str(error)) <= MOST_CHARACTERS:
            raise
        raise ValueError(shortened(str(error), MOST_CHARACTERS)) from error


def _read(document: Mapping[str, Any]) -> tuple[Settings, Strategy | None]:
    check_object("the document", document)
    block = document.get(BLOCK)
    if block is None:
        return Settings(), None
    check_object(BLOCK, block)
    names = _fields(Settings)
    for key in block:
        if key not in names and key not in registered():
            owners = [name for name, cls in registered().items() if key in _fields(cls)]
            remedy = nearest(key, {*names, *registered()})
            if owners:
                remedy = f"it goes into the block {BLOCK}.{f' or {BLOCK}.'.join(owners)}"
            raise ValueError(f"{BLOCK} has no key {key!r}; {remedy}")
    block = block if block.get("enabled") is True else _without_code(block)
    gate, hooks = None, NO_HOOKS
    if block.get("gate") is not None:
        from ds_moe_ext.moe.gate import read_gate

        gate = read_gate(block["gate"], f"{BLOCK}.gate")
    if block.get("hooks") is not None:
        from ds_moe_ext.moe.hooked import read_hooks

        hooks = read_hooks(block["hooks"], f"{BLOCK}.hooks")
    plain = {k: v for k, v in block.items() if k in names and k not in ("gate", "hooks")}
    settings = dataclasses.replace(read_record(Settings, plain, BLOCK), gate=gate, hooks=hooks)
    blocks: dict[str, Strategy] = {
        name: read_record(cls, {} if block.get(name) is None else block[name], f"{BLOCK}.{name}")
        for name, cls in registered().items()
    }
    strategy = _chosen(settings, blocks)
    return settings, strategy if settings.enabled else None


def _without_code(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what would be imported: strategies, a gate and hooks of the user's own."""
    hooks = block.get("hooks")
    if isinstance(hooks, list):
        block = {**block, "hooks": [hook for hook in hooks if not _is_code(_name_of(hook))]}
    if any(_is_code(block.get(key)) for key in ("strategy", "balance")):
        left_out = ("strategy", "balance", "options")
        block = {key: value for key, value in block.items() if key not in left_out}
    if _is_code(_name_of(block.get("gate"))):
        block = {key: value for key, value in block.items() if key != "gate"}
    return block


def _name_of(named: Any) -> Any:
    return named.get("type") if isinstance(named, Mapping) else named


def _is_code(name: Any) -> bool:
    return isinstance(name, str) and ":" in name


def misspelt(document: Mapping[str, Any]) -> str:
    """What to report of keys that are nearly ``BLOCK``, which nobody reads; empty if there are
    none. One that begins with no letter is taken to be switched off. Pure."""

    def is_near(key: str) -> bool:
        if key == BLOCK or not key[:1].isalpha():
            return False
        given, ours = (re.sub("[^a-z0-9]", "", name.lower()) for name in (key, BLOCK))
        given = given.replace("deepspeed", "ds")
        return given.startswith(ours) or SequenceMatcher(None, given, ours).ratio() > NEAR

    near = [key for key in document if isinstance(key, str) and is_near(key)]
    if not near:
        return ""
    return (
        f"unknown key {', '.join(map(repr, near))} in the configuration; did you mean "
        f"{BLOCK!r}? (to switch it off, set {BLOCK}.enabled to false)"
    )


def _fields(cls: type) -> set[str]:
    return {f.name for f in fields_of(cls)}


def _chosen(settings: Settings, blocks: Mapping[str, Strategy]) -> Strategy:
    chosen = _named("strategy", settings.strategy, settings, blocks)
    if isinstance(chosen, Choosing):
        chosen = chosen.among(blocks)
    if settings.balance is None:
        if not isinstance(chosen, Overlay):
            return chosen
        # Over what it lies over by itself, with the keys that stand in that one's block.
        likes = (block for block in blocks.values() if type(block) is type(chosen.placing))
        return chosen.over(next(likes, chosen.placing))
    if not isinstance(chosen, Overlay):
        overlays = (repr(name) for name, block in blocks.items() if isinstance(block, Overlay))
        raise ValueError(
            f"{BLOCK}.balance is {settings.balance!r}, but strategy {settings.strategy!r} "
            "places experts itself; leave balance out, or set strategy to "
            f"{' or '.join(overlays)}"
        )
    placing = _named("balance", settings.balance, settings, blocks)
    if not _may_balance(placing):
        raise ValueError(
            f"{BLOCK}.balance is {settings.balance!r}, which cannot place experts for "
            f"strategy {settings.strategy!r}; "
            f"{nearest('', (name for name in blocks if _may_balance(blocks[name])))}"
        )
    return chosen.over(placing)


def _may_balance(block: Strategy) -> bool:
    """Whether it places experts, on ranks that all do the same."""
    return not (isinstance(block, (Overlay, Choosing)) or block.has_roles)


def _named(key: str, name: str, settings: Settings, blocks: Mapping[str, Strategy]) -> Strategy:
    """A built-in strategy, or one of the user's own."""
    if ":" in name:
        return read_record(class_at(name, f"{BLOCK}.{key}"), settings.options, f"{BLOCK}.options")
    one_of(f"{BLOCK}.{key}", name, blocks)
    return blocks[name]
