"""Test tools for users of the library, to test their own tools and agents.

The library itself uses nothing of this package. Names are loaded on first use. All names outside ``__all__`` and all modules
are private by convention.

- a complete kernel in a folder: :func:`temporary_kernel`, with a scripted user and a scripted client
- models in process, without a server: :class:`PlaybackModel`, :class:`ScriptedModel`
- loopback servers with the providers' protocols, which check each request: :class:`OpenAIServer` and others
- third-party tools: :class:`ThirdPartySource`
- a scripted name resolver, whose answers can change: :class:`ScriptedResolver`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.providers.script import (
        ModelScript,
        RequestExpectation,
        ResultExpectation,
        ScriptedCall,
        ScriptedModel,
        ScriptedTurn,
        ScriptedUsage,
    )
    from handrail.testing.kernels import ScriptedApprovalHandler, ScriptedClient, ScriptedResolver, temporary_kernel
    from handrail.testing.model_servers import (
        AnthropicServer,
        ConnectionCut,
        ErrorReply,
        GeminiServer,
        OpenAIServer,
        ProviderServer,
        ReplyCall,
        ResponsesServer,
        ScriptedReply,
        StreamError,
        ThinkingBlock,
    )
    from handrail.testing.request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
    from handrail.testing.upstream_servers import ThirdPartySource

_HOME = {
    "AnthropicServer": "testing.model_servers",
    "ReplyCall": "testing.model_servers",
    "ConnectionCut": "testing.model_servers",
    "RequestExpectation": "agent.providers.script",
    "ThirdPartySource": "testing.upstream_servers",
    "GeminiServer": "testing.model_servers",
    "ScriptedResolver": "testing.kernels",
    "OpenAIServer": "testing.model_servers",
    "ReplyPause": "testing.request_checks",
    "PlaybackModel": "testing.request_checks",
    "ProviderServer": "testing.model_servers",
    "ErrorReply": "testing.model_servers",
    "ScriptedReply": "testing.model_servers",
    "ResponsesServer": "testing.model_servers",
    "ResultExpectation": "agent.providers.script",
    "ModelScript": "agent.providers.script",
    "ScriptedModel": "agent.providers.script",
    "ScriptedCall": "agent.providers.script",
    "ScriptedClient": "testing.kernels",
    "ScriptedApprovalHandler": "testing.kernels",
    "ScriptedTurn": "agent.providers.script",
    "ScriptedUsage": "agent.providers.script",
    "StreamError": "testing.model_servers",
    "ThinkingBlock": "testing.model_servers",
    "call_reply": "testing.request_checks",
    "temporary_kernel": "testing.kernels",
    "text_reply": "testing.request_checks",
}

__all__ = [
    "AnthropicServer",
    "ConnectionCut",
    "ErrorReply",
    "GeminiServer",
    "ModelScript",
    "OpenAIServer",
    "PlaybackModel",
    "ProviderServer",
    "ReplyCall",
    "ReplyPause",
    "RequestExpectation",
    "ResponsesServer",
    "ResultExpectation",
    "ScriptedApprovalHandler",
    "ScriptedCall",
    "ScriptedClient",
    "ScriptedModel",
    "ScriptedReply",
    "ScriptedResolver",
    "ScriptedTurn",
    "ScriptedUsage",
    "StreamError",
    "ThinkingBlock",
    "ThirdPartySource",
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
