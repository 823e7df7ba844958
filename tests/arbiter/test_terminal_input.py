"""Input for a terminal is judged: as shell text for a shell, and as plain text for other programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_agents import confined

from handrail import Kernel, Session
from handrail.arbiter.approvals.approval_flow import starts_interactive_shell
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

PROMPT = "# " if os.geteuid() == 0 else "$ "
SHELL = "bash --noprofile --norc"
NOT_TYPED = ("denied", "conflict")
"""How the second of two calls side by side is answered, judged after the first has typed or before."""
START = (f"allow terminal.start {SHELL}", "allow terminal.start python3 -q", "allow terminal.start cat")


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[Kernel]:
    async with temporary_kernel(tmp_path, rules=START) as kernel:
        yield kernel


async def opened(session: Session, command: str) -> str:
    job_id = (await session.call("terminal.start", {"command": command})).data["job_id"]
    assert (await session.call("terminal.resize", {"id": job_id, "columns": 100, "rows": 30})).ok, "it is up"
    return job_id


async def sent(session: Session, terminal: str, **what: str) -> str:
    result = await session.call("terminal.send", {"id": terminal, **what})
    assert result.ok or result.error_kind in ("denied", "conflict"), result.error_text
    return "typed" if result.ok else f"{result.error_kind}: {result.error_text}"


@confined
@pytest.mark.proves("X-11", "P-05")
async def test_shell_text_is_judged_as_a_command_and_unclear_text_is_not_sent(kernel: Kernel) -> None:
    session = await kernel.session(rules=["allow terminal.send", "deny shell.run rm *"])
    shell = await opened(session, SHELL)
    await until_shown(session, shell, PROMPT)  # before it listens, a ctrl-c would end it
    for clear in ("true\n", "echo one; echo two\n", "echo -n\npwd\n"):
        assert await sent(session, shell, text=clear) == "typed"
    assert await sent(session, shell, text="pwd", keys="enter") == "typed"
    for denied in ("rm -rf x\n", "true && rm x\n", "timeout 5 rm x\n", "true | rm x"):
        assert "deny shell.run rm *" in await sent(session, shell, text=denied), denied
    for text, why in (
        ("pwd", "not a complete line"),
        ("echo $(id)\n", ""),
        ("python3 -c 'x'\n", ""),
        ("echo a > b\n", "depends on the current folder"),
        ("echo !x\n", "interactive shell"),
        ("^a^b\n", ""),
        ("ls \t\n", "interactive shell"),
        ("for x in a; do\n", ""),
    ):
        told = await sent(session, shell, text=text)
        assert told.startswith("denied") and why in told, (text, told)
    assert await sent(session, shell, keys="up") == "typed"
    assert "the terminal's line already contains text" in await sent(session, shell, text="true\n")
    assert await sent(session, shell, keys="ctrl-c") == "typed"
    assert await sent(session, shell, text="true\n") == "typed"


@confined
@pytest.mark.proves("P-05")
async def test_keys_and_multiple_lines_cannot_run_a_command_that_was_not_judged(kernel: Kernel) -> None:
    session = await kernel.session(rules=["allow terminal.send", "deny shell.run rm *"])
    shell = await opened(session, SHELL)
    await until_shown(session, shell, PROMPT)
    cut = "up home " + "delete " * 5
    whole = "echo rm -f x\n"
    for why, what in (
        ("keys may run a line", {"text": whole, "keys": f"{cut}enter"}),
        ("keys may run a line", {"keys": "up enter"}),
        ("keys may run a line", {"keys": "ctrl-r"}),
        ("keys may run a line", {"keys": "up ctrl-o"}),
        ("keys may run a line", {"text": "true\n", "keys": "ctrl-x ctrl-e"}),
        ("keys may run a line", {"keys": "ctrl-v"}),
        ("spans several lines", {"text": "echo 'a\nrm -f x\n'\n"}),
        ("one line at a time", {"text": f"head -c 5\n{whole}"}),
        ("reads lines", {"text": "stty -isig\n"}),
        ("reads lines", {"text": "set +m\n"}),
    ):
        told = await sent(session, shell, **what)
        assert told.startswith("denied") and why in told, (what, told)
    assert await sent(session, shell, text=whole) == "typed"
    assert await sent(session, shell, keys=cut.strip()) == "typed", "what only edits runs nothing"
    assert "keys may run a line" in await sent(session, shell, keys="enter")
    assert await sent(session, shell, keys="ctrl-c enter") == "typed"
    both: list[tuple[str, dict[str, Any]]] = [("terminal.send", {"id": shell, "keys": k}) for k in ("up", "enter")]
    first, second = await session.call_all(both)
    assert first.ok and second.error_kind in NOT_TYPED


async def until_shown(session: Session, terminal: str, *marks: str) -> None:
    """Until all of ``marks`` were shown, one behind the other."""
    text = ""
    for mark in marks:
        while mark not in text:
            text += (await session.call("terminal.read", {"id": terminal})).data["text"]
        text = text.partition(mark)[2]


@confined
@pytest.mark.proves("P-05")
async def test_input_that_a_program_may_read_before_the_shell_needs_approval(kernel: Kernel) -> None:
    session = await kernel.session(rules=["allow terminal.send", "deny shell.run rm *"])
    shell = await opened(session, SHELL)
    assert await sent(session, shell, text="head -c 5\n") == "typed"
    told = await sent(session, shell, text="echo rm -f x\n")
    assert "may still run and read this input" in told, "head would take 'echo ', and the shell the rest"
    await until_shown(session, shell, "head -c 5\n")
    assert "may still run and read this input" in await sent(session, shell, text="echo rm -f x\n")
    assert await sent(session, shell, keys="ctrl-c") == "typed"
    await until_shown(session, shell, PROMPT)
    both: list[tuple[str, dict[str, Any]]] = [
        ("terminal.send", {"id": shell, "text": text}) for text in ("head -c 5\n", "echo rm -f x\n")
    ]
    first, second = await session.call_all(both)
    assert first.ok, "the prompt is there again"
    assert second.error_kind in NOT_TYPED


@confined
@pytest.mark.proves("X-11", "P-02")
async def test_text_for_other_programs_is_sent_only_if_a_rule_allows_it(kernel: Kernel) -> None:
    session = await kernel.session(rules=["allow terminal.send id=* text=print*", "deny shell.run rm *"])
    python = (await session.call("terminal.start", {"command": "python3 -q"})).data["job_id"]
    assert await sent(session, python, text="print(0)\n") == "typed", "also before it is up"
    assert await sent(session, python, text="print('a' if 1 else 2)\n") == "typed"
    assert (await sent(session, python, text="import os\n")).startswith("denied")
    assert await sent(session, python, keys="ctrl-c") == "typed", "to interrupt is to stop, and asks nobody"
    assert (await sent(session, python, keys="up enter")).startswith("denied")
    shell = await opened(session, SHELL)
    assert (await sent(session, shell, text="print $(id)\n")).startswith("denied"), (
        "a shell's text is parsed all the same"
    )


@confined
@pytest.mark.proves("X-11", "P-07")
async def test_a_user_sees_the_typed_text_and_can_allow_exactly_that(kernel: Kernel) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("session"), ApprovalAnswer("once")])
    session = await kernel.session(approval_handler=person)
    shell = await opened(session, SHELL)
    assert await sent(session, shell, text="git status\n") == "typed"
    await until_shown(session, shell, "git status\n", PROMPT)
    assert await sent(session, shell, text="git status\n") == "typed"
    (asked,) = person.requests
    assert asked.arguments["text"] == "git status\n" and "shell.run `git status" in asked.targets[0]
    assert await sent(session, shell, text="git push\n") == "typed"
    assert [request.arguments["text"] for request in person.requests[1:]] == ["git push\n"]


@confined
@pytest.mark.proves("P-02")
async def test_a_rule_about_a_program_applies_only_in_the_folder_it_was_written_for(
    kernel: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "ws" / "deep").mkdir()
    session = await kernel.session()
    elsewhere = await session.call("terminal.start", {"command": "cat", "cwd": "deep"})
    assert elsewhere.error_kind == "denied" and "cd deep" in str(elsewhere.error_text)
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    attended = await kernel.session(approval_handler=person)
    started = await attended.call("terminal.start", {"command": "cat", "cwd": "deep"})
    assert (
        started.ok
        and (await attended.call("terminal.resize", {"id": started.data["job_id"], "columns": 90, "rows": 30})).ok
    )
    assert len(person.requests) == 1


@confined
@pytest.mark.proves("P-01")
async def test_an_approved_line_is_refused_if_the_terminal_line_has_changed(kernel: Kernel) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    session = await kernel.session(rules=["allow terminal.send", "ask shell.run git push"], approval_handler=person)
    shell = await opened(session, SHELL)
    await until_shown(session, shell, PROMPT)
    person.may_answer.clear()
    judged = asyncio.ensure_future(session.call("terminal.send", {"id": shell, "text": "git push\n"}))
    await person.request_received.wait()
    assert await sent(session, shell, keys="up") == "typed"
    person.may_answer.set()
    second = await judged
    assert second.error_kind == "conflict"
    assert "changed after this call was checked" in str(second.error_text)


def test_a_terminal_with_an_unclear_program_is_treated_as_a_shell() -> None:
    for shell in (
        SHELL,
        "sh",
        "/bin/zsh -i",
        "env X=1 dash",
        "timeout 5 bash",
        "cd x; bash",
        "$SHELL",
        "python3 -q; bash",
        "script -q log",
        "sudo -i",
        "tmux",
        "nix-shell --pure",
    ):
        assert starts_interactive_shell(shell), shell
    for other in ("python3 -q", "cat", "sqlite3 a.db", "gdb ./a.out"):
        assert not starts_interactive_shell(other), other
