"""Adapters to model providers, opened by name. An SDK is imported only when its provider is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from handrail.agent.model_protocol import Model
from handrail.agent.text_tool_calls import TextForm
from handrail.contract.errors import StartError, UsageError

SERVICES: Mapping[str, tuple[str, str]] = {
    "openai": ("OPENAI_API_KEY", "openai"),
    "openai-responses": ("OPENAI_API_KEY", "openai"),
    "anthropic": ("ANTHROPIC_API_KEY", "anthropic"),
    "gemini": ("GEMINI_API_KEY", "google.genai"),
}
"""The variable with the key and the module of the SDK, by the word before the colon."""
MODEL_FORMS = f"{', '.join(f'{kind}:NAME' for kind in SERVICES)} or script:FILE"


class _ProviderRoute(NamedTuple):
    """The server and the call form of the models of one provider."""

    base_url: str | None
    text_calls: TextForm | None


_routes: WeakKeyDictionary[Model, Mapping[str, _ProviderRoute]] = WeakKeyDictionary()
"""For each opened model the routes by provider: its own, and those of the models that it was opened for."""


def open_subagent_model(model: Model, spec: str, base_url: str | None = None) -> Model:
    """Open the model of a sub-agent whose parent uses ``model``.

    If both have the same provider, they use the same server and the same form of calls.

    :param base_url: another server than the parent's; ``""`` for the provider's own
    :raises HandrailError: see :func:`open_model`
    """
    ways = _routes.get(model, {})
    way = ways.get(_provider_of_model(spec), _ProviderRoute(None, None))
    if base_url is not None:
        way = _ProviderRoute(base_url or None, None)
    opened = open_model(spec, base_url=way.base_url, text_calls=way.text_calls)
    _routes[opened] = {**ways, **_routes[opened]}
    return opened


def _provider_of_model(spec: str) -> str:
    """Return the provider of a model, whichever of its APIs is used."""
    return spec.partition(":")[0].partition("-")[0]


def open_model(spec: str, *, base_url: str | None = None, text_calls: TextForm | None = None) -> Model:
    """Open the model that ``spec`` names. Close it with ``aclose()`` when done.

    - ``openai:NAME``: chat completions; the key comes from ``OPENAI_API_KEY``
    - ``openai-responses:NAME``: responses; the same key
    - ``anthropic:NAME``: messages; the key comes from ``ANTHROPIC_API_KEY``
    - ``gemini:NAME``: the Gemini API; the key comes from ``GEMINI_API_KEY``
    - ``script:FILE``: plays a file of turns, see :mod:`handrail.agent.providers.scripted_model`

    :param base_url: another server with the same API. It gets the key of the environment if there is one, and requests
        without a key otherwise
    :param text_calls: for a model that cannot call tools: it writes its calls as text in this form, and the provider gets
        no tools
    :raises UsageError: if ``spec`` has none of these forms
    :raises StartError: if an SDK or a key is missing; the text says what to install or set
    :raises LoadError: if a script is faulty, with all faults
    """
    model = _open(spec, base_url)
    if text_calls is not None:
        from handrail.agent.text_tool_calls import TextCallModel

        model = TextCallModel(model, text_calls)
    _routes[model] = {_provider_of_model(spec): _ProviderRoute(base_url, text_calls)}
    return model


def _open(spec: str, base_url: str | None) -> Model:
    kind, colon, name = spec.partition(":")
    if not colon or not name or kind not in (*SERVICES, "script"):
        raise UsageError(f"The model is invalid: {spec!r}. Use {MODEL_FORMS}.")
    if kind == "script":
        if base_url is not None:
            raise UsageError(f"{spec!r} plays a file and uses no server. Remove the base URL ({base_url}).")
        from handrail.agent.providers.scripted_model import ScriptedModel

        return ScriptedModel.from_file(Path(name))
    key = _find_key(kind, name, base_url)
    match kind:
        case "openai":
            from handrail.agent.providers.openai import OpenAIModel

            return OpenAIModel(name, api_key=key, base_url=base_url)
        case "openai-responses":
            from handrail.agent.providers.responses import ResponsesModel

            return ResponsesModel(name, api_key=key, base_url=base_url)
        case "gemini":
            from handrail.agent.providers.gemini import GeminiModel

            return GeminiModel(name, api_key=key, base_url=base_url)
        case _:
            from handrail.agent.providers.anthropic import AnthropicModel

            return AnthropicModel(name, api_key=key, base_url=base_url)


def _find_key(kind: str, name: str, base_url: str | None) -> str:
    variable, module = SERVICES[kind]
    extra = kind.partition("-")[0]
    if not is_importable(module):
        raise StartError(f"{kind}:{name} needs the {extra} SDK. Install it with: pip install 'handrail[{extra}]'")
    key = os.environ.get(variable, "").strip()
    if key:
        return key
    if base_url is not None:
        return "no-key"  # the SDKs require a key, but local servers mostly do not
    raise StartError(
        f"{kind}:{name} needs a key. Set the environment variable {variable}, or pass --base-url for a server without one."
    )


def is_importable(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is missing or cannot be loaded
        return False
