"""The source of a session's mode, and that it is the same in whichever process runs its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handrail import open_kernel
from handrail.config import load_configuration
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.session_protocols import Session
from handrail.store import operator_decisions
from handrail.store.state_folders import locate_folders

pytestmark = pytest.mark.proves("P-14")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "ws").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "handrail.toml").write_text("")
    return tmp_path


def options(place: Path) -> dict[str, Any]:
    return {"workspace": place / "ws", "state": place / "state", "config": place / "config" / "handrail.toml"}


async def writes(session: Session, name: str) -> str:
    answer = await session.call("write", {"path": name, "content": "x"})
    return "done" if answer.ok else str(answer.error_text)


async def test_the_most_specific_setting_of_a_mode_wins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "config" / "handrail.toml").write_text('mode = "accept-edits"\n')
    agent = place / "config" / "agents" / "planner"
    agent.mkdir(parents=True)
    (agent / "agent.toml").write_text('id = "planner"\nmode = "plan"\n')
    async with open_kernel(**options(place)) as kernel:
        assert kernel.initial_rules.mode == "accept-edits"
        assert await writes(await kernel.session(), "a") == "done"
        assert "deny fs.write" in await writes(await kernel.session(agent="planner"), "b")
        assert await writes(await kernel.session(agent="planner", mode="accept-edits"), "c") == "done"
        assert "no rule allows" in await writes(await kernel.session(mode="ask"), "d")
    async with open_kernel(**options(place), agent="planner") as kernel:
        assert kernel.initial_rules.mode == "plan"
    async with open_kernel(**options(place), agent="planner", mode="auto") as kernel:
        assert kernel.initial_rules.mode == "auto"
    monkeypatch.setenv("HANDRAIL_MODE", "ask")
    async with open_kernel(**options(place), agent="planner") as kernel:
        assert kernel.initial_rules.mode == "ask"
    async with open_kernel(**options(place), agent="planner", settings=["mode=plan"]) as kernel:
        assert kernel.initial_rules.mode == "plan"


async def test_a_session_changes_its_mode_between_calls(place: Path) -> None:
    async with open_kernel(**options(place), mode="accept-edits") as kernel:
        session = await kernel.session()
        assert await writes(session, "a") == "done"
        session.set_mode("plan")
        assert "deny fs.write" in await writes(session, "b")
        session.set_mode("accept-edits")
        assert await writes(session, "b") == "done"
        with pytest.raises(UsageError, match="Valid modes: plan, ask"):
            session.set_mode("any")


async def test_sessions_of_a_connected_process_start_in_the_mode_of_that_process(place: Path) -> None:
    async with open_kernel(**options(place), mode="auto"), open_kernel(**options(place), mode="plan") as joined:
        assert type(joined).__name__ == "RemoteKernel"
        assert joined.initial_rules.mode == "plan"
        session = await joined.session()
        assert "deny fs.write" in await writes(session, "a")
        session.set_mode("accept-edits")
        assert await writes(session, "a") == "done"
        assert await writes(await joined.session(mode="accept-edits"), "b") == "done"
        assert (await joined.explain_call("write", {"path": "c", "content": ""})).mode == "plan"
    async with open_kernel(**options(place), mode="auto"), open_kernel(**options(place)) as joined:
        assert joined.initial_rules.mode == "ask", "the mode of the process that holds it is its own"


def test_an_untrusted_workspace_file_narrows_the_mode_and_never_widens_it(place: Path) -> None:
    folders = locate_folders(place / "ws", place / "state")
    own, configured = place / "ws" / "handrail.toml", place / "config" / "handrail.toml"
    for first, second, holds in (("accept-edits", "plan", "plan"), ("ask", "auto", "ask"), ("auto", "ask", "ask")):
        configured.write_text(f'mode = "{first}"\n')
        own.write_text(f'mode = "{second}"\n')
        assert load_configuration(configured, folders=folders, environment={}).settings.mode == holds
    configured.write_text('mode = "ask"\n')
    own.write_text('mode = "auto"\n')
    held = load_configuration(configured, folders=folders, environment={})
    assert [value.key for value in held.untrusted_workspace_values] == ["mode"]
    assert held.workspace is not None
    folders.workspace_state_folder.mkdir(parents=True)
    operator_decisions.trust_workspace_content(folders, held.workspace.sha256, clock=lambda: 0)
    assert load_configuration(configured, folders=folders, environment={}).settings.mode == "auto"


async def test_an_unknown_mode_is_refused_and_the_error_names_its_line(place: Path) -> None:
    (place / "config" / "handrail.toml").write_text('\nmode = "yolo"\n')
    with pytest.raises(LoadError, match=r"handrail.toml:2: mode: is 'yolo'; expected 'plan', 'ask'"):
        async with open_kernel(**options(place)):
            pass
    with pytest.raises(UsageError, match="Unknown mode"):
        async with open_kernel(**options(place), mode="yolo"):
            pass


async def test_explain_names_the_mode_and_another_mode_that_allows_the_call(place: Path) -> None:
    async with open_kernel(**options(place)) as kernel:
        explained = await kernel.explain_call("bash", {"command": "timeout 5 git status"})
        assert (explained.mode, explained.read_only) == ("ask", True)
        assert explained.action == "allow"
        explained = await kernel.explain_call("bash", {"command": "make"})
        assert (explained.read_only, explained.read_only_note) == (
            False,
            "make may change something",
        )
        assert explained.action == "allow" and explained.confined is True
        explained = await kernel.explain_call("write", {"path": "a", "content": "x"}, headless=False)
        assert explained.action == "ask" and "--mode accept-edits" in explained.possible_changes
        assert "mode: ask" in str(explained)
