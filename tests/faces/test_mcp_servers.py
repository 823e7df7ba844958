"""``handrail mcp import`` and ``list``: another program's servers, taken over on a person's word."""

from __future__ import annotations

import json
import stat
import sys
import tomllib
from pathlib import Path

import pytest
from tests.faces.conftest import Program

from handrail import config
from handrail.config.upstreams import configured
from handrail.faces.cli.app import run
from handrail.registry.pins import Definition, StoredPins
from handrail.registry.sources.mcp import listing
from handrail.registry.sources.mcp.listing import Listing
from handrail.registry.sources.mcp.tools import spec_of

TOKEN = "ghp_0123456789abcdefghij"


@pytest.mark.proves("F-04")
def test_servers_are_imported_when_a_person_agrees_and_their_secrets_lie_apart(
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

    assert run(["mcp", "import", str(file), "--no-install", *place]) == 2, "nobody agreed"
    assert "mcp" not in tomllib.loads(own.read_text())
    capfd.readouterr()

    assert run(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 0
    shown = capfd.readouterr()
    assert TOKEN not in shown.out + shown.err + own.read_text()
    assert "leaky: left out" in shown.out and "autoApprove: rights are given by rules here" in shown.out
    written = tomllib.loads(own.read_text())
    assert list(written["mcp"]["servers"]) == ["files", "clock"]
    assert (written["mode"], own.read_text().splitlines()[0]) == ("plan", "# mine")
    secret = Path(written["secrets"]["FILES_TOKEN"]["file"])
    assert (secret.read_text(), stat.S_IMODE(secret.stat().st_mode)) == (TOKEN, 0o600)

    assert run(["mcp", "list", "--json", *place]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)}
    assert states["clock"] == "to be installed: handrail mcp install clock"

    assert run(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 1
    assert "there is a server of that name already" in capfd.readouterr().out


def test_the_list_says_what_each_server_waits_for(
    handrail: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own" / "handrail.toml"
    file.parent.mkdir(mode=0o700)
    python = json.dumps(sys.executable)
    tables = "".join(f"[mcp.servers.{name}]\ncommand = {python}\n" for name in ("new", "known", "ready", "empty"))
    file.write_text(f'{tables}[mcp.servers.gone]\ncommand = "/nowhere/at/all"\n')
    state = handrail.state
    state.mkdir(mode=0o700, exist_ok=True)
    for server in configured(config.load(file)):
        names = {"known": ("a", "b"), "ready": ("a",), "empty": ()}.get(server.name)
        if names is not None:
            items = tuple({"name": name, "description": "Does.", "inputSchema": {"type": "object"}} for name in names)
            listing.write(state, server.name, server.hash, Listing(tools=items, protocol="2025-11-25"))
            if server.name == "ready":
                specs = [spec_of(item, server, server.requires) for item in items]
                StoredPins(state).approve(server.name, [Definition.of(spec) for spec in specs])
    assert (
        run(["mcp", "list", "--json", "-C", str(handrail.workspace), "--state", str(state), "--config", str(file)]) == 0
    )
    states = {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)}
    assert states["new"] == "never connected; connect it and see its tools: handrail sources review new"
    assert states["known"] == "2 tools, 2 to be reviewed: handrail sources review known"
    assert (states["ready"], states["empty"]) == ("1 tool", "0 tools")
    assert "/nowhere/at/all" in states["gone"]


def test_options_before_the_command_are_refused_and_not_forgotten(
    handrail: Program, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["mcp", "-C", str(handrail.workspace), "list"]) == 2
    assert "behind the command" in capfd.readouterr().err
