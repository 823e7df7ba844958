"""Refusals of the file service: every way out of the roots, and everything but regular files."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from tests.runtime.conftest import RecordingAccessCheck

from handrail.contract.errors import ToolError
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots, find_openat2_problem
from handrail.store.state_folders import remove_tree

pytestmark = pytest.mark.proves("S-03")


async def refused(files: RootedFiles, path: str) -> set[str]:
    """The kinds with which each door refuses ``path``; fails if one lets it through."""
    kinds: set[str] = set()
    for door in (files.read_bytes(path), files.read_lines(path), files.read_for_edit(path), files.write(path, b"x")):
        with pytest.raises(ToolError) as caught:
            await door
        assert "TOP-SECRET" not in caught.value.text
        kinds.add(caught.value.kind)
    return kinds


async def test_paths_that_leave_the_root_are_denied(files: RootedFiles, workspace: Path) -> None:
    (workspace / "up").symlink_to("..")
    (workspace / "key").symlink_to(workspace.parent / "ws_secret" / "key")
    (workspace / "magic").symlink_to("/proc/self/root")
    for path in (
        "../ws_secret/key",
        str(workspace.parent / "ws_secret" / "key"),
        f"{workspace}_secret/key",
        "up/ws_secret/key",
        "key",
        "magic/etc/passwd",
        "/proc/self/environ",
        f"/proc/self/root{workspace.parent}/ws_secret/key",
        "/dev/zero",
        "/dev/fd/0",
    ):
        assert await refused(files, path) == {"denied"}, path
    assert (workspace.parent / "ws_secret" / "key").read_text() == "TOP-SECRET"


async def test_a_magic_link_that_leads_into_the_workspace_reads_the_file_there(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / "f").write_text("mine")
    got = await files.read_bytes(f"/proc/self/root{workspace}/f")
    assert (got.path, got.data) == ("f", b"mine")


async def test_a_link_within_the_workspace_is_checked_and_recorded_under_its_target(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck, seen: SeenFileHashes
) -> None:
    (workspace / "real").write_text("x")
    (workspace / "alias").symlink_to("real")
    await files.read_bytes("alias")
    assert judge.asked == [("fs.read", str(workspace / "real"))]
    assert seen.find_seen_hash(str(workspace / "real")) is not None
    judge.refuse[str(workspace / "real")] = "a rule denies this file"
    with pytest.raises(ToolError, match="a rule denies") as caught:
        await files.read_bytes("alias")
    assert caught.value.kind == "denied"
    await files.write("alias2", b"")
    assert judge.asked[-1] == ("fs.write", str(workspace / "alias2"))


async def test_devices_fifos_and_sockets_are_refused(files: RootedFiles, workspace: Path) -> None:
    os.mkfifo(workspace / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(workspace / "socket"))
    names = ["pipe", "socket"]
    try:
        os.mknod(workspace / "zero", 0o666 | 0o020000, os.makedev(1, 5))
        names.append("zero")
    except PermissionError:
        pass  # only root makes devices
    for name in names:
        kinds = await refused(files, name)
        # Some file systems refuse to open a device at all.
        assert kinds <= {"denied", "failed"}, name
        assert "denied" in kinds or name == "zero"


async def test_a_file_with_a_hard_link_outside_the_workspace_is_not_written(
    files: RootedFiles, workspace: Path
) -> None:
    secret = workspace.parent / "ws_secret" / "key"
    os.link(secret, workspace / "harmless")
    await files.read_bytes("harmless")
    for over in ("seen", b"TOP-SECRET"):
        with pytest.raises(ToolError, match="hard links") as caught:
            await files.write("harmless", b"overwritten", expected=over)  # pyright: ignore[reportArgumentType]
        assert caught.value.kind == "denied"
    assert secret.read_text() == "TOP-SECRET"


async def test_a_loop_of_links_is_refused(files: RootedFiles, workspace: Path) -> None:
    (workspace / "a").symlink_to("b")
    (workspace / "b").symlink_to("a")
    (workspace / "self").symlink_to("self")
    for path in ("a", "self", "self/x"):
        assert await refused(files, path) <= {"conflict", "failed"}
    assert (workspace / "self").is_symlink()


async def test_a_link_swapped_in_after_the_rule_check_is_not_followed(
    workspace: Path, judge: RecordingAccessCheck, seen: SeenFileHashes
) -> None:
    """The judge itself swaps the file, so the swap falls exactly between judgement and open."""
    target = workspace / "f"
    secret = workspace.parent / "ws_secret" / "key"

    def swap(capability: object, path: object) -> None:
        target.unlink(missing_ok=True)
        target.symlink_to(secret)

    files = RootedFiles(SessionRoots(workspace), seen, swap)
    for door in ("read", "write"):
        target.unlink(missing_ok=True)
        target.write_text("plain")
        seen.record(str(target), "0")
        with pytest.raises(ToolError) as caught:
            await (files.read_bytes("f") if door == "read" else files.write("f", b"x"))
        assert caught.value.kind == "conflict"
    assert secret.read_text() == "TOP-SECRET"


async def test_a_folder_swapped_for_a_link_after_the_rule_check_is_not_followed(
    workspace: Path, judge: RecordingAccessCheck, seen: SeenFileHashes
) -> None:
    folder = workspace / "d"

    def swap(capability: object, path: object) -> None:
        if not folder.is_symlink():
            folder.rename(workspace / "moved")
            folder.symlink_to(workspace.parent / "ws_secret")

    folder.mkdir()
    (folder / "key").write_text("plain")
    files = RootedFiles(SessionRoots(workspace), seen, swap)
    with pytest.raises(ToolError) as caught:
        await files.read_bytes("d/key")
    assert caught.value.kind == "conflict"
    folder.unlink()
    (workspace / "moved").rename(folder)
    with pytest.raises(ToolError) as caught:
        await files.write("d/new", b"x")
    assert caught.value.kind == "conflict"
    assert not (workspace.parent / "ws_secret" / "new").exists()


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_link_swapped_during_access_never_exposes_files_outside_the_roots(
    files: RootedFiles, workspace: Path, rounds: int
) -> None:
    secret = workspace.parent / "ws_secret"
    (workspace / "in").mkdir()
    (workspace / "in" / "key").write_text("plain")
    stop = threading.Event()
    swaps = 0

    def swap() -> None:
        nonlocal swaps
        while not stop.is_set():
            (workspace / "d.new").symlink_to("in" if swaps % 2 else secret)
            (workspace / "d.new").replace(workspace / "d")
            swaps += 1

    swapper = threading.Thread(target=swap)
    swapper.start()
    answers: set[bytes | str] = set()
    try:
        while swaps == 0:
            pass
        for number in range(rounds):
            try:
                answers.add((await files.read_bytes("d/key")).data)
                await files.write(f"d/{number}", b"mine", expected="new")
            except ToolError as error:
                answers.add(error.kind)
    finally:
        stop.set()
        swapper.join()
    assert swaps > 1
    assert b"TOP-SECRET" not in answers
    assert answers <= {b"plain", "denied", "conflict", "failed"}
    assert sorted(entry.name for entry in secret.iterdir()) == ["key"]


async def test_a_path_five_thousand_folders_deep_is_refused_and_other_paths_still_work(
    files: RootedFiles, workspace: Path
) -> None:
    here = os.open(workspace, os.O_RDONLY)
    try:
        for _ in range(5_000):
            os.mkdir("d", dir_fd=here)
            here, above = os.open("d", os.O_RDONLY, dir_fd=here), here
            os.close(above)
    finally:
        os.close(here)
    try:
        for path in ("/".join(["d"] * 5_000), "/".join(["d"] * 2_000) + "/" + "../d" * 1_000):
            assert await refused(files, path) == {"invalid_input"}
        assert [one.path for one in await files.list("d/d")] == ["d/d/d"]
        await files.write("beside", b"x")
    finally:
        remove_tree(workspace)


@pytest.mark.parametrize("path", ["a/" * 2_000, "a//b/" * 800, "../" * 1_300, "http://a/" * 450, "/é" * 700])
async def test_a_path_with_hundreds_of_names_is_refused(files: RootedFiles, path: str) -> None:
    assert await refused(files, path) == {"invalid_input"}


async def test_a_short_path_of_links_that_lead_hundreds_of_folders_down_is_refused(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / "link").symlink_to("d/" * 250)
    (workspace / "second").symlink_to("link/" + "d/" * 400)
    assert await refused(files, "second/x") == {"invalid_input"}


async def test_files_in_an_extra_root_are_readable_and_never_writable(
    workspace: Path, judge: RecordingAccessCheck, seen: SeenFileHashes
) -> None:
    output = workspace.parent / "output"
    output.mkdir()
    (output / "1.txt").write_text("rest")
    files = RootedFiles(SessionRoots(workspace, [output]), seen, judge)
    assert (await files.read_bytes(str(output / "1.txt"))).data == b"rest"
    with pytest.raises(ToolError, match="read-only") as caught:
        await files.write(str(output / "1.txt"), b"x")
    assert caught.value.kind == "denied"


async def test_control_characters_in_file_names_are_escaped_in_error_messages(files: RootedFiles) -> None:
    for name in ("a\nb", "\x1b]0;x\x07", os.fsdecode(b"\xff\xfe")):
        with pytest.raises(ToolError) as caught:
            await files.read_bytes(name)
        assert caught.value.text.isprintable()
        await files.write(name, b"odd")
        assert (await files.read_bytes(name)).data == b"odd"


async def test_a_rule_for_one_name_does_not_cover_similar_names(
    files: RootedFiles, judge: RecordingAccessCheck, workspace: Path
) -> None:
    (workspace / "private").mkdir()
    judge.refuse[str(workspace / "private" / "f")] = "no"
    for name in ("PRIVATE/f", "private./f", "pr\u0131vate/f"):
        await files.write(name, b"x")
    assert not (workspace / "private" / "f").exists()
    with pytest.raises(ToolError):
        await files.write("private/./x/../f", b"x")


def test_this_machine_supports_openat2() -> None:
    assert find_openat2_problem() is None
