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

from handrail.frontends.mcp.exchange import Exchange, lacking
from handrail.frontends.mcp.guest import FORM, Guest
from handrail.frontends.mcp.resources import Outputs, SkillPrompts
from handrail.frontends.mcp.tools import Serving

if TYPE_CHECKING:
    from mcp.server.connection import Connection
    from mcp.server.context import ServerRequestContext
    from mcp.server.session import ServerSession

    from handrail.frontends.mcp.guest import Guest
    from handrail.kernel.kernel import Kernel


# The listings that a client received, and the notifications to it when they change.

MOST_SUBSCRIPTIONS = 1_000
"""Maximum number of resources that one client can subscribe to."""


class Visit:
    """One client with its listings, outputs, skills and subscriptions.

    It compares each listing with the one last sent, and notifies the client of changes.

    :ivar gone: whether the connection has ended, so that the session closes when its calls end
    :ivar level: the lowest log level that a client of a handshake version gets, as an index into the list of levels
    """

    def __init__(self, kernel: Kernel, spawn: Callable[[Coroutine[Any, Any, Any]], None], guest: Guest) -> None:
        """:param spawn: runs a coroutine in a task that ends with the server"""
        self.guest = guest
        self.gone = False
        self.level = 1
        self.outputs = Outputs(kernel, guest)
        self.skills = SkillPrompts(kernel, guest)
        self.subscribed: dict[str, int] = {}
        """Resource URI to the number of its subscriptions."""
        self._kernel = kernel
        self._spawn = spawn
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus, max_subscriptions=64)
        self.listening = 0
        self._client: ServerSession | None = None
        """The SDK session of a client of a handshake version."""
        self._shown: dict[str, Callable[[], Sequence[object]]] = {}
        self._told: dict[str, Sequence[object]] = {}
        self._telling = False
        self._mark: tuple[object, int, int] | None = None
        guest.changed = self.look_again
        guest.updated = lambda uri: spawn(self._tell_of_resource(uri))

    @property
    def unheard(self) -> bool:
        """Whether the client has no open stream of change notifications."""
        return not self.listening

    def heard(self, client: ServerSession) -> None:
        """Use this SDK session for notifications to a client of a handshake version."""
        self._client = client

    def close(self) -> None:
        """End the subscriptions."""
        self.listen.close()

    def lists(self, what: str, shown: Callable[[], Sequence[object]]) -> None:
        """Notify the client from now on when the tools, resources or prompts in this listing change.

        :param what: ``tools``, ``resources`` or ``prompts``
        :param shown: returns the current listing
        """
        self._shown[what] = shown
        self._told[what] = shown()

    def subscribe(self, uri: str) -> bool:
        """Add a subscription, and return whether it is the first for this resource.

        :raises MCPError: if the client has too many subscriptions
        """
        if uri not in self.subscribed and len(self.subscribed) >= MOST_SUBSCRIPTIONS:
            text = f"Too many resource subscriptions. The limit is {MOST_SUBSCRIPTIONS:,}. Unsubscribe from one first."
            raise MCPError(INVALID_PARAMS, text)
        self.subscribed[uri] = self.subscribed.get(uri, 0) + 1
        return self.subscribed[uri] == 1

    def unsubscribe(self, uri: str) -> bool:
        """Remove a subscription, and return whether it was the last for this resource."""
        left = self.subscribed.get(uri, 0) - 1
        if left > 0:
            self.subscribed[uri] = left
            return False
        return self.subscribed.pop(uri, None) is not None

    def may_have_changed(self) -> bool:
        """Return whether a listing may have changed since the last check.

        The check is cheap because it runs after each call.
        """
        now = (self._kernel.generation, self.outputs.changes, len(self.guest.session.view))
        before, self._mark = self._mark, now
        return before is None or before[0] is not now[0] or before[1:] != now[1:]

    def look_again(self) -> None:
        """Schedule a comparison of the listings."""
        if not self._telling and self._shown:
            self._telling = True
            self._spawn(self.tell_of_changes())

    async def tell_of_changes(self) -> None:
        """Notify the client of each listing that has changed."""
        self._telling = False
        for what, shown in self._shown.items():
            if (now := shown()) != self._told[what]:
                self._told[what] = now
                await self._tell_of_list(what)

    async def _tell_of_list(self, what: str) -> None:
        # The stateless version uses subscriptions for this, the handshake versions use notifications.
        client: Any = self._client
        if what == "tools":
            await self._bus.publish(ToolsListChanged())
            await (client.send_tool_list_changed() if client is not None else _nobody())
        elif what == "prompts":
            await self._bus.publish(PromptsListChanged())
            await (client.send_prompt_list_changed() if client is not None else _nobody())
        else:
            await self._bus.publish(ResourcesListChanged())
            await (client.send_resource_list_changed() if client is not None else _nobody())

    async def _tell_of_resource(self, uri: str) -> None:
        await self._bus.publish(ResourceUpdated(uri))
        if self._client is not None and uri in self.subscribed:
            await self._client.send_resource_updated(uri)


async def _nobody() -> None:
    return None


CONNECTION = "handrail.connection"
"""The key of the connection in the state of an HTTP request."""
_OF_PROXIES = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
    "x-request-id",
)
"""Header fields that proxies add."""
_VISIT = "handrail"
"""The key of the client in the state of a connection."""


class _OneRequest:
    """The identity of a client that cannot be recognized in a further request."""


class House:
    """The clients of one server, with their sessions and their held calls."""

    def __init__(self, kernel: Kernel, serving: Serving, *, over_http: bool = False) -> None:
        self.kernel = kernel
        self.serving = serving
        self._over_http = over_http
        """Over HTTP, several clients may come without credentials. Over stdio there is one client."""
        self._visits: dict[tuple[Any, bool], Visit] = {}
        """The clients of the stateless version, by their identity (:meth:`_who`) and whether they answer forms."""
        self._used: dict[tuple[Any, bool], float] = {}
        self._here: set[Visit] = set()
        self._of_connections: dict[str, Visit] = {}
        """The HTTP clients of handshake versions, by connection ID."""
        self._opening = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held: dict[str, tuple[Guest, asyncio.TimerHandle]] = {}
        self._closed = False

    @property
    def visits(self) -> frozenset[Visit]:
        """The connected clients."""
        return frozenset(self._here)

    def at_work(self, session_id: str) -> bool:
        """Return whether the client of a connection has a running call.

        :param session_id: the protocol's ID of the connection
        """
        visit = self._of_connections.get(session_id)
        return visit is not None and not visit.guest.idle

    async def aclose(self) -> None:
        """Close every session and cancel the running tasks."""
        self._closed = True
        for _, timer in self._held.values():
            timer.cancel()
        await asyncio.gather(*(self.leave(visit) for visit in tuple(self._here)))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` in a task that is cancelled when the server ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── the client of a request ──────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def visited(self, context: ServerRequestContext[Any], state: str | None = None) -> AsyncGenerator[Visit]:
        """Yield the client of a request, and count it as busy meanwhile.

        :param state: the client's state token, which identifies a client without credentials
        """
        visit = self._visit_of_state(context, state) or await self._visit(context)
        visit.guest.busy += 1
        try:
            yield visit
        finally:
            visit.guest.busy -= 1
            if visit.gone:
                self._leave_gone(visit)

    def _who(self, context: ServerRequestContext[Any]) -> object:
        """Return the identity of a stateless client: its credential, or else its connection.

        A proxy may send the requests of several clients over one connection. If a request has a proxy's header fields, it
        counts as a client of its own.
        """
        who = principal()
        if who is not None or not self._over_http:
            return who
        request: Any = context.request
        if request is None or any(name in request.headers for name in _OF_PROXIES):
            return _OneRequest()
        return request.scope.get("state", {}).get(CONNECTION) or _OneRequest()

    def _visit_of_state(self, context: ServerRequestContext[Any], state: str | None) -> Visit | None:
        held = self._held.get(state) if state is not None else None
        if held is None or not held[0].shared or principal() is not None:
            return None
        return next((visit for visit in self._here if visit.guest is held[0]), None)

    def disconnected(self, connection: object) -> None:
        """Close the sessions of a client without credentials after its connection ends, once they are idle."""
        for forms in (False, True):
            if (visit := self._visits.get((connection, forms))) is not None:
                visit.gone = True
                self._leave_gone(visit)

    def _leave_gone(self, visit: Visit) -> None:
        if visit.guest.idle and visit.unheard:
            for key in [key for key, one in self._visits.items() if one is visit]:
                del self._visits[key]
                self._used.pop(key, None)
            self.spawn(self.leave(visit))

    async def _visit(self, context: ServerRequestContext[Any]) -> Visit:
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            key = (self._who(context), self._answers_forms(context))
            if (visit := self._visits.get(key)) is None:
                async with self._opening:
                    visit = self._visits.get(key) or await self._admit(key)
            self._used[key] = time.monotonic()
            return visit
        connection = _connection_of(context)
        if (visit := connection.state.get(_VISIT)) is None:
            async with self._opening:
                if (visit := connection.state.get(_VISIT)) is None:
                    visit = await self._open(self._answers_forms(context))
                    connection.state[_VISIT] = visit
                    name = connection.session_id or ""
                    self._of_connections[name] = visit
                    connection.exit_stack.callback(lambda: self._gone(name, visit))
        visit.heard(context.session)
        return visit

    def _gone(self, name: str, visit: Visit) -> None:
        self._of_connections.pop(name, None)
        self.spawn(self.leave(visit))

    def _answers_forms(self, context: ServerRequestContext[Any]) -> bool:
        return not self.serving.headless and lacking(context.session.client_capabilities, FORM, {}) is None

    async def _admit(self, key: tuple[Any, bool]) -> Visit:
        """Open a session for a stateless client that has none.

        If the server is full, the longest unused idle client makes room.

        :raises MCPError: if too many clients are active
        """
        now = time.monotonic()
        idle = [other for other in self._visits if self._visits[other].guest.idle and self._visits[other].unheard]
        over = [other for other in idle if now - self._used[other] > self.serving.idle_s]
        if not over and len(self._visits) >= self.serving.most_guests:
            over = sorted(idle, key=lambda other: self._used[other])[:1]
            if not over:
                limit = f"The limit is {self.serving.most_guests:,}. Try again later."
                raise MCPError(INTERNAL_ERROR, f"Too many clients are connected. {limit}")
        for other in over:
            del self._used[other]
            self.spawn(self.leave(self._visits.pop(other)))
        visit = self._visits[key] = await self._open(key[1], shared=self._over_http and principal() is None)
        visit.gone = isinstance(key[0], _OneRequest)
        return visit

    async def reopen(self, session_id: str, context: ServerRequestContext[Any]) -> Visit:
        """Open a suspended session again for its unfinished tasks.

        :raises HandrailError: if another client has the session open, or it cannot be opened
        """
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        shared = self._over_http and modern and principal() is None
        return await self._open(self._answers_forms(context), session_id, shared=shared)

    async def _open(self, answers_forms: bool, session_id: str | None = None, *, shared: bool = False) -> Visit:
        if self._closed:
            raise MCPError(INTERNAL_ERROR, "The server is shutting down. Connect again later.")
        serving = self.serving
        guest = Guest(
            self.kernel.approvals, serving.wait_s, serving.hold_s, lambda: len(self._held) < serving.most_held
        )
        guest.shared = shared
        attendant = guest if answers_forms else None
        opened = self.kernel.session(session_id, headless=attendant is None, attendant=attendant, peer=guest)
        guest.enter(await opened)
        visit = Visit(self.kernel, self.spawn, guest)
        self._here.add(visit)
        return visit

    async def leave(self, visit: Visit) -> None:
        """Stop the calls of a disconnected client, and close its session.

        If its tasks can still be requested, the session is suspended instead.
        """
        if visit in self._here:
            self._here.discard(visit)
            visit.close()
            under_way = tuple(visit.guest.exchanges.values())
            for exchange in under_way:
                exchange.stop()
            session = visit.guest.session
            asked_for = any(one.beside for one in under_way) or time.monotonic() <= visit.guest.kept_until
            with contextlib.suppress(Exception):  # the log has the reason, and no client is left to notify
                await (session.suspend() if asked_for else session.close())

    # ── held calls, which wait for a further request of their client ─────────────────────────────

    def hold(self, guest: Guest, exchange: Exchange) -> str:
        """Hold a call until its client sends the next request, and return the state token for it.

        The token is valid once.
        """
        state = secrets.token_urlsafe(18)
        guest.held[state] = exchange
        timer = asyncio.get_running_loop().call_later(self.serving.hold_s, self._give_up, state)
        self._held[state] = (guest, timer)
        return state

    def take_up(self, guest: Guest, state: str) -> Exchange:
        """Return the held call that a state token names.

        :raises MCPError: if the token is unknown or expired, or belongs to another client
        """
        held = self._held.get(state)
        if held is None or held[0] is not guest:
            raise MCPError(INVALID_PARAMS, "Invalid or expired requestState", {"reason": "invalid_request_state"})
        del self._held[state]
        held[1].cancel()
        return guest.held.pop(state)

    def _give_up(self, state: str) -> None:
        guest, _ = self._held.pop(state)
        exchange = guest.held.pop(state)
        exchange.abandon()
        guest.end(exchange)  # after its call ends; by then an open approval is stored, and the call can be repeated


def _connection_of(context: ServerRequestContext[Any]) -> Connection:
    """Return the connection of a request.

    The SDK creates a session for each request. Only the connection below it lasts.
    """
    return context.session._connection  # pyright: ignore[reportPrivateUsage]


def principal() -> tuple[str, str | None, str | None] | None:
    """Return the credential of the current request, or None if the server requires no credentials."""
    token = get_access_token()
    return None if token is None else principal_components(token)
