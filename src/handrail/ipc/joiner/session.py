"""A session in a client process, with its turns, history and approvals. The lease holder executes its calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from handrail.catalog.interaction import Interaction
from handrail.catalog.view import CatalogOptions
from handrail.contract.agent import AgentManifest
from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalDesk, Choice, StoredRule
from handrail.contract.call import Answer, Event, ProposedCall, Result, call_id
from handrail.contract.doors.agents import AgentType, Delegates, Delegation, usable
from handrail.contract.doors.channels import Notices
from handrail.contract.doors.jobs import Job, Jobs
from handrail.contract.doors.memory import Entry, History, Skill
from handrail.contract.doors.peer import Buffers
from handrail.contract.errors import ErrorKind, HandrailError, StartError, ToolError, UsageError
from handrail.contract.generation import Generation
from handrail.contract.rules import as_data
from handrail.contract.session import Child, Proposal, StopReason
from handrail.contract.text.neutral import visible
from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.ipc.codec import mirror
from handrail.ipc.codec.interfaces import WIRE, Holder, asking, proxy
from handrail.ipc.codec.mirror import error_of
from handrail.ipc.holder.remote import kinds_offered
from handrail.ipc.joiner.membership import Membership
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import HANDED_ON, LEAVING, Refused
from handrail.policy.rules.rules import given
from handrail.session.context import SessionOptions
from handrail.session.events import EventQueue, events_of
from handrail.session.session import CLOSED, ENDED, SUSPENDED, check_reach, new_session_id, rules_of
from handrail.session.turn import as_proposed
from handrail.store.tables.approvals import ApprovalReader

LEAVING_S = 20.0
"""The maximum wait at shutdown for a lease holder that does not answer: longer than any call takes to stop."""


class JoinedSession:
    """A :class:`~handrail.contract.session.Session` over a :class:`Membership`.

    :param generation: returns the current tools of this process's sessions
    :param forget: called when the session has ended
    """

    def __init__(
        self,
        session_id: str,
        membership: Membership,
        generation: Callable[[], Generation],
        options: SessionOptions,
        workdir: str,
        forget: Callable[[JoinedSession], None],
    ) -> None:
        self.id = session_id
        self.history = JoinedHistory(session_id, membership)
        self.closed = False
        self.workdir = workdir
        self.attendant = options.get("attendant")
        self.peer = options.get("peer")
        self._membership = membership
        self._generation = generation
        self._own: Generation | None = None
        """The tools of its agent, if it is not the agent of its process."""
        self._options = options
        self._mode = given(options.get("mode"))
        self._rules = [as_data(rule) for rule in options.get("rules", ())]
        self._forget = forget
        self._turns = 0
        self._catalog = Interaction(session_id, CatalogOptions())
        """The loaded tools of its model, as in the lease holder."""
        self.adopted: Callable[[JoinedSession], None] = lambda _: None
        """Called with each sub-agent session that it opens."""
        self._ruled: Mapping[str, str | None] = {}
        """By id of a provider tool: the reason why the session's rules exclude it, or None."""
        self._listeners: list[Callable[[Event], None]] = []
        self._readers: list[EventQueue] = []
        self._closed: str | None = None
        self.agents: Sequence[AgentType] = ()
        self.skills: Sequence[Skill] = ()
        self.delegates: Delegates | None = None
        self._unattended = False
        """Whether the current interaction is headless."""

    @property
    def headless(self) -> bool:
        return self.attendant is None

    async def open(self) -> None:
        """Open the session with the lease holder.

        :raises HandrailError: if it cannot be opened
        """
        try:
            while True:
                try:
                    return self._opened(await self._membership.request("open", self._opening(), settle=True))
                except ConnectionLost:  # it may be open, but nothing has happened in it
                    continue
        except asyncio.CancelledError:
            self._end(SUSPENDED)
            self._membership.begin(self._given_up())
            raise

    async def _given_up(self) -> None:
        """Suspend a session that may have been opened although the caller was cancelled."""
        with contextlib.suppress(HandrailError):
            await self._leave("user")

    async def open_again(self, connection: Connection) -> None:
        """Open the session again with the next lease holder, before any other request.

        If the lease holder refuses it, this session ends and the others continue.

        :raises ConnectionLost: if the next lease holder disconnects as well
        """
        told = len(self._rules)
        try:
            self._opened(await connection.request("open", self._opening()))
        except Refused as refused:
            if refused.kind == LEAVING:
                raise
            self._end(f"cannot be opened with the next process that holds the workspace: {error_of(refused)}")
            return
        if self._unattended:  # in the middle of a headless interaction
            await connection.request("begin", self._beginning(""))
        if late := self._rules[told:]:
            connection.notify("rules", {"session": self.id, "rules": late})
            self._ruled = {}
        if self.delegates is not None:
            connection.notify("delegates", {"session": self.id, "there": True})
        if self._listeners:
            connection.notify("watch", {"session": self.id})

    def published(self, agent: str, generation: Generation) -> None:
        """Update the tools of ``agent``."""
        if self._own is not None and self._options.get("agent") == agent:
            self._own = generation

    def _opening(self) -> Message:
        view = {"interaction": self._catalog.number, "brought": list(self._catalog.active.steps())}
        options = self._options
        return {
            "id": self.id,
            "rules": list(self._rules),
            **view,
            "headless": self.headless,
            "topic": options.get("topic"),
            "agent": options.get("agent"),
            "mode": self._mode,
            "shared": bool(getattr(self.attendant, "shared", False)),
            "client": options.get("client"),
            "peer": None if self.peer is None else kinds_offered(self.peer, ""),
            "editor": isinstance(self.peer, Buffers),
        }

    def _tell_of_client(self, call: str, call_id: str) -> None:
        """Report the requests that the client supports to the lease holder, before a call is proposed.

        :param call: the id for the lease holder: of a turn, without the position in it
        """
        if self.peer is not None:
            kinds = kinds_offered(self.peer, call_id)
            self._membership.tell("client", {"session": self.id, "call": call, "kinds": kinds})

    def _opened(self, told: Message) -> None:
        if "generation" in told:
            self._own = mirror.generation_of(told["generation"], self._tools)
        self._turns = max(self._turns, told["turns"])
        self._catalog.arrange(WIRE.reader_of(CatalogOptions)(told["catalog"]))
        self._catalog.active.take(told["brought"])
        self._ruled = dict(told["native"])
        self.skills = self.skills or WIRE.form_of(Sequence[Skill]).read(told["skills"])  # they stay the same
        self.agents = WIRE.form_of(Sequence[AgentType]).read(told["agents"])

    # ── loaded tools ─────────────────────────────────────────────────────────────────────────────

    @property
    def _tools(self) -> Generation:
        return self._own or self._generation()

    @property
    def view(self) -> list[ToolSpec]:
        return usable(self._catalog.specs(self._tools), self.delegates)

    async def begin(self, text: str = "", *, headless: bool = False) -> None:
        self._check_open()
        self._catalog.begin()
        self._unattended = headless
        body = self._beginning(text)
        # Without a lease holder, the next one learns of it when the session is opened again.
        with contextlib.suppress(StartError):
            before = self._ruled
            told = await self._membership.request("begin", body, settle=True, repeatable=True)
            if self._ruled is before:  # otherwise rules were added after the evaluation
                self._ruled = dict(told)

    def _beginning(self, text: str) -> Message:
        number = self._catalog.number
        return {"session": self.id, "interaction": number, "text": text, "headless": self._unattended}

    def brought_in(self, interaction: int, steps: Iterable[str]) -> None:
        """Update the loaded tools, because the lease holder has changed them."""
        if interaction == self._catalog.number:
            self._catalog.active.take(steps)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        self._check_open()
        proposed = ProposedCall(tool, arguments)
        if key is None:
            self._turns += 1
            generation = self._tools
            answers = await self.carry_out(self._turns, self._membership.token, generation.number, (proposed,))
            return answers[0].result
        self._tell_of_client(f"{self.id}/key:{key}", f"{self.id}/key:{key}")
        body = {"session": self.id, "call": mirror.of_call(proposed), "key": key}
        while True:
            try:
                return WIRE.reader_of(Result)(await self._membership.request("keyed", body, settle=True))
            except ConnectionLost:  # with the same key, the recorded result is returned and nothing runs twice
                continue
            except StartError as error:
                return Result.error("unavailable", f"{error} Call again with the same key: nothing runs twice.")

    async def call_all(self, calls: Iterable[Proposal]) -> list[Result]:
        return [answer.result for answer in await self.turn().call_all(calls)]

    def turn(self) -> JoinedTurn:
        self._check_open()
        self._turns += 1
        token = self._membership.token
        return JoinedTurn(self.carry_out, token, self._tools, self._turns, self._catalog, self._ruled, self.delegates)

    async def carry_out(
        self, number: int, token: int, generation: int, calls: Sequence[ProposedCall], first: int | None = None
    ) -> Sequence[Answer]:
        """Execute the calls of one turn, even if the lease holder disconnects meanwhile.

        :param first: the position of a single call in the turn; None if ``calls`` are all calls of the turn
        """
        ids = [call_id(self.id, number, (first or 0) + index) for index in range(len(calls))]
        if self._closed is not None:
            return self._too_late(ids)
        told = [mirror.of_call(call) for call in calls]
        body: Message = {"session": self.id, "turn": number, "token": token, "generation": generation}
        if first is None:
            body["calls"] = told
        else:
            try:
                body |= {"position": first, "call": told[0], "behind": await self.history.behind()}
            except HandrailError as error:
                text = f"Nothing was run, because the conversation cannot be stored: {error}"
                return _all(ids, Result.error("unavailable", text))
        if not first:
            self._tell_of_client(f"{self.id}/{number}", call_id(self.id, number, 0))
        try:
            answers = await self._membership.request("reply" if first is None else "call", body, settle=True)
        except ConnectionLost:
            return await self._after_a_loss(ids, calls)
        except Refused as refused:
            if refused.kind != HANDED_ON:
                raise
            return await self._after_a_loss(ids, calls)
        except StartError as error:
            return _all(ids, Result.error("unavailable", f"Nothing was run. {error}"))
        except UsageError:
            if self._closed is None:
                raise
            return self._too_late(ids)
        return [mirror.answer_of(answer) for answer in (answers if first is None else [answers])]

    def _too_late(self, ids: Sequence[str], kind: ErrorKind = "cancelled") -> Sequence[Answer]:
        """Return the answers to calls in a session that is no longer open.

        :param kind: ``cancelled`` if none of them reached a lease holder, ``interrupted`` if this is unknown
        """
        assert self._closed is not None
        unknown = "It is unknown whether this call took effect. " if kind == "interrupted" else ""
        return _all(ids, Result.error(kind, unknown + self._closed))

    async def _after_a_loss(self, ids: Sequence[str], calls: Sequence[ProposedCall]) -> Sequence[Answer]:
        """Recover the answers to calls after the lease holder has disconnected.

        Calls that had not started are proposed to the next lease holder.
        """
        if self._closed is not None:
            return self._too_late(ids, "interrupted")
        try:
            await self.history.kept()
        except HandrailError as error:
            text = f"It is unknown whether this call took effect, and the conversation cannot be stored: {error}"
            return _all(ids, Result.error("interrupted", text))
        try:
            return await self._told_or_anew(ids, calls)
        except StartError as error:
            text = f"It is unknown whether this call took effect. Check before you call it again. {error}"
            return _all(ids, Result.error("interrupted", text))

    async def _told_or_anew(self, ids: Sequence[str], calls: Sequence[ProposedCall]) -> Sequence[Answer]:
        told = await self._recalled(ids)
        answers = [answer for answer, _ in told]
        again = [index for index, (_, begun) in enumerate(told) if not begun]
        if again:
            anew = await self.turn().call_all([calls[index] for index in again])
            for index, answer in zip(again, anew, strict=True):
                answers[index] = answer
        return answers

    async def recall(self, call_id: str) -> Answer:
        """Recover one answer; see :meth:`handrail.session.session.HeldSession.recall`."""
        return (await self.recall_all((call_id,)))[0]

    async def recall_all(self, call_ids: Sequence[str]) -> list[Answer]:
        """Recover several answers; see :meth:`handrail.session.session.HeldSession.recall_all`."""
        self._check_open()
        return [answer for answer, _ in await self._recalled(call_ids)]

    async def _recalled(self, call_ids: Sequence[str]) -> list[tuple[Answer, bool]]:
        body = {"session": self.id, "calls": list(call_ids)}
        while True:
            try:
                told = await self._membership.request("recall", body)
            except ConnectionLost:  # calls that it resumed are no longer suspended; their records have the answers
                continue
            return [(mirror.answer_of(answer), begun) for answer, begun in told]

    async def resume_parked(self) -> list[Answer]:
        """Resume suspended calls; see :meth:`handrail.session.session.HeldSession.resume_parked`."""
        self._check_open()
        waiting: list[str] | None = None
        while True:
            try:
                if waiting is None:
                    waiting = await self._membership.request("waiting", {"session": self.id})
                    answers = await self._membership.request("parked", {"session": self.id}, settle=True)
                    return [mirror.answer_of(answer) for answer in answers]
                return await self.recall_all(waiting)
            except ConnectionLost:  # the log has the calls that it resumed; the others still wait
                continue

    def cancel(self, reason: StopReason = "user") -> None:
        self._membership.begin(self._stop(reason))

    async def child(self, call_id: str, delegation: Delegation) -> Child:
        options: SessionOptions = {"attendant": self.attendant, "agent": delegation.agent}
        shared = (self._generation, options, self.workdir, self._forget)
        child = JoinedSession(new_session_id(), self._membership, *shared)
        handed = WIRE.write(Delegation, delegation)
        body = {"id": child.id, "session": self.id, "call": call_id, "delegation": handed}
        told = await self._membership.request("child", body, settle=True)
        child._opened(told)
        child.adopted = self.adopted
        self.adopted(child)
        return Child(child, AgentManifest.model_validate(told["agent"]))

    async def _stop(self, reason: StopReason) -> None:
        try:
            await self._membership.request("stop", {"session": self.id, "reason": reason})
        except (ConnectionLost, UsageError):  # the calls have ended with their lease holder or session
            pass

    def add_rules(self, *texts: str) -> None:
        """Add rules to the session; see :meth:`handrail.session.session.HeldSession.add_rules`."""
        found = rules_of(texts)
        self._rules += texts
        self._ruled = {}
        self._membership.tell("rules", {"session": self.id, "rules": list(texts)})
        check_reach(found, self._tools)

    def set_mode(self, mode: str) -> None:
        self._mode, self._ruled = given(mode), {}  # the next lease holder receives it, too
        self._membership.tell("mode", {"session": self.id, "mode": mode})

    # ── notifications, jobs and sub-agents ───────────────────────────────────────────────────────

    @property
    def notices(self) -> Notices:
        return proxy(Notices, "notices.", asking(self._membership, session=self.id))

    @property
    def jobs(self) -> Jobs:
        """The background jobs of the session, which run in the lease holder."""
        return proxy(Jobs, "jobs.", asking(self._membership, session=self.id))

    async def promote(self, call_id: str) -> Job:
        body = {"session": self.id, "call": call_id}
        return WIRE.reader_of(Job)(await self._membership.request("promote", body, repeatable=True))

    def delegate_to(self, delegates: Delegates | None) -> None:
        self.delegates = delegates
        self._membership.tell("delegates", {"session": self.id, "there": delegates is not None})

    async def instructions_above(self) -> Sequence[tuple[str, str]]:
        """Return the instructions of parent folders.

        See :meth:`handrail.contract.session.Session.instructions_above`.
        """
        told = await self._membership.request("instructions", {"session": self.id}, repeatable=True)
        return WIRE.form_of(Sequence[tuple[str, str]]).read(told)

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        if not self._listeners:
            self._membership.tell("watch", {"session": self.id})
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._membership.tell("unwatch", {"session": self.id})

        return stop

    def happened(self, event: Event) -> None:
        """Call the listeners with an event."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # a listener must not affect the call
                about = f"a listener to the events of session {self.id} failed at {event.kind!r}"
                asyncio.get_running_loop().call_exception_handler({"message": about, "exception": error})

    def events(self) -> AsyncIterator[Event]:
        return events_of(self, self._readers)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        if self.closed:
            return
        self._end(CLOSED)
        asked = {"session": self.id}
        while True:
            try:
                await self._membership.request("close", asked)
            except ConnectionLost:
                continue
            except UsageError:  # the next lease holder never had it open; the last one may have closed it
                with contextlib.suppress(UsageError):
                    await self._membership.request("close-session", {"id": self.id})
            return

    async def suspend(self) -> None:
        """Suspend the session. Any process can open it again."""
        if not self.closed:
            self._end(SUSPENDED)
            await self._leave("user")

    async def end_with_kernel(self) -> None:
        """Suspend the session because the kernel of this process is shutting down.

        Without a lease holder, or if it is shutting down as well, nothing is sent: its shutdown suspends the session, and so
        does the end of the connection.
        """
        if not self.closed:
            self._end(ENDED)
            if (standing := self._membership.standing) is not None:
                with contextlib.suppress(HandrailError, TimeoutError):
                    async with asyncio.timeout(LEAVING_S):
                        await standing.request("suspend", self._leaving("shutdown", ENDED))

    async def _leave(self, reason: StopReason) -> None:
        try:
            await self._membership.request("suspend", self._leaving(reason, SUSPENDED))
        except (ConnectionLost, UsageError):  # the session has ended with its lease holder
            pass

    def _leaving(self, reason: StopReason, why: str) -> Message:
        return {"session": self.id, "reason": reason, "why": why}

    def _end(self, why: str) -> None:
        self.closed = True
        self._closed = f"Session {self.id} {why}."
        self._forget(self)
        for reader in self._readers:
            reader.end()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise UsageError(self._closed)


def _all(ids: Sequence[str], result: Result) -> Sequence[Answer]:
    return [Answer(known_as, "", result, result) for known_as in ids]


# ── its turns ────────────────────────────────────────────────────────────────────────────────────

_NOT_JUDGED = (
    "the rules or tools have changed since the start of the interaction; the process that holds the workspace evaluates it "
    "again at the start of the next one"
)


class CarryOut(Protocol):
    """A callable that executes the calls of a turn, or one of them by its position."""

    async def __call__(
        self, number: int, token: int, generation: int, calls: Sequence[ProposedCall], first: int | None = None
    ) -> Sequence[Answer]: ...


class JoinedTurn:
    """A :class:`~handrail.contract.session.Turn` in a client process.

    :param ruled: by id of a provider tool: the reason why the session's rules exclude it, or None; other provider tools are
        not available
    :param delegates: the runner of sub-agents; None: sub-agents are not available
    """

    def __init__(
        self,
        carry_out: CarryOut,
        token: int,
        generation: Generation,
        number: int,
        catalog: Interaction,
        ruled: Mapping[str, str | None],
        delegates: Delegates | None,
    ) -> None:
        self._carry_out = carry_out
        self._catalog = catalog
        self._in_view = catalog.turn(generation)
        self._ruled = ruled
        self._delegates = delegates
        self._token = token
        self.generation = generation
        self.number = number
        self._submitted = 0

    @property
    def specs(self) -> list[ToolSpec]:
        return usable(self._catalog.specs(self.generation, self._in_view), self._delegates)

    @property
    def index(self) -> str:
        return self._catalog.index(self.generation)

    @property
    def native(self) -> list[NativeOffer]:
        specs = self._catalog.native(self.generation)
        return [NativeOffer(spec, self._ruled.get(spec.id, _NOT_JUDGED)) for spec in specs]

    async def call_all(self, calls: Iterable[Proposal]) -> Sequence[Answer]:
        proposed = [as_proposed(call) for call in calls]
        return await self._carry_out(self.number, self._token, self.generation.number, proposed)

    def look_ahead(self, call: Proposal) -> None:
        """Do nothing: the lease holder checks calls when they are submitted."""

    def submit(self, call: Proposal) -> asyncio.Task[Answer]:
        """Start the next call of a reply that is still arriving. Calls reach the lease holder in this order."""
        place, self._submitted = self._submitted, self._submitted + 1
        return asyncio.get_running_loop().create_task(self._answered(as_proposed(call), place))

    async def _answered(self, call: ProposedCall, place: int) -> Answer:
        (answer,) = await self._carry_out(self.number, self._token, self.generation.number, (call,), place)
        return answer


# ── its history ──────────────────────────────────────────────────────────────────────────────────


class JoinedHistory:
    """A :class:`~handrail.contract.doors.memory.History` that the lease holder stores."""

    def __init__(self, session_id: str, membership: Membership) -> None:
        self._session_id = session_id
        self._membership = membership
        self._latest: Keeping | None = None
        # These requests are repeatable: duplicates are recognised by their content, or are harmless.
        there = proxy(History, "history.", asking(membership, session=session_id))
        self.read, self.attached, self.attachment = there.read, there.attached, there.attachment
        self.compacted, self.provided = there.compacted, there.provided

    def keep(self, entries: Sequence[Entry]) -> Awaitable[None]:
        number = 1 if self._latest is None else self._latest.number + 1
        told = [[position, dict(data)] for position, data in entries]
        body = {"session": self._session_id, "entries": told, "number": number}
        self._latest = Keeping(self._membership, body, number)
        return self._latest

    async def behind(self) -> int:
        """Return the number of the write that a new call must wait for; 0 if all writes are durable.

        While the last write is in flight over the same connection, the lease holder lets the call wait for it.

        :raises HandrailError: if the messages cannot be stored
        """
        if (latest := self._latest) is not None:
            if latest.is_on_its_way:
                return latest.number
            await latest
        return 0

    async def kept(self) -> None:
        """Wait until the last write is durable.

        :raises HandrailError: if the messages cannot be stored
        """
        if self._latest is not None:
            await self._latest


class Keeping:
    """A write of messages to the current lease holder. It may be awaited any number of times."""

    def __init__(self, membership: Membership, body: Mapping[str, Any], number: int) -> None:
        self.number = number
        self._membership = membership
        self._sent_over: Connection | None = None
        self._work = asyncio.get_running_loop().create_task(self._keep(body))
        self._work.add_done_callback(_seen)  # awaiting it is optional

    @property
    def is_on_its_way(self) -> bool:
        """Whether it was sent to the current lease holder and has no answer yet."""
        standing = self._membership.standing
        return not self._work.done() and standing is not None and self._sent_over is standing

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self._work).__await__()

    async def _keep(self, body: Mapping[str, Any]) -> None:
        while True:  # each message has its position, so a repeated write has no effect
            self._sent_over = self._membership.standing
            try:
                await self._membership.request("keep", body)
            except ConnectionLost:
                continue
            return


def _seen(work: asyncio.Task[None]) -> None:
    if not work.cancelled():
        work.exception()


# Approval requests in a client process: read from the database, answered by the lease holder.

APPROVALS = "approvals."
"""The prefix of the operations of :class:`ApprovalDesk`."""


class JoinedApprovals:
    """A :class:`~handrail.contract.approvals.ApprovalDesk` in a client process.

    :param reader: returns a reader of the lease holder's database, which shows the durable state
    """

    def __init__(
        self, reader: Callable[[], ApprovalReader], holder: Holder, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._reader = reader
        self._once = proxy(ApprovalDesk, APPROVALS, asking(holder, repeatable=False))
        self._again = proxy(ApprovalDesk, APPROVALS, asking(holder))
        self._clock = clock

    def pending(self, session_id: str | None = None) -> list[Approval]:
        return self._reader().pending(self._clock(), session_id=session_id)

    def get(self, approval_id: str) -> Approval:
        found = self._reader().get(approval_id)
        if found is None:
            raise ToolError(
                f"Request `{visible(approval_id[:40])}` does not exist in this workspace. List pending requests with `handrail approve`.",
                kind="invalid_input",
            )
        return found

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        return await self._answered(
            lambda desk: desk.decide(approval_id, answer, by=by), approval_id, by, answer.choice
        )

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        return await self._answered(lambda desk: desk.answer(approval_id, answers, by=by), approval_id, by, None)

    async def _answered(
        self, ask: Callable[[ApprovalDesk], Awaitable[Approval]], approval_id: str, by: str, choice: Choice | None
    ) -> Approval:
        """Answer a request once.

        If the lease holder disconnected before it confirmed the answer, the answer may already be recorded.
        """
        try:
            return await ask(self._once)
        except ConnectionLost:
            pass
        try:
            return await ask(self._again)
        except ToolError:
            found = self.get(approval_id)
            if found.pending or found.decided_by != by or found.choice != choice:
                raise
            return found

    def rules(self) -> list[StoredRule]:
        return self._reader().rules()

    async def forget_rule(self, rule_id: str) -> StoredRule:
        known = next((rule for rule in self.rules() if rule.id == rule_id), None)
        try:
            return await self._once.forget_rule(rule_id)
        except ConnectionLost:
            pass
        try:
            return await self._again.forget_rule(rule_id)
        except ToolError:
            if known is None or any(rule.id == rule_id for rule in self.rules()):
                raise
            return known  # the previous lease holder had revoked it
