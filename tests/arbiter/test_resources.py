"""Lock templates and arguments become resources: two spellings of one resource give one lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.arbiter.lock_table import LockResolver, RequiredLock, do_locks_conflict
from handrail.contract.errors import ToolError
from handrail.contract.tool.spec import LockSpec, SideEffect, ToolSpec
from handrail.runtime.files.session_roots import FurtherRoots, SessionRoots

pytestmark = pytest.mark.proves("L-04")


@pytest.fixture
def roots(tmp_path: Path) -> SessionRoots:
    workspace = tmp_path / "ws"
    (workspace / "src" / "deep").mkdir(parents=True)
    (workspace / "src" / "a.py").write_text("a")
    (workspace / "link.py").symlink_to("src/a.py")
    (workspace / "linked").symlink_to("src")
    (tmp_path / "output").mkdir()
    return SessionRoots(workspace, [tmp_path / "output"])


def spec(*locks: str, side_effect: SideEffect = "write", concurrency_safe: bool = True) -> ToolSpec:
    return ToolSpec(
        "tool",
        "…",
        locks=tuple(LockSpec.parse(lock) for lock in locks),
        side_effect=side_effect,
        concurrency_safe=concurrency_safe,
    )


def wants(roots: SessionRoots, lock: str, **arguments: Any) -> tuple[RequiredLock, ...]:
    return LockResolver().resolve(spec(lock), arguments, roots)


@pytest.mark.parametrize(
    "spelling",
    [
        "src/a.py",
        "./src//a.py",
        "src/../src/./a.py",
        "linked/a.py",
        "link.py",
        "linked/deep/../a.py",
        "{workspace}/src/a.py",
        "../ws/src/a.py",
    ],
)
def test_every_spelling_of_a_file_is_one_resource(roots: SessionRoots, spelling: str) -> None:
    path = spelling.replace("{workspace}", roots.workspace)
    assert wants(roots, "file:{path}:X", path=path) == ((("workspace", "src", "a.py"), "X"),)
    assert wants(roots, "file:<path>:X", path=path) == ((("workspace", "src", "a.py"), "X"),)


@pytest.mark.proves("L-03")
def test_a_lock_on_a_folder_or_the_workspace_covers_a_file_in_it(roots: SessionRoots) -> None:
    file = wants(roots, "file:{path}:X", path="src/a.py")
    for around in (wants(roots, "file:{path}:S", path="src"), wants(roots, "workspace:S")):
        assert do_locks_conflict(file, around)
    assert not do_locks_conflict(file, wants(roots, "file:{path}:S", path="src/deep"))


@given(st.lists(st.sampled_from([".", "..", "", "src", "deep", "new", "linked"]), max_size=6))
def test_a_path_and_its_canonical_form_are_one_resource(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    workspace = tmp_path_factory.mktemp("ws", numbered=True)
    (workspace / "src" / "deep").mkdir(parents=True)
    (workspace / "linked").symlink_to("src/deep")
    roots = SessionRoots(workspace)
    path = "/".join(["src", *parts])
    canonical = os.path.realpath(workspace / path)
    assert wants(roots, "file:{path}:S", path=path) == wants(roots, "file:{path}:S", path=canonical)


def test_a_file_that_does_not_exist_yet_has_a_resource(roots: SessionRoots) -> None:
    assert wants(roots, "file:{path}:X", path="linked/new/b.py") == ((("workspace", "src", "new", "b.py"), "X"),)


@pytest.mark.parametrize("path", [".", "", "src/..", None])
def test_the_workspace_itself_is_the_root_of_its_files(roots: SessionRoots, path: str | None) -> None:
    assert wants(roots, "file:{path}:S", path=path) == ((("workspace",), "S"),)
    assert wants(roots, "file:{path}:S") == ((("workspace",), "S"),), "left out: the widest it could mean"


def test_locks_on_files_outside_the_workspace_are_independent_of_the_workspace_lock(roots: SessionRoots) -> None:
    (output,) = roots.readable
    found = wants(roots, "file:{path}:S", path=f"{output}/../output/call.txt")
    assert found == ((("file:/", *output.strip("/").split("/"), "call.txt"), "S"),)
    assert not do_locks_conflict(found, [(("workspace",), "X")])


def test_a_lock_on_a_parent_folder_covers_the_workspace(roots: SessionRoots) -> None:
    outer = wants(roots, "file:{path}:S", path=str(Path(roots.workspace).parent))
    assert do_locks_conflict(outer, wants(roots, "file:{path}:X", path="src/a.py"))
    assert do_locks_conflict(wants(roots, "file:{path}:X", path="/"), [(("workspace",), "S")])
    sibling = wants(roots, "file:{path}:S", path=roots.workspace + "_secret")
    assert not do_locks_conflict(sibling, [(("workspace",), "X")])


def test_other_lock_templates_resolve_to_one_resource_each(roots: SessionRoots) -> None:
    found = wants(roots, "account:{source}:X", source="alice/../bob")
    assert found == ((("account:alice/../bob",), "X"),)
    assert wants(roots, "page:{n}:X", n=5) == wants(roots, "page:{n}:X", n=5.0) == ((("page:5",), "X"),)
    assert wants(roots, "flag:{on}:S", on=True) == ((("flag:true",), "S"),)


def test_a_list_argument_locks_each_of_its_items(roots: SessionRoots) -> None:
    found = wants(roots, "file:{paths}:X", paths=["src/a.py", "link.py", "b.py"])
    assert found == ((("workspace", "src", "a.py"), "X"), (("workspace", "b.py"), "X"))
    assert wants(roots, "file:{paths}:X", paths=[]) == ((("workspace",), "X"),)


def test_an_argument_that_cannot_be_a_resource_is_refused(roots: SessionRoots) -> None:
    for arguments in (
        {"path": {"a": 1}},
        {"path": [["a"]]},
        {"path": "a\0b"},
        {"path": [str(n) for n in range(10_001)]},
    ):
        with pytest.raises(ToolError) as refused:
            wants(roots, "file:{path}:X", **arguments)
        assert refused.value.kind == "invalid_input"


def test_a_resource_argument_that_names_a_file_resolves_to_the_lock_of_that_file(roots: SessionRoots) -> None:
    assert wants(roots, "{resource}:X", resource="file:link.py") == ((("workspace", "src", "a.py"), "X"),)


def test_a_tool_without_declared_locks_gets_strict_defaults_and_unsafe_tools_share_a_lock(roots: SessionRoots) -> None:
    resources = LockResolver()
    undeclared = ToolSpec("a", "…", side_effect="external")
    reading = ToolSpec("b", "…", side_effect="read", concurrency_safe=False)
    assert resources.resolve(undeclared, {}, roots) == ((("workspace",), "X"),)
    assert resources.resolve(reading, {}, roots) == ((("workspace",), "S"), (("serial",), "X"))
    assert resources.resolve(spec(), {}, roots) == ()


def test_lock_templates_without_arguments_are_resolved_once(roots: SessionRoots) -> None:
    resources, tool = LockResolver(), spec("workspace:S", "account:X")
    assert resources.resolve(tool, {"a": 1}, roots) is resources.resolve(tool, {"a": 2}, roots)


def test_a_link_that_moved_is_resolved_again(roots: SessionRoots) -> None:
    resources, tool = LockResolver(), spec("file:link.py:X")
    assert resources.resolve(tool, {}, roots) == ((("workspace", "src", "a.py"), "X"),)
    link = Path(roots.workspace, "link.py")
    link.unlink()
    link.symlink_to("b.py")
    assert resources.resolve(tool, {}, roots) == ((("workspace", "b.py"), "X"),)


def test_a_workspace_lock_covers_files_in_a_further_writable_root(tmp_path: Path) -> None:
    for name in ("ws/notes", "notes", "specs"):
        (tmp_path / name).mkdir(parents=True)
    real = tmp_path.resolve()
    roots = SessionRoots(real / "ws", (), FurtherRoots((str(real / "specs"),), (str(real / "notes"),)))
    [whole] = wants(roots, "workspace:X")
    [noted] = wants(roots, "file:{path}:X", path=str(real / "notes" / "a"))
    [inside] = wants(roots, "file:{path}:X", path="notes/a")
    [specified] = wants(roots, "file:{path}:S", path=str(real / "specs" / "a"))
    assert do_locks_conflict([whole], [noted])
    assert not do_locks_conflict([noted], [inside])
    assert not do_locks_conflict([whole], [specified])
    above = wants(roots, "file:{path}:X", path=str(real))
    assert do_locks_conflict(above, [noted])
    assert do_locks_conflict(above, [inside])
