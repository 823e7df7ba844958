"""The schema language of each provider, and the form of a tool in its requests, provider tools included.

Sources: https://platform.openai.com/docs/guides/function-calling, https://docs.anthropic.com/en/docs/agents-and-tools/tool-use,
https://ai.google.dev/api/caching#FunctionDeclaration, https://modelcontextprotocol.io/specification (tools).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from handrail.contract.errors import UsageError
from handrail.contract.struct import Struct
from handrail.contract.tool.provider_tools import PROVIDER_TOOLS, ProviderToolSupport, get_provider_tool_name
from handrail.contract.tool.spec import ToolSpec

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "format"})


class ProviderSchemaDialect(Struct, frozen=True):
    """The schema language of one provider. :func:`handrail.catalog.schema_adapter.adapt_schema` adapts schemas to it.

    :param keywords: the supported keywords; None for every keyword of JSON Schema
    :param plain_root: whether the outermost schema has to be an object without ``oneOf``, ``anyOf``, ``allOf`` and similar
    :param property_names: the pattern of valid property names, or None for any name
    :param max_description: the maximum characters of a tool's description, or None
    :param form: makes the tool of a request from name, description and fitted parameters
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
    # Without it, `strict` is true there, and refuses every schema with an optional property.
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


OPENAI_CHAT = ProviderSchemaDialect("openai-chat", _chat, max_description=1024)
OPENAI_RESPONSES = ProviderSchemaDialect("openai-responses", _responses, max_description=1024)
ANTHROPIC = ProviderSchemaDialect("anthropic", _messages, property_names=re.compile(r"[A-Za-z0-9_.-]{1,64}\Z"))
GEMINI = ProviderSchemaDialect(
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
PLAIN_KEYWORDS = frozenset({"type", "description", "enum", "properties", "required", "items"})
"""The keywords that every server accepts."""
MCP = ProviderSchemaDialect("mcp", _mcp, plain_root=False)
TEXT = ProviderSchemaDialect("text", _mcp, plain_root=False, property_names=re.compile(r'[^\s=<>"@]{1,128}\Z'))
"""The dialect of models that write their calls into their text; see :mod:`handrail.agent.text_tool_calls`."""

DIALECTS: Mapping[str, ProviderSchemaDialect] = {
    dialect.name: dialect for dialect in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GEMINI, MCP)
}


def find_dialect(name: str) -> ProviderSchemaDialect:
    """Return the dialect of an API that many providers speak.

    :param name: ``openai-chat``, ``openai-responses``, ``anthropic`` or ``gemini``
    :raises UsageError: for another name
    """
    if name not in DIALECTS or name == MCP.name:
        expected = ", ".join(sorted(DIALECTS.keys() - {MCP.name}))
        raise UsageError(f"Unknown dialect: {name!r:.80}. Expected one of: {expected}.")
    return DIALECTS[name]


# Provider tools: their form in the requests to each provider, or the reason why a model does not get one.

_API_NAMES = {
    "openai-chat": "the chat completions API",
    "openai-responses": "the responses API",
    "anthropic": "the messages API",
    "gemini": "the Gemini API",
    "text": "a model that writes its calls as text",
}


def format_provider_tool(spec: ToolSpec, dialect: ProviderSchemaDialect, model: str) -> dict[str, Any] | str:
    """Return the form of a provider tool in a request, or a text that says why this model cannot have it.

    The form is an entry in the list of tools. For chat completions, it is a further parameter of the request.

    :param model: the provider's name of the model
    """
    api = _API_NAMES.get(dialect.name, dialect.name)
    support = PROVIDER_TOOLS[get_provider_tool_name(spec)].support.get(dialect.name)
    if support is None:
        those = " and ".join(
            _API_NAMES[name] for name in PROVIDER_TOOLS[get_provider_tool_name(spec)].support if name in _API_NAMES
        )
        return f"The tool {get_provider_tool_name(spec)} is not available in {api}, only in {those}."
    if dialect.name not in spec.provider_support:
        return f"The agent's manifest enables it for {', '.join(spec.provider_support)} only."
    if support.models is not None and support.models not in model:
        return f"In {api}, only models with {support.models!r} in their name have it, but not {model}."
    return _FORMS.get(dialect.name, _listed)(support, spec.provider_support[dialect.name])


def get_provider_tool_name_in_replies(spec: ToolSpec, dialect: ProviderSchemaDialect) -> str:
    support = PROVIDER_TOOLS[get_provider_tool_name(spec)].support[dialect.name]
    return support.name or support.type


def _listed(support: ProviderToolSupport, options: Mapping[str, Any]) -> dict[str, Any]:
    form: dict[str, Any] = {"type": support.type, **options}
    if support.name:
        form["name"] = support.name
    if "user_location" in form:
        form["user_location"] = {"type": "approximate", **form["user_location"]}
    return form


def _make_chat_tool(support: ProviderToolSupport, options: Mapping[str, Any]) -> dict[str, Any]:
    form = dict(options)
    if "user_location" in form:
        form["user_location"] = {"type": "approximate", "approximate": dict(form["user_location"])}
    return {f"{support.type}_options": form}


def _make_responses_tool(support: ProviderToolSupport, options: Mapping[str, Any]) -> dict[str, Any]:
    form = _listed(support, options)
    if "allowed_domains" in form:
        form["filters"] = {"allowed_domains": form.pop("allowed_domains")}
    if support.type == "code_interpreter":
        form["container"] = {"type": "auto"}
    return form


_FORMS: Mapping[str, Callable[[ProviderToolSupport, Mapping[str, Any]], dict[str, Any]]] = {
    "openai-chat": _make_chat_tool,
    "openai-responses": _make_responses_tool,
}
