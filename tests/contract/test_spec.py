"""Declarations of tools: defaults, templates, views and hash."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ConfigKey, LockSpec, ToolSpec, find_spec_faults, infer_capability_targets

READ = ToolSpec(
    id="notes.read",
    description="Read a note.",
    parameters={"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
    side_effect="read",
    guidance="Read before you write.",
)


@pytest.mark.proves("K-02")
def test_the_llm_view_of_a_spec_has_only_name_and_description_and_parameters() -> None:
    view = READ.build_llm_view()
    assert list(view) == ["name", "description", "parameters"]
    assert "Read before" not in str(view)
    assert set(READ.build_runtime_view()) == {f.name for f in fields(ToolSpec)} - {"id", "description", "parameters"}


@pytest.mark.proves("K-03")
def test_a_spec_without_declared_locks_locks_the_workspace() -> None:
    assert READ.effective_locks == (LockSpec("workspace", "S"),)
    assert replace(READ, side_effect="write").effective_locks == (LockSpec("workspace", "X"),)
    assert replace(READ, locks=()).effective_locks == ()
    assert replace(READ, locks=(), concurrency_safe=False).effective_locks == (LockSpec("serial", "X"),)


@pytest.mark.proves("K-03")
def test_targets_are_inferred_from_parameter_formats_unless_declared() -> None:
    assert READ.effective_targets == {"fs.read": ("{path}",)}
    assert replace(READ, side_effect="write").effective_targets == {"fs.write": ("{path}",)}
    assert replace(READ, targets={"fs.read": "x"}).effective_targets == {"fs.read": ("x",)}
    assert replace(READ, targets={"fs.read": ["x", "{path}"]}).effective_targets == {"fs.read": ("x", "{path}")}
    parameters = {"properties": {"u": {"format": "uri"}, "c": {"format": "command"}, "h": {"format": "host"}}}
    assert infer_capability_targets(parameters, "read") == {"net.fetch": ("{u}", "{h}"), "shell.run": ("{c}",)}


@pytest.mark.parametrize(
    "second",
    [
        {"type": "string", "format": "path"},
        {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]},
        {"type": "array", "items": {"type": "string", "format": "path"}},
        {"anyOf": [{"type": "array", "items": {"type": "string", "format": "path"}}, {"type": "null"}]},
    ],
)
def test_each_path_parameter_becomes_a_target(second: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "format": "path"}, "to": second}}
    assert infer_capability_targets(parameters, "write") == {"fs.write": ("{path}", "{to}")}


@pytest.mark.parametrize(
    ("text", "lock"),
    [("workspace:X", ("workspace", "X")), ("file:{path}:S", ("file:{path}", "S")), ("a:b:S", ("a:b", "S"))],
)
def test_lock_texts_are_parsed_into_resource_and_mode(text: str, lock: tuple[str, str]) -> None:
    parsed = LockSpec.parse(text)
    assert (parsed.resource, parsed.mode) == lock
    assert str(parsed) == text


@pytest.mark.parametrize("text", ["", "X", ":X", "workspace", "workspace:x", "workspace:SX", "workspace:"])
def test_an_invalid_lock_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="file:"):
        LockSpec.parse(text)


@given(st.text(alphabet="a{}<>/.:"), st.text(max_size=5))
def test_lock_templates_insert_any_argument_text_unchanged(template: str, value: str) -> None:
    lock = LockSpec(f"file:{{path}}/<path>/{template}", "S")
    assert lock.fill_resource_template({"path": value}).startswith(f"file:{value}/{value}/")
    assert lock.required_argument_names[:2] == ("path", "path")


@pytest.mark.parametrize(
    "change",
    [
        {"description": "x"},
        {"parameters": {"type": "object"}},
        {"side_effect": "external"},
        {"locks": ()},
        {"requires": Requires.model_validate({"fs": {"read": ["a"]}})},
        {"timeout_ms": 1},
        {"secrets": ("k",)},
        {"config": {"k": ConfigKey("x")}},
        {"targets": {"fs.read": "{path}"}},
        {"exposure": "none"},
        {"id": "notes.red"},
    ],
)
def test_a_changed_definition_has_another_hash(change: dict[str, Any]) -> None:
    assert replace(READ, **change).definition_hash != READ.definition_hash
    assert replace(READ).definition_hash == READ.definition_hash


@pytest.mark.parametrize("hidden", ["\x00", "\x08", "\x0c", "\x1b", "\x7f", "\x9b", "\u200b", "\u202e"])
def test_invisible_characters_are_found_in_every_text_that_a_model_reads(hidden: str) -> None:
    texts: list[dict[str, Any]] = [
        {"description": f"a{hidden}b"},
        {"parameters": {"type": "object", "properties": {f"a{hidden}b": {}}}},
        {"parameters": {"type": "object", "properties": {"a": {"enum": ["b", f"{hidden}c"]}}}},
    ]
    assert all("people do not see" in str(find_spec_faults(replace(READ, **one))) for one in texts)


def test_line_ends_and_spelled_out_escapes_are_allowed_in_a_description() -> None:
    assert find_spec_faults(replace(READ, description='two "lines"\r\n\tand \\u0000, \\b, \\f, über')) == []


@pytest.mark.proves("R-01")
def test_all_faults_of_a_spec_are_reported_together() -> None:
    misspelt: dict[str, Any] = {"side_effect": "reed", "mode": "later", "exposure": "all", "kind": "tool"}
    spec = replace(
        READ,
        id="no id",
        description=" ",
        locks=(LockSpec("file:{gone}", "X"),),
        targets={"fs.fly": "{path}", "fs.read": "{lost}", "fs.write": ["{path}", "{gone}"], "net.fetch": []},
        timeout_ms=0,
        max_output=-1,
        **misspelt,
        requires=Requires.model_validate({"fs": {"read": ["{home}"]}, "capabilities": ["ask", "fly"]}),
    )
    places = {place for place, _ in find_spec_faults(spec)}
    assert places == {
        "llm.name",
        "llm.description",
        "runtime.locks[0]",
        "runtime.locks",
        "runtime.targets.fs.fly",
        "runtime.targets.fs.read",
        "runtime.targets.fs.write",
        "runtime.targets.net.fetch",
        "runtime.timeout_ms",
        "runtime.max_output",
        "runtime.side_effect",
        "runtime.mode",
        "runtime.exposure",
        "runtime.kind",
        "runtime.requires.fs.read[0]",
        "runtime.requires.capabilities[1]",
    }
    assert find_spec_faults(READ) == []


@pytest.mark.proves("K-02")
@pytest.mark.attack("model-facing")
@pytest.mark.parametrize("hidden", ["\u202e", "\u200b", "\x1b[8m", "\U000e0053", "\x9b", "\u00ad"])
def test_invisible_characters_in_a_description_or_schema_are_faults(hidden: str) -> None:
    described = replace(READ, description=f"Read{hidden} a note.")
    assert [place for place, _ in find_spec_faults(described)] == ["llm.description"]
    for schema in ({"description": hidden}, {"enum": ["a", f"b{hidden}"]}, {hidden: True}):
        parameters = {"type": "object", "properties": {"path": {"type": "string", **schema}}}
        assert [place for place, _ in find_spec_faults(replace(READ, parameters=parameters))] == ["llm.parameters"]


def test_ordinary_text_in_any_script_is_not_a_fault() -> None:
    assert find_spec_faults(replace(READ, description="Liest eine Notiz – 日本語, עברית, 👩‍⚕️.\n\tUse <path>.")) == []
    holds_itself: dict[str, Any] = {"type": "object"}
    holds_itself["properties"] = {"path": holds_itself}
    assert [place for place, _ in find_spec_faults(replace(READ, parameters=holds_itself))] == []


def test_the_length_of_a_description_is_bounded() -> None:
    spec = ToolSpec("a.b", "Do." + " more" * 20_000)
    assert find_spec_faults(spec) == [("llm.description", "has 100,003 characters; the maximum is 50,000. Shorten it")]
