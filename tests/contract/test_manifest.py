"""The tool manifest: two views, and all faults in one report with their positions."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import LoadError
from handrail.contract.tool.manifest import MAX_MANIFEST_BYTES, RuntimeView, parse_manifest_data, parse_manifest_text
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import LockSpec, ToolSpec

COMMIT: dict[str, Any] = {
    "llm": {
        "name": "git_commit",
        "description": "Record the staged changes with a message.",
        "input_schema": {
            "type": "object",
            "properties": {"message": {"type": "string"}},
            "required": ["message"],
        },
    },
    "runtime": {
        "exec_path": "/choir/tools/global/git_commit",
        "timeout_ms": 15000,
        "locks": [{"resource": "workspace", "mode": "X"}],
        "network": False,
        "secret_resources": ["git_identity"],
        "side_effect": "write",
        "idempotent": False,
        "version": "1.0",
    },
}
"""The manifest printed for the first of the systems that this one continues, its three gaps filled in."""

WHOLE: dict[str, Any] = {
    "llm": {
        "name": "report.make",
        "description": "Make a report.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "format": "path"},
                "host": {"type": "string"},
            },
        },
    },
    "runtime": {
        "exec_path": "report/run",
        "build": ["make", "run"],
        "build_timeout_ms": 90_000,
        "timeout_ms": 1000,
        "locks": ["file:{path}:S", {"resource": "file:<path>", "mode": "X"}],
        "locks_background": ["reports:X"],
        "requires": {"fs": {"read": ["{workspace}"]}, "shell": [{"cmd": "git", "args": ["log", {"wildcard": True}]}]},
        "targets": {"fs.read": "{path}"},
        "secrets": ["token"],
        "side_effect": "read",
        "idempotent": True,
        "version": "3",
        "config": {"region": {"description": "Where", "secret": False, "required": False, "default": "eu"}},
        "mode": "direct",
        "concurrency_safe": False,
        "promotable": True,
        "cancellable": "process",
        "persistent": True,
        "output_schema": {"type": "object", "properties": {"pages": {"type": "integer"}}},
        "exposure": "core",
        "prompt_mask": True,
        "category": "reports",
        "tier": "extra",
        "kind": "search",
        "max_output": 5,
        "max_entries": 6,
        "guidance": "Use it last.",
        "guidance_order": "last",
        "documentation": "Long.",
        "documentation_required": True,
    },
}


def faults(manifest: Any) -> dict[str, str]:
    with pytest.raises(LoadError) as caught:
        parse_manifest_data(manifest, "tools/x.json")
    assert all(fault.source == "tools/x.json" for fault in caught.value.diagnostics)
    assert len({fault.location for fault in caught.value.diagnostics}) == len(caught.value.diagnostics)
    return {fault.location: fault.problem for fault in caught.value.diagnostics}


def changed(**runtime: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(WHOLE)
    manifest["runtime"] |= runtime
    return manifest


@pytest.mark.proves("K-02", "K-03")
def test_the_documented_example_manifest_loads_unchanged() -> None:
    spec = parse_manifest_text(json.dumps(COMMIT), "git_commit.json")
    assert (spec.id, spec.side_effect, spec.timeout_ms, spec.version) == ("git_commit", "write", 15_000, "1.0")
    assert spec.locks == (LockSpec("workspace", "X"),)
    assert spec.secrets == ("git_identity",)
    assert spec.exec_path == "git_commit"
    assert spec.requires == Requires()
    assert spec.parameters == COMMIT["llm"]["input_schema"]


@pytest.mark.proves("K-02")
def test_a_manifest_has_the_same_meaning_whether_parsed_in_full_or_field_by_field() -> None:
    others = copy.deepcopy(WHOLE)  # one name of another maker has it read part by part
    others["llm"]["input_schema"] = others["llm"].pop("parameters")
    found = [parse_manifest_text(json.dumps(one), "x.json") for one in (WHOLE, others)]
    found += [parse_manifest_data(one, "x.json") for one in (WHOLE, others)]
    assert all(one == found[0] and one.definition_hash == found[0].definition_hash for one in found)


@pytest.mark.proves("K-02")
def test_the_model_sees_only_name_description_and_parameters_of_a_manifest() -> None:
    assert parse_manifest_data(WHOLE, "x").build_llm_view() == {
        "name": "report__make",
        "description": "Make a report.",
        "parameters": WHOLE["llm"]["parameters"],
    }


@pytest.mark.proves("K-03")
def test_every_field_of_the_runtime_view_is_read() -> None:
    assert set(WHOLE["runtime"]) | {"network", "timeout_argument", "background_argument"} == set(
        RuntimeView.model_fields
    )
    spec = parse_manifest_data(WHOLE, "x")
    default = ToolSpec(id=spec.id, description=spec.description, parameters=spec.parameters)
    assert {name for name in WHOLE["runtime"] if getattr(spec, name) == getattr(default, name)} == {"mode"}
    assert spec.locks == (LockSpec("file:{path}", "S"), LockSpec("file:<path>", "X"))
    assert spec.locks is not None and spec.locks[1].fill_resource_template({"path": "a"}) == "file:a"
    assert spec.config["region"].default == "eu"
    assert spec.build == ("make", "run")


@pytest.mark.proves("R-15")
@pytest.mark.parametrize("ms", [0, -1, 3_600_001])
def test_a_build_timeout_above_one_hour_is_a_fault(ms: int) -> None:
    assert faults(changed(exec_path="report/run", build=["make"], build_timeout_ms=ms)) == {
        "runtime.build_timeout_ms": f"is {ms}; expected 1 to 3600000 milliseconds"
    }


def test_a_minimal_manifest_and_a_minimal_spec_in_code_define_the_same_tool() -> None:
    spec = parse_manifest_data({"llm": COMMIT["llm"], "runtime": {}}, "x")
    assert spec == ToolSpec(id=spec.id, description=spec.description, parameters=spec.parameters)


@pytest.mark.proves("K-03")
def test_a_manifest_without_a_runtime_view_gets_the_strictest_defaults() -> None:
    spec = parse_manifest_data({"llm": COMMIT["llm"]}, "x")
    assert (spec.side_effect, spec.mode, spec.timeout_ms, spec.max_output) == ("external", "direct", 60_000, 64 * 1024)
    assert spec.effective_locks == (LockSpec("workspace", "X"),)
    assert parse_manifest_data({"llm": COMMIT["llm"], "runtime": {"locks": []}}, "x").effective_locks == ()


@pytest.mark.proves("K-03")
def test_the_network_flag_of_a_manifest_becomes_required_hosts() -> None:
    def hosts(**runtime: Any) -> tuple[str, ...]:
        return parse_manifest_data({"llm": COMMIT["llm"], "runtime": runtime}, "x").requires.net.hosts

    named = {"net": {"hosts": ["api.example.org"]}}
    assert hosts() == hosts(network=False) == ()
    assert hosts(network=True) == ("*",)
    assert hosts(network=True, requires=named) == hosts(requires=named) == ("api.example.org",)
    assert "runtime.network" in faults({"llm": COMMIT["llm"], "runtime": {"network": False, "requires": named}})


@pytest.mark.proves("K-03")
@pytest.mark.parametrize(
    ("written", "meant"), [("/a/b/run", "run"), ("run", "run"), ("./run", "run"), ("bin/run.sh", "bin/run.sh")]
)
def test_only_the_last_part_of_an_absolute_exec_path_counts(written: str, meant: str) -> None:
    assert parse_manifest_data(changed(exec_path=written, build=[]), "x").exec_path == meant


@pytest.mark.proves("K-03")
@pytest.mark.parametrize(
    "written", ["", "/", "/a/", "..", "../x", "a/../../x", "a//b", "a/.", "/..", "a\x00b", "a\nb", 3]
)
def test_an_exec_path_stays_beneath_its_folder(written: object) -> None:
    assert "runtime.exec_path" in faults(changed(exec_path=written))


@pytest.mark.proves("K-03", "R-01")
def test_all_faults_of_a_manifest_are_reported_at_once() -> None:
    found = faults(
        {
            "llm": {
                "name": "bad name",
                "descripton": "x",
                "parameters": {"type": "object", "properties": {"path": {"type": "strin"}}},
                "input_schema": {},
            },
            "runtme": {},
            "runtime": {
                "timeout_ms": "5",
                "lock": [],
                "locks": ["workspace", "file:{path}:S", {"resource": "file:<gone>", "mode": "S"}, {"mode": "X"}],
                "requires": {"fs": {"raed": [], "read": ["{home}/x"]}, "capabilities": ["fly"]},
                "side_effect": "wrote",
                "mode": "direkt",
                "max_output": 0,
                "targets": {"fs.raed": "{path}"},
                "config": {"k": {"description": "x", "secrt": True}},
                "secrets": [1],
            },
        }
    )
    assert set(found) == {
        "llm.name",
        "llm.description",
        "llm.descripton",
        "llm.input_schema",
        "llm.parameters.properties.path.type",
        "runtme",
        "runtime.timeout_ms",
        "runtime.lock",
        "runtime.locks[0]",
        "runtime.locks[2]",
        "runtime.locks[3]",
        "runtime.requires.fs.raed",
        "runtime.requires.fs.read[0]",
        "runtime.requires.capabilities[0]",
        "runtime.side_effect",
        "runtime.mode",
        "runtime.max_output",
        "runtime.targets.fs.raed",
        "runtime.config.k.secrt",
        "runtime.secrets[0]",
    }


@pytest.mark.proves("K-03")
@pytest.mark.parametrize(
    ("runtime", "place", "said"),
    [
        ({"sideeffect": "read"}, "runtime.sideeffect", "did you mean 'side_effect'?"),
        ({"zzz": 1}, "runtime.zzz", "available: requires, side_effect, "),
        ({"timeout_ms": 1.5}, "runtime.timeout_ms", "is 1.5; expected a valid integer"),
        ({"timeout_ms": 0}, "runtime.timeout_ms", "expected a positive number"),
        ({"timeout_ms": True}, "runtime.timeout_ms", "is True"),
        ({"idempotent": "no"}, "runtime.idempotent", "is 'no'"),
        ({"side_effect": "Read"}, "runtime.side_effect", "is 'Read'; expected 'read', 'write' or 'external'"),
        ({"exposure": "all"}, "runtime.exposure", "'edge', 'core', 'both' or 'none'"),
        ({"kind": "run"}, "runtime.kind", "is 'run'"),
        ({"version": 1}, "runtime.version", "is 1"),
        ({"locks": "workspace:X"}, "runtime.locks", "expected a valid"),
        ({"locks": ["x:Z"]}, "runtime.locks[0]", "'x:Z' is not a lock"),
        ({"locks": [{"resource": "x", "mode": "S", "why": 1}]}, "runtime.locks[0]", '"mode": "S" or "X"'),
        ({"locks": ["file:{gone}:X"]}, "runtime.locks[0]", "names the unknown parameter 'gone'"),
        ({"targets": {"fs.read": "{gone}"}}, "runtime.targets.fs.read", "'gone'"),
        ({"config": {"k": {}}}, "runtime.config.k.description", "is missing"),
        ({"requires": {"capabilities": ["ask"]}}, "runtime.locks", "declare locks: []"),
        ({"secret_resources": []}, "runtime.secret_resources", "is another name of secrets"),
    ],
)
def test_each_fault_names_its_place_and_the_expected_value(runtime: dict[str, Any], place: str, said: str) -> None:
    found = faults(changed(**runtime))
    assert set(found) == {place}
    assert said in found[place]


@pytest.mark.parametrize(
    ("manifest", "place"),
    [
        ({}, "llm"),
        ({"llm": []}, "llm"),
        ({"llm": COMMIT["llm"], "runtime": None}, "runtime"),
        ({"llm": {"description": "x", "parameters": {"type": "object"}}}, "llm.name"),
        ({"llm": {"name": "x", "description": "x"}}, "llm.parameters"),
        ({"llm": {"name": "x", "description": "x", "parameters": "..."}}, "llm.parameters"),
        ({"llm": {"name": "x", "description": " ", "parameters": {"type": "object"}}}, "llm.description"),
        ({"llm": {"name": "x", "description": "x", "parameters": {}}}, "llm.parameters.type"),
        ({"llm": {"name": "a..b", "description": "x", "parameters": {"type": "object"}}}, "llm.name"),
        (COMMIT | {"comment": "x"}, "comment"),
    ],
)
def test_a_missing_or_malformed_part_is_reported_with_its_place(manifest: dict[str, Any], place: str) -> None:
    assert set(faults(manifest)) == {place}


@pytest.mark.parametrize("parameters", ["...", {"type": "object", "properties": {"a": {"$ref": "http://localhost/x"}}}])
def test_an_unusable_schema_is_a_fault_of_the_manifest(parameters: Any) -> None:
    manifest = copy.deepcopy(WHOLE)
    manifest["llm"]["parameters"] = parameters
    assert all(place.startswith("llm.parameters") or "'path'" in said for place, said in faults(manifest).items())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "// comment\n{}",
        '{"llm": 1, "llm": 2}',
        '{"a": NaN}',
        b"\xff\xfe",
        "[" * 10_000,
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_text_that_is_not_a_strict_json_object_is_one_fault(text: str | bytes) -> None:
    with pytest.raises(LoadError) as caught:
        parse_manifest_text(text, "tools/x.json")
    [fault] = caught.value.diagnostics
    assert (fault.source, fault.location) == ("tools/x.json", "")


def test_a_manifest_made_in_code_must_be_valid_json() -> None:
    assert "is not JSON" in faults({"llm": {"name": object()}})[""]
    looped: dict[str, Any] = {}
    looped["llm"] = looped
    assert "is not JSON" in faults(looped)[""]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.proves("R-01")
@given(st.sampled_from([("llm", k) for k in WHOLE["llm"]] + [("runtime", k) for k in WHOLE["runtime"]]), json_values)
def test_any_value_at_any_place_yields_a_spec_or_faults_and_never_an_exception(
    place: tuple[str, str], value: Any
) -> None:
    manifest = copy.deepcopy(WHOLE)
    manifest[place[0]][place[1]] = value
    try:
        spec = parse_manifest_data(manifest, "x")
    except LoadError as error:
        assert error.diagnostics
    else:
        assert isinstance(spec, ToolSpec)


@given(st.dictionaries(st.sampled_from(["llm", "runtime", "x"]), json_values))
def test_arbitrary_json_is_refused_with_a_load_error(manifest: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        parse_manifest_data(manifest, "x")


@pytest.mark.proves("K-03")
def test_the_timeout_argument_must_be_one_of_the_parameters() -> None:
    parameters = {"type": "object", "properties": {"most_ms": {"type": "integer"}}}
    llm = {"name": "report.make", "description": "Make a report.", "parameters": parameters}
    assert (
        parse_manifest_data({"llm": llm, "runtime": {"timeout_argument": "most_ms"}}, "x").timeout_argument == "most_ms"
    )
    assert "runtime.timeout_argument" in faults({"llm": llm, "runtime": {"timeout_argument": "least_ms"}})


@pytest.mark.proves("K-03")
def test_the_background_argument_must_be_a_boolean_parameter_of_a_direct_tool() -> None:
    later = {"later": {"type": "boolean"}, "soon": {"type": "integer"}}
    llm = {**WHOLE["llm"], "parameters": {"type": "object", "properties": later}}
    assert (
        parse_manifest_data({"llm": llm, "runtime": {"background_argument": "later"}}, "x").background_argument
        == "later"
    )
    for runtime in (
        {"background_argument": "soon"},
        {"background_argument": "never"},
        {"background_argument": "later", "mode": "background"},
    ):
        assert "runtime.background_argument" in faults({"llm": llm, "runtime": runtime})
    assert "runtime.locks_background[0]" in faults({"llm": llm, "runtime": {"locks_background": ["file:{path}:X"]}})
