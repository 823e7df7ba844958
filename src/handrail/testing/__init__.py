"""Test tools for users of the library, to test their own tools and agents.

The library itself uses nothing of this package. Names are loaded on first use. All names outside ``__all__`` and all modules
are private by convention.

- a complete kernel in a folder: :func:`temporary_kernel`, with a scripted user and a scripted client
- models in process, without a server: :class:`PlayedModel`, :class:`ScriptModel`
- loopback servers with the providers' protocols, which check each request: :class:`OpenAIServer` and others
- third-party tools: :class:`ForeignSource`
- a scripted name resolver, whose answers can change: :class:`Names`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.providers.script import (
        Expectation,
        ResultExpectation,
        Script,
        ScriptedCall,
        ScriptedTurn,
        ScriptedUsage,
        ScriptModel,
    )
    from handrail.testing.histories import Pause, PlayedModel, call_reply, text_reply
    from handrail.testing.kernels import Names, ScriptedPeer, ScriptedPerson, temporary_kernel
    from handrail.testing.servers import (
        AnthropicServer,
        Call,
        Cut,
        GeminiServer,
        OpenAIServer,
        ProviderServer,
        Refusal,
        Reply,
        ResponsesServer,
        StreamError,
        Thinking,
    )
    from handrail.testing.upstreams import ForeignSource

_HOME = {
    "AnthropicServer": "testing.servers",
    "Call": "testing.servers",
    "Cut": "testing.servers",
    "Expectation": "agent.providers.script",
    "ForeignSource": "testing.upstreams",
    "GeminiServer": "testing.servers",
    "Names": "testing.kernels",
    "OpenAIServer": "testing.servers",
    "Pause": "testing.histories",
    "PlayedModel": "testing.histories",
    "ProviderServer": "testing.servers",
    "Refusal": "testing.servers",
    "Reply": "testing.servers",
    "ResponsesServer": "testing.servers",
    "ResultExpectation": "agent.providers.script",
    "Script": "agent.providers.script",
    "ScriptModel": "agent.providers.script",
    "ScriptedCall": "agent.providers.script",
    "ScriptedPeer": "testing.kernels",
    "ScriptedPerson": "testing.kernels",
    "ScriptedTurn": "agent.providers.script",
    "ScriptedUsage": "agent.providers.script",
    "StreamError": "testing.servers",
    "Thinking": "testing.servers",
    "call_reply": "testing.histories",
    "temporary_kernel": "testing.kernels",
    "text_reply": "testing.histories",
}

__all__ = [
    "AnthropicServer",
    "Call",
    "Cut",
    "Expectation",
    "ForeignSource",
    "GeminiServer",
    "Names",
    "OpenAIServer",
    "Pause",
    "PlayedModel",
    "ProviderServer",
    "Refusal",
    "Reply",
    "ResponsesServer",
    "ResultExpectation",
    "Script",
    "ScriptModel",
    "ScriptedCall",
    "ScriptedPeer",
    "ScriptedPerson",
    "ScriptedTurn",
    "ScriptedUsage",
    "StreamError",
    "Thinking",
    "call_reply",
    "temporary_kernel",
    "text_reply",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
