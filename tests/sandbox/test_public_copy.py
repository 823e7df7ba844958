"""The copy of a folder's world-readable files, which replaces /etc in root's sandboxes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process
from handrail.sandbox.view import mount_options, public_config_copy
from handrail.sandbox.view.public_config_copy import REFRESH_INTERVAL_S, PublicConfigCopy

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="others are shown /etc itself, which gives them what is theirs")


class ConfigFolder:
    """A folder of configuration, its copies, and a clock."""

    def __init__(self, place: Path) -> None:
        self.source, self.places = place / "etc", (str(place / "copies"),)
        self.source.mkdir(0o755)
        self.now = time.monotonic()
        self.copy = PublicConfigCopy(str(self.source), self.places)

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        """As the machine does it: another file takes the place."""
        path = self.source / name
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        new = path.with_name(".new")
        new.write_text(text)
        new.chmod(mode)
        new.replace(path)

    @property
    def shown(self) -> Path:
        self.now += REFRESH_INTERVAL_S + 1
        before = os.umask(0o077)  # what is public stays so, however private Handrail's own files are
        try:
            return Path(self.copy.get_current_copy_folder(self.now))
        finally:
            os.umask(before)

    def names(self) -> list[str]:
        shown = self.shown
        return sorted(str(path.relative_to(shown)) for path in shown.rglob("*"))


@pytest.fixture
def etc(tmp_path: Path) -> ConfigFolder:
    return ConfigFolder(tmp_path.resolve())


def test_the_copy_holds_only_world_readable_files_and_keeps_links_unchanged(etc: ConfigFolder) -> None:
    etc.write("passwd", "root:x:0:0")
    etc.write("shadow", "HASH", 0o600)
    etc.write("group-only", "HASH", 0o640)
    etc.write("ssl/certs/a.pem", "A")
    etc.write("ssl/private/key", "HASH")
    (etc.source / "ssl" / "private").chmod(0o710)
    etc.write("init.d/run", "#!/bin/sh", 0o4755)
    (etc.source / "alternative").symlink_to("/usr/bin/true")
    (etc.source / "inner").symlink_to("ssl/private/key")
    os.mkfifo(etc.source / "pipe", 0o644)
    assert etc.names() == [
        *("alternative", "init.d", "init.d/run", "inner", "passwd", "ssl", "ssl/certs", "ssl/certs/a.pem")
    ]
    assert (etc.shown / "alternative").readlink() == Path("/usr/bin/true")
    assert (etc.shown / "ssl/certs/a.pem").read_text() == "A"
    assert (etc.shown / "init.d/run").stat().st_mode & 0o7777 == 0o755
    assert (etc.shown / "passwd").stat().st_mode & 0o7777 == 0o644
    assert (etc.shown / "ssl").stat().st_mode & 0o7777 == 0o755


def test_names_and_link_targets_of_any_bytes_are_copied_and_reused(etc: ConfigFolder) -> None:
    top = os.fsencode(etc.source)
    for name in (b"latin-\xe9", "utf-8-\u0151".encode(), b"ctl-\x01\n"):
        (fresh := Path(os.fsdecode(top + b"/" + name))).write_text("x")
        fresh.chmod(0o644)
        os.symlink(b"to/" + name, top + b"/link-" + name)
    shown = os.fsencode(etc.shown)
    assert sorted(os.listdir(shown)) == sorted(os.listdir(top))
    assert os.readlink(shown + b"/link-latin-\xe9") == b"to/latin-\xe9"
    stamp = os.lstat(shown + b"/latin-\xe9").st_ino
    again = PublicConfigCopy(str(etc.source), etc.places)
    assert os.fsencode(again.get_current_copy_folder(etc.now)) == shown
    assert os.lstat(shown + b"/latin-\xe9").st_ino == stamp, "the listing of the first process is understood"


def test_the_copy_follows_changed_files_and_removes_files_that_become_private(etc: ConfigFolder) -> None:
    for name in ("hosts", "soon", "away/file", "turns"):
        etc.write(name, "before")
    there = etc.shown
    kept = os.stat(there / "away/file").st_ino
    etc.write("hosts", "after!")  # as long as before
    written_at = (there / "hosts").stat().st_mtime_ns
    os.utime(etc.source / "hosts", ns=(written_at, written_at))
    (etc.source / "soon").chmod(0o600)
    (etc.source / "turns").unlink()
    etc.write("turns/inner", "now in a folder")
    assert etc.shown == there
    assert (there / "hosts").read_text() == "after!"
    assert not (there / "soon").exists()
    assert (there / "turns/inner").read_text() == "now in a folder"
    assert os.stat(there / "away/file").st_ino == kept  # what stays the same is not written again
    (etc.source / "away").chmod(0o700)
    assert etc.names() == ["hosts", "turns", "turns/inner"]


def test_a_folder_swapped_for_a_link_is_not_followed_into_the_copy(
    etc: ConfigFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service user may own part of /etc and could have root copy the files of a private folder."""
    private = tmp_path / "private"
    private.mkdir(0o700)
    (private / "key").write_text("KEY")
    (private / "key").chmod(0o644)
    etc.write("service/key", "public")
    seen, looks = public_config_copy.find_public_entries, iter((False, True))

    def look(source: str) -> public_config_copy.CopyEntries:
        found = seen(source)
        if next(looks):  # the one that is copied by
            (etc.source / "service").rename(tmp_path / "was")
            (etc.source / "service").symlink_to(private)
        return found

    monkeypatch.setattr(public_config_copy, "find_public_entries", look)
    assert etc.names() == ["service"]


def test_the_next_process_reuses_a_complete_copy_and_repairs_a_damaged_one(etc: ConfigFolder) -> None:
    etc.write("hosts", "a")
    there = etc.shown
    number = (there / "hosts").stat().st_ino
    etc.copy = PublicConfigCopy(str(etc.source), etc.places)
    assert etc.shown == there
    assert (there / "hosts").stat().st_ino == number
    (there / "hosts").write_text("half")
    (there / "more").write_text("of before")
    (there.parent / "list").write_bytes(b'{"form": 1, "entr')
    etc.copy = PublicConfigCopy(str(etc.source), etc.places)
    assert etc.names() == ["hosts"]
    assert (etc.shown / "hosts").read_text() == "a"


def test_other_users_cannot_open_the_lock_file_of_a_copy(etc: ConfigFolder) -> None:
    etc.write("hosts", "a")
    etc.shown.parent.chmod(0o755)
    etc.copy = PublicConfigCopy(str(etc.source), etc.places)
    kept = etc.shown.parent
    assert kept.stat().st_mode & 0o777 == 0o711
    assert (kept / "changing").stat().st_mode & 0o077 == 0


def test_an_unused_copy_is_removed_when_another_copy_is_made(etc: ConfigFolder, tmp_path: Path) -> None:
    etc.write("hosts", "a")
    first = etc.shown
    used, unused = (tmp_path / name for name in ("used", "unused"))
    copies: list[PublicConfigCopy] = []
    for place in (used, unused):
        place.mkdir(0o755)
        copies.append(PublicConfigCopy(str(place), etc.places))
        copies[-1].get_current_copy_folder(0.0)
    del copies[1]
    os.close(etc.copy._use)  # pyright: ignore[reportPrivateUsage] - as the end of its process would
    etc.copy._use = -1  # pyright: ignore[reportPrivateUsage]
    (tmp_path / "third").mkdir(0o755)
    PublicConfigCopy(str(tmp_path / "third"), etc.places).get_current_copy_folder(0.0)
    assert not first.exists()
    assert Path(copies[0].get_current_copy_folder(0.0)).exists()


def test_a_mount_point_inside_a_private_folder_survives_a_refresh_by_another_process(etc: ConfigFolder) -> None:
    """A folder of tools in a private one, say."""
    etc.write("hosts", "a")
    etc.write("private/tools/run", "x", 0o755)
    etc.write("private/file", "x")
    (etc.source / "private").chmod(0o700)
    there = etc.shown
    for inner in ("private/tools", "private/file", "hosts"):
        etc.copy.ensure_private_mount_point(str(etc.source / inner), etc.now)
    assert etc.names() == ["hosts", "private", "private/file", "private/tools"]
    assert (there / "private/file").read_text() == "" and (there / "private/tools").is_dir()
    other = PublicConfigCopy(str(etc.source), etc.places)
    etc.write("more", "b")
    other.get_current_copy_folder(etc.now)
    assert etc.names() == ["hosts", "more", "private", "private/file", "private/tools"]
    assert other.get_current_copy_folder(etc.now) == str(there)


def test_files_beyond_the_limits_are_left_out_of_the_copy(etc: ConfigFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_config_copy, "MOST_BYTES", 10)
    etc.write("a/large", "x" * 8)
    etc.write("large", "x" * 11)
    etc.write("small", "x" * 6)
    assert etc.names() == ["a", "small"]
    monkeypatch.setattr(public_config_copy, "MOST_ENTRIES", 1)
    assert etc.names() == ["a"]


def test_a_copies_folder_that_others_can_write_is_refused_with_the_reason(etc: ConfigFolder, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies").chmod(0o777)
    with pytest.raises(ToolError, match="only this user can write") as caught:
        assert etc.shown
    assert caught.value.kind == "unavailable"


async def until(process: Process, word: bytes) -> None:
    out = b""
    while word not in out:
        piece = await process.read(1000)
        assert piece, out
        out += piece


@as_root
@pytest.mark.proves("S-01")
async def test_a_private_file_replaced_during_a_program_run_stays_hidden_from_it(
    confined: SandboxFolders, etc: ConfigFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount over the file would go with its name. In the place of /etc is a folder of this test's own, so nothing of
    the machine's is replaced."""
    etc.write("shadow", "OLD-HASH", 0o600)
    etc.write("hosts", "before")
    monkeypatch.setattr(mount_options, "_configuration", configuration := mount_options._ConfigurationFolderView())  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(configuration, "_copies", {"/etc": etc.copy})
    monkeypatch.setattr(configuration, "_scanned_at", float("inf"))
    look = "cd /etc; cat shadow; ls; cat hosts"
    process = await confined.start("/bin/bash", "-c", f"{look}; echo ready; read; {look}; cat new")
    try:
        await until(process, b"ready")
        etc.write("shadow", "NEW-HASH", 0o600)
        etc.write("new", "NEW-KEY", 0o600)
        etc.write("hosts", "after")
        assert etc.shown
        out, errors, _ = await process.communicate(b"\n", 10_000)
    finally:
        await process.kill()
    assert b"HASH" not in out + errors and b"NEW-KEY" not in out
    assert b"after" in out
