"""The SDK's client for the client scenarios, for comparison."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import mcp_types as types
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider, TokenStorage
from mcp.client.auth.extensions.client_credentials import (
    ClientCredentialsOAuthProvider,
    PrivateKeyJWTOAuthProvider,
    SignedJWTParameters,
)
from mcp.client.client import Client
from mcp.client.context import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl
from tests.mcp_suite import client as scenarios
from tests.mcp_suite.client import answers_to_form

CALLBACK = "http://localhost:3000/callback"
IDENTITY_DOCUMENT = "https://conformance-test.local/client-metadata.json"
"""What the suite expects as the address of the client's own metadata."""


class Remembered(TokenStorage):
    """Tokens and registration for as long as the scenario takes."""

    def __init__(self, client: OAuthClientInformationFull | None = None) -> None:
        self._client = client
        self._tokens: OAuthToken | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


async def signed_in(url: str) -> dict[str, str]:
    """Return the parameters of the redirect after a sign-in: the suite's server agrees immediately."""
    async with httpx2.AsyncClient() as browser:
        answer = await browser.get(url, follow_redirects=False)
    return {key: values[0] for key, values in parse_qs(urlsplit(answer.headers["location"]).query).items()}


def authorization(url: str, by_person: type[OAuthClientProvider] = OAuthClientProvider) -> httpx2.Auth:
    known = scenarios.context()
    if "private_key_pem" in known:
        signed = SignedJWTParameters(
            issuer=known["client_id"],
            subject=known["client_id"],
            signing_algorithm=known.get("signing_algorithm", "ES256"),
            signing_key=known["private_key_pem"],
        )
        return PrivateKeyJWTOAuthProvider(url, Remembered(), known["client_id"], signed.create_assertion_provider())
    if os.environ["MCP_CONFORMANCE_SCENARIO"] == "auth/client-credentials-basic":
        return ClientCredentialsOAuthProvider(url, Remembered(), known["client_id"], known["client_secret"])
    came_back: dict[str, str] = {}

    async def visit(address: str) -> None:
        came_back.update(await signed_in(address))

    async def back() -> AuthorizationCodeResult:
        return AuthorizationCodeResult(
            code=came_back.get("code", ""), state=came_back.get("state"), iss=came_back.get("iss")
        )

    registered = None
    if "client_id" in known:
        registered = OAuthClientInformationFull(
            client_id=known["client_id"],
            client_secret=known.get("client_secret"),
            redirect_uris=[AnyUrl(CALLBACK)],
            token_endpoint_auth_method="client_secret_basic" if known.get("client_secret") else "none",
        )
    return by_person(
        url,
        OAuthClientMetadata(
            client_name="conformance",
            redirect_uris=[AnyUrl(CALLBACK)],
            grant_types=["authorization_code", "refresh_token"],
            response_types=["code"],
        ),
        Remembered(registered),
        visit,
        back,
        client_metadata_url=IDENTITY_DOCUMENT,
    )


async def form(context: ClientRequestContext, params: types.ElicitRequestParams) -> types.ElicitResult:
    schema = params.requested_schema if isinstance(params, types.ElicitRequestFormParams) else {}
    return types.ElicitResult(action="accept", content=answers_to_form(schema))


class Connected:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def tools(self) -> list[tuple[str, Mapping[str, Any]]]:
        return [(tool.name, tool.input_schema) for tool in (await self._client.list_tools()).tools]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return await self._client.call_tool(name, dict(arguments))

    async def rest(self) -> None:
        offered = self._client.server_capabilities
        if offered and offered.resources:
            for resource in (await self._client.list_resources()).resources:
                await self._client.read_resource(resource.uri)
        if offered and offered.prompts:
            for prompt in (await self._client.list_prompts()).prompts:
                await self._client.get_prompt(prompt.name, {})


@asynccontextmanager
async def connect(url: str) -> AsyncGenerator[Connected]:
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    protocol = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "")
    auth = authorization(url) if scenario.startswith("auth/") else None
    async with httpx2.AsyncClient(auth=auth, timeout=20) as http:
        transport = streamable_http_client(url, http_client=http)
        mode = "legacy" if protocol < "2026-07-28" else "auto"
        async with Client(transport, mode=mode, elicitation_callback=form) as client:
            yield Connected(client)
