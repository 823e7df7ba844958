"""The folders from a workspace up to the top of its repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from handrail.registry.sources.folders import loose

_MAX_UP = 32


def upwards(workspace: Path) -> Iterator[Path]:
    """The workspace, and the folders above it up to the top of its repository. Those above it have to be the user's own:
    in a folder that others may write, somebody else's words would be found."""
    top = next((f for f in (workspace, *workspace.parents[:_MAX_UP]) if os.path.lexists(f / ".git")), workspace)
    folder = workspace
    while True:
        yield folder
        if folder == top or folder == folder.parent:
            return
        folder = folder.parent
        try:
            if loose(folder) is not None:
                return
        except OSError:
            return
