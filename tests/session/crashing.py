"""A process that makes calls until it is killed, and the invariants of its workspace afterwards."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.prefork import command as prefork

from handrail.record.commit_log import read_unwritten_records
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.testing.scripted_kernel import temporary_kernel

CHILD = """
import asyncio, os, random, sys
from pathlib import Path
from handrail import ApprovalAnswer, tool
from handrail.testing.scripted_kernel import temporary_kernel

folder, life, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
chance = random.Random(seed)
effects = os.open(folder / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def say(*words):
    os.write(1, (" ".join(words) + "\\n").encode())

@tool(id="crash.write", side_effect="external", locks=["file:{name}:X"])
async def write(name: str, mark: str) -> str:
    "Have an effect."
    for _ in range(chance.randrange(3)):
        await asyncio.sleep(0)
    os.write(effects, (mark + "\\n").encode())
    for _ in range(chance.randrange(3)):
        await asyncio.sleep(0)
    return mark

@tool(id="crash.asked", side_effect="external", locks=["file:{name}:X"])
async def asked(name: str, mark: str) -> str:
    "Have an effect that somebody has to be asked about."
    os.write(effects, (mark + "\\n").encode())
    return mark

@tool(id="crash.hold", side_effect="external", locks=["file:held:X"])
async def hold(mark: str) -> str:
    "Never end."
    os.write(effects, (mark + "\\n").encode())
    await asyncio.Event().wait()
    return mark

@tool(id="crash.look", side_effect="read", locks=["file:{name}:S"])
async def look(name: str) -> str:
    "Look."
    return name

class Person:
    async def approve(self, request):
        if chance.randrange(3):
            await asyncio.Event().wait()
        return ApprovalAnswer("once")
    async def answer_questions(self, session_id, questions):
        return [[""] for _ in questions]

made = 0

async def caller(session):
    global made
    while True:
        made += 1
        mark, name = f"{life}-{made}", chance.choice("abc")
        kind = chance.randrange(8)
        if kind == 0:
            asyncio.ensure_future(session.call("crash.asked", {"name": name, "mark": mark}))
            await asyncio.sleep(0)
        elif kind == 1:
            asyncio.ensure_future(session.call("crash.write", {"name": "held", "mark": mark}))
            await asyncio.sleep(0)
        elif kind in (2, 3):
            await session.call("crash.look", {"name": name})
        elif kind == 4:
            result = await session.call("crash.write", {"name": name, "mark": mark}, key=mark)
            say("ack" if result.ok else "error", mark)
        else:
            marks = [f"{mark}.{n}" for n in range(chance.randrange(1, 4))]
            results = await session.call_all([("crash.write", {"name": chance.choice("abc"), "mark": m}) for m in marks])
            for result, one in zip(results, marks):
                say("ack" if result.ok else "error", one)

async def main():
    tools = (write, asked, hold, look)
    async with temporary_kernel(folder, tools=tools, rules=["allow crash.*", "ask crash.asked"]) as kernel:
        say("interrupted", *(lost.call_id for lost in kernel.interrupted_calls))
        session = await kernel.session("ses_crash", approval_handler=Person())
        asyncio.ensure_future(session.call("crash.hold", {"mark": life + "-held"}))
        await asyncio.gather(*(caller(session) for _ in range(4)))

asyncio.run(main())
"""


def die_by_itself(folder: Path, script: str, *arguments: str) -> str:
    """Run a program that kills itself by SIGKILL; gives what it had written. ``DIE`` in it is the statement that does so.

    :param folder: its first argument
    """
    file = folder / "dies.py"
    file.write_text(script.replace("DIE", "__import__('os').kill(__import__('os').getpid(), 9)"))
    argv = [*prefork.python(file), str(folder), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stdout, done.stderr[-2000:])
    return done.stdout


def records_of(folder: Path) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Each call's records as another process finds them, in the log or on their way into it."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    (database,) = (folder / "state").rglob("handrail.db")
    with LogReader.open_database(database) as reader:
        for record in reader.records():
            if record.call_id:
                found.setdefault(record.call_id, []).append((record.kind, dict(record.body or {})))
        for kind, _, call_id, body in read_unwritten_records(reader.connection, database.parent):
            if call_id:
                found.setdefault(call_id, []).append(
                    (kind, json.loads(body) if isinstance(body, bytes) else dict(body))
                )
    return found


class CrashingWorkspace:
    """One workspace whose process is killed again and again."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.lives = 0
        self.acknowledged: set[str] = set()
        self.interrupted: Counter[str] = Counter()
        self.open: set[str] = set()

    def live_and_die(self) -> None:
        """Start a process, kill it after a random number of answers, and look at what it left."""
        self.lives += 1
        argv = [sys.executable, "-c", CHILD, str(self.folder), f"l{self.lives}", str(self.chance.randrange(10**9))]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stderr is not None
            told = child.stdout.readline().split()
            assert told[:1] == ["interrupted"], child.stderr.read()
            self._told(told[1:])
            for _ in range(self.chance.randrange(1, 60)):
                self._heard(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            for line in child.stdout:
                self._heard(line)
            assert child.wait() == -signal.SIGKILL, child.stderr.read()
        self.look()

    def _heard(self, line: str) -> None:
        word, mark = line.split()
        assert word == "ack", line
        self.acknowledged.add(mark)

    def _told(self, calls: list[str]) -> None:
        """Check that the interrupted calls at a start are those that had started and not ended."""
        assert set(calls) == self.open and len(calls) == len(set(calls))
        self.interrupted.update(calls)
        self.open = set()

    def look(self) -> None:
        """The log as the killed process left it: nothing acknowledged is missing, no effect without an intent."""
        ran = Counter((self.folder / "effects").read_text().split())
        assert set(ran.values()) <= {1}
        by_mark: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for call_id, records in records_of(self.folder).items():
            kinds = [kind for kind, _ in records]
            assert kinds[0] == "proposed" and kinds.count("intended") <= 1
            ended = [kind for kind in kinds if kind in ("committed", "rejected", "interrupted")]
            assert len(ended) <= 1
            if "intended" in kinds and not ended:
                self.open.add(call_id)
            arguments: dict[str, str] = records[0][1]["arguments"]
            if "mark" in arguments:
                by_mark[arguments["mark"]] = records
        for mark in self.acknowledged:
            kind, body = by_mark[mark][-1]
            assert kind == "committed" and body["result"]["data"] == mark and ran[mark] == 1
        for mark in ran:
            assert "intended" in [kind for kind, _ in by_mark[mark]]

    async def settle(self) -> None:
        """Open it here: started calls are interrupted once, others shown as not run, and the chain verifies."""
        effects = (self.folder / "effects").read_text()
        async with temporary_kernel(self.folder) as kernel:
            self._told([lost.call_id for lost in kernel.interrupted_calls])
            assert verify_log(kernel.log.reader).ok
            rows = {row.call_id: row for row in kernel.log.reader.calls(limit=10**6)}
            for call_id, records in records_of(self.folder).items():
                kinds = [kind for kind, _ in records]
                row = rows[call_id]
                if "intended" not in kinds:
                    assert row.state in ("not-run", "rejected", "suspended") and row.started_ns is None, (row, kinds)
                elif kinds[-1] == "interrupted":
                    assert row.state == "interrupted" and kinds.count("interrupted") == 1
                else:
                    assert row.state in ("output", "rejected"), (row, kinds)
            found = {call_id for call_id, row in rows.items() if row.state == "interrupted"}
            assert found == set(self.interrupted) and set(self.interrupted.values()) <= {1}
        async with temporary_kernel(self.folder) as kernel:
            assert kernel.interrupted_calls == ()
        assert (self.folder / "effects").read_text() == effects

    def shown(self, *options: str) -> list[dict[str, Any]]:
        """Return the output of ``handrail log``."""
        where = ["--workspace", str(self.folder / "ws"), "--state", str(self.folder / "state")]
        argv = [*prefork.handrail(), "log", "--json", "--limit", "1000000", *options, *where]
        shown = subprocess.run(argv, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in shown.stdout.splitlines()]
