"""Fit the query adapter of the local model: what turns a request's direction towards those of the tools that serve it.

    python bench/finding/adapter.py --data DIR [--without CORPUS] [--out FILE]

``DIR`` holds corpora as ``bench/retrieval.py`` reads them. It is a ridge regression, from directions of requests to
those of their tools, drawn towards leaving them as they are; tools with many requests count by the square root. What is
kept is its scale and its first directions by singular value. ``--without`` leaves one corpus out, to measure on it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).parent.parent))

from retrieval import Corpus, corpora

from handrail.catalog.minilm import MiniLM
from handrail.catalog.splitting import parts
from handrail.catalog.texts import passage
from handrail.catalog.usual import REQUESTS, TOOLS
from handrail.catalog.vectors import center_of, directions

STAY = 0.01
"""How strongly requests are kept where they are."""

RANK = 48


def pairs(corpus: Corpus, model: MiniLM) -> tuple[Any, Any, Any]:
    """Directions of requests (or of the part nearest to a tool, where there are several), of tools, and which is whose."""
    asked, usual = model.encode(REQUESTS).mean(axis=0), model.encode(TOOLS)
    rows = model.encode([passage(each) for each in corpus.documents])
    tools = directions(rows, center_of(rows, usual))
    at = {each["id"]: number for number, each in enumerate(corpus.tools)}
    requests: list[Any] = []
    gold: list[int] = []
    for each in corpus.queries:
        wanted = [at[name] for name in each["gold"]]
        texts = [each["query"]] if len(wanted) == 1 else parts(each["query"])
        seen = directions(model.encode(texts), asked)
        near = seen @ tools[wanted].T
        for column, number in enumerate(wanted):
            requests.append(seen[int(near[:, column].argmax())])
            gold.append(number)
    return numpy.array(requests), tools, numpy.array(gold)


def fitted(several: list[tuple[Any, Any, Any]], width: int) -> Any:
    """The matrix by which directions of requests are multiplied."""
    own, to = numpy.zeros((width, width)), numpy.zeros((width, width))
    for requests, tools, gold in several:
        weights = 1 / numpy.sqrt(numpy.bincount(gold, minlength=len(tools))[gold])
        weights /= weights.sum()
        own += (requests * weights[:, None]).T @ requests
        to += (requests * weights[:, None]).T @ tools[gold]
    scale = numpy.trace(to) / numpy.trace(own)
    stay = STAY * len(several) * numpy.eye(width)
    return numpy.linalg.solve(own + stay, to + stay * scale) / scale


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--without", default="")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = MiniLM()
    held = [pairs(each, model) for each in corpora(given.data, given.limit) if each.name != given.without]
    matrix = fitted(held, held[0][1].shape[1])
    scale = float(numpy.trace(matrix) / len(matrix))
    left, values, right = numpy.linalg.svd(matrix - scale * numpy.eye(len(matrix)))
    root = numpy.sqrt(values[:RANK])
    first = numpy.zeros((1, len(matrix)))
    first[0, 0] = scale
    rows = numpy.concatenate((first, (left[:, :RANK] * root).T, root[:, None] * right[:RANK]))
    numpy.save(given.out, rows.astype(numpy.float16), allow_pickle=False)


if __name__ == "__main__":
    main()
