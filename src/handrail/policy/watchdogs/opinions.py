"""What a watchdog is asked, and the answers it may give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from handrail.policy.rules.rules import Action

DEFAULT_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class WatchdogCall:
    """What a watchdog sees of one call.

    :param agent: the agent's manifest, as data
    :param tool: the tool's runtime view
    :param decision: what capabilities and rules left: ``allow`` or ``ask``
    :param targets: what it would touch, as capability and canonical value: a path, ``host[:port]``, a command
    :param failed_before: how often exactly this call has failed in the session since anything was changed in it
    :param failed_in_a_row: how often of these since any other call succeeded
    """

    tool_id: str
    arguments: Mapping[str, Any]
    agent: Mapping[str, Any]
    tool: Mapping[str, Any]
    session_id: str
    call_id: str = ""
    decision: Action = "allow"
    targets: Sequence[tuple[str, str]] = ()
    failed_before: int = 0
    failed_in_a_row: int = 0


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
