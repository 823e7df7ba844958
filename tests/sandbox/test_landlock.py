"""Restrictions by Landlock that the mounts alone would not enforce."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Mapping
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sandbox.conftest import CompletedRun, SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, ProgramSpec, SandboxTier
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.filters import landlock
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.launcher_messages import LauncherProgram
from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.sandbox.view import mount_comparison
from handrail.sandbox.view.sandbox_user import LookupCache

ABI = landlock.probe_abi()
needs_landlock = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")
LAUNCHERS = [
    found
    for found in (launcher_messages.find_perl_launcher(), launcher_messages.find_python_launcher())
    if found is not None
]

WORKSPACE, SCRATCH = "/ground/workspace", "/ground/scratch"
Folders = Mapping[str, Literal["ro", "rw"]]


def other(first: LauncherProgram | None = None, abi: int | None = None) -> BubblewrapSandbox:
    return BubblewrapSandbox(
        next(find_bubblewrap_programs()), SandboxTier("bubblewrap", "for a test"), first=first, landlock_abi=abi
    )


async def ran(
    sandbox: BubblewrapSandbox, ground: SandboxFolders, script: str, folders: Folders | None = None, **seen: object
) -> CompletedRun:
    """Run ``script`` with a Landlock ruleset for other folders than the mounted ones.

    They are mounted apart from /tmp, which is writable with all that is in it.
    """
    plan = await sandbox.make_plan(ground.capabilities, ground.profile(), ProgramSpec((*SHELL_ARGV, script)))
    places = {str(ground.workspace): WORKSPACE, str(ground.scratch): SCRATCH}
    options = list(plan.made.options)
    for at, option in enumerate(options):
        if option == "--bind":
            options[at + 2] = places.get(options[at + 1], options[at + 2])
    told = {WORKSPACE: "rw", SCRATCH: "rw"} if folders is None else folders
    changed: dict[str, object] = {
        "options": tuple(options),
        "table": mount_comparison.derive_expected_mounts(options, LookupCache()),
        "start": WORKSPACE,
        "folders": tuple(told.items()),
        **seen,
    }
    made = dataclasses.replace(plan.made, **changed)  # pyright: ignore[reportArgumentType]
    process = sandbox.start_waiting_sandbox(dataclasses.replace(plan, made=made))
    environment = {"PATH": "/usr/bin:/bin", "HOME": SCRATCH}
    process.begin_program(launcher_messages.encode_program_start_message(WORKSPACE, (*SHELL_ARGV, script), environment))
    out, errors, dropped = await process.communicate(b"", 1 << 20)
    return CompletedRun(await process.wait(), out.decode(), errors.decode(), dropped)


@needs_landlock
@pytest.mark.proves("S-01")
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda found: found.name)
async def test_landlock_prevents_writes_to_a_folder_mounted_writable_by_mistake(
    ground: SandboxFolders, first: LauncherProgram
) -> None:
    (ground.workspace / "there").write_text("as it was")
    tries = [
        "echo x > new",
        "echo x >> there",
        "rm there",
        "mkdir d",
        "ln -s a b",
        "mkfifo p",
        "mv there here",
        ": > there",
    ]
    script = "; ".join(f"({one}) 2>&1 || echo held" for one in tries)
    seen = await ran(other(first), ground, script, {WORKSPACE: "ro", SCRATCH: "rw"})
    assert seen.out.count("held") == len(tries)
    assert seen.out.count("Permission denied") >= 7
    assert [path.name for path in ground.workspace.iterdir()] == ["there"]
    assert (ground.workspace / "there").read_text() == "as it was"


@needs_landlock
@pytest.mark.proves("S-01")
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda found: found.name)
async def test_landlock_prevents_reading_and_running_files_mounted_by_mistake(
    ground: SandboxFolders, first: LauncherProgram
) -> None:
    (ground.workspace / "key").write_text("TOP-SECRET")
    program = ground.workspace / "program"
    program.write_text("#!/bin/sh\necho STARTED")
    program.chmod(0o755)
    seen = await ran(other(first), ground, "cat key; ./program; echo over", {SCRATCH: "rw"})
    assert seen.out == "over\n"
    assert seen.errors.count("Permission denied") == 2


@needs_landlock
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda found: found.name)
async def test_the_landlock_rights_suffice_for_ordinary_work(ground: SandboxFolders, first: LauncherProgram) -> None:
    script = (
        "set -e; mkdir -p a/b; echo x > a/f; mv a/f a/b/g; ln a/b/g a/h; ln -s h a/s; rm -r a/b; : > a/h; mkfifo p;"
        'cp /bin/true t; ./t; echo y > "$HOME/f"; echo z > /tmp/f; mv /tmp/f /dev/shm/f; head -c 4 /dev/zero | wc -c;'
        "echo to > /dev/null; echo out > /dev/stdout; cat /etc/hostname > /dev/null; ls / > /dev/null"
    )
    seen = await ran(other(first), ground, script)
    assert (seen.code, seen.errors, seen.out) == (0, "", "4\nout\n")


@needs_landlock
async def test_landlock_prevents_writes_to_proc(ground: SandboxFolders) -> None:
    seen = await ran(other(), ground, "echo 1 > /proc/self/oom_score_adj || echo held; cat /proc/self/comm")
    assert seen.out == "held\ncat\n"


SERVER = """
import socket, sys
with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    server.listen()
    with socket.create_connection(server.getsockname()):
        print("served")
"""


@pytest.mark.skipif(ABI < 4, reason="this kernel's Landlock knows no network")
@pytest.mark.proves("S-01")
async def test_a_read_only_call_has_no_tcp_and_others_have_their_own_loopback(ground: SandboxFolders) -> None:
    (ground.workspace / "server.py").write_text(SERVER)
    assert (await ground.bash("python3 server.py")).out == "served\n"
    refused = await ground.bash("python3 server.py; exec 3<>/dev/tcp/127.0.0.1/3128", workspace_writable=False)
    assert "PermissionError" in refused.errors
    assert "/dev/tcp/127.0.0.1/3128: Permission denied" in refused.errors


@pytest.mark.skipif(ABI < 4, reason="this kernel's Landlock knows no network")
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda found: found.name)
async def test_a_program_connects_only_to_the_named_port(ground: SandboxFolders, first: LauncherProgram) -> None:
    script = "for port in 3128 3129; do exec 3<>/dev/tcp/127.0.0.1/$port; done"
    seen = await ran(other(first), ground, script, tcp=False, connect=(3128,))
    assert "3128: Connection refused" in seen.errors  # there is nobody, but it was tried
    assert "3129: Permission denied" in seen.errors


@pytest.mark.skipif(ABI < 6, reason="this kernel's Landlock knows no scopes")
@pytest.mark.proves("S-01")
async def test_a_program_cannot_signal_processes_outside_its_landlock_scope(ground: SandboxFolders) -> None:
    script = "sleep 100 & kill $!; wait $!; echo $?; kill -0 1 && echo REACHED"
    seen = await ran(other(), ground, script)
    assert (seen.out, "not permitted" in seen.errors) == ("143\n", True)
    assert "REACHED" in (await ran(other(abi=5), ground, script)).out


@needs_landlock
@pytest.mark.parametrize("abi", range(ABI + 1))
async def test_every_supported_landlock_version_can_be_enforced(ground: SandboxFolders, abi: int) -> None:
    seen = await ran(other(abi=abi), ground, "echo x > new; ls", {WORKSPACE: "ro", SCRATCH: "rw"})
    assert (seen.code, seen.out) == (0, "" if abi else "new\n")


@needs_landlock
@pytest.mark.parametrize("first", LAUNCHERS, ids=lambda found: found.name)
async def test_a_landlock_ruleset_that_the_kernel_refuses_stops_the_start(
    ground: SandboxFolders, first: LauncherProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = landlock.LandlockRuleset(struct.pack("=Q", 1 << 60), ())

    def ruleset(*_: object, **__: object) -> landlock.LandlockRuleset:
        return unknown

    monkeypatch.setattr(landlock, "compute_ruleset", ruleset)
    process = await other(first).start(ground.capabilities, ground.profile(), ProgramSpec(["touch", "begun"]))
    with pytest.raises(ToolError, match="Landlock cannot be used") as caught:
        await process.communicate(b"", 100)
    assert caught.value.kind == "backend"
    assert not (ground.workspace / "begun").exists()


ACCESS: st.SearchStrategy[Literal["ro", "rw"]] = st.sampled_from(["ro", "rw"])
PATHS = st.dictionaries(st.from_regex(r"(/[a-z]{1,4}){1,4}", fullmatch=True), ACCESS, max_size=5)


@given(version=st.integers(1, 9), folders=PATHS, tcp=st.booleans(), connect=st.lists(st.integers(1, 65535), max_size=2))
def test_landlock_rules_grant_only_rights_handled_by_the_ruleset(
    version: int, folders: Folders, tcp: bool, connect: list[int]
) -> None:
    made = landlock.compute_ruleset(version, folders, tcp=tcp, connect=connect)
    handled = struct.unpack(f"={len(made.attributes) // 8}Q", made.attributes)
    assert len(handled) == (1 if version < 4 else 2 if version < 6 else 3)
    assert handled[0] == landlock.get_handled_file_rights(version)
    assert all(rights and not rights & ~handled[0] for _, rights in made.folders)
    written = {path for path, rights in made.folders if rights & landlock.WRITE_FILE}
    assert written <= {"/dev", "/tmp", "/dev/shm", *(path for path, access in folders.items() if access == "rw")}
    assert {port for port, _ in made.ports} == (set(connect) if version >= 4 and not tcp else set())
    if version >= 4:
        assert handled[1] == (0 if tcp else landlock.BIND_TCP | landlock.CONNECT_TCP)


def test_later_landlock_versions_only_add_rights() -> None:
    handled = [landlock.get_handled_file_rights(version) for version in range(1, 8)]
    assert all(more & less == less for less, more in itertools.pairwise(handled))
    assert handled[0] == (1 << 13) - 1
