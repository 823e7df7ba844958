"""What the search knows of its hits, on many catalogues of many sizes, where it is known whether a tool serves the request.

Catalogues are drawn from each corpus, and filled up with methods of Google's APIs where it has too few tools. Their requests are the corpus's own whose tools are all in, its own whose tools
were kept out, and those of the other corpora; with a tool that is kept out go all that resemble it. Each corpus is
searched with an adapter that was fitted on the others.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from finding.google import google

import handrail.catalog.search.tool_search_index as searching
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.lexical_index import SearchableTool, make_embedding_text
from handrail.catalog.search.tool_search_index import HitEvidence, ToolIndex

if TYPE_CHECKING:
    from finding.known import Known
    from retrieval import Corpus

SIZES = {10: (40, 12), 20: (40, 12), 50: (30, 12), 200: (12, 32), 1_000: (4, 80), 4_000: (2, 160), 10_000: (1, 320)}
"""Tools of a catalogue: how many are drawn, and requests put to each, half of which it serves."""

ALIKE = 0.45
"""Cosine of two tools' vectors from which one resembles the other."""

FEWEST, OWN = 0.5, 1 / 3
"""The part of a size that a corpus must come to for a catalogue of its own tools alone; the part that is its own elsewhere, as far
as it goes. The largest size is the whole corpus and others'."""


@dataclass(frozen=True)
class Judged:
    """One request put to one catalogue.

    :param serves: of each hit, whether the request needs it
    :param needs: tools that it needs and that the catalogue has
    :param own: the request is one of the corpus that the catalogue is drawn from
    """

    hits: Sequence[HitEvidence]
    serves: Sequence[bool]
    needs: int
    size: int
    own: bool
    tools: int


def judged(corpus: Corpus, every: Sequence[Corpus], model: Known, turn: Any, *, by_words: bool) -> Iterator[Judged]:
    """:param turn: the adapter to search with"""
    choose = random.Random(5)
    rows = {each.name: model.encode([make_embedding_text(one) for one in each.documents]) for each in every}
    places = {each.name: {one["id"]: at for at, one in enumerate(each.tools)} for each in every}
    others = [each for each in every if each.name != corpus.name]
    documents, ids = corpus.documents, {each.id for each in corpus.documents}
    methods = (SearchableTool(each["name"], each["description"], each["parameters"]) for each in google())
    foreign = list(islice((each for each in methods if each.id not in ids), max(SIZES)))
    strange = model.encode([make_embedding_text(each) for each in foreign])
    encoder = None if by_words else EncoderThread(model.with_turn(turn))
    for size, (count, asked) in SIZES.items():
        own = len(documents) >= FEWEST * size and size < max(SIZES)
        room = size if own else len(documents) if size == max(SIZES) else int(OWN * size)
        for _ in range(count):
            cases = [(corpus, choose.choice(corpus.queries)) for _ in range(asked // 4)]
            cases += [(each := choose.choice(others), choose.choice(each.queries)) for _ in range(asked // 4)]
            out: set[int] = set()
            like: list[set[str]] = []
            for source, query in cases:
                gold = rows[source.name][[places[source.name][one] for one in query["gold"]]]
                out.update(int(at) for at in ((rows[corpus.name] @ gold.T).max(axis=1) >= ALIKE).nonzero()[0])
                alike = ((strange @ gold.T).max(axis=1) >= ALIKE).nonzero()[0]
                like.append({foreign[int(at)].id for at in alike})
                if source is corpus:
                    out.update(places[corpus.name][one] for one in query["gold"])
            left = [at for at in range(len(documents)) if at not in out]
            there = {documents[at].id for at in left}
            served = [
                each for each in choose.sample(corpus.queries, len(corpus.queries)) if there.issuperset(each["gold"])
            ]
            served = served[: min(asked // 2, max(2, size // 4))]
            held = dict.fromkeys(places[corpus.name][one] for each in served for one in each["gold"])
            held.update(dict.fromkeys(choose.sample(left, len(left))))
            catalogue = [documents[at] for at in list(held)[:room]]
            catalogue += choose.sample(foreign, size - len(catalogue))
            index = ToolIndex(catalogue, encoder=encoder)
            index.wait_until_complete()
            for query in served:
                yield _put(index, query["query"], query["gold"], size, own=True)
            for (source, query), barred in zip(cases, like, strict=True):
                yield _put(index, query["query"], (), size, own=source is corpus, barred=() if own else barred)
    if encoder is not None:
        encoder.close()


def _put(
    index: ToolIndex, query: str, gold: Sequence[str], size: int, *, own: bool, barred: Collection[str] = ()
) -> Judged:
    seen: list[Sequence[HitEvidence]] = []
    kept = searching.estimate_any_match_probability

    def fitting(hits: Sequence[HitEvidence], tools: int) -> float:
        seen.append(hits)
        return kept(hits, tools)

    searching.estimate_any_match_probability = fitting
    try:
        among = (lambda name: name not in barred) if barred else None
        found = index.search(query, 5, among=among, patience_s=60)
    finally:
        searching.estimate_any_match_probability = kept
    hits = [hit.id for hit in found.hits]
    evidence = seen[0][: len(hits)] if seen else []
    return Judged(evidence, [one in gold for one in hits], len(gold), size, own, len(index))
