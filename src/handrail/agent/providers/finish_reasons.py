"""Why a reply ends, in the words of all servers. One server often speaks for models of several others."""

from __future__ import annotations

import re
from typing import Literal, cast

from handrail.agent.model_protocol import FinishReason
from handrail.agent.providers.provider_errors import get_sdk_field

_END = frozenset(
    {"stop", "stop_sequence", "stop_token", "end", "end_turn", "eos", "eos_token", "complete", "completed"}
)
_CALLS = frozenset({"tool_calls", "tool_call", "tool_use", "function_call", "function_calls", "too_many_tool_calls"})
_LENGTH = re.compile(r"length|max_|window|(?:token|error)_limit")
_REFUSED = re.compile(
    r"filter|safety|refus|recitation|sensitive|prohibit|blocked|blocklist|spii|guardrail|toxic|inspection|flagged|language|armor"
)
_GAVE_UP = re.compile(
    r"error|abort|cancel|fail|time_?out|overload|unavailable|interrupt|malformed|unexpected|insufficient|missing"
)
_WORD_ENDS = re.compile(r"(?<=[a-z])(?=[A-Z])|[-\s]+")
_UNFINISHED = frozenset({"", "none", "null", "undefined", "unspecified", "finish_reason_unspecified", "not_finished"})
"""Reasons that some servers send while the reply continues."""


def read_finish_reason(given: object) -> str | None:
    """Return why a reply ended, in lower case with underscores, or None if it continues."""
    if isinstance(given, dict):
        given = get_sdk_field(cast("object", given), "type")
    reason = given.strip().rpartition(".")[2] if isinstance(given, str) else ""
    reason = _WORD_ENDS.sub("_", reason).lower()
    return None if reason in _UNFINISHED else reason


def classify_finish_reason(reason: str) -> FinishReason | Literal["gave up"]:
    """Return the kind of a reason that :func:`read_finish_reason` returned.

    :return: ``"gave up"`` if the server interrupted the reply, or could not read it
    """
    if reason in _END:
        return "end"
    if reason in _CALLS:
        return "calls"
    if reason == "pause_turn":
        return "paused"
    if _LENGTH.search(reason):
        return "length"
    if _REFUSED.search(reason):
        return "refused"
    return "gave up" if _GAVE_UP.search(reason) else "other"
