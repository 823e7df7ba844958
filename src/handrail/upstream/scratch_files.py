"""The files that a server's program leaves in its own folder, which neither the user nor another tool sees."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_MAX_FILES = 2_000
_MAX_NAMED = 10
_CACHES = frozenset({"node_modules", "__pycache__", "site-packages", "Library", "AppData", "logs", "tmp"})


def list_scratch_files(folder: str) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file that is not hidden and not in a cache, by its path in ``folder``."""
    found: dict[str, tuple[int, int]] = {}
    for at, inner, files in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in _CACHES)
        for name in sorted(files):
            if name.startswith(".") or name.endswith((".log", ".lock", ".tmp", ".pid")):
                continue
            try:
                status = (Path(at) / name).lstat()
            except OSError:
                continue
            found[os.path.relpath(f"{at}/{name}", folder)] = (status.st_size, status.st_mtime_ns)
            if len(found) >= _MAX_FILES:
                return found
    return found


def describe_new_files(
    server: str, folder: str, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> str:
    """Return a text about the files that a call has written into the server's own folder; empty without any."""
    written = [name for name, status in after.items() if before.get(name) != status]
    if not written:
        return ""
    named = ", ".join(written[:_MAX_NAMED]) + (
        f" and {len(written) - _MAX_NAMED} more" if len(written) > _MAX_NAMED else ""
    )
    return (
        f"The server wrote {named} into its own folder {folder}, not into the workspace. To let it write there, the user sets "
        f"write and cwd of [mcp.servers.{server}]."
    )
