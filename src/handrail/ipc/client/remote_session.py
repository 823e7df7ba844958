"""A session in a client process, with its turns, history and approvals. The lease holder executes its calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.catalog.view import CatalogOptions
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.approval_requests import (
    Approval,
    ApprovalAnswer,
    ApprovalChoice,
    ApprovalService,
    StoredProjectRule,
)
from handrail.contract.calls_and_results import CallAnswer, Event, ProposedCall, Result, make_call_id
from handrail.contract.errors import ErrorKind, HandrailError, StartError, ToolError, UsageError
from handrail.contract.permission_modes import DEFAULT_MODE, Mode
from handrail.contract.rule_forms import rule_to_json_data
from handrail.contract.services.channels_and_triggers import NotificationQueue
from handrail.contract.services.client_services import EditorClientHandler
from handrail.contract.services.history_and_skill_services import ConversationHistory, HistoryEntry, SkillInfo
from handrail.contract.services.job_and_tool_services import Job, JobService
from handrail.contract.services.subagent_services import (
    SubagentRunner,
    SubagentTask,
    SubagentType,
    drop_delegation_tools,
)
from handrail.contract.session_protocols import CallProposal, ChildSession, StopReason
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.provider_tools import ProviderToolOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool_generation import Generation
from handrail.contract.undo_reports import UndoReport
from handrail.ipc.client.reconnecting_client import ReconnectingClient
from handrail.ipc.codec import wire_encoding
from handrail.ipc.codec.protocol_rpc import WIRE_CODEC, HolderSender, make_lease_holder_caller, make_protocol_proxy
from handrail.ipc.codec.wire_encoding import restore_error
from handrail.ipc.server.client_proxies import get_supported_client_request_kinds
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import LEAVING, TRANSFERRED, RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost, IpcConnection
from handrail.policy.rules.rules_and_modes import parse_optional_mode
from handrail.session.local_session import (
    CLOSED,
    ENDED,
    SUSPENDED,
    generate_session_id,
    parse_session_rules,
    require_matchable_rules,
)
from handrail.session.session_context import SessionOptions
from handrail.session.session_events import EventQueue, add_listener, iterate_events
from handrail.session.turn import to_proposed_call
from handrail.store.tables.approval_tables import ApprovalReader

LEAVE_TIMEOUT_S = 20.0
"""The maximum wait at shutdown for a lease holder that does not answer: longer than any call takes to stop."""


async def request_undo(
    client: ReconnectingClient, call: str | None, session: str | None, *, dry_run: bool, overwrite: bool
) -> UndoReport:
    """Ask the lease holder to undo calls; see :meth:`handrail.kernel.kernel_interface.Kernel.undo`."""
    body = {"call": call, "session": session, "dry_run": dry_run, "overwrite": overwrite}
    return WIRE_CODEC.get_type_reader(UndoReport)(await client.request("undo", body, repeatable=dry_run))


class RemoteSession:
    """A :class:`~handrail.contract.session_protocols.Session` over a :class:`ReconnectingClient`.

    :param generation: returns the current tools of this process's sessions
    :param forget: called when the session has ended
    """

    def __init__(
        self,
        session_id: str,
        ipc_client: ReconnectingClient,
        generation: Callable[[], Generation],
        options: SessionOptions,
        workdir: str,
        forget: Callable[[RemoteSession], None],
    ) -> None:
        self.id = session_id
        self.history = RemoteHistory(session_id, ipc_client)
        self.is_closed = False
        self.workdir = workdir
        self.attendant = options.get("approval_handler")
        self.client = options.get("client")
        self._ipc_client = ipc_client
        self._generation = generation
        self._own_generation: Generation | None = None
        """The tools of its agent, if it is not the agent of its process."""
        self._options = options
        self._mode: Mode | None = parse_optional_mode(options.get("mode"))
        self._rules = [rule_to_json_data(rule) for rule in options.get("rules", ())]
        self._forget = forget
        self._turns = 0
        self._catalog = InteractionLoadedTools(session_id, CatalogOptions())
        """The loaded tools of its model, as in the lease holder."""
        self.on_child_opened: Callable[[RemoteSession], None] = lambda _: None
        """Called with each sub-agent session that it opens."""
        self._provider_tools: Mapping[str, str | None] = {}
        """By id of a provider tool: the reason why the session's rules exclude it, or None."""
        self._listeners: list[Callable[[Event], None]] = []
        self._readers: list[EventQueue] = []
        self.stop_listeners: list[Callable[[], None]] = []
        self._closed_reason: str | None = None
        self.subagent_types: Sequence[SubagentType] = ()
        self.skills: Sequence[SkillInfo] = ()
        self.delegates: SubagentRunner | None = None
        self._is_headless_interaction = False
        """Whether the current interaction is headless."""

    @property
    def is_headless(self) -> bool:
        return self.attendant is None

    async def open(self) -> None:
        """Open the session with the lease holder.

        :raises HandrailError: if it cannot be opened
        """
        try:
            while True:
                try:
                    return self._read_opened(await self._ipc_client.request("open", self._opening_body(), settle=True))
                except ConnectionLost:  # it may be open, but nothing has happened in it
                    continue
        except asyncio.CancelledError:
            self._end(SUSPENDED)
            self._ipc_client.start_background_task(self._abandon_opening())
            raise

    async def _abandon_opening(self) -> None:
        """Suspend a session that may have been opened although the caller was cancelled."""
        with contextlib.suppress(HandrailError):
            await self._detach_from_holder("user")

    async def reopen(self, connection: IpcConnection) -> None:
        """Open the session again with the next lease holder, before any other request.

        If the lease holder refuses it, this session ends and the others continue.

        :raises ConnectionLost: if the next lease holder disconnects as well
        """
        rule_count = len(self._rules)
        try:
            self._read_opened(await connection.request("open", self._opening_body()))
        except RemoteRequestError as refused:
            if refused.kind == LEAVING:
                raise
            self._end(f"cannot be opened with the next process that holds the workspace: {restore_error(refused)}")
            return
        if self._is_headless_interaction:  # in the middle of a headless interaction
            await connection.request("begin", self._interaction_body(""))
        if late := self._rules[rule_count:]:
            connection.notify("rules", {"session": self.id, "rules": late})
            self._provider_tools = {}
        if self.delegates is not None:
            connection.notify("delegates", {"session": self.id, "there": True})
        if self._listeners:
            connection.notify("watch", {"session": self.id})

    def update_agent_generation(self, agent: str, generation: Generation) -> None:
        if self._own_generation is not None and self._options.get("agent") == agent:
            self._own_generation = generation

    def _opening_body(self) -> Message:
        view = {
            "interaction": self._catalog.interaction_number,
            "loaded_tools": list(self._catalog.active.build_minimal_loading_steps()),
        }
        options = self._options
        return {
            "id": self.id,
            "rules": list(self._rules),
            **view,
            "headless": self.is_headless,
            "topic": options.get("topic"),
            "agent": options.get("agent"),
            "mode": self._mode,
            "shared": bool(getattr(self.attendant, "is_shared", False)),
            "user_context": options.get("user_context"),
            "client": None if self.client is None else get_supported_client_request_kinds(self.client, ""),
            "client_info": options.get("client_info"),
            "editor": isinstance(self.client, EditorClientHandler),
        }

    def _send_client_capabilities(self, call: str, call_id: str) -> None:
        """Report the requests that the client supports to the lease holder, before a call is proposed.

        :param call: the id for the lease holder: of a turn, without the position in it
        """
        if self.client is not None:
            kinds = get_supported_client_request_kinds(self.client, call_id)
            self._ipc_client.notify("client_capabilities", {"session": self.id, "call": call, "kinds": kinds})

    def _read_opened(self, fields: Message) -> None:
        if "generation" in fields:
            self._own_generation = wire_encoding.decode_generation(fields["generation"], self._tools)
        self._turns = max(self._turns, fields["turns"])
        self._mode = parse_optional_mode(fields["mode"])
        self._catalog.replace_catalog_options(WIRE_CODEC.get_type_reader(CatalogOptions)(fields["catalog"]))
        self._catalog.active.apply_loading_steps(fields["loaded_tools"])
        self._provider_tools = dict(fields["native"])
        self.skills = self.skills or WIRE_CODEC.get_type_codec(Sequence[SkillInfo]).read(
            fields["skills"]
        )  # they stay the same
        self.subagent_types = WIRE_CODEC.get_type_codec(Sequence[SubagentType]).read(fields["agents"])

    # ── loaded tools ─────────────────────────────────────────────────────────────────────────────

    @property
    def _tools(self) -> Generation:
        return self._own_generation or self._generation()

    @property
    def active_tools(self) -> list[ToolSpec]:
        return drop_delegation_tools(self._catalog.loaded_tool_specs(self._tools), self.delegates)

    async def start_interaction(self, text: str = "", *, headless: bool = False) -> None:
        self._check_open()
        self._catalog.start_next_interaction()
        self._is_headless_interaction = headless
        body = self._interaction_body(text)
        # Without a lease holder, the next one learns of it when the session is opened again.
        with contextlib.suppress(StartError):
            before = self._provider_tools
            answer = await self._ipc_client.request("begin", body, settle=True, repeatable=True)
            if self._provider_tools is before:  # otherwise rules were added after the evaluation
                self._provider_tools = dict(answer)

    def _interaction_body(self, text: str) -> Message:
        number = self._catalog.interaction_number
        return {"session": self.id, "interaction": number, "text": text, "headless": self._is_headless_interaction}

    def update_loaded_tools(self, interaction: int, steps: Iterable[str]) -> None:
        """Update the loaded tools, because the lease holder has changed them."""
        if interaction == self._catalog.interaction_number:
            self._catalog.active.apply_loading_steps(steps)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        self._check_open()
        proposed = ProposedCall(tool, arguments)
        if key is None:
            self._turns += 1
            generation = self._tools
            answers = await self.execute_calls(self._turns, self._ipc_client.token, generation.number, (proposed,))
            return answers[0].result
        self._send_client_capabilities(f"{self.id}/key:{key}", f"{self.id}/key:{key}")
        body = {"session": self.id, "call": wire_encoding.encode_proposed_call(proposed), "key": key}
        while True:
            try:
                return WIRE_CODEC.get_type_reader(Result)(await self._ipc_client.request("keyed", body, settle=True))
            except ConnectionLost:  # with the same key, the recorded result is returned and nothing runs twice
                continue
            except StartError as error:
                return Result.error("unavailable", f"{error} Call again with the same key: nothing runs twice.")

    async def call_all(self, calls: Iterable[CallProposal]) -> list[Result]:
        return [answer.result for answer in await self.start_turn().call_all(calls)]

    def start_turn(self) -> RemoteTurn:
        self._check_open()
        self._turns += 1
        token = self._ipc_client.token
        return RemoteTurn(
            self.execute_calls, token, self._tools, self._turns, self._catalog, self._provider_tools, self.delegates
        )

    async def execute_calls(
        self, number: int, token: int, generation: int, calls: Sequence[ProposedCall], first: int | None = None
    ) -> Sequence[CallAnswer]:
        """Execute the calls of one turn, even if the lease holder disconnects meanwhile.

        :param first: the position of a single call in the turn; None if ``calls`` are all calls of the turn
        """
        ids = [make_call_id(self.id, number, (first or 0) + index) for index in range(len(calls))]
        if self._closed_reason is not None:
            return self._closed_answers(ids)
        items = [wire_encoding.encode_proposed_call(call) for call in calls]
        body: Message = {"session": self.id, "turn": number, "token": token, "generation": generation}
        if first is None:
            body["calls"] = items
        else:
            try:
                body |= {"position": first, "call": items[0], "behind": await self.history.get_pending_write_number()}
            except HandrailError as error:
                text = f"Nothing was run, because the conversation cannot be stored: {error}"
                return _same_answers(ids, Result.error("unavailable", text))
        if not first:
            self._send_client_capabilities(f"{self.id}/{number}", make_call_id(self.id, number, 0))
        try:
            answers = await self._ipc_client.request("reply" if first is None else "call", body, settle=True)
        except ConnectionLost:
            return await self._recover_after_loss(ids, calls)
        except RemoteRequestError as refused:
            if refused.kind != TRANSFERRED:
                raise
            return await self._recover_after_loss(ids, calls)
        except StartError as error:
            return _same_answers(ids, Result.error("unavailable", f"Nothing was run. {error}"))
        except UsageError:
            if self._closed_reason is None:
                raise
            return self._closed_answers(ids)
        return [wire_encoding.decode_call_answer(answer) for answer in (answers if first is None else [answers])]

    def _closed_answers(self, ids: Sequence[str], kind: ErrorKind = "cancelled") -> Sequence[CallAnswer]:
        """Return the answers to calls in a session that is no longer open.

        :param kind: ``cancelled`` if none of them reached a lease holder, ``interrupted`` if this is unknown
        """
        assert self._closed_reason is not None
        unknown = "It is unknown whether this call took effect. " if kind == "interrupted" else ""
        return _same_answers(ids, Result.error(kind, unknown + self._closed_reason))

    async def _recover_after_loss(self, ids: Sequence[str], calls: Sequence[ProposedCall]) -> Sequence[CallAnswer]:
        """Recover the answers to calls after the lease holder has disconnected.

        Calls that had not started are proposed to the next lease holder.
        """
        if self._closed_reason is not None:
            return self._closed_answers(ids, "interrupted")
        try:
            await self.history.wait_until_durable()
        except HandrailError as error:
            text = f"It is unknown whether this call took effect, and the conversation cannot be stored: {error}"
            return _same_answers(ids, Result.error("interrupted", text))
        try:
            return await self._recover_or_repeat(ids, calls)
        except StartError as error:
            text = f"It is unknown whether this call took effect. Check before you call it again. {error}"
            return _same_answers(ids, Result.error("interrupted", text))

    async def _recover_or_repeat(self, ids: Sequence[str], calls: Sequence[ProposedCall]) -> Sequence[CallAnswer]:
        recovered = await self._request_recovery(ids)
        answers = [answer for answer, _ in recovered]
        again = [index for index, (_, begun) in enumerate(recovered) if not begun]
        if again:
            retry = await self.start_turn().call_all([calls[index] for index in again])
            for index, answer in zip(again, retry, strict=True):
                answers[index] = answer
        return answers

    async def recover_result(self, call_id: str) -> CallAnswer:
        """Recover one answer; see :meth:`handrail.session.local_session.LocalSession.recover_result`."""
        return (await self.recover_results((call_id,)))[0]

    async def recover_results(self, call_ids: Sequence[str]) -> list[CallAnswer]:
        """Recover several answers; see :meth:`handrail.session.local_session.LocalSession.recover_results`."""
        self._check_open()
        return [answer for answer, _ in await self._request_recovery(call_ids)]

    async def _request_recovery(self, call_ids: Sequence[str]) -> list[tuple[CallAnswer, bool]]:
        body = {"session": self.id, "calls": list(call_ids)}
        while True:
            try:
                response = await self._ipc_client.request("recall", body)
            except ConnectionLost:  # calls that it resumed are no longer suspended; their records have the answers
                continue
            return [(wire_encoding.decode_call_answer(answer), begun) for answer, begun in response]

    async def resume_suspended_calls(self) -> list[CallAnswer]:
        """Resume suspended calls; see :meth:`handrail.session.local_session.LocalSession.resume_suspended_calls`."""
        self._check_open()
        waiting: list[str] | None = None
        while True:
            try:
                if waiting is None:
                    waiting = await self._ipc_client.request("list_suspended_calls", {"session": self.id})
                    answers = await self._ipc_client.request(
                        "resume_suspended_calls", {"session": self.id}, settle=True
                    )
                    return [wire_encoding.decode_call_answer(answer) for answer in answers]
                return await self.recover_results(waiting)
            except ConnectionLost:  # the log has the calls that it resumed; the others still wait
                continue

    def cancel_running_calls(self, reason: StopReason = "user") -> None:
        self._ipc_client.start_background_task(self._stop(reason))

    async def open_child(self, call_id: str, delegation: SubagentTask) -> ChildSession:
        options: SessionOptions = {"approval_handler": self.attendant, "agent": delegation.agent}
        shared = (self._generation, options, self.workdir, self._forget)
        child = RemoteSession(generate_session_id(), self._ipc_client, *shared)
        handed = WIRE_CODEC.encode_value(SubagentTask, delegation)
        body = {"id": child.id, "session": self.id, "call": call_id, "delegation": handed}
        answer = await self._ipc_client.request("child", body, settle=True)
        child._read_opened(answer)
        child.on_child_opened = self.on_child_opened
        self.on_child_opened(child)
        return ChildSession(child, AgentManifest.model_validate(answer["agent"]))

    async def _stop(self, reason: StopReason) -> None:
        with contextlib.suppress(ConnectionLost, UsageError):  # the calls have ended with their lease holder or session
            await self._ipc_client.request("stop", {"session": self.id, "reason": reason})

    def add_rules(self, *texts: str) -> None:
        """Add rules to the session; see :meth:`handrail.session.local_session.LocalSession.add_rules`."""
        found = parse_session_rules(texts)
        self._rules += texts
        self._provider_tools = {}
        self._ipc_client.notify("rules", {"session": self.id, "rules": list(texts)})
        require_matchable_rules(found, self._tools)

    @property
    def mode(self) -> Mode:
        return self._mode or DEFAULT_MODE

    def apply_mode_change(self, mode: str) -> None:
        """Update the mode, because the lease holder has changed it. The next lease holder receives it, too."""
        self._mode, self._provider_tools = parse_optional_mode(mode), {}

    def set_mode(self, mode: str) -> None:
        self._mode, self._provider_tools = parse_optional_mode(mode), {}  # the next lease holder receives it, too
        self._ipc_client.notify("mode", {"session": self.id, "mode": mode})

    # ── notifications, jobs and sub-agents ───────────────────────────────────────────────────────

    @property
    def notifications(self) -> NotificationQueue:
        return make_protocol_proxy(
            NotificationQueue, "notices.", make_lease_holder_caller(self._ipc_client, session=self.id)
        )

    @property
    def jobs(self) -> JobService:
        """The background jobs of the session, which run in the lease holder."""
        return make_protocol_proxy(JobService, "jobs.", make_lease_holder_caller(self._ipc_client, session=self.id))

    async def undo(self, call: str | None = None, *, dry_run: bool = False, overwrite: bool = False) -> UndoReport:
        session = self.id if call is None else None
        return await request_undo(self._ipc_client, call, session, dry_run=dry_run, overwrite=overwrite)

    async def move_to_background(self, call_id: str) -> Job:
        body = {"session": self.id, "call": call_id}
        return WIRE_CODEC.get_type_reader(Job)(await self._ipc_client.request("promote", body, repeatable=True))

    def set_subagent_runner(self, delegates: SubagentRunner | None) -> None:
        self.delegates = delegates
        self._ipc_client.notify("delegates", {"session": self.id, "there": delegates is not None})

    async def read_parent_instructions(self) -> Sequence[tuple[str, str]]:
        """Return the instructions of parent folders.

        See :meth:`handrail.contract.session_protocols.Session.read_parent_instructions`.
        """
        answer = await self._ipc_client.request("instructions", {"session": self.id}, repeatable=True)
        return WIRE_CODEC.get_type_codec(Sequence[tuple[str, str]]).read(answer)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def watch_events(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        if not self._listeners:
            self._ipc_client.notify("watch", {"session": self.id})
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._ipc_client.notify("unwatch", {"session": self.id})

        return stop

    def watch_stop(self, listener: Callable[[], None]) -> Callable[[], None]:
        return add_listener(self.stop_listeners, listener)

    def dispatch_event(self, event: Event) -> None:
        """Call the listeners with an event."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # a listener must not affect the call
                about = f"a listener to the events of session {self.id} failed at {event.kind!r}"
                asyncio.get_running_loop().call_exception_handler({"message": about, "exception": error})

    def events(self) -> AsyncIterator[Event]:
        return iterate_events(self, self._readers)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        if self.is_closed:
            return
        self._end(CLOSED)
        asked = {"session": self.id}
        while True:
            try:
                await self._ipc_client.request("close", asked)
            except ConnectionLost:
                continue
            except UsageError:  # the next lease holder never had it open; the last one may have closed it
                with contextlib.suppress(UsageError):
                    await self._ipc_client.request("close-session", {"id": self.id})
            return

    async def suspend(self) -> None:
        """Suspend the session. Any process can open it again."""
        if not self.is_closed:
            self._end(SUSPENDED)
            await self._detach_from_holder("user")

    async def suspend_at_shutdown(self) -> None:
        """Suspend the session because the kernel of this process is shutting down.

        Without a lease holder, or if it is shutting down as well, nothing is sent: its shutdown suspends the session, and so
        does the end of the connection.
        """
        if not self.is_closed:
            self._end(ENDED)
            if (standing := self._ipc_client.current_connection) is not None:
                with contextlib.suppress(HandrailError, TimeoutError):
                    async with asyncio.timeout(LEAVE_TIMEOUT_S):
                        await standing.request("suspend", self._suspend_body("shutdown", ENDED))

    async def _detach_from_holder(self, reason: StopReason) -> None:
        with contextlib.suppress(ConnectionLost, UsageError):  # the session has ended with its lease holder
            await self._ipc_client.request("suspend", self._suspend_body(reason, SUSPENDED))

    def _suspend_body(self, reason: StopReason, why: str) -> Message:
        return {"session": self.id, "reason": reason, "why": why}

    def _end(self, why: str) -> None:
        self.is_closed = True
        self._closed_reason = f"Session {self.id} {why}"
        self._forget(self)
        for reader in self._readers:
            reader.end()

    def _check_open(self) -> None:
        if self._closed_reason is not None:
            raise UsageError(self._closed_reason)


def _same_answers(ids: Sequence[str], result: Result) -> Sequence[CallAnswer]:
    return [CallAnswer(known_as, "", result, result) for known_as in ids]


# ── its turns ────────────────────────────────────────────────────────────────────────────────────

_NOT_EVALUATED_TEXT = (
    "the rules or tools have changed since the start of the interaction; the process that holds the workspace evaluates it "
    "again at the start of the next one"
)


class TurnCallExecutor(Protocol):
    """A callable that executes the calls of a turn, or one of them by its position."""

    async def __call__(
        self, number: int, token: int, generation: int, calls: Sequence[ProposedCall], first: int | None = None
    ) -> Sequence[CallAnswer]: ...


class RemoteTurn:
    """A :class:`~handrail.contract.session_protocols.Turn` in a client process.

    :param ruled: by id of a provider tool: the reason why the session's rules exclude it, or None; other provider tools are
        not available
    :param delegates: the runner of sub-agents; None: sub-agents are not available
    """

    def __init__(
        self,
        execute_calls: TurnCallExecutor,
        token: int,
        generation: Generation,
        number: int,
        catalog: InteractionLoadedTools,
        ruled: Mapping[str, str | None],
        delegates: SubagentRunner | None,
    ) -> None:
        self._execute_calls = execute_calls
        self._catalog = catalog
        self._loaded = catalog.begin_turn(generation)
        self._provider_tools = ruled
        self._delegates = delegates
        self._token = token
        self.generation = generation
        self.number = number
        self._submitted = 0

    @property
    def tool_specs(self) -> list[ToolSpec]:
        return drop_delegation_tools(self._catalog.loaded_tool_specs(self.generation, self._loaded), self._delegates)

    @property
    def tool_index(self) -> str:
        return self._catalog.format_deferred_tool_index(self.generation)

    @property
    def provider_tools(self) -> list[ProviderToolOffer]:
        specs = self._catalog.provider_tools(self.generation)
        return [ProviderToolOffer(spec, self._provider_tools.get(spec.id, _NOT_EVALUATED_TEXT)) for spec in specs]

    async def call_all(self, calls: Iterable[CallProposal]) -> Sequence[CallAnswer]:
        proposed = [to_proposed_call(call) for call in calls]
        return await self._execute_calls(self.number, self._token, self.generation.number, proposed)

    def prepare_likely_call(self, call: CallProposal) -> None:
        """Do nothing: the lease holder checks calls when they are submitted."""

    def start_streamed_call(self, call: CallProposal) -> asyncio.Task[CallAnswer]:
        """Start the next call of a reply that is still arriving. Calls reach the lease holder in this order."""
        place, self._submitted = self._submitted, self._submitted + 1
        return asyncio.get_running_loop().create_task(self._submit_call(to_proposed_call(call), place))

    async def _submit_call(self, call: ProposedCall, place: int) -> CallAnswer:
        (answer,) = await self._execute_calls(self.number, self._token, self.generation.number, (call,), place)
        return answer


# ── its history ──────────────────────────────────────────────────────────────────────────────────


class RemoteHistory:
    """A :class:`~handrail.contract.services.history_and_skill_services.ConversationHistory` that the lease holder stores."""

    def __init__(self, session_id: str, ipc_client: ReconnectingClient) -> None:
        self._session_id = session_id
        self._ipc_client = ipc_client
        self._latest: PendingHistoryWrite | None = None
        # These requests are repeatable: duplicates are recognised by their content, or are harmless.
        there = make_protocol_proxy(
            ConversationHistory, "history.", make_lease_holder_caller(ipc_client, session=session_id)
        )
        self.read_stored_messages, self.store_attachment, self.load_attachment = (
            there.read_stored_messages,
            there.store_attachment,
            there.load_attachment,
        )
        self.record_compaction, self.record_turn = there.record_compaction, there.record_turn
        self.record_provider_tool_use = there.record_provider_tool_use

    def store_messages(self, entries: Sequence[HistoryEntry]) -> Awaitable[None]:
        number = 1 if self._latest is None else self._latest.number + 1
        items = [[position, dict(data)] for position, data in entries]
        body = {"session": self._session_id, "entries": items, "number": number}
        self._latest = PendingHistoryWrite(self._ipc_client, body, number)
        return self._latest

    async def get_pending_write_number(self) -> int:
        """Return the number of the write that a new call must wait for; 0 if all writes are durable.

        While the last write is in flight over the same connection, the lease holder lets the call wait for it.

        :raises HandrailError: if the messages cannot be stored
        """
        if (latest := self._latest) is not None:
            if latest.is_in_flight:
                return latest.number
            await latest
        return 0

    async def wait_until_durable(self) -> None:
        """Wait until the last write is durable.

        :raises HandrailError: if the messages cannot be stored
        """
        if self._latest is not None:
            await self._latest


class PendingHistoryWrite:
    """A write of messages to the current lease holder. It may be awaited any number of times."""

    def __init__(self, ipc_client: ReconnectingClient, body: Mapping[str, Any], number: int) -> None:
        self.number = number
        self._ipc_client = ipc_client
        self._sent_over: IpcConnection | None = None
        self._work = asyncio.get_running_loop().create_task(self._write(body))
        self._work.add_done_callback(_retrieve_exception)  # awaiting it is optional

    @property
    def is_in_flight(self) -> bool:
        """Whether it was sent to the current lease holder and has no answer yet."""
        standing = self._ipc_client.current_connection
        return not self._work.done() and standing is not None and self._sent_over is standing

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._work).__await__()

    async def _write(self, body: Mapping[str, Any]) -> None:
        while True:  # each message has its position, so a repeated write has no effect
            self._sent_over = self._ipc_client.current_connection
            try:
                await self._ipc_client.request("keep", body)
            except ConnectionLost:
                continue
            return


def _retrieve_exception(work: asyncio.Task[None]) -> None:
    if not work.cancelled():
        work.exception()


# Approval requests in a client process: read from the database, answered by the lease holder.

APPROVALS_PREFIX = "approvals."
"""The prefix of the operations of :class:`ApprovalService`."""


class RemoteApprovalService:
    """A :class:`~handrail.contract.approval_requests.ApprovalService` in a client process.

    :param reader: returns a reader of the lease holder's database, which shows the durable state
    """

    def __init__(
        self, reader: Callable[[], ApprovalReader], holder: HolderSender, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._reader = reader
        self._once_proxy = make_protocol_proxy(
            ApprovalService, APPROVALS_PREFIX, make_lease_holder_caller(holder, repeatable=False)
        )
        self._repeat_proxy = make_protocol_proxy(ApprovalService, APPROVALS_PREFIX, make_lease_holder_caller(holder))
        self._clock = clock

    def list_pending(self, session_id: str | None = None) -> list[Approval]:
        return self._reader().list_pending_requests(self._clock(), session_id=session_id)

    def get(self, approval_id: str) -> Approval:
        if (found := self._reader().get(approval_id)) is None:
            raise ToolError(
                f"Request `{escape_terminal_controls(approval_id[:40])}` does not exist in this workspace. List pending requests with `handrail approve`.",
                kind="invalid_input",
            )
        return found

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        return await self._submit_answer(
            lambda desk: desk.decide(approval_id, answer, by=by), approval_id, by, answer.choice
        )

    async def answer_questions(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        return await self._submit_answer(
            lambda desk: desk.answer_questions(approval_id, answers, by=by), approval_id, by, None
        )

    async def _submit_answer(
        self,
        ask: Callable[[ApprovalService], Awaitable[Approval]],
        approval_id: str,
        by: str,
        choice: ApprovalChoice | None,
    ) -> Approval:
        """Answer a request once.

        If the lease holder disconnected before it confirmed the answer, the answer may already be recorded.
        """
        with contextlib.suppress(ConnectionLost):
            return await ask(self._once_proxy)
        try:
            return await ask(self._repeat_proxy)
        except ToolError:
            found = self.get(approval_id)
            if found.is_pending or found.decided_by != by or found.choice != choice:
                raise
            return found

    def list_rules(self) -> list[StoredProjectRule]:
        return self._reader().list_rules()

    async def revoke_rule(self, rule_id: str) -> StoredProjectRule:
        known = next((rule for rule in self.list_rules() if rule.id == rule_id), None)
        with contextlib.suppress(ConnectionLost):
            return await self._once_proxy.revoke_rule(rule_id)
        try:
            return await self._repeat_proxy.revoke_rule(rule_id)
        except ToolError:
            if known is None or any(rule.id == rule_id for rule in self.list_rules()):
                raise
            return known  # the previous lease holder had revoked it
