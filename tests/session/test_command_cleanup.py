"""Commands whose processes resist termination: none survives the call."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from handrail import ApprovalAnswer, Event, Kernel
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[Kernel]:
    async with temporary_kernel(tmp_path, rules=["allow bash", "allow fs.*"]) as opened:
        yield opened


def processes() -> dict[int, str]:
    """Every process there is, by number, with its command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


@pytest.mark.proves("S-05", "X-08")
@pytest.mark.parametrize(
    "script",
    [
        "sleep {s} &",
        "(setsid sleep {s} >/dev/null 2>&1 &) ; echo done",
        'python3 -c "import os,time\nif os.fork()==0:\n  os.setsid()\n  if os.fork()==0:\n    time.sleep({s})"',
        "trap '' TERM HUP INT; (trap '' TERM; sleep {s}) & echo done",
        "nohup sleep {s} & disown; echo done",
    ],
)
async def test_no_process_started_by_a_command_survives_its_call(kernel: Kernel, script: str) -> None:
    session = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("once")]))
    mark = f"99{os.getpid():07d}"
    async with asyncio.timeout(300):
        result = await session.call("bash", {"command": script.replace("{s}", mark)})
    assert result.ok and result.data["exit_code"] == 0, result
    assert [line for line in processes().values() if mark in line and "pytest" not in line] == []


@pytest.mark.proves("S-05", "X-08")
async def test_a_stop_ends_every_process_of_a_command(kernel: Kernel) -> None:
    session = await kernel.session(approval_handler=ScriptedApprovalHandler([ApprovalAnswer("once")]))
    mark = f"98{os.getpid():07d}"
    events: list[Event] = []
    session.watch_events(events.append)
    script = f"for i in 1 2 3; do (setsid sleep {mark} &); done; touch begun; sleep {mark}"
    call = asyncio.create_task(session.call("bash", {"command": script}))
    begun = Path(session.workdir, "begun")
    async with asyncio.timeout(300):
        while not begun.exists():
            assert not call.done(), call.result()
            await asyncio.sleep(0)
    session.cancel_running_calls()
    result = await call
    assert result.error_kind == "cancelled" and result.metadata["stopped_by"] == "user"
    assert [line for line in processes().values() if mark in line] == []
