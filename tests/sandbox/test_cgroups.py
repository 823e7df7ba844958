"""A bound on the processes of real root, whom the kernel's own limit does not count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sandbox.conftest import Ground

from handrail.contract.sandbox import Limits
from handrail.sandbox import cgroups

V1 = "34 24 0:31 / /sys/fs/cgroup/pids rw,relatime shared:9 - cgroup cgroup rw,pids"
V2 = "29 23 0:26 / {place} rw,nosuid shared:4 - cgroup2 cgroup2 rw"
possible = pytest.mark.skipif(
    os.geteuid() != 0 or cgroups.group_for(1000) is None, reason="no control group can be made here"
)


def written(folder: Path, mounts: str, own: str) -> tuple[str, str]:
    (folder / "mounts").write_text(f"25 24 0:5 / /dev rw - devtmpfs udev rw\n{mounts}\n")
    (folder / "own").write_text(own)
    return str(folder / "mounts"), str(folder / "own")


def test_of_the_second_version_a_group_is_made_at_the_top_where_processes_are_counted_there(tmp_path: Path) -> None:
    place = tmp_path / "top"
    place.mkdir()
    files = written(tmp_path, V2.format(place=place), "0::/user.slice/session.scope\n")
    assert cgroups.top(*files) is None
    (place / "cgroup.subtree_control").write_text("cpu io memory\n")
    assert cgroups.top(*files) is None
    (place / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    assert cgroups.top(*files) == place


def test_of_the_first_version_it_is_made_beneath_ones_own(tmp_path: Path) -> None:
    place = tmp_path / "pids"
    (place / "mine").mkdir(parents=True)
    mounts = V1.replace("/sys/fs/cgroup/pids", str(place))
    assert cgroups.top(*written(tmp_path, mounts, "8:pids:/mine\n0::/\n")) == place / "mine"
    assert cgroups.top(*written(tmp_path, mounts, "8:pids:/elsewhere\n")) == place


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert cgroups.top(str(tmp_path / "mounts"), str(tmp_path / "own")) is None
    assert cgroups.top(*written(tmp_path, "", "")) is None


def test_of_the_first_version_a_process_enters_by_its_one_thread(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()
    assert cgroups.entrance(tmp_path) == tmp_path / "cgroup.procs"
    (tmp_path / "tasks").touch()
    assert cgroups.entrance(tmp_path) == tmp_path / "tasks"


@possible
@pytest.mark.proves("S-04")
async def test_every_process_of_a_sandbox_is_in_the_group(ground: Ground) -> None:
    group = cgroups.group_for(40)
    assert group is not None
    process = await ground.start("/bin/bash", "-c", "echo in; (cat; :); :", limits=Limits(processes=40))
    try:
        assert await process.read_line(10) == b"in\n"
        members = (group / "cgroup.procs").read_text().split()
        assert str(process.pid) in members and len(members) >= 3
        assert all(group.name in (Path("/proc") / member / "cgroup").read_text() for member in members)
    finally:
        await process.kill()


@possible
@pytest.mark.proves("S-04")
async def test_a_fork_bomb_of_real_root_is_held_and_other_calls_go_on_after_it(confined: Ground) -> None:
    script = "f() { f | f & }; (f) 2>&1 | grep -om1 'Resource temporarily unavailable'"
    ran = await confined.bash(script, limits=Limits(processes=30))
    assert ran.out.strip() == "Resource temporarily unavailable"
    assert (await confined.bash("id -u", limits=Limits(processes=30))).out == "0\n"


@possible
def test_a_group_goes_with_its_process_and_what_a_killed_one_left_with_the_next() -> None:
    place = cgroups.top()
    assert place is not None
    text = "from handrail.sandbox import cgroups; import os; print(cgroups.group_for(7)); os.{}"
    for end, stays in (("close(0)", False), ("kill(os.getpid(), 9)", True)):
        ran = subprocess.run([sys.executable, "-uc", text.format(end)], capture_output=True, text=True, check=False)
        made = Path(ran.stdout.strip())
        assert made.parent == place and made.exists() is stays
    again = subprocess.run([sys.executable, "-c", text.format("close(0)")], capture_output=True, check=True)
    assert again.stdout and not made.exists()
