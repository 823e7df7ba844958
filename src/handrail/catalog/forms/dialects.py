"""What each provider's schema language can say of a tool's parameters, and the form in which it takes a tool.

Sources: https://platform.openai.com/docs/guides/function-calling, https://docs.anthropic.com/en/docs/agents-and-tools/tool-use,
https://ai.google.dev/api/caching#FunctionDeclaration, https://modelcontextprotocol.io/specification (tools).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One provider's limits. Schemas beyond them are written in another way by :func:`handrail.catalog.forms.fitting.fit`.

    :param keywords: those that it reads in any schema; None for every keyword of JSON Schema
    :param plain_root: the outermost schema is an object without ``oneOf``, ``anyOf``, ``allOf`` and the like
    :param property_names: what a property may be called, or None for anything
    :param max_description: characters of a tool's description, or None
    :param form: the tool as the provider takes it, from name, description and fitted parameters
    """

    name: str
    form: Callable[[str, str, Mapping[str, Any]], dict[str, Any]]
    keywords: frozenset[str] | None = None
    plain_root: bool = True
    property_names: re.Pattern[str] | None = None
    max_description: int | None = None


def _chat(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def _responses(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    # Left out, `strict` is true there, and would refuse every schema with an optional property.
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": dict(parameters),
        "strict": False,
    }


def _messages(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": description, "input_schema": dict(parameters)}


def _declaration(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": description, "parametersJsonSchema": dict(parameters)}


def _mcp(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "description": description, "inputSchema": dict(parameters)}


OPENAI_CHAT = Dialect("openai-chat", _chat, max_description=1024)
OPENAI_RESPONSES = Dialect("openai-responses", _responses, max_description=1024)
ANTHROPIC = Dialect("anthropic", _messages, property_names=re.compile(r"[A-Za-z0-9_.-]{1,64}\Z"))
GEMINI = Dialect(
    "gemini",
    _declaration,
    keywords=frozenset(
        {
            *("type", "title", "description", "format", "enum", "properties", "required", "additionalProperties"),
            *("items", "prefixItems", "minItems", "maxItems", "minimum", "maximum", "anyOf", "propertyOrdering"),
        }
    ),
    property_names=re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}\Z"),
)
MCP = Dialect("mcp", _mcp, plain_root=False)
TEXT = Dialect("text", _mcp, plain_root=False, property_names=re.compile(r'[^\s=<>"@]{1,128}\Z'))
"""Of models that write their calls into their text; see :mod:`handrail.agent.streaming.text_calls`."""

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GEMINI, MCP)
}
