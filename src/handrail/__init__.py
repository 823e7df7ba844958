"""Handrail: a tool kernel for LLM agents.

A model only proposes tool calls; the kernel validates, authorises, locks, sandboxes, runs, records and
answers them. Start with :func:`open_kernel` and :func:`tool`::

    async with open_kernel(workspace=".") as kernel:
        session = await kernel.session()
        result = await session.call("read", {"path": "README.md"})

Names load when first used, so ``import handrail`` costs next to nothing.

What is exported is public: here, in :mod:`handrail.testing`, and for those who extend the kernel in :mod:`handrail.policy`
(watchdogs), :mod:`handrail.sandbox` (sandbox providers) and :mod:`handrail.sources` (sources of tools). Everything else is
private by convention, and changes without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.budget import Budget
    from handrail.agent.events import (
        AgentEvent,
        AgentIdle,
        BudgetExhausted,
        CallAnswered,
        CallProposed,
        ConversationCompacted,
        NotificationsDelivered,
        ProviderToolUnavailable,
        ProviderToolUsed,
        ReplyInterrupted,
        RunFinished,
        RunOutcome,
        TurnStarted,
    )
    from handrail.agent.loop import Agent
    from handrail.agent.model import TextDelta
    from handrail.agent.providers import open_model
    from handrail.agent.stream_task import RetryDelayed
    from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalHandler, ApprovalRequest, DeferApprovals
    from handrail.contract.call import Blob, CallAnswer, Event, ProposedCall, Result
    from handrail.contract.errors import (
        Diagnostic,
        ErrorKind,
        HandrailError,
        LoadError,
        LogUnavailable,
        StartError,
        ToolError,
        UsageError,
    )
    from handrail.contract.services.channels import Notification
    from handrail.contract.services.client import ClientHandler
    from handrail.contract.services.delegation import SubagentTask
    from handrail.contract.services.runtime import QuestionOption, Runtime, UserContext, UserQuestion
    from handrail.contract.session import Session, Turn
    from handrail.contract.text.neutralisation import neutralise_text, restore_text
    from handrail.contract.tool.decorator import tool
    from handrail.contract.tool.requires import Requires
    from handrail.contract.tool.spec import ConfigKey, LockSpec, ToolSpec
    from handrail.contract.tool.tool import Tool
    from handrail.contract.tool.triggers import TriggerContext, TriggerEvent, TriggerTool, make_trigger_spec
    from handrail.kernel.doctor import check_kernel
    from handrail.kernel.kernel import Kernel
    from handrail.kernel.startup import open_kernel
    from handrail.record.log_reader import LoggedRecord, LogReader
    from handrail.record.verification import LogVerification, verify_log
    from handrail.session.context import SessionOptions
    from handrail.store.folders import StateFolders, locate_folders
    from handrail.store.lease import LeaseHolder, find_lease_holder

_HOME = {
    "Agent": "agent.loop",
    "AgentIdle": "agent.events",
    "CallAnswer": "contract.call",
    "Approval": "contract.approvals",
    "ApprovalAnswer": "contract.approvals",
    "ApprovalRequest": "contract.approvals",
    "ApprovalHandler": "contract.approvals",
    "DeferApprovals": "contract.approvals",
    "Blob": "contract.call",
    "Budget": "agent.budget",
    "BudgetExhausted": "agent.events",
    "CallAnswered": "agent.events",
    "CallProposed": "agent.events",
    "UserContext": "contract.services.runtime",
    "ConversationCompacted": "agent.events",
    "ConfigKey": "contract.tool.spec",
    "RetryDelayed": "agent.stream_task",
    "SubagentTask": "contract.services.delegation",
    "ErrorKind": "contract.errors",
    "Event": "contract.call",
    "Diagnostic": "contract.errors",
    "TriggerEvent": "contract.tool.triggers",
    "StateFolders": "store.folders",
    "HandrailError": "contract.errors",
    "LeaseHolder": "store.lease",
    "Kernel": "kernel.kernel",
    "LoadError": "contract.errors",
    "LockSpec": "contract.tool.spec",
    "LogReader": "record.log_reader",
    "LogUnavailable": "contract.errors",
    "LoggedRecord": "record.log_reader",
    "AgentEvent": "agent.events",
    "ProviderToolUsed": "agent.events",
    "ProviderToolUnavailable": "agent.events",
    "Notification": "contract.services.channels",
    "NotificationsDelivered": "agent.events",
    "QuestionOption": "contract.services.runtime",
    "ClientHandler": "contract.services.client",
    "ProposedCall": "contract.call",
    "UserQuestion": "contract.services.runtime",
    "ReplyInterrupted": "agent.events",
    "Requires": "contract.tool.requires",
    "Result": "contract.call",
    "RunFinished": "agent.events",
    "RunOutcome": "agent.events",
    "Runtime": "contract.services.runtime",
    "Session": "contract.session",
    "SessionOptions": "session.context",
    "StartError": "contract.errors",
    "TextDelta": "agent.model",
    "Tool": "contract.tool.tool",
    "ToolError": "contract.errors",
    "ToolSpec": "contract.tool.spec",
    "TriggerTool": "contract.tool.triggers",
    "Turn": "contract.session",
    "TurnStarted": "agent.events",
    "UsageError": "contract.errors",
    "LogVerification": "record.verification",
    "TriggerContext": "contract.tool.triggers",
    "check_kernel": "kernel.doctor",
    "find_lease_holder": "store.lease",
    "locate_folders": "store.folders",
    "neutralise_text": "contract.text.neutralisation",
    "open_kernel": "kernel.startup",
    "open_model": "agent.providers",
    "restore_text": "contract.text.neutralisation",
    "tool": "contract.tool.decorator",
    "make_trigger_spec": "contract.tool.triggers",
    "verify_log": "record.verification",
}

__all__ = [
    "Agent",
    "AgentEvent",
    "AgentIdle",
    "Approval",
    "ApprovalAnswer",
    "ApprovalHandler",
    "ApprovalRequest",
    "Blob",
    "Budget",
    "BudgetExhausted",
    "CallAnswer",
    "CallAnswered",
    "CallProposed",
    "ClientHandler",
    "ConfigKey",
    "ConversationCompacted",
    "DeferApprovals",
    "Diagnostic",
    "ErrorKind",
    "Event",
    "HandrailError",
    "Kernel",
    "LeaseHolder",
    "LoadError",
    "LockSpec",
    "LogReader",
    "LogUnavailable",
    "LogVerification",
    "LoggedRecord",
    "Notification",
    "NotificationsDelivered",
    "ProposedCall",
    "ProviderToolUnavailable",
    "ProviderToolUsed",
    "QuestionOption",
    "ReplyInterrupted",
    "Requires",
    "Result",
    "RetryDelayed",
    "RunFinished",
    "RunOutcome",
    "Runtime",
    "Session",
    "SessionOptions",
    "StartError",
    "StateFolders",
    "SubagentTask",
    "TextDelta",
    "Tool",
    "ToolError",
    "ToolSpec",
    "TriggerContext",
    "TriggerEvent",
    "TriggerTool",
    "Turn",
    "TurnStarted",
    "UsageError",
    "UserContext",
    "UserQuestion",
    "check_kernel",
    "find_lease_holder",
    "locate_folders",
    "make_trigger_spec",
    "neutralise_text",
    "open_kernel",
    "open_model",
    "restore_text",
    "tool",
    "verify_log",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'handrail' has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
