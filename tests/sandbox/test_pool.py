"""Ready sandboxes: used once, only by matching calls, and equal to new ones."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.sandbox.conftest import CompletedRun, SandboxFolders
from tests.sandbox.test_network import get
from tests.web import LoopbackServer, ok

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, Process, ProgramSpec, SandboxLimits, SandboxProfile
from handrail.contract.tool.requires import CapabilitySet
from handrail.sandbox.bubblewrap import BubblewrapSandbox, SessionNetworkMembership
from handrail.sandbox.network import sandbox_network
from handrail.sandbox.start.ready_sandbox_pool import SandboxPool
from handrail.sandbox.start.sandboxed_process import wait_until_sandboxes_dismantled
from handrail.sandbox.view.mount_comparison import host_mounts


@pytest.fixture
async def pool(ground: SandboxFolders) -> AsyncIterator[SandboxPool]:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    made = SandboxPool(ground.sandbox)
    yield made
    await made.aclose()


class RecordingSandbox:
    """A sandbox that tells which starts found a ready one."""

    def __init__(self, pool: SandboxPool, ground: SandboxFolders) -> None:
        self.pool, self.ground = pool, ground
        self.was_ready = False
        """Whether the last start found a ready one."""

    async def start(self, *argv: str, **changes: object) -> Process:
        before = children()
        process = await self.pool.start(self.ground.capabilities, self.ground.profile(**changes), ProgramSpec(argv))
        self.was_ready = str(process.pid) in before
        return process

    async def run(self, *argv: str, stdin: bytes = b"", **changes: object) -> CompletedRun:
        process = await self.start(*argv, **changes)
        out, errors, dropped = await process.communicate(stdin, 4 << 20)
        return CompletedRun(await process.wait(), os.fsdecode(out), os.fsdecode(errors), dropped)

    async def text(self, text: str, **changes: object) -> CompletedRun:
        return await self.run(*SHELL_ARGV, text, stdin=b"", **changes)

    async def warmed(self, *argv: str, **changes: object) -> None:
        """Have one ready for calls like this one."""
        await self.run(*(argv or (*SHELL_ARGV, "true")), stdin=b"", **changes)
        await self.pool.wait_until_successors_ready()
        assert self.pool.ready_sandbox_count >= 1

    async def takes_ready(self, *argv: str, **changes: object) -> bool:
        """Whether such a call finds a ready one."""
        process = await self.start(*argv, **changes)
        taken = self.was_ready
        await process.communicate(b"", 1000)
        return taken


@pytest.fixture
def recording_sandbox(pool: SandboxPool, ground: SandboxFolders) -> RecordingSandbox:
    return RecordingSandbox(pool, ground)


TEXTS = [
    "true",
    "exit 7",
    "false",
    "echo a; echo b >&2; exit 3",
    "cat; echo $?",
    "if",
    "echo a\necho $LINENO\nfi",
    "echo 'abc",
    "a=(1 2",
    "set -x; echo hi",
    'echo "$0" $# $$ $PPID $- "$_"',
    "trap 'echo bye' EXIT; exit 4",
    "cat <<X\na $0\nX\n",
    "nosuch; echo $?",
    "exec nosuch",
    "cd / && pwd && echo $OLDPWD; declare -p OLDPWD PWD",
    "declare -p OLDPWD; pwd",
    "return 3; echo after",
    "kill -9 $$",
    "sleep 100 & kill $!; wait $!; echo $?",
    "f() { caller 0; echo ${FUNCNAME[*]} ${BASH_LINENO[*]}; }; f; echo ${BASH_SOURCE[*]}",
    "shopt -p; set -o; alias; trap -p; umask; ulimit -a",
    "compgen -v | grep -v -e ^PIPESTATUS -e ^BASH_ARG | sort",
    "env | sort | grep -v -e ^_= -e ^SHLVL=",
    "echo $SHLVL; bash -c 'echo $SHLVL'",
    'echo "$BASH_EXECUTION_STRING" | wc -l',
    "[ $SECONDS -lt 3 ] && echo young",
    "  echo lead\n\n  echo last  \n\n",
    "echo é☃ > 'ü b'; ls",
    "# nothing but a remark",
    "-x",
    "ls /proc/self/fd | wc -l",
    "readlink /proc/$$/fd/*",
]


@pytest.mark.proves("S-10")
async def test_a_ready_shell_behaves_like_a_freshly_started_shell(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    for text in TEXTS:
        process = await ground.sandbox.start(ground.capabilities, ground.profile(), ProgramSpec((*SHELL_ARGV, text)))
        out, errors, _ = await process.communicate(b"from stdin\n", 1 << 20)
        expected = await process.wait(), numberless(out.decode()), errors.decode()
        await recording_sandbox.warmed()
        ready = await recording_sandbox.run(*SHELL_ARGV, text, stdin=b"from stdin\n")
        assert recording_sandbox.was_ready
        assert (ready.code, numberless(ready.out), ready.errors) == expected, text


def numberless(text: str) -> str:
    return re.sub(r"pipe:\[\d+\]", "pipe", text)


async def test_a_ready_shell_has_no_leftover_variables_or_descriptors(recording_sandbox: RecordingSandbox) -> None:
    await recording_sandbox.warmed()
    ran = await recording_sandbox.text("echo one && compgen -v && ls -l /proc/self/fd")
    assert not {"REPLY", "text", "mode"} & set(ran.out.split())
    numbers = re.findall(r" (\d+) -> ", ran.out)
    assert numbers == ["0", "1", "2", "3"]  # the last is what ls looks with


@pytest.mark.proves("S-10")
async def test_a_text_longer_than_any_argument_runs_in_ready_and_new_sandboxes(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    text = "x='" + "y" * 2_000_000 + "'\necho ${#x}\nexit 9"
    for _ in range(2):
        ran = await recording_sandbox.text(text)
        assert (ran.code, ran.out, ran.errors) == (9, "2000000\n", "")
        await recording_sandbox.pool.wait_until_successors_ready()
    process = await ground.sandbox.start(ground.capabilities, ground.profile(), ProgramSpec((*SHELL_ARGV, text)))
    assert (await process.communicate(b"", 100))[0] == b"2000000\n"


async def test_every_byte_except_nul_reaches_a_ready_shell(recording_sandbox: RecordingSandbox) -> None:
    odd = os.fsdecode(bytes(code for code in range(1, 256) if code != ord("'")))
    for text in (f"printf %s '{odd}'", f"printf %s '{odd}{'z' * 150_000}' | head -c 254"):
        await recording_sandbox.warmed()
        assert (await recording_sandbox.text(text)).out == odd
        await recording_sandbox.pool.wait_until_successors_ready()
    with pytest.raises(ToolError, match="NUL") as caught:
        await recording_sandbox.text("echo a\0b")
    assert caught.value.kind == "invalid_input"


@pytest.mark.proves("S-10")
async def test_each_ready_sandbox_is_used_once(recording_sandbox: RecordingSandbox) -> None:
    await recording_sandbox.warmed()
    for _ in range(3):
        ran = await recording_sandbox.text("echo x >> /tmp/mine; wc -l < /tmp/mine")
        assert (ran.out, recording_sandbox.was_ready) == ("1\n", True)
        await recording_sandbox.pool.wait_until_successors_ready()


@pytest.mark.proves("S-10")
async def test_a_ready_sandbox_takes_later_arguments_environment_and_secrets(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    secrets = {"TOKEN": "value"}
    await recording_sandbox.warmed("/bin/true", secrets={"TOKEN": "another"})
    ran = await recording_sandbox.run(
        *("/bin/sh", "-c", 'cat <&$HANDRAIL_SECRETS_FD; echo "$MORE" "$0" "$PWD"', "zero"),
        secrets=secrets,
        environment={"MORE": "later"},
        cwd=str(ground.workspace),
    )
    assert (ran.out, ran.code) == (f'{{"TOKEN":"value"}}later zero {ground.workspace}\n', 0)
    assert recording_sandbox.was_ready


async def test_a_ready_sandbox_starts_in_the_folder_of_its_call(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    (ground.workspace / "a b").mkdir()
    await recording_sandbox.warmed()
    ran = await recording_sandbox.text("pwd && declare -p OLDPWD", cwd=str(ground.workspace / "a b"))
    assert ran.out == f"{ground.workspace}/a b\ndeclare -x OLDPWD\n"
    await recording_sandbox.pool.wait_until_successors_ready()
    with pytest.raises(ToolError, match="absent"):
        await recording_sandbox.text("pwd", cwd=str(ground.workspace / "absent"))


@pytest.mark.proves("S-10")
async def test_a_ready_sandbox_is_not_used_after_a_protected_file_changes(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    settings = ground.workspace / "handrail.toml"
    assert not await recording_sandbox.takes_ready(*SHELL_ARGV, "true")
    await recording_sandbox.pool.wait_until_successors_ready()
    assert await recording_sandbox.takes_ready(*SHELL_ARGV, "true")
    await recording_sandbox.pool.wait_until_successors_ready()
    settings.write_text("# a protected file has appeared")
    assert not await recording_sandbox.takes_ready(*SHELL_ARGV, "true")
    await recording_sandbox.pool.wait_until_successors_ready()
    assert await recording_sandbox.takes_ready(*SHELL_ARGV, "true")
    await recording_sandbox.pool.wait_until_successors_ready()
    (ground.workspace / "new").write_text("# and was replaced by another of its name")
    (ground.workspace / "new").replace(settings)
    assert not await recording_sandbox.takes_ready(*SHELL_ARGV, "true")
    ran = await recording_sandbox.text("echo x >> handrail.toml")
    assert "Read-only" in ran.errors


@pytest.mark.proves("S-10")
async def test_a_ready_sandbox_is_not_used_for_a_call_with_another_profile(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    (ground.workspace / "pin").write_text("")
    (ground.workspace / "mask").write_text("")
    changes: list[dict[str, object]] = [
        {"workspace_writable": False},
        {"limits": SandboxLimits(open_files=100)},
        {"limits": SandboxLimits(tmp_bytes=1 << 20)},
        {"environment": {"A": "b"}},
        {"pinned": (str(ground.workspace / "pin"),)},
        {"masked": (str(ground.workspace / "mask"),)},
        {"hidden": (str(ground.workspace / "mask"),)},
        {"readable": (str(ground.outside),)},
        {"scratch": str(ground.outside)},
        {"secrets": {"A": "b"}},
        {"unix_sockets": True},
    ]
    for change in changes:
        await recording_sandbox.warmed()
        assert not await recording_sandbox.takes_ready(*SHELL_ARGV, "true", **change), change
    assert not await recording_sandbox.takes_ready("/bin/true")


async def test_the_pool_has_no_ready_sandbox_before_the_first_call_of_a_session(
    recording_sandbox: RecordingSandbox,
) -> None:
    await asyncio.sleep(0)
    await recording_sandbox.pool.wait_until_successors_ready()
    assert recording_sandbox.pool.ready_sandbox_count == 0


async def test_the_pool_never_holds_more_ready_sandboxes_than_its_maximum(ground: SandboxFolders) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    pool = SandboxPool(ground.sandbox, most=2)
    recording_sandbox = RecordingSandbox(pool, ground)
    for name in ("A", "B", "C"):
        await recording_sandbox.text("true", environment={name: "x"})
        await pool.wait_until_successors_ready()
    assert pool.ready_sandbox_count == 2
    assert not await recording_sandbox.takes_ready(*SHELL_ARGV, "true", environment={"A": "x"})
    await pool.aclose()


async def test_the_pool_prepares_as_many_sandboxes_as_there_were_concurrent_calls(
    recording_sandbox: RecordingSandbox,
) -> None:
    for expected in (4, 6):
        await asyncio.gather(*(recording_sandbox.text("true") for _ in range(expected)))
        await recording_sandbox.pool.wait_until_successors_ready()
        assert recording_sandbox.pool.ready_sandbox_count >= expected
        before = children()
        started = await asyncio.gather(*(recording_sandbox.start(*SHELL_ARGV, "true") for _ in range(expected)))
        assert {str(process.pid) for process in started} <= before
        await asyncio.gather(*(process.communicate(b"", 1000) for process in started))


async def test_many_ready_sandboxes_of_one_kind_do_not_displace_another_kind(ground: SandboxFolders) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    pool = SandboxPool(ground.sandbox, most=3)
    recording_sandbox = RecordingSandbox(pool, ground)
    await recording_sandbox.text("true", environment={"A": "x"})
    await pool.wait_until_successors_ready()
    await asyncio.gather(*(recording_sandbox.text("true") for _ in range(4)))
    await pool.wait_until_successors_ready()
    assert pool.ready_sandbox_count == 3
    assert await recording_sandbox.takes_ready(*SHELL_ARGV, "true", environment={"A": "x"})
    await pool.aclose()


async def test_the_next_ready_sandbox_is_made_while_a_call_runs(recording_sandbox: RecordingSandbox) -> None:
    await recording_sandbox.warmed()
    process = await recording_sandbox.pool.start(
        recording_sandbox.ground.capabilities, recording_sandbox.ground.profile(), ProgramSpec((*SHELL_ARGV, "cat"))
    )
    await recording_sandbox.pool.wait_until_successors_ready()  # while the call runs
    assert recording_sandbox.pool.ready_sandbox_count >= 1
    assert (await process.communicate(b"still", 100))[0] == b"still"


async def test_an_unused_ready_sandbox_expires_and_is_not_replaced(ground: SandboxFolders) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    pool = SandboxPool(ground.sandbox, age_s=0.0)
    await RecordingSandbox(pool, ground).text("true")
    await pool.wait_until_successors_ready()
    await pool.aclose()
    assert pool.ready_sandbox_count == 0


@pytest.mark.proves("S-10")
async def test_a_closed_pool_or_session_leaves_no_process_or_descriptor(ground: SandboxFolders) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    await ground.bash("true")
    await wait_until_sandboxes_dismantled()
    host_mounts.forget()
    before = sorted(os.listdir("/proc/self/fd")), children()
    pool = SandboxPool(ground.sandbox)
    recording_sandbox = RecordingSandbox(pool, ground)
    await asyncio.gather(*(recording_sandbox.text("true") for _ in range(3)))
    await pool.wait_until_successors_ready()
    assert pool.ready_sandbox_count
    await pool.end_ready_sandboxes("/another/session")
    assert pool.ready_sandbox_count
    await pool.end_ready_sandboxes(str(ground.scratch))
    assert pool.ready_sandbox_count == 0
    await recording_sandbox.text("true")  # its successor is due when the pool closes
    await pool.aclose()
    assert pool.ready_sandbox_count == 0
    assert (sorted(os.listdir("/proc/self/fd")), children()) == before
    assert (await recording_sandbox.text("echo still")).out == "still\n"
    await pool.wait_until_successors_ready()
    assert pool.ready_sandbox_count == 0
    await wait_until_sandboxes_dismantled()


def children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # a thread that has ended meanwhile, whose children are another's now
            found |= set((task / "children").read_text().split())
    return found


@pytest.mark.proves("S-10")
async def test_a_cancelled_start_leaves_no_process_or_descriptor(ground: SandboxFolders) -> None:
    sandbox = ground.sandbox
    assert isinstance(sandbox, BubblewrapSandbox)
    await ground.bash("true")
    await wait_until_sandboxes_dismantled()
    host_mounts.forget()
    before = sorted(os.listdir("/proc/self/fd")), children()
    plan = await sandbox.make_plan(
        ground.capabilities, ground.profile(), ProgramSpec((*SHELL_ARGV, "true")), ready_made=True
    )
    starting = asyncio.ensure_future(sandbox.start_waiting_sandbox_in_thread(plan, None))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await wait_until_sandboxes_dismantled()
    host_mounts.forget()
    assert (sorted(os.listdir("/proc/self/fd")), children()) == before


def listening() -> int:
    """Return in how many sandboxes of this process a listener has the proxy's port."""
    count = 0
    for outer in children():
        with contextlib.suppress(OSError):
            for inner in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
                count += (
                    f":{sandbox_network.PROXY_PORT:04X} 00000000:0000 0A" in Path(f"/proc/{inner}/net/tcp").read_text()
                )
    return count


@pytest.mark.proves("S-02", "S-10")
async def test_a_ready_sandbox_with_a_network_listener_applies_the_hosts_of_its_call(
    pool: SandboxPool, ground: SandboxFolders
) -> None:
    async def run(text: str, *hosts: str) -> tuple[bool, str]:
        layer = dataclasses.replace(ground.layer(str(ground.workspace)), hosts=hosts)
        before = children()
        process = await pool.start(CapabilitySet((layer,)), ground.profile(), ProgramSpec((*SHELL_ARGV, text)))
        taken = str(process.pid) in before
        out, _, _ = await process.communicate(b"", 1 << 20)
        await process.wait()
        return taken, out.decode()

    async with LoopbackServer({"*": ok(b"ONE")}) as one, LoopbackServer({"*": ok(b"TWO")}) as two:
        await run("true", one.authority)
        await pool.wait_until_successors_ready()
        assert (pool.ready_sandbox_count, listening()) == (1, 1)
        taken, said = await run(get(one.url()) + get(two.url()), two.authority)
        assert taken and "TWO" in said and "ONE" not in said
        await pool.wait_until_successors_ready()
        assert listening() == pool.ready_sandbox_count >= 1
        assert await run("true") == (False, "")  # it has no hosts
    await pool.aclose()
    assert listening() == 0


@pytest.mark.proves("S-10")
async def test_a_closed_pool_with_network_listeners_leaves_no_process_or_descriptor(ground: SandboxFolders) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    connected = CapabilitySet((dataclasses.replace(ground.layer(str(ground.workspace)), hosts=("one.invalid",)),))
    await ground.bash("true")
    await wait_until_sandboxes_dismantled()
    host_mounts.forget()
    before = sorted(os.listdir("/proc/self/fd")), children()
    for early in (False, True):
        pool = SandboxPool(ground.sandbox)
        process = await pool.start(connected, ground.profile(), ProgramSpec((*SHELL_ARGV, "true")))
        await process.communicate(b"", 1000)
        await process.wait()
        while early and not pool.ready_sandbox_count:
            await asyncio.sleep(0)  # it is being made
        if not early:
            await pool.wait_until_successors_ready()
        await pool.aclose()
        await asyncio.sleep(0)  # what was cancelled lets go
        assert (sorted(os.listdir("/proc/self/fd")), children()) == before


@pytest.mark.parametrize("close_all", [True, False])
async def test_the_pool_makes_no_sandbox_after_the_pool_or_session_closes(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch, *, close_all: bool
) -> None:
    assert isinstance(ground.sandbox, BubblewrapSandbox)
    find_network = ground.sandbox.find_network
    looking, may_continue = asyncio.Event(), asyncio.Event()

    async def wait_before(capabilities: CapabilitySet, profile: SandboxProfile) -> SessionNetworkMembership | None:
        if asyncio.current_task() is not call:
            looking.set()
            await may_continue.wait()
        return await find_network(capabilities, profile)

    monkeypatch.setattr(ground.sandbox, "find_network", wait_before)
    call = asyncio.current_task()
    pool = SandboxPool(ground.sandbox)
    await RecordingSandbox(pool, ground).text("true")
    await looking.wait()
    closing = asyncio.create_task(pool.aclose() if close_all else pool.end_ready_sandboxes(str(ground.scratch)))
    await asyncio.sleep(0)
    may_continue.set()
    await closing
    await pool.wait_until_successors_ready()
    assert pool.ready_sandbox_count == 0
    await pool.aclose()


async def test_a_ready_sandbox_killed_while_waiting_is_not_used(recording_sandbox: RecordingSandbox) -> None:
    await recording_sandbox.warmed()
    for pid in children():
        if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n":
            os.kill(int(pid), 9)
    while recording_sandbox.pool.ready_sandbox_count:
        await asyncio.sleep(0)
    ran = await recording_sandbox.text("echo fine")
    assert (ran.code, ran.out) == (0, "fine\n")


async def test_a_call_with_its_own_descriptors_starts_a_new_sandbox(
    recording_sandbox: RecordingSandbox, ground: SandboxFolders
) -> None:
    await recording_sandbox.warmed()
    reading, writing = os.pipe()
    os.write(writing, b"through\n")
    os.close(writing)
    before = children()
    process = await recording_sandbox.pool.start(
        ground.capabilities, ground.profile(), ProgramSpec((*SHELL_ARGV, "cat <&5"), {5: reading})
    )
    os.close(reading)
    assert (await process.communicate(b"", 100))[0] == b"through\n"
    assert str(process.pid) not in before


async def test_many_parallel_calls_do_not_mix_their_outputs(recording_sandbox: RecordingSandbox) -> None:
    await recording_sandbox.warmed()
    runs = [recording_sandbox.text(f"echo {n}; exit {n}") for n in range(8)]
    assert [(ran.out.strip(), ran.code) for ran in await asyncio.gather(*runs)] == [(str(n), n) for n in range(8)]
