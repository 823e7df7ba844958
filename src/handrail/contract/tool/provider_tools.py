"""Tools that a model's provider carries out itself, and the options that each provider accepts for them.

An agent's manifest names the ones that its models may use. The kernel never runs them: the provider does, as a part of its
reply, and sends their results in the same stream.

Sources: https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/web-search-tool (and web-fetch, code-execution),
https://platform.openai.com/docs/guides/tools, https://platform.openai.com/docs/guides/tools-web-search (chat completions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

_COUNT = {"type": "integer", "minimum": 1}
_DOMAINS = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1_000}
_PLACE = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 1} for name in ("city", "region", "country", "timezone")},
    "additionalProperties": False,
    "minProperties": 1,
}
_DETAIL = {"enum": ["low", "medium", "high"]}


class ProviderToolSupport(Struct, frozen=True):
    """The form of a provider tool at one provider.

    :param type: its name in the list of tools
    :param options: the schemas of its options, by name; unknown options are rejected
    :param name: its name in replies, if that is not ``type``
    :param models: a word in the names of the models that have it; None if all may
    """

    type: str
    options: Mapping[str, Any]
    name: str = ""
    models: str | None = None

    def find_option_problems(self, given: Mapping[str, Any]) -> list[str]:
        """Return the problems of the given options; empty if they are valid."""
        found = compile_schema({"type": "object", "properties": self.options}).list_problems(dict(given))
        if not found and "allowed_domains" in given and "blocked_domains" in given:
            found.append("`allowed_domains` and `blocked_domains` exclude each other; use one of them")
        return found


class ProviderToolInfo(Struct, frozen=True):
    """One provider tool.

    :param support: by the name of a provider's API (:data:`handrail.catalog.provider_dialects.DIALECTS`)
    """

    description: str
    support: Mapping[str, ProviderToolSupport]


_SITES = {"allowed_domains": _DOMAINS, "blocked_domains": _DOMAINS}
_SEARCH = {"search_context_size": _DETAIL, "user_location": _PLACE}
_IMAGE = {
    "size": {"enum": ["auto", "1024x1024", "1024x1536", "1536x1024"]},
    "quality": {"enum": ["auto", "low", "medium", "high"]},
    "background": {"enum": ["auto", "transparent", "opaque"]},
    "output_format": {"enum": ["png", "jpeg", "webp"]},
}

PROVIDER_TOOLS: Mapping[str, ProviderToolInfo] = MappingProxyType(
    {
        "web_search": ProviderToolInfo(
            "Search the web and return the results with their sources.",
            {
                "anthropic": ProviderToolSupport(
                    "web_search_20250305", {"max_uses": _COUNT, **_SITES, "user_location": _PLACE}, name="web_search"
                ),
                "openai-chat": ProviderToolSupport("web_search", _SEARCH, models="search"),
                "openai-responses": ProviderToolSupport("web_search", {**_SEARCH, "allowed_domains": _DOMAINS}),
            },
        ),
        "web_fetch": ProviderToolInfo(
            "Fetch a page or document that the conversation names, and return its text.",
            {
                "anthropic": ProviderToolSupport(
                    "web_fetch_20250910", {"max_uses": _COUNT, "max_content_tokens": _COUNT, **_SITES}, name="web_fetch"
                )
            },
        ),
        "code_execution": ProviderToolInfo(
            "Run code in a container of the provider, without access to the workspace.",
            {
                "anthropic": ProviderToolSupport("code_execution_20250825", {}, name="code_execution"),
                "openai-responses": ProviderToolSupport("code_interpreter", {}),
            },
        ),
        "image_generation": ProviderToolInfo(
            "Create or edit an image.", {"openai-responses": ProviderToolSupport("image_generation", _IMAGE)}
        ),
    }
)
"""The provider tools, by their names in an agent's manifest."""


class ProviderToolOffer(NamedTuple):
    """A provider tool that an agent's models may be offered.

    :param unavailable_reason: why this session excludes it, or None
    """

    spec: ToolSpec
    unavailable_reason: str | None = None


PROVIDER_ONLY_TEXT = "The provider of the model runs this tool as a part of its reply. It cannot be called here."
"""Why a call of a provider tool cannot run."""

ProviderToolOptions = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""``[native]`` of an agent's manifest: name, then provider, then options."""


def make_provider_tool_id(name: str) -> str:
    """Return the tool id of a provider tool."""
    return f"native.{name}"


def collect_provider_tool_options(name: str, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the providers that are offered the tool, each with its options.

    If no provider is named, all that have the tool are offered it.
    """
    return {provider: dict(chosen.get(provider, {})) for provider in chosen or PROVIDER_TOOLS[name].support}


def find_provider_tool_faults(chosen: ProviderToolOptions) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield ``(place, problem)`` for unknown tools and providers, and for invalid options."""
    for name, providers in chosen.items():
        if (known := PROVIDER_TOOLS.get(name)) is None:
            close = nearest_names(name, PROVIDER_TOOLS, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            yield (name,), f"unknown provider tool {name[:80]!r}; {hint}available: {', '.join(PROVIDER_TOOLS)}"
            continue
        for provider, options in providers.items():
            if (support := known.support.get(provider)) is None:
                there = ", ".join(known.support)
                yield (
                    (name, provider),
                    f"{name} is not available from {provider[:80]!r}; the providers with it are {there}",
                )
                continue
            for problem in support.find_option_problems(options):
                yield (name, provider), problem


def make_provider_tool_spec(name: str, chosen: Mapping[str, Mapping[str, Any]]) -> ToolSpec:
    """Return the tool for the registry. It has no parameters: its provider defines their form."""
    return ToolSpec(
        id=make_provider_tool_id(name),
        description=PROVIDER_TOOLS[name].description,
        side_effect="external",
        locks=(),
        category="native",
        provider_support=collect_provider_tool_options(name, chosen),
    )


def get_provider_tool_name(spec: ToolSpec) -> str:
    """Return the name of the tool in :data:`PROVIDER_TOOLS`."""
    return spec.id.removeprefix("native.")
