"""The document service of the runtime: text from pages and PDFs, extracted in a process that can be ended.

The process runs in a sandbox without the workspace and without network, where the machine has one, and always under its
own limits of processor time and memory. A document that exceeds them costs the limit, not the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, Sandbox, SandboxLimits, SandboxProfile
from handrail.contract.services.tool_runtime import ExtractedPdfPages, ExtractedWebPage
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.origins.bounded_program import encode_input, make_argv, parse_json_lines, run_bounded_program
from handrail.origins.import_guard import build_trusted_search_path
from handrail.origins.program_lookup import ProgramRefused, find_own_interpreter
from handrail.runtime.shell_service import kill_process_despite_cancellation


class DocumentExtractorSettings(NamedTuple):
    """A module that extracts text with its ``compute_values``, and the limits of its process.

    :param cpu_s: processor time, start-up included
    :param memory_mib: address space
    :param timeout_s: wall time; the limit of processor time comes first, except on a busy machine
    """

    module: str
    cpu_s: int
    memory_mib: int
    timeout_s: float

    @property
    def limits_text(self) -> str:
        """The limits that a document can exceed, for a message."""
        return f"{self.cpu_s} s of processor time and {self.memory_mib} MiB"


PAGE_EXTRACTOR = DocumentExtractorSettings("handrail.runtime.documents.page_text", 2, 1024, 30.0)
PDF_EXTRACTOR = DocumentExtractorSettings("handrail.runtime.documents.pdf_text", 10, 1024, 50.0)  # a read may take 60 s
MAX_PAGES = 500
"""The most pages of a PDF that are read at once."""
_MAX_ANSWER = 64 * 1024 * 1024
_AT_ONCE = 2
_slots: dict[tuple[asyncio.AbstractEventLoop, DocumentExtractorSettings], asyncio.Semaphore] = {}
"""Processes of all sessions at a time. Slow PDFs do not keep web pages waiting."""
_PROCESSES = 16
_NOTHING = CapabilitySet((CapabilityLayer("extraction of text"),))
_SITES = ("site-packages", "dist-packages")
_PROGRAM_HINT = "use a program such as pdftotext in bash"


class SandboxedDocuments:
    """A document service: :class:`~handrail.contract.services.tool_runtime.DocumentService`.

    :param profile: of the session; the process gets its limits and masks, and none of its folders
    """

    def __init__(self, sandbox: Sandbox, profile: SandboxProfile) -> None:
        self._sandbox = sandbox
        self._profile = profile

    async def extract_page(self, page: bytes, *, charset: str | None = None, url: str) -> ExtractedWebPage:
        question: dict[str, object] = {"charset": charset, "url": url, "only_strip_tags": False}
        async with _get_slots(PAGE_EXTRACTOR):
            found, *_ = await self._run_extractor(PAGE_EXTRACTOR, question, page)
            is_simplified = "error" in found and found["error"] != "missing"
            if is_simplified:
                found, *_ = await self._run_extractor(PAGE_EXTRACTOR, {**question, "only_strip_tags": True}, page)
        if found.get("error") == "missing":
            raise ToolError(
                "Text cannot be extracted from HTML: the extra 'web' is not installed. Ask the user to install it "
                "(handrail doctor shows the command), or fetch JSON or plain text.",
                kind="unavailable",
            )
        if "error" in found:
            raise ToolError(
                f"The text of {url} could not be extracted within {PAGE_EXTRACTOR.limits_text}. Use another page, "
                "or a page with less content.",
                kind="failed",
            )
        return ExtractedWebPage(
            text=found["text"],
            part=found["part"],
            title=found.get("title", ""),
            links=tuple((text, target) for text, target in found.get("links", ())),
            hidden_elements=found.get("hidden_elements", 0),
            keeps_hidden=found.get("keeps_hidden", False),
            scripts=found.get("scripts", 0),
            is_simplified=is_simplified,
        )

    async def extract_pdf_pages(
        self, document: bytes, *, name: str, first: int = 1, count: int | None = None, max_bytes: int = 200_000
    ) -> ExtractedPdfPages:
        question: dict[str, object] = {
            "first": first,
            "count": min(count or MAX_PAGES, MAX_PAGES),
            "max_bytes": min(max_bytes, _MAX_ANSWER // 16),  # a character of 4 bytes is printed in 12
        }
        async with _get_slots(PDF_EXTRACTOR):
            head, *pages = await self._run_extractor(PDF_EXTRACTOR, question, document)
        if "error" in head:
            raise _make_pdf_error(name, head["error"], str(head.get("text", "")))
        total, begin = int(head["pages"]), int(head["first"])
        pages = [one for one in pages if "text" in one]
        if not pages and begin <= total:
            raise ToolError(
                f"Page {begin} of {name} could not be read within {PDF_EXTRACTOR.limits_text}. Read the next page, or "
                f"{_PROGRAM_HINT}.",
                kind="limit",
            )
        return ExtractedPdfPages(tuple(str(one["text"]) for one in pages), begin, total)

    async def _run_extractor(
        self, extractor: DocumentExtractorSettings, question: dict[str, object], document: bytes
    ) -> list[dict[str, Any]]:
        """Return the values of the answer, at least one. It has an ``error`` if the document has no text to return."""
        folders = list(dict.fromkeys((str(Path(__file__).parents[3]), *build_trusted_search_path())))
        try:
            argv = make_argv(find_own_interpreter(), extractor.module, extractor.cpu_s, extractor.memory_mib, folders)
        except ProgramRefused as error:
            raise ToolError(str(error), kind="unavailable") from None
        data = encode_input(question, document)
        output = bytearray()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(extractor.timeout_s):
                if self._sandbox.tier.is_confining:
                    await self._run_confined(argv, data, output, extractor, _list_code_folders(folders))
                else:
                    await _run_unconfined(argv, data, output)
        return parse_json_lines(output) or [{"error": "limit"}]

    async def _run_confined(
        self,
        argv: tuple[str, ...],
        data: bytes,
        output: bytearray,
        extractor: DocumentExtractorSettings,
        readable: tuple[str, ...],
    ) -> None:
        memory_bytes = extractor.memory_mib << 20
        profile = dataclasses.replace(
            self._profile,
            workspace_writable=False,
            readable=readable,
            writable=(),
            read_only_roots=(),
            environment={},
            limits=SandboxLimits(
                cpu_s=extractor.cpu_s,
                memory_bytes=memory_bytes,
                call_memory_bytes=2 * memory_bytes,
                processes=_PROCESSES,
            ),
        )
        process = await self._sandbox.start(_NOTHING, profile, ProgramSpec((_resolve_interpreter(argv[0]), *argv[1:])))
        try:
            await process.communicate(data, 0, lambda piece: output.extend(piece[: _MAX_ANSWER - len(output)]))
        finally:
            await kill_process_despite_cancellation(process)


def _make_pdf_error(name: str, why: str, text: str) -> ToolError:
    if why == "missing":
        return ToolError(
            f"Reading the text of a PDF is not available: pypdf is not installed. Ask the user to install the extra 'pdf' "
            f"(handrail doctor shows the command), or {_PROGRAM_HINT}.",
            kind="unavailable",
        )
    if why == "encrypted":
        return ToolError(
            f"{name} is encrypted with a password. Ask the user for a copy without a password.", kind="unavailable"
        )
    if why == "limit":
        return ToolError(
            f"{name} could not be read within {PDF_EXTRACTOR.limits_text}. Split the document, or {_PROGRAM_HINT}.",
            kind="limit",
        )
    return ToolError(
        f"{name} is not a readable PDF: {text or 'no details'}. Check the document, or {_PROGRAM_HINT}.", kind="failed"
    )


def _get_slots(extractor: DocumentExtractorSettings) -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    for other in [one for one in _slots if one[0].is_closed()]:
        del _slots[other]
    return _slots.setdefault((loop, extractor), asyncio.Semaphore(_AT_ONCE))


async def _run_unconfined(argv: tuple[str, ...], data: bytes, output: bytearray) -> None:
    try:
        await run_bounded_program(argv, data, output, max_bytes=_MAX_ANSWER)
    except (OSError, ValueError) as error:
        raise ToolError(
            f"The text of the document cannot be extracted: {error}. Ask the user to check the machine with handrail doctor.",
            kind="unavailable",
        ) from None


def _list_code_folders(import_folders: list[str]) -> tuple[str, ...]:
    """Return the folders of this Python, of Handrail and of packages that are not part of the system."""
    own = str(Path(__file__).parents[2])
    packages = [one for one in import_folders if os.path.basename(one) in _SITES and os.path.isdir(one)]  # noqa: PTH112, PTH119
    found = dict.fromkeys(os.path.realpath(one) for one in (sys.prefix, sys.base_prefix, own, *packages))
    return tuple(one for one in found if one not in ("/usr", "/"))


def _resolve_interpreter(interpreter: str) -> str:
    """Return the path of the interpreter with the links in the path to its folder resolved."""
    folder, name = os.path.split(interpreter)
    return str(Path(os.path.realpath(folder)) / name)
