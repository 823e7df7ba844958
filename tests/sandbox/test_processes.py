"""Input, output and end of a confined process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import IO, Any, cast

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, ProgramSpec
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.start import sandboxed_process as processes
from handrail.sandbox.start.ready_sandbox_pool import SandboxPool
from handrail.sandbox.start.sandboxed_process import SandboxedProcess, wait_until_sandboxes_dismantled
from handrail.sandbox.view.mount_comparison import host_mounts


@pytest.mark.parametrize(
    "older", [b"", b"Ip: A OutNoRoutes\n", b"Ip: OutNoRoutes A\nIp: 1\n", b"Ip: OutNoRoutes\nIp: x\n", b"\0"]
)
def test_counts_of_an_unknown_form_count_nothing(tmp_path: Path, older: bytes) -> None:
    (tmp_path / "snmp").write_bytes(older)
    (tmp_path / "snmp6").write_bytes(b"Ip6OutNoRoutes\n")
    counter = processes.NoRouteCounter(tuple(os.open(tmp_path / name, os.O_RDONLY) for name in ("snmp", "snmp6")))
    assert counter.count() == 0
    counter.close()


def survivors(marker: str) -> list[str]:
    """Return processes of this machine whose command line contains ``marker``."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line:
                found.append(f"{entry.name}: {line!r}")
    return found


DAEMONS = """
import os, signal, sys, time
for way in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if way:
                os.dup2(os.open("/dev/null", os.O_RDWR), 1)
            os.execv("/bin/bash", ["bash", "-c", "trap '' TERM HUP; while :; do sleep 1000; done", sys.argv[1]])
        os._exit(0)
print("started", flush=True)
"""


@pytest.mark.proves("S-05")
async def test_daemons_do_not_outlive_the_program_that_started_them(ground: SandboxFolders) -> None:
    marker = f"handrail-{secrets.token_hex(8)}"
    (ground.workspace / "daemons.py").write_text(DAEMONS)
    ran = await ground.bash(
        f"/usr/bin/env python3 daemons.py {marker}; while [ $(pgrep -fc {marker}) -lt 3 ]; do :; done"
    )
    assert (ran.out, ran.code) == ("started\n", 0)
    assert survivors(marker) == []


@pytest.mark.proves("S-05")
async def test_killing_a_program_ends_its_daemons(ground: SandboxFolders) -> None:
    marker = f"handrail-{secrets.token_hex(8)}"
    (ground.workspace / "daemons.py").write_text(DAEMONS)
    process = await ground.start("/bin/bash", "-c", f"python3 daemons.py {marker}; trap '' TERM; read forever", marker)
    assert await process.read_line(100) == b"started\n"
    assert survivors(marker)
    await process.kill()
    assert survivors(marker) == []
    assert await process.wait() == -9


@pytest.mark.proves("S-05")
async def test_a_kill_directly_after_the_start_leaves_no_process(ground: SandboxFolders) -> None:
    marker = f"handrail-{secrets.token_hex(8)}"
    for _ in range(20):
        process = await ground.start("/bin/bash", "-c", "read forever", marker)
        await process.kill()
    assert survivors(marker) == []


@pytest.mark.proves("S-05")
async def test_a_background_child_that_keeps_the_pipe_open_does_not_delay_the_call(ground: SandboxFolders) -> None:
    marker = f"handrail-{secrets.token_hex(8)}"
    ran = await ground.bash(f"bash -c 'sleep 99; : {marker}' & echo begun")
    assert (ran.out, ran.code) == ("begun\n", 0)
    assert survivors(marker) == []


async def test_output_of_a_program_that_has_already_ended_is_returned(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/bash", "-c", "echo early; echo warned >&2")
    await process.wait()
    assert await process.communicate(b"", 100) == (b"early\n", b"warned\n", 0)


async def test_endless_output_is_truncated_and_the_dropped_bytes_are_counted(ground: SandboxFolders) -> None:
    ran = await ground.bash("yes | head -c 20000000; yes error | head -c 3000000 >&2; exit 4", max_bytes=1000)
    assert (len(ran.out), len(ran.errors), ran.code) == (1000, 1000, 4)
    assert ran.dropped == 23_000_000 - 2000


async def test_large_input_and_output_pass_at_the_same_time(ground: SandboxFolders) -> None:
    data = os.urandom(3_000_000).hex().encode()
    process = await ground.start("/bin/cat")
    out, errors, dropped = await process.communicate(data, 10_000_000)
    assert (out == data, errors, dropped) == (True, b"", 0)
    assert await process.wait() == 0


async def test_a_program_that_ignores_its_input_ends_normally(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/true")
    out, _, _ = await process.communicate(b"x" * 1_000_000, 100)
    assert out == b""
    assert await process.wait() == 0


async def test_output_pieces_are_delivered_as_they_arrive(ground: SandboxFolders) -> None:
    heard = asyncio.Event()
    pieces: list[bytes] = []

    def hear(piece: bytes) -> None:
        pieces.append(piece)
        heard.set()

    process = await ground.start("/bin/bash", "-c", "echo first; read forever < <(sleep 1000)")
    talk = asyncio.create_task(process.communicate(b"", 100, hear))
    await heard.wait()
    assert pieces == [b"first\n"]
    talk.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talk
    await process.kill()


async def test_a_program_reads_and_writes_lines_in_turn(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/bash", "-c", 'while read -r line; do echo "got $line"; done; echo -n end')
    for word in (b"one", b"two"):
        await process.write(word + b"\n")
        assert await process.read_line(100) == b"got " + word + b"\n"
    await process.close_stdin()
    assert await process.read_line(100) == b"end"
    assert await process.read_line(100) == b""
    assert await process.wait() == 0
    await process.write(b"to nobody")
    await process.kill()


async def test_an_overlong_line_fails_with_a_limit_error(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/bash", "-c", "yes | tr -d '\\n' | head -c 100000; read forever")
    with pytest.raises(ToolError) as caught:
        await process.read_line(5_000)
    assert caught.value.kind == "limit"
    await process.kill()


async def test_a_long_write_waits_until_the_program_reads(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/bash", "-c", "read go; wc -c")
    writing = asyncio.create_task(process.write(b"\n" + b"x" * 1_000_000))
    await writing
    await process.close_stdin()
    assert (await process.read_line(100)).strip() == b"1000000"
    await process.kill()


async def test_output_can_be_read_in_pieces(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/bash", "-c", "echo abc; echo warn >&2; exit 2")
    got = b""
    while piece := await process.read(2):
        assert len(piece) <= 2
        got += piece
    assert got == b"abc\n"
    assert await process.wait() == 2
    await process.kill()


async def test_passed_descriptors_arrive_under_their_numbers_and_no_others_leak(ground: SandboxFolders) -> None:
    pipes = {3: os.pipe(), 7: os.pipe()}
    leaked = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        for number, (_, writing) in pipes.items():
            os.write(writing, f"from {number}\n".encode())
        process = await ground.sandbox.start(
            ground.capabilities,
            ground.profile(),
            ProgramSpec(
                ["/bin/bash", "-c", "head -1 <&3; head -1 <&7; ls -l /proc/self/fd; :"],
                {3: pipes[3][0], 7: pipes[7][0]},
            ),
        )
        out, _, _ = await process.communicate(b"", 1000)
    finally:
        os.close(leaked)
        for reading, writing in pipes.values():
            os.close(reading)
            os.close(writing)
    lines = out.decode().split("\n")
    assert lines[:2] == ["from 3", "from 7"]
    opened = {line.split(" -> ")[0].split()[-1]: line.split(" -> ")[1] for line in lines if " -> " in line}
    own = [number for number, target in opened.items() if target.endswith("/fd")]  # what ls itself opened to look
    assert set(opened) - set(own) == {"0", "1", "2", "3", "7"}
    assert len(own) == 1


async def test_repeated_runs_leave_no_open_descriptor(ground: SandboxFolders) -> None:
    await ground.bash("true")
    await wait_until_sandboxes_dismantled()
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await ground.bash("echo x; echo y >&2")
        process = await ground.start("/bin/cat")
        await process.kill()
    await wait_until_sandboxes_dismantled()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("hosts", [(), ("example.org",)])
@pytest.mark.parametrize("wanting", ["its handle", "its status"])
async def test_a_sandbox_whose_first_process_cannot_be_opened_ends_with_an_error(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch, wanting: str, hosts: tuple[str, ...]
) -> None:
    failed: list[int] = []
    opened, opened_file = os.pidfd_open, Path.open

    def fail(pid: int) -> None:
        failed.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if Path(f"/proc/{pid}/status").read_text().partition("PPid:\t")[2].split()[0] != str(os.getpid()):
            fail(pid)
        return opened(pid, flags)

    def open_file(path: Path, *given: Any, **named: Any) -> IO[Any]:
        if path.name == "status" and given == ("rb",):
            fail(int(path.parent.name))
        return cast("IO[Any]", opened_file(path, *given, **named))

    layer = ground.layer(str(ground.workspace))
    capabilities = CapabilitySet((CapabilityLayer("t", layer.fs_read, layer.fs_write, hosts, layer.shell),))
    await ground.bash("true")
    await wait_until_sandboxes_dismantled()
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(ToolError, match="Too many open files") as caught:
        if wanting == "its handle":
            patch.setattr(os, "pidfd_open", pidfd_open)
        else:
            patch.setattr(Path, "open", open_file)
        process = await ground.sandbox.start(capabilities, ground.profile(), ProgramSpec(("/bin/cat",)))
        try:
            await process.wait()
        finally:
            await process.kill()
    assert caught.value.kind == "unavailable" and failed
    await wait_until_sandboxes_dismantled()
    assert not any(Path(f"/proc/{pid}").exists() for pid in failed)
    assert sorted(os.listdir("/proc/self/fd")) == before
    process = await ground.sandbox.start(capabilities, ground.profile(), ProgramSpec(("/bin/echo", "again")))
    assert (await process.communicate(b"", 100))[0] == b"again\n"
    await process.kill()


async def test_a_missing_program_is_reported_as_a_shell_reports_it(ground: SandboxFolders) -> None:
    (ground.workspace / "plain").write_text("no program")
    for program, code, text in (("no-such-program", 127, b"not found"), ("./plain", 126, b"denied")):
        process = await ground.start(program, "argument")
        out, errors, _ = await process.communicate(b"", 1000)
        assert await process.wait() == code
        assert (out, text in errors, b"bwrap" in errors) == (b"", True, False)


async def test_a_failed_sandbox_setup_is_reported_as_a_sandbox_error(ground: SandboxFolders) -> None:
    process = await ground.start("true", cwd=str(ground.workspace / "absent"))
    with pytest.raises(ToolError, match="could not be set up") as caught:
        await process.communicate(b"", 1000)
    assert caught.value.kind == "backend"
    await process.kill()


async def test_an_invalid_argv_is_refused(ground: SandboxFolders) -> None:
    for argv, kind in (
        ((), "invalid_input"),
        (("echo", "a\0b"), "invalid_input"),
        (("echo", "x" * 3_000_000), "limit"),
    ):
        with pytest.raises(ToolError) as caught:
            await ground.sandbox.start(ground.capabilities, ground.profile(), ProgramSpec(argv))
        assert caught.value.kind == kind


async def test_merged_stderr_keeps_its_order_in_the_output(ground: SandboxFolders) -> None:
    process = await ground.sandbox.start(
        ground.capabilities,
        ground.profile(),
        ProgramSpec(["/bin/bash", "-c", "echo 1; echo 2 >&2; echo 3"], merge_stderr=True),
    )
    assert await process.communicate(b"", 100) == (b"1\n2\n3\n", b"", 0)
    await process.kill()


async def test_concurrent_sandboxes_do_not_mix_their_results(ground: SandboxFolders) -> None:
    runs = [ground.bash(f"echo {n}; exit {n}") for n in range(12)]
    done = await asyncio.gather(*runs)
    assert [(ran.out.strip(), ran.code) for ran in done] == [(str(n), n) for n in range(12)]


async def test_a_program_starts_in_a_sandbox_with_an_empty_capability_set(ground: SandboxFolders) -> None:
    process = await ground.sandbox.start(CapabilitySet(()), ground.profile(), ProgramSpec(["/usr/bin/id", "-u"]))
    out, _, _ = await process.communicate(b"", 100)
    assert out.decode().strip() == str(os.getuid())


async def left_by_killed_holders(ground: SandboxFolders, rounds: int) -> str:
    nursery = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.sandbox.nursery", str(ground.workspace), str(ground.scratch), str(rounds)),
        cwd=Path(__file__).parents[2],
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await nursery.communicate()
    return out.decode().strip()


@pytest.mark.proves("S-05")
async def test_a_lease_holder_killed_while_starting_a_sandbox_leaves_no_process(ground: SandboxFolders) -> None:
    assert await left_by_killed_holders(ground, 24) == "24"


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_many_lease_holders_killed_at_any_moment_leave_no_process(ground: SandboxFolders) -> None:
    assert await left_by_killed_holders(ground, 2000) == "2000"


@pytest.mark.proves("S-05")
async def test_a_forked_copy_of_the_host_process_does_not_keep_a_sandbox_alive(ground: SandboxFolders) -> None:
    process = await ground.start("/bin/bash", "-c", "echo begun; read forever")
    assert await process.read_line(100) == b"begun\n"
    reading, writing = os.pipe()
    copy = os.fork()
    if copy == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert isinstance(process, SandboxedProcess)
        process.close_lifeline()
        assert await process.wait() == 129
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(copy, 0)


async def test_the_wait_for_stuck_namespaces_ends_after_its_time_limit(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await ground.start("/bin/cat")
    assert isinstance(process, SandboxedProcess)
    await process.write(b"it runs\n")
    assert await process.read_line(100) == b"it runs\n"
    os.kill(process.pid, signal.SIGSTOP)  # the outer process of bubblewrap, so that it cannot end
    try:
        await process.communicate(b"", 1 << 16)  # nobody is left in it
        with monkeypatch.context() as patch:
            patch.setattr(processes, "DISMANTLING_S", 0.01)
            await wait_until_sandboxes_dismantled()
        assert Path(f"/proc/{process.pid}").exists()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await wait_until_sandboxes_dismantled()
    assert not Path(f"/proc/{process.pid}").exists()


async def many_calls(ground: SandboxFolders, rounds: int) -> None:
    """Run calls of several kinds, pooled or not, some killed, and check that nothing is left."""
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    await ground.bash("true")
    await wait_until_sandboxes_dismantled()
    host_mounts.forget()
    before = traces()
    pool = SandboxPool(ground.sandbox)
    marker = secrets.token_hex(8)
    profile = ground.profile(environment={"MARK": marker})
    text = "(sleep 1000 &); cat /proc/self/environ"
    for turn in range(0, rounds, 4):
        starts = [
            pool.start(ground.capabilities, profile, ProgramSpec((*SHELL_ARGV, text))),
            pool.start(
                ground.capabilities, profile, ProgramSpec(["/bin/cat", "/proc/self/environ"], merge_stderr=True)
            ),
            ground.sandbox.start(
                ground.capabilities, profile, ProgramSpec(["/bin/bash", "-c", f"setsid sleep 1000 & {text}; exit 3"])
            ),
            ground.sandbox.start(ground.capabilities, profile, ProgramSpec(["/bin/sleep", "1000"])),
        ]
        processes = await asyncio.gather(*starts)
        done = await asyncio.gather(*(process.communicate(b"", 1 << 16) for process in processes[:3]))
        assert all(marker.encode() in out for out, _, _ in done)
        await processes[3].kill()
        if turn % 20 == 0:
            await pool.wait_until_successors_ready()
    await pool.aclose()
    await wait_until_sandboxes_dismantled()
    assert traces() == before
    assert marked(marker) == []  # so no namespace of theirs is left either: nobody is in one


def traces() -> tuple[list[str], set[str], set[str]]:
    """Descriptors and children of this process, and temporary files."""
    children: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            children |= {*(task / "children").read_text().split()}
    files = {name for name in os.listdir("/tmp") if name.startswith("handrail-sandbox")}
    return sorted(os.listdir("/proc/self/fd")), children, files


def marked(marker: str) -> list[str]:
    """Processes of this machine that have ``marker`` in their environment."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in entry.read_bytes():
                found.append(str(entry))
    return found


@pytest.mark.proves("S-05")
async def test_two_hundred_calls_leave_no_process_descriptor_or_temporary_file(ground: SandboxFolders) -> None:
    await many_calls(ground, 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_thousand_calls_leave_no_process_descriptor_or_temporary_file(ground: SandboxFolders) -> None:
    await many_calls(ground, 10_000)


async def test_a_program_begun_after_its_sandbox_ended_raises_a_backend_error(ground: SandboxFolders) -> None:
    """For example, if a sandbox failed its setup before its network was ready."""
    sandbox = ground.sandbox
    assert isinstance(sandbox, BubblewrapSandbox)
    plan = await sandbox.make_plan(ground.capabilities, ground.profile(), ProgramSpec(("true",)))
    process = sandbox.start_waiting_sandbox(plan)
    process.close_lifeline()
    with contextlib.suppress(ToolError):
        await process.wait()
    await wait_until_sandboxes_dismantled()
    process.begin_program(plan.call, b"")
    with pytest.raises(ToolError) as caught:
        await process.wait()
    assert caught.value.kind == "backend"
