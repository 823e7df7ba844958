"""The ways to reach a model, opened by name; an SDK is imported only when its provider is asked for."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from handrail.agent.model import Model
from handrail.agent.text_calls import TextForm
from handrail.contract.errors import StartError, UsageError

_KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


def open_model(spec: str, *, base_url: str | None = None, text_calls: TextForm | None = None) -> Model:
    """The model that ``spec`` names. Close it with ``aclose()`` when done.

    - ``openai:NAME``: chat completions; the key comes from ``OPENAI_API_KEY``
    - ``anthropic:NAME``: messages; the key comes from ``ANTHROPIC_API_KEY``
    - ``script:FILE``: plays a file of turns, see :mod:`handrail.agent.providers.script_file`

    :param base_url: another server that speaks the same API. Such a server gets the key of the environment if
        there is one, and is asked without a key otherwise
    :param text_calls: for a model that cannot call tools: it writes its calls into its text, in this form, and the provider
        is offered none
    :raises UsageError: when ``spec`` has none of these forms
    :raises StartError: when an SDK or a key is missing; the text says what to install or set
    :raises LoadError: when a script is faulty, with all its faults
    """
    if text_calls is not None:
        from handrail.agent.providers.textual import TextualModel

        return TextualModel(open_model(spec, base_url=base_url), text_calls)
    kind, colon, name = spec.partition(":")
    if not colon or not name or kind not in ("openai", "anthropic", "script"):
        raise UsageError(f"{spec!r} is not a model; write openai:NAME, anthropic:NAME or script:FILE")
    if kind == "script":
        if base_url is not None:
            raise UsageError(f"{spec!r} plays a file and asks no server; leave the base URL ({base_url}) out")
        from handrail.agent.providers.script import ScriptModel

        return ScriptModel.from_file(Path(name))
    if kind == "openai":
        key = _key("openai", name, base_url)
        from handrail.agent.providers.openai import OpenAIModel

        return OpenAIModel(name, api_key=key, base_url=base_url)
    key = _key("anthropic", name, base_url)
    from handrail.agent.providers.anthropic import AnthropicModel

    return AnthropicModel(name, api_key=key, base_url=base_url)


def _key(kind: Literal["openai", "anthropic"], name: str, base_url: str | None) -> str:
    if find_spec(kind) is None:
        raise StartError(f"{kind}:{name} needs the {kind} SDK; install it with: pip install 'handrail[{kind}]'")
    variable = _KEYS[kind]
    key = os.environ.get(variable, "").strip()
    if key:
        return key
    if base_url is not None:
        return "no-key"  # the SDKs want one, servers on one's own machine mostly do not
    raise StartError(
        f"{kind}:{name} needs a key; set the environment variable {variable}, or give --base-url for a server without one"
    )
