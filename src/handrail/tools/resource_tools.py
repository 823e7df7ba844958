"""resource.list, .read, .subscribe, .unsubscribe, prompt.list, .get, .complete: resources and prompts of sources.

Results are MCP's, as plain data. The operator's own may be read. A server's text is requested under the rules about that
server, and is labelled with its origin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.services.resource_services import (
    SOURCE_PREFIX,
    PromptSpec,
    ResourceSpec,
    ResourceTemplate,
    SourceRequestSpec,
    SourceResources,
    SourceResponse,
)
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import make_closed_object_schema

MAX_URI = 4_096
MAX_NAME = 512
MAX_ARGUMENTS = 100
MAX_VALUES = 100
"""The most completions in one answer, as in MCP."""
CATEGORY = "system"
_URI = {"type": "string", "minLength": 1, "maxLength": MAX_URI, "description": "URI of the resource"}
_SOURCE = {
    "type": "string",
    "maxLength": MAX_NAME,
    "description": "Only this source, by the name that the operator gave it. Default: all",
}
_ARGUMENTS = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": 100_000},
    "maxProperties": MAX_ARGUMENTS,
    "description": "Arguments of the prompt by name, each a string. Default: none",
}
_ASKING_REQUIRES = Requires(capabilities=("resources", "elicit", "sample", "roots"))
"""A server may send requests to the client before it answers, if the operator has granted that."""
_spec = partial(ToolSpec, requires=Requires(capabilities=("resources",)), locks=(), category=CATEGORY)


class ResourceListTool(Tool):
    spec = _spec(
        id="resource.list",
        description=(
            "List the available resources of MCP servers and of the operator, and the URI templates of further ones."
        ),
        parameters=make_closed_object_schema({"source": _SOURCE}),
        side_effect="read",
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        offerings = _listings_of(await runtime.resources.list_sources(), args.get("source"))
        fields: dict[str, Any] = {"resources": [], "resourceTemplates": []}
        seen: set[str] = set()
        for offering in offerings:
            for spec in offering.resources:
                uri = _unique_name(spec.uri, offering, seen)
                fields["resources"].append({**_resource_data(spec), "uri": uri, **_source_data(offering)})
            fields["resourceTemplates"] += [
                {**_template_data(spec), **_source_data(offering)} for spec in offering.templates
            ]
        return _label_untrusted(fields, offerings)


class ResourceReadTool(Tool):
    source_request = SourceRequestSpec("resources/read", "uri")
    spec = _spec(
        id="resource.read",
        description=(
            "Read (fetch) the contents of a resource by its URI, as listed by resource.list or made from one "
            "of its templates."
        ),
        parameters=make_closed_object_schema({"uri": _URI}, ["uri"]),
        requires=_ASKING_REQUIRES,
        side_effect="external",
        kind="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return _content_result(await runtime.resources.read(args["uri"]))


class ResourceSubscribeTool(Tool):
    source_request = SourceRequestSpec("resources/subscribe", "uri")
    spec = _spec(
        id="resource.subscribe",
        description=(
            "Subscribe to a resource: notify the client of this session whenever it changes, until the session ends."
        ),
        parameters=make_closed_object_schema({"uri": _URI}, ["uri"]),
        side_effect="external",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        await runtime.resources.subscribe(args["uri"])
        return {"subscribed": args["uri"]}


class ResourceUnsubscribeTool(Tool):
    spec = _spec(
        id="resource.unsubscribe",
        description="Unsubscribe from a resource: end the notifications that resource.subscribe started.",
        parameters=make_closed_object_schema({"uri": _URI}, ["uri"]),
        side_effect="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {"unsubscribed": await runtime.resources.unsubscribe(args["uri"])}


class PromptListTool(Tool):
    spec = _spec(
        id="prompt.list",
        description=(
            "List the available prompts (prompt templates) of MCP servers and of the operator, with their arguments."
        ),
        parameters=make_closed_object_schema({"source": _SOURCE}),
        side_effect="read",
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        offerings = _listings_of(await runtime.resources.list_sources(), args.get("source"))
        seen: set[str] = set()
        fields = [
            {**_prompt_data(spec), "name": _unique_name(spec.name, offering, seen), **_source_data(offering)}
            for offering in offerings
            for spec in offering.prompts
        ]
        return _label_untrusted({"prompts": fields}, offerings)


class PromptGetTool(Tool):
    source_request = SourceRequestSpec("prompts/get", "name")
    spec = _spec(
        id="prompt.get",
        description="Get (render) a prompt by its name, filled in with arguments. Returns its messages.",
        parameters=make_closed_object_schema(
            {
                "name": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_NAME,
                    "description": "Name of the prompt, as listed by prompt.list",
                },
                "arguments": _ARGUMENTS,
            },
            ["name"],
        ),
        requires=_ASKING_REQUIRES,
        side_effect="external",
        kind="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return _content_result(await runtime.resources.get_prompt(args["name"], args.get("arguments", {})))


class PromptCompleteTool(Tool):
    source_request = SourceRequestSpec("completion/complete", "ref")
    spec = _spec(
        id="prompt.complete",
        description="Suggest (autocomplete) values for an argument of a prompt or of a URI template.",
        parameters=make_closed_object_schema(
            {
                "ref": {
                    **make_closed_object_schema(
                        {
                            "type": {
                                "enum": ["ref/prompt", "ref/resource"],
                                "description": "Prompt, or resource template",
                            },
                            "name": {
                                "type": "string",
                                "maxLength": MAX_NAME,
                                "description": "Name of the prompt. Required for ref/prompt",
                            },
                            "uri": {
                                "type": "string",
                                "maxLength": MAX_URI,
                                "description": "URI template. Required for ref/resource",
                            },
                            "title": {
                                "type": "string",
                                "maxLength": MAX_NAME,
                                "description": "Title of the prompt. Default: none",
                            },
                        },
                        ["type"],
                    ),
                    "description": "Prompt or template to complete",
                },
                "argument": {
                    **make_closed_object_schema(
                        {
                            "name": {"type": "string", "maxLength": MAX_NAME, "description": "Name of the argument"},
                            "value": {"type": "string", "maxLength": 10_000, "description": "Text to complete"},
                        },
                        ["name", "value"],
                    ),
                    "description": "Argument to complete",
                },
                "context": {**_ARGUMENTS, "description": "Arguments that are already known. Default: none"},
            },
            ["ref", "argument"],
        ),
        side_effect="external",
        kind="search",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        given = await runtime.resources.complete(args["ref"], args["argument"], args.get("context", {}))
        values = given.data["values"]
        fields = {**given.data, "values": values[:MAX_VALUES]}
        if len(values) > MAX_VALUES:
            fields |= {"total": max(len(values), int(given.data.get("total") or 0)), "hasMore": True}
        return _content_result(SourceResponse(fields, given.source))


RESOURCE_TOOLS: tuple[Tool, ...] = (
    ResourceListTool(),
    ResourceReadTool(),
    ResourceSubscribeTool(),
    ResourceUnsubscribeTool(),
    PromptListTool(),
    PromptGetTool(),
    PromptCompleteTool(),
)


def _listings_of(offerings: Sequence[SourceResources], source: str | None) -> Sequence[SourceResources]:
    """Return the listings of one source, or all.

    :raises ToolError: if the source does not exist
    """
    ordered = sorted(offerings, key=lambda one: one.is_third_party)
    if not source:
        return ordered
    found = [one for one in ordered if one.is_third_party and one.source == source]
    if not found:
        there = ", ".join(dict.fromkeys(one.source for one in ordered if one.is_third_party)) or "none"
        text = f"Source {source[:80]!r} does not exist or provides nothing. Sources: {there}."
        raise ToolError(text, kind="invalid_input")
    return found


def _unique_name(name: str, offering: SourceResources, seen: set[str]) -> str:
    """Return a name, with its source as prefix if an earlier source has the same name."""
    if name in seen and offering.is_third_party:
        return f"{SOURCE_PREFIX}{offering.source}:{name}"
    seen.add(name)
    return name


def _source_data(offering: SourceResources) -> dict[str, str]:
    return {"source": offering.source} if offering.is_third_party else {}


def _resource_data(spec: ResourceSpec) -> dict[str, Any]:
    fields = {"name": spec.name, "title": spec.title, "description": spec.description}
    return _without_empty({**spec.more, **fields, "mimeType": spec.media_type, "size": spec.size})


def _template_data(spec: ResourceTemplate) -> dict[str, Any]:
    fields = {"uriTemplate": spec.uri_template, "name": spec.name, "title": spec.title, "description": spec.description}
    return _without_empty({**spec.more, **fields, "mimeType": spec.media_type})


def _prompt_data(spec: PromptSpec) -> dict[str, Any]:
    fields = {"title": spec.title, "description": spec.description}
    return {
        **_without_empty({**spec.more, **fields}),
        "arguments": [_without_empty(asdict(one)) for one in spec.arguments],
    }


def _without_empty(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that have a value."""
    return {key: value for key, value in members.items() if value not in ("", None)}


def _content_result(given: SourceResponse) -> object:
    data = dict(given.data)
    return Result.output(data, untrusted_source=given.source) if given.source else data


def _label_untrusted(fields: dict[str, Any], offerings: Sequence[SourceResources]) -> object:
    sources = [one.source for one in offerings if one.is_third_party]
    return Result.output(fields, untrusted_source=", ".join(sorted(set(sources)))) if sources else fields
