"""Terminals in an editor that show the output of running commands.

A command always runs in Handrail's sandbox, under the rules. With the protocol's ``terminal/create``, the client would run it
with all rights of its user. A client that can draw terminals from updates (``_meta.terminal_output`` among its capabilities)
gets updates. In another client, the terminal runs a small program that shows the text it receives
(:mod:`handrail.frontends.acp.terminal_viewer`). A client without terminals gets the end of the output as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from acp import schema
from acp.agent.connection import AgentSideConnection
from acp.exceptions import RequestError

from handrail.frontends.acp import editor_call_format, terminal_viewer
from handrail.origins.program_lookup import ProgramRefused, find_own_interpreter

DisplayMode = Literal["drawn", "viewed", "text"]
MAX_TEXT_CHARACTERS = 4_000
"""Maximum characters of a growing output that a client without terminals gets, from the end."""
MAX_BUFFERED_BYTES = 1024 * 1024
"""Maximum bytes that wait for a slow terminal. Further output is left out, with a note."""
OMISSION_NOTE = "\n[Part of the output is not shown: this terminal was too slow.]\n"
MAX_TERMINALS = 16
"""Maximum number of concurrent terminals of one session. The output of further calls is text."""
_PATIENCE_S = 10.0
"""Seconds that a client has at the end to finish its terminals."""


def choose_output_display(offered: schema.ClientCapabilities) -> DisplayMode:
    """Return how a client can show the output of a command."""
    if (offered.field_meta or {}).get("terminal_output") is True:
        return "drawn"
    return "viewed" if offered.terminal and sys.platform != "win32" else "text"


class CommandTerminal:
    """The terminal of one running command.

    :param tell: sends the client an update of the call: its content and its ``_meta``
    """

    def __init__(
        self, call_id: str, how: DisplayMode, tell: Callable[[list[editor_call_format.Content] | None, Any], None]
    ) -> None:
        self.call_id = call_id
        self.mode: DisplayMode = how
        self._tell = tell
        self.has_shown_output = False
        """Whether some output was shown."""
        self._end = ""
        self.terminal_id: str | None = call_id if how == "drawn" else None
        self._waiting = bytearray()
        self._writer: asyncio.StreamWriter | None = None
        self._exit_message: bytes | None = None
        self._left_out = False

    @property
    def content(self) -> list[editor_call_format.Content] | None:
        if self.terminal_id is None:
            return None
        return [schema.TerminalToolCallContent(type="terminal", terminal_id=self.terminal_id)]

    def append_terminal_output(self, text: str) -> None:
        """Show a further piece of the output."""
        if not text:
            return
        self.has_shown_output = True
        text = editor_call_format.escape_control_characters(text)
        if self.mode == "drawn":
            self._tell(None, {"terminal_output": {"terminal_id": self.terminal_id, "data": text}})
        elif self.mode == "viewed":
            self._send(text.encode("utf-8", "replace"))
        else:
            self._end = (self._end + text)[-MAX_TEXT_CHARACTERS:]
            self._tell([editor_call_format.make_fenced_content(self._end)], None)

    def show_command_end(self, code: int | None, signal: str | None) -> None:
        if self.mode == "drawn":
            ended = {"terminal_id": self.terminal_id, "exit_code": code, "signal": signal}
            self._tell(None, {"terminal_exit": ended})
        elif self.mode == "viewed":
            self._exit_message = terminal_viewer.END + str(1 if code is None else code & 0xFF).encode()
            self._send(b"")

    def _send(self, data: bytes) -> None:
        writer = self._writer
        behind = len(self._waiting) if writer is None else writer.transport.get_write_buffer_size()
        if data and behind > MAX_BUFFERED_BYTES:
            data = b"" if self._left_out else OMISSION_NOTE.encode()
            self._left_out = True
        self._waiting += data
        if writer is not None:
            self.connect_viewer(writer)

    def connect_viewer(self, writer: asyncio.StreamWriter) -> None:
        """Send the waiting output to the viewer, which has connected."""
        self._writer = writer
        data, self._waiting = bytes(self._waiting), bytearray()
        if not writer.is_closing():
            writer.write(data + (self._exit_message or b""))
            if self._exit_message is not None:
                writer.close()

    def fall_back_to_text_output(self) -> None:
        """Show the output as text, because no terminal is available."""
        self.mode, text, self._waiting = "text", self._waiting.decode("utf-8", "replace"), bytearray()
        if text and self._exit_message is None:
            self.append_terminal_output(text)


class EditorTerminals:
    """The terminals of one session.

    :ivar session_id: the ID of the session, set when it is open
    """

    def __init__(self, client: AgentSideConnection, how: DisplayMode) -> None:
        self.session_id = ""
        self._client = client
        self._mode: DisplayMode = how
        self._open: dict[str, CommandTerminal] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: str | None = None

    def open_command_terminal(
        self, call_id: str, tell: Callable[[list[editor_call_format.Content] | None, Any], None]
    ) -> CommandTerminal:
        how: DisplayMode = self._mode if len(self._open) < MAX_TERMINALS else "text"
        found = self._open[call_id] = CommandTerminal(call_id, how, tell)
        if how == "viewed":
            task = asyncio.create_task(self._run_viewer(found, tell))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return found

    def get(self, call_id: str) -> CommandTerminal | None:
        return self._open.get(call_id)

    def end(self, call_id: str) -> CommandTerminal | None:
        return self._open.pop(call_id, None)

    async def _run_viewer(
        self, found: CommandTerminal, tell: Callable[[list[editor_call_format.Content] | None, Any], None]
    ) -> None:
        """Let the client show one command's output in a terminal, until the command ends."""
        server: asyncio.Server | None = None
        try:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="handrail-acp-")  # private: mode 0700
            path = os.path.join(self._folder, f"{id(found):x}")  # noqa: PTH118 - a text is needed
            server = await asyncio.start_unix_server(lambda _, writer: found.connect_viewer(writer), path)
            made = await self._client.create_terminal(
                self.session_id, find_own_interpreter(), ["-I", "-S", str(Path(terminal_viewer.__file__)), path]
            )
            found.terminal_id = made.terminal_id
            tell(found.content, None)
            await self._client.wait_for_terminal_exit(self.session_id, made.terminal_id)
            await self._client.release_terminal(self.session_id, made.terminal_id)
        except (OSError, RequestError, ValueError, ProgramRefused):  # it has disconnected, or cannot show a terminal
            if found.terminal_id is None:
                found.fall_back_to_text_output()
        finally:
            if server is not None:
                server.close()

    async def aclose(self) -> None:
        """End all terminals, and wait a limited time for the client to finish them."""
        for found in self._open.values():
            found.show_command_end(None, None)
        self._open.clear()
        if self._tasks:
            _, left = await asyncio.wait(tuple(self._tasks), timeout=_PATIENCE_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)
