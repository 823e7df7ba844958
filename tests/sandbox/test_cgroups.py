"""A limit on the processes of real root, whom the kernel's own limit does not count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.sandbox_protocol import SandboxLimits
from handrail.sandbox import bubblewrap
from handrail.sandbox.filters import memory_monitor
from handrail.sandbox.filters import resource_limits as cgroups
from handrail.sandbox.start.sandboxed_process import SandboxedProcess

FORKS = """python3 -c '
import os, time
for _ in range(60):
    try:
        os.fork() or time.sleep(600)
    except OSError as error:
        print(error.strerror)
        break
'"""
V1 = "34 24 0:31 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids"
V2 = "29 23 0:26 / {place} rw,nosuid shared:4 - cgroup2 cgroup2 rw"
possible = pytest.mark.skipif(
    os.geteuid() != 0 or not cgroups.make_limiting_cgroups(1000, None), reason="no control group can be made here"
)


def written(folder: Path, mounts: str, own: str) -> tuple[str, str]:
    (folder / "mounts").write_text(f"25 24 0:5 / /dev rw - devtmpfs udev rw\n{mounts}\n")
    (folder / "own").write_text(own)
    return str(folder / "mounts"), str(folder / "own")


def test_cgroup_v2_uses_the_top_group_only_if_its_controller_is_enabled(tmp_path: Path) -> None:
    place = tmp_path / "top"
    place.mkdir()
    files = written(tmp_path, V2.format(place=place), "0::/user.slice/session.scope\n")
    assert cgroups.find_parent_cgroup("pids", *files) is None
    (place / "cgroup.subtree_control").write_text("cpu io memory\n")
    assert cgroups.find_parent_cgroup("pids", *files) is None
    assert cgroups.find_parent_cgroup("memory", *files) == (place, 2)
    (place / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    assert cgroups.find_parent_cgroup("pids", *files) == (place, 2)


def test_cgroup_v1_uses_the_group_of_the_process_as_parent(tmp_path: Path) -> None:
    place = tmp_path / "pids"
    (place / "mine").mkdir(parents=True)
    mounts = V1.replace("/sys/fs/cgroup/pids", str(place))
    assert cgroups.find_parent_cgroup("pids", *written(tmp_path, mounts, "8:pids:/mine\n0::/\n")) == (place / "mine", 1)
    assert cgroups.find_parent_cgroup("pids", *written(tmp_path, mounts, "8:pids:/elsewhere\n")) == (place, 1)
    assert cgroups.find_parent_cgroup("memory", *written(tmp_path, mounts, "8:pids:/mine\n0::/\n")) is None


def test_a_machine_without_cgroups_has_no_parent_group(tmp_path: Path) -> None:
    assert cgroups.find_parent_cgroup("pids", str(tmp_path / "mounts"), str(tmp_path / "own")) is None
    assert cgroups.find_parent_cgroup("pids", *written(tmp_path, "", "")) is None


def test_the_lowest_memory_limit_of_the_parent_cgroups_applies(tmp_path: Path) -> None:
    place = tmp_path / "top"
    own = place / "user.slice" / "session.scope"
    own.mkdir(parents=True)
    files = written(tmp_path, V2.format(place=place), "0::/user.slice/session.scope\n")
    assert cgroups.read_own_memory_limit(*files) is None
    (own / "memory.max").write_text("max\n")
    assert cgroups.read_own_memory_limit(*files) is None
    (own.parent / "memory.max").write_text(f"{1 << 30}\n")
    assert cgroups.read_own_memory_limit(*files) == 1 << 30
    (own / "memory.max").write_text(f"{1 << 28}\n")
    (tmp_path / "memory.max").write_text("1\n")  # beyond where it is mounted
    assert cgroups.read_own_memory_limit(*files) == 1 << 28
    mounts = V1.replace("/sys/fs/cgroup/pids", str(place)).replace("rw,pids", "rw,memory")
    (place / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroups.read_own_memory_limit(*written(tmp_path, mounts, "4:memory:/\n")) is None
    (place / "memory.limit_in_bytes").write_text(f"{1 << 29}\n")
    assert cgroups.read_own_memory_limit(*written(tmp_path, mounts, "4:memory:/\n")) == 1 << 29


def test_a_process_enters_a_cgroup_v1_group_through_the_tasks_file(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()
    assert cgroups.find_cgroup_entry_file(tmp_path) == tmp_path / "cgroup.procs"
    (tmp_path / "tasks").touch()
    assert cgroups.find_cgroup_entry_file(tmp_path) == tmp_path / "tasks"


@possible
@pytest.mark.proves("S-04")
async def test_every_process_of_a_sandbox_is_in_its_cgroup(ground: SandboxFolders) -> None:
    groups = cgroups.make_limiting_cgroups(40, None)
    assert len(groups) == 1
    group = groups[0]
    limits = SandboxLimits(processes=40, call_memory_bytes=None)
    process = await ground.start("/bin/bash", "-c", "echo in; (cat; :); :", limits=limits)
    try:
        assert await process.read_line(10) == b"in\n"
        members = (group / "cgroup.procs").read_text().split()
        assert str(process.pid) in members and len(members) >= 3
        members.remove(str(os.getpid()))  # whose one thread that starts sandboxes is in it, and no other
        assert all(group.name in (Path("/proc") / member / "cgroup").read_text() for member in members)
        assert group.name not in Path("/proc/self/cgroup").read_text()
    finally:
        await process.kill()


@possible
async def test_the_cgroup_starter_thread_can_end_and_the_next_start_makes_another(
    ground: SandboxFolders,
) -> None:
    def starters() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name.startswith("handrail-sandboxes")]

    limits = SandboxLimits(processes=40, call_memory_bytes=None)
    for _ in range(2):
        process = await ground.start("/bin/true", limits=limits)
        assert starters()
        await process.wait()
        await process.kill()
        cgroups.end_cgroup_starter_threads()
        assert not starters()


@possible
def test_a_wrapping_shell_enters_the_cgroup_and_becomes_the_program() -> None:
    groups = cgroups.make_limiting_cgroups(40, None)
    program, argv = cgroups.build_cgroup_entry_command(groups, "/bin/cat", ["cat", "/proc/self/cgroup"])
    ran = subprocess.run(argv, executable=program, capture_output=True, text=True, check=True)
    assert groups[0].name in ran.stdout


@possible
@pytest.mark.proves("S-04")
async def test_a_fork_bomb_of_real_root_is_limited_and_later_calls_run(confined: SandboxFolders) -> None:
    ran = await confined.bash(FORKS, limits=SandboxLimits(processes=30))
    assert ran.out.strip() == "Resource temporarily unavailable"
    assert (await confined.bash("id -u", limits=SandboxLimits(processes=30))).out == "0\n"


@possible
def test_a_cgroup_is_removed_with_its_process_or_by_the_next_process() -> None:
    top = cgroups.find_parent_cgroup("pids")
    assert top is not None
    place = top.folder
    text = "from handrail.sandbox.filters import resource_limits as cgroups; import os; print(cgroups.make_limiting_cgroups(7, None)[0]); os.{}"
    for end, stays in (("close(0)", False), ("kill(os.getpid(), 9)", True)):
        ran = subprocess.run([sys.executable, "-uc", text.format(end)], capture_output=True, text=True, check=False)
        made = Path(ran.stdout.strip())
        assert made.parent == place and made.exists() is stays
    again = subprocess.run([sys.executable, "-c", text.format("close(0)")], capture_output=True, check=True)
    assert again.stdout and not made.exists()


@pytest.mark.skipif(
    os.geteuid() != 0 or not cgroups.make_limiting_cgroups(None, 1 << 40),
    reason="no control group can bound memory here",
)
@pytest.mark.proves("S-04")
async def test_a_cgroup_memory_limit_works_without_the_memory_monitor(
    confined: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in memory counts for no process: its holders are ended, and the waiting shell continues."""
    monkeypatch.setattr(bubblewrap, "compute_total_memory_limit", lambda: 96 << 20)

    def nobody_looks(process: SandboxedProcess, bound: int, files: int) -> None:
        pass

    monkeypatch.setattr(memory_monitor, "MemoryMonitor", nobody_looks)
    code = "import os; held = os.memfd_create('x'); [os.write(held, bytes(1 << 20)) for _ in range(256)]; print('all')"
    ran = await confined.bash(f'python3 -c "{code}"; echo $?', limits=SandboxLimits(processes=1009))
    assert ran.out.split() == ["137"]
