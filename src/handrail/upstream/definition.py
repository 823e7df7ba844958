"""One upstream server as its operator has set it: plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from handrail.contract.text.hosts import read_url
from handrail.contract.tool.requires import FsRequires, NetRequires, Requires
from handrail.contract.tool.spec import SideEffect

Transport = Literal["stdio", "http", "sse"]

GRANTS: Mapping[str, str] = {"sampling": "sample", "elicitation": "elicit", "roots": "roots"}
"""What a server may be granted to ask of the client, and the capability that its tools then have."""


@dataclass(frozen=True, slots=True)
class Oauth:
    """How to sign in; see ``[mcp.servers.NAME.oauth]``."""

    grant: Literal["authorization_code", "client_credentials", "identity_assertion"] = "authorization_code"
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    scopes: tuple[str, ...] = ()
    private_key: str = field(default="", repr=False)
    signing_algorithm: str = "ES256"
    client_metadata_url: str = ""
    issuer: str = ""
    identity_exchange: str = ""
    identity_client_id: str = ""
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ServerDefinition:
    """:param place: where it is configured, as the operator knows it
    :param command: the program as it was written, of a server that is started here
    :param environment: its further variables
    :param headers: further header fields of each request
    :param missing: why it cannot be used as it is configured, such as a secret that nobody gave
    """

    name: str
    place: str
    transport: Transport
    command: str = ""
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    oauth: Oauth = Oauth()
    prefix: str | None = None
    about: str = ""
    hosts: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    grants: frozenset[str] = frozenset()
    side_effects: Mapping[str, SideEffect] = field(default_factory=dict[str, SideEffect])
    trust_hints: bool = False
    timeout_ms: int = 60_000
    connect_timeout_ms: int = 30_000
    missing: str = ""

    @property
    def requires(self) -> Requires:
        """What the server as a whole needs: of a program its folders and hosts; what it may ask of a client."""
        capabilities = tuple(sorted(GRANTS[grant] for grant in self.grants))
        if self.transport != "stdio":
            return Requires(capabilities=capabilities)
        return Requires(
            fs=FsRequires(read=self.read, write=self.write),
            net=NetRequires(hosts=self.hosts),
            capabilities=capabilities,
        )

    @property
    def reached(self) -> tuple[str, ...]:
        """The hosts that Handrail itself may dial for it: its own, by the operator's word, and those of its egress grant."""
        return (str(read_url(self.url).host), *self.hosts) if self.url else ()

    @property
    def where(self) -> str:
        """How it is reached, without any secret."""
        return self.url.partition("?")[0] if self.url else " ".join((self.command, *self.args))

    @property
    def hash(self) -> str:
        """Of what decides what the server is; a listing of another one does not count. Without any value that may be
        secret."""
        what = [
            self.transport,
            self.command,
            list(self.args),
            sorted(self.environment),
            self.url.partition("?")[0],
            sorted(self.headers),
        ]
        return hashlib.sha256(json.dumps(what).encode("utf-8", "surrogatepass")).hexdigest()
