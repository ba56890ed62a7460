# SPDX-License-Identifier: Apache-2.0
"""The pages: links that lead somewhere, and the site that is made of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "configs/models", "docs", "docs/strategies", "examples", "launch/bench", "patches")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = LINK.findall(CODE.sub("", page.read_text()))
    inside = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in inside if not (page.parent / link).exists()] == []


@pytest.mark.slow  # it installs what makes a site
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Anchors too, pages that the navigation lacks, and names of the API that are not there: by the
    packages that docs/requirements.txt pins, which the script installs once."""
    done = subprocess.run(
        ["bash", "launch/docs.sh", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0 and "WARNING -" not in done.stderr, done.stderr[-3000:]
    names = (tmp_path / "api/index.html").read_text()
    assert 'id="ds_moe_ext.attach"' in names
    assert 'id="ds_moe_ext.use"' in names and "Megatron" in names  # of patches/
    # A page that lies outside of docs/, a file that one links to, and the way back.
    assert "../house/" in (tmp_path / "CONTRIBUTING/index.html").read_text()
    assert (tmp_path / "examples/own_strategy.py").read_bytes() == (
        ROOT / "examples/own_strategy.py"
    ).read_bytes()
