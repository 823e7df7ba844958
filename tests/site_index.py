"""Generate ``docs/llms.txt``: the title and first sentence of each page, for language models.

``python -m tests.conformance`` writes it from the navigation in ``mkdocs.yml``, and compares it with ``--check``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
INDEX = DOCS / "llms.txt"
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md"}
_END = re.compile(r"(?<=[.?:])(?<!e\.g\.)(?<!i\.e\.)[\"')]*(?=\s|$)")


def config() -> dict[str, Any]:
    """Return the configuration of the site."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def navigation() -> dict[str, list[str]]:
    """Return the pages of each part of the site."""
    parts = cast("list[dict[str, Any]]", config()["nav"])
    return {title: list(_below(entry)) for part in parts for title, entry in part.items()}


def _below(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in cast(
            "list[Any]", entry if isinstance(entry, list) else list(cast("dict[str, Any]", entry).values())
        ):
            yield from _below(inner)


def render(written: Mapping[Path, str]) -> str:
    """Return the file.

    :param written: the new texts of generated pages, which may not be on the disk yet
    """
    site = config()
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}"]
    for title, pages in navigation().items():
        paths = {page: ROOT / ROOT_PAGES[page] if page in ROOT_PAGES else DOCS / page for page in pages}
        there = {page: path for page, path in paths.items() if path in written or path.exists()}
        lines += ["", f"## {title}", ""] if there else []
        for page, path in there.items():
            heading, sentence = extract_title_and_summary(written.get(path) or path.read_text(encoding="utf-8"))
            link = page.removesuffix(".md") + ".html"
            lines.append(f"- [{heading}]({link}){f': {sentence}' if sentence else ''}")
    return "\n".join(lines) + "\n"


def extract_title_and_summary(text: str) -> tuple[str, str]:
    """Return the title and the first sentence of a page."""
    head, _, rest = f"\n{text}".partition("\n# ")[2].partition("\n")
    for block in rest.split("\n\n"):
        plain = " ".join(block.split())
        if plain and plain[0] not in "#|!<`:>-" and not plain.startswith("```"):
            plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", plain.replace("**", ""))
            end = _END.search(plain)
            return _plain(head), re.sub(r":\Z", ".", plain[: end.end()] if end else plain)
    return _plain(head), ""


def _plain(heading: str) -> str:
    return heading.replace("`", "").strip()
