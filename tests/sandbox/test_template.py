"""Sandboxes made from a template: the same as those that bubblewrap makes, and apart from it and from each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.sandbox import test_pool
from tests.sandbox.conftest import Ground, Ran
from tests.sandbox.test_mounts import BINARIES, SOMEBODY, Swapping

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, Process, ProgramSpec
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.start import sandbox_template
from handrail.sandbox.start.sandbox_template import (
    MAX_TEMPLATES,
    derive_template_mounts,
    wait_until_idle_templates_ended,
)
from handrail.sandbox.start.sandboxed_process import SandboxedProcess
from handrail.sandbox.view.mount_comparison import ExpectedMount, ExpectedMounts

pytestmark = pytest.mark.skipif(
    not sandbox_template.can_have_templates(), reason="this machine has no templates: no perl, or another processor"
)
KINDS = ("mnt", "pid", "net", "user", "ipc", "uts")


class Templates:
    """A ground whose sandboxes come from templates."""

    def __init__(self, ground: Ground, sandbox: BubblewrapSandbox) -> None:
        self.ground, self.sandbox = ground, sandbox

    async def ensure(self, **changes: object) -> None:
        profile = self.ground.profile(**changes)
        plan = await self.sandbox.make_plan(self.ground.capabilities, profile, ProgramSpec(("true",)))
        await self.sandbox.ensure_template(plan, None, profile.scratch)

    async def start(self, *argv: str, **changes: object) -> SandboxedProcess:
        """Start a program in a sandbox, which a template made."""
        process = await self.sandbox.start(self.ground.capabilities, self.ground.profile(**changes), ProgramSpec(argv))
        assert isinstance(process, SandboxedProcess)
        assert command(process.creator_pid).startswith("/usr/bin/perl"), "bubblewrap made it"
        return process

    async def bash(self, text: str, **changes: object) -> Ran:
        return await ran(await self.start(*SHELL_ARGV, text, **changes))

    async def serving(self, text: str, **changes: object) -> SandboxedProcess:
        """Start a shell text that then waits, once it has run."""
        process = await self.start(*SHELL_ARGV, f"{text}; echo done; cat", **changes)
        while await process.read_line(1 << 16) != b"done\n":
            pass
        return process


async def ran(process: Process) -> Ran:
    out, errors, dropped = await process.communicate(b"", 1 << 20)
    return Ran(await process.wait(), out.decode(), errors.decode(), dropped)


async def until_fewer(sandbox: BubblewrapSandbox, number: int) -> None:
    while sandbox.template_count >= number:
        await asyncio.sleep(0)


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


@pytest.fixture(
    params=[
        "as who runs this",
        pytest.param(
            "as the owner", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
        ),
    ]
)
async def templates(ground: Ground, request: pytest.FixtureRequest) -> AsyncIterator[Templates]:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    if request.param == "as the owner":
        for place in (ground.workspace, ground.scratch):
            os.chown(place, SOMEBODY, SOMEBODY)
    made = Templates(ground, BubblewrapSandbox(BINARIES[0], ground.sandbox.tier))
    yield made
    made.sandbox.close_session()
    await wait_until_idle_templates_ended()


LOOK = (
    "sed -E 's/^[0-9]+ [0-9]+ 0:[0-9]+/new/; s/^[0-9]+ [0-9]+ //; s/ - .*//' /proc/self/mountinfo | grep -v -e /proc/bus -e /proc/irq -e /proc/sysrq | sort;"
    "grep -E '^(Uid|Gid|Groups|Cap(Inh|Prm|Eff|Amb)|NoNewPrivs|Seccomp|Sig(Ign|Blk))' /proc/self/status; cat /proc/self/oom_score_adj;"
    "cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups /proc/sys/user/max_inotify_*;"
    "ulimit -a; pwd; hostname; umask; echo $$ $PPID; ls -ld / /tmp /dev /dev/* /proc/sys /tmp/*;"
    "readlink /proc/self/fd/* | sed 's/[0-9]//g'; ps -eo pid,ppid,pgid,sid | head -2; cat /proc/net/dev; stat -f /tmp /dev/shm | grep -v ID"
)


async def test_a_program_finds_the_same_as_in_a_sandbox_that_bubblewrap_made(templates: Templates) -> None:
    ground = templates.ground
    (ground.workspace / "secret").write_text("x")
    (ground.workspace / "vault").mkdir()
    (ground.workspace / "pin").write_text("y")
    places = {name: str(ground.workspace / name) for name in ("secret", "vault", "pin")}
    changes = {"masked": (places["secret"], places["vault"]), "pinned": (places["pin"],)}
    direct = await ran(
        await ground.sandbox.start(ground.capabilities, ground.profile(**changes), ProgramSpec((*SHELL_ARGV, LOOK)))
    )
    await templates.ensure(**changes)
    made = await templates.bash(LOOK, **changes)
    dates = re.compile(r"\w{3} +\d+ \d\d:\d\d")
    assert dates.sub("", made.out).splitlines() == dates.sub("", direct.out).splitlines()
    assert "ro" in made.out and made.code == direct.code == 0


async def test_no_namespace_is_shared_with_the_template_this_machine_or_another_sandbox(templates: Templates) -> None:
    await templates.ensure()
    processes = [await templates.serving("true") for _ in range(2)]
    pids = (*(process.pid for process in processes), processes[0].creator_pid, os.getpid())
    found = [{os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS} for pid in pids]
    for process in processes:
        await process.kill()
    assert len(set[str]().union(*found)) == len(KINDS) * len(pids)


async def test_nothing_of_a_sandbox_is_seen_or_reached_in_another(templates: Templates) -> None:
    await templates.ensure()
    leaving = (
        "echo A > /tmp/left; echo A > /dev/shm/left; ipcmk -M 100 >/dev/null; ipcmk -S 2 >/dev/null;"
        'python3 -c \'import socket,time,pty; s=socket.socket(); s.bind(("127.0.0.1",4567)); s.listen(); pty.openpty(); print("done",flush=True); time.sleep(1000)\''
    )
    process = await templates.start(*SHELL_ARGV, leaving)
    assert await process.read_line(100) == b"done\n"
    seen = await templates.bash(
        "ls /tmp /dev/shm; ls /dev/pts; ipcs -m -s | grep 0x; ls -d /proc/[0-9]*; (echo > /dev/tcp/127.0.0.1/4567) 2>&1 | sed 's/.*refused/refused/';"
        f"ls /proc/{process.pid} /proc/{process.creator_pid} 2>&1 | grep -c 'No such' | sed s/^/missing=/; kill -9 -1"
    )
    listed = set(seen.out.split())
    assert "left" not in listed and "0" not in listed and not any(word.startswith("0x") for word in listed)
    assert {word for word in listed if word.startswith("/proc/")} <= {f"/proc/{n}" for n in range(1, 12)}
    assert {"refused", "missing=2"} <= listed
    assert not process.is_waiting and Path(f"/proc/{process.pid}").exists()
    await process.kill()
    assert (await templates.bash("echo still")).out == "still\n"


async def test_no_right_is_left_over_the_namespaces_and_no_further_ones_can_be_made(templates: Templates) -> None:
    await templates.ensure()
    process = await templates.serving("true")
    for task in (process.pid, *map(int, children(process.pid))):
        status = Path(f"/proc/{task}/status").read_text()
        capabilities = dict(re.findall(r"Cap(\w+):\t(\w+)", status))
        assert set(capabilities.values()) == {"0" * 16}, capabilities
        assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    await process.kill()
    refused = await templates.bash(
        "cat /proc/sys/user/max_user_namespaces; unshare -U true; unshare -m true; mount -t tmpfs x /tmp; umount /proc;"
        "mount -o remount,rw /; hostname other; echo 9 > /proc/sys/user/max_user_namespaces; ip link set lo down; nsenter -t 1 -m true"
    )
    assert refused.out == "0\n" and refused.code != 0
    assert len(re.findall(r"(?i)not permitted|permission denied|read-only|must be superuser", refused.errors)) >= 7


async def test_the_first_process_has_the_same_descriptors_as_one_that_bubblewrap_started(templates: Templates) -> None:
    await templates.ensure()
    one, other = os.pipe(), os.pipe()
    try:
        direct = await templates.ground.sandbox.start(
            templates.ground.capabilities, templates.ground.profile(), ProgramSpec(("/bin/cat",), {5: one[0]})
        )
        made = await templates.sandbox.start(
            templates.ground.capabilities, templates.ground.profile(), ProgramSpec(("/bin/cat",), {5: other[0]})
        )
        for process in (direct, made):
            await process.write(b"it runs\n")
            assert await process.read_line(100) == b"it runs\n"
        assert isinstance(direct, SandboxedProcess) and isinstance(made, SandboxedProcess)
        first = direct.first_process_pid, made.first_process_pid
        while "pipe" in kinds(first[0]) + kinds(first[1]):  # it closes them while its program begins
            await asyncio.sleep(0)
        assert kinds(first[0]) == kinds(first[1])
        programs = [[kinds(int(pid)) for pid in children(pid)] for pid in first]
        assert programs[0] == programs[1] == [["pipe"] * 4]
        for process in (direct, made):
            await process.kill()
    finally:
        for end in (*one, *other):
            os.close(end)


def kinds(pid: int) -> list[str]:
    """The kinds of a process's open files, without their numbers."""
    links: list[str] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was just closed
            links.append(os.readlink(entry))
    return sorted(re.sub(r":?\[?\d+\]?", "", link) for link in links)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("inside", [False, True], ids=["from this machine", "from a sandbox"])
async def test_a_hidden_file_that_is_replaced_ends_every_sandbox_of_the_template(
    templates: Templates, inside: bool
) -> None:
    secret, spare = templates.ground.workspace / "secret", templates.ground.workspace / "spare"
    secret.write_text("TOP-SECRET")
    changes = {"masked": (str(secret),)}
    await templates.ensure(**changes)
    processes = [await templates.serving("cat secret", **changes) for _ in range(2)]
    spare.write_text("TOP-SECRET")
    if inside:
        await templates.ensure()
        await templates.bash(f"mv -f {spare} {secret}")
    else:
        spare.replace(secret)
    for process in processes:
        with pytest.raises(ToolError, match=re.escape(f"`{secret}` was replaced, moved or removed")) as caught:
            await process.wait()
        assert caught.value.kind == "conflict"
    direct = await templates.sandbox.start(
        templates.ground.capabilities, templates.ground.profile(**changes), ProgramSpec((*SHELL_ARGV, "cat secret"))
    )
    later = await ran(direct)
    assert "TOP-SECRET" not in later.out and later.code != 0


async def test_a_template_whose_mounts_lead_elsewhere_runs_nothing(ground: Ground) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    folder = ground.workspace / "d"
    folder.mkdir()
    (folder / "secret").write_text("TOP-SECRET")
    top = ground.workspace.parent
    swap = f"cd {ground.workspace}; mv d d2; mkdir d; echo > d/secret"
    sandbox = Swapping(top, swap)
    profile = ground.profile(masked=(str(folder / "secret"),))
    plan = await sandbox.make_plan(ground.capabilities, profile, ProgramSpec((*SHELL_ARGV, "cat d2/secret")))
    await sandbox.ensure_template(plan, None, profile.scratch)
    assert sandbox.template_count == 1
    process = sandbox.start_waiting(plan)
    process.begin_program(plan.call)
    with pytest.raises(ToolError, match="was replaced while the sandbox was prepared") as caught:
        await process.wait()
    assert caught.value.kind == "conflict" and process.get_collected()[0] == b""
    assert sandbox.template_count == 0
    await wait_until_idle_templates_ended()


async def test_a_killed_template_ends_its_sandboxes_and_the_next_start_works(templates: Templates) -> None:
    await templates.ensure()
    process = await templates.serving("(sleep 1000 &)")
    os.kill(process.creator_pid, signal.SIGKILL)
    assert await process.wait() == 128 + signal.SIGKILL
    assert not Path(f"/proc/{process.pid}/root").exists()
    await wait_until_idle_templates_ended()
    assert templates.sandbox.template_count == 0
    assert (await ran(await templates.sandbox.start(
        templates.ground.capabilities, templates.ground.profile(), ProgramSpec((*SHELL_ARGV, "echo fine"))
    ))).out == "fine\n"  # fmt: skip


async def test_a_retired_template_ends_with_its_last_sandbox(templates: Templates) -> None:
    await templates.ensure()
    process = await templates.serving("true")
    resident = process.creator_pid
    templates.sandbox.close_session("/another/session")
    assert templates.sandbox.template_count == 1
    templates.sandbox.close_session(str(templates.ground.scratch))
    assert templates.sandbox.template_count == 0
    await process.write(b"it runs\n")
    assert await process.read_line(100) == b"it runs\n"
    assert command(resident)
    await process.kill()
    await wait_until_idle_templates_ended()
    assert not command(resident)


async def test_templates_are_bounded_in_number_and_age(templates: Templates, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Sequence[dict[str, object]] = [{"readable": (f"/usr/{name}",)} for name in ("a", "b", "c", "d", "e", "f")]
    for number, changes in enumerate(plans):
        pinned = templates.ground.workspace / f"pin{number}"
        pinned.write_text("")
        await templates.ensure(pinned=(str(pinned),), **changes)
        assert templates.sandbox.template_count == min(number + 1, MAX_TEMPLATES)
    monkeypatch.setattr(sandbox_template, "MAX_AGE_S", -1.0)
    process = await templates.sandbox.start(
        templates.ground.capabilities,
        templates.ground.profile(pinned=(str(templates.ground.workspace / "pin5"),), **plans[5]),
        ProgramSpec((*SHELL_ARGV, "true")),
    )
    assert (await ran(process)).code == 0
    assert templates.sandbox.template_count == MAX_TEMPLATES - 1
    monkeypatch.undo()
    monkeypatch.setattr(sandbox_template, "MAX_IDLE_S", 0.0)
    await templates.ensure()
    await until_fewer(templates.sandbox, MAX_TEMPLATES)


async def test_where_no_template_can_be_made_bubblewrap_makes_each_sandbox(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = sandbox_template.SYSTEM_CALLS[platform.machine()]
    monkeypatch.setattr(sandbox_template, "SYSTEM_CALLS", {platform.machine(): (9999,) * len(numbers)})
    for _ in range(2):
        await templates.ensure()
        assert templates.sandbox.template_count == 0
        process = await templates.sandbox.start(
            templates.ground.capabilities, templates.ground.profile(), ProgramSpec((*SHELL_ARGV, "echo fine"))
        )
        assert isinstance(process, SandboxedProcess) and str(process.creator_pid) in test_pool.children()
        assert (await ran(process)).out == "fine\n"
    monkeypatch.undo()
    await templates.ensure()
    assert templates.sandbox.template_count == 0  # it is not tried again at once


def table(*mounts: tuple[str, bool, str]) -> ExpectedMounts:
    return ExpectedMounts(tuple(ExpectedMount(*mount) for mount in mounts))


SIZES = ("--perms", "1777", "--size", "1", "--tmpfs", "/dev/shm", "--perms", "1777", "--size", "2", "--tmpfs", "/tmp")
BASE = (
    ("/", True, "+"),
    ("/proc", False, "+"),
    ("/dev", True, "+"),
    ("/dev/shm", False, "+"),
    ("/tmp", False, "+"),
)


def test_what_sandboxes_share_is_read_only_or_there_is_no_template() -> None:
    options = (
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        *SIZES,
        "--perms",
        "0000",
        "--size",
        "4096",
        "--tmpfs",
        "/etc/private",
    )
    found = derive_template_mounts(options, table(*BASE, ("/etc/private", False, "+"), ("/tmp/ws", False, "1:2")))
    assert found is not None
    assert found.options[-2:] == ("--remount-ro", "/etc/private")
    assert "/dev/shm" not in found.options and "--tmpfs" in found.options
    assert (found.sizes, found.inner, found.system, found.sealed) == ((2, 1), ("/tmp/ws",), (), False)
    assert derive_template_mounts(options, table(*BASE, ("/tmp", False, "1:2"))) is None
    assert derive_template_mounts(options, table(*BASE, ("/dev/shm/ws", False, "1:2"))) is None
    assert derive_template_mounts(options, table(("/", False, "+"), *BASE[1:])) is None
    assert derive_template_mounts(options[:4], table(*BASE)) is None
