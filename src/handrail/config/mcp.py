"""``[mcp]``: upstream MCP servers, whose tools are under the same rules, and access to Handrail's own server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_HOUR_MS = 3_600_000
NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,39}$"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class SecretValue(_Table):
    """``{ secret = "NAME" }``, with what is written around it."""

    secret: Annotated[str, Field(description="Its name in the table of secrets.")]
    prefix: Annotated[str, Field(description="What stands before it, as in 'Bearer '.")] = ""


class McpOauth(_Table):
    """How Handrail signs in at a server that asks for it. Left out, it registers itself and a person signs in once."""

    grant: Annotated[
        Literal["authorization_code", "client_credentials", "identity_assertion"],
        Field(
            description="authorization_code: a person signs in. client_credentials: with the id and secret or key below. identity_assertion: the identity provider below vouches."
        ),
    ] = "authorization_code"
    client_id: Annotated[
        str, Field(description="The id that the authorization server gave; left out, one is asked for.")
    ] = ""
    client_secret: Annotated[SecretValue | None, Field(description="Its secret, by name.")] = None
    private_key: Annotated[
        SecretValue | None,
        Field(description="client_credentials: instead of the secret, the key in PEM form that signs for the client."),
    ] = None
    signing_algorithm: Annotated[str, Field(description="What private_key signs by.")] = "ES256"
    client_metadata_url: Annotated[
        str,
        Field(
            pattern=r"^(https://[^\s@]+/[^\s@]+)?$", description="Where the client's own metadata lie, used as its id."
        ),
    ] = ""
    issuer: Annotated[
        str, Field(description="The one authorization server to be trusted; left out, the one that the server names.")
    ] = ""
    identity_exchange: Annotated[
        str, Field(description="identity_assertion: where the identity provider exchanges tokens.")
    ] = ""
    identity_client_id: Annotated[str, Field(description="identity_assertion: the client's id there.")] = ""
    identity_token: Annotated[
        SecretValue | None, Field(description="identity_assertion: the person's identity token, by name.")
    ] = None
    scopes: Annotated[tuple[str, ...], Field(description="What to ask for; left out, what the server names.")] = ()

    @model_validator(mode="after")
    def _whole(self) -> McpOauth:
        needed = {
            "authorization_code": (),
            "client_credentials": ("client_id", "private_key" if self.private_key else "client_secret"),
            "identity_assertion": ("client_id", "client_secret", "identity_exchange", "identity_token"),
        }[self.grant]
        if lacking := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"the grant {self.grant} needs {' and '.join(lacking)}")
        return self


class McpServer(_Table):
    """``[mcp.servers.NAME]``: one server, by command or by url, and what it may do."""

    command: Annotated[
        str | None,
        Field(
            min_length=1,
            description="The program of a server that speaks over stdin and stdout; it runs in a sandbox of its own.",
        ),
    ] = None
    args: Annotated[tuple[str, ...], Field(description="Its arguments.")] = ()
    env: Annotated[
        dict[str, str | SecretValue],
        Field(description='Its further variables, each a text or { secret = "NAME" }. Only this server sees them.'),
    ] = {}
    url: Annotated[
        str | None,
        Field(pattern=r"^https?://[^\s@]+$", description="Or the address of a server that speaks over HTTP."),
    ] = None
    transport: Annotated[
        Literal["http", "sse"], Field(description="url: http (streamable HTTP), or sse for older servers.")
    ] = "http"
    headers: Annotated[
        dict[str, str | SecretValue],
        Field(description='url: further header fields, as Authorization = { secret = "NAME", prefix = "Bearer " }.'),
    ] = {}
    oauth: Annotated[McpOauth | None, Field(description="url: how to sign in where the server asks for it.")] = None
    enabled: Annotated[bool, Field(description="Whether it is there at all.")] = True
    prefix: Annotated[
        str | None,
        Field(
            pattern=r"^([A-Za-z][A-Za-z0-9_-]{0,39})?$",
            description="What its tools' ids begin with, before an underscore; left out, its name. One server may have ''.",
        ),
    ] = None
    about: Annotated[str, Field(description="What models are told of it; its own words never are.")] = ""
    hosts: Annotated[
        tuple[str, ...],
        Field(
            description="Hosts that its program may reach; of a url, those it may be signed in at. '*' for every public one."
        ),
    ] = ()
    read: Annotated[
        tuple[str, ...], Field(description="command: what of the workspace it may read, as ['.'] or ['docs/**'].")
    ] = ()
    write: Annotated[tuple[str, ...], Field(description="command: what of the workspace it may write.")] = ()
    folders: Annotated[
        tuple[str, ...], Field(description="command: further folders that it may read, where it is installed.")
    ] = ()
    sampling: Annotated[bool, Field(description="Whether it may have the client's model write something.")] = False
    elicitation: Annotated[bool, Field(description="Whether it may ask the person at the client by a form.")] = False
    roots: Annotated[bool, Field(description="Whether it may learn which folders the client works in.")] = False
    side_effects: Annotated[
        dict[str, Literal["read", "write", "external"]],
        Field(description="What its tools do, by the server's own names; '*' for all others. Left out, external."),
    ] = {}
    trust_hints: Annotated[
        bool,
        Field(description="Whether to believe the server which of its tools only read, and which may be repeated."),
    ] = False
    timeout_ms: Annotated[
        int, Field(gt=0, le=24 * _HOUR_MS, description="How long one call may take, in milliseconds.")
    ] = 60_000
    connect_timeout_ms: Annotated[
        int, Field(gt=0, le=_HOUR_MS, description="How long it may take to be ready, in milliseconds.")
    ] = 30_000

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        given = self.model_fields_set
        if self.command is not None and self.url is not None:
            raise ValueError("expected either command or url")
        if self.url is not None and (extra := sorted(given & {"args", "env", "read", "write", "folders"})):
            raise ValueError(f"{' and '.join(extra)} are for servers with a command")
        if self.command is not None and (extra := sorted(given & {"transport", "headers", "oauth"})):
            raise ValueError(f"{' and '.join(extra)} are for servers with a url")
        return self


class McpIntrospection(_Table):
    """``[mcp.serve.introspection]``: the authorization server itself is asked what a token is good for (RFC 7662)."""

    client_id: Annotated[str, Field(min_length=1, description="Handrail's own id at the authorization server.")]
    client_secret: Annotated[SecretValue, Field(description="Its secret, by name.")]
    url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s@]+)?$",
            description="Where it is asked; left out, where the authorization server says.",
        ),
    ] = ""
    method: Annotated[
        Literal["basic", "post"],
        Field(description="How Handrail says who it is: in the Authorization field, or in the form itself."),
    ] = "basic"
    cache_s: Annotated[
        int,
        Field(
            ge=0,
            le=300,
            description="How long an answer is believed, in seconds: a token that is revoked is taken that long.",
        ),
    ] = 30


class McpServe(_Table):
    """``[mcp.serve]``: who may come to ``handrail mcp --http``. What its options say counts before this."""

    tokens: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], SecretValue],
        Field(description='Bearer tokens that are taken, by who has them: alice = { secret = "NAME" }.'),
    ] = {}
    auth_server: Annotated[
        str, Field(description="The OAuth authorization server whose access tokens for this one are taken.")
    ] = ""
    scopes: Annotated[
        tuple[str, ...], Field(description="Scopes that a token of the authorization server must have.")
    ] = ()
    public_url: Annotated[str, Field(description="What clients reach this server by.")] = ""
    introspection: Annotated[
        McpIntrospection | None,
        Field(
            description="Have the authorization server say what each of its tokens is good for; left out, tokens are signed, and checked by its published keys."
        ),
    ] = None
