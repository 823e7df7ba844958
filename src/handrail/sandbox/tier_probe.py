"""The confinement that this machine can enforce, found by a trial, once per process.

No weaker way to start a program exists. If one of the layers is missing, :func:`choose_sandbox` gives a sandbox that refuses, with
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
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import (
    Process,
    ProgramSpec,
    Sandbox,
    SandboxLimits,
    SandboxMechanism,
    SandboxProfile,
    SandboxTier,
)
from handrail.contract.struct import Struct, field
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.filters import landlock, seccomp
from handrail.sandbox.filters.resource_limits import (
    build_rlimits,
    compute_sandbox_inotify_limits,
    compute_sandbox_memory_limit,
    compute_total_memory_limit,
    make_limiting_cgroups,
    read_own_memory_limit,
)
from handrail.sandbox.start.spawn import SYSTEM_BWRAP, find_bubblewrap_programs
from handrail.sandbox.view import sandbox_user

OptionalLayer = Literal["landlock", "seccomp"]
"""The layers that an operator can disable by name. Nothing replaces the namespaces."""
_OPTIONAL_MECHANISMS = ("hosts", "processes", "memory", "watches")
"""Mechanisms that confinement does not depend on. Without one, single tools are unavailable or the doctor reports it.
"""
_TRIAL_TIMEOUT_S = 20
_INSTALL_REMEDY = (
    "install bubblewrap 0.8 or newer (apt install bubblewrap, dnf install bubblewrap, pacman -S bubblewrap)"
)
_BOUND_REMEDY = "start Handrail in a control group with a bound, as systemd makes one: systemd-run --user --scope -p MemoryMax=75% …"
_NAMESPACE_NAMES = {"user": "users", "mnt": "mounts", "pid": "processes", "ipc": "shared memory", "uts": "host name"}
_TRIAL_SCRIPT = """
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


class RefusingSandbox:
    """A sandbox for a machine that can confine nothing: it starts no program."""

    def __init__(self, tier: SandboxTier) -> None:
        self._tier = tier

    @property
    def tier(self) -> SandboxTier:
        return self._tier

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Process:
        raise ToolError(
            f"Programs cannot be confined on this machine: {self._tier.detail.rstrip('. ')}. "
            f"{'Ask the user to fix this: ' if self._tier.remedy else ''}{self._tier.remedy}".rstrip(". ")
            + ".",
            kind="unavailable",
        )


def probe_tier(without: frozenset[str] = frozenset()) -> SandboxTier:
    """Return the tier of this machine, found by starting a program in a sandbox."""
    return choose_sandbox(without).tier


@lru_cache(maxsize=4)
def choose_sandbox(without: frozenset[str] = frozenset()) -> Sandbox:
    """Return the sandbox to use: the first bubblewrap that works, else one that refuses every start.

    :param without: the layers of :data:`OptionalLayer` that the operator allows to be missing
    """
    if not sys.platform.startswith("linux"):
        return RefusingSandbox(
            SandboxTier("none", f"Handrail has no sandbox for {sys.platform} in this version", "use Linux")
        )
    tried: list[tuple[str, str]] = []
    for binary in find_bubblewrap_programs():
        seen = _observe_confinement(binary)
        if isinstance(seen, str):
            tried.append((binary, seen))
            continue
        return _sandbox_for_bubblewrap(binary, tuple(_find_mechanisms(seen)), without)
    if not tried:
        missing_program = SandboxMechanism("namespaces", False, "bubblewrap is not installed", _INSTALL_REMEDY)
        return RefusingSandbox(
            SandboxTier(
                "none", "bubblewrap is not installed", _INSTALL_REMEDY, (missing_program, *_untried_mechanisms())
            )
        )
    detail = "; ".join(f"{binary} failed: {failure}" for binary, failure in tried)
    cure = suggest_bubblewrap_remedy(detail, Path("/proc/sys"), Path(SYSTEM_BWRAP).exists())
    return RefusingSandbox(
        SandboxTier("none", detail, cure, (SandboxMechanism("namespaces", False, detail, cure), *_untried_mechanisms()))
    )


def _sandbox_for_bubblewrap(binary: str, mechanisms: tuple[SandboxMechanism, ...], without: frozenset[str]) -> Sandbox:
    """Return the sandbox of a working bubblewrap; one that refuses if a required mechanism fails."""
    failed = [one for one in mechanisms if one.is_enforced is False]
    missing = [one for one in failed if one.name not in (*without, *_OPTIONAL_MECHANISMS)]
    if missing:
        detail = "; ".join(f"{one.name}: {one.detail}" for one in missing)
        remedies = "; ".join(one.remedy for one in missing if one.remedy)
        return RefusingSandbox(SandboxTier("none", detail, remedies, mechanisms))
    lacking = [one.name for one in failed if one.name in get_args(OptionalLayer)]
    name = f"bubblewrap without {' and '.join(lacking)}" if lacking else "bubblewrap"
    about = f"{binary}: separate namespaces, no network" + _format_layers(lacking)
    return BubblewrapSandbox(
        binary, SandboxTier(name, about, "", mechanisms), system_calls=b"" if "seccomp" in lacking else None
    )


def _format_layers(lacking: Sequence[str]) -> str:
    have = [name for name in get_args(OptionalLayer) if name not in lacking]
    return f", {' and '.join(have)} within" if have else ""


def suggest_bubblewrap_remedy(failure: str, sysctls: Path, system_bwrap: bool) -> str:
    """Return what to change so that bubblewrap works, from its messages and the kernel's settings.

    :param sysctls: where the kernel's settings are read (``/proc/sys``)
    :param system_bwrap: whether the distribution's bubblewrap is installed
    """
    if _read_setting(sysctls / "user/max_user_namespaces") == 0:
        return "allow user namespaces: sysctl -w user.max_user_namespaces=15000"
    if _read_setting(sysctls / "kernel/unprivileged_userns_clone") == 0:
        return "allow unprivileged user namespaces: sysctl -w kernel.unprivileged_userns_clone=1"
    if _read_setting(sysctls / "kernel/apparmor_restrict_unprivileged_userns") == 1:
        install = "" if system_bwrap else "apt install bubblewrap, then "
        return (
            f"AppArmor restricts user namespaces: {install}allow {SYSTEM_BWRAP} in a profile "
            "(apt install apparmor-profiles; load bwrap-userns-restrict), "
            "or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if "nknown option" in failure:
        return _INSTALL_REMEDY
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


def _read_setting(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


class _ObservedConfinement(Struct):
    """A program's view of its confinement: namespaces, and lines of /proc by their first word."""

    spaces: dict[str, str] = field(default_factory=dict[str, str])
    status: dict[str, str] = field(default_factory=dict[str, str])
    limits: list[str] = field(default_factory=list[str])
    settings: set[str] = field(default_factory=set[str])
    written: set[str] = field(default_factory=set[str])
    no_hosts: str | None = None
    """Why no proxy could be started for it."""

    def record_program_line(self, line: str) -> None:
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


def _observe_confinement(binary: str) -> _ObservedConfinement | str:
    """Return what a program sees in a sandbox of ``binary``, or why no sandbox could be made."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="handrail-probe-")
    except OSError as error:
        reason = error.strerror or str(error)
        return f"no temporary folder can be made ({reason}). Mount a writable /tmp, or set TMPDIR to a writable folder"
    with temporary as folder:
        place = os.path.realpath(folder)
        found: list[_ObservedConfinement | str] = []
        # A separate loop in a separate thread, since the caller may run in a loop.
        thread = threading.Thread(target=lambda: found.append(asyncio.run(_run_trial(binary, place))))
        thread.start()
        thread.join()
        return found[0] if found else "the trial failed"


async def _run_trial(binary: str, place: str) -> _ObservedConfinement | str:
    workspace, scratch = Path(place, "workspace"), Path(place, "scratch")
    workspace.mkdir()
    scratch.mkdir()
    whole = CapabilityLayer("probe", fs_read=(str(workspace),), fs_write=(str(workspace),), hosts=("probe.invalid",))
    system_calls = None if seccomp.get_supported_architecture() else b""
    sandbox = BubblewrapSandbox(binary, SandboxTier("probe", ""), system_calls=system_calls)
    profile, argv = SandboxProfile(str(workspace), str(scratch)), ("/bin/sh", "-c", _TRIAL_SCRIPT)
    no_hosts: str | None = None
    try:
        try:
            process = await sandbox.start(CapabilitySet((whole,)), profile, ProgramSpec(argv))
        except ToolError as error:
            no_hosts = error.text
            process = await sandbox.start(CapabilitySet((whole,)).without_hosts(), profile, ProgramSpec(argv))
        try:
            async with asyncio.timeout(_TRIAL_TIMEOUT_S):
                out, errors, _ = await process.communicate(b"", 1 << 16)
                code = await process.wait()
        finally:
            await process.kill()
    except TimeoutError:
        return f"no answer within {_TRIAL_TIMEOUT_S} s"
    except (ToolError, OSError, ValueError) as error:
        return str(error).removesuffix(" Try again.").rstrip(".")  # advice for a model, and another try gives the same
    if code != 0:
        return errors.decode("utf-8", "replace").strip()[:500] or f"it ended with {code}"
    seen = _ObservedConfinement(no_hosts=no_hosts)
    for line in out.decode("utf-8", "replace").splitlines():
        seen.record_program_line(line)
    if not (workspace / "tried").exists() or "workspace" not in seen.written:
        return "the workspace could not be written"
    return seen


def _find_mechanisms(seen: _ObservedConfinement) -> list[SandboxMechanism]:
    return [
        _namespaces(seen),
        _network(seen),
        _hosts(seen),
        _privileges(seen),
        _seccomp(seen),
        _landlock(seen),
        *_limits(seen),
    ]


def _untried_mechanisms() -> tuple[SandboxMechanism, ...]:
    """Return the mechanisms as untried because there are no namespaces; only Landlock can be asked for."""
    reason = "not tried without namespaces"
    version, why = _enforced_landlock_version()
    of_landlock = (
        SandboxMechanism("landlock", None, f"the kernel has version {version}; {reason}")
        if version
        else SandboxMechanism("landlock", False, why, _LANDLOCK)
    )
    names = ("network", "hosts", "privileges", "seccomp")
    return (
        *(SandboxMechanism(name, None, reason) for name in names),
        of_landlock,
        SandboxMechanism("limits", None, reason),
    )


def _has_own_namespace(seen: _ObservedConfinement, kind: str) -> bool:
    inside = seen.spaces.get(kind)
    return inside is not None and inside != str(Path(f"/proc/self/ns/{kind}").readlink())


def _namespaces(seen: _ObservedConfinement) -> SandboxMechanism:
    shared = [about for kind, about in _NAMESPACE_NAMES.items() if not _has_own_namespace(seen, kind)]
    if shared:
        return SandboxMechanism(
            "namespaces", False, f"these namespaces are shared with the machine: {', '.join(shared)}", _INSTALL_REMEDY
        )
    return SandboxMechanism("namespaces", True, f"separate ones for {', '.join(_NAMESPACE_NAMES.values())}")


def _network(seen: _ObservedConfinement) -> SandboxMechanism:
    if not _has_own_namespace(seen, "net"):
        return SandboxMechanism(
            "network", False, "programs run in the network namespace of the machine", _INSTALL_REMEDY
        )
    return SandboxMechanism("network", True, "a separate namespace with only a loopback")


def _hosts(seen: _ObservedConfinement) -> SandboxMechanism:
    if seen.no_hosts is not None:
        cure = "install perl (apt install perl-base), and let this user enter the namespaces of its sandboxes"
        return SandboxMechanism("hosts", False, seen.no_hosts, cure)
    return SandboxMechanism(
        "hosts", True, "programs reach the hosts of their call through a proxy that checks each request"
    )


def _privileges(seen: _ObservedConfinement) -> SandboxMechanism:
    none = set(seen.status.get("CapEff", "?")) == {"0"}
    if none and seen.status.get("NoNewPrivs") == "1":
        return SandboxMechanism(
            "privileges", True, "programs have no capabilities, and set-user-ID programs give them none"
        )
    return SandboxMechanism(
        "privileges", False, f"capabilities {seen.status.get('CapEff', 'unknown')}", _INSTALL_REMEDY
    )


def _seccomp(seen: _ObservedConfinement) -> SandboxMechanism:
    machine = seccomp.get_supported_architecture()
    if machine is None:
        about = f"Handrail has no system call filter for {os.uname().machine}"
        return SandboxMechanism("seccomp", False, about, f"use x86_64 or aarch64; {_disabled_detail('seccomp')}")
    if seen.status.get("Seccomp") != "2":
        about = "the system call filter is not in force"
        return SandboxMechanism(
            "seccomp", False, about, f"use a kernel with CONFIG_SECCOMP_FILTER; {_disabled_detail('seccomp')}"
        )
    count = len(seccomp.NUMBERS[machine])
    return SandboxMechanism("seccomp", True, f"a filter for {machine} that denies or inspects {count} system calls")


def _disabled_detail(layer: str) -> str:
    return f'to run without it, name it in the configuration: [sandbox] without = ["{layer}"]'


_LANDLOCK = (
    "use Linux 5.13 or newer with Landlock among its security modules: CONFIG_SECURITY_LANDLOCK=y, and landlock in lsm= "
    f"on the kernel's command line; {_disabled_detail('landlock')}"
)


def _enforced_landlock_version() -> tuple[int, str]:
    """Return the version of Landlock, or 0 with the reason."""
    if version := landlock.probe_abi():
        return version, ""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call(landlock.CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    disabled = ctypes.get_errno() == errno.EOPNOTSUPP
    return 0, "this kernel was started without Landlock" if disabled else "this kernel has no Landlock"


def _landlock(seen: _ObservedConfinement) -> SandboxMechanism:
    version, why = _enforced_landlock_version()
    if not version:
        return SandboxMechanism("landlock", False, why, _LANDLOCK)
    if "proc" in seen.written:
        return SandboxMechanism("landlock", False, "not in force: a write that it forbids succeeded", _LANDLOCK)
    return SandboxMechanism("landlock", True, f"version {version}, in force on files{', TCP' if version >= 4 else ''}")


def _limits(seen: _ObservedConfinement) -> list[SandboxMechanism]:
    limits = SandboxLimits()
    names = {"Max cpu time": 0, "Max file size": 1, "Max data size": 2, "Max processes": 6, "Max open files": 7}
    names |= {"Max pending signals": 11, "Max msgqueue size": 12, "Max locked memory": 8}
    wanted = build_rlimits(limits)
    wrong: list[str] = []
    for title, number in names.items():
        line = next((line for line in seen.limits if line.startswith(title)), "")
        soft = line.removeprefix(title).split()
        if not soft or soft[0] != str(wanted[number][0]):
            wrong.append(title.removeprefix("Max "))
    if wrong:
        return [SandboxMechanism("limits", False, f"not in force: {', '.join(wrong)}")]
    held = SandboxMechanism(
        "limits", True, "processor time, memory of each process, file size, open files, timers, /tmp, /dev/shm"
    )
    return [held, _processes(limits), _memory(limits), _watches(seen)]


def _processes(limits: SandboxLimits) -> SandboxMechanism:
    if os.geteuid() != 0:
        return SandboxMechanism("processes", True, f"at most {limits.processes} in a sandbox")
    if make_limiting_cgroups(limits.processes, None):
        about = "in all sandboxes of one Handrail together if they run as root, else in each sandbox"
        return SandboxMechanism("processes", True, f"at most {limits.processes} {about}")
    return SandboxMechanism(
        "processes", False, "the kernel does not count the processes of root", sandbox_user.USER_REMEDY
    )


def _watches(seen: _ObservedConfinement) -> SandboxMechanism:
    wanted = compute_sandbox_inotify_limits()
    if wanted and all(f"{setting} {number}" in seen.settings for setting, number in wanted):
        return SandboxMechanism(
            "watches", True, "each sandbox gets a quarter of its user's inotify instances and watches"
        )
    return SandboxMechanism(
        "watches",
        False,
        "a program can use up all inotify instances of its user, so the user's editors miss changes",
        "use Linux 4.11 or newer, and in a container mount /proc/sys/user so that it can be written",
    )


def _memory(limits: SandboxLimits) -> SandboxMechanism:
    looked = f"a call that uses more than {_gib(compute_sandbox_memory_limit(limits) or 0)} is ended"
    if make_limiting_cgroups(None, compute_total_memory_limit()):
        about = (
            f"{looked}; a control group limits all sandboxes of one Handrail to {_gib(compute_total_memory_limit())}"
        )
        return SandboxMechanism("memory", True, about)
    if (bound := read_own_memory_limit()) is not None:
        return SandboxMechanism(
            "memory", True, f"{looked}; a control group limits Handrail and its programs to {_gib(bound)}"
        )
    about = f"{looked}, but no control group limits memory between two checks"
    return SandboxMechanism("memory", False, about, _BOUND_REMEDY)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB"
