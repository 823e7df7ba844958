"""The state of one call in progress, the lane that it belongs to, and the refusal by which a step rejects it."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from handrail.arbiter.execution import STOPPED_TEXT, Execution, Stopped, kind_of_stop, uninterrupted
from handrail.arbiter.generators import Steps
from handrail.arbiter.jobs.outflow import Outflow, OutputFile
from handrail.arbiter.locks import Grant, Want
from handrail.arbiter.output.redaction import Redactor
from handrail.arbiter.subscriptions import Subscriptions
from handrail.catalog.interaction import Interaction
from handrail.contract.approvals import Approval, Attendant
from handrail.contract.call import Event, EventKind, ProposedCall, Result
from handrail.contract.doors.agents import AgentType, Delegates, Handed
from handrail.contract.doors.channels import NoticeBox, SessionDoor, Triggers
from handrail.contract.doors.files import Located
from handrail.contract.doors.memory import SessionSkills
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import ErrorKind
from handrail.contract.generation import Entry, Generation
from handrail.contract.modes import Mode
from handrail.contract.sandbox import Attempt
from handrail.contract.session import StopReason
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.requires import Layer
from handrail.contract.tool.spec import StateEnd
from handrail.policy.authority import Authority, Verdict
from handrail.policy.rules.rules import RuleBook, in_mode, within
from handrail.record.log import CommitLog, Kind, Record
from handrail.runtime.surface import Surroundings
from handrail.store.database.writer import Taken
from handrail.store.tables.jobs import JobRow

if TYPE_CHECKING:
    pass


# Failed calls of a session, with their counts. The object is created with the first failure.

MAX_KEPT = 500
_NOT_COUNTED = frozenset({"cancelled", "interrupted"})
"""Ends that say nothing about the call."""


@dataclass(slots=True)
class _Failing:
    times: int = 0
    in_a_row: int = 0
    at: int = 0


class FailedCalls:
    """A count of failed calls by tool and arguments, which starts again when a call of the session changes something."""

    __slots__ = ("_calls", "_successes", "tools")

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], _Failing] = OrderedDict()
        self._successes = 0
        self.tools: set[str] = set()
        """Ids of the tools of which a call has failed."""

    def failed(self, tool: str, arguments_hash: str, error_kind: str) -> None:
        """Count a call that ended with an error."""
        if error_kind in _NOT_COUNTED:
            return
        failing = self._calls.setdefault((tool, arguments_hash), _Failing())
        self._calls.move_to_end((tool, arguments_hash))
        self.tools.add(tool)
        failing.in_a_row = failing.in_a_row + 1 if failing.at == self._successes else 1
        failing.times += 1
        failing.at = self._successes
        if len(self._calls) > MAX_KEPT:
            self._calls.popitem(last=False)

    def succeeded(self, tool: str, arguments_hash: str | None) -> None:
        """Count a successful call that changed nothing.

        :param arguments_hash: None if no call of that tool has failed
        """
        self._successes += 1
        if arguments_hash is not None:
            self._calls.pop((tool, arguments_hash), None)

    def before(self, tool: str, arguments_hash: str) -> tuple[int, int]:
        """Return how often this call has failed, in all and since any other call succeeded."""
        failing = self._calls.get((tool, arguments_hash))
        if failing is None:
            return 0, 0
        return failing.times, failing.in_a_row if failing.at == self._successes else 0


Step = Literal["resolve", "validate", "authorise", "lock", "intend", "execute"]


_tuple: Any = tuple
_new_record: Callable[..., Record] = _tuple.__new__
"""Makes a ``Record`` in half the time of its own constructor. Each call makes four."""


class Refusal(Exception):
    """The rejection of a call by one step.

    It becomes the error result of the call and a ``refused`` record.
    """

    def __init__(self, step: Step, kind: ErrorKind, text: str, **details: Any) -> None:
        super().__init__(text)
        self.step: Step = step
        self.kind: ErrorKind = kind
        self.text = text
        self.details = details


@dataclass(slots=True)
class Lane:
    """One model's stream of calls within a session, as the arbiter sees it.

    :func:`handrail.kernel.sessions.lane_of` builds it. Fields with a default change while the session is open.

    :param authority: the most that its agent may do; the policy evaluates each call by it
    :param rules: replaced as a whole, by :meth:`rule_by`, when a user answers "for this session"
    :param current: returns the current generation of tools, which may be newer than that of a turn
    :param catalog: the tools that are loaded for its model
    :param skills: the skills of its session
    :param notices: receives the notifications for its agent
    :param agent_types: returns the agents to which its agent may delegate
    :param appoint: loads what a sub-agent needs; raises :class:`ToolError` with the reason if it cannot
    :param mode: the own mode of a sub-agent; a narrower mode of a parent session takes precedence
    :param origin: names the sub-agent to the users who approve its calls; ``""`` for a root session
    :param named_hosts_of: the parent agent that delegates hosts by name only; None if there is none
    """

    around: Surroundings
    authority: Authority
    rules: RuleBook
    current: Callable[[], Generation]
    catalog: Interaction
    skills: SessionSkills
    channels: SessionDoor
    triggers: Triggers
    notices: NoticeBox
    agent_types: Callable[[], Sequence[AgentType]]
    appoint: Callable[[str], object]
    mode: Mode | None
    origin: str
    named_hosts_of: str | None

    attendant: Attendant | None = None
    """The approval handler; None if the lane is headless, so that *ask* means *deny*."""
    closed: str | None = None
    """Why it accepts no more calls; None while it accepts them."""
    delegates: Delegates | None = None
    """Runs the sub-agents of its calls; None while no model is attached."""
    below: list[Lane] = field(default_factory=list["Lane"])
    """The lanes of the sub-agents that work for its calls."""
    delegating: dict[str, Call] = field(default_factory=dict[str, "Call"])
    """Its calls that wait for a sub-agent, by id. Successive lanes of one session share it while a sub-agent works."""
    listeners: list[Callable[[Event], None]] = field(default_factory=list[Callable[[Event], None]])
    subscribed: Subscriptions | None = None
    """Its resource subscriptions; None before the first one."""
    kept: Taken | None = None
    """The write of its latest conversation message."""
    running: dict[str, Call] = field(default_factory=dict[str, "Call"])
    failed: FailedCalls | None = None
    """Its failed calls; None before the first one."""
    emptied: asyncio.Event | None = None
    """Set by each call that ends while :meth:`answered` waits."""

    @property
    def session_id(self) -> str:
        return self.around.session_id

    def rule_by(self, book: RuleBook) -> None:
        """Evaluate calls by ``book`` from now on, also in the lanes of sub-agents."""
        self.rules = book
        for lane in tuple(self.below):
            own = lane.rules if lane.mode is None else in_mode(lane.rules, lane.mode)
            lane.rule_by(within(own, book))

    def heed(self, call: Call, result: Result, hashed: Callable[[object], str]) -> None:
        """Count how a resolved and valid call ended, from the first failure on."""
        if call.entry is None or call.arguments is None:
            return
        spec = call.entry.spec
        if result.ok and spec.side_effect != "read":
            self.failed = None  # calls that failed before may succeed now
            return
        failed = self.failed = self.failed or FailedCalls()
        if not result.ok:
            failed.failed(spec.id, hashed(call.arguments), result.error_kind or "failed")
        else:
            failed.succeeded(spec.id, hashed(call.arguments) if spec.id in failed.tools else None)

    @property
    def in_flight(self) -> list[Call]:
        """The calls whose answer a caller waits for: all but jobs and the nested calls of jobs."""
        return [call for call in self.running.values() if not call.of_a_job]

    async def answered(self) -> None:
        """Return when no call is in flight."""
        while self.in_flight:
            self.emptied = self.emptied or asyncio.Event()
            self.emptied.clear()
            await self.emptied.wait()


@dataclass(eq=False, slots=True)
class LiveJob:
    """A job that runs in this process.

    :param told: the answer that its proposer received
    :param not_locked: the locks that it would hold in its turn and does not take in the background
    :param ended: set when it has ended and its end is stored, or cannot be stored now
    :param kept: whether its end is stored
    :param decided: whether its turn completed the first three steps (resolve, validate, authorise)
    :param detached: whether its turn has released it and its own task has not started yet
    :param delegates: runs its sub-agents if its session has another runner now: the job keeps its model and its budget
    """

    row: JobRow
    call: Call
    output: OutputFile
    told: Result
    not_locked: tuple[str, ...]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    kept: bool = False
    decided: bool = False
    detached: bool = False
    delegates: Delegates | None = None


@dataclass(eq=False, slots=True)
class Going:
    """The tool session that a call opens, continues or closes.

    :param kind: whether the call opens a tool session, takes a step or closes it
    :param by: the tool that was called, if the call runs the tool of the open session instead
    :param sent: the input of a step
    :param state: the open tool session; None if there is none
    :param ended: how the tool session ended before this call; None while it is open
    """

    kind: Literal["open", "step", "close"]
    id: str
    by: Entry | None = None
    sent: Any = None
    state: OpenState | None = None
    ended: StateEnd | None = None

    @property
    def told(self) -> dict[str, Any]:
        """The fields of the proposal's record that connect the calls of one tool session."""
        if self.state is None and self.kind != "open":
            return {}
        return {"state": self.id} if self.by is None else {"state": self.id, "by": self.by.id}


class LookedAhead(NamedTuple):
    """The results of prevalidation; see :mod:`handrail.arbiter.arbiter`.

    :param given: the arguments as the model sent them, and ``compact`` their JSON
    :param arguments: the arguments as the tool receives them
    :param layer: the capability layer that the verdict is based on, with ``rules``
    """

    proposed: ProposedCall
    given: dict[str, Any]
    compact: bytes | None
    arguments: dict[str, Any]
    wants: tuple[Want, ...]
    layer: Layer
    rules: RuleBook
    verdict: Verdict


class AskedPeople(NamedTuple):
    """The approval requests of one call. :mod:`handrail.arbiter.approvals.asking` replaces it as a whole.

    :param asked: the requests that are not used yet
    :param granted: the granted requests among them, which are used up when the call starts
    :param answers: the questions that a user answered before the call started, and the answers
    """

    asked: tuple[Approval, ...] = ()
    granted: tuple[Approval, ...] = ()
    answers: tuple[Sequence[Question], Sequence[Sequence[str]]] | None = None


NOBODY_ASKED = AskedPeople()


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
    behind: Taken | None = None
    """The write of the latest message before its proposal, which may not be durable yet; see :meth:`known`."""
    looked: LookedAhead | None = None
    """The results of its prevalidation; None if it was not prevalidated."""

    # ── 1 resolve, 2 validate: the arbiter; `states` for stateful tools, `asking` for arguments that a user changed ──
    entry: Entry | None = None
    arguments: dict[str, Any] | None = None
    owns_arguments: bool = False
    going: Going | None = None
    """The tool session that it opens, continues or closes; None unless its tool is stateful."""
    background: bool = False
    """It runs in the background: it is answered with a job as soon as it is authorised."""
    wants: tuple[Want, ...] = ()
    located: dict[str, Located] | None = None
    """The paths that were resolved for its locks, which the rules reuse in the same loop turn.

    None after any ``await``, so that they are resolved again.
    """

    # ── 3 authorise: authorisation, asking ──
    verdict: Verdict | None = None
    rules: RuleBook | None = None
    at_source: tuple[Offering, str] | None = None
    """The source and the resource or prompt that the call was authorised for; None if it names neither."""
    read_only: bool = False
    """It only runs a command that is proved to change nothing, with everything mounted read-only."""
    people: AskedPeople = NOBODY_ASKED

    # ── 4 lock: locking, the reply that it belongs to ──
    entered: asyncio.Future[None] | None = None
    grant: Grant | None = None
    lock_wait_ms: float = 0.0

    # ── 5 intend: the arbiter ──
    begun: bool = False
    """Its intent is recorded and its tool has started."""

    # ── 6 execute: running, and the services of its runtime ──
    over: bool = False
    """Its tool has ended or was asked to stop, so it may make no further calls."""
    left_off: tuple[Any, ...] | None = None
    """``(budget_ms, runtime, finished)`` of a tool that an earlier task started; see :mod:`handrail.arbiter.running`.
    """
    children: int = 0
    nested: tuple[Call, ...] = ()
    """The calls that its tool is making now."""
    left: asyncio.Future[None] | None = None
    """Set when it is answered; None unless its caller waits for that."""
    artifacts: tuple[str, ...] = ()
    """The artifacts in the answers to its nested calls."""
    outflow: Outflow | None = None
    """The output of its tool while it runs; None before there is any."""
    reached: tuple[Attempt, ...] = ()
    """The hosts that it tried to reach, each once, up to a limit."""
    client_asks: int = 0
    """How many requests it and its nested calls have sent to the client."""
    hands_over: int = 0
    """How many sub-agents are working for it now."""
    handed: tuple[Handed, ...] = ()
    """The sub-agents that have worked for it."""
    heard_of: tuple[str, ...] = ()
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
        execution: Execution,
        log: CommitLog,
        redactor: Redactor,
    ) -> None:
        self.id = call_id
        self.proposed = proposed
        self.tool_id = proposed.name
        """The proposed name; once the call is resolved, the id of its tool."""
        self.lane = lane
        self.watched = lane.listeners
        """The listeners to its events; empty if there are none."""
        self.session_id = lane.around.session_id
        self.generation = generation
        self.execution = execution
        self.log = log
        self.redactor = redactor
        self.records: list[Record] = []
        self.started_ns = time.monotonic_ns()

    @property
    def steps(self) -> bool:
        """Whether it takes a step of an open tool session, which this process cannot outlive."""
        return self.going is not None and self.going.state is not None

    @property
    def ended_state(self) -> str:
        """The id of its tool session if that has ended; otherwise ``""``."""
        state = None if self.going is None else self.going.state
        return "" if state is None or state.ended is None else state.id

    @property
    def of_a_job(self) -> bool:
        """Whether it, or its outermost caller, is a job, so that no caller waits for its answer."""
        call = self
        while call.parent is not None:
            call = call.parent
        return call.job is not None

    def note(self, kind: Kind, body: dict[str, Any], redacted: Mapping[str, Any] | None = None) -> None:
        """Queue a record for the next write to the log, with secrets redacted.

        :param redacted: further fields, which are already redacted
        """
        if self.redactor.active:
            body = self.redactor.record(body)
        if redacted:
            body = {**body, **redacted}
        self.records.append(_new_record(Record, (kind, self.session_id, self.id, body)))

    def own_arguments(self) -> None:
        """Copy the proposed arguments before the first ``await``.

        The caller may still hold the object and change it after its evaluation. Arguments parsed from text need no copy.
        """
        if not self.owns_arguments and self.arguments is not None:
            self.owns_arguments = True
            if not isinstance(self.proposed.arguments, (str, bytes)):
                self.arguments = copy.deepcopy(self.arguments)

    async def known(self) -> None:
        """Wait until the conversation is durable up to its proposal, so that a later process knows of it.

        :raises LogUnavailable: if it could not be made durable
        """
        if self.behind is not None and not self.behind.durable:
            await uninterrupted(self.behind.written(), self.execution)

    def flush(self) -> None:
        """Hand the queued records to the log, without waiting for them to be durable."""
        if self.records:
            records, self.records = self.records, []
            self.log.append(records)

    async def interruptible(self, step: Step, work: Callable[[], Awaitable[Any]]) -> Any:
        """Await ``work``, which the user's stop or a shutdown may end.

        :raises Refusal: ``cancelled``, if one of them ended it
        """
        try:
            return await self.execution.inline(_begun(work))
        except Stopped as stopped:
            raise self.stopped(step, stopped.reason) from None

    def stopped(self, step: Step, reason: StopReason) -> Refusal:
        """Return the refusal of a call that was stopped before it ran."""
        text = f"`{self.tool_id}` was {STOPPED_TEXT[reason]} before it started. Nothing was run."
        return Refusal(step, kind_of_stop(reason), text, stopped_by=reason)

    def to_tell(self, arguments: Any) -> Any:
        """Return ``arguments`` for listeners, as a copy if the call itself uses the object."""
        return copy.deepcopy(arguments) if isinstance(self.proposed.arguments, (str, bytes)) else arguments

    def emit(self, kind: EventKind, data: Mapping[str, Any] | None = None) -> None:
        """Send an event to the session's listeners. Costs nothing if there are none."""
        listeners = self.watched
        if listeners:
            told, redactor = data or {}, self.redactor
            if redactor.active:
                told = redactor.value(dict(told))
            event = Event(kind, self.session_id, self.id, redactor.text(self.tool_id), time.time_ns(), told)
            for listener in tuple(listeners):
                try:
                    listener(event)
                except Exception as error:  # a listener must not change how a call ends
                    about = f"a listener to the events of session {self.session_id} failed at {kind!r}"
                    self.execution.loop.call_exception_handler({"message": about, "exception": error})

    def has_entered(self) -> None:
        """Mark that it is in the lock queue or needs no place, so that later calls of its reply may continue."""
        if self.entered is not None and not self.entered.done():
            self.entered.set_result(None)

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since its tool started, to the microsecond."""
        return (time.monotonic_ns() - self.started_ns) // 1000 / 1000

    def network(self) -> dict[str, Any]:
        """Return the hosts that it reached and those that were refused, for its result.

        Host names are redacted, since they can contain a secret.
        """
        text = self.redactor.text
        refused = ((f"{one.host}:{one.port}", one.refused) for one in self.reached if one.refused is not None)
        return {
            "reached": [text(f"{one.host}:{one.port}") for one in self.reached if one.refused is None],
            "refused": [{"host": text(host), "reason": text(reason)} for host, reason in refused],
        }

    def answer_error(self, kind: ErrorKind, text: str, data: Any = None, **metadata: Any) -> Result:
        return Result.error(kind, text, data, duration_ms=self.elapsed_ms, **metadata)


async def _begun(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


@dataclass(eq=False, slots=True)
class OpenState:
    """One open tool session in this process.

    :param call_id: the call that opened it
    :param arguments: a copy of the arguments of that call
    :param generation: keeps the tools of this generation in use while it is open
    """

    id: str
    call_id: str
    lane: Lane
    entry: Entry
    arguments: dict[str, Any]
    steps: Steps
    generation: Generation
    busy: bool = False
    ended: StateEnd | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def session_id(self) -> str:
        return self.lane.session_id
