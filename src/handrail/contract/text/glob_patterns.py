"""Path and text patterns: one small grammar, translated to regular expressions that cannot blow up.

Paths are POSIX, compared whole. ``*`` and ``?`` stay within one part, ``**`` spans parts, ``[ab]`` and ``[!ab]`` are
one character of a set. A pattern that names a folder covers everything in it. In a text (a shell word, an argument's
value) ``*`` spans anything.

Atomic groups prevent a blow-up: a text between two wildcards is matched at its first position and never given back.
For globs that loses no match, since an earlier position leaves at least as much to the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from handrail.contract.text.lazy_patterns import compile_regex_lazily

WILDCARDS = frozenset("*?[")

_STAR, _ACROSS, _FOLDERS = "[^/]*?", ".*?", "(?:[^/]*/)*?"
_SPANS = frozenset((_STAR, _ACROSS, _FOLDERS))
_ESCAPED = compile_regex_lazily(r"\[([*?[{$\\])\]")


def escape_glob_literal(literal: str) -> str:
    """Return a pattern that matches exactly ``literal``."""
    return "".join(f"[{c}]" if c in WILDCARDS else c for c in literal)


def has_wildcard(pattern: str) -> bool:
    """Return whether ``pattern`` can match more than one text, apart from the contents of a folder."""
    return len(extract_literal_prefix(pattern)) < count_pattern_characters(pattern)


@lru_cache(maxsize=4096)
def extract_literal_prefix(pattern: str) -> str:
    """Return the text before the first wildcard, with escaped characters (``[*]``) unescaped."""
    out: list[str] = []
    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "[" and pattern[index + 2 : index + 3] == "]" and pattern[index + 1] in "*?[{$\\":
            out.append(pattern[index + 1])
            index += 3
            continue
        if char in WILDCARDS:
            break
        out.append(char)
        index += 1
    return "".join(out)


def count_pattern_characters(pattern: str) -> int:
    """Return the number of characters of ``pattern``; an escaped one counts once."""
    return len(_ESCAPED.sub("x", pattern))


def find_glob_pattern_fault(pattern: str) -> str | None:
    """Return why ``pattern`` is invalid, or None."""
    if "[" not in pattern:
        return None  # only a set of characters can be wrong
    try:
        compile_path_glob(pattern)
    except ValueError as error:
        return str(error)
    return None


@lru_cache(maxsize=4096)
def compile_path_glob(pattern: str, *, subtree: bool = True, any_case: bool = False) -> re.Pattern[str]:
    """Compile a path glob.

    :param subtree: whether a pattern also covers everything below what it matches
    :param any_case: whether to ignore the case of ASCII letters
    :raises ValueError: for an impossible set of characters (``[z-a]``)
    """
    flags = re.DOTALL | re.IGNORECASE | re.ASCII if any_case else re.DOTALL
    return re.compile(build_path_glob_expression(pattern, subtree=subtree) + r"\Z", flags)


@lru_cache(maxsize=4096)
def compile_text_glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob over free text: ``*`` and ``?`` match any character, ``/`` and line ends too.

    :raises ValueError: for an impossible set of characters (``[z-a]``)
    """
    return re.compile(_join_expressions(_split_into_expressions(pattern, paths=False)) + r"\Z", re.DOTALL)


@lru_cache(maxsize=4096)
def build_path_glob_expression(pattern: str, *, subtree: bool = True) -> str:
    """Return the regular expression of a path glob without its end anchor, for use in a larger one.

    It has no capturing groups. Something that only the end of the path can match must follow it.
    """
    whole = _join_expressions(_split_into_expressions(pattern, paths=True))
    if subtree and not pattern.endswith("*"):
        return f"{whole}(?:/.*)?" if not pattern.endswith("/") else f"{whole.removesuffix('/')}(?:/.*)?"
    return whole


def build_any_path_glob_expression(patterns: Iterable[str]) -> str:
    """Return one expression for "any of these path globs".

    It is fast if many begin alike (``**/*.pem``, ``**/.env``). It has no groups and needs an end that only the path's
    end can match, like :func:`build_path_glob_expression`.
    """
    deep_stars: list[str] = []
    deep: list[str] = []
    rest: list[str] = []
    for pattern in patterns:
        tail = pattern.removeprefix("**/")
        if tail == pattern or tail in ("", "*") or tail.startswith("**"):
            rest.append(build_path_glob_expression(pattern))
        elif tail.startswith("*"):
            deep_stars.append(build_path_glob_expression(tail[1:]))
        else:
            deep.append(build_path_glob_expression(tail))
    if deep_stars:
        deep.append(f"{_STAR}(?:{'|'.join(deep_stars)})")
    if deep:
        rest.append(f"{_FOLDERS}(?:{'|'.join(deep)})")
    return f"(?:{'|'.join(rest)})" if rest else "(?!)"


def matches_path_glob(pattern: str, path: str, *, any_case: bool = False) -> bool:
    return compile_path_glob(pattern, any_case=any_case).match(path) is not None


def _split_into_expressions(pattern: str, *, paths: bool) -> list[str]:
    """Split ``pattern`` into regular expressions of one character each, with :data:`_SPANS` between them."""
    out: list[str] = []
    i, n = 0, len(pattern)
    while i < n:
        c = pattern[i]
        if c == "*":
            kind, i = _read_star_span(pattern, i, paths=paths)
            if not out or out[-1] != kind:  # two equal spans are one
                out.append(kind)
            continue
        if c == "?":
            out.append("[^/]" if paths else ".")
        elif c == "[" and (end := pattern.find("]", i + 2)) != -1:
            out.append(("(?!/)" if paths else "") + _translate_character_set(pattern[i + 1 : end], pattern))
            i = end
        else:
            out.append(re.escape(c))
        i += 1
    return out


def _read_star_span(pattern: str, start: int, *, paths: bool) -> tuple[str, int]:
    """Return the span of the stars at ``start``, and the position where the pattern continues."""
    end = start
    while end < len(pattern) and pattern[end] == "*":
        end += 1
    if paths and end - start == 1:
        return _STAR, end
    if paths and pattern[end : end + 1] == "/" and (start == 0 or pattern[start - 1] == "/"):
        return _FOLDERS, end + 1
    return _ACROSS, end


def _join_expressions(pieces: list[str]) -> str:
    """Join pieces to one expression.

    The text between two spans is matched once and kept. Only the last span can move.
    """
    groups: list[list[str]] = [[""]]  # each group: a span over parts, then the text after it, star by star
    heads = [""]
    for piece in pieces:
        if piece == _STAR:
            groups[-1].append("")
        elif piece in _SPANS:
            heads.append(piece)
            groups.append([""])
        else:
            groups[-1][-1] += piece
    out: list[str] = []
    for index, (head, stretches) in enumerate(zip(heads, groups, strict=True)):
        last_group = index == len(groups) - 1
        body = stretches[0]
        for k, stretch in enumerate(stretches[1:], 1):
            free = last_group and k == len(stretches) - 1
            body += f"{_STAR}{stretch}" if free else f"(?>{_STAR}{stretch})"
        if head == _ACROSS and last_group and not body:
            out.append(".*")
        else:
            out.append(f"{head}{body}" if last_group or not head else f"(?>{head}{body})")
    return "".join(out)


def _translate_character_set(body: str, pattern: str) -> str:
    """Return ``[…]`` as a character class, in which only ``a-z`` has a special meaning."""
    negated = len(body) > 1 and body[0] in "!^"
    members = body[1:] if negated else body
    out: list[str] = []
    i = 0
    while i < len(members):
        first = members[i]
        if members[i + 1 : i + 2] == "-" and i + 2 < len(members):
            last = members[i + 2]
            if last < first:
                raise ValueError(
                    f"{pattern!r} is not a valid pattern: the range {first}-{last} runs backwards; write a literal [ as [[]"
                )
            out.append(f"{re.escape(first)}-{re.escape(last)}")
            i += 3
        else:
            out.append(re.escape(first))
            i += 1
    return f"[{'^' if negated else ''}{''.join(out)}]"
