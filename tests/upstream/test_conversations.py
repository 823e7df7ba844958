"""Abuse of a connection by a server: floods, invalid IDs, and endless pages."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import combinations
from typing import Any, cast

import pytest

from handrail.upstream import server_definition as listings
from handrail.upstream import upstream_connection
from handrail.upstream.client.upstream_session import (
    HANDSHAKE_VERSIONS,
    MAX_PENDING_REPLIES,
    MAX_SERVER_REQUESTS,
    MODERN_VERSIONS,
    Message,
    TransportCallbacks,
    UpstreamConnectionLost,
    UpstreamSession,
    UpstreamSessionCallbacks,
)

Answers = Callable[[Message], dict[str, Any]]


class ScriptedTransport:
    """A transport to a server that answers by script, or accepts nothing more."""

    def __init__(self, answers: Answers | None = None) -> None:
        self.answers = answers
        self.ears: TransportCallbacks | None = None
        self.sent: list[Message] = []

    async def open(self, handler: TransportCallbacks) -> None:
        self.ears = handler

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        self.sent.append(message)
        if self.answers is None:
            await asyncio.Event().wait()
        elif self.ears is not None and "method" in message:
            self.ears.on_message({"jsonrpc": "2.0", "id": message.get("id"), "result": self.answers(message)}, None)

    def abandon_request(self, request: int) -> bool:
        return True

    def watch_protected_paths(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def set_version(self, protocol: str, *, modern: bool) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def open_session(
    wire: ScriptedTransport, grants: frozenset[str] = frozenset()
) -> tuple[UpstreamSession, list[UpstreamConnectionLost]]:
    ended: list[UpstreamConnectionLost] = []
    conversation = UpstreamSession(
        wire, "s", grants, "0", UpstreamSessionCallbacks(lambda: None, lambda _: None, ended.append)
    )
    await wire.open(conversation)
    return conversation, ended


GRANTS = ("elicitation", "sampling", "roots")


@pytest.mark.proves("F-04")
@pytest.mark.parametrize("granted", [some for size in range(4) for some in combinations(GRANTS, size)], ids="+".join)
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_server_is_offered_only_its_granted_client_capabilities(granted: tuple[str, ...], era: str) -> None:
    """In every message that says what a client can do, in either era of the protocol."""

    def answers(message: Message) -> dict[str, Any]:
        if message["method"] == "server/discover" and era == "modern":
            return {"supportedVersions": list(MODERN_VERSIONS)}
        return {"protocolVersion": HANDSHAKE_VERSIONS[-1]}

    wire = ScriptedTransport(answers)
    conversation, _ = await open_session(wire, frozenset(granted))
    await conversation.negotiate_version(None, 60)
    await conversation.request("tools/list", {})
    said = [capabilities for message in wire.sent for capabilities in offers_in(message.get("params"))]
    assert conversation.era == era and said
    assert all(offer.keys() & set(GRANTS) == set(granted) for offer in said)
    await conversation.aclose()


def offers_in(value: object) -> Iterator[Mapping[str, Any]]:
    """Return the client capabilities in a message, wherever they are."""
    if isinstance(value, Mapping):
        for key, one in cast("Mapping[str, Any]", value).items():
            if key == "capabilities" or key.endswith("clientCapabilities"):
                yield one
            yield from offers_in(one)


async def test_a_server_that_sends_requests_without_reading_replies_is_disconnected() -> None:
    conversation, ended = await open_session(ScriptedTransport())
    for number in range(100_000):
        conversation.on_message({"jsonrpc": "2.0", "id": number, "method": ("ping", "odd/method")[number % 2]}, None)
    assert len(ended) == 1 and "without reading" in ended[0].why
    assert len(asyncio.all_tasks()) <= MAX_PENDING_REPLIES + MAX_SERVER_REQUESTS + 2
    await conversation.aclose()


async def test_a_reply_with_an_invalid_request_id_is_ignored() -> None:
    conversation, ended = await open_session(ScriptedTransport())
    numbers: list[Any] = ["9" * 5_000, "\u0663", True, 1.5, [], None]
    for number in numbers:
        conversation.on_message({"jsonrpc": "2.0", "id": number, "result": {}}, None)
    assert not ended
    await conversation.aclose()


class TrackedItem(dict[str, Any]):
    """A page's item that can be seen to go."""


async def test_oversized_items_of_a_listing_are_not_held_while_more_pages_are_fetched() -> None:
    items: list[weakref.ref[TrackedItem]] = []
    most = 0

    def answers(message: Message) -> dict[str, Any]:
        nonlocal most
        most = max(most, sum(one() is not None for one in items))
        item = TrackedItem(name="x" * 2**21)
        items.append(weakref.ref(item))
        return {"tools": [item]} | ({"nextCursor": str(len(items))} if len(items) < 20 else {})

    conversation, _ = await open_session(ScriptedTransport(answers))
    conversation.capabilities = {"tools": {}}
    listing = await upstream_connection.fetch_server_listing(conversation, 60)
    assert (listing.tools, listing.left_out) == ((), 20) and most < 5
    await conversation.aclose()


def test_a_listing_is_bounded_to_the_size_that_can_be_stored() -> None:
    kept = listings.BoundedItems()
    kept.add_valid_items({"name": str(number), "description": "x" * 1_000_000} for number in range(20))
    assert 5 < len(kept.items) < 13 and len(kept.items) + kept.left_out == 20
    assert 4 * listings.MAX_LIST_BYTES < listings.MAX_STORED_BYTES


def test_a_too_deeply_nested_item_is_left_out_and_the_other_items_remain() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"not": deep}
    kept = listings.BoundedItems()
    kept.add_valid_items([{"name": "a", "inputSchema": deep}, {"name": "b"}])
    assert [one["name"] for one in kept.items] == ["b"] and kept.left_out == 1
