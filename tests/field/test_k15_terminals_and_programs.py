"""Reports about terminal keys, pattern errors, waiting editors, and toolchain variables."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.kernel.test_undo import AllowAll
from tests.tools.repositories import create_repository

from handrail.contract.errors import ToolError
from handrail.contract.services.job_and_tool_services import KEYS, parse_key_names
from handrail.testing.scripted_kernel import temporary_kernel

RULES = ("allow terminal.*", "allow bash", "allow bash *", "allow python")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("Enter C-c Up Tab Escape", ["enter", "ctrl-c", "up", "tab", "escape"]),
        ("ENTER Return Esc", ["enter", "enter", "escape"]),
        (
            "BSpace DC IC NPage PPage PgDn PageUp",
            ["backspace", "delete", "insert", "page-down", "page-up", "page-down", "page-up"],
        ),
        ("^C Ctrl+D ctrl-z C-Z Control-A", ["ctrl-c", "ctrl-d", "ctrl-z", "ctrl-z", "ctrl-a"]),
        ("ArrowUp ArrowLeft Space C-\\ C-[", ["up", "left", "space", "ctrl-backslash", "escape"]),
        (" ".join(KEYS), list(KEYS)),
    ],
)
def test_terminal_keys_can_have_their_tmux_names(names: str, expected: list[str]) -> None:
    assert list(parse_key_names(names)) == expected


@pytest.mark.parametrize("names", ["Entr", "C-", "C-cc", "ls", "M-x", "F13", "^", "C-1", "\x03"])
def test_an_unknown_key_is_refused_with_the_list_of_known_keys(names: str) -> None:
    with pytest.raises(ToolError, match="page-down, ctrl-a to ctrl-z"):
        parse_key_names(names)


async def test_a_terminal_program_is_interrupted_by_c_c_and_receives_text_with_enter(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        session = await kernel.session(approval_handler=AllowAll())
        started = await session.call("terminal.start", {})
        terminal = {"id": started.data["job_id"]}
        await session.call("terminal.send", {**terminal, "text": "cat", "keys": "Enter"})
        assert (await session.call("terminal.send", {**terminal, "keys": "C-c"})).ok
        await session.call("terminal.send", {**terminal, "text": "echo back-$((40+2))", "keys": "Return"})
        seen = ""
        for _ in range(20):
            seen += (await session.call("terminal.read", {**terminal, "wait_ms": 2000})).data["text"]
            if "back-42" in seen:
                break
        assert "back-42" in seen and "^C" in seen
        wrong = await session.call("terminal.send", {**terminal, "keys": "Entr"})
        assert wrong.error_kind == "invalid_input" and "Did you mean `enter`" in str(wrong.error_text)
        await session.suspend()


async def test_rules_apply_to_terminal_keys_in_any_spelling(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow terminal.start bash --noprofile --norc"]) as kernel:
        session = await kernel.session(headless=True)
        started = await session.call("terminal.start", {})
        for keys in ("Up Enter", "up enter", "ArrowUp C-m", "^P Return"):
            answer = await session.call("terminal.send", {"id": started.data["job_id"], "keys": keys})
            assert answer.error_kind == "denied", keys
        await session.suspend()


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("(", ["unclosed group", "near `(`"]),
        ("a" * 3_000 + "(" + "b" * 3_000, ["unclosed group", "near `aaaaa"]),
        ("é" * 300 + "[z-a]" + "b" * 300, ["the start must be <= the end", "[z-a]"]),
        ("(?<=a)b", ["look-around", "near `(?<=a)b`"]),
        (r"\1" * 400, ["backreferences are not supported", r"near `\1"]),
        ("x{100000}{1000}", ["size limit"]),
        ("a\nb(", ["pattern"]),
    ],
)
async def test_an_invalid_search_pattern_gets_a_short_error_with_the_faulty_part(
    pattern: str, parts: list[str], tmp_path: Path
) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        answer = await session.call("grep", {"pattern": pattern})
        text = str(answer.error_text)
        assert answer.error_kind == "invalid_input" and len(text) < 300 and "Correct the pattern" in text
        for part in parts:
            assert part in text
        await session.suspend()


@pytest.mark.parametrize(
    "name", ["JAVA_HOME", "NODE_OPTIONS", "FORCE_COLOR", "GRADLE_OPTS", "CARGO_BUILD_JOBS", "GOFLAGS"]
)
async def test_a_toolchain_variable_reaches_programs_only_if_it_is_configured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "value-1")
    for settings, shown in (("", ""), (f'[env]\npass = ["{name}"]\n', "value-1")):
        async with temporary_kernel(tmp_path, rules=RULES, settings=settings) as kernel:
            session = await kernel.session()
            answer = await session.call("bash", {"command": f"printenv {name}"})
            assert answer.data["output"].strip() == shown
            code = f"import os; print(os.environ.get('{name}', ''))"
            assert (await session.call("python", {"code": code})).data["output"].strip() == shown
            await session.suspend()


@pytest.mark.skipif(shutil.which("vi") is None, reason="needs vi")
@pytest.mark.parametrize("command", ["vi a.txt", "EDITOR=vi git commit", "sh -c 'vi a.txt; echo next'"])
async def test_an_editor_without_a_terminal_ends_early_with_a_hint(command: str, tmp_path: Path) -> None:
    create_repository(tmp_path / "ws").commit("one", a__txt="a\n")
    async with temporary_kernel(tmp_path, rules=("ask bash", "allow write")) as kernel:
        session = await kernel.session(approval_handler=AllowAll())
        await session.call("write", {"path": "b.txt", "content": "b"})
        await session.call("bash", {"command": "git add b.txt"})
        answer = await session.call("bash", {"command": command, "timeout_ms": 300_000})
        assert answer.ok and answer.data["exit_code"] != 0, answer
        assert "waited for a terminal" in answer.data["notes"][0] and "terminal.start" in answer.data["notes"][0]
        await session.suspend()


@pytest.mark.parametrize(
    "command", ["less a.txt", "more a.txt", "cat", "read x", "python3", "python3 -i", "git log", "git rebase -i HEAD"]
)
async def test_interactive_programs_end_without_a_terminal(command: str, tmp_path: Path) -> None:
    create_repository(tmp_path / "ws").commit("one", a__txt="a\n")
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        session = await kernel.session(approval_handler=AllowAll())
        answer = await session.call("bash", {"command": command, "timeout_ms": 300_000})
        assert answer.ok and "exit_code" in answer.data, answer
        await session.suspend()


async def test_a_program_that_only_prints_an_editor_message_keeps_running(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        session = await kernel.session(approval_handler=AllowAll())
        answer = await session.call("bash", {"command": "echo 'Input is not from a terminal'; sleep 4; echo done"})
        assert answer.data["output"].endswith("done\n") and answer.data["exit_code"] == 0
        await session.suspend()
