# SPDX-License-Identifier: Apache-2.0
"""Files that would run something where they are unpickled, and what reports whether they did."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

TABLE = ".metadata"


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def archive_of(thing: Any) -> bytes:
    """As ``torch.save`` writes it."""
    stream = io.BytesIO()
    torch.save(thing, stream)
    return stream.getvalue()


def plant_in_table(path: Path, marker: Path) -> None:
    """Beside what a table of DCP has."""
    table: Metadata = pickle.loads(path.read_bytes())
    table.planner_data = Payload(marker)
    path.write_bytes(pickle.dumps(table))


def plant_as_object(folder: Path, name: str, marker: Path) -> None:
    """In place of an object of a folder of DCP."""
    table: Metadata = pickle.loads((folder / TABLE).read_bytes())
    place = table.storage_data[MetadataIndex(name)]
    archive, path = archive_of({"a": Payload(marker)}), folder / place.relative_path
    place.offset, place.length = path.stat().st_size, len(archive)
    path.write_bytes(path.read_bytes() + archive)
    (folder / TABLE).write_bytes(pickle.dumps(table))


def plant_in_archive(path: Path, marker: Path) -> None:
    """Beside what a file of ``torch.save`` has."""
    whole: dict[str, Any] = torch.load(path, weights_only=False)
    path.write_bytes(archive_of({**whole, "more": Payload(marker)}))


def program(path: Path) -> None:
    """A program of TorchScript, which ``torch.load`` sets up."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)
