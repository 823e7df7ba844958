"""All services in a joined process: its tools, offerings, watchdogs and servers work for its sessions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD, JOINED, opened
from tests.upstream.scripted_mcp_servers import StdioServerProgram

from handrail import Event, Result, Runtime, ToolError, UsageError, tool
from handrail.contract.calls_and_results import Blob
from handrail.contract.services.memory_service import MemoryQuery, MemoryWriteRequest
from handrail.contract.services.resource_services import PromptSpec, ResourceSpec, ResourceTemplate, SourceRequestSpec
from handrail.contract.services.subagent_services import SubagentTask
from handrail.contract.tool.spec import ToolSessionArgumentNames, ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.policy.watchdogs.api import WatchdogCall, allow, ask, deny
from handrail.runtime.files import editor_file_service
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("L-07")
BOTH = pytest.mark.parametrize("door", [HELD, JOINED])
Script = Callable[[Runtime], Awaitable[object]]


class ScriptedTool(Tool):
    """A tool whose inside is written in the test."""

    def __init__(self, script: Script, *capabilities: str, **spec: Any) -> None:
        adapted = tool(
            id="t.script",
            description="Runs a script.",
            locks=(),
            side_effect="external",
            requires={"capabilities": list(capabilities), **spec},
        )(_nothing)
        self.spec: ToolSpec = adapted.spec
        self.script = script

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await self.script(runtime)


async def _nothing() -> None: ...


async def caught(work: Awaitable[object]) -> object:
    """Return its value or its error text."""
    try:
        return await work
    except ToolError as error:
        return ("ToolError", error.kind, error.text)


class Model:
    """Does a sub-agent's work without any."""

    async def compact_conversation(self) -> Result:
        return Result.output("nothing to leave out")

    async def run(self, call_id: str, delegation: SubagentTask) -> Result:
        return Result.output({"did": delegation.task, "for": delegation.agent})


# ── the doors ────────────────────────────────────────────────────────────────────────────────────


async def agents(on: Runtime) -> object:
    work = SubagentTask("default", "look around", "a look", {"depth": 1})
    return (
        await caught(on.subagents.list_types()),
        await caught(on.subagents.run(work)),
        await caught(on.subagents.compact_conversation()),
    )


async def skills(on: Runtime) -> object:
    return [one.name for one in await on.skills.list_skills()], await caught(on.skills.load_skill("no-such-skill"))


async def channels(on: Runtime) -> object:
    return (
        await on.channels.send("news", "hello", data={"n": [1]}),
        (await on.channels.receive("news", timeout_ms=0)).message is not None,
        await caught(on.channels.receive("empty", timeout_ms=0)),
        await caught(on.channels.send("news", "hello", kind="broadcast")),
    )


async def triggers(on: Runtime) -> object:
    added = await on.triggers.add_timer(3_600_000, "Look again.", name="hourly", once=True)
    listed = await on.triggers.list_triggers()
    again = await caught(on.triggers.add_schedule("* * * *", "never"))
    watched = await on.triggers.watch_channel("news", "Read it.", name="news")
    removed = await on.triggers.remove("hourly")
    names = [one.name for one in await on.triggers.list_triggers()]
    return added.kind, added.interval_ns, len(listed), again, watched.channel, removed.name, names


async def transcript(on: Runtime) -> object:
    found = await on.transcript.search("nothing-like-this", kinds=["call"])
    return (
        found,
        await caught(on.transcript.read_passage("message/99")),
        await caught(on.transcript.read_artifact("sha256:0")),
    )


async def memory(on: Runtime) -> object:
    stored = await on.memory.remember(
        MemoryWriteRequest("The user wants short answers in English.", "user/answers", ("style",))
    )
    again = await on.memory.remember(MemoryWriteRequest("The user wants short answers in English"))
    found = await on.memory.recall(MemoryQuery("short answers", limit=3))
    wrong = await caught(on.memory.remember(MemoryWriteRequest("short")))
    notes = await on.memory.recall(MemoryQuery(mode="range", store="working"))
    told = [(one.text, one.key, one.tags, one.untrusted) for one in found.memories]
    return stored.text, again.is_merged, told, found.total, wrong, notes, await on.memory.fold_facts()


async def terminals(on: Runtime) -> object:
    return (
        await on.terminals.is_open("job_none"),
        await on.terminals.has_existed("job_none"),
        await on.terminals.change_count(),
        await on.terminals.wait_for_change(0, 0),
        await on.terminals.track_read_position("job_none", 7),
        await on.terminals.track_read_position("job_none"),
        await caught(on.terminals.type_input("job_none", "x", ("enter",))),
        await caught(on.terminals.resize("job_none", 80, 24)),
        await caught(on.terminals.run("true", columns=80, rows=24)),
    )


async def offers(on: Runtime) -> object:
    listed = [
        (one.source, [spec.uri for spec in one.resources], one.has_resource("note:1"))
        for one in await on.resources.list_sources()
    ]
    return listed, await caught(on.resources.read("note:1"))


async def opened_door(on: Runtime) -> object:
    try:
        return await caught(on.tool_session.step())
    except ToolError as error:  # where the call is carried out, the door itself refuses
        return ("ToolError", error.kind, error.text)


@pytest.mark.parametrize(
    ("script", "capabilities"),
    [
        (agents, ("agents",)),
        (skills, ("skills",)),
        (channels, ("channels",)),
        (triggers, ("triggers",)),
        (transcript, ("transcript",)),
        (memory, ("memory",)),
        (terminals, ("terminals",)),
        (offers, ("resources",)),
        (opened_door, ()),
    ],
)
async def test_a_tool_of_a_connected_process_gets_the_same_runtime_as_a_local_tool(
    tmp_path: Path, script: Script, capabilities: tuple[str, ...]
) -> None:
    seen: list[str] = []
    for door in (HELD, JOINED):
        folder = tmp_path / door
        folder.mkdir()
        given = ScriptedTool(script, *capabilities, shell=[{"cmd": "*"}])
        async with opened(door, folder, tools=[given], rules=["allow t.script", "allow shell.run *"]) as kernel:
            session = await kernel.session()
            session.set_subagent_runner(Model())
            await kernel.log.flush()
            result = await session.call("t.script", {})
        assert result.ok, result
        seen.append(re.sub(r"_ns['\"]?[=:] ?\d+", "_ns", repr(result.data)).replace(str(folder), "FOLDER"))
    assert seen[1] == seen[0]
    assert "session.call" not in seen[1]


@BOTH
async def test_a_tool_is_denied_each_runtime_capability_that_it_does_not_require(tmp_path: Path, door: str) -> None:
    asks: Mapping[str, tuple[str, tuple[str, ...]]] = {
        "subagents": ("list_types", ()),
        "skills": ("list_skills", ()),
        "channels": ("send", ("news", "x")),
        "triggers": ("list_triggers", ()),
        "transcript": ("search", ("x",)),
        "memory": ("fold_facts", ()),
        "terminals": ("change_count", ()),
        "resources": ("list_sources", ()),
    }

    async def ask_all(on: Runtime) -> object:
        found: list[str] = []
        for name, (method, given) in asks.items():
            with pytest.raises(ToolError) as refused:
                await getattr(getattr(on, name), method)(*given)
            found.append(refused.value.kind)
        return found

    async with opened(door, tmp_path, tools=[ScriptedTool(ask_all)], rules=["allow t.script"]) as kernel:
        result = await (await kernel.session()).call("t.script", {})
    assert result.data == ["denied"] * 8, result


class ReadsNote(Tool):
    """A tool that asks a source for what one of its arguments names."""

    source_request = SourceRequestSpec("resources/read", "uri")
    spec = tool(
        id="t.note",
        description="Read a note.",
        side_effect="external",
        locks=(),
        requires={"capabilities": ["resources"]},
    )(_nothing).spec

    def __init__(self) -> None:
        self.spec = ToolSpec(
            id="t.note",
            description="Read a note.",
            parameters={"type": "object", "properties": {"uri": {"type": "string"}}, "additionalProperties": False},
            requires=type(self).spec.requires,
            side_effect="external",
            locks=(),
        )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        given = await runtime.resources.read(args["uri"])
        return {"contents": given.data["contents"], "source": given.source}


class SteppingTool(Tool):
    """A tool that takes a step of a state."""

    state_arguments = ToolSessionArgumentNames("id", "input")
    spec = ToolSpec(
        id="t.proceed",
        description="Take a step.",
        parameters={"type": "object", "properties": {"id": {"type": "string"}, "input": {}}},
        mode="stateful",
        side_effect="external",
        locks=(),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.tool_session.step()


@BOTH
async def test_a_tool_reads_its_authorised_resource_and_steps_an_open_tool_session(tmp_path: Path, door: str) -> None:
    @tool(id="t.count", side_effect="external", locks=[], mode="stateful")
    async def count(start: int) -> Any:
        """Count on."""
        while True:
            sent: Any = yield start  # pyright: ignore[reportUnknownVariableType]
            start += 1 if sent is None else sent  # pyright: ignore[reportUnknownVariableType]

    given = [ReadsNote(), SteppingTool(), count]
    async with opened(door, tmp_path, tools=given, resources=[NoteSource()], rules=["allow t.*"]) as kernel:
        session = await kernel.session()
        read = await session.call("t.note", {"uri": "note:1"})
        assert read.ok and read.data["contents"][0]["text"] == "one for default", read
        begun = await session.call("t.count", {"start": 5})
        assert begun.ok, begun
        stepped = await session.call("t.proceed", {"id": begun.data["state_id"], "input": 3})
        assert stepped.ok and 8 in stepped.data.values(), stepped


# ── offerings ────────────────────────────────────────────────────────────────────────────────────


class NoteSource:
    """An offering in Python."""

    source, is_third_party = "", False
    resources = (ResourceSpec("note:1", "one"), ResourceSpec("note:2", "a picture"))
    templates = (ResourceTemplate("note:{id}", "any"),)
    prompts = (PromptSpec("greet"),)

    def __init__(self) -> None:
        self.updated: list[Callable[[str], None]] = []
        self.stopped = asyncio.Event()

    def has_resource(self, uri: str) -> bool:
        return uri.startswith("note:")

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        if uri == "note:2":
            return {"contents": [{"uri": uri, "mimeType": "image/png", "blob": Blob(b"\x89PNG", "image/png")}]}
        if uri == "note:broken":
            raise ToolError("it is torn", kind="backend")
        return {"contents": [{"uri": uri, "text": f"one for {runtime.agent}"}]}

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        return {"messages": [{"role": "user", "content": {"type": "text", "text": f"hello {arguments.get('who')}"}}]}

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        return {"values": [argument["value"] + "!"]}

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        self.updated.append(on_update)

        async def stop() -> None:
            self.stopped.set()

        return stop


@BOTH
async def test_resources_and_prompts_of_a_program_are_available_to_its_sessions(tmp_path: Path, door: str) -> None:
    notes = NoteSource()
    async with opened(door, tmp_path, resources=[notes]) as kernel:
        session = await kernel.session()
        listed = await session.call("resource.list", {})
        assert [one["uri"] for one in listed.data["resources"]] == ["note:1", "note:2"], listed
        read = await session.call("resource.read", {"uri": "note:1"})
        assert read.ok and "one for default" in str(read.data), read
        made = await session.call("resource.read", {"uri": "note:77"})
        assert made.ok, made
        picture = await session.call("resource.read", {"uri": "note:2"})
        assert picture.ok and "sha256:" in str(picture.data), picture
        torn = await session.call("resource.read", {"uri": "note:broken"})
        assert (torn.error_kind, "torn" in str(torn.error_text)) == ("backend", True), torn
        greeted = await session.call("prompt.get", {"name": "greet", "arguments": {"who": "Ann"}})
        assert greeted.ok and "hello Ann" in str(greeted.data), greeted
        events: asyncio.Queue[Event] = asyncio.Queue()
        session.watch_events(lambda event: events.put_nowait(event) if event.kind == "resource-updated" else None)
        assert (await session.call("resource.subscribe", {"uri": "note:1"})).ok
        notes.updated[0]("note:1")
        assert (await events.get()).data["uri"] == "note:1"
        assert (await session.call("resource.unsubscribe", {"uri": "note:1"})).ok
        await notes.stopped.wait()
        assert [one.source for one in kernel.generation.resource_providers if one.resources] == [""]


async def test_resources_of_a_process_serve_only_its_own_sessions_and_end_with_the_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path / "a") as holder:
        config = tmp_path / "a" / "config" / "handrail.toml"
        async with open_on(holder.workdir, tmp_path / "a" / "state", config, resources=[NoteSource()]) as joined:
            mine, theirs = await joined.session("ses_mine"), await holder.session()
            assert (await mine.call("resource.read", {"uri": "note:1"})).ok
            assert (await theirs.call("resource.read", {"uri": "note:1"})).error_kind == "invalid_input"
        again = await holder.session("ses_mine")
        assert (await again.call("resource.read", {"uri": "note:1"})).error_kind == "invalid_input"


def open_on(workdir: str, state: Path, config: Path, **options: Any) -> Any:
    from handrail import open_kernel

    return open_kernel(workdir, state=state, config=config, **options)


# ── watchdogs ────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_a_programs_watchdogs_check_the_calls_of_its_sessions(tmp_path: Path, door: str) -> None:
    seen: list[WatchdogCall] = []

    def blocks(call: WatchdogCall) -> Any:
        seen.append(call)
        return deny("not that file") if call.arguments.get("path") == "b.txt" else allow()

    async def asks(call: WatchdogCall) -> Any:
        return ask("are you sure") if call.arguments.get("path") == "c.txt" else "allow"

    def fails(call: WatchdogCall) -> Any:
        if call.arguments.get("path") == "d.txt":
            raise ValueError("out of order")
        return "nonsense" if call.arguments.get("path") == "e.txt" else allow()

    watchdogs = [blocks, asks, fails]
    async with opened(door, tmp_path, watchdogs=watchdogs, rules=["allow write"]) as kernel:
        session = await kernel.session()
        said: dict[str, str] = {}
        for name in "abcde":
            result = await session.call("write", {"path": f"{name}.txt", "content": "x"})
            said[name] = "written" if result.ok else f"{result.error_kind}: {result.error_text}"
    assert said["a"] == "written"
    assert said["b"].startswith("denied") and "watchdog blocks denied this call of write: not that file" in said["b"]
    assert said["c"].startswith("denied") and "are you sure" in said["c"]
    assert "failed (ValueError: out of order)" in said["d"]
    assert "'nonsense'; expected one of allow(), deny(reason), ask(reason)" in said["e"]
    assert [call.tool_id for call in seen] == ["write"] * 5 and seen[0].session_id == session.id
    assert sorted(path.name for path in (tmp_path / "ws").iterdir()) == ["a.txt"]


class OnlyWrites:
    """A watchdog that looks at calls of one tool, and only briefly waited for."""

    timeout_ms = 200

    def __init__(self) -> None:
        self.asked: list[str] = []

    def concerns(self, spec: ToolSpec) -> bool:
        return spec.id == "write"

    async def __call__(self, call: WatchdogCall) -> Any:
        self.asked.append(call.tool_id)
        if call.arguments.get("path") == "slow.txt":
            await asyncio.Event().wait()
        return allow()


@BOTH
async def test_a_watchdog_sees_only_its_chosen_tools_and_a_late_answer_denies(tmp_path: Path, door: str) -> None:
    only = OnlyWrites()
    async with opened(door, tmp_path, watchdogs=[only], rules=["allow write"]) as kernel:
        session = await kernel.session()
        assert (await session.call("glob", {"pattern": "*"})).ok
        assert (await session.call("write", {"path": "a.txt", "content": "x"})).ok
        late = await session.call("write", {"path": "slow.txt", "content": "x"})
    assert late.error_kind == "denied" and "did not answer within 200 ms" in str(late.error_text), late
    assert only.asked == ["write", "write"]


async def test_a_watchdog_denies_the_call_when_its_process_has_gone(tmp_path: Path) -> None:
    begun, goes = asyncio.Event(), asyncio.Event()

    async def look(call: WatchdogCall) -> Any:
        if call.tool_id == "write":
            begun.set()
            await goes.wait()
        return allow()

    async with temporary_kernel(tmp_path) as holder:
        config = tmp_path / "config" / "handrail.toml"
        async with open_on(
            holder.workdir, tmp_path / "state", config, watchdogs=[look], rules=["allow write"]
        ) as joined:
            assert isinstance(joined, RemoteKernel)
            session = await joined.session("ses_w")
            call = asyncio.create_task(session.call("write", {"path": "a.txt", "content": "x"}))
            await begun.wait()
            standing = joined.ipc_client.current_connection
            assert standing is not None
            standing.drop("the test cuts it")
            again = await call  # proposed anew over the next connection, where it is asked again
            goes.set()
            assert again.error_kind in ("denied", "interrupted") or again.ok
        await holder.log.flush()
        bodies = [str(record.body) for record in holder.log.reader.records(session="ses_w")]
        assert any("The process of the watchdog has disconnected" in body for body in bodies), bodies


# ── servers ──────────────────────────────────────────────────────────────────────────────────────


@BOTH
async def test_a_program_connects_a_server_and_its_approved_tools_are_available(tmp_path: Path, door: str) -> None:
    server = StdioServerProgram(tmp_path)
    async with opened(door, tmp_path, rules=["allow mcp:mine:*"]) as kernel:
        session = await kernel.session()
        async with kernel.mcp_servers.connect("mine", **server.make_connect_arguments()) as connected:
            assert connected.name == "mine" and connected.listing.tools
            assert [(one.name, one.state) for one in kernel.mcp_servers.server_statuses] == [("mine", "connected")]
            assert (await session.call("mine_echo", {"text": "hi"})).error_kind == "unavailable"
            assert all(connected.tool_availability.values()), "nobody has approved them"
            await connected.approve_tool_definitions()
            assert connected.tool_availability["mine_echo"] is None
            assert (await session.call("mine_echo", {"text": "hi"})).data == "hi"
            with pytest.raises(UsageError, match="already"):
                async with kernel.mcp_servers.connect("mine", **server.make_connect_arguments()):
                    pass
        assert kernel.mcp_servers.server_statuses == []
        assert (await session.call("mine_echo", {"text": "hi"})).error_kind == "unknown_tool"
        with pytest.raises(UsageError, match="Missing `command` or `url` for the server 'other'"):
            async with kernel.mcp_servers.connect("other"):
                pass


async def test_a_server_ends_with_the_process_that_connected_it(tmp_path: Path) -> None:
    server, config = StdioServerProgram(tmp_path), tmp_path / "config" / "handrail.toml"
    async with (
        temporary_kernel(tmp_path) as holder,
        open_on(holder.workdir, tmp_path / "state", config) as joined,
        joined.mcp_servers.connect("mine", **server.make_connect_arguments()),
    ):
        assert [one.name for one in holder.mcp_servers.server_statuses] == ["mine"]
        await joined.ipc_client.aclose()
        while holder.mcp_servers.server_statuses:
            await asyncio.sleep(0)


# ── the editor at the face ───────────────────────────────────────────────────────────────────────


class Editor:
    """A client that shows one file otherwise than it is on the disk."""

    def supports(self, call_id: str, method: str, params: Mapping[str, Any]) -> bool:
        return False

    async def send_requests(self, call_id: str, requests: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        raise ToolError("it answers nothing", kind="unavailable")

    def detach(self, call_id: str) -> None: ...

    async def read_unsaved_text(self, path: str) -> str | None:
        return "as it is shown\n" if path.endswith("a.txt") else None


@BOTH
async def test_a_read_returns_unsaved_editor_text(tmp_path: Path, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor_file_service, "FRESH_NS", -(10**12))
    monkeypatch.setattr(editor_file_service, "SETTLED_NS", -(10**12))
    async with opened(door, tmp_path) as kernel:
        (Path(kernel.workdir) / "a.txt").write_text("as it is saved\n")
        session = await kernel.session(client=Editor())
        read = await session.call("read", {"path": "a.txt"})
        assert read.ok and read.data["text"] == "as it is shown", read
