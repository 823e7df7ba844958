"""What a TLS client says in the clear before anything is encrypted: which server it means (RFC 8446, RFC 6066).

A tunnel is opened to one host; a ClientHello that names another would reach a neighbour on the same address. Read
strictly: what cannot be read whole is refused, and so is a hello that is hidden (ECH, whose outer name says nothing).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HELLO_BYTES = 64 * 1024

HANDSHAKE, CHANGE_CIPHER_SPEC, APPLICATION_DATA = 22, 20, 23
CLIENT_HELLO, SERVER_HELLO = 1, 2
_MOST_IN_A_RECORD = 16 * 1024 + 256
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")

UNRECOGNIZED_NAME = b"\x15\x03\x03\x00\x02\x02\x70"
"""The alert that ends a handshake whose name is refused."""


class NotTLS(ValueError):
    """What was said is no TLS handshake, or not one that can be read in the clear."""


@dataclass(frozen=True, slots=True)
class Hello:
    """:param server_name: as the client wrote it; None where it named no server
    :param hidden: whether there is an encrypted hello inside"""

    server_name: str | None
    hidden: bool


def refusal(hello: Hello, name: str, *, is_address: bool) -> str | None:
    """Why a tunnel to the host ``name`` must not carry this hello; None if it may."""
    if hello.hidden:
        return f"the TLS hello is encrypted (ECH), so nobody can see that it is for {name}; turn ECH off in the client"
    if hello.server_name is None:
        return None if is_address else f"the TLS hello names no server (no SNI), and the tunnel was opened to {name}"
    if hello.server_name.lower().removesuffix(".") == name:
        return None
    return f"the TLS hello is for {hello.server_name[:253]!r}, and the tunnel was opened to {name}"


class Handshake:
    """Gathers the first handshake message from the records of one side.

    :param kind: the type of message that is expected
    :param again: a second hello, before which encrypted early data may come that the server leaves aside
    """

    def __init__(self, kind: int, *, again: bool = False) -> None:
        self._kind = kind
        self._skipped = (CHANGE_CIPHER_SPEC, APPLICATION_DATA) if again else ()
        self._message = b""
        self.records = b""
        """The records that were read, whole, to be passed on as they came."""
        self.rest = b""
        """What came after them."""
        self.body = b""
        """The message's, once it is there."""

    def feed(self, data: bytes) -> bool:
        """Whether the message is there whole.

        :raises NotTLS: when it cannot become one
        """
        self.rest += data
        while self.rest:
            kind = self.rest[0]
            if kind != HANDSHAKE and kind not in self._skipped:
                raise NotTLS("it is no TLS handshake")
            if len(self.rest) < 5:
                break
            length = int.from_bytes(self.rest[3:5])
            if self.rest[1] != 3 or not 0 < length <= _MOST_IN_A_RECORD:
                raise NotTLS("it is no TLS record")
            if len(self.records) + 5 + length > MAX_HELLO_BYTES:
                raise NotTLS("the handshake message is too long")
            if len(self.rest) < 5 + length:
                break
            content, self.records = self.rest[5 : 5 + length], self.records + self.rest[: 5 + length]
            self.rest = self.rest[5 + length :]
            if kind != HANDSHAKE:
                if self._message:
                    raise NotTLS("the handshake message is interrupted")
                continue
            self._message += content
            if self._message[0] != self._kind:
                raise NotTLS("it is another handshake message")
            size = 4 + int.from_bytes(self._message[1:4])
            if len(self._message) >= max(4, size):
                if len(self._message) > size and self._kind == CLIENT_HELLO:
                    raise NotTLS("something follows the hello in its record")
                self.body = self._message[4:size]
                return True
        return False


def read_hello(body: bytes) -> Hello:
    """A ClientHello's body.

    :raises NotTLS: when it is not exactly one
    """
    reader = _Reader(body)
    reader.take(2 + 32)  # version, random
    reader.take(reader.number(1))  # session id
    reader.take(reader.number(2))  # cipher suites
    reader.take(reader.number(1))  # compression methods
    if reader.at_end:
        return Hello(None, False)
    extensions = _Reader(reader.take(reader.number(2)))
    reader.expect_end()
    server_name: str | None = None
    hidden = False
    seen: set[int] = set()
    while not extensions.at_end:
        kind = extensions.number(2)
        data = extensions.take(extensions.number(2))
        if kind in seen:
            raise NotTLS("the hello has an extension twice")
        seen.add(kind)
        if kind == _SERVER_NAME:
            server_name = _server_name(data)
        hidden = hidden or kind == _ENCRYPTED_HELLO
    return Hello(server_name, hidden)


def asks_again(server_hello: bytes) -> bool:
    """Whether a ServerHello's body is a HelloRetryRequest, after which the client says a second hello."""
    return server_hello[2:34] == _RETRY


def _server_name(data: bytes) -> str:
    reader = _Reader(data)
    names = _Reader(reader.take(reader.number(2)))
    reader.expect_end()
    kind = names.number(1)
    name = names.take(names.number(2))
    names.expect_end()  # two names could be read in two ways
    if kind != 0 or not name or not name.isascii():
        raise NotTLS("the hello's server name is no host name")
    return name.decode()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise NotTLS("the hello is shorter than it says")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def expect_end(self) -> None:
        if not self.at_end:
            raise NotTLS("the hello has something after its end")
