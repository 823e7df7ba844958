"""What a provider of models is written with; see the entry point group ``handrail.models``.

It loads what is used first. Everything that is not in ``__all__`` is private by convention.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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

_HOME = {
    "AssistantMessage": "agent.model_protocol",
    "BlockEvent": "agent.model_protocol",
    "CallArgumentsDelta": "agent.model_protocol",
    "CallBlockClosed": "agent.model_protocol",
    "CallBlockOpened": "agent.model_protocol",
    "CallResult": "agent.model_protocol",
    "CallResultsMessage": "agent.model_protocol",
    "FinishReason": "agent.model_protocol",
    "HistoryCallPart": "agent.model_protocol",
    "Message": "agent.model_protocol",
    "Model": "agent.model_protocol",
    "ModelProvider": "agent.providers",
    "ModelRequest": "agent.model_protocol",
    "ProviderBlock": "agent.model_protocol",
    "ProviderBusy": "agent.model_protocol",
    "ProviderDenied": "agent.model_protocol",
    "ProviderError": "agent.model_protocol",
    "ProviderSchemaDialect": "catalog.provider_dialects",
    "ProviderToolResult": "agent.model_protocol",
    "ReplyFinished": "agent.model_protocol",
    "ReplyStreamCut": "agent.model_protocol",
    "TextDelta": "agent.model_protocol",
    "TextPart": "agent.model_protocol",
    "TokenUsage": "agent.model_protocol",
    "UserMessage": "agent.model_protocol",
    "UserPicture": "agent.model_protocol",
    "adapt_tool": "catalog.schema_adapter",
    "find_dialect": "catalog.provider_dialects",
}

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


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
