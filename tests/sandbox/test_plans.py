"""A cached plan equals a new one, whatever has changed on the machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import SHELL_ARGV, ProgramSpec, SandboxProfile
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires
from handrail.sandbox.view.launch_plans import LaunchPlan, LaunchPlanner
from handrail.sandbox.view.sandbox_user import LookupCache

TEXT = ProgramSpec((*SHELL_ARGV, "true"))


class PlanFixture:
    """A session's folders, and one who plans and remembers."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("home/work/.git/hooks", "home/work/deep/er", "scratch", "tool", "extra", "state"):
            (place / name).mkdir(parents=True, exist_ok=True)
        for name in ("home/work/.env", "home/work/.git/config"):
            (place / name).write_text("")
        self.planning = LaunchPlanner()
        self.work = f"{place}/home/work"
        self.profile = SandboxProfile(
            self.work,
            f"{place}/scratch",
            readable=(f"{place}/tool", f"{place}/later"),
            writable=(f"{place}/extra",),
            hidden=(f"{place}/state",),
            masked=(f"{self.work}/.env",),
            pinned=(f"{self.work}/.git/hooks", f"{self.work}/.git/config"),
        )
        layer = CapabilityLayer(
            "test", (self.work, f"{place}/extra"), (self.work, f"{place}/extra"), (), (ShellRequires(cmd="*"),)
        )
        self.capabilities = CapabilitySet((layer,))

    async def plan(self, planning: LaunchPlanner | None = None) -> LaunchPlan | tuple[str, str]:
        try:
            return await (planning or self.planning).plan(self.capabilities, self.profile, TEXT, ready_made=True)
        except ToolError as error:
            return error.kind, error.text

    async def agrees(self) -> LaunchPlan | tuple[str, str]:
        found = await self.plan()
        assert found == await self.plan(LaunchPlanner())
        return found


@pytest.fixture
def desk(tmp_path: Path) -> PlanFixture:
    return PlanFixture(tmp_path.resolve())


async def test_a_launch_plan_is_reused_while_nothing_has_changed(desk: PlanFixture) -> None:
    first = await desk.agrees()
    (Path(desk.work) / "new").write_text("what a workspace holds is not part of it")
    second = await desk.plan()
    assert isinstance(first, LaunchPlan) and isinstance(second, LaunchPlan)
    assert second.made is first.made


def _moved_with_a_link_left(path: str) -> None:
    os.rename(path, f"{path}-away")
    os.symlink(f"{path}-away", path)


def _replaced(path: str) -> None:
    if os.path.isdir(path):
        os.rename(path, f"{path}-old")
        Path(path).mkdir()
        return
    Path(f"{path}-new").write_text("")
    os.rename(f"{path}-new", path)


def _gone(path: str) -> None:
    os.rename(path, f"{path}-gone")


CHANGES: dict[str, Callable[[PlanFixture], object]] = {
    "a protected file appears": lambda desk: (Path(desk.work) / "handrail.toml").write_text(""),
    "a link of its name appears, to nothing": lambda desk: (Path(desk.work) / "handrail.toml").symlink_to("nothing"),
    "the workspace is replaced": lambda desk: _replaced(desk.work),
    "the workspace is gone": lambda desk: _gone(desk.work),
    "the folder around the workspace becomes a link": lambda desk: _moved_with_a_link_left(f"{desk.place}/home"),
    "the workspace becomes a link": lambda desk: _moved_with_a_link_left(desk.work),
    "the workspace becomes a file": lambda desk: (_gone(desk.work), Path(desk.work).write_text("")),
    "a protected file is replaced": lambda desk: _replaced(f"{desk.work}/.git/config"),
    "a protected folder is gone": lambda desk: _gone(f"{desk.work}/.git/hooks"),
    "the folder around what is protected is replaced": lambda desk: _replaced(f"{desk.work}/.git"),
    "the folder around what is protected becomes a link": lambda desk: _moved_with_a_link_left(f"{desk.work}/.git"),
    "what is protected becomes a link": lambda desk: _moved_with_a_link_left(f"{desk.work}/.git/config"),
    "a masked file is replaced": lambda desk: _replaced(f"{desk.work}/.env"),
    "a masked file is gone": lambda desk: _gone(f"{desk.work}/.env"),
    "what is hidden is gone": lambda desk: _gone(f"{desk.place}/state"),
    "what is hidden becomes a link": lambda desk: _moved_with_a_link_left(f"{desk.place}/state"),
    "a tool's folder comes": lambda desk: (desk.place / "later").mkdir(),
    "a tool's folder goes": lambda desk: _gone(f"{desk.place}/tool"),
    "a tool's folder leads elsewhere": lambda desk: _moved_with_a_link_left(f"{desk.place}/tool"),
    "a further folder goes": lambda desk: _gone(f"{desk.place}/extra"),
    "another interpreter is chosen": lambda desk: (Path(desk.work) / ".python-version").write_text("3.99"),
}


@pytest.mark.proves("S-10")
@pytest.mark.parametrize("change", CHANGES)
async def test_a_plan_is_rebuilt_after_each_relevant_change(desk: PlanFixture, change: str) -> None:
    first = await desk.agrees()
    assert isinstance(first, LaunchPlan)
    CHANGES[change](desk)
    second = await desk.agrees()
    assert not isinstance(second, LaunchPlan) or second.made is not first.made


@pytest.mark.parametrize("name", ["PATH", "PYENV_VERSION", "LANG", "LC_ALL", "TZ"])
async def test_a_plan_is_rebuilt_when_a_variable_that_it_passes_on_changes(
    desk: PlanFixture, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("/usr/bin", None, "C.UTF-8"):
        before = await desk.agrees()
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
        after = await desk.agrees()
        assert isinstance(before, LaunchPlan) and isinstance(after, LaunchPlan)
        assert after.made is not before.made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
async def test_a_plan_is_rebuilt_when_the_workspace_gets_another_owner(desk: PlanFixture) -> None:
    for folder in (desk.place, *desk.place.parents):
        folder.chmod(folder.stat().st_mode | 0o001)
    first = await desk.agrees()
    os.chown(desk.work, 65_533, 65_533)
    given = await desk.agrees()
    assert isinstance(first, LaunchPlan) and isinstance(given, LaunchPlan)
    assert (first.made.person, given.made.person is None) == (None, False)
    again = await desk.agrees()
    assert isinstance(again, LaunchPlan) and again.made is given.made
    (desk.place / "home").chmod(0o700)  # which keeps that person from it
    staged = await desk.agrees()
    assert isinstance(staged, LaunchPlan) and desk.work in staged.made.staged
    os.chown(desk.profile.scratch, 0, 0)
    await desk.agrees()
    assert Path(desk.profile.scratch).stat().st_uid == 65_533


def _open(_host: str, _port: int) -> None:
    return None


async def test_a_plan_is_reused_for_calls_with_another_folder_or_environment(desk: PlanFixture) -> None:
    first = await desk.agrees()
    desk.profile = dataclasses.replace(desk.profile, cwd=f"{desk.work}/deep", check_host=_open, environment={"X": "1"})
    second = await desk.agrees()
    assert isinstance(first, LaunchPlan) and isinstance(second, LaunchPlan)
    assert second.made is first.made and ("X", "1") in second.environment
    desk.profile = dataclasses.replace(desk.profile, cwd="/elsewhere")
    assert (await desk.agrees())[0] == "denied"  # pyright: ignore[reportIndexIssue]


async def test_a_plan_is_not_reused_for_other_capabilities(desk: PlanFixture) -> None:
    first = await desk.agrees()
    layer = desk.capabilities.layers[0]
    for capabilities in (
        CapabilitySet((dataclasses.replace(layer, fs_write=()),)),
        CapabilitySet((dataclasses.replace(layer, fs_read=(f"{desk.work}/deep",), fs_write=()),)),
        CapabilitySet((dataclasses.replace(layer, hosts=("example.org",)),)),
    ):
        desk.capabilities = capabilities
        second = await desk.agrees()
        assert second != first
        first = second


async def test_alternating_capability_sets_each_keep_their_launch_plan(desk: PlanFixture) -> None:
    layer = desk.capabilities.layers[0]
    sets = [CapabilitySet((dataclasses.replace(layer, owner=str(number)),)) for number in range(4)]
    made: list[object] = []
    for desk.capabilities in (*sets, *sets):
        found = await desk.agrees()
        assert isinstance(found, LaunchPlan)
        made.append(found.made)
    assert all(again is first for first, again in zip(made[:4], made[4:], strict=True))


NAMES = (
    "home",
    "home/work",
    "home/work/.git",
    "home/work/.git/hooks",
    "home/work/handrail.toml",
    "tool",
    "state",
    "later",
)
DEEDS = ("remove", "folder", "file", "link", "dangle")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deeds=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(DEEDS)), min_size=1, max_size=6))
async def test_a_cached_launch_plan_equals_a_new_one_after_any_changes(
    tmp_path: Path, deeds: list[tuple[str, str]]
) -> None:
    place = tmp_path.resolve() / "desk"
    shutil.rmtree(place, ignore_errors=True)
    desk = PlanFixture(place)
    await desk.agrees()
    for name, deed in deeds:
        path = place / name
        try:
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
            match deed:
                case "folder":
                    path.mkdir()
                case "file":
                    path.write_text("")
                case "link":
                    path.symlink_to(place / "extra")
                case "dangle":
                    path.symlink_to(place / "nowhere")
                case _:
                    pass
        except (FileNotFoundError, NotADirectoryError):
            continue  # what is around it has gone
        await desk.agrees()


def test_the_lookup_cache_resolves_paths_as_the_standard_library_does(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    (place / "a" / "b").mkdir(parents=True)
    (place / "link").symlink_to(place / "a")
    (place / "loop").symlink_to(place / "loop")
    for name in (
        "a",
        "a/b",
        "link",
        "link/b",
        "loop",
        "loop/x",
        "none",
        "a/none",
        "a/../a",
        "a//b",
        "a/b/",
        "a/./b",
        ".",
    ):
        path = f"{place}/{name}"
        real = os.path.realpath(path)
        assert LookupCache().resolve(path) == real
        assert LookupCache().is_canonical(path) == (path == real and os.path.exists(path))
    assert LookupCache().resolve("/") == "/" and LookupCache().is_canonical("/")


def test_the_lookup_cache_repeats_no_lookup(tmp_path: Path) -> None:
    look, asked = LookupCache(), list[str]()

    def said(word: str) -> int:
        asked.append(word)
        return len(asked)

    assert (look(said, "a"), look(said, "a"), look(said, "b")) == (1, 1, 2)
    assert look.identify(f"{tmp_path}/x") is None
    (tmp_path / "x").touch()
    assert look.identify(f"{tmp_path}/x") is None
    assert not look.are_lookups_unchanged() and asked == ["a", "b"]
    (tmp_path / "x").unlink()
    assert not look.are_lookups_unchanged() and asked == ["a", "b", "a"]
