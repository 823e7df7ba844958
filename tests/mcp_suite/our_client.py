"""Handrail's client for the client scenarios: ``kernel.mcp.connect`` and calls through the kernel."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.mcp_suite import client as scenarios
from tests.mcp_suite.client import Server, answers_to_form

from handrail.contract.errors import ToolError
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.session_protocols import Session
from handrail.kernel.upstream_mcp_servers import ConnectedMcpServer
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.upstream.oauth_sign_in import SignInPrompt

CALLBACK = "http://localhost:3000/callback"
IDENTITY_DOCUMENT = "https://conformance-test.local/client-metadata.json"
"""What the suite expects as the address of the client's own metadata."""


class Agreeing:
    """A client whose user accepts the values that forms propose."""

    def supports(self, call_id: str, method: str, params: Mapping[str, Any]) -> bool:
        return method == "elicitation/create" and params.get("mode", "form") == "form"

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        return {
            key: {"action": "accept", "content": answers_to_form(ask.params["requestedSchema"])}
            for key, ask in requests.items()
        }

    def detach(self, call_id: str) -> None:
        return


class Connected:
    def __init__(self, server: ConnectedMcpServer, session: Session) -> None:
        self._server = server
        self._session = session

    async def tools(self) -> list[tuple[str, Mapping[str, Any]]]:
        off = self._server.tool_availability
        return [(item["name"], item["inputSchema"]) for item in self._server.listing.tools if item["name"] in off]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        given = {
            key: value for key, value in arguments.items() if value is not None
        }  # null is no boolean, a rule of ours
        result = await self._session.call(name, given)
        if not result.ok:
            raise ToolError(result.error_text or "")
        return result.data

    async def rest(self) -> None:
        for resource in self._server.listing.resources:
            await self._session.call("resource.read", {"uri": resource["uri"]})
        for prompt in self._server.listing.prompts:
            await self._session.call("prompt.get", {"name": prompt["name"]})


def _oauth(known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """How this client signs in, as a configuration has it, and the secrets that it names."""
    secrets: dict[str, str] = {}

    def secret(name: str, value: str) -> dict[str, str]:
        secrets[name] = value
        return {"secret": name}

    said: dict[str, Any] = {}
    if "client_id" in known:
        said["client_id"] = known["client_id"]
    if "client_secret" in known:
        said["client_secret"] = secret("CLIENT_SECRET", known["client_secret"])
    if "private_key_pem" in known:
        said |= {
            "grant": "client_credentials",
            "private_key": secret("PRIVATE_KEY", known["private_key_pem"]),
            "signing_algorithm": known.get("signing_algorithm", "ES256"),
        }
    elif "idp_id_token" in known:
        said |= {
            "grant": "identity_assertion",
            "identity_exchange": known["idp_token_endpoint"],
            "identity_client_id": known["idp_client_id"],
            "identity_token": secret("IDENTITY_TOKEN", known["idp_id_token"]),
        }
    elif os.environ["MCP_CONFORMANCE_SCENARIO"] == "auth/client-credentials-basic":
        said["grant"] = "client_credentials"
    else:
        said["client_metadata_url"] = IDENTITY_DOCUMENT
    return said, secrets


async def _visited(url: str) -> str:
    from tests.mcp_suite.sdk_client import signed_in

    return f"{CALLBACK}?{urlencode(await signed_in(url))}"


@asynccontextmanager
async def connect(url: str) -> AsyncGenerator[Server]:
    oauth, secrets = _oauth(scenarios.context())
    more: dict[str, Any] = {"oauth": oauth} if os.environ["MCP_CONFORMANCE_SCENARIO"].startswith("auth/") else {}
    with tempfile.TemporaryDirectory(prefix="handrail-conformance-") as folder:
        async with (
            temporary_kernel(Path(folder), rules=["allow *"], secrets=secrets) as kernel,
            kernel.mcp_servers.connect(
                "server",
                url=url,
                prompt=SignInPrompt(CALLBACK, _visited),
                prefix="",
                hosts=["localhost:*", "127.0.0.1:*", "[::1]:*"],
                elicitation=True,
                **more,
            ) as server,
        ):
            await server.approve_tool_definitions()
            session = await kernel.session(client=Agreeing())
            try:
                yield Connected(server, session)
            finally:
                await session.close()
