"""Path and host patterns: one small grammar, translated to linear-time regular expressions.

Paths are POSIX, compared whole. ``*`` and ``?`` stay within one part, ``**`` spans parts, ``[ab]`` and
``[!ab]`` are one character of a set. A pattern that names a folder covers what is in it.
Hosts match exactly or at a label boundary (``*.example.org`` covers ``a.example.org`` and not ``example.org``).
"""

from __future__ import annotations

import re
from functools import lru_cache

WILDCARDS = frozenset("*?[")


def escape(literal: str) -> str:
    """``literal`` as a pattern that matches exactly itself."""
    return "".join(f"[{c}]" if c in WILDCARDS else c for c in literal)


def has_wildcard(pattern: str) -> bool:
    """Whether ``pattern`` can match more than one text."""
    return len(literal_prefix(pattern)) < len(re.sub(r"\[([*?[])\]", r"\1", pattern))


def literal_prefix(pattern: str) -> str:
    """The text before the first wildcard, with escaped characters (``[*]``) read as themselves."""
    out: list[str] = []
    index = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "[" and pattern[index + 2 : index + 3] == "]" and pattern[index + 1] in WILDCARDS:
            out.append(pattern[index + 1])
            index += 3
            continue
        if char in WILDCARDS:
            break
        out.append(char)
        index += 1
    return "".join(out)


@lru_cache(maxsize=4096)
def path_regex(pattern: str, *, subtree: bool = True) -> re.Pattern[str]:
    """Compile a path glob.

    :param subtree: whether a pattern also covers everything beneath what it matches
    """
    out: list[str] = []
    i, n = 0, len(pattern)
    while i < n:
        c = pattern[i]
        if c == "*":
            j = i
            while j < n and pattern[j] == "*":
                j += 1
            if j - i >= 2:
                if j < n and pattern[j] == "/" and (i == 0 or pattern[i - 1] == "/"):
                    out.append("(?:[^/]+/)*")
                    j += 1
                else:
                    out.append(".*")
            else:
                out.append("[^/]*")
            i = j
            continue
        if c == "?":
            out.append("[^/]")
        elif c == "[":
            end = pattern.find("]", i + 2)
            if end == -1:
                out.append(re.escape(c))
            else:
                body = pattern[i + 1 : end]
                negated = body[:1] in ("!", "^")
                members = re.sub(r"([\\\]\[^&~|])", r"\\\1", body[1:] if negated else body)
                out.append(f"(?!/)[{'^' if negated else ''}{members}]")
                i = end
        else:
            out.append(re.escape(c))
        i += 1
    whole = "".join(out)
    if subtree and not pattern.endswith("*"):
        whole = f"{whole.removesuffix('/')}(?:/.*)?"
    return re.compile(whole + r"\Z", re.DOTALL)


def path_matches(pattern: str, path: str) -> bool:
    return path_regex(pattern).match(path) is not None


def host_matches(pattern: str, host: str) -> bool:
    """Whether ``host[:port]`` is covered by ``pattern`` (``*``, ``*.label``, or exact, with an optional port)."""
    want, _, want_port = _split_port(pattern.lower())
    have, _, have_port = _split_port(host.lower())
    have = have.removesuffix(".")
    if want_port and want_port != have_port:
        return False
    if want == "*":
        return True
    if want.startswith("*."):
        return have.endswith(want[1:]) and len(have) > len(want) - 1
    return have == want


def _split_port(host: str) -> tuple[str, str, str]:
    head, colon, port = host.rpartition(":")
    if colon and (port.isdigit() or port == "*") and (":" not in head or head.endswith("]")):
        return head, colon, "" if port == "*" else port
    return host, "", ""
