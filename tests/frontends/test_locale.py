"""The command line in a locale without Unicode: every file can be named, and nothing fails with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernel.test_agents import confined

IN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def handrail(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    (folder / "ws").mkdir(exist_ok=True)
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), **IN_C}
    argv = [
        sys.executable,
        "-m",
        "handrail",
        *words,
        "--state",
        str(folder / "state"),
        "--workspace",
        str(folder / "ws"),
    ]
    return subprocess.run(argv, env=given, cwd=folder / "ws", capture_output=True, timeout=60, check=False)


@confined
@pytest.mark.proves("S-08")
def test_a_program_runs_in_an_ascii_locale_and_its_output_is_escaped(tmp_path: Path) -> None:
    done = handrail(tmp_path, "call", "bash", '{"command": "touch n\\u00e4; ls"}', "--rule", "allow bash")
    assert done.returncode == 0, done
    assert done.stdout.decode("ascii").endswith("n\\xe4\n")
    assert (tmp_path / "ws" / "nä").exists()


@pytest.mark.parametrize("name", ["ö-中.txt", "\udcff.txt"])
def test_a_file_of_any_name_is_written_or_listed_in_an_ascii_locale(tmp_path: Path, name: str) -> None:
    if name.isprintable():
        written = handrail(
            tmp_path, "call", "write", f'{{"path": "{name}", "content": "\\u00e9"}}', "--rule", "allow write"
        )
        assert written.returncode == 0, written
        assert (tmp_path / "ws" / name).read_text("utf-8") == "é"
    else:
        (tmp_path / "ws").mkdir()
        (tmp_path / "ws" / name).write_text("")
    listed = handrail(tmp_path, "call", "glob", '{"pattern": "*"}')
    assert listed.returncode == 0, listed
    assert b"Traceback" not in listed.stderr and ".txt" in listed.stdout.decode("ascii")
