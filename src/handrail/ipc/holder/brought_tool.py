"""The tools of a process that joined, as the holder has them: each is carried out by what :mod:`handrail.ipc.holder.brought` has
of that process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from handrail.arbiter.generators import OVER, running
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.tool import Tool
from handrail.contract.tool.triggers import OWN, Fired, TriggerTool, Waiting
from handrail.ipc.codec.descriptions import Description
from handrail.ipc.wire.framing import Message


class Home(Protocol):
    """The process that has the tool."""

    @property
    def secrets(self) -> frozenset[str]: ...
    @property
    def states(self) -> Iterator[int]: ...

    async def carry_out(
        self, tool: BroughtTool, args: dict[str, Any], runtime: Runtime, step: Message | None = None
    ) -> object: ...
    async def questions(self, tool: BroughtTool, args: dict[str, Any]) -> Sequence[Question]: ...
    async def never(self, tool: BroughtTool, arguments: Mapping[str, Any]) -> bool: ...
    async def wait(self, tool: BroughtTool, waiting: Waiting) -> Fired: ...
    def forget(self, state: int) -> None: ...


class BroughtTool(Tool):
    """One tool of a process that joined.

    Labelled like the holder's own Python (:attr:`~handrail.contract.tool.tool.Tool.trusted`): it is the code of the same
    operator, which the runtime's checks hold and the operating system does not.
    """

    blocking = True
    """A cancellation here does not end what runs there: it is told to end, and its locks stay until it has."""

    def __init__(self, description: Description, process: str, home: Home) -> None:
        self.spec = description.spec
        self.own_secrets = home.secrets
        self.definition = description.definition
        self.takes_runtime = description.takes_runtime
        self._home = home
        # Where people are told that it comes from.
        place, _, name = description.source.rpartition(".")
        self.__module__ = place or "joined"
        self.__qualname__ = f"{name} ({process})"

    def __repr__(self) -> str:
        return f"<tool {self.spec.id} of another process>"

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Have it carried out where it is from.

        :raises ToolError: as it raised it there; ``interrupted`` when its process goes meanwhile, ``unavailable`` when
            it had gone before
        """
        return await self._home.carry_out(self, args, runtime)


class AskingTool(BroughtTool):
    """One that people may have to be asked about before it runs."""

    async def questions(self, args: dict[str, Any]) -> Sequence[Question]:
        return await self._home.questions(self, args)


class SteppingTool(BroughtTool):
    """One that is gone through step by step: its generator is in the other process, this one asks it for each step."""

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        home = self._home
        step: Message = {"state": next(home.states), "first": True, "sent": None, "closes": False}
        while True:
            try:
                value = await home.carry_out(self, args, running(runtime), step)
            except BaseException:
                home.forget(step["state"])  # it may have yielded there what could not be told here
                raise
            if value is OVER:
                return
            try:
                sent: Any = yield value  # pyright: ignore[reportUnknownVariableType]
            except GeneratorExit:
                await self._close(args, runtime, {**step, "first": False, "sent": None, "closes": True})
                raise
            step = {**step, "first": False, "sent": sent}

    async def _close(self, args: dict[str, Any], runtime: Runtime, step: Message) -> None:
        try:
            now = running(runtime)
        except ToolError:  # no call ends it
            self._home.forget(step["state"])
        else:
            await self._home.carry_out(self, args, now, step)


class AskingSteppingTool(SteppingTool):
    """The same for which people may have to be asked before it is opened."""

    questions = AskingTool.questions


class BroughtTrigger(BroughtTool, TriggerTool):
    """One that adds triggers of a class of its own: they are added here, and waited for in its process."""

    blocking = False

    def __init__(self, description: Description, process: str, home: Home) -> None:
        super().__init__(description, process, home)
        self._by_time = description.trigger == "time"

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if self._by_time:
            arguments = {key: value for key, value in args.items() if key not in OWN}
            if await self._home.never(self, arguments):
                raise ToolError(f"{self.spec.id} says that this never fires; nothing was added", kind="invalid_input")
        return await TriggerTool.execute(self, args, runtime)

    async def wait(self, waiting: Waiting) -> Fired:
        return await self._home.wait(self, waiting)


_KINDS: Mapping[tuple[bool, bool], Callable[[Description, str, Home], BroughtTool]] = {
    (False, False): BroughtTool,
    (False, True): AskingTool,
    (True, False): SteppingTool,
    (True, True): AskingSteppingTool,
}
"""By whether they are stateful, and whether they ask first."""


def brought(description: Description, process: str, home: Home) -> BroughtTool:
    """The tool that a process has told of."""
    if description.trigger:
        return BroughtTrigger(description, process, home)
    return _KINDS[description.spec.mode == "stateful", description.asks_first](description, process, home)


__all__: Sequence[str] = ("BroughtTool", "Home", "brought")
