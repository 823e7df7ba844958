"""Reports about locales without Unicode, as root and as a user without an account name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from tests.kernel.test_agents import confined

IN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
USER = 54_321
"""No account has this number."""
AS_USER = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "sh", "-c", 'exec "$@"', "sh")
"""The shell loses the rights of root before it looks for the program."""


@lru_cache(maxsize=1)
def find_interpreter_for_everyone() -> str | None:
    """Return a Python of this version that an ordinary user may run, with the packages that this one has."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, shutil.which(name, path="/usr/bin:/usr/local/bin"), "/usr/bin/python3"):
        if python is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            try:
                done = subprocess.run(
                    [*AS_USER, python, "-c", "import handrail, pydantic_core"],
                    env=make_environment(Path(folder)),
                    cwd=folder,
                    capture_output=True,
                    timeout=60,
                    check=False,
                )
            except OSError:
                return None
        if done.returncode == 0:
            return python
    return None


def make_environment(folder: Path) -> dict[str, str]:
    packages = ":".join(path for path in sys.path if path)
    home = str(folder / "hömé")
    return {"PATH": os.environ["PATH"], "HOME": home, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", **IN_C}


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that the user reaches, which the folders of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        for inner in ("wörk", "hömé"):
            (place / inner).mkdir()
        yield place


def handrail(folder: Path, *words: str, root: bool) -> subprocess.CompletedProcess[bytes]:
    python, before = sys.executable, ()
    if not root:
        if os.geteuid() == 0:
            if shutil.which("setpriv") is None or (found := find_interpreter_for_everyone()) is None:
                pytest.skip("no Python here that an ordinary user may run")
            python, before = found, AS_USER
            for path in (folder, *folder.rglob("*")):
                os.chown(path, USER, USER, follow_symlinks=False)
    elif os.geteuid() != 0:
        pytest.skip("needs root")
    argv = [
        *before,
        python,
        "-m",
        "handrail",
        *words,
        "--state",
        str(folder / "stäte"),
        "--workspace",
        str(folder / "wörk"),
    ]
    return subprocess.run(
        argv,
        env=make_environment(folder),
        cwd=folder / "wörk",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


as_each = pytest.mark.parametrize("root", [True, False], ids=["root", "user"])


@as_each
@confined
def test_programs_and_files_and_the_log_work_in_the_c_locale(root: bool, folder: Path) -> None:
    workspace = folder / "wörk"
    (workspace / "ü.txt").write_text("grüße 日本\n", encoding="utf-8")
    (workspace / os.fsdecode(b"latin-\xe9.txt")).write_bytes(b"caf\xe9\n")
    (workspace / "p.py").write_text("print('grüße', open('ü.txt').read())\n", encoding="utf-8")
    command = '{"command": "ls; cat *.txt; python3 p.py; touch neu-é"}'
    done = handrail(folder, "call", "bash", command, "--rule", "allow bash", "--rule", "allow bash *", root=root)
    assert done.returncode == 0, done
    assert "gr\\xfc\\xdfe \\u65e5\\u672c" in done.stdout.decode("ascii") and (workspace / "neu-é").exists()
    read = handrail(folder, "call", "read", '{"path": "ü.txt"}', root=root)
    assert read.returncode == 0 and "gr\\xfc\\xdfe" in read.stdout.decode("ascii"), read
    written = handrail(folder, "call", "write", '{"path": "né☃", "content": "é☃"}', "--rule", "allow write", root=root)
    assert written.returncode == 0 and (workspace / "né☃").read_text("utf-8") == "é☃", written
    log = handrail(folder, "log", root=root)
    assert log.returncode == 0 and "n\\xe9\\u2603" in log.stdout.decode("ascii"), log


@as_each
def test_commands_in_the_c_locale_end_without_a_traceback(root: bool, folder: Path) -> None:
    config = folder / "hömé" / ".config" / "handrail"
    (config / "agents" / "default").mkdir(parents=True)
    config.joinpath("handrail.toml").write_text('# é\nrules = ["allow read ü*"]\n', encoding="utf-8")
    config.joinpath("agents", "default", "agent.toml").write_text(
        'id = "default"\ndescription = "Grüße"\n', encoding="utf-8"
    )
    for words in (["doctor"], ["config"], ["agents", "list"]):
        done = handrail(folder, *words, root=root)
        said = (done.stdout + done.stderr).decode("ascii")
        assert done.returncode in (0, 1) and "Traceback" not in said and "Error:" not in said, (words, said)
        if words == ["doctor"]:
            assert "+ sandbox" in said


@confined
def test_the_sandbox_starts_with_undecodable_file_names_in_etc(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place = Path("/etc") / os.fsdecode(b"handrail-test-\xe9-\xff")
    place.write_text("x")
    try:
        for root in (True, False):
            done = handrail(
                folder, "call", "bash", '{"command": "ls /etc | wc -l"}', "--rule", "allow bash *", root=root
            )
            assert done.returncode == 0, done
    finally:
        place.unlink()
