"""Whether a request was in a language that the search reads at all, where nothing was found for it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

from handrail.catalog.words.words import filler, hollow, term_of, words

STEMS = "English"
"""What a search by words reads: its stems and its filler are of that."""

_HARDLY = 1 / 4
"""The part of a request's telling words up to which hardly any of them is known."""

_LAST_LATIN = "\u024f"


def unread(request: str, reads: str, known: Callable[[str], bool]) -> str:
    """Why ``request`` may not have been understood, and what to do, as half a sentence; empty where it was.

    :param reads: the one language that the search reads; empty where it reads several, or it is not known which
    :param known: whether any tool has a term
    """
    if not reads:
        return ""
    if _mostly_foreign(request):
        return f"most of the request is not in Latin letters, and this search reads {reads}: ask again in {reads}"
    empty = hollow(request)
    said = {term_of(word) for word in words(request) if not filler(word) and word not in empty}
    if said and sum(map(known, said)) <= _HARDLY * len(said):
        return (
            f"hardly a word of the request is known here, and this search reads {reads}: if it is in another language, "
            f"ask again in {reads}"
        )
    return ""


def _mostly_foreign(text: str) -> bool:
    letters = [char for char in unicodedata.normalize("NFKD", text) if char.isalpha()]
    return 2 * sum(char > _LAST_LATIN for char in letters) > len(letters)
