"""What this machine can enforce: found out by trying it, once per process.

There is no weaker way to start a program. Where bubblewrap does not work, :func:`choose` gives a sandbox that
refuses, saying what is missing and how to get it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.requires import CapabilitySet, Layer
from handrail.contract.sandbox import Process, Profile, Sandbox, Tier
from handrail.sandbox.bubblewrap import SYSTEM_BWRAP, Bubblewrap, binaries, command_options

_TRY_S = 20
_INSTALL = "install bubblewrap 0.8 or newer (apt install bubblewrap, dnf install bubblewrap, pacman -S bubblewrap)"


class Refusing:
    """Implements :class:`handrail.contract.sandbox.Sandbox` where nothing can be confined: starts nothing."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    @property
    def tier(self) -> Tier:
        return self._tier

    async def start(
        self,
        capabilities: CapabilitySet,
        profile: Profile,
        argv: Sequence[str],
        descriptors: Mapping[int, int] | None = None,
        *,
        merge_stderr: bool = False,
    ) -> Process:
        raise ToolError(
            f"programs cannot be confined on this machine: {self._tier.detail}. {self._tier.remedy}".rstrip(". ") + ".",
            kind="unavailable",
        )


def probe() -> Tier:
    """The tier of this machine. Starts ``true`` with every option that a real call is given."""
    return choose().tier


@lru_cache(maxsize=1)
def choose() -> Sandbox:
    """The sandbox to use: the first bubblewrap that works, else one that refuses."""
    if not sys.platform.startswith("linux"):
        return Refusing(Tier("none", f"there is no sandbox for {sys.platform} in this version", "use Linux"))
    tried: list[tuple[str, str]] = []
    for binary in binaries():
        failure = _failure(binary)
        if failure is None:
            return Bubblewrap(binary, Tier("bubblewrap", f"{binary}: namespaces of its own, no network"))
        tried.append((binary, failure))
    if not tried:
        return Refusing(Tier("none", "bubblewrap is not installed", _INSTALL))
    detail = "; ".join(f"{binary} failed: {failure}" for binary, failure in tried)
    return Refusing(Tier("none", detail, remedy(detail, Path("/proc/sys"), Path(SYSTEM_BWRAP).exists())))


def remedy(failure: str, sysctls: Path, system_bwrap: bool) -> str:
    """What to change so that bubblewrap works, from what it said and the kernel's settings.

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
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "this is a container: start it with --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
            "--security-opt systempaths=unconfined"
        )
    return "allow this user to create user, mount, pid and network namespaces"


def _setting(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _failure(binary: str) -> str | None:
    """Why ``binary`` does not confine here; None if it does."""
    with tempfile.TemporaryDirectory(prefix="handrail-probe-") as folder:
        place = os.path.realpath(folder)
        workspace, scratch = Path(place, "workspace"), Path(place, "scratch")
        workspace.mkdir()
        scratch.mkdir()
        whole = Layer("probe", fs_read=(str(workspace),), fs_write=(str(workspace),))
        try:
            options = command_options(CapabilitySet((whole,)), Profile(str(workspace), str(scratch)))
            done = subprocess.run(
                [binary, *options, "--", "/bin/sh", "-c", ": > tried && readlink /proc/self/ns/net"],
                cwd=place,  # what a binary that confines nothing writes goes with the folder
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TRY_S,
                check=False,
                env={},
            )
        except (OSError, subprocess.SubprocessError, ToolError) as error:
            return str(error)
        if done.returncode != 0:
            return done.stderr.decode("utf-8", "replace").strip()[:500] or f"it ended with {done.returncode}"
        network = done.stdout.decode("ascii", "replace").strip()
        if not network or network == str(Path("/proc/self/ns/net").readlink()):
            return "it ran the program in the machine's own network namespace"
        if not (workspace / "tried").exists():
            return "the workspace could not be written"
    return None
