"""browse_tools, load_tools, find_tools, tool_search, info: discovery of tools that are not loaded yet.

They neither grant nor remove the right to run a tool. A loaded tool is in the model's view from its next request on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.services.job_and_tool_services import (
    UNLISTED_PREFIX,
    ToolDocumentation,
    ToolLoadResult,
    ToolMatch,
    ToolSearchResult,
)
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import make_closed_object_schema

MAX_DESCRIPTION = 200
"""The most characters of a tool's description in a list of hits."""
MAX_HITS = 10
_NEAREST = 3
"""The most tools that are named if no tool matches."""
_THROUGH_ALL = "find_tools searches all tools, including those of Handrail"
_NOT_FROM_OUTSIDE = f"No match{{by}}: no tool from an MCP server or extension does this. {_THROUGH_ALL}."
_LAST_RESORT = "rephrase the query once, use browse_tools, or tell the user that there is no such tool"
_OUT_OF_DOMAIN = "No match{by}: {why}. If that finds nothing either, {then}."
"""The message for a query that may not have been understood."""
_QUERY = {"type": "string", "minLength": 1, "maxLength": 4_000}
_discovery_spec = partial(
    ToolSpec,
    requires=Requires(capabilities=("catalog",)),
    side_effect="read",
    locks=(),
    category="system",
    tier="core",
    kind="search",
)


class ListToolCategoriesTool(Tool):
    spec = _discovery_spec(
        id="browse_tools",
        description="List the categories of tools that are not loaded, with the number of tools in each.",
        parameters=make_closed_object_schema({}),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {
            "categories": [
                {"name": one.name, "description": one.description, "tool_count": one.tool_count}
                for one in await runtime.catalog.list_categories()
            ]
        }


class LoadToolsTool(Tool):
    spec = _discovery_spec(
        id="load_tools",
        description=("Load all tools of a category, or one tool by its ID. You can call them from your next reply."),
        parameters=make_closed_object_schema(
            {
                "category": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 128,
                    "description": "Category, as listed by browse_tools. Required unless `tool` is given",
                },
                "tool": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 128,
                    "description": "ID of one tool. Required unless `category` is given",
                },
            }
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        if len(args) != 1:
            raise ToolError(
                ("`category` and `tool` exclude each other. " if args else "`category` or `tool` is missing. ")
                + "Pass `category` with a name from browse_tools, or `tool` with the id of one tool.",
                kind="invalid_input",
            )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        kind = "category" if "category" in args else "tool"
        loaded = await runtime.catalog.load(args[kind], kind=kind)
        message = _load_message(loaded)
        if not loaded.tools:
            about = (one.description for one in await runtime.catalog.list_categories() if one.name == loaded.name)
            message = " ".join([message, *about])
        fields = {"loaded": loaded.name, "tools_added": list(loaded.added), "message": message}
        return fields | _describe_unloaded_tools(loaded.unloaded)


class FindToolsTool(Tool):
    spec = _discovery_spec(
        id="find_tools",
        description=(
            "Search for tools that are not loaded, by what they do, and load the best matches. You can call "
            "them from your next reply. Describe the capability in English; pass several as `queries`. "
            "Returns an explicit message if no tool matches."
        ),
        parameters=make_closed_object_schema(
            {
                "query": {
                    **_QUERY,
                    "description": "Capability, e.g. 'send an email with attachments'. Required unless `queries` is given",
                },
                "queries": {
                    "type": "array",
                    "items": _QUERY,
                    "minItems": 1,
                    "maxItems": 5,
                    "description": "Several capabilities. Default: none",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MAX_HITS,
                    "description": "Maximum number of tools per query. Default: 5",
                },
            }
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        queries = _parse_queries(args)
        limit = int(args.get("limit", 5))
        found = await _find_and_load(queries, limit, runtime)
        best: dict[str, ToolMatch] = {}
        for findings in found:
            for hit in () if findings.no_match else findings.matches:
                if hit.tool_id not in best or hit.confidence > best[hit.tool_id].confidence:
                    best[hit.tool_id] = hit
        fields: dict[str, Any] = {"tools": [_hit_data(hit) for hit in best.values()]}
        missed = [query for query, findings in zip(queries, found, strict=False) if findings.no_match]
        if len(found) < len(queries):
            fields["not_loaded"] = queries[len(found) :]
        if missed:
            fields["no_match"] = missed if len(queries) > 1 else True
        near = [hit for one in found if one.no_match for hit in one.matches[:_NEAREST]]
        named = dict.fromkeys(hit.tool_id for hit in near if not hit.is_below_threshold and hit.tool_id not in best)
        if named:
            fields["nearest_unloaded"] = list(named)
        fields["message"] = _next_step_text(found, len(best), len(missed))
        fields |= _describe_unloaded_tools(
            dict.fromkeys(tool_id for findings in found for tool_id in findings.unloaded)
        )
        if missed:
            fields |= await _unlisted_sources_data(runtime)
        return _label_untrusted(fields, best.values())


class ExtensionToolSearchTool(Tool):
    spec = _discovery_spec(
        id="tool_search",
        description=(
            "Search the tools of MCP servers and extensions, and load the matches. You can call them from "
            "your next reply. To search all tools use find_tools."
        ),
        parameters=make_closed_object_schema({"query": {**_QUERY, "description": "Capability, in English"}}, ["query"]),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        findings = await runtime.catalog.search_and_load(args["query"], limit=MAX_HITS, extensions_only=True)
        hits = () if findings.no_match else findings.matches[:MAX_HITS]
        fields: dict[str, Any] = {
            "tools": [{"id": hit.tool_id, "description": _short(hit.description)} for hit in hits]
        }
        fields |= _describe_unloaded_tools(findings.unloaded)
        if hits and (went := _explain_uncompared([findings])):
            fields["message"] = went
        if not hits:
            message = _OUT_OF_DOMAIN if findings.query_problem else _NOT_FROM_OUTSIDE
            message = message.format(
                by=f" (compared by {findings.search_method})", why=findings.query_problem, then=_THROUGH_ALL
            )
            fields |= {"no_match": True, "message": message}
            fields |= await _unlisted_sources_data(runtime)
        return _label_untrusted(fields, hits)


class ToolDocumentationTool(Tool):
    spec = _discovery_spec(
        id="info",
        description="Show the full documentation of one tool: description, parameters and an example call.",
        parameters=make_closed_object_schema(
            {"tool": {"type": "string", "minLength": 1, "maxLength": 128, "description": "ID of the tool"}},
            ["tool"],
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        manual = await runtime.catalog.read_documentation(args["tool"])
        fields = make_documentation_data(manual)
        return (
            Result.output(fields, untrusted_source=make_untrusted_metadata([manual.source]))
            if manual.source
            else fields
        )


def make_documentation_data(manual: ToolDocumentation) -> dict[str, Any]:
    """Return a tool's documentation for the model, without empty members."""
    fields: dict[str, Any] = {
        "id": manual.id,
        "name": manual.name,
        "category": manual.category,
        "description": manual.description,
        "parameters": dict(manual.parameters),
    }
    fields |= {
        key: value for key, value in (("documentation", manual.documentation), ("guidance", manual.guidance)) if value
    }
    if manual.example is not None:
        fields["example"] = dict(manual.example)
    return fields


def make_untrusted_metadata(sources: Iterable[str]) -> str:
    """Return the ``untrusted`` metadata for texts of third-party sources."""
    return f"the texts of tools from {', '.join(sorted(set(sources)))} come from their authors, not from the operator"


def _parse_queries(args: dict[str, Any]) -> list[str]:
    if ("query" in args) == ("queries" in args):
        raise ToolError("Pass exactly one of `query`, for one need, and `queries`, for several.", kind="invalid_input")
    return args.get("queries") or [args["query"]]


def _load_message(loaded: ToolLoadResult) -> str:
    name, count = loaded.name, len(loaded.tools)
    if loaded.is_core:
        return (
            "Core tools are always loaded." if loaded.kind == "category" else f"{name} is a core tool: always loaded."
        )
    if loaded.kind == "tool":
        return f"{name} is now available." if loaded.added else f"{name} was already loaded."
    if not count:
        return f"No {name} tools were loaded."
    if not loaded.added:
        return f"All {count} {name} tools were already loaded."
    return f"{count} {name} tools are now available." if count > 1 else f"1 {name} tool is now available."


async def _find_and_load(queries: Sequence[str], limit: int, runtime: Runtime) -> list[ToolSearchResult]:
    """Search and load tools for each query, as long as there is room.

    :raises ToolError: if the search for the first query fails
    """
    catalog = runtime.catalog  # one catalog for all, so that a query does not unload the matches of another
    found: list[ToolSearchResult] = []
    for query in queries:
        try:
            found.append(await catalog.search_and_load(query, limit=limit))
        except ToolError as full:
            if full.kind != "conflict" or not found:
                raise
            break
    return found


def _describe_unloaded_tools(left: Iterable[str]) -> dict[str, Any]:
    """Return the tools that were unloaded to make room, if any."""
    names = list(left)
    if not names:
        return {}
    why = "These tools were found first and never called. Load them again with find_tools or load_tools."
    return {"unloaded": {"tools": names, "why": why}}


def _hit_data(hit: ToolMatch) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": hit.tool_id,
        "description": _short(hit.description),
        "confidence": round(hit.confidence, 2),
    }
    if hit.is_weak:
        fields["low_confidence"] = True
    return fields


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DESCRIPTION else f"{line[: MAX_DESCRIPTION - 1]}…"


def _next_step_text(found: Sequence[ToolSearchResult], hits: int, missed: int) -> str:
    """Return the message about the result and the next step."""
    by = next((f" (compared by {one.search_method})" for one in found if one.search_method), "")
    strange = next((one.query_problem for one in found if one.query_problem), "")
    if not hits and strange:
        return _OUT_OF_DOMAIN.format(by=by, why=strange, then=_LAST_RESORT)
    if not hits:
        return f"No match{by}: no available tool does this; {_LAST_RESORT}."
    loaded = "1 tool is loaded; you can call it" if hits == 1 else f"{hits} tools are loaded; you can call them"
    rest = f" {missed} of the queries had no match{by}: {strange or 'no available tool does this'}." if missed else ""
    went = _explain_uncompared([one for one in found if not one.no_match])
    return f"{loaded} from your next reply.{rest}{went and ' '}{went}"


def _explain_uncompared(found: Iterable[ToolSearchResult]) -> str:
    """Return what a search did not compare and why; empty if it compared all by words and meaning."""
    for means, colon, why in (one.search_method.partition(": ") for one in found):
        if means == "words only":
            reason = f" ({why})" if why else ""
            return f"Compared by words only, not by meaning{reason}: tools described in other words were not found."
        if colon:
            return f"Compared by meaning only in part ({why})."
    return ""


async def _unlisted_sources_data(runtime: Runtime) -> dict[str, Any]:
    """Return the sources that have not listed their tools yet, and so may have a match."""
    names = {
        one.name: one.description
        for one in await runtime.catalog.list_categories()
        if one.name.startswith(UNLISTED_PREFIX)
    }
    return {"not_searched": names} if names else {}


def _label_untrusted(fields: dict[str, Any], hits: Iterable[ToolMatch]) -> object:
    sources = [hit.source for hit in hits if hit.source]
    return Result.output(fields, untrusted_source=make_untrusted_metadata(sources)) if sources else fields
