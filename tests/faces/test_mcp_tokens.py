"""Access tokens of an authorization server, at a server of ours: an authorization server on loopback, with keys of its own."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import jwt
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from handrail.faces.mcp.house import Serving
from handrail.faces.mcp.http import Listening, _Listener, served  # pyright: ignore[reportPrivateUsage]
from handrail.faces.mcp.tokens import AuthServerTokens, check_address
from handrail.testing.kernels import temporary_kernel

KEY, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
RESOURCE = "https://tools.example.org/mcp"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Authority:
    """An authorization server, as far as it publishes what it is."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.keys = [self.public(KEY, "one")]
        self.fetched = 0
        self.said: dict[str, Any] = {"issuer": issuer, "jwks_uri": f"{issuer}/keys"}

    @staticmethod
    def public(key: ec.EllipticCurvePrivateKey, name: str) -> dict[str, Any]:
        point = key.public_key().public_numbers()
        x, y = (base64.urlsafe_b64encode(one.to_bytes(32, "big")).rstrip(b"=").decode() for one in (point.x, point.y))
        return {"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": name, "alg": "ES256"}

    def signed_with_what_is_public(self) -> str:
        """By a method where whoever can check can also sign; the key is the published one."""
        _, payload, _ = self.token().split(".")
        head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"one"}').rstrip(b"=").decode()
        mark = hmac.digest(json.dumps(self.keys[0]).encode(), f"{head}.{payload}".encode(), "sha256")
        return f"{head}.{payload}.{base64.urlsafe_b64encode(mark).rstrip(b'=').decode()}"

    def token(self, *, key: Any = KEY, kid: str | None = "one", algorithm: str = "ES256", **changed: Any) -> str:
        claims = {
            "iss": self.issuer,
            "aud": RESOURCE,
            "sub": "ann",
            "client_id": "editor",
            "exp": int(time.time()) + 600,
            "scope": "tools more",
        }
        given = {name: value for name, value in {**claims, **changed}.items() if value is not None}
        return jwt.encode(given, key, algorithm=algorithm, headers={"kid": kid} if kid is not None else None)


@asynccontextmanager
async def authority() -> AsyncGenerator[Authority]:
    port = free_port()
    one = Authority(f"http://127.0.0.1:{port}")

    async def about(_request: Request) -> Response:
        return JSONResponse(one.said)

    async def keys(_request: Request) -> Response:
        one.fetched += 1
        return JSONResponse({"keys": one.keys})

    app = Starlette(
        routes=[Route("/.well-known/oauth-authorization-server", about), Route("/keys", keys)],
    )
    async with listening(app, port):
        yield one


@asynccontextmanager
async def listening(app: Starlette, port: int) -> AsyncGenerator[None]:
    server = _Listener(uvicorn.Config(app, port=port, log_config=None, lifespan="off"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield
    finally:
        server.should_exit = True
        await running


@pytest.mark.proves("F-03")
async def test_only_a_token_made_here_by_that_authority_and_still_good_is_taken() -> None:
    async with authority() as one:
        verifier = AuthServerTokens(one.issuer, RESOURCE)
        good = await verifier.verify_token(one.token())
        assert good is not None and (good.client_id, good.subject, good.scopes) == ("editor", "ann", ["tools", "more"])
        assert await verifier.verify_token(one.token(aud=["https://a.example.org", RESOURCE])) is not None
        bad = {
            "expired": one.token(exp=int(time.time()) - 3600),
            "without an end": one.token(exp=None),
            "for another server": one.token(aud="https://other.example.org/mcp"),
            "for nobody": one.token(aud=None),
            "by another authority": one.token(iss="https://evil.example.org"),
            "not yet good": one.token(nbf=int(time.time()) + 3600),
            "signed by somebody else": one.token(key=OTHER),
            "signed by nobody": one.token(key=None, algorithm="none"),
            "signed with what is public": one.signed_with_what_is_public(),
            "by a key that is not there": one.token(kid="two"),
            "no client": one.token(sub=None, client_id=None),
            "no token": "x.y.z",
            "too long": one.token(sub="a" * 20_000),
        }
        for why, token in bad.items():
            assert await verifier.verify_token(token) is None, why
        assert one.fetched == 1, "an unknown key is not asked for again at once"


async def test_an_authority_that_calls_itself_something_else_is_not_believed() -> None:
    async with authority() as one:
        one.said["issuer"] = "https://evil.example.org"
        assert await AuthServerTokens(one.issuer, RESOURCE).verify_token(one.token()) is None
        one.said |= {"issuer": one.issuer, "jwks_uri": "http://keys.example.org/"}
        assert await AuthServerTokens(one.issuer, RESOURCE).verify_token(one.token()) is None
        assert one.fetched == 0


async def test_an_authority_that_is_not_there_lets_nobody_in() -> None:
    issuer = f"http://127.0.0.1:{free_port()}"
    assert await AuthServerTokens(issuer, RESOURCE).verify_token(Authority(issuer).token()) is None


@pytest.mark.proves("F-03")
async def test_clients_are_told_where_tokens_are_to_be_had_and_scopes_are_asked_for(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(authority())
        kernel = await stack.enter_async_context(temporary_kernel(tmp_path))
        where = Listening("127.0.0.1", 0, public_url=RESOURCE, auth_server=one.issuer, scopes=("tools",))
        url, _ = await stack.enter_async_context(served(kernel, Serving(), where))
        http = await stack.enter_async_context(
            httpx2.AsyncClient(headers={"Accept": "application/json, text/event-stream"})
        )
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        refused = await http.post(url, json=ping)
        assert refused.status_code == 401
        named = "https://tools.example.org/.well-known/oauth-protected-resource/mcp"
        assert f'resource_metadata="{named}"' in refused.headers["www-authenticate"]
        metadata = (await http.get(url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp"))).json()
        assert metadata["resource"] == RESOURCE and metadata["scopes_supported"] == ["tools"]
        assert [server.rstrip("/") for server in metadata["authorization_servers"]] == [one.issuer]
        narrow = await http.post(url, json=ping, headers={"Authorization": f"Bearer {one.token(scope='other')}"})
        assert narrow.status_code == 403
        through = await http.post(url, json=ping, headers={"Authorization": f"Bearer {one.token()}"})
        assert through.status_code == 400, "it may come in, and has to say hello first"


@pytest.mark.parametrize(
    "url",
    ["http://auth.example.org", "ftp://x", "https://", "https://u:p@auth.example.org", "https://a.example.org#b", "x"],
)
def test_keys_are_fetched_over_what_nobody_else_can_change(url: str) -> None:
    from handrail.contract.errors import UsageError

    with pytest.raises(UsageError, match="https://"):
        check_address(url, "--auth-server")
