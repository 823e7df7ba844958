"""Adapters to model providers, opened by name. An SDK is imported only when its provider is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from handrail.agent.model_protocol import Model
from handrail.agent.text_tool_calls import TextForm
from handrail.contract.errors import HandrailError, StartError, UsageError
from handrail.contract.struct import Struct
from handrail.origins.installed_package import build_extra_install_command

SERVICES: Mapping[str, tuple[str, str]] = {
    "openai": ("OPENAI_API_KEY", "openai"),
    "openai-responses": ("OPENAI_API_KEY", "openai"),
    "anthropic": ("ANTHROPIC_API_KEY", "anthropic"),
    "gemini": ("GEMINI_API_KEY", "google.genai"),
}
"""The variable with the key and the module of the SDK, by the word before the colon."""
_ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    "openai": ("/chat/completions", "/responses"),
    "openai-responses": ("/chat/completions", "/responses"),
    "anthropic": ("/v1/messages", "/v1"),
    "gemini": ("/v1beta", "/v1"),
}
"""The ends of an address that the SDK adds itself. Models of a run share the address also if they use another API of it."""
MODEL_FORMS = f"{', '.join(f'{kind}:NAME' for kind in SERVICES)} or script:FILE"


ENTRY_POINT_GROUP = "handrail.models"
"""The entry point group of providers: the name of an entry point is the word before the colon."""


class ModelProvider(Protocol):
    """A function that opens the models of one provider.

    :param name: the text after the colon
    :param api_key: the key that was passed to :func:`open_model`; None: the provider finds its own
    :param base_url: another server with the provider's API; None for the usual one
    """

    def __call__(self, name: str, /, *, api_key: str | None, base_url: str | None) -> Model:
        """Open a model.

        :raises HandrailError: if it is not available; the text says what to do
        """
        ...


@dataclass(frozen=True, slots=True)
class _ProviderRoute:
    """The server, the key and the call form of the models of one provider."""

    base_url: str | None = None
    text_calls: TextForm | None = None
    api_key: str | None = field(default=None, repr=False)


class _ModelOrigin(Struct, frozen=True):
    """How a model was opened, for the models of its sub-agents.

    :param routes: the routes by provider: its own, and those of the models that it was opened for
    :param providers: the providers that were passed in code
    """

    routes: Mapping[str, _ProviderRoute]
    providers: Mapping[str, ModelProvider]


_origins: WeakKeyDictionary[Model, _ModelOrigin] = WeakKeyDictionary()


def open_subagent_model(model: Model, spec: str, base_url: str | None = None) -> Model:
    """Open the model of a sub-agent whose parent uses ``model``.

    If both have the same provider, they use the same server, key and form of calls. A key that was passed in code is sent
    to no other server.

    :param base_url: another server than the parent's; ``""`` for the provider's own
    :raises HandrailError: see :func:`open_model`
    """
    origin = _origins.get(model, _ModelOrigin({}, {}))
    way = origin.routes.get(_provider_of_model(spec), _ProviderRoute())
    if base_url is not None:
        same_server = (base_url or None) == way.base_url
        way = _ProviderRoute(base_url or None, None, way.api_key if same_server else None)
    opened = open_model(
        spec, base_url=way.base_url, text_calls=way.text_calls, api_key=way.api_key, providers=origin.providers
    )
    _origins[opened] = _ModelOrigin({**origin.routes, **_origins[opened].routes}, origin.providers)
    return opened


def _provider_of_model(spec: str) -> str:
    """Return the provider of a model, whichever of its APIs is used."""
    kind = spec.partition(":")[0]
    return kind.partition("-")[0] if kind in SERVICES else kind


def open_model(
    spec: str,
    *,
    base_url: str | None = None,
    text_calls: TextForm | None = None,
    api_key: str | None = None,
    providers: Mapping[str, ModelProvider] | None = None,
) -> Model:
    """Open the model that ``spec`` names. Close it with ``aclose()`` when done.

    - ``openai:NAME``: chat completions; the key comes from ``OPENAI_API_KEY``
    - ``openai-responses:NAME``: responses; the same key
    - ``anthropic:NAME``: messages; the key comes from ``ANTHROPIC_API_KEY``
    - ``gemini:NAME``: the Gemini API; the key comes from ``GEMINI_API_KEY``
    - ``script:FILE``: plays a file of turns, see :mod:`handrail.agent.providers.scripted_model`
    - ``PROVIDER:NAME``: a provider in ``providers``, or of an installed package (entry point group ``handrail.models``)

    :param base_url: another server with the same API. It gets ``api_key`` or the key of the environment if there is one, and
        requests without a key otherwise
    :param text_calls: for a model that cannot call tools: it writes its calls as text in this form, and the provider gets
        no tools
    :param api_key: the key, instead of the one in the environment. Models of sub-agents with the same provider and server use
        it too
    :param providers: further providers by the word before the colon, also for the models of sub-agents
    :raises UsageError: if ``spec`` has none of these forms, or an argument does not fit it
    :raises StartError: if an SDK or a key is missing, or a provider fails; the text says what to install or set
    :raises LoadError: if a script is faulty, with all faults
    """
    given = dict(providers or {})
    if taken := sorted(given.keys() & {*SERVICES, "script"}):
        raise UsageError(f"Invalid `providers`: {taken[0]!r} is a built-in provider. Choose another name.")
    if api_key is not None and not api_key.strip():
        raise UsageError("Invalid `api_key`: it is empty. Pass the key, or leave `api_key` out to use the environment.")
    model = _open(spec, base_url, api_key, given)
    if text_calls is not None:
        from handrail.agent.text_tool_calls import TextCallModel

        model = TextCallModel(model, text_calls)
    _origins[model] = _ModelOrigin({_provider_of_model(spec): _ProviderRoute(base_url, text_calls, api_key)}, given)
    return model


def _open(spec: str, base_url: str | None, api_key: str | None, providers: Mapping[str, ModelProvider]) -> Model:
    kind, colon, name = spec.partition(":")
    if colon and name and kind not in (*SERVICES, "script"):
        return _open_with_provider(kind, name, base_url, api_key, providers)
    if not colon or not name:
        raise UsageError(f"The model is invalid: {spec!r}. Use {MODEL_FORMS}.")
    if kind == "script":
        for what, value in (("base URL", base_url), ("API key", api_key)):
            if value is not None:
                raise UsageError(f"{spec!r} replays a file and does not use a server. Remove the {what}.")
        from handrail.agent.providers.scripted_model import ScriptedModel

        return ScriptedModel.from_file(Path(name))
    base_url = None if base_url is None else _check_base_url(kind, base_url)
    key = _find_key(kind, name, base_url, api_key)
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


def _open_with_provider(
    kind: str, name: str, base_url: str | None, api_key: str | None, providers: Mapping[str, ModelProvider]
) -> Model:
    """Open a model of a provider that is not built in.

    :raises UsageError: if the provider does not exist
    :raises StartError: if it cannot be loaded, or opens no model
    """
    from handrail.store.entry_point_cache import list_entry_points_outside_workspaces

    installed = {point.name: point for point in list_entry_points_outside_workspaces(ENTRY_POINT_GROUP)}
    if kind not in providers and kind not in installed:
        others = sorted({*providers, *installed} - {*SERVICES, "script"})
        further = f" Further providers: {', '.join(others)}." if others else ""
        raise UsageError(f"The model is invalid: {f'{kind}:{name}'!r}. Use {MODEL_FORMS}.{further}")
    where = "`providers`" if kind in providers else installed[kind].value
    try:
        provider: Any = providers[kind] if kind in providers else installed[kind].load()
        model: Any = provider(name, api_key=api_key, base_url=base_url)
    except HandrailError:
        raise
    except Exception as error:
        error_text = f"{type(error).__name__}: {error}"
        error_text = error_text if api_key is None else error_text.replace(api_key, "***")
        raise StartError(
            f"The provider {kind!r} from {where} cannot open {name!r}: {error_text[:300]}. "
            "Upgrade its package, or use another model."
        ) from (error if api_key is None else None)
    if not isinstance(getattr(model, "name", None), str) or not callable(getattr(model, "stream", None)):
        raise StartError(
            f"The provider {kind!r} from {where} returned {type(model).__name__} for {name!r}. "
            "Expected a model with `name`, `stream` and `aclose`."
        )
    return cast("Model", model)


def _check_base_url(kind: str, base_url: str) -> str:
    """Return the address of a server without the end that the SDK adds.

    :raises UsageError: if it is not the URL of a server
    """
    try:
        parts = urlsplit(base_url.strip())
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise UsageError(f"The base URL is invalid: {base_url!r:.200}. Expected http://HOST:PORT/PATH.") from None
    if parts.scheme not in ("http", "https") or not has_host or " " in parts.netloc:
        raise UsageError(
            f"The base URL is invalid: {base_url!r:.200}. Expected http://HOST:PORT/PATH. Begin it with http:// or https://."
        )
    address = base_url.strip().rstrip("/")
    ends = (end for end in _ENDPOINTS[kind] if address.endswith(end))
    return address.removesuffix(next(ends, ""))


def _find_key(kind: str, name: str, base_url: str | None, api_key: str | None) -> str:
    variable, module = SERVICES[kind]
    extra = kind.partition("-")[0]
    if not is_module_importable(module):
        command = build_extra_install_command(extra)
        raise StartError(f"{kind}:{name} needs the {extra} SDK. Install it with: {command}")
    key = (api_key or os.environ.get(variable, "")).strip()
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"The key of {kind}:{name} has characters that no key has. Copy it again to {variable} or `api_key`."
        )
    if key:
        return key
    if base_url is not None:
        return "no-key"  # the SDKs require a key, but local servers mostly do not
    raise StartError(
        f"{kind}:{name} needs a key. Set the environment variable {variable}, pass `api_key`, or pass --base-url for a "
        "server without one."
    )


def is_module_importable(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is missing or cannot be loaded
        return False
