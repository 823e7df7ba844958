"""Reports about names in results and hints that no tool accepts."""

from __future__ import annotations

import json
import os
import subprocess
import unicodedata
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import Result
from handrail.contract.session_protocols import Session
from handrail.contract.text.neutralisation import escape_terminal_controls, neutralise_text, unescape_displayed_path
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

NFC, NFD = unicodedata.normalize("NFC", "café.txt"), unicodedata.normalize("NFD", "café.txt")
SCREENSHOT = "Screenshot 2024-01-01 at 9.41.00\u202fAM.png.txt"

NAMES = {
    "narrow space": SCREENSHOT,
    "no-break space": "a\u00a0b.txt",
    "ideographic space": "a\u3000b.txt",
    "line feed": "two\nlines.txt",
    "tab": "a\tb.txt",
    "escape": "\x1b[31mred.txt",
    "direction": "gpj\u202etxt.exe",
    "zero width": "a\u200bb.txt",
    "joined emoji": "\U0001f469\u200d\U0001f4bb.txt",
    "byte order mark": "\ufeffa.txt",
    "filler": "a\u3164b.txt",
    "combining": NFD,
    "bytes": os.fsdecode(b"caf\xe9.txt"),
    "space at the end": "a.txt ",
    "space at the start": " a.txt",
    "brackets": "⟦a⟧.txt",
    "text of an escape": "a⟦U+202F⟧b.txt",
    "text of a marker": "⟦<⟧.txt",
    "marker": "<system>.txt",
    "speaker": "Human: a.txt",
    "quotes": '"a\\tb"\\303.txt',
    "apostrophe": "it's.txt",
    "private use": "a\uf028.txt",
}
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())


@pytest.fixture
async def session(tmp_path: Path) -> AsyncGenerator[Session]:
    user = ScriptedApprovalHandler([ApprovalAnswer("once")] * 9)
    async with temporary_kernel(tmp_path, rules=["allow *"]) as kernel:
        session = await kernel.session(approval_handler=user)
        yield session
        await session.suspend()


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    folder.mkdir(exist_ok=True)
    return folder


async def call(session: Session, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call(tool, arguments)
    assert result.ok, result
    data: dict[str, Any] = result.data  # type: ignore[assignment]
    return data


def read_as_model(result: Result) -> Any:
    """The data of a result as a model reads it."""
    return json.loads(neutralise_text(json.dumps(result.data, ensure_ascii=False)))


def names_in(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith(".")}


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1))
def test_every_displayed_name_is_restored_to_the_file_name(name: str) -> None:
    assert unescape_displayed_path(escape_terminal_controls(name)) == name
    assert unescape_displayed_path(neutralise_text(escape_terminal_controls(name))) == name


@given(st.binary(min_size=1))
def test_every_displayed_name_of_raw_bytes_is_restored(raw: bytes) -> None:
    name = os.fsdecode(raw.replace(b"\0", b"x"))
    shown = escape_terminal_controls(name)
    assert shown.isprintable() and unescape_displayed_path(shown) == name


@given(st.text(st.sampled_from("⟦⟧U+202F7E,<\u202f\u200d "), max_size=20))
def test_a_name_that_contains_escape_text_is_restored(name: str) -> None:
    assert unescape_displayed_path(neutralise_text(escape_terminal_controls(name))) == name


def test_an_escape_for_a_character_that_is_never_escaped_stays_literal() -> None:
    for text in ("⟦U+002F⟧", "⟦U+0000⟧", "⟦U+002E⟧", "⟦U+0041⟧", "⟦U+D800⟧", "⟦U+110000⟧", "⟦U+202F,002F⟧"):
        assert unescape_displayed_path(text) == text


@each_name
async def test_file_tools_accept_a_displayed_name(session: Session, ws: Path, name: str) -> None:
    (ws / name).write_text("one\n")
    (shown,) = read_as_model(await session.call("glob", {"pattern": "*"}))["paths"]
    assert (await call(session, "read", path=shown))["text"] == "one"
    assert (await call(session, "write", path=shown, content="two\n"))["created"] is False
    await call(session, "edit", path=shown, old="two", new="three")
    await call(session, "multi_edit", path=shown, edits=[{"old": "three", "new": "four"}])
    await call(session, "file.patch", path=shown, operations=[{"op": "append", "content": "five\n"}])
    assert names_in(ws) == {name}
    assert (ws / name).read_text() == "four\nfive\n"
    assert [one["path"] for one in (await call(session, "grep", pattern="five"))["matches"]] == [
        escape_terminal_controls(name)
    ]
    assert (await call(session, "grep", pattern="five", path=shown))["matches"]
    moved = await call(session, "file.move", path=shown, to=f"sub/{shown}")
    assert names_in(ws / "sub") == {name}
    await call(session, "file.delete", path=moved["path"])
    assert names_in(ws / "sub") == set()


@each_name
async def test_a_new_file_under_a_displayed_name_is_created_once(session: Session, ws: Path, name: str) -> None:
    shown = neutralise_text(escape_terminal_controls(name))
    assert (await call(session, "write", path=shown, content="{}"))["created"] is True
    await call(session, "json_write", path=shown, pointer="/a", value=1)
    assert (await call(session, "json_read", path=shown))["value"] == {"a": 1}
    assert names_in(ws) == {name}


@each_name
async def test_search_tools_accept_the_displayed_name_of_a_folder(session: Session, ws: Path, name: str) -> None:
    (ws / name).mkdir()
    (ws / name / "in.txt").write_text("needle\n")
    shown = neutralise_text(escape_terminal_controls(name))
    assert (await call(session, "glob", pattern="*", path=shown))["paths"] == [
        f"{escape_terminal_controls(name)}/in.txt"
    ]
    assert (await call(session, "grep", pattern="needle", path=shown))["matches"]
    assert (await call(session, "tree", path=shown))["tree"] == "in.txt"
    pattern = f"{shown}/*.txt"
    assert (await call(session, "glob", pattern=pattern))["paths"] == [f"{escape_terminal_controls(name)}/in.txt"]


@pytest.mark.parametrize("form", ["escaped", "with a usual space", "raw"])
async def test_file_tools_accept_the_file_name_suggested_in_an_error(session: Session, ws: Path, form: str) -> None:
    (ws / SCREENSHOT).write_text("shot\n")
    missing = await session.call("read", {"path": SCREENSHOT.replace("9.41", "9.42")})
    assert "9.41.00⟦U+202F⟧AM.png" in str(missing.error_text)
    shown = {
        "escaped": "Screenshot 2024-01-01 at 9.41.00⟦U+202F⟧AM.png.txt",
        "with a usual space": SCREENSHOT.replace("\u202f", " "),
        "raw": SCREENSHOT,
    }[form]
    assert (await call(session, "read", path=shown))["text"] == "shot"
    await call(session, "write", path=shown, content="new\n")
    assert names_in(ws) == {SCREENSHOT}


async def test_an_escaped_ordinary_space_means_an_ordinary_space(session: Session, ws: Path) -> None:
    (ws / "a\u00a0b").write_text("no-break\n")
    await call(session, "write", path="a⟦U+0020⟧b", content="usual\n")
    assert names_in(ws) == {"a\u00a0b", "a b"}
    assert (await call(session, "read", path="a b"))["text"] == "usual"


@pytest.mark.parametrize(("there", "asked"), [(NFC, NFD), (NFD, NFC)])
async def test_a_path_in_the_other_unicode_normal_form_names_the_same_file(
    session: Session, ws: Path, there: str, asked: str
) -> None:
    folder = there.partition(".")[0]
    (ws / folder).mkdir()
    (ws / folder / there).write_text("one\n")
    path = f"{asked.partition('.')[0]}/{asked}"
    assert (await call(session, "read", path=path))["text"] == "one"
    await call(session, "write", path=path, content="two\n")
    await call(session, "file.move", path=path, to=f"{asked.partition('.')[0]}/b.txt")
    assert names_in(ws) == {folder} and names_in(ws / folder) == {"b.txt"}


async def test_a_read_lists_paths_that_look_the_same_and_each_can_be_read(session: Session, ws: Path) -> None:
    (ws / NFC).write_text("composed\n")
    (ws / NFD).write_text("decomposed\n")
    for name, text, other in (
        (NFC, "composed", "cafe⟦U+0301⟧.txt"),
        (NFD, "decomposed", "caf⟦U+00E9⟧.txt"),
    ):
        result = await session.call("read", {"path": name})
        assert result.data["text"] == text  # type: ignore[index,call-overload]
        assert result.metadata["same_looking_paths"] == [other]
    assert (await call(session, "read", path="cafe⟦U+0301⟧.txt"))["text"] == "decomposed"
    assert (await call(session, "read", path="caf⟦U+00E9⟧.txt"))["text"] == "composed"


async def test_an_ambiguous_file_name_is_refused_with_both_candidates(session: Session, ws: Path) -> None:
    (ws / "a\u00a0b").write_text("1\n")
    (ws / "a\u202fb").write_text("2\n")
    result = await session.call("write", {"path": "a b", "content": "3\n"})
    assert "`a⟦U+00A0⟧b` and `a⟦U+202F⟧b`" in str(result.error_text)
    assert names_in(ws) == {"a\u00a0b", "a\u202fb"}
    assert (await call(session, "read", path="a⟦U+202F⟧b"))["text"] == "2"


async def test_a_file_whose_name_contains_escape_text_can_be_read_in_both_spellings(session: Session, ws: Path) -> None:
    (ws / "a⟦U+202F⟧b").write_text("literal\n")
    assert (await call(session, "read", path="a⟦U+202F⟧b"))["text"] == "literal"
    (ws / "a\u202fb").write_text("space\n")
    assert (await call(session, "read", path="a⟦U+202F⟧b"))["text"] == "space"
    assert (await call(session, "read", path="a⟦U+27E6⟧U+202F⟧b"))["text"] == "literal"


@pytest.mark.parametrize("quoted", [r'"docs/caf\303\251\tb.md"', r"docs/caf\303\251\tb.md", r"docs/caf\xc3\xa9\tb.md"])
async def test_file_tools_accept_a_name_quoted_by_git(session: Session, ws: Path, quoted: str) -> None:
    (ws / "docs").mkdir()
    (ws / "docs/café\tb.md").write_text("x\n")
    assert (await call(session, "read", path=quoted))["text"] == "x"
    await call(session, "write", path=quoted, content="y\n")
    assert names_in(ws / "docs") == {"café\tb.md"}


SPELLINGS = ["a⟦U+00A0⟧b.txt", "a\u00a0b.txt", "a b.txt", "./a⟦U+00A0⟧b.txt", "sub/../a⟦U+00A0⟧b.txt"]


@pytest.mark.parametrize("rule", ["a\u00a0b.txt", "a b.txt", "a⟦U+00A0⟧b.txt", "**/a?b.txt"])
@pytest.mark.parametrize("path", SPELLINGS)
async def test_no_spelling_of_a_path_bypasses_a_deny_rule(tmp_path: Path, ws: Path, rule: str, path: str) -> None:
    (ws / "sub").mkdir()
    (ws / "a\u00a0b.txt").write_text("needle\n")
    rules = ["allow *", f"deny fs.read {rule}", f"deny fs.write {rule}"]
    async with temporary_kernel(tmp_path, rules=rules) as kernel:
        session = await kernel.session(headless=True)
        for tool, more in (("read", {}), ("grep", {"pattern": "needle"}), ("write", {"content": "x"})):
            result = await session.call(tool, {"path": path, **more})
            assert result.error_kind == "denied", (tool, result)
        assert "needle" not in str(await session.call("grep", {"pattern": "."}))
        await session.suspend()
    assert (ws / "a\u00a0b.txt").read_text() == "needle\n"


@pytest.mark.parametrize(("there", "rule"), [(NFC, NFD), (NFD, NFC), (NFC, NFC), (NFD, NFD)])
@pytest.mark.parametrize("asked", [NFC, NFD])
async def test_a_deny_rule_applies_to_both_normal_forms_of_an_accent(
    tmp_path: Path, ws: Path, there: str, rule: str, asked: str
) -> None:
    (ws / there).write_text("needle\n")
    async with temporary_kernel(tmp_path, rules=["allow *", f"deny fs.read {rule}"]) as kernel:
        session = await kernel.session(headless=True)
        assert (await session.call("read", {"path": asked})).error_kind == "denied"
        listed = await session.call("bash", {"command": f"cat {there}"})
        assert "needle" not in str(listed)
        await session.suspend()


async def test_a_word_in_a_shell_command_is_judged_as_the_shell_reads_it(tmp_path: Path, ws: Path) -> None:
    (ws / "a\u202fb").write_text("space\n")
    rules = ["allow *", "deny fs.write a⟦U+27E6⟧U+202F⟧b"]
    async with temporary_kernel(tmp_path, rules=rules) as kernel:
        session = await kernel.session(headless=True)
        refused = await session.call("bash", {"command": "echo x > 'a⟦U+202F⟧b'"})
        assert refused.error_kind == "denied"
        await session.suspend()
    assert names_in(ws) == {"a\u202fb"}


async def test_an_approval_request_has_the_same_target_for_a_raw_and_a_displayed_path(tmp_path: Path, ws: Path) -> None:
    (ws / "a\u202fb").write_text("x\n")
    user = ScriptedApprovalHandler()
    async with temporary_kernel(tmp_path, rules=["allow *", "ask fs.write **"]) as kernel:
        session = await kernel.session(approval_handler=user)
        for path in ("a\u202fb", "a⟦U+202F⟧b"):
            await session.call("write", {"path": path, "content": "y\n"})
        await session.suspend()
    first, second = user.requests
    assert "a⟦U+202F⟧b" in first.targets[0] and first.targets == second.targets


async def test_git_tools_and_other_tools_accept_a_path_displayed_by_git(session: Session, ws: Path) -> None:
    names = ["a\u202fb.txt", "two\nlines.txt", "tab\tb.txt", os.fsdecode(b"caf\xe9.txt"), NFD, 'q"uote.txt', "é.txt "]
    for command in (["init", "-q"], ["config", "user.name", "n"], ["config", "user.email", "e@example.org"]):
        subprocess.run(["git", *command], cwd=ws, check=True)
    for name in names:
        (ws / name).write_text("one\n")
    untracked: list[str] = (await call(session, "git.status"))["untracked"]
    assert sorted(map(unescape_displayed_path, untracked)) == sorted(names)
    await call(session, "git.add", paths=untracked)
    await call(session, "git.commit", message="first")
    for shown in untracked:
        assert (await call(session, "read", path=shown))["text"] == "one"
        await call(session, "write", path=shown, content="two\n")
        changed = await call(session, "git.diff", paths=[shown])
        assert [one["path"] for one in changed["files"]] == [shown]
        assert (await call(session, "git.blame", path=shown))["lines"]
        assert (await call(session, "git.show", file=shown))["content"] == "one\n"
        assert len((await call(session, "git.log", paths=[shown]))["commits"]) == 1
    assert [one["path"] for one in (await call(session, "git.diff", paths=[NFC]))["files"]] == [NFD]
    assert names_in(ws) == set(names)


PROGRAM = """#!/usr/bin/env python3
import json, os, sys
def look(paths):
    return [open(os.fsencode(path), "rb").read().decode() for path in paths]
if PERSISTENT:
    for line in sys.stdin:
        sent = json.loads(line)
        asked = sent["arguments"]
        print(json.dumps({"id": sent["id"], "result": look([asked["path"], *asked["others"]])}), flush=True)
else:
    asked = json.load(sys.stdin)
    print(json.dumps({"read": look([asked["path"], *asked["others"]])}))
"""


@pytest.mark.parametrize("persistent", [False, True])
async def test_a_program_tool_gets_the_real_file_names_for_displayed_paths(
    tmp_path: Path, ws: Path, persistent: bool
) -> None:
    tools = tmp_path / "config" / "tools"
    tools.mkdir(parents=True)
    path = {"type": "string", "format": "path"}
    parameters = {"type": "object", "properties": {"path": path, "others": {"type": "array", "items": path}}}
    llm = {"name": "look", "description": "Reads files.", "parameters": parameters}
    runtime: dict[str, object] = {
        "side_effect": "read",
        "locks": [],
        "persistent": persistent,
        "requires": {"fs": {"read": ["**"]}},
    }
    (tools / "look.json").write_text(json.dumps({"llm": llm, "runtime": runtime}))
    (tools / "look").write_text(PROGRAM.replace("PERSISTENT", str(persistent)))
    (tools / "look").chmod(0o755)
    for name in NAMES.values():
        (ws / name).write_text(f"it is {name!r}")
    (ws / NFC).unlink(missing_ok=True)
    async with temporary_kernel(tmp_path, rules=["allow *"]) as kernel:
        session = await kernel.session(headless=True)
        shown = sorted(read_as_model(await session.call("glob", {"pattern": "*"}))["paths"])
        expected = [f"it is {name!r}" for name in (unescape_displayed_path(one) for one in shown)]
        result = await session.call("look", {"path": shown[0], "others": [*shown[1:], NFC]})
        await session.suspend()
    assert result.ok, result
    data: Any = result.data
    found: Any = cast("dict[str, Any]", data)["read"] if isinstance(data, dict) else data
    assert found == [*expected, f"it is {NFD!r}"] and len(shown) == len(NAMES)


@pytest.mark.parametrize("name", ["[INST].txt", "dot.", "...", "<system>[a]", "a\u202f[b].txt"])
async def test_a_search_takes_a_displayed_name_as_its_pattern(session: Session, ws: Path, name: str) -> None:
    (ws / "d").mkdir()
    (ws / "d" / name).write_text("word\n")
    (displayed,) = (await session.call("glob", {"pattern": "d/*", "hidden": True})).data["paths"]
    for tool, arguments in (("glob", {"pattern": displayed}), ("grep", {"pattern": "word", "glob": displayed})):
        found = (await session.call(tool, {**arguments, "hidden": True})).data
        assert found.get("paths") or [match["path"] for match in found["matches"]] == [displayed], found
