# SPDX-License-Identifier: Apache-2.0
"""``ds_moe_ext.json`` in a checkpoint: how the run was laid out that wrote it, and what it wrote.

A save has an id, which all of its parts have: this file, DeepSpeed's and our folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_moe_ext import older_names
from ds_moe_ext.files import whole_files
from ds_moe_ext.files.whole_files import FileSum
from ds_moe_ext.strict import check_object, read_record

LAYOUT_FILE = "ds_moe_ext.json"

FORMAT = 4  # of the checkpoint; 1 had a file an expert

READ = (2, 3, FORMAT)
"""2 had experts flattened, as dense weights still are, and none was split. Before 4 a save had no
id, and its files no checksums."""

FOLDER = "ds_moe_ext"  # in the checkpoint, beside DeepSpeed's files

SAVE = "ds_moe_ext_save"  # name of the save's id in DeepSpeed's file and in the folder


@dataclass(frozen=True)
class SavedLayout:
    """What the file says."""

    strategy: str  # that the run had
    expert_parallel_size: int  # EP ranks
    expert_sharding_size: int  # ranks of an ETP group, which split its experts between them
    world_size: int  # ranks
    zero_stage: int  # of DeepSpeed
    num_experts: Mapping[str, int]  # of each layer, in model order
    owners: Mapping[str, Sequence[int]]  # of each layer, the EP rank where each expert lives
    # of each layer, the slot there that each expert lies in: the name that the slot's first weight
    # had when the run started
    slots: Mapping[str, Sequence[str]]
    optimizer: str | None  # class that steps the weights; None without one
    step: int  # optimizer steps that were taken
    tensor_parallel_size: int = 1  # ranks that share the dense weights of one copy of the model
    pipeline_stages: int = 1  # of a ``PipelineModule``, each with a file of dense weights; else 1
    save: str | None = None  # id of the save; None before format 4
    # lengths and checksums, by name from the folder; of all files but this, and those that
    # DeepSpeed goes on writing
    files: Mapping[str, FileSum] | None = None
    # of each layer how it routed, see ``attachment/routing_facts``; None where a checkpoint does
    # not say
    routing: Mapping[str, Mapping[str, Any]] | None = None

    def write(self, folder: Path) -> None:
        """Write it; that it is there says that all else is."""
        document = {"format": FORMAT, **older_names.on_disk(asdict(self))}
        whole_files.write_summed(folder / LAYOUT_FILE, document)

    @classmethod
    def read(cls, folder: Path) -> SavedLayout:
        """That of a checkpoint.

        Raises:
            ValueError: the checkpoint is not one of ours, or not complete.
        """
        path = folder / LAYOUT_FILE
        if not path.exists():
            raise ValueError(
                f"{folder} has no {LAYOUT_FILE}: it was written without ds_moe_ext, with it "
                "disabled, or incompletely; load it with ds_moe_ext disabled, or choose "
                "another checkpoint"
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            check_object("it", document)
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(path, error) from error
        kind = document.get("format", 1)
        if kind not in READ:
            raise ValueError(
                f"{path} is of format {kind!r}: the checkpoint was written by another version "
                f"of ds_moe_ext; this one reads {' and '.join(map(str, READ))} (or the file is "
                "damaged); load it with that version"
            )
        try:
            if kind == FORMAT:
                whole_files.check_summed(document)
            document.pop("format", None)
            return read_record(cls, {"expert_sharding_size": 1, **document}, "it")
        except (ValueError, TypeError) as error:
            raise _damaged(path, error) from error

    def check_owners(self, folder: Path) -> None:
        """Whether it says of all experts where they live."""
        ep_ranks = range(self.expert_parallel_size)
        for name, number in self.num_experts.items():
            owners, slots = self.owners.get(name, ()), self.slots.get(name, ())
            if not len(owners) == len(slots) == number or not all(
                owner in ep_ranks for owner in owners
            ):
                error = ValueError(f"it does not say where the {number} experts of {name} live")
                raise _damaged(folder / LAYOUT_FILE, error)

    def check(self, folder: Path, *, place: int = 0, num_places: int = 1) -> None:
        """Whether the checkpoint's files are what was written: one part of them each by so many
        readers."""
        files = self.files or {}
        names = list(files)[place::num_places]
        try:
            sums = {name: whole_files.read_sum(files[name]) for name in names}
        except (TypeError, ValueError, OverflowError) as error:
            raise _damaged(folder / LAYOUT_FILE, error) from error
        whole_files.check(folder, sums, LAYOUT_FILE)

    def check_save(self, path: Path, reported: Any) -> None:
        """Whether a part of the checkpoint is of this save."""
        if reported != self.save:
            raise ValueError(
                f"{path} is from another save than {LAYOUT_FILE} beside it ({reported} and "
                f"{self.save}): the folder mixes two checkpoints; copy one of them completely, "
                "or choose another"
            )


def _damaged(path: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"{path} cannot be read ({error}): it is damaged; copy the whole folder again, or choose "
        "another checkpoint (if you have changed it yourself, set its crc32 to null)"
    )
