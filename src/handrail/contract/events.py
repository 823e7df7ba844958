"""The events that a face can watch while calls run: one ordered stream per session."""

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
    "detached",  # it was answered with a job, under job, and goes on in the background
    "started",
    "progress",  # message, fraction; or a piece of what it gives so far, under output
    "log",  # a message of the tool's: level, data, logger
    "finished",  # type, error_kind; of a program that ended by itself its exit_code, or the signal
    "offers-changed",  # of the session, no call's: which tools, resources or prompts there are, or are in view
    "resource-updated",  # of the session: a resource that it has subscribed to, under uri
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one call, or to the session itself, where ``call_id`` and ``tool_id`` are empty.
    ``at_ns`` is wall-clock time in nanoseconds."""

    kind: EventKind
    session_id: str
    call_id: str
    tool_id: str
    at_ns: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
