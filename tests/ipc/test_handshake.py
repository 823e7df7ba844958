"""The greeting, and peers that do not greet, have another version, or fail later."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.ipc.doors import HELLO, NAME, ListenerFixture, house, next_message, until_closed

from handrail.contract.errors import StartError
from handrail.ipc.wire.message_frames import MAX_FRAME, Message, encode_frame
from handrail.ipc.wire.operation_dispatch import OperationSpec, OperationTable, RemoteRequestError
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import (
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    ConnectionRejected,
    LeaseHolderNotResponding,
    connect_to_lease_holder,
    get_handrail_version,
    listen_on_socket,
)


async def echo(body: object) -> object:
    return body


OPERATIONS = OperationTable({"echo": OperationSpec(echo, inline=True)})


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncGenerator[ListenerFixture]:
    async with house(tmp_path / "own", OPERATIONS) as made:
        yield made


async def test_both_sides_learn_the_greeting_and_process_of_the_other(doors: ListenerFixture) -> None:
    joined = await connect_to_lease_holder(doors.folder, NAME, hello={"face": "cli", "protocol": "mine"})
    held = await doors.accepted.get()
    assert held.peer_greeting == {"face": "cli", "handrail": get_handrail_version(), "protocol": PROTOCOL_VERSION}
    assert joined.peer_greeting == {"greeting": "hi", "handrail": get_handrail_version(), "protocol": PROTOCOL_VERSION}
    assert held.peer == joined.peer
    assert held.peer is not None and (held.peer.pid, held.peer.uid) == (os.getpid(), os.geteuid())
    await joined.aclose()


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION + 1, 0, "3", None, True, float(PROTOCOL_VERSION)])
async def test_a_different_protocol_is_refused_with_both_versions_and_advice(
    doors: ListenerFixture, protocol: object
) -> None:
    reader, writer = await doors.raw()
    writer.write(encode_frame({"hello": {"handrail": "9.9", "protocol": protocol}}))
    (answer,) = await until_closed(reader)
    refused = answer["refused"]
    assert refused["kind"] == "version"
    assert f"is Handrail 9.9 with protocol {protocol}" in refused["text"]
    assert (
        f"the other is Handrail {get_handrail_version()} with protocol {PROTOCOL_VERSION}. Use the same version"
        in refused["text"]
    )
    assert doors.accepted.empty()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a line of JSON": b'{"hello": {}}\n',
    "an oversized length": b"\xff\xff\xff\xff{}",
    "invalid JSON": b"\0\0\0\x05{]]]]",
    "no object": b"\0\0\0\x02[]",
    "a request before the greeting": encode_frame({"id": 1, "op": "echo", "body": 1}),
    "a greeting that is none": encode_frame({"hello": 1}),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_a_client_with_an_invalid_greeting_is_dropped_with_a_logged_reason(
    doors: ListenerFixture, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await doors.raw()
    writer.write(GARBAGE[name])
    for message in await until_closed(reader):
        assert list(message) == ["bye"]
    assert caplog.text.count("dropped a connection: ") == 1
    assert "Traceback" not in caplog.text
    assert doors.accepted.empty()
    assert await (await doors.join()).request("echo", 1) == 1


async def test_a_process_that_has_not_greeted_may_not_send_a_large_message(doors: ListenerFixture) -> None:
    reader, writer = await doors.raw()
    writer.write((MAX_GREETING_BYTES + 1).to_bytes(4, "big"))
    ((_, reason),) = (await until_closed(reader))[0].items()
    assert reason.startswith("a message of 16,777,217 bytes was announced; the maximum is 16,777,216")


@pytest.mark.parametrize("beginning", [b"", HELLO[:2], HELLO[:-1]])
async def test_an_incomplete_greeting_is_dropped_after_the_time_limit(
    tmp_path: Path, beginning: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path / "own", OPERATIONS, seconds=0.2) as doors:
        reader, writer = await doors.raw()
        writer.write(beginning)
        assert await until_closed(reader) == [{"bye": "no complete greeting within 0.2 s"}]
        assert "no complete greeting" in caplog.text
        assert not doors.listener.connections


async def test_a_client_that_greeted_in_time_may_stay_silent_longer(tmp_path: Path) -> None:
    async with house(tmp_path / "own", OPERATIONS, seconds=0.2) as doors:
        joined: IpcConnection | None = None
        while joined is None:
            with contextlib.suppress(StartError):  # where this process gets no turn for so long
                joined = await doors.join()
        reader, _writer = await doors.raw()
        await until_closed(reader)  # that one came later, and its time is over
        assert await joined.request("echo", 1) == 1


async def test_a_client_with_an_unfinished_message_does_not_affect_other_clients(doors: ListenerFixture) -> None:
    _reader, writer, held = await doors.greeted()
    writer.write(MAX_FRAME.to_bytes(4, "big") + b'{"id": 1, "op":')
    joined = await doors.join()
    assert [await joined.request("echo", number) for number in range(100)] == list(range(100))
    assert held.lost_reason is None
    writer.transport.abort()
    await held.closed.wait()
    assert held.lost_reason == "the other side closed it in the middle of a message"


NONSENSE: dict[str, list[Message]] = {
    "no kind": [{}],
    "an id twice": [{"id": 1, "op": "echo", "body": 1}, {"id": 1, "op": "echo", "body": 1}],
    "an id that shrinks": [{"id": 2, "op": "echo"}, {"id": 1, "op": "echo"}],
    "an id that is none": [{"id": "1", "op": "echo"}],
    "a truth for an id": [{"id": True, "op": "echo"}],
    "an answer to nothing": [{"id": 1, "ok": 1}],
    "an operation that is no text": [{"id": 1, "op": ["echo"]}],
    "a cancellation of nothing nameable": [{"cancel": None}],
    "a second greeting": [{"hello": {"protocol": PROTOCOL_VERSION}}],
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_peer_that_sends_malformed_messages_is_dropped_and_others_stay_connected(
    doors: ListenerFixture, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    joined = await doors.join()
    await doors.accepted.get()
    reader, writer, held = await doors.greeted()
    writer.write(b"".join(map(encode_frame, NONSENSE[name])))
    messages = await until_closed(reader)
    assert "bye" in messages[-1]
    answers = [message["id"] for message in messages[:-1]]
    assert answers == sorted(set(answers))
    await held.closed.wait()
    assert "dropped a connection" in caplog.text and "Traceback" not in caplog.text
    assert await joined.request("echo", 1) == 1


async def test_an_answer_with_neither_result_nor_error_fails_its_request(doors: ListenerFixture) -> None:
    _reader, writer, held = await doors.greeted()
    asked = asyncio.create_task(held.request("echo", 1))
    writer.write(encode_frame({"id": 1, "error": {"kind": 7}}))
    assert "neither a result nor an error" in str((await asyncio.gather(asked, return_exceptions=True))[0])


async def test_late_answers_and_cancellations_of_unknown_requests_are_ignored(doors: ListenerFixture) -> None:
    reader, writer, held = await doors.greeted()
    asked = asyncio.create_task(held.request("echo", 1))
    assert await next_message(reader) == {"id": 1, "op": "echo", "body": 1}
    asked.cancel()
    assert await next_message(reader) == {"cancel": 1}
    for message in ({"cancel": 77}, {"id": 1, "ok": 1}, {"id": 1, "ok": 1}, {"id": 1, "op": "echo", "body": 2}):
        writer.write(encode_frame(message))
    assert await next_message(reader) == {"id": 1, "ok": 2}
    assert held.lost_reason is None


async def test_a_rejected_connection_receives_the_holders_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def accept(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
        raise RemoteRequestError("closing", "it is closing; try again")

    listener = await listen_on_socket(tmp_path, NAME, accept)
    with pytest.raises(ConnectionRejected, match="Connection rejected: it is closing; try again") as caught:
        await connect_to_lease_holder(tmp_path, NAME)
    assert caught.value.kind == "closing"
    assert "it is closing" in caplog.text
    await listener.aclose()


async def test_an_exception_while_accepting_a_connection_drops_only_that_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def accept(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
        return OPERATIONS, {"number": 1 // hello["divisor"]}

    listener = await listen_on_socket(tmp_path, NAME, accept)
    with pytest.raises(LeaseHolderNotResponding):
        await connect_to_lease_holder(tmp_path, NAME, hello={"divisor": 0})
    assert "ZeroDivisionError" in caplog.text
    joined = await connect_to_lease_holder(tmp_path, NAME, hello={"divisor": 1})
    assert joined.peer_greeting["number"] == 1
    await joined.aclose()
    await listener.aclose()


async def test_connections_beyond_the_maximum_are_rejected(tmp_path: Path) -> None:
    async with house(tmp_path / "own", OPERATIONS, max_connections=2) as doors:
        first, _second = await doors.join(), await doors.join()
        with pytest.raises(ConnectionRejected, match=r"Too many connected processes: 2\. Close one") as caught:
            await doors.join()
        assert caught.value.kind == "full"
        await first.aclose()
        await (await doors.accepted.get()).closed.wait()
        assert await (await doors.join()).request("echo", 1) == 1


async def served(folder: Path, answer: bytes, *, close: bool) -> asyncio.Server:
    """A socket at the holder's place where something else answers."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_message(reader)
        writer.write(answer)
        if close:
            writer.close()
        else:
            await reader.read()
            writer.transport.abort()

    server = await asyncio.start_unix_server(speak, folder / NAME)
    (folder / NAME).chmod(0o600)
    return server


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            encode_frame({"welcome": {"handrail": "9.9", "protocol": 4}}),
            ConnectionRejected,
            "is Handrail 9.9 with protocol 4",
        ),
        (encode_frame({"refused": {}}), ConnectionRejected, "Connection rejected"),
        (encode_frame({"welcome": 1}), StartError, "not a Handrail process"),
        (encode_frame({"id": 1, "op": "echo"}), StartError, "not a Handrail process"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", LeaseHolderNotResponding, "not a Handrail process"),
        (encode_frame({"bye": "not today"}), LeaseHolderNotResponding, "did not accept this process: not today"),
        (encode_frame({"bye": {}}), StartError, "not a Handrail process"),
        (b"", LeaseHolderNotResponding, "closed it"),
    ],
)
async def test_a_listener_that_is_not_a_compatible_holder_raises_a_clear_error(
    tmp_path: Path, answer: bytes, kind: type[StartError], text: str
) -> None:
    server = await served(tmp_path, answer, close=True)
    with pytest.raises(kind, match=text) as caught:
        await connect_to_lease_holder(tmp_path, NAME)
    assert type(caught.value) is kind
    server.close()


async def test_a_holder_that_closes_during_the_handshake_is_reported_as_not_responding(tmp_path: Path) -> None:
    """The next holder may be tried: this one does not count as another program."""
    listener = await listen_on_socket(tmp_path, NAME, lambda connection, hello: (OPERATIONS, {}))
    joining = asyncio.create_task(connect_to_lease_holder(tmp_path, NAME))
    while not listener.connections:
        await asyncio.sleep(0)
    await listener.aclose("it ends")
    with pytest.raises(LeaseHolderNotResponding, match="it ends"):
        await joining


async def test_the_error_names_a_holder_that_does_not_answer(tmp_path: Path) -> None:
    server = await served(tmp_path, b"\0\0", close=False)
    with pytest.raises(
        LeaseHolderNotResponding, match=rf"Process {os.getpid()} holds the workspace but did not answer within 0.1 s"
    ):
        await connect_to_lease_holder(tmp_path, NAME, seconds=0.1)
    server.close()
