"""One upstream server as the operator has configured it, as plain data, and its cached listing."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from handrail.contract.errors import StartError
from handrail.contract.struct import Struct, field
from handrail.contract.text.host_names import parse_http_url
from handrail.contract.text.strict_json import check_nesting_depth
from handrail.contract.tool.requires import FsRequires, NetRequires, Requires
from handrail.contract.tool.spec import SideEffect
from handrail.store import operator_decisions

TransportKind = Literal["stdio", "http", "sse"]

CAPABILITY_BY_GRANT: Mapping[str, str] = {"sampling": "sample", "elicitation": "elicit", "roots": "roots"}
"""By grant of the operator, the capability that the server's tools then have, to send such requests to the client."""


@dataclasses.dataclass(frozen=True, slots=True)
class OauthSignInOptions:
    """The sign-in at a server, as in ``[mcp.servers.NAME.oauth]``."""

    grant: Literal["authorization_code", "client_credentials", "identity_assertion"] = "authorization_code"
    client_id: str = ""
    client_secret: str = dataclasses.field(default="", repr=False)
    scopes: tuple[str, ...] = ()
    private_key: str = dataclasses.field(default="", repr=False)
    signing_algorithm: str = "ES256"
    client_metadata_url: str = ""
    issuer: str = ""
    identity_exchange: str = ""
    identity_client_id: str = ""
    identity_token: str = dataclasses.field(default="", repr=False)
    callback_host: str = "127.0.0.1"
    callback_port: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ServerDefinition:
    """The configuration of one upstream server, with the values of its secrets.

    :param place: the place of its configuration, for messages
    :param command: the program as written, if Handrail starts the server
    :param environment: additional variables of the program
    :param headers: additional header fields of each request
    :param missing_reason: the reason why it cannot be used as configured, such as a missing secret
    """

    name: str
    place: str
    transport: TransportKind
    command: str = ""
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)
    url: str = ""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], repr=False)
    oauth: OauthSignInOptions = OauthSignInOptions()
    prefix: str | None = None
    about: str = ""
    hosts: tuple[str, ...] = ()
    tcp: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    grants: frozenset[str] = frozenset()
    side_effects: Mapping[str, SideEffect] = dataclasses.field(default_factory=dict[str, SideEffect])
    trust_hints: bool = False
    url_arguments: Literal["data", "hosts"] = "data"
    cwd: str = ""
    timeout_ms: int = 60_000
    connect_timeout_ms: int = 30_000
    missing_reason: str = ""

    @property
    def requires(self) -> Requires:
        """The requirements of the server as a whole: folders, hosts, and requests to the client."""
        capabilities = tuple(sorted(CAPABILITY_BY_GRANT[grant] for grant in self.grants))
        if self.transport != "stdio":
            return Requires(capabilities=capabilities)
        return Requires(
            fs=FsRequires(read=self.read, write=self.write),
            net=NetRequires(hosts=(*self.hosts, *self.tcp)),
            capabilities=capabilities,
        )

    @property
    def client_egress_hosts(self) -> tuple[str, ...]:
        """The hosts that Handrail itself may connect to: that of the URL and those of its egress grant."""
        return (str(parse_http_url(self.url).host), *self.hosts) if self.url else ()

    @property
    def url_or_command(self) -> str:
        """The URL or the command, without secrets."""
        return self.url.partition("?")[0] if self.url else " ".join((self.command, *self.args))

    def token_file(self, state: Path) -> Path:
        """Return the file with the tokens of the sign-in at this server.

        :param state: the root folder of all state
        """
        key = hashlib.sha256(f"{self.name}\0{self.url.partition('?')[0]}".encode()).hexdigest()[:24]
        return state / "mcp" / "tokens" / f"{key}.json"

    @property
    def definition_hash(self) -> str:
        """A hash of all that identifies the server. It covers no value that may be a secret.

        A listing with another hash belongs to another server and does not count.
        """
        what = [
            self.transport,
            self.command,
            list(self.args),
            sorted(self.environment),
            self.url.partition("?")[0],
            sorted(self.headers),
            *([self.cwd] if self.cwd else []),
        ]
        return hashlib.sha256(json.dumps(what).encode("utf-8", "surrogatepass")).hexdigest()


# The cache of a server's last listing, so that its tools are known without a connection.
#
# The file is in the state root, for all workspaces of this user. A file that is not a valid listing of this very server
# counts as absent. All content comes from the server, so every load checks it again.

LISTING_FORMAT = 2
MAX_STORED_BYTES = 64 * 1024 * 1024
MAX_ITEMS = 5_000
"""The most tools, resources, templates or prompts of one server."""
MAX_ITEM_BYTES = 1024 * 1024
MAX_ITEM_DEPTH = 400
MAX_LIST_BYTES = 12 * 1024 * 1024
"""The most bytes of a list, so that the stored file can be read again."""
JsonItem = Mapping[str, Any]


class ServerListing(Struct, frozen=True):
    """A server's listing as received; each item is a JSON object.

    :param protocol: the protocol version of the connection
    :param left_out: the number of items that exceeded a limit
    :param problems: why a list is missing, for people
    """

    tools: tuple[JsonItem, ...] = ()
    resources: tuple[JsonItem, ...] = ()
    templates: tuple[JsonItem, ...] = ()
    prompts: tuple[JsonItem, ...] = ()
    capabilities: JsonItem = field(default_factory=dict[str, Any])
    server: JsonItem = field(default_factory=dict[str, Any])
    protocol: str = ""
    left_out: int = 0
    problems: tuple[str, ...] = ()

    def find_tool(self, name: str) -> JsonItem | None:
        """Return the listed tool of a name, or None."""
        return next((one for one in self.tools if one.get("name") == name), None)


class BoundedItems:
    """The valid items of a server's list, within the limits."""

    def __init__(self) -> None:
        self.items: list[JsonItem] = []
        self.left_out = 0
        self._bytes = 0

    def add_valid_items(self, items: Iterable[object]) -> None:
        for one in items:
            size = _measure_item(one) if len(self.items) < MAX_ITEMS else None
            if size is not None and self._bytes + size <= MAX_LIST_BYTES:
                self.items.append(cast("JsonItem", one))
                self._bytes += size
            else:
                self.left_out += 1


def _measure_item(one: object) -> int | None:
    """Return the size of an item in bytes, or None if it is not an object, too large or nested too deeply."""
    if not isinstance(one, dict):
        return None
    try:
        text = json.dumps(one)
        check_nesting_depth(text, MAX_ITEM_DEPTH)
    except (ValueError, RecursionError):
        return None
    return len(text) if len(text) <= MAX_ITEM_BYTES else None


def read_cached_listing(state: Path, name: str, definition: str) -> ServerListing | None:
    """Return the cached listing of the server ``name`` if it has the same definition, or None.

    :param state: the root folder of all state
    :param definition: the hash of the server's definition
    """
    content = operator_decisions.read_private_file(_path(state, name), MAX_STORED_BYTES)
    if content is None:
        return None
    try:
        data: Any = orjson.loads(content)
        if data["version"] != LISTING_FORMAT or data["name"] != name or data["definition"] != definition:
            return None
        found: Any = data["listing"]
        lists = {
            key: tuple(cast("JsonItem", one) for one in found[key] if isinstance(one, dict))
            for key in ("tools", "resources", "templates", "prompts")
        }
        return ServerListing(
            **lists,
            capabilities=_object(found["capabilities"]),
            server=_object(found["server"]),
            protocol=str(found["protocol"]),
            left_out=int(found["left_out"]),
            problems=tuple(map(str, found["problems"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write_cached_listing(state: Path, name: str, definition: str, listing: ServerListing) -> None:
    """Store a listing. Errors are ignored, since the server can be asked again."""
    path = _path(state, name)
    whole = {
        "version": LISTING_FORMAT,
        "name": name,
        "definition": definition,
        "listing": {one.name: getattr(listing, one.name) for one in fields(listing)},
    }
    with contextlib.suppress(OSError, StartError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        operator_decisions.write_private_file(path, json.dumps(whole, ensure_ascii=True, sort_keys=True).encode())


def _object(value: object) -> JsonItem:
    return cast("JsonItem", value) if isinstance(value, dict) else {}


def _path(state: Path, name: str) -> Path:
    return state / "mcp" / "listings" / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
