"""Artifacts: named by their content, complete or absent, and verified when read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.contract.errors import LogUnavailable, ToolError
from handrail.record.artifacts import ArtifactStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "artifacts"
    made.mkdir(mode=0o700)
    return made


@pytest.mark.proves("O-03")
def test_a_stored_artifact_is_returned_under_the_hash_of_its_content(folder: Path) -> None:
    artifacts = ArtifactStore(folder)
    data = bytes(range(256)) * 1000
    ref = artifacts.put(data, "image/png")
    assert ref == "sha256:" + hashlib.sha256(data).hexdigest()
    found = ArtifactStore(folder).get(ref)
    assert (found.ref, found.data, found.media_type) == (ref, data, "image/png")
    assert ArtifactStore(folder).get(artifacts.put(b"")).data == b""


def test_the_same_content_is_stored_once(folder: Path) -> None:
    artifacts = ArtifactStore(folder)
    before = artifacts.put(b"x" * 100, "text/plain"), sorted(folder.rglob("*"))
    assert (artifacts.put(b"x" * 100, "text/html"), sorted(folder.rglob("*"))) == before


def test_a_damaged_artifact_is_refused_until_its_content_is_stored_again(folder: Path) -> None:
    artifacts = ArtifactStore(folder)
    ref = artifacts.put(b"content", "text/plain")
    (stored,) = [file for file in folder.rglob("*") if file.is_file() and file.read_bytes() == b"content"]
    stored.write_bytes(b"changed")
    with pytest.raises(ToolError, match="is damaged") as raised:
        artifacts.get(ref)
    assert raised.value.kind == "backend"
    assert artifacts.put(b"content") == ref and artifacts.get(ref).data == b"content"


@pytest.mark.parametrize(
    "ref", ["", "sha256:", "sha256:../../x", "md5:" + "0" * 32, "sha256:" + "G" * 64, "sha256:" + "0" * 64 + "\n"]
)
def test_an_invalid_artifact_reference_is_refused(folder: Path, ref: str) -> None:
    with pytest.raises(ToolError, match="Invalid artifact reference") as raised:
        ArtifactStore(folder).get(ref)
    assert raised.value.kind == "invalid_input"


def test_an_unknown_artifact_is_unavailable(folder: Path) -> None:
    with pytest.raises(ToolError, match="does not exist in this workspace") as raised:
        ArtifactStore(folder).get("sha256:" + "0" * 64)
    assert raised.value.kind == "unavailable"


@pytest.mark.parametrize("media_type", ["", "text", "text/plain\nX: y", "a/b" + "c" * 300])
def test_an_invalid_media_type_is_replaced_by_the_default(folder: Path, media_type: str) -> None:
    artifacts = ArtifactStore(folder)
    assert artifacts.get(artifacts.put(b"1", media_type)).media_type == "application/octet-stream"


def test_a_full_disk_leaves_no_incomplete_artifact(place: Place, folder: Path) -> None:
    said = place.finished(
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from handrail.contract.errors import LogUnavailable\n"
        "from handrail.record.artifacts import ArtifactStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    ArtifactStore(Path(sys.argv[3])).put(b'x' * 5000)\n"
        "except LogUnavailable as error:\n    print(error)\n",
        str(folder),
    )
    assert "Cannot store an output of 5,000 bytes" in said and str(folder) in said
    assert not [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size >= 1000]
    assert not list(folder.rglob(".new-*"))


def test_a_missing_artifact_folder_gives_an_error_that_names_the_state_option(tmp_path: Path) -> None:
    with pytest.raises(LogUnavailable, match="--state DIR"):
        ArtifactStore(tmp_path / "absent").put(b"x")
