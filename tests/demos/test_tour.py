"""The tour: its output, its checks, and its traces, also on machines without some features."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from demos.demonstration import IDENTITY, Interruption
from demos.tour import guide
from demos.tour.effects import survivors
from demos.tour.project import KEY, Project
from demos.tour.scenes import Scene, scenes
from tests.frontends.conftest import Terminals
from tests.prefork import command as prefork

from handrail.agent.providers.scripted_model import RequestExpectation
from handrail.frontends.cli.command_group import run_command_line
from handrail.record.verification import LogVerification
from handrail.sandbox import tier_probe
from handrail.sandbox.start.spawn import find_bubblewrap_programs

ROOT = str(Path(__file__).parents[2])

TOUR = (sys.executable, "-m", "demos.tour")
FILE = Path(guide.__file__).with_name("__main__.py")
needs_sandbox = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """An environment with a home and a temporary folder, to check for leftovers."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    apart = ("GIT_", "HANDRAIL_", "XDG_", "COLUMNS", "LINES")  # the last two come from shells and test runners
    kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)} | {"PYTHONPATH": ROOT}
    return {**kept, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}


def left_in(places: Mapping[str, str]) -> list[str]:
    return [*os.listdir(places["HOME"]), *os.listdir(places["TMPDIR"])]


def toured(places: Mapping[str, str], *arguments: str, within: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*within, *TOUR, *arguments], env=dict(places), capture_output=True, text=True)


@needs_sandbox
@pytest.mark.proves("A-02")
def test_the_tour_shows_every_effect_in_plain_text_and_leaves_nothing_behind(places: dict[str, str]) -> None:
    done = toured(places)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "All 21 effects are there." in done.stdout
    assert done.stdout.count("   ✓ ") == 21
    assert "intact: " in done.stdout
    assert "+        if quantity >= BULK_FROM:" in done.stdout.replace("+    if", "+        if")
    assert "denied by the rule 'deny bash curl *'" in done.stdout
    assert "192.0.2.1:443: Network is unreachable" in done.stdout
    assert ".env: Permission denied" in done.stdout
    assert "is run by version control automatically" in done.stdout
    assert KEY not in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert left_in(places) == []
    assert survivors(Path(places["TMPDIR"])) == []


@needs_sandbox
def test_the_kept_log_verifies_with_the_shown_command(places: dict[str, str]) -> None:
    done = subprocess.run([*prefork.python(FILE), "--keep"], env=places, capture_output=True, text=True)
    assert done.returncode == 0
    (kept,) = Path(places["TMPDIR"]).iterdir()
    verify = next(line for line in done.stdout.splitlines() if " log verify " in line)
    head = re.search(r"head ([0-9a-f]{64})", done.stdout)
    assert head is not None
    assert run_command_line(["log", "verify", *verify.split(" log verify ")[1].split(), "--head", head[1]]) == 0
    assert (kept / "shop" / ".git").is_dir() and not (kept / "outside.txt").exists()


@needs_sandbox
@pytest.mark.parametrize(("columns", "no_color"), [(80, ""), (100, "1")])
def test_the_tour_fits_the_terminal_width_and_uses_colours_unless_disabled(
    on_a_terminal: Terminals, places: dict[str, str], columns: int, no_color: str
) -> None:
    where = {**places, "NO_COLOR": no_color, "COLUMNS": str(columns)}
    terminal = on_a_terminal(*TOUR, environment=where)
    shown = terminal.wait_for("Where to go next")  # after it come commands to copy, each on one line
    assert terminal.end() == 0
    assert ("\x1b[1;36m" in shown) is (no_color == "") and ("\x1b" in terminal.shown) is (no_color == "")
    plain = re.sub(
        r"\x1b\[[0-9;?]*[A-Za-z]", "", shown
    )  # a carriage return ends a line: what turns is drawn over itself
    wide = [line for line in plain.splitlines() if len(line) > columns and " " in line.strip()]
    assert wide == []


@needs_sandbox
def test_a_tour_without_user_namespaces_lists_the_skipped_effects_with_a_remedy(
    places: dict[str, str],
) -> None:
    without = [next(find_bubblewrap_programs()), "--dev-bind", "/", "/", "--unshare-user", "--disable-userns", "--"]
    done = toured(places, within=without)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "bash: starts programs" in done.stdout and "ledger.total: starts programs" in done.stdout
    assert "Remedy: " in done.stdout
    assert "✓ both files hold their edits" in done.stdout and "✓ the commit log is intact" in done.stdout
    assert "All 9 effects that need no sandbox are there." in done.stdout
    assert "python3 -m unittest  " not in done.stdout.partition("1  Look around")[2]
    assert left_in(places) == []


@needs_sandbox
def test_an_unprivileged_user_with_a_read_only_home_gets_the_complete_ascii_tour(
    places: dict[str, str],
) -> None:
    home = places["HOME"]
    user = [
        next(find_bubblewrap_programs()),
        "--dev-bind",
        "/",
        "/",
        "--ro-bind",
        home,
        home,
        "--unshare-user",
        "--uid",
        "1234",
        "--gid",
        "1234",
    ]
    done = toured({**places, "PYTHONIOENCODING": "ascii"}, within=[*user, "--"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 21 effects are there." in done.stdout
    assert done.stdout.count("   + ") >= 18 and "\\u" not in done.stdout


def test_the_tour_exits_with_5_when_git_is_missing(places: dict[str, str], tmp_path: Path) -> None:
    done = toured({**places, "PATH": str(tmp_path)})
    assert done.returncode == 5
    assert done.stderr.startswith("tour: ") and "install git" in done.stderr and "Traceback" not in done.stderr
    assert left_in(places) == []


@needs_sandbox
def test_an_interrupted_tour_exits_with_130_and_cleans_up(places: dict[str, str]) -> None:
    # Through a pipe that is shorter than the tour, so that it cannot end before the signal has come.
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(TOUR, env=places, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    shown = b""
    with os.fdopen(reading, "rb", buffering=0) as output:
        while b"2  Run the tests" not in shown:
            shown += output.read(256)
        process.send_signal(signal.SIGINT)
        while more := output.read(4096):
            shown += more
    assert process.communicate()[1] == b"" and process.returncode == 130
    assert b"Where to go next" not in shown
    assert left_in(places) == []


# --- an effect that is not there -------------------------------------------------------------------------------


async def _toured_without(monkeypatch: pytest.MonkeyPatch, *labels: str) -> int:
    """The tour with a model that leaves some calls out."""

    def fewer(project: Project, port: int, page_port: int, *, confined: bool) -> list[Scene]:
        return [
            replace(scene, calls=tuple(c for c in scene.calls if c.label not in labels), expect=RequestExpectation())
            for scene in scenes(project, port, page_port, confined=confined)
            if not scene.calls or {c.label for c in scene.calls} - set(labels)
        ]

    monkeypatch.setattr(guide, "scenes", fewer)
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)
    return await guide.guided(Interruption(), keep=False)


@needs_sandbox
@pytest.mark.parametrize(
    ("labels", "lacking"),
    [
        (
            ["edit-pricing"],
            {"both files", "the tests pass", "the edits ran", "the tests waited", "the tests ran in"},
        ),
        (
            ["job", "job-end", "tests-before", "rest", "outside"],
            {"the tests ran in", "the tests fail", "what the head cut off", "the file outside"},
        ),
        (
            ["total", "curl", "publish", "commit", "key-read"],
            {
                "the external tool",
                "curl was refused",
                "the allowed script",
                "nothing that a call started",
                "the commit was made",
                "the injected file",
            },
        ),
        *((["key-" + name], {"the injected file"}) for name in ("curl", "script", "hook")),
    ],
)
async def test_each_missing_effect_is_listed_and_the_tour_exits_with_1(
    labels: list[str], lacking: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await _toured_without(monkeypatch, *labels) == 1
    shown = capsys.readouterr().out
    unwrapped = re.sub(r"\n {3}(?! |[✓✗])", " ", shown)  # however wide the terminal is
    missing = [line.removeprefix("   ✗ ") for line in unwrapped.splitlines() if line.startswith("   ✗ ")]
    missing = [line for line in missing if ". Instead: " in line]
    assert len(missing) == len(lacking), shown
    assert all(any(line.startswith(name) for line in missing) for name in lacking), missing
    assert f"{len(lacking)} of 21 effects are not there." in shown


@needs_sandbox
async def test_a_damaged_log_counts_as_a_missing_effect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_intact(_reader: object) -> LogVerification:
        return LogVerification(False, 3, "", problem="record 4: it was changed")

    monkeypatch.setattr(guide, "verify_log", not_intact)
    assert await _toured_without(monkeypatch) == 1
    assert "✗ the commit log is intact. Instead: not intact: record 4: it was changed" in capsys.readouterr().out


def test_the_leftover_check_finds_a_process_that_survives_its_sandbox(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("begun\n")
    by_environment = (["sh", "-c", "echo begun; exec sleep 600"], {"HOME": str(tmp_path)})
    for arguments, environment in (by_environment, (["tail", "-f", f"{tmp_path}/f"], {})):
        process = subprocess.Popen(
            arguments, env={"PATH": os.environ["PATH"], **environment}, stdout=subprocess.PIPE, text=True
        )
        with process:
            # A process shows what it was given only some time after it was started.
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            try:
                assert any(told.startswith(f"{process.pid} (") for told in survivors(tmp_path))
            finally:
                process.kill()
        assert survivors(tmp_path) == []
