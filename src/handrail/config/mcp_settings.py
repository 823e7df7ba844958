"""``[mcp]``: upstream MCP servers, whose tools are under the same rules, and access to Handrail's own server."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

_HOUR_MS = 3_600_000
SERVER_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,39}$"


class _McpTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class PrefixedSecretReference(_McpTable):
    """A reference to a secret, ``{ secret = "NAME" }``, with an optional prefix."""

    secret: Annotated[str, Field(description="Name of the secret in the table of secrets.")]
    prefix: Annotated[str, Field(description="Text before the value, such as 'Bearer '. Default empty.")] = ""


class ExpandableText(_McpTable):
    """A text with variables, ``{ expand = "${LOG_LEVEL:-info}" }``."""

    expand: Annotated[
        str,
        Field(
            description=(
                "Text in which ${VARIABLE} and ${VARIABLE:-default} are replaced by Handrail's environment variables."
            )
        ),
    ]


ServerText = str | PrefixedSecretReference | ExpandableText
"""The value of a variable or a header field of a server."""


class McpOauthSettings(_McpTable):
    """The sign-in at a server that requires it.

    Without these settings, Handrail registers itself and the user signs in once.
    """

    grant: Annotated[
        Literal["authorization_code", "client_credentials", "identity_assertion"],
        Field(
            description=(
                "OAuth grant: authorization_code (the user signs in), client_credentials (with the client's "
                "id and secret or key), or identity_assertion (an identity provider vouches for the user). "
                "Default authorization_code."
            )
        ),
    ] = "authorization_code"
    client_id: Annotated[
        str, Field(description="Client ID from the authorization server. Default: Handrail registers itself.")
    ] = ""
    client_secret: Annotated[PrefixedSecretReference | None, Field(description="Client secret, as a reference.")] = None
    private_key: Annotated[
        PrefixedSecretReference | None,
        Field(
            description=(
                "Only for client_credentials: private key in PEM format that signs for the client, as a "
                "reference, instead of the secret."
            )
        ),
    ] = None
    signing_algorithm: Annotated[str, Field(description="Algorithm of private_key. Default ES256.")] = "ES256"
    client_metadata_url: Annotated[
        str,
        Field(
            pattern=r"^(https://[^\s@]+/[^\s@]+)?$",
            description="URL of the client's own metadata, which is used as its ID. Default none.",
        ),
    ] = ""
    callback_host: Annotated[
        Literal["127.0.0.1", "localhost"],
        Field(
            description=(
                "Host of the address on this machine to which the browser returns: 127.0.0.1 or localhost. Default "
                "127.0.0.1."
            )
        ),
    ] = "127.0.0.1"
    callback_port: Annotated[
        int,
        Field(
            ge=0,
            le=65_535,
            description=(
                "Port of that address, from 1 to 65535. Default 0: the port of the last registration, or a free one."
            ),
        ),
    ] = 0
    issuer: Annotated[
        str, Field(description="The only authorization server to trust. Default: the one that the server names.")
    ] = ""
    identity_exchange: Annotated[
        str, Field(description="Only for identity_assertion: URL of the identity provider's token exchange.")
    ] = ""
    identity_client_id: Annotated[
        str, Field(description="Only for identity_assertion: client ID at the identity provider.")
    ] = ""
    identity_token: Annotated[
        PrefixedSecretReference | None,
        Field(description="Only for identity_assertion: identity token of the user, as a reference."),
    ] = None
    scopes: Annotated[
        tuple[str, ...], Field(description="OAuth scopes to request. Default: those that the server names.")
    ] = ()

    @model_validator(mode="after")
    def _check_grant_fields(self) -> McpOauthSettings:
        needed = {
            "authorization_code": (),
            "client_credentials": ("client_id", "private_key" if self.private_key else "client_secret"),
            "identity_assertion": ("client_id", "client_secret", "identity_exchange", "identity_token"),
        }[self.grant]
        if lacking := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"the grant {self.grant} requires {' and '.join(lacking)}")
        return self


class UpstreamServerSettings(_McpTable):
    """``[mcp.servers.NAME]``: one server, with a command or a URL, and its permissions."""

    command: Annotated[
        str | None,
        Field(
            min_length=1,
            description=(
                "Program of a server that communicates over stdin and stdout. It runs in its own sandbox. "
                "Either command or url is required."
            ),
        ),
    ] = None
    args: Annotated[tuple[str, ...], Field(description="Arguments of the program. Default none.")] = ()
    env: Annotated[
        dict[str, ServerText],
        Field(
            description=(
                'Additional environment variables, which only this server gets: each a string, { secret = "NAME" } or '
                '{ expand = "${VARIABLE:-default}" }. Default none.'
            )
        ),
    ] = {}
    url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[^\s@]+$",
            description="URL of a server that communicates over HTTP. Either command or url is required.",
        ),
    ] = None
    transport: Annotated[
        Literal["http", "sse"],
        Field(description="Only for url: transport, http (streamable HTTP) or sse (older servers). Default http."),
    ] = "http"
    headers: Annotated[
        dict[str, ServerText],
        Field(
            description=(
                "Only for url: additional header fields, such as Authorization = "
                '{ secret = "NAME", prefix = "Bearer " }. Default none.'
            )
        ),
    ] = {}
    oauth: Annotated[
        McpOauthSettings | None, Field(description="Only for url: sign-in, if the server requires it.")
    ] = None
    enabled: Annotated[bool, Field(description="Whether the server is used. Default true.")] = True
    prefix: Annotated[
        str | None,
        Field(
            pattern=r"^([A-Za-z][A-Za-z0-9_-]{0,39})?$",
            description=(
                "Prefix of its tools' IDs, followed by an underscore; one server may have ''. Default: the "
                "server's name."
            ),
        ),
    ] = None
    about: Annotated[
        str, Field(description="Description of the server for models, who never get its own text. Default none.")
    ] = ""
    hosts: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Hosts that its program may reach; for url, additional hosts for its sign-in. '*' for every "
                "public host. Default none."
            )
        ),
    ] = ()
    tcp: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[^\s/@*]+:[1-9][0-9]{0,4}$")], ...],
        Field(
            description=(
                "Only for command: addresses that its program may reach without HTTP, such as ['127.0.0.1:5432'] for "
                "a database. It finds each at 127.0.0.1 and the same port. Default none."
            )
        ),
    ] = ()
    read: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Only for command: paths in the workspace that it may read, such as ['.'] or ['docs/**']. Default none."
            )
        ),
    ] = ()
    write: Annotated[
        tuple[str, ...], Field(description="Only for command: paths in the workspace that it may write. Default none.")
    ] = ()
    folders: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Only for command: additional folders that it may read, such as that of its installation. Default none."
            )
        ),
    ] = ()
    cwd: Annotated[
        str,
        Field(
            description=(
                "Only for command: working directory of the program, in the workspace or in one of folders. "
                "Default: the workspace, if it may read it, else its own home folder."
            )
        ),
    ] = ""
    url_arguments: Annotated[
        Literal["data", "hosts"],
        Field(
            description=(
                "Meaning of a URL in the arguments of its tools: data, which the server may use freely, or hosts, "
                "which its hosts setting and the rules must allow. Default data."
            )
        ),
    ] = "data"
    sampling: Annotated[
        bool, Field(description="Permission to request texts from the client's model. Default false.")
    ] = False
    elicitation: Annotated[
        bool, Field(description="Permission to ask the user at the client by a form. Default false.")
    ] = False
    roots: Annotated[
        bool, Field(description="Permission to learn the folders that the client works in. Default false.")
    ] = False
    side_effects: Annotated[
        dict[str, Literal["read", "write", "external"]],
        Field(
            description=(
                "Side effects of its tools: read, write or external, by the server's own tool names; '*' for "
                "all other tools. Default external."
            )
        ),
    ] = {}
    trust_hints: Annotated[
        bool,
        Field(
            description=(
                "Whether to trust the server's hints on which tools only read and which may be repeated. Default false."
            )
        ),
    ] = False
    timeout_ms: Annotated[
        int,
        Field(
            gt=0,
            le=24 * _HOUR_MS,
            description="Timeout of one call, in milliseconds. Default 60000, from 1 to 86400000.",
        ),
    ] = 60_000
    connect_timeout_ms: Annotated[
        int,
        Field(
            gt=0,
            le=_HOUR_MS,
            description="Timeout of its start and connection, in milliseconds. Default 30000, from 1 to 3600000.",
        ),
    ] = 30_000

    @model_validator(mode="after")
    def _check_transport(self) -> UpstreamServerSettings:
        given = self.model_fields_set
        if self.command is not None and self.url is not None:
            raise ValueError("expected either command or url")
        if self.url is not None and (
            extra := sorted(given & {"args", "env", "read", "write", "folders", "cwd", "tcp"})
        ):
            raise ValueError(f"{' and '.join(extra)} are only for servers with a command")
        if self.command is not None and (extra := sorted(given & {"transport", "headers", "oauth"})):
            raise ValueError(f"{' and '.join(extra)} are only for servers with a url")
        return self


def find_mcp_server_faults(name: str, server: object) -> dict[str, str]:
    """Return the problems of one server, by their places in its table, without its values, which may be secret."""
    if re.fullmatch(SERVER_NAME_PATTERN, name) is None:
        return {
            "": f"the name {name[:60]!r} is not valid; expected letters, digits, '-' and '_', a letter first, at most 40 characters"
        }
    if not isinstance(server, dict):
        return {"": "is not a table"}
    try:
        UpstreamServerSettings.model_validate_json(json.dumps(server), strict=True)
    except ValidationError as error:
        return dict(_describe_fault(dict(one)) for one in error.errors())
    return {}


def _describe_fault(fault: dict[str, Any]) -> tuple[str, str]:
    """Return the place and the text of a fault."""
    location = [str(part) for part in fault["loc"]]
    if len(location) > 1 and location[0] in ("env", "headers"):
        text = 'expected a string, { secret = "NAME" } or { expand = "${VARIABLE}" }'
        return ".".join(location[:2]), text
    if (place := ".".join(location)) == "url" and fault["type"] == "string_pattern_mismatch":
        return place, "expected an http or https address, without a user and without white space"
    if fault["type"] == "extra_forbidden":
        near = nearest_names(location[-1], UpstreamServerSettings.model_fields, 1)
        return place, "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    return place, str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")


class McpTokenIntrospectionSettings(_McpTable):
    """``[mcp.serve.introspection]``: the check of tokens by the authorization server (RFC 7662)."""

    client_id: Annotated[str, Field(min_length=1, description="Client ID of Handrail at the authorization server.")]
    client_secret: Annotated[PrefixedSecretReference, Field(description="Client secret of Handrail, as a reference.")]
    url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s@]+)?$",
            description="URL of the introspection endpoint. Default: the one that the authorization server publishes.",
        ),
    ] = ""
    method: Annotated[
        Literal["basic", "post"],
        Field(
            description=(
                "Authentication of Handrail: basic (Authorization header) or post (form fields). Default basic."
            )
        ),
    ] = "basic"
    cache_s: Annotated[
        int,
        Field(
            ge=0,
            le=300,
            description=(
                "Time for which an answer is cached, in seconds; a revoked token stays valid until then. "
                "Default 30, from 0 to 300."
            ),
        ),
    ] = 30


class McpServeSettings(_McpTable):
    """``[mcp.serve]``: access to ``handrail mcp --http``. Command-line options override it."""

    tokens: Annotated[
        dict[Annotated[str, Field(pattern=SERVER_NAME_PATTERN)], PrefixedSecretReference],
        Field(description='Accepted bearer tokens, by client: alice = { secret = "NAME" }. Default none.'),
    ] = {}
    auth_server: Annotated[
        str,
        Field(
            description=(
                "URL of the OAuth authorization server whose access tokens for this server are accepted. Default none."
            )
        ),
    ] = ""
    scopes: Annotated[
        tuple[str, ...], Field(description="OAuth scopes that an access token must have. Default none.")
    ] = ()
    public_url: Annotated[
        str, Field(description="URL under which clients reach this server. Default: the address it listens on.")
    ] = ""
    introspection: Annotated[
        McpTokenIntrospectionSettings | None,
        Field(
            description=(
                "Token check by the authorization server. Default: signed tokens, checked against its published keys."
            )
        ),
    ] = None
