"""A tool that can run, with its :class:`~handrail.contract.tool.spec.ToolSpec`, and the checked form of each spec."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from handrail.contract.permission_modes import Mode
from handrail.contract.schema.argument_validation import (
    InvalidSchemaError,
    ParametersSchema,
    build_step_input_schema,
    compile_schema,
)
from handrail.contract.services.resource_services import SourceRequestSpec
from handrail.contract.services.tool_runtime import Runtime, UserQuestion
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import (
    JobArgumentSpec,
    ToolSessionArgumentNames,
    ToolSpec,
    find_spec_faults,
    find_spec_type_faults,
)


class Tool(abc.ABC):
    """One callable capability.

    Subclass it, set ``spec``, and write :meth:`execute`::

        class Weather(Tool):
            spec = ToolSpec(id="weather.now", description="…", parameters={…}, side_effect="read", locks=())

            async def execute(self, args, runtime):
                return {"celsius": 21}
    """

    spec: ToolSpec

    trusted = True
    """Whether it runs inside the kernel's process as the operator's own code, and is labelled so. False only if the
    operating system confines the tool."""

    origin: str | None = None
    """``mcp:SERVER:TOOL`` for a tool of an upstream MCP server, by which rules may name it."""

    source_request: SourceRequestSpec | None = None
    """The request that its call sends to a source of resources and prompts; rules evaluate it. For built-in tools
    only."""

    state_arguments: ToolSessionArgumentNames | None = None
    """The arguments that name the tool session that a call steps. Rules evaluate the call as one of that tool. For
    built-in tools only."""

    types_input = False
    """Whether its arguments are typed into a terminal of the session, whose program decides how a call is evaluated.
    For built-in tools only."""

    job_argument: JobArgumentSpec | None = None
    """The argument that names a job of the session. A call with an unknown job is rejected before approval. For
    built-in tools only."""

    session_modes: tuple[Mode, ...] = ()
    """The modes of the session in which it can be called; empty for all. A call in another mode is rejected before the
    user is asked. For built-in tools only."""

    own_secrets: frozenset[str] | None = None
    """The names of the secrets, and the keys of the secret settings, that it gets in the process in which it runs.
    None: those of the kernel that calls it."""

    @abc.abstractmethod
    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Run one call with validated ``args``.

        A tool of ``mode="stateful"`` is an async generator here: each step is a call of its own, and ``runtime``
        always belongs to the step that runs. ``yield`` returns the input of the next step, or None if it has none.

        :return: JSON-able data, or a whole :class:`~handrail.contract.calls_and_results.Result`
        :raises ToolError: for a failure that the model should read about
        """

    def check(self, args: dict[str, Any]) -> None:  # noqa: B027 - optional to override
        """Check ``args``, which match the schema, for problems that no schema can express.

        The kernel calls it before it asks for approval, and also when it only explains a call. So it must have no
        effect, be fast, and use nothing but ``args``.

        :raises ToolError: ``invalid_input``, with the problem and what is valid
        """

    def delegation_target(self, args: dict[str, Any]) -> str | None:
        """Return the agent to which a call with these validated ``args`` delegates.

        The kernel decides before the call runs whether that is possible. For built-in tools only.
        """
        return None

    def questions(self, args: dict[str, Any]) -> Sequence[UserQuestion] | Awaitable[Sequence[UserQuestion]]:
        """Return the questions for the user before this call runs, from its validated ``args``.

        The call waits for the answers without locks and without a time-out, also across restarts. Then
        ``runtime.people.answer`` with the same questions returns them at once. This method must have no side effects;
        it may be a coroutine.

        :raises ToolError: for arguments from which no question can be made
        """
        return ()

    async def aclose(self) -> None:  # noqa: B027 - optional to override
        """Release the resources that the tool holds between calls. Called once, when its generation ends."""


# Values computed once for each spec, however many generations contain it: its faults, its compiled schema, its hash.
#
# A spec never changes, and a generation keeps most tools of the one before. So the next generation finds most of these
# values in the cache.

T = TypeVar("T")


class SpecCheckResult(Struct, frozen=True):
    """The results of the checks of a spec.

    :param problems: ``(place, problem)``, all of them; if there are any, there is no usable schema
    """

    problems: tuple[tuple[str, str], ...]
    schema: ParametersSchema | None
    definition_hash: str
    step: ParametersSchema | None = None
    """The schema of a step's input, as the argument ``input``; None if the spec does not declare it."""


class SpecValueCache(Generic[T]):
    """A cache of values computed from specs, as long as the specs live. Safe in any thread.

    :param make: computes the value, once for each spec; a spec is known by its identity, because equal specs are rare
        and costly to find
    :param keeps: whether a value is cached; others are computed again
    """

    def __init__(self, make: Callable[[ToolSpec], T], keeps: Callable[[T], bool] = lambda made: True) -> None:
        self._make, self._keeps = make, keeps
        self._known: dict[int, tuple[weakref.ref[ToolSpec], T]] = {}

    def __call__(self, spec: ToolSpec) -> T:
        if (found := self._known.get(id(spec))) is not None and found[0]() is spec:
            return found[1]
        made = self._make(spec)
        if self._keeps(made):
            known = self._known

            def forget(_: object, key: int = id(spec)) -> None:
                known.pop(key, None)

            known[id(spec)] = weakref.ref(spec, forget), made
        return made


def _check(spec: ToolSpec) -> SpecCheckResult:
    if wrong := tuple(find_spec_type_faults(spec)):
        return SpecCheckResult(wrong, None, "")
    problems = find_spec_faults(spec)
    schema = step = None
    try:
        schema = compile_schema(spec.parameters)
    except InvalidSchemaError as error:
        problems += [(f"llm.parameters.{where}".rstrip("."), problem) for where, problem in error.problems]
    if spec.step_parameters is not None:
        try:
            step = compile_schema(build_step_input_schema(spec.step_parameters))
        except InvalidSchemaError as error:
            faults = [
                (where.removeprefix("properties.input").lstrip("."), problem) for where, problem in error.problems
            ]
            problems += [(f"runtime.step_parameters.{where}".rstrip("."), problem) for where, problem in faults]
    return SpecCheckResult(tuple(problems), schema, "" if problems else spec.definition_hash, step)


check_spec = SpecValueCache(_check, keeps=lambda made: not made.problems)
"""The checks of a spec, which no other tool and no machine changes."""
