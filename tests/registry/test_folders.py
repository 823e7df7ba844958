"""Folders of manifests and executables: valid and refused files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.tool.manifest import MAX_MANIFEST_BYTES
from handrail.contract.tool.spec import LockSpec
from handrail.contract.tool_generation import SourceContents
from handrail.registry.sources.executable_tools import PerCallExecutableTool
from handrail.registry.sources.persistent_tools import PersistentProcessTool
from handrail.registry.sources.tool_folder_source import ToolFolderSource

from .conftest import ExecutableFixture

SCRIPT = "#!/bin/sh\necho '{}'\n"


def load(place: ExecutableFixture, **options: Any) -> SourceContents:
    return ToolFolderSource(place.tools, "global", place.confinement(), **options).load()


def only_fault(place: ExecutableFixture, **options: Any) -> str:
    loaded = load(place, **options)
    assert loaded.tools == ()
    [fault] = loaded.faults
    return str(fault)


@pytest.mark.proves("R-01", "R-02")
def test_each_manifest_with_an_executable_loads_as_a_tool(place: ExecutableFixture) -> None:
    place.put("zoo", SCRIPT, side_effect="read")
    place.put("ant", SCRIPT, persistent=True)
    (place.tools / "notes.txt").write_text("not a manifest")
    (place.tools / ".hidden.json").write_text("{")
    loaded = load(place)
    assert loaded.faults == ()
    assert [(found.tool.spec.id, found.location) for found in loaded.tools] == [
        ("ant", str(place.tools / "ant.json")),
        ("zoo", str(place.tools / "zoo.json")),
    ]
    ant, zoo = (found.tool for found in loaded.tools)
    assert isinstance(ant, PersistentProcessTool)
    assert isinstance(zoo, PerCallExecutableTool) and not isinstance(zoo, PersistentProcessTool)
    assert (zoo.executable, zoo.folder, zoo.trusted) == (str(place.tools / "zoo"), str(place.tools), False)


@pytest.mark.proves("K-03", "R-01")
def test_the_documented_manifest_loads_from_a_folder_with_its_executable(place: ExecutableFixture) -> None:
    manifest = {
        "llm": {"name": "git_commit", "description": "Record changes.", "input_schema": {"type": "object"}},
        "runtime": {
            "exec_path": "/choir/tools/global/git_commit",
            "timeout_ms": 15000,
            "locks": [{"resource": "workspace", "mode": "X"}],
            "network": False,
            "secret_resources": ["git_identity"],
            "side_effect": "write",
            "idempotent": False,
            "version": "1.0",
        },
    }
    (place.tools / "git_commit.json").write_text(json.dumps(manifest))
    (place.tools / "git_commit").write_text(SCRIPT)
    (place.tools / "git_commit").chmod(0o755)
    loaded = load(place)
    assert loaded.faults == ()
    [found] = loaded.tools
    assert isinstance(found.tool, PerCallExecutableTool)
    assert found.tool.executable == str(place.tools / "git_commit")
    assert found.tool.spec.locks == (LockSpec("workspace", "X"),)


def test_a_missing_tool_folder_loads_no_tools(place: ExecutableFixture) -> None:
    place.tools.rmdir()
    assert load(place) == SourceContents()


def test_a_tool_in_a_subfolder_gets_only_that_subfolder(place: ExecutableFixture) -> None:
    place.put("deep", SCRIPT, exec_path="deep/bin/run")
    [found] = load(place).tools
    assert isinstance(found.tool, PerCallExecutableTool)
    assert found.tool.executable == str(place.tools / "deep/bin/run")
    assert found.tool.folder == str(place.tools / "deep")


@pytest.mark.proves("R-01")
def test_all_faults_of_a_folder_are_listed_together(place: ExecutableFixture) -> None:
    place.put("good", SCRIPT)
    place.put("missing", None)
    place.put("plain", SCRIPT, mode=0o644)
    place.put("both", None, exec_path="/somewhere/else", side_effect="wrote", timeout_ms=0)
    (place.tools / "broken.json").write_text("{")
    loaded = load(place)
    assert [found.tool.spec.id for found in loaded.tools] == ["good"]
    assert {(Path(fault.source).name, fault.location) for fault in loaded.faults} == {
        ("missing.json", "runtime.exec_path"),
        ("plain.json", "runtime.exec_path"),
        ("both.json", "runtime.exec_path"),
        ("both.json", "runtime.side_effect"),
        ("both.json", "runtime.timeout_ms"),
        ("broken.json", ""),
    }


@pytest.mark.proves("R-01")
@pytest.mark.parametrize("workspace", [".", "..", "../..", "tools"])
def test_tools_in_a_folder_that_a_model_can_write_are_refused(place: ExecutableFixture, workspace: str) -> None:
    place.put("x", SCRIPT)
    inside = str(place.tools.parent / workspace)
    assert "a model can write" in only_fault(place, workspaces=(str(place.workspace), inside))


def test_a_tool_folder_linked_into_a_workspace_is_refused(place: ExecutableFixture) -> None:
    place.put("x", SCRIPT)
    hidden = place.workspace / "tools"
    place.tools.rename(hidden)
    place.tools.symlink_to(hidden)
    assert "a model can write" in only_fault(place, workspaces=(str(place.workspace),))


@pytest.mark.proves("R-01")
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
@pytest.mark.parametrize("what", ["tools", "tools/x", "tools/x.json"])
def test_a_tool_writable_by_other_users_is_refused_with_the_chmod_command(
    place: ExecutableFixture, what: str, mode: int
) -> None:
    place.put("x", SCRIPT)
    path = place.tools.parent / what
    path.chmod(mode)
    said = only_fault(place)
    assert f"chmod go-w {path}" in said or f"chmod o-w {path}" in said


def test_a_tool_folder_below_a_world_writable_folder_is_refused(place: ExecutableFixture) -> None:
    place.put("x", SCRIPT)
    place.tools.parent.chmod(0o777)
    assert "is writable by every user" in only_fault(place)
    place.tools.parent.chmod(0o1777)
    assert load(place).faults == ()


def test_a_writable_folder_inside_a_tool_folder_is_refused(place: ExecutableFixture) -> None:
    place.put("x", SCRIPT, exec_path="x/bin/run")
    (place.tools / "x" / "bin").chmod(0o777)
    assert "x/bin is writable" in only_fault(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["tools", "tools/x", "tools/x.json"])
def test_a_tool_owned_by_another_user_is_refused(place: ExecutableFixture, what: str) -> None:
    place.put("x", SCRIPT)
    os.chown(place.tools.parent / what, 12345, -1)
    assert "belongs to user 12345" in only_fault(place)


@pytest.mark.proves("R-01")
def test_an_executable_link_that_leads_out_of_the_tool_folder_is_refused(place: ExecutableFixture) -> None:
    outside = place.tools.parent / "outside"
    outside.write_text(SCRIPT)
    outside.chmod(0o755)
    place.put("x", None)
    (place.tools / "x").symlink_to(outside)
    assert "leads out of the tool's folder" in only_fault(place)


def test_an_executable_link_that_stays_inside_the_tool_folder_is_followed(place: ExecutableFixture) -> None:
    place.put("x", SCRIPT, exec_path="v2/x")
    (place.tools / "y.json").write_text((place.tools / "x.json").read_text().replace("v2/x", "y"))
    (place.tools / "x.json").unlink()
    (place.tools / "y").symlink_to("v2/x")
    [found] = load(place).tools
    assert isinstance(found.tool, PerCallExecutableTool)
    assert found.tool.executable == str(place.tools / "v2" / "x")


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling"])
def test_an_executable_that_is_not_a_regular_file_is_refused(place: ExecutableFixture, kind: str) -> None:
    place.put("x", None)
    path = place.tools / "x"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o755)
    else:
        path.symlink_to("nothing")
    said = only_fault(place)
    assert {"folder": "is a folder", "fifo": "not a regular file", "dangling": "cannot be read"}[kind] in said


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_manifest_other_than_a_regular_file_is_a_fault_and_never_hangs_loading(
    place: ExecutableFixture, kind: str
) -> None:
    path = place.put("x", SCRIPT)
    if kind == "link":
        path.rename(place.tools.parent / "real.json")
        path.symlink_to(place.tools.parent / "real.json")
    else:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path, 0o644)
        else:
            path.mkdir()
    only_fault(place)


def test_a_manifest_above_the_size_limit_is_refused(place: ExecutableFixture) -> None:
    path = place.put("x", SCRIPT)
    path.write_bytes(b" " * (MAX_MANIFEST_BYTES + 5))
    assert "The maximum is" in only_fault(place)


def test_a_file_in_place_of_the_tool_folder_is_refused(place: ExecutableFixture) -> None:
    place.tools.rmdir()
    place.tools.write_text("")
    assert "is not a folder" in only_fault(place)
