"""The SDK's ACP client in the same process as the agent, with a scripted user."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

from acp import RequestError, connect_to_agent, schema, text_block
from acp._transport import memory_transport_pair
from acp.client.connection import ClientSideConnection

from handrail.agent.model_protocol import Model
from handrail.agent.providers import open_model
from handrail.agent.run_budget import Budget
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.errors import UsageError
from handrail.frontends.acp.acp_agent import serve_acp_client
from handrail.frontends.acp.editor_session_setup import AcpFrontendSettings
from handrail.kernel.kernel_interface import Kernel
from handrail.kernel.workspace_opening import open_kernel
from handrail.record.log_reader import LogReader
from handrail.session.transcript_search import StoredSessionReader
from handrail.store.lease import find_lease_holder
from handrail.store.state_folders import locate_folders

Answering = Callable[[schema.ToolCallUpdate, list[schema.PermissionOption]], str | None]


class Editor:
    """A client that records updates. :attr:`answering` returns the option kind for a permission request, or None to
    wait for :meth:`choose`.
    """

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.asked: list[tuple[schema.ToolCallUpdate, list[schema.PermissionOption]]] = []
        self.answering: Answering = lambda _call, _options: "reject_once"
        self.forms: list[Any] = []
        self.filled: Any = schema.DeclineElicitationResponse(action="decline")
        self.terminals: dict[str, asyncio.subprocess.Process] = {}
        self.buffers: dict[str, str] = {}
        self.started: list[list[str]] = []
        self.seen: dict[str, str] = {}
        self.released: list[str] = []
        self._open: list[asyncio.Future[str]] = []
        self._changed = asyncio.Condition()

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        async with self._changed:
            self.updates.append(update)
            self._changed.notify_all()

    async def request_permission(
        self, session_id: str, tool_call: schema.ToolCallUpdate, options: list[schema.PermissionOption], **_: Any
    ) -> schema.RequestPermissionResponse:
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with self._changed:
            self.asked.append((tool_call, options))
            self._open.append(waiting)
            self._changed.notify_all()
        kind = self.answering(tool_call, options) or await waiting
        chosen = next((one.option_id for one in options if one.kind == kind), kind)
        if kind == "cancelled":
            return schema.RequestPermissionResponse(outcome=schema.DeniedOutcome(outcome="cancelled"))
        return schema.RequestPermissionResponse(outcome=schema.AllowedOutcome(outcome="selected", option_id=chosen))

    async def create_elicitation(self, message: str, mode: Any, **_: Any) -> Any:
        self.forms.append((message, mode))
        return self.filled

    async def read_text_file(self, session_id: str, path: str, **_: Any) -> schema.ReadTextFileResponse:
        if path not in self.buffers:
            raise RequestError.resource_not_found(path)
        return schema.ReadTextFileResponse(content=self.buffers[path])

    async def create_terminal(
        self, session_id: str, command: str, args: list[str] | None = None, **_: Any
    ) -> schema.CreateTerminalResponse:
        process = await asyncio.create_subprocess_exec(
            command, *(args or ()), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self.started.append([command, *(args or ())])
        name = f"t{len(self.terminals)}"
        self.terminals[name] = process
        return schema.CreateTerminalResponse(terminal_id=name)

    async def wait_for_terminal_exit(
        self, session_id: str, terminal_id: str, **_: Any
    ) -> schema.WaitForTerminalExitResponse:
        output, _none = await self.terminals[terminal_id].communicate()
        self.seen[terminal_id] = output.decode()
        return schema.WaitForTerminalExitResponse(exit_code=self.terminals[terminal_id].returncode)

    async def release_terminal(self, session_id: str, terminal_id: str, **_: Any) -> None:
        async with self._changed:
            self.released.append(terminal_id)
            self._changed.notify_all()

    def on_connect(self, conn: Any) -> None:
        pass

    def choose(self, number: int, kind: str) -> None:
        """Answer the request of this number."""
        self._open[number].set_result(kind)

    async def until(self, fulfilled: Callable[[], object]) -> None:
        """Wait until an update makes it true."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(fulfilled()))

    def of(self, kind: str) -> list[Any]:
        """The updates of one kind, by the protocol's name for it."""
        return [update for update in self.updates if update.session_update == kind]

    @property
    def said(self) -> str:
        return "".join(update.content.text for update in self.of("agent_message_chunk"))

    def call(self, number: int) -> dict[str, Any]:
        """A call as a client has it after every update, by its place among the calls."""
        begun = self.of("tool_call")[number]
        found = begun.model_dump(mode="json", by_alias=True, exclude_none=True)
        for update in self.of("tool_call_update"):
            if update.tool_call_id == begun.tool_call_id:
                found |= update.model_dump(mode="json", by_alias=True, exclude_none=True)
        return found

    def statuses(self, number: int) -> list[str]:
        """The states that a call went through, each once."""
        begun = self.of("tool_call")[number]
        seen = [begun.status]
        for update in self.of("tool_call_update"):
            if update.tool_call_id == begun.tool_call_id and update.status not in (None, seen[-1]):
                seen.append(update.status)
        return seen


def played(folder: Path, *turns: Mapping[str, Any]) -> Callable[[AgentManifest], Model]:
    """A model that plays these turns, anew in each session."""
    file = folder / "script.json"
    file.write_text(json.dumps({"version": 1, "turns": list(turns)}))
    return lambda _: open_model(f"script:{file}")


def no_model(_: AgentManifest) -> Model:
    raise UsageError("no model: name one")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


class EditorFixture:
    """A folder with a workspace, where clients come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = folder / "ws"
        self.workspace.mkdir(exist_ok=True)
        (folder / "config").mkdir(exist_ok=True)
        self._config = folder / "config" / "handrail.toml"
        self._config.touch()

    def kernel(self, workspace: str, **more: Any) -> AbstractAsyncContextManager[Kernel]:
        return open_kernel(workspace, state=self.folder / "state", config=self._config, frontend="acp", **more)

    @contextmanager
    def reading(self, workspace: str) -> Generator[StoredSessionReader]:
        folders = locate_folders(workspace, str(self.folder / "state"), allow_home=False)
        with LogReader.open_database(folders.database_file) as log:
            holder = find_lease_holder(folders)
            yield StoredSessionReader(log.connection, None if holder is None else holder.token)

    @asynccontextmanager
    async def connected(
        self,
        *turns: Mapping[str, Any],
        editor: Editor | None = None,
        offers: schema.ClientCapabilities | None = None,
        model: Callable[[AgentManifest], Model] | None = None,
        only: str | None = None,
        headless: bool = False,
        rules: Sequence[str] = (),
        hello: bool = True,
        named: Mapping[str, Callable[[AgentManifest], Model]] | None = None,
    ) -> AsyncGenerator[tuple[ClientSideConnection, Editor]]:
        """Connect an initialised client until the block ends."""
        serving = AcpFrontendSettings(
            lambda workspace: self.kernel(workspace, rules=rules),
            self.reading,
            model or played(self.folder, *turns),
            lambda manifest: Budget.combine_limits(manifest.budgets),
            only,
            headless,
            lambda _: ("first", *(named or {})),
            lambda name: (named or {})[name](cast("Any", None)),
        )
        ours, theirs = memory_transport_pair()
        served = asyncio.create_task(serve_acp_client(cast("Any", ours), serving))
        editor = editor or Editor()
        client = connect_to_agent(cast("Any", editor), theirs, use_unstable_protocol=True)
        try:
            if hello:
                await client.initialize(1, client_capabilities=offers or schema.ClientCapabilities())
            yield client, editor
        finally:
            await client.close()
            await served


async def ask(client: ClientSideConnection, session_id: str, task: str = "go") -> schema.PromptResponse:
    return await client.prompt(session_id=session_id, prompt=[text_block(task)])
