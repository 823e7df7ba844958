"""A turn of a session in a process that joined."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from handrail.catalog.interaction import Interaction
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.doors.agents import Delegates, usable
from handrail.contract.generation import Generation
from handrail.contract.session import Proposal
from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.session.turn import as_proposed

_NOT_JUDGED = (
    "this process has joined, and the process that holds the workspace judges it at the start of each interaction; its rules "
    "or tools have changed since"
)


class CarryOut(Protocol):
    """Has the calls of a turn answered, by its number, the holder's token, and its generation; or one of them, by its place
    in it."""

    async def __call__(
        self, number: int, token: int, generation: int, calls: Sequence[ProposedCall], first: int | None = None
    ) -> Sequence[Answer]: ...


class JoinedTurn:
    """Implements :class:`~handrail.contract.session.Turn`.

    :param ruled: by the id of what a provider carries out itself: why the session's rules rule it out, or None. What is not
        in it is not offered
    :param delegates: who does the work of sub-agents; None: nobody can
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
        """Nothing: it is the holder who looks at calls, once they are made."""

    def submit(self, call: Proposal) -> asyncio.Task[Answer]:
        """Begin the next call of a reply that still goes on. They reach the holder in this order."""
        place, self._submitted = self._submitted, self._submitted + 1
        return asyncio.get_running_loop().create_task(self._answered(as_proposed(call), place))

    async def _answered(self, call: ProposedCall, place: int) -> Answer:
        (answer,) = await self._carry_out(self.number, self._token, self.generation.number, (call,), place)
        return answer
