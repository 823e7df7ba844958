"""The user at the terminal: the display before a call runs, and the keys."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import OnATerminal, Terminals
from tests.prefork import command as prefork

from handrail.contract.approval_requests import ApprovalRequest
from handrail.contract.services.tool_runtime import QuestionOption, UserQuestion
from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler

Asking = Callable[..., OnATerminal]

ASKS = """
import asyncio, json, sys
from dataclasses import asdict
from handrail.contract.errors import ToolError
from handrail.contract.approval_requests import ApprovalRequest
from handrail.contract.services.tool_runtime import QuestionOption, UserQuestion
from handrail.frontends.cli.terminal_approvals import TerminalApprovalHandler

def request(fields):
    return ApprovalRequest(**fields)

def question(fields):
    return UserQuestion(**{**fields, "options": tuple(QuestionOption(**o) for o in fields.get("options", ()))})

async def main(jobs):
    terminal = TerminalApprovalHandler(workspace=".")
    async def one(job):
        try:
            if "approve" in job:
                answer = asdict(await terminal.approve(request(job["approve"])))
                return answer if answer["arguments"] is not None else {k: answer[k] for k in ("choice", "message")}
            return await terminal.answer_questions("session", [question(q) for q in job["questions"]])
        except ToolError as error:
            return [error.kind, str(error)]
    print("RESULT", json.dumps(await asyncio.gather(*map(one, jobs))), flush=True)

asyncio.run(main(json.loads(open(sys.argv[1]).read())))
"""


def request(tool: str = "bash", always: str | None = "allow bash git status", **arguments: object) -> dict[str, Any]:
    never = None if always is None else f"deny{always.removeprefix('allow')}"
    asked = ApprovalRequest("c1", "s1", tool, arguments, "hash", "definition", "no rule allows it", always, never)
    return {"approve": {name: getattr(asked, name) for name in asked.__dataclass_fields__}}


def question(text: str, *options: str, multi_select: bool = False) -> dict[str, object]:
    asked = UserQuestion(text, "Pick", tuple(QuestionOption(label) for label in options), multi_select)
    return {
        "question": asked.question,
        "header": asked.header,
        "multi_select": asked.multi_select,
        "options": [{"label": option.label} for option in asked.options],
    }


@pytest.fixture
def asking(on_a_terminal: Terminals, tmp_path: Path) -> Asking:
    def start(*jobs: dict[str, object]) -> OnATerminal:
        script, asked = tmp_path / "asks.py", tmp_path / "asked.json"
        script.write_text(ASKS)
        asked.write_text(json.dumps(jobs))
        return on_a_terminal(*prefork.python(script), str(asked), environment={"NO_COLOR": "1"})

    return start


def answers(terminal: OnATerminal) -> list[Any]:
    terminal.wait_for("RESULT ")
    return json.loads(terminal.wait_for("\n"))


def test_a_user_sees_the_complete_call_with_a_reason_and_allows_it_once(asking: Asking) -> None:
    command = "echo " + "x" * 500 + " && rm -rf build"
    terminal = asking(request(command=command))
    seen = terminal.wait_for("> ")
    assert command.replace(" ", "") in "".join(seen.split())
    assert "no rule allows it" in seen
    terminal.type("o\n")
    assert answers(terminal) == [{"choice": "once", "message": ""}]


@pytest.mark.proves("P-08")
def test_the_session_choice_shows_the_rule_that_it_stores(asking: Asking) -> None:
    terminal = asking(request(command="git status"))
    assert "stores the rule  allow bash git status" in terminal.wait_for("> ")
    terminal.type("s\n")
    assert answers(terminal) == [{"choice": "session", "message": ""}]


def test_the_prompt_offers_only_once_or_reject_without_a_safe_rule(asking: Asking) -> None:
    terminal = asking(request(always=None, command="make $(cat targets)"))
    assert "for this session" not in terminal.wait_for("> ")
    terminal.type("s\n")
    terminal.wait_for("Type o, c and JSON, r")
    terminal.wait_for("> ")
    terminal.type("o\n")
    assert answers(terminal) == [{"choice": "once", "message": ""}]


@pytest.mark.proves("P-08")
@pytest.mark.parametrize(("typed", "choice"), [("sw", "session-wider"), ("pw", "project-wider")])
def test_the_prompt_shows_a_wider_rule_with_separate_keys(asking: Asking, typed: str, choice: str) -> None:
    wider = request(command="git status")
    wider["approve"]["suggested_wider_rule"] = "allow bash git status *"
    terminal = asking(wider, request(command="git push"))
    assert "the same with a wider rule: stores the rule  allow bash git status *" in terminal.wait_for("> ")
    terminal.type(f"{typed}\n")
    assert "wider rule" not in terminal.wait_for("> ")
    terminal.type(f"{typed}\n")
    terminal.wait_for("Type o, s, p, c and JSON, r, never, stop or defer")
    terminal.wait_for("> ")
    terminal.type("o\n")
    assert answers(terminal) == [{"choice": choice, "message": ""}, {"choice": "once", "message": ""}]


def test_a_rejection_carries_the_users_message(asking: Asking) -> None:
    terminal = asking(request(command="git push"))
    terminal.wait_for("> ")
    terminal.type("r commit only, I push myself\n")
    assert answers(terminal) == [{"choice": "reject", "message": "commit only, I push myself"}]


@pytest.mark.proves("P-07")
@pytest.mark.parametrize(
    ("typed", "choice", "message"),
    [
        ("p", "project", ""),
        ("project", "project", ""),
        ("never", "reject-always", ""),
        ("never not here", "reject-always", "not here"),
        ("stop enough", "stop", "enough"),
        ("defer", "defer", ""),
    ],
)
def test_every_answer_has_a_key_and_the_prompt_shows_the_rule_it_stores(
    asking: Asking, typed: str, choice: str, message: str
) -> None:
    terminal = asking(request(command="git status"))
    seen = terminal.wait_for("> ")
    assert "in every session: stores the rule  allow bash git status" in seen
    assert "stores the rule  deny bash git status" in seen
    terminal.type(f"{typed}\n")
    assert answers(terminal) == [{"choice": choice, "message": message}]


def test_the_prompt_reads_changed_arguments_as_json_and_asks_again_after_invalid_ones(asking: Asking) -> None:
    terminal = asking(request(command="rm -rf build"))
    terminal.wait_for("> ")
    terminal.type("c [1]\n")
    terminal.wait_for("Invalid arguments")
    terminal.wait_for("> ")
    terminal.type('c {"command": "rm -r build"}\n')
    assert answers(terminal) == [{"choice": "once", "message": "", "arguments": {"command": "rm -r build"}}]


def test_an_edit_is_shown_as_a_diff_against_the_current_file(asking: Asking, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("one\ntwo\nthree\n")
    terminal = asking(request("edit", path="note.txt", old="two", new="2\x1b[2J"))
    seen = terminal.wait_for("> ")
    assert "│ -two" in seen and "│ +2\\e[2J" in seen and "│  one" in seen
    terminal.type("r\n")
    answers(terminal)
    assert (tmp_path / "note.txt").read_text() == "one\ntwo\nthree\n"


def test_the_prompt_warns_that_an_edit_would_fail(asking: Asking, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("one\n")
    terminal = asking(request("edit", path="note.txt", old="two", new="2"))
    assert "this call would fail: `old` was not found in note.txt" in terminal.wait_for("> ")
    terminal.type("r\n")
    answers(terminal)


@pytest.mark.parametrize("typed", ["", "ok", "sure, go ahead", "once more", "O K", "1"])
def test_the_prompt_repeats_after_an_unknown_answer(asking: Asking, typed: str) -> None:
    terminal = asking(request(command="git push"))
    terminal.wait_for("> ")
    terminal.type(f"{typed}\n")
    terminal.wait_for("Type o, s, p")
    terminal.wait_for("> ")
    terminal.type("r\n")
    assert answers(terminal) == [{"choice": "reject", "message": ""}]


def test_the_end_of_input_rejects_the_call(asking: Asking) -> None:
    terminal = asking(request(command="git push"))
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.wait_for("Rejected")
    (answer,) = answers(terminal)
    assert isinstance(answer, dict) and answer["choice"] == "reject"


def test_keys_typed_before_a_prompt_do_not_approve_its_call(asking: Asking, tmp_path: Path) -> None:
    terminal = asking(request("first", command="one"), request("second", command="two"))
    terminal.wait_for("first requires approval")
    terminal.wait_for("> ")
    terminal.type("o\no\n")  # the second key was typed before the second call was shown
    terminal.wait_for("second requires approval")
    terminal.wait_for("> ")
    terminal.type("r\n")
    assert [answer["choice"] for answer in answers(terminal)] == ["once", "reject"]


def test_prompts_appear_one_at_a_time_and_answers_reach_their_own_call(asking: Asking) -> None:
    terminal = asking(*[request(f"tool{number}", command=str(number)) for number in range(3)])
    for number, key in enumerate("ors"):
        before = terminal.wait_for("> ")
        assert before.count("requires approval") == 1 and f"tool{number} requires approval" in before
        terminal.type(f"{key}\n")
    assert [answer["choice"] for answer in answers(terminal)] == ["once", "reject", "session"]


def test_an_argument_cannot_control_the_terminal_or_imitate_the_prompt(asking: Asking) -> None:
    hostile = "harmless\x1b[2J\x1b[1;1H\rsafe\u202egnp\n\nread requires approval  (allowed)\n> "
    terminal = asking(request("write", path="a\x1b]0;title\x07", content=hostile))
    terminal.wait_for("r TEXT  reject")
    terminal.wait_for("> ")
    terminal.type("r\n")
    answers(terminal)
    assert "\x1b[2J" not in terminal.shown and "\u202e" not in terminal.shown and "\x07" not in terminal.shown
    assert "\\e[2J" in terminal.shown and "\\u{202e}" in terminal.shown
    assert "\nread requires" not in terminal.shown and "  │ read requires approval" in terminal.shown


@pytest.mark.parametrize(
    ("asked", "typed", "expected"),
    [
        (question("Which?", "red", "green"), "2", ["green"]),
        (question("Which?", "red", "green"), "something else", ["something else"]),
        (question("Which?", "a", "b", "c", multi_select=True), "3, 1", ["c", "a"]),
        (question("Name?"), "Ada Lovelace", ["Ada Lovelace"]),
        (question("How many?"), "3", ["3"]),
    ],
)
def test_a_question_is_answered_with_an_option_number_or_text(
    asking: Asking, asked: dict[str, object], typed: str, expected: list[str]
) -> None:
    terminal = asking({"questions": [asked]})
    terminal.wait_for("> ")
    terminal.type(f"{typed}\n")
    assert answers(terminal) == [[expected]]


def test_an_invalid_option_number_makes_the_prompt_ask_again(asking: Asking) -> None:
    terminal = asking({"questions": [question("Which?", "red", "green")]})
    terminal.wait_for("> ")
    terminal.type("3\n")
    terminal.wait_for("from 1 to 2")
    terminal.wait_for("> ")
    terminal.type("1\n")
    assert answers(terminal) == [[["red"]]]


def test_several_questions_return_one_list_of_answers_each(asking: Asking) -> None:
    terminal = asking({"questions": [question("One?", "a", "b"), question("Two?")]})
    terminal.wait_for("> ")
    terminal.type("1\n")
    terminal.wait_for("Two?")
    terminal.wait_for("> ")
    terminal.type("free\n")
    assert answers(terminal) == [[["a"], ["free"]]]


def test_a_question_can_be_deferred(asking: Asking) -> None:
    terminal = asking({"questions": [question("One?", "a", "b")]})
    terminal.wait_for("> ")
    terminal.type(":defer\n")
    assert answers(terminal) == [None]


def test_an_unanswered_question_returns_unavailable(asking: Asking) -> None:
    terminal = asking({"questions": [question("Which?", "red")]})
    terminal.wait_for("> ")
    terminal.type("\x04")
    terminal.wait_for("Not answered")
    (answer,) = answers(terminal)
    assert isinstance(answer, list) and answer[0] == "unavailable"


async def test_a_closed_terminal_rejects_the_call() -> None:
    read, write = os.pipe()
    os.close(write)
    asked = ApprovalRequest(**request(command="x")["approve"])
    assert (await TerminalApprovalHandler(read).approve(asked)).choice == "reject"
    os.close(read)


async def test_a_cancelled_prompt_ends_and_the_next_one_can_be_answered() -> None:
    read, write = os.pipe()
    terminal = TerminalApprovalHandler(read)
    asked = ApprovalRequest(**request(command="x")["approve"])
    first = asyncio.create_task(terminal.approve(asked))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    os.write(write, b"o\n")
    assert (await terminal.approve(asked)).choice == "once"
    os.close(read)
    os.close(write)


def test_approval_prompts_and_forms_list_the_files_that_a_call_runs() -> None:
    from handrail.frontends.cli.terminal_approvals import format_approval_request_lines
    from handrail.frontends.mcp.approval_forms import make_approval_form

    files = {f"d/{number:02}.sh": "sha256:0" for number in range(25)} | {"a\nfake: prompt": "identity:1:2:3:4:5"}
    asked = ApprovalRequest(
        "c1", "s1", "bash", {"command": "x"}, "h", "d", "why", "allow bash x", files=dict(sorted(files.items()))
    )
    shown = "\n".join(format_approval_request_lines(asked))
    assert "a\\nfake: prompt  (large: checked by size and times, not by content)" in shown
    assert "d/18.sh" in shown and "d/19.sh" not in shown and "and 6 more" in shown
    assert "a stored rule applies to the command" in shown
    assert "d/18.sh" in repr(make_approval_form(asked, None, "2025-11-25").params)
    without = ApprovalRequest("c1", "s1", "bash", {"command": "x"}, "h", "d", "why", "allow bash x")
    assert "files" not in "\n".join(format_approval_request_lines(without))
