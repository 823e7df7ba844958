"""Stored state is listed with its workspace and size, and removed without touching anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.contract.errors import StartError
from handrail.store.state_folders import StateFolders, locate_folders
from handrail.store.state_inventory import (
    finish_interrupted_removals,
    list_stored_state,
    measure_folder_size,
    remove_workspace_state,
)

pytestmark = pytest.mark.proves("F-12")


async def used(place: Place, *sessions: str) -> StateFolders:
    """A workspace that was opened once, with files of sessions."""
    store = place.open()
    for session in sessions:
        (store.folders.prepare_session_output(session) / "1_0.txt").write_text("x" * 1000)
        (store.folders.prepare_session_scratch(session) / "cache").write_text("y" * 1000)
    await store.aclose()
    return store.folders


def another(place: Place, tmp_path: Path, name: str) -> Place:
    (tmp_path / name).mkdir()
    return Place(tmp_path / name, place.state)


async def test_each_workspace_is_listed_with_its_path_size_and_last_use(place: Place, tmp_path: Path) -> None:
    first, second = await used(place, "ses_1"), await used(another(place, tmp_path, "other"))
    os.utime(first.database_file, ns=(0, 1_000))
    kept = list_stored_state(place.state)
    assert [one.workspace for one in kept] == [second.workspace, first.workspace]
    assert (
        kept[1].key == first.key
        and kept[1].used_ns == 1_000
        and not kept[1].workspace_missing
        and kept[1].holder is None
    )
    assert kept[1].size_bytes == measure_folder_size(first.workspace_state_folder) + 2000


def test_an_unused_state_folder_has_no_stored_state(tmp_path: Path) -> None:
    assert list_stored_state(tmp_path / "nothing") == []


async def test_state_of_a_missing_workspace_is_listed_with_its_path(place: Place, tmp_path: Path) -> None:
    folders = await used(place)
    place.workspace.rename(tmp_path / "elsewhere")
    (kept,) = list_stored_state(place.state)
    assert kept.workspace_missing and kept.workspace == folders.workspace
    # What lies there now is something else.
    place.workspace.symlink_to(tmp_path / "elsewhere")
    assert list_stored_state(place.state)[0].workspace_missing


@pytest.mark.parametrize("name", [b"", b"/somewhere/else", b"\xff" * 10, b"\0"])
async def test_a_workspace_path_that_does_not_match_the_state_key_is_ignored(place: Place, name: bytes) -> None:
    folders = await used(place)
    folders.workspace_path_file.write_bytes(name)
    (kept,) = list_stored_state(place.state)
    assert kept.workspace is None and not kept.workspace_missing
    folders.workspace_path_file.unlink()
    os.mkfifo(folders.workspace_path_file)
    assert list_stored_state(place.state)[0].workspace is None
    await used(place)  # a pipe is not waited for


async def test_a_wrong_workspace_path_is_rewritten_at_the_next_use(place: Place) -> None:
    folders = await used(place)
    folders.workspace_path_file.write_bytes(b"/somewhere/else/that/is/longer/than/it/was")
    await used(place)
    assert folders.workspace_path_file.read_bytes() == os.fsencode(folders.workspace)


async def test_removing_the_state_of_a_workspace_removes_all_of_it_and_nothing_else(
    place: Place, tmp_path: Path
) -> None:
    folders = await used(place, "ses_1", "ses_2")
    other = await used(another(place, tmp_path, "other"), "ses_1")
    before = measure_folder_size(place.state / "output" / other.key)
    assert remove_workspace_state(place.state, folders.key) == []
    assert not [path for path in place.state.rglob("*") if folders.key in path.name]
    (kept,) = list_stored_state(place.state)
    assert kept.key == other.key and measure_folder_size(place.state / "output" / other.key) == before
    assert remove_workspace_state(place.state, folders.key) == []
    await used(place)
    assert len(list_stored_state(place.state)) == 2


async def test_damaged_state_is_listed_and_can_be_removed(place: Place) -> None:
    folders = await used(place)
    folders.database_file.write_bytes(b"no database")
    (kept,) = list_stored_state(place.state)
    assert remove_workspace_state(place.state, kept.key) == [] and list_stored_state(place.state) == []


async def test_state_held_by_a_running_process_is_not_removed(place: Place) -> None:
    store = place.open(frontend="mcp")
    try:
        (kept,) = list_stored_state(place.state)
        assert kept.holder is not None and "handrail mcp" in kept.holder and "alive" in kept.holder
        with pytest.raises(StartError, match="in use by handrail mcp"):
            remove_workspace_state(place.state, kept.key)
        assert store.folders.database_file.exists()
    finally:
        await store.aclose()
    assert remove_workspace_state(place.state, kept.key) == []


async def test_no_link_out_of_the_state_folder_is_followed(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("not ours")
    folders = await used(place, "ses_1")
    (folders.session_outputs_folder / "ses_2").symlink_to(outside, target_is_directory=True)
    (folders.artifact_folder / "ab").symlink_to(outside, target_is_directory=True)
    size = measure_folder_size(folders.workspace_state_folder)
    assert size < measure_folder_size(folders.workspace_state_folder) + measure_folder_size(outside)
    assert remove_workspace_state(place.state, folders.key) == []
    assert (outside / "file").read_text() == "not ours"


@pytest.mark.parametrize("part", ["ws", "output", "scratch"])
async def test_a_link_in_place_of_a_part_of_the_state_is_refused(place: Place, tmp_path: Path, part: str) -> None:
    folders = await used(place, "ses_1")
    elsewhere = tmp_path / "elsewhere"
    (place.state / part).rename(elsewhere)
    (place.state / part).symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(StartError, match="is not a folder"):
        remove_workspace_state(place.state, folders.key)
    with pytest.raises(StartError, match="is not a folder"):
        list_stored_state(place.state)
    assert any((elsewhere / folders.key).iterdir())


async def test_the_next_removal_finishes_an_interrupted_one(place: Place) -> None:
    folders = await used(place, "ses_1")
    for part in ("ws", "output"):
        (place.state / part / folders.key).rename(place.state / part / f".removed-{folders.key}-00000000")
    assert [one.key for one in list_stored_state(place.state)] == [folders.key]
    assert finish_interrupted_removals(place.state) == []
    assert [path.name for path in (place.state / "ws").iterdir()] == []


async def test_a_folder_that_cannot_be_removed_is_reported(place: Place) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing keeps root from removing")
    folders = await used(place)
    (place.state / "ws").chmod(0o500)
    try:
        problems = remove_workspace_state(place.state, folders.key)
    finally:
        (place.state / "ws").chmod(0o700)
    assert problems and str(folders.workspace_state_folder) in problems[0]


def test_a_state_folder_of_another_user_is_not_removed(place: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    place.state.mkdir()
    os.chown(place.state, 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534"):
        remove_workspace_state(place.state, locate_folders(place.workspace, place.state).key)
