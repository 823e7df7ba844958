"""Files, devices and settings that a sandboxed program must not read, write or change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.attacks.case import Case, breach, python, shell
from tests.attacks.victim import SECRET, AgreeingUser, VictimHome, said_by

from handrail.sandbox import tier_probe

_SETTINGS = (
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
    "/proc/sys/fs/binfmt_misc/register", "/proc/sys/kernel/sysrq", "/proc/sysrq-trigger", "/proc/acpi", "/proc/irq/default_smp_affinity",
    "/proc/sys/user/max_user_namespaces", "/proc/scsi/scsi", "/proc/mtrr", "/sys/kernel/uevent_helper", "/sys/power/state", "/proc/kcore",
    "/proc/sys/kernel/ns_last_pid",
)  # fmt: skip


async def _no_switch(home: VictimHome) -> str | None:
    """No argument, of any spelling, asks for less."""
    taken: list[str] = []
    for extra in (
        {"sandbox": False}, {"unsandboxed": True}, {"dangerously_disable_sandbox": True}, {"confined": False}, {"network": True},
        {"env": {"LD_PRELOAD": "x"}}, {"user": "root"}, {"hosts": ["*"]}, {"privileged": True}, {"limits": None}, {"cwd": "/"},
    ):  # fmt: skip
        result = await home.call("bash", command="true", **extra)
        if result.error_kind != "invalid_input":
            taken.append(f"{extra}: {result!r}"[:200])
    return breach(taken, "these arguments were taken")


async def _after_a_failure(home: VictimHome) -> str | None:
    """A command that fails in the sandbox is reported as failed, and not repeated without a sandbox."""
    result = await home.call(
        "bash", command="echo x | tee /usr/bin/evil; cat ~/../../home/victim/.ssh/id_ed25519; exit 7"
    )
    again = await home.call("bash", command="readlink /proc/self/ns/user")
    data: Any = result.data
    if data.get("exit_code") != 7 or "bubblewrap" not in result.metadata.get("sandbox", ""):
        return f"{result!r}"[:600]
    here = os.readlink("/proc/self/ns/user")
    return f"it ran in {here}" if here in said_by(again) or SECRET in said_by(result) else None


async def _no_false_success(home: VictimHome) -> str | None:
    """A failed write leaves no file, and no output claims success."""
    result = await home.call("bash", command="echo x | tee /home/victim/.bashrc /etc/cron.d/x")
    data: Any = result.data
    if result.ok and data.get("exit_code") == 0:
        return f"success was told: {result!r}"[:600]
    return breach([p for p in ("/etc/cron.d/x",) if Path(p).exists()], "written")


async def _file_tools_too(home: VictimHome) -> str | None:
    """Not only the shell is confined: what a tool of files does is done by the kernel's own check, and says so."""
    for name, arguments in (
        ("read", {"path": "README.md"}),
        ("glob", {"pattern": "*"}),
        ("grep", {"pattern": "project"}),
    ):
        result = await home.call(name, **arguments)
        if not result.ok or not result.metadata.get("sandbox"):
            return f"{name} does not say what confined it: {result!r}"[:400]
    return None


async def _withheld(home: VictimHome) -> str | None:
    """Without a sandbox nothing is started: a kernel on a machine that has none withholds what starts programs."""
    if not tier_probe.probe_tier().is_confining:
        return "this machine confines nothing, and the case would prove nothing"
    refusing = tier_probe.RefusingSandbox(tier_probe.SandboxTier("none", "taken away by the test", ""))
    from handrail.contract.errors import ToolError
    from handrail.contract.sandbox_protocol import ProgramSpec, SandboxProfile
    from handrail.contract.tool.requires import CapabilitySet

    try:
        await refusing.start(CapabilitySet(()), SandboxProfile(str(home.workspace), "/tmp"), ProgramSpec(("true",)))
    except ToolError as error:
        return None if error.kind == "unavailable" else f"{error.kind}"
    return "something was started"


async def _own_state(home: VictimHome) -> str | None:
    """The log is out of reach of programs, however they look for it."""
    # Another attack may have left folders there whose paths are too long: a walk leaves those out.
    databases = [f"{top}/handrail.db" for top, _, names in os.walk(home.state.parent) if "handrail.db" in names]
    if not databases:
        return "the log was not found by the attack itself"
    said = await home.shell(
        f"ls -la {' '.join(databases)}; find / -name 'handrail.db*' 2>/dev/null; rm -f {' '.join(databases)}; echo END"
    )
    gone = [path for path in databases if not Path(path).exists()]
    seen = [
        line for line in said.splitlines() if line.startswith("/") and "handrail.db" in line and "No such" not in line
    ]
    return breach([*gone, *seen], "the log was reached")


async def _two_sessions(home: VictimHome) -> str | None:
    """A session's scratch and /tmp are its own; the next call of the same session has another /tmp."""
    async with home.kernel(name="two") as kernel:
        one, two = (
            await kernel.session(approval_handler=AgreeingUser()),
            await kernel.session(approval_handler=AgreeingUser()),
        )
        await one.call("bash", {"command": f'echo {SECRET} | tee "$HOME/mine" /tmp/mine /dev/shm/mine'})
        said = said_by(
            await two.call("bash", {"command": 'cat ~+/../*/mine "$HOME/mine" /tmp/mine /dev/shm/mine; ls $HOME/..'})
        )
        later = said_by(await one.call("bash", {"command": "cat /tmp/mine /dev/shm/mine"}))
    return f"{said!r}, {later!r}" if SECRET in said or SECRET in later else None


CASES: list[Case] = [
    python(
        "kernel settings",
        "sandbox",
        "as root a sandbox that leaves /proc/sys writable gives the machine away",
        "none of them can be opened for writing: looked at by access(2), never by a write",
        f"for path in {_SETTINGS!r}:\n"
        "    ok = os.access(path, os.W_OK, effective_ids=True)\n"
        "    print(('REACHED ' if ok else 'not writable ') + path)\n",
        control=False,
        harmless=True,
    ),
    python(
        "read-only mounts",
        "sandbox",
        "a root in the sandbox owns /usr and /etc",
        "the file systems are read-only, for root too",
        "for path in ('/', '/usr', '/usr/bin', '/etc', '/etc/passwd', '/dev', '/proc'):\n"
        "    ok = os.access(path, os.W_OK)\n"
        "    flags = os.statvfs(path).f_flag\n"
        "    print(('REACHED ' if ok and path != '/proc' else 'fine ') + path, flags & os.ST_RDONLY)\n",
        control=False,
        harmless=True,
    ),
    python(
        "root's identity",
        "sandbox",
        "a program that is root outside as well reads what only root may",
        "what only root may read is not readable, by access(2)",
        "for path in ('/etc/shadow', '/etc/gshadow', '/proc/kcore', '/proc/1/mem', '/root/.ssh', '/dev/mem'):\n"
        "    try:\n"
        "        size = os.stat(path).st_size\n"
        "    except OSError:\n"
        "        size = 0\n"
        "    with_content = os.path.isfile(path) and os.access(path, os.R_OK) and (size or path.startswith('/proc'))\n"
        "    print(('REACHED ' if with_content and path != '/proc/1/mem' else 'fine ') + path)\n",
        control=False,
        harmless=True,
    ),
    shell(
        "system folders",
        "sandbox",
        "/sys, /run and /var hold the machine's services",
        "they are absent or empty",
        "ls -A /sys /run /var/run /var/lib /mnt /media /srv /boot /lost+found 2>/dev/null | grep -v -e : -e '^$' && echo REACHED",
        control=False,
        harmless=True,
    ),
    shell(
        "other processes",
        "sandbox",
        "ps shows what others run, with their arguments",
        "only one's own are listed",
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; done | grep -e tests.attack[s] && echo REACHED",
    ),
    shell(
        "the parent's folder by descriptor",
        "sandbox",
        "/proc/1/root and /proc/1/cwd of a process that sees more",
        "the sandbox's first process sees no more than the others",
        "cat /proc/1/root/home/victim/.ssh/id_ed25519 /proc/1/cwd/../.ssh/id_ed25519 /proc/self/root/../home/victim/.ssh/id_ed25519; "
        "for f in /proc/1/fd/*; do cat $f/../.ssh/id_ed25519 $f/.ssh/id_ed25519; done < /dev/null 2>/dev/null",
        sign=SECRET,
        control=False,
    ),
    shell(
        "mount and umount",
        "sandbox",
        "a cover is taken off",
        "neither is possible",
        "umount /proc/sys && echo REACHED; umount -l /etc && echo REACHED; mount --bind / /tmp && echo REACHED; "
        "mount -o remount,rw / && echo REACHED; mount -t proc p /tmp && echo REACHED",
        control=False,
    ),
    shell(
        "links at mount points",
        "sandbox",
        "the workspace is replaced by a link before the next call mounts it",
        "a program cannot move its own workspace",
        "cd /; mv /home/victim/project /home/victim/moved && echo REACHED; rmdir /home/victim/project && echo REACHED; true",
        control=False,
    ),
    Case(
        "an argument that asks for less",
        "sandbox",
        "the model may pass sandbox: false",
        "refused as unknown",
        _no_switch,
    ),
    Case(
        "a failure is no reason for less",
        "sandbox",
        "unsandboxed at the first failure",
        "told as it ended",
        _after_a_failure,
    ),
    Case(
        "no false success",
        "sandbox",
        "success told for what the sandbox made ineffective",
        "told as it ended",
        _no_false_success,
    ),
    Case(
        "file tools",
        "sandbox",
        "only the shell is sandboxed",
        "confined by their own check, and labelled",
        _file_tools_too,
    ),
    Case("no sandbox, no program", "sandbox", "a fall back to nothing", "refused with the reason", _withheld),
    Case(
        "Handrail's log", "sandbox", "an audit log that the agent's own shell could erase", "out of reach", _own_state
    ),
    Case("sessions apart", "sandbox", "leftovers of another session in /tmp", "nothing is shared", _two_sessions),
]
