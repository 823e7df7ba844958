"""The history a run builds: only whole exchanges enter it, so a provider takes it at any moment."""

from __future__ import annotations

import json
from collections.abc import Sequence

from handrail.agent.model import (
    AssistantMessage,
    CallPart,
    CallResult,
    Kept,
    Message,
    ResultsMessage,
    TextPart,
    UserMessage,
)
from handrail.agent.stream import Reply, WireIds, call_part, whole_characters
from handrail.contract.call import Answer
from handrail.contract.result import Result

NOT_SHOWN = frozenset({"duration_ms", "lock_wait_ms", "confined_by"})
"""Metadata that tells the model nothing to act on: without times, the same result is the same text."""


def shown(result: Result) -> str:
    """``result`` as its model reads it: compact JSON, ``{type, data | error_text, metadata}``, byte-stable."""
    wire = result.to_dict()
    metadata = {key: value for key, value in sorted(result.metadata.items()) if key not in NOT_SHOWN}
    if metadata:
        wire["metadata"] = metadata
    else:
        del wire["metadata"]
    return whole_characters(json.dumps(wire, ensure_ascii=False, separators=(",", ":"), default=str))


class Conversation:
    """The messages of one agent, over all its runs."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._ids = WireIds()

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    def ask(self, text: str) -> None:
        """Add what the user says."""
        self._messages.append(UserMessage(whole_characters(text)))

    def exchange(self, reply: Reply, answers: Sequence[Answer]) -> None:
        """Add a reply and the answers to its calls, at once. A reply of nothing adds nothing.

        :param answers: one for each of the reply's calls, in their order
        """
        parts: list[TextPart | CallPart | Kept] = []
        results: list[CallResult] = []
        answered = list(zip(reply.calls, answers, strict=True))
        for part in reply.parts:
            if isinstance(part, int):
                call, answer = answered[part]
                wire_id = self._ids.take(call.provider_id)
                parts.append(call_part(call, wire_id))
                results.append(CallResult(wire_id, shown(answer.model), not answer.model.ok))
            elif not isinstance(part, TextPart) or part.text.strip():
                parts.append(part)
        if any(not isinstance(part, Kept) for part in parts):
            self._messages.append(AssistantMessage(tuple(parts)))
        if results:
            self._messages.append(ResultsMessage(tuple(results)))
