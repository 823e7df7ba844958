"""Agents in the configuration folder: found, refused if others can write there, and their tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from handrail.contract.agent_manifest import AgentManifest, CheckedAgentManifest
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.tool.requires import Requires, ShellRequires
from handrail.contract.tool_generation import Generation
from handrail.registry.agent_folders import (
    find_unknown_tool_names,
    load_agent_manifest,
    load_agent_manifests,
    select_tools_of_agent,
)
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import PassedToolsSource
from handrail.registry.sources.tool_sources import AgentToolSources

from .conftest import CONFINING, ExecutableFixture, SimpleTool


def put(config: Path, agent: str, text: str | None = None, mode: int = 0o644) -> Path:
    folder = config / "agents" / agent
    folder.mkdir(parents=True, exist_ok=True)
    for made in (folder, folder.parent):
        made.chmod(0o755)
    file = folder / "agent.toml"
    file.write_text(f'id = "{agent}"\n' if text is None else text)
    file.chmod(mode)
    return file


def generation(*tool_ids: str, tier: SandboxTier = CONFINING) -> Generation:
    return load_generation([PassedToolsSource(tuple(SimpleTool(tool_id) for tool_id in tool_ids))], tier=tier)


def agent(**fields: object) -> AgentManifest:
    return AgentManifest.model_validate({"id": "reviewer", **fields})


def only_fault(checked: CheckedAgentManifest) -> str:
    [fault] = checked.faults
    return str(fault)


def test_the_default_agent_with_every_tool_exists_without_any_folder(tmp_path: Path) -> None:
    assert load_agent_manifests(tmp_path / "nowhere") == {"default": CheckedAgentManifest(AgentManifest(id="default"))}


def test_each_folder_with_a_manifest_defines_an_agent_and_the_default_comes_first(tmp_path: Path) -> None:
    for name in ("alpha", "zeta"):
        put(tmp_path, name)
    (tmp_path / "agents" / ".git").mkdir()
    (tmp_path / "agents" / "notes.txt").write_text("")
    found = load_agent_manifests(tmp_path)
    assert list(found) == ["default", "alpha", "zeta"]
    assert not any(checked.faults for checked in found.values())


def test_a_manifest_for_the_default_agent_replaces_its_defaults(tmp_path: Path) -> None:
    file = put(tmp_path, "default", 'id = "default"\ntools = ["read"]\n')
    assert load_agent_manifest(tmp_path, "default") == CheckedAgentManifest(AgentManifest(tools=("read",)), str(file))


def test_only_the_default_agent_may_have_a_tools_folder_without_a_manifest(tmp_path: Path) -> None:
    for name in ("default", "other"):
        (tmp_path / "agents" / name / "tools").mkdir(parents=True)
    assert load_agent_manifest(tmp_path, "default").faults == ()
    assert "agent.toml: is missing" in only_fault(load_agent_manifest(tmp_path, "other"))


def test_a_faulty_agent_does_not_affect_other_agents(tmp_path: Path) -> None:
    put(tmp_path, "broken", 'id = "broken"\ntols = []\nprompt = 1\n')
    put(tmp_path, "sound")
    found = load_agent_manifests(tmp_path)
    assert [fault.location for fault in found["broken"].faults] == ["prompt", "tols"]
    assert found["sound"].faults == ()


def test_the_error_for_an_unknown_agent_names_the_nearest_and_all_agents(tmp_path: Path) -> None:
    put(tmp_path, "reviewer")
    with pytest.raises(
        UsageError, match=r"'reviewr' does not exist. Did you mean 'reviewer'\? Agents: default, reviewer"
    ):
        load_agent_manifest(tmp_path, "reviewr")
    with pytest.raises(UsageError, match=r"Its manifest would be .*agents/zzz/agent.toml"):
        load_agent_manifest(tmp_path, "zzz")


@pytest.mark.parametrize("name", ["../reviewer", "a/b", "", ".", "a\n", "tools/..", "x" * 65, "default\0"])
def test_a_name_that_is_not_an_agent_id_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, "reviewer")
    with pytest.raises(UsageError, match="is not an agent's id"):
        load_agent_manifest(tmp_path, name)


@pytest.mark.parametrize("loose", ["agents/reviewer/agent.toml", "agents/reviewer", "agents"])
def test_an_agent_writable_by_other_users_is_refused(tmp_path: Path, loose: str) -> None:
    put(tmp_path, "reviewer")
    (tmp_path / loose).chmod(0o777)
    assert "is writable by" in only_fault(load_agent_manifest(tmp_path, "reviewer"))


def test_a_manifest_that_is_a_link_pipe_or_folder_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text('id = "linked"')
    for name in ("linked", "pipe", "folder"):
        (tmp_path / "agents" / name).mkdir(parents=True)
    (tmp_path / "agents" / "linked" / "agent.toml").symlink_to(elsewhere)
    os.mkfifo(tmp_path / "agents" / "pipe" / "agent.toml")
    (tmp_path / "agents" / "folder" / "agent.toml").mkdir()
    found = load_agent_manifests(tmp_path)
    assert "is a link" in only_fault(found["linked"])
    assert "is not a regular file" in only_fault(found["pipe"])
    assert "is not a regular file" in only_fault(found["folder"])


def test_an_agents_folder_in_a_workspace_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "inside")
    assert "overlaps the workspace" in only_fault(load_agent_manifests(tmp_path, [str(tmp_path)])["inside"])


def test_a_dangling_link_in_the_agents_folder_is_reported_as_a_faulty_agent(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "gone").symlink_to(tmp_path / "nowhere")
    assert "is not a folder" in only_fault(load_agent_manifests(tmp_path)["gone"])


# ── the tools it names ───────────────────────────────────────────────────────────────────────────


def test_an_agent_has_only_the_tools_that_it_names_and_their_aliases() -> None:
    everything = generation("notes.add", "notes.list", "mail.send", "clock")
    mine = select_tools_of_agent(agent(tools=("notes.*", "clock"), aliases={"now": "clock"}), everything, CONFINING)
    assert list(mine.entries) == ["notes.add", "notes.list", "clock"]
    assert mine.resolve_tool_name("mail.send") is None
    assert mine.resolve_tool_name("mail__send") is None
    entry = mine.resolve_tool_name("now")
    assert entry is not None
    assert entry.id == "clock"
    assert mine.number == everything.number


def test_each_name_that_matches_no_tool_is_a_fault_that_names_its_key() -> None:
    faulty = agent(
        tools=("notes.*", "mial.send", "web*"),
        core=("notes.add", "clock", "nothing"),
        aliases={"a": "nots.add", "b": "mail.send", "clock": "notes.add"},
        requires={"tools": {"bash": {"net": {"hosts": ("pypi.org",)}}}},
    )
    found = dict(find_unknown_tool_names(faulty, generation("notes.add", "mail.send", "clock")))
    assert found == {
        "tools[1]": "tool 'mial.send' does not exist; did you mean mail.send?",
        "tools[2]": "'web*' matches no tool",
        "core[1]": "'clock' is not in this agent's tools; add it to tools, or remove it here",
        "core[2]": "tool 'nothing' does not exist",
        "requires.tools.bash": "tool 'bash' does not exist",
        "aliases.a": "tool 'nots.add' does not exist; did you mean notes.add?",
        "aliases.b": "'mail.send' is not in this agent's tools; add it to tools, or remove it here",
        "aliases.clock": "is already the name of the tool 'clock'; choose another alias",
    }


def test_an_invalid_pattern_is_not_reported_as_an_unknown_tool_name() -> None:
    assert list(find_unknown_tool_names(agent(tools=("[z-a]",), core=("clock",)), generation("clock"))) == []


def test_the_fault_for_a_wire_name_suggests_the_tool_id() -> None:
    [(place, problem)] = find_unknown_tool_names(agent(tools=("mail__send",)), generation("mail.send", "mail.seen"))
    assert (place, problem) == ("tools[0]", "tool 'mail__send' does not exist; did you mean mail.send?")


def test_hosts_that_an_agent_grants_to_a_tool_apply_only_to_that_tool() -> None:
    everything = generation("fetch", "other")
    given = agent(requires={"tools": {"fetch": {"net": {"hosts": ("pypi.org",)}}}})
    mine = select_tools_of_agent(given, everything, CONFINING)
    assert mine.entries["fetch"].spec.requires.net.hosts == ("pypi.org",)
    assert mine.entries["fetch"].definition_hash != everything.entries["fetch"].definition_hash
    assert mine.entries["other"] is everything.entries["other"]
    assert everything.entries["fetch"].spec.requires.net.hosts == ()


def test_a_tool_limited_to_hosts_is_withheld_with_the_reason_if_confinement_is_impossible() -> None:
    given = agent(requires={"tools": {"fetch": {"net": {"hosts": ("pypi.org",)}}}})
    program = SimpleTool("fetch", requires=Requires(shell=(ShellRequires(cmd="curl"),)))
    everything = load_generation([PassedToolsSource((program,))], tier=CONFINING)
    assert everything.entries["fetch"].unavailable_reason is None
    withheld = select_tools_of_agent(given, everything, CONFINING).entries["fetch"].unavailable_reason
    assert withheld is not None
    assert "pypi.org" in withheld


def sources(place: ExecutableFixture, text: str, *given: str) -> AgentToolSources:
    config = place.tools.parent
    put(config, "reviewer", text)
    own = config / "agents" / "reviewer" / "tools"
    tools = tuple(SimpleTool(tool_id) for tool_id in given)
    checked = load_agent_manifest(config, "reviewer", [str(place.workspace)])
    return AgentToolSources(place.tools, own, str(place.workspace), place.confinement(), tools, checked)


def test_an_agents_generation_has_its_named_tools_and_lists_all_other_tool_ids(place: ExecutableFixture) -> None:
    found = sources(
        place, 'id = "reviewer"\ntools = ["read", "notes.*"]', "notes.add", "mail.send"
    ).load_generation_of_agent(7)
    assert list(found.entries) == ["read", "notes.add"]
    assert found.number == 7
    assert {"bash", "write", "mail.send"} <= found.other_tool_ids
    assert not {"read", "notes.add"} & found.other_tool_ids


def test_faults_of_an_agent_manifest_and_its_tool_folders_are_reported_together(place: ExecutableFixture) -> None:
    (place.tools / "faulty.json").write_text("{")
    with pytest.raises(LoadError) as caught:
        sources(place, 'id = "reviewer"\npromt = "x"\ntools = ["raed"]').load_generation_of_agent(1)
    assert [fault.location for fault in caught.value.diagnostics] == ["promt", ""]
    (place.tools / "faulty.json").unlink()
    with pytest.raises(LoadError) as caught:
        sources(place, 'id = "reviewer"\npromt = "x"\ntools = ["raed"]').load_generation_of_agent(1)
    assert [fault.location for fault in caught.value.diagnostics] == ["promt", "tools[0]"]
