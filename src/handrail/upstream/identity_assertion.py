"""The sign-in by identity assertion, which the SDK's providers lack: an identity provider vouches for the user at each server.

Source: https://github.com/modelcontextprotocol/ext-auth (enterprise-managed authorization), RFC 8693, RFC 7523
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import orjson
from mcp.client.auth import OAuthClientProvider, OAuthFlowError, TokenStorage
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata

ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"  # noqa: S105 - the name of a kind of token
ID_JAG = "urn:ietf:params:oauth:token-type:id-jag"
TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"  # noqa: S105
JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"


class IdentityAssertionSignIn(OAuthClientProvider):
    """Enterprise-managed authorization: an identity provider vouches for the user at each server.

    :param id_token: the user's token from the identity provider
    :param identity_client_id: this client's id at the identity provider
    :param exchange: the URL of the identity provider's token exchange
    :param issuer: the only authorization server that may receive the client's secret; empty for the one that the server names
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
        """Ask the identity provider before the authorization server, in the flow of the caller's requests."""
        flow = super()._auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                response = yield outgoing
                if outgoing.url == self._exchange:
                    response = yield self._token_request(await _read_identity_assertion(response))
                outgoing = await flow.asend(response)
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()

    async def _perform_authorization(self) -> httpx2.Request:
        metadata = self.context.oauth_metadata
        if metadata is None:
            raise OAuthFlowError("the server names no authorization server for an identity assertion")
        issuer = str(metadata.issuer)
        if self._issuer and issuer != self._issuer:
            raise OAuthFlowError(
                f"the server names the authorization server {issuer}, but {self._issuer} is configured"
            )
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


async def _read_identity_assertion(response: httpx2.Response) -> str:
    """Return the assertion of the identity provider.

    :raises OAuthFlowError: if there is none
    """
    body = await response.aread()
    try:
        answer: Any = orjson.loads(body)
        vouched = response.status_code == 200 and answer.get("issued_token_type") == ID_JAG
        assertion = answer["access_token"] if vouched else None
    except (orjson.JSONDecodeError, AttributeError, KeyError):
        assertion = None
    if not isinstance(assertion, str):
        raise OAuthFlowError(
            f"the identity provider returned no assertion; it answered with HTTP {response.status_code}"
        )
    return assertion
