"""What stands between a call and the state that it opens or goes on with: the tool, and the schema, that the call sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from handrail.arbiter.calls.call import Call
from handrail.contract.doors.opened import STEP_INPUT
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.schema.schema import Schema
from handrail.contract.tool.checking import checked
from handrail.contract.tool.tool import Tool

if TYPE_CHECKING:
    from handrail.arbiter.states.states import OpenState, States


class CallOpened:
    """Implements :class:`~handrail.contract.doors.opened.Opened` for one call."""

    __slots__ = ("_call", "_runtime", "_states")

    def __init__(self, call: Call, states: States, runtime: Runtime) -> None:
        if call.going is None or call.going.kind == "open":
            raise ToolError(f"{call.tool_id} goes on with no state", kind="denied")
        self._call = call
        self._states = states
        self._runtime = runtime

    async def step(self) -> object:
        return await self._states.step(self._call, self._runtime)

    async def close(self) -> object:
        return await self._states.close(self._call, self._runtime)


class Opening(Tool):
    """A stateful tool, as the call runs it that opens it."""

    def __init__(self, tool: Tool, call: Call, states: States) -> None:
        self.spec = tool.spec
        self.origin = tool.origin
        self._tool = tool
        self._call = call
        self._states = states

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await self._states.open(self._call, self._tool, runtime)

    def check(self, args: dict[str, Any]) -> None:
        self._tool.check(args)

    def questions(self, args: dict[str, Any]) -> Any:
        return self._tool.questions(args)


class SameArguments(Schema):
    """What a person may put in the place of a step's arguments: what it is sent, and nothing else."""

    __slots__ = ("_state",)

    def __init__(self, state: OpenState) -> None:
        self.parameters = state.entry.spec.parameters
        self._state = state

    def problems(self, arguments: dict[str, Any], *, parsed: bool = False) -> list[str]:
        given = dict(arguments)
        sent = given.pop(STEP_INPUT, None)
        if given != self._state.arguments:
            return [f"a step keeps the arguments that its state was opened with; only {STEP_INPUT} may be another"]
        step = checked(self._state.entry.spec).step
        return [] if step is None else step.problems({"input": sent}, parsed=parsed)

    def whole(self, arguments: dict[str, Any]) -> dict[str, Any]:
        step = checked(self._state.entry.spec).step
        if step is None or STEP_INPUT not in arguments:
            return arguments
        return {**arguments, STEP_INPUT: step.whole({"input": arguments[STEP_INPUT]})["input"]}
