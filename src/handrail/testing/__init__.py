"""Test tools for users of the library, to test their own tools and agents.

The library itself uses nothing of this package. Names are loaded on first use. All names outside ``__all__`` and all modules
are private by convention.

- a complete kernel in a folder: :func:`temporary_kernel`, with a scripted user and a scripted client
- models in process, without a server: :class:`PlaybackModel`, :class:`ScriptedModel`
- loopback servers with the providers' protocols, which check each request: :class:`OpenAIServer` and others
- forges on loopback, for pull requests: :class:`GitHubServer` and :class:`GiteaServer`
- third-party tools: :class:`ThirdPartySource`
- a scripted name resolver, whose answers can change: :class:`ScriptedResolver`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.providers.scripted_model import (
        ModelScript,
        RequestExpectation,
        ResultExpectation,
        ScriptedCall,
        ScriptedModel,
        ScriptedTurn,
        ScriptedUsage,
    )
    from handrail.testing.forge_servers import ForgeReply, ForgeRequest, ForgeServer, GiteaServer, GitHubServer
    from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply
    from handrail.testing.provider_servers import (
        AnthropicServer,
        ConnectionCut,
        ErrorReply,
        GeminiServer,
        OpenAIServer,
        ProviderServer,
        RawReply,
        ReplyCall,
        ResponsesServer,
        ScriptedReply,
        StreamError,
        ThinkingBlock,
    )
    from handrail.testing.scripted_kernel import (
        ScriptedApprovalHandler,
        ScriptedClient,
        ScriptedResolver,
        temporary_kernel,
    )
    from handrail.testing.scripted_mcp_servers import ThirdPartySource

_HOME = {
    "ForgeReply": "testing.forge_servers",
    "ForgeRequest": "testing.forge_servers",
    "ForgeServer": "testing.forge_servers",
    "GitHubServer": "testing.forge_servers",
    "GiteaServer": "testing.forge_servers",
    "AnthropicServer": "testing.provider_servers",
    "ReplyCall": "testing.provider_servers",
    "ConnectionCut": "testing.provider_servers",
    "RequestExpectation": "agent.providers.scripted_model",
    "ThirdPartySource": "testing.scripted_mcp_servers",
    "GeminiServer": "testing.provider_servers",
    "ScriptedResolver": "testing.scripted_kernel",
    "OpenAIServer": "testing.provider_servers",
    "ReplyPause": "testing.provider_request_checks",
    "PlaybackModel": "testing.provider_request_checks",
    "ProviderServer": "testing.provider_servers",
    "ErrorReply": "testing.provider_servers",
    "RawReply": "testing.provider_servers",
    "ScriptedReply": "testing.provider_servers",
    "ResponsesServer": "testing.provider_servers",
    "ResultExpectation": "agent.providers.scripted_model",
    "ModelScript": "agent.providers.scripted_model",
    "ScriptedModel": "agent.providers.scripted_model",
    "ScriptedCall": "agent.providers.scripted_model",
    "ScriptedClient": "testing.scripted_kernel",
    "ScriptedApprovalHandler": "testing.scripted_kernel",
    "ScriptedTurn": "agent.providers.scripted_model",
    "ScriptedUsage": "agent.providers.scripted_model",
    "StreamError": "testing.provider_servers",
    "ThinkingBlock": "testing.provider_servers",
    "call_reply": "testing.provider_request_checks",
    "temporary_kernel": "testing.scripted_kernel",
    "text_reply": "testing.provider_request_checks",
}

__all__ = [
    "AnthropicServer",
    "ConnectionCut",
    "ErrorReply",
    "ForgeReply",
    "ForgeRequest",
    "ForgeServer",
    "GeminiServer",
    "GitHubServer",
    "GiteaServer",
    "ModelScript",
    "OpenAIServer",
    "PlaybackModel",
    "ProviderServer",
    "RawReply",
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
