"""``handrail chat``: messages, approvals, interruption and resumption, in a terminal and a pipe."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import OnATerminal, Program, SleepingCommand, Terminals

PLAIN = {"NO_COLOR": "1"}


def script(tmp_path: Path, *turns: dict[str, Any]) -> str:
    path = tmp_path / f"script-{len(list(tmp_path.glob('script-*')))}.json"
    path.write_text(json.dumps({"turns": turns}))
    return f"script:{path}"


def call(name: str, **arguments: object) -> dict[str, Any]:
    return {"calls": [{"name": name, "arguments": arguments}]}


def say(terminal: OnATerminal, text: str) -> None:
    terminal.wait_for("\n> ")
    terminal.type(f"{text}\n")


def test_a_terminal_conversation_asks_for_approval_in_place_and_continues(
    handrail: Program, tmp_path: Path, on_a_terminal: Terminals
) -> None:
    model = script(
        tmp_path,
        {"text": "Hello, **you**."},
        {"text": "I write.", **call("write", path="new.txt", content="x\n")},
        {"text": "Written."},
    )
    terminal = on_a_terminal(*handrail.command("chat", "--model", model), environment=PLAIN)
    assert "mode ask, session ses_" in terminal.wait_for("Ctrl-D leaves.")
    say(terminal, "hi there")
    terminal.wait_for("Hello, you.")
    say(terminal, "write it")
    asked = terminal.wait_for("defer   answer later")
    assert "write requires approval" in asked and "s       allow in this session: stores the rule" in asked
    terminal.wait_for("> ")
    terminal.type("o\n")
    terminal.wait_for("Written.")
    say(terminal, "/usage")
    terminal.wait_for("requests, tokens not reported")
    say(terminal, "/exit")
    assert terminal.end() == 0 and (handrail.workspace / "new.txt").read_text() == "x\n"
    assert "\x1b[3" not in terminal.shown and "\x1b[1m" not in terminal.shown
    session = re.search(r"handrail chat --resume (ses_\w+)", terminal.shown)
    assert session is not None
    further = script(tmp_path, {"expect": {"task": "and now"}, "text": "Still here."})
    done = handrail("chat", "and now", "--resume", session[1], "--model", further)
    assert done.code == 0 and done.out == "Still here.\n" and "(resumed)" in done.err


def test_ctrl_c_interrupts_the_running_turn_and_the_conversation_continues(
    handrail: Program, tmp_path: Path, on_a_terminal: Terminals
) -> None:
    sleeper = SleepingCommand(handrail)
    model = script(tmp_path, call("bash", **json.loads(sleeper.arguments)), {"text": "Still with you."})
    command = handrail.command("chat", "sleep", "--model", model, "--rule", sleeper.rule)
    terminal = on_a_terminal(*command, environment=PLAIN)
    sleeper.wait_until_it_runs()
    terminal.type("\x03")
    terminal.wait_for("cancelled: The user stopped the run.")
    assert sleeper.left_over() == []
    say(terminal, "are you there?")
    terminal.wait_for("Still with you.")
    terminal.wait_for("> ")
    terminal.type("\x03")
    terminal.wait_for("Press Ctrl-C again to leave")
    terminal.type("\x03")
    assert (
        terminal.end() == 130
        and "Traceback" not in terminal.shown
        and re.search(r"to resume:\s+handrail\s+chat", terminal.shown)
    )


def test_chat_still_sends_messages_after_one_ctrl_c_at_the_prompt(
    handrail: Program, tmp_path: Path, on_a_terminal: Terminals
) -> None:
    model = script(tmp_path, {"expect": {"task": "later"}, "text": "Heard."})
    terminal = on_a_terminal(*handrail.command("chat", "--model", model), environment=PLAIN)
    terminal.wait_for("\n> ")
    terminal.type("\x03")
    terminal.wait_for("Press Ctrl-C again to leave")
    terminal.type("later\n")
    terminal.wait_for("Heard.")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_at_an_approval_prompt_ends_the_run(handrail: Program, tmp_path: Path, on_a_terminal: Terminals) -> None:
    model = script(tmp_path, call("write", path="a", content="x"), {"text": "Never mind."})
    terminal = on_a_terminal(*handrail.command("chat", "write", "--model", model), environment=PLAIN)
    terminal.wait_for("write requires approval")
    terminal.wait_for("> ")
    terminal.type("\x03")
    terminal.wait_for("cancelled: ")
    say(terminal, "/exit")
    assert terminal.end() == 0 and not (handrail.workspace / "a").exists()


@pytest.mark.parametrize(
    ("typed", "heard"),
    [
        (b"one\\\ntwo\n", "one\ntwo"),
        (b"//not a command\n", "/not a command"),
        (b"  \n\nspaced  \n", "spaced"),
        ("caf\u00e9 \u202e\n".encode(), "caf\u00e9"),
        (b"no newline", "no newline"),
    ],
)
def test_each_piped_line_is_a_message(handrail: Program, tmp_path: Path, typed: bytes, heard: str) -> None:
    model = script(tmp_path, {"expect": {"task": f"^{re.escape(heard)}"}, "text": "Yes."})
    done = handrail("chat", "--model", model, "--headless", stdin=typed)
    assert (done.code, done.out) == (0, "Yes.\n"), done.err
    assert "\x1b" not in done.err and "\u202e" not in done.err


def test_chat_commands_work_and_an_unknown_command_is_reported(handrail: Program, tmp_path: Path) -> None:
    model = script(tmp_path, {"text": "Yes."})
    typed = b"/help\n/mode\n/mode accept-edits\n/mode x\n/compact\n/fo\x1b[2Jo bar\n/usage\n/exit\nnever sent\n"
    done = handrail("chat", "--model", model, stdin=typed)
    assert (done.code, done.out) == (0, ""), done.err
    for told in (
        "/compact",
        "/undo",
        "mode accept-edits, for this session",
        "Unknown mode: 'x'",
        "Unknown command /fo\\e[2Jo",
    ):
        assert told in done.err
    assert "No model request was made yet." in done.err and "Nothing to compact" in done.err and "\x1b" not in done.err


def test_each_undo_reverts_one_more_call(handrail: Program, tmp_path: Path) -> None:
    (handrail.workspace / "b").write_text("before")
    model = script(tmp_path, call("write", path="a", content="x"), call("file.delete", path="b"), {"text": "Done."})
    typed = b"change it\n/undo\n/undo\n/undo\n"
    done = handrail(
        "chat", "--model", model, "--rule", "allow fs.write **", "--rule", "allow file.delete b", stdin=typed
    )
    assert (handrail.workspace / "b").read_text() == "before" and not (handrail.workspace / "a").exists(), done.err
    restored, removed, nothing = (
        done.err.index(one) for one in ("restored    b", "removed     a", "No change of session")
    )
    assert restored < removed < nothing


def test_undo_skips_a_conflicting_call_and_reverts_the_one_before(handrail: Program, tmp_path: Path) -> None:
    model = script(
        tmp_path, call("write", path="a", content="x"), call("write", path="b", content="x"), {"text": "Done."}
    )
    done = handrail("chat", "change it", "--model", model, "--rule", "allow fs.write **", stdin=b"")
    session = re.search(r"ses_[0-9a-f]{22}", done.err)
    assert session is not None, done.err
    (handrail.workspace / "b").write_text("newer")
    undone = handrail("chat", "--resume", session[0], "--model", model, stdin=b"/undo\n/undo\n/undo\n")
    assert (handrail.workspace / "b").read_text() == "newer" and not (handrail.workspace / "a").exists(), undone.err
    kept, removed, nothing = (
        undone.err.index(one) for one in ("Undid nothing of", "removed     a", "Nothing more to undo")
    )
    assert kept < removed < nothing
    assert "--overwrite` also undoes files that changed since" in undone.err


def test_json_output_has_one_event_per_line(handrail: Program, tmp_path: Path) -> None:
    model = script(tmp_path, {"text": "One."}, {"text": "Two."})
    done = handrail("chat", "--model", model, "--json", stdin=b"a\nb\n")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [one["event"] for one in events if one["event"] in ("session", "finished")] == [
        "session",
        "finished",
        "finished",
    ]
    assert done.err == ""


def test_chat_refuses_to_start_without_a_model_or_with_an_unknown_session(handrail: Program) -> None:
    assert "No model is set" in handrail("chat").err
    assert handrail("chat", "--resume", "ses_none", "--model", "script:x").code == 2
