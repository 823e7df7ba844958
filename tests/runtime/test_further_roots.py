"""Folders of an agent outside the workspace, and the access of a session to them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from handrail.contract.agent_manifest import AgentAdditionalRoot
from handrail.contract.errors import ToolError
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.secure_open import resolve_further_roots
from handrail.runtime.files.session_roots import FurtherRoots, SessionRoots

from .conftest import RecordingAccessCheck

Access = Literal["read", "write"]


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    root = tmp_path.resolve()
    for name in ("ws/docs", "state/ws", "config/agents", "specs/inner", "notes"):
        (root / name).mkdir(parents=True)
    return root


def resolved(ground: Path, *roots: tuple[str, Access]) -> tuple[FurtherRoots, list[tuple[str, str]]]:
    named = [AgentAdditionalRoot(path=path.replace("@", str(ground)), access=access) for path, access in roots]
    return resolve_further_roots(named, str(ground / "ws"), [ground / "state", ground / "config"])


def test_a_further_root_is_resolved_to_its_real_folder(ground: Path) -> None:
    (ground / "link").symlink_to(ground / "specs")
    further, faults = resolved(ground, ("@/link", "read"), ("@/specs/", "read"), ("@/notes", "write"))
    assert faults == []
    assert further == FurtherRoots((str(ground / "specs"),), (str(ground / "notes"),))


@pytest.mark.parametrize(
    ("path", "access", "part"),
    [
        ("@/nowhere", "read", "does not exist"),
        ("@/file", "read", "does not exist"),
        ("@/\0", "read", "does not exist"),
        ("/", "read", "the whole file system"),
        ("~", "read", "home folder"),
        ("@/state", "read", "where Handrail keeps its state"),
        ("@/state/ws", "read", "where Handrail keeps its state"),
        ("@/config/agents", "write", "where Handrail keeps its state"),
        ("@", "read", "where Handrail keeps its state"),
        ("@/into-state", "write", "where Handrail keeps its state"),
        ("@/ws/docs", "read", "is inside the workspace"),
        ("/etc", "read", "which the sandbox protects"),
        ("/proc/self", "read", "which the sandbox protects"),
        ("/usr", "write", "which the sandbox protects"),
        ("/tmp", "read", "several users or programs share"),
    ],
)
def test_an_invalid_root_is_a_fault_with_its_configuration_key(
    ground: Path, path: str, access: Access, part: str
) -> None:
    (ground / "file").write_text("")
    (ground / "into-state").symlink_to(ground / "state")
    further, [(place, problem)] = resolved(ground, ("@/notes", "read"), (path, access))
    assert place == "roots[1].path"
    assert part in problem
    assert further.readable == (str(ground / "notes"),)


def test_a_writable_root_above_the_workspace_is_refused_and_a_readable_one_is_accepted(tmp_path: Path) -> None:
    workspace = tmp_path.resolve() / "project" / "ws"
    workspace.mkdir(parents=True)
    above = str(workspace.parent)
    _, [(_, problem)] = resolve_further_roots([AgentAdditionalRoot(path=above, access="write")], str(workspace), [])
    assert "Open this folder as the workspace" in problem
    further, faults = resolve_further_roots([AgentAdditionalRoot(path=above)], str(workspace), [])
    assert (further.readable, faults) == ((above,), [])
    roots = SessionRoots(workspace, (), further)
    assert [roots.resolve_path(path).is_writable for path in ("a", "../a")] == [True, False]


def test_a_writable_root_inside_the_workspace_adds_no_root(ground: Path) -> None:
    assert resolved(ground, ("@/ws/docs", "write"), ("@/ws", "write")) == (FurtherRoots(), [])


def test_a_readable_root_inside_a_writable_one_is_refused(ground: Path) -> None:
    _, faults = resolved(ground, ("@/specs/inner", "read"), ("@/specs", "write"))
    assert [place for place, _ in faults] == ["roots[0].access"]
    assert resolved(ground, ("@/specs/inner", "write"), ("@/specs", "read"))[1] == []
    _, twice = resolved(ground, ("@/specs", "read"), ("@/specs", "write"))
    assert [place for place, _ in twice] == ["roots[1].access"]


async def test_files_are_readable_in_every_root_and_writable_only_in_writable_roots(ground: Path) -> None:
    for name in ("specs", "notes", "elsewhere"):
        (ground / name).mkdir(exist_ok=True)
        (ground / name / "a.txt").write_text(name)
    further, _ = resolved(ground, ("@/specs", "read"), ("@/notes", "write"))
    files = RootedFiles(SessionRoots(ground / "ws", (), further), SeenFileHashes(), RecordingAccessCheck())
    for name in ("specs", "notes"):
        assert (await files.read_bytes(str(ground / name / "a.txt"))).data == name.encode()
    with pytest.raises(ToolError, match="outside"):
        await files.read_bytes(str(ground / "elsewhere" / "a.txt"))
    await files.write(str(ground / "notes" / "b.txt"), b"new", expected="new")
    assert (ground / "notes" / "b.txt").read_bytes() == b"new"
    with pytest.raises(ToolError, match="read-only"):
        await files.write(str(ground / "specs" / "b.txt"), b"new", expected="new")
    assert not (ground / "specs" / "b.txt").exists()
