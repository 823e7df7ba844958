"""About how many tokens a text takes in a model's context.

An estimate of our own: vocabularies differ between providers and none can be had offline. It splits text as byte-pair
tokenizers do before they merge, and counts what is left of each piece. On tool definitions, prose and code it came within
a tenth of what ``o200k_base`` counts.
"""

from __future__ import annotations

import json
import re
from typing import Any

from handrail.contract.tool.spec import ToolSpec

_PIECE = re.compile(
    r"[ ]?[A-Za-z]+"  # a word with the blank before it
    r"|\d{1,3}"
    r"|[ ]?[^\sA-Za-z\d\x80-\U0010ffff]+[\r\n]*"  # punctuation, which merges well: '":"' is one
    r"|\s+"
    r"|[\x80-\U0010ffff]+"
)
_WORD = 10
"""Letters of a word that are mostly one token."""
_MARKS = 4
"""Marks in a row that are mostly one."""


def estimated(text: str) -> int:
    """About how many tokens ``text`` takes."""
    count = 0
    for match in _PIECE.finditer(text):
        piece = match.group()
        head = piece[1:2] if piece[0] == " " and len(piece) > 1 else piece[0]
        if head.isascii() and head.isalpha():
            count += 1 + (len(piece.strip()) - 1) // _WORD
        elif head.isdigit() or head.isspace():
            count += 1
        elif head.isascii():
            count += 1 + (len(piece.strip()) - 1) // _MARKS
        else:  # two or three bytes each, most of them one token
            count += len(piece)
    return count


def of_json(value: Any) -> int:
    """About how many tokens ``value`` takes as compact JSON."""
    return estimated(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))


def of_spec(spec: ToolSpec) -> int:
    """About how many tokens a tool takes among those that a model is given: its LLM view, and no more."""
    return of_json(spec.llm_view())
