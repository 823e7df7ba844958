"""The provider Protocol: one request in, block events out, and the errors a provider can end with.

A provider adapter translates two ways and decides nothing: it turns a :class:`ModelRequest` into its API's
form, and the API's stream into :data:`BlockEvent` values. It never collects a whole reply, never parses a
call's arguments, and never retries.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from handrail.contract.errors import HandrailError

if TYPE_CHECKING:
    from handrail.catalog.forms.dialects import Dialect

# --- what a reply is made of, in the order it arrives ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A further piece of the reply's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A structured call begins.

    :param index: the adapter's number for this block, not used again within the reply
    :param provider_id: the provider's own id, or None where it sent none
    :param name: the wire name; ``""`` where the provider sent none
    """

    index: int
    provider_id: str | None
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The provider said that this call is whole; no adapter infers it from the JSON."""

    index: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A block of the provider's own (signed reasoning, say) that it wants back unchanged in the history.

    :param said: the reply is made of it, as of its text: the provider used a tool of its own
    :param artifacts: what is kept of it here
    """

    provider: str
    block: Mapping[str, Any]
    said: bool = False
    artifacts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NativeGiven:
    """The provider carried out a tool of its own, and this came of it.

    :param name: what the provider calls the tool
    :param provider_id: the provider's own id of this use, or ``""``
    :param arguments: what the model asked of it, where the provider says so
    :param content: what came of it, as the provider's JSON
    :param failed: the provider says that it did not work
    :param kept: what the provider wants back in the history, where it does
    """

    name: str
    provider_id: str
    arguments: Mapping[str, Any]
    content: Any
    failed: bool = False
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of this one request and reply. Totals, not differences: the last one counts."""

    input_tokens: int
    output_tokens: int


FinishReason = Literal[
    "end",  # the model has said what it wanted to
    "calls",  # it waits for results
    "length",  # its output limit or its context cut the reply
    "paused",  # the provider asks for another request, to go on with a tool of its own
    "refused",  # a filter of the provider, or the model, declined
    "other",
]


@dataclass(frozen=True, slots=True)
class Finished:
    """The provider closed the reply. Whatever is still open by then stays incomplete."""

    reason: FinishReason


BlockEvent = TextDelta | CallOpened | CallArguments | CallClosed | Kept | NativeGiven | Usage | Finished


# --- the conversation, in a form of no provider ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call in the history, in a form that every provider takes.

    :param wire_id: unique within the conversation; see :class:`handrail.agent.streaming.stream.WireIds`
    :param name: matches ``[A-Za-z0-9_-]{1,64}``, whatever the model wrote
    :param arguments: always an object, whatever the model wrote
    """

    wire_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    """One that a user shows; see :mod:`handrail.agent.pictures`.

    :param ref: the artifact that it is kept as
    :param media_type: of those that every provider takes
    :param data: empty where it is only known by ``ref``
    """

    ref: str
    media_type: str
    data: bytes = field(default=b"", repr=False)

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """The picture itself, as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


@dataclass(frozen=True, slots=True)
class UserMessage:
    """
    :param pictures: each stands in the text as ``[image 1]`` and so on, for models that are shown none
    """

    text: str
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """One reply: its parts in the order they came."""

    parts: tuple[TextPart | CallPart | Kept, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def calls(self) -> tuple[CallPart, ...]:
        return tuple(part for part in self.parts if isinstance(part, CallPart))


@dataclass(frozen=True, slots=True)
class CallResult:
    """What the model reads of one call's answer: compact JSON text."""

    wire_id: str
    text: str
    is_error: bool


@dataclass(frozen=True, slots=True)
class ResultsMessage:
    """The answers to the calls of the message before it: one each, in call order."""

    results: tuple[CallResult, ...]


Message = UserMessage | AssistantMessage | ResultsMessage


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One turn's request.

    :param tools: LLM views (``name``, ``description``, ``parameters``) and nothing else of a tool
    :param max_output_tokens: None leaves the provider's default
    :param native: what the provider carries out itself, in its own form
    """

    system: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    max_output_tokens: int | None = None
    native: Sequence[Mapping[str, Any]] = ()


class Model(Protocol):
    """A way to reach one model."""

    @property
    def name(self) -> str:
        """``provider:model``, as an operator writes it."""
        ...

    @property
    def dialect(self) -> Dialect:
        """What its provider's schemas can say; arguments come back in the tool's own form by it."""
        ...

    def stream(self, request: ModelRequest) -> AsyncIterator[BlockEvent]:
        """Ask once and yield the reply as it arrives.

        :raises ProviderError: one of its subclasses; :class:`StreamCut` when the stream ends without its
            provider's closing sign
        """
        ...

    async def aclose(self) -> None:
        """Give back connections. The model cannot be used afterwards."""
        ...


# --- how it can fail: read by the operator, never by a model --------------------------------------------------


class ProviderError(HandrailError):
    """The provider did not give a whole reply. ``str()`` says what happened and the operator's next step."""


class ProviderBusy(ProviderError):
    """Rate limit, overload, a fault of the provider's, or no connection: asking again later may work.

    :param retry_after_s: seconds that the provider asks to wait, where it says so
    """

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class ProviderDenied(ProviderError):
    """The key is missing, wrong, without the right to this model, or its account is spent."""


class RequestRefused(ProviderError):
    """The provider will not take this request however often it is sent."""


class StreamCut(ProviderError):
    """The reply began and broke off."""
