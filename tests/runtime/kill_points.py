"""Kill a process at a chosen line while it changes files: ``python -m tests.runtime.kill_points FOLDER COUNT``.

It prints what recovery makes of the workspace after each of COUNT kills: ``old``, ``new``, or the files if they are neither.
With the count 0, it leaves a workspace in which a process was killed between the names of two files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from handrail.contract.services.file_services import FileChange
from handrail.contract.tool.requires import Capability
from handrail.runtime.files.joint_changes import MultiFileChangeJournal
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots

WATCHED = ("/runtime/files/joint_changes.py", "/runtime/files/atomic_write.py")
OLD = {
    "a.txt": (0o644, b"a\n"),
    "sub/b.txt": (0o600, b"b\n"),
    "gone.txt": (0o644, b"gone\n"),
    "moved.sh": (0o755, b"m\n"),
}
NEW = {
    "a.txt": (0o755, b"A\n"),
    "sub/b.txt": (0o600, b"B\n" * 50_000),
    "new/in/folder.txt": (0o644, b"new\n"),
    "sub/moved.sh": (0o755, b"M\n"),
}
CHANGES = (
    FileChange("a.txt", b"a\n", b"A\n", is_executable=True),
    FileChange("sub/b.txt", b"b\n", NEW["sub/b.txt"][1]),
    FileChange("gone.txt", b"gone\n", None),
    FileChange("moved.sh", b"m\n", None),
    FileChange("sub/moved.sh", None, b"M\n", like="moved.sh"),
    FileChange("new/in/folder.txt", None, b"new\n"),
)


class LineCounter:
    """Counts the lines that run in the watched files, and ends the process at one of them.

    :param last: the number of that line; 0 for none
    """

    def __init__(self, last: int = 0) -> None:
        self.count = 0
        self.last = last
        sys.settrace(self._trace)
        threading.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._count if frame.f_code.co_filename.endswith(WATCHED) else None

    def _count(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._count


def read_tree(root: Path) -> dict[str, tuple[int, bytes]]:
    files = (one for one in sorted(root.rglob("*")) if one.is_file())
    return {str(one.relative_to(root)): (one.stat().st_mode & 0o777, one.read_bytes()) for one in files}


def fill(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for path, (mode, data) in OLD.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
        (root / path).chmod(mode)


def allow_all(capability: Capability, target: str | Sequence[str]) -> str | None:
    return None


async def change(root: Path, journal: Path) -> None:
    files = RootedFiles(SessionRoots(root), SeenFileHashes(), allow_all, journal=MultiFileChangeJournal(journal))
    await files.change_atomically(CHANGES)


def fork_killed(root: Path, journal: Path, last: int) -> int:
    """Change the files in a child that is killed at a line, and return the lines that it ran; 0 if it was killed."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        counter = LineCounter(last)
        asyncio.run(change(root, journal))
        os.write(writer, str(counter.count).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as file:
        return int(file.read() or 0)


def kill_between_names(root: Path, journal: Path) -> None:
    """Kill a process after it gave the first file its name and before it gave the second."""
    for last in range(100, 5_000, 10):
        fill(root)
        fork_killed(root, journal, last)
        found = read_tree(root)
        if found.get("a.txt") == NEW["a.txt"] and found.get("sub/b.txt") == OLD["sub/b.txt"]:
            return
        shutil.rmtree(journal, ignore_errors=True)
    raise AssertionError("no kill came between two names")


def main(folder: Path, count: int) -> None:
    root, journal = folder / "ws", folder / "journal"
    os.umask(0o022)
    if not count:
        kill_between_names(root, journal)
        return
    fill(root)
    lines = fork_killed(root, journal, 0)
    outcomes: list[str] = ["new" if read_tree(root) == NEW else "broken"]
    for number in range(count):
        fill(root)
        fork_killed(root, journal, 1 + number * (lines - 1) // max(count - 1, 1))
        recovered = MultiFileChangeJournal(journal).recover()
        found, folders = read_tree(root), sorted(one.name for one in root.iterdir() if one.is_dir())
        if found == OLD and folders == ["sub"]:
            outcomes.append("old")
        else:
            outcomes.append("new" if found == NEW else f"{found} {folders} after {number}, recovered {recovered}")
        left = os.listdir(journal) if journal.exists() else []
        outcomes += [f"left {left}"] if any(name.endswith(".json") for name in left) else []
    print(json.dumps([lines, outcomes]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
