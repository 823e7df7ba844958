"""The program that is forked instead of started is the program: what it is given, how it ends, and that it ends."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.prefork import command as prefork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is started")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """The folder and environment of a start."""
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "note.txt").write_text("of this folder\n")
    return {"cwd": tmp_path / "workspace", "env": {**os.environ, "HANDRAIL_STATE": str(tmp_path / "state")}}


def run(*arguments: str, **given: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*prefork.handrail(), *arguments], capture_output=True, **given)


def test_it_has_the_arguments_folder_environment_and_streams_and_ends_with_the_code(
    given: dict[str, Any], tmp_path: Path
) -> None:
    done = run("call", "read", "-", "--json", input=b'{"path": "note.txt"}', **given)
    assert done.returncode == 0 and json.loads(done.stdout)["data"]["text"] == "of this folder"
    assert list((tmp_path / "state").rglob("handrail.db"))
    denied = run("call", "write", '{"path": "a", "content": "b"}', "--headless", **given)
    assert denied.returncode == 3 and denied.stdout == b"" and b"denied" in denied.stderr


def test_it_has_the_limits_of_whoever_starts_it(given: dict[str, Any]) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = run("call", "read", "{}", preexec_fn=small, **given)
    assert done.returncode == 5 and b"full" in done.stderr


def test_it_is_gone_when_what_stands_for_it_is_killed(given: dict[str, Any]) -> None:
    command = [*prefork.handrail(), "call", "write", '{"path": "a", "content": "b"}', "--wait"]
    process: subprocess.Popen[bytes] = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **given
    )
    with process:
        assert process.stdout is not None
        while b"waits" not in process.stdout.readline():
            pass
        process.kill()
        process.stdout.read()  # to the end: the program alone held it


def test_it_is_not_mistaken_for_one_in_a_sandbox(given: dict[str, Any]) -> None:
    *start, place = prefork.handrail()
    elsewhere = [*start, place.replace("mnt:[", "mnt:[1"), "--help"]
    done: subprocess.CompletedProcess[bytes] = subprocess.run(elsewhere, capture_output=True, **given)
    assert done.returncode == 1 and b"namespaces" in done.stderr and done.stdout == b""
