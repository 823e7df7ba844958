"""The text of a PDF by page.

This module runs in a separate process (:mod:`~handrail.origins.bounded_program`), since a document can be made to
cost anything. Each page is printed as soon as it is read, so the pages before a limit are kept.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any


def compute_values(question: Mapping[str, Any], document: bytes) -> Iterator[dict[str, object]]:
    """Yield the number of pages and of the first one, then the text of each page.

    :param question: the ``first`` page, the ``count`` of pages, and the ``max_bytes`` of their text as JSON
    """
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, WrongPasswordError

    first, count, max_bytes = (int(question[name]) for name in ("first", "count", "max_bytes"))
    reader = PdfReader(io.BytesIO(document))
    try:
        if reader.is_encrypted and not reader.decrypt(""):
            raise WrongPasswordError
        total = len(reader.pages)
    except (WrongPasswordError, DependencyError):
        yield {"error": "encrypted"}
        return
    begin = max(1, total + first + 1) if first < 0 else first
    yield {"pages": total, "first": begin}
    used = 0
    for number in range(begin, min(begin + count, total + 1)):
        try:
            text = reader.pages[number - 1].extract_text()
        except (MemoryError, RecursionError):
            return
        except Exception as error:
            text = f"(This page could not be read: {type(error).__name__}.)"
        text = text[:max_bytes].encode("utf-8", "replace").decode()
        used += len(json.dumps(text, ensure_ascii=False).encode()) + 40
        if used > max_bytes and number > begin:
            return
        yield {"text": text}
