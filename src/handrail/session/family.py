"""A session and those of the sub-agents that its calls begin: what bounds a child, what ends with its parent, and what goes on
until that is opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from handrail.arbiter.calls.call import Call
from handrail.arbiter.peers import far_along
from handrail.contract.agent import AgentManifest
from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.doors.agents import MAX_DEPTH, Child, Delegation, Handed
from handrail.contract.doors.peer import Buffers, Peer
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.events import Event
from handrail.runtime.secrets import SecretStore

if TYPE_CHECKING:
    from handrail.session.session import HeldSession

T = TypeVar("T")

ABORTED = "was aborted by its parent, whose session has ended"
NOT_NOW = "nobody is there now, and a sub-agent's call cannot wait for them"


class Opens(Protocol):
    """Opens the session of a sub-agent."""

    def __call__(self, parent: HeldSession, call: Call, delegation: Delegation) -> Awaitable[Child]: ...


@dataclass(eq=False, slots=True)
class Under:
    """Where a child session comes from.

    :ivar parent: another one once that, suspended meanwhile, is opened again
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
        """Whether nobody waits for the work: it is done for a job."""
        above = self.parent.family.under
        return self.call.of_a_job or (above is not None and above.in_background)


@dataclass(slots=True)
class Family:
    """A session's place in the tree of sub-agents: its parent and its children.

    :param manifest: of its agent
    :param opens: opens the sessions of sub-agents; None when there can be none
    :param under: the parent and its call; None for a session that a person or a program opened
    """

    manifest: AgentManifest
    opens: Opens | None = None
    under: Under | None = None
    children: list[HeldSession] = field(default_factory=list["HeldSession"])
    """The open sessions of its sub-agents."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is not open any more."""
    taken_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was suspended, with sub-agents at work in the background, and is opened again."""

    @property
    def line(self) -> tuple[AgentManifest, ...]:
        """The manifests of its agent and of those above, up to the top."""
        return (self.manifest, *above(self.under))

    def check_depth(self) -> None:
        """:raises ToolError: ``limit``, where there is no further level below it"""
        if len(self.line) > MAX_DEPTH:
            raise ToolError(
                f"there are {MAX_DEPTH} agents above this one already, and no further level is allowed; do the work yourself",
                kind="limit",
            )

    def top(self, session: HeldSession) -> str:
        """The id of the session at the top of the tree. ``session`` is the one that this place belongs to."""
        return session.id if self.under is None else self.under.parent.family.top(self.under.parent)

    async def child(self, of: HeldSession, call_id: str, delegation: Delegation, opens: Opens | None = None) -> Child:
        """See :meth:`handrail.contract.session.Session.child`.

        :param opens: instead of its own
        """
        opens = opens or self.opens
        call = of.lane.delegating.get(call_id)
        if call is None:
            raise UsageError(
                f"call {call_id[:80]!r} of session {of.id} hands no work over now, so it begins no sub-agent"
            )
        if opens is None:
            raise ToolError("sub-agents cannot be begun from this session", kind="unavailable")
        child = await opens(of, call, delegation)
        call.handed = (*call.handed, Handed(delegation.agent, child.session.id))
        if call.watched:  # whoever watches the call sees what is done for it
            child.session.watch(partial(_tell, call, delegation.agent))
        return child

    def cancel(self) -> None:
        """Stop what runs in the sessions below, except in those that work for a job."""
        for child in self._below(but_jobs=True):
            child.cancel("parent")

    async def end(self, *, but_jobs: bool = False) -> None:
        """End the sessions below, because this one ends.

        :param but_jobs: those that work for a job go on
        """
        self.left.set()
        await asyncio.gather(*(child.suspend(ABORTED, "parent") for child in self._below(but_jobs)))

    def _below(self, but_jobs: bool) -> list[HeldSession]:
        unders = ((child, child.family.under) for child in self.children)
        return [child for child, under in unders if not (but_jobs and under is not None and under.call.of_a_job)]

    def take_over(self, session: HeldSession, before: HeldSession) -> None:
        """The sub-agents that went on in the background while ``before`` was suspended are ``session``'s, which it is opened as
        again and whose place this is: they are bound by its rules, see its editor and ask its people.
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
        """Enter ``session``, which is open now, among its parent's children."""
        if self.under is not None:
            self.under.parent.family.children.append(session)
            self.under.parent.lane.below.append(session.lane)

    def leave(self, session: HeldSession) -> None:
        """Take ``session``, which is no longer open, from its parent's children."""
        if self.under is not None and session in self.under.parent.family.children:
            self.under.parent.family.children.remove(session)
            below = self.under.parent.lane.below
            below[:] = [lane for lane in below if lane is not session.lane]


def above(under: Under | None) -> tuple[AgentManifest, ...]:
    """The manifests of the agents above a session that comes from there, the nearest first."""
    return () if under is None else under.parent.family.line


def secrets_for(child: SecretStore, under: Under) -> SecretStore:
    """The secrets of a child: those that its parent has and passes on."""
    parent = under.parent
    names = parent.lane.around.secrets.names & set(parent.family.manifest.delegable.secrets)
    return child.only(names, f"the agent {parent.family.manifest.id} does not pass it on to its sub-agents")


def attendant_for(under: Under) -> Attendant | None:
    """The people of the parent, where it passes them on."""
    if under.parent.lane.attendant is None or not under.parent.family.manifest.delegable.presence:
        return None
    return _AskedFromBelow(under)


def editor_of(under: Under) -> Peer | None:
    """The parent's client, where it is an editor: what its user has not saved a sub-agent does not write over either."""
    peer = under.parent.lane.around.peer
    return peer if isinstance(peer, Buffers) else None


def named_hosts_of(under: Under) -> str | None:
    """The nearest agent above a child that passes on hosts by their names alone; None where none does."""
    parent = under.parent.family.manifest
    hosts = parent.delegable.net.hosts
    return under.parent.lane.named_hosts_of if hosts is None or "*" in hosts else parent.id


def origin_of(agent: str, under: Under) -> str:
    """Who asks, for the people of the session at the top."""
    is_top = under.parent.family.under is None
    of = f"session {under.parent.id}" if is_top else under.parent.lane.origin
    about = f" ({' '.join(under.delegation.description.split())[:80]})" if under.delegation.description.strip() else ""
    return f"sub-agent {agent}{about} of {of}"


def _tell(call: Call, agent: str, event: Event) -> None:
    if event.kind == "started":
        call.emit("progress", far_along(f"{agent}: {event.tool_id}", None, None, None))


@dataclass(frozen=True, slots=True)
class _AskedFromBelow:
    """The people of the session at the top of the tree, asked by one below. Its calls are not parked: nobody would take them up
    again. Those that are made in the background wait where they are while that session is suspended or its people put them
    off. Every other door can answer them meanwhile, and whoever opens the session again is asked."""

    under: Under

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        async def asked(people: Attendant) -> ApprovalAnswer | None:
            answer = await people.approve(request)
            return None if answer.choice == "later" else answer

        return await self._answered(asked) or ApprovalAnswer("reject", NOT_NOW)

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        answers = await self._answered(lambda people: people.answer(session_id, questions))
        if answers is None:
            raise ToolError(NOT_NOW, kind="unavailable")
        return answers

    async def _answered(self, ask: Callable[[Attendant], Awaitable[T | None]]) -> T | None:
        """What they answer; None where nobody is there now, and none is waited for."""
        waits = False
        while True:
            top = self.under.top
            people = None if top.closed else top.people
            if people is not None and (answer := await _unless_left(ask(people), top)) is not None:
                return answer
            alone = people is None and not top.closed and not waits  # it was headless when this was asked
            if alone or not self.under.in_background:
                return None
            waits = True
            await top.family.taken_up.wait()


async def _unless_left(asking: Awaitable[T | None], session: HeldSession) -> T | None:
    """What is answered, unless the session whose people are asked ends before: a yes that comes too late is none."""
    asked = asyncio.ensure_future(asking)
    left = asyncio.ensure_future(session.family.left.wait())
    try:
        await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if not left.done() else None
    finally:
        left.cancel()
        if not asked.cancel() and not asked.cancelled():
            asked.exception()  # looked at
