"""Locked tool ids without a built-in tool: their fixed shapes, and the check whether a tool fits one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from handrail.contract.schema.argument_validation import ParametersSchema
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import TargetTemplates, ToolKind, ToolSpec, extract_property_schemas

_LONGEST = 4_000


class LockedToolShape(Struct, frozen=True):
    """The declaration of a locked id that a model sees, for any tool that answers.

    :param examples: arguments in that shape; a tool that answers must accept all of them
    :param targets: the targets of a call, for rules; the tool that answers must require that capability
    :param max_output: the default limit in bytes; None for that of the tool that answers
    """

    description: str
    parameters: Mapping[str, Any]
    examples: tuple[Mapping[str, Any], ...]
    kind: ToolKind
    targets: TargetTemplates
    max_output: int | None = None

    def build_locked_spec(self, tool_id: str, answering: ToolSpec) -> ToolSpec:
        """Return the declaration of the locked id: its own view for models, the rest from ``answering``."""
        return replace(
            answering,
            id=tool_id,
            description=self.description,
            parameters=self.parameters,
            kind=self.kind,
            targets=self.targets,
            max_output=self.max_output or answering.max_output,
            timeout_argument=None,
            background_argument=None,
            output_schema=None,
            promotable=False,
            category="web",
            tier=None,
            guidance="",
            documentation="",
            documentation_required=False,
        )

    def definition_hash(self, tool_id: str, answering: ToolSpec) -> str:
        """Return the definition hash of the locked id.

        It changes with the tool that answers and with its declaration.

        :param answering: as its author declared it
        """
        both = f"{self.build_locked_spec(tool_id, answering).definition_hash} {answering.definition_hash}"
        return hashlib.sha256(both.encode()).hexdigest()

    def find_tool_incompatibilities(self, tool_id: str, answering: ToolSpec, schema: ParametersSchema) -> Iterator[str]:
        """Yield the reasons why a tool cannot answer for the locked id.

        :param schema: of its arguments
        """
        if answering.provider_support:
            yield "the provider of the model runs it, so the kernel gets no calls"
            return
        if answering.mode != "direct":
            yield f"its mode is {answering.mode!r}; {tool_id} requires the mode 'direct'"
        names = list(self.parameters["properties"])
        if missing := [name for name in names if name not in extract_property_schemas(answering.parameters)]:
            yield f"the parameter {' and '.join(missing)} is missing; {tool_id} requires {', '.join(names)}"
            return
        for example in self.examples:
            if problems := schema.list_problems(dict(example)):
                yield f"it rejects the arguments {dict(example)} of {tool_id}: {'; '.join(problems)}"
                return
        if "net.fetch" in self.targets and not answering.requires.net.hosts:
            yield f"it declares no hosts, and {tool_id} needs them; declare the hosts under requires.net.hosts"


LOCKED_SHAPES: Mapping[str, LockedToolShape] = MappingProxyType(
    {
        "web_search": LockedToolShape(
            "Search the web. Returns results, each with title, url and snippet. Fetch a page that you need with web_fetch.",
            {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "minLength": 1, "maxLength": _LONGEST, "description": "Search query"},
                    "max_results": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": 100,
                        "description": "Maximum number of results. Default: set by the provider",
                    },
                },
                "required": ["query"],
                "additionalProperties": False,
            },
            ({"query": "weather in Bern"}, {"query": "weather in Bern", "max_results": 5}),
            "search",
            {},
        ),
        "web_fetch": LockedToolShape(
            "Fetch a URL and return its content as text.",
            {
                "type": "object",
                "properties": {
                    "url": {
                        "type": "string",
                        "format": "uri",
                        "minLength": 1,
                        "maxLength": _LONGEST,
                        "description": "URL, starting with https:// or http://",
                    }
                },
                "required": ["url"],
                "additionalProperties": False,
            },
            ({"url": "https://example.org/page?a=b"},),
            "fetch",
            {"net.fetch": "{url}"},
            200 * 1024,
        ),
    }
)
"""By id. The built-in tool of an id has this shape, too; without one, the id exists if the operator names a tool."""
