"""The upstream MCP servers of one workspace, connected in the lease holder's process.

Four separate steps lead to a tool: the user installs the server (``handrail mcp install``), configures or enables it, names its
hosts and folders, and approves the definitions of its tools. The rules then decide about each call.

Code that only servers need is loaded with the first of them, since most calls need none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from handrail.config import Configuration
from handrail.contract.errors import UsageError
from handrail.contract.generation import Source
from handrail.contract.sandbox import Process, Profile, Program, Sandbox
from handrail.contract.text.hosts import bracketed, read_url
from handrail.contract.tool.requires import CapabilitySet, Layer, Variables, expand
from handrail.policy.authority import hidden as hides
from handrail.policy.rules.matching import Ranking
from handrail.policy.rules.rules import Rule, RuleBook
from handrail.runtime.secrets import SecretStore
from handrail.store.folders import Folders
from handrail.upstream.configured import configured, is_beneath

if TYPE_CHECKING:
    from handrail.sandbox.network.egress import Gate
    from handrail.upstream.client.conversation import Channel
    from handrail.upstream.definition import ServerDefinition
    from handrail.upstream.oauth import Prompt
    from handrail.upstream.owner import Upstream
    from handrail.upstream.source import McpSource

FIRST_LOOK_S = 1.0
"""The delay in seconds before the first connection to an unknown server with a URL, since its client code loads slowly."""


def listed_sources(config: Configuration, folders: Folders) -> list[Source]:
    """Return the configured servers with their cached listings, without a connection.

    :raises LoadError: with every fault of their configuration
    """
    names = SecretStore(dict.fromkeys(config.settings.secrets, ""))
    if not (found := configured(config, names)):
        return []
    from handrail.upstream.source import McpSource

    return [McpSource(one, folders.state, str(folders.workspace)) for one in found]


class Ground(NamedTuple):
    """The dependencies of the servers of one workspace.

    :param rules: the project's rules, whose denials of hosts and files apply to servers too
    :param learn: called with every value that may be a secret
    """

    folders: Folders
    sandbox: Sandbox
    variables: Variables
    ceiling: Layer | None
    rules: RuleBook
    learn: Callable[[str], None] = lambda value: None


class Upstreams:
    """The servers of one workspace, in the lease holder's process. For one event loop.

    :ivar when_changed: called with each source whose listing has changed
    """

    def __init__(self, ground: Ground, definitions: Iterable[ServerDefinition] = (), *, version: str = "0") -> None:
        self._ground = ground
        self._version = version
        self._sources: dict[str, McpSource] = {}
        self.when_changed: Callable[[McpSource], Awaitable[object]] = _nobody
        self._looking: set[asyncio.Task[None]] = set()
        self._awaited = asyncio.Event()
        """Set when a caller waits for the first listings."""
        self._closed = False
        for definition in definitions:
            self.add(definition)

    def add(self, definition: ServerDefinition, prompt: Prompt | None = None) -> McpSource:
        """Add a server.

        :param prompt: how a user signs in at it; None if no user is present
        :raises UsageError: if a server of this name exists
        """
        if definition.name in self._sources:
            raise UsageError(f"MCP server {definition.name!r} already exists. Choose another name for this one.")
        from handrail.upstream.owner import Upstream
        from handrail.upstream.source import McpSource

        source: McpSource

        async def changed() -> None:
            if not self._closed:
                with contextlib.suppress(UsageError):  # the kernel is being closed
                    await self.when_changed(source)

        ground = self._ground
        upstream = Upstream(
            definition,
            lambda: self._channel(definition, prompt),
            ground.folders.state,
            changed,
            version=self._version,
        )
        source = McpSource(definition, ground.folders.state, str(ground.folders.workspace), upstream)
        self._sources[definition.name] = source
        return source

    async def remove(self, name: str) -> None:
        """Close a server and remove it."""
        source = self._sources.pop(name)
        source.gone = True
        assert source.upstream is not None
        await source.upstream.aclose()
        if not self._closed:
            with contextlib.suppress(UsageError):
                await self.when_changed(source)

    @property
    def learn(self) -> Callable[[str], None]:
        """A function to call with every value that may be a secret."""
        return self._ground.learn

    @property
    def sources(self) -> list[McpSource]:
        return list(self._sources.values())

    def __getitem__(self, name: str) -> Upstream:
        """Return the connection of a server.

        :raises KeyError: if no server has this name
        """
        upstream = self._sources[name].upstream
        assert upstream is not None
        return upstream

    def __iter__(self) -> Iterable[Upstream]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (source.upstream for source in self.sources if source.upstream is not None)

    def look_at_new(self) -> None:
        """Connect the servers without a known listing, in the background. The others connect on first use.

        Servers with a URL are connected a little later, or as soon as a caller waits for them.
        """
        for source in self.sources:
            upstream = source.upstream
            if upstream is not None and upstream.listing is None and not source.fault():
                task = asyncio.create_task(self._first_look(upstream), name=f"mcp {upstream.name}: first look")
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

    async def looked_at(self) -> None:
        """Wait until each server without a known listing has been tried once."""
        self._awaited.set()
        if self._looking:
            await asyncio.wait(tuple(self._looking))

    async def aclose(self) -> None:
        """Close all servers at the same time, even if some fail."""
        self._closed = True
        for task in tuple(self._looking):
            task.cancel()
        upstreams = [source.upstream for source in self.sources if source.upstream is not None]
        await asyncio.gather(*self._looking, *(one.aclose() for one in upstreams), return_exceptions=True)

    async def _first_look(self, upstream: Upstream) -> None:
        if upstream.definition.transport != "stdio":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    await self._awaited.wait()
            if upstream.listing is not None:
                return
        with contextlib.suppress(Exception):  # callers that need it get the reason
            if upstream.definition.transport != "stdio":
                await asyncio.to_thread(import_module, "handrail.upstream.client.http")
            await upstream.connected()

    def _channel(self, definition: ServerDefinition, prompt: Prompt | None) -> Channel:
        if definition.transport == "stdio":
            from handrail.upstream.client.stdio import StdioChannel

            return StdioChannel(
                lambda: self._started(definition), _unseen(definition, str(self._ground.folders.workspace))
            )
        from handrail.upstream.client.http import http_channel

        reach, gate, ground = self._reach(definition), self._gate(definition), self._ground
        return http_channel(definition, reach, gate, ground.folders.state, prompt, ground.learn)

    def _reach(self, definition: ServerDefinition) -> CapabilitySet:
        """Return the hosts that Handrail itself may connect to. ``localhost`` is the loopback of this machine."""
        hosts = list(definition.reached)
        for address in (read_url(definition.url).host,):
            if address.name == "localhost":
                hosts += [f"127.0.0.1:{address.port}", f"{bracketed('::1')}:{address.port}"]
        return self._set(Layer(f"mcp server {definition.name}", hosts=tuple(hosts)))

    def _set(self, layer: Layer) -> CapabilitySet:
        ceiling = self._ground.ceiling
        return CapabilitySet((layer,) if ceiling is None else (layer, ceiling))

    def _gate(self, definition: ServerDefinition) -> Gate:
        """Return a check of hosts against the project's deny rules. A server cannot ask for approval."""
        ranking = Ranking((rule for rule in self._ground.rules if _is_about_hosts(rule)), "host")

        def gate(host: str, port: int) -> str | None:
            used = ranking.winner(f"{host}:{port}")
            if used is None or used.rule.action != "deny":
                return None
            return f"a rule denies {host} to MCP server {definition.name}: {used.rule.text} ({used.rule.source})"

        return gate

    async def _started(self, definition: ServerDefinition) -> Process:
        """Start the program of a server, in a sandbox with what the server was granted.

        :raises Lost: if it cannot be started
        """
        from handrail.upstream.client.conversation import Lost
        from handrail.upstream.install import Refused, resolve

        ground = self._ground
        workspace = str(ground.folders.workspace)

        def found() -> tuple[tuple[str, ...], tuple[str, ...]]:
            resolved = resolve(definition, ground.folders.state, workspace)
            resolved.check()
            return resolved.argv, resolved.folders

        try:
            argv, folders = await asyncio.to_thread(found)
        except Refused as refused:
            raise Lost(str(refused), unsent=True) from None
        layer = expand(definition.requires, ground.variables, f"mcp server {definition.name}")
        profile = Profile(
            workspace,
            ground.folders.home_of(f"mcp-{definition.name}"),
            bool(definition.write),
            readable=tuple(dict.fromkeys((*folders, *map(os.path.realpath, definition.folders)))),
            hidden=(str(ground.folders.state),),
            environment=definition.environment,
            gate=self._gate(definition),
            denials=hides(ground.rules, workspace),
        )
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:  # a descriptor prevents a prepared successor, which a long-running program does not need
            return await ground.sandbox.start(self._set(layer), profile, Program(argv, {3: nothing}))
        finally:
            os.close(nothing)


def _unseen(definition: ServerDefinition, workspace: str) -> dict[str, str]:
    """Return the arguments of a server that its sandbox hides, each with the setting that shows it."""
    table = f"[mcp.servers.{definition.name}]"
    found: dict[str, str] = {}
    for path in map(Path, definition.args):
        if (
            not path.is_absolute()
            or not path.exists()
            or any(is_beneath(path, Path(one)) for one in definition.folders)
        ):
            continue
        if not is_beneath(path, Path(workspace)):
            found[str(path)] = f"add {str(path.parent)!r} to folders of {table}"
        elif not definition.read:
            found[str(path)] = f"read of {table} lists the parts of the workspace that it sees, as read = ['.']"
    return found


async def _nobody(_: McpSource) -> None:
    return None


def _is_about_hosts(rule: Rule) -> bool:
    return rule.scope != "default" and rule.permission in ("net.fetch", "net.*", "*")
