"""Hooks of the documentation site: pages from the root of the repository, and links that leave ``docs/``.

``mkdocs.yml`` names this file. Nothing in the package imports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Files at the root of the repository, and their pages on the site."""
_FILE_BLOCK = re.compile(r"^(```\w+) ([^\s=]+)$", re.MULTILINE)
"""The first line of a code block that is a file, such as ``toml agents/reviewer/agent.toml``."""
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages to the site."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to the root of the repository to links within the site, and give file blocks their name as a title."""
    uri: str = page.file.src_uri
    at_root = uri in ROOT_PAGES.values()
    folder = posixpath.dirname(uri)

    def rewrite(match: re.Match[str]) -> str:
        target = match[2]
        if at_root and target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            outside = posixpath.normpath(posixpath.join("" if at_root else posixpath.join("docs", folder), target))
            if outside in ROOT_PAGES:
                target = posixpath.relpath(ROOT_PAGES[outside], folder or ".")
            elif outside == "README.md":
                target = posixpath.relpath("index.md", folder or ".")
        return f"{match[1]}{target}{match[3]}"

    return _FILE_BLOCK.sub(r'\1 title="\2"', _LINK.sub(rewrite, markdown))
