"""Pictures that a user shows with what they say: checked, kept by their content, and there again when a conversation goes on.

What is kept of a message names each by its hash; the bytes are an artifact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from handrail.agent.model import Message, Model, Picture, UserMessage
from handrail.contract.doors.history import History
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.result import Blob

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
