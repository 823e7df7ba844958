"""A tool that can run: its :class:`~handrail.contract.tool.spec.ToolSpec` and what it does."""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Sequence
from typing import Any

from handrail.contract.doors.offers import SourceRequest
from handrail.contract.doors.opened import GoesOn
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.tool.spec import ToolSpec


class Tool(abc.ABC):
    """One callable capability. Subclass it, give it a ``spec``, and write :meth:`execute`::

    class Weather(Tool):
        spec = ToolSpec(id="weather.now", description="…", parameters={…}, side_effect="read", locks=())

        async def execute(self, args, runtime):
            return {"celsius": 21}
    """

    spec: ToolSpec

    trusted = True
    """Whether it runs inside the kernel's process as its operator's own code, and is labelled as such. False only when the
    operating system confines what the tool does."""

    origin: str | None = None
    """``mcp:SERVER:TOOL`` of a tool of an upstream MCP server, by which rules may name it."""

    asks_source: SourceRequest | None = None
    """The request that a call of it sends to a source of resources and prompts, by which it is judged. For built-in tools
    only."""

    goes_on: GoesOn | None = None
    """The arguments that name the open state of which a call takes a step; the call is judged as one of the state's tool. For
    built-in tools only."""

    types = False
    """Whether its arguments are typed into a terminal of the session, whose program decides how a call is judged. For
    built-in tools only."""

    own_secrets: frozenset[str] | None = None
    """The names of the secrets that it gets in the process in which it runs; None: those of the kernel that calls it."""

    @abc.abstractmethod
    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Carry out one call with validated ``args``.

        A tool of ``mode="stateful"`` is an async generator here: each step is a call of its own, and ``runtime`` always
        belongs to the step that runs. ``yield`` gives the input of the next step, None when it has none.

        :return: JSON-able data, or a whole :class:`~handrail.contract.result.Result`
        :raises ToolError: for a failure the model should read about
        """

    def check(self, args: dict[str, Any]) -> None:  # noqa: B027 - optional to override
        """Look at ``args``, which fit the schema, for what no schema can say. It is called before anybody is asked about the
        call, and also where a call is only looked at; so it has no effect, takes no time, and knows nothing but ``args``.

        :raises ToolError: ``invalid_input``, for what is wrong with them and what would do
        """

    def hands_to(self, args: dict[str, Any]) -> str | None:
        """The agent to which a call with these validated ``args`` hands work. Whether it can is decided before the call may
        run. For built-in tools only."""
        return None

    def questions(self, args: dict[str, Any]) -> Sequence[Question] | Awaitable[Sequence[Question]]:
        """The questions to put to people before this call runs, from its validated ``args``.

        The call waits for the answers without locks and without a time-out, also across restarts; then
        ``runtime.people.answer`` with the same questions gives them at once. This method must have no side effects; it
        may be a coroutine.

        :raises ToolError: for arguments from which no question can be made
        """
        return ()

    async def aclose(self) -> None:  # noqa: B027 - optional to override
        """Give back what the tool holds between calls. Called once, when its generation ends."""
