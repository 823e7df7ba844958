"""``handrail doctor``: each layer of confinement, what runs without one, and the additions of each tool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.kernel.test_configured import put_tool
from tests.store.places import Place

from handrail.config import MergedConfiguration, load_configuration
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.sandbox_protocol import SandboxMechanism, SandboxTier
from handrail.kernel.doctor import DoctorCheck, machine_checks, run_doctor_checks
from handrail.kernel.doctor.machine_checks import check_sandbox
from handrail.kernel.doctor.workspace_checks import CapabilityReport, compute_agent_capabilities
from handrail.sandbox import tier_probe


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "handrail.toml").touch()
    return Place.beneath(tmp_path)


def config_of(place: Place, text: str = "") -> Path:
    file = place.workspace.parent / "config" / "handrail.toml"
    file.write_text(text)
    return file


def checked(place: Place, text: str = "") -> dict[str, DoctorCheck]:
    return {check.name: check for check in run_doctor_checks(place.workspace, place.state, config_of(place, text))}


def agent(place: Place, name: str = "default", text: str = "") -> CapabilityReport:
    config: MergedConfiguration = load_configuration(config_of(place, text), environment={})
    return compute_agent_capabilities(config, place.folders, name)


@pytest.mark.proves("S-08")
def test_the_doctor_shows_the_probe_result_of_each_sandbox_mechanism(place: Place) -> None:
    tier, found = tier_probe.probe_tier(), checked(place)
    for one in tier.mechanisms:
        shown = found[f"sandbox {one.name}"]
        assert (shown.detail, shown.state == "ok") == (one.detail, one.is_enforced is True)
        assert shown.state == "ok" or shown.remedy or one.is_enforced is None


def test_a_missing_mechanism_is_a_problem_without_a_sandbox_and_otherwise_a_warning(place: Place) -> None:
    lacking = (
        SandboxMechanism("namespaces", True, "there"),
        SandboxMechanism("landlock", False, "not there", "get it"),
        SandboxMechanism("limits", None, "not tried"),
    )
    for name, state in (("none", "problem"), ("bubblewrap without landlock", "warning")):
        found = {one.name: one for one in check_sandbox(SandboxTier(name, "", "", lacking), str(place.workspace))}
        assert (found["sandbox landlock"].state, found["sandbox landlock"].remedy) == (state, "get it")
        assert (found["sandbox namespaces"].state, found["sandbox limits"].state) == ("ok", "warning")


@pytest.mark.skipif(os.geteuid() != 0, reason="of root only is it a question")
def test_doctor_reports_which_users_rights_programs_have(place: Place) -> None:
    before = checked(place)
    assert before["sandbox identity"].state == "warning"
    assert "root" in before["sandbox identity"].detail and "ordinary user" in before["sandbox identity"].remedy
    os.chown(place.workspace, 65533, 65533)
    after = checked(place)
    assert after["sandbox identity"].state == after["sandbox processes"].state == "ok"
    assert "65533" in after["sandbox identity"].detail


@pytest.mark.proves("S-08")
def test_doctor_names_unconfined_tools_and_open_unix_sockets(place: Place) -> None:
    found = checked(place, '[sandbox]\nunconfined = ["bash", "nosuch"]\nunix_sockets = true\n')
    assert found["unconfined tools"].state == "warning" and "bash, nosuch" in found["unconfined tools"].detail
    assert found["unix sockets"].state == "warning"
    assert "unknown tools: nosuch" in found["sandbox.unconfined"].detail
    assert "sandbox.unconfined" not in checked(place, '[sandbox]\nunconfined = ["bash"]\n')


def test_doctor_reports_an_unknown_sandbox_provider_and_lists_the_available_ones(place: Place) -> None:
    found = checked(place, '[sandbox]\nprovider = "nosuch"\n')
    assert found["sandbox provider"].state == "problem" and "to one of: machine" in found["sandbox provider"].detail


@pytest.mark.proves("K-10")
def test_a_new_tool_extends_the_agents_capability_set_and_changes_no_other_tool(place: Place) -> None:
    before = agent(place)
    tools = place.workspace.parent / "config" / "tools"
    put_tool(tools, "weather", requires={"net": {"hosts": ["api.example.org"]}, "fs": {"read": ["{workspace}"]}})
    put_tool(tools, "git_look", requires={"shell": [{"cmd": "git", "args": ["log", {"prefix": "-"}]}]})
    after = agent(place)
    added = {"net.fetch api.example.org", "shell.run git log -…"}
    assert set(after.whole) - set(before.whole) == added and set(before.whole) < set(after.whole)
    shares = {tool.id: tool for tool in after.tools}
    assert shares["weather"].adds == ("net.fetch api.example.org",)
    assert f"fs.read {place.workspace}" in shares["weather"].has
    for tool in before.tools:
        assert shares[tool.id].has == tool.has and shares[tool.id].adds == tool.adds


@pytest.mark.proves("K-10")
def test_an_agent_check_lists_own_capabilities_tools_and_the_ceiling_separately(place: Place) -> None:
    folder = place.workspace.parent / "config" / "agents" / "reviewer"
    folder.mkdir(parents=True)
    (folder / "agent.toml").write_text(
        'id = "reviewer"\ntools = ["read", "bash"]\n[requires.net]\nhosts = ["docs.example.org"]\n'
        '[requires.tools.bash.net]\nhosts = ["pypi.example.org"]\n'
    )
    found = agent(place, "reviewer", '[ceiling.net]\nhosts = ["docs.example.org"]\n')
    assert found.own == ("net.fetch docs.example.org",)
    assert {tool.id: "net.fetch pypi.example.org" in tool.adds for tool in found.tools} == {"read": False, "bash": True}
    assert found.ceiling == ("net.fetch docs.example.org",)
    (folder / "agent.toml").write_text('id = "reviewer"\ntools = ["reed"]\n')
    with pytest.raises(LoadError, match="reed"):
        agent(place, "reviewer")
    with pytest.raises(UsageError, match="'nobody' does not exist"):
        agent(place, "nobody")


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (("bubblewrap 0.8.0", "bubblewrap 0.12.0"), "warning"),
        (("bubblewrap 0.11.0",), "warning"),
        (("something else",), "warning"),
        (("bubblewrap 0.12.0",), "ok"),
        (("bubblewrap 0.12.1", "bubblewrap 1.0"), "ok"),
    ],
)
def test_the_doctor_names_an_old_bubblewrap_with_its_version_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: tuple[str, ...], state: str
) -> None:
    found: list[str] = []
    for number, words in enumerate(said):
        program = tmp_path / f"bwrap{number}"
        program.write_text(f"#!/bin/sh\necho {words}\n")
        program.chmod(0o755)
        found.append(str(program))
    monkeypatch.setattr(machine_checks, "find_bubblewrap_programs", lambda: iter(found))
    (check,) = machine_checks._check_bubblewrap()  # pyright: ignore[reportPrivateUsage]
    assert check.state == state
    assert all(f"{program} ({words})" in check.detail for program, words in zip(found, said, strict=True))
    if state == "warning":
        assert "CVE-2026-87766" in check.detail and found[0] in check.detail.partition("fixed in ")[2]
        assert "0.12" in check.remedy
