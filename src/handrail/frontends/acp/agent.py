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
from handrail.frontends.acp.conversation import INTERNAL_ERROR, INVALID_PARAMS, Block, Conversation, asked_of
from handrail.frontends.acp.opening import McpServer, Places, Serving, converse, remarks_on
from handrail.frontends.acp.transport import INVALID_REQUEST, Checked, Messages

if TYPE_CHECKING:
    from handrail.session.past import SessionFacts

P = ParamSpec("P")
T = TypeVar("T")

PAGE = 50
"""Number of sessions on one page of the list."""
_log = logging.getLogger("handrail.acp")


def answered(handler: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
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


async def serve(messages: Messages, serving: Serving, *, patience_s: float = 5.0) -> None:
    """Serve one client until it disconnects, then suspend its sessions, which can be loaded again.

    :param patience_s: seconds that the client has at the end to read the remaining messages
    """
    desk = Desk(serving)
    agent = cast("Any", desk)  # the SDK's protocol expects handlers to accept members of _meta; Checked removes them
    connection = AgentSideConnection(agent, wire := Checked(messages), listening=False, use_unstable_protocol=True)
    try:
        await connection.listen()
    finally:
        wire.end_within(patience_s)
        await through(desk.aclose())
        await connection.close()


async def through(ending: Awaitable[None]) -> None:
    """Await ``ending`` until it is done, even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(ending)
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            continue
    task.result()


class Desk:
    """The agent's side of one connection. Its methods have the SDK's names for the protocol's requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._places = Places(serving.opening)
        self._open: dict[str, Conversation] = {}
        self._opening: set[str] = set()
        self._left: dict[asyncio.Task[None], Conversation] = {}
        """Sessions that were left while their sub-agents work, by the task that waits for these."""
        self._client: AgentSideConnection | None = None
        self._offered: schema.ClientCapabilities | None = None

    def on_connect(self, conn: AgentSideConnection) -> None:
        self._client = conn

    async def aclose(self) -> None:
        """Suspend every session and close every workspace.

        In a workspace that another process keeps open, background work continues.
        """
        for conversation in list(self._open.values()):
            await self._let_go(conversation)
        await self._places.aclose()
        if ended := [task for task, conversation in self._left.items() if not conversation.at_work]:
            await asyncio.wait(ended)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    @answered
    async def initialize(
        self,
        protocol_version: int,
        client_capabilities: schema.ClientCapabilities | None = None,
        client_info: schema.Implementation | None = None,
    ) -> schema.InitializeResponse:
        self._offered = client_capabilities or schema.ClientCapabilities()
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

    @answered
    async def authenticate(self, method_id: str) -> schema.AuthenticateResponse:
        text = "Sign-in is not required. The key of the model comes from the environment."
        raise RequestError(INVALID_PARAMS, text)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    @answered
    async def new_session(
        self,
        cwd: str,
        additional_directories: Sequence[str] | None = None,
        mcp_servers: Sequence[McpServer] | None = None,
    ) -> schema.NewSessionResponse:
        folder = self._folder(cwd, additional_directories)
        conversation = await self._enter(folder, None, mcp_servers)
        return schema.NewSessionResponse(
            session_id=conversation.session.id, modes=conversation.modes, config_options=conversation.options
        )

    @answered
    async def load_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: Sequence[McpServer] | None = None,
        additional_directories: Sequence[str] | None = None,
    ) -> schema.LoadSessionResponse:
        folder = self._folder(cwd, additional_directories)
        conversation = await self._again(folder, session_id, mcp_servers, replayed=True)
        try:
            await conversation.replay()
            conversation.known.set()
        except BaseException as error:
            await through(self._let_go(conversation))
            if isinstance(error, HandrailError):
                again = "The session was not loaded. `session/resume` continues it without its earlier messages."
                raise RequestError(INTERNAL_ERROR, f"{error} {again}") from None
            raise
        return schema.LoadSessionResponse(modes=conversation.modes, config_options=conversation.options)

    @answered
    async def resume_session(
        self,
        session_id: str,
        cwd: str,
        additional_directories: Sequence[str] | None = None,
        mcp_servers: Sequence[McpServer] | None = None,
    ) -> schema.ResumeSessionResponse:
        folder = self._folder(cwd, additional_directories)
        conversation = await self._again(folder, session_id, mcp_servers)
        return schema.ResumeSessionResponse(modes=conversation.modes, config_options=conversation.options)

    @answered
    async def fork_session(
        self,
        session_id: str,
        cwd: str,
        additional_directories: Sequence[str] | None = None,
        mcp_servers: Sequence[McpServer] | None = None,
    ) -> schema.ForkSessionResponse:
        folder = self._folder(cwd, additional_directories)
        self._facts(folder, session_id, may_be_open=True)
        conversation = await self._enter(folder, None, mcp_servers, fork=session_id)
        return schema.ForkSessionResponse(
            session_id=conversation.session.id, modes=conversation.modes, config_options=conversation.options
        )

    @answered
    async def list_sessions(self, cwd: str | None = None, cursor: str | None = None) -> schema.ListSessionsResponse:
        """List the sessions of one workspace or, when none is named, of those that this client has open."""
        self._greeted()
        first = 0
        if cursor is not None:
            if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 9:
                raise RequestError(INVALID_PARAMS, f"Invalid `cursor` {cursor[:80]!r}. Start again without a cursor.")
            first = int(cursor)
        folders = sorted({one.folder for one in self._open.values()}) if cwd is None else [self._folder(cwd, None)]
        if cwd is None and self._serving.only is not None:
            folders = [self._serving.only]
        found: list[tuple[str, SessionFacts]] = []
        for folder in folders:
            for facts in await asyncio.to_thread(self._all, folder, first + PAGE + 1):
                found.append((folder, facts))
        found.sort(key=lambda one: one[1].used_ns, reverse=True)
        page, rest = found[first : first + PAGE], found[first + PAGE :]
        return schema.ListSessionsResponse(
            sessions=[_info(folder, facts) for folder, facts in page],
            next_cursor=str(first + PAGE) if rest else None,
        )

    def _all(self, folder: str, limit: int) -> list[SessionFacts]:
        try:
            with self._serving.reading(folder) as reader:
                return reader.resumable(limit=limit)
        except StartError:
            return []  # the workspace has no stored state
        except sqlite3.Error as error:
            raise StartError(f"Could not read the stored sessions of {folder}: {error}") from None

    @answered
    async def close_session(self, session_id: str) -> schema.CloseSessionResponse:
        """Suspend a session, so that it can be loaded again.

        Only the operator removes a session permanently, with ``handrail sessions close``.
        """
        self._conversation(session_id)
        await self._leave(session_id)
        return schema.CloseSessionResponse()

    @answered
    async def set_session_mode(self, session_id: str, mode_id: str) -> schema.SetSessionModeResponse:
        self._conversation(session_id).set_mode(mode_id)
        return schema.SetSessionModeResponse()

    @answered
    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool
    ) -> schema.SetSessionConfigOptionResponse:
        conversation = self._conversation(session_id)
        await conversation.choose(config_id, value)
        return schema.SetSessionConfigOptionResponse(config_options=conversation.options)

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────

    @answered
    async def prompt(self, session_id: str, prompt: Sequence[Block]) -> schema.PromptResponse:
        return await self._conversation(session_id).prompt(*asked_of(prompt))

    async def cancel(self, session_id: str) -> None:
        if (conversation := self._open.get(session_id)) is not None:
            conversation.cancel()

    # ── opening and leaving a session ────────────────────────────────────────────────────────────

    def _greeted(self) -> schema.ClientCapabilities:
        if self._offered is None:
            raise RequestError(INVALID_REQUEST, "The connection is not initialized. Send `initialize` first.")
        return self._offered

    def _conversation(self, session_id: str) -> Conversation:
        self._greeted()
        conversation = self._open.get(session_id)
        if conversation is None:
            raise RequestError(
                INVALID_PARAMS, f"Session {session_id[:80]!r} is not open. Open it again with `session/load`."
            )
        return conversation

    def _folder(self, cwd: str, further: Sequence[str] | None) -> str:
        """Return the canonical path of the workspace that a client names.

        :raises RequestError: for an invalid path, or a workspace that is not allowed
        """
        self._greeted()
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
        if self._serving.only not in (None, folder):
            raise RequestError(
                INVALID_PARAMS,
                f"The workspace {folder!r} is not allowed. `handrail acp --workspace` allows only {self._serving.only}.",
            )
        return folder

    def _facts(self, folder: str, session_id: str, *, may_be_open: bool = False) -> SessionFacts:
        """Return the stored facts of a session.

        :raises RequestError: if the session does not exist, is closed, or is open and may not be
        """
        if not may_be_open and (session_id in self._open or session_id in self._opening):
            raise RequestError(INVALID_PARAMS, f"Session {session_id[:80]!r} is already open.")
        try:
            with self._serving.reading(folder) as reader:
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

    async def _again(
        self, folder: str, session_id: str, servers: Sequence[McpServer] | None, *, replayed: bool = False
    ) -> Conversation:
        self._facts(folder, session_id)
        self._opening.add(session_id)
        try:
            return await self._enter(folder, session_id, servers, replayed=replayed)
        finally:
            self._opening.discard(session_id)

    async def _enter(
        self,
        folder: str,
        session_id: str | None,
        servers: Sequence[McpServer] | None,
        *,
        fork: str | None = None,
        replayed: bool = False,
    ) -> Conversation:
        offered, client, serving = self._greeted(), self._client, self._serving
        assert client is not None
        kernel = await self._places.enter(folder)
        try:
            manifest = kernel.agent
            model = serving.model(manifest)
            try:
                if fork is not None:
                    session_id = await kernel.fork(fork)
                conversation = await converse(kernel, folder, session_id, model, serving, offered, client)
            except BaseException:
                await model.aclose()
                raise
        except BaseException:
            await self._places.leave(folder)
            raise
        conversation.remarks += remarks_on(kernel, servers or ())
        self._open[conversation.session.id] = conversation
        loop = asyncio.get_running_loop()
        loop.call_soon(conversation.announce)  # after the client has got the ID of the session
        if not replayed:
            loop.call_soon(conversation.known.set)
        return conversation

    async def _leave(self, session_id: str) -> None:
        conversation = self._open.pop(session_id)
        try:
            await conversation.leave()
        finally:
            rest = asyncio.create_task(self._release(conversation))
            if conversation.at_work:
                self._left[rest] = conversation
                rest.add_done_callback(self._released)
            else:
                await rest

    def _released(self, task: asyncio.Task[None]) -> None:
        del self._left[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("Could not release a session after it was left: %s", error)

    async def _release(self, conversation: Conversation) -> None:
        """Release the models and the workspace of a session that was left."""
        try:
            await conversation.release()
        finally:
            await self._places.leave(conversation.folder)

    async def _let_go(self, conversation: Conversation) -> None:
        """Leave a session, unless it was left meanwhile, and log errors."""
        session_id = conversation.session.id
        if self._open.get(session_id) is not conversation:
            return
        try:
            await self._leave(session_id)
        except Exception as error:
            _log.warning("Could not suspend session %s: %s", session_id, error)


def _info(folder: str, facts: SessionFacts) -> schema.SessionInfo:
    used = datetime.fromtimestamp(facts.used_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
    return schema.SessionInfo(session_id=facts.id, cwd=folder, title=facts.topic or facts.task or None, updated_at=used)
