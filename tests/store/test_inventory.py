"""What is kept is listed with its workspace and size, and removed without touching anything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.contract.errors import StartError
from handrail.store.folders import Folders, locate
from handrail.store.inventory import inventory, remove, sweep, tree_bytes

pytestmark = pytest.mark.proves("F-12")


async def used(place: Place, *sessions: str) -> Folders:
    """A workspace that was opened once, with files of sessions."""
    store = place.open()
    for session in sessions:
        (store.folders.output(session) / "1_0.txt").write_text("x" * 1000)
        (store.folders.scratch(session) / "cache").write_text("y" * 1000)
    await store.aclose()
    return store.folders


def another(place: Place, tmp_path: Path, name: str) -> Place:
    (tmp_path / name).mkdir()
    return Place(tmp_path / name, place.state)


async def test_each_workspace_is_listed_with_its_path_size_and_last_use(place: Place, tmp_path: Path) -> None:
    first, second = await used(place, "ses_1"), await used(another(place, tmp_path, "other"))
    os.utime(first.database, ns=(0, 1_000))
    kept = inventory(place.state)
    assert [one.workspace for one in kept] == [second.workspace, first.workspace]
    assert kept[1].key == first.key and kept[1].used_ns == 1_000 and not kept[1].gone and kept[1].holder is None
    assert kept[1].bytes == tree_bytes(first.own) + 2000


def test_a_state_folder_that_was_never_used_is_empty(tmp_path: Path) -> None:
    assert inventory(tmp_path / "nothing") == []


async def test_a_workspace_that_is_gone_is_known_by_its_name(place: Place, tmp_path: Path) -> None:
    folders = await used(place)
    place.workspace.rename(tmp_path / "elsewhere")
    (kept,) = inventory(place.state)
    assert kept.gone and kept.workspace == folders.workspace
    # What lies there now is something else.
    place.workspace.symlink_to(tmp_path / "elsewhere")
    assert inventory(place.state)[0].gone


@pytest.mark.parametrize("name", [b"", b"/somewhere/else", b"\xff" * 10, b"\0"])
async def test_a_name_that_is_not_the_keys_own_is_not_believed(place: Place, name: bytes) -> None:
    folders = await used(place)
    folders.name.write_bytes(name)
    (kept,) = inventory(place.state)
    assert kept.workspace is None and not kept.gone
    folders.name.unlink()
    os.mkfifo(folders.name)
    assert inventory(place.state)[0].workspace is None


async def test_the_name_is_written_again_where_it_was_lost(place: Place) -> None:
    folders = await used(place)
    folders.name.write_bytes(b"/somewhere/else/that/is/longer/than/it/was")
    await used(place)
    assert folders.name.read_bytes() == os.fsencode(folders.workspace)


async def test_removing_takes_everything_of_the_one_workspace(place: Place, tmp_path: Path) -> None:
    folders = await used(place, "ses_1", "ses_2")
    other = await used(another(place, tmp_path, "other"), "ses_1")
    before = tree_bytes(place.state / "output" / other.key)
    assert remove(place.state, folders.key) == []
    assert not [path for path in place.state.rglob("*") if folders.key in path.name]
    (kept,) = inventory(place.state)
    assert kept.key == other.key and tree_bytes(place.state / "output" / other.key) == before
    assert remove(place.state, folders.key) == []
    await used(place)
    assert len(inventory(place.state)) == 2


async def test_damaged_state_is_listed_and_removed_like_any_other(place: Place) -> None:
    folders = await used(place)
    folders.database.write_bytes(b"no database")
    (kept,) = inventory(place.state)
    assert remove(place.state, kept.key) == [] and inventory(place.state) == []


async def test_what_a_living_process_holds_is_refused(place: Place) -> None:
    store = place.open(face="mcp")
    try:
        (kept,) = inventory(place.state)
        assert kept.holder is not None and "handrail mcp" in kept.holder and "alive" in kept.holder
        with pytest.raises(StartError, match="in use by handrail mcp"):
            remove(place.state, kept.key)
        assert store.folders.database.exists()
    finally:
        await store.aclose()
    assert remove(place.state, kept.key) == []


async def test_no_link_is_followed_out_of_the_state(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("not ours")
    folders = await used(place, "ses_1")
    (folders.outputs / "ses_2").symlink_to(outside, target_is_directory=True)
    (folders.artifacts / "ab").symlink_to(outside, target_is_directory=True)
    size = tree_bytes(folders.own)
    assert size < tree_bytes(folders.own) + tree_bytes(outside)
    assert remove(place.state, folders.key) == []
    assert (outside / "file").read_text() == "not ours"


@pytest.mark.parametrize("part", ["ws", "output", "scratch"])
async def test_a_link_in_the_place_of_a_part_of_the_state_is_refused(place: Place, tmp_path: Path, part: str) -> None:
    folders = await used(place, "ses_1")
    elsewhere = tmp_path / "elsewhere"
    (place.state / part).rename(elsewhere)
    (place.state / part).symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(StartError, match="is not a folder"):
        remove(place.state, folders.key)
    with pytest.raises(StartError, match="is not a folder"):
        inventory(place.state)
    assert any((elsewhere / folders.key).iterdir())


async def test_what_a_killed_removal_put_aside_goes_with_the_next(place: Place) -> None:
    folders = await used(place, "ses_1")
    for part in ("ws", "output"):
        (place.state / part / folders.key).rename(place.state / part / f".removed-{folders.key}-00000000")
    assert [one.key for one in inventory(place.state)] == [folders.key]
    assert sweep(place.state) == []
    assert [path.name for path in (place.state / "ws").iterdir()] == []


async def test_what_cannot_be_removed_is_said(place: Place) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing keeps root from removing")
    folders = await used(place)
    (place.state / "ws").chmod(0o500)
    try:
        problems = remove(place.state, folders.key)
    finally:
        (place.state / "ws").chmod(0o700)
    assert problems and str(folders.own) in problems[0]


def test_a_state_folder_of_somebody_else_is_left_alone(place: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make one")
    place.state.mkdir()
    os.chown(place.state, 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534"):
        remove(place.state, locate(place.workspace, place.state).key)
