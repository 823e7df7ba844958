"""Fit the query adapter of the local model: what turns a request's direction towards those of the tools that serve it.

    python bench/finding/adapter.py --data DIR [--without CORPUS] [--cache FILE] --out FILE

``DIR`` holds corpora as ``bench/retrieval.py`` reads them. The matrix by which requests are multiplied begins as one
that leaves them as they are, and learns to prefer a request's tool among all of its corpus (a softmax over cosines),
each corpus counting the same, tools with many requests by the square root. Few rounds and a soft preference hold on
corpora that it was not fitted on; a sharp one or more rounds do not. What is kept is its scale and its first directions
by singular value. Beside it are kept some requests of each corpus with their tools, and those of ``everyday.txt``: requests
that are like them are looked for near the same tools. ``--without`` leaves one corpus out of both, to measure on it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).parent.parent))

from finding.known import Known
from retrieval import Corpus, corpora

from handrail.catalog.search.lexical_index import make_embedding_text
from handrail.catalog.search.vector_index import (
    BACKGROUND_REQUESTS,
    BACKGROUND_TOOLS,
    LabelledToolRequests,
    RequestVectorAdapter,
    center_and_normalize,
    compute_smoothed_mean,
)
from handrail.catalog.search.word_analysis import split_request_into_needs

SHARPNESS = 14.0
"""What a cosine is multiplied by before it is made a likelihood."""

ROUNDS, BATCHES, BATCH, PACE, STAY = 3, 12, 256, 5e-4, 5e-5
"""Rounds of so many batches of so many requests of each corpus, the length of a step, the pull back to the start."""

EVERYDAY = Path(__file__).parent / "everyday.txt"

RANK = 64

SERVED = 500
"""Requests of each corpus that are kept with their tools, of each tool about as many."""


def pairs(corpus: Corpus, model: Known) -> tuple[Any, Any, Any]:
    """Directions of requests (or of the part nearest to a tool, where there are several), of tools, and which is whose."""
    asked, usual = model.encode(BACKGROUND_REQUESTS).mean(axis=0), model.encode(BACKGROUND_TOOLS)
    rows = model.encode([make_embedding_text(each) for each in corpus.documents])
    tools = center_and_normalize(rows, compute_smoothed_mean(rows, usual))
    at = {each["id"]: number for number, each in enumerate(corpus.tools)}
    requests: list[Any] = []
    gold: list[int] = []
    for each in corpus.queries:
        wanted = [at[name] for name in each["gold"]]
        texts = [each["query"]] if len(wanted) == 1 else split_request_into_needs(each["query"])
        seen = center_and_normalize(model.encode(texts), asked)
        near = seen @ tools[wanted].T
        for column, number in enumerate(wanted):
            requests.append(seen[int(near[:, column].argmax())])
            gold.append(number)
    return numpy.array(requests), tools, numpy.array(gold)


def fitted(several: list[tuple[Any, Any, Any]], width: int) -> Any:
    """The matrix by which directions of requests are multiplied."""
    choose = numpy.random.default_rng(0)
    matrix, speed, square = numpy.eye(width), numpy.zeros((width, width)), numpy.zeros((width, width))
    batches = [
        (requests[some], tools, gold[some], numpy.sqrt(1 / numpy.bincount(gold, minlength=len(tools))[gold[some]]))
        for requests, tools, gold in several
        for _ in range(ROUNDS * BATCHES)
        for some in [choose.choice(len(gold), min(BATCH, len(gold)), replace=False)]
    ]
    order = choose.permutation(len(batches))
    for step, at in enumerate(order, 1):
        requests, tools, gold, weights = batches[at]
        turned = requests @ matrix
        lengths = numpy.linalg.norm(turned, axis=1, keepdims=True)
        turned = turned / lengths
        likely = SHARPNESS * turned @ tools.T
        likely = numpy.exp(likely - likely.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        likely[numpy.arange(len(gold)), gold] -= 1
        pull = SHARPNESS * (likely * (weights / weights.sum())[:, None]) @ tools
        slope = requests.T @ ((pull - (pull * turned).sum(axis=1, keepdims=True) * turned) / lengths)
        slope += STAY * (matrix - numpy.eye(width))
        speed, square = 0.9 * speed + 0.1 * slope, 0.99 * square + 0.01 * slope**2
        matrix -= PACE * (speed / (1 - 0.9**step)) / (numpy.sqrt(square / (1 - 0.99**step)) + 1e-8)
    return matrix


def without(left_out: Corpus, every: Sequence[Corpus], model: Known) -> RequestVectorAdapter:
    """The turn made of all corpora but one."""
    return made([pairs(each, model) for each in every if each.name != left_out.name], model)


def made(several: list[tuple[Any, Any, Any]], model: Known) -> RequestVectorAdapter:
    """The adapter fitted on ``several``, with some of their requests and with the everyday ones."""
    turn = RequestVectorAdapter(kept(fitted(several, several[0][0].shape[1])).astype(numpy.float32))
    requests: list[Any] = []
    tools: list[Any] = []
    for asked, held, gold in several:
        some = chosen(gold)
        needed, whose = numpy.unique(gold[some], return_inverse=True)
        requests.append((turn.adapt_linearly(asked[some]), whose + sum(map(len, tools))))
        tools.append(held[needed])
    known = LabelledToolRequests(
        numpy.concatenate([rows for rows, _ in requests]),
        numpy.concatenate(tools),
        numpy.concatenate([whose for _, whose in requests]),
    )
    return RequestVectorAdapter(turn.rows, [known, everyday(turn, model)])


def chosen(gold: Any) -> Any:
    """Some requests, of each tool about as many, by chance."""
    most = -(-SERVED // len(set(gold.tolist())))
    taken: Counter[int] = Counter()
    out: list[int] = []
    for at in numpy.random.default_rng(0).permutation(len(gold)):
        if taken[gold[at]] < most and len(out) < SERVED:
            taken[gold[at]] += 1
            out.append(int(at))
    return numpy.array(out)


def everyday(turn: RequestVectorAdapter, model: Known) -> LabelledToolRequests:
    """The requests of ``everyday.txt``."""
    tools: list[str] = []
    requests: list[str] = []
    whose: list[int] = []
    for line in EVERYDAY.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            requests.append(line.strip())
            whose.append(len(tools) - 1)
        elif not line.startswith("#"):
            tools.append(line)
    rows = model.encode(tools)
    asked = center_and_normalize(model.encode(requests), model.encode(BACKGROUND_REQUESTS).mean(axis=0))
    return LabelledToolRequests(
        turn.adapt_linearly(asked),
        center_and_normalize(rows, compute_smoothed_mean(rows, model.encode(BACKGROUND_TOOLS))),
        numpy.array(whose),
    )


def kept(matrix: Any) -> Any:
    """The rows of a turn: the scale, then each direction's two sides."""
    scale = float(numpy.trace(matrix) / len(matrix))
    left, values, right = numpy.linalg.svd(matrix - scale * numpy.eye(len(matrix)))
    root = numpy.sqrt(values[:RANK])
    first = numpy.zeros((1, len(matrix)))
    first[0, 0] = scale
    rows = numpy.concatenate((first, (left[:, :RANK] * root).T, root[:, None] * right[:RANK]))
    return rows.astype(numpy.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--without", default="")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--cache", type=Path, help="keep vectors in this file between two runs")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model = Known(given.cache)
    held = [pairs(each, model) for each in corpora(given.data, given.limit) if each.name != given.without]
    made(held, model).save(given.out)
    model.keep()


if __name__ == "__main__":
    main()
