"""Tools that change while the kernel is open: atomically, recorded, and never within a turn."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors
from tests.kernel.test_configured import put_tool

from handrail import LoadError, Runtime, Tool, ToolSpec, tool
from handrail.contract.tool_generation import GenerationDiff
from handrail.registry.sources.persistent_tools import fingerprint_program_files
from handrail.testing.scripted_kernel import temporary_kernel

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
    """A tool with state between calls."""

    spec = ToolSpec(id="count", description="Counts.", side_effect="read", locks=())

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        assert not self.ended.is_set()
        return "counted"

    async def aclose(self) -> None:
        self.ended.set()


async def test_a_reload_applies_to_the_next_turn_and_the_log_names_each_changed_tool(
    tmp_path: Path,
    kernel_in: Opens,
) -> None:
    folder = tmp_path / "config" / "tools"
    put_tool(folder, "old")
    async with kernel_in(tmp_path, tools=[send], rules=["allow *"]) as kernel:
        session = await kernel.session()
        begun = session.start_turn()
        (folder / "old.json").unlink()
        put_tool(folder, "new")
        number = kernel.generation.number
        told = await kernel.reload_tools(tools=[send_with_subject])
        assert told == GenerationDiff(added=("new",), removed=("old",), changed=("mail.send",))
        assert kernel.generation.number == number + 1

        old, new = begun, session.start_turn()
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
async def test_a_new_tool_gets_its_required_capabilities_after_a_reload(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=[send], rules=["allow mail.*"]) as kernel:
        session = await kernel.session()
        await kernel.reload_tools(tools=[send, twice])  # the first tool that makes calls
        answer = await session.call("mail.twice", {"to": "ann"})
        assert answer.data == ["ann", "ann"], answer.error_text


async def test_a_reload_with_faults_keeps_the_current_generation(tmp_path: Path, kernel_in: Opens) -> None:
    folder = tmp_path / "config" / "tools"
    async with kernel_in(tmp_path, tools=[send], rules=["allow *"]) as kernel:
        session = await kernel.session()
        before = kernel.generation
        put_tool(folder, "read")
        put_tool(folder, "bad", locks=["file"])
        with pytest.raises(LoadError) as raised:
            await kernel.reload_tools()
        assert len(raised.value.diagnostics) == 2
        assert kernel.generation is before
        assert (await session.call("mail.send", {"to": "ann"})).ok


async def test_a_removed_tool_is_closed_after_its_last_turn_and_others_with_the_kernel(tmp_path: Path) -> None:
    gone, kept = Counter(), Counter()
    async with temporary_kernel(tmp_path, tools=[gone], rules=["allow *"]) as kernel:
        session = await kernel.session()
        turn = session.start_turn()
        await kernel.reload_tools(tools=[kept])
        (answer,) = await turn.call_all([("count", {})])
        assert answer.result.data == "counted" and not gone.ended.is_set()
        del turn
        await gone.ended.wait()
        assert (await session.call("count", {})).data == "counted"
    assert kept.ended.is_set()


PROGRAM = """#!/usr/bin/env python3
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import words
for number, line in enumerate(sys.stdin, 1):
    print(json.dumps({"id": json.loads(line)["id"], "result": [words.SAID, number]}), flush=True)
"""


async def test_a_persistent_tool_keeps_its_process_across_a_reload_unless_it_changed(
    tmp_path: Path, kernel_in: Opens
) -> None:
    folder = tmp_path / "config" / "tools"

    def put(program: str = PROGRAM, said: str = "one", **more: object) -> None:
        put_tool(folder, "stays", persistent=True, **more)
        (folder / "stays").write_text(program)
        (folder / "words.py").write_text(f"SAID = '{said}'\n")

    put()
    async with kernel_in(tmp_path, rules=["allow *"]) as kernel:
        session = await kernel.session()
        assert (await session.call("stays", {})).data == ["one", 1]
        put_tool(folder, "another")  # of the same folder, and nothing to it
        put()
        assert (await kernel.reload_tools()).added == ("another",)
        assert (await session.call("stays", {})).data == ["one", 2]

        put(said="two")  # what it imports
        assert (await session.call("stays", {})).data == ["one", 3], "until it is looked through"
        await kernel.reload_tools()
        assert (await session.call("stays", {})).data == ["two", 1]
        put(PROGRAM + "# changed\n", "two")
        await kernel.reload_tools()
        assert (await session.call("stays", {})).data == ["two", 1]
        put(PROGRAM + "# changed\n", "two", timeout_ms=30_000)  # what it says of itself
        assert (await kernel.reload_tools()).changed == ("stays",)
        assert (await session.call("stays", {})).data == ["two", 1]

        for file in ("stays.json", "stays"):
            (folder / file).unlink()
        assert (await kernel.reload_tools()).removed == ("stays",)
        put(PROGRAM + "# changed\n", "two", timeout_ms=30_000)  # as it was; its process has ended
        await kernel.reload_tools()
        assert (await session.call("stays", {})).data == ["two", 1]


def test_a_program_fingerprint_covers_all_files_in_its_folder(tmp_path: Path) -> None:
    program, within = tmp_path / "run", tmp_path / "lib" / "deep" / "data.json"
    within.parent.mkdir(parents=True)
    program.write_text("x")
    within.write_text("{}")
    first = fingerprint_program_files(program, tmp_path, own=True)
    assert first is not None and first == fingerprint_program_files(program, tmp_path, own=True)
    within.write_text("[]")
    second = fingerprint_program_files(program, tmp_path, own=True)
    (tmp_path / "to").symlink_to("lib")
    assert len({first, second, fingerprint_program_files(program, tmp_path, own=True)}) == 3
    os.mkfifo(tmp_path / "lib" / "pipe")
    assert fingerprint_program_files(program, tmp_path, own=True) is None, "what cannot be told is never the same"
