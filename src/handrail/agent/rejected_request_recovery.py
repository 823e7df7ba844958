"""Recovery from a rejected request: the agent changes the history, so that no session stays rejected.

A request that is too long is compacted once, or a few times if the size of the context is unknown. A request that is rejected for another reason is sent once more without the
parts that only some models accept: blocks of the provider, and pictures. The change is kept if that request is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from handrail.agent.agent_run import AgentRunState
from handrail.agent.compaction import ConversationCompactor
from handrail.agent.conversation import Conversation, HistoryReduction, adapt_history_to_model, apply_history_reduction
from handrail.agent.model_protocol import (
    MAX_REQUEST_PICTURE_BYTES,
    MAX_REQUEST_PICTURES,
    CallResult,
    CallResultsMessage,
    ContextOverflow,
    Message,
    Model,
    ModelRequest,
    ProviderBlock,
    ProviderError,
    RequestRejected,
    UserMessage,
    UserPicture,
    get_model_origin,
    takes_pictures,
)
from handrail.agent.run_events import ConversationCompacted

MAX_ROUNDS = 3
"""The most compactions of one request whose provider does not say how much it takes. Each leaves half."""
PICTURE_LEFT_OUT = "[The image here is left out: the request has too many images. Read it again if you need it.]"
"""The note in place of an earlier picture for which a request has no room."""


class RejectedRequestRecovery:
    """The recovery of one agent from rejected requests.

    :param conversation: the agent's conversation
    :param compactor: leaves out older messages of it
    """

    def __init__(self, conversation: Conversation, compactor: ConversationCompactor, model: Model) -> None:
        self._conversation = conversation
        self._compactor = compactor
        self._origin = get_model_origin(model)
        self._takes_pictures = takes_pictures(model)
        self._trial: HistoryReduction | None = None
        """The change of the request that is sent once more."""
        self._rounds_left = MAX_ROUNDS
        """The number of times that a request may still be compacted."""

    def build_request_messages(self) -> tuple[Message, ...]:
        """Return the messages of the next request, in the form for the model."""
        messages: Sequence[Message] = self._conversation.messages
        if self._trial is not None:
            messages = apply_history_reduction(messages, self._conversation.positions, self._trial)
        messages = adapt_history_to_model(messages, self._origin)
        return tuple(limit_picture_count(messages) if self._takes_pictures else map(_without_result_pictures, messages))

    async def recover(
        self, run: AgentRunState, error: ProviderError, request: ModelRequest
    ) -> Sequence[ConversationCompacted] | None:
        """Prepare the conversation for one more request after ``error``.

        :return: the events, if any; None if nothing can be done
        :raises HandrailError: if a change cannot be stored
        """
        if run.stopped is not None or not isinstance(error, RequestRejected):
            return None
        if isinstance(error, ContextOverflow):
            if not self._rounds_left:
                self._rounds_left = MAX_ROUNDS
                return None
            fixed = len(request.system) + len(json.dumps([*request.tools, *request.native], default=str))
            made = await self._compactor.compact_after_rejected_request(run, error.max_tokens, fixed)
            if made is None:
                self._rounds_left = MAX_ROUNDS
                return None
            event, is_size_known = made
            self._rounds_left = 0 if is_size_known else self._rounds_left - 1
            return [event]
        if self._trial is not None:
            self._trial = None
            return None
        change = self._find_change(request.messages, error)
        self._trial = change
        return None if change is None else []

    def commit_accepted_reduction(self, tokens: int, request: ModelRequest) -> None:
        """Keep the change of the last request, because the provider accepted it.

        :param tokens: the input tokens that the provider reported; 0 for none
        """
        self._rounds_left = MAX_ROUNDS
        if self._trial is not None:
            self._conversation.reduce_rejected_history(self._trial)
            if self._trial.without_pictures and self._trial.for_good:
                self._takes_pictures = False
            self._trial = None
        self._compactor.record_accepted_request(tokens, request)

    def _find_change(self, sent: Sequence[Message], error: RequestRejected) -> HistoryReduction | None:
        """Return the change that may make the request acceptable, or None."""
        last = len(sent)
        while last and isinstance(sent[last - 1], UserMessage):
            last -= 1
        earlier = sent[:last]
        blocks = any(isinstance(part, ProviderBlock) for message in earlier for part in getattr(message, "parts", ()))
        pictures = any(_pictures_of(message) for message in earlier)
        change = HistoryReduction(
            self._conversation.get_stored_position(last),
            without_blocks=blocks and error.about in ("reasoning", "unknown"),
            without_pictures=pictures and error.about in ("pictures", "no pictures", "unknown"),
            for_good=error.about == "no pictures",
        )
        return change if change.without_blocks or change.without_pictures else None


def _pictures_of(message: Message) -> tuple[UserPicture, ...]:
    if isinstance(message, UserMessage):
        return message.pictures
    results = message.results if isinstance(message, CallResultsMessage) else ()
    return tuple(picture for result in results for picture in result.pictures)


def _without_result_pictures(message: Message) -> Message:
    if not isinstance(message, CallResultsMessage) or not _pictures_of(message):
        return message
    return CallResultsMessage(tuple(replace(result, pictures=()) for result in message.results))


def limit_picture_count(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with as many pictures as one request may have. The latest ones stay."""
    count = size = 0
    kept: list[Message] = []
    for message in reversed(messages):
        pictures = _pictures_of(message)
        count += len(pictures)
        size += sum(len(picture.data) for picture in pictures) * 4 // 3
        if pictures and kept and (count > MAX_REQUEST_PICTURES or size > MAX_REQUEST_PICTURE_BYTES):
            kept.append(_leave_out_pictures(message))
        else:
            kept.append(message)
    return messages if not count else kept[::-1]


def _leave_out_pictures(message: Message) -> Message:
    if isinstance(message, UserMessage):
        return UserMessage(f"{message.text}\n{PICTURE_LEFT_OUT}")
    if not isinstance(message, CallResultsMessage):
        return message
    return CallResultsMessage(tuple(_leave_out_of_result(result) for result in message.results))


def _leave_out_of_result(result: CallResult) -> CallResult:
    return replace(result, text=f"{result.text}\n{PICTURE_LEFT_OUT}", pictures=()) if result.pictures else result
