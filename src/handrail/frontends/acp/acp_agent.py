"""The handlers for each request of an ACP client.

Source: https://agentclientprotocol.com/protocol/overview
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from acp import PROTOCOL_VERSION, schema
from acp.agent.connection import AgentSideConnection
from acp.exceptions import RequestError

from handrail.contract.errors import HandrailError, LogUnavailable, StartError
from handrail.contract.session_protocols import ClientInfo
from handrail.frontends.acp.acp_transport import MessageTransport, ValidatingTransport
from handrail.frontends.acp.editor_session import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    Block,
    EditorSession,
    parse_prompt_blocks,
)
from handrail.frontends.acp.editor_session_setup import (
    AcpFrontendSettings,
    McpServer,
    OpenWorkspacePool,
    describe_unconfigured_servers,
    open_editor_session,
)
from handrail.frontends.mcp.client_messages import INVALID_REQUEST

if TYPE_CHECKING:
    from handrail.session.transcript_search import StoredSessionSummary

P = ParamSpec("P")
T = TypeVar("T")

PAGE_SIZE = 50
"""Number of sessions on one page of the list."""
_log = logging.getLogger("handrail.acp")


def convert_exceptions_to_request_errors(handler: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Wrap a request's handler so that its failures become error answers."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except RequestError:
            raise
        except HandrailError as error:
            code = INTERNAL_ERROR if isinstance(error, (LogUnavailable, StartError)) else INVALID_PARAMS
            raise RequestError(code, str(error)) from None
        except Exception as error:
            _log.warning("Internal error: %s: %s", type(error).__name__, error, exc_info=_debugging())
            text = f"Internal error of Handrail: {type(error).__name__}: {error}. Please report it."
            raise RequestError(INTERNAL_ERROR, text) from None

    return wrapped


def _debugging() -> bool:
    return os.environ.get("HANDRAIL_DEBUG") == "1"


async def serve_acp_client(
    messages: MessageTransport, serving: AcpFrontendSettings, *, patience_s: float = 5.0
) -> None:
    """Serve one client until it disconnects, then suspend its sessions, which can be loaded again.

    :param patience_s: seconds that the client has at the end to read the remaining messages
    """
    desk = AcpAgent(serving)
    agent = cast("Any", desk)  # the SDK's protocol expects handlers to accept members of _meta; Checked removes them
    connection = AgentSideConnection(
        agent, wire := ValidatingTransport(messages), listening=False, use_unstable_protocol=True
    )
    try:
        await connection.listen()
    finally:
        wire.limit_send_time(patience_s)
        await await_despite_cancellation(desk.aclose())
        await connection.close()


async def await_despite_cancellation(ending: Awaitable[None]) -> None:
    """Await ``ending`` until it is done, even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(ending)
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            continue
    task.result()


class AcpAgent:
    """The agent's side of one connection. Its methods have the SDK's names for the protocol's requests."""

    def __init__(self, serving: AcpFrontendSettings) -> None:
        self._settings = serving
        self._workspaces = OpenWorkspacePool(serving.open_workspace)
        self._open: dict[str, EditorSession] = {}
        self._opening_ids: set[str] = set()
        self._released_later: dict[asyncio.Task[None], EditorSession] = {}
        """Sessions that were left while their sub-agents work, by the task that waits for these."""
        self._client: AgentSideConnection | None = None
        self._client_capabilities: schema.ClientCapabilities | None = None
        self._client_info: ClientInfo | None = None

    def on_connect(self, conn: AgentSideConnection) -> None:
        self._client = conn

    async def aclose(self) -> None:
        """Suspend every session and close every workspace.

        In a workspace that another process keeps open, background work continues.
        """
        for conversation in list(self._open.values()):
            await self._leave_if_open(conversation)
        await self._workspaces.aclose()
        if ended := [
            task for task, conversation in self._released_later.items() if not conversation.has_working_subagents
        ]:
            await asyncio.wait(ended)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    @convert_exceptions_to_request_errors
    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: schema.ClientCapabilities | None = None,
        client_info: schema.Implementation | None = None,
    ) -> schema.InitializeResponse:
        self._client_capabilities = client_capabilities or schema.ClientCapabilities()
        self._client_info = None if client_info is None else ClientInfo(client_info.name, client_info.version)
        return schema.InitializeResponse(
            protocol_version=PROTOCOL_VERSION,  # the only supported version, also if the client requested another
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(image=True, audio=False, embedded_context=True),
                mcp_capabilities=schema.McpCapabilities(http=False, sse=False),
                session_capabilities=schema.SessionCapabilities(
                    list=schema.SessionListCapabilities(),
                    fork=schema.SessionForkCapabilities(),
                    resume=schema.SessionResumeCapabilities(),
                    close=schema.SessionCloseCapabilities(),
                ),
            ),
            agent_info=schema.Implementation(name="handrail", title="Handrail", version=version("handrail")),
            auth_methods=[],
        )

    @convert_exceptions_to_request_errors
    async def authenticate(self, method_id: str) -> schema.AuthenticateResponse:
        text = "Sign-in is not required. The key of the model comes from the environment."
        raise RequestError(INVALID_PARAMS, text)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    @convert_exceptions_to_request_errors
    async def new_session(
        self,
        cwd: str,
        additional_directories: Sequence[str] | None = None,
        mcp_servers: Sequence[McpServer] | None = None,
    ) -> schema.NewSessionResponse:
        folder = self._resolve_folder(cwd, additional_directories)
        conversation = await self._open_session(folder, None, mcp_servers)
        return schema.NewSessionResponse(
            session_id=conversation.session.id, modes=conversation.modes, config_options=conversation.options
        )

    @convert_exceptions_to_request_errors
    async def load_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: Sequence[McpServer] | None = None,
        additional_directories: Sequence[str] | None = None,
    ) -> schema.LoadSessionResponse:
        folder = self._resolve_folder(cwd, additional_directories)
        conversation = await self._reopen_session(folder, session_id, mcp_servers, replayed=True)
        try:
            await conversation.replay_conversation()
            conversation.client_ready.set()
        except BaseException as error:
            await await_despite_cancellation(self._leave_if_open(conversation))
            if isinstance(error, HandrailError):
                again = "The session was not loaded. `session/resume` continues it without its earlier messages."
                raise RequestError(INTERNAL_ERROR, f"{error} {again}") from None
            raise
        return schema.LoadSessionResponse(modes=conversation.modes, config_options=conversation.options)

    @convert_exceptions_to_request_errors
    async def resume_session(
        self,
        session_id: str,
        cwd: str,
        additional_directories: Sequence[str] | None = None,
        mcp_servers: Sequence[McpServer] | None = None,
    ) -> schema.ResumeSessionResponse:
        folder = self._resolve_folder(cwd, additional_directories)
        conversation = await self._reopen_session(folder, session_id, mcp_servers)
        return schema.ResumeSessionResponse(modes=conversation.modes, config_options=conversation.options)

    @convert_exceptions_to_request_errors
    async def fork_session(
        self,
        session_id: str,
        cwd: str,
        additional_directories: Sequence[str] | None = None,
        mcp_servers: Sequence[McpServer] | None = None,
    ) -> schema.ForkSessionResponse:
        folder = self._resolve_folder(cwd, additional_directories)
        self._get_stored_session(folder, session_id, may_be_open=True)
        conversation = await self._open_session(folder, None, mcp_servers, fork=session_id)
        return schema.ForkSessionResponse(
            session_id=conversation.session.id, modes=conversation.modes, config_options=conversation.options
        )

    @convert_exceptions_to_request_errors
    async def list_sessions(self, cwd: str | None = None, cursor: str | None = None) -> schema.ListSessionsResponse:
        """List the sessions of one workspace or, when none is named, of those that this client has open."""
        self._require_initialized()
        first = 0
        if cursor is not None:
            if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 9:
                raise RequestError(
                    INVALID_PARAMS, f"Invalid `cursor` {cursor[:80]!r}. Repeat the request without a cursor."
                )
            first = int(cursor)
        folders = (
            sorted({one.folder for one in self._open.values()}) if cwd is None else [self._resolve_folder(cwd, None)]
        )
        if cwd is None and self._settings.only_workspace is not None:
            folders = [self._settings.only_workspace]
        found: list[tuple[str, StoredSessionSummary]] = []
        for folder in folders:
            for facts in await asyncio.to_thread(self._resumable_sessions, folder, first + PAGE_SIZE + 1):
                found.append((folder, facts))
        found.sort(key=lambda one: one[1].used_ns, reverse=True)
        page, rest = found[first : first + PAGE_SIZE], found[first + PAGE_SIZE :]
        return schema.ListSessionsResponse(
            sessions=[_session_info(folder, facts) for folder, facts in page],
            next_cursor=str(first + PAGE_SIZE) if rest else None,
        )

    def _resumable_sessions(self, folder: str, limit: int) -> list[StoredSessionSummary]:
        try:
            with self._settings.open_reader(folder) as reader:
                return reader.list_resumable(limit=limit)
        except StartError:
            return []  # the workspace has no stored state
        except sqlite3.Error as error:
            raise StartError(
                f"Could not read the stored sessions of {folder}: {error}. Run `handrail doctor`."
            ) from None

    @convert_exceptions_to_request_errors
    async def close_session(self, session_id: str) -> schema.CloseSessionResponse:
        """Suspend a session, so that it can be loaded again.

        Only the operator removes a session permanently, with ``handrail sessions close``.
        """
        self._require_session(session_id)
        await self._leave_session(session_id)
        return schema.CloseSessionResponse()

    @convert_exceptions_to_request_errors
    async def set_session_mode(self, session_id: str, mode_id: str) -> schema.SetSessionModeResponse:
        self._require_session(session_id).set_mode(mode_id)
        return schema.SetSessionModeResponse()

    @convert_exceptions_to_request_errors
    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool
    ) -> schema.SetSessionConfigOptionResponse:
        conversation = self._require_session(session_id)
        await conversation.set_option(config_id, value)
        return schema.SetSessionConfigOptionResponse(config_options=conversation.options)

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────

    @convert_exceptions_to_request_errors
    async def prompt(self, session_id: str, prompt: Sequence[Block]) -> schema.PromptResponse:
        return await self._require_session(session_id).run_prompt(*parse_prompt_blocks(prompt))

    async def cancel(self, session_id: str) -> None:
        if (conversation := self._open.get(session_id)) is not None:
            conversation.cancel_prompt()

    # ── opening and leaving a session ────────────────────────────────────────────────────────────

    def _require_initialized(self) -> schema.ClientCapabilities:
        if self._client_capabilities is None:
            raise RequestError(INVALID_REQUEST, "The connection is not initialized. Send `initialize` first.")
        return self._client_capabilities

    def _require_session(self, session_id: str) -> EditorSession:
        self._require_initialized()
        if (conversation := self._open.get(session_id)) is None:
            raise RequestError(
                INVALID_PARAMS, f"Session {session_id[:80]!r} is not open. Open it again with `session/load`."
            )
        return conversation

    def _resolve_folder(self, cwd: str, further: Sequence[str] | None) -> str:
        """Return the canonical path of the workspace that a client names.

        :raises RequestError: for an invalid path, or a workspace that is not allowed
        """
        self._require_initialized()
        if further:
            raise RequestError(
                INVALID_PARAMS,
                "Additional directories are not supported. Add the folders to `[[roots]]` in agent.toml.",
            )
        if "\0" in cwd or not Path(cwd).is_absolute():
            raise RequestError(INVALID_PARAMS, f"Invalid `cwd`: {cwd[:200]!r}. Expected an absolute path.")
        folder = str(Path(cwd).resolve())
        if not Path(folder).is_dir():
            raise RequestError(INVALID_PARAMS, f"Invalid `cwd`: {cwd[:200]!r}. Expected an existing folder.")
        if self._settings.only_workspace not in (None, folder):
            raise RequestError(
                INVALID_PARAMS,
                f"The workspace {folder!r} is not allowed. `handrail acp --workspace` allows only {self._settings.only_workspace}.",
            )
        return folder

    def _get_stored_session(self, folder: str, session_id: str, *, may_be_open: bool = False) -> StoredSessionSummary:
        """Return the stored facts of a session.

        :raises RequestError: if the session does not exist, is closed, or is open and may not be
        """
        if not may_be_open and (session_id in self._open or session_id in self._opening_ids):
            raise RequestError(
                INVALID_PARAMS, f"Session {session_id[:80]!r} is already open. Close it first, or continue it."
            )
        try:
            with self._settings.open_reader(folder) as reader:
                found = reader.get(session_id)
        except (StartError, sqlite3.Error):
            found = None
        if found is None:
            listed = "`session/list` lists the sessions."
            raise RequestError(INVALID_PARAMS, f"Session {session_id[:80]!r} does not exist in {folder}. {listed}")
        if found.state == "closed":
            text = f"Session {session_id} is closed, and its messages were removed. Create a new session."
            raise RequestError(INVALID_PARAMS, text)
        return found

    async def _reopen_session(
        self, folder: str, session_id: str, servers: Sequence[McpServer] | None, *, replayed: bool = False
    ) -> EditorSession:
        self._get_stored_session(folder, session_id)
        self._opening_ids.add(session_id)
        try:
            return await self._open_session(folder, session_id, servers, replayed=replayed)
        finally:
            self._opening_ids.discard(session_id)

    async def _open_session(
        self,
        folder: str,
        session_id: str | None,
        servers: Sequence[McpServer] | None,
        *,
        fork: str | None = None,
        replayed: bool = False,
    ) -> EditorSession:
        offered, client, serving = self._require_initialized(), self._client, self._settings
        assert client is not None
        kernel = await self._workspaces.acquire_kernel(folder)
        try:
            manifest = kernel.default_agent
            model = serving.open_agent_model(manifest)
            try:
                if fork is not None:
                    session_id = await kernel.fork_session(fork)
                conversation = await open_editor_session(
                    kernel, folder, session_id, model, serving, offered, client, self._client_info
                )
            except BaseException:
                await model.aclose()
                raise
        except BaseException:
            await self._workspaces.release_workspace(folder)
            raise
        conversation.startup_notes += describe_unconfigured_servers(kernel, servers or ())
        self._open[conversation.session.id] = conversation
        loop = asyncio.get_running_loop()
        loop.call_soon(conversation.send_slash_commands)  # after the client has got the ID of the session
        if not replayed:
            loop.call_soon(conversation.client_ready.set)
        return conversation

    async def _leave_session(self, session_id: str) -> None:
        conversation = self._open.pop(session_id)
        try:
            await conversation.suspend()
        finally:
            rest = asyncio.create_task(self._release_left_session(conversation))
            if conversation.has_working_subagents:
                self._released_later[rest] = conversation
                rest.add_done_callback(self._on_released)
            else:
                await rest

    def _on_released(self, task: asyncio.Task[None]) -> None:
        del self._released_later[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("Could not release a session after it was left: %s", error)

    async def _release_left_session(self, conversation: EditorSession) -> None:
        """Release the models and the workspace of a session that was left."""
        try:
            await conversation.close_models_if_unused()
        finally:
            await self._workspaces.release_workspace(conversation.folder)

    async def _leave_if_open(self, conversation: EditorSession) -> None:
        """Leave a session, unless it was left meanwhile, and log errors."""
        session_id = conversation.session.id
        if self._open.get(session_id) is not conversation:
            return
        try:
            await self._leave_session(session_id)
        except Exception as error:
            _log.warning("Could not suspend session %s: %s", session_id, error)


def _session_info(folder: str, facts: StoredSessionSummary) -> schema.SessionInfo:
    used = datetime.fromtimestamp(facts.used_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
    return schema.SessionInfo(session_id=facts.id, cwd=folder, title=facts.topic or facts.task or None, updated_at=used)
