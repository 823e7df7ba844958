"""Values that are slow to validate, by kind."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any


def texts(size: int) -> Mapping[str, str]:
    """Texts of about ``size`` characters."""
    chance = random.Random(5)

    def repeated(piece: str) -> str:
        return piece * (size // len(piece))

    return {
        "letters": "a" * size,
        "braces": repeated("{a,"),
        "closed-braces": "{a," * (size // 8) + "b" + "}" * (size // 8),
        "brackets": "[" * size,
        "sets": repeated("[a-z]"),
        "open-sets": repeated("[a"),
        "parentheses": "(" * (size // 2) + ")" * (size // 2),
        "backslashes": "\\" * size,
        "stars": "*" * size,
        "star-letters": repeated("*a"),
        "folders": repeated("**/"),
        "dots": repeated("../"),
        "slashes": "/" * size,
        "parts": repeated("a/"),
        "quotes": repeated("'\""),
        "double-quotes": '"' * size,
        "substitutions": repeated("$("),
        "variables": repeated("${a:-"),
        "pipes": repeated("a|"),
        "commands": repeated("ls; "),
        "words": repeated("ls "),
        "heredocs": repeated("<<a\n"),
        "line-ends": "\n" * size,
        "returns": repeated("\r\n"),
        "short-lines": repeated("ab\n"),
        "other-lines": "".join(f"{chance.randrange(10**6)}\n" for _ in range(size // 7)),
        "blanks": " " * size,
        "tabs": repeated("\t x"),
        "nuls": "\0" * size,
        "combining": "a" + "\u0301" * size,
        "directions": repeated("\u202ea\u202c"),
        "invisible": repeated("a\u200b"),
        "tags": repeated("\U000e0041"),
        "escapes": repeated("\x1b[31m"),
        "open-escapes": repeated("\x1b]"),
        "wide": repeated("漢字"),
        "entities": repeated("&#65;"),
        "percent": repeated("%41"),
        "base64": "".join(chance.choices("ABCDEFGHIJKLMNOPabcdefgh0123456789+/", k=size)),
        "hex": "".join(chance.choices("0123456789abcdef", k=size)),
        "digits": "9" * size,
        "json": json.dumps({"a": [{"b": n} for n in range(size // 12)]})[:size],
        "json-list": "[" + "1," * (size // 2) + "1]",
        "json-in-json": json.dumps(json.dumps(json.dumps({"a": '"\\' * (size // 20)}))),
        "bomb": repeated("(a+)+") + "$",
        "alternatives": repeated("(a|aa)*"),
        "address": "https://" + repeated("a."),
        "users": "https://" + repeated("a@"),
        "numbers": repeated("1.1.1.1,"),
        "cron": repeated("*/1,"),
        "ranges": repeated("a..b~1^"),
        "markers": repeated("⟦U+202E⟧"),
        "half": repeated("ab\\u00"),
        "tags-of-html": repeated("<a href="),
        "yaml": "---\n" + repeated("- &a [*a, "),
        "random": "".join(map(chr, (chance.randrange(0x20, 0xD7FF) for _ in range(size // 2)))),
    }


def _deep(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


VALUES: Mapping[str, Any] = {
    "many-items": ["a"] * 200_000,
    "many-numbers": list(range(200_000)),
    "many-objects": [{"a": n} for n in range(100_000)],
    "many-lists": [[]] * 200_000,
    "many-keys": {f"k{n}": n for n in range(100_000)},
    "long-keys": {f"{n}{'k' * 100}": n for n in range(10_000)},
    "long-item": ["a" * 1_000_000],
    "deep": _deep(60),
    "deeper": _deep(5_000),
    "number": 10**4_000,
    "tiny": 1e-300,
}
