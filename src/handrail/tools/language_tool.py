"""The tool ``lsp``: questions to language servers about definitions, references, types, symbols, errors and renames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.services.language_services import (
    CodeLocation,
    LocationQueryResult,
    SymbolQuery,
    convert_completeness_to_json,
)
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import FsRequires, Requires, ShellRequires
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import MAX_PATH, file_read_spec, make_closed_object_schema

MAX_RESULTS = 200
"""The maximum number of places, symbols, diagnostics or lines in an answer."""
_MAX_FILES = 100
_MAX_HOVER = 8_000
_PROGRAMS = ("ty", "basedpyright-langserver", "pyright-langserver", "tsc", "clangd", "gopls")
"""The servers of the known languages, so that rules about programs decide about them. The operator names all others."""
ACTIONS = ("definition", "references", "hover", "symbols", "diagnostics", "rename_preview")


class LanguageServerTool(Tool):
    spec = file_read_spec(
        id="lsp",
        description=(
            "Ask a language server where a symbol is defined or used, or for its type and documentation (hover). It also lists "
            "symbols, finds errors in a file (diagnostics), and previews a rename without changing anything. Use it instead of "
            "grep to find uses, and after an edit to find errors. Give the name in `symbol`, or `path` and `line`. Returns "
            "path, line, column and source line, for the current contents of files. If `incomplete` is true, see `why`."
        ),
        parameters=make_closed_object_schema(
            {
                "action": {
                    "type": "string",
                    "enum": list(ACTIONS),
                    "description": "Question: definition, references, hover, symbols, diagnostics or rename_preview",
                },
                "path": {
                    "type": "string",
                    "format": "path",
                    "minLength": 1,
                    "maxLength": MAX_PATH,
                    "description": "File that has the symbol; required for diagnostics. Default: search the workspace",
                },
                "line": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Line of the symbol in `path`, from 1. Default: the line of `symbol`",
                },
                "symbol": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 300,
                    "description": "Name such as `parse` or `Parser.parse`; for symbols, a part of it. Default: the one that `line` defines",
                },
                "new_name": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 300,
                    "description": "New name, required for rename_preview. Default: none",
                },
            },
            ["action"],
        ),
        requires=Requires(
            fs=FsRequires(read=("{workspace}",)), shell=tuple(ShellRequires(cmd=program) for program in _PROGRAMS)
        ),
        kind="search",
        timeout_ms=180_000,
        max_entries=MAX_RESULTS,
    )

    def check(self, args: dict[str, Any]) -> None:
        action = args["action"]
        if action == "rename_preview" and "new_name" not in args:
            raise ToolError("`new_name` is missing for rename_preview. Pass the new name.", kind="invalid_input")
        if action == "diagnostics" and "path" not in args:
            raise ToolError("`path` is missing for diagnostics. Pass the path of a file.", kind="invalid_input")
        if "line" in args and "path" not in args:
            raise ToolError("`path` is missing for `line`. Pass the file of the line.", kind="invalid_input")
        if "path" not in args and "symbol" not in args:
            raise ToolError("The symbol is missing. Pass `symbol`, or `path` and `line`.", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        servers = runtime.language_servers
        query = SymbolQuery(args.get("path"), args.get("line"), args.get("symbol"))
        match args["action"]:
            case "definition":
                return _describe_locations(await servers.find_definitions(query))
            case "references":
                return _describe_locations(await servers.find_references(query))
            case "hover":
                hover = await servers.describe_symbol(query)
                text = hover.text[:_MAX_HOVER]
                return {
                    **_describe_location(hover.location),
                    "hover": text,
                    **convert_completeness_to_json(hover.quality),
                }
            case "symbols":
                symbols = await servers.list_symbols(query.path, name=query.symbol)
                found = [
                    {"name": one.name, "kind": one.kind, "container": one.container, **_describe_location(one.location)}
                    for one in symbols.symbols
                ]
                return {
                    "symbols": found[:MAX_RESULTS],
                    "total": len(found),
                    **convert_completeness_to_json(symbols.quality),
                }
            case "diagnostics":
                problems = await servers.list_diagnostics(args["path"])
                listed = [
                    {
                        "severity": one.severity,
                        "message": one.message,
                        "code": one.code,
                        **_describe_location(one.location),
                    }
                    for one in problems.diagnostics
                ]
                return {
                    "diagnostics": listed[:MAX_RESULTS],
                    "total": len(listed),
                    **convert_completeness_to_json(problems.quality),
                }
            case _:
                rename = await servers.preview_rename(query, args["new_name"])
                edits = [{**_describe_location(one.location), "new_text": one.new_text} for one in rename.edits]
                answer: dict[str, object] = {"edits": edits[:MAX_RESULTS], "total": len(edits)}
                if rename.other_changes:
                    answer["other_changes"] = list(rename.other_changes)
                return {
                    **answer,
                    **_count_by_file([one.location for one in rename.edits]),
                    **convert_completeness_to_json(rename.quality),
                }


def _describe_location(location: CodeLocation) -> dict[str, object]:
    found: dict[str, object] = {"path": location.path, "line": location.line, "column": location.column}
    if location.text is not None:
        found["text"] = location.text
    return found


def _describe_locations(answer: LocationQueryResult) -> dict[str, object]:
    locations = answer.locations
    return {
        "locations": [_describe_location(one) for one in locations[:MAX_RESULTS]],
        "total": len(locations),
        **_count_by_file(locations),
        **convert_completeness_to_json(answer.quality),
    }


def _count_by_file(locations: Sequence[CodeLocation]) -> dict[str, object]:
    """Return how many places each file has, if not all of them are listed."""
    if len(locations) <= MAX_RESULTS:
        return {}
    return {"files": dict(Counter(one.path for one in locations).most_common(_MAX_FILES))}
