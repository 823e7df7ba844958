"""What the calls of a session are resolved and judged by: an agent, the tools that it has, its rules.

One arbiter, one lock table and one log serve any number of contexts. Those of one agent share their generations of
tools, except where a process brought tools of its own: these belong to its sessions alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from handrail.catalog.view import CatalogOptions
from handrail.contract.agent import AgentManifest
from handrail.contract.errors import UsageError
from handrail.contract.requires import Layer
from handrail.contract.tool import Tool
from handrail.policy.authority import Authority
from handrail.policy.rules import RuleBook
from handrail.registry.generation import Difference, Generation
from handrail.registry.sources.all import ToolSources
from handrail.registry.succession import Succession
from handrail.runtime.roots import NO_FURTHER, FurtherRoots
from handrail.runtime.secrets import NO_SECRETS, SecretStore


class Shelf:
    """The generations of tools of one agent, made from the same sources."""

    def __init__(
        self,
        sources: ToolSources,
        succession: Succession,
        layer: Callable[[Iterable[Generation]], Layer],
        numbers: Callable[[], int],
        publish: Callable[[Generation, Difference | None], None],
    ) -> None:
        """
        :param layer: what the agent has, with the tools of these generations
        :param numbers: gives the number of the next generation, whichever shelf it is for
        :param publish: puts a new generation on record
        """
        self._sources = sources
        self.succession = succession
        self._layer = layer
        self._numbers = numbers
        self._publish = publish
        self.is_on_record = False
        """Whether sessions have worked with it."""
        self.authorities: list[Authority] = []
        """Those that judge by what the agent's tools require."""
        self._reloading = asyncio.Lock()
        self.watchers: list[Callable[[Generation], None]] = []
        """Told of each new generation."""

    def begin(self) -> None:
        """A session works with it: from now on its generations are on record. Who only looks leaves no trace."""
        if not self.is_on_record:
            self.is_on_record = True
            self._publish(self.succession.current, None)

    async def reload(self, given: Iterable[Tool] | None = None) -> Difference:
        """Look through the sources again, in a thread, and publish what they have as the next generation, in one step.
        Calls go on meanwhile.

        :param given: instead of the tools given in code before; None leaves those as they are
        :raises LoadError: with every fault; the current generation stays
        :raises UsageError: when the kernel was closed meanwhile
        """
        tools = None if given is None else tuple(given)
        async with self._reloading:  # one after the other, so that the numbers rise
            sources = self._sources if tools is None else replace(self._sources, given=tools)
            number = self._numbers()
            generation, layer = await asyncio.to_thread(self._look, sources, number, self.succession.living)
            return self._follow(sources, generation, layer)

    def _look(self, sources: ToolSources, number: int, living: Iterable[Generation]) -> tuple[Generation, Layer]:
        generation = sources.load(number)
        return generation, self._layer((generation, *living))

    def _follow(self, sources: ToolSources, generation: Generation, layer: Layer) -> Difference:
        if self.succession.closed:
            raise UsageError("the kernel was closed while its tools were looked through; open it anew")
        difference = self.succession.publish(generation)
        self._sources = sources
        for authority in self.authorities:
            authority.agent_layer = layer
        if self.is_on_record:
            self._publish(generation, difference)
        for told in tuple(self.watchers):
            told(generation)
        return difference


class Context:
    """One agent in one process's sessions.

    :ivar further: the agent's roots beside the workspace
    :ivar rules: those that every session of it starts with
    :ivar secrets: what its sessions' tools may be given
    :ivar catalog: how its sessions' models see the tools
    :ivar shared: whether other contexts see the same generations, so that they do not end with this one
    """

    def __init__(
        self,
        manifest: AgentManifest,
        shelf: Shelf,
        authority: Authority,
        rules: RuleBook,
        further: FurtherRoots = NO_FURTHER,
        *,
        shared: bool,
        secrets: SecretStore = NO_SECRETS,
        catalog: CatalogOptions | None = None,
    ) -> None:
        self.manifest = manifest
        self.catalog = catalog or CatalogOptions(core=manifest.core)
        self.further = further
        self.shelf = shelf
        self.authority = authority
        self.rules = rules
        self.shared = shared
        self.secrets = secrets
        shelf.authorities.append(authority)

    @property
    def agent(self) -> str:
        """The agent's id."""
        return self.manifest.id

    @property
    def generation(self) -> Generation:
        """The tools there are now. A turn keeps those there were when it began."""
        return self.shelf.succession.current

    def part(self, own: Context) -> None:
        """Go on, in sessions that are open as well, with the tools of ``own``, which nobody else has or will have."""
        before = self.shelf
        before.authorities.remove(self.authority)
        own.shelf.authorities[:] = [self.authority]
        self.authority.agent_layer = own.authority.agent_layer
        self.shelf, self.shared = own.shelf, own.shared
        if before.is_on_record:
            own.shelf.begin()

    async def aclose(self) -> None:
        """Nobody opens sessions of it any more."""
        self.shelf.authorities.remove(self.authority)
        if not self.shared:
            await self.shelf.succession.aclose()
