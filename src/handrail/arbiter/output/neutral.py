"""Neutralising a result for the model: dangerous characters in foreign text are spelled out (:mod:`handrail.contract.text.neutral`), counted and flagged.

The people and programs at the face, the log, artifacts and sidecars have the text as it is.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import orjson

from handrail.contract.result import Result
from handrail.contract.text.neutral import found, may_have_any, neutralised

FLAG = "neutralised"
"""In the metadata: how many places of which kind were spelled out."""


def for_model(result: Result, encoded: bytes | None = None) -> Result:
    """``result`` with what acts, hides or imitates spelled out in data, error text and metadata; the same object where
    there is nothing of it.

    :param encoded: the JSON of its data, where that is at hand
    """
    counts: Counter[str] = Counter()
    data = result.data
    if data is not None and may_have_any(orjson.dumps(data) if encoded is None else encoded):
        data = _walked(data, counts)
    error_text = result.error_text
    if error_text is not None:
        error_text = _text(error_text, counts)
    metadata = cast("dict[str, Any]", result.metadata)
    if may_have_any(orjson.dumps(metadata, default=str)):
        metadata = _walked(metadata, counts)
    if not counts:
        return result
    return Result(result.type, data, error_text, {**metadata, FLAG: dict(sorted(counts.items()))})


def _walked(value: Any, counts: Counter[str]) -> Any:
    if isinstance(value, str):
        return _text(value, counts)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        walked = {_text(key, counts): _walked(item, counts) for key, item in members.items()}
        # Keys that are shown alike would hide one another: as a list of pairs all of them stay.
        return walked if len(walked) == len(members) else {"pairs": [list(pair) for pair in _pairs(members)]}
    if isinstance(value, (list, tuple)):
        return [_walked(item, counts) for item in cast("list[Any]", value)]
    return value


def _pairs(members: dict[str, Any]) -> list[tuple[str, Any]]:
    unused: Counter[str] = Counter()
    return [(_text(key, unused), _walked(item, unused)) for key, item in members.items()]


def _text(text: str, counts: Counter[str]) -> str:
    pieces = found(text)
    if not pieces:
        return text
    counts.update(piece.kind for piece in pieces)
    return neutralised(text)
