"""One conversation with a workspace, as faces and agents see it, wherever its calls are carried out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from handrail.contract.call import Answer, ProposedCall
from handrail.contract.delegation import AgentType, Child, Delegates, Delegation
from handrail.contract.doors import Job, Jobs
from handrail.contract.events import Event
from handrail.contract.history import History
from handrail.contract.native import NativeOffer
from handrail.contract.notices import Notices
from handrail.contract.result import Result
from handrail.contract.skills import Skill
from handrail.contract.spec import ToolSpec

Proposal = tuple[str, Mapping[str, Any] | str] | ProposedCall
"""``(tool, arguments)``, or the same with what a provider adds."""
StopReason = Literal["timeout", "user", "shutdown", "parent"]
"""``parent``: it is a sub-agent's, and whoever began that was stopped or has ended."""


class Turn(Protocol):
    """One model request with its calls; it pins one generation of the registry."""

    @property
    def number(self) -> int: ...

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools in view of the model, in a stable order: the core tools, then what was brought in, as it was brought.
        Those that are withheld are left out."""
        ...

    @property
    def index(self) -> str:
        """What there is beside :attr:`specs`, for the system text; ``""`` where that is nothing."""
        ...

    @property
    def native(self) -> Sequence[NativeOffer]:
        """What the model's provider may carry out itself, each with the reason where this session rules it out."""
        ...

    async def call_all(self, calls: Iterable[Proposal]) -> Sequence[Answer]:
        """Carry out the calls of a whole reply: exactly one answer each, in order."""
        ...

    def submit(self, call: Proposal) -> Awaitable[Answer]:
        """Begin the next call of a reply whose further calls are not known yet; give its answer when there is one. Calls
        enter the lock queue in the order in which they are submitted, as those of :meth:`call_all` do."""
        ...


class Session(Protocol):
    """Opened by :meth:`handrail.kernel.Kernel.session`. Use it from tasks of the kernel's event loop."""

    @property
    def id(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    @property
    def headless(self) -> bool:
        """Whether nobody can be asked: ask is deny, and ``question`` a fixed error."""
        ...

    @property
    def workdir(self) -> str:
        """The workspace's canonical folder."""
        ...

    def add_rules(self, *texts: str) -> None:
        """Add rules of the session scope; they hold from now on, also for calls that wait for a lock.

        :raises ValueError: for a text that is no rule
        """
        ...

    def set_mode(self, mode: str) -> None:
        """Go on in another mode (``plan``, ``ask``, ``accept-edits``, ``auto``); it holds from now on, also for calls that
        wait for a lock.

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
        """The next turn. It keeps the generation of tools that is current now, and what is in view of it now."""
        ...

    async def begin(self, text: str = "", *, headless: bool = False) -> None:
        """Begin an interaction: a user says ``text``. What the one before brought into view is gone.

        :param headless: nobody can be asked until the next one begins, as when a trigger began it

        Without this, all that is said and called in a session is one interaction.
        """
        ...

    @property
    def view(self) -> Sequence[ToolSpec]:
        """The tools that the next turn's model will see, if nothing more happens."""
        ...

    @property
    def history(self) -> History | None:
        """Where what is said in it is kept; None where nothing is."""
        ...

    @property
    def notices(self) -> Notices | None:
        """What its agent is to be told beside the answers to its calls; None where nobody keeps that."""
        ...

    async def recall(self, call_id: str) -> Answer:
        """The answer to a call that was proposed before and whose answer was not heard: as it is on record,
        ``interrupted`` where nobody knows it. A call that was parked is taken up: approved, it runs now, once; while
        it still waits for a person the answer has ``parked`` in its metadata.

        :raises LogUnavailable: when the log cannot tell
        """
        ...

    async def resume_parked(self) -> list[Answer]:
        """Take up every call that was parked, as one reply: those approved run, once; those rejected are answered so;
        those nobody has answered wait for the attendant, or are parked again. Gives their answers, in order.

        :raises LogUnavailable: when the log cannot tell
        """
        ...

    @property
    def jobs(self) -> Jobs:
        """Its calls that outlive their turn."""
        ...

    async def promote(self, call_id: str) -> Job:
        """Let a running call go on in the background: whoever waits for it is answered with the job. Twice is once.

        :raises ToolError: ``invalid_input`` where no such call is running, or its tool is not promotable; ``conflict`` where
            it has ended, or is about to: then its answer is its result; ``limit`` where there are too many jobs
        :raises LogUnavailable: when that cannot be made durable; the call goes on as it was
        """
        ...

    def cancel(self, reason: StopReason = "user") -> object:
        """Stop every call in flight, and those of the sub-agents below; each still gets its one result. Jobs go on."""
        ...

    @property
    def agents(self) -> Sequence[AgentType]:
        """The agents that its own may hand work to."""
        ...

    @property
    def skills(self) -> Sequence[Skill]:
        """The skills that its model can read, the nearest first; the same as long as it is open."""
        ...

    def delegate_to(self, delegates: Delegates | None) -> None:
        """From now on these see to what its calls hand over to sub-agents; None where nobody does."""
        ...

    async def child(self, call_id: str, delegation: Delegation) -> Child:
        """Open a session for the sub-agent that a call of this one begins. It ends with this one at the latest. Its calls may
        touch at most what this one's agent passes on.

        :param call_id: in flight
        :raises ToolError: as :meth:`handrail.contract.delegation.Agents.run` does
        :raises UsageError: when no such call is in flight
        """
        ...

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event, in order, as it happens. Gives the way to stop it.

        What it raises is told to the event loop's exception handler and changes nothing about the call.
        """
        ...

    def events(self) -> AsyncIterator[Event]:
        """The events from the first step of the iteration on, until the session or its kernel is closed.

        A reader that falls 10,000 behind misses progress only; one that falls 20,000 behind is let go.

        :raises UsageError: when it was let go, after the events up to there
        """
        ...

    async def suspend(self) -> None:
        """Leave it so that it can be opened again by its id: it takes no more calls, those in flight are stopped and
        answered, one that waits for a person stays waiting, and all that belongs to it stays."""
        ...

    async def close(self) -> None:
        """Close it for good: calls in flight are stopped and answered, its output and scratch folders are removed."""
        ...
