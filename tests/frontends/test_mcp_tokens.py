"""Access tokens at our server, from a loopback authorization server with its own keys."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx2
import jwt
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from handrail.config.mcp_settings import McpServeSettings
from handrail.contract.errors import HandrailError
from handrail.frontends.mcp.client_manager import McpFrontendSettings
from handrail.frontends.mcp.http import token_verifiers
from handrail.frontends.mcp.http.http_server import HttpFrontendSettings, _UvicornServer, open_http_server  # pyright: ignore[reportPrivateUsage]
from handrail.frontends.mcp.http.token_verifiers import (
    IntrospectionSettings,
    IntrospectionTokenVerifier,
    JwtTokenVerifier,
    TokenCheckFailed,
    require_secure_url,
)
from handrail.runtime.secret_store import SecretStore
from handrail.testing.scripted_kernel import temporary_kernel

KEY, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
RESOURCE = "https://tools.example.org/mcp"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class AuthorizationServer:
    """An authorization server, as far as it publishes what it is."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.keys = [self.public(KEY, "one")]
        self.fetched = 0
        self.said: dict[str, Any] = {
            "issuer": issuer,
            "jwks_uri": f"{issuer}/keys",
            "introspection_endpoint": f"{issuer}/ask",
        }
        self.asked: list[tuple[str, dict[str, str]]] = []
        """What it was asked about, and by whom."""
        self.active: Any = self.claims(active=True)
        """What it answers; bytes as they are."""
        self.status = 200
        self.answers = asyncio.Event()
        self.answers.set()

    def claims(self, **changed: Any) -> dict[str, Any]:
        """The claims of a valid opaque token, without those that are None."""
        said = {"iss": self.issuer, "aud": RESOURCE, "sub": "ann", "client_id": "editor", "scope": "tools more"}
        end = {"exp": int(time.time()) + 600, "token_type": "Bearer"}
        return {name: value for name, value in {**said, **end, **changed}.items() if value is not None}

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
async def authority() -> AsyncGenerator[AuthorizationServer]:
    port = free_port()
    one = AuthorizationServer(f"http://127.0.0.1:{port}")

    async def about(_request: Request) -> Response:
        return JSONResponse(one.said)

    async def keys(_request: Request) -> Response:
        one.fetched += 1
        return JSONResponse({"keys": one.keys})

    async def ask(request: Request) -> Response:
        form = {name: str(value) for name, value in parse_qsl((await request.body()).decode())}
        one.asked.append((request.headers.get("authorization", ""), form))
        await one.answers.wait()
        if isinstance(one.active, bytes):
            return Response(one.active, one.status, media_type="application/json")
        return JSONResponse(one.active, one.status, headers={"location": f"{one.issuer}/elsewhere"})

    routes = [Route("/.well-known/oauth-authorization-server", about), Route("/keys", keys)]
    app = Starlette(routes=[*routes, Route("/ask", ask, methods=["POST"])])
    async with listening(app, port):
        yield one


@asynccontextmanager
async def listening(app: Starlette, port: int) -> AsyncGenerator[None]:
    server = _UvicornServer(uvicorn.Config(app, port=port, log_config=None, lifespan="off"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await running


@pytest.mark.proves("F-03")
async def test_only_a_valid_token_of_the_authority_for_this_resource_is_accepted() -> None:
    async with authority() as one:
        verifier = JwtTokenVerifier(one.issuer, RESOURCE)
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


async def test_an_authority_with_a_different_issuer_is_not_trusted() -> None:
    async with authority() as one:
        one.said["issuer"] = "https://evil.example.org"
        assert await JwtTokenVerifier(one.issuer, RESOURCE).verify_token(one.token()) is None
        one.said |= {"issuer": one.issuer, "jwks_uri": "http://keys.example.org/"}
        assert await JwtTokenVerifier(one.issuer, RESOURCE).verify_token(one.token()) is None
        assert one.fetched == 0


async def test_a_token_is_refused_when_its_authority_is_unreachable() -> None:
    issuer = f"http://127.0.0.1:{free_port()}"
    assert await JwtTokenVerifier(issuer, RESOURCE).verify_token(AuthorizationServer(issuer).token()) is None


@pytest.mark.proves("F-03")
async def test_clients_learn_the_authority_for_tokens_and_missing_scopes_are_refused(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(authority())
        kernel = await stack.enter_async_context(temporary_kernel(tmp_path))
        where = HttpFrontendSettings("127.0.0.1", 0, public_url=RESOURCE, auth_server=one.issuer, scopes=("tools",))
        url, _ = await stack.enter_async_context(open_http_server(kernel, McpFrontendSettings(), where))
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


# ── opaque ones, which their authority is asked about ────────────────────────────────────────────

HOW = IntrospectionSettings("handrail", "s:cret/1")


@pytest.mark.proves("F-03")
async def test_an_opaque_token_is_valid_only_as_its_authority_confirms() -> None:
    async with authority() as one:
        for method, who, more in (
            ("basic", f"Basic {base64.b64encode(b'handrail:s%3Acret%2F1').decode()}", {}),
            ("post", "", {"client_id": "handrail", "client_secret": "s:cret/1"}),
        ):
            verifier = IntrospectionTokenVerifier(one.issuer, RESOURCE, replace(HOW, method=method))
            good = await verifier.verify_token("opaque-1")
            assert good is not None and (good.client_id, good.subject) == ("editor", "ann")
            assert good.scopes == ["tools", "more"] and good.resource == RESOURCE and good.token == ""
            assert one.asked[-1] == (who, {"token": "opaque-1", "token_type_hint": "access_token", **more})
        one.active = one.claims(active=True, aud=["https://a.example.org", f"{RESOURCE}/"], iss=None, exp=None)
        assert await verifier.verify_token("opaque-2") is not None
        bad: dict[str, dict[str, Any]] = {
            "not active": {"active": False},
            "expired": {"exp": int(time.time()) - 1},
            "an end that is none": {"exp": "soon"},
            "not yet good": {"nbf": int(time.time()) + 3600},
            "for another server": {"aud": "https://other.example.org/mcp"},
            "for nobody": {"aud": None},
            "by another authority": {"iss": "https://evil.example.org"},
            "to be proved by a key": {"cnf": {"jkt": "x"}},
            "of another kind": {"token_type": "DPoP"},
            "no client": {"client_id": None, "sub": None},
        }
        for why, changed in bad.items():
            one.active = one.claims(**{"active": True, **changed})
            assert await verifier.verify_token(f"opaque {why}") is None, why
        asked = len(one.asked)
        for token in ("", "x" * 20_000, "n\nl", "ümlaut"):
            assert await verifier.verify_token(token) is None
        assert len(one.asked) == asked, "what can be no token is not asked about"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (200, b"no json"),
        (200, b"[]"),
        (200, b'{"active": "true"}'),
        (200, b'{"sub": "ann"}'),
        (200, b'{"active": true, "pad": "' + b"x" * 1_100_000 + b'"}'),
        (307, {"active": True}),
        (401, {"error": "invalid_client"}),
        (500, b""),
    ],
)
async def test_an_invalid_answer_of_the_authority_admits_no_client_and_is_not_cached(status: int, said: Any) -> None:
    async with authority() as one:
        verifier = IntrospectionTokenVerifier(one.issuer, RESOURCE, HOW)
        good, one.active, one.status = one.active, said, status
        with pytest.raises(TokenCheckFailed):
            await verifier.verify_token("opaque")
        one.active, one.status = good, 200
        assert await verifier.verify_token("opaque") is not None


async def test_an_opaque_token_is_not_accepted_when_its_authority_cannot_be_asked() -> None:
    issuer = f"http://127.0.0.1:{free_port()}"
    for url in ("", f"{issuer}/ask"):
        with pytest.raises(TokenCheckFailed):
            await IntrospectionTokenVerifier(issuer, RESOURCE, replace(HOW, url=url)).verify_token("opaque")


async def test_concurrent_checks_of_one_token_send_one_introspection_and_cache_the_answer() -> None:
    async with authority() as one:
        verifier = IntrospectionTokenVerifier(one.issuer, RESOURCE, HOW)
        one.answers.clear()
        coming = [asyncio.ensure_future(verifier.verify_token("opaque")) for _ in range(20)]
        while not one.asked:
            await asyncio.sleep(0)
        coming[0].cancel()  # whoever leaves takes nobody's answer away
        one.answers.set()
        found = await asyncio.gather(*coming, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError) and all(one is not None for one in found[1:])
        one.active = {"active": False}
        assert await verifier.verify_token("opaque") is not None and len(one.asked) == 1
        assert await verifier.verify_token("other") is None
        one.active = one.claims(active=True)
        assert await verifier.verify_token("other") is None and len(one.asked) == 2
        anew = IntrospectionTokenVerifier(one.issuer, RESOURCE, replace(HOW, cache_s=0))
        assert await anew.verify_token("other") is not None and await anew.verify_token("other") is not None
        assert len(one.asked) == 4


async def test_token_queries_and_cached_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_verifiers, "MAX_CACHED_TOKENS", 2)
    monkeypatch.setattr(token_verifiers, "MAX_INTROSPECTIONS", 2)
    async with authority() as one:
        verifier = IntrospectionTokenVerifier(one.issuer, RESOURCE, HOW)
        one.answers.clear()
        waiting = [asyncio.ensure_future(verifier.verify_token(f"opaque-{number}")) for number in range(2)]
        while len(one.asked) < 2:
            await asyncio.sleep(0)
        with pytest.raises(TokenCheckFailed, match="Too many queries"):
            await verifier.verify_token("opaque-2")
        one.answers.set()
        await asyncio.gather(*waiting)
        await verifier.verify_token("opaque-2")
        asked = len(one.asked)
        await verifier.verify_token("opaque-0")
        assert len(one.asked) == asked + 1, "the oldest answer is forgotten"


@pytest.mark.proves("F-03")
async def test_a_server_accepts_opaque_tokens_and_reports_when_it_cannot_check_one(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(authority())
        kernel = await stack.enter_async_context(temporary_kernel(tmp_path))
        own = McpServeSettings.model_validate(
            {
                "auth_server": one.issuer,
                "public_url": RESOURCE,
                "scopes": ["tools"],
                "tokens": {"carol": {"secret": "CAROL"}},
                "introspection": {"client_id": "handrail", "client_secret": {"secret": "ASK"}},
            }
        )
        secrets = SecretStore({"CAROL": "carol-0123456789abcdef", "ASK": "sesame"})
        where = HttpFrontendSettings.from_options("127.0.0.1:0", configured=own, secrets=secrets)
        assert "sesame" not in repr(where) and "carol-0123456789abcdef" not in repr(where)
        url, _ = await stack.enter_async_context(open_http_server(kernel, McpFrontendSettings(), where))
        http = await stack.enter_async_context(
            httpx2.AsyncClient(headers={"Accept": "application/json, text/event-stream"})
        )

        async def pinged(token: str) -> httpx2.Response:
            ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            return await http.post(url, json=ping, headers={"Authorization": f"Bearer {token}"})

        assert (await pinged("opaque-1")).status_code == 400, "it may come in, and has to say hello first"
        assert (await pinged("carol-0123456789abcdef")).status_code == 400
        assert len(one.asked) == 1, "nobody else is told of the operator's own tokens"
        one.active = one.claims(active=True, scope="more")
        assert (await pinged("opaque-2")).status_code == 403
        one.active = {"active": False}
        assert (await pinged("opaque-3")).status_code == 401
        assert (await pinged(one.token())).status_code == 401, "where it is asked, a signature is not enough"
        one.status = 503
        unsure = await pinged("opaque-4")
        assert unsure.status_code == 503 and unsure.headers["retry-after"] and "www-authenticate" not in unsure.headers
        assert unsure.json()["error"] == "temporarily_unavailable"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"tokens": {"a": {"secret": "NONE"}}}, "NONE"),
        ({"tokens": {"a": {"secret": "SHORT"}}}, "16 characters"),
        ({"tokens": {"a": {"secret": "LONG"}, "b": {"secret": "LONG"}}}, "differ from all others"),
        ({"introspection": {"client_id": "h", "client_secret": {"secret": "LONG"}}}, "auth_server"),
        (
            {
                "auth_server": "https://auth.example.org",
                "introspection": {"client_id": "h", "client_secret": {"secret": "NONE"}},
            },
            "NONE",
        ),
        (
            {
                "auth_server": "https://auth.example.org",
                "introspection": {"client_id": "h", "client_secret": {"secret": "LONG"}, "url": "http://a.example.org"},
            },
            "https://",
        ),
    ],
)
def test_an_unsafe_token_configuration_is_refused(own: dict[str, Any], said: str) -> None:
    secrets = SecretStore({"SHORT": "x" * 15, "LONG": "x" * 16}, {"NONE": "the variable N is not set; set it"})
    with pytest.raises(HandrailError, match=said) as caught:
        HttpFrontendSettings.from_options(
            "127.0.0.1:0", configured=McpServeSettings.model_validate(own), secrets=secrets
        )
    assert "xxx" not in str(caught.value)


def test_configured_tokens_permit_a_public_address() -> None:
    own = McpServeSettings.model_validate({"tokens": {"a": {"secret": "A"}}, "public_url": RESOURCE})
    found = HttpFrontendSettings.from_options("0.0.0.0:0", configured=own, secrets=SecretStore({"A": "x" * 16}))
    assert found.tokens == {"x" * 16: "a"} and found.public_url == RESOURCE


@pytest.mark.parametrize(
    "url",
    ["http://auth.example.org", "ftp://x", "https://", "https://u:p@auth.example.org", "https://a.example.org#b", "x"],
)
def test_keys_are_fetched_only_over_a_secure_url(url: str) -> None:
    from handrail.contract.errors import UsageError

    with pytest.raises(UsageError, match="https://"):
        require_secure_url(url, "--auth-server")
