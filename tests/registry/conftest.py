"""Tool folders, the real sandbox, and runtimes as the kernel makes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.call import Result
from handrail.contract.doors.agents import Agents
from handrail.contract.doors.channels import Channels, Triggers
from handrail.contract.doors.jobs import Catalog, Jobs
from handrail.contract.doors.memory import Skills
from handrail.contract.doors.offers import Offers
from handrail.contract.doors.peer import LogLevel, PeerDoor
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Attempt, Profile, Tier
from handrail.contract.tool.requires import Capability, CapabilitySet, May, Variables, expand
from handrail.contract.tool.settings import SettingsLayer, ToolSettings
from handrail.contract.tool.spec import Opened, ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.registry.sources.executables import Confinement
from handrail.runtime.files.roots import Roots
from handrail.runtime.surface import CallRuntime, Surroundings
from handrail.sandbox import tiers

CONFINING = Tier("bubblewrap", "as if")


def turned_off(*tools: str) -> SettingsLayer:
    """An operator's settings that turn these tools off."""
    return SettingsLayer("handrail.toml:1", {tool: ToolSettings(enabled=False) for tool in tools})


class Simple(Tool):
    """A tool with nothing to it but its spec."""

    def __init__(self, tool_id: str, **spec: Any) -> None:
        self.spec = ToolSpec(id=tool_id, description=spec.pop("description", "Does it."), **spec)
        self.closed = 0

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return args

    async def aclose(self) -> None:
        self.closed += 1


class _NotCancelled:
    requested = False

    def check(self) -> None:
        return None


class _NoValues:
    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        return None

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        return None


class _Doors:
    """What carries a call out, reduced to a call that nobody stops and that touches nothing else."""

    cancellation = _NotCancelled()
    job_id: str | None = None
    callers: tuple[str, ...] = ()

    def may(self) -> May:
        return _everything

    def reached(self, attempt: Attempt) -> None:
        pass

    def tell(self, message: str, fraction: float | None, done: float | None, total: float | None) -> None:
        return

    def log(self, level: LogLevel, data: Any, logger: str | None) -> None:
        return

    def offers(self, runtime: Runtime) -> Offers:
        raise ToolError("there are no offerings here", kind="unavailable")

    def opened(self, runtime: Runtime) -> Opened:
        raise ToolError("nothing is open here", kind="denied")

    def peer(self, require: Callable[[str], None]) -> PeerDoor:
        raise ToolError("there is no client here", kind="unavailable")

    def answered(self, questions: Sequence[Question]) -> None:
        return None

    async def ask(self, questions: Sequence[Question]) -> list[list[str]]:
        raise AssertionError("nothing here asks anybody")

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        raise AssertionError(f"nothing here calls {tool_id}")

    def catalog(self) -> Catalog:
        raise AssertionError("nothing here looks at a catalog")

    def output(self, piece: str | bytes) -> None:
        return

    def jobs(self) -> Jobs:
        raise ToolError("there are no jobs here", kind="unavailable")

    def agents(self) -> Agents:
        raise ToolError("there are no agents here", kind="unavailable")

    def skills(self) -> Skills:
        raise ToolError("there are no skills here", kind="unavailable")

    def channels(self) -> Channels:
        raise ToolError("there are no channels here", kind="unavailable")

    def triggers(self) -> Triggers:
        raise ToolError("there are no triggers here", kind="unavailable")


def _everything(capability: Capability, target: str | Sequence[str]) -> str | None:
    return None


@dataclass
class Place:
    """A workspace, a scratch and a tool folder, with what a kernel would hand to executables."""

    workspace: Path
    scratch: Path
    tools: Path

    def profile(self) -> Profile:
        return Profile(workspace=str(self.workspace), scratch=str(self.scratch))

    def capabilities(self, spec: ToolSpec) -> CapabilitySet:
        return CapabilitySet((expand(spec.requires, Variables(workspace=(str(self.workspace),)), spec.id),))

    def confinement(self) -> Confinement:
        return Confinement(
            tiers.choose(),
            profile_for=lambda runtime: self.profile(),
            own=lambda spec: (self.capabilities(spec), self.profile()),
        )

    def runtime(self, spec: ToolSpec, call_id: str = "ses_1/1.0") -> CallRuntime:
        around = Surroundings(
            session_id="ses_1",
            agent="default",
            workdir=str(self.workspace),
            scratch=str(self.scratch),
            roots=Roots(str(self.workspace)),
            sandbox=tiers.choose(),
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
def place(tmp_path: Path) -> Place:
    root = tmp_path.resolve()
    made = Place(root / "workspace", root / "scratch", root / "config" / "tools")
    for folder in (made.workspace, made.scratch, made.tools):
        folder.mkdir(parents=True, mode=0o755)
    return made
