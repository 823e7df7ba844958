"""What a client has been shown in listings, and notifying it when that changes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from handrail.frontends.mcp.offers import Outputs
from handrail.frontends.mcp.skills import SkillPrompts

if TYPE_CHECKING:
    from mcp.server.session import ServerSession

    from handrail.frontends.mcp.clients.guest import Guest
    from handrail.kernel.kernel import Kernel

MOST_SUBSCRIPTIONS = 1_000
"""Resources to which one client may subscribe."""


class Visit:
    """A client, with what it was shown and subscribed to.

    :ivar gone: whether its connection has ended, so that its session ends with its work
    :ivar level: the lowest log level that a client of the older era is sent, as an index into the list of levels
    """

    def __init__(self, kernel: Kernel, spawn: Callable[[Coroutine[Any, Any, Any]], None], guest: Guest) -> None:
        """:param spawn: runs what it is given in a task, which ends with the server"""
        self.guest = guest
        self.gone = False
        self.level = 1
        self.outputs = Outputs(kernel, guest)
        self.skills = SkillPrompts(kernel, guest)
        self.subscribed: dict[str, int] = {}
        """Resource to how many subscriptions it has."""
        self._kernel = kernel
        self._spawn = spawn
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus, max_subscriptions=64)
        self.listening = 0
        self._client: ServerSession | None = None
        """The connection of a client of the older era."""
        self._shown: dict[str, Callable[[], Sequence[object]]] = {}
        self._told: dict[str, Sequence[object]] = {}
        self._telling = False
        self._mark: tuple[object, int, int] | None = None
        guest.changed = self.look_again
        guest.updated = lambda uri: spawn(self._tell_of_resource(uri))

    @property
    def unheard(self) -> bool:
        """Whether nobody listens."""
        return not self.listening

    def heard(self, client: ServerSession) -> None:
        """Remember the connection of a request of the older era, by which the client can be notified."""
        self._client = client

    def close(self) -> None:
        """End the subscriptions."""
        self.listen.close()

    def lists(self, what: str, shown: Callable[[], Sequence[object]]) -> None:
        """Notify the client from now on when the tools, resources or prompts that it was shown change.

        :param shown: gives what the listing would show now
        """
        self._shown[what] = shown
        self._told[what] = shown()

    def subscribe(self, uri: str) -> bool:
        """Count one more subscription. Gives whether it is the first.

        :raises MCPError: when there are too many
        """
        if uri not in self.subscribed and len(self.subscribed) >= MOST_SUBSCRIPTIONS:
            raise MCPError(INVALID_PARAMS, f"at most {MOST_SUBSCRIPTIONS:,} resources can be subscribed to")
        self.subscribed[uri] = self.subscribed.get(uri, 0) + 1
        return self.subscribed[uri] == 1

    def unsubscribe(self, uri: str) -> bool:
        """Count one subscription less. Gives whether it was the last."""
        left = self.subscribed.get(uri, 0) - 1
        if left > 0:
            self.subscribed[uri] = left
            return False
        return self.subscribed.pop(uri, None) is not None

    def may_have_changed(self) -> bool:
        """Whether anything may have changed, so that it is worth comparing. Quick, because it is asked after each call."""
        now = (self._kernel.generation, self.outputs.changes, len(self.guest.session.view))
        before, self._mark = self._mark, now
        return before is None or before[0] is not now[0] or before[1:] != now[1:]

    def look_again(self) -> None:
        """Compare the listings soon, because something may have changed."""
        if not self._telling and self._shown:
            self._telling = True
            self._spawn(self.tell_of_changes())

    async def tell_of_changes(self) -> None:
        """Notify the client of each listing that is different now."""
        self._telling = False
        for what, shown in self._shown.items():
            if (now := shown()) != self._told[what]:
                self._told[what] = now
                await self._tell_of_list(what)

    async def _tell_of_list(self, what: str) -> None:
        # The newer protocol has subscriptions for this, and the older one notifications.
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
