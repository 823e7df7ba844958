"""Manuals of tools, and which of them a session has read."""

from __future__ import annotations

from typing import Any

import pytest
from tests.catalog.stock import CORE, entry, generation, many
from tests.tools.desk import SessionValues

from handrail.catalog.loaded_tools import DocumentationReadTracker, InteractionLoadedTools, make_example_arguments
from handrail.catalog.view import CatalogOptions
from handrail.contract.errors import ToolError
from handrail.contract.tool.tool_protocol import Tool, check_spec
from handrail.contract.tool_generation import ThirdPartySourceInfo, ToolEntry
from handrail.tools import BUILTINS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path"},
        "mode": {"enum": ["fast", "slow"]},
        "count": {"type": "integer", "minimum": 3},
        "parts": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/part"}},
        "note": {"type": "string"},
    },
    "required": ["path", "mode", "count", "parts"],
    "$defs": {"part": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}},
}


@pytest.mark.proves("D-13")
async def test_the_documentation_of_a_tool_is_complete() -> None:
    one = entry(
        "press.print",
        parameters=SCHEMA,
        documentation="Long and careful.",
        guidance="Seldom.",
        category="office",
    )
    of = InteractionLoadedTools("s", CatalogOptions(), SessionValues())
    manual = await of.make_call_catalog(generation(CORE, one)).read_documentation("press__print")
    assert (manual.id, manual.name, manual.category) == ("press.print", "press__print", "office")
    assert (manual.documentation, manual.guidance) == ("Long and careful.", "Seldom.")
    assert manual.example == {"path": "notes.md", "mode": "fast", "count": 3, "parts": [{"on": True}]}
    assert manual.parameters == SCHEMA and manual.source == ""


async def test_the_documentation_of_a_third_party_tool_names_its_source() -> None:
    of = InteractionLoadedTools("s", CatalogOptions(), SessionValues())
    manual = await of.make_call_catalog(
        generation(CORE, entry("gh_x", foreign=ThirdPartySourceInfo("github")))
    ).read_documentation("gh_x")
    assert manual.source == "github"


@pytest.mark.proves("D-13")
async def test_a_documentation_read_is_stored_for_the_session_and_the_definition() -> None:
    kept, tool = SessionValues(), entry("press.print", documentation="One.")
    of = InteractionLoadedTools("s", CatalogOptions(), kept)
    assert of.documentation_reads is not None and not await of.documentation_reads.has_read_documentation(tool)
    await of.make_call_catalog(generation(tool)).read_documentation("press.print")
    assert await of.documentation_reads.has_read_documentation(tool)
    assert await DocumentationReadTracker("s", kept).has_read_documentation(tool), "a later process knows"
    assert not await DocumentationReadTracker("other", kept).has_read_documentation(tool)
    assert not await of.documentation_reads.has_read_documentation(entry("press.print", documentation="Two.")), (
        "the manual has changed since"
    )


@pytest.mark.proves("D-13", "D-09")
async def test_the_error_for_missing_documentation_suggests_a_tool_or_gives_the_reason() -> None:
    of = InteractionLoadedTools("s", CatalogOptions(), SessionValues())
    door = of.make_call_catalog(generation(CORE, many(3), entry("no.go", withheld="not here")))
    with pytest.raises(ToolError, match=r"Did you mean reports\.t0001") as told:
        await door.read_documentation("reports.t001")
    assert told.value.kind == "unknown_tool"
    with pytest.raises(ToolError, match="not here"):
        await door.read_documentation("no.go")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "^[0-9]{9}$"}}, "required": ["x"]},
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"type": "object", "properties": {"x": False}, "required": ["x"]},
    ],
)
def test_a_schema_without_a_valid_example_gets_no_example(schema: dict[str, Any]) -> None:
    assert make_example_arguments(entry("x", parameters=schema)) is None


def test_an_example_call_has_the_required_arguments_of_its_tool() -> None:
    entries = {tool.spec.id: entry_of(tool) for tool in BUILTINS}
    assert make_example_arguments(entries["add_schedule"]) == {"prompt": "<prompt>", "every_minutes": 1}
    assert make_example_arguments(entries["edit"]) == {"path": "notes.md", "old": "<old>", "new": "<new>"}
    for one in entries.values():
        if (example := make_example_arguments(one)) is not None:
            one.validate_arguments(example)
    assert [id for id, one in entries.items() if make_example_arguments(one) is None] == [
        "file.patch",
        "scratchpad",
        "artifact.read",
    ]


def entry_of(tool: Tool) -> ToolEntry:
    schema = check_spec(tool.spec).schema
    assert schema is not None
    return ToolEntry(tool.spec, tool, schema, "here", "hash")
