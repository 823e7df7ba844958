"""What a face can watch while a call runs: one stream per session, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal[
    "proposed",
    "refused",
    "asking",
    "approved",
    "parked",  # nobody is there to ask now: it goes on when its session is taken up again
    "waiting",  # for locks
    "started",
    "progress",
    "finished",
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one call. ``at_ns`` is wall-clock time in nanoseconds."""

    kind: EventKind
    session_id: str
    call_id: str
    tool_id: str
    at_ns: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
