"""Terminals in an editor that show the output of running commands.

A command always runs in Handrail's sandbox, under the rules. With the protocol's ``terminal/create``, the client would run it
with all rights of its user. A client that can draw terminals from updates (``_meta.terminal_output`` among its capabilities)
gets updates. In another client, the terminal runs a small program that shows the text it receives
(:mod:`handrail.frontends.acp.screen`). A client without terminals gets the end of the output as text.
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

from handrail.frontends.acp import screen, showing
from handrail.origins.programs import ProgramRefused, own_interpreter

How = Literal["drawn", "viewed", "text"]
MOST_TEXT = 4_000
"""Maximum characters of a growing output that a client without terminals gets, from the end."""
MOST_BEHIND = 1024 * 1024
"""Maximum bytes that wait for a slow terminal. Further output is left out, with a note."""
LEFT_OUT = "\n[Part of the output is not shown: this terminal was too slow.]\n"
MOST_SCREENS = 16
"""Maximum number of concurrent terminals of one session. The output of further calls is text."""
_PATIENCE_S = 10.0
"""Seconds that a client has at the end to finish its terminals."""


def how_shown(offered: schema.ClientCapabilities) -> How:
    """Return how a client can show the output of a command."""
    if (offered.field_meta or {}).get("terminal_output") is True:
        return "drawn"
    return "viewed" if offered.terminal and sys.platform != "win32" else "text"


class Screen:
    """The terminal of one running command.

    :param tell: sends the client an update of the call: its content and its ``_meta``
    """

    def __init__(self, call_id: str, how: How, tell: Callable[[list[showing.Content] | None, Any], None]) -> None:
        self.call_id = call_id
        self.how: How = how
        self._tell = tell
        self.shown = False
        """Whether some output was shown."""
        self._end = ""
        self.terminal: str | None = call_id if how == "drawn" else None
        self._waiting = bytearray()
        self._writer: asyncio.StreamWriter | None = None
        self._over: bytes | None = None
        self._left_out = False

    @property
    def content(self) -> list[showing.Content] | None:
        if self.terminal is None:
            return None
        return [schema.TerminalToolCallContent(type="terminal", terminal_id=self.terminal)]

    def write(self, text: str) -> None:
        """Show a further piece of the output."""
        if not text:
            return
        self.shown = True
        text = showing.plain(text)
        if self.how == "drawn":
            self._tell(None, {"terminal_output": {"terminal_id": self.terminal, "data": text}})
        elif self.how == "viewed":
            self._send(text.encode("utf-8", "replace"))
        else:
            self._end = (self._end + text)[-MOST_TEXT:]
            self._tell([showing.fenced(self._end)], None)

    def end(self, code: int | None, signal: str | None) -> None:
        """Show that the command has ended."""
        if self.how == "drawn":
            ended = {"terminal_id": self.terminal, "exit_code": code, "signal": signal}
            self._tell(None, {"terminal_exit": ended})
        elif self.how == "viewed":
            self._over = screen.END + str(1 if code is None else code & 0xFF).encode()
            self._send(b"")

    def _send(self, data: bytes) -> None:
        writer = self._writer
        behind = len(self._waiting) if writer is None else writer.transport.get_write_buffer_size()
        if data and behind > MOST_BEHIND:
            data = b"" if self._left_out else LEFT_OUT.encode()
            self._left_out = True
        self._waiting += data
        if writer is not None:
            self.connected(writer)

    def connected(self, writer: asyncio.StreamWriter) -> None:
        """Send the waiting output to the viewer, which has connected."""
        self._writer = writer
        data, self._waiting = bytes(self._waiting), bytearray()
        if not writer.is_closing():
            writer.write(data + (self._over or b""))
            if self._over is not None:
                writer.close()

    def as_text(self) -> None:
        """Show the output as text, because no terminal is available."""
        self.how, text, self._waiting = "text", self._waiting.decode("utf-8", "replace"), bytearray()
        if text and self._over is None:
            self.write(text)


class Screens:
    """The terminals of one session.

    :ivar session_id: the ID of the session, set when it is open
    """

    def __init__(self, client: AgentSideConnection, how: How) -> None:
        self.session_id = ""
        self._client = client
        self._how: How = how
        self._open: dict[str, Screen] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: str | None = None

    def begin(self, call_id: str, tell: Callable[[list[showing.Content] | None, Any], None]) -> Screen:
        """Open a terminal for a command that starts."""
        how: How = self._how if len(self._open) < MOST_SCREENS else "text"
        found = self._open[call_id] = Screen(call_id, how, tell)
        if how == "viewed":
            task = asyncio.create_task(self._view(found, tell))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return found

    def get(self, call_id: str) -> Screen | None:
        return self._open.get(call_id)

    def end(self, call_id: str) -> Screen | None:
        return self._open.pop(call_id, None)

    async def _view(self, found: Screen, tell: Callable[[list[showing.Content] | None, Any], None]) -> None:
        """Let the client show one command's output in a terminal, until the command ends."""
        server: asyncio.Server | None = None
        try:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="handrail-acp-")  # private: mode 0700
            path = os.path.join(self._folder, f"{id(found):x}")  # noqa: PTH118 - a text is needed
            server = await asyncio.start_unix_server(lambda _, writer: found.connected(writer), path)
            made = await self._client.create_terminal(
                self.session_id, own_interpreter(), ["-I", "-S", str(Path(screen.__file__)), path]
            )
            found.terminal = made.terminal_id
            tell(found.content, None)
            await self._client.wait_for_terminal_exit(self.session_id, made.terminal_id)
            await self._client.release_terminal(self.session_id, made.terminal_id)
        except (OSError, RequestError, ValueError, ProgramRefused):  # it has disconnected, or cannot show a terminal
            if found.terminal is None:
                found.as_text()
        finally:
            if server is not None:
                server.close()

    async def aclose(self) -> None:
        """End all terminals, and wait a limited time for the client to finish them."""
        for found in self._open.values():
            found.end(None, None)
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
