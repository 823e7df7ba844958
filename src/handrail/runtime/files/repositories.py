"""Git directories that do not carry the name ``.git``: any folder with a HEAD, ``objects`` and ``refs`` is one.

A person who stands in such a folder and types ``git status`` runs what its ``config`` says. By its name such a path is
an ordinary one, so a write is looked at together with what lies beside it: nothing in a git directory is written, nor
the piece that would make one of a folder. Nor is what the settings of git name under other names: hooks, included files,
scripts that a command of the settings runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice

from handrail.contract.errors import ToolError
from handrail.contract.protected.protected import GIT, GIT_NAMES, Protection, plain, protection
from handrail.runtime.files import beneath
from handrail.runtime.files.openat2 import HANDLE
from handrail.runtime.files.roots import Located, is_beneath
from handrail.runtime.guard import git as vcs
from handrail.sandbox.view.tree import check_passing

_HEAD = "head"
_REFERENCE = re.compile(rb"\s*(?:ref:|[0-9a-fA-F]{40})")
_CONTENTS = frozenset(("objects", "refs"))
_MOST_ENTRIES = 5_000
"""Entries of a folder that are looked at for links."""
_TELLING = ("config", "head", "hooks", "commondir", "objects", "refs")


def check_write(located: Located, data: bytes) -> None:
    """
    :raises ToolError: ``denied`` where writing ``data`` there changes what git runs, or makes a git directory
    """
    assert located.root is not None
    for path in vcs.pointed_around(located.root, located.absolute):
        if is_beneath(located.absolute, path):
            raise ToolError(Protection("hook").refusal(located.shown), kind="denied")
    if (found := _linked_to(located)) is not None:
        raise ToolError(found.refusal(located.shown), kind="denied")
    parts = beneath.relative(located).split("/")
    for count in range(1, len(parts)):
        if _is_git_directory(located, parts[:count]):
            raise ToolError(Protection("state").refusal(located.shown), kind="denied")
    relative = beneath.relative(located)
    low = relative.lower() if relative.isascii() else "".join(map(plain, relative))
    if not any(name in low for name in _TELLING):
        return
    names = [plain(part) for part in parts]
    if names[-1] == _HEAD and _REFERENCE.match(data):
        raise ToolError(
            f"{located.shown} with this content marks its folder as a git repository, which git then takes its "
            "configuration from: no tool writes it. Give the file another name; repositories are made by git",
            kind="denied",
        )
    for index, name in enumerate(names):
        found = GIT_NAMES.get(name)
        if found is None and name not in _CONTENTS:
            continue
        folder = parts[:index]
        if not _there(located, [*folder, "HEAD"]):
            continue
        raise ToolError((found or Protection("vcs")).refusal(located.shown), kind="denied")


def _linked_to(located: Located) -> Protection | None:
    """Return what a path is protected as for being behind a link that a person made with a protected name, or in a protected
    folder. Looked at are the root, the path's own folder and the protected folders in both. Writing the file behind the
    link writes what the name stands for."""
    assert located.root is not None
    own = located.absolute.rpartition("/")[0] or "/"
    for folder in dict.fromkeys((located.root, own)):
        for link, found in _protected_links(located.root, folder):
            if is_beneath(located.absolute, os.path.realpath(link)):
                return found
    return None


def _protected_links(root: str, folder: str, *, inner: bool = True) -> Iterator[tuple[str, Protection]]:
    """Yield the links in a folder that are never written, with why.

    :param inner: those in the protected folders in it, too
    """
    below = folder[len(root.rstrip("/")) + 1 :]
    try:
        with os.scandir(folder) as entries:
            looked_at = list(islice(entries, _MOST_ENTRIES))
    except OSError as error:
        check_passing(error, folder)
        return
    for entry in looked_at:
        link = entry.is_symlink()
        if not link and not (inner and entry.is_dir(follow_symlinks=False)):
            continue
        found = protection(f"{below}/{entry.name}" if below else entry.name)
        if found is None or found.asks:
            continue
        if link:
            yield entry.path, found
        elif plain(entry.name) != GIT:
            yield from _protected_links(root, entry.path, inner=False)


def _is_git_directory(located: Located, folder: list[str]) -> bool:
    """Whether git takes a folder for a git directory. Where that cannot be seen, the write fails by itself."""
    if not _there(located, [*folder, "HEAD"], unseen=False):
        return False
    contents = all(_there(located, [*folder, part], unseen=False) for part in _CONTENTS)
    return contents or _there(located, [*folder, "commondir"], unseen=False)


def _there(located: Located, parts: list[str], *, unseen: bool = True) -> bool:
    """Whether there is such an entry, of whatever kind.

    :param unseen: the answer where that cannot be seen
    """
    assert located.root is not None
    place = Located("/".join((located.root.rstrip("/"), *parts)), "", True, located.root)
    try:
        os.close(beneath.open_beneath(place, HANDLE | os.O_NOFOLLOW))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return unseen
    return True
