"""The stateful tools that this process brought: their generators, each gone through for whoever holds the workspace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from handrail.arbiter.generators import OVER, NotEnding, Steps
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.decorator import FunctionTool, steps_of
from handrail.contract.tool.tool import Tool
from handrail.ipc.codec.values import an_object, anything, fields, flag, whole

GRACE_S = 5.0
"""How long what is open may take to end with its process."""


def a_step(value: Any) -> Mapping[str, Any] | None:
    """Which step of which state is asked for; None for a tool without any."""
    if value is None:
        return None
    return fields(an_object(value), {"state": whole, "first": flag, "sent": anything, "closes": flag})


class OpenSteps:
    """What is open here, by the numbers that the holder gave."""

    def __init__(self) -> None:
        self._open: dict[int, Steps] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, tool: Tool, arguments: dict[str, Any], runtime: Runtime, step: Mapping[str, Any]) -> object:
        """One step, or the end, of one.

        :return: what it yields, as JSON values; :data:`OVER` where there is no further step
        """
        number = step["state"]
        steps = self._open.get(number)
        if steps is None:
            if not step["first"]:
                raise ToolError(
                    f"what {tool.spec.id} had open in its process is not there any more", kind="interrupted"
                )
            none = f"no step of {tool.spec.id} runs: it touches things only while one does"
            steps = self._open[number] = Steps(lambda of: steps_of(tool, arguments, of), tool.spec.id, none)
        try:
            if step["closes"]:
                await steps.close(runtime)
                return OVER
            value = await steps.next(runtime, step["sent"])
        except NotEnding:
            text = f"{tool.spec.id} went on when it was told to end; its author lets it end at GeneratorExit"
            raise ToolError(text, kind="backend") from None
        finally:
            if steps.over:
                self._open.pop(number, None)
        return tool.finished(value) if isinstance(tool, FunctionTool) and value is not OVER else value

    def forget(self, number: int) -> None:
        """End one that no call ends."""
        if (steps := self._open.pop(number, None)) is not None:
            task = asyncio.get_running_loop().create_task(_close(steps))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def forget_all(self) -> None:
        """The holder is another one, or gone."""
        for number in tuple(self._open):
            self.forget(number)

    async def aclose(self) -> None:
        """End all, and wait until what stands in their ``finally`` has run; not for ever."""
        self.forget_all()
        if self._ending:
            _, left = await asyncio.wait(set(self._ending), timeout=GRACE_S)
            for task in left:
                task.cancel()


async def _close(steps: Steps) -> None:
    with contextlib.suppress(Exception):  # nobody is left to be told
        await steps.close()
