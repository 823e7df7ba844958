"""Pending approvals survive kill -9 of the requesting process and of the lease holder."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.session.crashing import die_by_itself

from handrail import tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.testing.scripted_kernel import temporary_kernel

CHILD = """
import asyncio, os, sys
from pathlib import Path
from handrail import open_kernel, tool

folder, how = Path(sys.argv[1]), sys.argv[2]

@tool(id="bank.pay", side_effect="external")
async def pay(source: str) -> str:
    "Pay."
    with open(folder / "paid", "a") as file:
        file.write(source + "\\n")
    if how == "hang":
        DIE
    return source

class Elsewhere:
    async def approve(self, request):
        print("ASKED", request.id, request.call_id, request.session_id, flush=True)
        if how == "plain":
            DIE
        await asyncio.Event().wait()

    async def answer_questions(self, session_id, questions):
        return None

async def main():
    for name in ("ws", "config"):
        (folder / name).mkdir(exist_ok=True)
    config = folder / "config" / "handrail.toml"
    config.touch()
    async with open_kernel(folder / "ws", tools=[pay], state=folder / "state", config=config) as kernel:
        session = await kernel.session(approval_handler=Elsewhere())
        call = asyncio.create_task(session.call("bank.pay", {"source": "a"}))
        if how == "hang":
            while not kernel.approvals.list_pending():
                await asyncio.sleep(0.01)
            from handrail import ApprovalAnswer
            await kernel.approvals.decide(kernel.approvals.list_pending()[0].id, ApprovalAnswer("once"), by="child")
        print("ENDED", (await call).to_dict(), flush=True)

asyncio.run(main())
"""


@tool(id="bank.pay", side_effect="external")
async def pay(source: str) -> str:
    """Pay."""
    return source


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    script = CHILD.replace("DIE", "pass")
    return subprocess.Popen([sys.executable, "-c", script, str(folder), how], stdout=subprocess.PIPE, text=True)


def read_output_line(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(word), line
    return line.split()[1:]


@pytest.mark.proves("P-09", "X-13")
async def test_a_call_awaiting_approval_survives_a_kill_and_runs_once_after_the_answer(tmp_path: Path) -> None:
    approval, call, session_id = die_by_itself(tmp_path, CHILD, "plain").split()[1:]
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        assert [row.id for row in kernel.approvals.list_pending()] == [approval] and not kernel.interrupted_calls
        await kernel.approvals.decide(approval, ApprovalAnswer("once"), by="defer")
        assert [row.state for row in kernel.log.reader.calls()] == ["suspended"]
    assert not (tmp_path / "paid").exists()
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        session = await kernel.session(session_id)
        answer = await session.recover_result(call)
        # Another definition of the tool than the child's would be a conflict; this one is the same, word by word.
        assert answer.result.data == "a", answer.result
        assert (await session.recover_result(call)).result.data == "a"
        kinds = [record.kind for record in kernel.log.reader.records(call=call)]
        assert kinds.count("intended") == 1 and kinds.count("committed") == 1 and kinds.count("resumed") == 1


@pytest.mark.proves("P-09")
async def test_an_approved_call_that_was_running_when_killed_never_runs_again(tmp_path: Path) -> None:
    _, call, session_id = die_by_itself(tmp_path, CHILD, "hang").split()[1:]
    assert (tmp_path / "paid").read_text() == "a\n"
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        assert [lost.call_id for lost in kernel.interrupted_calls] == [call]
        session = await kernel.session(session_id)
        assert await session.resume_suspended_calls() == [] and kernel.approvals.list_pending() == []
        assert (await session.recover_result(call)).result.error_kind == "interrupted"
    assert (tmp_path / "paid").read_text() == "a\n"


@pytest.mark.proves("P-09", "L-07")
@pytest.mark.skipif(sys.platform != "linux", reason="joining needs Linux")
async def test_an_approval_request_of_a_killed_connected_process_stays_pending_at_the_lease_holder(
    tmp_path: Path,
) -> None:
    async with temporary_kernel(tmp_path, tools=[pay]) as kernel:
        loop = asyncio.get_running_loop()
        with start(tmp_path, "joined") as child:
            approval, call, _ = await loop.run_in_executor(None, read_output_line, child, "ASKED")
            assert kernel.approvals.get(approval).is_pending
            child.send_signal(signal.SIGKILL)
        assert kernel.approvals.get(approval).is_pending
        await kernel.approvals.decide(approval, ApprovalAnswer("once"), by="holder")
        await kernel.log.flush()
        assert not list(kernel.log.reader.records(call=call, kind="intended"))
        assert not (tmp_path / "paid").exists()
