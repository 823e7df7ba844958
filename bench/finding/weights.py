"""What words count beside meaning: recall@5 of each corpus at several weights, with an adapter fitted on the others.

python bench/finding/weights.py --data DIR [--cache FILE] [--limit N]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from finding.adapter import without
from finding.known import Known
from retrieval import corpora, measure, ours

import handrail.catalog.search.tool_search_index as fusion

TRIED = (0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--limit", type=int, help="only so many requests of each corpus")
    given = parser.parse_args()
    model = Known(given.cache)
    every = list(corpora(given.data, None))
    asked = {each.name: each for each in corpora(given.data, given.limit)}
    for corpus in every:
        _, search = ours(corpus, model.with_turn(without(corpus, every, model)))
        for weight in TRIED:
            fusion.WORDS = weight
            for row in measure(asked[corpus.name], f"words {weight}", search):
                print({name: row[name] for name in ("corpus", "method", "recall@5", "all@5")}, flush=True)
    model.keep()


if __name__ == "__main__":
    main()
