"""Records of whole calls: durable before an effect, correct after a crash, and only for real calls."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail import Session, tool
from handrail.record.commit_log import read_unwritten_records
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.testing.scripted_kernel import temporary_kernel

PATIENCE_S = 300

PRELUDE = """
import asyncio, json, resource, sys
from pathlib import Path
from handrail import tool
from handrail.testing.scripted_kernel import temporary_kernel

effects = Path(sys.argv[1], "effects")

@tool(id="mail.send", side_effect="external", locks=["outbox:X"])
async def send(to: str) -> str:
    '''Send a mail.'''
    with effects.open("a") as file:
        file.write(to + "\\n")
    if to == "never":
        print("in the middle", flush=True)
        await asyncio.Event().wait()
    return to

@tool(id="mail.count", side_effect="read", locks=[])
async def count() -> int:
    '''Count what was sent.'''
    with effects.open("a") as file:
        file.write("counted\\n")
    return 1

def kernel():
    return temporary_kernel(Path(sys.argv[1]), tools=[send, count], rules=["allow mail.*"])
"""

KILLED = """
async def main():
    async with kernel() as opened:
        session = await opened.session("ses_known")
        await session.call("mail.send", {"to": "done"}, key="k1")
        await session.call("mail.send", {"to": "never"}, key="k2")

asyncio.run(main())
"""

KILLS_ITSELF = """
import os, signal

@tool(id="mail.burn", side_effect="external", locks=["outbox:X"])
async def burn(last: bool) -> str:
    '''Send what sends no answer.'''
    with effects.open("a") as file:
        file.write("burnt\\n")
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return "sent"

async def main():
    before = int(sys.argv[2])
    async with temporary_kernel(Path(sys.argv[1]), tools=[burn], rules=["allow mail.*"]) as opened:
        session = await opened.session("ses_known")
        for number in range(before):
            await session.call("mail.burn", {"last": False}, key=f"k{number}")
        await session.call("mail.burn", {"last": True}, key=f"k{before}")

asyncio.run(main())
"""

FULL = """
def bound(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

async def main():
    said = []
    async with kernel() as opened:
        session = await opened.session()
        async def say(step, calls):
            for result in await session.call_all(calls):
                said.append((step, result.type, result.error_kind, result.error_text))
        send, count = ("mail.send", {"to": "x"}), ("mail.count", {})
        await say("room", [send])
        effects.write_text("")
        bound(1000)
        # The first may be refused only after it was tried, which tells the log that there is no room.
        await say("full", [send, send])
        await say("full", [count, send, ("read", {"path": "a.txt"})])
        ran = effects.read_text()
        bound(resource.RLIM_INFINITY)
        await opened.log.flush()
        await say("again", [send, count])
    print(json.dumps({"said": said, "ran while full": ran}))

asyncio.run(main())
"""


def process(folder: Path, script: str, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PRELUDE + script, str(folder), *arguments]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


@pytest.mark.proves("G-01")
async def test_an_intent_is_durable_during_its_call_and_the_outcome_before_the_next_call(tmp_path: Path) -> None:
    @tool(id="look", side_effect="external", locks=["one:X"])
    async def look() -> list[list[str]]:
        """Look at the log as another process would, and at what is noted for it."""
        database = next((tmp_path / "state").rglob("handrail.db"))
        with LogReader.open_database(database) as reader:
            before = read_unwritten_records(reader.connection, database.parent)
            found = [(entry.call_id, entry.kind) for entry in reader.records()]
        found += [(record.call_id, record.kind) for record in before]
        return [[call.rpartition("/")[2], kind] for call, kind in dict.fromkeys(found) if call]

    # A read writes nothing before it runs, so what it finds on the disk is what its predecessor left there.
    peek = tool(id="peek", side_effect="read", locks=["one:S"])(look.function)

    async with temporary_kernel(tmp_path, tools=[look, peek], rules=["allow look", "allow peek"]) as kernel:
        session = await kernel.session()
        for turn in (1, 2, 3):
            first, second = await session.call_all([("look", {}), ("peek", {})])
            assert first.ok and second.ok
            kinds = [kind for call, kind in first.data if call == f"{turn}.0"]
            assert kinds == ["proposed", "authorised", "intended"]
            assert [kind for call, kind in second.data if call == f"{turn}.0"][-1] == "committed"


@pytest.mark.proves("G-01", "G-05")
@pytest.mark.parametrize("before", [0, 1, 2, 5])
async def test_the_log_has_the_call_of_a_process_killed_as_its_tool_began(tmp_path: Path, before: int) -> None:
    with process(tmp_path, KILLS_ITSELF, str(before)) as killed:
        assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    async with temporary_kernel(tmp_path) as kernel:
        assert [lost.call_id for lost in kernel.interrupted_calls] == [f"ses_known/key:k{before}"]
        rows = list(kernel.log.reader.calls())
        assert [row.state for row in rows] == ["output"] * before + ["interrupted"]
        (proposal,) = kernel.log.reader.records(call=f"ses_known/key:k{before}", kind="proposed")
        assert (proposal.body or {})["arguments"] == {"last": True}
        assert verify_log(kernel.log.reader).ok
    assert (tmp_path / "effects").read_text() == "burnt\n" * (before + 1)


@pytest.mark.proves("G-05", "L-10")
async def test_a_call_killed_midway_is_interrupted_at_the_next_start_and_never_run_again(tmp_path: Path) -> None:
    with process(tmp_path, KILLED) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "in the middle\n"
        killed.kill()
    ran: list[str] = []

    @tool(id="mail.send", side_effect="external", locks=["outbox:X"])
    async def send(to: str) -> str:
        """Send a mail."""
        ran.append(to)
        return to

    async with temporary_kernel(tmp_path, tools=[send], rules=["allow mail.*"]) as kernel:
        assert [(lost.call_id, lost.tool) for lost in kernel.interrupted_calls] == [("ses_known/key:k2", "mail.send")]
        session = await kernel.session("ses_known")
        done = await session.call("mail.send", {"to": "done"}, key="k1")
        assert done.ok and done.data == "done" and done.metadata["replayed"] is True
        lost = await session.call("mail.send", {"to": "never"}, key="k2")
        assert lost.error_kind == "interrupted"
        assert lost.error_text is not None and "not run again" in lost.error_text
        states = {row.call_id.rpartition(":")[2]: row.state for row in kernel.log.reader.calls()}
        assert states == {"k1": "output", "k2": "interrupted"}
        assert verify_log(kernel.log.reader).ok
    assert ran == [] and (tmp_path / "effects").read_text() == "done\nnever\n"


@pytest.mark.proves("G-10")
def test_a_full_disk_makes_every_call_unavailable_until_space_is_free(tmp_path: Path) -> None:
    with process(tmp_path, FULL) as full:
        assert full.stdout is not None
        output = json.loads(full.stdout.read())
    said: list[tuple[str, str, str | None, str | None]] = [tuple(row) for row in output["said"]]
    while_full = [row for row in said if row[0] == "full"]
    assert len(while_full) == 5 and {row[2] for row in while_full} == {"unavailable"}
    assert all(text is not None and "log" in text for *_, text in while_full)
    assert output["ran while full"] == ""
    assert [row[1] for row in said if row[0] != "full"] == ["output", "output", "output"]


@pytest.mark.proves("G-09a")
async def test_only_the_owner_can_access_the_files_of_the_state_folder(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert (await session.call("glob", {"pattern": "*"})).ok
        kept = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
        assert Path(kernel.state_folder) in kept
        assert [(path, oct(path.stat().st_mode)) for path in kept if path.stat().st_mode & 0o077] == []


@pytest.mark.proves("R-06")
async def test_the_log_records_each_generation_with_its_tools_and_each_calls_generation(tmp_path: Path) -> None:
    @tool(id="mail.send", side_effect="external", locks=["outbox:X"])
    async def send(to: str) -> str:
        """Send a mail."""
        return to

    async with temporary_kernel(tmp_path, tools=[send], rules=["allow mail.*"]) as kernel:
        session: Session = await kernel.session()
        assert (await session.call("mail.send", {"to": "ann"})).ok
        (named,) = kernel.log.reader.records(kind="generation")
        (proposed,) = kernel.log.reader.records(kind="proposed")
    body: dict[str, Any] = dict(named.body or {})
    assert body["number"] == 1 == (proposed.body or {})["generation"]
    definition = body["tools"]["mail.send"]["definition"]
    assert definition == kernel.generation.entries["mail.send"].definition_hash
    assert (proposed.body or {})["generation"] == body["number"]


@pytest.mark.proves("P-13")
async def test_explain_and_reload_leave_no_record(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        assert (await kernel.explain_call("read", {"path": "a.txt"})).action == "allow"
        await kernel.reload_tools()
        await kernel.log.flush()
        assert list(kernel.log.reader.records()) == []
        session = await kernel.session()
        await session.call("glob", {"pattern": "*"})
        await kernel.log.flush()
        (named,) = kernel.log.reader.records(kind="generation")
        assert (named.body or {})["number"] == 2, "the one that the session works with"
