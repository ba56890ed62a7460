# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all; and lengths and checksums of a checkpoint's files, by
which damage and mix-ups are found."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FileSum = Sequence[int | None]
"""Bytes of a file, and their CRC-32; None where that was not asked for."""

_CHUNK_BYTES = 2**22


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of a file behind the block: who reads it, or finds it
    behind a crash, has the old one or the new one. Where writing fails, what was there stays, and
    nothing else."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # a disk that is full needs the room
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, whenever this process or machine ends."""
    with replacing(path) as new, new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file, if it is there; it is gone from the disk then, before anything is written."""
    if not path.exists():
        return
    path.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def why_unwritable(path: Path, *, makes_folders: bool) -> str:
    """Why a file cannot be written, tried without changing it; empty if it can.

    Args:
        path: of the file.
        makes_folders: those that it lies in; else they must be there.
    """
    try:
        if makes_folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        # A pipe that nobody reads would have an ordinary open wait for ever.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666))
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # of a name that no file can have
        return str(error)
    return ""


# Lengths and checksums.


def sum_of(path: Path) -> FileSum:
    crc, num_bytes = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, num_bytes = zlib.crc32(chunk, crc), num_bytes + len(chunk)
    return num_bytes, crc


def sums_of(folder: Path, names: Sequence[str], *, checksums: bool = True) -> dict[str, FileSum]:
    """Those of files that were written, by their names from the folder; they are on the disk then,
    and not only on their way to it. Without checksums lengths alone, so that no file is read."""
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    if checksums:
        return {name: sum_of(folder / name) for name in names}
    return {name: ((folder / name).stat().st_size, None) for name in names}


def read_sum(reported: Sequence[Any]) -> FileSum:
    """What a file says of another.

    Raises:
        TypeError, ValueError: it says nothing of the kind.
    """
    num_bytes, crc = reported
    return int(num_bytes), None if crc is None else int(crc)


def sum_of_document(document: Mapping[str, Any]) -> int:
    """CRC-32 of what a document of JSON says, however it is written."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def write_summed(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document of JSON whole, with its CRC-32 in it."""
    summed = {**document, "crc32": sum_of_document(document)}
    write_whole(path, json.dumps(summed, indent=1))


def check_summed(document: dict[str, Any]) -> None:
    """Take the CRC-32 out of a document; null where a person has changed something. Raises
    ValueError where it is another's."""
    crc = document.pop("crc32", 0)
    if crc is not None and crc != sum_of_document(document):
        raise ValueError("its crc32 differs")


def check(folder: Path, sums: Mapping[str, FileSum], reported_by: str) -> None:
    """Whether files of a folder are what they were, as the file ``reported_by`` says.

    Raises:
        ValueError: they are not.
    """
    wrong = [
        f"{folder / name} {reason}"
        for name, reported in sums.items()
        if (reason := _wrong(folder / name, reported))
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more files)" if wrong[1:] else ""
        raise ValueError(
            f"{wrong[0]}{more}, other than {folder / reported_by} says: it is missing or damaged, "
            "or of another save; copy the whole folder again, or choose another checkpoint"
        )


def _wrong(path: Path, reported: FileSum) -> str:
    num_bytes, crc = reported
    try:
        found = path.stat().st_size
        if found != num_bytes:
            return f"has {found} bytes, not {num_bytes}"
        is_same = crc is None or tuple(sum_of(path)) == tuple(reported)
        return "" if is_same else "has other contents"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
