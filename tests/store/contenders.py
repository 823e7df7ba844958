"""Processes that compete for one workspace, controlled by lines."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections import deque
from types import TracebackType

from tests.store.places import Place

PATIENCE_S = 300

RACER = """
import sys
from pathlib import Path
from handrail.store.state_folders import prepare_folders
from handrail.store.lease import WorkspaceLease, WorkspaceAlreadyHeld
say("ready")
for line in sys.stdin:
    folders = prepare_folders(line.strip(), sys.argv[2])
    try:
        lease = WorkspaceLease.acquire(folders, frontend="cli", clock=lambda: 0)
    except WorkspaceAlreadyHeld as held:
        say("turned-away", held.holder.token)
    else:
        say("holds", lease.token)
    if sys.stdin.readline().strip() == "release" and "lease" in vars():
        lease.release()
        del lease
    say("done")
"""
"""Tries for the workspace that it is told; with the next line lets go again."""

WRITER = """
import asyncio, itertools, sys
from handrail.record.commit_log import CommitLog, Record
from handrail.store.state_folders import prepare_folders
from handrail.store.lease import WorkspaceLease, WorkspaceAlreadyHeld
from handrail.store.workspace_store import WorkspaceStore

async def held():
    while True:
        await WorkspaceLease.wait_until_free(prepare_folders(sys.argv[1], sys.argv[2]), interval_s=0.02)
        try:
            return WorkspaceStore.open(sys.argv[1], sys.argv[2], frontend="cli")
        except WorkspaceAlreadyHeld as error:
            if error.holder.state != "alive":
                say("blocked", error.holder.pid)

async def main():
    say("ready")
    store = await held()
    log = CommitLog(store.database)
    say("holds", store.lease.token)
    async def caller(lane):
        for number in itertools.count():
            mark = f"{store.lease.token}-{lane}-{number}"
            await log.commit([Record("committed", "ses_1", mark, {"text": "x" * 100})])
            say("ack", mark)
    try:
        await asyncio.gather(*(caller(lane) for lane in range(4)))
    except Exception as error:
        say("refused", error)

asyncio.run(main())
"""
"""Waits for the workspace, then commits without end and says so each time."""

PAUSED = """
import asyncio, sys, threading
from handrail.contract.errors import LogUnavailable
from handrail.record.commit_log import CommitLog, Record
from handrail.store.workspace_store import WorkspaceStore

class Gate:
    "A table that holds the writer up, just before it would begin a transaction."
    def __init__(self):
        self.open = threading.Event()
    def load(self, connection):
        pass
    def build_statements(self, batch):
        self.open.wait()
        return ()

def record(mark):
    return Record("committed", "ses_1", mark, {})

async def main():
    store = WorkspaceStore.open(sys.argv[1], sys.argv[2], frontend="mcp")
    log = CommitLog(store.database)
    await log.commit([record("before")])
    gate = Gate()
    if sys.argv[3] == "before the transaction":
        log.record_soon([record("queued")])
    store.database.write_soon(gate, None)
    for number in range(5):
        log.record_soon([record(f"queued {number}")])
    waiting = [asyncio.ensure_future(log.commit([record("waited for")]))]
    if sys.argv[3] == "several tables":
        waiting.append(asyncio.ensure_future(store.session_values.put("ses_1", "tool", "key", 1)))
    await asyncio.sleep(0)
    lost = threading.Event()
    store.lease.add_lost_callback(lost.set)
    say("queued", store.lease.is_valid)
    await asyncio.to_thread(sys.stdin.readline)
    # Resumed. Nothing has been renewed or written since.
    say("valid", store.lease.is_valid)
    gate.open.set()
    for refused in await asyncio.gather(*waiting, return_exceptions=True):
        say("refused", refused)
    lost.wait()
    say("lost", store.lease.lost_reason)
    say("refusal", log.unavailable_reason)
    log.record_soon([record("afterwards")])
    try:
        await log.commit([record("afterwards too")])
    except LogUnavailable as error:
        say("refused", error)
    say("valid", store.lease.is_valid)
    await store.aclose()
    say("closed", store.database.writer.backlog)

asyncio.run(main())
"""
"""Is paused with records before its writer, and tells what becomes of them."""

_SAY = """
import os as _os
def say(*words):
    _os.write(1, (f"{_os.getpid()} " + " ".join(map(str, words)) + "\\n").encode())
"""


class ContendingProcesses:
    """Processes of one place, whose lines arrive in one order. They end with the block."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._reading, self._writing = os.pipe()
        self._rest = b""
        self._lines: deque[tuple[int, str, str]] = deque()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, text: str, *arguments: str) -> int:
        """Its process id."""
        argv = [sys.executable, "-c", _SAY + text, str(self._place.workspace), str(self._place.state), *arguments]
        started = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=self._writing)
        self.processes[started.pid] = started
        return started.pid

    def tell(self, pid: int, line: str) -> None:
        stdin = self.processes[pid].stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def hear(self) -> tuple[int, str, str]:
        """Return the next line of any process: its sender, first word, and the rest."""
        while not self._lines:
            ready, _, _ = select.select([self._reading], [], [], PATIENCE_S)
            assert ready, "nobody says anything"
            *whole, self._rest = (self._rest + os.read(self._reading, 65536)).split(b"\n")
            for line in whole:
                pid, _, said = line.decode().partition(" ")
                word, _, rest = said.partition(" ")
                self._lines.append((int(pid), word, rest))
        return self._lines.popleft()

    def forget(self) -> None:
        """Discard the lines so far, while no process writes."""
        while select.select([self._reading], [], [], 0)[0]:
            self._rest = (self._rest + os.read(self._reading, 65536)).rpartition(b"\n")[2]
        self._lines.clear()

    def hear_from(self, pid: int, word: str) -> str:
        """The rest of that process's next line, which must begin with ``word``."""
        said = self.hear()
        assert said[:2] == (pid, word), said
        return said[2]

    def signal(self, pid: int, number: signal.Signals) -> None:
        self.processes[pid].send_signal(number)

    def stop(self, pid: int) -> None:
        """Pause it, and return when it is paused."""
        self.signal(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)

    def kill(self, pid: int) -> None:
        process = self.processes.pop(pid)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL), "it ended in a failure of its own"
        if process.stdin is not None:
            process.stdin.close()

    def rest(self) -> list[tuple[int, str, str]]:
        """Return the remaining lines of killed processes after all have ended."""
        assert not self.processes
        os.close(self._writing)
        self._writing = -1
        while content := os.read(self._reading, 65536):
            self._rest += content
        for line in self._rest.splitlines():
            pid, _, said = line.decode().partition(" ")
            word, _, rest = said.partition(" ")
            self._lines.append((int(pid), word, rest))
        lines, self._lines = list(self._lines), deque()
        return lines

    def __enter__(self) -> ContendingProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in list(self.processes):
            self.kill(pid)
        os.close(self._reading)
        if self._writing >= 0:
            os.close(self._writing)
