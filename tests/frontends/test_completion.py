"""Shell completion, requested as the shells do."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frontends.conftest import Ended, Here, Program
from tests.prefork import command as prefork

from handrail.frontends.cli.command_group import COMMANDS, run_command_line

pytestmark = pytest.mark.proves("F-02a")

SHELLS = ("bash", "zsh", "fish")


def complete_line(handrail: Program, *words: str) -> Ended:
    """Return the completions in bash for a line that ends with the last of ``words``."""
    line = ["handrail", *(shlex.quote(word) if " " in word else word for word in words)]  # as it is typed
    own = {"_HANDRAIL_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        prefork.handrail(),
        env={**os.environ, **own, "HANDRAIL_STATE": str(handrail.state)},
        cwd=handrail.workspace,
        capture_output=True,
        text=True,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def offered(handrail: Program, *words: str) -> list[str]:
    done = complete_line(handrail, *words)
    assert (done.code, done.err) == (0, "")
    return [line.split(",", 1)[1] for line in done.out.splitlines() if line]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_can_parse_its_completion_script(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command_line(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert f"_HANDRAIL_COMPLETE={shell}_complete" in text and "_handrail_completion" in text
    if (program := shutil.which(shell)) is not None:
        (tmp_path / "script").write_text(text)
        assert subprocess.run([program, "-n", str(tmp_path / "script")], capture_output=True).returncode == 0


def test_commands_and_options_are_completed(handrail: Program) -> None:
    assert offered(handrail, "") == list(COMMANDS)
    assert offered(handrail, "co") == ["config", "completion"]
    assert offered(handrail, "call", "--wo") == ["--workspace"]
    assert offered(handrail, "log", "") == ["list", "verify", "acknowledge", "purge"]
    assert offered(handrail, "completion", "z") == ["zsh"]
    assert offered(handrail, "log", "--he") == ["--head", "--help"]


def test_tools_sessions_and_calls_are_completed_from_stored_state(here: Here, handrail: Program) -> None:
    assert "read" in offered(handrail, "call", "r")  # those that ship, where nothing is kept yet
    assert not handrail.state.exists()
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    assert offered(handrail, "call", "gr") == ["grep"]
    assert offered(handrail, "explain", "gr") == ["grep"]
    (session,) = offered(handrail, "log", "--session", "")
    (call,) = offered(handrail, "log", "--call", session[:6])
    assert call.startswith(f"{session}/") and offered(handrail, "explain", session) == [call]
    assert offered(handrail, "log", "--session", "nothing") == []


def test_completion_offers_resumable_sessions_and_pending_requests(
    here: Here, handrail: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_HEADLESS", "0")
    (tmp_path / "said.toml").write_text('version = 1\n[[turns]]\ntext = "Said."\n')
    assert here("call", "read", '{"path": "note.txt"}').code == 0  # a session that is closed
    waits = here("call", "write", '{"path": "new.txt", "content": ""}')  # one in which nothing was said
    assert here("run", "a task", "--model", f"script:{tmp_path / 'said.toml'}").code == 0
    assert len(offered(handrail, "sessions", "show", "")) == 3
    (resumable,) = offered(handrail, "run", "--resume", "")
    assert offered(handrail, "run", "--fork", "ses_") == [resumable]
    assert offered(handrail, "explain", "apr_") == [waits.out.strip()]


def test_completion_uses_the_workspace_of_the_command_line(here: Here, handrail: Program, tmp_path: Path) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    other = tmp_path / "other"
    other.mkdir()
    assert offered(handrail, "log", "--session", "") != []
    assert offered(handrail, "log", "--workspace", str(other), "--session", "") == []
    assert offered(handrail, "log", "--workspace", str(tmp_path / "nowhere"), "--session", "") == []


@pytest.mark.parametrize("words", [("nothing", "x"), ("log", "--call", "%_'\""), ("log", "--session", "\x1b")])
def test_meaningless_words_complete_to_nothing_without_an_error(handrail: Program, words: tuple[str, ...]) -> None:
    done = complete_line(handrail, *words)
    assert (done.code, done.err) == (0, "") and done.out.strip() == ""


def test_a_damaged_log_causes_no_error_during_completion(here: Here, handrail: Program) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    (database,) = handrail.state.glob("ws/*/handrail.db")
    database.write_bytes(b"x" * 5000)
    for words in (("call", "r"), ("log", "--session", ""), ("log", "--call", "s")):
        assert complete_line(handrail, *words).err == ""


def test_completion_loads_no_kernel(here: Here, handrail: Program) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    code = (
        "import os, sys\nfrom handrail.frontends.cli.command_group import run_command_line as run\n"
        "try:\n    run([])\nexcept SystemExit:\n    pass\n"
        "print('LOADED', sorted({'handrail.kernel.kernel_interface', 'handrail.tools', 'pydantic', 'rich', 'mcp'} & set(sys.modules)))"
    )
    own = {"_HANDRAIL_COMPLETE": "bash_complete", "COMP_WORDS": "handrail call gre", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **own, "HANDRAIL_STATE": str(handrail.state)},
        cwd=handrail.workspace,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["plain,grep", "LOADED []"]


def test_a_pending_request_is_completed_by_its_id(here: Here, handrail: Program) -> None:
    assert here("call", "write", '{"path": "new.txt", "content": "x"}').code == 4
    (waiting,) = offered(handrail, "approve", "")
    assert waiting in here("approve", "--json").out
    assert offered(handrail, "call", "--resume", waiting[:6]) == [waiting]
