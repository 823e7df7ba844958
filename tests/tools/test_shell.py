"""bash in the real sandbox."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.tools.desk import BuiltinToolFixture

from handrail.tools import BUILTINS


@pytest.mark.proves("K-07")
async def test_a_nonzero_exit_code_is_returned_as_an_output(confined: BuiltinToolFixture) -> None:
    answer = await confined.call("bash", command="echo out; echo err >&2; exit 3")
    assert answer == {"exit_code": 3, "output": "out\nerr\n"}


async def test_a_command_runs_in_the_workspace(confined: BuiltinToolFixture) -> None:
    confined.put("a.txt", "x\n")
    answer = await confined.call("bash", command="cat a.txt > b.txt && pwd")
    assert answer == {"exit_code": 0, "output": f"{confined.workspace}\n"}
    assert (confined.workspace / "b.txt").read_text() == "x\n"


async def test_each_call_runs_in_a_new_shell(confined: BuiltinToolFixture) -> None:
    await confined.call("bash", command="export KEPT=1; cd /tmp")
    answer = await confined.call("bash", command='echo "[$KEPT]" "$PWD"')
    assert answer["output"] == f"[] {confined.workspace}\n"


async def test_a_command_ended_by_a_signal_reports_the_signal(confined: BuiltinToolFixture) -> None:
    answer = await confined.call("bash", command="kill -TERM $$")
    assert answer["exit_code"] == 128 + 15 or answer["signal"] == 15


async def test_invalid_utf8_bytes_in_the_output_become_replacement_characters(confined: BuiltinToolFixture) -> None:
    assert (await confined.call("bash", command=r"printf 'a\377b'"))["output"] == "a\ufffdb"


@pytest.mark.proves("X-08")
async def test_a_cancelled_command_keeps_its_output_as_a_partial_result(confined: BuiltinToolFixture) -> None:
    tool = next(tool for tool in BUILTINS if tool.spec.id == "bash")
    runtime = confined.runtime(tool)
    told = confined.workspace / "told"
    os.mkfifo(told)
    work = asyncio.ensure_future(tool.execute({"command": "echo begun; echo > told; tail -f /dev/null"}, runtime))
    await asyncio.to_thread(told.read_text)  # comes back once the command has come so far
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert runtime.partial_result == {"output": "begun\n"}
