"""Handrail: a tool kernel for LLM agents.

A model only proposes tool calls; the kernel validates, authorises, locks, sandboxes, runs, records and
answers them. Start with :func:`open_kernel` and :func:`tool`::

    async with open_kernel(workspace=".") as kernel:
        session = await kernel.session()
        result = await session.call("read", {"path": "README.md"})

Names load when first used, so ``import handrail`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handrail.agent.budget import Budget
    from handrail.agent.loop import Agent
    from handrail.agent.providers import open_model
    from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalRequest, Attendant, Away
    from handrail.contract.call import Answer, Blob, Event, ProposedCall, Result
    from handrail.contract.doors.agents import Delegation
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
    from handrail.contract.tool.decorator import tool
    from handrail.contract.tool.requires import Requires
    from handrail.contract.tool.spec import ConfigKey, LockSpec, ToolSpec
    from handrail.contract.tool.tool import Tool
    from handrail.contract.tool.triggers import Fired, TriggerTool, Waiting, trigger_spec
    from handrail.kernel.doctor import check_kernel
    from handrail.kernel.kernel import Kernel
    from handrail.kernel.opening import open_kernel

_HOME = {
    "Agent": "agent.loop",
    "Answer": "contract.call",
    "Approval": "contract.approvals",
    "ApprovalAnswer": "contract.approvals",
    "ApprovalRequest": "contract.approvals",
    "Attendant": "contract.approvals",
    "Away": "contract.approvals",
    "Blob": "contract.call",
    "Budget": "agent.budget",
    "ClientContext": "contract.doors.runtime",
    "ConfigKey": "contract.tool.spec",
    "Delegation": "contract.doors.agents",
    "ErrorKind": "contract.errors",
    "Event": "contract.call",
    "Fault": "contract.errors",
    "Fired": "contract.tool.triggers",
    "HandrailError": "contract.errors",
    "Kernel": "kernel.kernel",
    "LoadError": "contract.errors",
    "LockSpec": "contract.tool.spec",
    "LogUnavailable": "contract.errors",
    "Option": "contract.doors.runtime",
    "ProposedCall": "contract.call",
    "Question": "contract.doors.runtime",
    "Requires": "contract.tool.requires",
    "Result": "contract.call",
    "Runtime": "contract.doors.runtime",
    "Session": "contract.session",
    "StartError": "contract.errors",
    "Tool": "contract.tool.tool",
    "ToolError": "contract.errors",
    "ToolSpec": "contract.tool.spec",
    "TriggerTool": "contract.tool.triggers",
    "Turn": "contract.session",
    "UsageError": "contract.errors",
    "Waiting": "contract.tool.triggers",
    "check_kernel": "kernel.doctor",
    "open_kernel": "kernel.opening",
    "open_model": "agent.providers",
    "tool": "contract.tool.decorator",
    "trigger_spec": "contract.tool.triggers",
}

__all__ = [
    "Agent",
    "Answer",
    "Approval",
    "ApprovalAnswer",
    "ApprovalRequest",
    "Attendant",
    "Away",
    "Blob",
    "Budget",
    "ClientContext",
    "ConfigKey",
    "Delegation",
    "ErrorKind",
    "Event",
    "Fault",
    "Fired",
    "HandrailError",
    "Kernel",
    "LoadError",
    "LockSpec",
    "LogUnavailable",
    "Option",
    "ProposedCall",
    "Question",
    "Requires",
    "Result",
    "Runtime",
    "Session",
    "StartError",
    "Tool",
    "ToolError",
    "ToolSpec",
    "TriggerTool",
    "Turn",
    "UsageError",
    "Waiting",
    "check_kernel",
    "open_kernel",
    "open_model",
    "tool",
    "trigger_spec",
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
