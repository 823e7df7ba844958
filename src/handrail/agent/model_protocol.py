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

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import HandrailError, ToolError, UsageError
from handrail.contract.services.history_and_skill_services import ConversationHistory
from handrail.contract.struct import Struct

if TYPE_CHECKING:
    from handrail.catalog.provider_dialects import ProviderSchemaDialect


# Block events: the parts of a reply, in the order in which they arrive.


class TextDelta(Struct, frozen=True):
    """The next piece of the reply's text."""

    text: str


class CallBlockOpened(Struct, frozen=True):
    """The start of a structured call.

    :param index: the adapter's number of this block, unique within the reply
    :param provider_id: the provider's id, or None if it sent none
    :param name: the wire name; ``""`` if the provider sent none
    """

    index: int
    provider_id: str | None
    name: str


class CallArgumentsDelta(Struct, frozen=True):
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


class CallBlockClosed(Struct, frozen=True):
    """The provider's statement that a call is complete. No adapter infers it from the JSON."""

    index: int


class ProviderBlock(Struct, frozen=True):
    """A provider's block, such as signed reasoning, that goes back unchanged with the history.

    :param said: whether the block is content of the reply, as text is: the provider used one of its own tools
    :param artifacts: references to its stored output
    """

    provider: str
    block: Mapping[str, Any]
    said: bool = False
    artifacts: tuple[str, ...] = ()


class ProviderToolResult(Struct, frozen=True):
    """The output of a tool that the provider ran.

    :param name: the provider's name of the tool
    :param provider_id: the provider's id of this use, or ``""``
    :param arguments: the model's arguments, if the provider reports them
    :param content: the output, as the provider's JSON
    :param failed: whether the provider reports a failure
    :param block: the block that goes back with the history, if the provider wants one
    """

    name: str
    provider_id: str
    arguments: Mapping[str, Any]
    content: Any
    failed: bool = False
    block: ProviderBlock | None = None


class TokenUsage(Struct, frozen=True):
    """The tokens of one request and its reply. These are totals: the last one counts.

    :param input_tokens: all tokens of the request, with those that the provider read from its cache or wrote to it
    :param cache_read_tokens: the part of ``input_tokens`` that came from the provider's cache
    :param cache_write_tokens: the part of ``input_tokens`` that the provider wrote to its cache
    :param cost: the price as the provider reports it, in its unit; None if it reports none
    """

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost: float | None = None


FinishReason = Literal[
    "end",  # the reply is complete
    "calls",  # the model waits for results
    "length",  # the output limit or the context cut the reply
    "paused",  # the provider needs another request to continue with one of its own tools
    "refused",  # a filter of the provider, or the model, declined
    "other",
]
"""Why a reply ends."""


class ReplyFinished(Struct, frozen=True):
    """The provider's end of the reply. Blocks that are still open stay incomplete."""

    reason: FinishReason


BlockEvent = (
    TextDelta
    | CallBlockOpened
    | CallArgumentsDelta
    | CallBlockClosed
    | ProviderBlock
    | ProviderToolResult
    | TokenUsage
    | ReplyFinished
)
"""One event of a reply as it arrives."""


# The conversation, independent of any provider.


class TextPart(Struct, frozen=True):
    """A text in a reply of the model."""

    text: str


class HistoryCallPart(Struct, frozen=True):
    """A call in the history, in a form that every provider accepts.

    :param wire_id: unique within the conversation; see :class:`handrail.agent.reply_assembly.HistoryCallIdAllocator`
    :param name: matches ``[A-Za-z0-9_-]{1,64}``, whatever the model wrote
    :param arguments: always an object, whatever the model wrote
    :param provider_id: the provider's own id if it differs from ``wire_id``; only that provider gets it
    """

    wire_id: str
    name: str
    arguments: Mapping[str, Any]
    provider_id: str = ""


@dataclass(frozen=True, slots=True)
class UserPicture:
    """A picture that a user shows, or that a tool returns.

    :param ref: the artifact that stores it
    :param media_type: one that every provider accepts
    :param data: empty if only ``ref`` is known
    """

    ref: str
    media_type: str
    data: bytes = field(default=b"", repr=False)

    @property
    def base64(self) -> str:
        """The picture's data in base64."""
        return base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """The picture as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


class UserMessage(Struct, frozen=True):
    """A message of the user.

    :param pictures: the text names them ``[image 1]`` and so on, for models that take no pictures
    """

    text: str
    pictures: tuple[UserPicture, ...] = ()


class AssistantMessage(Struct, frozen=True):
    """A reply of the model, with its parts in order.

    :param origin: the model and the address that it came from; see :func:`get_model_origin`
    """

    parts: tuple[TextPart | HistoryCallPart | ProviderBlock, ...]
    origin: str = ""

    @property
    def text(self) -> str:
        """The whole text of the reply."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def calls(self) -> tuple[HistoryCallPart, ...]:
        """The calls of the reply, in order."""
        return tuple(part for part in self.parts if isinstance(part, HistoryCallPart))


class CallResult(Struct, frozen=True):
    """The answer to a call as the model reads it: compact JSON text, and the pictures in it."""

    wire_id: str
    text: str
    is_error: bool
    pictures: tuple[UserPicture, ...] = ()


class CallResultsMessage(Struct, frozen=True):
    """The answers to the calls of the previous message: one each, in call order."""

    results: tuple[CallResult, ...]


Message = UserMessage | AssistantMessage | CallResultsMessage
"""One message of a conversation."""


class ModelRequest(Struct, frozen=True):
    """The request of one turn.

    :param tools: the LLM views of tools: ``name``, ``description`` and ``parameters``
    :param max_output_tokens: None for the provider's default
    :param native: definitions of the tools that the provider runs, in its format
    """

    system: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    max_output_tokens: int | None = None
    native: Sequence[Mapping[str, Any]] = ()


class Model(Protocol):
    """A connection to one model."""

    @property
    def name(self) -> str:
        """``provider:model``, as an operator writes it."""
        ...

    @property
    def dialect(self) -> ProviderSchemaDialect:
        """The schema features of its provider. Arguments come back in the tool's form."""
        ...

    def stream(self, request: ModelRequest) -> AsyncIterator[BlockEvent]:
        """Send one request and yield the reply as it arrives.

        :raises ProviderError: one of its subclasses; :class:`ReplyStreamCut` if the stream ends without the provider's end marker
        """
        ...

    async def aclose(self) -> None:
        """Close the connections. The model cannot be used afterwards."""


# Errors of a provider: read by the operator, never by a model.


class ProviderError(HandrailError):
    """The provider returned no complete reply. The text has the cause and the operator's next step."""


class ProviderBusy(ProviderError):
    """A rate limit, an overload, a fault of the provider, or no connection. A later request may succeed.

    :param retry_after_s: the seconds that the provider asks to wait, if any
    """

    def __init__(self, text: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class ProviderDenied(ProviderError):
    """A key that is missing, wrong, or not allowed to use this model, or an account without credit."""


RejectedPart = Literal["pictures", "no pictures", "reasoning", "unknown", "nothing"]
"""The part of a request that its provider rejects: pictures, any picture, blocks of a provider, or one that it does not
name. ``"nothing"``: the request is not rejected for its messages."""


class RequestRejected(ProviderError):
    """A request that the provider will never accept.

    :param about: the part for which it is rejected
    """

    def __init__(self, text: str, *, about: RejectedPart = "unknown") -> None:
        super().__init__(text)
        self.about: RejectedPart = about


class ContextOverflow(RequestRejected):
    """A request that is longer than the model's context.

    :param max_tokens: the tokens that the model takes, if the provider says so
    """

    def __init__(self, text: str, *, max_tokens: int | None = None) -> None:
        super().__init__(text, about="nothing")
        self.max_tokens = max_tokens


class ReplyStreamCut(ProviderError):
    """A reply that was interrupted after its start."""


# Pictures in a user's message: checked, stored by their content, and loaded again when a conversation continues.
#
# A stored message names each picture by its hash; the bytes are an artifact.

MAX_PICTURE_BYTES = 5 * 1024 * 1024 // 4 * 3
"""The largest picture that every provider accepts, in bytes. Providers count it as base64: 5 MiB."""
MAX_PICTURE_PIXELS = 8_000
"""The largest width and height that every provider accepts."""
MAX_PICTURES = 16
"""The most pictures in one message."""
MAX_REQUEST_PICTURES = 20
"""The most pictures in one request. With more, a provider accepts only smaller ones."""
MAX_REQUEST_PICTURE_BYTES = 16 * 1024 * 1024
"""The most base64 characters of all pictures in one request, so that it stays below the size that providers accept."""
PICTURE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""The media types of pictures."""
PICTURE_NOT_STORED = "[the picture here is no longer stored]"
PICTURE_NOT_ANSWERED = "[the picture here got no answer and is not shown again]"


def get_model_origin(model: Model) -> str:
    """Return the name of a model with its address. Only that model gets its own blocks and call ids back."""
    origin = getattr(model, "origin", None)
    return origin if isinstance(origin, str) and origin else model.name


def takes_pictures(model: Model) -> bool:
    """Return whether pictures can be sent to ``model``. The model itself may still not understand them."""
    return getattr(model, "takes_pictures", False) is True


def detect_picture_type(data: bytes) -> str | None:
    """Return the media type of a picture by its first bytes, or None if providers do not accept it."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def explain_picture_fault(data: bytes, media_type: str) -> str | None:
    """Return why providers do not accept a picture, or None."""
    if detect_picture_type(data) is None:
        return f"its content is not {media_type}"
    if len(data) > MAX_PICTURE_BYTES:
        return f"it has {len(data):,} bytes, and the maximum is {MAX_PICTURE_BYTES:,}"
    if max(size := parse_picture_dimensions(data) or (0, 0)) > MAX_PICTURE_PIXELS:
        return f"it has {size[0]:,} × {size[1]:,} pixels, and the maximum is {MAX_PICTURE_PIXELS:,} in each direction"
    return None


def parse_picture_dimensions(data: bytes) -> tuple[int, int] | None:
    """Return the width and height of a picture by its header, or None if the header does not have them."""
    if data.startswith(b"\x89PNG") and data[12:16] == b"IHDR" and len(data) >= 24:
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data.startswith(b"GIF8") and len(data) >= 10:
        return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    if data[:4] == b"RIFF":
        return _measure_webp(data)
    return _measure_jpeg(data) if data.startswith(b"\xff\xd8") else None


def _measure_webp(data: bytes) -> tuple[int, int] | None:
    if len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if data[12:16] == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _measure_jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big") if marker != 0xFF else 1
    return None


def convert_pictures_to_blobs(pictures: Sequence[bytes]) -> list[Blob]:
    """Return the pictures with their media types.

    :raises UsageError: if a file is not a picture, or the pictures are too many or too large
    """
    if len(pictures) > MAX_PICTURES:
        raise UsageError(f"The message has {len(pictures)} images. The maximum is {MAX_PICTURES}. Send fewer.")
    found: list[Blob] = []
    for number, data in enumerate(pictures, 1):
        if (kind := detect_picture_type(data)) is None:
            raise UsageError(f"Image {number} is not a PNG, JPEG, GIF or WebP file. Convert it to one of these.")
        if len(data) > MAX_PICTURE_BYTES:
            raise UsageError(
                f"Image {number} has {len(data):,} bytes. The maximum is {MAX_PICTURE_BYTES:,}. Make it smaller."
            )
        if (fault := explain_picture_fault(data, kind)) is not None:
            raise UsageError(f"Image {number} cannot be sent: {fault}. Make it smaller.")
        found.append(Blob(data, kind))
    return found


async def create_message_with_stored_pictures(
    text: str, pictures: Sequence[Blob], history: ConversationHistory | None
) -> UserMessage:
    """Store the pictures and return the user's message, which an agent takes as its task.

    :param pictures: see :func:`convert_pictures_to_blobs`
    :param history: the history of the agent's session; None stores nothing
    :raises HandrailError: if a picture cannot be stored
    """
    kept: list[UserPicture] = []
    for one in pictures:
        ref = "" if history is None else await history.store_attachment(one.data, one.media_type)
        kept.append(UserPicture(ref, one.media_type, one.data))
    return UserMessage(text, tuple(kept))


async def load_pictures_into_messages(messages: Sequence[Message], history: ConversationHistory) -> list[Message]:
    """Return the messages with the content of each picture. A note replaces a picture that is not stored.

    :raises HandrailError: if the stored pictures cannot be read now
    """
    return [await _load_message_pictures(message, history) for message in messages]


async def _load_message_pictures(message: Message, history: ConversationHistory) -> Message:
    if isinstance(message, UserMessage) and message.pictures:
        found, note = await _load_pictures(message.pictures, history)
        return UserMessage(message.text + note, found)
    if isinstance(message, CallResultsMessage) and any(result.pictures for result in message.results):
        return CallResultsMessage(
            tuple([await load_pictures_into_result(result, history) for result in message.results])
        )
    return message


async def load_pictures_into_result(result: CallResult, history: ConversationHistory) -> CallResult:
    """Return a result with the content of its pictures. A note replaces one that no provider accepts.

    :raises HandrailError: if the stored pictures cannot be read now
    """
    if not result.pictures:
        return result
    found, note = await _load_pictures(result.pictures, history)
    for picture in found:
        if (fault := explain_picture_fault(picture.data, picture.media_type)) is not None:
            note += f"\n[The image is not shown: {fault}. Make a smaller copy and read that.]"
    kept = tuple(one for one in found if explain_picture_fault(one.data, one.media_type) is None)
    return replace(result, text=result.text + note, pictures=kept)


async def _load_pictures(
    pictures: Sequence[UserPicture], history: ConversationHistory
) -> tuple[tuple[UserPicture, ...], str]:
    """Return the pictures with their content, and a note for each that is not stored."""
    found: list[UserPicture] = []
    note = ""
    for picture in pictures:
        try:
            found.append(replace(picture, data=picture.data or await history.load_attachment(picture.ref)))
        except ToolError:
            note += f"\n{PICTURE_NOT_STORED}"
    return tuple(found), note
