"""A session in the process that carries its calls out: its lane, its turns, its events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets as randomness
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.call import Lane
from handrail.arbiter.execution import StopReason
from handrail.arbiter.looking import JobView
from handrail.arbiter.reply import Reply
from handrail.catalog.interaction import Interaction
from handrail.catalog.view import CatalogOptions
from handrail.contract.agent import AgentManifest
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.delegation import AgentType, Child, Delegates, Delegation, usable
from handrail.contract.doors import Job, Jobs
from handrail.contract.errors import UsageError
from handrail.contract.events import Event
from handrail.contract.history import History
from handrail.contract.native import NativeOffer
from handrail.contract.notices import Notices
from handrail.contract.result import Result
from handrail.contract.session import Proposal
from handrail.contract.skills import Skill
from handrail.contract.spec import ToolSpec
from handrail.policy.modes import given, in_mode
from handrail.policy.native import ruled
from handrail.policy.rules import RuleBook
from handrail.registry.generation import Generation
from handrail.session.events import EventQueue, events_of
from handrail.session.family import Family
from handrail.session.news import News
from handrail.session.parked import parked_calls
from handrail.session.reach import check_reach, rules_of
from handrail.session.recalling import recalled
from handrail.session.turn import HeldTurn

CLOSED = "is closed; open another with kernel.session()"
SUSPENDED = "is suspended; open it again by its id"
ENDED = "has ended with its kernel, which is closed; open a kernel anew"
"""What a call of a session is told that is not open any more."""
_MOST_SKIPPED = 1_000
"""Turns that may still begin although a later one has."""


class HeldSession:
    """Implements :class:`~handrail.contract.session.Session`. Safe to use from any task of the kernel's event loop."""

    def __init__(
        self,
        arbiter: Arbiter,
        lane: Lane,
        generation: Callable[[], Generation],
        on_close: Callable[[HeldSession], Awaitable[None]],
        on_suspend: Callable[[HeldSession], Awaitable[None]],
        turns: int = 0,
        family: Family | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._lane = lane
        self._generation = generation
        lane.current = generation
        if lane.catalog is None:
            lane.catalog = Interaction(lane.session_id, CatalogOptions(), lane.around.values)
        self._catalog = lane.catalog
        self.news = News(lane)
        """Tells its watchers of what is no call's."""
        self._people = lane.attendant
        """Who can be asked, where the interaction does not rule that out."""
        self._on_close = on_close
        self._on_suspend = on_suspend
        self._turns = turns
        self._skipped: dict[int, None] = {}
        """Turns that were numbered and have not begun."""
        self.id = lane.session_id
        self._keys: dict[str, _KeyInUse] = {}
        self._readers: list[EventQueue] = []
        self.closed = False
        self.history: History | None = None
        """Where what is said in it is kept."""
        self.notices: Notices | None = None
        """What its agent is to be told; None where nobody keeps that."""
        self.family = family or Family(AgentManifest())
        """The sessions of sub-agents above and below it."""

    @property
    def turns(self) -> int:
        """The number of the last turn."""
        return self._turns

    @property
    def generation(self) -> Generation:
        """The tools that its next turn gets."""
        return self._generation()

    @property
    def headless(self) -> bool:
        """Whether nobody can be asked: ask is deny, and ``question`` a fixed error."""
        return self._lane.attendant is None

    @property
    def workdir(self) -> str:
        """The workspace's canonical folder."""
        return self._lane.around.workdir

    @property
    def rules(self) -> RuleBook:
        """The rules in force now, including what was answered "for this session"."""
        return self._lane.rules

    def add_rules(self, *texts: str) -> None:
        """Add rules of the session scope; they hold from now on, also for calls that wait for a lock.

        :raises ValueError: for a text that is no rule; and for those that can match no call of the tools there are, once
            the others hold
        """
        found = rules_of(texts)
        self._lane.rule_by(self._lane.rules.with_rules(*found))
        check_reach(found, self._generation())

    def set_mode(self, mode: str) -> None:
        """Go on in another mode; it holds from now on, also for calls that wait for a lock.

        :raises UsageError: naming the modes there are
        """
        wanted = given(mode)
        if wanted is not None and wanted != self._lane.rules.mode:
            self._lane.rule_by(in_mode(self._lane.rules, wanted))

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        """Propose one call and wait for its answer.

        :param tool: id, alias or wire name
        :param arguments: an object, or its JSON text
        :param key: makes the call repeatable by its caller: the same key with the same arguments gives the
            recorded result without running anything again, also after a restart; with other arguments it is a
            ``conflict``
        """
        self._check_open()
        proposed = ProposedCall(tool, arguments)
        if key is not None:
            return await self._keyed(proposed, key)
        self._turns += 1
        call = self._arbiter.call(f"{self.id}/{self._turns}.0", proposed, self._lane, self._generation())
        return (await self._arbiter.carry_out(call)).result

    async def call_all(self, calls: Iterable[Proposal]) -> list[Result]:
        """Propose calls as one reply: in parallel where locks allow, one result each, in order."""
        return [answer.result for answer in await self.turn().call_all(calls)]

    async def begin(self, text: str = "", number: int | None = None, *, headless: bool = False) -> None:
        """See :meth:`handrail.contract.session.Session.begin`.

        :param number: of the interaction, where somebody else counts them; the same again begins nothing
        """
        self._check_open()
        self._lane.attendant = self._lane.around.attendant = None if headless else self._people
        if number is None or number != self._catalog.number:
            self._catalog.begin(number)
            self.news.view_changed()
        await self._catalog.preload(self._generation(), text)
        await self._catalog.keep()

    @property
    def view(self) -> list[ToolSpec]:
        """The tools that the next turn has in view."""
        return usable(self._catalog.specs(self._generation()), self._lane.delegates)

    @property
    def catalog(self) -> Interaction:
        """What its model has in view."""
        return self._catalog

    @property
    def native(self) -> list[NativeOffer]:
        """What a model's provider may carry out itself; a rule that denies the tool rules it out."""
        return [ruled(spec, self._lane.rules) for spec in self._catalog.native(self._generation())]

    def turn(self) -> HeldTurn:
        """The next turn. It keeps the generation of tools that is current now."""
        return self.turn_at(self._turns + 1, self._generation())

    def turn_at(self, number: int, generation: Generation) -> HeldTurn:
        """A turn that is numbered by whoever counts them elsewhere, on the generation that they saw. Turns may begin in
        another order than they were numbered in.

        :raises UsageError: for a number that has been
        """
        self._count(number)
        return HeldTurn(self._arbiter, self._lane, generation, number, self._catalog)

    def call_of_turn(self, number: int, generation: Generation, proposed: ProposedCall) -> Coroutine[Any, Any, Answer]:
        """Carry out the only call of a turn; see :meth:`turn_at`."""
        self._count(number)
        self._catalog.turn(generation)
        return self._arbiter.carry_out(self._arbiter.call(f"{self.id}/{number}.0", proposed, self._lane, generation))

    def _count(self, number: int) -> None:
        """Begin the turn of this number; see :meth:`turn_at`."""
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
            raise UsageError(f"turn {number} of session {self.id} has been; the last one was {self._turns}")

    @property
    def lane(self) -> Lane:
        """As the arbiter sees it."""
        return self._lane

    async def recall(self, call_id: str) -> Answer:
        """The answer to a call of this session that was proposed before and whose answer was not heard: as it is on
        record, ``interrupted`` where nobody knows it.

        A call that was parked is taken up: if it was approved it runs now, once; while it still waits for a person its
        answer has ``parked`` in its metadata. No other call runs.

        :raises LogUnavailable: when the log cannot tell
        """
        self._check_open()
        for call in await parked_calls(self._arbiter, self._lane, self._generation(), call_id):
            return await self._arbiter.carry_out(call)
        arbiter, generation = self._arbiter, self._generation()
        return await recalled(arbiter.log, arbiter.shaper, generation, self.id, call_id, arbiter.jobs.tree)

    async def parked(self) -> list[str]:
        """The ids of the calls that :meth:`resume_parked` takes up.

        :raises LogUnavailable: when the log cannot tell
        """
        return [call.id for call in await parked_calls(self._arbiter, self._lane, self._generation())]

    async def resume_parked(self) -> list[Answer]:
        """Take up every call that was parked, as one reply: those approved run, once; those rejected are answered so;
        those nobody has answered wait for the attendant, or are parked again. Gives their answers, in order.

        :raises LogUnavailable: when the log cannot tell
        """
        self._check_open()
        calls = iter(parked := await parked_calls(self._arbiter, self._lane, self._generation()))
        reply = Reply(self._arbiter, lambda _: next(calls))
        for call in parked:
            reply.submit(call.proposed)
        return await reply.answers()

    @property
    def jobs(self) -> Jobs:
        """Its calls that outlive their turn."""
        return JobView(self._arbiter.jobs, self.id)

    async def promote(self, call_id: str) -> Job:
        """See :meth:`handrail.contract.session.Session.promote`."""
        return await self._arbiter.jobs.promote(self._lane, call_id)

    def cancel(self, reason: StopReason = "user") -> int:
        """Stop every call in flight, and those of the sub-agents below; each still gets its one result. Gives the number of
        its own."""
        self.family.cancel()
        running = self._lane.in_flight
        for call in running:
            call.execution.stop(reason)
        return len(running)

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event, in order, as it happens. Gives the way to stop it.

        What it raises is told to the event loop's exception handler and changes nothing about the call.
        """
        listeners = self._lane.listeners
        listeners.append(listener)

        def stop() -> None:
            if listener in listeners:
                listeners.remove(listener)

        return stop

    def events(self) -> AsyncIterator[Event]:
        """The events from the first step of the iteration on, until the session or its kernel is closed.

        A reader that falls 10,000 behind misses progress only; one that falls 20,000 behind is let go.

        :raises UsageError: when it was let go, after the events up to there
        """
        return events_of(self, self._readers)

    async def close(self) -> None:
        """Close it for good: calls in flight are stopped and answered, its output and scratch folders are removed."""
        if self.closed:
            return
        await _through(self._close())

    @property
    def agents(self) -> Sequence[AgentType]:
        """The agents that its own may hand work to."""
        return self._lane.agent_types()

    @property
    def skills(self) -> Sequence[Skill]:
        """The skills that its model can read, the nearest first; the same as long as it is open."""
        return () if self._lane.skills is None else self._lane.skills.index

    def delegate_to(self, delegates: Delegates | None) -> None:
        """See :meth:`handrail.contract.session.Session.delegate_to`."""
        self._lane.delegates = delegates

    async def child(self, call_id: str, delegation: Delegation) -> Child:
        """See :meth:`handrail.contract.session.Session.child`."""
        self._check_open()
        return await self.family.child(self, call_id, delegation)

    async def settled(self) -> None:
        """Return when no call is in flight."""
        await self._lane.answered()

    async def suspend(self, why: str = SUSPENDED, reason: StopReason = "user") -> None:
        """Take no more calls and stop those in flight. All that it remembers stays, for whoever opens it again.

        :param why: what a later call is told
        :param reason: what those in flight are told
        """
        if self.closed:
            return
        await _through(self._suspend(why, reason))

    async def _close(self) -> None:
        await self.end("user", CLOSED)
        await self._on_close(self)

    async def _suspend(self, why: str, reason: StopReason) -> None:
        for call in self._lane.in_flight:
            if call.asked and self.family.under is None:  # it waits for a person, which outlasts this: parked
                call.execution.stop("shutdown")
        await self.end(reason, why)
        await self._on_suspend(self)

    def hand_on(self) -> None:
        """Stop the calls in flight that have not begun to run."""
        for call in self._lane.in_flight:
            if not call.begun:
                call.execution.stop("shutdown")

    async def end(self, reason: StopReason, why: str) -> None:
        """Take no more calls, stop those in flight and wait until each has its answer. Its folders stay.

        :param why: what a later call is told, as ``is closed``
        """
        if self.family.under is not None and reason == "shutdown":
            reason = "parent"  # what it asks of people does not outlast it: nobody takes its calls up again
        self.closed = True
        self._lane.closed = f"session {self.id} {why}"
        self.news.end()
        self.cancel(reason)
        await self.family.end()
        if self._lane.subscribed is not None:
            await self._lane.subscribed.aclose()
        # Work in the event loop that never heeds its cancellation must not keep everybody else from ending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 + 3 * self._arbiter.limits.grace_ms / 1000):
                await self._lane.answered()
        await self._arbiter.states.end_session(self.id)
        for reader in self._readers:
            reader.end()

    async def _keyed(self, proposed: ProposedCall, key: str) -> Result:
        if not key or len(key) > 200 or not key.isprintable() or "/" in key:
            raise UsageError(f"{key[:50]!r} is not a key: 1 to 200 printable characters without '/'")
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
    """Await it to its end, which comes soon, also when this task is cancelled meanwhile: a session that is half closed can
    neither be used nor closed nor opened again."""
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
    """Lets the calls with one key through one by one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


def new_session_id() -> str:
    """Sorts by time, and cannot be guessed."""
    return f"ses_{time.time_ns() // 1_000_000:012x}{randomness.token_hex(5)}"
