# SPDX-License-Identifier: Apache-2.0
"""The pages: links that lead somewhere, and the site that is made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Anchors too, pages that the navigation lacks, and names of the API that are not there."""
    known = [Path(sys.executable).with_name("mkdocs"), ROOT / "build/docs/bin/mkdocs"]
    mkdocs = next((path for path in known if path.exists()), None)
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: bash launch/docs.sh installs it")
    done = subprocess.run(
        [str(mkdocs), "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    assert 'id="ds_moe_ext.attach"' in (tmp_path / "api/index.html").read_text()
    # A page that lies outside of docs/, a file that one links to, and the way back.
    assert "../house/" in (tmp_path / "CONTRIBUTING/index.html").read_text()
    assert (tmp_path / "examples/own_strategy.py").read_bytes() == (
        ROOT / "examples/own_strategy.py"
    ).read_bytes()
