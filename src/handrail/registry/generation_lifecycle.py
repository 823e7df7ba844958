"""The current generation of each agent, the end of tools in older ones, and the record of changes in the log.

A new generation is published in one step, whole. A turn or call that holds an older one continues with it. A tool ends when no
held generation contains it any more, and at the latest with the kernel.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolEntry


class SharedToolUses:
    """Open tools that the agents of a kernel may share. A tool ends when its last user releases it."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()

    def add_tool_user(self, tool: Tool) -> None:
        """Count one more user of the tool."""
        self._holders[id(tool)] += 1

    def release_tool_user(self, tool: Tool) -> bool:
        """Count one user less and return whether it was the last, so that the tool has to end."""
        self._holders[id(tool)] -= 1
        if self._holders[id(tool)] > 0:
            return False
        del self._holders[id(tool)]
        return True


class GenerationLifecycle:
    """The generations of one agent, bound to one event loop.

    :param open_tools: the open tools of one kernel, which its agents share
    :param loop: the event loop; None for the running one
    """

    def __init__(
        self, first: Generation, open_tools: SharedToolUses | None = None, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._shared = open_tools or SharedToolUses()
        self._loop = loop or asyncio.get_running_loop()
        self.current = first
        """The generation that new turns and calls get."""
        self._older: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._open: dict[int, Tool] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.closed = False
        self._keep_open(first)

    @property
    def generations_in_use(self) -> tuple[Generation, ...]:
        """The current generation and the older ones that a turn or call still uses."""
        return (self.current, *self._older)

    def publish(self, generation: Generation) -> GenerationDiff:
        """Make ``generation`` the current one and return how its tools differ from the previous one.

        :raises ValueError: unless its number is higher
        """
        older = self.current
        if generation.number <= older.number:
            raise ValueError(
                f"Generation {generation.number} cannot be published. Its number must be above {older.number}."
            )
        self._keep_open(generation)
        self._older.add(older)
        weakref.finalize(older, self._schedule_unused_tool_close).atexit = False
        self.current = generation
        return generation.compute_diff_from(older)

    async def aclose(self) -> None:
        """End every tool.

        :raises ExceptionGroup: the errors of all tools that failed to end
        """
        self.closed = True
        tools, self._open = tuple(self._open.values()), {}
        problems = await _close_tools([tool for tool in tools if self._shared.release_tool_user(tool)])
        if self._ending:
            await asyncio.wait(self._ending)
        if problems:
            raise ExceptionGroup("some tools did not end cleanly", problems)

    def _keep_open(self, generation: Generation) -> None:
        for entry in generation.entries.values():
            if id(entry.tool) not in self._open:
                self._open[id(entry.tool)] = entry.tool
                self._shared.add_tool_user(entry.tool)

    def _schedule_unused_tool_close(self) -> None:
        """Schedule the end of unused tools after an older generation was released. Any thread may call this."""
        if self._open and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_unused_tools)

    def _close_unused_tools(self) -> None:
        held = {id(entry.tool) for generation in self.generations_in_use for entry in generation.entries.values()}
        gone = [self._open.pop(key) for key in tuple(self._open) if key not in held]
        if gone := [tool for tool in gone if self._shared.release_tool_user(tool)]:
            task = self._loop.create_task(_close_tools_quietly(gone))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


async def _close_tools(tools: Iterable[Tool]) -> list[Exception]:
    problems: list[Exception] = []
    for tool in tools:
        try:
            await tool.aclose()
        except Exception as error:
            problems.append(error)
    return problems


async def _close_tools_quietly(tools: Iterable[Tool]) -> None:
    """End tools in the background and drop their errors, which no caller awaits."""
    await _close_tools(tools)


# The record of an agent's generations in the log: every tool of the first, then the changes from one to the next.
#
# A reader goes back from a change to the generation that it ``after`` names, until one names the tool. To keep that way
# short, a generation is recorded whole again once the changes since would name as many tools.

MAX_CONSECUTIVE_CHANGES = 50
"""The most generations in a row that the log records as changes only."""


class GenerationRecorder:
    """The records of one agent's generations in the log. Not thread-safe."""

    __slots__ = ("_changes", "_named", "_told")

    def __init__(self) -> None:
        self._told: int | None = None
        self._changes = self._named = 0

    def build_generation_record_body(
        self, generation: Generation, difference: GenerationDiff | None = None
    ) -> dict[str, Any]:
        """Return the body of the record of ``generation``: its tools, their definitions and their sources.

        :param difference: the change since the generation that was recorded last
        """
        after, self._told = self._told, generation.number
        if difference is not None and after is not None and self._is_short(difference, len(generation)):
            new = (*difference.added, *difference.changed)
            self._changes += 1
            self._named += len(new) + len(difference.removed)
            tools = _index_entries(generation.entries[tool_id] for tool_id in new)
            return {"number": generation.number, "after": after, "difference": asdict(difference), "tools": tools}
        self._changes = self._named = 0
        changes = {} if difference is None else {"difference": asdict(difference)}
        return {"number": generation.number, "tools": _index_entries(generation.entries.values()), **changes}

    def _is_short(self, difference: GenerationDiff, count: int) -> bool:
        named = len(difference.added) + len(difference.changed) + len(difference.removed)
        return self._changes < MAX_CONSECUTIVE_CHANGES and self._named + named < count


def _index_entries(entries: Iterable[ToolEntry]) -> dict[str, Any]:
    return {
        entry.id: {
            "definition": entry.definition_hash,
            "source": entry.source,
            "unavailable": entry.unavailable_reason,
            "status": entry.status,
            "sandbox": entry.sandbox,
            **({} if entry.answering_spec is None else {"answered_by": entry.answering_spec.id}),
        }
        for entry in entries
    }
