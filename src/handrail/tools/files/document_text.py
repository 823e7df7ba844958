"""Answers of ``read`` for documents: a PDF by page, a Jupyter notebook by cell, and the types of images."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import ToolError
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.lazy_patterns import compile_regex_lazily

PDF_START = b"%PDF-"
MAX_PDF_BYTES = 128 * 1024 * 1024
"""The largest PDF that is read. This process and that of the extraction hold all of it."""
_PIECE_BYTES = 16 * 1024 * 1024
_MAX_OUTPUT = 10_000
"""The most characters that are shown of one output of a cell."""
_MAX_IMAGES = 8
"""The most images of a notebook in one answer."""
_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_OLD_FORMS = {"png": "image/png", "jpeg": "image/jpeg", "gif": "image/gif", "svg": "image/svg+xml"}
"""The names of forms before version 4 of the notebook format."""
_TERMINAL_CODES = compile_regex_lazily(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_NO_TEXT = "(This page has no text. It may be a scan: convert it to images with a program in bash, and read these.)"


async def read_pdf(runtime: Runtime, path: str, first: int, count: int | None, max_bytes: int) -> dict[str, object]:
    """Read the text of the pages from ``first`` on that fit into an answer.

    :raises ToolError: ``invalid_input`` for pages beyond the end, ``limit`` for a file that is too large
    """
    shown, document = await _read_whole_file(runtime, path)
    answer = await extract_pdf_text(runtime, document, shown, first, count, max_bytes)
    return {"path": shown, **answer, "size": len(document)}


async def extract_pdf_text(
    runtime: Runtime, document: bytes, name: str, first: int, count: int | None, max_bytes: int
) -> dict[str, object]:
    """Return the text of the pages from ``first`` on that fit, with their numbers and the number of all pages.

    :param name: of the document, for messages
    :raises ToolError: ``invalid_input`` for pages beyond the end
    """
    found = await runtime.documents.extract_pdf_pages(
        document, name=name, first=first, count=count, max_bytes=max_bytes
    )
    if not found.total:
        raise ToolError(f"{name} has no pages. Check the document.", kind="failed")
    if found.first > found.total:
        raise ToolError(
            f"`offset` is beyond the end of {name}: page {found.first}. The document has {found.total} pages. Pass a smaller "
            "`offset`.",
            kind="invalid_input",
        )
    parts = [
        f"--- page {number} ---\n{text.strip() or _NO_TEXT}" for number, text in enumerate(found.pages, found.first)
    ]
    return _join_parts(parts, max_bytes, found.first, found.total, "page")[0]


async def _read_whole_file(runtime: Runtime, path: str) -> tuple[str, bytes]:
    """Return the path to show and the content of a file of at most :data:`MAX_PDF_BYTES`, read in pieces."""
    pieces, done = list[bytes](), 0
    while True:
        found = await runtime.files.read_bytes(path, start=done, max_bytes=_PIECE_BYTES)
        if found.size > MAX_PDF_BYTES:
            raise ToolError(
                f"{found.path} has {found.size:,} bytes. A PDF may have at most {MAX_PDF_BYTES:,}. Split the document, or use a "
                "program such as pdftotext in bash.",
                kind="limit",
            )
        pieces.append(found.data)
        done += len(found.data)
        if not found.data or done >= found.size:
            return found.path, b"".join(pieces)


def detect_image_type(data: bytes) -> str | None:
    """Return the media type of an image by its first bytes, or None for anything else."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES if data.startswith(magic)), None)


async def read_notebook_cells(
    runtime: Runtime, path: str, first: int, count: int | None, max_bytes: int
) -> dict[str, object] | None:
    """Read the cells from ``first`` on that fit into an answer; None if the file has another form or is too large.

    :raises ToolError: ``invalid_input`` for cells beyond the end
    """
    try:
        found = await runtime.files.read_bytes(path)
    except ToolError as error:
        if error.kind == "limit":
            return None
        raise
    cells = await asyncio.to_thread(_parse_cells, found.data)
    if cells is None:
        return None
    begin = max(1, len(cells) + first + 1) if first < 0 else first
    if begin > max(1, len(cells)):
        raise ToolError(
            f"`offset` is beyond the end of {found.path}: cell {begin}. The notebook has {len(cells)} cells. Pass a smaller "
            "`offset`.",
            kind="invalid_input",
        )
    wanted = cells[begin - 1 :][:count]
    answer = await asyncio.to_thread(_show_cells, wanted, begin, len(cells), max_bytes)
    return {"path": found.path, **answer, "size": found.size}


def _show_cells(cells: Sequence[Mapping[str, Any]], first: int, total: int, max_bytes: int) -> dict[str, object]:
    """Return the text of the cells that fit, and the images in them."""
    images, ends, parts = list[Blob](), list[int](), list[str]()
    for number, cell in enumerate(cells, first):
        parts.append(_show_cell(number, cell, images))
        ends.append(len(images))
    answer, count = _join_parts(parts, max_bytes, first, total, "cell")
    shown = images[: ends[count - 1]] if count else ()
    return {**answer, "images": shown} if shown else answer


def _join_parts(
    parts: Sequence[str], max_bytes: int, first: int, total: int, what: str
) -> tuple[dict[str, object], int]:
    """Return as many parts as fit, with the numbers of the first and last, and of the one to continue with; and their count."""
    used, kept = 0, list[str]()
    for part in parts:
        used += len(json.dumps(part, ensure_ascii=False).encode("utf-8", "replace"))
        if used > max_bytes and kept:
            break
        kept.append(part if used <= max_bytes else f"{part[: max_bytes // 4]}\n(The rest of this {what} is too long.)")
    last = first + len(kept) - 1
    answer: dict[str, object] = {
        "text": "\n\n".join(kept),
        f"first_{what}": first,
        f"last_{what}": last,
        "next": last + 1 if last < total else None,
        f"total_{what}s": total,
    }
    return answer, len(kept)


def _parse_cells(data: bytes) -> list[Mapping[str, Any]] | None:
    """Return the cells of a notebook; None if it is none."""
    try:
        notebook: Any = json.loads(data.decode("utf-8-sig"))
        sheets: Any = notebook.get("worksheets")
        cells: Any = sheets[0]["cells"] if "cells" not in notebook and sheets else notebook["cells"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cast("list[object]", cells)):
        return None
    return cast("list[Mapping[str, Any]]", cells)


def _show_cell(number: int, cell: Mapping[str, Any], images: list[Blob]) -> str:
    """Return the text of a cell, and add its images to ``images``."""
    kind = str(cell.get("cell_type", "unknown"))[:40]
    lines = [f"--- cell {number} ({kind}) ---", _join_text(cell.get("source", cell.get("input", "")))]
    attachments: object = cell.get("attachments")
    for name, forms in cast("dict[str, object]", attachments).items() if isinstance(attachments, dict) else ():
        if isinstance(forms, dict):
            found = _show_other_forms(cast("Mapping[str, Any]", forms), images, number)
            lines += [f"attachment {name[:100]}: {line}" for line in found]
    outputs: object = cell.get("outputs")
    for output in cast("list[object]", outputs) if isinstance(outputs, list) else ():
        if isinstance(output, dict):
            shown = _show_output(cast("Mapping[str, Any]", output), images, number)
            lines += [f"--- output of cell {number} ---", *shown]
    return "\n".join(lines)


def _show_output(output: Mapping[str, Any], images: list[Blob], number: int) -> Iterator[str]:
    """Yield the text of an output, a reference to each of its images, and a note for its other forms if it has no text."""
    if output.get("output_type") in ("error", "pyerr"):
        trace = _join_text(output.get("traceback", ""), "\n")
        yield _shorten(trace or f"{output.get('ename')}: {output.get('evalue')}")
        return
    forms: object = output.get("data", output)
    data: Mapping[str, Any] = cast("Mapping[str, Any]", forms) if isinstance(forms, dict) else {}
    data = {_OLD_FORMS.get(name, name): value for name, value in data.items()}
    text = next((data[name] for name in ("text/plain", "text") if name in data), None)
    if text is not None:
        yield _shorten(_join_text(text))
    rest = {name: value for name, value in data.items() if text is None or name.startswith("image/")}
    yield from _show_other_forms(rest, images, number)


def _show_other_forms(forms: Mapping[str, Any], images: list[Blob], number: int) -> Iterator[str]:
    """Yield a line for each form that is not text, and add the images that a model can see to ``images``."""
    for name, value in forms.items():
        if "/" not in name or name == "text/plain":
            continue
        encoded = _join_text(value)
        image = _decode_image(encoded) if name.startswith("image/") else None
        if image is None:
            yield f"({name}, {len(encoded):,} characters, not shown)"
        elif len(images) >= _MAX_IMAGES:
            yield f"({name}, not shown: an answer has at most {_MAX_IMAGES} images; read with `offset: {number}`)"
        else:
            images.append(image)
            yield f"(image {len(images)} of this answer: {image.media_type}, {len(image.data):,} bytes)"


def _decode_image(encoded: str) -> Blob | None:
    """Return an image in base64, or None if it is none that a model can see."""
    try:
        data = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    kind = detect_image_type(data)
    return None if kind is None else Blob(data, kind)


def _shorten(text: str) -> str:
    text = _TERMINAL_CODES.sub("", text).rstrip("\n")
    if len(text) <= _MAX_OUTPUT:
        return text
    return f"{text[:_MAX_OUTPUT]}\n({len(text) - _MAX_OUTPUT:,} more characters of this output are not shown)"


def _join_text(value: object, separator: str = "") -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return separator.join(one for one in cast("list[object]", value) if isinstance(one, str))
    return json.dumps(value, ensure_ascii=False, default=str)
