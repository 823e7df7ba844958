"""Write the vectors of tools as there are everywhere, against which it is judged whether anything in a catalogue fits.

    python bench/finding/elsewhere.py --out src/handrail/catalog/search/elsewhere.npy

They are the usual tools, those of ``everyday.txt`` and those of ``elsewhere.txt``. Nothing is fitted: a component of a vector
is one byte.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).parent.parent))

from handrail.catalog.embedders.minilm import MiniLMEmbedder
from handrail.catalog.search.vector_index import BACKGROUND_TOOLS

PLACE = Path(__file__).parent


def tools() -> list[str]:
    """Each once, as ``name: what it does``."""
    named = [(PLACE / name).read_text(encoding="utf-8").splitlines() for name in ("everyday.txt", "elsewhere.txt")]
    return list(
        dict.fromkeys([*BACKGROUND_TOOLS, *(line for lines in named for line in lines if line and line[0] not in " #")])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows: Any = MiniLMEmbedder().encode(tools())
    numpy.save(given.out, numpy.rint(rows * (127 / numpy.abs(rows).max(axis=1, keepdims=True))).astype(numpy.int8))
    print(f"{len(rows)} tools")


if __name__ == "__main__":
    main()
