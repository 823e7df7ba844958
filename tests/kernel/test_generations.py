"""Tools that change while the kernel is open: in one step, on record, and never under a turn that has begun."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors
from tests.kernel.test_configured import put_tool

from handrail import LoadError, Runtime, Tool, ToolSpec, tool
from handrail.registry.generation import Difference
from handrail.testing.kernels import temporary_kernel

pytestmark = pytest.mark.proves("R-06")
kernel_in = by_both_doors()


@tool(id="mail.send", side_effect="external", locks=["outbox:X"])
async def send(to: str) -> str:
    """Send a mail."""
    return to


@tool(id="mail.send", side_effect="external", locks=["outbox:X"])
async def send_with_subject(to: str, subject: str) -> str:
    """Send a mail."""
    return f"{to}: {subject}"


class Counter(Tool):
    """A tool that holds something between calls."""

    spec = ToolSpec(id="count", description="Counts.", side_effect="read", locks=())

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        assert not self.ended.is_set()
        return "counted"

    async def aclose(self) -> None:
        self.ended.set()


async def test_what_was_added_changed_and_taken_away_holds_for_the_next_turn_and_the_log_names_it(
    tmp_path: Path,
    kernel_in: Opens,
) -> None:
    folder = tmp_path / "config" / "tools"
    put_tool(folder, "old")
    async with kernel_in(tmp_path, tools=[send], rules=["allow *"]) as kernel:
        session = await kernel.session()
        begun = session.turn()
        (folder / "old.json").unlink()
        put_tool(folder, "new")
        number = kernel.generation.number
        told = await kernel.reload(tools=[send_with_subject])
        assert told == Difference(added=("new",), removed=("old",), changed=("mail.send",))
        assert kernel.generation.number == number + 1

        old, new = begun, session.turn()
        calls: list[tuple[str, dict[str, Any]]] = [("old", {}), ("new", {}), ("mail.send", {"to": "ann"})]
        of_the_old = [answer.result for answer in await old.call_all(calls)]
        of_the_new = [answer.result for answer in await new.call_all(calls)]
        assert [result.error_kind for result in of_the_old] == [None, "unknown_tool", None]
        assert [result.error_kind for result in of_the_new] == ["unknown_tool", None, "invalid_input"]
        assert of_the_old[0].data == {"tool": "old"} and of_the_new[1].data == {"tool": "new"}

        await kernel.log.flush()
        first, second = [record.body or {} for record in kernel.log.reader.records(kind="generation")][-2:]
        assert (first["number"], second["number"]) == (number, number + 1)
        assert "old" in first["tools"] and (second["after"], set(second["tools"])) == (number, {"new", "mail.send"})
        assert second["difference"] == {"added": ["new"], "removed": ["old"], "changed": ["mail.send"]}
        proposals = [record.body or {} for record in kernel.log.reader.records(kind="proposed")]
        assert [proposal["generation"] for proposal in proposals] == [number] * 3 + [number + 1] * 3


@tool(id="mail.twice", side_effect="external", locks=["outbox:X"], requires={"capabilities": ["call"]})
async def twice(to: str, runtime: Runtime) -> list[object]:
    """Send a mail twice."""
    return [(await runtime.call("mail.send", {"to": to})).data for _ in range(2)]


@pytest.mark.proves("K-10")
async def test_what_a_new_tool_requires_it_has_with_no_other_change(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[send], rules=["allow mail.*"]) as kernel:
        session = await kernel.session()
        await kernel.reload(tools=[send, twice])  # the first tool that makes calls
        answer = await session.call("mail.twice", {"to": "ann"})
        assert answer.data == ["ann", "ann"], answer.error_text


async def test_faults_leave_everything_as_it_was(tmp_path: Path, kernel_in: Opens) -> None:
    folder = tmp_path / "config" / "tools"
    async with kernel_in(tmp_path, tools=[send], rules=["allow *"]) as kernel:
        session = await kernel.session()
        before = kernel.generation
        put_tool(folder, "read")
        put_tool(folder, "bad", locks=["file"])
        with pytest.raises(LoadError) as raised:
            await kernel.reload()
        assert len(raised.value.faults) == 2
        assert kernel.generation is before
        assert (await session.call("mail.send", {"to": "ann"})).ok


async def test_a_tool_that_is_gone_ends_once_no_turn_holds_it_and_the_rest_with_the_kernel(tmp_path: Path) -> None:
    gone, kept = Counter(), Counter()
    async with temporary_kernel(tmp_path, tools=[gone], rules=["allow *"]) as kernel:
        session = await kernel.session()
        turn = session.turn()
        await kernel.reload(tools=[kept])
        (answer,) = await turn.call_all([("count", {})])
        assert answer.result.data == "counted" and not gone.ended.is_set()
        del turn
        await gone.ended.wait()
        assert (await session.call("count", {})).data == "counted"
    assert kept.ended.is_set()


async def test_a_persistent_tool_is_replaced_and_its_old_process_ends(tmp_path: Path, kernel_in: Opens) -> None:
    folder = tmp_path / "config" / "tools"
    put_tool(folder, "stays", persistent=True)
    program = (
        "#!/usr/bin/env python3\n"
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({{'id': json.loads(line)['id'], 'result': '{answer}'}}), flush=True)\n"
    )
    (folder / "stays").write_text(program.format(answer="one"))
    async with kernel_in(tmp_path, rules=["allow *"]) as kernel:
        session = await kernel.session()
        assert (await session.call("stays", {})).data == "one"
        (folder / "stays").write_text(program.format(answer="two"))
        assert (await session.call("stays", {})).data == "one"
        await kernel.reload()
        assert (await session.call("stays", {})).data == "two"
