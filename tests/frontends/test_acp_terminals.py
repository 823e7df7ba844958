"""The display of a running command in an editor. The command always runs here, in the sandbox."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from acp import schema
from tests.frontends.acp_clients import Editor, EditorFixture, ask, call

from handrail.contract.calls_and_results import Event, Result
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.acp.editor_terminals import (
    MAX_BUFFERED_BYTES,
    MAX_TEXT_CHARACTERS,
    OMISSION_NOTE,
    CommandTerminal,
    EditorTerminals,
    choose_output_display,
)
from handrail.frontends.acp.editor_updates import Update, UpdateSender
from handrail.frontends.acp.terminal_viewer import END
from handrail.sandbox import tier_probe

pytestmark = [
    pytest.mark.proves("F-05"),
    pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="bash is withheld on this machine"),
]
ECHO = ({"calls": [call("bash", command="echo one")]}, {"text": "Done."})


async def test_a_client_with_terminal_support_receives_the_output_of_a_command(tmp_path: Path) -> None:
    desk, offers = EditorFixture(tmp_path), schema.ClientCapabilities(field_meta={"terminal_output": True})
    async with desk.connected(*ECHO, offers=offers, rules=["allow bash echo *"]) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    told = editor.call(0)
    terminal = told["content"][0]["terminalId"]
    metas = [update.field_meta for update in editor.of("tool_call_update") if update.field_meta]
    assert told["kind"] == "execute" and told["status"] == "completed"
    assert metas[0] == {"terminal_info": {"terminal_id": terminal, "cwd": str(desk.workspace)}}
    assert "".join(meta["terminal_output"]["data"] for meta in metas[1:-1]) == "one\n"
    assert metas[-1] == {"terminal_exit": {"terminal_id": terminal, "exit_code": 0, "signal": None}}


async def test_the_terminal_of_a_client_runs_a_viewer_and_never_the_command(tmp_path: Path) -> None:
    desk, editor = EditorFixture(tmp_path), Editor()
    turns = ({"calls": [call("bash", command="touch made")]}, *ECHO)
    offers = schema.ClientCapabilities(terminal=True)
    rules = ["allow bash echo *", "allow bash touch *"]
    async with desk.connected(*turns, editor=editor, offers=offers, rules=rules) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        await editor.until(lambda: len(editor.released) == 2)
    assert editor.seen == {"t0": "", "t1": "one\n"}
    assert [(command[0], Path(command[3]).name) for command in editor.started] == [
        (sys.executable, "terminal_viewer.py")
    ] * 2
    assert [process.returncode for process in editor.terminals.values()] == [0, 0]
    assert [one["terminalId"] for update in editor.of("tool_call_update") for one in _terminals(update)].count(
        "t1"
    ) >= 1


def _terminals(update: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = update.model_dump(mode="json", by_alias=True).get("content") or []
    return [one for one in found if one["type"] == "terminal"]


async def test_a_client_that_cannot_create_its_offered_terminal_receives_the_output_as_text(tmp_path: Path) -> None:
    desk, editor = EditorFixture(tmp_path), Editor()
    editor.create_terminal = None  # type: ignore[method-assign, assignment] # pyright: ignore[reportAttributeAccessIssue]
    offers = schema.ClientCapabilities(terminal=True)
    async with desk.connected(*ECHO, editor=editor, offers=offers, rules=["allow bash echo *"]) as (client, _):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
    assert "one" in editor.call(0)["content"][0]["content"]["text"]


@pytest.mark.parametrize(("command", "code"), [("echo one", 0), ("ls nowhere", 2)])
async def test_a_background_command_is_shown_until_it_ends(tmp_path: Path, command: str, code: int) -> None:
    desk, offers = EditorFixture(tmp_path), schema.ClientCapabilities(field_meta={"terminal_output": True})
    turns = (
        {"calls": [call("bash", command=command, background=True)]},
        {"calls": [call("wait", job_id="${0.data.job_id}")]},
        {"text": "Done."},
    )
    rules = ["allow bash echo *", "allow bash ls *"]
    async with desk.connected(*turns, offers=offers, rules=rules) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)

        def ended() -> list[Any]:
            metas: list[dict[str, Any]] = [update.field_meta or {} for update in editor.of("tool_call_update")]
            return [meta["terminal_exit"] for meta in metas if "terminal_exit" in meta]

        await editor.until(ended)
        assert ended()[0]["exit_code"] == code and len(ended()) == 1
        assert editor.statuses(0) == ["pending", "in_progress", "completed"]
        assert editor.call(0)["rawOutput"]["data"]["job_id"].startswith("bash_")


def editor_sees(told: list[Update]) -> list[Any]:
    """The updates that have content."""
    return [update for update in told if getattr(update, "content", None)]


async def test_clients_without_terminals_receive_the_end_of_the_output_as_inert_text() -> None:
    told: list[Update] = []

    async def send(update: Update) -> None:
        told.append(update)

    spec = ToolSpec(id="bash", description="", parameters={"type": "object"}, kind="execute")
    terminals = EditorTerminals(None, choose_output_display(schema.ClientCapabilities()))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    telling = UpdateSender(send, lambda _: spec, "/ws", terminals)

    def happens(kind: Any, **data: Any) -> None:
        telling.show_call_event(Event(kind, "s", "s/1.0", "bash", 0, data))

    happens("proposed", arguments={"command": "x"})
    happens("started")
    for _ in range(100):
        happens("progress", message="", output="\x1b[2J" + "x" * 100)
    await telling.wait_until_delivered()
    telling.show_call_result("s/1.0", "bash", Result.output({"exit_code": 3, "output": "all"}))
    await telling.wait_until_delivered()
    await telling.aclose()
    assert len(told) < 10, "what waits is replaced by what comes after it"
    shown: list[str] = [update.content[0].content.text for update in editor_sees(told)]
    assert len(shown[0]) <= MAX_TEXT_CHARACTERS + 20 and "\x1b" not in shown[0]
    assert "all" in shown[-1]


async def test_unshown_terminal_output_is_kept_within_bounds() -> None:
    screen = CommandTerminal("s/1.0", "viewed", lambda _content, _meta: None)
    for _ in range(100):
        screen.append_terminal_output("x" * 100_000)
    near, far = socket.socketpair()
    reader, shows = await asyncio.open_connection(sock=far)
    _unread, writer = await asyncio.open_connection(sock=near)
    screen.connect_viewer(writer)
    screen.show_command_end(0, None)
    shown = await reader.read()
    assert MAX_BUFFERED_BYTES < len(shown) < MAX_BUFFERED_BYTES + 200_000
    shows.close()
    assert shown.count(OMISSION_NOTE.encode()) == 1 and shown.endswith(OMISSION_NOTE.encode() + END + b"0")
