"""``file.move`` and ``file.delete``: the requests, the checks, and tools of a client process that move files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.kernel.doors import HELD, JOINED, opened

from handrail import Runtime, tool


@pytest.mark.parametrize(
    ("mode", "tool_id", "action"),
    [
        ("ask", "file.move", "ask"),
        ("accept-edits", "file.move", "allow"),
        ("accept-edits", "file.delete", "ask"),
        ("auto", "file.move", "allow"),
        ("auto", "file.delete", "ask"),
        ("plan", "file.move", "deny"),
        ("plan", "file.delete", "deny"),
    ],
)
async def test_a_mode_that_allows_moving_files_still_asks_before_deleting_them(
    tmp_path: Path, mode: str, tool_id: str, action: str
) -> None:
    async with opened(HELD, tmp_path, mode=mode) as kernel:
        why = await kernel.explain_call(tool_id, {"path": "a", "to": "b"} if tool_id == "file.move" else {"path": "a"})
        assert why.action == action, why
        secret = {"path": ".env", "to": "b"} if tool_id == "file.move" else {"path": ".env"}
        assert (await kernel.explain_call(tool_id, secret)).action != "allow"


@pytest.mark.parametrize("mode", ["accept-edits", "auto"])
async def test_a_mode_that_allows_moving_files_moves_folders_without_secrets_only(tmp_path: Path, mode: str) -> None:
    async with opened(HELD, tmp_path, mode=mode) as kernel:
        session = await kernel.session()
        source = Path(session.workdir, "a/deep")
        source.mkdir(parents=True)
        (source / "x").write_text("x")
        assert (await session.call("file.move", {"path": "a", "to": "b"})).ok
        Path(session.workdir, "b/deep/.env").write_text("TOKEN=x")
        assert (await session.call("file.move", {"path": "b", "to": "c"})).error_kind == "denied"
        assert Path(session.workdir, "b/deep/x").read_text() == "x"


async def test_a_move_needs_permission_for_both_paths(tmp_path: Path) -> None:
    async with opened(HELD, tmp_path, rules=["allow fs.write a/**", "allow file.delete a/y"]) as kernel:
        session = await kernel.session()
        workspace = Path(session.workdir)
        (workspace / "a").mkdir()
        (workspace / "a/x").write_text("x")
        (workspace / "b").write_text("b")
        for moved in ({"path": "a/x", "to": "c"}, {"path": "b", "to": "a/b"}):
            assert (await session.call("file.move", moved)).error_kind == "denied"
        moved = await session.call("file.move", {"path": "a/x", "to": "a/y"})
        assert moved.data == {"path": "a/y", "kind": "file", "entries": 1, "size": 1}
        assert (await session.call("file.delete", {"path": "a/y"})).ok and not (workspace / "a/y").exists()


@pytest.mark.proves("P-17")
@pytest.mark.parametrize("rule", ["allow file.delete **", "allow fs.write **", "allow file.delete"])
async def test_a_broad_allow_rule_still_asks_before_a_delete_that_cannot_be_undone(tmp_path: Path, rule: str) -> None:
    async with opened(HELD, tmp_path, rules=[rule, "allow file.delete named"]) as kernel:
        workspace = Path((await kernel.session()).workdir)
        (workspace / "empty").mkdir()
        (workspace / "empty.txt").touch()
        for name in ("full/x", "work.txt", "named", "tracked", "changed"):
            (workspace / name).parent.mkdir(exist_ok=True)
            (workspace / name).write_text("x")
        for words in (("init", "-q"), ("add", "tracked", "changed")):
            subprocess.run(["git", *words], cwd=workspace, check=True)
        (workspace / "changed").write_text("other")
        found = {
            name: (await kernel.explain_call("file.delete", {"path": name, "recursive": True})).action
            for name in ("full", "work.txt", "changed", "tracked", "empty", "empty.txt", "missing", "named")
        }
        assert [name for name, action in found.items() if action == "ask"] == ["full", "work.txt", "changed"], found


@pytest.mark.parametrize("door", [HELD, JOINED])
async def test_a_tool_moves_and_deletes_files_and_creates_folders(tmp_path: Path, door: str) -> None:
    @tool(id="desk.tidy", side_effect="write", requires={"fs": {"read": ["{workspace}"], "write": ["{workspace}"]}})
    async def tidy(runtime: Runtime) -> dict[str, object]:
        """Tidy up."""
        made = await runtime.files.make_folder("old")
        moved = await runtime.files.move("a.txt", "old/a.txt")
        deleted = await runtime.files.delete("b.txt")
        return {"made": made.path, "moved": moved.path, "deleted": [deleted.path, deleted.kind, deleted.size]}

    async with opened(door, tmp_path, tools=[tidy], rules=["allow desk.tidy", "allow fs.*"]) as kernel:
        session = await kernel.session()
        for name in ("a.txt", "b.txt"):
            Path(session.workdir, name).write_text("one")
        result = await session.call("desk.tidy", {})
        assert result.data == {"made": "old", "moved": "old/a.txt", "deleted": ["b.txt", "file", 3]}, result
