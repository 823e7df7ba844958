"""A tool that can run, with its :class:`~handrail.contract.tool.spec.ToolSpec`, and the checked form of each spec."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from handrail.contract.doors.offers import SourceRequest
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.schema.schema import InvalidSchema, Schema, compile_schema, of_step
from handrail.contract.tool.spec import GoesOn, OfJob, ToolSpec, faults_in, of_wrong_type


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

    of_job: OfJob | None = None
    """The job of the session that a call is about. A call that names none is refused before anybody is asked about it. For
    built-in tools only."""

    own_secrets: frozenset[str] | None = None
    """The names of the secrets, and the keys of the secret settings, that it gets in the process in which it runs; None: those of
    the kernel that calls it."""

    @abc.abstractmethod
    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Carry out one call with validated ``args``.

        A tool of ``mode="stateful"`` is an async generator here: each step is a call of its own, and ``runtime`` always
        belongs to the step that runs. ``yield`` gives the input of the next step, None when it has none.

        :return: JSON-able data, or a whole :class:`~handrail.contract.call.Result`
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


# Values computed once for each spec, however many generations contain it: its faults, its compiled schema, its hash.
#
# A spec never changes, and a generation keeps most tools of the one before. So the next generation finds most of these
# values in the cache.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checked:
    """:param problems: ``(place, problem)``, all of them; with any, there is no schema to be used"""

    problems: tuple[tuple[str, str], ...]
    schema: Schema | None
    definition_hash: str
    step: Schema | None = None
    """Of what a step is sent, as the argument ``input``; None where the spec says nothing of it."""


class OfSpecs(Generic[T]):
    """What was made of specs, as long as somebody holds them. Safe in any thread.

    :param make: is called once for each; a spec is known by its identity, since equal ones are rare and costly to tell
    :param keeps: what is not kept is made again
    """

    def __init__(self, make: Callable[[ToolSpec], T], keeps: Callable[[T], bool] = lambda made: True) -> None:
        self._make, self._keeps = make, keeps
        self._known: dict[int, tuple[weakref.ref[ToolSpec], T]] = {}

    def __call__(self, spec: ToolSpec) -> T:
        found = self._known.get(id(spec))
        if found is not None and found[0]() is spec:
            return found[1]
        made = self._make(spec)
        if self._keeps(made):
            known = self._known

            def forget(_: object, key: int = id(spec)) -> None:
                known.pop(key, None)

            known[id(spec)] = weakref.ref(spec, forget), made
        return made


def _check(spec: ToolSpec) -> Checked:
    if wrong := tuple(of_wrong_type(spec)):
        return Checked(wrong, None, "")
    problems = faults_in(spec)
    schema = step = None
    try:
        schema = compile_schema(spec.parameters)
    except InvalidSchema as error:
        problems += [(f"llm.parameters.{where}".rstrip("."), problem) for where, problem in error.problems]
    if spec.step_parameters is not None:
        try:
            step = compile_schema(of_step(spec.step_parameters))
        except InvalidSchema as error:
            faults = [
                (where.removeprefix("properties.input").lstrip("."), problem) for where, problem in error.problems
            ]
            problems += [(f"runtime.step_parameters.{where}".rstrip("."), problem) for where, problem in faults]
    return Checked(tuple(problems), schema, "" if problems else spec.definition_hash, step)


checked = OfSpecs(_check, keeps=lambda made: not made.problems)
"""Everything about a spec that no other tool and no machine changes."""
