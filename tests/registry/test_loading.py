"""Loading sources into a generation: order, overrides, conflicts, withheld tools, all faults in one report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.sandbox_protocol import SandboxMechanism, SandboxTier
from handrail.contract.tool.decorator import tool
from handrail.contract.tool.spec import ConfigKey
from handrail.contract.tool.tool_ids_and_wire_names import LOCKED_IDS
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import IN_PROCESS, DiscoveredTool, Generation, SourceContents, SourceRank
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import BuiltinSource, PassedToolsSource, ToolEntryPointsSource
from handrail.tools import ALIASES

from .conftest import CONFINING, ExecutableFixture, SimpleTool

NOTHING = SandboxTier("none", "bubblewrap is not installed", "apt install bubblewrap")


@dataclass
class ListSource:
    """A source of what it is given."""

    rank: SourceRank
    tools: tuple[Tool, ...]
    is_third_party: bool = False
    diagnostics: tuple[Diagnostic, ...] = ()

    def load(self) -> SourceContents:
        return SourceContents(
            tuple(DiscoveredTool(t, f"{self.rank} folder/{t.spec.id}.json") for t in self.tools), self.diagnostics
        )


def load(*sources: Any, tier: SandboxTier = CONFINING, **options: Any) -> Generation:
    return load_generation(sources, tier=tier, **options)


def faults(*sources: Any, **options: Any) -> list[str]:
    with pytest.raises(LoadError) as caught:
        load(*sources, **options)
    return [str(fault) for fault in caught.value.diagnostics]


@pytest.mark.proves("R-01")
def test_tools_are_listed_in_the_order_of_their_sources() -> None:
    generation = load(
        ListSource("built-in", (SimpleTool("b"), SimpleTool("a"))),
        ListSource("global", (SimpleTool("g"),)),
        ListSource("agent", (SimpleTool("f"),)),
        ListSource("code", (SimpleTool("c"),)),
        ListSource("package", (SimpleTool("p"),)),
        number=7,
    )
    assert list(generation.entries) == ["b", "a", "g", "f", "c", "p"]
    assert generation.number == 7
    entry = generation.entries["g"]
    assert (entry.source, entry.unavailable_reason, entry.sandbox) == ("global folder/g.json", None, IN_PROCESS)
    assert entry.definition_hash == entry.spec.definition_hash
    assert entry.schema.list_problems({"x": 1})


@pytest.mark.proves("R-01")
def test_the_built_in_tools_load_before_passed_tools() -> None:
    generation = load(BuiltinSource(), PassedToolsSource((SimpleTool("mine"),)))
    assert "read" in generation.entries
    assert list(generation.entries)[-1] == "mine"
    assert all(e.source == "built-in" for e in generation.entries.values() if e.id != "mine")


@pytest.mark.proves("R-04")
def test_an_agent_tool_replaces_the_global_tool_of_the_same_id_in_place() -> None:
    ours = SimpleTool("b", description="The agent's.")
    generation = load(
        ListSource("global", (SimpleTool("a"), SimpleTool("b"), SimpleTool("c"))), ListSource("agent", (ours,))
    )
    assert list(generation.entries) == ["a", "b", "c"]
    assert generation.entries["b"].tool is ours


@pytest.mark.proves("P-02")
@pytest.mark.parametrize("rank", ["global", "agent", "code", "package"])
@pytest.mark.parametrize("tool_id", ["scratchpad", "scratchpad.sync", "wait", "stop_task", "find_tools"])
def test_a_tool_cannot_take_a_name_that_the_shipped_rules_allow_without_approval(
    rank: SourceRank, tool_id: str
) -> None:
    [fault] = faults(ListSource(rank, (SimpleTool(tool_id),)))
    assert "requires no approval; rename this tool" in fault


@pytest.mark.proves("R-04")
@pytest.mark.parametrize("rank", ["global", "agent", "code", "package"])
@pytest.mark.parametrize("tool_id", [*LOCKED_IDS, "file.patch"])
def test_a_tool_cannot_override_a_built_in_tool_or_take_a_locked_id(rank: SourceRank, tool_id: str) -> None:
    [fault] = faults(ListSource("built-in", (SimpleTool("file.patch"),)), ListSource(rank, (SimpleTool(tool_id),)))
    assert fault.startswith(f"{rank} folder/{tool_id}.json: llm.name: ")
    assert "locked id" in fault or "built-in" in fault


@pytest.mark.proves("R-05")
@pytest.mark.parametrize(
    ("first", "second"),
    [("global", "global"), ("agent", "agent"), ("global", "code"), ("agent", "global"), ("code", "package")],
)
def test_a_clash_of_ids_names_both_sources(first: SourceRank, second: SourceRank) -> None:
    [fault] = faults(ListSource(first, (SimpleTool("x"),)), ListSource(second, (SimpleTool("x"),)))
    assert fault.startswith(f"{second} folder/x.json")
    assert f"{first} folder/x.json" in fault


@pytest.mark.proves("R-05", "K-04")
def test_a_clash_of_wire_names_names_both_sources() -> None:
    [fault] = faults(ListSource("global", (SimpleTool("a.b"),)), ListSource("agent", (SimpleTool("a__b"),)))
    assert "agent folder/a__b.json" in fault and "global folder/a.b.json" in fault and "wire name 'a__b'" in fault


@pytest.mark.proves("R-01")
def test_all_faults_of_all_sources_are_listed_together() -> None:
    found = faults(
        ListSource("global", (SimpleTool("a", parameters={"type": "objct"}), SimpleTool("bad id"))),
        ListSource("agent", (), diagnostics=(Diagnostic("agent/x.json", "", "is gone"),)),
        ListSource("code", (SimpleTool("c", timeout_ms=0, description=""), SimpleTool("read"))),
        aliases={"d": "gone"},
    )
    assert len(found) == 7
    for part in ("parameters.type", "bad id", "agent/x.json: is gone", "timeout_ms", "description", "locked", "'gone'"):
        assert any(part in fault for fault in found), part


def test_faulty_tools_of_a_third_party_source_are_quarantined_and_the_others_work() -> None:
    foreign = ListSource(
        "package",
        (SimpleTool("read"), SimpleTool("ok"), SimpleTool("x.y"), SimpleTool("z", parameters={})),
        True,
        (Diagnostic("f", "", "odd"),),
    )
    generation = load(ListSource("code", (SimpleTool("x__y"),)), foreign)
    assert list(generation.entries) == ["x__y", "ok"]
    assert [fault.source for fault in generation.quarantined] == [
        "f",
        "package folder/read.json",
        "package folder/x.y.json",
        "package folder/z.json",
    ]
    assert len(faults(ListSource("code", (SimpleTool("x__y"),)), foreign, strict=True)) == 4


def test_an_alias_must_name_an_existing_tool_and_clash_with_no_other_name() -> None:
    source = ListSource("code", (SimpleTool("a.b"), SimpleTool("c")))
    assert load(source, aliases={"x": "c"}).resolve_tool_name("x") is not None
    assert "did you mean a.b?" in faults(source, aliases={"x": "a.bb"})[0]
    for alias in ("c", "a__b", "read", "not an id"):
        assert len(faults(source, aliases={alias: "c"})) == 1


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"secrets": ("key",)}, "secrets that are not known here: key (not set; add key = "),
        (
            {"config": {"key": ConfigKey("k", secret=True)}},
            "secret settings without a value: key (not set",
        ),
        (
            {"config": {"a": ConfigKey("a"), "b": ConfigKey("b", default="x")}},
            'settings without a value: a (a; add a = "…" under [tools."run".config] of handrail.toml)',
        ),
    ],
)
@pytest.mark.proves("R-01", "K-03")
def test_a_tool_with_missing_secrets_or_settings_is_loaded_and_withheld_with_the_reason(
    spec: dict[str, Any], reason: str
) -> None:
    async def run() -> None:
        """Run."""

    made = tool(**spec)(run)
    entry = load(PassedToolsSource((made,))).entries["run"]
    assert entry.unavailable_reason is not None and reason in entry.unavailable_reason


@pytest.mark.proves("S-08")
def test_a_tool_that_starts_programs_is_unavailable_without_a_sandbox() -> None:
    shelly = tool(id="shelly", requires={"shell": [{"cmd": "git"}]})(_noop)
    generation = load(PassedToolsSource((shelly, SimpleTool("plain"))), tier=NOTHING)
    assert generation.entries["plain"].unavailable_reason is None
    assert "bubblewrap is not installed (apt install bubblewrap)" in (
        generation.entries["shelly"].unavailable_reason or ""
    )
    assert load(PassedToolsSource((shelly,))).entries["shelly"].unavailable_reason is None


@pytest.mark.proves("S-08", "S-02")
def test_a_tool_that_starts_programs_with_hosts_is_unavailable_without_sandbox_network_support() -> None:
    needs: dict[str, Any] = {"net": {"hosts": ["a.example.org"]}}
    fetches = tool(id="fetches", requires=needs)(_noop)
    starts = tool(id="starts", requires={**needs, "shell": [{"cmd": "curl"}]})(_noop)
    lacking = SandboxMechanism("hosts", False, "no port could be opened", "install perl")
    tier = SandboxTier("bubblewrap", "without hosts", mechanisms=(lacking,))
    entries = load(PassedToolsSource((fetches, starts)), tier=tier).entries
    assert entries["fetches"].unavailable_reason is None  # by the runtime's own check, whatever the sandbox can
    withheld = entries["starts"].unavailable_reason or ""
    for word in ("a.example.org", "no port could be opened", "install perl"):
        assert word in withheld
    able = SandboxTier("bubblewrap", "with hosts", mechanisms=(SandboxMechanism("hosts", True, "through a proxy"),))
    assert load(PassedToolsSource((starts,)), tier=able).entries["starts"].unavailable_reason is None


@pytest.mark.proves("S-08")
def test_an_executable_tool_is_unavailable_without_a_sandbox(place: ExecutableFixture) -> None:
    from handrail.registry.sources.tool_folder_source import ToolFolderSource

    place.put("ext", "#!/bin/sh\n")
    source = ToolFolderSource(place.tools, "global", place.confinement())
    assert "cannot be confined" in (load(source, tier=NOTHING).entries["ext"].unavailable_reason or "")
    confined = load(source, tier=CONFINING).entries["ext"]
    assert (confined.unavailable_reason, confined.sandbox) == (None, "bubblewrap")


async def _noop() -> None:
    """Do nothing."""


def test_manifest_fields_for_executables_are_faults_in_a_python_tool() -> None:
    found = faults(PassedToolsSource((SimpleTool("a", persistent=True, exec_path="x"),)))
    assert len(found) == 2 and "persistent" in found[0] and "exec_path" in found[1]


@pytest.mark.proves("K-01")
def test_tools_are_loaded_from_functions_objects_classes_and_modules() -> None:
    class Fixed(SimpleTool):
        def __init__(self) -> None:
            super().__init__("fixed")

    module = ModuleType("my_tools")
    module.first = tool(id="first")(_noop)  # type: ignore[attr-defined]
    module.again = module.first  # type: ignore[attr-defined]
    module.second = SimpleTool("second")  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    generation = load(PassedToolsSource((tool(id="decorated")(_noop), SimpleTool("object"), Fixed, module)))
    assert list(generation.entries) == ["decorated", "object", "fixed", "first", "second"]
    assert generation.entries["decorated"].source == f"{__name__}._noop"


def test_a_blocking_function_is_marked_as_blocking() -> None:
    def slow() -> None:
        """Wait."""

    generation = load(PassedToolsSource((tool(slow), tool(id="quick")(_noop))))
    assert [entry.is_blocking for entry in generation.entries.values()] == [True, False]


def test_an_object_that_is_not_a_tool_is_a_fault_with_an_explanation() -> None:
    class Half(Tool):
        spec = SimpleTool("half").spec

    class Bare(Tool):
        async def execute(self, args: dict[str, Any], runtime: Any) -> object:
            return None

    class Failing(SimpleTool):
        def __init__(self) -> None:
            raise OSError("no disk")

    found = faults(PassedToolsSource((_noop, Half, Bare(), Failing, 3, ModuleType("empty"))))
    assert len(found) == 6
    for part, fault in zip(
        ("decorate it with @tool", "no execute", "expected spec", "no disk", "is a int", "no tool"), found, strict=True
    ):
        assert part in fault


@pytest.mark.proves("R-09")
def test_installed_packages_add_tools_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("handrail_test_plugin")
    module.one = SimpleTool("one")  # type: ignore[attr-defined]
    module.several = [SimpleTool("two"), tool(id="three")(_noop)]  # type: ignore[attr-defined]
    module.broken = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "handrail_test_plugin", module)

    def points(*values: tuple[str, str]) -> ToolEntryPointsSource:
        return ToolEntryPointsSource(lambda: [EntryPoint(name, value, "handrail.tools") for name, value in values])

    good = points(("b", "handrail_test_plugin:several"), ("a", "handrail_test_plugin:one"))
    assert list(load(good).entries) == ["one", "two", "three"]
    assert load(good).entries["one"].source == "entry point a of an unnamed package"
    found = faults(
        points(
            ("a", "handrail_test_plugin:gone"),
            ("b", "no_such_module_at_all:x"),
            ("c", "handrail_test_plugin:broken"),
            ("d", "handrail_test_plugin:one"),
            ("e", "handrail_test_plugin:one"),
        )
    )
    assert len(found) == 4
    assert "no_such_module_at_all" in found[1] and "ModuleNotFoundError" in found[1]
    assert "entry point d of" in found[3]


def test_the_entry_points_of_this_environment_load_without_faults() -> None:
    assert ToolEntryPointsSource().load().faults == ()


@pytest.mark.proves("R-01")
def test_a_tool_cannot_take_an_alias_of_a_built_in_tool() -> None:
    generation = load(BuiltinSource())
    assert generation.aliases == ALIASES and ALIASES["git_commit"] == "git.commit"
    assert generation.resolve_tool_name("git_commit") is generation.entries["git.commit"]
    assert (
        "an alias of the built-in tool 'git.commit'"
        in faults(BuiltinSource(), ListSource("code", (SimpleTool("git_commit"),)))[0]
    )
    foreign = load(BuiltinSource(), ListSource("package", (SimpleTool("git_commit"), SimpleTool("ok")), True))
    assert "ok" in foreign.entries
    assert [fault.location for fault in foreign.quarantined] == ["llm.name"]
    assert foreign.resolve_tool_name("git_commit") is foreign.entries["git.commit"]
    assert len(faults(BuiltinSource(), aliases={"git_commit": "read"})) == 1
