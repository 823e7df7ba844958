"""The wording about states of stateful tools: how one ended, and the answer to a step that comes too late."""

from __future__ import annotations

from collections.abc import Mapping

from handrail.arbiter.calls.call import Refusal
from handrail.contract.doors.opened import StateEnd
from handrail.contract.errors import ErrorKind

_HOW: Mapping[StateEnd, str] = {
    "done": "it gave its last step",
    "closed": "it was closed",
    "expired": "no step came in time",
    "failed": "a step of it failed",
    "timeout": "a step of it took too long",
    "cancelled": "a step of it was stopped",
    "suspended": "its session, or Handrail, ended meanwhile",
    "changed": "its tool is no longer the one that opened it",
    "interrupted": "Handrail ended while it was open, and nobody knows how far a step that ran then came; look at what it did",
}


def how(ended: StateEnd) -> str:
    """How one ended, as the end of a sentence."""
    return _HOW[ended]


def has_ended(ended: StateEnd) -> str:
    """What follows the name of one that has."""
    return f"has ended: {_HOW[ended]}. Open another where it is still needed"


def how_to_go_on(idle_s: float) -> str:
    """With the first step of one."""
    after = f"{idle_s / 60:.3g} min" if idle_s >= 60 else f"{idle_s:.3g} s"
    return f"Go on by tool.step, end it by tool.close; without a step it ends after {after}."


def full(most: int, named: str) -> str:
    """
    :param named: those that are open, as the end of a part of a sentence
    """
    return f"a session has at most {most} states open or being opened{named}; close one by tool.close. Nothing was run"


def over_now(state_id: str) -> str:
    """What follows the text of a failure that ended one."""
    return f"The state {state_id} has ended with that"


def kind_of(ended: StateEnd) -> ErrorKind:
    return "interrupted" if ended == "interrupted" else "conflict"


def refusal(state_id: str, ended: StateEnd) -> Refusal:
    """Of a step of one that has ended."""
    return Refusal("validate", kind_of(ended), f"the state {state_id} {has_ended(ended)}")
