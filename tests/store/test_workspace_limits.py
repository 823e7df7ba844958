"""Folders that cannot be a workspace: by path, link or bind mount, and for each front end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from handrail.contract.agent_manifest import AgentAdditionalRoot
from handrail.contract.errors import StartError
from handrail.kernel.workspace_opening import open_kernel
from handrail.runtime.files.secure_open import resolve_further_roots
from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.store import state_folders
from handrail.store.state_folders import explain_too_broad_workspace, find_enclosing_system_folder, locate_folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate home for the current user, and no other users."""
    (home := tmp_path.resolve() / "people" / "ada").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for variable in state_folders._VARIABLES:  # pyright: ignore[reportPrivateUsage]
        monkeypatch.delenv(variable, raising=False)
    (accounts := tmp_path / "passwd").write_text("")
    monkeypatch.setattr(state_folders, "_ACCOUNTS", accounts)
    return home


PRIVATE = (
    *(
        ".ssh",
        ".gnupg",
        ".config",
        ".local",
        ".local/share",
        ".local/state/handrail",
        ".cache",
        ".aws",
        ".kube",
        ".docker",
    ),
    *(".mozilla", ".claude", ".cursor", ".codex", ".config/handrail", ".config/nvim/deep/er", ".anything-at-all"),
    *(".password-store", "Library", "Library/Keychains", "Library/Mobile Documents", "snap", "AppData/Roaming"),
)


@pytest.mark.parametrize("name", PRIVATE)
def test_a_folder_for_keys_or_settings_needs_the_allow_home_flag(home: Path, tmp_path: Path, name: str) -> None:
    (folder := home / name).mkdir(parents=True)
    with pytest.raises(StartError, match=r"keys, settings .*--allow-home"):
        locate_folders(folder, tmp_path / "state")
    assert locate_folders(folder, tmp_path / "state", allow_home=True).workspace == folder
    (link := tmp_path / "innocent").symlink_to(folder)
    with pytest.raises(StartError, match="--allow-home"):
        locate_folders(link, tmp_path / "state")


@pytest.mark.parametrize(
    "name",
    [
        *("project", "project/.config", "work/.hidden/project", "src/.ssh", "Documents/Library/x", "notes.d/.git"),
        *("Library/Mobile Documents/project", "Library/CloudStorage/Drive/project"),
    ],
)
def test_a_project_folder_below_a_home_folder_is_accepted_as_a_workspace(home: Path, tmp_path: Path, name: str) -> None:
    (folder := home / name).mkdir(parents=True)
    assert locate_folders(folder, tmp_path / "state").workspace == folder


def test_the_target_of_a_key_folder_link_in_the_home_folder_needs_the_flag(home: Path, tmp_path: Path) -> None:
    (kept := tmp_path / "vault" / "ssh" / "inner").mkdir(parents=True)
    (home / ".ssh").symlink_to(kept.parent)
    for folder in (kept.parent.parent, kept.parent, kept):
        with pytest.raises(StartError, match="--allow-home"):
            locate_folders(folder, tmp_path / "state")
    (dotfiles := home / "src" / "dotfiles").mkdir(parents=True)
    (home / ".dotfiles").symlink_to(dotfiles)
    assert locate_folders(dotfiles, tmp_path / "state").workspace == dotfiles, "a project that a link leads to"


@pytest.mark.parametrize("name", ["XDG_CONFIG_HOME", "GNUPGHOME", "CLAUDE_CONFIG_DIR", "DOCKER_CONFIG"])
def test_a_folder_named_by_an_environment_variable_for_settings_needs_the_flag(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (place := tmp_path / "elsewhere" / "below").mkdir(parents=True)
    assert explain_too_broad_workspace(place) is None
    monkeypatch.setenv(name, str(place.parent))
    for folder in (place.parent, place):
        assert name in (explain_too_broad_workspace(folder) or "")


@pytest.mark.parametrize(
    ("line", "refused"),
    [("bo:x:1001:1001::{}:/bin/sh", True), ("root:x:0:0::{}:/bin/sh", True), ("www:x:33:33::{}:/bin/false", False)],
)
def test_the_home_folder_of_another_user_needs_the_flag(home: Path, tmp_path: Path, line: str, refused: bool) -> None:
    (other := tmp_path.resolve() / "far" / "bo").mkdir(parents=True)
    (other / ".ssh").mkdir()
    (tmp_path / "passwd").write_text(f"nonsense\n{line.format(other)}\n")
    assert [explain_too_broad_workspace(folder) is not None for folder in (other, other.parent, other / ".ssh")] == [
        refused
    ] * 3


@pytest.mark.parametrize(
    "place",
    [
        *(
            "/",
            "/home",
            "/Users",
            "/home/somebody",
            "/root",
            "/tmp",
            "/var/tmp",
            "/var",
            "/opt",
            "/mnt",
            "/media",
            "/dev/shm",
        ),
        *(
            "/etc",
            "/etc/ssh",
            "/usr",
            "/usr/lib",
            "/usr/src",
            "/boot",
            "/proc",
            "/proc/1",
            "/sys/kernel",
            "/dev",
            "/dev/pts",
        ),
        *("/run", "/run/user/1000/x", "/var/log", "/var/spool/cron", "/bin", "/System/Library"),
    ],
)
def test_a_system_folder_needs_the_flag(home: Path, place: str) -> None:
    folder = Path(place)
    assert (explain_too_broad_workspace(folder) or find_enclosing_system_folder(folder)) is not None


@pytest.mark.parametrize(
    "place",
    ["/usr/src/app", "/srv/site", "/opt/project", "/var/www/site", "/workspace", "/app", "/tmp/x", "/mnt/x/project"],
)
def test_a_common_project_folder_outside_the_home_folder_needs_no_flag(home: Path, place: str) -> None:
    assert (explain_too_broad_workspace(Path(place)) or find_enclosing_system_folder(Path(place))) is None


def test_a_bind_mount_of_a_protected_folder_is_recognised(home: Path, tmp_path: Path) -> None:
    for name in (".ssh", "project"):
        (home / name).mkdir()
    bound = tmp_path / "bound"
    code = (
        "import sys\nfrom pathlib import Path\nfrom handrail.store.state_folders import find_enclosing_system_folder, explain_too_broad_workspace\n"
        "found = [Path(place) for place in sys.argv[1:]]\n"
        "print([(explain_too_broad_workspace(one) or find_enclosing_system_folder(one)) is not None for one in found])"
    )
    mounts = {"ssh": home / ".ssh", "home": home, "etc": Path("/etc"), "project": home / "project"}
    argv = [next(find_bubblewrap_programs()), "--dev-bind", "/", "/"]
    for name, source in mounts.items():
        (bound / name).mkdir(parents=True)
        argv += ["--bind", str(source), str(bound / name)]
    asked = [str(bound / name) for name in (*mounts, "home/.ssh")]
    done = subprocess.run([*argv, sys.executable, "-c", code, *asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([True, True, True, False, True])


async def test_the_flag_is_required_for_opening_and_for_joining_a_kernel(home: Path, tmp_path: Path) -> None:
    (keys := home / ".ssh").mkdir()
    with pytest.raises(StartError, match="--allow-home"):
        async with open_kernel(keys, state=tmp_path / "state"):
            pass
    (config := tmp_path / "handrail.toml").write_text("")
    async with open_kernel(keys, state=tmp_path / "state", config=config, allow_home=True):
        with pytest.raises(StartError, match="--allow-home"):  # it would be joined
            async with open_kernel(keys, state=tmp_path / "state", config=config):
                pass


def test_a_folder_of_keys_is_refused_as_a_further_root(home: Path, tmp_path: Path) -> None:
    (keys := home / ".config" / "gh").mkdir(parents=True)
    for path in (str(keys), "~/.config", "~/.config/gh"):
        _, [(place, problem)] = resolve_further_roots([AgentAdditionalRoot(path=path)], str(tmp_path / "ws"), [])
        assert place == "roots[0].path" and "keys, settings" in problem
