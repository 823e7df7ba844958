"""A session in the process that carries its calls out: its lane, turns, events, rules, and place among sub-agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets as randomness
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.call import Call, Lane
from handrail.arbiter.delegating import note_handed
from handrail.arbiter.jobs.views import JobView
from handrail.arbiter.peers import far_along
from handrail.catalog.interaction import Interaction
from handrail.contract.agent import AgentManifest
from handrail.contract.approvals import Attendant
from handrail.contract.call import Answer, Event, ProposedCall, Result
from handrail.contract.doors.agents import MAX_DEPTH, AgentType, Delegates, Delegation, Handed, usable
from handrail.contract.doors.channels import Notices
from handrail.contract.doors.jobs import Job, Jobs
from handrail.contract.doors.memory import History, Skill
from handrail.contract.doors.peer import Buffers, Peer
from handrail.contract.errors import LogUnavailable, ToolError, UsageError
from handrail.contract.generation import Generation
from handrail.contract.session import Child, Proposal, Session, StopReason, Turn
from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.authority import ruled
from handrail.policy.rules.checking import check_loaded, specs_of
from handrail.policy.rules.rules import Rule, RuleBook, given, in_mode, parse_rule
from handrail.record.log import Record
from handrail.session.events import EventQueue, News, events_of
from handrail.session.project_files import files_above, permitting
from handrail.session.taking_up import TakingUp
from handrail.session.turn import HeldTurn

# Rules added to an open session: parsed, and rejected if they can match nothing.

GIVEN = "session"
"""The source of the rules that the program gives a session."""


def rules_of(texts: Iterable[str]) -> list[Rule]:
    """Parse rules of the session scope.

    :raises ValueError: if a text is not a rule
    """
    return [parse_rule(text, scope="session", source=GIVEN) for text in texts]


def check_reach(rules: Iterable[Rule], tools: Generation) -> None:
    """Check that each rule can match a call of these tools.

    :raises ValueError: if a rule can match no call
    """
    known, specs = {*tools.entries, *tools.beyond}, specs_of(tools.entries)
    for rule in rules:
        parse_rule(rule.text, scope="session", known=known)
        check_loaded(rule, (), (), specs)


CLOSED = "is closed. Open another session with kernel.session()."
SUSPENDED = "is suspended. Open it again with its id."
ENDED = "has ended because its kernel is closed. Open a new kernel."
"""Texts of why a closed session refuses calls. Each follows the session's id."""
_MOST_SKIPPED = 1_000
"""The number of skipped turns that may still start after a later turn has started."""

ABORTED = "was aborted by its parent, whose session has ended."


class HeldSession:
    """A session in the process that runs its calls.

    Implements :class:`~handrail.contract.session.Session`. Use it from tasks of the kernel's event loop.
    """

    def __init__(
        self,
        arbiter: Arbiter,
        lane: Lane,
        on_close: Callable[[HeldSession], Awaitable[None]],
        on_suspend: Callable[[HeldSession], Awaitable[None]],
        turns: int,
        family: Family,
        history: History,
    ) -> None:
        """Create the session of a lane.

        :param turns: the number of its last turn
        :param family: its place in the tree of sub-agent sessions
        :param history: its stored conversation
        """
        self._arbiter = arbiter
        self._lane = lane
        self._generation = lane.current
        self._catalog = lane.catalog
        self.news = News(lane)
        """Sends events that belong to no call to the session's watchers."""
        self._people = lane.attendant
        """The approval handler, unless the interaction is headless."""
        self._on_close = on_close
        self._on_suspend = on_suspend
        self._turns = turns
        self._earlier = TakingUp(arbiter, lane, lane.current)
        self._skipped: dict[int, None] = {}
        """The turns that have a number and have not started."""
        self.id = lane.session_id
        self._keys: dict[str, _KeyInUse] = {}
        self._readers: list[EventQueue] = []
        self.closed = False
        self._rests = False
        """Whether the session was suspended. Its jobs continue, with the sub-agents that work for them."""
        self.history: History | None = history
        self.notices: Notices | None = lane.notices
        """The notifications for its agent."""
        self.successor: Session | None = None
        """The same session in the process that now holds the workspace. It is set once this process is connected to that one."""
        self.family = family

    @property
    def turns(self) -> int:
        """The number of the last turn."""
        return self._turns

    @property
    def generation(self) -> Generation:
        """The tools that the next turn gets."""
        return self._generation()

    @property
    def people(self) -> Attendant | None:
        """The approval handler of the interactions that are not headless."""
        return self._people

    @property
    def headless(self) -> bool:
        """Whether the current interaction has no user to ask."""
        if (successor := self.successor) is not None:
            return successor.headless
        return self._lane.attendant is None

    @property
    def workdir(self) -> str:
        """The canonical folder of the workspace."""
        return self._lane.around.workdir

    @property
    def rules(self) -> RuleBook:
        """The rules in force now, including the user's answers "for this session"."""
        return self._lane.rules

    @property
    def given_rules(self) -> tuple[str, ...]:
        """The rules that the program gave the session. They are not stored."""
        return tuple(rule.text for rule in self._lane.rules if rule.scope == "session" and rule.source == GIVEN)

    def add_rules(self, *texts: str) -> None:
        """Add rules of the session scope. They apply at once.

        :raises ValueError: if a text is not a rule (no rule is added), or if a rule can match no call of any tool (all rules
            are added)
        """
        if (successor := self.successor) is not None:
            successor.add_rules(*texts)
            return
        found = rules_of(texts)
        self._lane.rule_by(self._lane.rules.with_rules(*found))
        check_reach(found, self._generation())

    def set_mode(self, mode: str) -> None:
        """Switch to another mode. It applies at once.

        :raises UsageError: if the mode does not exist
        """
        if (successor := self.successor) is not None:
            successor.set_mode(mode)
            return
        wanted = given(mode)
        if wanted is not None and wanted != self._lane.rules.mode:
            self._lane.rule_by(in_mode(self._lane.rules, wanted))

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        """Propose one call and wait for its result.

        :param key: an idempotency key; see :meth:`handrail.contract.session.Session.call`
        """
        if (successor := self.successor) is not None:
            return await successor.call(tool, arguments, key=key)
        if self._lane.closed is not None:
            raise UsageError(self._lane.closed)
        proposed = ProposedCall(tool, arguments)
        if key is not None:
            return await self._keyed(proposed, key)
        self._turns += 1
        call = self._arbiter.call(f"{self.id}/{self._turns}.0", proposed, self._lane, self._generation())
        return (await self._arbiter.carry_out(call)).result

    async def call_all(self, calls: Iterable[Proposal]) -> list[Result]:
        """Propose calls as one reply and return one result each, in order."""
        if (successor := self.successor) is not None:
            return await successor.call_all(calls)
        return [answer.result for answer in await self.turn().call_all(calls)]

    async def begin(self, text: str = "", number: int | None = None, *, headless: bool = False) -> None:
        """Start an interaction with the user's message ``text``.

        :param number: the number of the interaction, if another process counts them; the current number starts nothing
        :param headless: whether the interaction has no user to ask
        """
        if (successor := self.successor) is not None:
            await successor.begin(text, headless=headless)
            return
        self._check_open()
        self._lane.attendant = self._lane.around.attendant = None if headless else self._people
        if number is None or number != self._catalog.number:
            self._catalog.begin(number)
            self.news.view_changed()
        await self._catalog.preload(self._generation(), text)
        await self._catalog.keep()

    @property
    def view(self) -> Sequence[ToolSpec]:
        """The tools that the model of the next turn sees."""
        if (successor := self.successor) is not None:
            return successor.view
        generation = self._generation()
        self._catalog.load_ahead(generation)
        return usable(self._catalog.specs(generation), self._lane.delegates)

    @property
    def catalog(self) -> Interaction:
        """The tools that are loaded for its model."""
        return self._catalog

    @property
    def native(self) -> Sequence[NativeOffer]:
        """The tools that the model's provider may run itself."""
        if (successor := self.successor) is not None:
            return successor.turn().native
        return [
            ruled(spec, self._lane.rules, self._lane.named_hosts_of)
            for spec in self._catalog.native(self._generation())
        ]

    def turn(self) -> Turn:
        """Start the next turn with the current tools."""
        if (successor := self.successor) is not None:
            return successor.turn()
        return self.turn_at(self._turns + 1, self._generation())

    def turn_at(self, number: int, generation: Generation) -> HeldTurn:
        """Start a turn with a number from another process, on the generation that this process saw.

        Turns may start in another order than their numbers.

        :raises UsageError: if the turn of this number has started already
        """
        self._count(number)
        return HeldTurn(self._arbiter, self._lane, generation, number, self._catalog)

    def call_of_turn(self, number: int, generation: Generation, proposed: ProposedCall) -> Coroutine[Any, Any, Answer]:
        """Run the only call of a turn; see :meth:`turn_at`."""
        self._count(number)
        self._catalog.turn(generation)
        return self._arbiter.carry_out(self._arbiter.call(f"{self.id}/{number}.0", proposed, self._lane, generation))

    def _count(self, number: int) -> None:
        """Mark the turn of this number as started; see :meth:`turn_at`."""
        self._check_open()
        if number == self._turns + 1:
            self._turns = number
        elif number > self._turns:
            self._skipped |= dict.fromkeys(range(max(self._turns + 1, number - _MOST_SKIPPED), number))
            while len(self._skipped) > _MOST_SKIPPED:
                del self._skipped[next(iter(self._skipped))]
            self._turns = number
        elif number in self._skipped:
            del self._skipped[number]
        else:
            raise UsageError(
                f"Turn {number} of session {self.id} has started already. The last turn was {self._turns}. Use a higher number."
            )

    @property
    def lane(self) -> Lane:
        """The session as the arbiter sees it."""
        return self._lane

    async def recall(self, call_id: str) -> Answer:
        """Return the answer to an earlier call, or resume the call if it awaits approval.

        :raises LogUnavailable: if the log cannot be read
        """
        if (successor := self.successor) is not None:
            return await successor.recall(call_id)
        self._check_open()
        return (await self._earlier.answers((call_id,)))[0]

    async def recall_all(self, call_ids: Sequence[str]) -> list[Answer]:
        """Return the answers to several earlier calls, in order; see :meth:`recall`.

        :raises LogUnavailable: if the log cannot be read
        """
        if (successor := self.successor) is not None:
            return await successor.recall_all(call_ids)
        self._check_open()
        return await self._earlier.answers(call_ids)

    async def parked(self) -> list[str]:
        """Return the ids of the calls that :meth:`resume_parked` would resume.

        :raises LogUnavailable: if the log cannot be read
        """
        return [call.id for call in await self._earlier.waiting()]

    async def resume_parked(self) -> list[Answer]:
        """Resume all calls that await approval, as one reply, and return their answers.

        :raises LogUnavailable: if the log cannot be read
        """
        if (successor := self.successor) is not None:
            return await successor.resume_parked()
        self._check_open()
        return await self._earlier.resume()

    @property
    def jobs(self) -> Jobs:
        """The background jobs of the session."""
        if (successor := self.successor) is not None:
            return successor.jobs
        return JobView(self._arbiter.jobs, self.id)

    async def promote(self, call_id: str) -> Job:
        """Move a running call to the background and return its job.

        See :meth:`handrail.contract.session.Session.promote` for the errors.
        """
        if (successor := self.successor) is not None:
            return await successor.promote(call_id)
        return await self._arbiter.jobs.promote(self._lane, call_id)

    async def follow(self, open_again: Callable[..., Awaitable[Session]]) -> None:
        """Continue as the same session of the process that now holds the workspace.

        The session keeps its rules and its mode. It stays headless if it is headless now.

        :param open_again: opens the session there, given ``rules=`` and ``mode=``
        :raises HandrailError: if the session cannot be opened there; then it does not continue
        """
        rules, mode = self.given_rules, self._lane.rules.mode
        successor = await open_again(rules=rules, mode=mode)
        if self._people is not None and self._lane.attendant is None:
            await successor.begin(headless=True)
        if (now := self._lane.rules.mode) != mode:
            successor.set_mode(now)
        for text in self.given_rules:
            if text not in rules:
                with contextlib.suppress(ValueError):  # the rule is added there too, even if it can match no call
                    successor.add_rules(text)
        for listener in self._lane.listeners:
            successor.watch(listener)
        if self._lane.delegates is not None:
            successor.delegate_to(self._lane.delegates)
        self.history, self.notices = successor.history, successor.notices
        self.successor = successor

    def cancel(self, reason: StopReason = "user") -> int:
        """Stop every call in flight, and those of its sub-agents.

        :return: the number of the session's own calls that it stopped
        """
        if self.successor is not None:
            self.successor.cancel(reason)
        self.family.cancel()
        self._earlier.stop(reason)
        running = self._lane.in_flight
        for call in running:
            call.execution.stop(reason)
        return len(running)

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event, and return a function that ends this."""
        if (successor := self.successor) is not None:
            return successor.watch(listener)
        listeners = self._lane.listeners
        listeners.append(listener)

        def stop() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return stop

    def events(self) -> AsyncIterator[Event]:
        """Iterate over the events from now on until the session is closed."""
        return events_of(self, self._readers)

    async def close(self) -> None:
        """Close the session for good and remove its output and scratch folders."""
        if (successor := self.successor) is not None:
            await successor.close()
            return
        if self.closed:
            return
        await _through(self._close())

    @property
    def agents(self) -> Sequence[AgentType]:
        """The agents to which the session's agent may delegate."""
        if (successor := self.successor) is not None:
            return successor.agents
        return self._lane.agent_types()

    @property
    def skills(self) -> Sequence[Skill]:
        """The skills that its model can load."""
        if (successor := self.successor) is not None:
            return successor.skills
        return self._lane.skills.index

    async def instructions_above(self) -> Sequence[tuple[str, str]]:
        """Return the project's instruction files above the workspace, the farthest first.

        :raises LogUnavailable: if the log accepts no records
        """
        if (successor := self.successor) is not None:
            return await successor.instructions_above()
        reader = self._generation().resolve("read")
        if reader is None or reader.withheld is not None:
            return ()
        log, redactor, workdir = self._arbiter.log, self._arbiter.shaper.redactor, Path(self.workdir)
        if log.refusal is not None:
            raise LogUnavailable(log.refusal)
        permitted = permitting(reader.spec, self._lane.rules)
        found = await asyncio.to_thread(files_above, workdir, permitted, redactor.text)
        if found:
            told = redactor.record({"files": [one.for_the_record() for one in found]})
            log.append([Record("instructions-read", self.id, "", told)])
        return [(os.path.relpath(one.path, workdir), one.text) for one in found if one.text is not None]

    def delegate_to(self, delegates: Delegates | None) -> None:
        """Set the runner of sub-agents; with None the session's calls cannot delegate."""
        if (successor := self.successor) is not None:
            successor.delegate_to(delegates)
            return
        self._lane.delegates = delegates

    async def child(self, call_id: str, delegation: Delegation) -> Child:
        """Open a session for the sub-agent that a call of this session starts.

        :param call_id: the id of a call in flight
        :raises ToolError: if the agent may not be started
        :raises UsageError: if the call is not in flight
        """
        if (successor := self.successor) is not None:
            return await successor.child(call_id, delegation)
        call = self._lane.delegating.get(call_id)
        if call is None or not call.of_a_job or not self._rests:
            self._check_open()
        return await self.family.child(self, call_id, delegation)

    async def settled(self) -> None:
        """Wait until no call is in flight."""
        await self._lane.answered()

    async def suspend(self, why: str = SUSPENDED, reason: StopReason = "user") -> None:
        """Stop and answer the calls in flight, and keep the session so that it can be opened again.

        :param why: why the session refuses later calls; follows the session's id
        :param reason: why the calls in flight are stopped
        """
        if (successor := self.successor) is not None:
            await successor.suspend()
            return
        if self.closed:
            return
        await _through(self._suspend(why, reason))

    async def _close(self) -> None:
        await self.end("user", CLOSED)
        await self._on_close(self)

    async def _suspend(self, why: str, reason: StopReason) -> None:
        for call in self._lane.in_flight:
            if (
                call.people.asked and self.family.under is None
            ):  # the call awaits approval, and its request outlasts the suspension
                call.execution.stop("shutdown")
        self._rests = self.family.under is None  # nothing continues for a sub-agent's session
        await self.end(reason, why)
        await self._on_suspend(self)

    def hand_on(self) -> None:
        """Stop the calls in flight that have not started to run."""
        for call in self._lane.in_flight:
            if not call.begun:
                call.execution.stop("shutdown")

    async def end(self, reason: StopReason, why: str) -> None:
        """Accept no more calls, stop those in flight, and wait until each has its answer.

        The session's folders stay.

        :param why: why the session refuses later calls, such as ``is closed.``; follows the session's id
        """
        if self.family.under is not None and reason == "shutdown":
            reason = "parent"  # its approval requests end with it: its calls are never resumed
        self.closed = True
        self._lane.closed = f"Session {self.id} {why}"
        self.news.end()
        self.cancel(reason)
        await self.family.end(but_jobs=self._rests)
        if self._lane.subscribed is not None:
            await self._lane.subscribed.aclose()
        # A task that ignores its cancellation must not keep the session from ending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 + 3 * self._arbiter.limits.grace_ms / 1000):
                await self._lane.answered()
        await self._arbiter.states.end_session(self.id)
        for reader in self._readers:
            reader.end()

    async def _keyed(self, proposed: ProposedCall, key: str) -> Result:
        if not key or len(key) > 200 or not key.isprintable() or "/" in key:
            raise UsageError(f"`key` is invalid: {key[:50]!r}. Use 1 to 200 printable characters without '/'.")
        in_use = self._keys.setdefault(key, _KeyInUse())
        in_use.users += 1
        try:
            async with in_use.lock:
                self._check_open()
                call = self._arbiter.call(
                    f"{self.id}/key:{key}", proposed, self._lane, self._generation(), replayable=True
                )
                return (await self._arbiter.carry_out(call)).result
        finally:
            in_use.users -= 1
            if not in_use.users:
                del self._keys[key]

    def _check_open(self) -> None:
        if self._lane.closed is not None:
            raise UsageError(self._lane.closed)


async def _through(ending: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, even if this task is cancelled meanwhile.

    A session that is half closed can neither be used nor closed nor opened again.
    """
    task = asyncio.get_running_loop().create_task(ending)
    owed: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as cancellation:
            owed = cancellation
    if owed is not None:
        raise owed
    task.result()


@dataclass(slots=True)
class _KeyInUse:
    """A lock that lets the calls with one idempotency key run one by one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


def new_session_id() -> str:
    """Return an id that sorts by time and cannot be guessed."""
    return f"ses_{time.time_ns() // 1_000_000:012x}{randomness.token_hex(5)}"


Opens = Callable[["HeldSession", Call, Delegation], Awaitable[Child]]
"""Opens the session of a sub-agent."""


@dataclass(eq=False, slots=True)
class Under:
    """The parent session, call and delegation that created a sub-agent's session.

    :ivar parent: replaced if the parent is suspended and opened again
    """

    parent: HeldSession
    call: Call
    delegation: Delegation

    @property
    def top(self) -> HeldSession:
        """The session at the top of the tree."""
        above = self.parent.family.under
        return self.parent if above is None else above.top

    @property
    def in_background(self) -> bool:
        """Whether the sub-agent works for a background job, so that no call waits for it."""
        above = self.parent.family.under
        return self.call.of_a_job or (above is not None and above.in_background)


@dataclass(slots=True)
class Family:
    """A session's place in the tree of sub-agents: its parent and its children.

    :param manifest: the manifest of its agent
    :param opens: opens the sessions of sub-agents; None if the session can have none
    :param under: the parent and its call; None for a session that a user or a program opened
    """

    manifest: AgentManifest
    opens: Opens | None = None
    under: Under | None = None
    children: list[HeldSession] = field(default_factory=list["HeldSession"])
    """The open sessions of its sub-agents."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session ends."""
    taken_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the session is opened again after a suspension during which sub-agents worked in the background."""

    @property
    def line(self) -> tuple[AgentManifest, ...]:
        """The manifests of its agent and of all parent agents, the nearest first."""
        return (self.manifest, *above(self.under))

    def check_depth(self) -> None:
        """Check that the session may have sub-agents of a further level.

        :raises ToolError: ``limit``, if it may not
        """
        if len(self.line) > MAX_DEPTH:
            raise ToolError(
                f"Sub-agents may be nested at most {MAX_DEPTH} levels deep, and this agent is at that level. Do the work yourself.",
                kind="limit",
            )

    def top(self, session_id: str) -> str:
        """Return the id of the session at the top of the tree.

        :param session_id: the id of the session at this place
        """
        return session_id if self.under is None else self.under.top.id

    async def child(self, of: HeldSession, call_id: str, delegation: Delegation, opens: Opens | None = None) -> Child:
        """Open the session of a sub-agent for a call of session ``of``.

        :param opens: replaces the opener of this place
        :raises ToolError: if the session can have no sub-agents, or the opener refuses
        :raises UsageError: if the call does not delegate now
        """
        opens = opens or self.opens
        call = of.lane.delegating.get(call_id)
        if call is None:
            raise UsageError(
                f"Call {call_id[:80]!r} of session {of.id} does not delegate now. "
                "Pass the id of a call in flight that starts a sub-agent."
            )
        if opens is None:
            raise ToolError("Sub-agents are not available in this session. Do the work yourself.", kind="unavailable")
        child = await opens(of, call, delegation)
        note_handed(call, Handed(delegation.agent, child.session.id))
        if call.watched:  # watchers of the call see the progress of the sub-agent
            child.session.watch(partial(_tell, call, delegation.agent))
        return child

    def cancel(self) -> None:
        """Stop the calls of the child sessions, except of those that work for a job."""
        for child in self._below(but_jobs=True):
            child.cancel("parent")

    async def end(self, *, but_jobs: bool = False) -> None:
        """End the child sessions because this session ends.

        :param but_jobs: whether the sessions that work for a job continue
        """
        self.left.set()
        await asyncio.gather(*(child.suspend(ABORTED, "parent") for child in self._below(but_jobs)))

    def _below(self, but_jobs: bool) -> list[HeldSession]:
        unders = ((child, child.family.under) for child in self.children)
        return [child for child, under in unders if not (but_jobs and under is not None and under.call.of_a_job)]

    def take_over(self, session: HeldSession, before: HeldSession) -> None:
        """Move the child sessions of ``before``, which was suspended, to ``session``, which replaces it.

        The sub-agents then follow the rules of ``session``, and use its editor and its approval handler.
        """
        for child in tuple(before.family.children):
            child.family.leave(child)
            if child.family.under is not None:
                child.family.under.parent = session
            child.family.enter(child)
        session.lane.rule_by(session.lane.rules)
        self._seen_by_editor()
        before.family.taken_up.set()

    def _seen_by_editor(self) -> None:
        for child in self.children:
            if child.family.under is not None:
                child.lane.around.peer = editor_of(child.family.under)
            child.family._seen_by_editor()

    def enter(self, session: HeldSession) -> None:
        """Add ``session``, which is open now, to its parent's children."""
        if self.under is not None:
            self.under.parent.family.children.append(session)
            self.under.parent.lane.below.append(session.lane)

    def leave(self, session: HeldSession) -> None:
        """Remove ``session``, which is no longer open, from its parent's children."""
        if self.under is not None and session in self.under.parent.family.children:
            self.under.parent.family.children.remove(session)
            below = self.under.parent.lane.below
            below[:] = [lane for lane in below if lane is not session.lane]


def above(under: Under | None) -> tuple[AgentManifest, ...]:
    """Return the manifests of the agents above a session, the nearest first."""
    return () if under is None else under.parent.family.line


def editor_of(under: Under) -> Peer | None:
    """Return the parent's client if it is an editor.

    A sub-agent does not overwrite unsaved changes of the editor's user either.
    """
    peer = under.parent.lane.around.peer
    return peer if isinstance(peer, Buffers) else None


def _tell(call: Call, agent: str, event: Event) -> None:
    if event.kind == "started":
        call.emit("progress", far_along(f"{agent}: {event.tool_id}", None, None, None))
