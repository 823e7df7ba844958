"""The owner of a server's connection: it connects on first use, waits between attempts, and disconnects.

One task opens, keeps and closes the connection; callers use it and never open anything themselves. A call that arrives during
the wait for the next attempt fails at once. A slow tool ends its own call and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from handrail.contract.errors import ToolError
from handrail.upstream import definition as listings
from handrail.upstream.client.conversation import MODERN, Channel, Conversation, Era, Hooks, Lost, RpcError, TooLong
from handrail.upstream.client.subscriptions import Subscriptions
from handrail.upstream.client.tasks import carried_out, with_input
from handrail.upstream.definition import MOST_ITEMS, Item, Kept, Listing, ServerDefinition

if TYPE_CHECKING:
    from handrail.contract.doors.runtime import Runtime
    from handrail.upstream.client.conversation import Conversation


# The listing of a server, page by page, within bounds.

MOST_PAGES = 1_000
_LISTS = (
    ("tools", "tools", "tools/list", "tools"),
    ("resources", "resources", "resources/list", "resources"),
    ("templates", "resources", "resources/templates/list", "resourceTemplates"),
    ("prompts", "prompts", "prompts/list", "prompts"),
)


async def listed(conversation: Conversation) -> Listing:
    """Everything that the server says it has.

    :raises RpcError: where it refuses to list its tools
    :raises Lost: when the connection ends
    """
    found: dict[str, tuple[Item, ...]] = {}
    left_out = 0
    for key, capability, method, field in _LISTS:
        if capability not in conversation.capabilities:
            continue
        try:
            found[key], more = await _all_of(conversation, method, field)
        except RpcError:
            if key == "tools":
                raise
            continue  # some say that they have resources and know no list of them
        left_out += more
    return Listing(
        **found,
        capabilities=dict(conversation.capabilities),
        server=dict(conversation.server),
        protocol=conversation.protocol,
        left_out=left_out,
    )


async def _all_of(conversation: Conversation, method: str, field: str) -> tuple[tuple[Item, ...], int]:
    kept = Kept()
    seen: set[str] = set()
    params: dict[str, Any] = {}
    for _ in range(MOST_PAGES):
        page = await conversation.request(method, params)
        given = page.get(field)
        kept.add(cast("list[Any]", given) if isinstance(given, list) else ())
        cursor = page.get("nextCursor")
        if not isinstance(cursor, str) or cursor in seen or len(kept.items) + kept.left_out > MOST_ITEMS:
            break
        seen.add(cursor)
        params = {"cursor": cursor}
    return tuple(kept.items), kept.left_out


BACKOFF_S: Sequence[float] = (1, 2, 5, 15, 60)
"""How long to wait after so many attempts in a row that came to nothing; the last holds from there on."""
LIST_AGAIN_S = 0.25
"""The least time between two listings: a server may say as often as it likes that its lists have changed."""

State = Literal["idle", "connecting", "connected", "waiting", "closed"]


class Upstream:
    """One server. For one event loop.

    :param channel: makes what carries the messages of the next connection
    :param state: the root of all state
    :param when_changed: told when what it lists is another than before
    """

    def __init__(
        self,
        definition: ServerDefinition,
        channel: Callable[[], Channel],
        state: Path,
        when_changed: Callable[[], Awaitable[None]],
        *,
        version: str = "0",
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        self.definition = definition
        self.listing: Listing | None = listings.read(state, definition.name, definition.hash)
        self.state: State = "idle"
        self.reason = definition.missing
        """Why there is no connection, where there should be one."""
        self.attempts = 0
        """How many have been made."""
        self.subscriptions = Subscriptions()
        self._channel = channel
        self._root = state
        self._when_changed = when_changed
        self._version = version
        self.backoff_s = backoff_s
        self._conversation: Conversation | None = None
        self._owner: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[None] | None = None
        self._next_at = 0.0
        self._hint: Era | None = None
        if self.listing is not None and self.listing.protocol:
            self._hint = "modern" if self.listing.protocol in MODERN else "legacy"

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def protocol(self) -> str:
        """The version that is spoken now; empty without a connection."""
        return self._conversation.protocol if self._conversation is not None else ""

    @property
    def waits_s(self) -> int:
        """While it is waiting, in how many seconds the next attempt is."""
        return max(1, math.ceil(self._next_at - asyncio.get_running_loop().time()))

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        runtime: Runtime | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        stands: Callable[[], None] = lambda: None,
        as_task: bool = False,
    ) -> dict[str, Any]:
        """Ask the server, and where it asks back for input in the newer era, ask the client and go on. A tool's result is
        waited for also where it comes by a task.

        :param runtime: of the call on whose behalf
        :param stands: raises where what the server lists now is not what is asked for any more; looked at on each
            connection anew
        :param as_task: see :func:`handrail.upstream.client.tasks.carried_out`
        :raises ToolError: ``unavailable`` without a connection, ``interrupted`` when it was lost meanwhile, ``limit``,
            ``backend``, or as a client's answers make it
        """

        async def made(conversation: Conversation, said: Mapping[str, Any]) -> dict[str, Any]:
            if method != "tools/call":
                return await conversation.request(method, said, runtime, headers=headers)
            grants = self.definition.grants
            return await carried_out(conversation, said, runtime, grants, headers=headers, as_task=as_task)

        async def once(said: Mapping[str, Any]) -> dict[str, Any]:
            conversation = await self.connected()
            stands()
            try:
                if self.definition.write:
                    async with conversation.channel.watched():
                        return await made(conversation, said)
                return await made(conversation, said)
            except Lost as lost:
                if not lost.forgotten:
                    raise
                # The server refused it unseen, as where it has forgotten the session: once more, on the next connection.
                conversation = await self.connected(again=True)
                stands()
                return await made(conversation, said)

        try:
            return await with_input(once, params, runtime, self.name, self.definition.grants)
        except Lost as lost:
            raise self._interrupted(lost) from None
        except TooLong as error:
            raise ToolError(f"mcp server {self.name}: {error}", kind="limit") from None

    def _interrupted(self, lost: Lost) -> ToolError:
        if lost.unsent:
            return ToolError(f"mcp server {self.name} is unavailable: {lost.why}", kind="unavailable")
        return ToolError(
            f"mcp server {self.name} is unavailable: {lost.why}, in the middle of this call; what it had done by then is "
            "unknown. Look at the state of things before you call it again",
            kind="interrupted",
        )

    async def connected(self, *, again: bool = False) -> Conversation:
        """The connection. The first attempt is waited for; while a next one is waited for, nobody else is.

        :param again: the server is known to be there and to have forgotten this connection
        :raises ToolError: ``unavailable``, with the reason and when the next attempt is
        """
        if self._conversation is not None and self._conversation.end is None:
            return self._conversation
        if self.state == "closed":
            raise ToolError(f"mcp server {self.name} has been closed with its kernel", kind="unavailable")
        if self.definition.missing:
            raise ToolError(f"mcp server {self.name} is unavailable: {self.definition.missing}", kind="unavailable")
        if self._owner is None or self._owner.done():
            self._attempt = asyncio.get_running_loop().create_future()
            self.state = "connecting"
            self._owner = asyncio.create_task(self._own(), name=f"mcp {self.name}: owner")
        elif self.state == "waiting" or (self.state == "connected" and not again):  # its owner has not noticed yet
            raise self._unavailable()
        attempt = self._attempt
        if attempt is None or attempt.done():
            attempt = self._attempt = asyncio.get_running_loop().create_future()
        await asyncio.shield(attempt)
        if self._conversation is None or self._conversation.end is not None:
            raise self._unavailable()
        return self._conversation

    def _unavailable(self) -> ToolError:
        text = f"mcp server {self.name} is unavailable"
        if self._conversation is not None and self._conversation.end is not None:
            return ToolError(f"{text}: {self._conversation.end.why}", kind="unavailable")
        if self.state == "waiting":
            text += f", next attempt in {self.waits_s} s"
        return ToolError(f"{text}: {self.reason}" if self.reason else text, kind="unavailable")

    async def listed(self) -> Listing:
        """What the server has; connects where nobody knows.

        :raises ToolError: ``unavailable``
        """
        if self.listing is None:
            await self.connected()
        if self.listing is None:
            raise self._unavailable()
        return self.listing

    # ── the owner's task ────────────────────────────────────────────────────────────────────────

    async def _own(self) -> None:
        failures, at_once = 0, False
        while True:
            conversation: Conversation | None = None
            changed, lost = asyncio.Event(), asyncio.Event()
            hooks = Hooks(changed.set, self.subscriptions.updated, lambda _, over=lost: over.set())
            fruitful = False
            try:
                self.state = "connecting"
                if self._attempt is None or self._attempt.done():
                    self._attempt = asyncio.get_running_loop().create_future()
                self.attempts += 1
                conversation = Conversation(self._channel(), self.name, self.definition.grants, self._version, hooks)
                await self._opened(conversation)
                self._conversation, self.state, self.reason = conversation, "connected", ""
                self._settle()
                answered = conversation.answered
                await self._kept(conversation, changed, lost)
                fruitful = conversation.answered > answered
            except Exception as error:  # whatever it is, a server is tried again later and harms nobody else
                self.reason = _why(error, self.definition.connect_timeout_ms)
            finally:
                if conversation is not None:
                    if conversation.end is not None and self.state == "connected":
                        self.reason = conversation.end.why
                    await conversation.aclose()
                self._conversation = None
            failures = 1 if fruitful else failures + 1
            ended = conversation.end if conversation is not None else None
            at_once = ended is not None and ended.forgotten and (fruitful or not at_once)
            if not at_once:
                await self._paused(self.backoff_s[min(failures, len(self.backoff_s)) - 1])

    async def _paused(self, delay_s: float) -> None:
        self.state, self._next_at = "waiting", asyncio.get_running_loop().time() + delay_s
        self._settle()
        await asyncio.sleep(delay_s)

    def _settle(self) -> None:
        """The attempt is over, whichever way: whoever waits for it looks what there is."""
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_result(None)

    async def _opened(self, conversation: Conversation) -> None:
        """Connect, agree on a version, and see what there is: no call is made by a definition that is not the present one."""
        timeout_s = self.definition.connect_timeout_ms / 1000
        async with asyncio.timeout(timeout_s):
            await conversation.channel.open(conversation)
            try:
                await conversation.begin(self._hint, timeout_s)
            except Lost:
                if self._hint is None:
                    self._hint = "legacy"  # it may have ended for being asked something that it does not know
                raise
            self._hint = conversation.era
            await self._list(conversation)

    async def _kept(self, conversation: Conversation, changed: asyncio.Event, lost: asyncio.Event) -> None:
        """Until it is lost: list again when the server says so, and have the subscriptions that are wanted."""
        self.subscriptions.begin(conversation, changed)
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
                    async with asyncio.timeout(self.definition.connect_timeout_ms / 1000):
                        await self._list(conversation)
                except (RpcError, TimeoutError, TooLong):
                    pass  # it does not say now; what it said before holds
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LIST_AGAIN_S):
                        await lost.wait()
        finally:
            await self.subscriptions.end()

    async def _list(self, conversation: Conversation) -> None:
        before, found = self.listing, await listed(conversation)
        if found == before:
            return
        self.listing = found
        await asyncio.to_thread(listings.write, self._root, self.name, self.definition.hash, found)
        await self._when_changed()

    async def aclose(self) -> None:
        """End the connection, and what was started for it."""
        self.state = "closed"
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)
        self._settle()


def _why(error: Exception, timeout_ms: int) -> str:
    if isinstance(error, TimeoutError):
        return f"it was not ready within {timeout_ms} ms"
    if isinstance(error, Lost):
        return error.why
    if isinstance(error, RpcError):
        return f"it refused to begin: {error.message[:300]}"
    return str(error) or type(error).__name__
