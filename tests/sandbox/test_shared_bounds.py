"""Limits shared by all processes of a user: one sandbox cannot use up the share of the others."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SandboxLimits
from handrail.sandbox import tier_probe
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.filters import memory_monitor, seccomp
from handrail.sandbox.filters.resource_limits import build_rlimits, compute_sandbox_inotify_limits
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.launcher_messages import LauncherProgram

LAUNCHERS = [
    found
    for found in (launcher_messages.find_perl_launcher(), launcher_messages.find_python_launcher())
    if found is not None
]
INOTIFY = """
import ctypes
libc = ctypes.CDLL(None)
held = 0
while held < 5000 and libc.inotify_init1(0) >= 0:
    held += 1
print(held)
for setting in ("max_inotify_instances", "max_inotify_watches"):
    try:
        open(f"/proc/sys/user/{setting}", "w").write("100000")
        print("raised", setting)
    except OSError:
        pass
"""
TIMERS = """
import ctypes
libc = ctypes.CDLL(None)
held = 0
while held < 100_000 and libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0:
    held += 1
print(held)
"""
AIO = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
context = ctypes.c_ulong()
made = libc.syscall({number}, 10_000, ctypes.byref(context))
print(made, errno.errorcode.get(ctypes.get_errno()))
"""


def with_first(ground: SandboxFolders, first: LauncherProgram) -> SandboxFolders:
    chosen = tier_probe.choose_sandbox()
    assert isinstance(chosen, BubblewrapSandbox)
    binary = chosen._binary  # pyright: ignore[reportPrivateUsage] - the same, with another first process
    return SandboxFolders(
        ground.workspace, ground.scratch, ground.outside, BubblewrapSandbox(binary, chosen.tier, first=first)
    )


@pytest.mark.proves("S-04")
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda first: first.name)
async def test_a_sandbox_gets_a_share_of_the_inotify_instances_of_its_user(
    confined: SandboxFolders, first: LauncherProgram
) -> None:
    wanted = dict(compute_sandbox_inotify_limits())
    whole = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert wanted["/proc/sys/user/max_inotify_instances"] == whole // 4
    (confined.workspace / "probe.py").write_text(INOTIFY)
    ran = await with_first(confined, first).bash("python3 probe.py; cat /proc/sys/user/max_inotify_watches")
    held, watches = ran.out.split()
    assert int(held) <= whole // 4, ran
    assert int(watches) == wanted["/proc/sys/user/max_inotify_watches"]


@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda first: first.name)
async def test_neither_the_launcher_nor_a_program_keeps_a_linux_capability(
    confined: SandboxFolders, first: LauncherProgram
) -> None:
    sets = "Cap(Inh|Prm|Eff|Amb)"
    ran = await with_first(confined, first).bash(f"grep -Eh '{sets}' /proc/1/status /proc/self/status")
    assert {line.split()[1] for line in ran.out.splitlines()} == {"0" * 16}
    assert len(ran.out.splitlines()) == 8


@pytest.mark.proves("S-04")
async def test_a_sandbox_gets_a_share_of_the_timers_of_its_user(confined: SandboxFolders) -> None:
    bound = build_rlimits(SandboxLimits())[resource.RLIMIT_SIGPENDING][0]
    assert bound <= 4096
    (confined.workspace / "probe.py").write_text(TIMERS)
    ran = await confined.bash("python3 probe.py; ulimit -q; ulimit -l")
    held, queues, locked = ran.out.split()
    assert 0 < int(held) <= bound
    assert int(queues) <= 256 * 1024
    assert int(locked) <= 1024


@pytest.mark.proves("S-04")
async def test_a_sandboxed_program_cannot_use_asynchronous_io_contexts(confined: SandboxFolders) -> None:
    chosen = seccomp.get_supported_architecture()
    if chosen is None:
        pytest.skip("there is no filter for this machine")
    (confined.workspace / "probe.py").write_text(AIO.format(number=seccomp.NUMBERS[chosen]["io_setup"]))
    ran = await confined.bash("python3 probe.py")
    assert ran.out.split() == ["-1", "ENOSYS"], ran


@pytest.mark.proves("S-04")
@pytest.mark.parametrize(
    ("script", "place"),
    [
        ("import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'w').close()", "/tmp"),
        ("import itertools\nfor n in itertools.count(): open(f'/dev/shm/{n}', 'w').close()", "/dev/shm"),
        ("import itertools, os\nfor n in itertools.count(): os.mkdir(f'/tmp/{n}')", "/tmp"),
        ("import itertools, os\nfor n in itertools.count(): os.symlink('x', f'/tmp/{n}')", "/tmp"),
    ],
    ids=["files", "shared memory", "folders", "links"],
)
async def test_a_call_that_fills_memory_with_empty_files_is_ended(
    confined: SandboxFolders, script: str, place: str
) -> None:
    (confined.workspace / "probe.py").write_text(script)
    limits = SandboxLimits(tmp_bytes=16 << 20, shm_bytes=4 << 20)
    with pytest.raises(ToolError) as caught:
        await confined.bash("python3 probe.py", limits=limits)
    assert caught.value.kind == "limit"
    assert "files in /tmp and /dev/shm" in caught.value.text


TERMINALS = """
import os, time
for n in range({processes}):
    if n and os.fork() == 0:
        break
held = []
try:
    while len(held) < {each}:
        held.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError:
    pass
time.sleep({rest})
print("DONE")
"""


@pytest.mark.proves("S-04")
@pytest.mark.parametrize(("processes", "each"), [(1, 3_000), (20, 200)])
async def test_a_call_that_takes_the_machines_terminals_is_ended(
    confined: SandboxFolders, processes: int, each: int
) -> None:
    (confined.workspace / "probe.py").write_text(TERMINALS.format(processes=processes, each=each, rest=60))
    with pytest.raises(ToolError) as caught:
        await confined.bash("python3 probe.py")
    assert caught.value.kind == "limit" and "pseudo-terminals" in caught.value.text


async def test_a_call_may_have_many_terminals(confined: SandboxFolders) -> None:
    (confined.workspace / "probe.py").write_text(TERMINALS.format(processes=1, each=100, rest=1))
    assert "DONE" in (await confined.bash("python3 probe.py")).out


ATTRIBUTES = """
import itertools, os
for n in itertools.count():
    open(f"/tmp/{n}", "w").close()
    for k in range(16):
        try:
            os.setxattr(f"/tmp/{n}", f"user.{k}", b"x" * 4000)
        except OSError as error:
            if error.errno == 95:  # this kernel has none there
                raise SystemExit(9)
            break
"""


async def test_extended_attributes_count_as_files(confined: SandboxFolders) -> None:
    (confined.workspace / "probe.py").write_text(ATTRIBUTES)
    process = await confined.start("/bin/bash", "-c", "python3 probe.py", limits=SandboxLimits(tmp_bytes=16 << 20))
    try:
        await process.communicate(b"", 1 << 16)
        assert await process.wait() == 9
    except ToolError as error:
        assert error.kind == "limit"
    finally:
        await process.kill()


PIPES = """
import os, signal
held = [os.pipe() for _ in range(1500)]
print("up", flush=True)
signal.pause()
"""


async def test_a_call_whose_pipes_use_up_the_share_of_its_user_is_ended(
    confined: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root always gets full-size pipes, so the shortage is simulated here."""
    (confined.workspace / "probe.py").write_text(PIPES)
    process = await confined.start("/bin/bash", "-c", "exec python3 probe.py")
    try:
        assert await process.read_line(100) == b"up\n"
        monkeypatch.setattr(memory_monitor, "are_new_pipes_undersized", lambda: True)
        with pytest.raises(ToolError, match=r"1,50\d pipes"):
            await process.wait()
    finally:
        await process.kill()


@pytest.mark.skipif(os.geteuid() == 0, reason="root is given whole pipes always")
def test_new_pipes_of_normal_size_are_not_reported_as_short() -> None:
    assert memory_monitor.are_new_pipes_undersized() is False


def test_a_program_that_holds_few_files_and_pipes_is_not_ended() -> None:
    assert memory_monitor.find_exceeded_limit_error(os.getpid(), None, short=True) is None
    assert memory_monitor.count_tmpfs_files(0) == 0


@pytest.mark.proves("S-04")
async def test_system_v_memory_is_limited_and_postgres_gets_its_segment(confined: SandboxFolders) -> None:
    (confined.workspace / "probe.py").write_text(
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def tried(what, *of): print(what, 'made' if getattr(libc, what)(*of) >= 0 else ctypes.get_errno())\n"
        "tried('shmget', 0, ctypes.c_size_t(56), 0o1600)\n"
        "tried('shmget', 0, ctypes.c_size_t(1 << 20), 0o1600)\n"
        "tried('shmget', 0, ctypes.c_size_t((1 << 32) + 4096), 0o1600)\n"
        "tried('msgget', 0, 0o1600)\n"
        "tried('semget', 0, 17, 0o1600)\n"
        "tried('semget', 0, 1, 0o1600)\n"
    )
    ran = await confined.bash("python3 probe.py")
    assert ran.out.split("\n")[:-1] == ["shmget made", "shmget 1", "shmget 1", "msgget 38", "semget 1", "semget made"]
