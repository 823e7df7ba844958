"""Quality and time of the extraction of text from web pages, on sets of pages with known content.

    python bench/extraction.py --data FOLDER

FOLDER can have three sets, each optional:

- ``news`` and ``docs``: ``ground-truth.json`` with ``{name: {"articleBody": text}}``, and ``html/NAME.html.gz``. The score
  compares runs of four words, as the article extraction benchmark of Scrapinghub does. For ``docs``, the shares of the
  table cells and of the lines of code in the known text are counted that the found text has as they are.
- ``mixed``: ``evaldata.json`` with ``{url: {"file", "with", "without"}}``, and the files in ``eval`` or ``cache``. The score
  counts the texts that must and must not appear, as the evaluation of trafilatura does.

Targets: F1 of at least .95 for news and docs, and .91 for mixed; .95 of the cells and lines; a median of 15 ms a page.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from handrail.runtime.documents.page_text import decode_web_page, extract_main_page_text

TARGETS = {"news": 0.95, "docs": 0.95, "mixed": 0.91}
_MIN_SHARE = 0.95
_WORDS = re.compile(r"\w+")


def read_pages(folder: Path) -> Iterator[tuple[bytes, Any]]:
    """Yield the pages of one set, each with what is known of it."""
    if (truth := folder / "ground-truth.json").exists():
        for name, known in json.loads(truth.read_text()).items():
            yield gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes()), known["articleBody"]
        return
    for known in json.loads((folder / "evaldata.json").read_text()).values():
        places = (folder / "cache" / known["file"], folder / "eval" / known["file"])
        yield next(one for one in places if one.is_file()).read_bytes(), known


def count_shingles(text: str) -> Counter[tuple[str, ...]]:
    """Return the runs of four words in a text, each with its number."""
    words = _WORDS.findall(text)
    return Counter(tuple(words[at : at + 4]) for at in range(max(1, len(words) - 3)) if words)


def compare_shingles(expected: str, found: str) -> tuple[float | None, float | None]:
    """Return the precision and the recall of a text; None where there is nothing to count."""
    wanted, there = count_shingles(expected), count_shingles(found)
    both = (wanted & there).total()
    return (both / there.total() if there else None), (both / wanted.total() if wanted else None)


def compare_chunks(known: dict[str, Any], found: str) -> tuple[int, int, int]:
    """Return true positives, false positives and false negatives of the texts that are known of a page."""
    plain = " ".join(found.split())
    there = sum(" ".join(one.split()) in plain for one in known["with"])
    wrong = sum(" ".join(one.split()) in plain for one in known["without"])
    return there, wrong, len(known["with"]) - there


def count_kept(page: str, known: str, found: str) -> dict[str, tuple[int, int]]:
    """Return of how many table cells and lines of code the text has how many, if the known text has them."""
    from resiliparse.parse.html import HTMLTree

    tree: Any = HTMLTree.parse(page)
    plain, known_plain = (" ".join(text.split()) for text in (found, known))
    cells = {" ".join(one.text.split()) for one in tree.document.query_selector_all("td, th") if not _has_table(one)}
    cells = {one for one in cells if one and one in known_plain}
    lines = {line.rstrip() for one in tree.document.query_selector_all("pre") for line in one.text.split("\n")}
    lines = {one for one in lines if one.strip() and one.strip() in known}
    there = {line.rstrip() for line in found.split("\n")}
    return {
        "cells": (sum(one in plain for one in cells), len(cells)),
        "lines": (sum(one in there for one in lines), len(lines)),
    }


def _has_table(cell: Any) -> bool:
    return bool(cell.query_selector_all("table, pre"))


def measure(folder: Path) -> tuple[float, list[float], Counter[str]]:
    """Return the F1 of one set, the processor time of each page in milliseconds, and the counts of cells and lines."""
    times: list[float] = []
    kept: Counter[str] = Counter()
    rates: list[tuple[float | None, float | None]] = []
    counts = (0, 0, 0)
    for data, known in read_pages(folder):
        begin = time.process_time()
        page = decode_web_page(data, None)
        found = extract_main_page_text(page, "https://example.org/").text
        times.append(1000 * (time.process_time() - begin))
        if isinstance(known, str):
            rates.append(compare_shingles(known, found))
            for what, (there, all_of_them) in count_kept(page, known, found).items() if folder.name == "docs" else ():
                kept[what] += there
                kept[f"all {what}"] += all_of_them
        else:
            there, wrong, missing = compare_chunks(known, found)
            counts = (counts[0] + there, counts[1] + wrong, counts[2] + missing)
    if rates:
        precision = statistics.mean(one for one, _ in rates if one is not None)
        recall = statistics.mean(one for _, one in rates if one is not None)
        return 2 * precision * recall / (precision + recall), times, kept
    return 2 * counts[0] / (2 * counts[0] + counts[1] + counts[2]), times, kept


def main() -> None:
    """Measure the sets of a folder and exit with 1 if a target is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True, help="folder with the sets")
    folder: Path = options.parse_args().data
    missed = False
    for name, target in TARGETS.items():
        if not (folder / name).is_dir():
            print(f"{name:6} not in {folder}")
            continue
        f1, times, kept = measure(folder / name)
        shares = {what: kept[what] / kept[f"all {what}"] for what in ("cells", "lines") if kept[f"all {what}"]}
        missed = missed or f1 < target or any(share < _MIN_SHARE for share in shares.values())
        print(
            f"{name:6} {len(times):5} pages  F1 {f1:.3f} (target {target})  "
            f"p50 {statistics.median(times):.1f} ms  longest {max(times):.0f} ms",
            *(f" {what} {share:.3f}" for what, share in shares.items()),
        )
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
