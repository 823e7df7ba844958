"""The test machinery: a test process that dies does not block the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIES = """
import os, pytest, signal

def test_before_it(): ...
@pytest.mark.xdist_group("alone")
def test_of_which_the_process_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after_it(): ...
"""


def test_a_dying_worker_fails_its_test_and_the_other_tests_run(tmp_path: Path) -> None:
    """Without :mod:`tests.scheduling` this would hang for ever, and so would the whole suite."""
    (tmp_path / "test_it.py").write_text(DIES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group: together\n")
    plugins = ["-p", "xdist", "-p", "tests.scheduling", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-n", "1", "--dist", "loadgroup", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 2 passed" in ended.stdout
    named = re.findall(r"^FAILED \S+test_it\.py::(\S+)", ended.stdout, re.MULTILINE)
    assert named == ["test_of_which_the_process_dies"]  # without its group: so it can be asked for again
