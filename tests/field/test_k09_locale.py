"""Reports about the process that starts Handrail: its locale, user, home, folder, open files and limits."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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


def start(
    folder: Path,
    words: Sequence[str],
    environment: dict[str, str],
    *,
    before: Callable[[], None] = lambda: None,
    state: bool = True,
) -> tuple[int, str]:
    """Run a command in a changed process; gives its exit code and what it printed."""
    locations = ["--workspace", str(folder / "wörk"), *(["--state", str(folder / "stäte")] if state else [])]
    done = subprocess.run(
        [sys.executable, "-m", "handrail", *words, *locations],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(path for path in sys.path if path), **environment},
        cwd=folder / "wörk",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
        preexec_fn=before,
    )
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert "Traceback" not in printed and "internal error" not in printed, printed
    return done.returncode, printed


def remove_current_folder() -> None:
    place = f"{os.getcwd()}/gone"
    os.mkdir(place)
    os.chdir(place)
    os.rmdir(place)


def close_umask() -> None:
    os.umask(0o77)


CHANGES: dict[str, tuple[dict[str, str], Callable[[], None]]] = {
    "no input": ({}, lambda: os.close(0)),
    "no error output": ({}, lambda: os.close(2)),
    "few open files": ({}, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))),
    "no current folder": ({}, remove_current_folder),
    "no temporary folder": ({"TMPDIR": "/none/none"}, lambda: None),
    "a file as temporary folder": ({"TMPDIR": "/etc/passwd"}, lambda: None),
    "no programs": ({"PATH": ""}, lambda: None),
    "odd time zone": ({"TZ": "Foo/Bar"}, lambda: None),
    "odd terminal": ({"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "0"}, lambda: None),
    "narrow terminal": ({"COLUMNS": "-5"}, lambda: None),
    "no permissions for others": ({}, close_umask),
    "home is not a folder": ({"HOME": "/dev/null"}, lambda: None),
    "empty home": ({"HOME": ""}, lambda: None),
}


@confined
@pytest.mark.parametrize("change", CHANGES.keys())
def test_programs_and_files_work_in_an_unusual_process(change: str, folder: Path) -> None:
    environment, before = CHANGES[change]
    environment = {"HOME": str(folder / "hömé"), **environment}
    rules = ["--rule", "allow write", "--rule", "allow bash *"]
    written = json.dumps({"path": "a.txt", "content": "hello\n"})
    assert start(folder, ["call", "write", written, *rules], environment, before=before)[0] == 0
    code, printed = start(
        folder, ["call", "bash", '{"command": "cat a.txt; mktemp"}', *rules], environment, before=before
    )
    assert code == 0 and "hello" in printed, printed
    assert os.listdir(folder / "wörk") == ["a.txt"]


def test_each_command_names_a_current_folder_that_is_gone(folder: Path) -> None:
    for words in (["call", "read", "{}"], ["doctor"], ["config"], ["log"], ["trust"], ["mcp"], ["agents", "list"]):
        done = subprocess.run(
            [sys.executable, "-m", "handrail", *words],
            env={"PATH": os.environ["PATH"], "HOME": str(folder / "hömé")},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=remove_current_folder,
        )
        assert done.returncode == 5 and "The current folder no longer exists" in done.stderr, (words, done)


def test_neither_state_nor_settings_are_taken_from_the_current_folder(folder: Path) -> None:
    """Relative variables would name a folder of the workspace, where a model can write."""
    workspace = folder / "wörk"
    for name in ("rel", "here/.config", "~/.config"):
        place = workspace / name / "handrail"
        place.mkdir(parents=True)
        (place / "handrail.toml").write_text('rules = ["allow write"]\n')
    written = ["call", "write", '{"path": "a.txt", "content": "x"}']
    for environment in (
        {"HOME": str(folder / "hömé"), "XDG_CONFIG_HOME": "rel", "XDG_STATE_HOME": "rel"},
        {"HOME": "here"},
    ):
        code, printed = start(folder, written, environment)
        assert code == 4 and "waits for approval" in printed, printed
        start(folder, ["log"], environment, state=False)
    assert sorted(os.listdir(workspace)) == ["here", "rel", "~"] and not (workspace / "a.txt").exists()
    assert os.listdir(workspace / "rel" / "handrail") == ["handrail.toml"]


def test_a_user_without_home_and_account_is_asked_for_a_state_folder(folder: Path) -> None:
    for state in (True, False):
        code, printed = start_without_home(folder, "call", "read", '{"path": "."}', state=state)
        if state:
            assert code == 1 and "is a folder" in printed, printed
        else:
            assert code == 5 and "Set HOME, or name the folder with --state DIR" in printed, printed
    code, printed = start_without_home(folder, "call", "read", "{}", "--rule", "deny fs.read ~/.ssh/**")
    assert code == 2 and "names the home folder, which is not known" in printed, printed


def start_without_home(folder: Path, *words: str, state: bool = True) -> tuple[int, str]:
    """Run a command as a user without an account, and without HOME."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes a user without an account")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)

    def become_user() -> None:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)

    if find_interpreter_for_everyone() is None:
        pytest.skip("no Python here that an ordinary user may run")
    locations = ["--workspace", str(folder / "wörk"), *(["--state", str(folder / "stäte")] if state else [])]
    environment = make_environment(folder)
    del environment["HOME"]
    done = subprocess.run(
        [str(find_interpreter_for_everyone()), "-m", "handrail", *words, *locations],
        env=environment,
        cwd=folder / "wörk",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
        preexec_fn=become_user,
    )
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert "Traceback" not in printed and "internal error" not in printed, printed
    return done.returncode, printed


def test_a_limit_of_file_sizes_is_named_if_the_log_cannot_be_written(folder: Path) -> None:
    environment = {"HOME": str(folder / "hömé")}
    code, printed = start(
        folder,
        ["call", "read", '{"path": "."}'],
        environment,
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert code == 5 and "ulimit -f: 0 bytes" in printed, printed
