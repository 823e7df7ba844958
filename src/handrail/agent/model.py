"""The Protocol of a model: a request in, a stream of block events out, and the errors of a provider.

A provider adapter translates in two directions and decides nothing: it turns a :class:`ModelRequest` into its API's
form, and the API's stream into :data:`BlockEvent` values. It never collects a whole reply, never parses a
call's arguments, and never retries.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from handrail.contract.call import Blob
from handrail.contract.doors.memory import History
from handrail.contract.errors import HandrailError, ToolError, UsageError

if TYPE_CHECKING:
    from handrail.catalog.dialects import Dialect


# Block events: the parts of a reply, in the order in which they arrive.


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


# The conversation, independent of any provider.


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call in the history, in a form that every provider takes.

    :param wire_id: unique within the conversation; see :class:`handrail.agent.stream.WireIds`
    :param name: matches ``[A-Za-z0-9_-]{1,64}``, whatever the model wrote
    :param arguments: always an object, whatever the model wrote
    """

    wire_id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    """One that a user shows; see :mod:`handrail.agent.model`.

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


# Errors of a provider: read by the operator, never by a model.


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


# Pictures in a user's message: checked, stored by their content, and loaded again when a conversation continues.
#
# A stored message names each picture by its hash; the bytes are an artifact.

MOST_BYTES = 5 * 1024 * 1024
"""Of one picture: what each of the providers takes."""
MOST_PICTURES = 16
"""In one message."""
NOT_KEPT = "[a picture that was shown here is not kept any longer]"
NOT_ANSWERED = "[what was shown here got no answer, and is not shown again]"


def takes_pictures(model: Model) -> bool:
    """Whether ``model`` is reached in a way that can show it any. What it makes of one is its provider's to say."""
    return getattr(model, "takes_pictures", False) is True


def kind_of(data: bytes) -> str | None:
    """What a picture is by its first bytes, of those that every provider takes; whatever it is called."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def checked(pictures: Sequence[bytes]) -> list[Blob]:
    """Each with what it is.

    :raises UsageError: for what is no picture, and for more, or larger ones, than a provider takes
    """
    if len(pictures) > MOST_PICTURES:
        raise UsageError(f"{len(pictures)} images are too many for one message; at most {MOST_PICTURES} are taken")
    found: list[Blob] = []
    for number, data in enumerate(pictures, 1):
        kind = kind_of(data)
        if kind is None:
            raise UsageError(f"image {number} is no PNG, JPEG, GIF or WebP; save it as one of these")
        if len(data) > MOST_BYTES:
            raise UsageError(
                f"image {number} has {len(data):,} bytes; at most {MOST_BYTES:,} are taken, so make it smaller"
            )
        found.append(Blob(data, kind))
    return found


async def shown(text: str, pictures: Sequence[Blob], history: History | None) -> UserMessage:
    """What a user says and shows, once that is kept; an agent takes it as its task.

    :param pictures: see :func:`checked`
    :param history: of the agent's session; None where nothing is kept
    :raises HandrailError: when it cannot be kept
    """
    kept: list[Picture] = []
    for one in pictures:
        ref = "" if history is None else await history.attached(one.data, one.media_type)
        kept.append(Picture(ref, one.media_type, one.data))
    return UserMessage(text, tuple(kept))


async def with_their_content(messages: Sequence[Message], history: History) -> list[Message]:
    """The same, where each picture can be looked at; for one that is not kept any longer the text says so.

    :raises HandrailError: when nobody can look for now
    """
    return [
        await _whole(message, history) if isinstance(message, UserMessage) and message.pictures else message
        for message in messages
    ]


async def _whole(message: UserMessage, history: History) -> UserMessage:
    found: list[Picture] = []
    text = message.text
    for picture in message.pictures:
        try:
            found.append(replace(picture, data=await history.attachment(picture.ref)))
        except ToolError:
            text += f"\n{NOT_KEPT}"
    return UserMessage(text, tuple(found))
