"""A sandbox shows the planned files, whatever replaces a path before, during or after its mount."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, Process, ProgramSpec, SandboxTier, TerminalSize
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.launcher_messages import LauncherProgram
from handrail.sandbox.start.ready_sandbox_pool import SandboxPool
from handrail.sandbox.start.sandboxed_process import SandboxedProcess
from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.sandbox.view import mount_comparison
from handrail.sandbox.view.mount_comparison import ExpectedMount, ExpectedMounts
from handrail.sandbox.view.sandbox_user import LookupCache

pytestmark = pytest.mark.proves("S-01")

LAUNCHERS = [
    found
    for found in (launcher_messages.find_perl_launcher(), launcher_messages.find_python_launcher())
    if found is not None
]
BINARIES = list(find_bubblewrap_programs())
SOMEBODY = 65_533
SECRET = "TOP-SECRET"


_FOLDERS = (
    "ws/d",
    "ws/e",
    "ws/vault",
    "ws/deep/er",
    "ws/.git/hooks",
    "scratch",
    "specs",
    "notes",
    "folder",
    "tool/bin",
    "tool/lib",
    "elsewhere/d",
)
_HIDDEN = (
    "ws/.env",
    "ws/d/.env",
    "ws/vault/key",
    "ws/deep/er/key",
    "elsewhere/s",
    "elsewhere/a",
    "elsewhere/d/s",
)
_KEPT = ("ws/p", "ws/d/s", "ws/handrail.toml", "ws/.git/config", "specs/a", "notes/a", "tool/bin/a")


@pytest.fixture(params=LAUNCHERS, ids=lambda found: found.name)
def first(request: pytest.FixtureRequest) -> LauncherProgram:
    return request.param


@pytest.fixture(
    params=[
        "as who runs this",
        pytest.param(
            "as the owner", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
        ),
    ]
)
def home(request: pytest.FixtureRequest, ground: SandboxFolders) -> Iterator[SandboxFolders]:
    """A workspace with hidden and protected files, further folders, and keys outside."""
    with tempfile.TemporaryDirectory(prefix="handrail-mounts-") as folder:
        # Not beneath pytest's folders, which each run of pytest closes to other users when it begins.
        place = Path(folder).resolve()
        for name in _FOLDERS:
            (place / name).mkdir(parents=True)
        for name in _HIDDEN:
            (place / name).write_text(SECRET)
        for name in _KEPT:
            (place / name).write_text("as it was\n")
        if request.param == "as the owner":
            for path in (place, *place.rglob("*")):
                os.chown(path, SOMEBODY, SOMEBODY)
        yield SandboxFolders(place / "ws", place / "scratch", place / "elsewhere", ground.sandbox)


def masks(home: SandboxFolders, **changes: object) -> dict[str, Any]:
    """The arguments of a profile that hides and keeps something."""
    ws = home.workspace
    return {
        "masked": tuple(str(ws / name) for name in (".env", "d/.env", "vault", "deep/er/key")),
        "pinned": tuple(str(ws / name) for name in ("p", "d/s", ".git/config", ".git/hooks")),
        **changes,
    }


class SwappingSandbox(BubblewrapSandbox):
    """A sandbox whose bubblewrap finds something else than was planned.

    :param swap: a shell text that is run between the plan and the mounts
    """

    def __init__(
        self, folder: Path, swap: str, *, binary: str = BINARIES[0], first: LauncherProgram | None = None
    ) -> None:
        script = folder / "swapping-bwrap"
        script.write_bytes(os.fsencode(f'#!/bin/sh\n{swap}\nexec {shlex.quote(binary)} "$@"\n'))
        script.chmod(0o755)
        super().__init__(str(script), SandboxTier("bubblewrap", "for a test"), first=first)


# ── what is mounted is what was asked for ────────────────────────────────────────────────────────

SWAPS = {
    "a folder on the way, for a link": "mv ws/d ws/d2; ln -s $PWD/elsewhere/d ws/d",
    "a folder on the way, for a link in the old root": "mv ws/d ws/d2; ln -s /oldroot$PWD/elsewhere/d ws/d",
    "a folder on the way, for another folder": "mv ws/d ws/d2; mkdir ws/d; echo > ws/d/s; echo > ws/d/.env",
    "two folders, for each other": "echo > ws/e/s; echo > ws/e/.env; mv ws/d ws/x; mv ws/e ws/d; mv ws/x ws/e",
    "a folder on the way, back and forth": "cp -r ws/d ws/d3; mv ws/d ws/d2; mv ws/d3 ws/d",
    "a deep folder on the way": "mv ws/deep ws/deep2; mkdir -p ws/deep/er; echo > ws/deep/er/key",
    "a pinned file, for a link": "mv ws/p ws/p2; ln -s $PWD/elsewhere/s ws/p",
    "a pinned file, for another": "echo other > ws/p2; mv -f ws/p2 ws/p",
    "a pinned file, for a link of the workspace's": "mv ws/p ws/p2; ln -s d/.env ws/p",
    "a pinned folder, for a link": "mv ws/.git/hooks ws/.git/h2; ln -s $PWD/elsewhere ws/.git/hooks",
    "the repository": "mv ws/.git ws/g2; mkdir -p ws/.git/hooks; echo > ws/.git/config",
    "handrail.toml": "mv ws/handrail.toml ws/h2; ln -s $PWD/elsewhere/s ws/handrail.toml",
    "handrail.toml, for another": "cp ws/handrail.toml ws/h2; mv ws/h2 ws/handrail.toml",
    "the workspace": "mv ws ws2; ln -s $PWD/elsewhere ws",
    "the workspace, for a copy": "mv ws ws2; cp -r ws2 ws",
    "the scratch": "mv scratch scratch2; ln -s $PWD/elsewhere scratch",
    "a further root": "mv specs specs2; ln -s $PWD/elsewhere specs",
    "a further root to write": "mv notes notes2; ln -s $PWD/elsewhere notes",
    "a toolchain": "mv tool tool2; mkdir -p elsewhere/bin; ln -s $PWD/elsewhere tool",
    "the folder of a tool": "mv folder folder2; ln -s $PWD/elsewhere folder",
}  # fmt: skip


@pytest.mark.parametrize("what", SWAPS)
async def test_a_mount_source_or_mount_point_swapped_during_the_start_ends_the_sandbox(
    home: SandboxFolders, first: LauncherProgram, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = home.workspace.parent
    monkeypatch.setenv("PATH", f"{place}/tool/bin:{os.environ['PATH']}")
    home.sandbox = SwappingSandbox(place, f"cd {shlex.quote(str(place))}\n{SWAPS[what]}", first=first)
    layer = home.layer(str(home.workspace), str(place / "notes"), read=(str(place / "specs"),))
    capabilities = type(home.capabilities)((layer,))
    profile = home.profile(
        **masks(home),
        writable=(str(place / "notes"),),
        read_only_roots=(str(place / "specs"),),
        readable=(str(place / "folder"),),
    )
    text = f"cat {place}/*/* {place}/*/*/* {place}/*/*/*/*; echo written > {place}/notes/new; echo begun"
    process = await home.sandbox.start(capabilities, profile, ProgramSpec(["/bin/bash", "-c", text]))
    try:
        with pytest.raises(ToolError, match=r"was replaced while the sandbox was prepared.*Try again") as caught:
            await process.communicate(b"", 1 << 20)
        assert caught.value.kind == "conflict"
        assert isinstance(process, SandboxedProcess) and process.get_collected()[0] == b""
    finally:
        await process.kill()
    assert not (place / "elsewhere" / "new").exists()


@pytest.mark.parametrize("binary", BINARIES)
@pytest.mark.parametrize("writable", [True, False], ids=["written", "only read"])
async def test_a_masked_file_stays_unreadable_after_its_folder_is_swapped(
    home: SandboxFolders, binary: str, writable: bool
) -> None:
    """Also where the workspace is only read, so that no folder on the way is a mount."""
    place = home.workspace.parent
    swap = f"cd {shlex.quote(str(place))}; mv ws/d ws/e2; mkdir ws/d; echo > ws/d/.env; echo > ws/d/s"
    home.sandbox = SwappingSandbox(place, swap, binary=binary)
    with pytest.raises(ToolError, match=f"`{place}/ws/d` was replaced") as caught:
        await home.bash("cat e2/.env", **masks(home, workspace_writable=writable))
    assert caught.value.kind == "conflict"


@pytest.mark.parametrize("binary", BINARIES)
async def test_a_sandbox_with_unchanged_masked_paths_starts(
    home: SandboxFolders, first: LauncherProgram, binary: str
) -> None:
    home.sandbox = BubblewrapSandbox(binary, SandboxTier("bubblewrap", "for a test"), first=first)
    ran = await home.bash("cat p d/s; cat .env d/.env vault/key deep/er/key; echo new > made", **masks(home))
    assert (ran.out, SECRET in ran.errors) == ("as it was\n" * 2, False)
    assert (home.workspace / "made").read_text() == "new\n"


@pytest.mark.parametrize(
    "name", ["a b", "tab\there", "line\nbreak", "back\\slash", "é☃", "\\040", os.fsdecode(b"\xff\xfe"), "x\u2028y"]
)
async def test_mount_points_of_any_name_are_verified(ground: SandboxFolders, first: LauncherProgram, name: str) -> None:
    ground.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    folder = ground.workspace / name
    folder.mkdir()
    (folder / "key").write_text(SECRET)
    ran = await ground.bash("cat */key; echo begun", masked=(str(folder / "key"),))
    assert (ran.out, SECRET in ran.errors) == ("begun\n", False)
    place = shlex.quote(str(folder))
    ground.sandbox = SwappingSandbox(
        ground.workspace.parent, f"mv {place} {place}2; mkdir {place}; echo > {place}/key", first=first
    )
    with pytest.raises(ToolError, match="was replaced while the sandbox was prepared") as caught:
        await ground.bash("cat */key", masked=(str(folder / "key"),))
    assert str(folder) in caught.value.text


async def test_a_workspace_in_var_tmp_is_verified_below_the_tmp_of_the_sandbox(ground: SandboxFolders) -> None:
    """There ``/var/tmp`` is a link to the sandbox's own ``/tmp``."""
    table = mount_comparison.derive_expected_mounts(
        ["--symlink", "../tmp", "/var/tmp", "--tmpfs", "/tmp", "--bind", str(ground.workspace), "/var/tmp/ws"],
        LookupCache(),
    )
    assert [mount.point for mount in table.mounts] == ["/", "/tmp", "/tmp/ws"]


OTHERWISE = {
    "a mask is missing": ("--ro-bind\0/dev/null\0{ws}/.env\0", "", "{ws}/.env"),
    "a folder's mask is missing": ("--perms\x000000\0--size\x004096\0--tmpfs\0{ws}/vault\0--remount-ro\0{ws}/vault\0", "", "{ws}/vault"),
    "a file is kept writable": ("--ro-bind\0{ws}/p\0", "--bind\0{ws}/p\0", "{ws}/p"),
    "a mask can be written": ("--remount-ro\0{ws}/vault\0", "", "{ws}/vault"),
    "the root can be written": ("--remount-ro\0/\0--chdir", "--chdir", "/"),
    "there is one mount more": ("--remount-ro\0/\0--chdir", "--ro-bind\0{ws}/d\0{ws}/e\0--remount-ro\0/\0--chdir", "{ws}/e"),
    "a mask is covered": ("--remount-ro\0/\0--chdir", "--bind\0{ws}/d/.env\0{ws}/.env\0--remount-ro\0/\0--chdir", "{ws}/.env"),
    "another file masks": ("--ro-bind\0/dev/null\0{ws}/.env", "--ro-bind\0{ws}/p\0{ws}/.env", "{ws}/.env"),
    "a mask is under the mount that covers it": ("--bind\0{ws}/d\0{ws}/d\0", "--ro-bind\0/dev/null\0{ws}/d/.env\0--bind\0{ws}/d\0{ws}/d\0", "{ws}/d/.env"),
}  # fmt: skip


@pytest.mark.parametrize("how", OTHERWISE)
async def test_a_mount_table_with_any_difference_ends_the_sandbox(
    home: SandboxFolders, first: LauncherProgram, how: str
) -> None:
    """By a bubblewrap that carries out other options than it was given."""
    old, new, named = (text.format(ws=home.workspace) for text in OTHERWISE[how])
    script = home.workspace.parent / "other-bwrap"
    script.write_text(
        "#!/usr/bin/python3\nimport os, sys\n"
        "at = len(sys.argv) - 1 - sys.argv[::-1].index('--args') + 1\n"
        "text = os.pread(int(sys.argv[at]), 1 << 20, 0)\n"
        f"old, new = {os.fsencode(old)!r}, {os.fsencode(new)!r}\n"
        "assert old in text, text\n"
        "other = os.memfd_create('other', 0)\n"
        "os.write(other, text.replace(old, new, 1)); os.lseek(other, 0, 0)\n"
        "sys.argv[at] = str(other)\n"
        f"os.execv({BINARIES[0]!r}, ['bwrap', *sys.argv[1:]])\n"
    )
    script.chmod(0o755)
    home.sandbox = BubblewrapSandbox(str(script), SandboxTier("bubblewrap", "for a test"), first=first)
    with pytest.raises(ToolError) as caught:
        await home.bash("cat .env vault/key; echo begun", **masks(home))
    assert (caught.value.kind, caught.value.text) == (
        "conflict",
        mount_comparison.make_replaced_mount_error(named).text,
    )


# ── a mount that ends takes the sandbox with it ──────────────────────────────────────────────────

ENDS: dict[str, tuple[str, Callable[[Path], object]]] = {}


def end(name: str, point: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def noted(way: Callable[[Path], object]) -> Callable[[Path], object]:
        ENDS[name] = (point, way)
        return way

    return noted


def saved(path: Path, text: str = f"{SECRET}\n") -> None:
    """Write a file as editors, git and the kernel's own tools do: a new one in the place of the old."""
    new = path.with_name("saved~")
    new.write_text(text)
    new.rename(path)


def backed_up(path: Path) -> None:
    """Write a file as editors do that keep the old one under another name."""
    path.rename(path.with_name("backup~"))
    path.write_text(SECRET)


for _name in (".env", "d/.env", "deep/er/key", "p", "d/s", ".git/config", "handrail.toml"):
    end(f"{_name} is saved", _name)(lambda ws, name=_name: saved(ws / name))
    end(f"{_name} is saved with a backup", _name)(lambda ws, name=_name: backed_up(ws / name))
end("a hidden file is removed", ".env")(lambda ws: (ws / ".env").unlink())
end("a hidden folder is moved", "vault")(lambda ws: (ws / "vault").rename(ws / "vault2"))
end("a pinned folder is moved", ".git/hooks")(lambda ws: (ws / ".git/hooks").rename(ws / ".git/h2"))
end("a folder on the way is moved", "d")(lambda ws: (ws / "d").rename(ws / "d2"))
end("an outer folder on the way is moved", "deep")(lambda ws: (ws / "deep").rename(ws / "deep2"))


@pytest.mark.parametrize("what", ENDS)
async def test_a_mount_that_disappears_ends_the_program_and_is_named(
    home: SandboxFolders, first: LauncherProgram, what: str
) -> None:
    point, way = ENDS[what]
    home.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    # It does not heed a signal, nor do those that it leaves behind.
    text = "trap '' TERM HUP; (setsid sleep 600 &); echo begun; sleep 600"
    process = await home.start("/bin/bash", "-c", text, **masks(home))
    try:
        assert await process.read(100) == b"begun\n"
        way(home.workspace)
        with pytest.raises(ToolError) as caught:
            await process.wait()
        assert (caught.value.kind, caught.value.text) == (
            "conflict",
            mount_comparison.make_ended_mount_error(f"{home.workspace}/{point}").text,
        )
    finally:
        await process.kill()


@pytest.mark.parametrize("name", [".env", "d"])
async def test_mounts_of_a_read_only_workspace_are_watched(
    home: SandboxFolders, first: LauncherProgram, name: str
) -> None:
    home.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    process = await home.start("/bin/bash", "-c", "echo begun; exec sleep 600", **masks(home, workspace_writable=False))
    try:
        assert await process.read(100) == b"begun\n"
        (home.workspace / name).rename(home.workspace / "elsewhere")
        with pytest.raises(ToolError, match=f"/{name}` was replaced, moved or removed"):
            await process.wait()
    finally:
        await process.kill()


async def test_output_before_a_mount_conflict_is_kept_separately_from_the_error(
    home: SandboxFolders, first: LauncherProgram
) -> None:
    home.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    process = await home.start("/bin/bash", "-c", "echo begun; exec sleep 600", **masks(home))
    try:
        asking = asyncio.ensure_future(process.communicate(b"", 1000, lambda out: saved(home.workspace / ".env")))
        assert (await asking)[0] == b"begun\n"
        with pytest.raises(ToolError, match="try again"):
            await process.wait()
    finally:
        await process.kill()


async def test_a_program_in_a_terminal_ends_when_a_mount_disappears(
    home: SandboxFolders, first: LauncherProgram
) -> None:
    home.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    program = ProgramSpec(["/bin/bash", "-c", "echo begun; exec sleep 600"], terminal=TerminalSize(24, 80))
    process = await home.sandbox.start(home.capabilities, home.profile(**masks(home)), program)
    try:
        assert await process.read(100) == b"begun\n"
        saved(home.workspace / ".env")
        with pytest.raises(ToolError, match=r"\.env` was replaced"):
            await process.wait()
    finally:
        await process.kill()


async def test_ordinary_renames_around_the_mounts_do_not_end_the_program(
    home: SandboxFolders, first: LauncherProgram
) -> None:
    """Renames of other files in the same folders, by the program and from outside, and its own attempts on what it is kept
    from."""
    home.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    text = "for i in $(seq 300); do echo > x; mv x y; mv y d/z; mv d/z .git/z; done; mv .env e; mv d d2; rm -rf .git/hooks; echo done; read"
    process = await home.start("/bin/bash", "-c", text, **masks(home))
    try:
        assert await process.read(100) == b"done\n"
        for number in range(300):
            saved(home.workspace / "other", str(number))
            saved(home.workspace / "d" / "other", str(number))
        (home.workspace / "e").rename(home.workspace / "f")
        await process.write(b"\n")
        await process.communicate(b"", 1000)
        assert await process.wait() == 0
    finally:
        await process.kill()


def descendants(process: int) -> Iterator[int]:
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from descendants(child)


def files_of(process: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for number in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(number.readlink())


async def test_a_sandbox_uses_no_inotify_instance_of_its_user(home: SandboxFolders, first: LauncherProgram) -> None:
    """They are few, and the user's editors need them."""
    home.sandbox = BubblewrapSandbox(BINARIES[0], SandboxTier("bubblewrap", "for a test"), first=first)
    process = await home.start("/bin/bash", "-c", "echo begun; exec sleep 600", **masks(home))
    try:
        assert await process.read(100) == b"begun\n"
        open_files = [name for one in descendants(os.getpid()) for name in files_of(one)]
        assert any("mountinfo" in name for name in open_files), "the process that watches is among them"
        assert not [name for name in open_files if "inotify" in name]
    finally:
        await process.kill()


async def test_a_replaced_mount_is_detected_without_rename_notifications(
    home: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine whose kernel does not tell of renames."""
    monkeypatch.setattr(launcher_messages, "_SIGNALS", {})
    process = await home.start("/bin/bash", "-c", "echo begun; exec sleep 600", **masks(home))
    try:
        assert await process.read(100) == b"begun\n"
        backed_up(home.workspace / ".env")
        with pytest.raises(ToolError, match=r"\.env` was replaced"):
            await process.wait()
    finally:
        await process.kill()


# ── sandboxes that wait for their call ───────────────────────────────────────────────────────────


@pytest.fixture
async def pool(home: SandboxFolders) -> AsyncIterator[SandboxPool]:
    assert isinstance(home.sandbox, BubblewrapSandbox)
    made = SandboxPool(home.sandbox)
    yield made
    await made.aclose()


async def started(pool: SandboxPool, home: SandboxFolders, text: str, **changes: object) -> Process:
    return await pool.start(home.capabilities, home.profile(**masks(home, **changes)), ProgramSpec((*SHELL_ARGV, text)))


async def run(pool: SandboxPool, home: SandboxFolders, text: str, **changes: object) -> bytes:
    process = await started(pool, home, text, **changes)
    out, errors, _ = await process.communicate(b"", 1000)
    await process.wait()
    return out + errors


@pytest.mark.parametrize(
    "what", [name for name in ENDS if "d/.env" in name or "handrail.toml" in name or "moved" in name]
)
async def test_a_ready_sandbox_ends_when_one_of_its_mounts_disappears(
    home: SandboxFolders, pool: SandboxPool, what: str
) -> None:
    await run(pool, home, "true")
    await pool.wait_until_successors_ready()
    ready = next(iter(pool._ready))  # pyright: ignore[reportPrivateUsage]
    assert await ready.wait_until_ready() and pool.ready_sandbox_count == 1
    gone = asyncio.get_running_loop().create_future()
    ready.add_sandbox_empty_callback(lambda: gone.set_result(None))
    ENDS[what][1](home.workspace)
    await gone
    assert pool.ready_sandbox_count == 0 and not ready.is_waiting
    with pytest.raises(ToolError, match="was replaced, moved or removed") as caught:
        await ready.wait()  # as a call does that had taken it just before
    assert caught.value.kind == "conflict"


@pytest.mark.parametrize("name", ["ws", "specs", "scratch", "tool", "folder"])
async def test_a_ready_sandbox_is_not_used_after_its_mount_source_was_swapped(
    home: SandboxFolders, pool: SandboxPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mount ends with that: the sandbox would still show the old folder."""
    place = home.workspace.parent
    monkeypatch.setenv("PATH", f"{place}/tool/bin:{os.environ['PATH']}")
    changes = {"read_only_roots": (str(place / "specs"),), "readable": (str(place / "folder"),)}
    layer = home.layer(str(home.workspace), read=(str(place / "specs"),))
    capabilities = type(home.capabilities)((layer,))

    async def taken() -> bool:
        before = pool.ready_sandbox_count
        process = await pool.start(
            capabilities, home.profile(**masks(home, **changes)), ProgramSpec((*SHELL_ARGV, "true"))
        )
        found = pool.ready_sandbox_count < before
        await process.communicate(b"", 100)
        await process.wait()
        await pool.wait_until_successors_ready()
        return found

    await taken()
    assert await taken()
    (place / name).rename(place / "away")
    subprocess.run(["cp", "-rp", place / "away", place / name], check=True)
    assert not await taken()
    assert await taken()


# ── the tables themselves ────────────────────────────────────────────────────────────────────────


def test_a_mount_source_swapped_during_the_lookup_fails_with_a_conflict(ground: SandboxFolders) -> None:
    """The look has followed a link that is not there any more: what it found is nothing to be compared with."""
    (ground.workspace / "d").mkdir()
    (ground.workspace / "d" / "key").write_text("harmless")
    path = str(ground.workspace / "d" / "key")

    class Misled(LookupCache):
        def identify(self, path: str):
            return super().identify(path.replace(f"{ground.workspace}/d/", f"{ground.outside}/"))

    with pytest.raises(ToolError, match="was replaced") as caught:
        mount_comparison.derive_expected_mounts(["--ro-bind", path, path], Misled())
    assert caught.value.kind == "conflict"
    (ground.workspace / "d").rename(ground.workspace / "d2")
    (ground.workspace / "d").symlink_to(ground.outside)
    with pytest.raises(ToolError, match="was replaced"):
        mount_comparison.derive_expected_mounts(["--ro-bind", path, path], LookupCache())


def test_a_mount_parent_is_the_innermost_mount_that_is_not_covered() -> None:
    points = ["/", "/w", "/w/m", "/w/m/n", "/w/m", "/w/m/n/key", "/w/m"]
    parents = [0, 1, 2, 3, 3, 5, 5]
    table = ExpectedMounts(tuple(ExpectedMount(point, read_only=False, content="1:2") for point in points))
    looked = ["/", "/w", "/w/m"]
    assert mount_comparison.list_paths_to_identify(table) == tuple(looked)

    def described(parents: list[int]) -> bytes:
        lines = [
            f"{n} {on} 0:9 /r {at} rw - t d rw\n" for n, (on, at) in enumerate(zip(parents, points, strict=True), 1)
        ]
        items = ["".join(lines), *("1:2" for _ in looked)]
        return b"".join(len(item).to_bytes(4, "big") + item.encode() for item in items)

    assert mount_comparison.find_first_mount_mismatch(table, described(parents)) is None
    for number in range(1, len(points)):
        elsewhere = [*parents[:number], 99 if parents[number] == 1 else 1, *parents[number + 1 :]]
        assert mount_comparison.find_first_mount_mismatch(table, described(elsewhere)) == points[number]


def test_a_path_is_escaped_like_the_kernel_escapes_it() -> None:
    assert mount_comparison.escape_mountinfo_path("/a b\tc\nd\\e é") == "/a\\040b\\011c\\012d\\134e\\040é"


# ── machines that have mounts beneath what is mounted ────────────────────────────────────────────

_AMONG_MOUNTS = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import CapabilitySet, CapabilityLayer, ShellRequires
from handrail.contract.sandbox_protocol import SandboxProfile, ProgramSpec, SandboxTier
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.start.ready_sandbox_pool import SandboxPool

place, binary = Path(sys.argv[1]), sys.argv[2]
ws, specs, scratch = place / "ws", place / "specs", place / "scratch"

def run(*argv):
    subprocess.run([str(word) for word in argv], check=True)

def tmpfs(at):
    at.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "none", at)

run("mount", "--make-rshared", "/")
for folder in (ws, specs, scratch, ws / "other", ws / "vault"):
    folder.mkdir(exist_ok=True)
(ws / "other" / "seen").write_text("seen\\n")
tmpfs(scratch)
tmpfs(ws / "m")
tmpfs(ws / "m" / "inner")
(ws / "m" / "key").write_text("TOP-SECRET")
(ws / "m" / "p").write_text("kept\\n")
(ws / "b c\\\\d").mkdir()
run("mount", "--bind", ws / "other", ws / "b c\\\\d")
tmpfs(ws / "twice")
tmpfs(ws / "twice")
tmpfs(ws / "twice" / "on top")
tmpfs(ws / "vault" / "inner")
(ws / "vault" / "inner" / "key").write_text("TOP-SECRET")
run("mount", "--bind", specs, specs)
tmpfs(specs / "in it")
tmpfs(ws / "unbound")
run("mount", "--make-unbindable", ws / "unbound")

layer = CapabilityLayer("t", (str(ws), str(specs)), (str(ws),), (), (ShellRequires(cmd="*"),))
capabilities = CapabilitySet((layer,))
profile = SandboxProfile(
    str(ws), str(scratch), read_only_roots=(str(specs),),
    masked=(str(ws / "m" / "key"), str(ws / "vault")), pinned=(str(ws / "m" / "p"),),
)
sandbox = BubblewrapSandbox(binary, SandboxTier("bubblewrap", "for a test"))

async def outcome(process):
    try:
        out, errors, _ = await process.communicate(b"", 1000)
        await process.wait()
        return out.decode(), errors.decode()
    except ToolError as error:
        return error.kind, error.text
    finally:
        await process.kill()

def start(text):
    return sandbox.start(capabilities, profile, ProgramSpec(["/bin/bash", "-c", text]))

async def main():
    text = 'cat m/p b*/seen; cat m/key vault/inner/key vault/key'
    said = await outcome(await start(text))
    assert said[0] == "kept\\nseen\\n" and "TOP-SECRET" not in said[1], said
    tmpfs(ws / "later")
    said = await outcome(await start("ls later; echo begun"))
    assert said[0] == "begun\\n", said

    process = await start("echo begun; read; echo done")
    assert await process.read(100) == b"begun\\n"
    os.kill(process.first_process_pid, signal.SIGSTOP)
    tmpfs(ws / "brief")
    run("umount", ws / "brief")
    os.kill(process.first_process_pid, signal.SIGCONT)
    await process.write(b"x\\n")
    said = await outcome(process)
    assert said[0] == "done\\n", said  # the table had changed, and was as before when it was looked at

    for change, named in (
        (lambda: tmpfs(ws / "new"), ws / "new"),
        (lambda: run("umount", ws / "later"), ws / "later"),
        (lambda: tmpfs(specs / "new"), specs / "new"),
    ):
        process = await start("echo begun; exec sleep 600")
        assert await process.read(100) == b"begun\\n"
        change()
        said = await outcome(process)
        assert said[0] == "conflict" and str(named) in said[1], (named, said)
    said = await outcome(await start("echo begun"))
    assert said[0] == "begun\\n", said
    # A mount point that moves with its folder gives no sign: the first try tells, and the next one is right.
    (ws / "around").mkdir()
    tmpfs(ws / "around" / "m")
    assert (await outcome(await start("echo begun")))[0] == "begun\\n"
    (ws / "around").rename(ws / "about")
    told = [(await outcome(await start("echo begun")))[0] for _ in range(2)]
    assert told[1] == "begun\\n", told
    print("held")

asyncio.run(main())
"""


@pytest.mark.parametrize("binary", BINARIES)
def test_a_sandbox_works_among_nested_mounts_and_detects_their_changes(tmp_path: Path, binary: str) -> None:
    """In a mount namespace of the test's, in which it may mount."""
    unshare = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
    done = subprocess.run(
        [*unshare, "--propagation", "private", sys.executable, "-c", _AMONG_MOUNTS, str(tmp_path.resolve()), binary],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("held\n", 0), done.stderr
