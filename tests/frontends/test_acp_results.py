"""Results in an editor: readable text instead of the result's JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from acp import schema
from tests.frontends.acp_clients import EditorFixture, ask, call

from handrail.contract.calls_and_results import CallAnswer, Event, Result
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.acp.editor_call_format import Content, make_result_content
from handrail.frontends.acp.editor_terminals import EditorTerminals, choose_output_display
from handrail.frontends.acp.editor_updates import Update, UpdateSender
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("F-05")
DRAWS = schema.ClientCapabilities(field_meta={"terminal_output": True})


def words(content: list[Content]) -> list[str]:
    found: list[str] = []
    for one in content:
        assert isinstance(one, schema.ContentToolCallContent) and isinstance(one.content, schema.TextContentBlock)
        found.append(one.content.text)
    return found


def block(text: str) -> str:
    return f"```\n{text}\n```"


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ({"exit_code": 0, "output": ""}, ["(no output)", "exit code 0"]),
        ({"exit_code": 3, "output": ""}, ["(no output)", "exit code 3"]),
        ({"exit_code": 0, "output": "x"}, [block("x")]),
        ({"exit_code": 3, "output": "x"}, [block("x"), "exit code 3"]),
        ({"exit_code": -9, "output": "", "signal": 9}, ["(no output)", "ended by SIGKILL"]),
        ({"exit_code": -9, "signal": 99}, ["ended by signal 99"]),
        (
            {"exit_code": 1, "output": "x", "limit": "too much memory", "dropped_bytes": 5000, "notes": ["[a](b)"]},
            [
                block("x"),
                "exit code 1",
                "too much memory",
                "5,000 bytes of the output were not saved.",
                block("[a](b)"),
            ],
        ),
        ({"exit_code": 0}, ["exit code 0"]),
        ({"head": "begins", "exit_code": 0}, [block("begins")]),
        ({"path": "a", "text": ""}, ["(no output)"]),
        ({"id": "term_1", "sent_bytes": 3}, [block("id: term_1\nsent_bytes: 3")]),
        ({"exit_code": 0, "rows": 5}, [block("exit_code: 0\nrows: 5")]),
        ({"exit_code": 0, "rows": [5]}, [block('{\n "exit_code": 0,\n "rows": [\n  5\n ]\n}')]),
        (
            {
                "job_id": "bash_1",
                "state": "completed",
                "result": {"type": "output", "data": {"exit_code": 0, "output": ""}},
            },
            [block("bash_1: completed"), "(no output)", "exit code 0"],
        ),
        (
            {"job_id": "bash_1", "state": "failed", "result": {"type": "error", "error_text": "it is gone"}},
            [block("bash_1: failed"), "it is gone"],
        ),
        (
            {"job_id": 1, "state": 2, "result": {"type": 3}},
            [block('{\n "job_id": 1,\n "state": 2,\n "result": {\n  "type": 3\n }\n}')],
        ),
        (None, ["(no output)"]),
        ("", ["(no output)"]),
        ({}, ["(no output)"]),
        ([], ["(no output)"]),
        (0, [block("0")]),
        (False, [block("false")]),
    ],
)
def test_a_result_is_shown_as_readable_text_rather_than_json(data: Any, shown: list[str]) -> None:
    assert words(make_result_content(Result.output(data), "/ws")[0]) == shown


def test_a_failed_call_shows_its_reason_first() -> None:
    failed = Result.error("timeout", "it took too long", {"output": ""})
    assert words(make_result_content(failed, "/ws")[0]) == ["it took too long"]
    cut = Result.output({"head": "x", "exit_code": 0}, truncated=True, output_path="/out/1.txt")
    assert words(make_result_content(cut, "/ws")[0]) == [
        block("x"),
        "The output is truncated. It is complete in /out/1.txt.",
    ]


@pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="bash is withheld on this machine")
async def test_a_command_without_output_shows_a_note(tmp_path: Path) -> None:
    desk = EditorFixture(tmp_path)
    turns = ({"calls": [call("bash", command="true"), call("bash", command="false")]}, {"text": "Done."})
    async with desk.connected(*turns, rules=["allow bash true", "allow bash false"]) as (client, editor):
        opened = await client.new_session(cwd=str(desk.workspace))
        await ask(client, opened.session_id)
        shown = [[one["content"]["text"] for one in editor.call(n)["content"]] for n in range(2)]
        assert shown == [["(no output)", "exit code 0"], ["(no output)", "exit code 1"]]


class ReceivedUpdates:
    """A client with the updates of one call."""

    def __init__(self, offers: schema.ClientCapabilities) -> None:
        self.updates: list[Any] = []
        spec = ToolSpec(id="bash", description="", parameters={"type": "object"}, kind="execute")
        screens = EditorTerminals(None, choose_output_display(offers))  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
        self.telling = UpdateSender(self._send, lambda _: spec, "/ws", screens)

    async def _send(self, update: Update) -> None:
        self.updates.append(update)

    def happens(self, kind: Any, **data: Any) -> None:
        self.telling.show_call_event(Event(kind, "s", "s/1.0", "bash", 0, data))

    async def content(self) -> list[Content]:
        """Return the final content."""
        await self.telling.wait_until_delivered()
        await self.telling.aclose()
        return [update.content for update in self.updates if getattr(update, "content", None) is not None][-1]


async def test_a_result_without_program_output_replaces_the_empty_terminal() -> None:
    told = ReceivedUpdates(DRAWS)
    told.happens("started")
    told.telling.show_call_result("s/1.0", "bash", Result.output({"id": "term_1", "sent_bytes": 3}))
    assert words(await told.content()) == [block("id: term_1\nsent_bytes: 3")]


async def test_a_program_ended_by_a_signal_is_shown_with_the_signal_name() -> None:
    told = ReceivedUpdates(DRAWS)
    told.happens("started")
    told.telling.show_call_result(
        "s/1.0", "bash", Result.output({"exit_code": -9, "signal": 9, "output": "", "limit": "memory"})
    )
    terminal, *beside = await told.content()
    assert isinstance(terminal, schema.TerminalToolCallContent) and words(beside) == ["memory"]
    (end,) = [
        update.field_meta["terminal_exit"] for update in told.updates if "terminal_exit" in (update.field_meta or {})
    ]
    assert (end["exit_code"], end["signal"]) == (None, "SIGKILL")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("output", "shown"), [("", "(no output)"), ("said", block("said"))])
async def test_a_finished_job_shows_its_output_whether_its_call_is_answered_early_or_late(
    early: bool, output: str, shown: str
) -> None:
    told = ReceivedUpdates(schema.ClientCapabilities())
    result = Result.output({"job_id": "bash_1", "state": "running"})
    answer = CallAnswer("s/1.0", "bash", result, result)
    told.happens("started")
    told.happens("backgrounded", job_id="bash_1")
    if not early:
        told.telling.show_call_answer(answer)
        await told.telling.wait_until_delivered()
        assert words(told.updates[-1].content) == [block("job_id: bash_1\nstate: running")]
    told.happens("progress", message="", output=output)
    told.happens("finished", type="output")
    if early:
        told.telling.show_call_answer(answer)
    assert words(await told.content()) == [shown]
    assert [update.status for update in told.updates if update.status][-1] == "completed"
