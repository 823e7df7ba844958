"""Templates of URIs, read backwards: which URIs one makes, and by which values.

A template may be a foreign server's, and a URI is a model's: so no expression that backtracks, which the two could make run
for ever.

Source: https://www.rfc-editor.org/rfc/rfc6570
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

MAX_URI = 4096
MOST_EXPRESSIONS = 8
VARIABLE = re.compile(r"\{(\+?)([A-Za-z_][A-Za-z0-9_]*)\}")
"""What an operator's own template may have."""
_EXPRESSION = re.compile(r"\{([+#./;?&]?)[^{}]*\}")
_STOPS = {"": "/?#", "+": "", "#": "", ".": "/?#", "/": "?#", ";": "/?#", "?": "#", "&": "#"}
"""By the kind of an expression: what no value of it holds. The kinds but the first two begin with themselves, or are empty."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What URIs a template makes, read generously.

    The places that were reached in a URI are the bits of one number.

    :param first: what every URI begins with
    :param rest: each expression's kind, and the text behind it
    """

    first: str
    rest: tuple[tuple[str, str], ...]

    def makes(self, uri: str) -> bool:
        if not self.rest:
            return uri == self.first
        if not uri.startswith(self.first) or not uri.endswith(self.rest[-1][1]):
            return False
        reached = 1 << len(self.first)
        for kind, text in self.rest:
            free = _places(uri, _STOPS[kind])
            begun = reached if kind in ("", "+") else (reached & _starts(uri, kind)) << 1
            # Adding carries each place over the run of free ones that it stands in, and so over whatever is between.
            reached |= begun | (((begun & free) + free) ^ free)
            reached = (reached & _starts(uri, text)) << len(text)
        return bool(reached >> len(uri) & 1)


def shape_of(template: str) -> Shape | None:
    """None for a template that makes too many URIs to be judged."""
    expressions = list(_EXPRESSION.finditer(template))
    if len(template) > MAX_URI or len(expressions) > MOST_EXPRESSIONS:
        return None
    texts = _texts(template, expressions)
    kinds = [expression[1] for expression in expressions]
    return Shape(texts[0], tuple(zip(kinds, texts[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class Matching:
    """What URIs an operator's own template makes, by values that are not empty; each variable takes as much as it can.

    :param rest: of each variable its kind, its name, and the text behind it
    """

    first: str
    rest: tuple[tuple[str, str, str], ...]

    def values(self, uri: str) -> dict[str, str] | None:
        """The values that make ``uri``, as they stand in it; None where none do."""
        if len(uri) > MAX_URI or not uri.startswith(self.first):
            return None
        # From behind: where each variable's value may end, so that what follows makes the rest, and where it may begin.
        begins = bytearray(len(uri) + 2)
        begins[len(uri)] = 1
        ends: list[bytearray] = []
        for kind, _, text in reversed(self.rest):
            end, at = bytearray(len(uri) + 2), uri.find(text)
            while at >= 0:
                end[at] = begins[at + len(text)]
                at = uri.find(text, at + 1)
            begins = bytearray(len(uri) + 2)
            for place in range(len(uri) - 1, -1, -1):
                if _is_free(uri[place], kind):
                    begins[place] = end[place + 1] or begins[place + 1]
            ends.append(end)
        at = len(self.first)
        if not begins[at]:
            return None
        found: dict[str, str] = {}
        for (kind, name, text), end in zip(self.rest, reversed(ends), strict=True):
            place = last = at
            while place < len(uri) and _is_free(uri[place], kind):
                place += 1
                last = place if end[place] else last
            found[name] = uri[at:last]
            at = last + len(text)
        return found


def matching_of(template: str) -> Matching:
    """
    :raises ValueError: for a template that :class:`Matching` does not read, which says why
    """
    variables = list(VARIABLE.finditer(template))
    if not variables or set("{}") & set(VARIABLE.sub("", template)):
        raise ValueError("expected variables as {name} or {+name}, at least one")
    names = [variable[2] for variable in variables]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"has the variable {twice[0]!r} twice; name each once")
    if len(variables) > MOST_EXPRESSIONS:
        raise ValueError(f"has {len(variables)} variables; expected at most {MOST_EXPRESSIONS}")
    texts = _texts(template, variables)
    rest = zip((one[1] for one in variables), names, texts[1:], strict=True)
    return Matching(texts[0], tuple(rest))


def _texts(template: str, expressions: list[re.Match[str]]) -> list[str]:
    """What stands before the first expression, and behind each of them."""
    begins = [0, *(expression.end() for expression in expressions)]
    ends = [*(expression.start() for expression in expressions), len(template)]
    return [template[begin:end] for begin, end in zip(begins, ends, strict=True)]


def _is_free(letter: str, kind: str) -> bool:
    """Whether it may stand in a value."""
    return letter != "\n" if kind == "+" else letter not in _STOPS[kind] and not letter.isspace()


@lru_cache(maxsize=64)
def _places(uri: str, stops: str) -> int:
    """The places of a URI at which a character stands that is none of ``stops``."""
    return int("0" + "".join("01"[one not in stops] for one in reversed(uri)), 2)


@lru_cache(maxsize=256)
def _starts(uri: str, text: str) -> int:
    """The places of a URI at which ``text`` stands."""
    found, at = 0, uri.find(text)
    while at >= 0:
        found |= 1 << at
        at = uri.find(text, at + 1)
    return found
