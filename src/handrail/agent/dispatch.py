"""Where a reply's calls go, and when they start: what the loop needs of a session, and the way it uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from handrail.contract.call import Answer, ProposedCall
from handrail.contract.history import History
from handrail.contract.native import NativeOffer
from handrail.contract.spec import ToolSpec

StopKind = Literal["user", "shutdown", "timeout"]


class Turn(Protocol):
    """One request with its calls, on one pinned generation; :mod:`handrail.session` has the real one."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools in the model's view, in a stable order."""
        ...

    @property
    def index(self) -> str:
        """What there is beside these, for the system text."""
        ...

    @property
    def native(self) -> Sequence[NativeOffer]:
        """What the model's provider may carry out itself."""
        ...

    @property
    def number(self) -> int:
        """Part of the ids of its calls; see :func:`handrail.contract.call.call_id`."""
        ...

    async def call_all(self, calls: Sequence[ProposedCall]) -> Sequence[Answer]:
        """Carry out one reply's calls: one answer each, in call order."""
        ...


class Session(Protocol):
    """The part of a session that the loop uses."""

    @property
    def id(self) -> str: ...

    @property
    def history(self) -> History | None:
        """Where its conversation is kept; None keeps it in memory only."""
        ...

    async def recall(self, call_id: str) -> Answer:
        """The answer to a call that was proposed before, and whose answer was not heard: as it is on record,
        ``interrupted`` where nobody knows it. A call that was parked runs now if it was approved; while it still waits
        for a person its answer has ``parked`` in its metadata."""
        ...

    def turn(self) -> Turn: ...

    async def begin(self, text: str) -> None:
        """A user says ``text``: from here to the answer it is one interaction."""
        ...

    def cancel(self, reason: StopKind) -> object:
        """Stop the calls in flight; each is still answered."""
        ...


class Dispatch(Protocol):
    """When the calls of one reply start."""

    def closed(self, position: int, call: ProposedCall) -> None:
        """The provider closed this call's block; the reply goes on."""
        ...

    async def answers(self, calls: Sequence[ProposedCall]) -> Sequence[Answer]:
        """The reply has ended with these calls: one answer each, in order, faulty ones recorded and answered too."""
        ...


class AfterReply:
    """Starts a reply's calls together, when the reply has ended."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def closed(self, position: int, call: ProposedCall) -> None:
        """Nothing starts before the reply ends."""

    async def answers(self, calls: Sequence[ProposedCall]) -> Sequence[Answer]:
        return await self._turn.call_all(calls)
