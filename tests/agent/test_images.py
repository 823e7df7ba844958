"""Images from a user: each provider gets them in its form, and a resumed session has them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from tests.agent.provider_bench import Kind, bench, each_provider

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import (
    MAX_PICTURE_BYTES,
    PICTURE_NOT_ANSWERED,
    PICTURE_NOT_STORED,
    RequestRejected,
    UserMessage,
    UserPicture,
    convert_pictures_to_blobs,
    create_message_with_stored_pictures,
    detect_picture_type,
    takes_pictures,
)
from handrail.agent.text_tool_calls import TextCallModel
from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import UsageError
from handrail.testing.provider_request_checks import PlaybackModel, text_reply
from handrail.testing.provider_servers import ScriptedReply
from handrail.testing.scripted_kernel import temporary_kernel

PNG = b"\x89PNG\r\n\x1a\n and so on"
SHOWN = UserPicture("", "image/png", PNG)


def given_in(kind: Kind, body: Any) -> list[Any]:
    """Return the first user message of a request."""
    match kind:
        case "openai":
            return next(m["content"] for m in body["messages"] if m["role"] == "user")
        case "openai-responses":
            return body["input"][0]["content"]
        case "anthropic":
            return body["messages"][0]["content"]
        case _:
            return body["contents"][0]["parts"]


@each_provider
async def test_each_provider_receives_a_picture_in_its_request_format(kind: Kind) -> None:
    encoded = base64.b64encode(PNG).decode()
    url = f"data:image/png;base64,{encoded}"
    forms: dict[Kind, Any] = {
        "openai": {"type": "image_url", "image_url": {"url": url}},
        "openai-responses": {"type": "input_image", "image_url": url, "detail": "auto"},
        "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
        "gemini": {"inlineData": {"data": encoded, "mime_type": "image/png"}},
    }
    async with bench(kind, ScriptedReply("A dot."), ScriptedReply("Still a dot.")) as b:
        assert takes_pictures(b.model) and takes_pictures(TextCallModel(b.model, "xml"))
        agent = b.agent()
        assert (await agent.complete(UserMessage("What is [image 1]?", (SHOWN,)))).text == "A dot."
        assert (await agent.complete("And now?")).text == "Still a dot."
        b.accepted()
        for request in b.server.requests:
            given = given_in(kind, request.body)
            assert forms[kind] in given and "What is [image 1]?" in str(given)


async def test_a_model_with_text_calls_accepts_pictures() -> None:
    model = PlaybackModel(text_reply("A dot."))
    async with bench("openai", ScriptedReply("A dot.")) as b:
        agent = Agent(b.session, TextCallModel(b.model, "xml"))
        assert (await agent.complete(UserMessage("[image 1]", (SHOWN,)))).ok
        assert any(part["type"] == "image_url" for part in given_in("openai", b.server.requests[0].body))
    assert not takes_pictures(model)


async def test_a_picture_is_stored_by_its_hash_and_sent_again_in_later_runs(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        said = await create_message_with_stored_pictures(
            "[image 1] [image 2]", [Blob(PNG, "image/png"), Blob(PNG + b"!", "image/png")], session.history
        )
        model = PlaybackModel(text_reply("Two dots."), text_reply("Yes."), text_reply("One."))
        assert (await Agent(session, model).complete(said)).ok
        assert session.history is not None
        ((_, kept), *_) = await session.history.read_stored_messages()
        assert [one["artifact"][:7] for one in kept["pictures"]] == ["sha256:"] * 2
        await session.suspend()

        session = await kernel.session(session.id)
        assert (await Agent(session, model).complete("Sure?")).ok
        again = model.requests[-1].messages[0]
        assert isinstance(again, UserMessage) and [one.data for one in again.pictures] == [PNG, PNG + b"!"]
        await session.suspend()

        for file in Path(kernel.state_folder, "artifacts").rglob("*"):
            if file.is_file() and file.read_bytes() == PNG:
                file.unlink()
        session = await kernel.session(session.id)
        assert (await Agent(session, model).complete("And now?")).ok
        again = model.requests[-1].messages[0]
        assert isinstance(again, UserMessage) and len(again.pictures) == 1 and PICTURE_NOT_STORED in again.text


async def test_a_rejected_picture_does_not_block_later_messages(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        model = PlaybackModel([RequestRejected("it takes no images")], text_reply("Hello."), text_reply("Again."))
        agent = Agent(session, model)
        outcome = await agent.complete(
            await create_message_with_stored_pictures("[image 1]", [Blob(PNG, "image/png")], session.history)
        )
        assert outcome.status == "failed" and "takes no images" in outcome.detail
        assert (await agent.complete("Hello?")).text == "Hello."
        await session.suspend()
        session = await kernel.session(session.id)
        assert (await Agent(session, model).complete("Hello?")).ok
        for request in model.requests[1:]:
            first = request.messages[0]
            assert isinstance(first, UserMessage) and not first.pictures and PICTURE_NOT_ANSWERED in first.text


def test_the_type_of_a_picture_follows_from_its_first_bytes() -> None:
    kinds = {
        PNG: "image/png",
        b"\xff\xd8\xff\xe0": "image/jpeg",
        b"GIF89a": "image/gif",
        b"RIFF1234WEBPVP8 ": "image/webp",
    }
    assert [one.media_type for one in convert_pictures_to_blobs(list(kinds))] == list(kinds.values())
    assert detect_picture_type(b"RIFF1234WAVE") is None and detect_picture_type(b"") is None
    for wrong, words in (
        ([b"<svg/>"], "Image 1 is not a PNG"),
        ([PNG] * 17, "The maximum is 16"),
        ([PNG, PNG + b"x" * MAX_PICTURE_BYTES], "Image 2 has"),
    ):
        with pytest.raises(UsageError, match=words):
            convert_pictures_to_blobs(wrong)
