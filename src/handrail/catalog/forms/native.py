"""A tool that a provider carries out itself, in the form in which that provider takes it, or why a model is not offered it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from handrail.catalog.forms.dialects import Dialect
from handrail.contract.tool.native import NATIVE, Support, native_name
from handrail.contract.tool.spec import ToolSpec

_API = {
    "openai-chat": "the chat completions API",
    "openai-responses": "the responses API",
    "anthropic": "the messages API",
    "gemini": "the Gemini API",
    "text": "a model that writes its calls as text",
}


def in_own_form(spec: ToolSpec, dialect: Dialect, model: str) -> dict[str, Any] | str:
    """What stands for it in a request: an entry of the list of tools, or for chat completions a further parameter. A text
    where this model cannot have it: why.

    :param model: its name, as the provider knows it
    """
    api = _API.get(dialect.name, dialect.name)
    support = NATIVE[native_name(spec)].support.get(dialect.name)
    if support is None:
        those = " and ".join(_API[name] for name in NATIVE[native_name(spec)].support if name in _API)
        return f"{api} has no {native_name(spec)}, only {those}"
    if dialect.name not in spec.provider_support:
        return f"the agent's manifest has it for {', '.join(spec.provider_support)} only"
    if support.models is not None and support.models not in model:
        return f"in {api} only models with {support.models!r} in their name have it, and {model} is none"
    return _FORMS.get(dialect.name, _listed)(support, spec.provider_support[dialect.name])


def name_in_reply(spec: ToolSpec, dialect: Dialect) -> str:
    """By what name a reply speaks of it."""
    support = NATIVE[native_name(spec)].support[dialect.name]
    return support.name or support.type


def _listed(support: Support, options: Mapping[str, Any]) -> dict[str, Any]:
    form: dict[str, Any] = {"type": support.type, **options}
    if support.name:
        form["name"] = support.name
    if "user_location" in form:
        form["user_location"] = {"type": "approximate", **form["user_location"]}
    return form


def _of_chat(support: Support, options: Mapping[str, Any]) -> dict[str, Any]:
    form = dict(options)
    if "user_location" in form:
        form["user_location"] = {"type": "approximate", "approximate": dict(form["user_location"])}
    return {f"{support.type}_options": form}


def _of_responses(support: Support, options: Mapping[str, Any]) -> dict[str, Any]:
    form = _listed(support, options)
    if "allowed_domains" in form:
        form["filters"] = {"allowed_domains": form.pop("allowed_domains")}
    if support.type == "code_interpreter":
        form["container"] = {"type": "auto"}
    return form


_FORMS: Mapping[str, Callable[[Support, Mapping[str, Any]], dict[str, Any]]] = {
    "openai-chat": _of_chat,
    "openai-responses": _of_responses,
}
