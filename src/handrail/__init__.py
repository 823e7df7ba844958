"""Handrail: a tool kernel for LLM agents.

A model only proposes tool calls; the kernel validates, authorises, locks, sandboxes, runs, records and
answers them. Start with :func:`open_kernel` and :func:`tool`::

    async with open_kernel(workspace=".") as kernel:
        session = await kernel.session()
        result = await session.call("read", {"path": "README.md"})

Names load when first used, so ``import handrail`` costs next to nothing.

What is exported is public: here, in :mod:`handrail.testing`, and for those who extend the kernel in :mod:`handrail.policy`
(watchdogs), :mod:`handrail.sandbox` (sandbox providers), :mod:`handrail.sources` (sources of tools) and :mod:`handrail.models`
(model providers). Everything else is private by convention, and changes without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.agent_loop import Agent
    from handrail.agent.model_protocol import TextDelta
    from handrail.agent.providers import open_model
    from handrail.agent.reply_stream import RetryDelayed
    from handrail.agent.run_budget import Budget
    from handrail.agent.run_events import (
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
    from handrail.contract.approval_requests import (
        Approval,
        ApprovalAnswer,
        ApprovalHandler,
        ApprovalRequest,
        DeferApprovals,
    )
    from handrail.contract.calls_and_results import Blob, CallAnswer, Event, ProposedCall, Result
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
    from handrail.contract.services.channels_and_triggers import Notification
    from handrail.contract.services.client_services import ClientHandler
    from handrail.contract.services.subagent_services import SubagentTask
    from handrail.contract.services.tool_runtime import QuestionOption, Runtime, UserContext, UserQuestion
    from handrail.contract.session_protocols import Session, Turn
    from handrail.contract.text.neutralisation import neutralise_text, restore_escapes
    from handrail.contract.tool.decorator import tool
    from handrail.contract.tool.requires import Requires
    from handrail.contract.tool.spec import ConfigKey, LockSpec, ToolSpec
    from handrail.contract.tool.tool_protocol import Tool
    from handrail.contract.tool.trigger_tools import TriggerContext, TriggerEvent, TriggerTool, make_trigger_spec
    from handrail.frontends.cli.renderer import TerminalRenderer
    from handrail.kernel.doctor import check_kernel
    from handrail.kernel.kernel_interface import Kernel
    from handrail.kernel.workspace_opening import open_kernel
    from handrail.record.log_reader import LoggedRecord, LogReader
    from handrail.record.verification import LogVerification, verify_log
    from handrail.session.session_context import SessionOptions
    from handrail.store.lease import LeaseHolder, find_lease_holder
    from handrail.store.state_folders import StateFolders, locate_folders

_HOME = {
    "Agent": "agent.agent_loop",
    "AgentIdle": "agent.run_events",
    "CallAnswer": "contract.calls_and_results",
    "Approval": "contract.approval_requests",
    "ApprovalAnswer": "contract.approval_requests",
    "ApprovalRequest": "contract.approval_requests",
    "ApprovalHandler": "contract.approval_requests",
    "DeferApprovals": "contract.approval_requests",
    "Blob": "contract.calls_and_results",
    "Budget": "agent.run_budget",
    "BudgetExhausted": "agent.run_events",
    "CallAnswered": "agent.run_events",
    "CallProposed": "agent.run_events",
    "UserContext": "contract.services.tool_runtime",
    "ConversationCompacted": "agent.run_events",
    "ConfigKey": "contract.tool.spec",
    "RetryDelayed": "agent.reply_stream",
    "SubagentTask": "contract.services.subagent_services",
    "ErrorKind": "contract.errors",
    "Event": "contract.calls_and_results",
    "Diagnostic": "contract.errors",
    "TriggerEvent": "contract.tool.trigger_tools",
    "StateFolders": "store.state_folders",
    "HandrailError": "contract.errors",
    "LeaseHolder": "store.lease",
    "Kernel": "kernel.kernel_interface",
    "LoadError": "contract.errors",
    "LockSpec": "contract.tool.spec",
    "LogReader": "record.log_reader",
    "LogUnavailable": "contract.errors",
    "LoggedRecord": "record.log_reader",
    "AgentEvent": "agent.run_events",
    "ProviderToolUsed": "agent.run_events",
    "ProviderToolUnavailable": "agent.run_events",
    "Notification": "contract.services.channels_and_triggers",
    "NotificationsDelivered": "agent.run_events",
    "QuestionOption": "contract.services.tool_runtime",
    "ClientHandler": "contract.services.client_services",
    "ProposedCall": "contract.calls_and_results",
    "UserQuestion": "contract.services.tool_runtime",
    "ReplyInterrupted": "agent.run_events",
    "Requires": "contract.tool.requires",
    "Result": "contract.calls_and_results",
    "RunFinished": "agent.run_events",
    "RunOutcome": "agent.run_events",
    "Runtime": "contract.services.tool_runtime",
    "Session": "contract.session_protocols",
    "SessionOptions": "session.session_context",
    "StartError": "contract.errors",
    "TerminalRenderer": "frontends.cli.renderer",
    "TextDelta": "agent.model_protocol",
    "Tool": "contract.tool.tool_protocol",
    "ToolError": "contract.errors",
    "ToolSpec": "contract.tool.spec",
    "TriggerTool": "contract.tool.trigger_tools",
    "Turn": "contract.session_protocols",
    "TurnStarted": "agent.run_events",
    "UsageError": "contract.errors",
    "LogVerification": "record.verification",
    "TriggerContext": "contract.tool.trigger_tools",
    "check_kernel": "kernel.doctor",
    "find_lease_holder": "store.lease",
    "locate_folders": "store.state_folders",
    "neutralise_text": "contract.text.neutralisation",
    "open_kernel": "kernel.workspace_opening",
    "open_model": "agent.providers",
    "restore_escapes": "contract.text.neutralisation",
    "tool": "contract.tool.decorator",
    "make_trigger_spec": "contract.tool.trigger_tools",
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
    "TerminalRenderer",
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
    "restore_escapes",
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
