"""What a provider of models is written with; see the entry point group ``handrail.models``.

It loads what is used first. Everything that is not in ``__all__`` is private by convention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.contract import make_lazy_exports

if TYPE_CHECKING:
    from handrail.agent.model_protocol import (
        AssistantMessage,
        BlockEvent,
        CallArgumentsDelta,
        CallBlockClosed,
        CallBlockOpened,
        CallResult,
        CallResultsMessage,
        FinishReason,
        HistoryCallPart,
        Message,
        Model,
        ModelRequest,
        ProviderBlock,
        ProviderBusy,
        ProviderDenied,
        ProviderError,
        ProviderToolResult,
        ReplyFinished,
        ReplyStreamCut,
        TextDelta,
        TextPart,
        TokenUsage,
        UserMessage,
        UserPicture,
    )
    from handrail.agent.providers import ModelProvider
    from handrail.catalog.provider_dialects import ProviderSchemaDialect, find_dialect
    from handrail.catalog.schema_adapter import adapt_tool

__all__ = [
    "AssistantMessage",
    "BlockEvent",
    "CallArgumentsDelta",
    "CallBlockClosed",
    "CallBlockOpened",
    "CallResult",
    "CallResultsMessage",
    "FinishReason",
    "HistoryCallPart",
    "Message",
    "Model",
    "ModelProvider",
    "ModelRequest",
    "ProviderBlock",
    "ProviderBusy",
    "ProviderDenied",
    "ProviderError",
    "ProviderSchemaDialect",
    "ProviderToolResult",
    "ReplyFinished",
    "ReplyStreamCut",
    "TextDelta",
    "TextPart",
    "TokenUsage",
    "UserMessage",
    "UserPicture",
    "adapt_tool",
    "find_dialect",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "agent.model_protocol": """
            AssistantMessage BlockEvent CallArgumentsDelta CallBlockClosed CallBlockOpened CallResult
            CallResultsMessage FinishReason HistoryCallPart Message Model ModelRequest ProviderBlock
            ProviderBusy ProviderDenied ProviderError ProviderToolResult ReplyFinished ReplyStreamCut
            TextDelta TextPart TokenUsage UserMessage UserPicture
        """,
        "agent.providers": "ModelProvider",
        "catalog.provider_dialects": "ProviderSchemaDialect find_dialect",
        "catalog.schema_adapter": "adapt_tool",
    },
)
