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

from typing import TYPE_CHECKING

from handrail.contract import make_lazy_exports

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
        ThirdPartySource,
        temporary_kernel,
    )

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

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "agent.providers.scripted_model": """
            ModelScript RequestExpectation ResultExpectation ScriptedCall ScriptedModel ScriptedTurn
            ScriptedUsage
        """,
        "testing.forge_servers": "ForgeReply ForgeRequest ForgeServer GitHubServer GiteaServer",
        "testing.provider_request_checks": "PlaybackModel ReplyPause call_reply text_reply",
        "testing.provider_servers": """
            AnthropicServer ConnectionCut ErrorReply GeminiServer OpenAIServer ProviderServer RawReply
            ReplyCall ResponsesServer ScriptedReply StreamError ThinkingBlock
        """,
        "testing.scripted_kernel": """
            ScriptedApprovalHandler ScriptedClient ScriptedResolver ThirdPartySource temporary_kernel
        """,
    },
)
