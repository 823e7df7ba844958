"""A lease with a manual clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from handrail.store.lease import WorkspaceLease
from handrail.store.state_folders import StateFolders


class ManualClock:
    """The machine's monotonic clock, set by hand. ``then`` runs once, within the next look at it."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000
        self.then: Callable[[], None] | None = None

    def __call__(self) -> int:
        shown, then, self.then = self.now, self.then, None
        if then is not None:
            then()
        return shown


def first_line(stream: object) -> str:
    return getattr(stream, "readline")()  # noqa: B009


def acquire_lease(folders: StateFolders, time: ManualClock, face: str = "one") -> WorkspaceLease:
    return WorkspaceLease.acquire(folders, frontend=face, clock=lambda: 0, monotonic=time, renewing=False)


def file_of(lease: WorkspaceLease, folders: StateFolders) -> Path:
    return folders.workspace_state_folder / f"holder-{lease.token}"


def abandon(lease: WorkspaceLease) -> None:
    """Let go as the operating system does when a process is killed: nothing is tidied up."""
    lease._file.close_descriptor()  # pyright: ignore[reportPrivateUsage]
    lease._connection.close()  # pyright: ignore[reportPrivateUsage]


def left_alone(_folders: StateFolders, _token: int) -> None:
    """Instead of removing what former holders left."""
