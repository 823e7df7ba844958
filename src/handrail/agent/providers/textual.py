"""Tool use for a model without tool calling: tools are described in the system text, calls parsed from the reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from handrail.agent.model import (
    AssistantMessage,
    BlockEvent,
    CallPart,
    Finished,
    Message,
    Model,
    ModelRequest,
    Picture,
    ResultsMessage,
    TextDelta,
    TextPart,
    UserMessage,
    takes_pictures,
)
from handrail.agent.prompt import STRUCTURED_ONLY
from handrail.agent.text_calls import GRAMMARS, Grammar, TextCalls, TextForm, tools_told
from handrail.catalog.dialects import TEXT, Dialect
from handrail.catalog.fitting import offered


class TextualModel:
    """``model``, with its calls written as text in one of the forms of :mod:`handrail.agent.text_calls`.

    The provider is offered no tools. What a call gave goes back as what the user says, one line of JSON for each call.
    """

    def __init__(self, model: Model, form: TextForm) -> None:
        self._model = model
        self._grammar = GRAMMARS[form]

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def dialect(self) -> Dialect:
        return TEXT

    @property
    def takes_pictures(self) -> bool:
        return takes_pictures(self._model)

    async def aclose(self) -> None:
        await self._model.aclose()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """See :meth:`handrail.agent.model.Model.stream`."""
        views = [offered(view, TEXT)[0] for view in request.tools]
        reader = TextCalls(self._grammar, {view["name"]: view["inputSchema"] for view in views})
        events = cast("AsyncGenerator[BlockEvent, None]", self._model.stream(self._as_text(request, views)))
        over = False
        async with aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta):
                    for one in reader.feed(event.text):
                        yield one
                elif isinstance(event, Finished):
                    over = True
                    for one in reader.end():
                        yield one
                    yield Finished("calls") if event.reason == "end" and reader.calls else event
                else:
                    yield event
        if not over:
            for one in reader.end():
                yield one

    def _as_text(self, request: ModelRequest, views: Sequence[Mapping[str, Any]]) -> ModelRequest:
        system = request.system.replace(STRUCTURED_ONLY, "")
        if views:
            told = [{**view, "parameters": view["inputSchema"]} for view in views]
            system = f"{system.rstrip()}\n\n{tools_told(self._grammar, told)}\n"
        return replace(
            request, system=system, messages=list(_said(request.messages, self._grammar)), tools=[], native=()
        )


def _said(messages: Sequence[Message], grammar: Grammar) -> Iterator[Message]:
    """The conversation in text alone. Two messages of the user's in a row are one: not every provider takes two."""
    names: dict[str, str] = {}
    waiting: list[str] = []
    pictures: list[Picture] = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            if waiting:
                yield UserMessage("\n\n".join(waiting), tuple(pictures))
                waiting, pictures = [], []
            names = {call.wire_id: call.name for call in message.calls}
            yield AssistantMessage(tuple(_without_calls(message, grammar)))
        elif isinstance(message, ResultsMessage):
            waiting.append(
                "\n".join(
                    f"Result of call {number} ({names.get(result.wire_id, 'unknown')}): {result.text}"
                    for number, result in enumerate(message.results, 1)
                )
            )
        else:
            waiting.append(message.text)
            pictures += message.pictures
    if waiting:
        yield UserMessage("\n\n".join(waiting), tuple(pictures))


def _without_calls(message: AssistantMessage, grammar: Grammar) -> Iterator[Any]:
    text = ""
    for part in message.parts:
        if isinstance(part, TextPart):
            text += part.text
        elif isinstance(part, CallPart):
            text += (
                ("\n" if text and not text.endswith("\n") else "") + grammar.written(part.name, part.arguments) + "\n"
            )
        else:
            if text:
                yield TextPart(text)
            text = ""
            yield part
    if text:
        yield TextPart(text)
