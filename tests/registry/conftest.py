"""Fixtures: tool folders, the real sandbox, and the runtimes of the kernel."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ConnectionAttempt, SandboxProfile, SandboxTier
from handrail.contract.services.channels_and_triggers import ChannelService, TriggerService
from handrail.contract.services.client_services import ClientService, LogLevel
from handrail.contract.services.history_and_skill_services import SkillService
from handrail.contract.services.job_and_tool_services import CatalogService, JobService
from handrail.contract.services.resource_services import ResourceService
from handrail.contract.services.subagent_services import SubagentService
from handrail.contract.services.task_services import TaskService
from handrail.contract.services.tool_runtime import ModeService, Runtime, UserQuestion
from handrail.contract.tool.operator_tool_settings import ToolSettings, ToolSettingsLayer
from handrail.contract.tool.requires import AccessCheck, Capability, CapabilitySet, PathVariables, expand_requires
from handrail.contract.tool.spec import ToolSession, ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.runtime.call_runtime import CallRuntime, SessionSharedServices
from handrail.runtime.files.session_roots import SessionRoots
from handrail.sandbox import tier_probe

CONFINING = SandboxTier("bubblewrap", "as if")


def turned_off(*tools: str) -> ToolSettingsLayer:
    """An operator's settings that turn these tools off."""
    return ToolSettingsLayer("handrail.toml:1", {tool: ToolSettings(enabled=False) for tool in tools})


class SimpleTool(Tool):
    """A tool with nothing to it but its spec."""

    def __init__(self, tool_id: str, **spec: Any) -> None:
        self.spec = ToolSpec(id=tool_id, description=spec.pop("description", "Does it."), **spec)
        self.closed = 0

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return args

    async def aclose(self) -> None:
        self.closed += 1


class _NotCancelled:
    is_requested = False

    def raise_if_requested(self) -> None:
        return None


class _NoValues:
    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        return None

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        return None


class _Doors:
    """Minimal services for a call that is never stopped."""

    cancellation = _NotCancelled()
    job_id: str | None = None
    calling_call_ids: tuple[str, ...] = ()

    def build_access_check(self) -> AccessCheck:
        return _everything

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

    def resources(self, runtime: Runtime) -> ResourceService:
        raise ToolError("there are no offerings here", kind="unavailable")

    def tool_session(self, runtime: Runtime) -> ToolSession:
        raise ToolError("nothing is open here", kind="denied")

    def client(self, require: Callable[[str], None]) -> ClientService:
        raise ToolError("there is no client here", kind="unavailable")

    def find_answers(self, questions: Sequence[UserQuestion]) -> None:
        return None

    async def ask_user(self, questions: Sequence[UserQuestion]) -> list[list[str]]:
        raise AssertionError("nothing here asks anybody")

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        raise AssertionError(f"nothing here calls {tool_id}")

    def catalog(self) -> CatalogService:
        raise AssertionError("nothing here looks at a catalog")

    def output(self, piece: str | bytes) -> None:
        return

    def jobs(self) -> JobService:
        raise ToolError("there are no jobs here", kind="unavailable")

    def subagents(self) -> SubagentService:
        raise ToolError("there are no agents here", kind="unavailable")

    def skills(self) -> SkillService:
        raise ToolError("there are no skills here", kind="unavailable")

    def tasks(self) -> TaskService:
        raise ToolError("there are no tasks here", kind="unavailable")

    def mode(self) -> ModeService:
        raise ToolError("there is no mode here", kind="unavailable")

    def channels(self) -> ChannelService:
        raise ToolError("there are no channels here", kind="unavailable")

    def triggers(self) -> TriggerService:
        raise ToolError("there are no triggers here", kind="unavailable")


def _everything(capability: Capability, target: str | Sequence[str]) -> str | None:
    return None


@dataclass
class ExecutableFixture:
    """A workspace, a scratch and a tool folder, with what a kernel would hand to executables."""

    workspace: Path
    scratch: Path
    tools: Path

    def profile(self) -> SandboxProfile:
        return SandboxProfile(workspace=str(self.workspace), scratch=str(self.scratch))

    def capabilities(self, spec: ToolSpec) -> CapabilitySet:
        return CapabilitySet(
            (expand_requires(spec.requires, PathVariables(workspace=(str(self.workspace),)), spec.id),)
        )

    def confinement(self) -> ToolConfinement:
        return ToolConfinement(
            tier_probe.choose_sandbox(),
            profile_for=lambda runtime: self.profile(),
            tool_profile=lambda spec: (self.capabilities(spec), self.profile()),
        )

    def runtime(self, spec: ToolSpec, call_id: str = "ses_1/1.0") -> CallRuntime:
        around = SessionSharedServices(
            session_id="ses_1",
            agent="default",
            workdir=str(self.workspace),
            scratch=str(self.scratch),
            roots=SessionRoots(str(self.workspace)),
            sandbox=tier_probe.choose_sandbox(),
            values=_NoValues(),
        )
        return CallRuntime(spec, call_id, around, self.capabilities(spec), _Doors())

    def put(self, name: str, script: str | None, mode: int = 0o755, **runtime: Any) -> Path:
        """Write ``NAME.json`` and its executable; no executable for None."""
        manifest = {"llm": {"name": name, "description": "Does it.", "parameters": {"type": "object"}}}
        manifest["llm"]["parameters"] = runtime.pop("parameters", {"type": "object", "additionalProperties": True})
        path = self.tools / f"{name}.json"
        path.write_text(json.dumps({**manifest, "runtime": runtime}))
        path.chmod(0o644)
        if script is not None:
            executable = self.tools / runtime.get("exec_path", name)
            executable.parent.mkdir(parents=True, exist_ok=True)
            executable.write_text(script)
            executable.chmod(mode)
        return path


@pytest.fixture
def place(tmp_path: Path) -> ExecutableFixture:
    root = tmp_path.resolve()
    made = ExecutableFixture(root / "workspace", root / "scratch", root / "config" / "tools")
    for folder in (made.workspace, made.scratch, made.tools):
        folder.mkdir(parents=True, mode=0o755)
    return made
