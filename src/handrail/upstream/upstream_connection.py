"""The connection manager of one server: it connects on first use, waits between attempts, and disconnects.

One task opens, keeps and closes the connection; callers only use it. A call that arrives during the wait for the next attempt
fails at once. A slow tool blocks only its own call.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from handrail.contract.errors import ToolError
from handrail.upstream import server_definition as listings
from handrail.upstream.client.resource_subscriptions import ServerResourceSubscriptions
from handrail.upstream.client.stdio_transport import StdioTransport
from handrail.upstream.client.task_calls import call_tool_until_result, send_request_answering_input
from handrail.upstream.client.upstream_session import (
    METHOD_NOT_FOUND,
    MODERN_VERSIONS,
    McpTransport,
    ProtocolEra,
    ResponseTooLong,
    RpcError,
    TimeLimiter,
    UpstreamConnectionLost,
    UpstreamSession,
    UpstreamSessionCallbacks,
)
from handrail.upstream.server_definition import MAX_ITEMS, BoundedItems, JsonItem, ServerDefinition, ServerListing

if TYPE_CHECKING:
    from handrail.contract.services.tool_runtime import Runtime


# The listing of a server, page by page, within limits.

_SILENCE = (
    ", and wrote nothing to its stdout. A server exchanges one JSON message a line. One that waits for Content-Length headers, "
    "as a language server does, cannot be used"
)
MAX_PAGES = 1_000
LIST_TIMEOUT_S = 5.0
"""The timeout in seconds of each list other than the announced tools."""
_LISTS = (
    ("tools", "tools", "tools/list", "tools"),
    ("resources", "resources", "resources/list", "resources"),
    ("templates", "resources", "resources/templates/list", "resourceTemplates"),
    ("prompts", "prompts", "prompts/list", "prompts"),
)


async def fetch_server_listing(
    conversation: UpstreamSession, timeout_s: float, limit_time: TimeLimiter = asyncio.timeout
) -> ServerListing:
    """Fetch all items that the server lists.

    The tools come first. They are asked for even if the server did not announce any. Another list that fails or gets no
    answer is empty, and the listing says why.

    :param timeout_s: the timeout for the list of the tools
    :param limit_time: limits the time of a block in seconds
    :raises RpcError: if it announced tools and refuses to list them
    :raises UpstreamConnectionLost: if the connection ends
    :raises TimeoutError: if it announced tools and does not list them
    """
    found: dict[str, tuple[JsonItem, ...]] = {}
    problems: list[str] = []
    left_out = 0

    async def fetch(key: str, method: str, field: str, limit_s: float) -> None:
        nonlocal left_out
        try:
            async with limit_time(limit_s):
                found[key], more = await _all_of(conversation, method, field, problems)
            left_out += more
        except TimeoutError:
            problems.append(f"{method} got no answer within {limit_s:g} s")
        except (RpcError, ResponseTooLong) as error:
            # A server that does not know the method has no such items, which is not a problem.
            if not isinstance(error, RpcError) or error.code != METHOD_NOT_FOUND:
                problems.append(f"{method} failed: {error}")

    announced = conversation.capabilities
    tools, *others = _LISTS
    if "tools" in announced:
        async with limit_time(timeout_s):
            found["tools"], left_out = await _all_of(conversation, tools[2], tools[3], problems)
    else:
        await fetch(tools[0], *tools[2:], LIST_TIMEOUT_S)
        if "resources" in announced or "prompts" in announced:
            problems.clear()  # a server without tools need not answer
    await asyncio.gather(
        *(
            fetch(key, method, field, LIST_TIMEOUT_S)
            for key, capability, method, field in others
            if capability in announced
        )
    )
    return ServerListing(
        **found,
        capabilities=dict(conversation.capabilities),
        server=dict(conversation.server),
        protocol=conversation.protocol,
        left_out=left_out,
        problems=tuple(sorted(problems)),
    )


async def _all_of(
    conversation: UpstreamSession, method: str, field: str, problems: list[str]
) -> tuple[tuple[JsonItem, ...], int]:
    """Return the items of a list and the number of those left out, and add what is wrong with it to ``problems``.

    :raises RpcError: if the server refuses the first page
    """
    kept = BoundedItems()
    seen: set[str | int] = set()
    params: dict[str, Any] = {}
    for _ in range(MAX_PAGES):
        try:
            page = await conversation.request(method, params)
        except RpcError as error:
            if not params:
                raise
            problems.append(f"{method} failed after {len(kept.items)} items: {error}")
            break
        given = page.get(field, page.get("content"))  # a bare list is read as content
        if isinstance(given, dict) and all(isinstance(one, dict) for one in cast("dict[str, Any]", given).values()):
            given = [{"name": name, **one} for name, one in cast("dict[str, Any]", given).items()] or None
        if not isinstance(given, list):
            problems.append(f"{method} was answered without a list of {field}")
        kept.add_valid_items(cast("list[Any]", given) if isinstance(given, list) else ())
        cursor = page.get("nextCursor")
        # A cursor that comes again would make the listing endless.
        if (
            isinstance(cursor, bool)
            or not isinstance(cursor, str | int)
            or cursor in ("", *seen)
            or len(kept.items) + kept.left_out > MAX_ITEMS
        ):
            break
        seen.add(cursor)
        params = {"cursor": cursor}
    return tuple(kept.items), kept.left_out


BACKOFF_S: Sequence[float] = (1, 2, 5, 15, 60)
"""The delay in seconds before an attempt, by the number of failed attempts in a row; the last value repeats."""
RELIST_INTERVAL_S = 0.25
"""The minimum time in seconds between two listings, since a server may report changes at any rate."""


class _ProbeError(Exception):
    """The server did not survive the probe for the newest version, or did not answer it."""


UpstreamState = Literal["idle", "connecting", "connected", "waiting", "closed"]


class UpstreamServerConnection:
    """The connection to one server. For one event loop.

    :param make_transport: makes the transport of the next connection
    :param state: the root folder of all state
    :param on_listing_changed: called when the listing has changed
    :param limit_time: limits the time of a block in seconds, without the time that a user takes to sign in
    """

    def __init__(
        self,
        definition: ServerDefinition,
        make_transport: Callable[[], McpTransport],
        state: Path,
        on_listing_changed: Callable[[], Awaitable[None]],
        *,
        version: str = "0",
        backoff_s: Sequence[float] = BACKOFF_S,
        limit_time: TimeLimiter = asyncio.timeout,
    ) -> None:
        self.definition = definition
        self.listing: ServerListing | None = listings.read_cached_listing(
            state, definition.name, definition.definition_hash
        )
        self.state: UpstreamState = "idle"
        self.reason = definition.missing_reason
        """The reason why there is no connection."""
        self.attempts = 0
        """The number of connection attempts."""
        self.subscriptions = ServerResourceSubscriptions()
        self._channel = make_transport
        self._root = state
        self._when_changed = on_listing_changed
        self._version = version
        self._limit_time = limit_time
        self.backoff_s = backoff_s
        self._conversation: UpstreamSession | None = None
        self._owner: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[None] | None = None
        self._next_at = 0.0
        self.scratch_folder = ""
        """The folder of its program's own files; empty before its start."""
        self.scratch_files: dict[str, tuple[int, int]] | None = None
        """The files in its own folder after the last call; None if its program has had no call yet."""
        self._retry_now = asyncio.Event()
        self._was_useful = False
        """Whether the last connection answered a call, and no other attempt followed."""
        self._credentials = 0
        """The state of the stored credentials at the last attempt."""
        self._hint: ProtocolEra | None = None
        if self.listing is not None and self.listing.protocol:
            self._hint = "modern" if self.listing.protocol in MODERN_VERSIONS else "legacy"

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def protocol_version(self) -> str:
        """The protocol version of the connection; empty without one."""
        return self._conversation.protocol if self._conversation is not None else ""

    @property
    def seconds_until_retry(self) -> int:
        """The seconds until the next attempt."""
        return max(1, math.ceil(self._next_at - asyncio.get_running_loop().time()))

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        runtime: Runtime | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        check_current: Callable[[], None] = lambda: None,
        as_task: bool = False,
    ) -> dict[str, Any]:
        """Send a request and return its result.

        If the server requests input, the client is asked and the request continues. A task of a tool is awaited.

        :param runtime: the runtime of the call that needs the request
        :param check_current: raises if the server's listing no longer matches the request; called for each connection
        :param as_task: see :func:`handrail.upstream.client.task_calls.call_tool_until_result`
        :raises ToolError: ``unavailable`` without a connection, ``interrupted`` if it was lost meanwhile, ``limit``,
            ``backend``, or the error of a client's answer
        """

        async def made(conversation: UpstreamSession, fields: Mapping[str, Any]) -> dict[str, Any]:
            if method != "tools/call":
                return await conversation.request(method, fields, runtime, headers=headers)
            grants = self.definition.grants
            return await call_tool_until_result(conversation, fields, runtime, grants, headers=headers, as_task=as_task)

        async def once(fields: Mapping[str, Any]) -> dict[str, Any]:
            conversation = await self.ensure_connected()
            check_current()
            try:
                # Only a server with write access can change a protected name.
                if self.definition.write:
                    async with conversation.transport.watch_protected_paths():
                        return await made(conversation, fields)
                return await made(conversation, fields)
            except UpstreamConnectionLost as lost:
                if not lost.is_session_expired:
                    raise
                # The server rejected the request without running it, for instance since it forgot the session. Retry once.
                conversation = await self.ensure_connected(retry=True)
                check_current()
                return await made(conversation, fields)

        try:
            return await send_request_answering_input(once, params, runtime, self.name, self.definition.grants)
        except UpstreamConnectionLost as lost:
            raise self._interrupted(lost) from None
        except ResponseTooLong as error:
            raise ToolError(
                f"MCP server {self.name} sent an answer that cannot be used: {error}. Request less, for instance with "
                "narrower arguments.",
                kind="limit",
            ) from None

    def _interrupted(self, lost: UpstreamConnectionLost) -> ToolError:
        if lost.is_unsent:
            return ToolError(
                f"MCP server {self.name} is unavailable: {lost.why}. Continue without it, or try again later.",
                kind="unavailable",
            )
        return ToolError(
            f"MCP server {self.name} was disconnected during this call: {lost.why}. The effect of the "
            "call is unknown. Check the current state before you call the tool again.",
            kind="interrupted",
        )

    async def ensure_connected(self, *, retry: bool = False) -> UpstreamSession:
        """Return the connection, and open it if necessary.

        The first attempt is awaited. During the wait for a later attempt, this raises at once.

        :param retry: the server is reachable and has forgotten the present connection
        :raises ToolError: ``unavailable``, with the reason and the time of the next attempt
        """
        if self._conversation is not None and self._conversation.end_reason is None:
            return self._conversation
        if self.state == "closed":
            raise ToolError(
                f"MCP server {self.name} is closed, as is its kernel. Continue without it.", kind="unavailable"
            )
        if self.definition.missing_reason:
            raise ToolError(
                f"MCP server {self.name} is unavailable: {self.definition.missing_reason}. Ask the user to correct "
                "its configuration.",
                kind="unavailable",
            )
        if self._owner is None or self._owner.done():
            self._attempt = asyncio.get_running_loop().create_future()
            self.state = "connecting"
            self._owner = asyncio.create_task(self._run_connection(), name=f"mcp {self.name}: owner")
        elif self.state == "waiting" and (self._was_useful or self._read_credentials_state() != self._credentials):
            self._credentials, self._was_useful = self._read_credentials_state(), False
            self._retry_now.set()  # a program that ends after its answer, or the user has signed in meanwhile
        elif (self.state == "waiting" and not self._retry_now.is_set()) or (  # the owner task has not noticed yet
            self.state == "connected" and not (retry or self._is_session_expired)
        ):
            raise self._unavailable()
        attempt = self._attempt
        if attempt is None or attempt.done():
            attempt = self._attempt = asyncio.get_running_loop().create_future()
        # One attempt serves all callers, so the cancellation of one must not end it.
        await asyncio.shield(attempt)
        if self._conversation is None or self._conversation.end_reason is not None:
            raise self._unavailable()
        return self._conversation

    @property
    def _is_session_expired(self) -> bool:
        """Whether the connection ended only because the server has forgotten the session."""
        ended = self._conversation.end_reason if self._conversation is not None else None
        return ended is not None and ended.is_session_expired

    def _unavailable(self) -> ToolError:
        text = f"MCP server {self.name} is unavailable"
        if self._conversation is not None and self._conversation.end_reason is not None:
            return ToolError(f"{text}: {self._conversation.end_reason.why}", kind="unavailable")
        if self.state == "waiting":
            text += f", next attempt in {self.seconds_until_retry} s"
        return ToolError(f"{text}: {self.reason}" if self.reason else text, kind="unavailable")

    async def ensure_listing_known(self) -> ServerListing:
        """Return the server's listing; connect first if it is unknown.

        :raises ToolError: ``unavailable``
        """
        if self.listing is None:
            await self.ensure_connected()
        if self.listing is None:
            raise self._unavailable()
        return self.listing

    # ── the owner's task ────────────────────────────────────────────────────────────────────────

    async def _run_connection(self) -> None:
        failures, at_once = 0, False
        while True:
            conversation: UpstreamSession | None = None
            changed, lost = asyncio.Event(), asyncio.Event()
            hooks = UpstreamSessionCallbacks(
                changed.set, self.subscriptions.notify_subscribers, lambda _, over=lost: over.set()
            )
            fruitful = False
            try:
                self.state = "connecting"
                if self._attempt is None or self._attempt.done():
                    self._attempt = asyncio.get_running_loop().create_future()
                self.attempts += 1
                self._credentials = self._read_credentials_state()
                conversation = UpstreamSession(self._channel(), self.name, self.definition.grants, self._version, hooks)
                await self._open_connection(conversation)
                self._conversation, self.state, self.reason = conversation, "connected", ""
                self._end_attempt()
                answered = conversation.answered_count
                await self._serve_until_lost(conversation, changed, lost)
                fruitful = conversation.answered_count > answered
            except _ProbeError:
                self.attempts -= 1  # the second connection belongs to the same attempt
                continue
            except Exception as error:  # any error leads to a later attempt and affects no other server
                self.reason = _describe_failure(error, self.definition.connect_timeout_ms)
                if isinstance(error, TimeoutError) and conversation is not None and _is_silent(conversation.transport):
                    self.reason += _SILENCE
            finally:
                if conversation is not None:
                    if conversation.end_reason is not None and self.state == "connected":
                        self.reason = conversation.end_reason.why
                    await conversation.aclose()
                self._conversation = None
            failures = 1 if fruitful else failures + 1
            self._was_useful = fruitful
            ended = conversation.end_reason if conversation is not None else None
            # A forgotten session is not a fault of the connection, so it opens again at once. A server that forgets each
            # time must wait.
            at_once = ended is not None and ended.is_session_expired and (fruitful or not at_once)
            if not at_once:
                await self._pause(self.backoff_s[min(failures, len(self.backoff_s)) - 1])

    async def _pause(self, delay_s: float) -> None:
        self.state, self._next_at = "waiting", asyncio.get_running_loop().time() + delay_s
        self._retry_now.clear()
        self._end_attempt()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._retry_now.wait()

    def _read_credentials_state(self) -> int:
        """Return a number that changes when a user signs in at this server, in any process."""
        if self.definition.transport == "stdio":
            return 0
        try:
            return self.definition.token_file(self._root).stat().st_mtime_ns
        except OSError:
            return 0

    def _end_attempt(self) -> None:
        """End the attempt, successful or not, and wake its waiters."""
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_result(None)

    async def _open_connection(self, conversation: UpstreamSession) -> None:
        """Connect, agree on a version and list, so that no call uses an old definition."""
        timeout_s = self.definition.connect_timeout_ms / 1000
        async with self._limit_time(timeout_s):
            await conversation.transport.open(conversation)
            try:
                await conversation.negotiate_version(self._hint, timeout_s, self._limit_time)
            except (UpstreamConnectionLost, RpcError, TimeoutError) as error:
                unsent = isinstance(error, UpstreamConnectionLost) and error.is_unsent
                if self._hint == "legacy" or unsent:
                    raise
                # The probe may have upset the server, so the next connection begins with the handshake that every
                # server knows.
                self._hint = "legacy"
                raise _ProbeError from error
        self._hint = conversation.era
        try:
            await self._list(conversation)
        except TimeoutError:
            raise UpstreamConnectionLost(f"the server did not answer tools/list within {timeout_s:g} s") from None
        except RpcError as error:
            raise UpstreamConnectionLost(f"the server refused to list its tools: {error.message[:300]}") from None

    async def _serve_until_lost(
        self, conversation: UpstreamSession, changed: asyncio.Event, lost: asyncio.Event
    ) -> None:
        """Use the connection until it is lost: list again on changes, and keep the subscriptions."""
        self.subscriptions.subscribe_on_connection(conversation, changed)
        try:
            while not lost.is_set():
                waits = [asyncio.ensure_future(event.wait()) for event in (changed, lost)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                if lost.is_set():
                    return
                changed.clear()
                try:
                    await self._list(conversation)
                except (RpcError, TimeoutError, ResponseTooLong):
                    pass  # it cannot list now, so the previous listing holds
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELIST_INTERVAL_S):
                        await lost.wait()
        finally:
            await self.subscriptions.detach()

    async def _list(self, conversation: UpstreamSession) -> None:
        timeout_s = self.definition.connect_timeout_ms / 1000
        before, found = self.listing, await fetch_server_listing(conversation, timeout_s, self._limit_time)
        # Many servers report a change after each connection. Without a difference, no tool needs a new review.
        if found == before:
            return
        self.listing = found
        await asyncio.to_thread(
            listings.write_cached_listing, self._root, self.name, self.definition.definition_hash, found
        )
        await self._when_changed()

    async def aclose(self) -> None:
        """Close the connection and all that was started for it."""
        self.state = "closed"
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)
        self._end_attempt()


def _is_silent(transport: McpTransport) -> bool:
    return isinstance(transport, StdioTransport) and not transport.has_output


def _describe_failure(error: Exception, timeout_ms: int) -> str:
    if isinstance(error, TimeoutError):
        return f"the server was not ready within {timeout_ms} ms"
    if isinstance(error, UpstreamConnectionLost):
        return error.why
    if isinstance(error, RpcError):
        return f"the server refused the connection: {error.message[:300]}"
    return str(error) or type(error).__name__
