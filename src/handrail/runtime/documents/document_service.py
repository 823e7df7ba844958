"""The document service of the runtime: text from pages, extracted in a process that can be ended.

The process runs in a sandbox without the workspace and without network, where the machine has one, and always under its
own limits of processor time and memory. A page that exceeds them costs the limit, not the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, Sandbox, SandboxLimits, SandboxProfile
from handrail.contract.services.tool_runtime import ExtractedPage
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.origins.program_lookup import (
    ProgramRefused,
    find_enclosing_folder,
    find_own_interpreter,
    list_open_workspaces,
)
from handrail.runtime.documents.page_text import CPU_SECONDS, MEMORY_MIB
from handrail.runtime.shell_service import end_process

_LIBRARIES = ("resiliparse", "trafilatura")
_MODULE = "handrail.runtime.documents.page_text"
_START = f"import sys; sys.path[:0] = sys.argv[1:]; from {_MODULE} import main; main()"
_TIMEOUT_S = 30.0
"""Wall time of one process. The limit of processor time comes first, except on a busy machine."""
_MAX_ANSWER = 64 * 1024 * 1024
_AT_ONCE = 2
_slots = asyncio.Semaphore(_AT_ONCE)
"""Processes of all sessions at a time."""
_LIMITS = SandboxLimits(
    cpu_s=CPU_SECONDS, memory_bytes=MEMORY_MIB << 20, call_memory_bytes=2 * MEMORY_MIB << 20, processes=16
)
_NOTHING = CapabilitySet((CapabilityLayer("extraction of text"),))


class SandboxedDocuments:
    """A document service: :class:`~handrail.contract.services.tool_runtime.DocumentService`.

    :param profile: of the session; the process gets its limits and masks, and none of its folders
    """

    def __init__(self, sandbox: Sandbox, profile: SandboxProfile) -> None:
        self._sandbox = sandbox
        self._profile = profile

    async def extract_page(self, page: bytes, *, charset: str | None = None, url: str) -> ExtractedPage:
        if not all(find_spec(library) for library in _LIBRARIES):
            raise ToolError(
                "Text cannot be extracted from HTML: the extra 'web' is not installed. Ask the user to run "
                "pip install 'handrail[web]', or fetch JSON or plain text.",
                kind="unavailable",
            )
        question: dict[str, object] = {"charset": charset, "url": url, "only_strip_tags": False}
        async with _slots:
            found = await self._run_program(question, page)
            simplified = found is None
            if found is None:
                found = await self._run_program({**question, "only_strip_tags": True}, page)
        if found is None:
            raise ToolError(
                f"The text of {url} could not be extracted within {CPU_SECONDS} s and {MEMORY_MIB} MiB. Use another page, "
                "or a page with less content.",
                kind="failed",
            )
        return ExtractedPage(
            text=found["text"],
            part=found["part"],
            title=found.get("title", ""),
            links=tuple((text, target) for text, target in found.get("links", ())),
            hidden_elements=found.get("hidden_elements", 0),
            scripts=found.get("scripts", 0),
            is_simplified=simplified,
        )

    async def _run_program(self, question: dict[str, object], page: bytes) -> dict[str, Any] | None:
        """Return the answer of the program; None if it exceeded a limit."""
        try:
            argv = (find_own_interpreter(), "-I", "-S", "-c", _START, *_list_import_folders())
        except ProgramRefused as error:
            raise ToolError(str(error), kind="unavailable") from None
        data = json.dumps(question).encode() + b"\n" + page
        output = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                run = self._run_confined if self._sandbox.tier.is_confining else _run_unconfined
                output = await run(argv, data)
        try:
            return cast("dict[str, Any]", json.loads(output))
        except ValueError:
            return None

    async def _run_confined(self, argv: tuple[str, ...], data: bytes) -> bytes:
        profile = dataclasses.replace(
            self._profile,
            workspace_writable=False,
            readable=_list_code_folders(),
            writable=(),
            read_only_roots=(),
            environment={},
            limits=_LIMITS,
        )
        process = await self._sandbox.start(_NOTHING, profile, ProgramSpec((_in_sandbox(argv[0]), *argv[1:])))
        try:
            output, _, _ = await process.communicate(data, _MAX_ANSWER)
        finally:
            await end_process(process)
        return output


async def _run_unconfined(argv: tuple[str, ...], data: bytes) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate(data)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    return output


def _list_import_folders() -> list[str]:
    """Return the import path for the process, without open workspaces, where a call could have written."""
    folders = list_open_workspaces()
    wanted = dict.fromkeys((str(Path(__file__).parents[3]), *sys.path))
    return [one for one in wanted if one.startswith("/") and find_enclosing_folder(one, folders) is None]


@lru_cache(maxsize=1)
def _list_code_folders() -> tuple[str, ...]:
    """Return the folders of this Python and of Handrail that are not part of the system."""
    own = str(Path(__file__).parents[2])
    found = dict.fromkeys(os.path.realpath(one) for one in (sys.prefix, sys.base_prefix, own))
    return tuple(one for one in found if one not in ("/usr", "/"))


def _in_sandbox(interpreter: str) -> str:
    """Return the path of the interpreter with the links in the path to its folder resolved."""
    folder, name = os.path.split(interpreter)
    return str(Path(os.path.realpath(folder)) / name)
