"""The connected clients: each one's session, opened when first needed and closed when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import principal_components
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from handrail.contract.session_protocols import ClientInfo
from handrail.frontends.mcp.client_call import McpClientCall, find_missing_capability
from handrail.frontends.mcp.client_resources import CallOutputResources, SkillPrompts
from handrail.frontends.mcp.connected_client import FORM_METHOD, ConnectedMcpClient
from handrail.frontends.mcp.tool_listing import McpFrontendSettings

if TYPE_CHECKING:
    from mcp.server.connection import Connection
    from mcp.server.context import ServerRequestContext
    from mcp.server.session import ServerSession

    from handrail.frontends.mcp.client_messages import EarlyClient
    from handrail.kernel.kernel_interface import Kernel


# The listings that a client received, and the notifications to it when they change.

MAX_SUBSCRIPTIONS = 1_000
"""Maximum number of resources that one client can subscribe to."""


class McpClientState:
    """One client with its listings, outputs, skills and subscriptions.

    It compares each listing with the one last sent, and notifies the client of changes.

    :ivar is_disconnected: whether the connection has ended, so that the session closes when its calls end
    :ivar log_level: the lowest log level that a client of a handshake version gets, as an index into the list of levels
    """

    def __init__(
        self, kernel: Kernel, spawn: Callable[[Coroutine[Any, Any, Any]], None], client: ConnectedMcpClient
    ) -> None:
        """:param spawn: runs a coroutine in a task that ends with the server"""
        self.client = client
        self.is_disconnected = False
        self.log_level = 1
        self.outputs = CallOutputResources(kernel, client)
        self.skills = SkillPrompts(kernel, client)
        self.subscription_counts: dict[str, int] = {}
        """Resource URI to the number of its subscriptions."""
        self._kernel = kernel
        self._spawn = spawn
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus, max_subscriptions=64)
        self.listener_count = 0
        self._server_session: ServerSession | None = None
        """The SDK session of a client of a handshake version."""
        self._current_listings: dict[str, Callable[[], Sequence[object]]] = {}
        self._sent_listings: dict[str, Sequence[object]] = {}
        self._check_scheduled = False
        self._last_mark: tuple[object, int, int] | None = None
        client.on_listing_changed = self.schedule_change_check
        client.on_resource_updated = lambda uri: spawn(self._notify_resource_updated(uri))

    @property
    def has_no_listeners(self) -> bool:
        """Whether the client has no open stream of change notifications."""
        return not self.listener_count

    def attach_sdk_session(self, client: ServerSession) -> None:
        """Use this SDK session for notifications to a client of a handshake version."""
        self._server_session = client

    def end_subscriptions(self) -> None:
        """End the subscriptions."""
        self.listen.close()

    def watch_listing_changes(self, what: str, shown: Callable[[], Sequence[object]]) -> None:
        """Notify the client from now on when the tools, resources or prompts in this listing change.

        :param what: ``tools``, ``resources`` or ``prompts``
        :param shown: returns the current listing
        """
        self._current_listings[what] = shown
        self._sent_listings[what] = shown()

    def add_subscription(self, uri: str) -> bool:
        """Add a subscription, and return whether it is the first for this resource.

        :raises MCPError: if the client has too many subscriptions
        """
        if uri not in self.subscription_counts and len(self.subscription_counts) >= MAX_SUBSCRIPTIONS:
            text = f"Too many resource subscriptions. The limit is {MAX_SUBSCRIPTIONS:,}. Unsubscribe from one first."
            raise MCPError(INVALID_PARAMS, text)
        self.subscription_counts[uri] = self.subscription_counts.get(uri, 0) + 1
        return self.subscription_counts[uri] == 1

    def remove_subscription(self, uri: str) -> bool:
        """Remove a subscription, and return whether it was the last for this resource."""
        left = self.subscription_counts.get(uri, 0) - 1
        if left > 0:
            self.subscription_counts[uri] = left
            return False
        return self.subscription_counts.pop(uri, None) is not None

    def detect_possible_listing_change(self) -> bool:
        """Return whether a listing may have changed since the last check.

        The check is cheap because it runs after each call.
        """
        now = (self._kernel.generation, self.outputs.change_count, len(self.client.session.active_tools))
        before, self._last_mark = self._last_mark, now
        return before is None or before[0] is not now[0] or before[1:] != now[1:]

    def schedule_change_check(self) -> None:
        """Schedule a comparison of the listings."""
        if not self._check_scheduled and self._current_listings:
            self._check_scheduled = True
            self._spawn(self.send_listing_change_notifications())

    async def send_listing_change_notifications(self) -> None:
        """Notify the client of each listing that has changed."""
        self._check_scheduled = False
        for what, shown in self._current_listings.items():
            if (now := shown()) != self._sent_listings[what]:
                self._sent_listings[what] = now
                await self._notify_list_changed(what)

    async def _notify_list_changed(self, what: str) -> None:
        # The stateless version uses subscriptions for this, the handshake versions use notifications.
        client: Any = self._server_session
        if what == "tools":
            await self._bus.publish(ToolsListChanged())
            await (client.send_tool_list_changed() if client is not None else _do_nothing())
        elif what == "prompts":
            await self._bus.publish(PromptsListChanged())
            await (client.send_prompt_list_changed() if client is not None else _do_nothing())
        else:
            await self._bus.publish(ResourcesListChanged())
            await (client.send_resource_list_changed() if client is not None else _do_nothing())

    async def _notify_resource_updated(self, uri: str) -> None:
        await self._bus.publish(ResourceUpdated(uri))
        if self._server_session is not None and uri in self.subscription_counts:
            await self._server_session.send_resource_updated(uri)


async def _do_nothing() -> None:
    return None


CONNECTION_KEY = "handrail.connection"
"""The key of the connection in the state of an HTTP request."""
_PROXY_HEADERS = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "x-request-id",
)
"""Header fields that proxies add."""
_CLIENT_KEY = "handrail"
"""The key of the client in the state of a connection."""


class _AnonymousClient:
    """The identity of a client that cannot be recognized in a further request."""


class McpClientManager:
    """The clients of one server, with their sessions and their held calls."""

    def __init__(self, kernel: Kernel, settings: McpFrontendSettings, *, over_http: bool = False) -> None:
        self.kernel = kernel
        self.settings = settings
        self._over_http = over_http
        """Over HTTP, several clients may come without credentials. Over stdio there is one client."""
        self._stateless_clients: dict[tuple[Any, bool], McpClientState] = {}
        """The clients of the stateless version, by their identity (:meth:`_identify_client`) and whether they answer forms."""
        self._last_used: dict[tuple[Any, bool], float] = {}
        self._clients: set[McpClientState] = set()
        self._clients_by_connection: dict[str, McpClientState] = {}
        """The HTTP clients of handshake versions, by connection ID."""
        self.early_client: EarlyClient | None = None
        """The client of stdio, if it made calls before the server was loaded."""
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held_calls: dict[str, tuple[ConnectedMcpClient, asyncio.TimerHandle]] = {}
        self._closed = False

    @property
    def clients(self) -> frozenset[McpClientState]:
        """The connected clients."""
        return frozenset(self._clients)

    def has_running_calls(self, session_id: str) -> bool:
        """Return whether the client of a connection has a running call.

        :param session_id: the protocol's ID of the connection
        """
        state = self._clients_by_connection.get(session_id)
        return state is not None and not state.client.is_idle

    async def aclose(self) -> None:
        """Close every session and cancel the running tasks."""
        self._closed = True
        for _, timer in self._held_calls.values():
            timer.cancel()
        await asyncio.gather(*(self.stop_and_close_client(state) for state in tuple(self._clients)))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn_server_task(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` in a task that is cancelled when the server ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── the client of a request ──────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def acquire_request_client(
        self, context: ServerRequestContext[Any], state: str | None = None
    ) -> AsyncGenerator[McpClientState]:
        """Yield the client of a request, and count it as busy meanwhile.

        :param state: the client's state token, which identifies a client without credentials
        """
        visit = self._client_of_state(context, state) or await self._find_client(context)
        visit.client.active_requests += 1
        try:
            yield visit
        finally:
            visit.client.active_requests -= 1
            if visit.is_disconnected:
                self._close_if_idle(visit)

    def _identify_client(self, context: ServerRequestContext[Any]) -> object:
        """Return the identity of a stateless client: its credential, or else its connection.

        A proxy may send the requests of several clients over one connection. If a request has a proxy's header fields, it
        counts as a separate client.
        """
        who = get_request_principal()
        if who is not None or not self._over_http:
            return who
        request: Any = context.request
        if request is None or any(name in request.headers for name in _PROXY_HEADERS):
            return _AnonymousClient()
        return request.scope.get("state", {}).get(CONNECTION_KEY) or _AnonymousClient()

    def _client_of_state(self, context: ServerRequestContext[Any], state: str | None) -> McpClientState | None:
        held = self._held_calls.get(state) if state is not None else None
        if held is None or not held[0].is_shared or get_request_principal() is not None:
            return None
        return next((visit for visit in self._clients if visit.client is held[0]), None)

    def close_disconnected_sessions(self, connection: object) -> None:
        """Close the sessions of a client without credentials after its connection ends, once they are idle."""
        for forms in (False, True):
            if (state := self._stateless_clients.get((connection, forms))) is not None:
                state.is_disconnected = True
                self._close_if_idle(state)

    def _close_if_idle(self, client: McpClientState) -> None:
        if client.client.is_idle and client.has_no_listeners:
            for key in [key for key, one in self._stateless_clients.items() if one is client]:
                del self._stateless_clients[key]
                self._last_used.pop(key, None)
            self.spawn_server_task(self.stop_and_close_client(client))

    async def _find_client(self, context: ServerRequestContext[Any]) -> McpClientState:
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            key = (self._identify_client(context), self._answers_forms(context))
            if (state := self._stateless_clients.get(key)) is None:
                async with self._opening:
                    state = self._stateless_clients.get(key) or await self._admit_client(
                        key, extract_client_info(context)
                    )
            self._last_used[key] = time.monotonic()
            return state
        connection = _connection_of(context)
        if (state := connection.state.get(_CLIENT_KEY)) is None:
            async with self._opening:
                if (state := connection.state.get(_CLIENT_KEY)) is None:
                    state = await self._open_client(info=extract_client_info(context))
                    connection.state[_CLIENT_KEY] = state
                    name = connection.session_id or ""
                    self._clients_by_connection[name] = state
                    connection.exit_stack.callback(lambda: self._on_connection_closed(name, state))
        state.attach_sdk_session(context.session)
        return state

    def _on_connection_closed(self, name: str, client: McpClientState) -> None:
        self._clients_by_connection.pop(name, None)
        self.spawn_server_task(self.stop_and_close_client(client))

    def _answers_forms(self, context: ServerRequestContext[Any]) -> bool:
        return (
            not self.settings.headless
            and find_missing_capability(context.session.client_capabilities, FORM_METHOD, {}) is None
        )

    async def _admit_client(self, key: tuple[Any, bool], info: ClientInfo | None) -> McpClientState:
        """Open a session for a stateless client that has none.

        If the server is full, the longest unused idle client makes room.

        :raises MCPError: if too many clients are active
        """
        now = time.monotonic()
        idle = [
            other
            for other in self._stateless_clients
            if self._stateless_clients[other].client.is_idle and self._stateless_clients[other].has_no_listeners
        ]
        over = [other for other in idle if now - self._last_used[other] > self.settings.idle_s]
        if not over and len(self._stateless_clients) >= self.settings.max_sessions:
            over = sorted(idle, key=lambda other: self._last_used[other])[:1]
            if not over:
                limit = f"The limit is {self.settings.max_sessions:,}. Try again later."
                raise MCPError(INTERNAL_ERROR, f"Too many clients are connected. {limit}")
        for other in over:
            del self._last_used[other]
            self.spawn_server_task(self.stop_and_close_client(self._stateless_clients.pop(other)))
        unknown = isinstance(key[0], _AnonymousClient)
        state = self._stateless_clients[key] = await self._open_client(
            asks=key[1] or not unknown, shared=self._over_http, info=info
        )
        state.is_disconnected = unknown
        return state

    async def reopen_suspended_client(self, session_id: str, context: ServerRequestContext[Any]) -> McpClientState:
        """Open a suspended session again for its unfinished tasks.

        :raises HandrailError: if another client has the session open, or it cannot be opened
        """
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        info = extract_client_info(context)
        return await self._open_client(session_id, shared=self._over_http and modern, info=info)

    async def _open_client(
        self,
        session_id: str | None = None,
        *,
        asks: bool = True,
        shared: bool = False,
        info: ClientInfo | None = None,
    ) -> McpClientState:
        """Open the session of a client.

        :param asks: whether an approval can wait for the user. A client that does not show forms gets its ID
        :param shared: whether several clients may use the session
        """
        if self._closed:
            raise MCPError(INTERNAL_ERROR, "The server is shutting down. Connect again later.")
        serving = self.settings
        connected = ConnectedMcpClient(
            self.kernel.approvals,
            serving.wait_s,
            serving.hold_s,
            lambda: len(self._held_calls) < serving.max_held_calls,
        )
        connected.is_shared = shared
        attendant = connected if asks and not serving.headless else None
        early = None if self.early_client is None or session_id is not None else self.early_client.hand_over(connected)
        opened = early or await self.kernel.session(
            session_id, headless=attendant is None, approval_handler=attendant, client=connected, client_info=info
        )
        connected.set_and_watch_session(opened)
        state = McpClientState(self.kernel, self.spawn_server_task, connected)
        self._clients.add(state)
        return state

    async def stop_and_close_client(self, client: McpClientState) -> None:
        """Stop the calls of a disconnected client, and close its session.

        If its tasks can still be requested, the session is suspended instead.
        """
        if client in self._clients:
            self._clients.discard(client)
            client.end_subscriptions()
            under_way = tuple(client.client.calls.values())
            for waiting_call in under_way:
                waiting_call.cancel_call()
            session = client.client.session
            asked_for = any(one.is_task for one in under_way) or time.monotonic() <= client.client.kept_until
            with contextlib.suppress(Exception):  # the log has the reason, and no client is left to notify
                await (session.suspend() if asked_for else session.close())

    # ── held calls, which wait for a further request of their client ─────────────────────────────

    def hold_call_until_request(self, client: ConnectedMcpClient, call: McpClientCall) -> str:
        """Hold a call until its client sends the next request, and return the state token for it.

        The token is valid once.
        """
        state = secrets.token_urlsafe(18)
        client.held_calls[state] = call
        timer = asyncio.get_running_loop().call_later(self.settings.hold_s, self._abandon_call, state)
        self._held_calls[state] = (client, timer)
        return state

    def take_held_call(self, client: ConnectedMcpClient, state: str) -> McpClientCall:
        """Return the held call that a state token names.

        :raises MCPError: if the token is unknown or expired, or belongs to another client
        """
        held = self._held_calls.get(state)
        if held is None or held[0] is not client:
            raise MCPError(
                INVALID_PARAMS,
                "The `requestState` is invalid or has expired. Make the call again without it.",
                {"reason": "invalid_request_state"},
            )
        del self._held_calls[state]
        held[1].cancel()
        return client.held_calls.pop(state)

    def _abandon_call(self, state: str) -> None:
        connected, _ = self._held_calls.pop(state)
        waiting_call = connected.held_calls.pop(state)
        waiting_call.fail_client_requests()
        connected.end_call(
            waiting_call
        )  # after its call ends; by then an open approval is stored, and the call can be repeated


def _connection_of(context: ServerRequestContext[Any]) -> Connection:
    """Return the connection of a request.

    The SDK creates a session for each request. Only the connection below it lasts.
    """
    return context.session._connection  # pyright: ignore[reportPrivateUsage]


def extract_client_info(context: ServerRequestContext[Any]) -> ClientInfo | None:
    """Return what the client of a request says about itself in the handshake or in the request."""
    client_params = context.session.client_params
    return (
        None if client_params is None else ClientInfo(client_params.client_info.name, client_params.client_info.version)
    )


def get_request_principal() -> tuple[str, str | None, str | None] | None:
    """Return the credential of the current request, or None if the server requires no credentials."""
    token = get_access_token()
    return None if token is None else principal_components(token)
