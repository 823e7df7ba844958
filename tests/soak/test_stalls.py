"""Every argument of every shipped tool with every hostile value: nothing blocks the event loop.

The bound is on processor time, of one callback of the loop or one native step in another thread, and above what any call
takes. What took more than :data:`REPORTED_MS` is printed, as data.
"""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from tests.soak.hostile import VALUES, texts
from tests.soak.stalls import StallWatch, watch_threads

from handrail import ApprovalAnswer, ApprovalRequest, Result, tool
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.session_protocols import Session
from handrail.contract.tool.tool_protocol import Tool
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.slow

REPORTED_MS = 50
BOUND_MS = 100
_SECRETS = {"KEY": "s3cr3t-Value-0123456789abcdef"}
_EDITING = frozenset({"write", "edit", "multi_edit", "file.patch", "json_write"})
Place = tuple[str | int, ...]
Schema = Mapping[str, Any]


@pytest.fixture
def threads_watched() -> Iterator[None]:
    """The native steps of threads are measured, too, which makes their Python several times as slow."""
    watch_threads()
    yield
    threading.setprofile(None)


class AgreeingUser:
    """A user who approves every call and answers every question with nothing."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("once")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        return [[""] for _ in questions]


def ordinary(schema: Schema, path: str) -> Any:
    """A small value that fits."""
    if schema.get("format") == "path":
        return path
    for keyword in ("default", "enum"):
        if keyword in schema:
            return schema[keyword] if keyword == "default" else schema[keyword][0]
    match schema.get("type"):
        case "string":
            return "abc"
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
        case "array":
            return [ordinary(schema["items"], path)] * max(1, schema.get("minItems", 1))
        case "object":
            return {name: ordinary(schema["properties"][name], path) for name in schema.get("required", ())}
        case _:
            return 1


def places(schema: Schema, before: Place = ()) -> Iterator[tuple[Place, Schema]]:
    """Every argument, and every part of one that its schema names."""
    for name, part in cast("Mapping[str, Schema]", schema.get("properties", {})).items():
        yield (*before, name), part
        if part.get("type") == "object":
            yield from places(part, (*before, name))
        elif part.get("type") == "array":
            yield (*before, name, 0), part["items"]
            yield from places(part["items"], (*before, name, 0))


def placed(arguments: Mapping[str, Any], schema: Schema, place: Place, value: object, path: str) -> dict[str, Any]:
    """``arguments`` with ``value`` there, and ordinary values on the way to it."""
    whole = copy.deepcopy(dict(arguments))
    at: Any = whole
    for step, following in pairwise(place):
        schema = cast("Schema", schema["items"] if isinstance(step, int) else schema["properties"][step])
        if isinstance(step, str) and step not in at:
            at[step] = [ordinary(schema["items"], path)] if following == 0 else ordinary(schema, path)
        at = at[step]
    at[place[-1]] = value
    return whole


def fits_roughly(value: object, schema: Schema) -> bool:
    """Whether more is tried of ``value`` than that it is of the wrong type, which a few kinds show."""
    kind = schema.get("type")
    return kind is None or (kind == "string") == isinstance(value, str)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("size", [500_000, 1_000_000, 60_000, 8_000])
async def test_no_argument_of_any_tool_blocks_the_event_loop(tmp_path: Path, size: int) -> None:
    kinds: dict[str, Any] = {**texts(size), **VALUES}
    workspace = tmp_path / "ws"
    workspace.mkdir()
    subprocess.run(["git", "init", "-q", str(workspace)], check=True)
    for kind, text in texts(size).items():
        (workspace / f"{kind}.txt").write_text(text)
    (workspace / "small.txt").write_text("abc\nabc\n")
    held: list[str] = []
    async with temporary_kernel(tmp_path, secrets=_SECRETS) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser())
        for tool_id, entry in kernel.generation.entries.items():
            schema = entry.spec.parameters
            tried: list[tuple[Place, Schema]] = [*places(schema), (("unknown",), {"type": "object"})]
            for place, part in tried:
                for kind, value in kinds.items():
                    if not fits_roughly(value, part) and kind not in ("letters", "many-items", "number", "entities"):
                        continue
                    path = f"{kind}.txt" if isinstance(value, str) and place[-1] != "path" else "small.txt"
                    required = {name: ordinary(schema["properties"][name], path) for name in schema.get("required", ())}
                    arguments = placed(required, schema, place, value, path)
                    if tool_id in _EDITING and place != ("path",):
                        await session.call("read", {"path": path, "limit": 1})
                    async with StallWatch() as watch:
                        await asyncio.wait_for(session.call(tool_id, arguments), 120)
                    if watch.longest_ms > REPORTED_MS:
                        held.append(f"{watch.longest_ms:.0f} ms: {tool_id} {place} {kind}\n{watch.stack}")
                        print(held[-1])
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("threads_watched")
async def test_no_output_of_a_tool_blocks_the_event_loop(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {**texts(8_000_000), **VALUES}
    given: list[Any] = []

    @tool(id="test.out", side_effect="external")
    async def out() -> object:
        """Give something."""
        return given[0]

    @tool(id="test.fail", side_effect="read")
    async def fail() -> object:
        """Fail with something."""
        raise ValueError(given[0])

    held: list[str] = []
    async with temporary_kernel(tmp_path, tools=[out, fail], rules=["allow test.*"], secrets=_SECRETS) as kernel:
        session = await kernel.session()
        for kind, value in kinds.items():
            for name, shape in (("test.out", value), ("test.out", {"a": value, "b": 1}), ("test.fail", value)):
                given[:] = [shape]
                async with StallWatch() as watch:
                    await session.call(name, {})
                if watch.longest_ms > REPORTED_MS:
                    held.append(f"{watch.longest_ms:.0f} ms: {name} {kind}\n{watch.stack}")
                    print(held[-1])
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)


async def held_by(session: Session, tool_id: str, arguments: Mapping[str, Any], held: list[str]) -> Result:
    """The result of a call, and a line in ``held`` if it held the loop."""
    async with StallWatch() as watch:
        result = await asyncio.wait_for(session.call(tool_id, arguments), 300)
    print(f"{watch.longest_ms:4.0f} ms: {tool_id} {str(arguments)[:60]}")
    if watch.longest_ms > REPORTED_MS:
        held.append(f"{watch.longest_ms:.0f} ms: {tool_id} {str(arguments)[:60]}\n{watch.stack}")
        print(held[-1])
    return result


@pytest.mark.timeout(1800)
async def test_no_list_of_many_files_blocks_the_event_loop(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    folders = [workspace / f"folder{number:03}" for number in range(100)]
    for folder in folders:
        folder.mkdir(parents=True)
        for number in range(200):
            (folder / f"file{number:03}.txt").write_text("word\n" * 5)
    git = ("git", "-C", str(workspace), "-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run([*git, "init", "-q"], check=True)
    blob = subprocess.run(
        [*git, "hash-object", "-w", "--stdin"], input=b"x\n", capture_output=True, check=True
    ).stdout.strip()
    entries = b"".join(b"100644 %s\tindexed/%05d.txt\n" % (blob, number) for number in range(100_000))
    subprocess.run([*git, "update-index", "--index-info"], input=entries, check=True)
    subprocess.run([*git, "config", "user.name", "n"], check=True)
    subprocess.run([*git, "config", "user.email", "e@example.org"], check=True)
    held: list[str] = []
    async with temporary_kernel(tmp_path, secrets=_SECRETS) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser())
        for tool_id, arguments in (
            ("git.status", {}),
            ("git.diff", {"staged": True, "counts_only": True}),
            ("git.commit", {"message": "All of it"}),
            ("git.status", {}),
            ("git.diff", {"counts_only": True}),
            ("git.add", {"all": True}),
            ("git.show", {"counts_only": True}),
            ("grep", {"pattern": "word"}),
            ("grep", {"pattern": "nothing like it", "glob": "*.txt"}),
            ("glob", {"pattern": "**"}),
            ("glob", {"pattern": "**/nothing"}),
            ("tree", {}),
        ):
            result = await held_by(session, tool_id, arguments, held)
            assert result.ok, result.error_text
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)


@pytest.mark.timeout(1800)
async def test_no_program_blocks_the_event_loop_with_its_output_or_files(tmp_path: Path) -> None:
    held: list[str] = []
    async with temporary_kernel(tmp_path, secrets=_SECRETS) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser())
        for command in (
            "head -c 70000000 /dev/urandom",
            "yes '' | head -c 100000000",
            "mkdir made; cd made; seq 30000 | xargs touch",
            "rm -r made",
        ):
            assert (await held_by(session, "bash", {"command": command}, held)).ok
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind", ["letters", "line-ends", "returns", "short-lines", "other-lines", "combining", "random", "json", "wide"]
)
@pytest.mark.usefixtures("threads_watched")
async def test_no_edit_of_a_large_file_blocks_the_event_loop(tmp_path: Path, kind: str) -> None:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    size = 500_000 if kind in ("line-ends", "returns") else 2_000_000
    whole = f"first\n{texts(size)[kind]}\nlast\n"
    held: list[str] = []
    async with temporary_kernel(tmp_path, secrets=_SECRETS) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser())
        for tool_id, arguments in (
            ("edit", {"old": "last", "new": "end"}),
            ("edit", {"old": whole[10:12], "new": "x", "replace_all": True}),
            ("edit", {"old": "is not there", "new": "x"}),
            ("multi_edit", {"edits": [{"old": "first\n", "new": "1\n"}, {"old": "last\n", "new": "2\n"}]}),
            (
                "file.patch",
                {"operations": [{"op": "insert", "line": 1, "content": "x"}, {"op": "append", "content": "y"}]},
            ),
            ("write", {"content": "short"}),
            ("json_read", {}),
            ("json_write", {"value": 1}),
        ):
            (workspace / "a.txt").write_text(whole, newline="")
            await held_by(session, "read", {"path": "a.txt", "limit": 3}, held)
            await held_by(session, tool_id, {"path": "a.txt", **arguments}, held)
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)


@pytest.mark.timeout(1800)
async def test_opening_a_kernel_with_many_tools_and_rules_does_not_block_the_event_loop(tmp_path: Path) -> None:
    def made(number: int) -> Tool:
        @tool(id=f"many.tool{number}", side_effect="read", locks=[])
        async def one(a: str) -> str:
            """Do one of many things with files and mails."""
            return a

        return one

    folder = tmp_path / "config" / "tools"
    folder.mkdir(parents=True)
    (folder / "run").write_text("#!/bin/sh\n")
    for place in (folder.parent, folder, folder / "run"):
        place.chmod(0o755)
    for number in range(1_000):
        llm = {"name": f"listed{number}", "description": "Does something.", "parameters": {"type": "object"}}
        manifest = folder / f"listed{number}.json"
        manifest.write_text(json.dumps({"llm": llm, "runtime": {"exec_path": "run", "side_effect": "read"}}))
        manifest.chmod(0o644)
    rules = "".join(f'  "allow bash git log {number} *",\n' for number in range(1_900))
    tools = [made(number) for number in range(10_000)]
    held: list[str] = []

    async def watched(what: str, work: Awaitable[Any]) -> Any:
        async with StallWatch() as watch:
            done = await work
        print(f"{watch.longest_ms:4.0f} ms: {what}")
        if watch.longest_ms > REPORTED_MS:
            held.append(f"{watch.longest_ms:.0f} ms: {what}\n{watch.stack}")
        return done

    opened = temporary_kernel(tmp_path, tools=tools, settings=f"rules = [\n{rules}]\n")
    kernel = await watched("open", opened.__aenter__())
    try:
        session = await watched("session", kernel.session())
        await watched("a call of bash", session.call("bash", {"command": "git log 5 x"}))
        await watched("find_tools", session.call("find_tools", {"query": "mail " * 90_000}))
        await watched("kernel.find", kernel.find("file mail " * 100))
        await watched("tool_statuses", kernel.tool_statuses())
        await watched("reload", kernel.reload(tools[:9_000]))
    finally:
        await watched("close", opened.__aexit__(None, None, None))
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)
