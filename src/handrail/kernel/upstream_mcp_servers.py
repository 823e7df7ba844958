"""``kernel.mcp_servers``: the upstream MCP servers of an open kernel, and sign-in at one.

A program can also connect a server::

    async with kernel.mcp.connect("files", command="mcp-server-filesystem", args=["/data"]) as server:
        await server.approve()
        result = await session.call("files_read_file", {"path": "/data/notes.txt"})
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pydantic

from handrail.config import MergedConfiguration
from handrail.config.mcp_settings import SERVER_NAME_PATTERN, UpstreamServerSettings
from handrail.config.secret_references import resolve_secrets
from handrail.contract.errors import HandrailError, ToolError, UsageError
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import PathVariables
from handrail.ipc.codec.protocol_rpc import WIRE_CODEC, RequestHandler, make_request_handler, make_request_operation
from handrail.ipc.wire.operation_dispatch import OperationSpec
from handrail.kernel.sandbox_selection import make_limited_sandbox
from handrail.policy.call_targets import build_ceiling_capability_layer
from handrail.policy.rules.rules_and_modes import RuleBook
from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.store.state_folders import StateFolders, prepare_folders
from handrail.upstream.network_route import make_server_route
from handrail.upstream.oauth_sign_in import OauthTokenStore, SignInPrompt, SignInRequired
from handrail.upstream.server_config_loader import build_server_definition, load_enabled_servers
from handrail.upstream.server_definition import ServerListing
from handrail.upstream.upstream_registry import UpstreamDependencies, UpstreamRegistry

if TYPE_CHECKING:
    from handrail.contract.tool_generation import Generation
    from handrail.ipc.client.reconnecting_client import ReconnectingClient
    from handrail.ipc.server.client_process import ClientProcess
    from handrail.kernel.kernel_assembly import KernelComponents
    from handrail.runtime.secret_store import SecretStore
    from handrail.upstream.mcp_source import McpSource


logger = logging.getLogger("handrail.ipc")


class McpServerStatus(Struct, frozen=True):
    """The current state of one server.

    :param where: its command or address, without secrets
    :param state: ``idle`` (not used yet), ``connecting``, ``connected``, ``waiting`` (for the next attempt), ``closed``
    :param reason: the reason why it is not connected, if it should be
    :param protocol: the protocol version of the current or last connection; empty if unknown
    :param tools: the number of listed tools; None if it was never connected
    """

    name: str
    transport: Literal["stdio", "http", "sse"]
    where: str
    state: Literal["idle", "connecting", "connected", "waiting", "closed"]
    reason: str
    protocol: str
    tools: int | None


class ConnectedMcpServer:
    """A server that :meth:`McpServerManager.connect` has connected.

    :ivar listing: the listing of the server, as the server wrote it
    """

    def __init__(
        self,
        name: str,
        listing: ServerListing,
        generation: Callable[[], Generation],
        pins: StoredPins,
        refresh: Callable[[], Awaitable[object]],
    ) -> None:
        self.name = name
        self.listing = listing
        self._generation = generation
        self._pins = pins
        self._refresh = refresh

    @property
    def tool_availability(self) -> dict[str, str | None]:
        """The ids of its tools, each with the reason why it is unavailable, or None."""
        entries = self._generation().entries.values()
        return {
            entry.id: entry.unavailable_reason
            for entry in entries
            if entry.third_party is not None and entry.third_party.name == self.name
        }

    async def approve_tool_definitions(self, tools: Iterable[str] | None = None) -> None:
        """Approve the current definitions of tools, like ``handrail sources approve``.

        :param tools: the ids of the tools; None for all
        :raises StartError: if the state folder cannot be written
        """
        wanted = None if tools is None else set(tools)
        entries = self._generation().entries
        found = [tool_id for tool_id in self.tool_availability if wanted is None or tool_id in wanted]
        self._pins.approve(self.name, [ThirdPartyDefinition.from_spec(entries[tool_id].spec) for tool_id in found])
        await self._refresh()


class McpServerManager(ABC):
    """The upstream MCP servers of one kernel."""

    @property
    @abstractmethod
    def server_statuses(self) -> Sequence[McpServerStatus]:
        """The current state of all servers."""

    @abstractmethod
    def connect(
        self,
        name: str,
        *,
        command: str | None = None,
        url: str | None = None,
        prompt: SignInPrompt | None = None,
        **settings: Any,
    ) -> AbstractAsyncContextManager[ConnectedMcpServer]:
        """Connect a further server until the block ends.

        Its tools are available to every session of this workspace, with the ids ``<name>_<tool>``. A tool runs only after its
        definition has been approved.

        :param command: the command of a server that runs here, in a sandbox; or
        :param url: the URL of a server over HTTP
        :param prompt: how the user signs in, if the server requires it
        :param settings: any setting of ``[mcp.servers.NAME]``: ``args``, ``env``, ``read``, ``hosts``, ``elicitation``, …
        :raises UsageError: if a setting is invalid, or the name is in use
        :raises ToolError: ``unavailable`` if the server cannot be reached
        """


class ReconnectableMcpServer(NamedTuple):
    """A server that a program has connected, with the data to connect it again with the next lease holder."""

    server: UpstreamServerSettings
    prompt: SignInPrompt | None


class LocalMcpServerManager(McpServerManager):
    """The servers in the lease holder."""

    def __init__(
        self, generation: Callable[[], Generation], components: KernelComponents, secrets: SecretStore
    ) -> None:
        """Create the servers of a kernel.

        :param generation: returns the current generation of the kernel
        """
        self._generation = generation
        self._components = components
        self._secrets = secrets
        self._live_servers: dict[str, ReconnectableMcpServer] = {}
        self._successor: McpServerManager | None = None

    @property
    def server_statuses(self) -> Sequence[McpServerStatus]:
        return [get_server_status(source) for source in self._components.upstreams.sources]

    @asynccontextmanager
    async def connect(
        self,
        name: str,
        *,
        command: str | None = None,
        url: str | None = None,
        prompt: SignInPrompt | None = None,
        **settings: Any,
    ) -> AsyncGenerator[ConnectedMcpServer]:
        server = _parse_server_settings(name, command=command, url=url, **settings)
        connected = await self.connect_until_disconnected(name, server, prompt)
        try:
            yield connected
        finally:
            await self.disconnect_server(name)

    async def connect_until_disconnected(
        self, name: str, server: UpstreamServerSettings, prompt: SignInPrompt | None
    ) -> ConnectedMcpServer:
        """Connect a server until :meth:`disconnect_server`; see :meth:`connect`."""
        rooms = self._components
        definition = build_server_definition(
            name, server, "Kernel.mcp.connect", self._secrets, rooms.upstreams.register_secret
        )
        source = rooms.upstreams.add(definition, prompt)
        try:
            await rooms.upstreams[name].ensure_connected()
            await rooms.publish_source_tools(source)
        except BaseException:
            await rooms.upstreams.close_and_remove_server(name)
            raise
        self._live_servers[name] = ReconnectableMcpServer(server, prompt)
        listing = source.last_listing
        assert listing is not None
        pins = StoredPins(rooms.store.folders.state)
        return ConnectedMcpServer(name, listing, self._generation, pins, lambda: rooms.publish_source_tools(source))

    async def publish_server_tools(self, name: str) -> None:
        """Publish the current tools of a server, for example after an approval."""
        source = next((one for one in self._components.upstreams.sources if one.name == name), None)
        if source is not None:
            await self._components.publish_source_tools(source)

    async def disconnect_server(self, name: str) -> None:
        """Disconnect a server that was connected here, or that moved to the next lease holder."""
        if self._live_servers.pop(name, None) is not None:
            await self._components.upstreams.close_and_remove_server(name)
        elif isinstance(self._successor, RemoteMcpServerManager):
            await self._successor.disconnect_server(name)

    async def disconnect_all_servers(self) -> None:
        """Disconnect all servers that were connected here."""
        for name in tuple(self._live_servers):
            await self.disconnect_server(name)

    async def transfer_servers_to(self, successor: McpServerManager) -> None:
        """Move all servers that were connected here to the next lease holder."""
        live = dict(self._live_servers)
        await self.disconnect_all_servers()
        self._successor = successor
        if isinstance(successor, RemoteMcpServerManager):
            successor.reconnect_former_servers(live)


class ClientMcpServerManager:
    """The servers that a client process has connected, on the lease holder's side.

    They end with its connection.
    """

    def __init__(self, components: KernelComponents, client: ClientProcess) -> None:
        self._components = components
        self._client = client
        self._local_servers: LocalMcpServerManager | None = None
        self.requests: Mapping[str, RequestHandler] = {
            "mcp.connect": make_request_handler(self._connect),
            "mcp.look": make_request_handler(self._refresh),
            "mcp.remove": make_request_handler(self._remove),
        }

    def _get_servers(self) -> LocalMcpServerManager:
        if self._local_servers is None:
            context = self._client.context
            secrets = context.secrets.with_added_secrets(self._client.secrets)
            self._local_servers = LocalMcpServerManager(lambda: context.generation, self._components, secrets)
            self._client.add_disconnect_callback(self._local_servers.disconnect_all_servers)
        return self._local_servers

    async def _connect(self, name: str, server: UpstreamServerSettings, redirect: str | None) -> Any:
        prompt = None
        if redirect is not None:
            prompt = SignInPrompt(redirect, lambda url: self._open_address(name, url))
        connected = await self._get_servers().connect_until_disconnected(name, server, prompt)
        if self._client.connection.lost_reason is not None:
            await self._get_servers().disconnect_all_servers()
        return WIRE_CODEC.encode_value(ServerListing, connected.listing)

    async def _open_address(self, name: str, url: str) -> str:
        return WIRE_CODEC.get_type_reader(str)(
            await self._client.connection.request("mcp.visit", {"name": name, "url": url})
        )

    async def _refresh(self, name: str) -> None:
        await self._get_servers().publish_server_tools(name)

    async def _remove(self, name: str) -> None:
        await self._get_servers().disconnect_server(name)


class RemoteMcpServerManager(McpServerManager):
    """The MCP servers in a client process.

    The lease holder runs all servers, and all processes have their tools.

    :param ipc_client: returns the connection to the lease holder
    :param generation: returns the current generation of the kernel
    """

    def __init__(
        self,
        folders: StateFolders,
        config: MergedConfiguration,
        ipc_client: Callable[[], ReconnectingClient],
        generation: Callable[[], Generation],
    ) -> None:
        self._folders = folders
        self._config = config
        self._ipc_client = ipc_client
        self._generation = generation
        self._live_servers: dict[str, ReconnectableMcpServer] = {}
        self._prompts: dict[str, SignInPrompt] = {}
        self._listings: dict[str, ServerListing] = {}
        self.requests: Mapping[str, OperationSpec] = {
            "mcp.visit": make_request_operation(
                "mcp.visit", make_request_handler(self._open_address), cancel_when_lost=True
            )
        }
        """The request of the lease holder: open an address where the user signs in."""

    @property
    def server_statuses(self) -> Sequence[McpServerStatus]:
        """The configured servers, as far as this process knows them, and those that it has connected."""
        from handrail.kernel.agent_loading import make_placeholder_secrets
        from handrail.upstream.mcp_source import McpSource

        config, folders = self._config, self._folders

        def status(definition: Any) -> McpServerStatus:
            return get_server_status(McpSource(definition, folders.state, str(folders.workspace)))

        names = make_placeholder_secrets(config)
        found = [status(one) for one in load_enabled_servers(config, names)]
        for name, live in self._live_servers.items():
            one = status(build_server_definition(name, live.server, "Kernel.mcp.connect", names))
            found.append(replace(one, state="connected", tools=len(self._listings[name].tools)))
        return found

    @asynccontextmanager
    async def connect(
        self,
        name: str,
        *,
        command: str | None = None,
        url: str | None = None,
        prompt: SignInPrompt | None = None,
        **settings: Any,
    ) -> AsyncGenerator[ConnectedMcpServer]:
        live = ReconnectableMcpServer(_parse_server_settings(name, command=command, url=url, **settings), prompt)
        listing = await self._add(name, live)
        self._live_servers[name] = live

        async def look_again() -> None:
            await self._ipc_client().request("mcp.look", {"name": name}, repeatable=True)

        try:
            yield ConnectedMcpServer(name, listing, self._generation, StoredPins(self._folders.state), look_again)
        finally:
            await self.disconnect_server(name)

    async def disconnect_server(self, name: str) -> None:
        """Disconnect a server that was connected from here."""
        self._prompts.pop(name, None)
        if self._live_servers.pop(name, None) is not None and self._ipc_client().current_connection is not None:
            await self._ipc_client().request("mcp.remove", {"name": name}, repeatable=True)

    def reconnect_former_servers(self, live: Mapping[str, ReconnectableMcpServer]) -> None:
        """Connect the servers that this process had connected while it held the workspace."""
        self._live_servers |= live
        self.reconnect_all_servers()

    def reconnect_all_servers(self) -> None:
        """Connect the servers of this process again with the next lease holder."""
        for name, live in tuple(self._live_servers.items()):
            self._ipc_client().start_background_task(self._reconnect(name, live))

    async def _reconnect(self, name: str, live: ReconnectableMcpServer) -> None:
        try:
            await self._add(name, live)
        except HandrailError as error:
            logger.warning("mcp server %s cannot be connected with the next lease holder: %s", name, error)

    async def _add(self, name: str, live: ReconnectableMcpServer) -> ServerListing:
        body: dict[str, Any] = {"name": name, "server": live.server.model_dump(mode="json", exclude_unset=True)}
        body["redirect"] = None if live.prompt is None else live.prompt.redirect
        if live.prompt is not None:
            self._prompts[name] = live.prompt
        answer = await self._ipc_client().request("mcp.connect", body, settle=True, repeatable=True)
        self._listings[name] = listing = WIRE_CODEC.get_type_reader(ServerListing)(answer)
        return listing

    async def _open_address(self, name: str, url: str) -> str:
        if name not in self._prompts:
            raise UsageError(f"This process has started no sign-in for the MCP server {name[:60]!r}. Start one first.")
        return await self._prompts[name].open_browser(url)


def _parse_server_settings(name: str, **settings: Any) -> UpstreamServerSettings:
    """Parse the settings of a server.

    :raises UsageError: if the name or a setting is invalid
    """
    import re

    if re.fullmatch(SERVER_NAME_PATTERN, name) is None:
        raise UsageError(
            f"Invalid server name: {name[:60]!r}. Expected at most 40 letters, digits, '-' and '_', starting with a letter."
        )
    given = {key: value for key, value in settings.items() if value is not None}
    if not {"command", "url"} & given.keys():
        raise UsageError(f"Missing `command` or `url` for the server {name!r}. Pass command=… or url=…")
    try:
        return UpstreamServerSettings.model_validate(given)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UsageError(f"Invalid settings for the server {name!r}: {problems}.") from None


def get_server_status(source: McpSource) -> McpServerStatus:
    """Return the current state of a server."""
    definition, upstream, listing = source.definition, source.upstream, source.last_listing
    protocol = upstream.protocol_version if upstream is not None else ""
    return McpServerStatus(
        definition.name,
        definition.transport,
        definition.url_or_command,
        upstream.state if upstream is not None else "idle",
        (upstream.reason if upstream is not None else "") or source.explain_misconfiguration(),
        protocol or (listing.protocol if listing is not None else ""),
        None if listing is None else len(listing.tools),
    )


# Connection of a server without a kernel, to sign in with a browser or to list its content.

SIGN_IN_TIMEOUT_S = 300.0
_MAX_HEAD = 16 * 1024
_REQUEST_TIMEOUT_S = 10.0
"""The time limit for the request of a browser."""
_MAX_CONNECTIONS = 32
_SIGNED_IN_PAGE = b"You are signed in. You can close this page and go back to the terminal."
_REFUSED_PAGE = b"You are not signed in. The terminal has the reason. You can close this page."
_OTHER_SIGN_IN_PAGE = b"This page belongs to another sign-in. Open the address in the terminal again."


async def sign_in_to_server(
    config: MergedConfiguration, folders: StateFolders, name: str, show: Callable[[str], None]
) -> int:
    """Connect a configured server, and let the user sign in. The tokens are stored for later starts.

    :param show: shows an address to the user
    :return: the number of tools of the server
    :raises UsageError: if the server does not exist or has no ``url``, or if the sign-in fails
    """
    if (definition := next((one for one in load_enabled_servers(config) if one.name == name), None)) is None:
        raise UsageError(f"The configuration has no MCP server {name!r}. Run `handrail mcp list` to see the servers.")
    oauth_options = definition.oauth
    registered = OauthTokenStore(definition, folders.state).registered_redirect_uri
    kept = _get_port(registered, oauth_options.callback_host)
    async with _serve_sign_in_callback(show, oauth_options.callback_host, oauth_options.callback_port, kept) as prompt:
        tools = await fetch_and_store_tool_list(config, folders, name, prompt)
    if tools is None:
        raise UsageError(
            f"The configuration has no MCP server {name!r} with a `url`. List the servers with: handrail mcp list"
        )
    return tools


async def fetch_and_store_tool_list(
    config: MergedConfiguration, folders: StateFolders, name: str, prompt: SignInPrompt | None = None
) -> int | None:
    """Connect a configured server once, and store its listing.

    :param prompt: how the user signs in; then only servers with a ``url`` are used
    :return: the number of its tools; None if the server does not exist
    :raises UsageError: if it cannot be reached
    """
    known = await resolve_secrets(config.settings.secrets, os.environ)
    definition = next((one for one in load_enabled_servers(config, known) if one.name == name), None)
    if definition is not None and definition.missing_reason:
        raise UsageError(f"MCP server {name!r} cannot be used: {definition.missing_reason}. Correct it first.")
    if definition is None or (prompt is not None and not definition.url):
        return None
    folders = prepare_folders(
        folders.workspace, folders.state, allow_home=True
    )  # checked when the folders were located
    variables = PathVariables(workspace=(str(folders.workspace),))
    ceiling = build_ceiling_capability_layer(config.settings.ceiling, variables)
    upstreams = UpstreamRegistry(
        UpstreamDependencies(
            folders,
            GuardedSandbox(make_limited_sandbox(config)),
            variables,
            ceiling,
            RuleBook(),
            route=make_server_route(config.settings, known),
        )
    )
    upstreams.add(definition, prompt)
    try:
        await upstreams[name].ensure_connected()
        return len((await upstreams[name].ensure_listing_known()).tools)
    except ToolError as error:
        raise UsageError(error.text) from None
    finally:
        await upstreams.aclose()


def delete_server_tokens(config: MergedConfiguration, folders: StateFolders, name: str) -> bool:
    """Delete the stored tokens of a server, and return whether there were any.

    :raises UsageError: if the server does not exist
    """
    if not (names := [one for one in load_enabled_servers(config) if one.name == name]):
        raise UsageError(f"The configuration has no MCP server {name!r}. List the servers with: handrail mcp list")
    return OauthTokenStore(names[0], folders.state).delete()


def _get_port(address: str, host: str) -> int:
    """Return the port in an address of a host; 0 for another host, or without a port."""
    try:
        parts = urlsplit(address)
        return (parts.port or 0) if parts.hostname == host else 0
    except ValueError:
        return 0


@asynccontextmanager
async def _serve_sign_in_callback(
    show: Callable[[str], None], host: str, port: int, kept_port: int
) -> AsyncGenerator[SignInPrompt]:
    """Serve a page on the loopback address, to which the browser returns after the sign-in.

    :param host: the host in its address
    :param port: the configured port; 0 for none
    :param kept_port: the port of the last registration, for which a free one is taken if another program has it; 0 for none
    :raises UsageError: if another program has the configured port
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[str] = loop.create_future()
    expected_state = ""
    """The state of the address that the user was shown last; empty before."""
    open_now = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            if open_now <= _MAX_CONNECTIONS:
                await answered(reader, writer)
        finally:
            open_now -= 1
            writer.close()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        faults = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
        with contextlib.suppress(*faults):
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
            known = method == "GET" and target.startswith("/callback?")
            fields = parse_qs(urlsplit(target).query)
            is_expected = known and _is_redirect_of(fields, expected_state)
            body = b"Page not found." if not known else _OTHER_SIGN_IN_PAGE
            if is_expected:
                body = _REFUSED_PAGE if "error" in fields else _SIGNED_IN_PAGE
            status = b"200 OK" if is_expected else b"400 Bad Request" if known else b"404 Not Found"
            writer.write(
                b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
                % (status, len(body), body)
            )
            await writer.drain()
            if is_expected and not came.done():
                came.set_result(target)

    try:
        server = await asyncio.start_server(serve, "127.0.0.1", port or kept_port, limit=_MAX_HEAD)
    except OSError as error:
        if port:
            raise UsageError(
                f"Port {port} for the return of the browser cannot be used: {error.strerror or error}. Stop the program that uses it, or set another callback_port."
            ) from None
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_MAX_HEAD)
    bound = server.sockets[0].getsockname()[1]
    servers = [server]
    if host == "localhost":  # a browser may try the address of IPv6 first
        with contextlib.suppress(OSError):
            servers.append(await asyncio.start_server(serve, "::1", bound, limit=_MAX_HEAD))
    origin = f"http://{host}:{bound}"

    async def visit(address: str) -> str:
        nonlocal came, expected_state
        came, expected_state = loop.create_future(), parse_qs(urlsplit(address).query).get("state", [""])[0]
        show(address)
        try:
            async with asyncio.timeout(SIGN_IN_TIMEOUT_S):
                return origin + await came
        except TimeoutError:
            raise SignInRequired(
                f"the browser did not return within {SIGN_IN_TIMEOUT_S:g} s; sign in again with: handrail mcp login NAME"
            ) from None

    try:
        yield SignInPrompt(f"{origin}/callback", visit)
    finally:
        for one in servers:
            one.close()


def _is_redirect_of(fields: Mapping[str, list[str]], state: str) -> bool:
    """Return whether a browser returns from the sign-in with a state. An error may come without one."""
    if not state:
        return False
    return fields.get("state", [""])[0] == state or ("error" in fields and "state" not in fields)
