"""Quality and time of the extraction of text from web pages, on sets of pages with known content.

    python bench/extraction.py --data FOLDER

FOLDER can have three sets, each optional:

- ``news`` and ``docs``: ``ground-truth.json`` with ``{name: {"articleBody": text}}``, and ``html/NAME.html.gz``. The score
  compares runs of four words, as the article extraction benchmark of Scrapinghub does.
- ``mixed``: ``evaldata.json`` with ``{url: {"file", "with", "without"}}``, and the files in ``eval`` or ``cache``. The score
  counts the texts that must and must not appear, as the evaluation of trafilatura does.

Targets: F1 of at least .95 for news and docs, and .91 for mixed; a median of at most 15 ms a page.
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

from handrail.runtime.documents.page_text import decode_page, extract_page_text

TARGETS = {"news": 0.95, "docs": 0.95, "mixed": 0.91}
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


def measure(folder: Path) -> tuple[float, list[float]]:
    """Return the F1 of one set, and the processor time of each page in milliseconds."""
    times: list[float] = []
    rates: list[tuple[float | None, float | None]] = []
    counts = (0, 0, 0)
    for data, known in read_pages(folder):
        begin = time.process_time()
        found = extract_page_text(decode_page(data, None), "https://example.org/").text
        times.append(1000 * (time.process_time() - begin))
        if isinstance(known, str):
            rates.append(compare_shingles(known, found))
        else:
            there, wrong, missing = compare_chunks(known, found)
            counts = (counts[0] + there, counts[1] + wrong, counts[2] + missing)
    if rates:
        precision = statistics.mean(one for one, _ in rates if one is not None)
        recall = statistics.mean(one for _, one in rates if one is not None)
        return 2 * precision * recall / (precision + recall), times
    return 2 * counts[0] / (2 * counts[0] + counts[1] + counts[2]), times


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
        f1, times = measure(folder / name)
        missed = missed or f1 < target
        print(
            f"{name:6} {len(times):5} pages  F1 {f1:.3f} (target {target})  "
            f"p50 {statistics.median(times):.1f} ms  longest {max(times):.0f} ms"
        )
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
