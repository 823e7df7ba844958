"""The history that a run builds. Only whole exchanges enter it, so a provider accepts it at any moment; each message is
stored as it is added, a reply before its calls are proposed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from handrail.agent.conversation.history import Exchange, as_data, compacted, restored
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
from handrail.agent.pictures import NOT_ANSWERED, with_their_content
from handrail.agent.streaming.stream import Reply, WireIds, call_part, whole_characters
from handrail.contract.call import Answer
from handrail.contract.doors.history import Entry, History
from handrail.contract.result import Result

NOT_SHOWN = frozenset({"duration_ms", "lock_wait_ms", "confined_by", "artifacts"})
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


READ = "read"
_LEAST_REPEATED = 1_000
"""Characters of a text below which it is repeated: to say that it is unchanged would take as much."""
_UNCHANGED = (
    "The text is left out, because it is the same as in your earlier read of these lines since the user's last message. Use that "
    "answer."
)


class _ReadsGiven:
    """The answers of reads since the user's last message that are still whole in the conversation."""

    def __init__(self) -> None:
        self._given: dict[str, bytes] = {}
        """By path and range, the hash of all that was given."""

    def forget(self) -> None:
        """A user has spoken, or messages were left out: every file is given again."""
        self._given.clear()

    def answered(self, answer: Answer) -> Result:
        """The result for the model: of a text that it was given already only that it is unchanged."""
        result = answer.model
        whole: object = result.data
        if answer.tool_id != READ or not result.ok or not isinstance(whole, Mapping):
            return result
        data = dict(cast("Mapping[str, Any]", whole))
        text = data.pop("text", None)
        if not isinstance(text, str) or len(text) < _LEAST_REPEATED or result.metadata.get("truncated"):
            return result
        place = json.dumps([data.get(key) for key in ("path", "first_line", "last_line", "start", "end")])
        digest = hashlib.sha256(
            json.dumps([data, text], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        ).digest()
        if self._given.get(place) != digest:
            self._given[place] = digest
            return result
        return Result.output({**data, "message": _UNCHANGED}, **{**result.metadata, "unchanged": True})


class _Draft(NamedTuple):
    """What a reply adds to the conversation, worked out before it is proposed.

    :param new: its calls that were not proposed before
    :param data: as it is kept; nothing for a reply without calls
    """

    reply: Reply
    call_ids: Sequence[str]
    new: Sequence[CallPart]
    message: AssistantMessage
    data: Mapping[str, Any]


class Conversation:
    """The messages of one agent, over all its runs, kept as they are said where there is a ``history``.

    :param history: where; None keeps them in memory only
    :param repeat_reads: give the text of a file again that was read already and is unchanged
    """

    def __init__(self, history: History | None = None, *, repeat_reads: bool = True) -> None:
        self._history = history
        self._reads = None if repeat_reads else _ReadsGiven()
        self._messages: list[Message] = []
        self._positions: list[int] = []
        """Of each message: where it is kept."""
        self._open_at = 0
        self._open: Exchange | None = None
        self._ids = WireIds()
        self._draft: _Draft | None = None
        self._next = 0
        self._unsaved: list[Entry] = []
        self._handed_on = 0
        """How many of these are on their way."""
        self._keeping: list[Awaitable[None]] = []
        self._loaded = history is None
        self.heard: set[str] = set()
        """Ids of the notices that were told in it."""
        self._headless = self.carried = False
        """``carried``: headless since before this one was loaded, which its session does not know."""

    @property
    def headless(self) -> bool:
        """Whether nobody can be asked: what a trigger began stays so, until a user says something."""
        return self._headless

    @headless.setter
    def headless(self, headless: bool) -> None:
        self._headless, self.carried = headless, False

    @property
    def messages(self) -> tuple[Message, ...]:
        """Whole exchanges only."""
        return tuple(self._messages)

    @property
    def open(self) -> Exchange | None:
        """The last reply, while calls of it have no answer. Nothing else may be said before they have."""
        return self._open

    @property
    def unanswered(self) -> bool:
        """Whether calls have no answer, or what was said last has none."""
        return self._open is not None or (bool(self._messages) and not isinstance(self._messages[-1], AssistantMessage))

    async def load(self) -> None:
        """Read what was said before, once.

        :raises HandrailError: when it cannot be read
        """
        if self._loaded or self._history is None:
            return
        found = restored(await self._history.read())
        self._messages = await with_their_content(found.messages, self._history)
        self._open = found.open
        self._positions, self._open_at = found.positions, found.open_at
        self._ids, self._next, self.heard = found.ids, found.next, found.heard
        self._headless = self.carried = found.headless
        self._loaded = True

    def begin_to_save(self) -> None:
        """Hand on what was said since the last time: it is kept before the effects of what is proposed from now on."""
        if self._history is not None and len(self._unsaved) > self._handed_on:
            entries = self._unsaved[self._handed_on :]
            self._handed_on += len(entries)
            self._keeping.append(self._history.keep(entries))

    async def save(self) -> None:
        """Keep what was said since the last time; durable on return.

        :raises LogUnavailable: when it cannot be kept now; it is tried again the next time
        """
        self.begin_to_save()
        count, keeping = self._handed_on, self._keeping
        self._keeping = []
        try:
            for kept in keeping:
                await kept
        except BaseException:
            self._handed_on = 0
            raise
        del self._unsaved[:count]
        self._handed_on -= count

    def ask(self, said: str | UserMessage) -> str:
        """Add what the user says; gives its text."""
        assert self._open is None, "calls before it have no answer"
        self._show_no_more()
        message = said if isinstance(said, UserMessage) else UserMessage(said)
        self._add(replace(message, text=whole_characters(message.text)))
        return message.text

    def _show_no_more(self) -> None:
        """What was shown and got no answer, as where the provider refused it, would keep every later request from one."""
        for place in range(len(self._messages) - 1, -1, -1):
            if not isinstance(message := self._messages[place], UserMessage):
                return
            if message.pictures:
                self._messages[place] = plain = UserMessage(f"{message.text}\n{NOT_ANSWERED}")
                if self._history is not None:
                    self._unsaved.append((self._positions[place], as_data(plain)))

    def hear(self, text: str, ids: Sequence[str]) -> None:
        """Add what is told beside the answers to calls: the notices of these ids, as ``text``."""
        assert self._open is None, "calls before it have no answer"
        message = UserMessage(whole_characters(text))
        self.heard.update(ids)
        self._add(message, notices=list(ids), **({"headless": True} if self.headless else {}))

    def propose(self, reply: Reply, call_ids: Sequence[str]) -> None:
        """Take a reply whose calls are about to be proposed, or what there is of it; the same again, grown, takes its place.
        A reply of nothing adds nothing.

        :param call_ids: the ids under which the kernel will know its calls, in their order
        """
        growing, draft = self._open, self._draft
        assert growing is None or not growing.results, "calls before it have no answer"
        if draft is None or draft.reply != reply or draft.call_ids != call_ids:
            self._drop_draft()
            draft = self._drafted(reply, call_ids)
        self._draft, message = None, draft.message
        if growing is not None and message == growing.message:
            return
        if reply.calls:
            self._open = Exchange(message, tuple(call_ids))
            if growing is not None:
                self._next -= 1
            self._open_at = self._next
            self._keep(draft.data)
        elif any(not isinstance(part, Kept) or part.said for part in message.parts):
            self._add(message)

    def draft(self, reply: Reply, call_ids: Sequence[str]) -> None:
        """Work out ahead what :meth:`propose` is to add, if it is given this very reply."""
        self._drop_draft()
        self._draft = self._drafted(reply, call_ids)

    def _drafted(self, reply: Reply, call_ids: Sequence[str]) -> _Draft:
        known = [] if self._open is None else list(self._open.message.calls)  # these stay what they were
        new = [call_part(call, self._ids.take(call.provider_id)) for call in reply.calls[len(known) :]]
        known += new
        parts: list[TextPart | CallPart | Kept] = []
        for part in reply.parts:
            if isinstance(part, int):
                parts.append(known[part])
            elif not isinstance(part, TextPart) or part.text.strip():
                parts.append(part)
        message = AssistantMessage(tuple(parts))
        return _Draft(reply, call_ids, new, message, as_data(message, call_ids) if reply.calls else {})

    def _drop_draft(self) -> None:
        if self._draft is not None:
            self._ids.give_back([part.wire_id for part in self._draft.new])
            self._draft = None

    def answer(self, answers: Mapping[int, Answer]) -> None:
        """Add answers to the calls of the open reply; with the last one it becomes part of the history.

        :param answers: by the position of the call among the reply's calls
        """
        exchange = self._open
        if exchange is None or not answers:
            return
        calls = exchange.message.calls
        for position, answer in answers.items():
            wire_id = calls[position].wire_id
            result = answer.model if self._reads is None else self._reads.answered(answer)
            exchange.results[wire_id] = CallResult(wire_id, shown(result), not result.ok)
        if exchange.missing:
            told = [exchange.results[call.wire_id] for call in calls if call.wire_id in exchange.results]
            self._keep(as_data(ResultsMessage(tuple(told)), partial=True))
        else:
            self._open = None
            self._messages.append(exchange.message)
            self._positions.append(self._open_at)
            self._add(exchange.answered())

    def compact(self, first: int, text: str) -> None:
        """From now on ``text`` stands in the place of the messages before the ``first``-th, which stay kept."""
        assert self._open is None, "calls before it have no answer"
        if self._reads is not None:
            self._reads.forget()
        place = self._positions[first]
        self._messages[:first], self._positions[:first] = [UserMessage(text)], [place - 1]
        self._keep(compacted(place, text))

    def _add(self, message: Message, **more: Any) -> None:
        if self._reads is not None and isinstance(message, UserMessage):
            self._reads.forget()
        self._messages.append(message)
        self._positions.append(self._next)
        self._keep({**as_data(message), **more})

    def _keep(self, data: Mapping[str, Any]) -> None:
        if self._history is not None:
            self._unsaved.append((self._next, data))
            self._next += 1
