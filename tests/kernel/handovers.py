"""Several processes on one workspace, with calls that have effects, while the holder is killed or paused.

The processes are forked by a nursery that has everything imported, so that a thousand of them cost little. Each tells
what it proposes and what it is answered over a socket of the test's, in the order it happened; a killed one's last words
arrive, too. Effects leave a line in a file: what ran twice or not at all is seen without asking Handrail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kernel.nursery import NURSERY

from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.lease import LeaseHolder, WorkspaceLease, find_lease_holder
from handrail.store.state_folders import StateFolders, locate_folders

_PATIENCE_S = 300.0
"""Only for a test that hangs to say where."""


@dataclass(eq=False)
class MemberProcess:
    """The state of one process, as the test knows it."""

    name: str
    pid: int
    writer: asyncio.StreamWriter = field(repr=False)
    alive: bool = True
    opened: int = 0
    token: int = 0
    """Of the holder that gave its last answer."""
    proposed: set[str] = field(default_factory=set[str])
    """What has no answer yet."""
    left: dict[str, list[str]] | None = None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


class SharedWorkspace:
    """One workspace and those who share it. Made by :func:`handovers`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.folders: StateFolders = locate_folders(folder / "ws", folder / "state")
        self.chance = random.Random(seed)
        self.members: list[MemberProcess] = []
        self.born = 0
        self.nursery: asyncio.subprocess.Process
        self.answers: dict[str, dict[str, Any]] = {}
        self.unchecked: list[str] = []
        self.records: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.calls_of: dict[str, list[str]] = {}
        """Call ids by mark: more than one where a call was proposed again."""
        self.sequence = 0
        self.effects: Counter[str] = Counter()
        self.read_up_to = {"effects": 0, "ws/trace": 0}
        self.takeovers: list[tuple[str, float]] = []
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self._news = asyncio.Event()

    # ── the processes ────────────────────────────────────────────────────────────────────────────

    async def start(self) -> MemberProcess:
        """Another process, once its kernel is open."""
        self.born += 1
        taken = {each.name.partition("-")[0] for each in self.members}  # it goes on with the sessions of a dead one
        place = next(f"m{n}" for n in range(len(taken) + 1) if f"m{n}" not in taken)
        name = f"{place}-{self.born}"
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(f"{name} {self.chance.randrange(10**9)}\n".encode())
        await self.until(lambda: any(each.name == name and each.opened for each in self.members))
        return next(each for each in self.members if each.name == name)

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to one of them until it is gone."""
        member: MemberProcess | None = None
        try:
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break  # it was killed in the middle of it
                word, told = json.loads(line)
                if word == "born":
                    member = MemberProcess(told["name"], told["pid"], writer)
                    self.members.append(member)
                else:
                    assert member is not None
                    self.heard(member, word, told)
                self._news.set()
        except ConnectionResetError:
            pass
        except Exception as error:
            self.failures.append(repr(error))
        finally:
            if member is not None:
                member.alive = False
                self.members.remove(member)
            writer.close()
            self._news.set()

    async def gone(self) -> None:
        """Return when no process listens any more."""
        while self.members:
            self._news.clear()
            await self._news.wait()

    def heard(self, member: MemberProcess, word: str, told: dict[str, Any]) -> None:
        if word == "open":
            member.opened += 1
        elif word == "proposed":
            assert not member.proposed & set(told["marks"])
            member.proposed |= set(told["marks"])
        elif word == "answered":
            member.proposed.remove(told["mark"])  # raises for a second answer
            member.token = told["token"]
            assert told["mark"] not in self.answers
            self.answers[told["mark"]] = told
            self.unchecked.append(told["mark"])
        elif word == "left":
            member.left = told
            assert not member.proposed, f"{member.name} left without answers to {member.proposed}"
            told["files"] = [path for path in told["files"] if "/handrail/public-" not in path]  # the machine's own
            assert told == {"files": [], "tasks": [], "threads": []}, f"{member.name} left behind {told}"
        else:
            raise AssertionError(f"{member.name}: {word} {told}")

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until the condition is true; checked at every message."""
        deadline = time.monotonic() + _PATIENCE_S
        while not reached():
            assert not self.failures, f"{self.failures}; {self._seen()}"
            self._news.clear()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._news.wait()
            except TimeoutError:
                deadline = 0
            if time.monotonic() > deadline:
                seen = self._seen()
                for member in self.members:  # each says where it stands, unless it is stopped
                    member.signal(signal.SIGUSR1)
                await asyncio.sleep(1)
                raise AssertionError(f"nothing came of it: {seen}")

    def _seen(self) -> str:
        locks: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            file = f":{self.folders.database_file.with_name('handrail.db-shm').stat().st_ino} "
            locks = [lock for lock in Path("/proc/locks").read_text().splitlines() if file in lock]
        return f"holder {self.holder()!r}, {self.members}, locks {locks}"

    def holder(self) -> LeaseHolder | None:
        return find_lease_holder(self.folders)

    def member_of(self, holder: LeaseHolder | None) -> MemberProcess | None:
        return next((each for each in self.members if holder is not None and each.pid == holder.pid), None)

    async def holding(self) -> tuple[MemberProcess, int]:
        """Return the lease holder and its token after all processes have had an answer from it."""
        while True:
            holder = self.holder()
            member = self.member_of(holder)
            if holder is not None and member is not None:
                token = holder.token or 0
                await self.until(
                    lambda member=member, token=token: (
                        not member.alive or all(each.token >= token for each in self.members)
                    )
                )
                if member.alive and (now := self.holder()) is not None and now.token == token:
                    return member, token
            await asyncio.sleep(0)

    async def some_answers(self, count: int) -> None:
        goal = len(self.answers) + count
        await self.until(lambda: len(self.answers) >= goal)

    # ── what happens to them ─────────────────────────────────────────────────────────────────────

    async def kill(self) -> None:
        """Kill the lease holder during its work, and wait until another one answers."""
        member, token = await self.holding()
        await self.some_answers(self.chance.randrange(1, 40))
        began = time.monotonic_ns()
        member.signal(signal.SIGKILL)
        await self.taken_over("killed", member, token, began)
        await self.until(lambda: not member.alive)
        self.look()
        await self.start()

    async def pause(self) -> None:
        """Pause the lease holder, and continue or kill it after another one answers."""
        member, token = await self.holding()
        await self.some_answers(self.chance.randrange(1, 40))
        began = await self._stopped(member)
        while self._is_writing():  # then nobody else can write before it goes on: see pause_in_a_write
            member.signal(signal.SIGCONT)
            await self.some_answers(1)
            began = await self._stopped(member)
        await self.taken_over("paused", member, token, began)
        others = [each for each in self.members if each is not member]  # all leave the one that answers nothing
        await self.until(lambda: all(each.token > token for each in others if each.alive))
        if self.chance.randrange(2):
            opened = member.opened
            member.signal(signal.SIGCONT)
            await self.until(lambda: member.token > token or member.opened > opened)
        else:
            member.signal(signal.SIGKILL)
            await self.until(lambda: not member.alive)
        self.look()
        if not member.alive:
            await self.start()

    async def pause_in_a_write(self) -> None:
        """Stop it where it keeps everybody from writing, until it is stale, and kill it."""
        member, token = await self.holding()
        await self._stopped(member)
        while not self._is_writing():
            member.signal(signal.SIGCONT)
            await self.some_answers(1)
            await self._stopped(member)
        await WorkspaceLease.wait_until_free(self.folders)
        began = time.monotonic_ns()
        member.signal(signal.SIGKILL)
        await self.taken_over("killed, paused in a write", member, token, began)
        await self.until(lambda: not member.alive)
        self.look()
        await self.start()

    async def _stopped(self, member: MemberProcess) -> int:
        """Stop the process, and return when all of its threads are stopped."""
        began = time.monotonic_ns()
        member.signal(signal.SIGSTOP)
        threads = Path(f"/proc/{member.pid}/task")
        while any(b") T " not in (each / "stat").read_bytes() for each in threads.iterdir()):
            await asyncio.sleep(0)
        return began

    def _is_writing(self) -> bool:
        """Return whether the database is locked for writing."""
        connection = sqlite3.connect(self.folders.database_file, timeout=0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        finally:
            connection.close()
        return False

    async def leave(self) -> None:
        """Let one of them close its kernel in good order and open it again; now and then it is the holder."""
        member = self.chance.choice(self.members)
        holder = self.holder()
        opened, began = member.opened, time.monotonic_ns()
        member.writer.write(b"again\n")
        if holder is not None and holder.pid == member.pid:
            await self.taken_over("left", member, holder.token or 0, began)
        await self.until(lambda: member.opened > opened)
        self.look()

    async def taken_over(self, how: str, former: MemberProcess, token: int, began: int) -> None:
        """Return when a call has been answered by the next holder."""
        first: list[int] = []

        def answered() -> bool:
            recent = (self.answers[mark] for mark in self.unchecked[-200:])
            first[:] = [told["ended"] for told in recent if told["token"] > token]
            return bool(first)

        await self.until(answered)
        self.takeovers.append((how, (min(first) - began) / 1e9))

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Check that answers are recorded with their outcome, and effects are unique and have an intent."""
        answered, self.unchecked = self.unchecked, []
        with LogReader.open_database(self.folders.database_file) as reader:
            for record in reader.records(since=self.sequence):
                self.sequence = record.sequence
                if record.call_id:
                    body = dict(record.body or {})
                    self.records.setdefault(record.call_id, []).append((record.kind, body))
                    if record.kind == "proposed" and isinstance(body.get("arguments"), dict):
                        self.calls_of.setdefault(_mark_of(body["arguments"]), []).append(record.call_id)
        for name, start in self.read_up_to.items():
            path = self.folder / name
            if path.exists():
                with path.open("rb") as file:
                    file.seek(start)
                    whole = file.read().rpartition(b"\n")[0]
                    self.effects.update(whole.decode().split())
                    self.read_up_to[name] = start + len(whole)
        doubles = [mark for mark, times in self.effects.items() if times > 1]
        assert not doubles, f"had effects twice: {doubles}"
        for mark in answered:
            self._check(mark, self.answers[mark])

    def _check(self, mark: str, told: dict[str, Any]) -> None:
        result, call_id = told["result"], told["call"]
        kind = result["metadata"].get("error_kind") or result["type"]
        records = self.records.get(call_id, [])
        kinds = [each for each, _ in records]
        self.outcomes[kind] += 1
        if kind == "output":
            assert self.effects[mark] == 1 or self._is_read(records, result), (mark, told, records)
        elif kind == "interrupted":
            assert "interrupted" in kinds or "committed" in kinds, (mark, told, records)
        else:
            assert kind in ("unavailable", "cancelled"), (mark, told)
            # One that was stopped in its middle, by a holder that left in good order, may have had its effect.
            assert not self.effects[mark] or "committed" in kinds, (mark, told, records)
        if "log_error" in result["metadata"]:
            self.outcomes["log_error"] += 1
        elif kind == "output" and not self._is_read(records, result):
            ended = [body for each, body in records if each == "committed"]
            assert len(ended) == 1 and ended[0]["result"]["type"] == "output", (mark, told, records)
            assert ended[0]["result"]["data"] == result["data"], (mark, told, records)

    def _is_read(self, records: list[tuple[str, dict[str, Any]]], result: dict[str, Any]) -> bool:
        """Return whether nothing waited for the records of the call, so that a kill may have lost them."""
        if records and records[0][0] == "proposed":
            return records[0][1]["tool"] == "soak.look"
        return result["data"] in self.answers and result["data"] not in self.effects

    def verify(self) -> None:
        with LogReader.open_database(self.folders.database_file) as reader:
            found = verify_log(reader)
            assert found.ok, found

    async def finish(self) -> None:
        """Let everybody leave in good order, and look at the whole."""
        leaving = list(self.members)
        for member in leaving:
            member.writer.write(b"end\n")
        await self.until(lambda: not self.members)
        assert all(member.left is not None for member in leaving), "not everybody told how it left"
        assert self.nursery.stdin is not None and self.nursery.stdout is not None
        self.nursery.stdin.close()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                alone = await self.nursery.stdout.readline()
        except TimeoutError:
            children = Path(f"/proc/{self.nursery.pid}/task/{self.nursery.pid}/children").read_text().split()
            left = [each for each in children if not _never_began(each)]
            assert not left, f"processes were left: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in left]}"
            self.outcomes["bubblewraps that never began and never end"] += len(children)
            for pid in children:
                os.kill(int(pid), signal.SIGKILL)
            alone = await self.nursery.stdout.readline()
        assert alone == b"alone\n"
        self.look()
        self.verify()
        for mark in self.effects:
            began = [each for each in dict.fromkeys(self.calls_of.get(mark, ())) if self._began(each)]
            assert len(began) == 1, (mark, {each: self.records[each] for each in self.calls_of[mark]})
        for call_id, records in self.records.items():
            kinds = [kind for kind, _ in records]
            assert sum(kind in ("committed", "interrupted") for kind in kinds) <= 1, (call_id, kinds)
            assert "intended" not in kinds or kinds[-1] in ("committed", "interrupted", "rejected"), (call_id, kinds)
        assert self.holder() is None
        assert not list(self.folders.workspace_state_folder.glob("*.sock")), "a socket was left"

    def _began(self, call_id: str) -> bool:
        """Whether it may have run: its intent is on record, and not that it was stopped before it began. Such a one may be
        proposed again, under its key or another id."""
        kinds = [kind for kind, _ in self.records[call_id]]
        return "intended" in kinds and kinds[-1] != "rejected"

    def told(self) -> str:
        """Return a report for readers: events and durations."""
        lines = [f"{len(self.answers)} answers: {dict(self.outcomes)}, {self.effects.total()} effects"]
        for how in sorted({how for how, _ in self.takeovers}):
            took = sorted(seconds for each, seconds in self.takeovers if each == how)
            within = sum(seconds <= 3 for seconds in took)
            lines.append(
                f"{how}: {len(took)} times, answered by the next holder after {statistics.median(took):.2f} s "
                f"(p50), {took[-1]:.2f} s (most), {within} of {len(took)} within 3 s"
            )
        return "\n".join(lines)


def _mark_of(arguments: dict[str, Any]) -> str:
    if "mark" in arguments:
        return arguments["mark"]
    words = str(arguments.get("command", "")).split()
    return words[1] if len(words) > 1 else ""


def _never_began(pid: str) -> bool:
    """Whether it is bubblewrap's own child before it has its user namespace: when bubblewrap dies in just that moment
    it waits for ever for the mapping of its users (on an eventfd of its own), and nothing of ours has been started."""
    process = Path(f"/proc/{pid}")
    waits = "anon_inode:[eventfd]" in [str(path.readlink()) for path in (process / "fd").iterdir()]
    return waits and process.joinpath("comm").read_text() == "bwrap\n"


@asynccontextmanager
async def handovers(folder: Path, *, seed: int, members: int = 4, tasks: int = 2) -> AsyncGenerator[SharedWorkspace]:
    """Start ``members`` processes with ``tasks`` sessions each, and end the rest afterwards."""
    (folder / "ws").mkdir(parents=True)
    (folder / "state").mkdir(mode=0o700)
    (folder / "handrail.toml").touch()
    found = SharedWorkspace(folder, seed)
    server = await asyncio.start_unix_server(found.attend, str(folder / "told"), limit=2**24)
    found.nursery = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        NURSERY,
        str(folder),
        str(tasks),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert found.nursery.stdout is not None
        assert await found.nursery.stdout.readline() == b"ready\n"
        for _ in range(members):
            await found.start()
        yield found
    finally:
        for member in list(found.members):
            with contextlib.suppress(ProcessLookupError):
                member.signal(signal.SIGKILL)
        if found.nursery.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                found.nursery.kill()
            await found.nursery.wait()
        await found.gone()
        server.close()
