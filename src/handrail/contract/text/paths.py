"""A path once it is resolved, for every room that reads, rules over or locks files. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Located(NamedTuple):
    """One path, resolved.

    :param absolute: canonical: no ``..``, no link in what exists; a tail that does not exist yet is kept as written
    :param shown: relative inside the workspace, absolute elsewhere; control characters and bytes that are no
        UTF-8 are escaped
    :param inside: whether it lies beneath any root
    :param root: the root it lies beneath, or None
    :param writable: whether that root may be written at all
    :param inner: the path from the root to it, by which it is opened; ``.`` for the root itself
    """

    absolute: str
    shown: str
    inside: bool
    root: str | None = None
    writable: bool = False
    inner: str = ""


class PathRoots(Protocol):
    """What resolves a session's paths: :class:`~handrail.runtime.files.roots.Roots`, for rooms below it."""

    workspace: str
    """Absolute, canonical."""

    def locate(self, path: str, /) -> Located:
        """Return where ``path`` is now.

        :raises ToolError: for a text that can name no file
        """
        ...
