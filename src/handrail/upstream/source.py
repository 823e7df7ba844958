"""An upstream server as the registry sees it: what it listed the last time, judged like every foreign source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from handrail.contract.errors import Fault
from handrail.registry.sources.source import Found, Loaded, Rank
from handrail.upstream import listing as listings
from handrail.upstream.definition import ServerDefinition
from handrail.upstream.installed import Refused, resolve
from handrail.upstream.listing import Item, Listing
from handrail.upstream.offering import McpOffering
from handrail.upstream.tools import McpTool

if TYPE_CHECKING:
    from handrail.upstream.owner import Upstream


class McpSource:
    """Implements :class:`~handrail.registry.sources.source.Source`. Loading looks at what is known and connects nobody.

    :param upstream: None for who only looks
    """

    rank: Rank = "package"
    foreign = True

    def __init__(
        self, definition: ServerDefinition, state: Path, workspace: str, upstream: Upstream | None = None
    ) -> None:
        self.definition = definition
        self.upstream = upstream
        self.gone = False
        """It was disconnected: nothing of it is there any more."""
        self._state = state
        self._workspace = workspace
        self._requires = definition.requires
        self._made: dict[str, McpTool] = {}
        self._offered: tuple[object, McpOffering] | None = None

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def listing(self) -> Listing | None:
        """What the server is known to have; None before anybody has been connected to it."""
        if self.upstream is not None:
            return self.upstream.listing
        return listings.read(self._state, self.name, self.definition.hash)

    def fault(self) -> str:
        """Why the server cannot be used as it is configured; empty where it can."""
        if self.definition.missing:
            return self.definition.missing
        if self.definition.transport == "stdio":
            try:
                resolve(self.definition, self._state, self._workspace, to_start=False)
            except Refused as error:
                return str(error)
        return ""

    def unreachable(self) -> str:
        """Why the server cannot be reached now, and when that is tried again; empty where nothing is known against it."""
        if fault := self.fault():
            return f"mcp server {self.name} cannot be used: {fault}"
        if self.upstream is not None and self.upstream.state == "waiting":
            return (
                f"mcp server {self.name} cannot be reached: {self.upstream.reason}; the next attempt is in "
                f"{self.upstream.waits_s} s"
            )
        return ""

    @property
    def prefix(self) -> str:
        return self.name if self.definition.prefix is None else self.definition.prefix

    def standing(self) -> str:
        """See :class:`~handrail.contract.generation.Unheard`."""
        if fault := self.fault():
            return f"mcp server {self.name} cannot be used: {fault}. A person sees more with: handrail mcp list"
        nobody = f"nobody knows the tools of mcp server {self.name} yet"
        review = f"What they say is then looked at by a person before one runs: handrail sources review {self.name}"
        upstream = self.upstream
        if upstream is None:
            return f"{nobody}, which has never been connected. {review}"
        if upstream.state == "closed":
            return f"{nobody}, which has been closed with its kernel"
        if upstream.state == "waiting":
            return f"{nobody}: {upstream.reason}; the next attempt is in {upstream.waits_s} s. {review}"
        return f"{nobody}: it is being connected for the first time; try again in a moment. {review}"

    def load(self) -> Loaded:
        if self.gone:
            return Loaded(name=self.name)
        faults: list[Fault] = []
        if fault := self.fault():
            faults.append(Fault(self.definition.place, "", fault))
        listing = self.listing
        if listing is None:
            return Loaded((), tuple(faults), self.name, self.definition.about, unheard=self)
        found: list[Found] = []
        made: dict[str, McpTool] = {}
        for item in listing.tools:
            tool = self._tool(item, made, faults)
            if tool is not None:
                found.append(Found(tool, f"mcp server {self.name}"))
        if listing.left_out:
            faults.append(
                Fault(f"mcp server {self.name}", "", f"{listing.left_out} of what it lists is too much or too large")
            )
        self._made = made
        offering = self._offering(listing)
        return Loaded(tuple(found), tuple(faults), self.name, self.definition.about, offering=offering)

    def _offering(self, listing: Listing) -> McpOffering | None:
        """The same object as long as the server says the same of it."""
        key = listing.resources, listing.templates, listing.prompts
        if not any(key):
            return None
        if self._offered is None or self._offered[0] != key:
            self._offered = key, McpOffering(listing, self.definition, self.upstream)
        return self._offered[1]

    def _tool(self, item: Item, made: dict[str, McpTool], faults: list[Fault]) -> McpTool | None:
        name = str(item.get("name"))
        if name in made:
            faults.append(Fault(f"mcp server {self.name}", name, "is listed twice; the first counts"))
            return None
        known = self._made.get(name)
        if known is not None and (known.item is item or known.item == item):
            made[name] = known
            return known
        try:
            made[name] = tool = McpTool(item, self.upstream, self.definition, self._requires)
        except (ValueError, TypeError, RecursionError) as error:
            faults.append(Fault(f"mcp server {self.name}", name[:100], str(error)))
            return None
        return tool
