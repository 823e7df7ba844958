"""Two ways to sign in that the SDK's providers do not go: as servers of 2025-03-26 have it, and by an identity's assertion.

Source: https://modelcontextprotocol.io/specification/2025-03-26/basic/authorization,
https://github.com/modelcontextprotocol/ext-auth (enterprise-managed authorization), RFC 8693, RFC 7523
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import orjson
from mcp.client.auth import OAuthClientProvider, OAuthFlowError, TokenStorage
from mcp.client.auth.utils import issuers_match
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata

ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"  # noqa: S105 - the name of a kind of token
ID_JAG = "urn:ietf:params:oauth:token-type:id-jag"
TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"  # noqa: S105
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"

_WELL_KNOWN = "/.well-known/oauth-authorization-server"


class PersonSignsIn(OAuthClientProvider):
    """The authorization code flow, also with a server of 2025-03-26 that is its own authorization server.

    Such a server publishes no protected-resource metadata, and its metadata lie at the root of its origin whatever its
    issuer's path is. An issuer of that very origin is taken for it; one of any other origin is refused as ever.

    :ivar known: the client's id, where the operator has one
    :ivar trusted: the one authorization server that a person is sent to and that is given the client's secret; empty for
        the one that the server names
    """

    known: OAuthClientInformationFull | None = None
    trusted: str = ""

    async def _initialize(self) -> None:
        await super()._initialize()
        self.context.client_info = self.known or self.context.client_info

    async def _perform_authorization(self) -> httpx2.Request:
        metadata = self.context.oauth_metadata
        named = str(metadata.issuer) if metadata is not None else _origin(self.context.server_url)
        if self.trusted and not issuers_match(named, self.trusted):
            raise OAuthFlowError(f"the server names the authorization server {named}; {self.trusted} is configured")
        return await super()._perform_authorization()

    async def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        flow = super()._auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                response = yield outgoing
                if self._is_root_metadata(outgoing, response):
                    response = await self._issued_by_origin(outgoing, response)
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()

    def _is_root_metadata(self, asked: httpx2.Request, response: httpx2.Response) -> bool:
        legacy = self.context.auth_server_url is None and response.status_code == 200
        return legacy and str(asked.url) == _origin(self.context.server_url) + _WELL_KNOWN

    async def _issued_by_origin(self, asked: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        body = await response.aread()
        try:
            metadata: Any = orjson.loads(body)
            issuer = metadata["issuer"]
        except (orjson.JSONDecodeError, TypeError, KeyError):
            return response
        origin = _origin(self.context.server_url)
        if not isinstance(issuer, str) or _origin(issuer) != origin:
            return response
        said = orjson.dumps({**metadata, "issuer": origin})
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=said, request=asked)


class IdentityAssertion(OAuthClientProvider):
    """Enterprise-managed authorization: the identity provider of the operator's house vouches for the person, so nobody
    signs in at each server.

    :param id_token: what the person signed in with at the identity provider
    :param identity_client_id: this client's id there
    :param exchange: where the identity provider exchanges tokens
    :param issuer: the one authorization server that may be given the client's secret; left out, the one that the server
        names
    """

    def __init__(
        self,
        server_url: str,
        storage: TokenStorage,
        *,
        client_id: str,
        client_secret: str,
        id_token: str,
        identity_client_id: str,
        exchange: str,
        issuer: str = "",
        scopes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(server_url, OAuthClientMetadata(redirect_uris=None, grant_types=[JWT_BEARER]), storage)
        self._scope = " ".join(scopes)
        self._id_token = id_token
        self._identity_client_id = identity_client_id
        self._exchange = exchange
        self._issuer = issuer
        self._known = OAuthClientInformationFull(
            redirect_uris=None,
            client_id=client_id,
            client_secret=client_secret,
            grant_types=[JWT_BEARER],
            token_endpoint_auth_method="client_secret_basic",  # noqa: S106 - a method's name
        )

    async def _initialize(self) -> None:
        self.context.current_tokens = await self.context.storage.get_tokens()
        self.context.client_info = self._known
        self._initialized = True

    async def _auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """The identity provider is asked on the way to the authorization server, by whoever sends this flow's requests."""
        flow = super()._auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                response = yield outgoing
                if str(outgoing.url) == self._exchange:
                    response = yield self._token_request(await _assertion_in(response))
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()

    async def _perform_authorization(self) -> httpx2.Request:
        metadata = self.context.oauth_metadata
        if metadata is None:
            raise OAuthFlowError("the server names no authorization server that an identity could be asserted to")
        issuer = str(metadata.issuer)
        if self._issuer and issuer != self._issuer:
            raise OAuthFlowError(f"the server names the authorization server {issuer}; {self._issuer} is configured")
        form = {
            "grant_type": TOKEN_EXCHANGE,
            "requested_token_type": ID_JAG,
            "subject_token": self._id_token,
            "subject_token_type": ID_TOKEN,
            "audience": issuer,
            "resource": self.context.get_resource_url(),
            "client_id": self._identity_client_id,
        }
        return httpx2.Request("POST", self._exchange, data=form)

    def _token_request(self, assertion: str) -> httpx2.Request:
        form = {"grant_type": JWT_BEARER, "assertion": assertion, "resource": self.context.get_resource_url()}
        if self._scope:
            form["scope"] = self._scope
        form, headers = self.context.prepare_token_auth(form, {"Content-Type": "application/x-www-form-urlencoded"})
        return httpx2.Request("POST", self._get_token_endpoint(), data=form, headers=headers)


async def _assertion_in(response: httpx2.Response) -> str:
    """:raises OAuthFlowError: where the identity provider does not vouch"""
    body = await response.aread()
    try:
        answer: Any = orjson.loads(body)
        vouched = response.status_code == 200 and answer.get("issued_token_type") == ID_JAG
        assertion = answer["access_token"] if vouched else None
    except (orjson.JSONDecodeError, AttributeError, KeyError):
        assertion = None
    if not isinstance(assertion, str):
        raise OAuthFlowError(f"the identity provider gave no assertion; it answered with HTTP {response.status_code}")
    return assertion


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()
