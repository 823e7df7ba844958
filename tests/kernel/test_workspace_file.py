"""The configuration of a workspace in a whole kernel: which settings apply, and that no call changes it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from handrail import Kernel, LoadError, UsageError, open_kernel
from handrail.config import load_configuration
from handrail.sandbox import tier_probe
from handrail.store import operator_decisions
from handrail.store.state_folders import prepare_folders

confined = pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="bash is withheld on this machine")
pytestmark = pytest.mark.proves("F-11")
OWN = 'rules = ["allow write notes/**", "deny read secret/**"]\n[limits]\nlock_wait_ms = 7\n'


@asynccontextmanager
async def opened(
    folder: Path, own: str | None, rules: Iterable[str] = (), *, trusted: bool = False, settings: Iterable[str] = ()
) -> AsyncGenerator[Kernel]:
    """A kernel on ``folder/ws`` whose file contains ``own``; an existing operator file is kept."""
    workspace, config = folder / "ws", folder / "handrail.toml"
    workspace.mkdir(exist_ok=True)
    config.touch()
    if own is not None:
        (workspace / "handrail.toml").write_text(own)
    if trusted:
        folders = prepare_folders(workspace, folder / "state")
        found = load_configuration(config, folders=folders).workspace
        assert found is not None
        operator_decisions.trust_workspace_content(folders, found.sha256, clock=lambda: 1)
    async with open_kernel(workspace, rules=rules, state=folder / "state", config=config, settings=settings) as kernel:
        yield kernel


async def test_workspace_denies_apply_at_once_and_allows_and_settings_only_after_trust(
    tmp_path: Path,
) -> None:
    for trusted in (False, True):
        async with opened(tmp_path, OWN, trusted=trusted) as kernel:
            session = await kernel.session()
            written = await session.call("write", {"path": "notes/a.txt", "content": "x"})
            assert written.ok is trusted, written
            denied = await session.call("read", {"path": "secret/a.txt"})
            assert denied.error_kind == "denied" and "'deny read secret/**' (project scope)" in str(denied.error_text)
            assert kernel.config.settings.limits.lock_wait_ms == (7 if trusted else 60_000)
            assert (kernel.config.untrusted_workspace_warning is None) is trusted
    async with opened(tmp_path, OWN + "#") as kernel:
        session = await kernel.session()
        changed = await session.call("write", {"path": "notes/b.txt", "content": "x"})
        assert changed.error_kind == "denied"


async def test_an_ask_rule_of_an_untrusted_workspace_file_does_not_replace_an_operator_deny(tmp_path: Path) -> None:
    (tmp_path / "handrail.toml").write_text('rules = ["deny fs.write notes/**"]\n')
    own = 'rules = ["ask fs.write notes/a.txt"]\n'
    async with opened(tmp_path, own) as kernel:
        explained = await kernel.explain_call("write", {"path": "notes/a.txt", "content": "x"}, headless=False)
        assert explained.action == "deny"
    async with opened(tmp_path, own + 'agent = "default"\n', trusted=True) as kernel:
        explained = await kernel.explain_call("write", {"path": "notes/a.txt", "content": "x"}, headless=False)
        assert explained.action == "ask"


async def test_environment_variables_and_settings_also_configure_the_kernel_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_RULES", "allow write notes/**")
    async with opened(tmp_path, None, settings=["limits.grace_ms=9"]) as kernel:
        assert kernel.config.settings.limits.grace_ms == 9
        session = await kernel.session()
        assert (await session.call("write", {"path": "notes/a.txt", "content": "x"})).ok


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("rules = [\n", "is not TOML"),
        ('rules = ["allow raed"]\n', "handrail.toml:1: Invalid rule 'allow raed'"),
        ('rules = [\n"deny raed"]\n', "handrail.toml:2: Invalid rule 'deny raed'"),
        ("[limits]\ngrace_ms = 0\n", "handrail.toml:2: limits.grace_ms"),
    ],
)
async def test_a_faulty_workspace_file_stops_the_start_with_its_line(tmp_path: Path, own: str, told: str) -> None:
    with pytest.raises(LoadError) as caught:
        async with opened(tmp_path, own):
            raise AssertionError("it opened")
    assert told in str(caught.value)


@pytest.mark.proves("P-15", "F-11")
async def test_file_tools_cannot_write_the_workspace_file_under_any_rule(tmp_path: Path) -> None:
    rules = ["allow *", "allow fs.*", "allow write handrail.toml", "allow fs.write handrail.toml"]
    async with opened(tmp_path, OWN, rules) as kernel:
        (tmp_path / "ws" / "link").symlink_to("handrail.toml")
        session = await kernel.session()
        assert (await session.call("read", {"path": "handrail.toml"})).ok
        for path in ("handrail.toml", "./HANDRAIL.TOML", "link", str(tmp_path / "ws" / "handrail.toml")):
            for name, arguments in (
                ("write", {"path": path, "content": "rules = []"}),
                ("edit", {"path": path, "old": "deny", "new": "allow"}),
                ("file.patch", {"path": path, "operations": [{"op": "append", "content": "x"}]}),
            ):
                answer = await session.call(name, arguments)
                assert answer.error_kind == "denied" and "no rule can allow it" in str(answer.error_text), (
                    name,
                    path,
                    answer,
                )
        assert (tmp_path / "ws" / "handrail.toml").read_text() == OWN
        assert sorted(path.name for path in (tmp_path / "ws").iterdir()) == ["handrail.toml", "link"]


@confined
@pytest.mark.proves("P-15", "F-11")
@pytest.mark.parametrize("command", ["rm -f handrail.toml", "mv handrail.toml x", "echo 'rules = []' > handrail.toml"])
async def test_bash_cannot_change_the_workspace_file_even_if_rules_allow_everything(
    tmp_path: Path, command: str
) -> None:
    own = 'rules = ["allow bash"]\n'
    through = f"/bin/bash -c '{command.replace(chr(39), chr(34))}'"
    async with opened(tmp_path, own, ["allow *", f"allow bash {through}", "allow fs.*"], trusted=True) as kernel:
        session = await kernel.session()
        answer = await session.call("bash", {"command": through})
        assert not answer.ok or answer.data["exit_code"] != 0, answer
    assert (tmp_path / "ws" / "handrail.toml").read_text() == own
    assert [path.name for path in (tmp_path / "ws").iterdir()] == ["handrail.toml"]


async def test_a_joining_process_applies_its_rules_and_is_refused_settings_it_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = 'rules = ["ask write", "allow edit"]\n'
    async with opened(tmp_path, own):
        other = tmp_path / "other.toml"
        other.write_text('rules = ["allow write notes/**"]\n')
        monkeypatch.setenv("HANDRAIL_RULES", "deny write notes/b.txt")
        workspace, state = tmp_path / "ws", tmp_path / "state"
        with pytest.raises(UsageError, match=r"Cannot set limits\.grace_ms"):
            async with open_kernel(workspace, settings=["limits.grace_ms=9"], state=state, config=other):
                raise AssertionError("it joined")
        async with open_kernel(workspace, settings=["agent=default"], state=state, config=other) as joined:
            session = await joined.session()
            assert (await session.call("write", {"path": "notes/a.txt", "content": "x"})).ok
            assert (await session.call("write", {"path": "notes/b.txt", "content": "x"})).error_kind == "denied"
            assert (await session.call("write", {"path": "handrail.toml", "content": "x"})).error_kind == "denied"
