"""The canonical form of a path, on which rules are evaluated, and its short form to show.

A model's path may climb, be relative or follow links. :meth:`SessionRoots.resolve_path` returns the one absolute path that names the
same thing without any of that, so that a rule, a lock and an open mean the same file. It has the names that the folders list, also where case does not
matter. The result is only a *name*: callers open it below the root without following links, so a swap in between fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from handrail.contract.errors import StartError, ToolError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import (
    escape_non_ascii_path,
    escape_terminal_controls,
    normalise_unicode_spelling,
    unescape_displayed_path,
)
from handrail.origins.listed_paths import canonicalize_path_spelling, is_exact_on_device

# The kernel's own path resolution (openat2), called by ctypes.

NO_MAGICLINKS = 0x02
NO_SYMLINKS = 0x04
BENEATH = 0x08
CACHED = 0x20
"""Fail with EAGAIN instead of waiting for a disk."""

PATH_FLAGS = getattr(os, "O_PATH", 0) | os.O_CLOEXEC
"""Flags that name a file without opening it, which is enough to ask for its status."""

_OPENAT2 = 437  # one number on every architecture, as for all calls since 5.1
AT_FDCWD = -100
_ON_LINUX = sys.platform.startswith("linux")
_RACE_RETRIES = 64
"""The kernel returns EAGAIN if something was renamed while it resolved ``..``. A retry usually succeeds."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)


_LOOKUP_HOW = ctypes.byref(_OpenHow(PATH_FLAGS, 0, NO_SYMLINKS | NO_MAGICLINKS))


def openat2(folder: int, path: str, flags: int, resolve: int, mode: int = 0) -> int:
    """Call openat2 and return the descriptor.

    :param folder: the descriptor that ``path`` is relative to
    :raises OSError: with the kernel's error; EAGAIN only with :data:`CACHED`
    """
    how = _OpenHow(flags, mode, resolve)
    raw = os.fsencode(path)
    for _ in range(_RACE_RETRIES):
        descriptor = _syscall(_OPENAT2, folder, raw, ctypes.byref(how), ctypes.sizeof(how))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number == errno.EINTR or (number == errno.EAGAIN and not resolve & CACHED):
            continue
        raise OSError(number, os.strerror(number), path)
    raise OSError(errno.ELOOP, "the path keeps changing while it is resolved", path)


_MOST_LOOKS = 8
"""How often a path is resolved while links on its way are replaced."""


def resolve_canonical_path(path: str) -> str:
    """Return :func:`os.path.realpath` of an absolute path without NUL, with the names that the folders list.

    If no part of the path is a link, and the folder is known to be exact, this takes three short system calls.

    :raises ToolError: ``denied`` for a spelling that opens an entry which its folder does not list
    """
    if _ON_LINUX and path.startswith("/") and "//" not in path and "/." not in path and not path.endswith("/"):
        raw = os.fsencode(path)
        descriptor = _syscall(_OPENAT2, AT_FDCWD, raw, _LOOKUP_HOW, ctypes.sizeof(_OpenHow))
        if descriptor >= 0:
            try:
                device = os.fstat(descriptor).st_dev
            finally:
                os.close(descriptor)
            return path if is_exact_on_device(path, device) else canonicalize_path_spelling(path)
        if ctypes.get_errno() == errno.ENOENT:  # so no earlier part of the path is a link
            return canonicalize_path_spelling(path)
    return canonicalize_path_spelling(_resolve_links(path))


def _resolve_links(path: str) -> str:
    """Return :func:`os.path.realpath` of a path, which fails if a link on the way is replaced by a folder meanwhile."""
    for _ in range(_MOST_LOOKS):
        try:
            return os.path.realpath(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    raise ToolError(
        f"`{escape_terminal_controls(path)}` changed while it was being resolved. Try again when no program is replacing its folders.",
        kind="conflict",
    )


def find_openat2_problem() -> str | None:
    """Return why files cannot be confined here, with the remedy; None if they can."""
    if not _ON_LINUX:
        return f"File tools need the Linux system call openat2. This system is {sys.platform}. Use Linux."
    try:
        os.close(openat2(AT_FDCWD, "/", PATH_FLAGS | os.O_DIRECTORY, NO_SYMLINKS | NO_MAGICLINKS))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return f"The kernel ({os.uname().release}) has no openat2. Use Linux 5.6 or newer."
        return f"openat2 is blocked here ({error.strerror}). Allow it in the seccomp profile of the container."
    return None


MAX_PATH_BYTES = 4095
"""The kernel's limit for one path, without its final NUL."""
MAX_NAME_BYTES = 255
MAX_PATH_NAMES = 600
"""The maximum number of names in a path. Locks and rules take the square of it in time, on the event loop."""
MAX_COMPARED_NAMES = 20_000
"""How many entries of a folder are compared with a name that does not exist there."""


class FurtherRoots(Struct, frozen=True):
    """The folders of an agent besides the workspace: absolute, canonical paths.

    :param repositories: the writable ones that are git directories
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()


NO_FURTHER_ROOTS = FurtherRoots()


class SessionRoots:
    """The folders that a session's file tools may use: workspace, further roots and saved outputs.

    :param readable: the session's own folders, read-only
    :raises StartError: if the workspace is not an existing folder
    """

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        readable: Sequence[str | os.PathLike[str]] = (),
        further: FurtherRoots = NO_FURTHER_ROOTS,
    ) -> None:
        self.workspace = canonicalize_path_spelling(os.path.realpath(workspace))
        if not Path(self.workspace).is_dir():
            raise StartError(
                f"The workspace '{escape_terminal_controls(str(workspace))}' is not a folder. Create it, or name another one."
            )
        self._workspace_prefix = f"{self.workspace.rstrip('/')}/"
        self.readable: tuple[str, ...] = tuple(canonicalize_path_spelling(os.path.realpath(root)) for root in readable)
        self.further = further
        self.writable: frozenset[str] = frozenset((self.workspace, *further.writable))
        # The longest first, so that a root within a root is found by its own name.
        every = (self.workspace, *self.readable, *further.readable, *further.writable)
        self._roots_by_length = tuple(
            (root, f"{root.rstrip('/')}/", root in self.writable) for root in sorted(every, key=len, reverse=True)
        )
        """Each root with the prefix of the paths in it, and whether it may be written."""

    def resolve_path(self, path: str) -> ResolvedPath:
        """Return the canonical form of ``path``, which is absolute or relative to the workspace.

        The path may be spelled as a message showed it, or in a way that looks the same. See :meth:`_find_meant_path`.

        :raises ToolError: ``invalid_input`` for a text that cannot name a file: empty, with NUL, too long or not
            encodable, or for one that means several files; ``unavailable`` if the workspace has become a link to
            another folder; ``denied`` for a spelling that opens an entry which its folder does not list
        """
        if path.isascii() and " " not in path and "\\" not in path:
            return self.resolve_exact_path(path)
        _check_path(unescape_displayed_path(path))
        meant, alike = self._find_meant_path(path)
        located = self.resolve_exact_path(meant)
        return located._replace(same_looking=alike) if alike else located

    def resolve_exact_path(self, path: str) -> ResolvedPath:
        """Return the canonical form of a path that is spelled as on the disk, such as a word of a shell text.

        :raises ToolError: as :meth:`resolve_path`
        """
        if not (0 < len(path) <= MAX_NAME_BYTES and path.isascii() and "\0" not in path):
            _check_path(path)
        absolute = resolve_canonical_path(os.path.join(self.workspace, path))  # noqa: PTH118 - keeps an absolute path as it is
        if len(absolute) > MAX_PATH_NAMES and (
            absolute.count("/") > MAX_PATH_NAMES or len(os.fsencode(absolute)) > MAX_PATH_BYTES
        ):
            raise _path_too_long_error(path)
        located = self.locate_canonical_path(absolute)
        if not located.is_inside and (lost := find_lost_root_error(self.workspace)) is not None:
            raise lost
        return located

    def _find_meant_path(self, path: str) -> tuple[str, tuple[str, ...]]:
        """Return ``path`` as it is spelled on the disk, and other entries that look the same.

        An escape of a shown path stands for its character. If nothing has that name, an entry with the text of the
        escape is meant, or the one that git shows so in quotes, or the only one that looks the same.

        :raises ToolError: ``invalid_input`` if several look the same, and none is spelled so
        """
        restored = unescape_displayed_path(path)
        if self._exists(restored):
            return restored, () if restored != path else self._list_other_forms(path)
        for other in dict.fromkeys((path, _unquote_git_path(path))):
            if other != restored and self._exists(other):
                return other, ()
        found = ""
        for part in path.split("/"):
            name = unescape_displayed_path(part)
            if name == part and (not part.isascii() or " " in part) and not self._exists(found + part):
                name = self._find_same_looking(found, part) or part
            found += f"{name}/"
        return found[:-1], ()

    def _exists(self, path: str) -> bool:
        return os.path.lexists(os.path.join(self.workspace, path))  # noqa: PTH118 - keeps an absolute path as it is

    def _list_other_forms(self, path: str) -> tuple[str, ...]:
        """Return the entries that differ from ``path`` only in how an accent is encoded, spelled out."""
        forms = dict.fromkeys(unicodedata.normalize(form, path) for form in ("NFC", "NFD"))
        return tuple(escape_non_ascii_path(form) for form in forms if form != path and self._exists(form))

    def _find_same_looking(self, folder: str, name: str) -> str | None:
        """Return the only entry of ``folder`` that looks like ``name``; None if there is none.

        :raises ToolError: ``invalid_input`` if there are several
        """
        place = resolve_canonical_path(os.path.join(self.workspace, folder).rstrip("/") or "/")  # noqa: PTH118 - see above
        if not self.locate_canonical_path(place).is_inside:
            return None
        wanted = normalise_unicode_spelling(name)
        try:
            with os.scandir(place) as entries:
                names = [one.name for one in islice(entries, MAX_COMPARED_NAMES)]
        except (OSError, ValueError):
            return None
        found = [one for one in names if one != name and normalise_unicode_spelling(one) == wanted]
        if len(found) > 1:
            shown = " and ".join(f"`{escape_non_ascii_path(folder + one)}`" for one in sorted(found)[:3])
            raise ToolError(
                f"`{escape_terminal_controls(folder + name)}` could mean several files, which look the same: {shown}. Use "
                "one of these spellings.",
                kind="invalid_input",
            )
        return found[0] if found else None

    def find_final_symlink(self, path: str, located: ResolvedPath) -> str | None:
        """Return the shown path of a link if the last name of ``path`` is one; None if it is not.

        :param located: the resolved ``path``
        """
        path = self._find_meant_path(path)[0]
        folder, _, name = os.path.join(self.workspace, path).rstrip("/").rpartition("/")  # noqa: PTH118 - see above
        if name in ("", ".", ".."):
            return None
        entry = canonicalize_path_spelling(f"{resolve_canonical_path(folder or '/').rstrip('/')}/{name}")
        return None if entry == located.absolute else self.format_path_for_display(entry)

    def locate_canonical_path(self, absolute: str) -> ResolvedPath:
        """Return the location of a path that is already canonical, without asking the file system."""
        for root, within, writable in self._roots_by_length:
            if absolute.startswith(within) or absolute == root:
                inner = absolute[len(within) :] or "."
                shown = inner if root == self.workspace else self.format_path_for_display(absolute)
                if shown is inner:
                    shown = escape_terminal_controls(inner)
                return ResolvedPath(absolute, shown, True, root, writable, inner)
        return ResolvedPath(absolute, escape_terminal_controls(absolute), False)

    def explain_path_outside_roots(self, located: ResolvedPath) -> str:
        """Return the error text for the model about a path that is in none of the roots."""
        there = dict.fromkeys((self.workspace, *self.further.readable, *self.further.writable))
        outputs = " and its saved outputs" if self.readable else ""
        return (
            f"`{located.display_path}` is outside the folders of this session "
            f"({', '.join(map(escape_terminal_controls, there))}){outputs}. Use a path there, or ask the user to add the "
            "folder to [[roots]] in the agent's manifest."
        )

    def format_path_for_display(self, absolute: str) -> str:
        """Return a canonical path as results and messages show it."""
        if absolute == self.workspace:
            return "."
        if absolute.startswith(self._workspace_prefix):
            absolute = absolute[len(self._workspace_prefix) :]
        return escape_terminal_controls(absolute)


_GIT_ESCAPE = compile_regex_lazily(rb'\\([0-7]{3}|x[0-9a-f]{2}|[abfnrtv"\\])')
_GIT_CHARACTERS = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


def _unquote_git_path(path: str) -> str:
    """Return the path that git shows as ``path``: in quotes, with escapes, and bytes as numbers."""
    if "\\" not in path:
        return path
    with contextlib.suppress(UnicodeEncodeError):
        inner = path[1:-1] if len(path) > 2 and path[0] == path[-1] == '"' else path
        return os.fsdecode(_GIT_ESCAPE.sub(_git_byte, os.fsencode(inner)))
    return path


def _git_byte(match: re.Match[bytes]) -> bytes:
    if len(match[1]) == 3:
        return bytes((int(match[1][1:], 16) if match[1][:1] == b"x" else int(match[1], 8) & 0xFF,))
    return bytes((_GIT_CHARACTERS.get(match[1][0], match[1][0]),))


def _check_path(path: str) -> None:
    """Check that a text can name a file.

    :raises ToolError: ``invalid_input`` if it cannot
    """
    if not path:
        raise ToolError("The path is empty. Name a file or folder, or '.' for the workspace.", kind="invalid_input")
    if "\0" in path:
        raise ToolError(
            f"The path '{escape_terminal_controls(path)}' contains a NUL character. Remove it.", kind="invalid_input"
        )
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeEncodeError):
            path.encode()
            raise ToolError(
                f"The path '{escape_terminal_controls(path)}' cannot be used: Handrail runs in a locale without Unicode. Ask "
                "the user to start it with PYTHONUTF8=1.",
                kind="unavailable",
            ) from None
        raise ToolError(
            f"The path '{escape_terminal_controls(path)}' is not valid Unicode text. Correct it.", kind="invalid_input"
        ) from None
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    if len(raw) > MAX_PATH_BYTES or len(parts) > MAX_PATH_NAMES or any(len(part) > MAX_NAME_BYTES for part in parts):
        raise _path_too_long_error(path)


def find_lost_root_error(root: str) -> ToolError | None:
    """Return the error for a root that is no longer a folder at its canonical path; else None.

    Another folder at the same path is accepted, such as a fresh checkout.
    """
    if not os.path.lexists(root):
        what = "no longer exists: it was moved or deleted while it was open"
    elif os.path.realpath(root) != root:
        what = "became a symbolic link while it was open, and Handrail does not follow a link to another folder"
    elif not Path(root).is_dir():
        what = "is not a folder any more"
    else:
        return None
    return ToolError(
        f"The folder {escape_terminal_controls(root)} {what}. Nothing was read or changed. Ask the user to put it back, or "
        "to restart Handrail where the folder is now.",
        kind="unavailable",
    )


def is_beneath(path: str, folder: str) -> bool:
    """Return whether canonical ``path`` is ``folder`` or lies in it, compared by whole names.

    So ``/ws`` does not contain ``/ws_secret``.
    """
    return path == folder or path.startswith(folder if folder.endswith("/") else folder + "/")


def _path_too_long_error(path: str) -> ToolError:
    return ToolError(
        f"The path {escape_terminal_controls(path[:60])}… is too long: {len(path)} characters. The limits are "
        f"{MAX_PATH_BYTES} bytes and {MAX_PATH_NAMES} names for a path, and {MAX_NAME_BYTES} bytes for one name. Use a shorter path.",
        kind="invalid_input",
    )
