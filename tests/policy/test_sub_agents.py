"""What an agent has that another one starts: never more than any that bounds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.requires import (
    Capability,
    CapabilitySet,
    FsRequires,
    Layer,
    NetRequires,
    Requires,
    ShellRequires,
    Variables,
    expand,
    union,
)
from handrail.contract.spec import ToolSpec
from handrail.policy.capabilities import call_set, passed_on, sub_agent_set

VARIABLES = Variables(workspace=("/ws", "/further"), ad_hoc=("/out",))
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


def _layer(requires: Requires) -> Layer:
    return expand(requires, VARIABLES, "layer")


def _set(layers: list[Layer]) -> CapabilitySet:
    return CapabilitySet(tuple(layers))


_REQUIRES = st.builds(
    _requires,
    _PATHS,
    _PATHS,
    st.lists(st.sampled_from(["*", "*.example.org", "api.example.org", "a.example.org:8443"]), max_size=2),
    st.lists(st.sampled_from(["*", "git", "make"]), max_size=2),
    st.lists(st.sampled_from(["ask", "state", "call", "vcs.config"]), max_size=3, unique=True),
)
_LAYERS = st.builds(_layer, _REQUIRES)
_SETS = st.builds(_set, st.lists(_LAYERS, max_size=3))
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


@pytest.mark.proves("P-12")
@given(_SETS, _LAYERS, st.none() | _LAYERS, st.booleans())
def test_a_sub_agent_has_what_its_parent_its_manifest_and_the_host_all_allow(
    parent: CapabilitySet, declared: Layer, ceiling: Layer | None, presence: bool
) -> None:
    child = sub_agent_set(parent, declared, ceiling, presence=presence)
    bounds = [CapabilitySet((declared,)), *([] if ceiling is None else [CapabilitySet((ceiling,))])]
    for capability, target in TOUCHES:
        every = parent.allows(capability, target) and all(bound.allows(capability, target) for bound in bounds)
        assert child.allows(capability, target) is every
    for name in ("ask", "state", "call", "vcs.config"):
        every = parent.has(name) and all(bound.has(name) for bound in bounds)
        assert child.has(name) is (every and (presence or name != "ask"))
    assert not CapabilitySet().allows("fs.read", "/ws/a")


@pytest.mark.proves("P-12")
@given(_SETS, _LAYERS, _LAYERS, _REQUIRES)
def test_neither_do_its_calls_nor_those_of_agents_below_it(
    parent: CapabilitySet, child: Layer, grandchild: Layer, tool: Requires
) -> None:
    first = sub_agent_set(parent, child)
    second = sub_agent_set(first, grandchild)
    call = call_set(ToolSpec("t", "Do.", requires=tool), VARIABLES, grandchild, None, second)
    for capability, target in TOUCHES:
        if call.allows(capability, target):
            assert second.allows(capability, target)
        if second.allows(capability, target):
            assert first.allows(capability, target)
        if first.allows(capability, target):
            assert parent.allows(capability, target)
    assert not passed_on(parent).has("ask")


@pytest.mark.proves("K-10")
@given(_REQUIRES, _REQUIRES, _LAYERS)
def test_another_tool_extends_the_agent_and_no_other_tool(mine: Requires, others: Requires, own: Layer) -> None:
    before = call_set(ToolSpec("a", "A.", requires=mine), VARIABLES, own)
    after = call_set(ToolSpec("a", "A.", requires=mine), VARIABLES, union("a", [own, expand(others, VARIABLES, "b")]))
    declared = CapabilitySet((expand(mine, VARIABLES, "a"),))
    for capability, target in TOUCHES:
        if before.allows(capability, target):
            assert after.allows(capability, target)
        if after.allows(capability, target):
            assert declared.allows(capability, target)


@pytest.mark.proves("K-09")
def test_a_variable_with_several_roots_stands_for_each_and_an_empty_one_for_none() -> None:
    layer = expand(
        Requires(fs=FsRequires(read=("{workspace}/src", "{user-data}"), write=("{user-data}/x",))), VARIABLES, "t"
    )
    assert layer.fs_read == ("/ws/src", "/further/src")
    assert layer.fs_write == ()
    assert not CapabilitySet((layer,)).uses("fs.write")
