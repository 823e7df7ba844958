"""Upstream MCP servers: which there are, how they are reached, and why one cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from handrail.kernel.doctor.check import Check

if TYPE_CHECKING:
    from handrail.config import Configuration
    from handrail.kernel.servers import ServerStatus
    from handrail.store.folders import Folders


def of_servers(servers: Iterable[ServerStatus]) -> Iterator[Check]:
    """One line for each."""
    for server in servers:
        known = "never connected yet" if server.tools is None else f"{server.tools} tools"
        spoken = f", {server.protocol}" if server.protocol else ""
        about = f"{server.transport} {server.where}: {server.state}{spoken}, {known}"
        name = f"mcp server {server.name}"
        if server.reason:
            remedy = f"see [mcp.servers.{server.name}]"
            for sign in ("handrail mcp install", "handrail mcp login"):
                if sign in server.reason:
                    remedy = f"{sign} {server.name}"
            yield Check(name, "problem", f"{about}; {server.reason}", remedy)
        else:
            yield Check(name, "ok", about)


def of_configured(config: Configuration, folders: Folders) -> Iterator[Check]:
    """Those of a configuration, without connecting anybody."""
    from handrail.kernel.agents import as_configured
    from handrail.kernel.servers import status_of
    from handrail.upstream.configured.configured import configured
    from handrail.upstream.source import McpSource

    found = configured(config, as_configured(config))
    yield from of_servers(status_of(McpSource(one, folders.state, str(folders.workspace))) for one in found)
