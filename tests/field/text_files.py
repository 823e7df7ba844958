"""A session that reads and edits files by the results that a model gets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from handrail.contract.calls_and_results import ProposedCall, Result
from handrail.contract.session_protocols import Session
from handrail.testing.scripted_kernel import temporary_kernel

RULES = [f"allow {tool}" for tool in ("edit", "multi_edit", "write", "file.patch", "json_write")]


@dataclass(frozen=True)
class ModelSession:
    """A session, and its workspace."""

    session: Session
    workspace: Path

    def put(self, name: str, content: bytes) -> Path:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    async def result(self, tool: str, **arguments: Any) -> Result:
        """The answer to one call, as the model sees it."""
        (answer,) = await self.session.start_turn().call_all([ProposedCall(tool, arguments)])
        return answer.model

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await self.result(tool, **arguments)
        assert result.ok, result.error_text
        return cast("dict[str, Any]", result.data)

    async def fail(self, tool: str, **arguments: Any) -> str:
        result = await self.result(tool, **arguments)
        assert result.error_text is not None, result.data
        return result.error_text

    async def show(self, name: str) -> str:
        """The text of a file, as the model sees it."""
        return (await self.call("read", path=name))["text"]


@asynccontextmanager
async def model_session(tmp_path: Path) -> AsyncGenerator[ModelSession]:
    async with temporary_kernel(tmp_path, rules=[*RULES, "allow fs.write"]) as kernel:
        yield ModelSession(await kernel.session(), tmp_path / "ws")
