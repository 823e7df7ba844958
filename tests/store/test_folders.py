"""State folders: private, outside the workspace, and refused with a next step otherwise."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.contract.errors import StartError, UsageError
from handrail.store.state_folders import StateFolders, locate_folders, prepare_folders


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def prepared(place: Place) -> StateFolders:
    return prepare_folders(place.workspace, place.state)


def test_every_state_folder_is_private_to_its_user(place: Place) -> None:
    folders = prepared(place)
    session = folders.prepare_session_output("ses_1"), folders.prepare_session_scratch("ses_1")
    for folder in (
        folders.workspace_state_folder,
        folders.artifact_folder,
        folders.workspace_state_folder.parent,
        *session,
        *(s.parent for s in session),
    ):
        assert mode_of(folder) == 0o700, folder


def test_two_paths_to_one_workspace_share_state_and_two_workspaces_do_not(place: Place, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(place.workspace)
    other = tmp_path / "workspace2"
    other.mkdir()
    assert locate_folders(link, place.state) == locate_folders(place.workspace / ".." / "workspace", place.state)
    assert (
        locate_folders(other, place.state).workspace_state_folder
        != locate_folders(place.workspace, place.state).workspace_state_folder
    )


def test_session_folders_are_separate_from_the_database_and_from_each_other(place: Place) -> None:
    folders = prepared(place)
    spots = [
        folders.workspace_state_folder,
        folders.prepare_session_output("a"),
        folders.prepare_session_output("b"),
        folders.prepare_session_scratch("a"),
        folders.prepare_session_scratch("b"),
    ]
    for one in spots:
        for other in spots:
            assert one == other or not one.is_relative_to(other)


@pytest.mark.parametrize("session_id", ["", "..", "a/b", "../../x", ".hidden", "a\0b", "a\n", "-rf", "x" * 65, "ü"])
def test_an_invalid_session_id_is_refused(place: Place, session_id: str) -> None:
    folders = prepared(place)
    for use in (folders.prepare_session_output, folders.prepare_session_scratch, folders.remove_session_files):
        with pytest.raises(UsageError, match="session id"):
            use(session_id)


def test_state_inside_the_workspace_is_refused_even_through_a_link(place: Place, tmp_path: Path) -> None:
    inside = place.workspace / "deep" / "state"
    way_around = tmp_path / "way-around"
    way_around.symlink_to(place.workspace)
    for state in (inside, place.workspace, way_around / "state"):
        with pytest.raises(StartError, match=r"is inside the workspace.*--state"):
            prepare_folders(place.workspace, state)
    assert not inside.exists()


def test_a_workspace_inside_the_state_folder_is_refused(place: Place) -> None:
    folders = prepared(place)
    folders.search_cache_folder.mkdir()
    for own in (folders.workspace_state_folder, folders.search_cache_folder):
        with pytest.raises(StartError, match="is inside the state folder"):
            prepare_folders(own, place.state)


def test_the_state_folder_comes_from_the_argument_then_the_environment_then_the_platform(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_STATE", str(tmp_path / "from-environment"))
    assert locate_folders(place.workspace, place.state).state == place.state.resolve()
    assert locate_folders(place.workspace).state == (tmp_path / "from-environment").resolve()
    monkeypatch.delenv("HANDRAIL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert locate_folders(place.workspace).state.name == "handrail"


def test_a_state_folder_in_the_home_of_an_unknown_user_is_named(place: Place) -> None:
    with pytest.raises(StartError) as caught:
        locate_folders(place.workspace, "~no-such-user/state")
    assert "~no-such-user/state" in str(caught.value) and "HOME is not set" not in str(caught.value)


def test_a_home_folder_or_the_whole_file_system_needs_the_flag(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "people" / "ada"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    state = tmp_path / "elsewhere"
    for broad in (home, home.parent, Path("/")):
        with pytest.raises(StartError, match="--allow-home"):
            locate_folders(broad, state)
    assert locate_folders(home, state, allow_home=True).workspace == home.resolve()
    project = home / "project"
    project.mkdir()
    assert locate_folders(project, state).workspace == project.resolve()


def test_a_workspace_that_is_not_a_folder_is_refused(place: Place) -> None:
    file = place.workspace / "file"
    file.write_text("")
    for wrong in (file, place.workspace / "absent", f"{place.workspace}/nul\0"):
        with pytest.raises(StartError, match="--workspace DIR"):
            locate_folders(wrong, place.state)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_a_state_folder_that_other_users_can_access_is_refused(place: Place, mode: int) -> None:
    own = prepared(place).workspace_state_folder
    own.chmod(mode)
    with pytest.raises(StartError, match=r"Other users can access.*chmod 700"):
        prepared(place)


def test_a_state_folder_that_other_users_can_write_is_refused(place: Place) -> None:
    place.state.mkdir()
    place.state.chmod(0o777)
    with pytest.raises(StartError, match="Other users can write"):
        prepared(place)


def test_a_link_in_place_of_a_state_folder_is_refused(place: Place, tmp_path: Path) -> None:
    target = tmp_path / "trap"
    target.mkdir(mode=0o700)
    place.state.mkdir(mode=0o700)
    (place.state / "ws").symlink_to(target)
    with pytest.raises(StartError, match="is not a folder"):
        prepared(place)
    assert not list(target.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_state_folder_of_another_user_is_refused(place: Place) -> None:
    own = prepared(place).workspace_state_folder
    os.chown(own, 65534, 65534)
    with pytest.raises(StartError, match="belongs to user 65534"):
        prepared(place)


def test_an_unwritable_state_folder_is_named_with_the_next_step(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    for state in (file / "state", Path("/proc/handrail-state")):
        with pytest.raises(StartError, match=r"cannot be written: .*runs no call.*--state DIR or HANDRAIL_STATE"):
            prepare_folders(place.workspace, state)


def test_removing_the_files_of_a_session_follows_no_link(place: Place, tmp_path: Path) -> None:
    folders = prepared(place)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    scratch, output, neighbour = (
        folders.prepare_session_scratch("ses_1"),
        folders.prepare_session_output("ses_1"),
        folders.prepare_session_scratch("ses_2"),
    )
    (scratch / "link").symlink_to(precious)
    (scratch / "read-only").mkdir()
    (scratch / "read-only" / "file").write_text("")
    (scratch / "read-only").chmod(0o500)
    (output / "call.txt").write_text("")
    folders.remove_session_files("ses_1")
    folders.remove_session_files("ses_1")
    assert not scratch.exists() and not output.exists() and neighbour.exists()
    assert (precious / "file").read_text() == "kept"
