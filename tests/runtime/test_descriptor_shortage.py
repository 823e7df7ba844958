"""After a shortage of descriptors, programs start again, and hidden files stay hidden."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.runtime.test_guard import GuardFixture, ground

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec
from handrail.runtime.guard import guarded_sandbox, post_run_check
from handrail.runtime.guard.post_run_check import PostRunCheck
from handrail.sandbox import tier_probe
from handrail.sandbox.view import cached_folder_tree as module
from handrail.sandbox.view.cached_folder_tree import FolderTree

pytestmark = pytest.mark.proves("S-07")
__all__ = ["ground"]

SCRIPT = """
import asyncio, os, resource, sys, threading
from pathlib import Path
from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import CapabilitySet, CapabilityLayer, ShellRequires
from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.policy.rules.rules_and_modes import build_default_rule_book
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.shell_service import SandboxedShell
from handrail.sandbox import tier_probe as tiers; from handrail.sandbox.start import ready_sandbox_pool as pool; from handrail.sandbox.start import sandboxed_process as process
from handrail.sandbox.start.sandboxed_process import wait_until_sandboxes_dismantled

place = Path(sys.argv[1])
ws = place / "ws"
program = ShellRequires.model_validate({"cmd": "*"})
hosts = tuple(sys.argv[2:])
capabilities = CapabilitySet((CapabilityLayer("test", (str(ws),), (str(ws),), hosts, (program,), frozenset()),))
profile = SandboxProfile(str(ws), str(place / "scratch"), denials=build_hidden_path_rules(build_default_rule_book(), str(ws)), quarantine=str(place / "q"))

def lowest_free():
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)
    return descriptor

def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

async def main():
    pooled = pool.wrap_bubblewrap_in_pool(tiers.choose_sandbox())
    shell = SandboxedShell(GuardedSandbox(pooled), profile, capabilities, SessionRoots(ws), lambda capability, target: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kinds, worked = set(), 0
    check = "exec 2>/dev/null; cat .env; echo evil >> .git/config; echo evil > .vscode/tasks.json; echo worked; true"
    assert (await shell.run(check)).output == b"worked\\n"
    await pooled.wait_until_successors_ready()
    for spare in [*range(0, 40), *range(0, 40, 3)]:
        (ws / f"new{spare}").mkdir(exist_ok=True)
        (ws / "src" / f"new{spare}").mkdir(exist_ok=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free() + spare, hard))
        try:
            done = await shell.run(check)
            assert done.output == b"worked\\n", done
            worked += 1
        except ToolError as error:
            kinds.add(error.kind)
            if error.kind != "unavailable":
                print("UNEXPECTED", spare, error.kind, error.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        done = await shell.run(check)
        assert done.output == b"worked\\n", (spare, done)
        assert (ws / ".git/config").read_text() == "theirs" and (ws / ".vscode/tasks.json").read_text() == "theirs"
    await pooled.aclose()
    while process._UNREAPED:  # however long this machine takes to put namespaces away
        await wait_until_sandboxes_dismantled()
    for thread in threading.enumerate():
        if thread.name == "handrail-reap":
            thread.join()
    left = [(child, Path(f"/proc/{child}/cmdline").read_bytes()) for child in children()]
    print("kinds", sorted(kinds), "worked", worked, "children", len(left), left)

asyncio.run(main())
"""


@pytest.mark.parametrize("hosts", [(), ("example.org",)])
def test_programs_start_again_after_every_shortage_of_descriptors(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    chosen = tier_probe.choose_sandbox()
    if not chosen.tier.is_confining:
        pytest.skip(chosen.tier.detail)
    place = tmp_path.resolve()
    for name in ("ws/.git/objects", "ws/.git/refs", "ws/.vscode", "ws/src", "scratch"):
        (place / name).mkdir(parents=True)
    for name in (".git/config", ".vscode/tasks.json"):
        (place / "ws" / name).write_text("theirs")
    (place / "ws" / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (place / "ws" / ".env").write_text("TOP-SECRET")
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(place), *hosts], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "UNEXPECTED" not in ran.stdout, ran.stdout
    assert "kinds ['unavailable']" in ran.stdout and "children 0" in ran.stdout, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr


def test_a_folder_that_was_briefly_unreadable_is_read_at_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / ".envrc").write_text("x")
    real = os.scandir
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EIO):
        for failing in ("", "a", "a/b"):
            tree = FolderTree(str(tmp_path))

            def scandir(path: str, number: int = number, failing: str = failing):
                if path == str(tmp_path / failing):
                    raise OSError(number, os.strerror(number))
                return real(path)

            with monkeypatch.context() as patched:
                patched.setattr(module.os, "scandir", scandir)
                if number == errno.EIO:
                    tree.refresh()
                    assert tree.list_unreadable_folders() == [str(tmp_path / failing)], (
                        "it is hidden as long as it cannot be read"
                    )
                else:
                    with pytest.raises(ToolError, match="Call again") as caught:
                        tree.refresh()
                    assert caught.value.kind == "unavailable"
            tree.refresh()
            assert tree.list_unreadable_folders() == [] and list(tree.get_protected_entries()) == [
                str(tmp_path / "a" / "b" / ".envrc")
            ]


async def test_a_failed_check_after_a_program_is_repeated_before_the_next_program(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_sandbox, "_LAST_CHECK_PAUSES_S", ())

    def short(self: PostRunCheck) -> None:
        raise ToolError("no descriptors", kind="unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(PostRunCheck, "check_and_restore", short)
        with pytest.raises(ToolError, match="could not be checked") as caught:
            await ground.run("echo evil > .envrc")
        assert caught.value.kind == "unavailable"
        with pytest.raises(ToolError, match="no descriptors"):
            await ground.run("echo not yet")
        assert (ground.workspace / ".envrc").exists()
    with pytest.raises(ToolError, match=r"\.envrc was moved to") as caught:
        await ground.run("echo not yet")
    assert caught.value.kind == "conflict" and not (ground.workspace / ".envrc").exists()
    assert await ground.run("echo again") == (0, "again\n")


async def test_a_failed_check_after_a_call_is_repeated_before_the_next_call(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "while read go; do echo evil > .envrc; echo done; done"
    process = await ground.sandbox.start(ground.capabilities, ground.profile, ProgramSpec(["/bin/bash", "-c", script]))
    assert isinstance(process, guarded_sandbox.GuardedProcess)

    def short(self: PostRunCheck) -> None:
        raise ToolError("no descriptors", kind="unavailable")

    try:
        await process.begin_call()
        await process.write(b"go\n")
        assert await process.read_line(100) == b"done\n"
        with monkeypatch.context() as patched:
            patched.setattr(PostRunCheck, "check_and_restore", short)
            with pytest.raises(ToolError, match="no descriptors"):
                await process.end_call()
            with pytest.raises(ToolError, match="no descriptors"):
                await process.begin_call()
        assert any(".envrc was moved to" in found for found in await process.begin_call())
        assert not (ground.workspace / ".envrc").exists()
    finally:
        await process.kill()


@pytest.mark.parametrize("wanting", ["a file", "a link"])
async def test_a_restore_that_fails_once_is_retried(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch, wanting: str
) -> None:
    (ground.workspace / ".envrc").write_text("theirs")
    (ground.workspace / "conf").mkdir()
    (ground.workspace / ".vscode").symlink_to("conf")
    failed: list[str] = []

    def once(real: Callable[..., object]) -> Callable[..., object]:
        def short(*given: object, **named: object) -> object:
            if not failed:
                failed.append("once")
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(*given, **named)

        return short

    process = await ground.sandbox.start(
        ground.capabilities, ground.profile, ProgramSpec(["/bin/bash", "-c", "echo up; read go; exit 0"])
    )
    try:
        assert await process.read_line(100) == b"up\n"
        name = "restore_file" if wanting == "a file" else "open_parent"
        monkeypatch.setattr(post_run_check, name, once(getattr(post_run_check, name)))
        if wanting == "a file":
            (ground.workspace / "new").write_text("new")
            (ground.workspace / "new").rename(ground.workspace / ".envrc")
        else:
            (ground.workspace / ".vscode").unlink()
        await process.close_stdin()
        with pytest.raises(ToolError, match="restored"):
            await process.wait()
    finally:
        await process.kill()
    assert failed and (ground.workspace / ".envrc").read_text() == "theirs"
    assert (ground.workspace / ".vscode").readlink() == Path("conf")
