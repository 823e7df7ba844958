"""A session and those of the sub-agents that its calls begin: what bounds a child, and what ends with its parent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from handrail.arbiter.call import Call
from handrail.arbiter.peers import far_along
from handrail.contract.agent import AgentManifest
from handrail.contract.delegation import MAX_DEPTH, Child, Delegation, Handed
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.events import Event
from handrail.contract.peer import Buffers, Peer
from handrail.contract.people import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.runtime import Question
from handrail.runtime.secrets import SecretStore

if TYPE_CHECKING:
    from handrail.session.session import HeldSession

ABORTED = "was aborted by its parent, whose session has ended"
NOT_NOW = "nobody is there now, and a sub-agent's call cannot wait for them"


class Opens(Protocol):
    """Opens the session of a sub-agent."""

    def __call__(self, parent: HeldSession, call_id: str, delegation: Delegation) -> Awaitable[Child]: ...


@dataclass(frozen=True, slots=True)
class Under:
    """Where a child session comes from."""

    parent: HeldSession
    call_id: str
    delegation: Delegation


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
        child = await opens(of, call_id, delegation)
        call.handed = (*call.handed, Handed(delegation.agent, child.session.id))
        if call.watched:  # whoever watches the call sees what is done for it
            child.session.watch(partial(_tell, call, delegation.agent))
        return child

    def cancel(self) -> None:
        """Stop what runs in the sessions below, except in those that work for a job."""
        for child in tuple(self.children):
            under = child.family.under
            call = None if under is None else under.parent.lane.delegating.get(under.call_id)
            if call is None or not call.of_a_job:
                child.cancel("parent")

    async def end(self) -> None:
        """End the sessions below, because this one ends."""
        await asyncio.gather(*(child.suspend(ABORTED, "parent") for child in tuple(self.children)))

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
    there = under.parent.lane.attendant
    if there is None or not under.parent.family.manifest.delegable.presence:
        return None
    return there if isinstance(there, _AskedFromBelow) else _AskedFromBelow(there)


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
    """The people of a parent session, asked by a child. Its calls are not parked: nobody would take them up again."""

    people: Attendant

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        answer = await self.people.approve(request)
        return ApprovalAnswer("reject", NOT_NOW) if answer.choice == "later" else answer

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        answers = await self.people.answer(session_id, questions)
        if answers is None:
            raise ToolError(NOT_NOW, kind="unavailable")
        return answers
