"""A workspace and state folder of one test, and processes that share them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from handrail.store.state_folders import StateFolders, locate_folders
from handrail.store.workspace_store import WorkspaceStore


@dataclass(frozen=True)
class Place:
    workspace: Path
    state: Path

    @staticmethod
    def beneath(folder: Path) -> Place:
        workspace = folder / "workspace"
        workspace.mkdir(parents=True)
        return Place(workspace, folder / "state")

    @property
    def folders(self) -> StateFolders:
        return locate_folders(self.workspace, self.state)

    def open(self, frontend: str = "library", clock: Callable[[], int] | None = None) -> WorkspaceStore:
        if clock is None:
            return WorkspaceStore.open(self.workspace, self.state, frontend=frontend)
        return WorkspaceStore.open(self.workspace, self.state, frontend=frontend, clock=clock)

    @contextmanager
    def process(self, text: str, *arguments: str) -> Generator[subprocess.Popen[str]]:
        """Run Python code in its own process with the workspace, the state and ``arguments``.

        It ends with the block.
        """
        started = subprocess.Popen(
            [sys.executable, "-c", text, str(self.workspace), str(self.state), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with started:
            try:
                yield started
            finally:
                started.kill()

    def finished(self, text: str, *arguments: str) -> str:
        """Return the output of such a process, which must succeed."""
        with self.process(text, *arguments) as process:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            return out
