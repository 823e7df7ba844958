"""A tool that can run: its :class:`~handrail.contract.spec.ToolSpec` and what it does."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Sequence
from typing import Any

from handrail.contract.offering import SourceRequest
from handrail.contract.opened import GoesOn
from handrail.contract.runtime import Question, Runtime
from handrail.contract.spec import ToolSpec


class Tool(abc.ABC):
    """One callable capability. Subclass it, give it a ``spec``, and write :meth:`execute`::

    class Weather(Tool):
        spec = ToolSpec(id="weather.now", description="…", parameters={…}, side_effect="read", locks=())

        async def execute(self, args, runtime):
            return {"celsius": 21}
    """

    spec: ToolSpec

    trusted = True
    """Runs inside the kernel's process as its operator's own code, and is labelled so. False only where the
    operating system confines what the tool does."""

    origin: str | None = None
    """``mcp:SERVER:TOOL`` of a tool of an upstream MCP server, by which rules may name it."""

    asks_source: SourceRequest | None = None
    """What a call of it asks of a source of resources and prompts, by which it is judged. Only built-in tools do."""

    goes_on: GoesOn | None = None
    """Which state a call of it goes on with, as whose tool's it is judged. Only built-in tools do."""

    types = False
    """What it is sent is typed into a terminal of its session, whose program decides how it is judged. Only a built-in tool
    does."""

    own_secrets: frozenset[str] | None = None
    """The names of the secrets that it gets where it runs. None: those of the kernel that it is called by."""

    @abc.abstractmethod
    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Carry out one call with validated ``args``.

        A tool of ``mode="stateful"`` yields here, as an async generator: each step is a call of its own, and ``runtime``
        that of whichever runs. What the next step is sent is what ``yield`` gives, None where it is sent nothing.

        :return: JSON-able data, or a whole :class:`~handrail.contract.result.Result`
        :raises ToolError: for a failure the model should read about
        """

    def questions(self, args: dict[str, Any]) -> Sequence[Question] | Awaitable[Sequence[Question]]:
        """What people have to be asked before this call runs, by its validated ``args``.

        The call waits for the answers without locks or a time-out, across restarts too; ``runtime.people.answer`` with
        the same questions then gives them at once. It must have no effects; it may be a coroutine.

        :raises ToolError: for arguments that no question can be made of
        """
        return ()

    async def aclose(self) -> None:  # noqa: B027 - optional to override
        """Give back what the tool holds between calls. Called once, when its generation ends."""
