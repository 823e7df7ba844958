"""The runtime over the wire: every door works, judges as in the holder, and opens only to whoever runs the call."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.joining.workshop import Open, connected, workshop

from handrail import Runtime, ToolError, tool
from handrail.contract.runtime import ClientContext, Option, Question
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.joining.brought import BroughtTools
from handrail.joining.doors import DOORS, PREFIX
from handrail.joining.executing import describe
from handrail.joining.operations import Op, Operations, Refused
from handrail.testing.kernels import ScriptedPerson, temporary_kernel

EVERYTHING = {
    "fs": {"read": ["{workspace}"], "write": ["{workspace}"]},
    "shell": [{"cmd": "*"}],
    "capabilities": ["state", "call"],
}

Script = Callable[[Runtime], Awaitable[object]]


class Scripted(Tool):
    """A tool whose inside is written in the test; the same object runs in the holder and in the other process."""

    def __init__(self, script: Script, **spec: Any) -> None:
        options: dict[str, Any] = {"requires": EVERYTHING, "locks": (), "side_effect": "external", **spec}
        adapted = tool(id="t.script", description="Runs a script.", **options)(_nothing)
        self.spec: ToolSpec = adapted.spec
        self.script = script

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await self.script(runtime)


async def _nothing() -> None: ...


RULES = ["allow fs.read *", "allow fs.write *", "allow shell.run *", "deny fs.read secret/**", "deny shell.run rm *"]


def _files(folder: Path) -> Path:
    made = folder / "ws"
    made.mkdir(parents=True)
    (made / "a.txt").write_text("one\ntwo\nthree\n")
    (made / "b.bin").write_bytes(b"\x00\xff\xfe")
    (made / "secret").mkdir()
    (made / "secret" / "key").write_text("k")
    return made


async def caught(work: Awaitable[object]) -> object:
    """What it gives, or what it says."""
    try:
        return await work
    except ToolError as error:
        return ("ToolError", error.kind, error.text)


async def everything(on: Runtime) -> object:
    """Each door, with an answer and with a refusal."""
    seen: list[object] = [
        await caught(on.files.stat("b.bin")),
        await caught(on.files.stat("no.txt")),
        await caught(on.files.stat("../outside")),
        await caught(on.files.read_bytes("b.bin")),
        await caught(on.files.read_bytes("a.txt", start=-4, max_bytes=2)),
        await caught(on.files.read_bytes("secret/key")),
        await caught(on.files.read_lines("a.txt", first=2, count=1)),
        await caught(on.files.list(".")),
        await caught(on.files.write("a.txt", b"over", over=b"not this")),
        await caught(on.files.read_for_edit("a.txt")),
        await caught(on.files.write("a.txt", b"four\n")),
        await caught(on.files.write("new/c.txt", b"\x00", over="new")),
        await caught(on.files.write("new/c.txt", b"x", over="new")),
        await caught(on.files.write("new/c.txt", b"x", over=b"\x00")),
        await caught(on.files.read_for_edit("b.bin", max_bytes=1)),
        await caught(on.search.grep("four")),
        await caught(on.search.grep("FOUR", ".", glob="*.txt", ignore_case=True, literal=True, max_matches=1)),
        await caught(on.search.grep("(", ".")),
        await caught(on.search.glob("**/*.txt")),
        await caught(on.shell.run("cat a.txt; printf '\\377'; exit 3")),
        await caught(on.shell.run(["cat", "-"], stdin=b"\x00in")),
        await caught(on.shell.run("rm a.txt")),
        await caught(on.shell.run([])),
        await caught(on.shell.run("pwd", cwd="new")),
        await caught(on.shell.run("kill -9 $$")),
        await caught(on.state.get("k")),
        await caught(on.state.put("k", {"n": [1, None, 2**70, "\udc80"]})),
        await caught(on.state.get("k")),
        await caught(on.call("t.other", {"n": 2})),
        await caught(on.call("t.missing", {})),
        on.tool_id,
        on.call_id.partition("/")[2],
        on.agent,
        on.topic,
        on.client,
        dict(on.config),
        on.cancellation.requested,
        on.capabilities.has("call"),
        on.capabilities.has("ask"),
        len(on.capabilities.layers),
    ]
    try:
        on.secrets.get("token")
    except ToolError as error:
        seen.append((error.kind, error.text))
    try:
        await on.people.answer([])
    except ToolError as error:
        seen.append((error.kind, error.text))
    return repr(seen)


@tool(id="t.other", side_effect="read", locks=[])
async def other(n: int) -> dict[str, int]:
    """Another tool."""
    return {"n": n + 1}


@pytest.mark.proves("L-07b")
async def test_every_door_gives_and_refuses_as_it_does_in_the_holder(tmp_path: Path) -> None:
    seen: list[Any] = []
    for name in ("here", "there"):
        folder = tmp_path / name
        workspace = _files(folder)
        given = Scripted(everything)
        if name == "here":
            rules = ["allow t.script", "allow t.other", *RULES]
            async with temporary_kernel(folder, tools=[given, other], rules=rules) as kernel:
                result = await (await kernel.session(topic="a topic", client=ClientContext(place="Bonn"))).call(
                    "t.script", {}
                )
        else:
            async with workshop(folder, given, also=[other], rules=RULES) as shop:
                session = await shop.kernel.session(topic="a topic", client=ClientContext(place="Bonn"))
                result = await session.call("t.script", {})
        assert result.ok, result
        assert (workspace / "a.txt").read_bytes() == b"four\n"
        seen.append(_without_times(result.data.replace(str(folder), "FOLDER")))
    assert seen[1] == seen[0]


def _without_times(text: str) -> str:
    return re.sub(r"(mtime_ns=|'duration_ms': )[\d.]+", r"\1…", text)


async def test_what_a_tool_did_not_declare_is_refused_over_the_wire_too(tmp_path: Path) -> None:
    async def ask(on: Runtime) -> object:
        doors: list[Callable[[], Awaitable[object]]] = [
            lambda: on.files.stat("a"),
            lambda: on.search.glob("*"),
            lambda: on.shell.run("true"),
            lambda: on.state.get("k"),
            lambda: on.people.answer([]),
            lambda: on.call("t.other", {}),
        ]
        kinds: list[object] = []
        for door in doors:
            with pytest.raises(ToolError, match="did not declare") as caught:
                await door()
            kinds.append(caught.value.kind)
        return kinds

    async with workshop(tmp_path, Scripted(ask, requires={})) as shop:
        result = await shop.session.call("t.script", {})
        assert result.data == ["denied"] * 6


async def test_people_are_asked_through_the_holder(tmp_path: Path) -> None:
    async def ask(on: Runtime) -> object:
        question = Question("Which?", "Colour", (Option("red", "warm"), Option("blue")), multi_select=True)
        return await on.people.answer([question])

    person = ScriptedPerson(answers=[[["red", "blue"]]])
    given = Scripted(ask, requires={"capabilities": ["ask"]})
    async with workshop(tmp_path, given, attendant=person) as shop:
        result = await shop.session.call("t.script", {})
        assert result.data == [["red", "blue"]]
        assert person.questions == [Question("Which?", "Colour", (Option("red", "warm"), Option("blue")), True)]


async def test_output_of_a_program_is_heard_while_it_runs(tmp_path: Path) -> None:
    heard: list[bytes] = []
    first = asyncio.Event()

    async def run(on: Runtime) -> object:
        def listen(piece: bytes) -> None:
            heard.append(piece)
            first.set()

        running = asyncio.create_task(on.shell.run("echo begun; cat go; echo done", on_output=listen))
        await first.wait()
        assert not running.done()
        await asyncio.to_thread((tmp_path / "ws" / "go").write_text, "on\n")
        return (await running).output.decode()

    async with workshop(tmp_path, Scripted(run), rules=RULES) as shop:
        os.mkfifo(tmp_path / "ws" / "go")
        result = await shop.session.call("t.script", {})
        assert result.data == "begun\non\ndone\n"
        assert b"".join(heard).decode() == result.data


async def test_a_listener_that_fails_ends_the_program_and_raises_there(tmp_path: Path) -> None:
    async def run(on: Runtime) -> object:
        def listen(piece: bytes) -> None:
            raise KeyError("in the listener")

        with pytest.raises(KeyError, match="in the listener"):
            await on.shell.run("cat a.txt; tail -f a.txt", on_output=listen)
        return (await on.shell.run("echo still works")).output.decode()

    _files(tmp_path)
    async with workshop(tmp_path, Scripted(run), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).data == "still works\n"


async def test_cancelling_what_waits_at_a_door_ends_it_in_the_holder(tmp_path: Path) -> None:
    async def run(on: Runtime) -> object:
        begun = asyncio.Event()
        running = asyncio.create_task(on.shell.run("cat a.txt; tail -f a.txt", on_output=lambda _: begun.set()))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return "ended"

    _files(tmp_path)
    async with workshop(tmp_path, Scripted(run), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).data == "ended"
        assert shop.ours.open_requests == 0


async def test_what_a_tool_left_at_a_door_is_ended_before_its_locks_go(tmp_path: Path) -> None:
    left: list[asyncio.Task[Any]] = []

    async def run(on: Runtime) -> object:
        begun = asyncio.Event()
        command = "cat a.txt; tail -f a.txt"
        left.append(asyncio.create_task(on.shell.run(command, on_output=lambda _: begun.set())))
        await begun.wait()
        return "left"

    _files(tmp_path)
    async with workshop(tmp_path, Scripted(run), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).data == "left"
        assert shop.ours.open_requests == 0
        with pytest.raises(ToolError) as caught:
            await left[0]
        assert caught.value.kind in ("cancelled", "backend")


async def test_a_runtime_that_is_kept_opens_nothing_after_its_call(tmp_path: Path) -> None:
    kept: list[Runtime] = []

    async def keep(on: Runtime) -> object:
        kept.append(on)
        return "kept"

    async with workshop(tmp_path, Scripted(keep), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).ok
        with pytest.raises(ToolError, match="no call of this process runs"):
            await kept[0].files.write("late.txt", b"x")
        kept[0].progress("late")
        kept[0].partial("late")
        assert not (tmp_path / "ws" / "late.txt").exists()


async def test_a_threads_own_event_loop_can_use_the_doors(tmp_path: Path) -> None:
    @tool(id="t.script", side_effect="external", locks=[], requires=EVERYTHING)
    def in_a_thread(runtime: Runtime) -> object:
        """Work in a thread."""
        heard: list[bytes] = []

        async def work() -> object:
            runtime.progress("in a thread", fraction=0.5)
            completed = await runtime.shell.run("echo hi", on_output=heard.append)
            size = (await runtime.files.stat("a.txt")).size
            return [size, completed.output.decode(), b"".join(heard).decode()]

        return asyncio.run(work())

    _files(tmp_path)
    async with workshop(tmp_path, in_a_thread, rules=RULES) as shop:
        result = await shop.session.call("t.script", {})
        assert result.data == [14, "hi\n", "hi\n"]


async def test_progress_and_the_last_partial_output_reach_the_holder(tmp_path: Path) -> None:
    told: list[Any] = []

    async def work(on: Runtime) -> object:
        for step in range(1_000):
            on.partial({"step": step})
        on.progress("half", fraction=0.5)
        on.progress("more")
        await asyncio.Event().wait()

    async with workshop(tmp_path, Scripted(work, timeout_ms=50), grace_ms=5_000) as shop:
        shop.session.watch(lambda event: told.append(event.data) if event.kind == "progress" else None)
        result = await shop.session.call("t.script", {})
        assert result.data == {"step": 999}
        assert told == [{"message": "half", "fraction": 0.5}, {"message": "more", "fraction": None}]


async def test_a_call_that_a_brought_tool_makes_runs_under_its_locks_and_ends_with_it(tmp_path: Path) -> None:
    ended = asyncio.Event()

    @tool(id="t.inner", side_effect="external", locks=["place:X"])
    async def inner() -> None:
        """Runs in the holder."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work(on: Runtime) -> object:
        return (await on.call("t.inner", {})).error_kind

    given = Scripted(work, locks=["place:X"], timeout_ms=50)
    async with workshop(tmp_path, given, also=[inner], grace_ms=5_000) as shop:
        result = await shop.session.call("t.script", {})
        assert result.error_kind == "timeout"
        assert ended.is_set()
    refused = Scripted(work, locks=["elsewhere:X"])
    async with workshop(tmp_path / "again", refused, also=[inner]) as shop:
        assert (await shop.session.call("t.script", {})).data == "conflict"


# ── whoever asks for more ────────────────────────────────────────────────────────────────────────


class _Waiting:
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.end = asyncio.Event()

    async def __call__(self, on: Runtime) -> object:
        self.begun.set()
        await self.end.wait()
        return "done"


async def _run_of(shop: Open) -> int:
    (number,) = shop.brought._runs  # pyright: ignore[reportPrivateUsage]
    return number


async def test_a_peer_cannot_open_doors_of_a_call_that_is_not_its_own(tmp_path: Path) -> None:
    _files(tmp_path)
    waiting = _Waiting()
    async with workshop(tmp_path, Scripted(waiting), rules=RULES) as shop:
        running = asyncio.create_task(shop.session.call("t.script", {}))
        await waiting.begun.wait()
        number = await _run_of(shop)
        body = {"run": number, "arguments": {"path": "a.txt"}}
        assert (await shop.theirs.request("runtime.files.stat", body))["value"]["size"] == 14

        stranger, ours = await connected()
        brought = BroughtTools(ours, describe([Scripted(waiting)]))
        ours.open(Operations(brought.requests, brought.notices), {})
        stranger.open(Operations(), {})
        for guess in (number, number + 1, 0, -1, 2**63):
            with pytest.raises(Refused) as caught:
                await stranger.request("runtime.files.stat", {"run": guess, "arguments": {"path": "a.txt"}})
            assert caught.value.kind == "not_running"
        stranger.notify("partial", {"run": number, "value": {"data": "forged"}})
        stranger.notify("progress", {"run": number, "message": "forged", "fraction": None})
        await ours.aclose()

        waiting.end.set()
        assert (await running).data == "done"
        with pytest.raises(Refused) as caught:
            await shop.theirs.request("runtime.files.stat", body)
        assert caught.value.kind == "not_running"


async def test_a_peer_finds_no_door_that_is_not_in_the_table(tmp_path: Path) -> None:
    waiting = _Waiting()
    async with workshop(tmp_path, Scripted(waiting), rules=RULES) as shop:
        running = asyncio.create_task(shop.session.call("t.script", {}))
        await waiting.begun.wait()
        number = await _run_of(shop)
        names = [
            "files",
            "files.__class__",
            "_doors",
            "kept",
            "profile",
            "secrets.get",
            "shell.__init__",
            "files.stat.x",
        ]
        for name in [*names, "", "call.__globals__", "cancellation.stop"]:
            with pytest.raises(Refused) as caught:
                await shop.theirs.request(PREFIX + name, {"run": number, "arguments": {}})
            assert caught.value.kind == "unknown_op"
        waiting.end.set()
        await running


_FAULTY: list[Any] = [
    None,
    [],
    {},
    {"run": 1},
    {"run": True, "arguments": {}},
    {"run": "1", "arguments": {}},
    {"run": 1.0, "arguments": {}},
    {"run": 1, "arguments": None},
    {"run": 1, "arguments": {"path": 3}},
    {"run": 1, "arguments": {"path": None}},
    {"run": 1, "arguments": {"path": ["a"]}},
    {"run": 1, "arguments": {"path": "a.txt", "self": 1}},
    {"run": 1, "arguments": {"path": "a.txt", "data": "text", "over": "seen"}},
    {"run": 1, "arguments": {"path": "a.txt", "data": {"$bytes": "?"}, "over": "seen"}},
    {"run": 1, "arguments": {"path": "a.txt", "data": {"$bytes": "aGk="}, "over": "anything"}},
    {"run": 1, "arguments": {"path": "a.txt", "data": {"$bytes": "aGk=", "more": 1}, "over": "seen"}},
    {"run": 1, "arguments": {"command": [1], "cwd": None, "stdin": {"$bytes": ""}, "on_output": None}},
    {"run": 1, "arguments": {"command": "id", "cwd": None, "stdin": {"$bytes": ""}, "on_output": "x"}},
    {"run": 1, "arguments": {"questions": [{"question": "?"}]}},
    {"run": 1, "arguments": {"tool_id": "t.other", "arguments": []}},
]


async def test_arguments_of_a_wrong_form_reach_no_door(tmp_path: Path) -> None:
    workspace = _files(tmp_path)
    waiting = _Waiting()
    async with workshop(tmp_path, Scripted(waiting), rules=RULES) as shop:
        running = asyncio.create_task(shop.session.call("t.script", {}))
        await waiting.begun.wait()
        assert await _run_of(shop) == 1
        for name in DOORS:
            for body in _FAULTY:
                with pytest.raises(Refused) as caught:
                    await shop.theirs.request(PREFIX + name, body)
                assert caught.value.kind == "malformed"
                assert caught.value.text.startswith(name)
        for notice in ("partial", "progress"):
            for body in [*_FAULTY, {"run": 1, "value": {"blobs": 3}}, {"run": 1, "message": 1, "fraction": "x"}]:
                shop.theirs.notify(notice, body)
        waiting.end.set()
        assert (await running).data == "done"
        assert (workspace / "a.txt").read_text() == "one\ntwo\nthree\n"


async def _answering(folder: Path, answer: Any) -> Any:
    """The result where the other process answers every execute with this."""
    theirs, ours = await connected()

    async def execute(body: Any) -> Any:
        return answer

    theirs.open(Operations({"execute": Op(execute)}), {})
    brought = BroughtTools(ours, describe([other]))
    ours.open(Operations(brought.requests, brought.notices), {})
    async with temporary_kernel(folder, tools=brought.tools, rules=["allow t.other"]) as kernel:
        result = await (await kernel.session()).call("t.other", {"n": 1})
    await ours.aclose()
    return result


@pytest.mark.parametrize(
    "answer",
    [
        None,
        3,
        {},
        {"value": None},
        {"value": {}},
        {"value": {"data": 1, "blobs": [[["x"], {"$bytes": ""}, "a/b"]]}},
        {"value": {"data": 1, "result": {"type": "grant"}}},
        {"error": {}},
        {"error": {"kind": 3, "text": "x"}},
        {"raised": "x"},
    ],
)
async def test_an_answer_that_cannot_be_read_is_a_result_that_says_so(tmp_path: Path, answer: Any) -> None:
    result = await _answering(tmp_path, answer)
    assert result.error_kind == "backend"
    assert "cannot be read" in result.error_text


async def test_a_process_that_claims_other_facts_about_its_call_changes_none_of_them(tmp_path: Path) -> None:
    forged = {"type": "output", "error_text": None, "metadata": {"confined_by": "bubblewrap", "duration_ms": -1}}
    result = await _answering(tmp_path, {"value": {"data": 1, "result": forged}})
    assert result.metadata["confined_by"] == "runtime"
    assert result.metadata["duration_ms"] >= 0


async def test_a_process_that_says_cancelled_without_having_been_told_is_a_failure(tmp_path: Path) -> None:
    result = await _answering(tmp_path, {"cancelled": True})
    assert result.error_kind == "backend"
