"""What every sandbox provider has to hold: the checks that :func:`handrail.sandbox.selfcheck.self_check` runs.

Each tries something from inside that is harmless where nothing confines it, and gives None where it was held, else what
was reached. They need bash and the usual small programs inside, and where it says so perl or python.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from handrail.contract.sandbox import Limits, Program
from handrail.sandbox.ground import Check, Ground, NotTried, standing_by

_MIB = 1024 * 1024
_found: list[Check] = []
_Run = Callable[[Ground], Awaitable[str | None]]


def _check(group: str, name: str) -> Callable[[_Run], _Run]:
    def note(run: _Run) -> _Run:
        _found.append(Check(group, name, run))
        return run

    return note


# ── files ────────────────────────────────────────────────────────────────────────────────────────────


@_check("files", "a program writes in the workspace")
async def _workspace_written(ground: Ground) -> str | None:
    ran = await ground.bash("echo done > file")
    file = ground.workspace / "file"
    return None if file.exists() and file.read_text() == "done\n" else f"nothing was written: {ran.said}"


@_check("files", "its home is the scratch, and what it leaves there stays")
async def _home(ground: Ground) -> str | None:
    await ground.bash("echo kept > ~/kept")
    ran = await ground.bash("cat ~/kept")
    return None if ran.out == "kept\n" else f"it was not there for the next program: {ran.said}"


@_check("files", "nothing outside is read")
async def _outside_read(ground: Ground) -> str | None:
    ran = await ground.bash(f"cat '{ground.outside}/secret'; cat /proc/1/root'{ground.outside}/secret'")
    return "a file outside was read" if ground.secret in ran.out else None


@_check("files", "nothing outside is read by a link")
async def _link_read(ground: Ground) -> str | None:
    (ground.workspace / "link").symlink_to(ground.outside / "secret")
    ran = await ground.bash("cat link")
    return "a file outside was read" if ground.secret in ran.out else None


@_check("files", "nothing outside is written")
async def _outside_written(ground: Ground) -> str | None:
    ground.outside.chmod(0o777)
    (ground.workspace / "way").symlink_to(ground.outside)
    await ground.bash(f"echo x > '{ground.outside}/new'; echo x > way/newer")
    there = {entry.name for entry in ground.outside.iterdir()} - {"secret"}
    return f"it wrote {', '.join(sorted(there))} outside" if there else None


@_check("files", "without the right to write it changes nothing")
async def _not_written(ground: Ground) -> str | None:
    for how in ({"write": False}, {"workspace_writable": False}):
        await ground.bash("echo x > new", **how)
        if (ground.workspace / "new").exists():
            return f"it wrote in a workspace that is to be read only ({next(iter(how))})"
    return None


@_check("files", "hidden and masked files are not read")
async def _hidden(ground: Ground) -> str | None:
    (ground.workspace / "state").mkdir()
    for name in ("state/secret", ".env"):
        (ground.workspace / name).write_text(ground.secret)
    hidden, masked = (str(ground.workspace / "state"),), (str(ground.workspace / ".env"),)
    ran = await ground.bash("cat state/secret .env", hidden=hidden, masked=masked)
    return "one was read" if ground.secret in ran.out else None


@_check("files", "pinned files are neither written nor put aside")
async def _pinned(ground: Ground) -> str | None:
    hooks = ground.workspace / "project" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "file").write_text("before")
    for path in (hooks.parent, hooks, hooks / "file"):
        if os.geteuid() == 0:
            os.chown(path, ground.workspace.stat().st_uid, -1)
    script = "echo x > project/hooks/file; mv project aside; mkdir -p project/hooks; echo x > project/hooks/file"
    await ground.bash(script, pinned=(str(hooks),))
    there = hooks / "file"
    return None if there.exists() and there.read_text() == "before" else "it was written or put aside"


@_check("files", "the kernel's settings are not to be written")
async def _settings(ground: Ground) -> str | None:
    ran = await ground.bash("for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger; do [ -w $f ] && echo $f; done")
    return f"it may write {' '.join(ran.out.split())}" if ran.out.strip() else None


# ── network ──────────────────────────────────────────────────────────────────────────────────────────


@_check("network", "a server on this machine's loopback is not reached")
async def _loopback(ground: Ground) -> str | None:
    await ground.bash(f"exec 3<>/dev/tcp/127.0.0.1/{ground.port}")
    return "it was reached" if await ground.was_reached("tcp") else None


@_check("network", "there is no device but its own loopback")
async def _devices(ground: Ground) -> str | None:
    ran = await ground.bash("cat /proc/net/dev")
    devices = {line.partition(":")[0].strip() for line in ran.out.splitlines() if ":" in line} - {"lo"}
    return f"it has {', '.join(sorted(devices))}" if devices else None


_CONNECT = {
    "python3": "import socket; socket.socket(socket.AF_UNIX).connect('server')",
    "perl": "use Socket; socket(S, AF_UNIX, SOCK_STREAM, 0) && connect(S, pack_sockaddr_un('server'))",
}


@_check("network", "a server that listens in the workspace is not reached")
async def _unix_server(ground: Ground) -> str | None:
    script = "; ".join(
        f'command -v {program} > /dev/null && {{ echo {program}; {program} {flag} "{text}"; }}'
        for (program, text), flag in zip(_CONNECT.items(), ("-c", "-e"), strict=True)
    )
    ran = await ground.bash(script)
    if await ground.was_reached("unix"):
        return "it was reached"
    if not ran.out.strip():
        raise NotTried("there is neither python nor perl in the sandbox")
    return None


# ── processes ────────────────────────────────────────────────────────────────────────────────────────


@_check("processes", "those of this machine are not seen")
async def _not_seen(ground: Ground) -> str | None:
    mark = f"mark-{secrets.token_hex(8)}"
    with standing_by(mark):
        ran = await ground.bash("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'", environment={"IGNORED": "1"})
    return "one was seen" if mark in ran.out else None


@_check("processes", "nothing that it started is left")
async def _nothing_left(ground: Ground) -> str | None:
    number = f"7{secrets.randbelow(10**8):08d}"
    waiting = f"sh -c 'echo up; exec sleep {number} > /dev/null'"
    # Both have got away from their group, and ignore what they can, before the shell ends.
    both = f"(trap '' TERM HUP INT; setsid {waiting} & setsid nohup {waiting} &) 2> /dev/null"
    await ground.bash(f"{both} | (read -r _; read -r _)")
    left = ground.left(number)
    return f"{len(left)} processes are left" if left else None


@_check("processes", "it has ended when it has, whoever still holds its output")
async def _ended(ground: Ground) -> str | None:
    number = f"7{secrets.randbelow(10**8):08d}"
    ran = await ground.bash(f"sleep {number} & echo done")
    return None if ran.out == "done\n" else f"its output is not whole: {ran.said}"


@_check("processes", "killing it ends it, whatever it ignores")
async def _killed(ground: Ground) -> str | None:
    number = f"7{secrets.randbelow(10**8):08d}"
    script = f"trap '' TERM HUP INT; echo up; sleep {number}; sleep {number}"
    process = await ground.sandbox.start(ground.capabilities(), ground.profile(), Program(("/bin/bash", "-c", script)))
    try:
        await process.read_line(100)
    finally:
        await process.kill()
    left = ground.left(number)
    return f"{len(left)} processes are left" if left else None


@_check("processes", "no set-user-id program and no capability gives it more")
async def _privileges(ground: Ground) -> str | None:
    ran = await ground.bash("cat /proc/self/status")
    status = dict(line.split(":\t", 1) for line in ran.out.splitlines() if ":\t" in line)
    if set(status.get("CapEff", "?")) != {"0"}:
        return f"it has capabilities: {status.get('CapEff', 'unknown')}"
    return None if status.get("NoNewPrivs") == "1" else "it may gain privileges"


@_check("processes", "it makes no user namespace of its own")
async def _no_namespaces(ground: Ground) -> str | None:
    ran = await ground.bash("command -v unshare > /dev/null || exit 99; unshare --user true && echo made")
    if ran.code == 99:
        raise NotTried("there is no unshare(1) in the sandbox")
    return "it made one" if "made" in ran.out else None


# ── what it is given ─────────────────────────────────────────────────────────────────────────────────


@_check("environment", "it has what the call says and nothing of Handrail's own")
async def _environment(ground: Ground) -> str | None:
    ran = await ground.bash("env; cat /proc/1/environ | tr '\\0' '\\n'", environment={"GIVEN": "value"})
    if ground.secret in ran.out:
        return "a variable of Handrail's own was seen"
    return None if "GIVEN=value" in ran.out.split("\n") else "what was given is not there"


@_check("environment", "secrets come by a descriptor, and nowhere else")
async def _secrets(ground: Ground) -> str | None:
    value = f"value-{secrets.token_hex(8)}"
    script = 'eval "cat <&$HANDRAIL_SECRETS_FD"; echo; echo ---; env; cat /proc/[0-9]*/cmdline | tr "\\0" "\\n"'
    ran = await ground.bash(script, secrets={"TOKEN": value})
    given, _, elsewhere = ran.out.partition("---")
    if value in elsewhere:
        return "one was seen in the environment or the arguments"
    try:
        return None if json.loads(given) == {"TOKEN": value} else "another value was given"
    except ValueError:
        return f"none was given: {ran.said}"


@_check("descriptors", "it has no descriptor of Handrail's")
async def _descriptors(ground: Ground) -> str | None:
    descriptor = os.open(ground.outside / "secret", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        ran = await ground.bash("for f in /proc/$$/fd/*; do readlink $f; [ -f $f ] && cat $f; done; :")
    finally:
        os.close(descriptor)
    return "one was inherited" if str(ground.outside) in ran.out or ground.secret in ran.out else None


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────


@_check("limits", "a file grows to its bound")
async def _file_size(ground: Ground) -> str | None:
    await ground.bash("head -c 3M /dev/zero > big", limits=Limits(file_bytes=_MIB))
    size = (ground.workspace / "big").stat().st_size
    return None if size <= _MIB else f"it wrote {size} bytes, and the bound is {_MIB}"


@_check("limits", "files can be open up to a bound")
async def _open_files(ground: Ground) -> str | None:
    script = 'for n in {10..60}; do eval "exec $n</dev/null" || exit; done; echo all'
    ran = await ground.bash(script, limits=Limits(open_files=40))
    return "it opened more" if "all" in ran.out else None


@_check("limits", "there are processes up to a bound")
async def _processes(ground: Ground) -> str | None:
    script = "n=0; for i in {1..60}; do sleep 5 & n=$((n+1)); done 2> /dev/null; set -- $(jobs -p); echo $#"
    ran = await ground.bash(f"{script} || :", limits=Limits(processes=30))
    count = ran.out.strip()
    return f"it started {count}" if count.isdigit() and int(count) >= 60 else None


@_check("limits", "memory is to be had up to a bound")
async def _memory(ground: Ground) -> str | None:
    script = "x=$(head -c 200M /dev/zero | tr '\\0' a); echo ${#x}"
    ran = await ground.bash(script, limits=Limits(memory_bytes=64 * _MIB))
    return "it took more" if ran.out.strip() == str(200 * _MIB) else None


@_check("limits", "processor time is to be had up to a bound")
async def _processor(ground: Ground) -> str | None:
    ran = await ground.bash("while ((SECONDS < 20)); do :; done; echo all", limits=Limits(cpu_s=1))
    return "it went on" if "all" in ran.out else None


@_check("limits", "the folder /tmp is its own and is full at its bound")
async def _tmp(ground: Ground) -> str | None:
    name = f"handrail-{secrets.token_hex(8)}"
    ran = await ground.bash(
        f"head -c 3M /dev/zero > /tmp/{name}; stat -c %s /tmp/{name}", limits=Limits(tmp_bytes=_MIB)
    )
    there = f"/tmp/{name}"  # noqa: S108 - whether it is there is what is asked
    if os.path.lexists(there):
        Path(there).unlink()
        return "it wrote in this machine's own"
    return None if ran.out.strip().isdigit() and int(ran.out) <= _MIB else f"it holds more: {ran.said}"


@_check("limits", "output is kept up to a bound and counted beyond")
async def _output(ground: Ground) -> str | None:
    ran = await ground.bash("head -c 3M /dev/zero", max_bytes=1000)
    kept, whole = len(ran.out), len(ran.out) + ran.dropped
    return None if kept <= 1000 and whole == 3 * _MIB else f"{kept} bytes were kept and {whole} counted"


CHECKS = tuple(_found)
"""In the order that they are made and shown."""
