"""Whose rights a sandbox's programs have: those of the workspace's owner, where Handrail itself runs as real root.

Root in a user namespace is still the owner of all that root owns: files that only root may read, the kernel's settings,
and no bound on processes. So bubblewrap is started as the user who owns the workspace. Where that is root, programs stay
root; then the mounts, Landlock and the filter of system calls hold them, and ``handrail doctor`` says so.
"""

from __future__ import annotations

import os
import platform
import pwd
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Mechanism, Profile
from handrail.sandbox.view.looks import Looks, What

AS_SOMEBODY = "run Handrail as an ordinary user, or give the workspace to one (chown -R): its owner's rights are enough"
PERL = "/usr/bin/perl"
STAGE = "/run"
"""Covered, in bubblewrap's own mount namespace only, by the folders that the user could not get to."""
_CALLS = {"x86_64": (272, 165, 116, 119, 117), "aarch64": (97, 40, 159, 149, 147)}
"""unshare, mount, setgroups, setresgid and setresuid."""
_SMALLEST = ("--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--proc", "/proc")
_TRY_S = 20
_BINDS = frozenset({"--bind", "--ro-bind"})


@dataclass(frozen=True, slots=True)
class Person:
    """Who a sandbox's programs are."""

    uid: int
    gid: int


def person_for(workspace: str, look: Looks | None = None) -> Person | None:
    """The owner of a workspace, where this process can and has to become them; None to stay who it is."""
    look = look or Looks()
    return None if look(os.geteuid) != 0 else _owner(workspace, look)[0]


def mechanism(workspace: str) -> Mechanism:
    """The same for people to read."""
    uid = os.geteuid()
    if uid != 0:
        return Mechanism("identity", True, f"Handrail and its programs run as user {uid}, not as root")
    person, reason, remedy = _owner(workspace, Looks())
    if person is not None:
        return Mechanism("identity", True, f"programs run as user {person.uid}, who owns the workspace, not as root")
    return Mechanism("identity", False, f"programs run with root's rights, in their namespaces: {reason}", remedy)


def _owner(workspace: str, look: Looks) -> tuple[Person | None, str, str]:
    found = look.at(look.canonical(workspace))
    if found is None:
        return None, f"whose {workspace} is cannot be told: it is not there, or cannot be got to", ""
    if found.uid == 0:
        return None, "the workspace belongs to root", AS_SOMEBODY
    if (missing := look(lacking)) is not None:
        return None, missing, "install perl"
    person = Person(found.uid, _group(found.uid, found.gid))
    if (refused := look(tried, person)) is not None:
        return None, f"user {person.uid} cannot make a sandbox: {refused}", "allow user namespaces to ordinary users"
    return person, "", ""


@lru_cache(maxsize=16)
def tried(person: Person) -> str | None:
    """Why a sandbox of that person's fails, found out by making one; None where it does not."""
    from handrail.sandbox.start.spawn import binaries  # which becomes people by this module

    binary = next(binaries(), None)
    if binary is None:
        return "bubblewrap is not installed"
    program, argv = command(person, (), binary, ["bwrap", *_SMALLEST, "--", "/bin/true"])
    try:
        done = subprocess.run(
            argv, executable=program, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRY_S, check=False, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode("utf-8", "replace").strip()[:300] or "it said nothing"


def lacking() -> str | None:
    """What becoming somebody else would need and this machine does not have."""
    if platform.machine() not in _CALLS:
        return f"becoming another user is not known how on {platform.machine()}"
    if not os.access(PERL, os.X_OK):
        return f"becoming another user needs {PERL}"
    return None


@lru_cache(maxsize=16)
def _group(uid: int, otherwise: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return otherwise


def staged(options: Sequence[str], person: Person, look: Looks) -> tuple[list[str], list[str]]:
    """bubblewrap's options with other sources for what the person cannot get to, and what is to be found there."""
    found = list(options)
    sources: dict[str, str] = {}
    for at, option in enumerate(options):
        if option in _BINDS and _out_of_reach(source := options[at + 1], person, look):
            found[at + 1] = sources.setdefault(source, f"{STAGE}/{len(sources)}")
    return found, list(sources)


def command(person: Person, sources: Sequence[str], binary: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """The program to start in place of ``binary``, and its argv."""
    numbers = (*_CALLS[platform.machine()], person.uid, person.gid)
    words = (*map(str, numbers), STAGE, str(len(sources)), *sources, binary, *argv)
    return PERL, ["perl", "-f", "-e", _script(), "--", *words]


@lru_cache(maxsize=1)
def _script() -> str:
    return Path(__file__).with_name("become.pl").read_text("utf-8")


def prepare(profile: Profile, person: Person, look: Looks) -> None:
    """Give the person the scratch, and see that they can read what the call needs beside the workspace.

    :raises ToolError: ``unavailable`` for a folder of a tool that only root can read
    """
    look(_given, profile.scratch, person)
    for folder in profile.readable:
        found = look.at(look.canonical(folder))
        if found is None:
            continue  # what is not there is not mounted
        wanted = 0o5 if stat.S_ISDIR(found.mode) else 0o4
        if not _has(found, person, wanted):
            raise ToolError(
                f"{folder} cannot be read by user {person.uid}, who owns the workspace and as whom programs run; "
                f"its operator would change that with chmod -R o+rX {folder}",
                kind="unavailable",
            )


def _given(folder: str, person: Person) -> None:
    if Path(folder).stat().st_uid != person.uid:
        _give(folder, person)


def _give(folder: str, person: Person) -> None:
    """Root's own files beneath, following no link; what has a second name elsewhere stays whose it is."""
    for _, _, files, descriptor in os.fwalk(folder, topdown=False):
        for name in files:
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if found.st_uid == 0 and found.st_nlink == 1:
                os.chown(name, person.uid, person.gid, dir_fd=descriptor, follow_symlinks=False)
        if os.fstat(descriptor).st_uid == 0:
            os.fchown(descriptor, person.uid, person.gid)


def _out_of_reach(path: str, person: Person, look: Looks) -> bool:
    """Whether a folder on the way keeps the person from it; where an access list says more, it is taken to."""
    if path == STAGE or path.startswith(f"{STAGE}/"):
        return True
    return not all(_enterable(look.at(look.canonical(str(folder))), person) for folder in Path(path).parents)


def _enterable(found: What | None, person: Person) -> bool:
    return found is not None and _has(found, person, 0o1)


def _has(found: What, person: Person, bits: int) -> bool:
    shift = 6 if found.uid == person.uid else 3 if found.gid == person.gid else 0
    return (found.mode >> shift) & bits == bits
