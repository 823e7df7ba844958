"""Reports about images of tools that the model did not get, or that blocked a session."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.agent.provider_bench import Kind, ProviderFixture, bench, each_provider
from tests.field.pictures import GIF, JPEG, WEBP, make_png

from handrail import tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import (
    MAX_PICTURE_BYTES,
    MAX_REQUEST_PICTURES,
    create_message_with_stored_pictures,
    explain_picture_fault,
    parse_picture_dimensions,
)
from handrail.agent.reply_stream import RetryPolicy
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.session_protocols import Session
from handrail.testing.provider_servers import ErrorReply, RawReply, ReplyCall, ScriptedReply
from handrail.testing.scripted_kernel import temporary_kernel

OK = ScriptedReply("I see it.")


def read(*names: str) -> ScriptedReply:
    return ScriptedReply(*(ReplyCall("read", {"path": name}) for name in names))


@asynccontextmanager
async def reading(
    kind: Kind, folder: Path, files: dict[str, bytes], *replies: ScriptedReply | ErrorReply | RawReply
) -> AsyncGenerator[tuple[ProviderFixture, Session]]:
    """A provider's server, and a session in a workspace with these files."""
    folder.joinpath("ws").mkdir(exist_ok=True)
    for name, data in files.items():
        folder.joinpath("ws", name).write_bytes(data)
    async with temporary_kernel(folder) as kernel, bench(kind, *replies) as b:
        session = await kernel.session()
        try:
            yield b, session
        finally:
            await session.suspend()


def sent_pictures(b: ProviderFixture, request: int) -> list[bytes]:
    """The pictures in a request, in order, of whatever API."""
    found: list[bytes] = []

    def search(value: Any) -> None:
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            url: Any = members.get("image_url")
            url = cast("dict[str, Any]", url).get("url") if isinstance(url, dict) else url
            data: Any = members.get("data") if "media_type" in members or "mime_type" in members else None
            text: Any = url.partition(",")[2] if isinstance(url, str) else data
            if isinstance(text, str):
                found.append(base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_")))
                return
        values: Any = cast("Any", value)
        values = values.values() if isinstance(value, dict) else values if isinstance(value, list) else ()
        for one in values:
            search(one)

    search(b.server.requests[request].body)
    return found


@each_provider
@pytest.mark.parametrize("data", [make_png(), GIF, JPEG, WEBP], ids=["png", "gif", "jpeg", "webp"])
async def test_a_picture_that_a_model_reads_is_sent_to_the_provider(kind: Kind, data: bytes, tmp_path: Path) -> None:
    async with reading(kind, tmp_path, {"p.img": data}, read("p.img"), OK, OK) as (b, session):
        agent = Agent(session, b.model)
        assert (await agent.complete("What is on p.img?")).text == "I see it."
        assert (await agent.complete("Sure?")).ok
        b.accepted()
        assert sent_pictures(b, 1) == [data] == sent_pictures(b, 2)


@each_provider
async def test_pictures_of_parallel_calls_are_all_sent_to_the_provider(kind: Kind, tmp_path: Path) -> None:
    files = {"a.png": make_png(2), "b.txt": b"text\n", "c.gif": GIF}
    async with reading(kind, tmp_path, files, read(*files), OK) as (b, session):
        assert (await Agent(session, b.model).complete("look")).ok
        b.accepted()
        assert sent_pictures(b, 1) == [files["a.png"], GIF]


@each_provider
async def test_figures_of_a_notebook_are_sent_to_the_provider(kind: Kind, tmp_path: Path) -> None:
    figures = [make_png(2), make_png(3)]
    outputs = [
        {"output_type": "display_data", "data": {"text/plain": "<Figure>", "image/png": base64.b64encode(one).decode()}}
        for one in figures
    ]
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": "plot()", "outputs": outputs}]}).encode()
    async with reading(kind, tmp_path, {"a.ipynb": notebook}, read("a.ipynb"), OK) as (b, session):
        assert (await Agent(session, b.model).complete("What do the plots show?")).ok
        b.accepted()
        assert sent_pictures(b, 1) == figures


@each_provider
async def test_a_picture_is_sent_again_after_a_restart(kind: Kind, tmp_path: Path) -> None:
    tmp_path.joinpath("ws").mkdir()
    tmp_path.joinpath("ws", "p.png").write_bytes(make_png())
    known = None
    async with bench(kind, read("p.png"), OK, OK) as b:
        for task in ("look", "again"):
            async with temporary_kernel(tmp_path) as kernel:
                session = await kernel.session(known)
                known = session.id
                assert (await Agent(session, b.model).complete(task)).ok
                await session.suspend()
        b.accepted()
        assert sent_pictures(b, 2) == [make_png()]


@each_provider
async def test_a_picture_over_the_provider_limits_is_replaced_by_an_explanation(kind: Kind, tmp_path: Path) -> None:
    files = {"large.png": make_png(padding=MAX_PICTURE_BYTES), "wide.png": make_png(9_000, 3)}
    async with reading(kind, tmp_path, files, read(*files), OK) as (b, session):
        assert (await Agent(session, b.model).complete("look")).ok
        b.accepted()
        assert sent_pictures(b, 1) == []
    told = json.dumps(b.server.requests[1].body)
    assert "3,932,160" in told and "8,000" in told and "Make a smaller copy" in told


def test_the_picture_size_limit_accounts_for_base64() -> None:
    largest = make_png(padding=MAX_PICTURE_BYTES - len(make_png(padding=1)) + 1)
    assert len(largest) == MAX_PICTURE_BYTES
    assert len(base64.b64encode(largest)) <= 5 * 1024 * 1024
    assert explain_picture_fault(largest, "image/png") is None
    assert explain_picture_fault(largest + b"x", "image/png") is not None


def test_the_size_of_a_picture_is_read_from_its_header() -> None:
    assert parse_picture_dimensions(make_png(300, 40)) == (300, 40)
    assert parse_picture_dimensions(GIF) == (1, 1)
    assert parse_picture_dimensions(JPEG) == (32, 16)
    assert parse_picture_dimensions(WEBP) == (1, 1)
    for data in (make_png(), GIF, JPEG, WEBP):
        for end in range(len(data)):
            parse_picture_dimensions(data[:end])


@each_provider
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "No endpoints found that support image input"),
        (400, "messages.2.content.0.image.source.base64: image exceeds 5 MB maximum"),
        (400, "Could not process image"),
        (400, "Unknown part type image_url: this model does not support images"),
        (500, "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"),
        (422, "bad request"),
        (500, "this model is missing data required for image input"),
        (400, "You uploaded an unsupported image. Please make sure your image is one of: ['png', 'jpeg', 'gif', 'webp']."),
        (400, "Unsupported MIME type: image/png"),
    ],
)  # fmt: skip
async def test_a_picture_that_the_provider_refuses_is_left_out_of_later_requests(
    kind: Kind, status: int, said: str, tmp_path: Path
) -> None:
    refusal = ErrorReply(status, said, "invalid_request_error")
    async with reading(kind, tmp_path, {"p.png": make_png()}, read("p.png"), refusal, OK, OK) as (b, session):
        agent = Agent(session, b.model, retry=RetryPolicy(attempts=1))
        assert (await agent.complete("look")).text == "I see it."
        assert (await agent.complete("and now?")).ok
        b.accepted()
        assert [len(sent_pictures(b, number)) for number in range(4)] == [0, 1, 0, 0]
    assert "provider rejected it" in json.dumps(b.server.requests[2].body)


@pytest.mark.parametrize(
    "said",
    ["This model does not support image input", "messages[1]: unknown variant `image_url`, expected `text` at line 1",
     "Invalid content type. image_url is only supported by certain models.", "At most 0 image(s) may be provided in one request."],
)  # fmt: skip
async def test_a_model_without_image_support_gets_only_the_first_picture(said: str, tmp_path: Path) -> None:
    refusal = ErrorReply(400, said, "invalid_request_error")
    replies = (read("p.png"), refusal, read("p.png"), OK)
    async with reading("openai", tmp_path, {"p.png": make_png()}, *replies) as (b, session):
        assert (await Agent(session, b.model).complete("look")).ok
        b.accepted()
        assert [len(sent_pictures(b, number)) for number in range(4)] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "said",
    ["You uploaded an unsupported image. Please use one of the formats png and jpeg.", "Unsupported MIME type: image/png",
     "The image format is not supported.", "Too many images in request: 25", "image dimensions exceed the maximum: not supported"],
)  # fmt: skip
async def test_a_model_that_refuses_one_picture_for_its_form_gets_the_next(said: str, tmp_path: Path) -> None:
    refusal = ErrorReply(400, said, "invalid_request_error")
    replies = (read("p.png"), refusal, read("p.png"), OK)
    async with reading("openai", tmp_path, {"p.png": make_png()}, *replies) as (b, session):
        assert (await Agent(session, b.model).complete("look")).ok
        b.accepted()
        assert [len(sent_pictures(b, number)) for number in range(4)] == [0, 1, 0, 1]


async def test_images_are_left_out_after_the_next_model_refuses_them(tmp_path: Path) -> None:
    refusal = ErrorReply(404, "No endpoints found that support image input", "not_found")
    async with temporary_kernel(tmp_path) as kernel, bench("openai", OK) as one, bench("openai", refusal, OK) as other:
        session = await kernel.session()
        shown = await create_message_with_stored_pictures(
            "What is [image 1]?", [Blob(make_png(), "image/png")], session.history
        )
        assert (await Agent(session, one.model).complete(shown)).ok
        await session.suspend()
        session = await kernel.session(session.id)
        assert (await Agent(session, other.model).complete("Hello?")).ok
        await session.suspend()
        other.accepted()
        assert [len(sent_pictures(other, number)) for number in (0, 1)] == [1, 0]


async def test_older_pictures_over_the_request_limit_are_left_out(tmp_path: Path) -> None:
    names = {f"{n:02}.png": make_png(n + 1) for n in range(MAX_REQUEST_PICTURES + 4)}
    reads = [read(*list(names)[at : at + 6]) for at in range(0, len(names), 6)]
    async with reading("anthropic", tmp_path, names, *reads, OK) as (b, session):
        assert (await Agent(session, b.model).complete("look at all")).ok
        b.accepted()
        sent = sent_pictures(b, len(reads))
    assert 0 < len(sent) <= MAX_REQUEST_PICTURES
    assert sent == list(names.values())[-len(sent) :]
    assert "too many images" in json.dumps(b.server.requests[-1].body)


@each_provider
async def test_a_picture_reference_inside_file_data_is_not_sent_as_a_picture(kind: Kind, tmp_path: Path) -> None:
    made = read("p.png")
    async with reading(kind, tmp_path, {"p.png": make_png()}, made, OK) as (b, session):
        agent = Agent(session, b.model)
        assert (await agent.complete("look")).ok
        (ref,) = {one for one in json.dumps(b.server.requests[1].body).split('\\"') if one.startswith("sha256:")} or {
            ""
        }
    fake = json.dumps({"image": {"artifact": ref or "sha256:" + "0" * 64, "media_type": "image/png", "bytes": 9}})
    async with reading(kind, tmp_path, {"fake.json": fake.encode()}, read("fake.json"), OK) as (b, session):
        assert (await Agent(session, b.model).complete("look")).ok
        assert sent_pictures(b, 1) == []


@each_provider
async def test_pictures_in_an_output_or_error_of_an_operator_tool_reach_the_provider(
    kind: Kind, tmp_path: Path
) -> None:
    @tool(id="test.shots", side_effect="read", locks=[])
    def shots() -> dict[str, Any]:
        """Return two pictures and a sound."""
        return {
            "pages": [{"picture": Blob(GIF, "image/gif")}, Blob(make_png(), "image/png")],
            "sound": Blob(b"x", "audio/wav"),
        }

    @tool(id="test.fails", side_effect="read", locks=[])
    def fails() -> Result:
        """Fail with a picture of the screen."""
        return Result.error("failed", "It broke.", {"screen": Blob(GIF, "image/gif")})

    replies = (ScriptedReply(ReplyCall("test__shots"), ReplyCall("test__fails")), OK)
    async with (
        temporary_kernel(tmp_path, tools=[shots, fails], rules=["allow test.*"]) as kernel,
        bench(kind, *replies) as b,
    ):
        session = await kernel.session()
        assert (await Agent(session, b.model).complete("look")).ok
        await session.suspend()
        b.accepted()
        assert sent_pictures(b, 1) == [GIF, make_png(), GIF]
