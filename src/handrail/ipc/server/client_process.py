"""One client process on the lease holder's side: its registrations, its sessions, and the requests that it may send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from operator import itemgetter
from typing import Annotated, Any, Protocol, cast

from handrail.arbiter.approvals.approval_broker import ApprovalBroker
from handrail.arbiter.call_state import Call
from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.catalog.view import CatalogOptions
from handrail.contract.calls_and_results import DEFAULT_PROBLEM_KIND, CallAnswer, Event, ProposedCall, Result
from handrail.contract.errors import HandrailError, UsageError
from handrail.contract.json_codec import MalformedDataError, Reader, decode_exact_fields
from handrail.contract.permission_modes import Mode
from handrail.contract.rule_forms import RuleWithExamples
from handrail.contract.services.channels_and_triggers import NotificationQueue
from handrail.contract.services.client_services import ClientRequestKind
from handrail.contract.services.history_and_skill_services import ConversationHistory, HistoryEntry, SkillInfo
from handrail.contract.services.job_and_tool_services import ToolSearchResult
from handrail.contract.services.subagent_services import SubagentTask, SubagentType
from handrail.contract.services.tool_runtime import UserContext
from handrail.contract.session_protocols import ChildSession, ClientInfo, StoppedWork, StopReason
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolStatus
from handrail.ipc.codec import wire_encoding
from handrail.ipc.codec.protocol_rpc import (
    SHUTDOWN_TEXT,
    WIRE_CODEC,
    RequestHandler,
    make_notification_handler,
    make_protocol_handlers,
    make_request_handler,
    make_request_operation,
)
from handrail.ipc.server.client_proxies import (
    RemoteApprovalHandler,
    RemoteClientHandler,
    RemoteEditorHandler,
    RemoteResourceProvider,
    RemoteSubagentRunner,
    RemoteWatchdog,
    ResourceChangeCallbacks,
    make_remote_resource_provider,
)
from handrail.ipc.server.client_tools import ClientProcessTools
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import LEAVING, TRANSFERRED, OperationSpec, OperationTable, RemoteRequestError
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.policy.decision_explanation import PolicyExplanation
from handrail.record.commit_log import CommitLog
from handrail.registry.agent_folders import parse_agent_tables
from handrail.session.local_session import LocalSession, ParentRef
from handrail.session.session_context import (
    AgentContext,
    ClientProcessRegistrations,
    SessionOpenParameters,
    SessionOptions,
)
from handrail.session.session_events import DROPPABLE_KINDS
from handrail.session.turn import LocalTurn

_MAX_OLD_GENERATIONS = 16
"""The number of older generations that a turn of a client process may still use."""
_MAX_FRONTEND_CHARS = 40
_MAX_PATIENCE_MS = 60_000
MAX_TURNS = 1_000_000_000
"""The maximum turn number of a session. Turn numbers are part of call ids, which are compared and stored."""
EAGER_REQUESTS = ("reply", "call", "keyed", "keep")
"""Calls, which usually end without waiting, so that their answers need not wait for the next iteration of the event loop; and
messages that are stored before these calls, so that the order is preserved."""
UNBOUNDED_WAITS = ("notices.wait_until_pending", "notices.wait_for_next")
"""Waits that may never end: they are cancelled with the connection."""

_tuple: Any = tuple
_new_call: Callable[..., ProposedCall] = _tuple.__new__
"""Create a ``ProposedCall`` in half the time of its constructor."""


def _check_turn(number: int) -> int:
    if not 0 < number < MAX_TURNS:
        raise MalformedDataError(f"expected a number from 1 to {MAX_TURNS - 1:,}")
    return number


def _check_entry(entry: HistoryEntry) -> HistoryEntry:
    if not 0 <= entry[0] < 1 << 62:
        raise MalformedDataError("expected a message as position (from 0) and data")
    return entry


TurnNumber = Annotated[int, _check_turn]
"""The number of a turn."""
CheckedHistoryEntry = Annotated[HistoryEntry, _check_entry]
"""A message of a session with its position."""

_REPLY_FIELDS: Mapping[str, Any] = {
    "session": str,
    "turn": TurnNumber,
    "token": int,
    "generation": int,
    "calls": Sequence[ProposedCall],
}
_get_reply_fields = cast("Callable[[Any], tuple[Any, ...]]", itemgetter(*_REPLY_FIELDS))


@cache
def _reply_readers() -> Mapping[str, Reader[Any]]:
    return {name: WIRE_CODEC.get_type_codec(kind).read for name, kind in _REPLY_FIELDS.items()}


def decode_reply_request(body: Any) -> tuple[str, int, int, int, Sequence[ProposedCall]]:
    """Read the fields of a ``reply`` request, in the order of their table.

    Nearly all requests of client processes are replies, so a valid reply with one call takes a fast path.

    :raises RemoteRequestError: if a field is invalid; the text names it
    """
    try:
        session, turn, token, generation, calls = _get_reply_fields(body)
        [[name, arguments, provider_id, fault, kind]] = calls
        if (
            type(session) is type(name) is type(arguments) is str
            and type(turn) is type(token) is type(generation) is int
            and type(calls) is type(calls[0]) is list
            and 0 < turn < MAX_TURNS
            and provider_id is fault is None
            and kind == DEFAULT_PROBLEM_KIND
            # Only ASCII text is surely valid. Any other is left to the general reader.
            and arguments.isascii()
            # A message with further fields must be refused, as the general reader does.
            and len(body) == len(_REPLY_FIELDS)
        ):
            return session, turn, token, generation, (_new_call(ProposedCall, (name, arguments, None, None, kind)),)
    except (KeyError, TypeError, ValueError):
        pass
    try:
        session, turn, token, generation, calls = decode_exact_fields(body, _reply_readers()).values()
    except MalformedDataError as error:
        raise RemoteRequestError("UsageError", f"Invalid request `reply`: {error}.") from None
    return session, turn, token, generation, calls


class ClientFacingKernel(Protocol):
    """The parts of the local kernel that client processes need."""

    @property
    def log(self) -> CommitLog: ...

    def describe_kernel(self) -> Message:
        """Return the description of this kernel for a client process."""
        ...

    @property
    def approvals(self) -> ApprovalBroker: ...

    async def stop_work(self, target: str, by: str) -> StoppedWork:
        """Stop a call, a job, a session or everything; see :meth:`SessionManager.stop_work`."""
        ...

    def create_agent_environment(self, agent: str, registrations: ClientProcessRegistrations) -> AgentContext:
        """Return a new context of an agent with the registrations of a process.

        :raises LoadError: with all faults
        """
        ...

    def redact_secrets(self, secrets: Mapping[str, str]) -> None:
        """Redact these secrets from now on.

        :raises ValueError: if a value cannot be redacted
        """

    async def open_session(self, opening: SessionOpenParameters, id: str | None = None) -> LocalSession: ...

    async def open_child_session(
        self, context_of: Callable[[str], AgentContext], under: ParentRef, frontend: str, id: str | None = None
    ) -> LocalSession:
        """Open the session of a sub-agent; see :meth:`handrail.contract.session_protocols.Session.open_child`."""
        ...

    async def explain_call_in_context(
        self,
        context: AgentContext,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        rules: Iterable[str | RuleWithExamples],
        headless: bool,
    ) -> PolicyExplanation: ...

    def list_statuses_in_context(self, context: AgentContext) -> Sequence[ToolStatus]: ...

    async def find_tools_in_context(self, context: AgentContext, query: str, **how: Any) -> ToolSearchResult: ...

    def make_client_operations(self, client: ClientProcess) -> Mapping[str, RequestHandler]:
        """Return the further requests that a client process may send, by name."""
        ...


class ClientFacingServer(Protocol):
    """The parts of the server that a :class:`ClientProcess` needs."""

    @property
    def host(self) -> ClientFacingKernel: ...

    @property
    def is_shutting_down(self) -> bool: ...

    async def wait_for_orphaned_calls(self, session_id: str) -> None:
        """Wait until no call runs in a session whose client process has disconnected."""

    def release_lost_client(self, client: ClientProcess, sessions: Iterable[LocalSession]) -> None:
        """Release a client process that has disconnected.

        Its sessions are suspended after their calls have ended. Then its registrations end.
        """


class ClientProcess:
    """A connected client process, with its registrations and sessions.

    :raises RemoteRequestError: if the greeting is invalid or the requested agent cannot be loaded
    """

    def __init__(self, server: ClientFacingServer, connection: IpcConnection, hello: Message) -> None:
        self._server = server
        self._host = server.host
        self.connection = connection
        self._sessions: dict[str, LocalSession] = {}
        self._watched: dict[str, Callable[[], None]] = {}  # by session: the function that stops watching
        self._last_stored: dict[str, int] = {}
        """By session: the number of the last ``keep`` request that was accepted."""
        self._streamed_turns: dict[str, LocalTurn] = {}
        """By session: the last turn whose calls arrived one by one."""
        self._generations: dict[int, Generation] = {}
        self._reloading = asyncio.Lock()
        self._last_dropped_generation = 0
        """The number of the newest generation that was dropped."""
        self._contexts: dict[str, AgentContext] = {}
        """By agent: the context of the process, and those of further agents that its sessions use."""
        greeting = wire_encoding.parse_client_greeting(hello)
        self.frontend: str = greeting.face[:_MAX_FRONTEND_CHARS]
        self.secrets = greeting.secrets
        self._cleanups: list[Callable[[], Awaitable[object]]] = []
        self._subscriptions = ResourceChangeCallbacks()
        try:
            self._client_tools = client_tools = ClientProcessTools(connection, greeting.tools, greeting.secrets)
            # Before any tool or rule of the process is used: what they return may already contain a secret.
            self._host.redact_secrets(greeting.secrets)
            self._registrations = ClientProcessRegistrations(
                self.frontend,
                tools=tuple(client_tools.tools),
                rules=tuple(greeting.rules),
                watchdogs=tuple(
                    RemoteWatchdog(connection, number, one) for number, one in enumerate(greeting.watchdogs)
                ),
                offerings=self._make_providers(greeting.offerings),
                mode=greeting.mode,
                configured_mode=greeting.configured_mode,
                tool_config=greeting.tool_config,
                tool_settings=greeting.tool_settings,
                catalog=greeting.catalog,
                agents=parse_agent_tables(greeting.agents),
                builtins=greeting.builtins,
            )
            self.context = self._get_or_make_context(greeting.agent)
        except HandrailError as error:
            raise wire_encoding.convert_to_remote_error(error) from None
        except ValueError as error:  # a secret that cannot be redacted
            raise RemoteRequestError("UsageError", f"Invalid `secrets`: {error}") from None
        self._token: int = self._host.describe_kernel()["token"]
        self.requests: Mapping[str, RequestHandler] = {
            "open": make_request_handler(self._open),
            "child": make_request_handler(self._open_child),
            "begin": make_request_handler(self._start_interaction),
            "call": make_request_handler(self._answer_next_call),
            "keyed": make_request_handler(self._call_with_key),
            "recall": make_request_handler(self._recover_results),
            "list_suspended_calls": make_request_handler(self._list_suspended_calls),
            "resume_suspended_calls": make_request_handler(self._resume_suspended_calls),
            "instructions": make_request_handler(self._read_parent_instructions),
            "stop": make_request_handler(self._stop),
            "suspend": make_request_handler(self._suspend),
            "close": make_request_handler(self._close),
            "explain": make_request_handler(self._explain),
            "statuses": make_request_handler(self._list_statuses),
            "find": make_request_handler(self._find),
            "reload": make_request_handler(self._reload),
            "flush": make_request_handler(self._flush),
            "keep": make_request_handler(self._append_history),
            **make_protocol_handlers(ConversationHistory, "history.", self._history),
            **make_protocol_handlers(NotificationQueue, "notices.", self._notifications),
            **self._host.make_client_operations(self),
        }
        """The requests of the process, except replies and the runtime services of the calls that it runs."""
        self.notifications: Mapping[str, Callable[[Any], None]] = {
            "watch": make_notification_handler(self._watch),
            "unwatch": make_notification_handler(self._unwatch),
            "rules": make_notification_handler(self._add_rules),
            "mode": make_notification_handler(self._set_mode),
            "client_capabilities": make_notification_handler(self._set_client_capabilities),
            "delegates": make_notification_handler(self._set_subagent_runner),
            "offering.updated": make_notification_handler(self._subscriptions.invoke_change_callback),
        }
        self.operations = self._operations()

    def make_greeting_response(self) -> Message:
        """Return the answer to the greeting of the process."""
        context = self.context
        return {
            **self._host.describe_kernel(),
            "agent": context.manifest.to_data(),
            "generation": wire_encoding.encode_generation(context.generation),
            "rules": wire_encoding.encode_rule_book(context.rules),
        }

    def handle_disconnect(self, reason: str) -> None:
        """Release the process, whose connection is lost.

        It receives nothing more. Its sessions end with their calls.
        """
        for context in self._contexts.values():
            context.generations.watchers.remove(self._send_generation)
        # The field is emptied first, so that nothing that the release causes is sent over the lost connection.
        sessions, self._sessions = self._sessions, {}
        for session_id in tuple(self._watched):
            self._unwatch(session_id)
        self._server.release_lost_client(self, sessions.values())

    async def aclose(self) -> None:
        """End the registrations of the process. None of its calls may be running."""
        contexts, self._contexts = self._contexts, {}
        async with AsyncExitStack() as steps:
            for context in contexts.values():
                # An exit stack runs every step even if one of them fails.
                steps.push_async_callback(context.aclose)
            for end in self._cleanups:
                steps.push_async_callback(end)

    def add_disconnect_callback(self, end: Callable[[], Awaitable[object]]) -> None:
        """Call ``end`` after the process has disconnected."""
        self._cleanups.append(end)

    def _operations(self) -> OperationTable:
        is_leaving = self._is_shutting_down
        ops = {
            name: make_request_operation(
                name,
                one,
                is_leaving=is_leaving,
                at_once=name in EAGER_REQUESTS,
                cancel_when_lost=name in UNBOUNDED_WAITS,
            )
            for name, one in self.requests.items()
        }
        ops["reply"] = OperationSpec(self._answer_reply_calls, eager="reply" in EAGER_REQUESTS)
        return OperationTable(
            {**ops, **self._client_tools.requests}, {**self.notifications, **self._client_tools.notifications}
        )

    def _is_shutting_down(self) -> bool:
        return self._server.is_shutting_down

    def _get_or_make_context(self, agent: str) -> AgentContext:
        """Return the context of ``agent`` with the registrations of the process, created at its first use."""
        if (context := self._contexts.get(agent)) is None:
            context = self._make_context(agent)
            context.generations.watchers.append(self._send_generation)
            self._contexts[agent] = context
            self._keep_generation(context.generation)
        return context

    def _make_context(self, agent: str) -> AgentContext:
        return self._host.create_agent_environment(
            agent, replace(self._registrations, tools=tuple(self._client_tools.tools))
        )

    def _make_providers(
        self, told: Sequence[wire_encoding.ResourceProviderDescription]
    ) -> tuple[ResourceProvider, ...]:
        offer = self._client_tools.call_provider_method
        return tuple(
            make_remote_resource_provider(self.connection, number, one, offer, self._subscriptions)
            for number, one in enumerate(told)
        )

    def _start_own_generations(self) -> GenerationDiff:
        """Give the process its own generations, because it registered its first tools."""
        fresh = {agent: self._make_context(agent) for agent in self._contexts}  # a fault changes nothing
        before = self.context.generation
        for agent, context in self._contexts.items():
            context.generations.watchers.remove(self._send_generation)
            context.replace_generations(fresh[agent])
            context.generations.watchers.append(self._send_generation)
            self._send_generation(context.generation)
        return self.context.generation.compute_diff_from(before)

    def _keep_generation(self, generation: Generation) -> None:
        self._generations[generation.number] = generation
        while len(self._generations) > _MAX_OLD_GENERATIONS:
            self._last_dropped_generation = next(iter(self._generations))
            del self._generations[self._last_dropped_generation]

    def _send_generation(self, generation: Generation) -> None:
        self._keep_generation(generation)
        encoded_generation = wire_encoding.encode_generation(generation)
        for agent, context in self._contexts.items():
            if context.generation is generation:
                self.connection.notify("generation", {"agent": agent, "generation": encoded_generation})

    @property
    def sessions(self) -> tuple[LocalSession, ...]:
        """The open sessions of the process."""
        return tuple(self._sessions.values())

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────

    async def _open(
        self,
        id: str,
        agent: str | None,
        headless: bool,
        client: Sequence[ClientRequestKind] | None,
        editor: bool,
        topic: str | None,
        user_context: UserContext | None,
        client_info: ClientInfo | None,
        rules: Sequence[str | RuleWithExamples],
        mode: Mode | None,
        shared: bool,
        interaction: int,
        loaded_tools: Sequence[str],
    ) -> Message:
        # A client that reconnects may open the session while calls of its lost connection still run in it.
        await self._server.wait_for_orphaned_calls(id)
        context = self.context if agent is None else self._get_or_make_context(agent)
        kind = RemoteEditorHandler if editor else RemoteClientHandler
        options: SessionOptions = {
            "approval_handler": None if headless else RemoteApprovalHandler(self.connection, id, shared=shared),
            "client": None if client is None else kind(self.connection, id, client),
        }
        options |= {"rules": rules, "mode": mode, "topic": topic, "user_context": user_context}
        options |= {"client_info": client_info}
        opening = SessionOpenParameters(context, self._get_or_make_context, self.frontend, options)
        return self._register_session(await self._host.open_session(opening, id), context, interaction, loaded_tools)

    async def _open_child(self, id: str, session: str, call: str, delegation: SubagentTask) -> Message:
        """Open the session of a sub-agent for a call; see :meth:`handrail.contract.session_protocols.Session.open_child`."""
        parent = self._find_session(session)
        opened: list[LocalSession] = []

        async def opens(parent: LocalSession, call: Call, delegation: SubagentTask) -> ChildSession:
            opened.append(
                await self._host.open_child_session(
                    self._get_or_make_context, ParentRef(parent, call, delegation), self.frontend, id
                )
            )
            return ChildSession(opened[0], opened[0].tree_node.manifest)

        await parent.tree_node.open_child(parent, call, delegation, opens)
        (child,) = opened
        manifest = child.tree_node.manifest
        return {**self._register_session(child, self._get_or_make_context(manifest.id)), "agent": manifest.to_data()}

    def _set_subagent_runner(self, session: str, there: bool) -> None:
        if session in self._sessions:
            self._sessions[session].set_subagent_runner(
                RemoteSubagentRunner(self.connection, session) if there else None
            )

    def _register_session(
        self, session: LocalSession, context: AgentContext, interaction: int = 0, loaded_tools: Sequence[str] = ()
    ) -> Message:
        # The connection may have been lost while the session was opened. Nothing else would release the session.
        if self.connection.lost_reason is not None:
            self._server.release_lost_client(self, (session,))
        else:
            self._sessions[session.id] = session
        catalog = session.catalog
        if interaction or loaded_tools:  # the interaction continues here; otherwise its stored state counts
            catalog.start_next_interaction(interaction, loaded_tools)
        catalog.preload_index(context.generation)
        session.change_notifier.on_tools_loaded = partial(self._send_loaded_tools, session.id, catalog)
        session.change_notifier.on_mode_changed = partial(self._send_mode, session.id)
        session.watch_stop(partial(self._send_stop, session.id))
        fields: Message = {
            "mode": session.mode,
            "turns": session.last_turn,
            "catalog": WIRE_CODEC.encode_value(CatalogOptions, catalog.options),
            "loaded_tools": list(catalog.active.build_minimal_loading_steps()),
            "native": _list_provider_tools(session),
            "skills": WIRE_CODEC.encode_value(Sequence[SkillInfo], session.skills),
            "agents": WIRE_CODEC.encode_value(Sequence[SubagentType], session.subagent_types),
        }
        if context is self.context:  # the process knows these tools already
            return fields
        return fields | {"generation": wire_encoding.encode_generation(context.generation)}

    async def _start_interaction(self, session: str, interaction: int, text: str, headless: bool) -> Any:
        opened = self._find_session(session)
        await opened.start_interaction(text, interaction, headless=headless)
        return _list_provider_tools(opened)

    def _send_loaded_tools(self, session_id: str, catalog: InteractionLoadedTools, steps: Sequence[str]) -> None:
        """Send the change of the loaded tools, before the answer of the call that made it."""
        self.connection.notify(
            "loaded_tools", {"session_id": session_id, "interaction": catalog.interaction_number, "steps": list(steps)}
        )

    def _send_mode(self, session_id: str, mode: Mode) -> None:
        """Send the new mode of a session, before the answer of the call that changed it."""
        self.connection.notify("mode", {"session_id": session_id, "mode": mode})

    def _send_stop(self, session_id: str) -> None:
        """Send that a user stopped a session, so that its agent ends its run."""
        self.connection.notify("stopped", {"session_id": session_id})

    def _find_session(self, session_id: str) -> LocalSession:
        if (session := self._sessions.get(session_id)) is None:
            raise UsageError(f"Session {session_id[:80]!r} is not open in this process. Open it first.")
        return session

    async def _answer_reply_calls(self, body: Any) -> list[Any]:
        """Answer all calls of one reply. Every error is sent by its class and text."""
        if self._server.is_shutting_down:
            raise RemoteRequestError(LEAVING, SHUTDOWN_TEXT)
        session, turn, token, generation, calls = decode_reply_request(body)
        found = self._sessions.get(session) or self._find_session(session)
        tools = self._tools_for_turn(found, token, generation)
        # Most replies propose one call. This path needs no task and no turn object for it.
        if len(calls) == 1:
            answers: Sequence[CallAnswer] = (await found.run_single_call_turn(turn, tools, calls[0]),)
        else:
            answers = await found.open_numbered_turn(turn, tools).call_all(calls)
        if self._server.is_shutting_down and any(_was_ended_by_shutdown(answer.result) for answer in answers):
            raise RemoteRequestError(TRANSFERRED, "The process that held the workspace has ended. Try again.")
        return [wire_encoding.encode_call_answer(answer) for answer in answers]

    def _tools_for_turn(self, session: LocalSession, token: int, generation: int) -> Generation:
        """Return the tools of a turn.

        A turn that started with another lease holder, or over an earlier connection, continues with the current tools.
        """
        # Each lease holder numbers its generations from the start, so a number is only valid together with its token.
        tools = self._generations.get(generation) if token == self._token else session.generation
        # The number is unknown, but not because it is too old: it is from an earlier connection.
        if tools is None and generation > self._last_dropped_generation:
            tools = session.generation
        if tools is None:
            raise UsageError(f"Generation {generation} of the tools is no longer available. Start a new turn.")
        return tools

    async def _answer_next_call(
        self,
        session: str,
        turn: TurnNumber,
        position: int,
        token: int,
        generation: int,
        call: ProposedCall,
        behind: int,
    ) -> Any:
        """Answer the next call of a reply that is still arriving.

        If another lease holder received the first calls of the turn, this one does not know the turn: the client reads the
        results from the log, or proposes the calls again.
        """
        found = self._find_session(session)
        # A call must not run before the messages that led to it are stored, or a crash would leave a call without its
        # reason.
        if behind not in (0, self._last_stored.get(session)):
            raise RemoteRequestError(
                TRANSFERRED,
                f"The messages of session {session} before this call did not arrive, or were refused. Start a new turn.",
            )
        opened = self._streamed_turns.get(session)
        if not position:
            tools = self._tools_for_turn(found, token, generation)
            try:
                opened = self._streamed_turns[session] = found.open_numbered_turn(turn, tools)
            except UsageError:
                if found.is_closed:
                    raise
                opened = None  # the log or the history has calls of the turn: another lease holder received them
        if opened is None or (opened.number, opened.proposed_call_count) != (turn, position):
            raise RemoteRequestError(
                TRANSFERRED, f"Turn {turn} of session {session} did not start with this lease holder. Start a new turn."
            )
        answer = await opened.start_streamed_call(call)
        if self._server.is_shutting_down and _was_ended_by_shutdown(answer.result):
            raise RemoteRequestError(TRANSFERRED, "The process that held the workspace has ended. Try again.")
        return wire_encoding.encode_call_answer(answer)

    async def _call_with_key(self, session: str, call: ProposedCall, key: str) -> Result:
        given = call.arguments
        arguments = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
        result = await self._find_session(session).call(call.name, arguments, key=key)
        if self._is_shutting_down() and _was_ended_by_shutdown(result):  # repeated with its key, the log answers it
            raise RemoteRequestError(LEAVING, SHUTDOWN_TEXT)
        return result

    async def _recover_results(self, session: str, calls: Sequence[str]) -> Any:
        """Return the answers, each with whether the call has started or waits.

        A call that has not started had no effect and may be proposed again.
        """
        answers = await self._find_session(session).recover_results(calls)
        return [[wire_encoding.encode_call_answer(answer), await self._has_begun(answer)] for answer in answers]

    async def _has_begun(self, answer: CallAnswer) -> bool:
        # The log decides, not the answer: the lease holder that started the call may have ended before it could reply.
        outcome = await self._host.log.find_outcome(answer.call_id)
        # The kernel records `refused` for a call that it stopped before the start, because the lease holder shut down.
        stopped = outcome is not None and outcome.kind == "rejected" and _was_ended_by_shutdown(answer.result)
        return bool({"awaiting_approval", "job_id"} & answer.result.metadata.keys()) or (
            outcome is not None and not stopped
        )

    async def _list_suspended_calls(self, session: str) -> list[str]:
        return await self._find_session(session).list_calls_awaiting_approval()

    async def _resume_suspended_calls(self, session: str) -> list[Any]:
        return [
            wire_encoding.encode_call_answer(answer)
            for answer in await self._find_session(session).resume_suspended_calls()
        ]

    async def _read_parent_instructions(self, session: str) -> Sequence[tuple[str, str]]:
        return await self._find_session(session).read_parent_instructions()

    # ── messages and notifications ───────────────────────────────────────────────────────────────

    def _history(self, session: str) -> ConversationHistory:
        if (history := self._find_session(session).history) is None:
            raise UsageError(f"Session {session} has no stored history. Pass the id of a stored session.")
        return history

    async def _append_history(self, session: str, entries: Sequence[CheckedHistoryEntry], number: int) -> None:
        kept = self._history(session).store_messages(entries)
        # Set before the wait: the next call may arrive while these messages are written, and the writer keeps the
        # order.
        self._last_stored[session] = number
        await kept

    def _notifications(self, session: str) -> NotificationQueue:
        if (notices := self._find_session(session).notifications) is None:
            raise UsageError(f"Session {session} receives no notifications. Open it first.")
        return notices

    async def _stop(self, session: str, reason: StopReason) -> int:
        return self._find_session(session).cancel_running_calls(reason)

    async def _suspend(self, session: str, reason: StopReason, why: str) -> None:
        found = self._find_session(session)
        self._remove_session(session)
        await found.suspend(why, reason)

    async def _close(self, session: str) -> None:
        found = self._find_session(session)
        await found.close()
        self._remove_session(session)

    def _remove_session(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._streamed_turns.pop(session_id, None)
        self._last_stored.pop(session_id, None)
        self._unwatch(session_id)

    def _watch(self, session: str) -> None:
        if session in self._sessions and session not in self._watched:
            self._watched[session] = self._sessions[session].watch_events(self._send_event)

    def _unwatch(self, session: str) -> None:
        if (stop := self._watched.pop(session, None)) is not None:
            stop()

    def _send_event(self, event: Event) -> None:
        # A slow client must not make the kernel keep an unlimited number of progress events. Other kinds are not
        # skipped.
        self.connection.notify("event", asdict(event), skip_when_behind=event.kind in DROPPABLE_KINDS)

    def _add_rules(self, session: str, rules: Sequence[str]) -> None:
        if session in self._sessions:
            self._sessions[session].add_rules(*rules)

    def _set_mode(self, session: str, mode: Mode | None) -> None:
        if session in self._sessions and mode is not None:
            self._sessions[session].set_mode(mode)

    def _set_client_capabilities(self, session: str, call: str, kinds: Sequence[ClientRequestKind]) -> None:
        if session in self._sessions and isinstance(
            peer := self._sessions[session].lane.environment.client, RemoteClientHandler
        ):
            peer.set_supported_requests(call, kinds)

    # ── the kernel ───────────────────────────────────────────────────────────────────────────────

    async def _flush(self) -> None:
        await self._host.log.flush()

    async def _list_statuses(self) -> Sequence[ToolStatus]:
        return self._host.list_statuses_in_context(self.context)

    async def _find(self, query: str, limit: int, patience_ms: int | None, by_words: bool) -> ToolSearchResult:
        # Bounded, since the value comes from another process.
        patience_s = None if patience_ms is None else min(max(patience_ms, 0), _MAX_PATIENCE_MS) / 1000
        return await self._host.find_tools_in_context(
            self.context, query, limit=max(limit, 1), patience_s=patience_s, by_words=by_words
        )

    async def _explain(
        self, tool: str, arguments: Mapping[str, Any], rules: Sequence[str | RuleWithExamples], headless: bool
    ) -> PolicyExplanation:
        return await self._host.explain_call_in_context(self.context, tool, arguments, rules=rules, headless=headless)

    async def _reload(
        self, tools: Sequence[Any] | None, offerings: Sequence[wire_encoding.ResourceProviderDescription]
    ) -> GenerationDiff:
        # One at a time: a reload that fails restores the tools before it, which would undo a later one that succeeded.
        async with self._reloading:
            before = self._client_tools.tools
            try:
                return await self._load_reloaded(tools, offerings)
            except HandrailError:
                self._client_tools.tools = before
                raise

    async def _load_reloaded(
        self, tools: Sequence[Any] | None, offerings: Sequence[wire_encoding.ResourceProviderDescription]
    ) -> GenerationDiff:
        given = None if tools is None else self._client_tools.replace_tools(tools)
        for one, told in zip(self._registrations.offerings, offerings, strict=False):
            cast("RemoteResourceProvider", one).listing = told.listing
        if self.context.shared and given:
            return self._start_own_generations()
        given = given if not self.context.shared else None
        for context in [one for one in self._contexts.values() if one is not self.context]:
            await context.generations.reload_all_sources(given)
        return await self.context.generations.reload_all_sources(given)


def _was_ended_by_shutdown(result: Result) -> bool:
    """Return whether a call was stopped or suspended because the kernel was shutting down."""
    return result.metadata.get("stopped_by") == "shutdown" or "awaiting_approval" in result.metadata


def _list_provider_tools(session: LocalSession) -> list[Any]:
    """Return the provider tools by id, each with the reason why the session's rules exclude it, or None."""
    return [[offer.spec.id, offer.unavailable_reason] for offer in session.provider_tools]
