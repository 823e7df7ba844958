"""Comparison of paths with the protected names: files that no tool writes, and files that need explicit permission.

A name has one of three answers. *Never*: a program reads the file unasked (a shell that starts, an editor that opens
the folder, a commit) and runs its content. No tool writes it and no rule allows it. *Ask always*: other agents follow
the file, or a tool runs its content when a person starts that tool. A rule allows it only by naming it. *Free*: rules
decide, as for the project's own code (a Makefile, a test). Private keys are not read either.

:mod:`handrail.contract.protected.never_written` and :mod:`handrail.contract.protected.approval_required` hold the rows, each with its source.
This module compares names with them for every room: rules, file tools, mounts, and the check after a program has ended.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Literal

from handrail.contract.protected.approval_required import APPROVAL_REQUIRED, UNPROTECTED
from handrail.contract.protected.never_written import (
    KIND_DESCRIPTIONS,
    NEVER_WRITTEN,
    ProtectedProgramFiles,
    ProtectionKind,
)
from handrail.contract.struct import Struct

WORKSPACE_FILE = "handrail.toml"
"""A file in the root of the workspace with decisions of the user, which no call may change."""

VCS_CONFIG = "vcs.config"
"""The capability of a tool whose programs may change version-control configuration, by an allow-list of keys."""

INSTALLED_PACKAGES = frozenset(("node_modules", "site-packages", "dist-packages"))
"""Folders of packages from a public index."""

_ASKED: frozenset[ProtectionKind] = frozenset(("instructions", "settings", "code"))


class PathProtection(Struct, frozen=True):
    """Why a path is protected.

    :param kind: ``vcs`` is what a program with the capability ``vcs.config`` may change, by keys
    """

    kind: ProtectionKind

    @property
    def requires_approval(self) -> bool:
        """Whether the user, or a rule that names the path, may permit a write. Otherwise nothing does."""
        return self.kind in _ASKED

    @property
    def applies_to_programs(self) -> bool:
        """Whether the protection also applies to programs.

        Code that a tool loads belongs to the project, so programs may write it.
        """
        return self.kind != "code"

    @property
    def description(self) -> str:
        """What the file is, as a predicate."""
        return KIND_DESCRIPTIONS[self.kind]

    def format_write_denial(self, shown: str) -> str:
        """Return why a write is refused, for the model."""
        if self.requires_approval:
            return f"{shown} {self.description}. {self._rule_hint(shown)}"
        return (
            f"{shown} {self.description}. No tool can write it, and no rule can allow it. "
            "Describe the change to the user, who can make it."
        )

    def format_approval_reason(self, shown: str) -> str:
        """Return why a write requires approval although a rule allows it, for the model and the user."""
        return f"{shown} {self.description}, and no rule names it"

    @staticmethod
    def _rule_hint(shown: str) -> str:
        return f"A write requires approval, or a rule that names the path, such as 'allow fs.write {shown}'."


_BY_KIND: Mapping[ProtectionKind, PathProtection] = {kind: PathProtection(kind) for kind in KIND_DESCRIPTIONS}
_RULES, _KEY, _HOOK, _VCS, _STATE = (_BY_KIND[kind] for kind in ("rules", "key", "hook", "vcs", "state"))

GIT = ".git"
GIT_NAMES: Mapping[str, PathProtection] = {"config": _VCS, "config.worktree": _VCS, "commondir": _VCS, "hooks": _HOOK}
"""Files in a git directory that decide what git runs. ``commondir`` names the place of the rest."""
_GIT_DATA = frozenset(("objects", "refs", "logs"))
"""Folders of a git directory in which names are those of branches and objects."""
_BELOW: Mapping[str, Mapping[str, PathProtection]] = {
    ".hg": dict.fromkeys(("hgrc", "hgrc-not-shared", "sharedpath"), _VCS),
    ".sl": dict.fromkeys(("config", "hgrc", "sharedpath"), _VCS),
    ".jj": dict.fromkeys(("config.toml", "workspace-config.toml"), _VCS),
    ".bzr": dict.fromkeys(("branch.conf",), _VCS),
}
"""Protected below a folder of that name, at any depth."""
_STATES = frozenset((GIT, *_BELOW, ".svn", ".pijul", "_darcs", ".fslckout"))
"""Folders with the state of version control. Its programs write there, and file tools do not."""


# The rows, prepared for comparison.


_ENDS = 3
"""The minimum number of characters before or after the ``*`` of a pattern."""


class _SingleNameIndex:
    """An index of single names, exact and with one ``*``, each with its protection."""

    def __init__(self, entries: Iterable[tuple[str, PathProtection]]) -> None:
        self.exact: dict[str, PathProtection] = {}
        self._heads: dict[str, list[tuple[str, str, PathProtection]]] = {}
        """Patterns that begin with a text, by its first characters."""
        self._tails: dict[str, list[tuple[str, str, PathProtection]]] = {}
        """Patterns that begin with the ``*``, by their last characters."""
        for name, found in entries:
            head, star, tail = name.partition("*")
            if not star:
                self.exact.setdefault(name, found)
            elif head:
                self._heads.setdefault(head[:_ENDS], []).append((head, tail, found))
            else:
                self._tails.setdefault(tail[-_ENDS:], []).append((head, tail, found))

    def find(self, name: str) -> PathProtection | None:
        return self.exact.get(name) or self.match_name_pattern(name)

    def match_name_pattern(self, name: str) -> PathProtection | None:
        for patterns in (self._heads.get(name[:_ENDS]), self._tails.get(name[-_ENDS:])):
            for head, tail, found in patterns or ():
                if name.startswith(head) and name.endswith(tail) and len(name) >= len(head) + len(tail):
                    return found
        return None


def _index_rows(rows: Iterable[ProtectedProgramFiles], *, paths: bool) -> list[tuple[str, PathProtection]]:
    return [
        (name, _BY_KIND[row.kind])
        for row in rows
        if row.kind != "free"
        for name in row.names.split()
        if ("/" in name) is paths
    ]


_NEVER = _SingleNameIndex(_index_rows(NEVER_WRITTEN, paths=False))
_ASK = _SingleNameIndex(_index_rows(APPROVAL_REQUIRED, paths=False))
_FREE = frozenset(name for row in UNPROTECTED for name in row.names.split())
_BY_PATH: dict[str, list[tuple[tuple[str, ...], _SingleNameIndex]]] = {}
"""By the first name of a path: the names between, and the last one with its protection."""
for _path, _found in _index_rows((*NEVER_WRITTEN, *APPROVAL_REQUIRED), paths=True):
    _first, *_between, _last = _path.split("/")
    _BY_PATH.setdefault(_first, []).append((tuple(_between), _SingleNameIndex([(_last, _found)])))
_ANY = _SingleNameIndex(
    (path.rpartition("/")[2], found)
    for paths in (False, True)
    for path, found in _index_rows((*NEVER_WRITTEN, *APPROVAL_REQUIRED), paths=paths)
)
"""Every single name, and the last name of every path."""


@lru_cache(maxsize=16_384)
def _find_by_name(name: str) -> PathProtection | None:
    """Return the protection of a single plain name, in any folder."""
    if (found := _NEVER.find(name) or _ASK.exact.get(name)) is not None:
        return found
    return None if name in _FREE else _ASK.match_name_pattern(name)


# Queries about one path or name.


def find_path_protection(relative: str) -> PathProtection | None:
    """Return why a path, relative to its root, is protected from tools and programs; None if it is not.

    The result is the strictest one for any of its names. Names are compared as the least exact file system does:
    without letter case, invisible characters, trailing dots or blanks, and the part after a colon, and with
    compatibility forms resolved. Every call that touches files uses this function.
    """
    parts = relative.split("/")
    if not any(map(_may_be_protected_name, parts)):
        return None
    return _find_by_parts([normalise_file_name(part) for part in parts if part not in ("", ".")])


@lru_cache(maxsize=256)
def extract_path_from_git_folder(root: str) -> str:
    """Return the part of a root's path from its ``.git`` on, with a slash at its end; empty if the root is in no ``.git``.

    A path relative to such a root is protected like the same path of a repository in the workspace.
    """
    names = root.rstrip("/").split("/")
    start = next((index for index, name in enumerate(names) if normalise_file_name(name) == GIT), len(names))
    return "".join(f"{name}/" for name in names[start:])


def find_tool_write_protection(relative: str) -> PathProtection | None:
    """Return why a file tool does not write a path: :func:`find_path_protection`, or state of version control."""
    parts = relative.split("/")
    if not any(map(_may_be_protected_name, parts)):
        return None
    names = [normalise_file_name(part) for part in parts if part not in ("", ".")]
    found = _find_by_parts(names)
    if (found is None or found.requires_approval) and not _STATES.isdisjoint(names):
        return _STATE
    return found


def is_private_key_path(relative: str) -> bool:
    """Return whether a path is a private key, which no tool reads either."""
    parts = relative.split("/")
    if not any(map(_may_be_protected_name, parts)):
        return False
    parts = [normalise_file_name(part) for part in parts if part not in ("", ".")]
    if not any(_NEVER.exact.get(part) is _KEY for part in parts):
        return False
    if ".ssh" in parts:
        name = parts[-1]
        public = name in (".ssh", "config", "authorized_keys", "allowed_signers") or name.startswith("known_hosts")
        return not public and not name.endswith(".pub")
    if ".gnupg" in parts:
        return "private-keys-v1.d" in parts or parts[-1] in ("secring.gpg", ".gpg-v21-migrated")
    return not _LOGINS.issuperset(part for part in parts if _NEVER.exact.get(part) is _KEY)


_LOGINS = frozenset((".rhosts", ".shosts", ".k5login", ".k5users"))
"""Files that grant logins: protected like a key, and readable like any file."""


def format_private_key_denial(shown: str) -> str:
    """Return why a private key is not read, for the model."""
    return f"{shown} is a private key, or in a place for keys. No tool can read it, and no rule can allow it."


@lru_cache(maxsize=4096)
def normalise_file_name(name: str) -> str:
    """Return a name in the form of the least exact file system."""
    if not name.isascii():
        name = unicodedata.normalize("NFKC", name)
        name = "".join(c for c in name if unicodedata.category(c) not in ("Cf", "Mn"))
    name = name.partition(":")[0].casefold().rstrip(". ")
    return GIT if name.startswith("git~") else name


def needs_full_path_check(name: str) -> bool:
    """Return whether an entry of this name needs a check of its whole path.

    The check is quick, for walks over many entries.
    """
    if not name.isascii() or name[:1] == "." or ":" in name or name[-1:] in ". " or name[3:4] == "~":
        return True
    low = name.lower()
    return low in _ANY.exact or low == WORKSPACE_FILE or _ANY.match_name_pattern(low) is not None


def has_path_dependent_entries(name: str) -> bool:
    """Return whether the protection in a folder of this name depends on the path of each entry."""
    name = normalise_file_name(name)
    return name == GIT or name in _BELOW


@lru_cache(maxsize=16_384)
def _may_be_protected_name(name: str) -> bool:
    """Return whether a path with this name in it can be protected."""
    name = normalise_file_name(name)
    return (
        name in _BY_PATH
        or name in _STATES
        or name == WORKSPACE_FILE
        or _find_by_name(name) is not None
        or name.startswith(GIT)
    )


def _find_by_parts(parts: Sequence[str]) -> PathProtection | None:
    if parts == [WORKSPACE_FILE]:
        return _RULES
    asked: PathProtection | None = None
    installed = False
    for index, part in enumerate(parts):
        for found in (_find_by_name(part), *_find_by_multi_name_rows(parts, index)):
            if found is None:
                continue
            if not found.requires_approval:
                return found
            if not installed or (found.kind == "code" and "node_modules" not in parts[:index]):
                asked = _stricter_protection(asked, found)
        if part == GIT:
            return _find_git_dir_protection(parts[index + 1 :]) or asked
        below = _BELOW.get(part)
        if below is not None and (found := _first_protection(below, parts[index + 1 :])) is not None:
            return found
        installed = installed or part in INSTALLED_PACKAGES
    return asked


def _first_protection(below: Mapping[str, PathProtection], names: Sequence[str]) -> PathProtection | None:
    return next((found for name in names if (found := below.get(name)) is not None), None)


def _stricter_protection(asked: PathProtection | None, found: PathProtection) -> PathProtection:
    """Return the first of two protections that ask, unless only the second applies to programs."""
    return found if asked is None or (found.applies_to_programs and not asked.applies_to_programs) else asked


def _find_by_multi_name_rows(parts: Sequence[str], index: int) -> list[PathProtection | None]:
    """Return the protections by rows of several names, for the path whose first name is at ``index``."""
    if (rows := _BY_PATH.get(parts[index])) is None:
        return []
    found: list[PathProtection | None] = []
    for between, last in rows:
        at = index + 1 + len(between)
        if at < len(parts) and tuple(parts[index + 1 : at]) == between:
            found.append(last.find(parts[at]))
    return found


def _find_git_dir_protection(rest: Sequence[str]) -> PathProtection | None:
    """Return the protection of a path below a ``.git``, or of the ``.git`` itself.

    As a file, ``.git`` names the place of the repository.
    """
    if not rest:
        return _VCS
    if rest[0] in _GIT_DATA:
        return None
    for index, name in enumerate(rest):
        if (found := GIT_NAMES.get(name)) is not None:
            return found
        if name == "attributes" and rest[index - 1] == "info":
            return _VCS
    return None


# The commands that serve git's clones and pushes at the other end: git itself, with options that keep it from running
# anything that the repository there names.

_SERVES = (
    "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.alternateRefsCommand=: -c gc.auto=0 "
    "-c maintenance.auto=false -c receive.autogc=false -c receive.denyCurrentBranch=refuse -c 'safe.directory=*' "
)
"""git at the other end of a path. It starts without the environment of this end, so its command line has the options."""

Service = Literal["upload-pack", "receive-pack"]


def build_git_server_option(service: Service, *, by_path: bool) -> str:
    """Return the option with the command that serves a clone (``upload-pack``) or a push (``receive-pack``).

    git takes the first ``uploadpack`` or ``receivepack`` of a remote that it reads. That is the repository's own, not
    one that is set over it. An option outranks both.

    :param by_path: whether git starts the command on this machine; a web server knows it by its name
    """
    return f"--{service}={_SERVES}{service}" if by_path else f"--{service}=git-{service}"


_SERVICES: tuple[Service, ...] = ("upload-pack", "receive-pack")
SERVER_OPTIONS = frozenset(
    build_git_server_option(service, by_path=by_path) for service, by_path in product(_SERVICES, (True, False))
)
"""All of these options. With one of them git runs no more than without it."""
