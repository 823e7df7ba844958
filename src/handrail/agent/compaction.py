"""A conversation that has grown too long for its model: older exchanges are left out of the requests, and an outline stands
in their place. What was said stays kept as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from handrail.agent.budget import CHARACTERS_PER_TOKEN, characters_of
from handrail.agent.conversation import Conversation
from handrail.agent.events import Compacted
from handrail.agent.model import AssistantMessage, Message, ResultsMessage, UserMessage
from handrail.contract.neutral import neutralised

INTRO = "[Handrail] Older messages are left out here to make room; they are kept. In them, in short:"
_KEEPS = 0.5
"""Of the room there is, how much the messages that stay may take."""
_MOST_OUTLINED = 12_000
"""Characters of the outline."""
_OF_A_TASK = 4_000
_OF_A_TEXT = 300
_OF_A_CALL = 160


def make_room(conversation: Conversation, tokens: int | None) -> Compacted | None:
    """Leave out what does not fit, where the messages are more than about ``tokens``. Whole exchanges stay or go."""
    messages = conversation.messages
    before = sum(map(characters_of, messages))
    if tokens is None or before <= tokens * CHARACTERS_PER_TOKEN:
        return None
    first = first_kept(messages, int(tokens * CHARACTERS_PER_TOKEN * _KEEPS))
    if first <= 1:  # nothing to leave out, or an outline in the place of an outline
        return None
    conversation.compact(first, outline(messages[:first]))
    after = sum(map(characters_of, conversation.messages))
    return Compacted(first, before // CHARACTERS_PER_TOKEN, after // CHARACTERS_PER_TOKEN)


def first_kept(messages: Sequence[Message], room: int) -> int:
    """The position of the first message to keep: as many as take at most ``room`` characters, and at least the last
    exchange. Answers stay with their calls."""
    first = len(messages)
    taken = 0
    for position in range(len(messages) - 1, -1, -1):
        taken += characters_of(messages[position])
        if taken > room and first < len(messages):
            break
        if not isinstance(messages[position], ResultsMessage):
            first = position
    return 0 if first == len(messages) else first


def outline(messages: Sequence[Message]) -> str:
    """What was asked, said and called, a line each; of tools' results no more than whether they were errors, so that nothing
    in them is said again in another's place."""
    lines = list(_lines(messages))
    head, tail = lines[:1], lines[1:]
    room = _MOST_OUTLINED - sum(map(len, head))
    kept: list[str] = []
    for line in reversed(tail):
        room -= len(line) + 1
        if room < 0:
            kept.append(f"- ({len(tail) - len(kept):,} lines are left out)")
            break
        kept.append(line)
    return "\n".join((INTRO, *head, *reversed(kept)))


def _lines(messages: Sequence[Message]) -> Iterator[str]:
    failed = {r.wire_id for m in messages if isinstance(m, ResultsMessage) for r in m.results if r.is_error}
    for position, message in enumerate(messages):
        match message:
            case UserMessage(text) if text.startswith(INTRO):
                yield from text.splitlines()[1:]
            case UserMessage(text) if text.startswith("[Handrail]"):
                yield f"- you were told: {_short(_after_its_first_line(text), _OF_A_TEXT)}"
            case UserMessage(text):
                yield f"- the user said: {_short(text, _OF_A_TEXT if position else _OF_A_TASK)}"
            case AssistantMessage():
                if message.text.strip():
                    yield f"- you said: {_short(message.text, _OF_A_TEXT)}"
                for call in message.calls:
                    arguments = _short(json.dumps(call.arguments, ensure_ascii=False, default=str), _OF_A_CALL)
                    yield f"- you called {call.name} {arguments}: {'error' if call.wire_id in failed else 'ok'}"
            case ResultsMessage():
                pass


def _after_its_first_line(text: str) -> str:
    return text.partition("\n")[2]


def _short(text: str, most: int) -> str:
    line = neutralised(" ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]}…"
