"""Sub-agents of an agent in a process that joined: its model is there, and the calls of all of them are carried out by the
holder. So the holder asks that process to see to what a call hands over, and that process has child sessions opened here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.contract.call import Result
from handrail.contract.doors.agents import NO_MODEL, Agents, AgentType, Delegates, Delegation
from handrail.contract.doors.channels import Channels, Triggers
from handrail.contract.doors.jobs import Terminals
from handrail.contract.doors.memory import Skill, Skills, Transcript
from handrail.contract.doors.offers import Offers
from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.tool.spec import Opened
from handrail.ipc.codec import mirror
from handrail.ipc.codec.values import Malformed, Reader, a_list, an_object, fields, optional, text
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Refused

if TYPE_CHECKING:
    from handrail.ipc.joiner.membership import Membership

_DELEGATION: Mapping[str, Reader[Any]] = {
    "agent": text,
    "task": text,
    "description": text,
    "metadata": optional(an_object),
}
HANDED: Mapping[str, Reader[Any]] = {"session": text, "call": text, **_DELEGATION}
"""What the holder asks for."""
BEGUN: Mapping[str, Reader[Any]] = {"id": text, **HANDED}
"""How a child session is asked for, by its id."""


def of_delegation(delegation: Delegation) -> Message:
    metadata = None if delegation.metadata is None else dict(delegation.metadata)
    told = {"agent": delegation.agent, "task": delegation.task, "description": delegation.description}
    return {**told, "metadata": metadata}


def a_delegation(given: Mapping[str, Any]) -> Delegation:
    return Delegation(given["agent"], given["task"], given["description"], given["metadata"])


def some_types(value: Any) -> tuple[AgentType, ...]:
    """The agents that work may be handed to, each as its id and description."""
    return tuple(AgentType(text(one[0]), text(one[1])) for one in map(a_list, a_list(value)) if len(one) == 2)


class RemoteDelegates:
    """Implements :class:`~handrail.contract.doors.agents.Delegates` in the holder."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._connection = connection
        self._session_id = session_id

    async def compact(self) -> Result:
        lost = "the process that has the model has gone; look into its session before you ask again"
        return await self._asked("compact", {"session": self._session_id}, lost)

    async def run(self, call_id: str, delegation: Delegation) -> Result:
        body = {"session": self._session_id, "call": call_id, **of_delegation(delegation)}
        lost = "the line to the process that has the model was lost while the sub-agent was at work; look at what it has done before you hand this over again"
        return await self._asked("delegate", body, lost)

    async def _asked(self, what: str, body: Message, when_lost: str) -> Result:
        try:
            return Result.from_dict(an_object(await self._connection.request(what, body, settle=True)))
        except ConnectionLost as lost:
            if not lost.sent:
                raise ToolError(
                    "the process that has the model has gone; nothing was handed over", kind="unavailable"
                ) from None
            raise ToolError(when_lost, kind="interrupted") from None
        except Refused as refused:
            error = mirror.error_of(refused)
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None
        except (Malformed, KeyError) as error:
            raise ToolError(f"what became of the work cannot be read: {error}", kind="backend") from None


async def compacted(delegates: Callable[[str], Delegates | None], body: Any) -> Message:
    """Make room in the conversation of this process's session, for the holder; see :func:`handed_over`."""
    there = delegates(fields(body, {"session": text})["session"])
    if there is None:
        raise mirror.refusal_of(ToolError(NO_MODEL, kind="unavailable"))
    try:
        return (await there.compact()).to_dict()
    except HandrailError as error:
        raise mirror.refusal_of(error) from None


async def handed_over(delegates: Callable[[str], Delegates | None], body: Any) -> Message:
    """See to what a call of this process's session hands over, for the holder.

    :param delegates: those of a session, by its id
    """
    told = fields(body, HANDED)
    there = delegates(told["session"])
    if there is None:
        raise mirror.refusal_of(ToolError(NO_MODEL, kind="unavailable"))
    try:
        return (await there.run(told["call"], a_delegation(told))).to_dict()
    except ToolError as error:
        raise mirror.refusal_of(error) from None


class WithAgents:
    """A session in a process that joined, as far as sub-agents go; see :class:`~handrail.contract.session.Session`."""

    id: str
    _membership: Membership
    agents: Sequence[AgentType] = ()
    skills: Sequence[Skill] = ()
    delegates: Delegates | None = None

    def delegate_to(self, delegates: Delegates | None) -> None:
        self.delegates = delegates
        self._membership.tell("delegates", {"session": self.id, "there": delegates is not None})

    async def instructions_above(self) -> Sequence[tuple[str, str]]:
        """See :meth:`handrail.contract.session.Session.instructions_above`."""
        while True:
            try:
                told = await self._membership.request("instructions", {"session": self.id})
            except ConnectionLost:  # looking changes nothing
                continue
            return [(text(path), text(words)) for path, words in told]

    def _told_of_agents(self, told: Message) -> None:
        """What it was told when it was opened. Its skills stay what they were."""
        self.skills = self.skills or tuple(a_skill(one) for one in told["skills"])
        self.agents = some_types(told["agents"])


def a_skill(value: Any) -> Skill:
    """One that a session's model can read."""
    given = an_object(value)
    layer = given.get("layer")
    if layer not in ("workspace", "user", "shipped"):
        raise Malformed("expected a skill's layer")
    return Skill(text(given.get("name")), text(given.get("description")), layer, text(given.get("place")))


class ByCallOnly:
    """The doors that a tool has only where its call is carried out; in another process it calls a tool that has them."""

    @property
    def agents(self) -> Agents:
        raise _by_call("reaches agents", "task")

    @property
    def skills(self) -> Skills:
        raise _by_call("reaches skills", "skill")

    @property
    def offers(self) -> Offers:
        raise _by_call("gets what a source offers", "resource.read")

    @property
    def opened(self) -> Opened:
        raise _by_call("goes on with a state", "tool.step")

    @property
    def channels(self) -> Channels:
        raise _by_call("reaches channels", "send_message")

    @property
    def terminals(self) -> Terminals:
        raise _by_call("reaches terminals", "terminal.start")

    @property
    def triggers(self) -> Triggers:
        raise _by_call("reaches triggers", "add_timer")

    @property
    def transcript(self) -> Transcript:
        raise _by_call("looks up what was said", "search_memory")


def _by_call(does: str, tool: str) -> ToolError:
    return ToolError(
        f'a tool of this process {does} by runtime.call, as in runtime.call("{tool}", …)', kind="unavailable"
    )
