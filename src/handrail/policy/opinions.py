"""What a watchdog is asked and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from handrail.policy.rules import Action

DEFAULT_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class WatchdogCall:
    """What a watchdog sees of one call.

    :param agent: the agent's manifest, as data
    :param tool: the tool's runtime view
    :param decision: what capabilities and rules left: ``allow`` or ``ask``
    """

    tool_id: str
    arguments: Mapping[str, Any]
    agent: Mapping[str, Any]
    tool: Mapping[str, Any]
    session_id: str
    call_id: str = ""
    decision: Action = "allow"


@dataclass(frozen=True, slots=True)
class Opinion:
    """A watchdog's answer. ``reason`` is read by the model when the answer is deny, by a person when it is ask."""

    action: Action
    reason: str = ""


def allow() -> Opinion:
    """No objection."""
    return Opinion("allow")


def deny(reason: str) -> Opinion:
    """The call fails, and the model reads why."""
    return Opinion("deny", reason)


def ask(reason: str) -> Opinion:
    """A person decides; where nobody can be asked, the call is denied."""
    return Opinion("ask", reason)


def call_as_json(call: WatchdogCall) -> dict[str, Any]:
    """What an external watchdog reads."""
    return asdict(call)
