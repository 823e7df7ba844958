"""Failures that the sandbox causes get a note; similar output for other reasons gets none."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
from tests.runtime.test_shell import ANY, shell_on

from handrail.contract.sandbox_protocol import Sandbox
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("S-08")

NETWORK = "This call has no network"
READ_ONLY = "Programs can write only in the workspace"
LOOPBACK = "At 127.0.0.1 and localhost"
OUTSIDE = "is outside the folders that programs can see"
UNIX = "cannot create Unix sockets"
SERVICES = "do not reach the services of this machine"
ROOT = "do not have the rights of root"
HOME = "their $HOME is a private folder"


@pytest.fixture
def sandbox() -> Sandbox:
    chosen = tier_probe.choose_sandbox()
    if not chosen.tier.is_confining:
        pytest.skip(f"this machine cannot confine programs: {chosen.tier.detail}; {chosen.tier.remedy}")
    return GuardedSandbox(chosen)


async def notes_of(sandbox: Sandbox, workspace: Path, command: str) -> str:
    return "\n".join((await shell_on(sandbox, workspace, ANY).run(command)).notes)


@pytest.mark.parametrize(
    ("command", "sign"),
    [
        ("curl -s https://example.org", NETWORK),
        ("curl https://example.org", NETWORK),
        ("curl -sS http://192.0.2.1/", NETWORK),
        ("wget -q https://example.org", NETWORK),
        ("git ls-remote https://example.org/x.git", NETWORK),
        ("python3 -c 'import socket; socket.getaddrinfo(\"example.org\", 443)'", NETWORK),
        ("python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80))'", NETWORK),
        ("node -e 'fetch(\"https://example.org\").catch(e => { console.error(e); process.exit(1) })'", NETWORK),
        ('node -e \'require("net").connect(1, "192.0.2.1")\'', NETWORK),
        ("npm view left-pad --fetch-retries=0", NETWORK),
        ("pip download --retries 0 nothing-there", NETWORK),
        ("cargo search x", NETWORK),
        ("curl -s http://127.0.0.1:9", LOOPBACK),
        ("curl http://localhost:9", LOOPBACK),
        ("python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:9\")'", LOOPBACK),
        ("bash -c 'exec 3<>/dev/tcp/127.0.0.1/9'", LOOPBACK),
        ("node -e 'fetch(\"http://127.0.0.1:8799\").catch(e => { console.error(e); process.exit(1) })'", LOOPBACK),
        ("echo x > /usr/share/x", READ_ONLY),
        ("mkdir /opt/new", OUTSIDE),
        ("cat /home/somebody/notes.txt", OUTSIDE),
        ("python3 -c 'open(\"/srv/data/x\")'", OUTSIDE),
        ('python3 -c \'open("/usr/x", "w")\'', READ_ONLY),
        ('node -e \'require("fs").writeFileSync("/usr/x", "")\'', READ_ONLY),
        ("python3 -c 'import socket; socket.socket(socket.AF_UNIX)'", UNIX),
        ("docker ps", SERVICES),
        ("systemctl status", SERVICES),
        ("apt-get install -y jq", ROOT),
        ("chown 1 .", ROOT),
        ("sudo -n true", ROOT),
        ("cat ~/.ssh/id_rsa", HOME),
        ("ls ~/.aws", HOME),
        ("python3 -c 'import pathlib; pathlib.Path.home().joinpath(\".netrc\").read_text()'", HOME),
    ],
)
async def test_a_failure_caused_by_the_sandbox_has_a_matching_note(
    sandbox: Sandbox, workspace: Path, command: str, sign: str
) -> None:
    program = command.split()[0]
    if shutil.which(program) is None and program != "echo":
        pytest.skip(f"{program} is not installed")
    said = await shell_on(sandbox, workspace, ANY).run(f"{command}; exit $?")
    notes = "\n".join(said.notes)
    assert sign in notes, (said.exit_code, said.output, notes)
    others = {NETWORK, READ_ONLY, LOOPBACK, UNIX, OUTSIDE, SERVICES, ROOT, HOME} - {sign}
    assert not any(other in notes for other in others), notes


@pytest.mark.parametrize(
    "command",
    [
        "echo 'curl: (6) Could not resolve host: example.org'",
        "echo 'touch: cannot touch /usr/x: Read-only file system'",
        "echo 'bash: line 1: node: command not found'",
        "echo 'Failed to connect to 127.0.0.1 port 9: Connection refused'",
        "printf 'Name or service not known\\nAddress family not supported by protocol\\n' | tee log",
        "echo 'all tests passed' && false",
        "grep -r nothing-like-it .",
        "ls gone",
        "ls /usr/gone /etc/gone /tmp/gone $HOME/gone $PWD/gone",
        "sh -c 'exit 6'",
        "sh -c 'exit 127'",
        "no-such-program-anywhere",
        "kill 999999",
        "python3 -c 'raise SystemExit(\"the socket and the daemon are gone\")'",
        "touch a && chmod 0 a && rm -f a && false",
    ],
)
async def test_a_program_that_fails_for_another_reason_gets_no_note(
    sandbox: Sandbox, workspace: Path, command: str
) -> None:
    assert await notes_of(sandbox, workspace, command) == ""


_CATCHING = """python3 - <<'END'
import socket
try:
    socket.create_connection(("192.0.2.1", 80))
except OSError:
    print("offline")
END"""


@pytest.mark.parametrize(
    "command",
    [
        "curl -s http://192.0.2.1/ || true",
        "curl -s http://192.0.2.1/ 2>/dev/null; echo done",
        "wget -q http://192.0.2.1/ | wc -c",
        "test -z $(curl -s http://192.0.2.1/)",
        _CATCHING,
        "python3 -c 'import socket; socket.socket(socket.AF_INET6).connect_ex((\"2001:db8::1\", 80)); raise SystemExit(1)'",
    ],
)
async def test_a_hidden_network_failure_has_a_note(sandbox: Sandbox, workspace: Path, command: str) -> None:
    if shutil.which(program := command.split()[0]) is None:
        pytest.skip(f"{program} is not installed")
    assert NETWORK in await notes_of(sandbox, workspace, command)


@pytest.mark.parametrize(
    "command",
    [
        "curl -s http://127.0.0.1:9/ || true",
        "python3 -c 'import socket; print(socket.gethostbyname(\"localhost\"))'; true",
        "python3 -c 'import socket; print(socket.socket().connect_ex((\"192.0.2.1\", 80)))'",
        "echo curl http://192.0.2.1/ || true",
    ],
)
async def test_a_call_that_succeeds_or_stays_in_its_sandbox_gets_no_network_note(
    sandbox: Sandbox, workspace: Path, command: str
) -> None:
    assert NETWORK not in await notes_of(sandbox, workspace, command)


def put_program(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\necho ran\n")
    (folder / name).chmod(stat.S_IRWXU)


@pytest.mark.parametrize(
    "command",
    ["only-here", "sh -c only-here", "env only-here", "python3 -c 'import subprocess as s; s.run([\"only-here\"])'"],
)
async def test_a_program_hidden_by_the_sandbox_is_named_with_its_folder(
    sandbox: Sandbox, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    home = tmp_path / "home"
    put_program(home / ".cargo" / "bin", "only-here")
    monkeypatch.setenv("HOME", str(home))
    notes = await notes_of(sandbox, workspace, command)
    assert "`only-here` is in" in notes and ".cargo/bin" in notes and "PATH" in notes
    assert await notes_of(sandbox, workspace, f"{command} || true") == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["/", "/a", "a/b.", "object directory a", "x: ", "'/a", "127.0.0.1 "])
async def test_a_long_last_line_is_searched_in_one_pass(sandbox: Sandbox, workspace: Path, unit: str) -> None:
    """Each of these took minutes, in which nothing else was answered."""
    (workspace / "said").write_text(unit * (100_000 // len(unit)))
    assert OUTSIDE not in await notes_of(sandbox, workspace, "cat said >&2; exit 1")


async def test_a_missing_path_is_found_after_any_sign(sandbox: Sandbox, workspace: Path) -> None:
    for said in ("cat: /srv/a/b", "open '/srv/a/b'", "x=/srv/a/b", "(/srv/a/b", "a:/srv/a/b"):
        (workspace / "said").write_text(f"{said}: No such file or directory")
        assert "/srv/a/b" in await notes_of(sandbox, workspace, "cat said >&2; exit 1"), said
