# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages may link to files of the repository that lie outside of docs/.

Each such file comes into the site under its own path, markdown as a page, anything else as it is;
so the site is whole by itself, and says what its own version says. Links are written for a reader
of the repository, and are rewritten here.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")  # where a link to a file leads
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add what pages and the navigation name outside of docs/, and what those pages name."""
    waiting = [f"{DOCS}{file.src_uri}" for file in files.documentation_pages()]
    waiting += [path for path in _named(config.nav) if not (ROOT / DOCS / path).exists()]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith(DOCS):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            named = [_target(path, link) for link in LINK.findall(CODE.sub("", _text(path)))]
            new = {each for each in named if (ROOT / each).is_file()} - seen
            new = {each for each in new if not each.startswith(DOCS)}
            seen |= new
            waiting += sorted(new)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links for where files lie in the site."""
    path = page.file.src_uri
    if (ROOT / DOCS / path).exists():
        path = DOCS + path
    parts, end = [], 0
    for code in CODE.finditer(markdown):  # stays as it is
        parts += [LINK.sub(_rewriting(path), markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(_rewriting(path), markdown[end:])])


def _rewriting(path: str) -> Callable[[re.Match[str]], str]:
    folder = os.path.dirname(path.removeprefix(DOCS))

    def rewrite(link: re.Match[str]) -> str:
        target = _target(path, link[0]).removeprefix(DOCS)
        return os.path.relpath(target, folder or ".").replace(os.sep, "/")

    return rewrite


def _target(path: str, link: str) -> str:
    """Where a link of a file leads, from the repository's root."""
    return os.path.normpath(os.path.join(os.path.dirname(path), link)).replace(os.sep, "/")


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _named(nav: Any) -> list[str]:
    """Pages of the navigation, in any depth."""
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [page for each in inner for page in _named(each)]
