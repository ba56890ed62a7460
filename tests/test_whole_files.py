# SPDX-License-Identifier: Apache-2.0
"""What lengths find where checksums were left out, and what they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_moe_ext.files import whole_files


@pytest.mark.parametrize("checksums", [True, False])
def test_damage_is_found_by_what_was_written(tmp_path: Path, checksums: bool) -> None:
    (tmp_path / "a").write_bytes(b"twelve bytes")
    written = whole_files.sums_of(tmp_path, ["a"], checksums=checksums)
    reported = json.loads(json.dumps(written))
    sums = {name: whole_files.read_sum(each) for name, each in reported.items()}
    whole_files.check(tmp_path, sums, "reported")
    (tmp_path / "a").write_bytes(b"twelve bytez")
    if checksums:
        with pytest.raises(ValueError, match="has other contents"):
            whole_files.check(tmp_path, sums, "reported")
    else:
        whole_files.check(tmp_path, sums, "reported")
    (tmp_path / "a").write_bytes(b"twelve")
    with pytest.raises(ValueError, match="has 6 bytes, not 12"):
        whole_files.check(tmp_path, sums, "reported")


@pytest.mark.parametrize("reported", [3, "ab", [], [1, 2, 3], [None, 1]])
def test_what_is_no_sum_is_refused(reported: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        whole_files.read_sum(reported)  # type: ignore[arg-type]
