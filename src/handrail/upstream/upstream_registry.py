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

from handrail.config import MergedConfiguration
from handrail.contract.errors import UsageError
from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings
from handrail.contract.sandbox_protocol import Process, ProgramSpec, Sandbox, SandboxProfile
from handrail.contract.text.host_names import bracket_ipv6_host, parse_http_url
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, PathVariables, expand_requires
from handrail.contract.tool_generation import ToolSource
from handrail.policy.path_denials import build_hidden_path_rules as hides
from handrail.policy.rules.matchers import RuleRanking
from handrail.policy.rules.rules_and_modes import Rule, RuleBook
from handrail.runtime.secret_store import SecretStore
from handrail.store.state_folders import StateFolders
from handrail.upstream.server_config_loader import is_path_inside, load_enabled_servers

if TYPE_CHECKING:
    from handrail.sandbox.network.egress_check import HostGate
    from handrail.upstream.client.upstream_session import McpTransport
    from handrail.upstream.mcp_source import McpSource
    from handrail.upstream.oauth_sign_in import SignInPrompt
    from handrail.upstream.requested_hosts import DeniedHostRecorder
    from handrail.upstream.server_definition import ServerDefinition
    from handrail.upstream.upstream_connection import UpstreamServerConnection

FIRST_CONNECT_WAIT_S = 1.0
"""The delay in seconds before the first connection to an unknown server with a URL, since its client code loads slowly."""


def list_cached_sources(config: MergedConfiguration, folders: StateFolders) -> list[ToolSource]:
    """Return the configured servers with their cached listings, without a connection.

    :raises LoadError: with every fault of their configuration
    """
    names = SecretStore(dict.fromkeys(config.settings.secrets, ""))
    if not (found := load_enabled_servers(config, names)):
        return []
    from handrail.upstream.mcp_source import McpSource

    return [McpSource(one, folders.state, str(folders.workspace)) for one in found]


class UpstreamDependencies(NamedTuple):
    """The dependencies of the servers of one workspace.

    :param rules: the project's rules, whose denials of hosts and files apply to servers too
    :param register_secret: called with every value that may be a secret
    """

    folders: StateFolders
    sandbox: Sandbox
    variables: PathVariables
    ceiling: CapabilityLayer | None
    rules: RuleBook
    register_secret: Callable[[str], None] = lambda value: None
    route: OutboundConnectionSettings = DIRECT_ROUTE


class UpstreamRegistry:
    """The servers of one workspace, in the lease holder's process. For one event loop.

    :ivar on_listing_changed: called with each source whose listing has changed
    """

    def __init__(
        self, deps: UpstreamDependencies, definitions: Iterable[ServerDefinition] = (), *, version: str = "0"
    ) -> None:
        self._ground = deps
        self._version = version
        self._sources: dict[str, McpSource] = {}
        self._requested: dict[str, DeniedHostRecorder] = {}
        self.on_listing_changed: Callable[[McpSource], Awaitable[object]] = _ignore_change
        self._looking: set[asyncio.Task[None]] = set()
        self._awaited = asyncio.Event()
        """Set when a caller waits for the first listings."""
        self._closed = False
        for definition in definitions:
            self.add(definition)

    def add(self, definition: ServerDefinition, prompt: SignInPrompt | None = None) -> McpSource:
        """Add a server.

        :param prompt: how a user signs in at it; None if no user is present
        :raises UsageError: if a server of this name exists
        """
        if definition.name in self._sources:
            raise UsageError(f"MCP server {definition.name!r} already exists. Choose another name for this one.")
        from handrail.upstream.mcp_source import McpSource
        from handrail.upstream.upstream_connection import UpstreamServerConnection

        source: McpSource

        async def changed() -> None:
            if not self._closed:
                with contextlib.suppress(UsageError):  # the kernel is being closed
                    await self.on_listing_changed(source)

        dependencies = self._ground
        upstream = UpstreamServerConnection(
            definition,
            lambda: self._channel(definition, prompt),
            dependencies.folders.state,
            changed,
            version=self._version,
            limit_time=asyncio.timeout if prompt is None else prompt.limit_time,
        )
        source = McpSource(definition, dependencies.folders.state, str(dependencies.folders.workspace), upstream)
        self._sources[definition.name] = source
        return source

    async def close_and_remove_server(self, name: str) -> None:
        """Close a server and remove it."""
        source = self._sources.pop(name)
        source.gone = True
        assert source.upstream is not None
        await source.upstream.aclose()
        if not self._closed:
            with contextlib.suppress(UsageError):
                await self.on_listing_changed(source)

    @property
    def register_secret(self) -> Callable[[str], None]:
        """A function to call with every value that may be a secret."""
        return self._ground.register_secret

    @property
    def sources(self) -> list[McpSource]:
        return list(self._sources.values())

    def __getitem__(self, name: str) -> UpstreamServerConnection:
        """Return the connection of a server.

        :raises KeyError: if no server has this name
        """
        upstream = self._sources[name].upstream
        assert upstream is not None
        return upstream

    def __iter__(self) -> Iterable[UpstreamServerConnection]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (source.upstream for source in self.sources if source.upstream is not None)

    def connect_unlisted_servers(self) -> None:
        """Connect the servers without a known listing, in the background. The others connect on first use.

        Servers with a URL are connected a little later, or as soon as a caller waits for them.
        """
        for source in self.sources:
            upstream = source.upstream
            if upstream is not None and upstream.listing is None and not source.explain_misconfiguration():
                task = asyncio.create_task(self._connect_first(upstream), name=f"mcp {upstream.name}: first look")
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

    async def wait_for_unlisted_servers(self) -> None:
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
        for requested in self._requested.values():
            await requested.wait_until_stored()

    async def _connect_first(self, upstream: UpstreamServerConnection) -> None:
        if upstream.definition.transport != "stdio":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_CONNECT_WAIT_S):
                    await self._awaited.wait()
            if upstream.listing is not None:
                return
        with contextlib.suppress(Exception):  # callers that need it get the reason
            if upstream.definition.transport != "stdio":
                await asyncio.to_thread(import_module, "handrail.upstream.client.http_transport")
            await upstream.ensure_connected()

    def _channel(self, definition: ServerDefinition, prompt: SignInPrompt | None) -> McpTransport:
        if definition.transport == "stdio":
            from handrail.upstream.client.stdio_transport import StdioTransport

            return StdioTransport(
                lambda: self._start_program(definition),
                _find_hidden_paths(definition, str(self._ground.folders.workspace)),
            )
        from handrail.upstream.client.http_transport import make_http_transport

        reach, gate, dependencies = (
            self._hosts_reachable_by_kernel(definition),
            self._make_host_check(definition),
            self._ground,
        )
        return make_http_transport(
            definition,
            reach,
            gate,
            dependencies.folders.state,
            prompt,
            dependencies.register_secret,
            dependencies.route,
        )

    def _requested_hosts(self, name: str) -> DeniedHostRecorder:
        from handrail.upstream.requested_hosts import DeniedHostRecorder

        if name not in self._requested:
            self._requested[name] = DeniedHostRecorder(self._ground.folders.state, name)
        return self._requested[name]

    def _hosts_reachable_by_kernel(self, definition: ServerDefinition) -> CapabilitySet:
        """Return the hosts that Handrail itself may connect to. ``localhost`` is the loopback of this machine."""
        hosts = list(definition.client_egress_hosts)
        for address in (parse_http_url(definition.url).host,):
            if address.name == "localhost":
                hosts += [f"127.0.0.1:{address.port}", f"{bracket_ipv6_host('::1')}:{address.port}"]
        return self._layer_capabilities(CapabilityLayer(f"mcp server {definition.name}", hosts=tuple(hosts)))

    def _layer_capabilities(self, layer: CapabilityLayer) -> CapabilitySet:
        ceiling = self._ground.ceiling
        return CapabilitySet((layer,) if ceiling is None else (layer, ceiling))

    def _make_host_check(self, definition: ServerDefinition) -> HostGate:
        """Return a check of hosts against the project's deny rules. A server cannot ask for approval."""
        ranking = RuleRanking((rule for rule in self._ground.rules if _is_about_hosts(rule)), "host")

        def gate(host: str, port: int) -> str | None:
            used = ranking.find_winner(f"{host}:{port}")
            if used is None or used.rule.action != "deny":
                return None
            return f"a rule denies {host} to MCP server {definition.name}: {used.rule.text} ({used.rule.source})"

        return gate

    async def _start_program(self, definition: ServerDefinition) -> Process:
        """Start the program of a server, in a sandbox with what the server was granted.

        :raises UpstreamConnectionLost: if it cannot be started
        """
        from handrail.upstream.client.upstream_session import UpstreamConnectionLost
        from handrail.upstream.server_programs import ServerCommandRejected, resolve_server_program

        dependencies = self._ground
        workspace = str(dependencies.folders.workspace)

        def found() -> tuple[tuple[str, ...], tuple[str, ...]]:
            resolved = resolve_server_program(definition, dependencies.folders.state, workspace)
            resolved.verify_file_hashes()
            return resolved.argv, resolved.folders

        try:
            argv, folders = await asyncio.to_thread(found)
        except ServerCommandRejected as refused:
            raise UpstreamConnectionLost(str(refused), unsent=True) from None
        if fault := _fault_in_start_folder(definition, workspace):
            raise UpstreamConnectionLost(fault, unsent=True)
        layer = expand_requires(definition.requires, dependencies.variables, f"mcp server {definition.name}")
        home = dependencies.folders.prepare_tool_home(f"mcp-{definition.name}")
        self[definition.name].scratch_folder, self[definition.name].scratch_files = home, None
        profile = SandboxProfile(
            workspace,
            home,
            bool(definition.write),
            readable=tuple(dict.fromkeys((*folders, *map(os.path.realpath, definition.folders)))),
            hidden=(str(dependencies.folders.state),),
            cwd=_locate_start_folder(definition, workspace) or None,
            environment=definition.environment,
            check_host=self._make_host_check(definition),
            on_attempt=self._requested_hosts(definition.name).record_attempt,
            denials=hides(dependencies.rules, workspace),
            route=dependencies.route,
            serves=True,
            tcp=definition.tcp,
        )
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:  # a descriptor prevents a prepared successor, which a long-running program does not need
            return await dependencies.sandbox.start(
                self._layer_capabilities(layer), profile, ProgramSpec(argv, {3: nothing})
            )
        finally:
            os.close(nothing)


def _locate_start_folder(definition: ServerDefinition, workspace: str) -> str:
    """Return the configured working directory of a server's program; empty if none is configured."""
    if not definition.cwd:
        return ""
    return os.path.realpath(Path(workspace) / Path(definition.cwd).expanduser())


def _fault_in_start_folder(definition: ServerDefinition, workspace: str) -> str:
    """Return why a server's program cannot begin in its working directory; empty if it can."""
    folder = _locate_start_folder(definition, workspace)
    if not folder:
        return ""
    table = f"[mcp.servers.{definition.name}]"
    if not Path(folder).is_dir():
        return f"cwd of {table} is {folder!r}, which is not a folder; correct it"
    if is_path_inside(Path(folder), Path(workspace)):
        return (
            "" if definition.read or definition.write else f"cwd of {table} is in the workspace; add read = ['.'] too"
        )
    shown = any(is_path_inside(Path(folder), Path(os.path.realpath(one))) for one in definition.folders)
    return "" if shown else f"cwd of {table} is {folder!r}, which its program cannot see; add it to folders"


def _find_hidden_paths(definition: ServerDefinition, workspace: str) -> dict[str, str]:
    """Return the arguments of a server that its sandbox hides, each with the setting that shows it."""
    table = f"[mcp.servers.{definition.name}]"
    found: dict[str, str] = {}
    for path in map(Path, definition.args):
        if (
            not path.is_absolute()
            or not path.exists()
            or any(is_path_inside(path, Path(one)) for one in definition.folders)
        ):
            continue
        if not is_path_inside(path, Path(workspace)):
            found[str(path)] = f"add {str(path.parent)!r} to folders of {table}"
        elif not definition.read:
            found[str(path)] = f"read of {table} lists the parts of the workspace that it sees, as read = ['.']"
    return found


async def _ignore_change(_: McpSource) -> None:
    return None


def _is_about_hosts(rule: Rule) -> bool:
    return rule.scope != "default" and rule.permission in ("net.fetch", "net.*", "*")
