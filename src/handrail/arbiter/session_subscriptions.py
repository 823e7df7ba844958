"""The resource subscriptions of an open session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from handrail.contract.errors import ToolError
from handrail.contract.services.resource_services import SourceRequestSpec
from handrail.contract.tool.resource_provider import PollableResourceProvider, ResourceProvider, find_resource_provider

logger = logging.getLogger("handrail.arbiter")

MAX_SUBSCRIPTIONS = 1_000
"""Resources of one session."""
NOTIFY_INTERVAL_S = 0.1
"""The shortest interval between two notifications about one resource. Changes in between give one more notification."""
POLL_INTERVAL_S = 1.0
"""How often the kernel checks subscribed resources of sources that send no notifications."""
_ENDING_S = 5.0
_SUBSCRIBING = SourceRequestSpec("resources/subscribe", "uri")

Stop = Callable[[], Awaitable[None]]


class SessionResourceSubscriptions:
    """The resource subscriptions of one session.

    :param tell: called with the URI of a changed resource, as the session names it
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._stops: dict[str, Stop | None] = {}
        self._stamps: dict[str, str] = {}
        """Stamps by URI, for resources of sources that send no notifications."""
        self._glances: dict[str, str] = {}
        """Cheap stamps by URI, for those of these resources that have one."""
        self._offerings: Sequence[ResourceProvider] = ()
        """The present sources, as far as known here."""
        self._watching: asyncio.Task[None] | None = None
        self._quiet: dict[str, bool] = {}
        """URIs with a recent notification, and whether they have changed again since."""
        self._over = False

    def __contains__(self, uri: str) -> bool:
        return uri in self._stops

    async def subscribe_resource(self, uri: str, offering: ResourceProvider, named: str) -> None:
        """Subscribe to a resource.

        :param uri: the URI as the session names it
        :param named: the URI as its source names it
        :raises ToolError: ``unavailable`` if the source does not support subscriptions; ``limit`` if there are too many
        """
        if uri in self._stops:
            return
        if self._over or len(self._stops) >= MAX_SUBSCRIPTIONS:
            raise ToolError(
                f"This session cannot subscribe to more resources. The limit is {MAX_SUBSCRIPTIONS:,}. Unsubscribe from some first.",
                kind="limit",
            )
        self._stops[uri] = None  # reserves its place while the source answers
        before = uri[: len(uri) - len(named)] if uri.endswith(named) else ""
        try:
            stop = await offering.subscribe(named, lambda changed: self._on_updated(uri, before + changed))
            if isinstance(offering, PollableResourceProvider):
                glance = await asyncio.to_thread(
                    offering.quick_stamp, named
                )  # first, so that a change meanwhile is noticed
                self._stamps[uri] = await asyncio.to_thread(offering.content_stamp, named)
                if glance:
                    self._start_polling_resource(uri, glance, offering)
        except BaseException:
            self._stops.pop(uri, None)
            self._drop(uri)
            raise
        if self._over or uri not in self._stops:  # no longer wanted
            self._drop(uri)
            await stop()
        else:
            self._stops[uri] = stop

    async def unsubscribe_resource(self, uri: str) -> bool:
        """Remove a subscription and return whether there was one."""
        if uri not in self._stops:
            return False
        stop = self._stops.pop(uri)
        self._drop(uri)
        if stop is not None:
            await stop()
        return True

    async def aclose(self) -> None:
        """End all subscriptions within a limited time, even if sources do not answer."""
        self._over = True
        if self._watching is not None:
            self._watching.cancel()
        stops, self._stops = [stop for stop in self._stops.values() if stop is not None], {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                for failure in await asyncio.gather(*(stop() for stop in stops), return_exceptions=True):
                    if isinstance(failure, Exception):
                        logger.info("a subscription could not be ended at its source: %s", failure)

    async def poll_and_report_changed_resources(self, offerings: Sequence[ResourceProvider]) -> None:
        """Check sources that send no notifications, and report changed resources.

        :param offerings: the present sources
        """
        self._offerings = offerings
        await self._check(self._stamps)

    async def _check(self, uris: Iterable[str]) -> None:
        for uri, stamp in [(uri, self._stamps[uri]) for uri in uris if uri in self._stamps]:
            found = find_resource_provider(self._offerings, _SUBSCRIBING, uri)
            now = ""
            if found is not None and isinstance(found[0], PollableResourceProvider):
                now = await asyncio.to_thread(found[0].content_stamp, found[1])
            if now != stamp and uri in self._stamps:
                self._stamps[uri] = now
                self._on_updated(uri, uri)

    def _drop(self, uri: str) -> None:
        self._stamps.pop(uri, None)
        self._glances.pop(uri, None)
        if not self._glances and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _start_polling_resource(self, uri: str, glance: str, offering: ResourceProvider) -> None:
        """Check the resource at intervals, in one task for all."""
        self._glances[uri] = glance
        if not self._offerings:
            self._offerings = (offering,)
        elif all(offering is not one for one in self._offerings):
            self._offerings = (offering, *self._offerings)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._poll(), name="poll the offered resources")

    async def _poll(self) -> None:
        while self._glances:
            await asyncio.sleep(POLL_INTERVAL_S)
            found = {uri: find_resource_provider(self._offerings, _SUBSCRIBING, uri) for uri in self._glances}
            seen = await asyncio.to_thread(_read_quick_stamps, found)
            if other := [uri for uri, glance in seen.items() if self._glances.get(uri, glance) != glance]:
                self._glances |= {uri: seen[uri] for uri in other}
                await self._check(other)

    def _on_updated(self, uri: str, changed: str) -> None:
        if self._over or uri not in self._stops:
            return
        if changed in self._quiet:
            self._quiet[changed] = True
        elif len(self._quiet) < MAX_SUBSCRIPTIONS:  # a source may report any number of parts
            self._quiet[changed] = False
            asyncio.get_running_loop().call_later(NOTIFY_INTERVAL_S, self._notify_again, uri, changed)
            self._tell(changed)

    def _notify_again(self, uri: str, changed: str) -> None:
        if self._quiet.pop(changed, False):
            self._on_updated(uri, changed)


def _read_quick_stamps(found: Mapping[str, tuple[ResourceProvider, str] | None]) -> dict[str, str]:
    """Return the present cheap stamps. Called in a thread."""
    seen: dict[str, str] = {}
    for uri, at in found.items():
        seen[uri] = at[0].quick_stamp(at[1]) if at is not None and isinstance(at[0], PollableResourceProvider) else ""
    return seen
