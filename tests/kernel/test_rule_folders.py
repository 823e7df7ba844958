"""A rule for one workspace matches only paths that a call of it can access."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handrail import LoadError, open_kernel

pytestmark = pytest.mark.proves("P-18")


@pytest.mark.parametrize("rule", ["allow fs.write /etc/hosts", "allow fs.read ~/.ssh/**", "allow fs.* /nowhere/**"])
async def test_a_rule_about_a_path_outside_all_session_folders_is_refused(tmp_path: Path, rule: str) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "handrail.toml").write_text("")
    with pytest.raises(LoadError, match="outside all folders of the session"):
        async with open_kernel(
            tmp_path / "ws", state=tmp_path / "state", config=tmp_path / "handrail.toml", rules=[rule]
        ):
            pass


async def test_the_users_configuration_may_contain_rules_about_other_workspaces(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "handrail.toml").write_text('rules = ["allow fs.write /elsewhere/**"]\n')
    own = f"allow fs.write {tmp_path}/ws/src/**"
    async with open_kernel(
        tmp_path / "ws", state=tmp_path / "state", config=tmp_path / "handrail.toml", rules=[own, "deny fs.read /**"]
    ) as kernel:
        explained = await kernel.explain_call("write", {"path": "src/a", "content": ""})
        assert explained.action == "allow" and explained.rule is not None and explained.rule.text == own


async def test_a_rule_set_in_an_untrusted_workspace_file_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "handrail.toml").write_text("")
    (tmp_path / "ws" / "handrail.toml").write_text('rules = ["@developer", "ask fs.write x/**"]\n')
    call = ("write", {"path": "a", "content": ""})
    options: dict[str, Any] = {"state": tmp_path / "state", "config": tmp_path / "handrail.toml"}
    async with open_kernel(tmp_path / "ws", **options) as kernel:
        assert (await kernel.explain_call(*call)).action == "ask"
        assert kernel.config.untrusted_workspace_warning is not None
    async with open_kernel(tmp_path / "ws", **options, rules=["@developer"]) as kernel:
        assert (await kernel.explain_call(*call)).action == "allow"
    with pytest.raises(LoadError, match="Did you mean '@developer'"):
        async with open_kernel(tmp_path / "ws", **options, rules=["@develper"]):
            pass
