"""The resource subscriptions of an open session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from handrail.contract.doors.offers import SourceRequest
from handrail.contract.errors import ToolError
from handrail.contract.tool.offering import Offering, Stamped, offered

logger = logging.getLogger("handrail.arbiter")

MOST_SUBSCRIBED = 1_000
"""Resources of one session."""
TOLD_EVERY_S = 0.1
"""A session is told of one resource this often at most, and once more of what came meanwhile."""
LOOK_EVERY_S = 1.0
"""How often sources that do not tell are glanced at, while a session wants to hear of what they have."""
_ENDING_S = 5.0
_SUBSCRIBING = SourceRequest("resources/subscribe", "uri")

Stop = Callable[[], Awaitable[None]]


class Subscriptions:
    """Of one session.

    :param tell: told the URI of what has changed, as the session named it
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._stops: dict[str, Stop | None] = {}
        self._stamps: dict[str, str] = {}
        """By URI, of those whose source can only be looked at."""
        self._glances: dict[str, str] = {}
        """By URI, of those of them at which a glance tells something."""
        self._offerings: Sequence[Offering] = ()
        """Those there are, as far as is known here."""
        self._watching: asyncio.Task[None] | None = None
        self._quiet: dict[str, bool] = {}
        """By URI that was told of just now: whether it has changed again since."""
        self._over = False

    def __contains__(self, uri: str) -> bool:
        return uri in self._stops

    async def add(self, uri: str, offering: Offering, named: str) -> None:
        """
        :param uri: as the session names it
        :param named: as its source does
        :raises ToolError: ``unavailable`` where the source does not tell; ``limit`` for too many
        """
        if uri in self._stops:
            return
        if self._over or len(self._stops) >= MOST_SUBSCRIBED:
            raise ToolError(f"a session is told of {MOST_SUBSCRIBED:,} resources at most", kind="limit")
        self._stops[uri] = None  # its place, while the source is asked
        before = uri[: len(uri) - len(named)] if uri.endswith(named) else ""
        try:
            stop = await offering.subscribe(named, lambda changed: self._updated(uri, before + changed))
            if isinstance(offering, Stamped):
                glance = await asyncio.to_thread(offering.glance, named)  # first: what changes meanwhile is seen
                self._stamps[uri] = await asyncio.to_thread(offering.stamp, named)
                if glance:
                    self._watch(uri, glance, offering)
        except BaseException:
            self._stops.pop(uri, None)
            self._forget(uri)
            raise
        if self._over or uri not in self._stops:  # no longer wanted
            self._forget(uri)
            await stop()
        else:
            self._stops[uri] = stop

    async def remove(self, uri: str) -> bool:
        """Whether there was one."""
        if uri not in self._stops:
            return False
        stop = self._stops.pop(uri)
        self._forget(uri)
        if stop is not None:
            await stop()
        return True

    async def aclose(self) -> None:
        """End all of them, within bounds, whatever their sources do."""
        self._over = True
        if self._watching is not None:
            self._watching.cancel()
        stops, self._stops = [stop for stop in self._stops.values() if stop is not None], {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                for failure in await asyncio.gather(*(stop() for stop in stops), return_exceptions=True):
                    if isinstance(failure, Exception):
                        logger.info("a source was not told that nobody listens any more: %s", failure)

    async def look_again(self, offerings: Sequence[Offering]) -> None:
        """Tell of what is other now, of sources that do not tell themselves.

        :param offerings: those there are now
        """
        self._offerings = offerings
        await self._look(self._stamps)

    async def _look(self, uris: Iterable[str]) -> None:
        for uri, stamp in [(uri, self._stamps[uri]) for uri in uris if uri in self._stamps]:
            found = offered(self._offerings, _SUBSCRIBING, uri)
            now = ""
            if found is not None and isinstance(found[0], Stamped):
                now = await asyncio.to_thread(found[0].stamp, found[1])
            if now != stamp and uri in self._stamps:
                self._stamps[uri] = now
                self._updated(uri, uri)

    def _forget(self, uri: str) -> None:
        self._stamps.pop(uri, None)
        self._glances.pop(uri, None)
        if not self._glances and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _watch(self, uri: str, glance: str, offering: Offering) -> None:
        """Glance at it now and then, with all others in one go."""
        self._glances[uri] = glance
        if not self._offerings:
            self._offerings = (offering,)
        elif all(offering is not one for one in self._offerings):
            self._offerings = (offering, *self._offerings)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watched(), name="glances at what is offered")

    async def _watched(self) -> None:
        while self._glances:
            await asyncio.sleep(LOOK_EVERY_S)
            found = {uri: offered(self._offerings, _SUBSCRIBING, uri) for uri in self._glances}
            seen = await asyncio.to_thread(_glances_at, found)
            if other := [uri for uri, glance in seen.items() if self._glances.get(uri, glance) != glance]:
                self._glances |= {uri: seen[uri] for uri in other}
                await self._look(other)

    def _updated(self, uri: str, changed: str) -> None:
        if self._over or uri not in self._stops:
            return
        if changed in self._quiet:
            self._quiet[changed] = True
        elif len(self._quiet) < MOST_SUBSCRIBED:  # of a part that nobody named there may be any number
            self._quiet[changed] = False
            asyncio.get_running_loop().call_later(TOLD_EVERY_S, self._again, uri, changed)
            self._tell(changed)

    def _again(self, uri: str, changed: str) -> None:
        if self._quiet.pop(changed, False):
            self._updated(uri, changed)


def _glances_at(found: Mapping[str, tuple[Offering, str] | None]) -> dict[str, str]:
    """What a glance at each tells now; called in a thread."""
    seen: dict[str, str] = {}
    for uri, at in found.items():
        seen[uri] = at[0].glance(at[1]) if at is not None and isinstance(at[0], Stamped) else ""
    return seen
