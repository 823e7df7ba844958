"""Call built-in tools as the arbiter does: with validated arguments and a real runtime."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalHandler, ApprovalRequest
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.services.channels_and_triggers import ChannelService, TriggerService
from handrail.contract.services.client_services import ClientService, LogLevel
from handrail.contract.services.history_and_skill_services import SkillService
from handrail.contract.services.job_and_tool_services import CatalogService, JobService
from handrail.contract.services.resource_services import ResourceService
from handrail.contract.services.subagent_services import SubagentService
from handrail.contract.services.task_services import TaskService
from handrail.contract.services.tool_runtime import ModeService, Runtime, UserQuestion
from handrail.contract.tool.requires import AccessCheck, Capability, CapabilitySet, PathVariables, expand_requires
from handrail.contract.tool.spec import ToolSession
from handrail.contract.tool.tool_protocol import Tool
from handrail.runtime.call_runtime import CallRuntime, SessionSharedServices
from handrail.tools import BUILTINS

_numbers = itertools.count(1)


class RunningCall:
    """A call that is never stopped."""

    is_requested = False

    def raise_if_requested(self) -> None:
        return


@dataclass
class CallServices:
    """The arbiter's services for the runtime of a call, without an arbiter."""

    evaluate: AccessCheck
    approval_handler: ApprovalHandler | None = None
    cancellation: RunningCall = field(default_factory=RunningCall)
    job_id: str | None = None
    calling_call_ids: tuple[str, ...] = ()

    def build_access_check(self) -> AccessCheck:
        return self.evaluate

    def explain_host_refusal(self, host: str) -> str | None:
        return None

    async def request_host(self, host: str) -> str | None:
        return None

    def record_attempt(self, attempt: ConnectionAttempt) -> None:
        pass

    def report_progress(self, message: str, fraction: float | None, done: float | None, total: float | None) -> None:
        return

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None:
        return

    def output(self, piece: str | bytes) -> None:
        return

    def jobs(self) -> JobService:
        raise ToolError("there are no jobs here", kind="unavailable")

    def resources(self, runtime: Runtime) -> ResourceService:
        raise ToolError("there are no offerings here", kind="unavailable")

    def tool_session(self, runtime: Runtime) -> ToolSession:
        raise ToolError("nothing is open here", kind="denied")

    def client(self, require: Callable[[str], None]) -> ClientService:
        raise ToolError("there is no client here", kind="unavailable")

    def find_answers(self, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        return None

    async def ask_user(self, questions: Sequence[UserQuestion]) -> list[list[str]]:
        assert self.approval_handler is not None
        return await self.approval_handler.answer_questions("session", questions) or []

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        raise ToolError(f"{tool_id}({arguments}) has no arbiter here", kind="unavailable")

    def subagents(self) -> SubagentService:
        raise ToolError("there are none here", kind="unavailable")

    def skills(self) -> SkillService:
        raise ToolError("there are none here", kind="unavailable")

    def tasks(self) -> TaskService:
        raise ToolError("there are no tasks here", kind="unavailable")

    def mode(self) -> ModeService:
        raise ToolError("there is no mode here", kind="unavailable")

    def channels(self) -> ChannelService:
        raise ToolError("there are none here", kind="unavailable")

    def triggers(self) -> TriggerService:
        raise ToolError("there are none here", kind="unavailable")

    def catalog(self) -> CatalogService:
        raise ToolError("there is no catalog here", kind="unavailable")


class SessionValues:
    """Session values in a dictionary."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str, str], Any] = {}

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        return self.kept.get((session_id, tool_id, key))

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        self.kept[session_id, tool_id, key] = value


@dataclass
class ScriptedUser:
    """A user with scripted answers, who records the questions."""

    answers: list[list[str]]
    asked: list[UserQuestion] = field(default_factory=list[UserQuestion])

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("reject", f"{request.tool_id}: not in this test")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        self.asked += questions
        return self.answers


@dataclass
class BuiltinToolFixture:
    """One session's calls of the built-in tools."""

    around: SessionSharedServices
    refuse: dict[str, str] = field(default_factory=dict[str, str])
    """Canonical path to the reason why no rule allows it."""
    hosts: tuple[str, ...] = ()
    """Hosts for the tools that reach the network, instead of those that they declare."""

    @property
    def workspace(self) -> Path:
        return Path(self.around.workdir)

    def runtime(self, tool: Tool) -> CallRuntime:
        variables = PathVariables(workspace=(self.around.workdir,), output=self.around.roots.readable)
        layer = expand_requires(tool.spec.requires, variables, tool.spec.id)
        capabilities = CapabilitySet((replace(layer, hosts=self.hosts) if self.hosts and layer.hosts else layer,))

        def may(capability: Capability, target: str | Sequence[str]) -> str | None:
            if isinstance(target, str) and target in self.refuse:
                return self.refuse[target]
            if capability != "shell.run" and not capabilities.allows(capability, target):
                return f"{capability} of {target} is not in the capability set"
            return None

        return CallRuntime(
            tool.spec,
            f"call-{next(_numbers)}",
            self.around,
            capabilities,
            CallServices(may, self.around.approval_handler),
        )

    async def call(self, tool_id: str, **arguments: Any) -> Any:
        """Return the tool's output or error text; the arguments must match its schema."""
        tool = next(tool for tool in BUILTINS if tool.spec.id == tool_id)
        assert compile_schema(tool.spec.parameters).list_problems(arguments) == []
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
        assert part in str(raised.value), str(raised.value)
    return raised.value
