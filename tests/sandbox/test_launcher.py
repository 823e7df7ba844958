"""The first process of a sandbox, before and during its program, in Perl and in Python."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import socket
import string
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, SandboxLimits, SandboxTier
from handrail.sandbox.bubblewrap import BubblewrapSandbox
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.launcher_messages import LauncherProgram, is_safe_to_evaluate_text
from handrail.sandbox.start.sandboxed_process import SandboxedProcess
from handrail.sandbox.start.spawn import find_bubblewrap_programs

LAUNCHERS = [
    found
    for found in (launcher_messages.find_perl_launcher(), launcher_messages.find_python_launcher())
    if found is not None
]


@pytest.fixture(params=LAUNCHERS, ids=lambda found: found.name)
def first(request: pytest.FixtureRequest) -> LauncherProgram:
    return request.param


@pytest.fixture
def launched(ground: SandboxFolders, first: LauncherProgram) -> SandboxFolders:
    """The ground with this launcher in its sandboxes."""
    ground.sandbox = BubblewrapSandbox(
        next(find_bubblewrap_programs()), SandboxTier("bubblewrap", "for a test"), first=first
    )
    return ground


async def test_the_launcher_returns_exit_codes_and_signals_as_a_shell_does(launched: SandboxFolders) -> None:
    for script, code in (("exit 0", 0), ("exit 77", 77), ("kill -SEGV $$", 128 + signal.SIGSEGV), ("kill $$", 143)):
        assert (await launched.bash(script)).code == code


async def test_the_launcher_returns_shell_exit_codes_for_a_missing_or_unrunnable_program(
    launched: SandboxFolders,
) -> None:
    (launched.workspace / "plain").write_text("no program")
    (launched.workspace / "script").write_text("exit 5")
    (launched.workspace / "script").chmod(0o755)
    for program, code, said in (("absent", 127, b"not found"), ("./plain", 126, b"denied"), ("./script", 5, b"")):
        process = await launched.start(program, "x")
        out, errors, _ = await process.communicate(b"", 1000)
        assert (await process.wait(), out, said in errors) == (code, b"", True)


async def test_arguments_reach_the_program_byte_for_byte(launched: SandboxFolders) -> None:
    words = ["", " ", "a b", "-x", "\n\t", "é☃", os.fsdecode(b"\xff\x01\x7f\x80"), "x" * 100_000]
    process = await launched.start("/usr/bin/printf", "%s\\0", *words)
    out, _, _ = await process.communicate(b"", 1 << 20)
    assert out.split(b"\0")[:-1] == [os.fsencode(word) for word in words]


async def test_the_program_gets_exactly_the_given_environment(launched: SandboxFolders) -> None:
    process = await launched.start("/usr/bin/env", "-0", environment={"EMPTY": "", "ODD": "a=b\nc"})
    out, _, _ = await process.communicate(b"", 1 << 20)
    found = dict(entry.split(b"=", 1) for entry in out.split(b"\0")[:-1])
    assert (found[b"EMPTY"], found[b"ODD"], found[b"HOME"]) == (b"", b"a=b\nc", os.fsencode(launched.scratch))
    assert not {b"_", b"SHLVL", b"PWD", b"OLDPWD"} & set(found)  # no shell was in between


async def test_the_program_inherits_no_descriptor_of_the_launcher(launched: SandboxFolders) -> None:
    process = await launched.start("/bin/ls", "-l", "/proc/self/fd")
    out, _, _ = await process.communicate(b"", 1000)
    opened = [line.split()[8:] for line in out.decode().splitlines()[1:]]
    assert [number for number, _, target in opened if not target.endswith("/fd")] == ["0", "1", "2"]
    assert len(opened) == 4


async def test_a_program_cannot_signal_or_inspect_the_first_process(launched: SandboxFolders) -> None:
    ran = await launched.bash("kill -9 1; kill 1; cat /proc/1/environ /proc/1/mem; head -c1 /proc/1/fd/*; echo $PPID")
    assert (ran.out, ran.code) == ("1\n", 0)


async def test_resource_limits_apply_and_cannot_be_raised(launched: SandboxFolders) -> None:
    ran = await launched.bash(
        "ulimit -n; ulimit -f; ulimit -n 4096; ulimit -n", limits=SandboxLimits(open_files=99, file_bytes=1 << 20)
    )
    assert ran.out.split() == ["99", "1024", "99"]
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert own[0] != 99


@pytest.mark.proves("S-06")
async def test_secrets_are_readable_only_from_a_descriptor(launched: SandboxFolders) -> None:
    secrets = {"TOKEN": "tok-" + "s" * 30, "KEY": 'é"\n' * 50_000}
    script = (
        "import json, os, sys\n"
        "number = int(os.environ['HANDRAIL_SECRETS_FD'])\n"
        "text = os.fdopen(number).read()\n"
        "print(json.dumps([number, json.loads(text)]))\n"
        "for place in ('self/environ', 'self/cmdline', '1/cmdline'):\n"
        "    assert 's' * 30 not in open(f'/proc/{place}', errors='replace').read()\n"
    )
    process = await launched.sandbox.start(
        launched.capabilities, launched.profile(secrets=secrets), ProgramSpec(["python3", "-c", script])
    )
    out, errors, _ = await process.communicate(b"", 1 << 20)
    assert errors == b""
    number, read = json.loads(out)
    assert (number, read) == (3, secrets)
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # others end while this looks
            assert b"tok-s" not in entry.read_bytes()


async def test_secrets_and_a_passed_descriptor_are_both_readable(launched: SandboxFolders) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from the pipe")
    os.close(writing)
    process = await launched.sandbox.start(
        launched.capabilities,
        launched.profile(secrets={"A": "b"}),
        ProgramSpec(
            ["/bin/bash", "-c", "cat <&7; cat <&$HANDRAIL_SECRETS_FD; echo $HANDRAIL_SECRETS_FD"], {7: reading}
        ),
    )
    os.close(reading)
    out, _, _ = await process.communicate(b"", 1000)
    assert out == b'from the pipe{"A":"b"}8\n'


async def test_too_many_arguments_fail_with_a_limit_error(launched: SandboxFolders) -> None:
    process = await launched.start("/bin/true", *(["x" * 100_000] * 40))
    with pytest.raises(ToolError, match="too long") as caught:
        await process.communicate(b"", 100)
    assert caught.value.kind == "limit"


async def test_a_missing_working_folder_is_a_sandbox_error(launched: SandboxFolders) -> None:
    process = await launched.start("true", cwd=str(launched.workspace / "absent"))
    with pytest.raises(ToolError, match="absent") as caught:
        await process.communicate(b"", 100)
    assert caught.value.kind == "backend"


@pytest.mark.proves("S-05")
async def test_orphaned_processes_are_reaped_while_the_program_runs(launched: SandboxFolders) -> None:
    ran = await launched.bash(
        "for i in 1 2 3 4 5 6 7 8; do (true &); done;"
        "  while grep -ls '^State:.Z' /proc/[0-9]*/status > /dev/null; do :; done; echo none"
    )
    assert ran.out == "none\n"


@pytest.mark.proves("S-05")
async def test_a_sandbox_ends_when_its_lifeline_is_closed(launched: SandboxFolders) -> None:
    process = await launched.start("/bin/bash", "-c", "echo begun; read -t 30 forever")
    assert await process.read_line(100) == b"begun\n"
    assert isinstance(process, SandboxedProcess)
    process.close_lifeline()
    assert await process.wait() == 129, "it was ended, and did not come to its own end"


def spoken_to(first: LauncherProgram, letter: bytes) -> tuple[bytes, int]:
    """Return the launcher's answer to ``letter`` outside any sandbox, and its exit code."""
    here, there = socket.socketpair()
    lifeline_here, lifeline = socket.socketpair()
    text = os.memfd_create("letter")
    os.write(text, letter)
    os.lseek(text, 0, os.SEEK_SET)
    spare = os.dup(0)
    numbers = (there.fileno(), text, lifeline.fileno(), spare)
    with here, lifeline_here:
        done = subprocess.run([*first.argv, *map(str, numbers)], pass_fds=numbers, stdin=subprocess.DEVNULL)
        there.close()
        lifeline.close()
        os.close(text)
        os.close(spare)
        return here.recv(4096), done.returncode


def test_the_launcher_refuses_to_start_in_a_namespace_shared_with_the_machine(first: LauncherProgram) -> None:
    answer, code = spoken_to(first, launcher_messages.encode_launcher_setup("exec", None, {}, {}))
    assert (answer, code) == (b"Eit shares the mnt namespace of this machine", 125)


@pytest.mark.parametrize("length", [0, 3, 20, 100])
def test_a_truncated_launcher_message_starts_no_program(first: LauncherProgram, length: int) -> None:
    answer, code = spoken_to(first, launcher_messages.encode_launcher_setup("exec", None, {}, {})[:length])
    assert (answer, code) == (b"Ethe letter is cut", 125)


# ── texts that a waiting shell may evaluate ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "  ls -la ; pwd\n",
        "cd src && python3 -m pytest -q tests/x.py 2>&1 | tail -20",
        "grep -rn 'a b$c' . > out.txt; cat < out.txt",
        "git commit -m \"say 'it'\" && git status --short || echo no",
        "echo a\necho b\n\necho c",
    ],
)
def test_ordinary_command_texts_are_safe_to_evaluate(text: str) -> None:
    assert is_safe_to_evaluate_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "if",
        "echo 'a",
        "set -x; true",
        "a &&",
        "&& a",
        "a;;b",
        "echo $HOME",
        "$(date)",
        "a & b",
        "(a)",
        "{ a; }",
        "! a",
        "[[ a ]]",
        "time a",
        "cat <<X\nX",
        "a > ",
        "a |& b",
        "f() { a; }",
        ". file",
        "eval a",
        "a #b",
        "a\\",
        "`a`",
        '"$x"',
        "bash && set -o xtrace",
        "x" * 5000,
        "echo \x01",
        "é",
        "a\x00b",
        "case",
        "exec ls",
        "a[",
        "true; b[1",
        "trap x EXIT",
    ],
)
def test_a_text_with_observable_evaluation_differences_is_not_safe_to_evaluate(text: str) -> None:
    assert not is_safe_to_evaluate_text(text)


PIECES = st.sampled_from(
    [
        "a",
        "ls",
        "-l",
        "x=1",
        "'q q'",
        '"d d"',
        ">",
        ">>",
        "<",
        "2>&1",
        ">&2",
        "|",
        "||",
        "&&",
        ";",
        "\n",
        "&",
        " ",
        "\t",
        "if",
        "fi",
        "do",
        "done",
        "then",
        "!",
        "[",
        "]",
        "[[",
        "{",
        "}",
        "(",
        ")",
        "$",
        "`",
        "'",
        '"',
        "#",
        "\\",
        ".",
        "set",
        *string.punctuation,
    ]
)


@settings(max_examples=3 * settings().max_examples)
@given(pieces=st.lists(PIECES, min_size=1, max_size=8))
def test_a_text_that_is_safe_to_evaluate_has_no_syntax_error(pieces: list[str]) -> None:
    text = " ".join(pieces) if len(pieces) % 2 else "".join(pieces)
    if is_safe_to_evaluate_text(text):
        # -n: read, nothing is run
        checked = subprocess.run(["/bin/bash", "--noprofile", "--norc", "-n", "-c", "--", text], capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, b""), shlex.quote(text)
