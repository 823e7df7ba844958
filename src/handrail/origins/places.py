"""The workspaces that are open in this process, and whether a path leads through one of them.

A call can write in a workspace. So the kernel takes neither code nor a program from there, and every link on the way to
one counts: a link in the workspace can be changed between a look and a start.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
"""The system's own folders. They count as outside of a workspace that merely holds them, as ``/`` does."""
_MOST_LINKS = 40
_lock = threading.Lock()
_open: Counter[str] = Counter()
_folders: tuple[str, ...] = ()
"""The canonical folders that are counted; another tuple after each change."""


@contextmanager
def opened(*folders: str | os.PathLike[str]) -> Generator[None]:
    """Count ``folders`` as open workspaces until the block ends."""
    canonical = [os.path.realpath(folder) for folder in folders]
    _count(canonical, 1)
    try:
        yield
    finally:
        _count(canonical, -1)


def add(folders: Iterable[str]) -> None:
    """Count ``folders`` as open workspaces until the process ends, as further roots that calls may write in are."""
    if canonical := {os.path.realpath(folder) for folder in folders}.difference(_folders):
        _count(canonical, 1)


def workspaces() -> tuple[str, ...]:
    """Return the canonical folders that calls can write in: the same object until one is opened or closed."""
    return _folders


def current_folder() -> str | None:
    """Return the current folder where it may be a project; None for ``/``, a system folder, and what holds a home folder.

    Somebody who starts Handrail in a folder works in it, so a program from there is as doubtful as one of a workspace.
    """
    try:
        folder = os.getcwd()  # noqa: PTH109 - asked for at every look
    except OSError:
        return None
    broad = folder == "/" or any(is_beneath(home, folder) for home in home_folders())
    return None if broad or any(is_beneath(folder, system) for system in SYSTEM) else folder


def _count(folders: Iterable[str], by: int) -> None:
    global _folders
    with _lock:
        for folder in folders:
            _open[folder] += by
        _folders = tuple(+_open)


@lru_cache(maxsize=1)
def home_folders() -> frozenset[str]:
    """Return every person's home folder, and root's."""
    import pwd
    from pathlib import Path

    homes = {os.path.realpath(Path.home())}
    for entry in pwd.getpwall():
        if entry.pw_uid == 0 or 1000 <= entry.pw_uid < 65_534:
            homes.add(os.path.realpath(entry.pw_dir))
    return frozenset(homes - {"/", "/nonexistent"})


def passed(path: str) -> Iterator[str]:
    """Yield every place on the way to an absolute ``path``: each folder and link, and last the file itself.

    :raises OSError: when there are too many links
    """
    left = path.split("/")[::-1]
    at, links = "", 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            at = at.rpartition("/")[0]
            continue
        yield (here := f"{at}/{part}")
        try:
            target = os.readlink(here)  # noqa: PTH115 - many of them, at each look
        except OSError:
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(f"too many links on the way to {path}")
        if target.startswith("/"):
            at = ""
        left.extend(reversed(target.split("/")))


def folder_around(path: str, folders: Iterable[str]) -> str | None:
    """Return the first of the canonical ``folders`` that an absolute path leads through or into, or None.

    A path that cannot be followed is taken for one that leads into the first.
    """
    folders = tuple(folders)
    if not folders:
        return None
    try:
        places = tuple(passed(path))
    except (OSError, ValueError):
        return folders[0]
    return next((folder for folder in folders if any(_holds(folder, place) for place in places)), None)


def is_beneath(path: str, folder: str) -> bool:
    """Return whether ``path`` is ``folder`` or in it, by their texts."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _holds(folder: str, path: str) -> bool:
    if not is_beneath(path, folder):
        return False
    return not any(is_beneath(path, system) and not is_beneath(folder, system) for system in SYSTEM)
