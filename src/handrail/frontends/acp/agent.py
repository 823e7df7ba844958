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
"""Sessions on one page of their list."""
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
            _log.warning("a defect of Handrail's own: %s: %s", type(error).__name__, error, exc_info=_debugging())
            raise RequestError(INTERNAL_ERROR, f"a defect of Handrail's own: {type(error).__name__}: {error}") from None

    return wrapped


def _debugging() -> bool:
    return os.environ.get("HANDRAIL_DEBUG") == "1"


async def serve(messages: Messages, serving: Serving, *, patience_s: float = 5.0) -> None:
    """Serve one client until it hangs up, and has read what it is still told or left that for ``patience_s``; its sessions are
    suspended then, and can be loaded again."""
    desk = Desk(serving)
    agent = cast("Any", desk)  # the SDK's protocol wants handlers to take what stands in _meta; Checked takes that out
    connection = AgentSideConnection(agent, wire := Checked(messages), listening=False, use_unstable_protocol=True)
    try:
        await connection.listen()
    finally:
        wire.end_within(patience_s)
        await through(desk.aclose())
        await connection.close()


async def through(ending: Awaitable[None]) -> None:
    """Await ``ending`` to its end even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(ending)
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            continue
    task.result()


class Desk:
    """The agent's side of one connection. Its methods are the protocol's, by the names that the SDK has for them."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._places = Places(serving.opening)
        self._open: dict[str, Conversation] = {}
        self._opening: set[str] = set()
        self._left: dict[asyncio.Task[None], Conversation] = {}
        """Those that were left while sub-agents of theirs work, with what waits for the end of that."""
        self._client: AgentSideConnection | None = None
        self._offered: schema.ClientCapabilities | None = None

    def on_connect(self, conn: AgentSideConnection) -> None:
        self._client = conn

    async def aclose(self) -> None:
        """Suspend every session and close every workspace. Where somebody else keeps one open, what works there goes on."""
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
            protocol_version=PROTOCOL_VERSION,  # the one that is spoken here, whatever was asked for
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
        raise RequestError(INVALID_PARAMS, "there is nothing to sign in to: the model's key comes from the environment")

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
                again = "the session is not open now; session/resume goes on with it and tells nothing of it"
                raise RequestError(INTERNAL_ERROR, f"{error}; {again}") from None
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
                raise RequestError(INVALID_PARAMS, "that is no cursor of this list")
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
            return []  # nothing is kept of it
        except sqlite3.Error as error:
            raise StartError(f"what is kept of {folder} cannot be read: {error}") from None

    @answered
    async def close_session(self, session_id: str) -> schema.CloseSessionResponse:
        """Leave a session so that it can be loaded again. Only the operator removes one for good (``handrail sessions close``)."""
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

    # ── the way into a session ───────────────────────────────────────────────────────────────────

    def _greeted(self) -> schema.ClientCapabilities:
        if self._offered is None:
            raise RequestError(INVALID_REQUEST, "the first request of a connection is initialize")
        return self._offered

    def _conversation(self, session_id: str) -> Conversation:
        self._greeted()
        conversation = self._open.get(session_id)
        if conversation is None:
            raise RequestError(
                INVALID_PARAMS, f"session {session_id[:80]!r} is not open here; session/load opens it again"
            )
        return conversation

    def _folder(self, cwd: str, further: Sequence[str] | None) -> str:
        """The workspace that a client names, canonical.

        :raises RequestError: for one that cannot be, or may not be worked in
        """
        self._greeted()
        if further:
            raise RequestError(
                INVALID_PARAMS, "a session has one workspace here; further folders are roots in the agent's manifest"
            )
        if "\0" in cwd or not Path(cwd).is_absolute():
            raise RequestError(INVALID_PARAMS, f"cwd is an absolute path, not {cwd[:200]!r}")
        folder = str(Path(cwd).resolve())
        if not Path(folder).is_dir():
            raise RequestError(INVALID_PARAMS, f"cwd {cwd[:200]!r} is no folder")
        if self._serving.only not in (None, folder):
            raise RequestError(
                INVALID_PARAMS, f"sessions are opened in {self._serving.only} only: handrail acp was given --workspace"
            )
        return folder

    def _facts(self, folder: str, session_id: str, *, may_be_open: bool = False) -> SessionFacts:
        """
        :raises RequestError: when there is no such session
        """
        if not may_be_open and (session_id in self._open or session_id in self._opening):
            raise RequestError(INVALID_PARAMS, f"session {session_id[:80]} is open already")
        try:
            with self._serving.reading(folder) as reader:
                found = reader.get(session_id)
        except (StartError, sqlite3.Error):
            found = None
        if found is None:
            raise RequestError(INVALID_PARAMS, f"there is no session {session_id[:80]!r} in {folder}")
        if found.state == "closed":
            raise RequestError(INVALID_PARAMS, f"session {session_id} was closed for good: nothing said in it is kept")
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
        loop.call_soon(conversation.announce)  # once the client knows which session it is of
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
            _log.warning("a session that was left could not be let go of in order: %s", error)

    async def _release(self, conversation: Conversation) -> None:
        """Let go of the models and the workspace of a session that was left."""
        try:
            await conversation.release()
        finally:
            await self._places.leave(conversation.folder)

    async def _let_go(self, conversation: Conversation) -> None:
        """Leave a session that nobody will leave, unless it has been left meanwhile."""
        session_id = conversation.session.id
        if self._open.get(session_id) is not conversation:
            return
        try:
            await self._leave(session_id)
        except Exception as error:
            _log.warning("session %s could not be left in order: %s", session_id, error)


def _info(folder: str, facts: SessionFacts) -> schema.SessionInfo:
    used = datetime.fromtimestamp(facts.used_ns / 1e9, UTC).isoformat().replace("+00:00", "Z")
    return schema.SessionInfo(session_id=facts.id, cwd=folder, title=facts.topic or facts.task or None, updated_at=used)
