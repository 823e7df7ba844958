"""The preforked program behaves like a started one: input, output, exit code and end."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.prefork import command as prefork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is started")


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of a start: a workspace with a ``note.txt``, and its own state."""

    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HANDRAIL_STATE": str(self.folder / "state"), "CI": "", "HANDRAIL_HEADLESS": ""}

    def run(
        self, command: Sequence[str], stdin: bytes = b"", before: Callable[[], None] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command, cwd=self.workspace, env=self.environment, input=stdin, capture_output=True, preexec_fn=before
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.workspace.mkdir()
    (place.workspace / "note.txt").write_text("of this folder\n")
    return place


def test_a_forked_program_has_the_given_arguments_folder_environment_streams_and_exit_code(place: Place) -> None:
    done = place.run([*prefork.handrail(), "call", "read", "-", "--json"], b'{"path": "note.txt"}')
    assert done.returncode == 0 and json.loads(done.stdout)["data"]["text"] == "of this folder"
    assert list((place.folder / "state").rglob("handrail.db"))
    write = ["call", "write", '{"path": "a", "content": "b"}', "--headless"]
    denied = place.run([*prefork.handrail(), *write])
    assert denied.returncode == 3 and denied.stdout == b"" and b"denied" in denied.stderr


def test_a_forked_program_has_the_resource_limits_of_its_starter(place: Place) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = place.run([*prefork.handrail(), "call", "read", "{}"], before=small)
    assert done.returncode == 5 and b"check the disk" in done.stderr


def test_a_forked_program_ends_when_its_stand_in_is_killed(place: Place) -> None:
    with subprocess.Popen(
        [*prefork.handrail(), "call", "write", '{"path": "a", "content": "b"}', "--wait"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=place.workspace,
        env=place.environment,
    ) as process:
        assert process.stdout is not None
        told: list[bytes] = []
        while b"waits" not in (line := process.stdout.readline()):
            told.append(line)
            assert line, f"it ended by itself: {told}"
        process.kill()
        process.stdout.read()  # to the end: the program alone held it


def test_a_forked_program_is_refused_from_another_namespace(place: Place) -> None:
    *start, here = prefork.handrail()
    done = place.run([*start, here.replace("mnt:[", "mnt:[1"), "--help"])
    assert done.returncode == 1 and b"namespaces" in done.stderr and done.stdout == b""
