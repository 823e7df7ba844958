"""The confinement that this machine can enforce, found by a trial, once per process.

No weaker way to start a program exists. If one of the layers is missing, :func:`choose` gives a sandbox that refuses, with
the missing layer and its remedy. Only an operator can name a layer that may be missing; then the sandbox's name says so
too, and with it every result.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Limits, Mechanism, Process, Profile, Program, Sandbox, Tier
from handrail.contract.tool.requires import CapabilitySet, Layer
from handrail.sandbox.bubblewrap import Bubblewrap
from handrail.sandbox.filters import landlock, seccomp
from handrail.sandbox.filters.limits import groups_for, memory_of_all, memory_of_call, own_bound, rlimits, user_counts
from handrail.sandbox.start.spawn import SYSTEM_BWRAP, binaries
from handrail.sandbox.view import identity

Optional = Literal["landlock", "seccomp"]
"""The layers that an operator can disable by name. Nothing replaces the namespaces."""
_WITHHOLDING = ("hosts", "processes", "memory", "watches")
"""Mechanisms that confinement does not depend on. Without one, single tools are unavailable or the doctor reports it.
"""
_TRY_S = 20
_INSTALL = "install bubblewrap 0.8 or newer (apt install bubblewrap, dnf install bubblewrap, pacman -S bubblewrap)"
_BOUNDED = "start Handrail in a control group with a bound, as systemd makes one: systemd-run --user --scope -p MemoryMax=75% …"
_SPACES = {"user": "users", "mnt": "mounts", "pid": "processes", "ipc": "shared memory", "uts": "host name"}
_SCRIPT = """
for kind in user mnt pid ipc uts net; do readlink /proc/self/ns/$kind; done
while read -r name value; do
  case $name in Seccomp:|NoNewPrivs:|CapEff:|Uid:) echo "$name $value" ;; esac
done < /proc/self/status
while read -r line; do echo "limit $line"; done < /proc/self/limits
for setting in /proc/sys/user/max_inotify_*; do echo "setting $setting $(cat $setting)"; done
(echo handrail > /proc/self/comm) 2> /dev/null && echo "proc: written"
: > tried && echo "workspace: written"
"""
"""Prints a program's view of its confinement. Only Landlock denies the last write but one; the mount of /proc allows
it."""


class Refusing:
    """A sandbox for a machine that can confine nothing: it starts no program."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    @property
    def tier(self) -> Tier:
        return self._tier

    async def start(self, capabilities: CapabilitySet, profile: Profile, program: Program) -> Process:
        raise ToolError(
            f"Programs cannot be confined on this machine: {self._tier.detail.rstrip('. ')}. "
            f"{'Ask the user to fix this: ' if self._tier.remedy else ''}{self._tier.remedy}".rstrip(". ")
            + ".",
            kind="unavailable",
        )


def probe(without: frozenset[str] = frozenset()) -> Tier:
    """Return the tier of this machine, found by starting a program in a sandbox."""
    return choose(without).tier


@lru_cache(maxsize=4)
def choose(without: frozenset[str] = frozenset()) -> Sandbox:
    """Return the sandbox to use: the first bubblewrap that works, else one that refuses every start.

    :param without: the layers of :data:`Optional` that the operator allows to be missing
    """
    if not sys.platform.startswith("linux"):
        return Refusing(Tier("none", f"Handrail has no sandbox for {sys.platform} in this version", "use Linux"))
    tried: list[tuple[str, str]] = []
    for binary in binaries():
        seen = _looked_at(binary)
        if isinstance(seen, str):
            tried.append((binary, seen))
            continue
        return _sandbox_of(binary, tuple(_mechanisms(seen)), without)
    if not tried:
        missing_program = Mechanism("namespaces", False, "bubblewrap is not installed", _INSTALL)
        return Refusing(Tier("none", "bubblewrap is not installed", _INSTALL, (missing_program, *_not_tried())))
    detail = "; ".join(f"{binary} failed: {failure}" for binary, failure in tried)
    cure = remedy(detail, Path("/proc/sys"), Path(SYSTEM_BWRAP).exists())
    return Refusing(Tier("none", detail, cure, (Mechanism("namespaces", False, detail, cure), *_not_tried())))


def _sandbox_of(binary: str, mechanisms: tuple[Mechanism, ...], without: frozenset[str]) -> Sandbox:
    """Return the sandbox of a working bubblewrap; one that refuses if a required mechanism fails."""
    failed = [one for one in mechanisms if one.held is False]
    missing = [one for one in failed if one.name not in (*without, *_WITHHOLDING)]
    if missing:
        detail = "; ".join(f"{one.name}: {one.detail}" for one in missing)
        remedies = "; ".join(one.remedy for one in missing if one.remedy)
        return Refusing(Tier("none", detail, remedies, mechanisms))
    lacking = [one.name for one in failed if one.name in get_args(Optional)]
    name = f"bubblewrap without {' and '.join(lacking)}" if lacking else "bubblewrap"
    about = f"{binary}: separate namespaces, no network" + _layers(lacking)
    return Bubblewrap(binary, Tier(name, about, "", mechanisms), system_calls=b"" if "seccomp" in lacking else None)


def _layers(lacking: Sequence[str]) -> str:
    have = [name for name in get_args(Optional) if name not in lacking]
    return f", {' and '.join(have)} within" if have else ""


def remedy(failure: str, sysctls: Path, system_bwrap: bool) -> str:
    """Return what to change so that bubblewrap works, from its messages and the kernel's settings.

    :param sysctls: where the kernel's settings are read (``/proc/sys``)
    :param system_bwrap: whether the distribution's bubblewrap is installed
    """
    if _setting(sysctls / "user/max_user_namespaces") == 0:
        return "allow user namespaces: sysctl -w user.max_user_namespaces=15000"
    if _setting(sysctls / "kernel/unprivileged_userns_clone") == 0:
        return "allow unprivileged user namespaces: sysctl -w kernel.unprivileged_userns_clone=1"
    if _setting(sysctls / "kernel/apparmor_restrict_unprivileged_userns") == 1:
        install = "" if system_bwrap else "apt install bubblewrap, then "
        return (
            f"AppArmor restricts user namespaces: {install}allow {SYSTEM_BWRAP} in a profile "
            "(apt install apparmor-profiles; load bwrap-userns-restrict), "
            "or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if "nknown option" in failure:
        return _INSTALL
    if "install perl" in failure:
        return "apt install perl-base"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "this is a container: let it make user namespaces, by --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        )
    return (
        "allow this user to create user, mount, pid and network namespaces; within another sandbox or container, "
        "start that one so that it allows them"
    )


def _setting(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(slots=True)
class _Seen:
    """A program's view of its confinement: namespaces, and lines of /proc by their first word."""

    spaces: dict[str, str] = field(default_factory=dict[str, str])
    status: dict[str, str] = field(default_factory=dict[str, str])
    limits: list[str] = field(default_factory=list[str])
    settings: set[str] = field(default_factory=set[str])
    written: set[str] = field(default_factory=set[str])
    no_hosts: str | None = None
    """Why no proxy could be started for it."""

    def note(self, line: str) -> None:
        """Record a line that the program printed."""
        word, _, rest = line.partition(" ")
        if "[" in line and word.endswith("]"):
            self.spaces[line.partition(":")[0]] = line
        elif word == "limit":
            self.limits.append(rest)
        elif word == "setting":
            self.settings.add(rest)
        elif rest == "written":
            self.written.add(word.rstrip(":"))
        else:
            self.status[word.rstrip(":")] = rest.strip()


def _looked_at(binary: str) -> _Seen | str:
    """Return what a program sees in a sandbox of ``binary``, or why no sandbox could be made."""
    with tempfile.TemporaryDirectory(prefix="handrail-probe-") as folder:
        place = os.path.realpath(folder)
        found: list[_Seen | str] = []
        # A separate loop in a separate thread, since the caller may run in a loop.
        thread = threading.Thread(target=lambda: found.append(asyncio.run(_tried(binary, place))))
        thread.start()
        thread.join()
        return found[0] if found else "the trial failed"


async def _tried(binary: str, place: str) -> _Seen | str:
    workspace, scratch = Path(place, "workspace"), Path(place, "scratch")
    workspace.mkdir()
    scratch.mkdir()
    whole = Layer("probe", fs_read=(str(workspace),), fs_write=(str(workspace),), hosts=("probe.invalid",))
    system_calls = None if seccomp.machine() else b""
    sandbox = Bubblewrap(binary, Tier("probe", ""), system_calls=system_calls)
    profile, argv = Profile(str(workspace), str(scratch)), ("/bin/sh", "-c", _SCRIPT)
    no_hosts: str | None = None
    try:
        try:
            process = await sandbox.start(CapabilitySet((whole,)), profile, Program(argv))
        except ToolError as error:
            no_hosts = error.text
            process = await sandbox.start(CapabilitySet((whole,)).offline(), profile, Program(argv))
        try:
            async with asyncio.timeout(_TRY_S):
                out, errors, _ = await process.communicate(b"", 1 << 16)
                code = await process.wait()
        finally:
            await process.kill()
    except TimeoutError:
        return f"no answer within {_TRY_S} s"
    except (ToolError, OSError, ValueError) as error:
        return str(error)
    if code != 0:
        return errors.decode("utf-8", "replace").strip()[:500] or f"it ended with {code}"
    seen = _Seen(no_hosts=no_hosts)
    for line in out.decode("utf-8", "replace").splitlines():
        seen.note(line)
    if not (workspace / "tried").exists() or "workspace" not in seen.written:
        return "the workspace could not be written"
    return seen


def _mechanisms(seen: _Seen) -> list[Mechanism]:
    return [
        _namespaces(seen),
        _network(seen),
        _hosts(seen),
        _privileges(seen),
        _seccomp(seen),
        _landlock(seen),
        *_limits(seen),
    ]


def _not_tried() -> tuple[Mechanism, ...]:
    """Return the mechanisms as untried because there are no namespaces; only Landlock can be asked for."""
    reason = "not tried without namespaces"
    version, why = _landlock_version()
    of_landlock = (
        Mechanism("landlock", None, f"the kernel has version {version}; {reason}")
        if version
        else Mechanism("landlock", False, why, _LANDLOCK)
    )
    names = ("network", "hosts", "privileges", "seccomp")
    return (*(Mechanism(name, None, reason) for name in names), of_landlock, Mechanism("limits", None, reason))


def _own(seen: _Seen, kind: str) -> bool:
    inside = seen.spaces.get(kind)
    return inside is not None and inside != str(Path(f"/proc/self/ns/{kind}").readlink())


def _namespaces(seen: _Seen) -> Mechanism:
    shared = [about for kind, about in _SPACES.items() if not _own(seen, kind)]
    if shared:
        return Mechanism(
            "namespaces", False, f"these namespaces are shared with the machine: {', '.join(shared)}", _INSTALL
        )
    return Mechanism("namespaces", True, f"separate ones for {', '.join(_SPACES.values())}")


def _network(seen: _Seen) -> Mechanism:
    if not _own(seen, "net"):
        return Mechanism("network", False, "programs run in the network namespace of the machine", _INSTALL)
    return Mechanism("network", True, "a separate namespace with only a loopback")


def _hosts(seen: _Seen) -> Mechanism:
    if seen.no_hosts is not None:
        cure = "install perl (apt install perl-base), and let this user enter the namespaces of its sandboxes"
        return Mechanism("hosts", False, seen.no_hosts, cure)
    return Mechanism("hosts", True, "programs reach the hosts of their call through a proxy that checks each request")


def _privileges(seen: _Seen) -> Mechanism:
    none = set(seen.status.get("CapEff", "?")) == {"0"}
    if none and seen.status.get("NoNewPrivs") == "1":
        return Mechanism("privileges", True, "programs have no capabilities, and set-user-ID programs give them none")
    return Mechanism("privileges", False, f"capabilities {seen.status.get('CapEff', 'unknown')}", _INSTALL)


def _seccomp(seen: _Seen) -> Mechanism:
    machine = seccomp.machine()
    if machine is None:
        about = f"Handrail has no system call filter for {os.uname().machine}"
        return Mechanism("seccomp", False, about, f"use x86_64 or aarch64; {_by_name('seccomp')}")
    if seen.status.get("Seccomp") != "2":
        about = "the system call filter is not in force"
        return Mechanism("seccomp", False, about, f"use a kernel with CONFIG_SECCOMP_FILTER; {_by_name('seccomp')}")
    count = len(seccomp.NUMBERS[machine])
    return Mechanism("seccomp", True, f"a filter for {machine} that denies or inspects {count} system calls")


def _by_name(layer: str) -> str:
    return f'to run without it, name it in the configuration: [sandbox] without = ["{layer}"]'


_LANDLOCK = (
    "use Linux 5.13 or newer with Landlock among its security modules: CONFIG_SECURITY_LANDLOCK=y, and landlock in lsm= "
    f"on the kernel's command line; {_by_name('landlock')}"
)


def _landlock_version() -> tuple[int, str]:
    """Return the version of Landlock, or 0 with the reason."""
    if version := landlock.abi():
        return version, ""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call(landlock.CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    disabled = ctypes.get_errno() == errno.EOPNOTSUPP
    return 0, "this kernel was started without Landlock" if disabled else "this kernel has no Landlock"


def _landlock(seen: _Seen) -> Mechanism:
    version, why = _landlock_version()
    if not version:
        return Mechanism("landlock", False, why, _LANDLOCK)
    if "proc" in seen.written:
        return Mechanism("landlock", False, "not in force: a write that it forbids succeeded", _LANDLOCK)
    return Mechanism("landlock", True, f"version {version}, in force on files{', TCP' if version >= 4 else ''}")


def _limits(seen: _Seen) -> list[Mechanism]:
    limits = Limits()
    names = {"Max cpu time": 0, "Max file size": 1, "Max data size": 2, "Max processes": 6, "Max open files": 7}
    names |= {"Max pending signals": 11, "Max msgqueue size": 12, "Max locked memory": 8}
    wanted = rlimits(limits)
    wrong: list[str] = []
    for title, number in names.items():
        line = next((line for line in seen.limits if line.startswith(title)), "")
        soft = line.removeprefix(title).split()
        if not soft or soft[0] != str(wanted[number][0]):
            wrong.append(title.removeprefix("Max "))
    if wrong:
        return [Mechanism("limits", False, f"not in force: {', '.join(wrong)}")]
    held = Mechanism(
        "limits", True, "processor time, memory of each process, file size, open files, timers, /tmp, /dev/shm"
    )
    return [held, _processes(limits), _memory(limits), _watches(seen)]


def _processes(limits: Limits) -> Mechanism:
    if os.geteuid() != 0:
        return Mechanism("processes", True, f"at most {limits.processes} in a sandbox")
    if groups_for(limits.processes, None):
        about = "in all sandboxes of one Handrail together if they run as root, else in each sandbox"
        return Mechanism("processes", True, f"at most {limits.processes} {about}")
    return Mechanism("processes", False, "the kernel does not count the processes of root", identity.AS_SOMEBODY)


def _watches(seen: _Seen) -> Mechanism:
    wanted = user_counts()
    if wanted and all(f"{setting} {number}" in seen.settings for setting, number in wanted):
        return Mechanism("watches", True, "each sandbox gets a quarter of its user's inotify instances and watches")
    return Mechanism(
        "watches",
        False,
        "a program can use up all inotify instances of its user, so the user's editors miss changes",
        "use Linux 4.11 or newer, and in a container mount /proc/sys/user so that it can be written",
    )


def _memory(limits: Limits) -> Mechanism:
    looked = f"a call that uses more than {_gib(memory_of_call(limits) or 0)} is ended"
    if groups_for(None, memory_of_all()):
        about = f"{looked}; a control group limits all sandboxes of one Handrail to {_gib(memory_of_all())}"
        return Mechanism("memory", True, about)
    if (bound := own_bound()) is not None:
        return Mechanism("memory", True, f"{looked}; a control group limits Handrail and its programs to {_gib(bound)}")
    about = f"{looked}, but no control group limits memory between two checks"
    return Mechanism("memory", False, about, _BOUNDED)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB"
