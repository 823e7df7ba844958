"""The hosts that the program of a server asked for and was refused, kept for the operator, who decides whether to add them.

The file ``mcp/requested/NAME.json`` of the state root counts the refusals of each host and port. Names of hosts come from the
program, so they are data that people read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import StartError
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.text.host_names import grant_covers_host, parse_host_address
from handrail.store import operator_decisions

MAX_HOSTS = 100
_MAX_FILE_BYTES = 256 * 1024


class DeniedHostRecorder:
    """The refused hosts of one server.

    :param state: the root folder of all state
    """

    def __init__(self, state: Path, server: str) -> None:
        self._path = _locate(state, server)
        self._counts = dict(read_denied_host_counts(state, server))
        self._writing: asyncio.Task[None] | None = None
        self._is_changed = False

    def record_attempt(self, attempt: ConnectionAttempt) -> None:
        """Count a refused attempt, and store it in the background."""
        host = f"{attempt.host}:{attempt.port}"
        if attempt.refusal_reason is None or (host not in self._counts and len(self._counts) >= MAX_HOSTS):
            return
        self._counts[host] = self._counts.get(host, 0) + 1
        self._is_changed = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="mcp: stores requested hosts")

    async def wait_until_stored(self) -> None:
        """Wait until everything that was recorded is stored."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        while self._is_changed:
            self._is_changed = False
            await asyncio.to_thread(_store, self._path, json.dumps(self._counts, sort_keys=True).encode())


def read_denied_host_counts(state: Path, server: str) -> Mapping[str, int]:
    """Return how often a server asked for each refused host, most often first."""
    content = operator_decisions.read_private_file(_locate(state, server), _MAX_FILE_BYTES)
    try:
        found: Any = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        found = {}
    counts = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    valid = {host: count for host, count in counts.items() if isinstance(count, int) and count > 0}
    return dict(sorted(valid.items(), key=lambda one: (-one[1], one[0])))


def describe_denied_hosts(state: Path, server: str, allowed: tuple[str, ...]) -> list[str]:
    """Return a line for each refused host that the server's table does not have yet.

    :param allowed: the hosts of its table
    """
    lines: list[str] = []
    for host, count in read_denied_host_counts(state, server).items():
        name, _, port = host.rpartition(":")
        if any(_covers(pattern, host) for pattern in allowed):
            continue
        times = "once" if count == 1 else f"{count} times"
        shown = name if port == "443" else host
        lines.append(f'asked for {shown} {times}: to allow it, add "{shown}" to hosts of [mcp.servers.{server}]')
    return lines


def _covers(pattern: str, host: str) -> bool:
    """Return whether a pattern of a server's table allows a host. The pattern ``*`` allows public hosts only."""
    try:
        found = parse_host_address(host)
    except ValueError:
        return False
    is_public = found.address is None and "." in found.name and not found.name.endswith(".localhost")
    return grant_covers_host(pattern, host) and (is_public or not pattern.startswith("*"))


def _store(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError, StartError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        operator_decisions.write_private_file(path, content)


def _locate(state: Path, server: str) -> Path:
    return state / "mcp" / "requested" / f"{server}.json"
