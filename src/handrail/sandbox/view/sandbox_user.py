"""The user of a sandbox's programs: the workspace's owner, if Handrail itself runs as real root. Remembered lookups.

Root in a user namespace is still the owner of everything that root owns: files that only root may read and the kernel's
settings, without a limit on processes. So bubblewrap is started as the user who owns the workspace. If that is root, programs
stay root; then the mounts, Landlock and the filter of system calls hold them, and ``handrail doctor`` says so.
"""

from __future__ import annotations

import os
import platform
import pwd
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SandboxMechanism, SandboxProfile
from handrail.contract.struct import Struct

# Lookups on the machine before a sandbox starts, recorded so that a plan can be reused while their answers stay the
# same.
#
# A plan follows from the request and from the lookups on the machine. Each lookup is made through a :class:`LookupCache`,
# which records it with its answer. The plan may be used again if all of them, repeated, give the same answers: then
# planning again would give the same plan.

_Answer = TypeVar("_Answer")
_Arguments = TypeVarTuple("_Arguments")


class FileIdentity(NamedTuple):
    """The identity of a path: values that differ if another file takes its place."""

    device: int
    inode: int
    mode: int
    uid: int
    gid: int

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class LookupCache:
    """A record of every lookup on the machine during planning, with its answer.

    A planner uses only these lookups. Each is made once; a repeated question gets the recorded answer.
    """

    __slots__ = ("_answers", "_paths", "_variables")

    def __init__(self) -> None:
        self._paths: dict[str, FileIdentity | None] = {}
        self._variables: dict[bytes, bytes | None] = {}
        self._answers: dict[tuple[Callable[..., object], tuple[object, ...]], object] = {}

    def identify(self, path: str) -> FileIdentity | None:
        """Return the identity of an absolute path without following a final link; None if there is nothing."""
        if path not in self._paths:
            self._paths[path] = _identify(path)
        return self._paths[path]

    def is_canonical(self, path: str) -> bool:
        """Return whether an absolute path exists and is canonical: no part of it is a link."""
        if os.path.normpath(path) != path:
            return False
        above = path
        while above != "/":
            found = self.identify(above)
            if found is None or found.is_link:
                return False
            above = above.rpartition("/")[0] or "/"
        return True

    def resolve(self, path: str) -> str:
        """Return :func:`os.path.realpath` of a path."""
        return path if self.is_canonical(path) else self(os.path.realpath, path)

    def read_environment_variable(self, name: str) -> str | None:
        """Return an environment variable of this process."""
        value = os.environ.get(name)
        self._variables[os.fsencode(name)] = None if value is None else os.fsencode(value)
        return value

    def __call__(self, look: Callable[[*_Arguments], _Answer], *what: *_Arguments) -> _Answer:
        """Return ``look(*what)``. The answer is compared later, so it must not be changed in place."""
        asked = look, what
        if asked not in self._answers:
            self._answers[asked] = look(*what)
        return self._answers[asked]  # pyright: ignore[reportReturnType] - what this look gave

    def are_lookups_unchanged(self) -> bool:
        """Return whether all lookups still give the same answers.

        It runs at every start, mostly with cold caches, so it is written for speed.
        """
        for name, value in self._variables.items():
            if _variables.get(name) != value:
                return False
        at, there = os.lstat, os.access
        try:
            for path, was in self._paths.items():
                if was is None:
                    # Raising an error would take longer than everything else.
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
"""The variables as bytes: reading them as text would take ten times as long."""


def _identify(path: str) -> FileIdentity | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return FileIdentity(found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid)


USER_REMEDY = (
    "run Handrail as an ordinary user, or give the workspace to one (chown -R): the rights of its owner are enough"
)
PERL = "/usr/bin/perl"
STAGE_FOLDER = "/run"
"""The mount point, in bubblewrap's mount namespace only, of folders that the user cannot reach."""
_SYSTEM_CALLS = {"x86_64": (272, 165, 116, 119, 117), "aarch64": (97, 40, 159, 149, 147)}
"""The numbers of unshare, mount, setgroups, setresgid and setresuid."""
_SMALLEST = ("--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc")
_TRY_S = 20
_BINDS = frozenset({"--bind", "--ro-bind"})


class SandboxUser(Struct, frozen=True):
    """The user that a sandbox's programs run as."""

    uid: int
    gid: int


def find_sandbox_user(workspace: str, look: LookupCache | None = None) -> SandboxUser | None:
    """Return the workspace's owner if this process can and must become that user; else None."""
    look = look or LookupCache()
    return None if look(os.geteuid) != 0 else _find_owner(workspace, look)[0]


def describe_user_change_mechanism(workspace: str) -> SandboxMechanism:
    """Return the same as a mechanism for the doctor."""
    uid = os.geteuid()
    if uid != 0:
        return SandboxMechanism("identity", True, f"Handrail and its programs run as user {uid}, not as root")
    user, reason, remedy = _find_owner(workspace, LookupCache())
    if user is not None:
        return SandboxMechanism(
            "identity", True, f"programs run as user {user.uid}, who owns the workspace, not as root"
        )
    return SandboxMechanism(
        "identity", False, f"programs run with the rights of root, in their namespaces: {reason}", remedy
    )


def _find_owner(workspace: str, look: LookupCache) -> tuple[SandboxUser | None, str, str]:
    found = look.identify(look.resolve(workspace))
    if found is None:
        return None, f"the owner of {workspace} is unknown: the folder does not exist or cannot be reached", ""
    if found.uid == 0:
        return None, "the workspace belongs to root", USER_REMEDY
    if (missing := look(explain_missing_user_tools)) is not None:
        return None, missing, "install perl"
    user = SandboxUser(found.uid, _find_group(found.uid, found.gid))
    if (refused := look(probe_sandbox_user_failure, user)) is not None:
        return None, f"user {user.uid} cannot make a sandbox: {refused}", "allow user namespaces to ordinary users"
    return user, "", ""


@lru_cache(maxsize=16)
def probe_sandbox_user_failure(user: SandboxUser) -> str | None:
    """Return why a sandbox of this user fails, found by making one; None if it works."""
    from handrail.sandbox.start.spawn import find_bubblewrap_programs  # which imports this module

    binary = next(find_bubblewrap_programs(), None)
    if binary is None:
        return "bubblewrap is not installed"
    program, argv = build_command_as_user(user, (), binary, ["bwrap", *_SMALLEST, "--", "/bin/true"])
    try:
        done = subprocess.run(
            argv, executable=program, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRY_S, check=False, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode("utf-8", "replace").strip()[:300] or "no message"


def explain_missing_user_tools() -> str | None:
    """Return what this machine lacks for becoming another user; None if nothing."""
    if platform.machine() not in _SYSTEM_CALLS:
        return f"Handrail cannot become another user on {platform.machine()}"
    if not os.access(PERL, os.X_OK):
        return f"becoming another user needs {PERL}"
    return None


@lru_cache(maxsize=16)
def _find_group(uid: int, otherwise: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return otherwise


def replace_unreachable_sources(
    options: Sequence[str], user: SandboxUser, look: LookupCache
) -> tuple[list[str], list[str]]:
    """Return bubblewrap's options with reachable sources for the user, and the folders replaced."""
    found = list(options)
    sources: dict[str, str] = {}
    for at, option in enumerate(options):
        if option in _BINDS and _is_unreachable_for_user(source := options[at + 1], user, look):
            found[at + 1] = sources.setdefault(source, f"{STAGE_FOLDER}/{len(sources)}")
    return found, list(sources)


def build_command_as_user(
    user: SandboxUser, sources: Sequence[str], binary: str, argv: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the program and argv to start in place of ``binary``, so that it runs as the user."""
    numbers = (*_SYSTEM_CALLS[platform.machine()], user.uid, user.gid)
    words = (*map(str, numbers), STAGE_FOLDER, str(len(sources)), *sources, binary, *argv)
    return PERL, ["perl", "-f", "-e", _read_script(), "--", *words]


@lru_cache(maxsize=1)
def _read_script() -> str:
    return Path(__file__).with_name("become.pl").read_text("utf-8")


def give_user_folder_access(profile: SandboxProfile, user: SandboxUser, look: LookupCache) -> None:
    """Give the user the scratch folder and the saved outputs, and check that they can read the other folders of the call.

    :raises ToolError: ``unavailable`` for a folder of a tool that only root can read
    """
    look(_grant_scratch_folder, profile.scratch, user)
    for folder in profile.outputs:
        look(_chown_to_user, folder, user)
    for folder in profile.readable:
        if folder in profile.outputs:
            continue
        found = look.identify(look.resolve(folder))
        if found is None:
            continue  # a missing folder is not mounted
        wanted = 0o5 if stat.S_ISDIR(found.mode) else 0o4
        if not _has_rights(found, user, wanted):
            raise ToolError(
                f"`{folder}` cannot be read by user {user.uid}, who owns the workspace and runs the programs. "
                f"Ask the user to run chmod -R o+rX {folder}.",
                kind="unavailable",
            )


def _grant_scratch_folder(folder: str, user: SandboxUser) -> None:
    if Path(folder).stat().st_uid != user.uid:
        _chown_to_user(folder, user)


def _chown_to_user(folder: str, user: SandboxUser) -> None:
    """Give the user root's files in a folder, following no link. Files with several names are left out."""
    for _, _, files, descriptor in os.fwalk(folder, topdown=False):
        for name in files:
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if found.st_uid == 0 and found.st_nlink == 1:
                os.chown(name, user.uid, user.gid, dir_fd=descriptor, follow_symlinks=False)
        if os.fstat(descriptor).st_uid == 0:
            os.fchown(descriptor, user.uid, user.gid)


def _is_unreachable_for_user(path: str, user: SandboxUser, look: LookupCache) -> bool:
    """Return whether a folder on the way keeps the user from a path, by its mode alone."""
    if path == STAGE_FOLDER or path.startswith(f"{STAGE_FOLDER}/"):
        return True
    return not all(_can_enter(look.identify(look.resolve(str(folder))), user) for folder in Path(path).parents)


def _can_enter(found: FileIdentity | None, user: SandboxUser) -> bool:
    return found is not None and _has_rights(found, user, 0o1)


def _has_rights(found: FileIdentity, user: SandboxUser, bits: int) -> bool:
    shift = 6 if found.uid == user.uid else 3 if found.gid == user.gid else 0
    return (found.mode >> shift) & bits == bits
