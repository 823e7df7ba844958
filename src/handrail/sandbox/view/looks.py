"""What is looked at before a sandbox is started, so that the same plan need not be made again from the same answers.

A plan follows from what is asked for and from what was found on the machine meanwhile. Each such look is made through a
:class:`Looks`, which remembers it with its answer. The plan may be used again when all of them, made again, give the
same answers: then making it again would give the same plan.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar, TypeVarTuple

_Found = TypeVar("_Found")
_What = TypeVarTuple("_What")


class What(NamedTuple):
    """What a path is itself, as far as another in its place would differ."""

    device: int
    inode: int
    mode: int
    uid: int
    gid: int

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class Looks:
    """The looks of one plan. Whoever makes a plan takes from the machine only what this gave.

    Each thing is looked at once; who asks again is told the same.
    """

    __slots__ = ("_answers", "_paths", "_variables")

    def __init__(self) -> None:
        self._paths: dict[str, What | None] = {}
        self._variables: dict[bytes, bytes | None] = {}
        self._answers: dict[tuple[Callable[..., object], tuple[object, ...]], object] = {}

    def at(self, path: str) -> What | None:
        """What is at an absolute path, no link followed at its end; None where nothing can be found."""
        if path not in self._paths:
            self._paths[path] = _what_is(path)
        return self._paths[path]

    def by_no_link(self, path: str) -> bool:
        """Whether something is at an absolute path, and neither that nor a folder on the way to it is a link: whether it
        is canonical."""
        if os.path.normpath(path) != path:
            return False
        above = path
        while above != "/":
            found = self.at(above)
            if found is None or found.is_link:
                return False
            above = above.rpartition("/")[0] or "/"
        return True

    def canonical(self, path: str) -> str:
        """:func:`os.path.realpath`"""
        return path if self.by_no_link(path) else self(os.path.realpath, path)

    def variable(self, name: str) -> str | None:
        """This process's own environment variable."""
        value = os.environ.get(name)
        self._variables[os.fsencode(name)] = None if value is None else os.fsencode(value)
        return value

    def __call__(self, look: Callable[[*_What], _Found], *what: *_What) -> _Found:
        """What ``look`` says of ``what``. It is compared later, so it is never changed in place."""
        asked = look, what
        if asked not in self._answers:
            self._answers[asked] = look(*what)
        return self._answers[asked]  # pyright: ignore[reportReturnType] - what this look gave

    def same_again(self) -> bool:
        """Whether everything, looked at now, is as it was. At every start, and mostly from cold caches: in few words."""
        for name, value in self._variables.items():
            if _variables.get(name) != value:
                return False
        at, there = os.lstat, os.access
        try:
            for path, was in self._paths.items():
                if was is None:
                    # An error would take longer to be raised than all the rest.
                    if there(path, os.F_OK, effective_ids=_EFFECTIVE, follow_symlinks=False):
                        return False
                    continue
                now = at(path)
                if (
                    now.st_ino != was.inode
                    or now.st_mode != was.mode
                    or now.st_dev != was.device
                    or now.st_uid != was.uid
                    or now.st_gid != was.gid
                ):
                    return False
        except OSError:
            return False
        for (look, what), found in self._answers.items():  # noqa: SIM110
            if look(*what) != found:
                return False
        return True


_EFFECTIVE = os.access in os.supports_effective_ids
_variables: Mapping[bytes, bytes] = getattr(os.environb, "_data", os.environb)
"""As the system has them, which to ask takes a tenth of what asking for them as texts takes."""


def _what_is(path: str) -> What | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return What(found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid)
