"""The examples of the operations page, and errors where nothing can be written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.frontends.conftest import Program
from tests.prefork import command as prefork
from tests.snippets import page, snippets

from handrail.sandbox import tier_probe

UNIT = "handrail.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_documented_unit(tmp_path: Path) -> None:
    (unit,) = [snippet.text for snippet in snippets(page("docs/how-to/operate.md"), "ini") if snippet.file == UNIT]
    assert re.search(r"^ExecStart=/opt/handrail/bin/handrail mcp ", unit, re.MULTILINE)
    (tmp_path / UNIT).write_text(unit.replace("/opt/handrail/bin/handrail", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(tmp_path / UNIT)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / UNIT).write_text(unit.replace("/opt/handrail/bin/handrail", sys.executable).replace("User=", "Usr="))
    wrong = subprocess.run(["systemd-analyze", "verify", str(tmp_path / UNIT)], capture_output=True, text=True)
    assert "Usr" in wrong.stderr, "the check sees a fault"


def test_the_documented_unit_uses_only_existing_options_of_the_command() -> None:
    (unit,) = [snippet.text for snippet in snippets(page("docs/how-to/operate.md"), "ini") if snippet.file == UNIT]
    (line,) = re.findall(r"^ExecStart=/opt/handrail/bin/handrail (.*)$", unit, re.MULTILINE)
    options = [word for word in line.split() if word.startswith("--")]
    help_text = subprocess.run([*prefork.handrail(), "mcp", "--help"], capture_output=True, text=True).stdout
    assert options and all(option in help_text for option in options)


def test_a_missing_temporary_folder_makes_programs_unavailable_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> object:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    why = tier_probe._observe_confinement("bwrap")  # pyright: ignore[reportPrivateUsage]
    assert isinstance(why, str) and "no temporary folder can be made" in why and "TMPDIR" in why


@pytest.mark.parametrize("home", ["read-only", "missing"])
def test_a_call_works_with_a_missing_or_read_only_home_folder(tmp_path: Path, home: str) -> None:
    folder = tmp_path / "home"
    if home == "read-only":
        folder.mkdir(mode=0o500)
    (tmp_path / "ws").mkdir()
    program = Program(tmp_path / "ws", tmp_path / "state", tmp_path / "config")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        program.cold("call", "glob", '{"pattern": "*"}'), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not folder.exists() or not any(folder.iterdir())
