"""The shell service: commands and argument lists in the sandbox, authorized, and ended with their call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Sandbox, SandboxProfile, SandboxTier
from handrail.contract.tool.requires import Capability, CapabilityLayer, CapabilitySet, ShellRequires
from handrail.runtime import shell_service
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.shell_service import SandboxedShell
from handrail.sandbox import tier_probe

pytestmark = pytest.mark.proves("K-11a")


@pytest.fixture
def sandbox() -> Sandbox:
    chosen = tier_probe.choose_sandbox()
    if not chosen.tier.is_confining:
        pytest.skip(f"this machine cannot confine programs: {chosen.tier.detail}; {chosen.tier.remedy}")
    return chosen


class RecordingCheck:
    """Remembers what was to be run, and refuses what a test says."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.asked: list[tuple[str, str | Sequence[str]]] = []

    def __call__(self, capability: Capability, target: str | Sequence[str]) -> str | None:
        self.asked.append((capability, target))
        return self.refusal


def shell_on(
    sandbox: Sandbox, workspace: Path, *programs: ShellRequires, may: RecordingCheck | None = None
) -> SandboxedShell:
    scratch = workspace.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    folder = str(workspace)
    capabilities = CapabilitySet((CapabilityLayer("tool", (folder,), (folder,), (), programs),))
    return SandboxedShell(
        sandbox, SandboxProfile(folder, str(scratch)), capabilities, SessionRoots(workspace), may or RecordingCheck()
    )


ANY = ShellRequires(cmd="*")


async def test_a_command_text_runs_in_bash_and_an_argv_runs_without_a_shell(sandbox: Sandbox, workspace: Path) -> None:
    may = RecordingCheck()
    shell_service = shell_on(sandbox, workspace, ANY, may=may)
    text = await shell_service.run("echo $((1 + 1)) >&2; exit 3")
    assert (text.exit_code, text.output, text.signal) == (3, b"2\n", None)
    direct = await shell_service.run(["echo", "$HOME;", "*"])
    assert direct.output == b"$HOME; *\n"
    assert may.asked == [("shell.run", "echo $((1 + 1)) >&2; exit 3"), ("shell.run", ("echo", "$HOME;", "*"))]


async def test_an_argv_accepts_extra_environment_variables_and_a_command_text_does_not(
    sandbox: Sandbox, workspace: Path
) -> None:
    shell_service = shell_on(sandbox, workspace, ANY)
    told = await shell_service.run(["printenv", "GIT_PAGER", "LANG"], environment={"GIT_PAGER": "a b", "LANG": "C"})
    assert told.output == b"a b\nC\n"
    assert (await shell_service.run(["printenv", "GIT_PAGER"])).output == b""
    with pytest.raises(ToolError, match="extra environment variables"):
        await shell_service.run("printenv", environment={"GIT_PAGER": "a"})


async def test_stderr_is_captured_separately_on_request(sandbox: Sandbox, workspace: Path) -> None:
    done = await shell_on(sandbox, workspace, ANY).run("echo one; echo two >&2; exit 3", separate_stderr=True)
    assert (done.exit_code, done.output, done.stderr) == (3, b"one\n", b"two\n")


async def test_paths_that_the_rules_hide_are_listed(sandbox: Sandbox, workspace: Path) -> None:
    shell_service = shell_on(sandbox, workspace, ANY)
    assert list(await shell_service.list_hidden_paths(["a", "b"])) == []
    assert list(
        await shell_on(sandbox, workspace, ANY, may=RecordingCheck("no")).list_hidden_paths(["a", "gone/b"])
    ) == [
        "a",
        "gone/b",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("PATH", "x"), ("LD_PRELOAD", "x"), ("BASH_ENV", "x"), ("HOME", "/"), ("https_proxy", ""), ("A=B", "x"), ("", "x"),
     ("HTTP_PROXY", "x"), ("HANDRAIL_SECRETS", "3"), ("A", "x\0y")],
)  # fmt: skip
async def test_a_reserved_or_invalid_environment_variable_is_refused(
    sandbox: Sandbox, workspace: Path, name: str, value: str
) -> None:
    with pytest.raises(ToolError) as refused:
        await shell_on(sandbox, workspace, ANY).run(["true"], environment={name: value})
    assert refused.value.kind == "invalid_input"


async def test_stdin_is_passed_to_the_program_and_then_closed(sandbox: Sandbox, workspace: Path) -> None:
    assert (await shell_on(sandbox, workspace, ANY).run("wc -c", stdin=b"12345")).output.strip() == b"5"
    assert (await shell_on(sandbox, workspace, ANY).run("cat")).output == b""


async def test_the_working_directory_must_be_the_workspace_or_a_folder_below_it(
    sandbox: Sandbox, workspace: Path
) -> None:
    (workspace / "sub").mkdir()
    (workspace / "out").symlink_to("..")
    shell_service = shell_on(sandbox, workspace, ANY)
    assert (await shell_service.run("pwd")).output.decode().strip() == str(workspace)
    assert (await shell_service.run(["pwd"], cwd="sub")).output.decode().strip() == str(workspace / "sub")
    for cwd, kind in (("..", "denied"), ("out", "denied"), ("/", "denied"), ("absent", "failed")):
        with pytest.raises(ToolError) as caught:
            await shell_service.run("pwd", cwd=cwd)
        assert caught.value.kind == kind


async def test_a_command_without_its_shell_capability_does_not_run(sandbox: Sandbox, workspace: Path) -> None:
    for command in ("true", ["true"]):
        with pytest.raises(ToolError, match="not allowed in this call") as caught:
            await shell_on(sandbox, workspace).run(command)
        assert caught.value.kind == "denied"
    with pytest.raises(ToolError, match="not allowed in this call"):
        await shell_on(sandbox, workspace, ShellRequires(cmd="git")).run(["rm", "-rf", "."])


async def test_a_command_refused_by_the_rules_is_not_run(sandbox: Sandbox, workspace: Path) -> None:
    for command in ("touch made", ["touch", "made"]):
        with pytest.raises(ToolError, match="no rule allows") as caught:
            await shell_on(sandbox, workspace, ANY, may=RecordingCheck("no rule allows this")).run(command)
        assert caught.value.kind == "denied"
    assert not (workspace / "made").exists()


@pytest.mark.parametrize("command", ["", "  \n", "a\0b", (), ("",), ("a", "\0")])
async def test_a_command_that_names_no_program_is_invalid(
    sandbox: Sandbox, workspace: Path, command: str | tuple[str, ...]
) -> None:
    with pytest.raises(ToolError) as caught:
        await shell_on(sandbox, workspace, ANY).run(command)
    assert caught.value.kind == "invalid_input"


@pytest.mark.proves("S-05")
async def test_a_cancelled_command_leaves_no_process_and_its_output_was_delivered(
    sandbox: Sandbox, workspace: Path
) -> None:
    marker = f"handrail-{secrets.token_hex(8)}"
    heard = asyncio.Event()
    pieces: list[bytes] = []

    def hear(piece: bytes) -> None:
        pieces.append(piece)
        heard.set()

    run = asyncio.create_task(
        shell_on(sandbox, workspace, ANY).run(
            f"trap '' TERM INT; echo begun; read {marker[:8]} < <(sleep 1000); : {marker}", on_output=hear
        )
    )
    await heard.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert pieces == [b"begun\n"]
    lines = [entry / "cmdline" for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not any(marker.encode() in line.read_bytes() for line in lines if line.exists())


async def test_the_output_callback_gets_one_notice_when_further_output_is_dropped(
    sandbox: Sandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_service, "MAX_OUTPUT_BYTES", 100)
    pieces: list[bytes] = []
    done = await shell_on(sandbox, workspace, ANY).run(
        "for n in 1 2 3 4 5; do printf %050d $n; done", on_output=pieces.append
    )
    assert (len(done.output), done.dropped_bytes) == (100, 150)
    assert b"".join(pieces) == done.output + b"\n[the output continues; its first 100 bytes are kept]\n"
    pieces.clear()
    await shell_on(sandbox, workspace, ANY).run("printf %0100d 1", on_output=pieces.append)
    assert len(b"".join(pieces)) == 100, "nothing was left out"


async def test_the_result_has_the_tail_of_dropped_output(
    sandbox: Sandbox, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_service, "MAX_OUTPUT_BYTES", 150)
    monkeypatch.setattr(shell_service, "TAIL_BYTES", 50)
    pieces: list[bytes] = []
    shell = shell_on(sandbox, workspace, ANY)
    done = await shell.run("for n in 1 2 3 4 5; do printf %050d $n; done", on_output=pieces.append, keep_bytes=20)
    passed = b"".join(pieces)
    assert passed == b"%050d%050d" % (1, 2) and done.output == passed[:20]
    assert (done.dropped_bytes, done.tail) == (150, b"%050d" % 5)
    done = await shell.run("printf %030d 1", keep_bytes=20)
    assert (done.dropped_bytes, done.output, done.tail) == (0, b"0" * 20, b"0" * 9 + b"1")
    done = await shell.run("printf %020d 1", keep_bytes=20)
    assert (done.dropped_bytes, done.tail) == (0, b"")


async def test_no_command_runs_on_a_machine_without_a_sandbox(workspace: Path) -> None:
    refusing = tier_probe.RefusingSandbox(SandboxTier("none", "bubblewrap is not installed", "install it"))
    with pytest.raises(
        ToolError, match=r"bubblewrap is not installed\. Ask the user to fix this: install it\."
    ) as caught:
        await shell_on(refusing, workspace, ANY).run("touch made")
    assert caught.value.kind == "unavailable"
    assert not (workspace / "made").exists()
