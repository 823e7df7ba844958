"""The text of a PDF by page, read in a process with its own limits, since a document can be made to cost anything.

The process gets the open file as its input, and prints one JSON value a line: the number of pages, then the text of each
page. The system ends the process at a limit, so lines may be missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import FilePages, ResolvedPath
from handrail.origins.import_guard import build_trusted_search_path
from handrail.origins.program_lookup import ProgramRefused, find_own_interpreter

CPU_SECONDS = 10
"""Processor time for one range of pages."""
TIMEOUT_S = 60.0
"""Wall time. The limit of processor time comes first, except on a busy machine."""
MEMORY_MIB = 1024
"""Address space of the process."""
MAX_PAGES = 500
"""The most pages that are read at once."""
_START = "import sys; sys.path[:0] = sys.argv[4:]; from handrail.runtime.files.pdf_pages import main; main()"
_AT_ONCE = 2
_slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
_LIMITS = f"{CPU_SECONDS} s of processor time and {MEMORY_MIB} MiB"
_PROGRAM_HINT = "use a program such as pdftotext in bash"


async def read_pdf_pages(
    descriptor: int, located: ResolvedPath, size: int, first: int, count: int | None, max_bytes: int
) -> FilePages:
    """Return the text of the pages from ``first`` on; see :meth:`FileService.read_pages`.

    :param descriptor: the open file
    """
    loop = asyncio.get_running_loop()
    for other in [one for one in _slots if one.is_closed()]:
        del _slots[other]
    async with _slots.setdefault(loop, asyncio.Semaphore(_AT_ONCE)):
        head, *pages = await _run_reader(descriptor, first, min(count or MAX_PAGES, MAX_PAGES), max_bytes)
    name = located.display_path
    if "error" in head:
        raise _reader_error(name, head["error"], str(head.get("text", "")))
    total, begin = int(head["pages"]), int(head["first"])
    if begin > total:
        raise ToolError(
            f"`offset` is beyond the end of {name}: page {begin}. The document has {total} pages. Pass a smaller `offset`.",
            kind="invalid_input",
        )
    if not pages and total:
        raise ToolError(
            f"Page {begin} of {name} could not be read within {_LIMITS}. Pass the next page as `offset`, or {_PROGRAM_HINT}.",
            kind="limit",
        )
    end = begin + len(pages)
    texts = tuple(str(one["text"]) for one in pages)
    return FilePages(name, texts, begin, end if end <= total else None, total, size)


def _reader_error(name: str, why: str, text: str) -> ToolError:
    if why == "missing":
        return ToolError(
            f"Reading the text of a PDF is not available: pypdf is not installed. Ask the user to run "
            f"pip install 'handrail[pdf]', or {_PROGRAM_HINT}.",
            kind="unavailable",
        )
    if why == "encrypted":
        return ToolError(
            f"{name} is encrypted with a password. Ask the user for a copy without a password.", kind="unavailable"
        )
    if why == "limit":
        return ToolError(
            f"{name} could not be read within {_LIMITS}. Split the document, or {_PROGRAM_HINT}.", kind="limit"
        )
    return ToolError(
        f"{name} is not a readable PDF: {text or 'no details'}. Check the file, or {_PROGRAM_HINT}.", kind="failed"
    )


async def _run_reader(descriptor: int, first: int, count: int, max_bytes: int) -> list[dict[str, Any]]:
    """Return the values that the process printed: one about the document, then one for each page."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(find_own_interpreter(), "-I", "-S", "-c", _START, str(first), str(count), str(max_bytes)),
            *dict.fromkeys((str(Path(__file__).parents[3]), *build_trusted_search_path())),
            stdin=descriptor,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except (ProgramRefused, OSError, ValueError) as error:
        raise ToolError(
            f"Reading the text of a PDF is not available: {error}. Ask the user, or {_PROGRAM_HINT}.",
            kind="unavailable",
        ) from None
    output = bytearray()
    assert process.stdout is not None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                while (piece := await process.stdout.read(1 << 16)) and len(output) < 16 * max_bytes + (1 << 20):
                    output += piece
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    values: list[dict[str, Any]] = []
    for line in output.splitlines():
        try:
            values.append(cast("dict[str, Any]", json.loads(line)))
        except ValueError:  # the process ended in the middle of a line
            break
    return values or [{"error": "limit"}]


# In the process.


def main() -> None:
    """Print the pages of the document on the standard input. The arguments are the range and the most bytes of text."""
    import resource  # the kernel imports this module also on systems without it

    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY_MIB * 1024 * 1024,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    first, count, max_bytes = map(int, sys.argv[1:4])
    try:
        _print_pages(first, count, max_bytes)
    except (MemoryError, RecursionError):
        _print_value({"error": "limit"})
    except Exception as error:
        _print_value({"error": "failed", "text": f"{type(error).__name__}: {error}"[:300]})


def _print_pages(first: int, count: int, max_bytes: int) -> None:
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError, WrongPasswordError
    except ImportError:
        _print_value({"error": "missing"})
        return
    with os.fdopen(0, "rb", closefd=False) as file:
        file.seek(0)
        reader = PdfReader(file)
        try:
            if reader.is_encrypted and not reader.decrypt(""):
                raise WrongPasswordError
            total = len(reader.pages)
        except (WrongPasswordError, DependencyError):
            _print_value({"error": "encrypted"})
            return
        begin = max(1, total + first + 1) if first < 0 else first
        _print_value({"pages": total, "first": begin})
        used = 0
        for number in range(begin, min(begin + count, total + 1)):
            try:
                text = reader.pages[number - 1].extract_text()
            except (MemoryError, RecursionError):
                return
            except Exception as error:
                text = f"(This page could not be read: {type(error).__name__}.)"
            text = text.encode("utf-8", "replace").decode()
            used += len(json.dumps(text, ensure_ascii=False).encode()) + 40
            if used > max_bytes and number > begin:
                return
            _print_value({"text": text})


def _print_value(value: dict[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()
