"""A workspace, and each built-in tool called as the arbiter calls it: checked arguments, a real runtime."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.call import Result
from handrail.contract.doors.agents import Agents
from handrail.contract.doors.channels import Channels, Triggers
from handrail.contract.doors.jobs import Catalog, Jobs
from handrail.contract.doors.memory import Skills
from handrail.contract.doors.offers import Offers
from handrail.contract.doors.peer import LogLevel, PeerDoor
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.sandbox import Attempt
from handrail.contract.schema.schema import compile_schema
from handrail.contract.tool.requires import Capability, CapabilitySet, May, Variables, expand
from handrail.contract.tool.spec import Opened
from handrail.contract.tool.tool import Tool
from handrail.runtime.surface import CallRuntime, Surroundings
from handrail.tools import BUILTINS

_numbers = itertools.count(1)


class Running:
    """A call that nobody stops."""

    requested = False

    def check(self) -> None:
        return


@dataclass
class Doors:
    """What the arbiter gives a call's runtime, without an arbiter."""

    judge: May
    attendant: Attendant | None = None
    cancellation: Running = field(default_factory=Running)
    job_id: str | None = None
    callers: tuple[str, ...] = ()

    def may(self) -> May:
        return self.judge

    def reached(self, attempt: Attempt) -> None:
        pass

    def tell(self, message: str, fraction: float | None, done: float | None, total: float | None) -> None:
        return

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None:
        return

    def output(self, piece: str | bytes) -> None:
        return

    def jobs(self) -> Jobs:
        raise ToolError("there are no jobs here", kind="unavailable")

    def offers(self, runtime: Runtime) -> Offers:
        raise ToolError("there are no offerings here", kind="unavailable")

    def opened(self, runtime: Runtime) -> Opened:
        raise ToolError("nothing is open here", kind="denied")

    def peer(self, require: Callable[[str], None]) -> PeerDoor:
        raise ToolError("there is no client here", kind="unavailable")

    def answered(self, questions: Sequence[Question]) -> list[list[str]] | None:
        return None

    async def ask(self, questions: Sequence[Question]) -> list[list[str]]:
        assert self.attendant is not None
        return await self.attendant.answer("session", questions) or []

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        raise ToolError(f"{tool_id}({arguments}) has no arbiter here", kind="unavailable")

    def agents(self) -> Agents:
        raise ToolError("there are none here", kind="unavailable")

    def skills(self) -> Skills:
        raise ToolError("there are none here", kind="unavailable")

    def channels(self) -> Channels:
        raise ToolError("there are none here", kind="unavailable")

    def triggers(self) -> Triggers:
        raise ToolError("there are none here", kind="unavailable")

    def catalog(self) -> Catalog:
        raise ToolError("there is no catalog here", kind="unavailable")


class Memory:
    """Session values in a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str, str], Any] = {}

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        return self.kept.get((session_id, tool_id, key))

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        self.kept[session_id, tool_id, key] = value


@dataclass
class Someone:
    """Answers as it was told to, and remembers what it was asked."""

    answers: list[list[str]]
    asked: list[Question] = field(default_factory=list[Question])

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("reject", f"{request.tool_id}: not in this test")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]]:
        self.asked += questions
        return self.answers


@dataclass
class Desk:
    """One session's calls of the built-in tools."""

    around: Surroundings
    refuse: dict[str, str] = field(default_factory=dict[str, str])
    """Canonical path to the reason why no rule allows it."""

    @property
    def workspace(self) -> Path:
        return Path(self.around.workdir)

    def runtime(self, tool: Tool) -> CallRuntime:
        variables = Variables(workspace=(self.around.workdir,), output=self.around.roots.readable)
        capabilities = CapabilitySet((expand(tool.spec.requires, variables, tool.spec.id),))

        def may(capability: Capability, target: str | Sequence[str]) -> str | None:
            if isinstance(target, str) and target in self.refuse:
                return self.refuse[target]
            if capability != "shell.run" and not capabilities.allows(capability, target):
                return f"{capability} of {target} is not in the capability set"
            return None

        return CallRuntime(
            tool.spec, f"call-{next(_numbers)}", self.around, capabilities, Doors(may, self.around.attendant)
        )

    async def call(self, tool_id: str, **arguments: Any) -> Any:
        """What the tool returns, whose arguments have to fit its schema, or what it says of them."""
        tool = next(tool for tool in BUILTINS if tool.spec.id == tool_id)
        assert compile_schema(tool.spec.parameters).problems(arguments) == []
        tool.check(arguments)
        return await tool.execute(arguments, self.runtime(tool))

    def put(self, name: str, content: str | bytes) -> Path:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


async def refused(attempt: Awaitable[object], kind: ErrorKind, *parts: str) -> ToolError:
    """The error that ``attempt`` has to raise, of ``kind`` and with ``parts`` in its text."""
    with pytest.raises(ToolError) as raised:
        await attempt
    assert raised.value.kind == kind, str(raised.value)
    for part in parts:
        assert part in str(raised.value)
    return raised.value
