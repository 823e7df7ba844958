"""Patches under rules, locks, approvals and undo: each file as if another tool changed it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_undo import AllowAll, read_tree

from handrail import open_kernel
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.frontends.acp import editor_call_format
from handrail.frontends.cli.terminal_approvals import preview_edit_diff
from handrail.kernel.kernel_interface import Kernel
from handrail.session.local_session import LocalSession
from handrail.tools.files.patch_tool import ApplyPatchTool

ROOT = Path(__file__).parents[2]


class RejectingUser:
    """Rejects everything, and keeps what it was asked, with the diff that is shown."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.asked: list[ApprovalRequest] = []
        self.diffs: list[str | None] = []

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.asked.append(request)
        self.diffs.append(await preview_edit_diff(request, str(self.workspace)))
        return ApprovalAnswer("reject")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        return None


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    root = tmp_path / "ws"
    (root / "src").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (root / "src" / f"{name}.py").write_text(f"{name} = 1\n")
    (root / ".env").write_text("KEY=1\n")
    (root / "run.sh").write_text("true\n")
    (root / "run.sh").chmod(0o755)
    return root


@asynccontextmanager
async def opened(workspace: Path, *rules: str, **options: Any) -> AsyncGenerator[tuple[Kernel, LocalSession]]:
    mode = options.pop("mode", "ask")
    async with open_kernel(workspace, state=workspace.parent / "state", mode=mode) as kernel:
        session = await kernel.session(rules=rules, **options)
        assert isinstance(session, LocalSession)
        yield kernel, session


def patch(*lines: str) -> dict[str, str]:
    return {"patch": "\n".join(("*** Begin Patch", *lines, "*** End Patch"))}


WHOLE = patch(
    *("*** Update File: src/a.py", "-a = 1", "+a = 2", "*** Add File: new/in/d.py", "+d = 1"),
    *("*** Update File: run.sh", "*** Move to: bin/run.sh", "-true", "+false", "*** Delete File: src/c.py"),
)


def update(path: str) -> tuple[str, ...]:
    return f"*** Update File: {path}", "-KEY=1", "+KEY=2"


@pytest.mark.proves("G-11", "T-06a")
async def test_undo_reverts_a_complete_patch(workspace: Path) -> None:
    before = read_tree(workspace)
    async with opened(workspace, approval_handler=AllowAll()) as (kernel, session):
        result = await session.call("apply_patch", WHOLE)
        assert result.ok, result
        after = read_tree(workspace)
        assert after != before and (workspace / "bin/run.sh").stat().st_mode & 0o111
        report = await kernel.undo()
        assert report.is_complete and read_tree(workspace) == before
        assert (await session.undo(report.id)).is_complete and read_tree(workspace) == after


@pytest.mark.parametrize(
    ("rules", "lines", "text"),
    [
        (("deny fs.write src/b.py",), ("*** Update File: src/b.py", "-b = 1", "+b = 2"), "deny fs.write src/b.py"),
        (("deny fs.write lib/**",), ("*** Update File: src/b.py", "*** Move to: lib/b.py", "-b = 1", "+b = 2"), "lib"),
        (("deny apply_patch src/b.py",), ("*** Update File: src/b.py", "-b = 1", "+b = 2"), "deny apply_patch"),
        (("deny fs.read src/b.py",), ("*** Update File: src/b.py", "-b = 1", "+b = 2"), "deny fs.read"),
        (("deny file.delete **",), ("*** Delete File: src/b.py",), "deny file.delete"),
        ((), ("*** Update File: .env", "-KEY=1", "+KEY=2"), ".env"),
        ((), ("*** Update File: src/b.py", "*** Move to: x/.env", "-b = 1", "+b = 2"), ".env"),
        ((), ("*** Add File: .git/hooks/pre-commit", "+x"), ".git"),
        ((), ("*** Add File: out/x.py", "+x"), "outside"),
    ],
)
async def test_one_refused_file_stops_a_whole_patch(
    workspace: Path, rules: tuple[str, ...], lines: tuple[str, ...], text: str
) -> None:
    (workspace.parent / "elsewhere").mkdir()
    (workspace / "out").symlink_to(workspace.parent / "elsewhere")
    before = read_tree(workspace)
    async with opened(workspace, *rules, mode="accept-edits") as (_, session):
        ok = ("*** Update File: src/a.py", "-a = 1", "+a = 2")
        result = await session.call("apply_patch", patch(*ok, *lines))
        assert result.error_kind == "denied" and text in str(result.error_text), result
        assert read_tree(workspace) == before
        assert (await session.call("apply_patch", patch(*ok))).ok


@pytest.mark.parametrize(
    "lines",
    [
        ("*** Update File: none.txt", "*** Move to: credentials.json", "@@ KEY=s", "+END"),
        ("*** Update File: none.txt", "*** Move to: credentials.json", " KEY=secret", "-x", "+END"),
        ("*** Update File: src/a.py", "*** Move to: credentials.json", "-a = 1", "+a = 2"),
        ("*** Add File: credentials.json", "+KEY=secret", "+END"),
    ],
)
async def test_a_patch_does_not_reveal_the_content_of_a_read_protected_file(
    workspace: Path, lines: tuple[str, ...]
) -> None:
    (workspace / "credentials.json").write_text("KEY=secret\nEND\n")
    async with opened(workspace, "allow apply_patch **") as (_, session):
        result = await session.call("apply_patch", patch(*lines))
        assert result.error_kind == "denied" and "Reading credentials.json" in str(result.error_text), result


async def test_the_deletion_of_a_file_without_a_copy_in_git_requires_approval(workspace: Path) -> None:
    handler = RejectingUser(workspace)
    async with opened(workspace, mode="accept-edits", approval_handler=handler) as (_, session):
        assert not (await session.call("apply_patch", patch("*** Delete File: src/a.py"))).ok
        subprocess.run("git init -q && git add -A", shell=True, cwd=workspace, check=True)
        assert len(handler.asked) == 1 and "git has no copy" in handler.asked[0].reason
        assert (await session.call("apply_patch", patch("*** Delete File: src/a.py"))).ok


async def test_an_approval_request_shows_the_complete_change_as_diffs(workspace: Path) -> None:
    handler = RejectingUser(workspace)
    async with opened(workspace, approval_handler=handler) as (_, session):
        assert not (await session.call("apply_patch", WHOLE)).ok
        await session.call("apply_patch", patch("*** Update File: src/a.py", "-never", "+b"))
        assert not (await session.call("apply_patch", {"patch": "nothing"})).ok
    whole, failing = handler.diffs
    for part in (
        "+++ b/src/a.py",
        "-a = 1\n+a = 2",
        "--- /dev/null\n+++ b/new/in/d.py",
        "rename to bin/run.sh",
        "-c = 1",
    ):
        assert part in str(whole)
    assert "would fail" in str(failing) and "hunk 1" in str(failing)
    read = editor_call_format.parse_unified_diff(str(whole), "", str(workspace))
    drawn = [(os.path.relpath(one.path, workspace), one.old_text, one.new_text) for one in read.parts]
    assert ("src/a.py", "a = 1", "a = 2") in drawn and ("new/in/d.py", None, "d = 1") in drawn
    assert ("src/c.py", "c = 1", "") in drawn and not read.is_complete
    arguments = handler.asked[0].arguments
    assert editor_call_format.make_call_title("apply_patch", arguments).startswith("apply_patch src/a.py, new/in/d.py")
    places = editor_call_format.extract_call_file_locations(ApplyPatchTool.spec, arguments, str(workspace))
    assert str(workspace / "bin/run.sh") in [one.path for one in places]


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        (("diff --git a/src/a.py b/src/a.py", "old mode 100644", "new mode 100755"), "src/a.py"),
        (
            (
                *("diff --git a/src/a.py b/src/a.py", "old mode 100644", "new mode 100755", "--- a/src/a.py"),
                *("+++ b/src/a.py", "@@ -1 +1 @@", "-a = 1", "+a = 2"),
            ),
            "+++ b/src/a.py",
        ),
        (
            (
                *("diff --git a/src/a.py b/bin/a.py", "old mode 100644", "new mode 100755", "rename from src/a.py"),
                "rename to bin/a.py",
            ),
            "rename to bin/a.py",
        ),
        (
            (
                *("diff --git a/tool b/tool", "new file mode 100755", "--- /dev/null", "+++ b/tool"),
                *("@@ -0,0 +1 @@", "+true"),
            ),
            "+++ b/tool",
        ),
    ],
)
async def test_an_approval_request_shows_which_file_becomes_executable(
    workspace: Path, lines: tuple[str, ...], changed: str
) -> None:
    handler = RejectingUser(workspace)
    async with opened(workspace, approval_handler=handler) as (_, session):
        assert not (await session.call("apply_patch", {"patch": "\n".join(lines) + "\n"})).ok
    (shown,) = handler.diffs
    assert str(shown).startswith("mode 100755\n") and changed in str(shown)


async def test_a_result_has_the_diffs_of_all_files_for_an_editor(workspace: Path) -> None:
    async with opened(workspace, approval_handler=AllowAll()) as (_, session):
        result = await session.call(
            "apply_patch",
            patch("*** Update File: src/a.py", "-a = 1", "+a = 2", *("*** Update File: src/b.py", "-b = 1", "+b = 3")),
        )
    content, places = editor_call_format.make_result_content(result, str(workspace))
    assert [one.path for one in places] == [str(workspace / "src/a.py"), str(workspace / "src/b.py")]
    assert [getattr(one, "new_text", None) for one in content] == ["a = 2", "b = 3"]


async def test_a_patch_locks_exactly_the_files_that_it_names(workspace: Path) -> None:
    async with opened(workspace, approval_handler=AllowAll()) as (kernel, session):
        assert (await session.call("apply_patch", WHOLE)).ok
        await kernel.log.flush()
        *_, record = kernel.log.reader.records(kind="intended")
        locks = set((record.body or {})["locks"])
    names = ("src/a.py", "new/in/d.py", "run.sh", "bin/run.sh", "src/c.py")
    assert locks == {f"workspace/{name}:X" for name in names}


async def test_concurrent_patches_of_the_same_files_are_all_applied(workspace: Path) -> None:
    (workspace / "src/a.py").write_text("".join(f"line {number}\n" for number in range(40)))
    (workspace / "src/b.py").write_text("".join(f"line {number}\n" for number in range(40)))
    import asyncio

    async with opened(workspace, mode="accept-edits") as (_, session):
        results = await asyncio.gather(
            *(
                session.call(
                    "apply_patch",
                    patch(
                        *(
                            line
                            for name in order
                            for line in (f"*** Update File: src/{name}.py", f"-line {number}", f"+{number}")
                        )
                    ),
                )
                for number in range(40)
                for order in (("a", "b") if number % 2 else ("b", "a"),)
            )
        )
    assert all(result.ok for result in results)
    for name in ("a", "b"):
        assert (workspace / f"src/{name}.py").read_text() == "".join(f"{number}\n" for number in range(40))


KILLED = """
import asyncio, sys
from handrail import open_kernel
from tests.runtime.kill_points import LineCounter

async def main(workspace, state, last, patch):
    counter = LineCounter()
    async with open_kernel(workspace, state=state, mode="accept-edits") as kernel:
        session = await kernel.session()
        counter.count, counter.last = 0, int(last)
        await session.call("apply_patch", {"patch": patch})
        print(counter.count, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.proves("T-06a")
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95])
async def test_the_next_start_finishes_or_reverts_the_patch_of_a_killed_kernel(workspace: Path, part: float) -> None:
    lines = patch(
        *("*** Update File: src/a.py", "-a = 1", "+a = 2", "*** Add File: new/d.py", "+d = 1"),
        *("*** Update File: src/b.py", "*** Move to: lib/b.py", "-b = 1", "+b = 2"),
    )["patch"]

    def run(last: int) -> str:
        words = (sys.executable, "-c", KILLED, str(workspace), str(workspace.parent / "state"), str(last), lines)
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    old = read_tree(workspace)
    count = int(run(0))
    new = read_tree(workspace)
    assert new != old and count > 100
    async with opened(workspace, approval_handler=AllowAll()) as (kernel, _):
        assert (await kernel.undo()).is_complete
    assert read_tree(workspace) == old
    assert run(int(count * part)) == ""
    async with opened(workspace, approval_handler=AllowAll()) as (kernel, _):
        found = read_tree(workspace)
        assert found in (old, new)
        if found == new:
            assert (await kernel.undo()).is_complete and read_tree(workspace) == old
