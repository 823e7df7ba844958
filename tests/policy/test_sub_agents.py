"""Rights of a sub-agent: never more than any of its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.agent_manifest import AgentManifest, DelegableHosts, DelegablePaths, DelegationPolicy
from handrail.contract.tool.requires import (
    Capability,
    CapabilityLayer,
    CapabilitySet,
    FsRequires,
    NetRequires,
    PathVariables,
    Requires,
    ShellRequires,
    expand_requires,
    unite_capability_layers,
)
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.call_targets import compute_call_capabilities

VARIABLES = PathVariables(workspace=("/ws", "/further"), ad_hoc=("/out",))
_PATHS = st.lists(
    st.sampled_from(["{workspace}", "src", "src/*.py", "/etc", "{ad-hoc}", "{user-data}", "**"]), max_size=3
)


def _requires(read: list[str], write: list[str], hosts: list[str], programs: list[str], named: list[str]) -> Requires:
    return Requires(
        fs=FsRequires(read=tuple(read), write=tuple(write)),
        net=NetRequires(hosts=tuple(hosts)),
        shell=tuple(ShellRequires(cmd=program) for program in programs),
        capabilities=tuple(named),
    )


def _layer(requires: Requires) -> CapabilityLayer:
    return expand_requires(requires, VARIABLES, "layer")


_REQUIRES = st.builds(
    _requires,
    _PATHS,
    _PATHS,
    st.lists(st.sampled_from(["*", "*.example.org", "api.example.org", "a.example.org:8443"]), max_size=2),
    st.lists(st.sampled_from(["*", "git", "make"]), max_size=2),
    st.lists(st.sampled_from(["ask", "state", "call", "vcs.config"]), max_size=3, unique=True),
)
_LAYERS = st.builds(_layer, _REQUIRES)
_EVERYTHING = Requires(
    fs=FsRequires(read=("/**", "/"), write=("/**", "/")),
    net=NetRequires(hosts=("*", "*:*")),
    shell=(ShellRequires(cmd="*"),),
    capabilities=("ask", "state", "call", "vcs.config"),
)
TOUCHES: list[tuple[Capability, str | tuple[str, ...]]] = [
    ("fs.read", "/ws/src/a.py"),
    ("fs.read", "/further/x"),
    ("fs.read", "/out/1"),
    ("fs.read", "/etc/passwd"),
    ("fs.write", "/ws/src/a.py"),
    ("fs.write", "/etc/passwd"),
    ("net.fetch", "api.example.org:443"),
    ("net.fetch", "a.example.org:8443"),
    ("net.fetch", "other.org:443"),
    ("shell.run", ("git", "status")),
    ("shell.run", ("rm", "x")),
]


def _optional(patterns: list[str]) -> st.SearchStrategy[tuple[str, ...] | None]:
    return st.none() | st.lists(st.sampled_from(patterns), max_size=2).map(tuple)


_DELEGABLE = st.builds(
    DelegationPolicy,
    fs=st.builds(DelegablePaths, read=_optional(["{workspace}", "src", "/etc"]), write=_optional(["src", "**"])),
    net=st.builds(DelegableHosts, hosts=_optional(["*", "api.example.org"])),
    shell=st.none() | st.just((ShellRequires(cmd="git"),)),
    capabilities=_optional(["ask", "state"]),
    can_ask_user=st.booleans(),
)


def _named(delegation: DelegationPolicy) -> CapabilitySet:
    return CapabilitySet((expand_requires(delegation.to_requires(), VARIABLES, "named"),))


@pytest.mark.proves("P-12")
@given(_LAYERS, _DELEGABLE, _LAYERS, st.none() | _LAYERS)
def test_a_sub_agent_has_only_capabilities_that_delegation_manifest_and_ceiling_allow(
    parent: CapabilityLayer, delegation: DelegationPolicy, declared: CapabilityLayer, ceiling: CapabilityLayer | None
) -> None:
    manifest = AgentManifest(id="parent", delegation=delegation)
    handed = CallAuthorizer(VARIABLES, parent, ceiling=ceiling).compute_delegable_capabilities(manifest)
    child = compute_call_capabilities(ToolSpec("t", "Do.", requires=_EVERYTHING), VARIABLES, declared, ceiling, handed)
    bounds = [parent, declared, *([] if ceiling is None else [ceiling])]
    said: dict[Capability, bool] = {
        "fs.read": delegation.fs.read is not None,
        "fs.write": delegation.fs.write is not None,
        "net.fetch": delegation.net.hosts is not None,
        "shell.run": delegation.shell is not None,
    }
    for capability, target in TOUCHES:
        every = all(CapabilitySet((bound,)).allows(capability, target) for bound in bounds)
        cut = said[capability] and not _named(delegation).allows(capability, target)
        assert child.allows(capability, target) is (every and not cut)
    for name in ("ask", "state", "call", "vcs.config"):
        every = all(CapabilitySet((bound,)).has_capability(name) for bound in bounds)
        cut = delegation.capabilities is not None and name not in delegation.capabilities
        assert child.has_capability(name) is (every and not cut and (delegation.can_ask_user or name != "ask"))


@pytest.mark.proves("P-12")
@given(_LAYERS, _DELEGABLE, _LAYERS, _DELEGABLE, _LAYERS, _REQUIRES)
def test_calls_of_nested_sub_agents_never_exceed_the_capabilities_above_them(
    parent: CapabilityLayer,
    by_parent: DelegationPolicy,
    child: CapabilityLayer,
    by_child: DelegationPolicy,
    grandchild: CapabilityLayer,
    tool: Requires,
) -> None:
    top = CallAuthorizer(VARIABLES, parent)
    first = top.compute_delegable_capabilities(AgentManifest(id="a", delegation=by_parent))
    middle = CallAuthorizer(VARIABLES, child).restrict_to_delegation(first)
    second = middle.compute_delegable_capabilities(AgentManifest(id="b", delegation=by_child))
    call = compute_call_capabilities(ToolSpec("t", "Do.", requires=tool), VARIABLES, grandchild, None, second)
    for capability, target in TOUCHES:
        if call.allows(capability, target):
            assert second.allows(capability, target)
        if second.allows(capability, target):
            assert first.allows(capability, target)
            assert CapabilitySet((child,)).allows(capability, target)
        if first.allows(capability, target):
            assert CapabilitySet((parent,)).allows(capability, target)
    assert not top.compute_delegable_capabilities(AgentManifest(id="a")).has_capability("ask")


def test_a_parent_without_capabilities_delegates_no_capability() -> None:
    nothing = CallAuthorizer(VARIABLES, _layer(_EVERYTHING)).restrict_to_delegation(CapabilitySet())
    assert nothing.compute_delegable_capabilities(AgentManifest(id="a")) == CapabilitySet()
    call = compute_call_capabilities(
        ToolSpec("t", "Do.", requires=_EVERYTHING), VARIABLES, _layer(_EVERYTHING), None, CapabilitySet()
    )
    assert not any(call.allows(capability, target) for capability, target in TOUCHES)


@pytest.mark.proves("K-10")
@given(_REQUIRES, _REQUIRES, _LAYERS)
def test_an_added_tool_extends_its_agent_but_does_not_widen_other_tools(
    mine: Requires, others: Requires, own: CapabilityLayer
) -> None:
    before = compute_call_capabilities(ToolSpec("a", "A.", requires=mine), VARIABLES, own)
    after = compute_call_capabilities(
        ToolSpec("a", "A.", requires=mine),
        VARIABLES,
        unite_capability_layers("a", [own, expand_requires(others, VARIABLES, "b")]),
    )
    declared = CapabilitySet((expand_requires(mine, VARIABLES, "a"),))
    for capability, target in TOUCHES:
        if before.allows(capability, target):
            assert after.allows(capability, target)
        if after.allows(capability, target):
            assert declared.allows(capability, target)


@pytest.mark.proves("K-09")
def test_a_variable_expands_to_each_of_its_roots_and_an_empty_variable_to_none() -> None:
    layer = expand_requires(
        Requires(fs=FsRequires(read=("{workspace}/src", "{user-data}"), write=("{user-data}/x",))), VARIABLES, "t"
    )
    assert layer.fs_read == ("/ws/src", "/further/src")
    assert layer.fs_write == ()
    assert not CapabilitySet((layer,)).may_allow_any_target("fs.write")
