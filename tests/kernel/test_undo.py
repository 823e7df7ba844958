"""Undo restores what calls changed: real programs in the real sandbox, compared byte by byte."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.prefork import command as prefork

from handrail import open_kernel
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.kernel.kernel_interface import Kernel
from handrail.runtime.undo.file_tool_trackers import FileChangeRecorder
from handrail.session.local_session import LocalSession

Tree = dict[str, tuple[int, bytes | str | None]]


class AllowAll:
    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("once")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        return None


@asynccontextmanager
async def opened(folder: Path, *settings: str) -> AsyncGenerator[tuple[Kernel, LocalSession]]:
    async with open_kernel(folder / "ws", state=folder / "state", settings=settings) as kernel:
        session = await kernel.session(approval_handler=AllowAll())
        assert isinstance(session, LocalSession)
        yield kernel, session


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*prefork.handrail(), *words], capture_output=True, text=True, check=False)


def git(workspace: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=workspace, check=True, capture_output=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A repository with a dirty work tree, links, an empty folder, modes, and names that are hard to print."""
    root = tmp_path / "ws"
    (root / "src" / "deep" / "deeper").mkdir(parents=True)
    (root / "empty" / "inner").mkdir(parents=True)
    for number in range(40):
        (root / "src" / f"m{number}.py").write_text(f"value = {number}\n" * 20)
        (root / "src" / "deep" / f"d{number}.txt").write_bytes(bytes([number]) * 300)
    (root / "run.sh").write_text("#!/bin/sh\necho hi\n")
    (root / "run.sh").chmod(0o755)
    (root / "src" / "deep" / "deeper" / "closed.txt").write_text("mode 0400")
    (root / "src" / "deep" / "deeper" / "closed.txt").chmod(0o400)
    (root / "src" / "link.py").symlink_to("m1.py")
    (root / "dangling").symlink_to("nowhere/at all")
    (root / "a\nb c").write_text("newline in the name")
    (root / ".gitignore").write_text("ignored/\n*.log\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "src" / "m0.py").write_text("dirty = True\n")
    (root / "untracked.txt").write_text("not in git")
    (root / "ignored").mkdir()
    (root / "ignored" / "precious").write_bytes(os.urandom(5_000))
    (root / "debug.log").write_text("a log")
    (root / "large.bin").write_bytes(os.urandom(700_000))
    return root


def read_tree(root: Path) -> Tree:
    """Everything in a folder, with modes; git's index may be refreshed by any git command."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            relative = str(path.relative_to(root))
            try:
                status = path.lstat()
            except PermissionError:
                found[relative] = -1, None
                continue
            if stat.S_ISLNK(status.st_mode):
                found[relative] = 0, os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                found[relative] = stat.S_IMODE(status.st_mode), path.read_bytes()
            else:
                found[relative] = stat.S_IMODE(status.st_mode), None
    return found


DAMAGE = {
    "rm -rf a folder": "rm -rf src",
    "rm -rf .git": "rm -rf .git",
    "rm -rf everything": "rm -rf ./* .gitignore",
    "git clean": "git clean -qfdx",
    "git checkout": "git checkout -q .",
    "git reset": "git reset -q --hard",
    "truncate": "truncate -s 0 src/*.py large.bin",
    "sparse": "truncate -s 300M untracked.txt",
    "dd": "dd if=/dev/zero of=large.bin bs=1000 count=300 conv=notrunc status=none",
    "sed": "sed -i s/value/other/ src/*.py",
    "chmod": "chmod -R a-rwx,u+r src",
    "chmod folders": "find src -depth -type d -exec chmod 0 {} + ; chmod 600 run.sh",
    "mv over": "mv src/m2.py src/m3.py",
    "ln over": "ln -sf m1.py src/m4.py && ln -sfn src empty",
    "tar over": "mkdir t && cp src/m5.py t/m6.py && tar -C t -cf x.tar m6.py && tar -C src -xf x.tar",
    "python": "python3 -c \"import os; [open(f'src/m{n}.py', 'r+').write('X') or os.rename(f'src/m{n}.py', f'src/n{n}.py') for n in range(30)]\"",
    "rename storm": "for n in 1 2 3; do mv src s$n && mv s$n src; done; mv src/m1.py tmp; mv src/m2.py src/m1.py; mv tmp src/m2.py",
    "folders and links": "rm -rf empty dangling src/link.py && mkdir dangling && echo x > dangling/x",
    "file to folder": "rm run.sh && mkdir -p run.sh/in && echo x > run.sh/in/x && rm -rf src/deep && echo file > src/deep",
    "append": "for f in src/*.py; do echo more >> $f; done",
    "new files": "mkdir -p new/sub && touch new/sub/file 'new/with space' && ln -s . new/sub/loop && mkfifo pipe",
    "mmap": "python3 -c \"import mmap; f = open('large.bin', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[5:9] = b'MMAP'; m.close()\"",
}


@pytest.mark.proves("G-11")
@pytest.mark.parametrize("command", DAMAGE.values(), ids=DAMAGE)
async def test_undo_restores_files_that_a_program_damaged(tmp_path: Path, workspace: Path, command: str) -> None:
    before = read_tree(workspace)
    async with opened(tmp_path) as (kernel, session):
        result = await session.call("bash", {"command": command})
        damaged = read_tree(workspace)
        assert damaged != before, result
        report = await session.undo()
        assert read_tree(workspace) == before
        if "mkfifo" not in command:
            assert report.is_complete, report
        kinds = [one.kind for one in kernel.log.reader.records() if one.kind.startswith("und")]
        assert kinds == ["undo-intended", "undone"]
        if "mkfifo" in command or "300M" in command or "chmod" in command:
            return
        again = await kernel.undo(report.id)
        assert again.is_complete, again
        after = read_tree(workspace)
        assert {path: one for path, one in after.items() if not _is_protected(path)} == {
            path: one for path, one in damaged.items() if not _is_protected(path)
        }


def _is_protected(path: str) -> bool:
    return path.startswith(".git/")


# ── what file tools changed ──────────────────────────────────────────────────────────────────────

EDITS: dict[str, Sequence[tuple[str, dict[str, Any]]]] = {
    "write": [("write", {"path": "untracked.txt", "content": "other"})],
    "write new": [("write", {"path": "new/in/folder.txt", "content": "x"})],
    "edit": [("edit", {"path": "run.sh", "old": "echo hi", "new": "echo ho"})],
    "multi_edit": [
        ("multi_edit", {"path": "src/m3.py", "edits": [{"old": "value = 3\n", "new": "x = 1\n", "replace_all": True}]})
    ],
    "patch": [
        ("file.patch", {"path": "run.sh", "operations": [{"op": "append", "content": "echo patched\n"}]}),
    ],
    "patch of several files": [
        (
            "apply_patch",
            {
                "patch": "*** Begin Patch\n*** Delete File: src/m1.py\n*** Add File: new/x.py\n+x\n*** Update File: run.sh\n"
                "*** Move to: bin/run.sh\n-echo hi\n+echo ho\n*** Delete File: src/deep/d1.txt\n*** End Patch"
            },
        )
    ],
    "move a file": [("file.move", {"path": "run.sh", "to": "new/in/run.sh"})],
    "move a folder": [("file.move", {"path": "src", "to": "lib/moved"}), ("bash", {"command": "rm -rf lib"})],
    "delete a file": [("file.delete", {"path": "large.bin"})],
    "delete a folder": [("file.delete", {"path": "src", "recursive": True})],
    "delete an empty folder": [("file.delete", {"path": "empty/inner"})],
    "move and delete": [
        ("file.move", {"path": "ignored", "to": "src/ignored"}),
        ("file.delete", {"path": "src", "recursive": True}),
        ("write", {"path": "src", "content": "a file"}),
    ],
    "three in turn": [
        ("write", {"path": "untracked.txt", "content": "one"}),
        ("edit", {"path": "untracked.txt", "old": "one", "new": "two"}),
        ("bash", {"command": "echo three >> untracked.txt; chmod 600 untracked.txt"}),
    ],
}


@pytest.mark.proves("G-11")
@pytest.mark.parametrize("calls", EDITS.values(), ids=EDITS)
async def test_undo_restores_files_that_file_tools_changed(
    tmp_path: Path, workspace: Path, calls: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    before = read_tree(workspace)
    async with opened(tmp_path) as (_, session):
        for path in ("untracked.txt", "run.sh", "src/m3.py"):
            await session.call("read", {"path": path})
        for name, arguments in calls:
            result = await session.call(name, arguments)
            assert result.ok, result
        assert read_tree(workspace) != before
        report = await session.undo()
        assert report.is_complete and read_tree(workspace) == before


async def test_undo_keeps_a_file_that_was_moved_in_from_outside_the_workspace(tmp_path: Path, workspace: Path) -> None:
    async with opened(tmp_path) as (_, session):
        snapshots = session.lane.environment.snapshots
        assert snapshots is not None
        target = session.lane.environment.roots.resolve_path("moved")
        source = ResolvedPath(str(tmp_path / "x"), "x", True, str(tmp_path), relative_path="x")
        FileChangeRecorder(snapshots, target, (f"{session.id}/1.0",), "file.move").keep_moved(source, [""])
        (workspace / "moved").write_text("the only copy")
        report = await session.undo()
        assert report.problems and (workspace / "moved").read_text() == "the only copy"


async def test_each_undo_without_a_call_id_reverts_one_more_call(tmp_path: Path, workspace: Path) -> None:
    file = workspace / "untracked.txt"
    async with opened(tmp_path) as (kernel, session):
        for text in ("one", "two", "three"):
            await session.call("bash", {"command": f"echo {text} > untracked.txt"})
        seen = [file.read_text()]
        for _ in range(3):
            seen += [(await kernel.undo(), file.read_text())[1]]
        assert seen == ["three\n", "two\n", "one\n", "not in git"]
        with pytest.raises(ToolError, match="already undone"):
            await kernel.undo()


# ── what changed since ───────────────────────────────────────────────────────────────────────────


async def test_a_file_changed_after_the_call_is_a_conflict_and_keeps_its_newer_version(
    tmp_path: Path, workspace: Path
) -> None:
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "rm -rf src; echo made > made.txt; echo changed > untracked.txt"})
        (workspace / "made.txt").write_text("mine")
        (workspace / "untracked.txt").write_text("mine too")
        (workspace / "src").write_text("a file of the user")
        report = await session.undo()
        conflicts = {one.path for one in report.paths if one.outcome == "conflict"}
        assert {"made.txt", "untracked.txt", "src", "src/m1.py"} <= conflicts
        assert not report.is_complete and report.count("restored") == 0 and report.id == ""
        assert (workspace / "made.txt").read_text() == "mine" and (
            workspace / "src"
        ).read_text() == "a file of the user"
        forced = await session.undo(overwrite=True)
        assert (workspace / "untracked.txt").read_text() == "not in git" and (workspace / "src" / "m1.py").exists()
        assert not (workspace / "made.txt").exists()
        await session.undo(forced.id)
        assert (workspace / "made.txt").read_text() == "mine" and (
            workspace / "src"
        ).read_text() == "a file of the user"


async def test_a_dry_run_says_which_folders_stay_for_their_newer_files(tmp_path: Path, workspace: Path) -> None:
    async with opened(tmp_path) as (kernel, session):
        await session.call("bash", {"command": "mkdir -p new/inner other; touch new/inner/one other/two"})
        await session.call("bash", {"command": "touch new/inner/later"})
        foreseen = await kernel.undo(f"{session.id}/1.0", dry_run=True)
        done = await kernel.undo(f"{session.id}/1.0")
    assert foreseen.paths == done.paths
    assert {one.path: one.outcome for one in done.paths} == {
        "new": "conflict",
        "new/inner": "conflict",
        "new/inner/one": "removed",
        "other": "removed",
        "other/two": "removed",
    }
    assert os.listdir(workspace / "new" / "inner") == ["later"] and not (workspace / "other").exists()


async def test_an_undo_keeps_files_that_an_overlapping_job_may_have_changed(tmp_path: Path, workspace: Path) -> None:
    async with opened(tmp_path) as (kernel, session):
        job = await session.call(
            "bash",
            {
                "command": "until [ -e go ]; do sleep 0.02; done; echo job > by-job; echo job > src/m7.py; touch done; sleep 60",
                "background": True,
            },
        )
        job_id = job.data["job_id"]
        wrote = await session.call("write", {"path": "by-tool", "content": "tool"})
        assert wrote.ok
        call = await session.call(
            "bash", {"command": "touch go; until [ -e done ]; do sleep 0.02; done; echo call > src/m8.py"}
        )
        assert call.ok, call
        with pytest.raises(ToolError, match="is still running"):
            await kernel.undo(job_id)
        last = await kernel.undo()
        assert last.count("restored") == 0 and all("ran at the same time" in one.detail for one in last.paths)
        assert (workspace / "src" / "m7.py").read_text() == "job\n"
        await session.jobs.stop(job_id)
        await session.jobs.wait(job_id, timeout_ms=30_000)
        both = await session.undo()
        assert not (workspace / "by-job").exists() and "value" in (workspace / "src" / "m8.py").read_text()
        assert "value" in (workspace / "src" / "m7.py").read_text() and not (workspace / "by-tool").exists()
        assert both.count("conflict") == 0


async def test_a_background_job_is_undone_by_its_id(tmp_path: Path, workspace: Path) -> None:
    before = read_tree(workspace)
    async with opened(tmp_path) as (kernel, session):
        job = await session.call("bash", {"command": "rm -rf src; echo x > y", "background": True})
        await session.jobs.wait(job.data["job_id"], timeout_ms=30_000)
        assert (await kernel.undo(job.data["job_id"])).is_complete
    assert read_tree(workspace) == before


# ── what is kept, and for how long ───────────────────────────────────────────────────────────────


async def test_a_file_too_large_to_keep_is_named_only_after_it_changed(tmp_path: Path, workspace: Path) -> None:
    (workspace / "huge.bin").write_bytes(os.urandom(3 << 20))
    async with opened(tmp_path, "undo.file_mib=2") as (_, session):
        other = await session.call("bash", {"command": "echo x > untracked.txt"})
        assert "notes" not in other.data
        changed = await session.call("bash", {"command": "echo x > huge.bin"})
        assert "huge.bin" in str(changed.data["notes"])
        report = await session.undo()
        assert [(one.path, one.outcome) for one in report.paths if one.outcome != "restored"] == [
            ("huge.bin", "unavailable")
        ]


async def test_large_folders_that_tools_can_recreate_are_not_stored_for_undo(tmp_path: Path, workspace: Path) -> None:
    modules = workspace / "node_modules" / "package"
    modules.mkdir(parents=True)
    for number in range(1_001):
        (modules / f"{number}.js").write_text("x")
    async with opened(tmp_path) as (_, session):
        result = await session.call("bash", {"command": "rm node_modules/package/7.js; rm -rf src"})
        assert "node_modules/package" in str(result.data["notes"])
        report = await session.undo()
        assert (workspace / "src" / "m1.py").exists() and "node_modules" in report.problems[0]


async def test_the_undo_store_drops_the_oldest_calls_beyond_its_limit(tmp_path: Path, workspace: Path) -> None:
    (workspace / "large.bin").unlink()
    async with opened(tmp_path, "undo.max_mib=4") as (kernel, session):
        first = await session.call("bash", {"command": "head -c 1000000 /dev/urandom > fill"})
        assert first.ok
        for _ in range(6):
            await session.call("bash", {"command": "head -c 1000000 /dev/urandom > fill"})
        with pytest.raises(ToolError, match="No change of call"):
            await kernel.undo(f"{session.id}/1.0")
        assert (await kernel.undo(f"{session.id}/7.0")).is_complete
    kept = sum(path.stat().st_size for path in (tmp_path / "state").rglob("large/*"))
    assert kept <= 4 << 20


async def test_a_new_process_undoes_the_calls_of_an_earlier_process(tmp_path: Path, workspace: Path) -> None:
    before = read_tree(workspace)
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "rm -rf .git"})
    (workspace / "src" / "m9.py").write_text("edited between the processes")
    async with opened(tmp_path) as (kernel, session):
        await session.call("bash", {"command": "rm -rf src"})
        assert (await kernel.undo()).is_complete and (await kernel.undo()).is_complete
    (workspace / "src" / "m9.py").write_bytes(before["src/m9.py"][1])  # type: ignore[arg-type]
    assert read_tree(workspace) == before


async def test_a_kernel_keeps_no_undo_data_when_the_operator_disables_undo(tmp_path: Path, workspace: Path) -> None:
    async with opened(tmp_path, "undo.enabled=false") as (_, session):
        await session.call("bash", {"command": "echo x > untracked.txt"})
        with pytest.raises(ToolError, match="switched off"):
            await session.undo()
    assert not list((tmp_path / "state").rglob("undo.db"))


async def test_the_undo_store_is_private_and_outside_the_workspace(tmp_path: Path, workspace: Path) -> None:
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "echo x > untracked.txt"})
    for path in (tmp_path / "state").rglob("*"):
        if "undo" in path.parts:
            assert path.stat().st_mode & 0o077 == 0, path
    assert not list(workspace.rglob("undo.db"))


async def test_a_purge_removes_the_file_contents_stored_for_undo(tmp_path: Path, workspace: Path) -> None:
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "rm -rf src .git"})
    purge = ["log", "purge", "--before", "0", "--yes", "-C", str(workspace), "--state", str(tmp_path / "state")]
    assert "1 changes kept for undo" in command(*purge).stdout
    async with opened(tmp_path) as (kernel, _):
        with pytest.raises(ToolError, match="already undone"):
            await kernel.undo()
        assert kernel.log.reader is not None
    kept = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if "undo" in path.parts and path.is_file()]
    assert not any(b"value = 7" in data for data in kept)


async def test_a_connected_process_undoes_through_the_lease_holder(tmp_path: Path, workspace: Path) -> None:
    before = read_tree(workspace)
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "rm -rf src"})
        where = ["-C", str(workspace), "--state", str(tmp_path / "state"), "--json"]
        told = await asyncio.to_thread(command, "undo", f"{session.id}/1.0", *where)
        report = json.loads(told.stdout)
        assert told.returncode == 0 and report["is_complete"] and report["calls"] == [f"{session.id}/1.0"]
        assert read_tree(workspace) == before
        again = await asyncio.to_thread(command, "undo", report["id"], *where)
        assert again.returncode == 0 and not (workspace / "src").exists()


# ── hostile workspaces ───────────────────────────────────────────────────────────────────────────


async def test_an_undo_follows_no_link_out_of_the_workspace(tmp_path: Path, workspace: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "m1.py").write_text("outside")
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "rm -rf src; echo x > made"})
        (workspace / "src").symlink_to(outside)
        (workspace / "made").unlink()
        (workspace / "made").symlink_to(outside / "m1.py")
        for overwrite in (False, True):
            await session.undo(overwrite=overwrite)
            assert [path.name for path in outside.iterdir()] == ["m1.py"]
            assert (outside / "m1.py").read_text() == "outside"


async def test_a_redo_restores_no_content_to_a_protected_path(tmp_path: Path, workspace: Path) -> None:
    protected = workspace / ".vscode" / "tasks.json"
    protected.parent.mkdir()
    protected.write_text("mine")
    async with opened(tmp_path) as (_, session):
        snapshots = session.lane.environment.snapshots
        assert snapshots is not None
        located = session.lane.environment.roots.resolve_path(".vscode/tasks.json")
        tracker = FileChangeRecorder(snapshots, located, (f"{session.id}/1.0",), "test")
        tracker.keep(b"mine", 0o644, b"planted", 0o644)
        protected.write_text("planted")
        undone = await session.undo()
        assert protected.read_text() == "mine"
        with pytest.raises(ToolError):
            await session.undo()
        again = await session.undo(undone.id)
        assert protected.read_text() == "mine" and "protected" in again.paths[0].detail


async def test_the_undo_store_has_no_copies_of_files_hidden_from_programs(tmp_path: Path, workspace: Path) -> None:
    (workspace / ".env").write_text("TOKEN=s3cr3t-value")
    async with opened(tmp_path) as (_, session):
        await session.call("bash", {"command": "echo x > untracked.txt"})
    kept = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if "undo" in path.parts and path.is_file()]
    assert kept and not any(b"s3cr3t-value" in data for data in kept)


async def test_an_undo_loses_at_most_the_special_files_that_it_cannot_store(tmp_path: Path, workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    with (workspace / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    os.link(workspace / "untracked.txt", workspace / "second name")
    (workspace / "loop").symlink_to("loop")
    async with opened(tmp_path) as (_, session):
        result = await session.call("bash", {"command": "rm -f sparse pipe loop 'second name'; rm -rf src"})
        assert "sparse" in str(result.data["notes"])
        report = await session.undo()
        lost = {one.path for one in report.paths if one.outcome == "unavailable"}
        assert lost == {"pipe", "sparse"} and (workspace / "loop").is_symlink()
        assert (workspace / "second name").read_text() == "not in git" and (workspace / "src" / "m1.py").exists()


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.kernel.test_undo import opened

async def main():
    async with opened(Path(sys.argv[1])) as (_, session):
        await session.call("bash", {"command": "echo x > untracked.txt"})
        await session.call("bash", {"command": "rm -rf src; echo x > made; sleep 600"})

asyncio.run(main())
"""


@pytest.mark.parametrize("starts_another", [False, True])
async def test_undo_restores_files_that_a_call_changed_before_it_was_killed(
    tmp_path: Path, workspace: Path, starts_another: bool
) -> None:
    (workspace / ".env").write_text("TOKEN=mine")
    before = read_tree(workspace)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2])
    while not (workspace / "made").exists():
        await asyncio.sleep(0.02)
        assert process.poll() is None
    process.kill()
    process.wait()
    async with opened(tmp_path) as (kernel, session):
        if starts_another:
            await session.call("bash", {"command": "echo later > later"})
            await kernel.undo()
        report = await kernel.undo()
        assert "killed" in report.problems[0] and not report.is_complete
        await kernel.undo()
    (workspace / "made").unlink()
    after = read_tree(workspace)
    assert {path: one for path, one in after.items() if one[1] is not None} == {
        path: one for path, one in before.items() if one[1] is not None and path != "src/link.py"
    }


async def test_undo_restores_files_within_its_size_limit_and_names_the_others(tmp_path: Path, workspace: Path) -> None:
    folder = workspace / "data"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.bin").write_bytes(os.urandom(300_000))
        (folder / f"{number:02}.txt").write_bytes(os.urandom(60_000))
    before = read_tree(folder)
    async with opened(tmp_path, "undo.max_mib=2") as (_, session):
        for _ in range(3):
            result = await session.call("bash", {"command": "rm -rf data"})
            assert "data/" in str(result.data["notes"])
            report = await session.undo()
            lost = {one.path.removeprefix("data/") for one in report.paths if one.outcome == "unavailable"}
            given_back = read_tree(folder)
            assert given_back and lost and {*given_back, *lost} == {*before}
            assert all(before[name] == one for name, one in given_back.items())
            for name in lost:
                (folder / name).write_bytes(before[name][1])  # type: ignore[arg-type]
    kept = sum(path.stat().st_size for path in (tmp_path / "state").rglob("large/*"))
    assert kept <= 2 << 20


PERSISTENT = """#!/usr/bin/env python3
import json, shutil, sys
from pathlib import Path

for line in sys.stdin:
    call = json.loads(line)
    path = Path(call["arguments"]["path"])
    shutil.rmtree(path) if path.is_dir() else path.write_text("changed")
    print(json.dumps({"id": call["id"], "result": {"text": "done"}}), flush=True)
"""


async def test_each_call_of_a_persistent_tool_is_undone_separately(tmp_path: Path, workspace: Path) -> None:
    tools = tmp_path / "config" / "tools"
    tools.mkdir(parents=True)
    (tools / "change.py").write_text(PERSISTENT)
    (tools / "change.py").chmod(0o755)
    manifest = {
        "llm": {
            "name": "change",
            "description": "Change a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
        "runtime": {
            "exec_path": "change.py",
            "persistent": True,
            "side_effect": "write",
            "requires": {"fs": {"write": ["{workspace}"], "read": ["{workspace}"]}},
        },
    }
    (tools / "change.json").write_text(json.dumps(manifest))
    (tmp_path / "config" / "handrail.toml").touch()
    before = read_tree(workspace)
    config = tmp_path / "config" / "handrail.toml"
    async with open_kernel(workspace, state=tmp_path / "state", config=config) as kernel:
        session = await kernel.session(approval_handler=AllowAll())
        for path in ("src", "untracked.txt"):
            result = await session.call("change", {"path": str(workspace / path)})
            assert result.ok, result
        (workspace / "mine").write_text("mine")
        assert (await kernel.undo(f"{session.id}/1.0")).is_complete
        assert (workspace / "src" / "m1.py").exists() and (workspace / "untracked.txt").read_text() == "changed"
        assert (await kernel.undo()).is_complete
        (workspace / "mine").unlink()
        assert read_tree(workspace) == before
