"""The agent manifest: valid forms, and all faults in one report with their keys."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.agent_manifest import (
    MAX_AGENT_BYTES,
    AgentAdditionalRoot,
    AgentManifest,
    CheckedAgentManifest,
    check_agent_manifest_table,
    parse_agent_manifest,
)
from handrail.contract.tool.requires import ShellRequires

WHOLE = b"""
id = "reviewer"
description = "Reads a change and comments on it."
role = "subagent"
prompt = "Comment; change nothing."
model = "openai:gpt-5"
tools = ["read", "grep", "git.*"]
core = ["read"]
rules = ["deny fs.write", "allow bash git log -*"]

[requires]
fs.read = ["{workspace}"]
shell = [{ cmd = "git", args = ["log"] }]

[requires.tools.bash.net]
hosts = ["pypi.org"]

[[roots]]
path = "~/specs"

[[roots]]
path = "/srv/notes"
access = "write"

[budgets]
turns = 20
tokens = 100_000
seconds = 90
calls = 40
shared = false

[delegation]
fs.write = ["reviews/**"]
secrets = ["notes_key"]
can_ask_user = true
agents = ["writer*"]

[aliases]
"choir.fs.read" = "read"
"""


def parsed(text: str | bytes, expected_id: str = "reviewer") -> CheckedAgentManifest:
    return parse_agent_manifest(text.encode() if isinstance(text, str) else text, "agent.toml", expected_id)


def problems(text: str | bytes) -> dict[str, str]:
    checked = parsed(text)
    assert all(fault.source == "agent.toml" for fault in checked.faults)
    return {fault.location: fault.problem for fault in checked.faults}


def test_an_agent_manifest_is_read_with_every_field() -> None:
    checked = parsed(WHOLE)
    assert checked.faults == ()
    agent = checked.manifest
    assert (agent.id, agent.prompt, agent.model) == ("reviewer", "Comment; change nothing.", "openai:gpt-5")
    assert [agent.has_tool(name) for name in ("read", "git.push", "bash", "gitlab.push")] == [True, True, False, False]
    assert agent.rules == ("deny fs.write", "allow bash git log -*")
    assert agent.requires.shell == (ShellRequires(cmd="git", args=("log",)),)
    assert agent.requires.tools["bash"].net.hosts == ("pypi.org",)
    assert agent.roots == (AgentAdditionalRoot(path="~/specs"), AgentAdditionalRoot(path="/srv/notes", access="write"))
    assert agent.budgets.model_dump() == {
        "turns": 20,
        "tokens": 100_000,
        "seconds": 90.0,
        "calls": 40,
        "context": None,
        "compaction": None,
        "repeat_reads": None,
        "shared": False,
    }
    assert agent.aliases == {"choir.fs.read": "read"}
    assert agent.core == ("read",)
    assert (agent.role, agent.delegation.fs.read, agent.delegation.fs.write) == ("subagent", None, ("reviews/**",))
    assert (agent.delegation.secrets, agent.delegation.can_ask_user) == (("notes_key",), True)


def test_an_agent_accepts_delegation_only_if_its_role_and_each_caller_permit_it() -> None:
    default, writer = AgentManifest(), parsed('id = "writer"\nrole = "all"', "writer").manifest
    assert default.effective_role == "all"
    assert not parsed('id = "reviewer"').manifest.accepts_delegation_from(
        default
    )  # its rules are in nobody's reach unsaid
    assert writer.accepts_delegation_from(default)
    reviewer = parsed(WHOLE).manifest
    assert writer.accepts_delegation_from(reviewer)
    assert not default.accepts_delegation_from(reviewer)
    assert default.accepts_delegation_from(writer) and not default.accepts_delegation_from(writer, reviewer)
    assert not default.accepts_delegation_from(writer, default, reviewer)


def test_each_delegation_fault_is_reported_at_its_own_key() -> None:
    found = problems(
        """
        id = "reviewer"
        role = "subagnt"
        [delegation]
        fs.read = ["{worspace}"]
        capabilities = ["fly"]
        agents = ["a b"]
        presense = true
        """
    )
    assert set(found) == {
        *("role", "delegation.fs.read[0]", "delegation.capabilities[0]", "delegation.agents[0]", "delegation.presense"),
    }


def test_a_manifest_with_only_an_id_has_every_tool_and_default_values() -> None:
    checked = parsed('id = "reviewer"')
    assert checked.faults == ()
    assert checked.manifest == AgentManifest(id="reviewer")
    assert checked.manifest.has_tool("anything.at.all")


def test_an_empty_tool_list_allows_no_tool() -> None:
    assert not parsed('id = "reviewer"\ntools = []').manifest.has_tool("read")


def test_all_manifest_faults_are_reported_together_with_key_and_nearest_name() -> None:
    found = problems(
        b"""
        id = "reviewr"
        descripton = "x"
        prompt = 3
        model = "gpt"
        tools = ["git.*", 5, "a b", "[z-a]"]
        core = ["read", 1]
        rules = ["deny x", 7]
        roots = [{ path = "rel" }, { path = "/a", access = "wirte" }, { acess = "read" }, 5, { path = "/a/../b" }]
        [requires]
        net.hosts = ["http://x", "ok.org", 1979-05-27]
        capabilities = ["fly"]
        fs.read = ["{worspace}"]
        shell = [{ cmd = "" }]
        tools.bash.fs.read = ["."]
        tools."a.b".net.hosts = ["x y"]
        [budgets]
        turns = true
        tokens = 0
        seconds = inf
        calls = "3"
        tunrs = 4
        [aliases]
        "bad alias" = "read"
        x = 3
        bash = "read"
        """
    )
    expected = {
        "id": "use the same name for both",
        "descripton": "did you mean 'description'?",
        "prompt": "is 3",
        "model": "expected PROVIDER:NAME",
        "tools[1]": "is 5",
        "tools[2]": "is not a pattern of tool ids",
        "tools[3]": "runs backwards",
        "core[1]": "is 1",
        "rules[1]": "is 7",
        "roots[0].path": "an absolute path",
        "roots[1].access": "expected 'read' or 'write'",
        "roots[2].path": "is missing",
        "roots[2].acess": "did you mean 'access'?",
        "roots[3]": "is 5",
        "roots[4].path": "contains '..'",
        "requires.net.hosts[0]": "not a host pattern",
        "requires.net.hosts[2]": "is a date",
        "requires.capabilities[0]": "unknown capability 'fly'",
        "requires.fs.read[0]": "unknown variable",
        "requires.shell[0].cmd": "is ''",
        "requires.tools.bash.fs": "unknown key; available: net",
        "requires.tools['a.b'].net.hosts[0]": "not a host pattern",
        "budgets.turns": "is True",
        "budgets.tokens": "is 0",
        "budgets.seconds": "finite number",
        "budgets.calls": "is '3'",
        "budgets.tunrs": "did you mean 'turns'?",
        "aliases['bad alias']": "is not an id",
        "aliases.x": "is 3",
        "aliases.bash": "locked id",
    }
    assert found.keys() == expected.keys()
    for place, part in expected.items():
        assert part in found[place], place


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"id = ", "is not TOML"),
        (b"\xff", "is not UTF-8"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"x = 1" + b"0" * 5_000, "is not TOML"),
        (b"#" * (MAX_AGENT_BYTES + 1), "larger than the maximum of 256 KiB"),
    ],
)
def test_a_manifest_that_is_not_a_table_is_one_fault(content: bytes, part: str) -> None:
    [fault] = parsed(content).faults
    assert part in fault.problem
    assert fault.location == ""


def test_the_fault_for_a_missing_id_names_the_expected_folder_name() -> None:
    assert problems("prompt = 'x'") == {"id": "is missing; expected id = 'reviewer', the name of its folder"}


def test_a_table_with_too_deep_nesting_is_reported_as_a_fault() -> None:
    assert any("nested too deeply" in problem for problem in problems(b"a" + b".a" * 3_000 + b" = 1").values())


def test_a_fault_that_follows_from_another_fault_is_not_reported() -> None:
    checked = parsed('id = "reviewer"\nroots = [5, { path = "/a" }]\ncore = [1, "x"]')
    later = checked.with_added_faults(
        [("roots[0].path", "a"), ("roots[1].path", "b"), ("core[0]", "c"), ("core[1]", "d")]
    )
    assert [fault.location for fault in later.faults] == ["core[0]", "roots[0]", "roots[1].path", "core[1]"]


# ── whatever is written there ────────────────────────────────────────────────────────────────────

_SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.dates(),
    st.datetimes(),
    st.sampled_from(["read", "*", "deny bash", "~/x", "/", "{workspace}", "\0", "[z-a]", "bash", "openai:x", ""]),
    st.text(alphabet=string.printable, max_size=8),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["path", "access", "net", "hosts", "fs", "read", "tools", "bash", "cmd", "args", "turns"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
_TABLES = st.dictionaries(st.sampled_from([*AgentManifest.model_fields, "promt", "x"]), _VALUES, max_size=8)


@given(_TABLES)
def test_any_table_yields_a_manifest_or_faults_and_never_an_exception(table: dict[str, Any]) -> None:
    checked = check_agent_manifest_table(table, "agent.toml", "reviewer")
    unknown = [key for key in table if key not in AgentManifest.model_fields]
    assert all(any(fault.location == key for fault in checked.faults) for key in unknown)
    if not checked.faults:
        data = checked.manifest.to_data()
        again = check_agent_manifest_table(
            {key: value for key, value in data.items() if key in table}, "agent.toml", "reviewer"
        )
        assert again.faults == ()
        assert again.manifest == checked.manifest


@given(st.binary(max_size=400))
def test_any_bytes_are_parsed_to_a_manifest_or_to_faults(content: bytes) -> None:
    checked = parse_agent_manifest(content, "agent.toml", "reviewer")
    assert checked.faults or checked.manifest.id == "reviewer"


@given(st.lists(st.sampled_from(WHOLE.decode().splitlines()), max_size=25), st.text(max_size=3))
def test_any_shuffled_manifest_lines_are_parsed_to_a_manifest_or_to_faults(lines: list[str], extra: str) -> None:
    checked = parse_agent_manifest("\n".join([*lines, extra]).encode("utf-8", "replace"), "agent.toml", "reviewer")
    assert checked.faults or checked.manifest.id == "reviewer"
