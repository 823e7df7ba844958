"""The sandbox and services of a kernel against a model whose calls are all approved."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.conftest import Probe
from tests.attacks.victim import AgreeingUser

from handrail.kernel.doctor import check_machine
from handrail.kernel.kernel_interface import Kernel
from handrail.kernel.workspace_opening import open_kernel
from handrail.origins.program_lookup import ProgramRefused, find_program
from handrail.runtime.ripgrep import find_ripgrep
from handrail.sandbox import tier_probe
from handrail.session.local_session import LocalSession as Session
from handrail.store.state_folders import prepare_folders

pytestmark = pytest.mark.attack("sandbox")

pytestmark = pytest.mark.attack("sandbox")

ESCAPES = [
    # (what is tried, what is printed only where it worked; the source)
    ("cat ../beside/key ws/../../beside/key /proc/self/root/../beside/key", "TOP-SECRET"),  # paths out of the folder
    ("ln -s ../beside/key l; cat l; ln ../beside/key h; cat h", "TOP-SECRET"),  # links out of it
    ("kill -0 PARENT && echo REACHED", "REACHED"),  # signals to processes outside
    ("exec 3<>/dev/tty && echo REACHED", "REACHED"),  # TIOCSTI needs the terminal
    ("unshare -Ur echo REACHED", "REACHED"),  # a further user namespace
    ("bwrap --ro-bind / / echo REACHED", "REACHED"),  # a sandbox in the sandbox
    ("nsenter -t 1 -a echo REACHED", "REACHED"),  # namespaces of the first process
    ("grep -q 'NoNewPrivs:.1' /proc/self/status || echo REACHED", "REACHED"),  # setuid programs
    ("ls /sys /run/* /var/run/* /tmp/.X11-unix 2>/dev/null && echo REACHED", "REACHED"),  # docker, dbus, X11
    ("env | grep -i -e agent -e dbus -e display -e docker && echo REACHED", "REACHED"),  # the ways to them
    ("grep -q LEAKED /proc/1/environ /proc/self/environ && echo REACHED", "REACHED"),  # tokens in the environment
    ("grep -e '^[^@]*@' /proc/net/unix && echo REACHED", "REACHED"),  # abstract sockets
    ("echo x > /proc/sys/kernel/hostname && echo REACHED", "REACHED"),  # the host's settings
    ("mknod /tmp/d b 8 0 && echo REACHED; mount -t tmpfs t /tmp && echo REACHED", "REACHED"),  # devices and mounts
    ("python3 -c 'import socket; socket.socket(17, 3); print(\"REACHED\")'", "REACHED"),  # raw packets
]


@pytest.mark.proves("S-01")
async def test_a_program_inherits_its_three_streams_and_nothing_else(probe: Probe) -> None:
    """Source: descriptors of the parent, the log's database among them, open in the child."""
    text = await probe("ls -l /proc/$$/fd; ls -l /proc/$$/fd | grep -v pipe | grep -e '->'")
    assert sorted(line.split()[-3] for line in text.splitlines() if "->" in line) == ["0", "1", "2"]


@pytest.mark.proves("S-01")
async def test_a_command_that_begins_with_a_dash_is_not_read_as_an_option(probe: Probe) -> None:
    """Source: argument injection into ``sh -c``."""
    assert "command not found" in await probe("-o posix; true")


def _state_files(place: Path) -> list[str]:
    return sorted(str(path) for path in (place / "state").rglob("*"))


@pytest.mark.proves("S-03")
@pytest.mark.parametrize("form", ["{path}", "../state/{relative}", "link/{relative}", "x/../../state/{relative}"])
async def test_no_tool_reaches_the_state_folder_of_the_kernel(session: Session, place: Path, form: str) -> None:
    """Source: an audit log that the agent's own shell could erase."""
    (place / "ws" / "link").symlink_to(place / "state")
    database = next((place / "state").rglob("handrail.db"))
    path = form.format(path=database, relative=database.relative_to(place / "state"))
    folder = path.rpartition("/")[0]
    await session.call("bash", {"command": "touch first"})  # the first program makes the folder of kept files
    before = _state_files(place)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("read", {"path": path}),
        ("read", {"path": path, "unit": "bytes"}),
        ("write", {"path": f"{folder}/new", "content": "x"}),
        ("edit", {"path": path, "old": "a", "new": "b"}),
        ("file.patch", {"path": path, "operations": [{"op": "append", "content": "x"}]}),
        ("glob", {"pattern": "**", "path": folder}),
        ("grep", {"pattern": ".", "path": folder}),
        ("grep", {"pattern": ".", "path": path}),
    ]
    for name, arguments in calls:
        assert (await session.call(name, arguments)).error_kind == "denied", (name, arguments)
    if tier_probe.probe_tier().is_confining:
        for command in (f"cat {path}", f"rm -rf {folder}", f"echo x > {folder}/new"):
            result = await session.call("bash", {"command": command})
            assert "SQLite" not in str(result.data)
    assert _state_files(place) == before


@pytest.mark.proves("S-01")
async def test_a_program_cannot_see_or_change_the_state_folder_inside_a_mounted_toolchain(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: an installation prefix on PATH is mounted whole, whatever else an operator keeps in it."""
    if not tier_probe.probe_tier().is_confining:
        pytest.skip("this machine cannot confine programs")
    prefix = place / "prefix"
    for name in ("bin", "lib"):
        (prefix / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{prefix}/bin:{os.environ['PATH']}")
    state, config = prefix / "var" / "state", place / "handrail.toml"
    config.touch()
    async with open_kernel(place / "ws", state=state, config=config, rules=["ask effect:external"]) as kernel:
        session, other = (
            await kernel.session(approval_handler=AgreeingUser()),
            await kernel.session(approval_handler=AgreeingUser()),
        )
        assert (await other.call("bash", {"command": "echo OTHERS > $HOME/theirs"})).ok
        text = f"ls {prefix}; find {state}; cat $(find {state} -type f); echo mine > $HOME/a && cat $HOME/a"
        output = (await session.call("bash", {"command": text})).data["output"]
        writing = (await session.call("bash", {"command": f"touch {state}/x; touch {prefix}/x"})).data
    assert "lib" in output
    assert "mine" in output
    assert "OTHERS" not in output
    assert "handrail.db" not in output
    assert other.id not in output
    assert writing["exit_code"] != 0
    assert not (state / "x").exists()


@pytest.mark.proves("O-01")
async def test_a_session_reads_neither_outputs_nor_scratch_of_another(kernel: Kernel, session: Session) -> None:
    other = await kernel.session(approval_handler=AgreeingUser())
    (Path(kernel.workdir) / "long").write_text("OTHERS\n" * 60_000)
    cut = await other.call("read", {"path": "long", "limit": 50_000})
    outputs = Path(session._lane.environment.roots.readable[0]).parent  # pyright: ignore[reportPrivateUsage]
    theirs = outputs / other.id
    for folder in (outputs.parent, outputs, theirs):  # each is made when a session first needs it
        folder.mkdir(mode=0o700, exist_ok=True)
    (theirs / "kept.txt").write_text("OTHERS")
    assert cut.ok
    for name, arguments in [
        ("read", {"path": str(theirs / "kept.txt")}),
        ("read", {"path": f"{outputs / session.id}/../{other.id}/kept.txt"}),
        ("grep", {"pattern": "OTHERS", "path": str(outputs)}),
        ("glob", {"pattern": "**", "path": str(theirs)}),
    ]:
        assert (await session.call(name, arguments)).error_kind == "denied", arguments


@pytest.mark.proves("S-03")
async def test_a_secret_file_cannot_be_read_through_links_other_spellings_or_search_tools(
    kernel: Kernel, place: Path
) -> None:
    """Source: deny lists walked around by links, spellings and other tools."""
    workspace = place / "ws"
    (workspace / "sub").mkdir()
    for name in (".env", "sub/.env.local", "server.pem", "sub/id_rsa"):
        (workspace / name).write_text("TOKEN=TOP-SECRET\n")
    (workspace / "plain.txt").symlink_to(".env")
    (workspace / "folder").symlink_to("sub")
    session = await kernel.session(rules=["allow write", "allow edit", "allow file.patch", "allow apply_patch"])
    paths = [".env", "./.env", "sub/../.env", "plain.txt", "folder/.env.local", "sub//id_rsa", str(workspace / ".env")]
    paths += ["server.pem", ".env/", ".env/.", "folder/./id_rsa", f"/proc/self/cwd/{workspace}/.env"]
    for path in paths:
        for name, arguments in [
            ("read", {"path": path}),
            ("read", {"path": path, "unit": "bytes"}),
            ("grep", {"pattern": "TOP", "path": path}),
            ("edit", {"path": path, "old": "TOKEN", "new": "X"}),
            ("file.patch", {"path": path, "operations": [{"op": "append", "content": "x"}]}),
            ("apply_patch", {"patch": f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-TOKEN=\n+X\n"}),
            ("apply_patch", {"patch": f"*** Begin Patch\n*** Delete File: {path}\n*** End Patch"}),
            ("apply_patch", {"patch": f"diff --git a/{path} b/x\ncopy from {path}\ncopy to x\n"}),
            ("write", {"path": path, "content": "x"}),
        ]:
            result = await session.call(name, arguments)
            assert not result.ok, (name, arguments)
            assert "TOP-SECRET" not in repr(result)
    for name, arguments in [
        ("grep", {"pattern": "TOP"}),
        ("grep", {"pattern": "TOP", "glob": ".env*"}),
        ("grep", {"pattern": "TOP", "glob": "*.pem"}),
        ("grep", {"pattern": "TOP", "path": "folder"}),
        ("glob", {"pattern": "**/.env*"}),
        ("glob", {"pattern": "*.pem"}),
    ]:
        result = await session.call(name, arguments)
        assert "TOP" not in repr(result.data)
        assert ".pem" not in repr(result.data)
        assert ".env" not in repr(result.data)
    assert (workspace / ".env").read_text() == "TOKEN=TOP-SECRET\n"


# ── programs that the kernel itself starts ───────────────────────────────────────────────────────


def _planted(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    planted = folder / name
    planted.write_text("#!/bin/sh\nexit 1\n")
    planted.chmod(planted.stat().st_mode | stat.S_IXUSR)
    return planted


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs are confined on Linux only")
@pytest.mark.proves("S-01")
@pytest.mark.parametrize("name", ["git", "rg"])
def test_the_kernel_does_not_run_a_program_planted_in_the_workspace(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Source: an activated environment inside the project comes first on PATH, and its programs can be written.

    Nothing is run here: only which program would be is looked at.
    """
    workspace, tools = place / "ws", place / "tools"
    planted = _planted(workspace / ".venv" / "bin", name)
    (place / "links").mkdir()
    (place / "links" / name).symlink_to(planted)
    (place / "way").symlink_to(planted.parent)
    (workspace / "out").symlink_to(tools)
    honest = _planted(tools, name)
    folders = [planted.parent, place / "links", place / "way", workspace / "out", ".venv/bin", "", tools]
    monkeypatch.setenv("PATH", ":".join(str(folder) for folder in folders))
    monkeypatch.chdir(workspace)
    if name == "git":
        assert find_program(name, outside=(str(workspace),)) == str(honest)
        monkeypatch.setenv("PATH", str(planted.parent))
        with pytest.raises(ProgramRefused):
            find_program(name, outside=(str(workspace),))
    else:
        assert os.path.realpath(find_ripgrep(str(workspace), confined=True)) == str(honest)


def test_doctor_warns_if_a_call_could_change_the_installation(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: tools installed in the environment of the project that they guard."""
    assert "installation" not in {check.name for check in check_machine(str(place / "ws"))}
    monkeypatch.setattr(sys, "path", [*sys.path, str(place / "ws" / ".venv" / "lib")])
    assert "installation" in {check.name for check in check_machine(str(place / "ws"))}


# ── what is left behind ──────────────────────────────────────────────────────────────────────────


def test_the_files_of_a_session_are_removed_at_any_folder_depth(place: Path) -> None:
    """Source: folders 5,000 deep, which end every recursive removal."""
    folders = prepare_folders(place / "ws", place / "state")
    scratch = folders.prepare_session_scratch("deep")
    (scratch / "locked").mkdir()
    (scratch / "locked" / "f").write_text("x")
    (scratch / "locked").chmod(0)
    (scratch / "link").symlink_to(place / "beside")
    here = os.open(scratch, os.O_RDONLY)
    for _ in range(3_000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    folders.remove_session_files("deep")
    assert not scratch.exists()
    assert (place / "beside" / "key").read_text() == "TOP-SECRET"


@pytest.mark.proves("S-01")
async def test_a_socket_outside_the_workspace_cannot_be_reached_through_a_link(probe: Probe, place: Path) -> None:
    """Source: docker.sock and agents' sockets. Sockets in the workspace are accessible, as documented."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "beside" / "s"))
        server.listen()
        (place / "ws" / "s").symlink_to(place / "beside" / "s")
        connect = "import socket; socket.socket(socket.AF_UNIX).connect('s'); print('REACHED')"
        assert "REACHED" not in await probe(f'python3 -c "{connect}"')
