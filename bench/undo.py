"""Costs of undo: a call with kept files against the same call without, and the time to give back 1,000 files.

    python bench/undo.py [FILES]

Two kernels on two equal workspaces, calls in turn; the figures are medians and their ratio. Of the damage, each kind is done once in a
new workspace and undone; the bytes and permissions are compared.
"""

from __future__ import annotations

import asyncio
import os
import stat
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from handrail import ApprovalAnswer, ApprovalRequest, Session, open_kernel

ROUNDS = 40
COMMANDS = {"read-only": "true", "writes one file": "touch folder0/file1.txt", "runs Python": "python3 -c pass"}
DAMAGE = {
    "rm -rf": "rm -rf ./folder*",
    "truncate": "truncate -s 0 folder*/*",
    "sed -i": "sed -i s/value/other/ folder*/*",
    "append": "for file in folder*/*; do echo more >> $file; done",
    "chmod": "chmod 600 folder*/*",
    "rename": "for folder in folder*; do mv $folder new-$folder; done",
}


class AllowAll:
    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("once")

    async def answer_questions(self, session_id: str, questions: Sequence[object]) -> list[list[str]] | None:
        return None


def fill(folder: Path, files: int) -> None:
    for number in range(files):
        place = folder / f"folder{number // 50}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"file{number % 50}.txt").write_text(f"value {number}\n" * 100)


def read_tree(root: Path) -> dict[str, tuple[int, bytes]]:
    found: dict[str, tuple[int, bytes]] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            found[str(path.relative_to(root))] = stat.S_IMODE(path.stat().st_mode), path.read_bytes()
    return found


async def call(session: Session, command: str) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = await session.call("bash", {"command": command})
    assert result.ok, result.error_text
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


async def compare_calls(base: Path, files: int) -> None:
    for name in ("without", "with"):
        fill(base / name, files)
    settings = ["undo.enabled=false"]
    async with (
        open_kernel(base / "without", state=base / "s1", settings=settings) as one,
        open_kernel(base / "with", state=base / "s2") as other,
    ):
        sessions = [await kernel.session(approval_handler=AllowAll()) for kernel in (one, other)]
        print(f"a call in {files:,} files         {'without':>18} {'with undo':>18}   ratio")
        for name, command in COMMANDS.items():
            took: list[list[tuple[float, float]]] = [[], []]
            for _ in range(ROUNDS):
                for number, session in enumerate(sessions):
                    took[number].append(await call(session, command))
                    await asyncio.sleep(0.05)  # a ready sandbox is made meanwhile
            for index, unit in ((0, "ms"), (1, "ms of processor")):
                before, now = (statistics.median(one[index] for one in of[1:]) for of in took)
                print(f"{name:17} {unit:15} {before:15.2f} {now:18.2f}   {now / before:5.2f}")
            print(f"{name:17} first call      {took[0][0][0]:15.2f} {took[1][0][0]:18.2f}")


async def undo_damage(base: Path, files: int) -> None:
    print(f"to undo damage to {files:,} files    {'s':>8}   paths")
    for number, (name, command) in enumerate(DAMAGE.items()):
        workspace = base / f"damaged{number}"
        fill(workspace, files)
        before = read_tree(workspace)
        async with open_kernel(workspace, state=base / "s3") as kernel:
            session = await kernel.session(approval_handler=AllowAll())
            await call(session, command)
            assert read_tree(workspace) != before
            began = time.perf_counter()
            report = await session.undo()
            took = time.perf_counter() - began
        assert read_tree(workspace) == before and report.is_complete
        print(f"{name:30} {took:8.2f}   {len(report.paths):,}")


async def main() -> None:
    files = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as made:
        await compare_calls(Path(made), files)
        await undo_damage(Path(made), files)


if __name__ == "__main__":
    asyncio.run(main())
