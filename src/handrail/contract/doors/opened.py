"""Stateful tools: one call opens a state, later calls take steps of it, and one closes it.

A tool of ``mode="stateful"`` is an async generator. A call of it opens a *state* and is answered with the first step. Only
the shapes are here, so that tools, the runtime and the arbiter agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

STEP_INPUT = "step_input"
"""The name under which what a step is sent is judged, beside the arguments that the state was opened with."""

StateEnd = Literal["done", "closed", "expired", "failed", "timeout", "cancelled", "suspended", "changed", "interrupted"]
"""How a state ended: it gave its last step; ``tool.close``; no step came in time; a step raised, took too long or was stopped;
its session or kernel ended; its tool is no longer the same; nobody knows, since its process ended."""


@dataclass(frozen=True, slots=True)
class GoesOn:
    """Says that a tool goes on with a state that another call opened. Only built-in tools do.

    :param argument: which of its arguments is the state's id
    :param input: which one the tool is sent; None for one that ends the state
    """

    argument: str
    input: str | None = None


class Opened(Protocol):
    """What the call of a tool that goes on with a state goes on with. It was judged as a call of the tool that is open."""

    async def step(self) -> object:
        """Send the call's input, and give what its caller is answered.

        :raises ToolError: as the tool raised it; ``conflict`` for a state that has ended
        """
        ...

    async def close(self) -> object:
        """End the state, and give what the caller is answered."""
        ...
