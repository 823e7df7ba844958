"""The state of one call in progress, the lane that it belongs to, and the refusal by which a step rejects it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from handrail.arbiter.generator_steps import GeneratorSteps
from handrail.arbiter.jobs.output_stream import CallOutputWriter, JobOutputFile
from handrail.arbiter.lock_table import LockGrant, RequiredLock
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.arbiter.session_subscriptions import SessionResourceSubscriptions
from handrail.arbiter.stoppable_execution import (
    STOPPED_TEXT,
    StoppableTaskRunner,
    WorkStopped,
    await_deferring_cancellation,
    get_stop_error_kind,
)
from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.contract.approval_requests import Approval, ApprovalHandler
from handrail.contract.calls_and_results import Event, EventKind, ProposedCall, Result
from handrail.contract.errors import ErrorKind
from handrail.contract.permission_modes import Mode
from handrail.contract.sandbox_protocol import CallConfinement, ConnectionAttempt
from handrail.contract.services.channels_and_triggers import NotificationSink, SessionChannelService, TriggerService
from handrail.contract.services.client_services import ClientMethod
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.services.history_and_skill_services import SessionSkillService
from handrail.contract.services.subagent_services import DelegatedSession, SubagentRunner, SubagentType
from handrail.contract.services.task_services import TaskService
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.session_protocols import StopReason
from handrail.contract.struct import Struct, field
from handrail.contract.tool.requires import CapabilityLayer
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.spec import StateEnd
from handrail.contract.tool_generation import Generation, ToolEntry
from handrail.policy.call_authorizer import CallAuthorizer, PolicyVerdict
from handrail.policy.rules.rules_and_modes import RuleBook, limit_to_parent, parse_mode, with_mode
from handrail.record.commit_log import CommitLog, Record, RecordKind, encode_record_body, join_record_bodies
from handrail.runtime.call_runtime import SessionSharedServices
from handrail.store.database.group_writer import QueuedWrite
from handrail.store.tables.job_tables import JobRow

if TYPE_CHECKING:
    pass


# Failed calls of a session, with their counts. The object is created with the first failure.

MAX_COUNTED_CALLS = 500
_NOT_COUNTED = frozenset({"cancelled", "interrupted"})
"""Ends that say nothing about the call."""


class _FailureCount(Struct):
    total: int = 0
    consecutive: int = 0
    success_count: int = 0


class FailedCallCounter:
    """A count of failed calls by tool and arguments, which starts again when a call of the session changes something."""

    __slots__ = ("_calls", "_successes", "tools")

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], _FailureCount] = OrderedDict()
        self._successes = 0
        self.tools: set[str] = set()
        """Ids of the tools of which a call has failed."""

    def record_failure(self, tool: str, arguments_hash: str, error_kind: str) -> None:
        """Count a call that ended with an error."""
        if error_kind in _NOT_COUNTED:
            return
        failing = self._calls.setdefault((tool, arguments_hash), _FailureCount())
        self._calls.move_to_end((tool, arguments_hash))
        self.tools.add(tool)
        # A success in between means that the model tried something else, so the row of failures is broken.
        failing.consecutive = failing.consecutive + 1 if failing.success_count == self._successes else 1
        failing.total += 1
        failing.success_count = self._successes
        # The oldest failure is the least likely to be repeated.
        if len(self._calls) > MAX_COUNTED_CALLS:
            self._calls.popitem(last=False)

    def record_success(self, tool: str, arguments_hash: str | None) -> None:
        """Count a successful call that changed nothing.

        :param arguments_hash: None if no call of that tool has failed
        """
        self._successes += 1
        if arguments_hash is not None:
            self._calls.pop((tool, arguments_hash), None)

    def get_failure_counts(self, tool: str, arguments_hash: str) -> tuple[int, int]:
        """Return how often this call has failed, in all and since any other call succeeded."""
        if (failing := self._calls.get((tool, arguments_hash))) is None:
            return 0, 0
        return failing.total, failing.consecutive if failing.success_count == self._successes else 0


StepName = Literal["resolve", "validate", "authorise", "lock", "intend", "execute"]


_tuple: Any = tuple
_new_record: Callable[..., Record] = _tuple.__new__
"""Makes a ``Record`` in half the time of its own constructor. Each call makes four."""


class CallRejection(Exception):
    """The rejection of a call by one step.

    It becomes the error result of the call and a ``refused`` record.
    """

    def __init__(self, step: StepName, kind: ErrorKind, text: str, **details: Any) -> None:
        super().__init__(text)
        self.step: StepName = step
        self.kind: ErrorKind = kind
        self.text = text
        self.details = details


class Lane(Struct):
    """One model's stream of calls within a session, as the arbiter sees it.

    :func:`handrail.kernel.session_manager.make_session_lane` builds it. Fields with a default change while the session is open.

    :param authority: the most that its agent may do; the policy evaluates each call by it
    :param rules: replaced as a whole, by :meth:`set_rules_including_child_lanes`, when a user answers "for this session"
    :param current_generation: returns the current generation of tools, which may be newer than that of a turn
    :param catalog: the tools that are loaded for its model
    :param skills: the skills of its session
    :param notifications: receives the notifications for its agent
    :param agent_types: returns the agents to which its agent may delegate
    :param load_agent: loads what a sub-agent needs; raises :class:`ToolError` with the reason if it cannot
    :param mode: the own mode of a sub-agent; a narrower mode of a parent session takes precedence
    :param origin: names the sub-agent to the users who approve its calls; ``""`` for a root session
    :param named_hosts_of: the parent agent that delegates hosts by name only; None if there is none
    """

    environment: SessionSharedServices
    authority: CallAuthorizer
    rules: RuleBook
    current_generation: Callable[[], Generation]
    catalog: InteractionLoadedTools
    skills: SessionSkillService
    channels: SessionChannelService
    triggers: TriggerService
    notifications: NotificationSink
    agent_types: Callable[[], Sequence[SubagentType]]
    load_agent: Callable[[str], object]
    mode: Mode | None
    origin: str
    named_hosts_of: str | None

    approval_handler: ApprovalHandler | None = None
    """The approval handler; None if the lane is headless, so that *ask* means *deny*."""
    closed_reason: str | None = None
    """Why it accepts no more calls; None while it accepts them."""
    is_stopped: bool = False
    """Whether the user has stopped its session, so that a run of its agent ends with the results of its calls."""
    subagent_runner: SubagentRunner | None = None
    """Runs the sub-agents of its calls; None while no model is attached."""
    child_lanes: list[Lane] = field(default_factory=list["Lane"])
    """The lanes of the sub-agents that work for its calls."""
    delegating_calls: dict[str, Call] = field(default_factory=dict[str, "Call"])
    """Its calls that wait for a sub-agent, by id. Successive lanes of one session share it while a sub-agent works."""
    listeners: list[Callable[[Event], None]] = field(default_factory=list[Callable[[Event], None]])
    subscriptions: SessionResourceSubscriptions | None = None
    """Its resource subscriptions; None before the first one."""
    last_message_write: QueuedWrite | None = None
    """The write of its latest conversation message."""
    running_calls: dict[str, Call] = field(default_factory=dict[str, "Call"])
    failed_calls: FailedCallCounter | None = None
    """Its failed calls; None before the first one."""
    call_ended: asyncio.Event | None = None
    """Set by each call that ends while :meth:`answered` waits."""
    tasks: TaskService | None = None
    """The tasks of the workspace, as its session sees them. Set before its first call."""
    previous_mode: Mode | None = None
    """The mode before the current one; None before the first change."""
    on_mode_changed: Callable[[Mode, Mode], None] = lambda mode, before: None
    """Called with each change of the mode: the new mode and the one before."""
    host_questions: dict[str, tuple[asyncio.Task[Approval | None], Call]] = field(
        default_factory=dict[str, "tuple[asyncio.Task[Approval | None], Call]"]
    )
    """The questions about hosts that are open now, each with the call that asked first, by host."""
    host_requests: dict[str, str] = field(default_factory=dict[str, str])
    """The requests for hosts without an effect so far, by host."""
    deferred_requests: set[str] = field(default_factory=set[str])
    """Those of them that the session's frontend could not ask about."""
    refused_hosts: dict[str, str] = field(default_factory=dict[str, str])
    """The hosts that the user rejected for this session, with the text for the model."""

    @property
    def session_id(self) -> str:
        return self.environment.session_id

    def set_permission_mode(self, mode: Mode) -> Mode:
        """Switch to another mode, and return the mode before. All changes of a session's mode happen here."""
        before = parse_mode(self.rules.mode)
        # Setting the same mode again must not change what plan_exit returns to.
        if mode != before:
            self.previous_mode = before
            self.set_rules_including_child_lanes(with_mode(self.rules, mode))
            self.on_mode_changed(mode, before)
        return before

    def set_rules_including_child_lanes(self, book: RuleBook) -> None:
        """Evaluate calls by ``book`` from now on, also in the lanes of sub-agents."""
        self.rules = book
        # A sub-agent never has wider rules than its parent, also after a change in the middle of its work.
        for lane in tuple(self.child_lanes):
            own = lane.rules if lane.mode is None else with_mode(lane.rules, lane.mode)
            lane.set_rules_including_child_lanes(limit_to_parent(own, book))

    def update_failure_counts(self, call: Call, result: Result, hashed: Callable[[object], str]) -> None:
        """Count how a resolved and valid call ended, from the first failure on."""
        if call.entry is None or call.arguments is None:
            return
        spec = call.entry.spec
        if result.ok and spec.side_effect != "read":
            self.failed_calls = None  # calls that failed before may succeed now
            return
        failed = self.failed_calls = self.failed_calls or FailedCallCounter()
        if not result.ok:
            failed.record_failure(spec.id, hashed(call.arguments), result.error_kind or "failed")
        else:
            failed.record_success(spec.id, hashed(call.arguments) if spec.id in failed.tools else None)

    @property
    def awaited_calls(self) -> list[Call]:
        """The calls whose answer a caller waits for: all but jobs and the nested calls of jobs."""
        return [call for call in self.running_calls.values() if not call.belongs_to_job]

    async def wait_until_idle(self) -> None:
        """Return when no call is in flight."""
        while self.awaited_calls:
            self.call_ended = self.call_ended or asyncio.Event()
            # The event is cleared before the wait, and the loop tests again: a call may end and another one start in
            # between.
            self.call_ended.clear()
            await self.call_ended.wait()


class LiveJob(Struct, eq=False):
    """A job that runs in this process.

    :param answer: the answer that its proposer received
    :param skipped_locks: the locks that it would hold in its turn and does not take in the background
    :param ended: set when it has ended and its end is stored, or cannot be stored now
    :param end_stored: whether its end is stored
    :param authorised: whether its turn completed the first three steps (resolve, validate, authorise)
    :param backgrounded: whether its turn has released it and its own task has not started yet
    :param subagent_runner: runs its sub-agents if its session has another runner now: the job keeps its model and its budget
    """

    row: JobRow
    call: Call
    output: JobOutputFile
    answer: Result
    skipped_locks: tuple[str, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    end_stored: bool = False
    authorised: bool = False
    backgrounded: bool = False
    subagent_runner: SubagentRunner | None = None


class ToolSessionStep(Struct, eq=False):
    """The tool session that a call opens, continues or closes.

    :param kind: whether the call opens a tool session, takes a step or closes it
    :param step_tool: the tool that was called, if the call runs the tool of the open session instead
    :param step_input: the input of a step
    :param session: the open tool session; None if there is none
    :param ended: how the tool session ended before this call; None while it is open
    """

    kind: Literal["open", "step", "close"]
    id: str
    step_tool: ToolEntry | None = None
    step_input: Any = None
    session: LiveToolSession | None = None
    ended: StateEnd | None = None

    @property
    def proposal_record_fields(self) -> dict[str, Any]:
        """The fields of the proposal's record that connect the calls of one tool session."""
        if self.session is None and self.kind != "open":
            return {}
        return {"state": self.id} if self.step_tool is None else {"state": self.id, "by": self.step_tool.id}


class PrevalidationResult(NamedTuple):
    """The results of prevalidation; see :mod:`handrail.arbiter.arbiter`.

    :param sent_arguments: the arguments as the model sent them, and ``arguments_json`` their JSON
    :param arguments: the arguments as the tool receives them
    :param repairs: what was read differently from how it was sent, by path
    :param layer: the capability layer that the verdict is based on, with ``rules``
    """

    proposed: ProposedCall
    sent_arguments: dict[str, Any]
    arguments_json: bytes | None
    arguments: dict[str, Any]
    repairs: dict[str, str]
    required_locks: tuple[RequiredLock, ...]
    layer: CapabilityLayer
    rules: RuleBook
    verdict: PolicyVerdict


class CallApprovals(NamedTuple):
    """The approval requests of one call. :mod:`handrail.arbiter.approvals.approval_flow` replaces it as a whole.

    :param requests: the requests that are not used yet
    :param granted: the granted requests among them, which are used up when the call starts
    :param answers: the questions that a user answered before the call started, and the answers
    """

    requests: tuple[Approval, ...] = ()
    granted: tuple[Approval, ...] = ()
    answers: tuple[Sequence[UserQuestion], Sequence[Sequence[str]]] | None = None


NO_APPROVALS = CallApprovals()
_MOST_NAMED_HOSTS = 5


class Call:
    """The state of one call between its proposal and its answer. Only the arbiter changes it.

    Fields are listed under the step that sets them. A field that most calls never set has its default on the class, so a call
    is cheap to make. The fields of a job, a tool session or a user's answer are in a separate object.
    """

    # ── origin: set when it is made ──
    parent: Call | None = None
    replayable: bool = False
    resumed: bool = False
    """An earlier process recorded its proposal: it continues with the user's answers, or as a job."""
    preceding_message: QueuedWrite | None = None
    """The write of the latest message before its proposal, which may not be durable yet; see :meth:`wait_until_proposal_durable`."""
    prevalidated: PrevalidationResult | None = None
    """The results of its prevalidation; None if it was not prevalidated."""

    # ── 1 resolve, 2 validate: the arbiter; `states` for stateful tools, `asking` for arguments that a user changed ──
    entry: ToolEntry | None = None
    arguments: dict[str, Any] | None = None
    argument_repairs: Mapping[str, str] = MappingProxyType({})
    """The arguments that were converted to the type that the schema asks for, by path, each with a description."""
    owns_arguments: bool = False
    session_step: ToolSessionStep | None = None
    """The tool session that it opens, continues or closes; None unless its tool is stateful."""
    background: bool = False
    """It runs in the background: it is answered with a job as soon as it is authorised."""
    required_locks: tuple[RequiredLock, ...] = ()
    resolved_paths: dict[str, ResolvedPath] | None = None
    """The paths that were resolved for its locks, which the rules reuse in the same loop turn.

    None after any ``await``, so that they are resolved again.
    """

    same_looking_paths: Sequence[str] = ()
    """Existing paths that its arguments could be mistaken for."""

    # ── 3 authorise: authorisation, asking ──
    verdict: PolicyVerdict | None = None
    rules: RuleBook | None = None
    requested_source: tuple[ResourceProvider, str] | None = None
    """The source and the resource or prompt that the call was authorised for; None if it names neither."""
    read_only: bool = False
    """It only runs a command that is proved to change nothing, with everything mounted read-only."""
    confinement: CallConfinement | None = None
    """The narrow sandbox that a rule with ``{confined}`` gives it; None if no such rule allowed it."""
    approvals: CallApprovals = NO_APPROVALS

    # ── 4 lock: locking, the reply that it belongs to ──
    queued: asyncio.Future[None] | None = None
    grant: LockGrant | None = None
    lock_wait_ms: float = 0.0

    # ── 5 intend: the arbiter ──
    started: bool = False
    """Its intent is recorded and its tool has started."""

    # ── 6 execute: running, and the services of its runtime ──
    tool_ended: bool = False
    """Its tool has ended or was asked to stop, so it may make no further calls."""
    handed_over_run: tuple[Any, ...] | None = None
    """``(budget_ms, runtime, finished)`` of a tool that an earlier task started; see :mod:`handrail.arbiter.tool_runner`.
    """
    nested_count: int = 0
    nested_calls: tuple[Call, ...] = ()
    """The calls that its tool is making now."""
    answered: asyncio.Future[None] | None = None
    """Set when it is answered; None unless its caller waits for that."""
    artifacts: tuple[str, ...] = ()
    """The artifacts in the answers to its nested calls."""
    output_stream: CallOutputWriter | None = None
    """The output of its tool while it runs; None before there is any."""
    network_attempts: tuple[ConnectionAttempt, ...] = ()
    """The hosts that it tried to reach, each once, up to a limit."""
    allowed_hosts: frozenset[str] = frozenset()
    """The hosts that the user allowed until it ends."""
    host_questions: tuple[asyncio.Task[Approval | None], ...] = ()
    """The questions about hosts that it asked."""
    client_request_count: int = 0
    """How many requests it and its nested calls have sent to the client."""
    unsupported_requests: frozenset[ClientMethod] = frozenset()
    """The methods of requests that the client did not support, with those of its nested calls."""
    working_subagents: int = 0
    """How many sub-agents are working for it now."""
    subagents: tuple[DelegatedSession, ...] = ()
    """The sub-agents that have worked for it."""
    delivered_notifications: tuple[str, ...] = ()
    """Ids of the notifications that its answer already contains.

    They are marked as delivered once its answer is recorded.
    """

    # ── jobs ──
    job: LiveJob | None = None
    """The job that it has become; None while it belongs to its turn."""

    def __init__(
        self,
        call_id: str,
        proposed: ProposedCall,
        lane: Lane,
        generation: Generation,
        execution: StoppableTaskRunner,
        log: CommitLog,
        redactor: SecretRedactor,
    ) -> None:
        self.id = call_id
        self.proposed = proposed
        self.tool_id = proposed.name
        """The proposed name; once the call is resolved, the id of its tool."""
        self.lane = lane
        self.listeners = lane.listeners
        """The listeners to its events; empty if there are none."""
        self.session_id = lane.environment.session_id
        self.generation = generation
        self.execution = execution
        self.log = log
        self.redactor = redactor
        self.records: list[Record] = []
        self.started_ns = time.monotonic_ns()

    @property
    def is_tool_session_step(self) -> bool:
        """Whether it takes a step of an open tool session, which this process cannot outlive."""
        return self.session_step is not None and self.session_step.session is not None

    @property
    def ended_tool_session_id(self) -> str:
        """The id of its tool session if that has ended; otherwise ``""``."""
        state = None if self.session_step is None else self.session_step.session
        return "" if state is None or state.end is None else state.id

    @property
    def belongs_to_job(self) -> bool:
        """Whether it, or its outermost caller, is a job, so that no caller waits for its answer."""
        call = self
        while call.parent is not None:
            call = call.parent
        return call.job is not None

    def queue_log_record(
        self, kind: RecordKind, body: dict[str, Any], redacted: Mapping[str, Any] | None = None
    ) -> None:
        """Queue a record for the next write to the log, with secrets redacted.

        :param redacted: further fields, which are already redacted
        """
        if self.redactor.active:
            body = self.redactor.redact_record_body(body)
        # These fields were redacted with the rules for arguments, and must not be redacted twice.
        if redacted:
            body = {**body, **redacted}
        self.queue_encoded_record(kind, encode_record_body(body))

    def queue_encoded_record(self, kind: RecordKind, body: bytes) -> None:
        """Queue a record whose body is JSON and contains no secret."""
        self.records.append(_new_record(Record, (kind, self.session_id, self.id, body)))

    def copy_arguments(self) -> None:
        """Copy the proposed arguments before the first ``await``.

        The caller may still hold the object and change it after its evaluation. Arguments parsed from text need no copy.
        """
        if not self.owns_arguments and self.arguments is not None:
            self.owns_arguments = True
            if not isinstance(self.proposed.arguments, (str, bytes)):
                self.arguments = copy.deepcopy(self.arguments)

    async def wait_until_proposal_durable(self) -> None:
        """Wait until the conversation is durable up to its proposal, so that a later process knows of it.

        :raises LogUnavailable: if it could not be made durable
        """
        if self.preceding_message is not None and not self.preceding_message.is_durable:
            await await_deferring_cancellation(self.preceding_message.request_flush(), self.execution)

    def submit_queued_records(self) -> None:
        """Hand the queued records to the log, without waiting for them to be durable."""
        if self.records:
            kinds, _, _, bodies = zip(*self.records, strict=True)
            self.records = []
            self.log.record_call_soon(self.session_id, self.id, " ".join(kinds), join_record_bodies(bodies))

    def schedule_record_submission(self) -> None:
        """Hand the queued records to the log soon, or with its outcome if that comes first."""
        if self.records:
            self.log.record_started_call(self.id, self.submit_queued_records)

    async def await_interruptible(self, step: StepName, work: Callable[[], Awaitable[Any]]) -> Any:
        """Await ``work``, which the user's stop or a shutdown may end.

        :raises CallRejection: ``cancelled``, if one of them ended it
        """
        try:
            return await self.execution.run_in_current_task(_run_work(work))
        except WorkStopped as stopped:
            raise self.make_stop_rejection(step, stopped.reason) from None

    def make_stop_rejection(self, step: StepName, reason: StopReason) -> CallRejection:
        """Return the refusal of a call that was stopped before it ran."""
        text = f"`{self.tool_id}` was {STOPPED_TEXT[reason]} before it started. Nothing was run."
        metadata = {"session_stopped": True} if self.lane.is_stopped else {}
        return CallRejection(step, get_stop_error_kind(reason), text, stopped_by=reason, **metadata)

    def copy_arguments_for_event(self, arguments: Any) -> Any:
        """Return ``arguments`` for listeners, as a copy if the call itself uses the object."""
        return copy.deepcopy(arguments) if isinstance(self.proposed.arguments, (str, bytes)) else arguments

    def emit(self, kind: EventKind, data: Mapping[str, Any] | None = None) -> None:
        """Send an event to the session's listeners. Costs nothing if there are none."""
        if listeners := self.listeners:
            event_data, redactor = data or {}, self.redactor
            # Listeners can be other programs, so they get no secret either.
            if redactor.active:
                event_data = redactor.redact_json(dict(event_data))
            event = Event(
                kind, self.session_id, self.id, redactor.redact_text(self.tool_id), time.time_ns(), event_data
            )
            # A listener may remove itself while it is called.
            for listener in tuple(listeners):
                try:
                    listener(event)
                except Exception as error:  # a listener must not change how a call ends
                    about = f"a listener to the events of session {self.session_id} failed at {kind!r}"
                    self.execution.loop.call_exception_handler({"message": about, "exception": error})

    def mark_lock_queued(self) -> None:
        """Mark that it is in the lock queue or needs no place, so that later calls of its reply may continue."""
        # The call can reach this point twice: in the queue, and at its end.
        if self.queued is not None and not self.queued.done():
            self.queued.set_result(None)

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since its tool started, to the microsecond."""
        return (time.monotonic_ns() - self.started_ns) // 1000 / 1000

    def make_network_metadata(self) -> dict[str, Any]:
        """Return the metadata about hosts: those that it reached and those that were refused, or why it had no network.

        Host names are redacted, since they can contain a secret.
        """
        text, tried = self.redactor.redact_text, self.network_attempts
        reached = [text(f"{one.host}:{one.port}") for one in tried if one.refusal_reason is None]
        refused = [
            {"host": text(f"{one.host}:{one.port}"), "reason": text(one.refusal_reason)}
            for one in tried
            if one.refusal_reason is not None
        ]
        if tried:
            found: dict[str, Any] = {"network": {"reached": reached, "refused": refused}}
            if reached:
                found["untrusted_source"] = f"the network ({', '.join(reached[:_MOST_NAMED_HOSTS])})"
            return found
        capabilities = None if self.verdict is None else self.verdict.capabilities
        if self.read_only or capabilities is None or capabilities.may_allow_any_target("net.fetch"):
            return {}
        owner = capabilities.find_owner_denying_all_hosts(is_confined=self.confinement is not None)
        reason = "the call ran confined" if owner is None else f"{owner} has no hosts"
        return {"network": {"reached": [], "refused": [], "unavailable": reason}}

    def make_error_result(self, kind: ErrorKind, text: str, data: Any = None, **metadata: Any) -> Result:
        return Result.error(kind, text, data, duration_ms=self.elapsed_ms, **metadata)


async def _run_work(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


class LiveToolSession(Struct, eq=False):
    """One open tool session in this process.

    :param call_id: the call that opened it
    :param arguments: a copy of the arguments of that call
    :param generation: keeps the tools of this generation in use while it is open
    """

    id: str
    call_id: str
    lane: Lane
    entry: ToolEntry
    arguments: dict[str, Any]
    steps: GeneratorSteps
    generation: Generation
    is_busy: bool = False
    end: StateEnd | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def session_id(self) -> str:
        return self.lane.session_id
