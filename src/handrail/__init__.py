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
        AgentIdle,
        BudgetSpent,
        CallAnswered,
        CallProposed,
        Compacted,
        LoopEvent,
        NativeUsed,
        NativeWithheld,
        NoticesHeard,
        ReplyCut,
        RunFinished,
        RunOutcome,
        TurnStarted,
    )
    from handrail.agent.loop import Agent
    from handrail.agent.model import TextDelta
    from handrail.agent.providers import open_model
    from handrail.agent.pump import Delayed
    from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalRequest, Attendant, Away
    from handrail.contract.call import Answer, Blob, Event, ProposedCall, Result
    from handrail.contract.doors.agents import Delegation
    from handrail.contract.doors.channels import Notice
    from handrail.contract.doors.peer import Peer
    from handrail.contract.doors.runtime import ClientContext, Option, Question, Runtime
    from handrail.contract.errors import (
        ErrorKind,
        Fault,
        HandrailError,
        LoadError,
        LogUnavailable,
        StartError,
        ToolError,
        UsageError,
    )
    from handrail.contract.session import Session, Turn
    from handrail.contract.text.neutral import neutralised, restored
    from handrail.contract.tool.decorator import tool
    from handrail.contract.tool.requires import Requires
    from handrail.contract.tool.spec import ConfigKey, LockSpec, ToolSpec
    from handrail.contract.tool.tool import Tool
    from handrail.contract.tool.triggers import Fired, TriggerTool, Waiting, trigger_spec
    from handrail.kernel.doctor import check_kernel
    from handrail.kernel.kernel import Kernel
    from handrail.kernel.opening import open_kernel
    from handrail.record.reading import LoggedRecord, LogReader
    from handrail.record.verification import Verification, verify
    from handrail.session.context import SessionOptions
    from handrail.store.folders import Folders, locate
    from handrail.store.lease import Holder, holder_of

_HOME = {
    "Agent": "agent.loop",
    "AgentIdle": "agent.events",
    "Answer": "contract.call",
    "Approval": "contract.approvals",
    "ApprovalAnswer": "contract.approvals",
    "ApprovalRequest": "contract.approvals",
    "Attendant": "contract.approvals",
    "Away": "contract.approvals",
    "Blob": "contract.call",
    "Budget": "agent.budget",
    "BudgetSpent": "agent.events",
    "CallAnswered": "agent.events",
    "CallProposed": "agent.events",
    "ClientContext": "contract.doors.runtime",
    "Compacted": "agent.events",
    "ConfigKey": "contract.tool.spec",
    "Delayed": "agent.pump",
    "Delegation": "contract.doors.agents",
    "ErrorKind": "contract.errors",
    "Event": "contract.call",
    "Fault": "contract.errors",
    "Fired": "contract.tool.triggers",
    "Folders": "store.folders",
    "HandrailError": "contract.errors",
    "Holder": "store.lease",
    "Kernel": "kernel.kernel",
    "LoadError": "contract.errors",
    "LockSpec": "contract.tool.spec",
    "LogReader": "record.reading",
    "LogUnavailable": "contract.errors",
    "LoggedRecord": "record.reading",
    "LoopEvent": "agent.events",
    "NativeUsed": "agent.events",
    "NativeWithheld": "agent.events",
    "Notice": "contract.doors.channels",
    "NoticesHeard": "agent.events",
    "Option": "contract.doors.runtime",
    "Peer": "contract.doors.peer",
    "ProposedCall": "contract.call",
    "Question": "contract.doors.runtime",
    "ReplyCut": "agent.events",
    "Requires": "contract.tool.requires",
    "Result": "contract.call",
    "RunFinished": "agent.events",
    "RunOutcome": "agent.events",
    "Runtime": "contract.doors.runtime",
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
    "Verification": "record.verification",
    "Waiting": "contract.tool.triggers",
    "check_kernel": "kernel.doctor",
    "holder_of": "store.lease",
    "locate": "store.folders",
    "neutralised": "contract.text.neutral",
    "open_kernel": "kernel.opening",
    "open_model": "agent.providers",
    "restored": "contract.text.neutral",
    "tool": "contract.tool.decorator",
    "trigger_spec": "contract.tool.triggers",
    "verify": "record.verification",
}

__all__ = [
    "Agent",
    "AgentIdle",
    "Answer",
    "Approval",
    "ApprovalAnswer",
    "ApprovalRequest",
    "Attendant",
    "Away",
    "Blob",
    "Budget",
    "BudgetSpent",
    "CallAnswered",
    "CallProposed",
    "ClientContext",
    "Compacted",
    "ConfigKey",
    "Delayed",
    "Delegation",
    "ErrorKind",
    "Event",
    "Fault",
    "Fired",
    "Folders",
    "HandrailError",
    "Holder",
    "Kernel",
    "LoadError",
    "LockSpec",
    "LogReader",
    "LogUnavailable",
    "LoggedRecord",
    "LoopEvent",
    "NativeUsed",
    "NativeWithheld",
    "Notice",
    "NoticesHeard",
    "Option",
    "Peer",
    "ProposedCall",
    "Question",
    "ReplyCut",
    "Requires",
    "Result",
    "RunFinished",
    "RunOutcome",
    "Runtime",
    "Session",
    "SessionOptions",
    "StartError",
    "TextDelta",
    "Tool",
    "ToolError",
    "ToolSpec",
    "TriggerTool",
    "Turn",
    "TurnStarted",
    "UsageError",
    "Verification",
    "Waiting",
    "check_kernel",
    "holder_of",
    "locate",
    "neutralised",
    "open_kernel",
    "open_model",
    "restored",
    "tool",
    "trigger_spec",
    "verify",
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
