"""The Protocols of a session and its turns, as frontends and agents use them, in this process or another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from handrail.contract.agent import AgentManifest
from handrail.contract.call import Answer, Event, ProposedCall, Result
from handrail.contract.doors.agents import AgentType, Delegates, Delegation
from handrail.contract.doors.channels import Notices
from handrail.contract.doors.jobs import Job, Jobs
from handrail.contract.doors.memory import History, Skill
from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.spec import ToolSpec

Proposal = tuple[str, Mapping[str, Any] | str] | ProposedCall
"""``(tool, arguments)``, or a :class:`ProposedCall`, which also carries what a provider adds to a call."""
StopReason = Literal["timeout", "budget", "user", "call", "shutdown", "parent"]
"""``timeout``: the tool's own; ``budget``: the time of the run whose call it is; ``call``: a call of the same session asked for
it; ``parent``: the session is a sub-agent's, and its parent was stopped or has ended."""


class Turn(Protocol):
    """One model request with its calls; it pins one generation of the registry."""

    @property
    def number(self) -> int: ...

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools that the model sees, in a stable order: the core tools, then those brought into view, in the order in
        which they were. Withheld tools are left out."""
        ...

    @property
    def index(self) -> str:
        """The index of the tools beyond :attr:`specs`, for the system text; ``""`` when there are none."""
        ...

    @property
    def native(self) -> Sequence[NativeOffer]:
        """The tools that the model's provider may carry out itself; one that this session rules out has the reason with it."""
        ...

    async def call_all(self, calls: Iterable[Proposal]) -> Sequence[Answer]:
        """Carry out the calls of a whole reply: exactly one answer each, in order."""
        ...

    def look_ahead(self, call: Proposal) -> None:
        """The next call of a reply that is still being streamed may become this one: its arguments are whole, and its block is
        open. What is the same whenever it is submitted may be worked out now, so that it begins sooner then. Nothing happens
        of it, nothing is recorded, and another call may come in its place."""
        ...

    def submit(self, call: Proposal) -> Awaitable[Answer]:
        """Start the next call of a reply that is still being streamed. Gives an awaitable of its answer. Calls enter the lock
        queue in the order in which they are submitted, like those of :meth:`call_all`."""
        ...


class Session(Protocol):
    """Opened by :meth:`handrail.kernel.kernel.Kernel.session`. Use it from tasks of the kernel's event loop."""

    @property
    def id(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    @property
    def headless(self) -> bool:
        """Whether nobody can be asked: then ask means deny, and ``question`` answers with a fixed error."""
        ...

    @property
    def workdir(self) -> str:
        """The workspace's canonical folder."""
        ...

    def add_rules(self, *texts: str) -> None:
        """Add rules of the session scope. They apply at once, also to calls that wait for a lock.

        :raises ValueError: for a text that is no rule
        """
        ...

    def set_mode(self, mode: str) -> None:
        """Switch to another mode (``plan``, ``ask``, ``accept-edits``, ``auto``). It applies at once, also to calls that wait
        for a lock.

        :raises UsageError: naming the modes there are
        """
        ...

    async def call(self, tool: str, arguments: Mapping[str, Any] | str, *, key: str | None = None) -> Result:
        """Propose one call and wait for its answer.

        :param tool: id, alias or wire name
        :param arguments: an object, or its JSON text
        :param key: makes the call repeatable by its caller: the same key with the same arguments gives the
            recorded result without running anything again, also after a restart; with other arguments it is a
            ``conflict``
        """
        ...

    async def call_all(self, calls: Iterable[Proposal]) -> list[Result]:
        """Propose calls as one reply: in parallel where locks allow, one result each, in order."""
        ...

    def turn(self) -> Turn:
        """Begin the next turn. It keeps the tools that are current now, and those of them that are in view now."""
        ...

    async def begin(self, text: str = "", *, headless: bool = False) -> None:
        """Begin an interaction with the user's message ``text``. Tools that the previous one brought into view leave it.

        :param headless: nobody can be asked during this interaction, as when a trigger began it

        A session in which this is never called is one interaction as a whole.
        """
        ...

    @property
    def view(self) -> Sequence[ToolSpec]:
        """The tools that the next turn's model will see, if nothing more happens."""
        ...

    @property
    def history(self) -> History | None:
        """Where its conversation is stored; None when it is not stored."""
        ...

    @property
    def notices(self) -> Notices | None:
        """The notices for its agent, beside the answers to its calls; None when none are kept."""
        ...

    async def recall(self, call_id: str) -> Answer:
        """The answer to an earlier call whose answer was lost: the recorded one, or ``interrupted`` when the outcome is
        unknown. A parked call is resumed: once approved it runs now, once; while it still waits for a person, the
        answer has ``parked`` in its metadata.

        :raises LogUnavailable: when the log cannot be read
        """
        ...

    async def recall_all(self, call_ids: Sequence[str]) -> list[Answer]:
        """As :meth:`recall`, for several calls, in the order in which they were proposed. Those that are parked are taken up
        together, as one reply: all that still wait for a person are asked about at once.

        :raises LogUnavailable: when the log cannot be read; none is taken up
        """
        ...

    async def resume_parked(self) -> list[Answer]:
        """Resume every parked call, as one reply: approved calls run, once; rejected ones are answered as such; those that
        nobody has decided wait for the attendant, or are parked again. Gives their answers, in order.

        :raises LogUnavailable: when the log cannot be read
        """
        ...

    @property
    def jobs(self) -> Jobs:
        """Its calls that outlive their turn."""
        ...

    async def promote(self, call_id: str) -> Job:
        """Move a running call to the background: whoever waits for it gets the job as its answer. Doing so again has no
        further effect.

        :raises ToolError: ``invalid_input`` when no such call is running, or its tool is not promotable; ``conflict`` when
            it has ended or is about to, so that its answer is its result; ``limit`` when there are too many jobs
        :raises LogUnavailable: when the move cannot be made durable; the call goes on in its turn
        """
        ...

    def cancel(self, reason: StopReason = "user") -> object:
        """Stop every call in flight, and those of its sub-agents. Each still gets its one result. Jobs go on."""
        ...

    @property
    def agents(self) -> Sequence[AgentType]:
        """The agents to which its own agent may hand work."""
        ...

    @property
    def skills(self) -> Sequence[Skill]:
        """The skills that its model can read, the nearest first. The list does not change while the session is open."""
        ...

    async def instructions_above(self) -> Sequence[tuple[str, str]]:
        """The project's instruction files above the workspace up to the top of its repository, the farthest first: the path
        of each from the workspace, and what stands in it. Those that a rule keeps from reading are left out, and secrets. All
        this is on record.

        :raises LogUnavailable: when the log takes no records
        """
        ...

    def delegate_to(self, delegates: Delegates | None) -> None:
        """Have ``delegates`` run the sub-agents to which its calls hand work; None: work can no longer be handed over."""
        ...

    async def child(self, call_id: str, delegation: Delegation) -> Child:
        """Open a session for the sub-agent that a call of this one starts. It ends with this one at the latest, and its calls
        may touch at most what this one's agent passes on.

        :param call_id: of the call, which has to be in flight
        :raises ToolError: as :meth:`handrail.contract.doors.agents.Agents.run` does
        :raises UsageError: when no such call is in flight
        """
        ...

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event, in order, as it happens. Gives a function that stops it.

        An exception of the listener goes to the event loop's exception handler and does not affect the call.
        """
        ...

    def events(self) -> AsyncIterator[Event]:
        """The events from the start of the iteration until the session or its kernel is closed.

        A reader that falls 10,000 events behind misses progress events only; one that falls 20,000 behind is cut off.

        :raises UsageError: when the reader was cut off, after the events up to that point
        """
        ...

    async def suspend(self) -> None:
        """Leave the session so that it can be opened again by its id: it accepts no more calls, those in flight are stopped and
        answered, calls that wait for a person go on waiting, and everything that belongs to it is kept."""
        ...

    async def close(self) -> None:
        """Close the session for good: calls in flight are stopped and answered, its output and scratch folders are removed."""
        ...


class Child(NamedTuple):
    """A session that a call of another one began, and whose it is."""

    session: Session
    manifest: AgentManifest


class Values(Protocol):
    """Where session values are kept: one JSON value per (session, tool, key)."""

    async def get(self, session_id: str, tool_id: str, key: str) -> Any: ...

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None: ...
