"""A test suite for sandbox providers: each check tries to reach one thing that a call must not reach.

:func:`self_check` runs the suite against any :class:`handrail.contract.sandbox_protocol.Sandbox`, this machine's own or one of
another package. Each check tries from inside a sandbox and observes from outside, in a temporary folder. A check does no
harm without confinement, so the suite may run against a provider that confines nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, Sandbox, SandboxLimits, SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires

# One check of a sandbox provider, and the fixture that it runs in.

_ANY_PROGRAM = ShellRequires(cmd="*")


class CheckCannotRun(Exception):
    """An error for a check that cannot run here, with the reason."""


class CheckProgramResult(Struct, frozen=True):
    """The result of a program in the sandbox: exit code and output."""

    code: int
    out: str
    errors: str
    dropped: int

    @property
    def summary(self) -> str:
        """The exit code and the last line of output, for a report."""
        words = (self.errors or self.out).strip().split("\n")
        return f"exit code {self.code}{': ' if words[-1] else ''}{words[-1][:120]}"


class CheckFixture(Struct, frozen=True):
    """The fixture of one check: its folders, and targets outside the sandbox.

    :param secret: the content of ``outside / "secret"`` and of the variable :data:`_VARIABLE` of this process
    :param port: of a server on this machine's loopback
    :param connections: one item for each connection to it, or to the server at ``workspace / "server"``
    """

    sandbox: Sandbox
    workspace: Path
    scratch: Path
    outside: Path
    secret: str
    port: int
    connections: list[str]

    def capabilities(self, *, write: bool = True) -> CapabilitySet:
        folder = str(self.workspace)
        return CapabilitySet(
            (CapabilityLayer("self-check", (folder,), (folder,) if write else (), (), (_ANY_PROGRAM,)),)
        )

    def profile(self, **changes: Any) -> SandboxProfile:
        return replace(SandboxProfile(str(self.workspace), str(self.scratch)), **changes)

    async def was_server_reached(self, name: Literal["tcp", "unix"]) -> bool:
        """Return whether a program has connected to the server.

        This makes another connection, which the server accepts after all earlier ones.
        """
        if name == "tcp":
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        else:
            here = os.open(self.workspace, os.O_RDONLY | os.O_DIRECTORY)
            try:
                reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{here}/server")
            finally:
                os.close(here)
        await reader.read()
        writer.close()
        self.connections.remove(name)
        return name in self.connections

    async def bash(
        self, script: str, *, write: bool = True, max_bytes: int = 1 << 20, **profile: Any
    ) -> CheckProgramResult:
        """Run a script and wait until no process of it is left."""
        return await self.run(("/bin/bash", "-c", script), write=write, max_bytes=max_bytes, **profile)

    async def run(
        self, argv: Sequence[str], *, write: bool = True, max_bytes: int = 1 << 20, **profile: Any
    ) -> CheckProgramResult:
        process = await self.sandbox.start(self.capabilities(write=write), self.profile(**profile), ProgramSpec(argv))
        try:
            out, errors, dropped = await process.communicate(b"", max_bytes)
            code = await process.wait()
        finally:
            await process.kill()
        return CheckProgramResult(code, out.decode("utf-8", "replace"), errors.decode("utf-8", "replace"), dropped)

    def end_marked_processes(self, marker: str) -> list[int]:
        """End the processes of this machine with ``marker`` among their arguments, and return their ids."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                        os.kill(found[-1], signal.SIGKILL)
        return found


class SandboxCheck(Struct, frozen=True):
    """One property that a sandbox must have.

    :param run: returns None if the sandbox has it, else what was reached
    """

    group: str
    name: str
    run: Callable[[CheckFixture], Awaitable[str | None]]


@contextlib.contextmanager
def run_marked_host_process(marker: str) -> Generator[int, None, None]:
    """Run a process on this machine with ``marker`` in its arguments."""
    waiting = subprocess.Popen(["/bin/sh", "-c", "read -r _", marker], stdin=subprocess.PIPE, env={})
    try:
        yield waiting.pid
    finally:
        waiting.kill()
        waiting.communicate()


CHECK_TIMEOUT_S = 60.0
_VARIABLE = "HANDRAIL_SELF_CHECK"
_NOBODY = 65_534
_AT_ONCE = 3


class CheckOutcome(Struct, frozen=True):
    """The result of one check.

    :param state: ``held``; ``open`` if something was reached that should not be; ``not tried`` if this machine lacks
        what the check needs
    """

    group: str
    name: str
    state: Literal["held", "open", "not tried"]
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return its fields as JSON-able data."""
        return asdict(self)


async def self_check(sandbox: Sandbox, checks: Sequence[SandboxCheck] | None = None) -> list[CheckOutcome]:
    """Run the checks on a sandbox provider, and return their results.

    :param checks: only these; all by default
    """
    if checks is None:
        checks = CHECKS
    turns = asyncio.Semaphore(_AT_ONCE)
    with _make_unlisted_folder() as place, _set_secret_variable() as secret:

        async def made(number: int, check: SandboxCheck) -> CheckOutcome:
            async with turns, _make_fixture(sandbox, place / str(number), secret) as fixture:
                return await _run_check(check, fixture)

        return await asyncio.gather(*(made(number, check) for number, check in enumerate(checks)))


async def _run_check(check: SandboxCheck, fixture: CheckFixture) -> CheckOutcome:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            reached = await check.run(fixture)
    except CheckCannotRun as reason:
        return CheckOutcome(check.group, check.name, "not tried", str(reason))
    except TimeoutError:
        return CheckOutcome(check.group, check.name, "open", f"the check took longer than {CHECK_TIMEOUT_S:.0f} s")
    except ToolError as error:
        return CheckOutcome(check.group, check.name, "open", f"the sandbox could not be used: {error.text}")
    except Exception as error:  # a failure of the provider is a result, and the other checks continue
        return CheckOutcome(check.group, check.name, "open", f"the sandbox failed: {type(error).__name__}: {error}")
    return CheckOutcome(check.group, check.name, "held" if reached is None else "open", reached or "")


@contextlib.contextmanager
def _make_unlisted_folder() -> Generator[Path, None, None]:
    """Make a folder that other users can enter but not list, since a sandbox may run as another user."""
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="handrail-self-check-")))
    place.chmod(0o711)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _set_secret_variable() -> Generator[str, None, None]:
    """Set a variable in this process's environment that no program may see."""
    secret = f"secret-{secrets.token_hex(16)}"
    os.environ[_VARIABLE] = secret
    try:
        yield secret
    finally:
        os.environ.pop(_VARIABLE, None)


@contextlib.asynccontextmanager
async def _make_fixture(sandbox: Sandbox, place: Path, secret: str) -> AsyncGenerator[CheckFixture, None]:
    folders = [place / name for name in ("workspace", "scratch", "outside")]
    place.mkdir(mode=0o711)
    for folder in folders:
        folder.mkdir(mode=0o755)
    workspace, scratch, outside = folders
    (outside / "secret").write_text(secret)
    if os.geteuid() == 0:  # a sandbox of root becomes the workspace's owner only if that is another user
        with contextlib.suppress(OSError):  # within another sandbox no other user exists
            os.chown(workspace, _NOBODY, _NOBODY)
    connections: list[str] = []

    def reached(name: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(name)
            writer.close()

        return accept

    tcp = await asyncio.start_server(reached("tcp"), "127.0.0.1", 0)
    here = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"/proc/self/fd/{here}/server")  # an address holds 107 bytes
    finally:
        os.close(here)
    (workspace / "server").chmod(0o777)
    unix = await asyncio.start_unix_server(reached("unix"), sock=listener)
    port: int = tcp.sockets[0].getsockname()[1]
    try:
        yield CheckFixture(sandbox, workspace, scratch, outside, secret, port, connections)
    finally:
        for server in (tcp, unix):
            server.close()
            await server.wait_closed()


def count_check_states(outcomes: Sequence[CheckOutcome]) -> Mapping[str, int]:
    """Return how many checks are held, open and not tried."""
    return {state: sum(one.state == state for one in outcomes) for state in ("held", "open", "not tried")}


# The checks that every sandbox provider has to pass.
#
# Each tries something from inside that is harmless without confinement. It returns None if the sandbox held, else what
# was reached. The checks need bash and the usual small programs inside, and some need perl or python.

_MIB = 1024 * 1024
_REGISTERED: list[SandboxCheck] = []
_CheckFunction = Callable[[CheckFixture], Awaitable[str | None]]


def _check(group: str, name: str) -> Callable[[_CheckFunction], _CheckFunction]:
    def note(run: _CheckFunction) -> _CheckFunction:
        _REGISTERED.append(SandboxCheck(group, name, run))
        return run

    return note


# Files.


@_check("files", "a program can write in the workspace")
async def _workspace_written(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("echo done > file")
    file = fixture.workspace / "file"
    return None if file.exists() and file.read_text() == "done\n" else f"nothing was written: {ran.summary}"


@_check("files", "the home folder is the scratch folder, and files in it persist")
async def _home(fixture: CheckFixture) -> str | None:
    await fixture.bash("echo kept > ~/kept")
    ran = await fixture.bash("cat ~/kept")
    return None if ran.out == "kept\n" else f"the file was missing for the next program: {ran.summary}"


@_check("files", "files outside cannot be read")
async def _outside_read(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash(f"cat '{fixture.outside}/secret'; cat /proc/1/root'{fixture.outside}/secret'")
    return "a file outside was read" if fixture.secret in ran.out else None


@_check("files", "files outside cannot be read through a link")
async def _link_read(fixture: CheckFixture) -> str | None:
    (fixture.workspace / "link").symlink_to(fixture.outside / "secret")
    ran = await fixture.bash("cat link")
    return "a file outside was read" if fixture.secret in ran.out else None


@_check("files", "files outside cannot be written")
async def _outside_written(fixture: CheckFixture) -> str | None:
    fixture.outside.chmod(0o777)
    (fixture.workspace / "way").symlink_to(fixture.outside)
    await fixture.bash(f"echo x > '{fixture.outside}/new'; echo x > way/newer")
    there = {entry.name for entry in fixture.outside.iterdir()} - {"secret"}
    return f"it wrote {', '.join(sorted(there))} outside" if there else None


@_check("files", "a call without write access changes nothing")
async def _not_written(fixture: CheckFixture) -> str | None:
    for how in ({"write": False}, {"workspace_writable": False}):
        await fixture.bash("echo x > new", **how)
        if (fixture.workspace / "new").exists():
            return f"it wrote in a read-only workspace ({next(iter(how))})"
    return None


@_check("files", "hidden and masked files cannot be read")
async def _hidden(fixture: CheckFixture) -> str | None:
    (fixture.workspace / "state").mkdir()
    for name in ("state/secret", ".env"):
        (fixture.workspace / name).write_text(fixture.secret)
    hidden, masked = (str(fixture.workspace / "state"),), (str(fixture.workspace / ".env"),)
    ran = await fixture.bash("cat state/secret .env", hidden=hidden, masked=masked)
    return "one was read" if fixture.secret in ran.out else None


@_check("files", "pinned files cannot be written or moved away")
async def _pinned(fixture: CheckFixture) -> str | None:
    hooks = fixture.workspace / "project" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "file").write_text("before")
    for path in (hooks.parent, hooks, hooks / "file"):
        if os.geteuid() == 0:
            os.chown(path, fixture.workspace.stat().st_uid, -1)
    script = "echo x > project/hooks/file; mv project aside; mkdir -p project/hooks; echo x > project/hooks/file"
    await fixture.bash(script, pinned=(str(hooks),))
    there = hooks / "file"
    return None if there.exists() and there.read_text() == "before" else "it was written or moved away"


@_check("files", "kernel settings cannot be written")
async def _settings(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash(
        "for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger; do [ -w $f ] && echo $f; done"
    )
    return f"it may write {' '.join(ran.out.split())}" if ran.out.strip() else None


# Network.


@_check("network", "a server on the loopback of this machine cannot be reached")
async def _loopback(fixture: CheckFixture) -> str | None:
    await fixture.bash(f"exec 3<>/dev/tcp/127.0.0.1/{fixture.port}")
    return "it was reached" if await fixture.was_server_reached("tcp") else None


@_check("network", "the only network device is the loopback of the sandbox")
async def _devices(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("cat /proc/net/dev")
    devices = {line.partition(":")[0].strip() for line in ran.out.splitlines() if ":" in line} - {"lo"}
    return f"it has {', '.join(sorted(devices))}" if devices else None


_CONNECT = {
    "python3": "import socket; socket.socket(socket.AF_UNIX).connect('server')",
    "perl": "use Socket; socket(S, AF_UNIX, SOCK_STREAM, 0) && connect(S, pack_sockaddr_un('server'))",
}


@_check("network", "a server that listens in the workspace cannot be reached")
async def _unix_server(fixture: CheckFixture) -> str | None:
    script = "; ".join(
        f'command -v {program} > /dev/null && {{ echo {program}; {program} {flag} "{text}"; }}'
        for (program, text), flag in zip(_CONNECT.items(), ("-c", "-e"), strict=True)
    )
    ran = await fixture.bash(script)
    if await fixture.was_server_reached("unix"):
        return "it was reached"
    if not ran.out.strip():
        raise CheckCannotRun("the sandbox has neither python nor perl")
    return None


# Processes.


@_check("processes", "processes of this machine cannot be seen")
async def _not_seen(fixture: CheckFixture) -> str | None:
    marker = f"mark-{secrets.token_hex(8)}"
    with run_marked_host_process(marker):
        ran = await fixture.bash("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'", environment={"IGNORED": "1"})
    return "one was seen" if marker in ran.out else None


@_check("processes", "no process is left after the call")
async def _nothing_left(fixture: CheckFixture) -> str | None:
    number = f"7{secrets.randbelow(10**8):08d}"
    waiting = f"sh -c 'echo up; exec sleep {number} > /dev/null'"
    # Both have left their process group, and ignore all signals they can, before the shell ends.
    both = f"(trap '' TERM HUP INT; setsid {waiting} & setsid nohup {waiting} &) 2> /dev/null"
    await fixture.bash(f"{both} | (read -r _; read -r _)")
    left = fixture.end_marked_processes(number)
    return f"{len(left)} processes are left" if left else None


@_check("processes", "a call ends with its program, even if another process holds its output")
async def _ended(fixture: CheckFixture) -> str | None:
    number = f"7{secrets.randbelow(10**8):08d}"
    ran = await fixture.bash(f"sleep {number} & echo done")
    return None if ran.out == "done\n" else f"its output is not complete: {ran.summary}"


@_check("processes", "a killed program ends, whatever signals it ignores")
async def _killed(fixture: CheckFixture) -> str | None:
    number = f"7{secrets.randbelow(10**8):08d}"
    script = f"trap '' TERM HUP INT; echo up; sleep {number}; sleep {number}"
    process = await fixture.sandbox.start(
        fixture.capabilities(), fixture.profile(), ProgramSpec(("/bin/bash", "-c", script))
    )
    try:
        await process.read_line(100)
    finally:
        await process.kill()
    left = fixture.end_marked_processes(number)
    return f"{len(left)} processes are left" if left else None


@_check("processes", "set-user-ID programs and capabilities give no more rights")
async def _privileges(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("cat /proc/self/status")
    status = dict(line.split(":\t", 1) for line in ran.out.splitlines() if ":\t" in line)
    if set(status.get("CapEff", "?")) != {"0"}:
        return f"it has capabilities: {status.get('CapEff', 'unknown')}"
    return None if status.get("NoNewPrivs") == "1" else "it may gain privileges"


@_check("processes", "a program cannot create a user namespace")
async def _no_namespaces(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("command -v unshare > /dev/null || exit 99; unshare --user true && echo made")
    if ran.code == 99:
        raise CheckCannotRun("the sandbox has no unshare(1)")
    return "it made one" if "made" in ran.out else None


# The environment, secrets and descriptors that a program receives.


@_check("environment", "the environment has the variables of the call, and none of Handrail")
async def _environment(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("env; cat /proc/1/environ | tr '\\0' '\\n'", environment={"GIVEN": "value"})
    if fixture.secret in ran.out:
        return "a variable of Handrail was seen"
    return None if "GIVEN=value" in ran.out.split("\n") else "the variable of the call is missing"


@_check("environment", "secrets arrive by a descriptor only")
async def _secrets(fixture: CheckFixture) -> str | None:
    value = f"value-{secrets.token_hex(8)}"
    script = 'eval "cat <&$HANDRAIL_SECRETS_FD"; echo; echo ---; env; cat /proc/[0-9]*/cmdline | tr "\\0" "\\n"'
    ran = await fixture.bash(script, secrets={"TOKEN": value})
    given, _, elsewhere = ran.out.partition("---")
    if value in elsewhere:
        return "one was seen in the environment or the arguments"
    try:
        return None if json.loads(given) == {"TOKEN": value} else "another value was given"
    except ValueError:
        return f"none was given: {ran.summary}"


@_check("descriptors", "no descriptor of Handrail is inherited")
async def _descriptors(fixture: CheckFixture) -> str | None:
    descriptor = os.open(fixture.outside / "secret", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        ran = await fixture.bash("for f in /proc/$$/fd/*; do readlink $f; [ -f $f ] && cat $f; done; :")
    finally:
        os.close(descriptor)
    return "one was inherited" if str(fixture.outside) in ran.out or fixture.secret in ran.out else None


# Limits.


@_check("limits", "a file cannot grow beyond its limit")
async def _file_size(fixture: CheckFixture) -> str | None:
    await fixture.bash("head -c 3M /dev/zero > big", limits=SandboxLimits(file_bytes=_MIB))
    size = (fixture.workspace / "big").stat().st_size
    return None if size <= _MIB else f"it wrote {size} bytes, and the limit is {_MIB}"


@_check("limits", "the number of open files is limited")
async def _open_files(fixture: CheckFixture) -> str | None:
    script = 'for n in {10..60}; do eval "exec $n</dev/null" || exit; done; echo all'
    ran = await fixture.bash(script, limits=SandboxLimits(open_files=40))
    return "it opened more" if "all" in ran.out else None


@_check("limits", "the number of processes is limited")
async def _processes(fixture: CheckFixture) -> str | None:
    script = "n=0; for i in {1..60}; do sleep 5 & n=$((n+1)); done 2> /dev/null; set -- $(jobs -p); echo $#"
    ran = await fixture.bash(f"{script} || :", limits=SandboxLimits(processes=30))
    count = ran.out.strip()
    return f"it started {count}" if count.isdigit() and int(count) >= 60 else None


@_check("limits", "memory is limited")
async def _memory(fixture: CheckFixture) -> str | None:
    script = "x=$(head -c 200M /dev/zero | tr '\\0' a); echo ${#x}"
    ran = await fixture.bash(script, limits=SandboxLimits(memory_bytes=64 * _MIB))
    return "it took more" if ran.out.strip() == str(200 * _MIB) else None


@_check("limits", "processor time is limited")
async def _processor(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("while ((SECONDS < 20)); do :; done; echo all", limits=SandboxLimits(cpu_s=1))
    return "it went on" if "all" in ran.out else None


@_check("limits", "the folder /tmp is private and limited")
async def _tmp(fixture: CheckFixture) -> str | None:
    name = f"handrail-{secrets.token_hex(8)}"
    ran = await fixture.bash(
        f"head -c 3M /dev/zero > /tmp/{name}; stat -c %s /tmp/{name}", limits=SandboxLimits(tmp_bytes=_MIB)
    )
    there = f"/tmp/{name}"  # noqa: S108 - whether it is there is what is asked
    if os.path.lexists(there):
        Path(there).unlink()
        return "it wrote in /tmp of this machine"
    return None if ran.out.strip().isdigit() and int(ran.out) <= _MIB else f"it holds more: {ran.summary}"


@_check("limits", "output is kept up to a limit, and counted beyond it")
async def _output(fixture: CheckFixture) -> str | None:
    ran = await fixture.bash("head -c 3M /dev/zero", max_bytes=1000)
    kept, whole = len(ran.out), len(ran.out) + ran.dropped
    return None if kept <= 1000 and whole == 3 * _MIB else f"{kept} bytes were kept and {whole} counted"


CHECKS = tuple(_REGISTERED)
"""All checks, in the order in which they run and are shown."""
