"""The runtime over the connection: each service works, is authorized by the holder, and belongs to its call."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.field.test_k14_documents import PAGES, make_pdf
from tests.ipc.scripted import EVERYTHING, RULES, ScriptedTool, files_in, other
from tests.ipc.workshop import workshop

from handrail import Runtime, ToolError, tool
from handrail.contract.services.tool_runtime import QuestionOption, UserContext, UserQuestion
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


async def caught(work: Awaitable[object]) -> object:
    """Return its value or its error text."""
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
        await caught(on.files.write("a.txt", b"over", expected=b"not this")),
        await caught(on.files.read_for_edit("a.txt")),
        await caught(on.files.write("a.txt", b"four\n")),
        await caught(on.files.write("new/c.txt", b"\x00", expected="new")),
        await caught(on.files.write("new/c.txt", b"x", expected="new")),
        await caught(on.files.write("new/c.txt", b"x", expected=b"\x00")),
        await caught(on.files.read_for_edit("b.bin", max_bytes=1)),
        await caught(on.search.grep("four")),
        await caught(on.search.grep("FOUR", ".", glob="*.txt", ignore_case=True, literal=True, max_matches=1)),
        await caught(on.search.grep("(", ".")),
        await caught(on.search.glob("**/*.txt")),
        await caught(on.shell.run("cat a.txt; printf '\\377'; exit 3")),
        await caught(on.shell.run(["cat", "-"], stdin=b"\x00in")),
        await caught(on.shell.run(["printenv", "A"], environment={"A": "1"})),
        await caught(on.shell.run("echo one; echo two >&2", separate_stderr=True)),
        await caught(on.shell.run(["true"], environment={"PATH": "."})),
        await caught(on.shell.list_hidden_paths(["a.txt", "secret/x", "secret/\udc80"])),
        await caught(on.shell.run("rm a.txt")),
        await caught(on.shell.run([])),
        await caught(on.shell.run("pwd", cwd="new")),
        await caught(on.shell.run("kill -9 $$")),
        await caught(on.state.get("k")),
        await caught(on.state.put("k", {"n": [1, None, 2**70, "\udc80"]})),
        await caught(on.state.get("k")),
        await caught(on.documents.extract_pdf_pages(make_pdf(PAGES), name="a.pdf", first=-4, count=2)),
        await caught(on.documents.extract_pdf_pages(b"\xff", name="b.pdf")),
        await caught(on.call("t.other", {"n": 2})),
        await caught(on.call("t.missing", {})),
        on.tool_id,
        on.call_id.partition("/")[2],
        on.agent,
        on.topic,
        on.user_context,
        dict(on.config),
        on.cancellation.is_requested,
        on.capabilities.has_capability("call"),
        on.capabilities.has_capability("ask"),
        len(on.capabilities.layers),
    ]
    try:
        on.secrets.get("token")
    except ToolError as error:
        seen.append((error.kind, error.text))
    try:
        await on.user.ask([])
    except ToolError as error:
        seen.append((error.kind, error.text))
    return repr(seen)


@pytest.mark.proves("L-07")
async def test_every_runtime_method_behaves_for_a_client_tool_as_in_the_holder(tmp_path: Path) -> None:
    seen: list[Any] = []
    for name in ("here", "there"):
        folder = tmp_path / name
        workspace = files_in(folder)
        given = ScriptedTool(everything)
        if name == "here":
            rules = ["allow t.script", "allow t.other", *RULES]
            async with temporary_kernel(folder, tools=[given, other], rules=rules) as kernel:
                result = await (await kernel.session(topic="a topic", user_context=UserContext(location="Bonn"))).call(
                    "t.script", {}
                )
        else:
            async with workshop(folder, given, also=[other], rules=RULES) as shop:
                session = await shop.kernel.session(topic="a topic", user_context=UserContext(location="Bonn"))
                result = await session.call("t.script", {})
        assert result.ok, result
        assert (workspace / "a.txt").read_bytes() == b"four\n"
        seen.append(_without_times(result.data.replace(str(folder), "FOLDER")))
    assert seen[1] == seen[0]


def _without_times(text: str) -> str:
    return re.sub(r"(mtime_ns=|'duration_ms': )[\d.]+", r"\1…", text)


async def test_capabilities_that_a_tool_did_not_declare_are_refused_over_the_wire(tmp_path: Path) -> None:
    async def ask(on: Runtime) -> object:
        doors: list[Callable[[], Awaitable[object]]] = [
            lambda: on.files.stat("a"),
            lambda: on.search.glob("*"),
            lambda: on.shell.run("true"),
            lambda: on.state.get("k"),
            lambda: on.user.ask([]),
            lambda: on.call("t.other", {}),
        ]
        kinds: list[object] = []
        for door in doors:
            with pytest.raises(ToolError, match="did not declare") as caught:
                await door()
            kinds.append(caught.value.kind)
        return kinds

    async with workshop(tmp_path, ScriptedTool(ask, requires={})) as shop:
        result = await shop.session.call("t.script", {})
        assert result.data == ["denied"] * 6


async def test_a_client_tool_asks_the_user_through_the_holder(tmp_path: Path) -> None:
    async def ask(on: Runtime) -> object:
        question = UserQuestion(
            "Which?", "Colour", (QuestionOption("red", "warm"), QuestionOption("blue")), multi_select=True
        )
        return await on.user.ask([question])

    person = ScriptedApprovalHandler(answers=[[["red", "blue"]]])
    given = ScriptedTool(ask, requires={"capabilities": ["ask"]})
    async with workshop(tmp_path, given, approval_handler=person) as shop:
        result = await shop.session.call("t.script", {})
        assert result.data == [["red", "blue"]]
        assert person.questions == [
            UserQuestion("Which?", "Colour", (QuestionOption("red", "warm"), QuestionOption("blue")), True)
        ]


async def test_a_client_tool_receives_program_output_while_the_program_runs(tmp_path: Path) -> None:
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

    async with workshop(tmp_path, ScriptedTool(run), rules=RULES) as shop:
        os.mkfifo(tmp_path / "ws" / "go")
        result = await shop.session.call("t.script", {})
        assert result.data == "begun\non\ndone\n"
        assert b"".join(heard).decode() == result.data


async def test_a_failing_output_listener_ends_the_program_and_raises_in_the_client_tool(tmp_path: Path) -> None:
    async def run(on: Runtime) -> object:
        def listen(piece: bytes) -> None:
            raise KeyError("in the listener")

        with pytest.raises(KeyError, match="in the listener"):
            await on.shell.run("cat a.txt; tail -f a.txt", on_output=listen)
        return (await on.shell.run("echo still works")).output.decode()

    files_in(tmp_path)
    async with workshop(tmp_path, ScriptedTool(run), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).data == "still works\n"


async def test_a_cancelled_runtime_request_ends_in_the_holder(tmp_path: Path) -> None:
    async def run(on: Runtime) -> object:
        begun = asyncio.Event()
        running = asyncio.create_task(on.shell.run("cat a.txt; tail -f a.txt", on_output=lambda _: begun.set()))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return "ended"

    files_in(tmp_path)
    async with workshop(tmp_path, ScriptedTool(run), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).data == "ended"
        assert shop.ours.unanswered_peer_request_count == 0


async def test_runtime_requests_that_a_tool_left_running_end_with_its_call(tmp_path: Path) -> None:
    left: list[asyncio.Task[Any]] = []

    async def run(on: Runtime) -> object:
        begun = asyncio.Event()
        command = "cat a.txt; tail -f a.txt"
        left.append(asyncio.create_task(on.shell.run(command, on_output=lambda _: begun.set())))
        await begun.wait()
        return "left"

    files_in(tmp_path)
    async with workshop(tmp_path, ScriptedTool(run), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).data == "left"
        assert shop.ours.unanswered_peer_request_count == 0
        with pytest.raises(ToolError) as caught:
            await left[0]
        assert caught.value.kind in ("cancelled", "backend")


async def test_a_stored_runtime_is_unusable_after_its_call(tmp_path: Path) -> None:
    kept: list[Runtime] = []

    async def keep(on: Runtime) -> object:
        kept.append(on)
        return "kept"

    async with workshop(tmp_path, ScriptedTool(keep), rules=RULES) as shop:
        assert (await shop.session.call("t.script", {})).ok
        with pytest.raises(ToolError, match="is only available during a call"):
            await kept[0].files.write("late.txt", b"x")
        kept[0].report_progress("late")
        kept[0].set_partial_result("late")
        assert not (tmp_path / "ws" / "late.txt").exists()


async def test_an_event_loop_in_a_thread_can_use_the_runtime(tmp_path: Path) -> None:
    @tool(id="t.script", side_effect="external", locks=[], requires=EVERYTHING)
    def in_a_thread(runtime: Runtime) -> object:
        """Work in a thread."""
        heard: list[bytes] = []

        async def work() -> object:
            runtime.report_progress("in a thread", fraction=0.5)
            completed = await runtime.shell.run("echo hi", on_output=heard.append)
            size = (await runtime.files.stat("a.txt")).size
            return [size, completed.output.decode(), b"".join(heard).decode()]

        return asyncio.run(work())

    files_in(tmp_path)
    async with workshop(tmp_path, in_a_thread, rules=RULES) as shop:
        result = await shop.session.call("t.script", {})
        assert result.data == [14, "hi\n", "hi\n"]


async def test_progress_and_the_last_partial_output_reach_the_holder(tmp_path: Path) -> None:
    told: list[Any] = []

    async def work(on: Runtime) -> object:
        for step in range(1_000):
            on.set_partial_result({"step": step})
        on.report_progress("half", fraction=0.5)
        on.report_progress("more")
        await asyncio.Event().wait()

    async with workshop(tmp_path, ScriptedTool(work, timeout_ms=1_000), grace_ms=5_000) as shop:
        shop.session.watch_events(lambda event: told.append(event.data) if event.kind == "progress" else None)
        result = await shop.session.call("t.script", {})
        assert result.data == {"step": 999}
        assert told == [{"message": "half", "fraction": 0.5}, {"message": "more", "fraction": None}]


async def test_a_call_made_by_a_client_tool_uses_its_locks_and_ends_with_it(tmp_path: Path) -> None:
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

    given = ScriptedTool(work, locks=["place:X"], timeout_ms=500)
    async with workshop(tmp_path, given, also=[inner], grace_ms=5_000) as shop:
        result = await shop.session.call("t.script", {})
        assert result.error_kind == "timeout"
        assert ended.is_set()
    refused = ScriptedTool(work, locks=["elsewhere:X"])
    async with workshop(tmp_path / "again", refused, also=[inner]) as shop:
        assert (await shop.session.call("t.script", {})).data == "conflict"
