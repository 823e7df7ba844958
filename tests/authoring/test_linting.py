"""Findings of the linter: each on a tool that has the fault and one that does not."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from handrail.authoring.tool_linter import LintFinding, lint_tools
from handrail.contract.errors import UsageError
from handrail.contract.schema.argument_validation import compile_schema
from handrail.sandbox import tier_probe

SANDBOX = tier_probe.choose_sandbox()
GOOD = {
    "llm": {
        "name": "notes.add",
        "description": "Add a line to the notes on a topic, for later.",
        "parameters": {
            "type": "object",
            "properties": {"line": {"type": "string", "description": "What to add"}},
            "required": ["line"],
        },
    },
    "runtime": {"exec_path": "run", "side_effect": "write", "locks": ["notes:X"]},
}


def manifest(
    folder: Path, *, llm: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None, without: str = ""
) -> Path:
    """A sound tool with the given differences."""
    views = {"llm": {**GOOD["llm"], **(llm or {})}, "runtime": {**GOOD["runtime"], **(runtime or {})}}
    views["runtime"].pop(without, None)
    path = folder / "notes.add.json"
    path.write_text(json.dumps(views))
    program = folder / "run"
    program.write_text("#!/bin/sh\n# reads .line\n")
    program.chmod(0o755)
    return path


def list_findings(path: Path) -> list[tuple[str, str]]:
    return [(finding.severity, f"{finding.path}: {finding.text}") for finding in lint_tools(path, SANDBOX)[1]]


def property_(name: str, **schema: Any) -> dict[str, Any]:
    return {"parameters": {"type": "object", "properties": {name: schema}}}


@pytest.mark.proves("K-12")
def test_a_good_tool_has_no_findings(tmp_path: Path) -> None:
    assert list_findings(manifest(tmp_path)) == []


@pytest.mark.proves("K-12", "R-15")
@pytest.mark.parametrize(
    ("build", "path", "problem"),
    [
        (["sh", "build.sh"], "notes/run", None),
        (["./build.sh"], "notes/run", None),
        (["./make.sh"], "notes/run", "build: starts ./make.sh, which is not an executable file in notes"),
        (
            ["build.sh"],
            "notes/run",
            "build: starts build.sh from PATH, not from notes; write ./build.sh",
        ),
        (["sh", "build.sh"], "run", "runtime.build: needs a folder for the executable and its sources"),
        (["sh", "build.sh"], "none/run", "runtime.build: the folder 'none' next to the manifest is missing"),
        ([""], "notes/run", "runtime.build[0]: "),
        ("sh build.sh", "notes/run", "runtime.build: "),
    ],
)
def test_a_source_folder_is_checked_before_it_is_built(
    build: object, path: str, problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    script = tmp_path / "notes" / "build.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    found = list_findings(manifest(tmp_path, runtime={"exec_path": path, "build": build}))
    assert [text for _, text in found] == [] if problem is None else any(text.startswith(problem) for _, text in found)


@pytest.mark.proves("K-12")
@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"llm": {"description": "Adds."}}, "description: has 5 characters"),
        ({"llm": {"description": "Adds a line. " * 100}}, "description: has 1,299 characters"),
        ({"without": "side_effect"}, "side_effect: is missing, so it counts as external"),
        ({"runtime": {"side_effect": "external"}}, "side_effect: is external, but the tool requires no hosts"),
        ({"without": "locks"}, "locks: are missing, so each call locks the whole workspace"),
        (
            {"runtime": {"side_effect": "read", "requires": {"fs": {"write": ["a"]}}}},
            "side_effect: is read, but requires.fs.write names files",
        ),
        ({"runtime": {"requires": {"capabilities": ["elicit"]}}}, "locks: notes:X are held while the client decides"),
        ({"runtime": {"timeout_ms": 3_600_000}}, "timeout_ms: is 60 minutes"),
        ({"llm": property_("line", type="string")}, "parameters.line: has no description"),
        ({"llm": property_("line", description="What to add")}, "parameters.line: has no type"),
        (
            {"llm": property_("api_key", type="string", description="The key")},
            "parameters.api_key: looks like a secret",
        ),
        ({"llm": property_("path", type="string", description="Where")}, "parameters.path: looks like a path"),
        (
            {"llm": property_("colour", type="string", description="c")},
            "parameters.colour: does not occur in the implementation",
        ),
        ({"llm": property_("$line", type="string", description="l")}, "does not accept the property name '$line'"),
        (
            {"llm": {"parameters": {"type": "object", "oneOf": [{"required": ["line"]}, {"required": ["run"]}]}}},
            "parameters: gemini does not accept alternatives at the top level",
        ),
    ],
)
def test_a_likely_mistake_is_a_warning(tmp_path: Path, change: dict[str, Any], warning: str) -> None:
    found = list_findings(manifest(tmp_path, **change))
    assert any(severity == "warning" and warning in text for severity, text in found), found
    assert not any(severity == "error" for severity, _ in found)


@pytest.mark.proves("K-12")
def test_each_fault_that_start_up_would_refuse_is_an_error(tmp_path: Path) -> None:
    path = manifest(
        tmp_path, llm={"parameters": {"type": "array"}}, runtime={"locks": ["file:{gone}:S"], "tiemout_ms": 5}
    )
    found = list_findings(path)
    assert [severity for severity, _ in found] == ["error"] * 3
    text = " ".join(text for _, text in found)
    assert "tiemout_ms" in text and "'gone'" in text and "one object" in text


def object_(required: list[str], *names: str, **further: Any) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": "line"} for name in names}
    return {"type": "object", "properties": properties, "required": required, **further}


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        (object_(["line", "word"], "line"), "parameters.required"),
        (object_(["word"], "line", additionalProperties=False), "parameters.required"),
        (object_(["word"], "line", patternProperties={"^l": {}}), "parameters.required"),
        (object_(["word"], "line", allOf=[{"properties": {"other": {}}}]), "parameters.required"),
        (
            object_(["line"], properties={"line": object_(["word"], "run", additionalProperties=False)}),
            "parameters.line.required",
        ),
    ],
)
def test_a_parameter_schema_that_no_call_can_satisfy_is_an_error(
    tmp_path: Path, parameters: dict[str, Any], where: str
) -> None:
    found = [
        text
        for severity, text in list_findings(manifest(tmp_path, llm={"parameters": parameters}))
        if severity == "error"
    ]
    assert len(found) == 1 and found[0].startswith(f"{where}: names 'word', which is not in properties"), found
    values = [{}, {"line": "a"}, {"word": "b"}, {"line": "a", "word": "b"}, {"line": {"word": "b", "run": "c"}}]
    assert all(compile_schema(parameters).list_problems(value) for value in values)


@pytest.mark.parametrize(
    "parameters",
    [
        object_(["word"], "line", additionalProperties=True),
        object_(["word"], "line", patternProperties={"^w": {}}),
        object_(["word"], "line", allOf=[{"properties": {"word": {}}}]),
        object_(["word"], "line", anyOf=[{"$ref": "#/$defs/w"}], **{"$defs": {"w": {"properties": {"word": {}}}}}),
        object_(["line"], properties={"line": object_(["word"], "run")}),
    ],
)
def test_a_schema_that_a_call_can_match_gives_no_error(tmp_path: Path, parameters: dict[str, Any]) -> None:
    assert not [
        text
        for severity, text in list_findings(manifest(tmp_path, llm={"parameters": parameters}))
        if severity == "error"
    ]


@pytest.mark.parametrize(
    ("schema", "warning"),
    [
        (
            {"type": "integer", "default": "seven"},
            "has a default that does not fit its schema: `default`: expected integer, got string of 5 characters",
        ),
        ({"$ref": "#/$defs/n", "default": 9}, "has a default that does not fit its schema"),
        ({"enum": []}, "has an empty enum"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "has minimum 5 and maximum 2"),
        ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, "has minimum 2 and exclusiveMaximum 2"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "has minLength 3 and maxLength 1"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_meaningless_part_of_a_schema_is_a_warning(
    tmp_path: Path, schema: dict[str, Any], warning: str, nested: bool
) -> None:
    properties = {"line": {"type": "array", "items": schema} if nested else schema}
    parameters = {"type": "object", "properties": properties, "$defs": {"n": {"type": "integer", "maximum": 3}}}
    place = "parameters.line.items" if nested else "parameters.line"
    found = list_findings(manifest(tmp_path, llm={"parameters": parameters}))
    assert any(severity == "warning" and text.startswith(f"{place}: {warning}") for severity, text in found), found
    assert not any(severity == "error" for severity, _ in found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "default": 2, "minimum": 2, "maximum": 2},
        {"$ref": "#/$defs/n", "default": 3},
        {"type": ["string", "null"], "default": None},
        {"type": "object", "properties": {"properties": {"type": "string", "default": "x"}}},
    ],
)
def test_a_valid_default_produces_no_finding(tmp_path: Path, schema: dict[str, Any]) -> None:
    parameters = {
        "type": "object",
        "properties": {"line": {**schema, "description": "l"}},
        "$defs": {"n": {"type": "integer"}},
    }
    assert list_findings(manifest(tmp_path, llm={"parameters": parameters})) == []


@pytest.mark.proves("K-12")
def test_a_file_is_linted_alone_and_a_folder_with_all_its_files(tmp_path: Path) -> None:
    path = manifest(tmp_path)
    (tmp_path / "other.json").write_text("{")
    assert list_findings(path) == []
    assert [severity for severity, _ in list_findings(tmp_path)] == ["error"]


@pytest.mark.proves("K-12")
def test_python_files_of_a_folder_are_not_imported_and_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    with pytest.raises(UsageError, match="name the file itself"):
        list_findings(tmp_path)


@pytest.mark.proves("K-12")
def test_tools_defined_in_code_are_linted_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    source = '''
    from handrail import Runtime, Tool, ToolSpec, tool

    @tool(side_effect="read")
    async def greet(name: str, mood: str, runtime: Runtime) -> str:
        """Say hello to somebody by name.

        Args:
            name: whom
            mood: in which mood
        """
        return f"hello {name}"

    class Whole(Tool):
        spec = ToolSpec(
            id="whole", description="Gives back what it is given, whole.", side_effect="read",
            parameters={"type": "object", "properties": {"a": {"type": "string", "description": "any"}}},
        )

        async def execute(self, args, runtime):
            return args
    '''
    path.write_text(textwrap.dedent(source))
    tools, findings = lint_tools(path, SANDBOX)
    assert set(tools) >= {"greet", "whole"}
    about = {(finding.tool, finding.path) for finding in findings if "does not occur in" in finding.text}
    assert about == {("greet", "parameters.mood")}


@pytest.mark.proves("K-12")
def test_the_linter_checks_tools_in_lists_and_skips_base_classes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    source = """
    from handrail import Tool, ToolSpec, tool

    def adding(number):
        @tool(id=f"add.{number}", side_effect="read", locks=[])
        def add(value: int, unused: str) -> int:
            '''Add a fixed number to a value.'''
            return value + number

        return add

    class Greeting(Tool):
        async def execute(self, args, runtime):
            return f"{self.word} {args['name']}"

    class Hello(Greeting):
        word = "hello"
        spec = ToolSpec(
            id="hello", description="Say hello to somebody by name.", side_effect="read", locks=(),
            parameters={"type": "object", "properties": {"name": {"type": "string", "description": "whom"}}},
        )

    TOOLS = [adding(1), adding(2), Hello]
    """
    path.write_text(textwrap.dedent(source))
    tools, findings = lint_tools(path, SANDBOX)
    assert sorted(tools) == ["add.1", "add.2", "hello"]
    assert not [finding for finding in findings if finding.severity == "error"]
    assert {finding.tool for finding in findings if finding.path == "parameters.unused"} == {"add.1", "add.2"}


@pytest.mark.parametrize("name", ["accessToken", "api-key", "apiKey", "user_password", "GITHUB_TOKEN"])
@pytest.mark.proves("K-12")
def test_a_parameter_with_any_spelling_of_a_secret_name_gets_a_finding(tmp_path: Path, name: str) -> None:
    told = list_findings(manifest(tmp_path, llm=property_(name, type="string", description="what it is")))
    assert any("looks like a secret" in text for _, text in told)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("page_token", "string"), ("nextToken", "string"), ("token_count", "integer"), ("show_password", "boolean")],
)
@pytest.mark.proves("K-12")
def test_a_page_token_or_a_non_text_property_is_not_taken_for_a_secret(tmp_path: Path, name: str, kind: str) -> None:
    told = list_findings(manifest(tmp_path, llm=property_(name, type=kind, description="what it is")))
    assert not any("looks like a secret" in text for _, text in told)


@pytest.mark.proves("K-12")
def test_a_file_that_ends_the_program_is_reported_as_an_import_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise SystemExit(3)")
    assert [text for _, text in list_findings(path)] == [": cannot be imported: SystemExit: 3"]


@pytest.mark.proves("K-12")
def test_a_file_that_fails_to_import_gives_an_error_finding_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import no_such_package\n")
    assert lint_tools(path, SANDBOX)[1] == [
        LintFinding(
            "error", str(path), "", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
        )
    ]


@pytest.mark.parametrize(
    ("name", "text", "problem"), [("a.txt", "", "neither a manifest"), ("b.py", "x = 1", "has no tool")]
)
def test_a_path_without_a_tool_is_refused_with_the_reason(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=problem):
        lint_tools(tmp_path / name, SANDBOX)
    with pytest.raises(UsageError, match="does not exist"):
        lint_tools(tmp_path / "gone", SANDBOX)


@pytest.mark.proves("K-12")
def test_resources_and_prompts_are_checked_like_manifests(tmp_path: Path) -> None:
    file = tmp_path / "resources.json"
    file.write_text('{"resources": [{"uri": "a:b", "name": "x", "text": "t"}]}')
    assert (
        lint_tools(file, tier_probe.choose_sandbox())
        == lint_tools(tmp_path, tier_probe.choose_sandbox())
        == (["resources.json"], [])
    )
    file.write_text('{"resources": [{"uri": "a:b", "name": "x"}]}')
    (found,) = lint_tools(file, tier_probe.choose_sandbox())[1]
    assert (found.severity, found.path) == ("error", "resources[0]")


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft-07/schema#", "draft/2019-09/schema"])
def test_a_default_is_validated_with_the_draft_of_its_schema(tmp_path: Path, draft: str) -> None:
    parameters = {
        "$schema": f"http{'s' if '2019' in draft else ''}://json-schema.org/{draft}",
        "type": "object",
        "properties": {"line": {"type": "string", "description": "l", "default": 3}},
        "definitions": {"a b/%": {"type": "integer", "default": "x"}},
    }
    found = [
        text for _, text in list_findings(manifest(tmp_path, llm={"parameters": parameters})) if "has a default" in text
    ]
    assert [text.split(": ")[0] for text in found] == ["parameters.line", "parameters.definitions.a b/%"]
