"""``handrail mcp import`` and ``list``: servers of other programs, imported after confirmation."""

from __future__ import annotations

import json
import stat
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.frontends.conftest import Program

from handrail import config
from handrail.contract.errors import StartError
from handrail.frontends.cli.command_group import run_command_line
from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition
from handrail.store import operator_decisions
from handrail.upstream import server_definition
from handrail.upstream.mcp_tool import build_tool_spec
from handrail.upstream.server_config_loader import load_enabled_servers
from handrail.upstream.server_definition import ServerListing

TOKEN = "ghp_0123456789abcdefghij"


@pytest.mark.proves("F-04")
def test_imported_servers_require_consent_and_their_secrets_are_in_separate_files(
    handrail: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = {
        "files": {"command": "/opt/files/server", "args": ["--root", "/srv"], "env": {"TOKEN": TOKEN}},
        "clock": {"command": "uvx", "args": ["mcp-server-time"], "autoApprove": ["*"]},
        "leaky": {"command": "x", "args": ["--api-key", TOKEN]},
    }
    file, own = tmp_path / "other.json", tmp_path / "own" / "handrail.toml"
    file.write_text(json.dumps({"mcpServers": servers}))
    own.parent.mkdir(mode=0o700)
    own.write_text('# mine\nmode = "plan"\n')
    place = ["-C", str(handrail.workspace), "--state", str(handrail.state), "--config", str(own)]

    assert run_command_line(["mcp", "import", str(file), "--no-install", *place]) == 2, "no person agreed"
    assert "mcp" not in tomllib.loads(own.read_text())
    capfd.readouterr()

    assert run_command_line(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 1, "one was left out"
    shown = capfd.readouterr()
    assert "2 of 3 servers imported, 1 left out" in shown.err
    assert TOKEN not in shown.out + shown.err + own.read_text()
    assert "leaky: not imported" in shown.out and "autoApprove: rules grant permissions in Handrail" in shown.out
    written = tomllib.loads(own.read_text())
    assert list(written["mcp"]["servers"]) == ["files", "clock"]
    assert (written["mode"], own.read_text().splitlines()[0]) == ("plan", "# mine")
    secret = Path(written["secrets"]["FILES_TOKEN"]["file"])
    assert (secret.read_text(), stat.S_IMODE(secret.stat().st_mode)) == (TOKEN, 0o600)

    assert run_command_line(["mcp", "list", "--json", *place]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)}
    assert states["clock"] == "not installed: handrail mcp install clock"

    assert run_command_line(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 1
    assert "its name is already in use" in capfd.readouterr().out


def test_no_import_gives_a_server_the_secret_of_another_server(
    handrail: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two files, an operator's own secret, a server that was removed, and names that meet."""
    own = tmp_path / "own" / "handrail.toml"
    own.parent.mkdir(mode=0o700)
    (kept := own.parent / "secrets").mkdir(mode=0o700)
    (kept / "GIT_TOKEN").write_text("the operator's")
    own.write_text(f'[secrets.A_KEY]\nfile = "{kept / "GIT_TOKEN"}"\n')
    place = ["-C", str(handrail.workspace), "--state", str(handrail.state), "--config", str(own)]

    def imported(servers: dict[str, dict[str, str]]) -> int:
        (file := tmp_path / "other.json").write_text(
            json.dumps({"mcpServers": {name: {"command": "/x", "env": env} for name, env in servers.items()}})
        )
        return run_command_line(["mcp", "import", str(file), "--no-install", "--yes", *place])

    def given() -> dict[str, dict[str, str]]:
        written = tomllib.loads(own.read_text())
        files = {name: Path(one["file"]).read_text() for name, one in written["secrets"].items()}
        return {
            name: {key: files[value["secret"]] for key, value in server["env"].items()}
            for name, server in written["mcp"]["servers"].items()
        }

    assert imported({"git": {"TOKEN": "of git"}, "a": {"KEY": "of a", "B_KEY": "of a too"}}) == 0
    assert (
        imported({"a-b": {"KEY": "of a-b"}, "a_c": {"KEY": "of a_c"}, "Git": {"TOKEN": "of Git"}, "c": {"KEY": "of c"}})
        == 1
    )
    shown = capfd.readouterr().out
    assert "Git: not imported: its name is already in use" in shown and "a_c: not imported" in shown
    expected = {
        "git": {"TOKEN": "of git"},
        "a": {"KEY": "of a", "B_KEY": "of a too"},
        "a-b": {"KEY": "of a-b"},
        "c": {"KEY": "of c"},
    }
    assert given() == expected and (kept / "GIT_TOKEN").read_text() == "the operator's"
    lines = own.read_text().split("\n")
    at = lines.index("[mcp.servers.c]")
    own.write_text("\n".join(lines[:at]))  # the server and its reference go, its file stays
    assert imported({"c": {"KEY": "of the new c"}}) == 0
    assert given() == {**expected, "c": {"KEY": "of the new c"}} and (kept / "C_KEY").read_text() == "of c"


def test_an_imported_secret_never_takes_a_name_that_another_server_uses(handrail: Program, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[mcp.servers.other]\ncommand = "/y"\nenv = { K = { secret = "GIT_TOKEN" } }\n')
    (file := tmp_path / "other.json").write_text(
        json.dumps({"mcpServers": {"git": {"command": "/x", "env": {"TOKEN": "of git"}}}})
    )
    place = ["-C", str(handrail.workspace), "--state", str(handrail.state), "--config", str(own)]
    assert run_command_line(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 0
    assert list(tomllib.loads(own.read_text())["secrets"]) == ["GIT_TOKEN_2"]


def test_a_failed_import_leaves_no_secret_behind(
    handrail: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own" / "handrail.toml"
    own.parent.mkdir(mode=0o700)
    place = ["-C", str(handrail.workspace), "--state", str(handrail.state), "--config", str(own)]
    (file := tmp_path / "other.json").write_text(
        json.dumps({"mcpServers": {"a": {"command": "/x", "env": {"KEY": "v"}}}})
    )

    def full(
        path: Path, content: bytes, write: Callable[[Path, bytes], None] = operator_decisions.write_private_file
    ) -> None:
        if path.name == "handrail.toml":
            raise StartError("the disk is full")
        write(path, content)

    own.write_text("")
    monkeypatch.setattr(operator_decisions, "write_private_file", full)
    assert run_command_line(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 5
    assert list((own.parent / "secrets").iterdir()) == [] and own.read_text() == ""


def test_the_server_list_shows_the_next_step_for_each_server(
    handrail: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own" / "handrail.toml"
    file.parent.mkdir(mode=0o700)
    python = json.dumps(sys.executable)
    tables = "".join(f"[mcp.servers.{name}]\ncommand = {python}\n" for name in ("new", "known", "ready", "empty"))
    file.write_text(f'{tables}[mcp.servers.gone]\ncommand = "/nowhere/at/all"\n')
    state = handrail.state
    state.mkdir(mode=0o700, exist_ok=True)
    for server in load_enabled_servers(config.load_configuration(file)):
        names = {"known": ("a", "b"), "ready": ("a",), "empty": ()}.get(server.name)
        if names is not None:
            items = tuple({"name": name, "description": "Does.", "inputSchema": {"type": "object"}} for name in names)
            server_definition.write_cached_listing(
                state, server.name, server.definition_hash, ServerListing(tools=items, protocol="2025-11-25")
            )
            if server.name == "ready":
                specs = [build_tool_spec(item, server, server.requires) for item in items]
                StoredPins(state).approve(server.name, [ThirdPartyDefinition.from_spec(spec) for spec in specs])
    assert (
        run_command_line(
            ["mcp", "list", "--json", "-C", str(handrail.workspace), "--state", str(state), "--config", str(file)]
        )
        == 0
    )
    states = {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)}
    assert states["new"] == "never connected. To connect and see its tools: handrail sources review new"
    assert states["known"] == "2 tools, 2 to review: handrail sources review known"
    assert (states["ready"], states["empty"]) == ("1 tool", "0 tools")
    assert "/nowhere/at/all" in states["gone"]


def test_options_before_the_mcp_subcommand_are_refused(handrail: Program, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["mcp", "-C", str(handrail.workspace), "list"]) == 2
    assert "must follow the command" in capfd.readouterr().err
