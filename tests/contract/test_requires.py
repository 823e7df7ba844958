"""Requirements and capability sets: declaration, expansion, and layers that only narrow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from handrail.contract.tool.requires import (
    AnyArgumentPattern,
    CapabilityLayer,
    CapabilitySet,
    FsRequires,
    NetRequires,
    PathVariables,
    PrefixArgumentPattern,
    Requires,
    ShellRequires,
    expand_requires,
    unite_capability_layers,
)

WORKSPACE = PathVariables(workspace=("/ws",))


def layer(*patterns: str, owner: str = "tool", variables: PathVariables = WORKSPACE) -> CapabilityLayer:
    return expand_requires(Requires(fs=FsRequires(read=patterns)), variables, owner)


@pytest.mark.proves("K-09")
@pytest.mark.parametrize(
    ("pattern", "covered", "not_covered"),
    [
        ("{workspace}", "/ws/a/b", "/ws_secret/a"),
        ("{workspace}/**", "/ws/a/b", "/ws_secret/a"),
        ("src", "/ws/src/a", "/ws/src2/a"),
        ("./src/", "/ws/src/a", "/ws/src2/a"),
        (".", "/ws/a", "/wsx"),
        ("*.md", "/ws/a.md", "/ws/b/a.md"),
        ("/etc/ssl", "/etc/ssl/cert", "/etc/sslx"),
    ],
)
def test_a_pattern_is_relative_to_the_workspace_and_covers_complete_path_segments(
    pattern: str, covered: str, not_covered: str
) -> None:
    one = CapabilitySet((layer(pattern),))
    assert one.allows("fs.read", covered)
    assert not one.allows("fs.read", not_covered)
    assert not one.allows("fs.write", covered)


@pytest.mark.proves("K-09")
def test_a_variable_expands_to_all_its_folders() -> None:
    both = CapabilitySet((layer("{workspace}/src", variables=PathVariables(workspace=("/a", "/b"))),))
    assert both.allows("fs.read", "/a/src/x")
    assert both.allows("fs.read", "/b/src/x")
    assert not both.allows("fs.read", "/c/src/x")


@pytest.mark.proves("K-09")
def test_a_pattern_with_an_empty_variable_allows_no_path() -> None:
    closed = layer("{ad-hoc}", "{user-data}/x", "src", variables=PathVariables())
    assert closed.fs_read == ()
    assert not CapabilitySet((closed,)).allows("fs.read", "/x")
    assert not CapabilitySet((closed,)).may_allow_any_target("fs.read")


@pytest.mark.proves("K-09")
@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("{home}/x", "{home}"),
        ("a/{workspace}", "within a name"),
        ("{workspace}_secret/**", "within a name"),
        ("../x", ".."),
        ("{workspace}/../x", ".."),
        ("", "empty"),
        ("a\0b", "NUL"),
        ("[z-a]", "backwards"),
    ],
)
def test_an_invalid_pattern_is_a_fault_and_allows_no_path(pattern: str, word: str) -> None:
    requires = Requires(fs=FsRequires(write=(pattern,)))
    (place, problem), *_ = requires.find_faults()
    assert place == "requires.fs.write[0]"
    assert word in problem
    assert expand_requires(requires, WORKSPACE, "tool").fs_write == ()


@pytest.mark.proves("K-09")
def test_unknown_capabilities_and_unmatchable_hosts_are_faults() -> None:
    requires = Requires(capabilities=("ask", "fly"), net=NetRequires(hosts=("https://x.org", "x.org")))
    assert [place for place, _ in requires.find_faults()] == ["requires.net.hosts[0]", "requires.capabilities[1]"]
    assert "fly" in requires.find_faults()[1][1]


def test_unknown_keys_in_requirements_are_refused() -> None:
    with pytest.raises(ValidationError):
        Requires.model_validate({"fs": {"raed": ["x"]}})


@pytest.mark.proves("K-09")
@pytest.mark.parametrize(
    ("args", "argv", "allowed"),
    [
        (None, ("git", "status", "-s"), True),
        (None, ("git",), True),
        (None, ("gitx",), False),
        (None, (), False),
        ((), ("git",), True),
        ((), ("git", "status"), False),
        (("status",), ("git", "status"), True),
        (("status",), ("git", "status", "-s"), False),
        (("status",), ("git",), False),
        ((AnyArgumentPattern(wildcard=True),), ("git", "anything"), True),
        ((AnyArgumentPattern(wildcard=True),), ("git", "any", "thing"), False),
        ((PrefixArgumentPattern(prefix="--f"),), ("git", "--force"), True),
        ((PrefixArgumentPattern(prefix="--f"),), ("git", "-f"), False),
    ],
)
def test_shell_arguments_must_match_the_complete_argument_vector(
    args: tuple[str | AnyArgumentPattern | PrefixArgumentPattern, ...] | None, argv: tuple[str, ...], allowed: bool
) -> None:
    requires = Requires.model_validate({"shell": [{"cmd": "git"} | ({} if args is None else {"args": args})]})
    assert CapabilitySet((expand_requires(requires, WORKSPACE, "tool"),)).allows("shell.run", argv) is allowed


def test_a_star_as_command_allows_any_program() -> None:
    requires = Requires(shell=(ShellRequires(cmd="*"),))
    assert CapabilitySet((expand_requires(requires, WORKSPACE, "tool"),)).allows("shell.run", ("anything", "at", "all"))


@pytest.mark.proves("K-10")
def test_a_capability_set_without_layers_allows_nothing() -> None:
    nothing = CapabilitySet()
    assert not nothing.allows("fs.read", "/ws/a")
    assert not nothing.has_capability("ask")
    assert not nothing.may_allow_any_target("net.fetch")
    assert nothing.compute_covering_folders("fs.read") == ()


@pytest.mark.proves("K-10")
def test_layers_without_a_common_host_allow_no_host() -> None:
    one = expand_requires(Requires(net=NetRequires(hosts=("a.org",))), WORKSPACE, "tool")
    other = expand_requires(Requires(net=NetRequires(hosts=("b.org",))), WORKSPACE, "agent")
    both = CapabilitySet((one, other))
    assert not both.allows("net.fetch", "a.org")
    assert not both.allows("net.fetch", "b.org")
    assert not both.allows("net.fetch", "c.org")
    refusing = both.find_denying_layer("net.fetch", "a.org")
    assert refusing is not None
    assert refusing.owner == "agent"


@pytest.mark.proves("K-10")
def test_a_named_capability_must_be_in_every_layer() -> None:
    one = expand_requires(Requires(capabilities=("ask", "state")), WORKSPACE, "tool")
    other = expand_requires(Requires(capabilities=("ask",)), WORKSPACE, "agent")
    assert CapabilitySet((one, other)).has_capability("ask")
    assert not CapabilitySet((one, other)).has_capability("state")


def test_covered_folders_are_those_within_every_layer() -> None:
    wide, narrow = layer("{workspace}/**", "/etc/ssl"), layer("{workspace}/src/**", "{workspace}/docs")
    assert CapabilitySet((wide, narrow)).compute_covering_folders("fs.read") == ("/ws/docs", "/ws/src")
    assert CapabilitySet((wide, layer("/opt"))).compute_covering_folders("fs.read") == ()


PATTERNS = st.lists(
    st.sampled_from(["{workspace}", "src/**", "src", "*.py", "/etc", "/opt/**", "{ad-hoc}", "**/a"]), max_size=4
)
LAYERS = PATTERNS.map(lambda patterns: layer(*patterns))
TARGETS = st.sampled_from(
    ["/ws", "/ws/a", "/ws/src/a", "/ws/src", "/ws/x.py", "/etc/passwd", "/opt/a", "/a", "/ws_secret/a"]
)


@pytest.mark.proves("K-10", "P-01")
@given(st.lists(LAYERS, max_size=4), LAYERS, TARGETS)
def test_an_added_layer_never_widens_a_capability_set(
    layers: list[CapabilityLayer], more: CapabilityLayer, target: str
) -> None:
    before = CapabilitySet(tuple(layers))
    if layers and before.with_added_layers(more).allows("fs.read", target):
        assert before.allows("fs.read", target)


@pytest.mark.proves("K-10")
@given(LAYERS, LAYERS, TARGETS)
def test_a_union_of_layers_allows_exactly_the_targets_that_either_layer_allows(
    one: CapabilityLayer, other: CapabilityLayer, target: str
) -> None:
    whole = CapabilitySet((unite_capability_layers("agent", [one, other]),))
    either = CapabilitySet((one,)).allows("fs.read", target) or CapabilitySet((other,)).allows("fs.read", target)
    assert whole.allows("fs.read", target) is either


@given(st.text(max_size=20))
def test_expanding_requirements_never_raises_and_a_faulty_pattern_grants_nothing(pattern: str) -> None:
    requires = Requires(fs=FsRequires(read=(pattern,)))
    expanded = expand_requires(requires, WORKSPACE, "tool")
    if requires.find_faults():
        assert expanded.fs_read == ()


def test_an_additional_readable_folder_extends_workspace_patterns_for_reading_only() -> None:
    both = Requires(fs=FsRequires(read=("{workspace}", "docs"), write=("{workspace}", "docs")))
    expanded = expand_requires(both, PathVariables(workspace=("/ws",), readable=("/specs",)), "tool")
    assert expanded.fs_read == ("/ws", "/specs", "/ws/docs", "/specs/docs")
    assert expanded.fs_write == ("/ws", "/ws/docs")


FOLDERS = st.sets(
    st.sampled_from(["/", "/ws", "/ws/src", "/ws/*.md", "/ws/**/a", "/ws/src/**", "/w[s]/b?"]), max_size=3
)
PATHS = st.sampled_from(
    ["/", "/ws", "/wsx", "/ws/a", "/ws/a.md", "/ws/a.md/b", "/ws/src/c/a", "/ws/b1", "/ws/b1/x", "/x"]
)
GRANTS = st.sets(st.sampled_from(["*", "*:*", "a.org", "a.org:81", "*.org", "*.a.org:*", "127.0.0.1"]), max_size=3)
HOSTS = st.sampled_from(["a.org", "a.org:80", "a.org:81", "b.a.org:5", "b.org", "127.0.0.1:80", "no host"])


@pytest.mark.proves("K-09")
@given(st.lists(st.tuples(FOLDERS, GRANTS), max_size=3), PATHS, HOSTS)
def test_a_prepared_coverage_test_agrees_with_the_capability_set(
    layers: list[tuple[set[str], set[str]]], path: str, host: str
) -> None:
    whole = CapabilitySet(tuple(CapabilityLayer("one", tuple(paths), hosts=tuple(hosts)) for paths, hosts in layers))
    assert bool(whole.build_fast_coverage_predicate("fs.read")(path)) == whole.allows("fs.read", path)
    assert bool(whole.build_fast_coverage_predicate("net.fetch")(host)) == whole.allows("net.fetch", host)
