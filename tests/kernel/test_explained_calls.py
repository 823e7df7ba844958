"""``explain`` and the call itself agree: each shipped tool, under a rule about each permission that its calls use."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernel.test_agents import confined
from tests.tools.example_calls import CALLS, ONLINE, opened_kernel, served

pytestmark = [confined, pytest.mark.proves("P-13")]

FILES = {"a.txt": "old\n", "ships.py": "def launch(name):\n    return name\n", "draft.txt": "1\n", "b.txt": "1\n2\n"}


@pytest.mark.parametrize(
    "rule",
    [
        "deny shell.run",
        pytest.param("deny shell.run *", marks=pytest.mark.slow),
        "deny shell.run git …",
        pytest.param("deny shell.run git blame …", marks=pytest.mark.slow),
        pytest.param("deny shell.run git push …", marks=pytest.mark.slow),
        pytest.param("deny shell.run python3 *", marks=pytest.mark.slow),
        pytest.param("deny shell.run ty …", marks=pytest.mark.slow),
        "deny net.fetch",
        pytest.param("deny net.fetch *", marks=pytest.mark.slow),
        pytest.param("deny net.fetch 127.0.0.1", marks=pytest.mark.slow),
        "deny fs.write",
        pytest.param("deny fs.write **", marks=pytest.mark.slow),
        pytest.param("deny fs.write a.txt", marks=pytest.mark.slow),
        pytest.param("deny fs.read", marks=pytest.mark.slow),
        pytest.param("deny fs.read **", marks=pytest.mark.slow),
        "deny fs.read a.txt",
        pytest.param("ask shell.run git …", marks=pytest.mark.slow),
        "ask shell.run git commit …",
    ],
)
async def test_each_shipped_tool_gets_the_decision_that_explain_shows(tmp_path: Path, rule: str) -> None:
    differing: list[str] = []
    async with served(tmp_path) as host, opened_kernel(tmp_path, host, "allow *", rule) as (kernel, session):
        for name, text in FILES.items():
            Path(session.workdir, name).write_text(text)
        for tool_id, arguments in CALLS.items():
            if "…" in arguments.values():
                continue  # a call about something that another call has started
            called = {**arguments, "url": host.url(ONLINE[tool_id])} if tool_id in ONLINE else arguments
            explained = await kernel.explain_call(tool_id, called)
            answer = await session.call(tool_id, called)
            if (explained.effective_action == "deny") != (answer.error_kind == "denied"):
                differing.append(
                    f"{tool_id}: {explained.action} ({explained.reason}), then {answer.error_kind}: {answer.error_text}"
                )
    assert not differing, "\n".join(differing)
