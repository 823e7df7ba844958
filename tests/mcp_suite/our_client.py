"""Handrail's client for the client scenarios."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx2
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from tests.mcp_suite import client as scenarios
from tests.mcp_suite import sdk_client
from tests.mcp_suite.client import Server

from handrail.registry.sources.mcp.flows import IdentityAssertion, PersonSignsIn


def _authorization(url: str) -> httpx2.Auth:
    known = scenarios.context()
    if "idp_id_token" in known:
        return IdentityAssertion(
            url,
            sdk_client.Remembered(),
            client_id=known["client_id"],
            client_secret=known["client_secret"],
            id_token=known["idp_id_token"],
            identity_client_id=known["idp_client_id"],
            exchange=known["idp_token_endpoint"],
        )
    return sdk_client.authorization(url, PersonSignsIn)


@asynccontextmanager
async def connect(url: str) -> AsyncGenerator[Server]:
    scenario = os.environ["MCP_CONFORMANCE_SCENARIO"]
    protocol = os.environ.get("MCP_CONFORMANCE_PROTOCOL_VERSION", "")
    auth = _authorization(url) if scenario.startswith("auth/") else None
    async with httpx2.AsyncClient(auth=auth, timeout=20) as http:
        transport = streamable_http_client(url, http_client=http)
        mode = "legacy" if protocol < "2026-07-28" else "auto"
        async with Client(transport, mode=mode, elicitation_callback=sdk_client.form) as client:
            yield sdk_client.Connected(client)
