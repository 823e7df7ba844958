"""Limits of a sandbox: each is exceeded, and the error names it."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sandbox.conftest import SandboxFolders
from tests.sandbox.test_cgroups import FORKS

from handrail.contract.sandbox_protocol import SandboxLimits
from handrail.sandbox.filters import memory_monitor
from handrail.sandbox.filters.resource_limits import build_rlimits, infer_reached_limit

MIB = 1024 * 1024


@given(st.one_of(st.none(), st.integers(1, 2**40)), st.one_of(st.none(), st.integers(1, 2**20)))
def test_resource_limits_never_exceed_the_hard_limits_of_the_process(size: int | None, count: int | None) -> None:
    wanted = build_rlimits(
        SandboxLimits(cpu_s=count, memory_bytes=size, processes=count, file_bytes=size, open_files=count)
    )
    for which, (soft, hard) in wanted.items():
        ceiling = resource.getrlimit(which)[1]
        assert soft <= hard
        assert ceiling == resource.RLIM_INFINITY or hard <= ceiling
    assert wanted[resource.RLIMIT_CORE] == (1, 1)
    assert (resource.RLIMIT_DATA in wanted) is (size is not None)
    assert (resource.RLIMIT_CPU in wanted) is (resource.RLIMIT_NOFILE in wanted) is (count is not None)


@pytest.mark.proves("S-04")
async def test_the_cpu_time_limit_ends_a_program_and_names_its_setting(ground: SandboxFolders) -> None:
    ran = await ground.bash("while :; do :; done", limits=SandboxLimits(cpu_s=1))
    bound = infer_reached_limit(ran.code, ran.errors.encode())
    assert bound is not None and bound.is_certain and "sandbox.cpu_s" in bound.text


async def test_a_program_that_catches_the_first_cpu_signal_is_killed_soon_after(ground: SandboxFolders) -> None:
    """The hard limit follows, which no program can catch."""
    ran = await ground.bash(
        "ulimit -Ht; trap '' XCPU; ulimit -Ht 1; while :; do :; done", limits=SandboxLimits(cpu_s=1)
    )
    assert ran.out.strip() == "6" and ran.code == 128 + signal.SIGKILL


@pytest.mark.proves("S-04")
async def test_the_memory_of_a_process_is_limited_and_its_address_space_is_not(ground: SandboxFolders) -> None:
    script = """python3 - <<'PYTHON'
import mmap
mmap.mmap(-1, 1 << 36, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
print("reserved", flush=True)
bytearray(1 << 30)
PYTHON"""
    ran = await ground.bash(script, limits=SandboxLimits(memory_bytes=256 * MIB))
    assert (ran.code, ran.out.strip()) == (1, "reserved")
    bound = infer_reached_limit(ran.code, ran.errors.encode())
    assert bound is not None and not bound.is_certain and "sandbox.memory_mib" in bound.text


async def test_a_file_grows_only_to_its_limit(ground: SandboxFolders) -> None:
    ran = await ground.bash("exec head -c 20M /dev/zero > big", limits=SandboxLimits(file_bytes=10 * MIB))
    assert (ground.workspace / "big").stat().st_size == 10 * MIB
    bound = infer_reached_limit(ran.code, ran.errors.encode())
    assert bound is not None and bound.is_certain and "sandbox.file_mib" in bound.text


async def test_a_process_opens_files_only_up_to_its_limit(ground: SandboxFolders) -> None:
    script = "python3 -c 'import os; print(len([os.open(\"/dev/null\", 0) for _ in range(100)]))'"
    ran = await ground.bash(script, limits=SandboxLimits(open_files=50))
    bound = infer_reached_limit(ran.code, ran.errors.encode())
    assert ran.code == 1 and bound is not None and "sandbox.open_files" in bound.text
    assert (await ground.bash(script, limits=SandboxLimits(open_files=200))).out.strip() == "100"


@pytest.mark.proves("S-04")
async def test_tmp_and_shared_memory_fill_up_at_their_limits(ground: SandboxFolders) -> None:
    limits = SandboxLimits(tmp_bytes=2 * MIB, shm_bytes=MIB)
    for place, size in (("/tmp", 2 * MIB), ("/dev/shm", MIB)):
        ran = await ground.bash(f"head -c 20M /dev/zero > {place}/big; stat -c %s {place}/big", limits=limits)
        assert ran.out.strip() == str(size)
        assert (bound := infer_reached_limit(1, ran.errors.encode())) is not None and "sandbox.tmp_mib" in bound.text


@pytest.mark.proves("S-04")
async def test_a_fork_bomb_of_an_ordinary_user_is_limited(confined: SandboxFolders) -> None:
    """As root, the workspace gets another owner, as whom its programs run."""
    if os.geteuid() == 0:
        os.chown(confined.workspace, 65533, 65533)
    script = f"id -u; {FORKS}; : > still-works"
    ran = await confined.bash(script, limits=SandboxLimits(processes=30))
    assert ran.out.split("\n")[1] == "Resource temporarily unavailable"
    assert ran.out.split()[0] != "0"


async def test_the_core_limit_of_a_sandboxed_program_is_one_byte(ground: SandboxFolders) -> None:
    """A limit of one byte says both; none at all would leave the handler of this machine, which runs as its root."""
    ran = await ground.bash("ulimit -c; cat /proc/self/limits | grep core; kill -SEGV $$")
    assert ran.code == 128 + signal.SIGSEGV
    assert ran.out.split("\n")[1].split()[-3:] == ["1", "1", "bytes"]


async def test_sandboxed_programs_have_a_raised_oom_score_and_cannot_lower_it(ground: SandboxFolders) -> None:
    ran = await ground.bash("cat /proc/self/oom_score_adj; echo 0 > /proc/self/oom_score_adj")
    assert ran.out.split() == ["500"] and ran.errors


@pytest.mark.skipif(os.geteuid() != 0, reason="for anybody but root the launcher says it of itself")
async def test_no_sandboxed_process_starts_before_its_oom_score_is_set(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[int]()

    def late(pid: int) -> None:
        at_rest = 0
        while at_rest < 100:  # it waits for the mark, or else for those whom it has started
            at_rest = at_rest + 1 if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S" else 0
            os.sched_yield()
        begun.extend(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        mark(pid)

    mark = memory_monitor.prefer_for_oom_kill
    monkeypatch.setattr(memory_monitor, "prefer_for_oom_kill", late)
    ran = await ground.bash("cat /proc/self/oom_score_adj /proc/1/oom_score_adj")
    assert ran.out.split() == ["500", "500"] and begun == []


@pytest.mark.parametrize(
    ("code", "said", "wanted"),
    [
        (0, b"MemoryError", None),
        (3, b"", None),
        (1, b"an ordinary failure", None),
        (-signal.SIGXCPU, b"", "sandbox.cpu_s"),
        (128 + signal.SIGXFSZ, b"", "sandbox.file_mib"),
        (128 + signal.SIGSYS, b"", "another architecture"),
        (254, b"bash: fork: retry: Resource temporarily unavailable", "sandbox.processes"),
        (134, b"terminate called after throwing an instance of 'std::bad_alloc'", "sandbox.memory_mib"),
        (1, b"OSError: [Errno 24] Too many open files" + b"\n" * 5000, None),
    ],
)
def test_an_exit_at_a_limit_names_the_limit_and_its_setting(code: int, said: bytes, wanted: str | None) -> None:
    bound = infer_reached_limit(code, said)
    assert (bound is None) is (wanted is None)
    assert bound is None or (wanted is not None and wanted in bound.text)
