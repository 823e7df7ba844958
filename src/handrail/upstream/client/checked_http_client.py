"""An HTTP client that checks the host and address of every connection, and connects to the checked address."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

import httpcore2
import httpx2

from handrail.contract.errors import ToolError, UsageError
from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings
from handrail.contract.text.host_names import parse_host_address
from handrail.sandbox.network.egress_check import EgressCheck
from handrail.sandbox.network.trusted_authorities import load_trusted_ssl_context
from handrail.upstream.oauth_sign_in import SignInRequired

CONNECT_S = 30.0
IDLE_S = 4.0
"""How long in seconds an idle connection is kept; servers commonly keep theirs for five seconds."""
MOST_CONNECTIONS = 512
_POOL_LIMITS: dict[str, Any] = {
    "max_connections": MOST_CONNECTIONS,
    "max_keepalive_connections": 16,
    "keepalive_expiry": IDLE_S,
}


class _TcpStream(httpcore2.AsyncNetworkStream):
    """The part of a network stream that httpcore needs, over asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError as error:
            raise httpcore2.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ReadError(error.strerror or str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError as error:
            raise httpcore2.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.WriteError(error.strerror or str(error)) from error

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except ssl.SSLCertVerificationError as error:
            await self.aclose()
            raise httpcore2.ConnectError(f"its certificate cannot be trusted: {error.verify_message}") from error
        except (OSError, TimeoutError) as error:
            await self.aclose()
            raise httpcore2.ConnectError(str(error) or "no answer") from error
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "ssl_object":
            return self._writer.get_extra_info("ssl_object")
        if info == "is_readable":
            return self._reader.at_eof() or self._writer.is_closing()
        return None


class _EgressBackend(httpcore2.AsyncNetworkBackend):
    def __init__(self, egress: EgressCheck) -> None:
        self._egress = egress

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                connection = await self._egress.connect_to_checked_address(
                    await self._egress.authorize_and_resolve_host(parse_host_address(named))
                )
                try:
                    return _TcpStream(*await asyncio.open_connection(sock=connection))
                except BaseException:
                    connection.close()
                    raise
        except (ToolError, ValueError) as error:
            raise httpcore2.ConnectError(str(error)) from error
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(f"{host} does not answer") from error
        except OSError as error:
            raise httpcore2.ConnectError(error.strerror or str(error)) from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _ProxyBackend(httpcore2.AsyncNetworkBackend):
    """Connections to a proxy, which its operator has named and which needs no further permission."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                return _TcpStream(*await asyncio.open_connection(host, port))
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(f"the proxy {host}:{port} does not answer") from error
        except OSError as error:
            raise httpcore2.ConnectError(f"the proxy {host}:{port}: {error.strerror or error}") from error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _EgressTransport(httpx2.AsyncHTTPTransport):
    """A transport that checks each host, and reaches it directly or through the configured proxy."""

    def __init__(self, egress: EgressCheck, trust: ssl.SSLContext, route: OutboundConnectionSettings) -> None:
        super().__init__(verify=trust, trust_env=False)
        self._egress = egress
        self._route = route
        self._trust = trust
        self._proxied: dict[str, httpx2.AsyncHTTPTransport] = {}
        self._pool = httpcore2.AsyncConnectionPool(  # httpx has no option for a backend
            ssl_context=trust, network_backend=_EgressBackend(egress), **_POOL_LIMITS
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        proxy = self._route.find_proxy(url.scheme, url.host, port)
        if not proxy:
            return await super().handle_async_request(request)
        await self._check_host(url.host, port)
        return await self._transport_through(proxy).handle_async_request(request)

    async def _check_host(self, host: str, port: int) -> None:
        """Check a host that a proxy will reach. The proxy resolves its name, so only a literal address can be checked.

        :raises httpx2.ConnectError: if the host may not be reached
        """
        try:
            parsed = parse_host_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            if parsed.address is not None:
                await self._egress.authorize_and_resolve_host(parsed)
            elif (refused := self._egress.explain_refusal(parsed)) is not None:
                raise httpx2.ConnectError(refused)
        except (ToolError, ValueError) as error:
            raise httpx2.ConnectError(str(error)) from error

    def _transport_through(self, proxy: str) -> httpx2.AsyncHTTPTransport:
        found = self._proxied.get(proxy)
        if found is None:
            parts = urlsplit(proxy)
            auth = None
            if parts.username is not None:
                auth = (unquote(parts.username), unquote(parts.password or ""))
            found = self._proxied[proxy] = httpx2.AsyncHTTPTransport(verify=self._trust, trust_env=False)
            found._pool = httpcore2.AsyncHTTPProxy(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
                parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
                proxy_auth=auth,
                ssl_context=self._trust,
                proxy_ssl_context=self._trust if parts.scheme == "https" else None,
                network_backend=_ProxyBackend(),
                **_POOL_LIMITS,
            )
        return found

    async def aclose(self) -> None:
        await super().aclose()
        for transport in self._proxied.values():
            await transport.aclose()


def make_checked_http_client(
    egress: EgressCheck, auth: httpx2.Auth | None = None, route: OutboundConnectionSettings = DIRECT_ROUTE
) -> httpx2.AsyncClient:
    """Return an HTTP client for one server.

    It follows no redirects, uses no proxy but the configured one, keeps no cookies of other sites, and has no timeout for answers.

    :raises UsageError: if the route cannot be used as configured
    """
    if route.problem:
        raise UsageError(f"{route.problem}.")
    return httpx2.AsyncClient(
        transport=_EgressTransport(egress, load_trusted_ssl_context(route.ca_file), route),
        auth=auth,
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        trust_env=False,
        follow_redirects=False,
    )


def find_same_server_redirect(response: httpx2.Response) -> str | None:
    """Return the target of a redirect that keeps the method and the server; None for any other response.

    A redirect that only adds or removes a slash keeps the method, whatever its status.
    """
    onward = response.next_request
    if response.status_code not in (301, 302, 307, 308) or onward is None:
        return None
    before, after = response.request.url, keep_secure_scheme(response.request.url, onward.url)
    same = (before.scheme, before.host, before.port) == (after.scheme, after.host, after.port)
    is_kept = response.status_code in (307, 308) or before.path.rstrip("/") == after.path.rstrip("/")
    return str(after) if same and is_kept and not after.userinfo else None


def keep_secure_scheme(before: httpx2.URL, after: httpx2.URL) -> httpx2.URL:
    """Return an address with https that a server behind a proxy writes with http, if it names the host of the request."""
    if (
        (before.scheme, after.scheme) == ("https", "http")
        and before.host == after.host
        and after.port in (None, before.port)
    ):
        return after.copy_with(scheme="https", port=before.port)
    return after


def describe_http_error(error: Exception) -> str:
    """Return the text for an error of a connection."""
    if isinstance(error, httpx2.ProxyError):
        return f"the proxy refused the connection: {str(error)[:300]}"
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return f"the server cannot be reached: {str(error)[:300] or 'no answer'}{_hint_for(str(error))}"
    if isinstance(error, SignInRequired):
        return str(error)
    return f"the connection was lost: {str(error)[:300] or type(error).__name__}"


def _hint_for(text: str) -> str:
    """Return what an operator can do about a connection that failed."""
    if "certificate cannot be trusted" in text:
        return ". If your network has its own certificate authority, set ca_file under [network]"
    if "could not be resolved" in text and any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        return '. HTTPS_PROXY is set; to use it, set proxy = "environment" under [network]'
    return ""
