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

from typing import TYPE_CHECKING

from handrail.contract import make_lazy_exports

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

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "agent.agent_loop": "Agent",
        "agent.model_protocol": "TextDelta",
        "agent.providers": "open_model",
        "agent.reply_stream": "RetryDelayed",
        "agent.run_budget": "Budget",
        "agent.run_events": """
            AgentEvent AgentIdle BudgetExhausted CallAnswered CallProposed ConversationCompacted
            NotificationsDelivered ProviderToolUnavailable ProviderToolUsed ReplyInterrupted RunFinished
            RunOutcome TurnStarted
        """,
        "contract.approval_requests": "Approval ApprovalAnswer ApprovalHandler ApprovalRequest DeferApprovals",
        "contract.calls_and_results": "Blob CallAnswer Event ProposedCall Result",
        "contract.errors": """
            Diagnostic ErrorKind HandrailError LoadError LogUnavailable StartError ToolError UsageError
        """,
        "contract.services.channels_and_triggers": "Notification",
        "contract.services.client_services": "ClientHandler",
        "contract.services.subagent_services": "SubagentTask",
        "contract.services.tool_runtime": "QuestionOption Runtime UserContext UserQuestion",
        "contract.session_protocols": "Session Turn",
        "contract.text.neutralisation": "neutralise_text restore_escapes",
        "contract.tool.decorator": "tool",
        "contract.tool.requires": "Requires",
        "contract.tool.spec": "ConfigKey LockSpec ToolSpec",
        "contract.tool.tool_protocol": "Tool",
        "contract.tool.trigger_tools": "TriggerContext TriggerEvent TriggerTool make_trigger_spec",
        "frontends.cli.renderer": "TerminalRenderer",
        "kernel.doctor": "check_kernel",
        "kernel.kernel_interface": "Kernel",
        "kernel.workspace_opening": "open_kernel",
        "record.log_reader": "LogReader LoggedRecord",
        "record.verification": "LogVerification verify_log",
        "session.session_context": "SessionOptions",
        "store.lease": "LeaseHolder find_lease_holder",
        "store.state_folders": "StateFolders locate_folders",
    },
)
