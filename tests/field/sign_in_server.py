"""An authorization server with strict checks of clients, redirect addresses and refresh tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from tests.upstream.scripted_mcp_servers import HttpResponseWriter, ReceivedHttpRequest


class StrictSignInServer:
    """An MCP server with its own authorization server.

    :ivar clients: the redirect addresses of each registered client
    :ivar grants: the grants of all token requests that succeeded
    :ivar refused: the errors of those that did not
    :ivar odd: changes of its answers, by the last part of their path: each returns the body, and the status if it is not 200
    :ivar asked: the forms of all token requests and the addresses of all sign-ins
    :ivar awaited: the number of requests without a valid token that are answered together; 0 for each at once
    """

    def __init__(self) -> None:
        self.clients: dict[str, list[str]] = {}
        self.grants: list[str] = []
        self.refused: list[str] = []
        self.awaited = 0
        self.unknown_client: tuple[int, dict[str, str]] = (401, {"error": "invalid_client"})
        self.redirect_error = ""
        self.odd: dict[str, Callable[[dict[str, Any]], object]] = {}
        self.asked: list[dict[str, str]] = []
        self.registered: list[dict[str, Any]] = []
        self.challenge = ""
        self.metadata_places = ["/.well-known/oauth-authorization-server"]
        self.issuer_path = ""
        self.any_redirect = False
        self.authorizations: list[str] = []
        self.required_scope = ""
        self.granted = ""
        self._made = 0
        self._token = ""
        self._refresh = ""
        self._used: set[str] = set()
        self._waiting = 0
        self._together = asyncio.Event()

    def expire_token(self) -> None:
        """Refuse the access token from now on; the refresh token stays valid."""
        self._token = ""

    def drop_clients(self) -> None:
        """Forget all registrations, like a server that was installed again."""
        self.clients.clear()
        self._token = ""

    async def __call__(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
        answering = _OddAnswers(answering, self.odd.get(urlsplit(asked.path).path.rpartition("/")[2]))
        parts = urlsplit(asked.path)
        origin = f"http://{asked.headers['host']}"
        if parts.path == "/mcp":
            return await self._answer_mcp(asked, answering, origin)
        if parts.path == "/.well-known/oauth-protected-resource":
            await say(answering, {"resource": f"{origin}/mcp", "authorization_servers": [origin + self.issuer_path]})
        elif parts.path in self.metadata_places:
            more = {"response_types_supported": ["code"], "code_challenge_methods_supported": ["S256"]}
            places = {f"{name}_endpoint": f"{origin}/{name}" for name in ("authorization", "token", "registration")}
            await say(answering, {"issuer": origin + self.issuer_path, **places, **more})
        elif parts.path == "/registration":
            self._made += 1
            self.registered.append(asked.body)
            self.clients[f"c-{self._made}"] = list(asked.body["redirect_uris"])
            await say(answering, {**asked.body, "client_id": f"c-{self._made}"}, 201)
        elif parts.path == "/authorization":
            await self._authorize(parse_qs(parts.query), answering)
        elif parts.path == "/token":
            self.authorizations.append(asked.headers.get("authorization", ""))
            await self._give_token({key: one[0] for key, one in parse_qs(asked.body).items()}, answering)
        else:
            await answering.send_response(404)
        return True

    async def _answer_mcp(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter, origin: str) -> bool:
        if self._token and asked.headers.get("authorization") == f"Bearer {self._token}":
            if self.required_scope in self.granted.split() or not self.required_scope:
                return False
            fault = f'Bearer error="insufficient_scope", scope="{self.required_scope}"'
            await answering.send_response(403, www_authenticate=fault)
            return True
        if self.awaited:
            self._waiting += 1
            if self._waiting >= self.awaited:
                self.awaited = 0
                self._together.set()
            await self._together.wait()
        place = f'Bearer resource_metadata="{origin}/.well-known/oauth-protected-resource"'
        await answering.send_response(401, www_authenticate=self.challenge or place)
        return True

    async def _authorize(self, asked: dict[str, list[str]], answering: HttpResponseWriter) -> None:
        client, redirect = asked["client_id"][0], asked["redirect_uri"][0]
        self.asked.append({key: one[0] for key, one in asked.items()})
        if asked["state"][0] != "registration-check":
            self.granted = asked.get("scope", [""])[0]
        if client not in self.clients and not self.redirect_error:
            await say(answering, self.unknown_client[1], self.unknown_client[0])
        elif client in self.clients and redirect not in self.clients[client] and not self.any_redirect:
            await say(answering, {"error": "invalid_request", "error_description": "redirect_uri mismatch"}, 400)
        else:
            fault = f"error={self.redirect_error}" if client not in self.clients else f"code=code-of-{client}"
            await answering.send_response(302, location=f"{redirect}?{fault}&state={asked['state'][0]}")

    async def _give_token(self, form: dict[str, str], answering: HttpResponseWriter) -> None:
        fault: tuple[int, dict[str, str]] | None = None
        self.asked.append(form)
        if form["client_id"] not in self.clients:
            fault = self.unknown_client
        elif form["grant_type"] == "refresh_token" and form["refresh_token"] != self._refresh:
            fault = (400, {"error": "invalid_grant"})
            if form["refresh_token"] in self._used:  # a stolen token: nothing of this sign-in is valid any more
                self._token = self._refresh = ""
        if fault is not None:
            self.refused.append(fault[1]["error"])
            await say(answering, fault[1], fault[0])
            return
        self._used.add(self._refresh)
        self.grants.append(form["grant_type"])
        number = len(self.grants)
        self._token, self._refresh = f"token-{number}", f"refresh-{number}"
        token = {
            "access_token": self._token,
            "token_type": "Bearer",
            "refresh_token": self._refresh,
            "expires_in": 3600,
        }
        await say(answering, token)


class _OddAnswers(HttpResponseWriter):
    """A writer that changes the answers with JSON."""

    def __init__(self, inner: HttpResponseWriter, change: Callable[[dict[str, Any]], object] | None) -> None:
        super().__init__(inner._writer)  # pyright: ignore[reportPrivateUsage]
        self._change = change

    async def send_response(
        self, status: int, body: bytes = b"", kind: str = "application/json", **headers: str
    ) -> None:
        if self._change is not None and body:
            changed = self._change(json.loads(body))
            if isinstance(changed, tuple):
                status, changed = cast("tuple[int, object]", changed)
            body = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        await super().send_response(status, body, kind, **headers)


async def say(answering: HttpResponseWriter, what: dict[str, Any], status: int = 200) -> None:
    await answering.send_response(status, json.dumps(what).encode())


async def request_page(address: str) -> tuple[int, dict[str, str]]:
    """Request an address, and return the status and the header fields of the answer."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"GET {parts.path}?{parts.query} HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode())
    head = (await reader.read()).split(b"\r\n\r\n")[0].decode().split("\r\n")
    writer.close()
    fields = dict(line.split(": ", 1) for line in head[1:])
    return int(head[0].split()[1]), fields


class Browser:
    """A browser whose user agrees at once.

    :ivar shown: the addresses that it was sent to
    :ivar returned: the addresses that it was sent back to
    """

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.returned: list[str] = []
        self._visits: set[asyncio.Task[None]] = set()

    def open(self, address: str) -> None:
        """Visit an address and follow its redirect, in the background."""
        self._visits.add(asyncio.create_task(self._follow(address)))

    async def _follow(self, address: str) -> None:
        status, _ = await request_page(await self.agree(address))
        assert status == 200

    async def agree(self, address: str) -> str:
        """Visit an address, and return where it redirects to."""
        self.shown.append(address)
        status, fields = await request_page(address)
        assert status == 302, f"the user is stuck at a page with status {status}"
        self.returned.append(fields["location"])
        return fields["location"]
