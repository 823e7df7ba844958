"""``handrail mcp import`` and ``list``: another program's servers, taken over on a person's word."""

from __future__ import annotations

import json
import stat
import tomllib
from pathlib import Path

import pytest
from tests.faces.conftest import Program

from handrail.faces.cli.app import run

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
    file, config = tmp_path / "other.json", tmp_path / "own" / "handrail.toml"
    file.write_text(json.dumps({"mcpServers": servers}))
    config.parent.mkdir(mode=0o700)
    config.write_text('# mine\nmode = "plan"\n')
    place = ["-C", str(handrail.workspace), "--state", str(handrail.state), "--config", str(config)]

    assert run(["mcp", "import", str(file), "--no-install", *place]) == 2, "nobody agreed"
    assert "mcp" not in tomllib.loads(config.read_text())
    capfd.readouterr()

    assert run(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 0
    shown = capfd.readouterr()
    assert TOKEN not in shown.out + shown.err + config.read_text()
    assert "leaky: left out" in shown.out and "autoApprove: rights are given by rules here" in shown.out
    written = tomllib.loads(config.read_text())
    assert list(written["mcp"]["servers"]) == ["files", "clock"]
    assert (written["mode"], config.read_text().splitlines()[0]) == ("plan", "# mine")
    secret = Path(written["secrets"]["FILES_TOKEN"]["file"])
    assert (secret.read_text(), stat.S_IMODE(secret.stat().st_mode)) == (TOKEN, 0o600)

    assert run(["mcp", "list", "--json", *place]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capfd.readouterr().out)}
    assert states["clock"] == "to be installed: handrail mcp install clock"

    assert run(["mcp", "import", str(file), "--no-install", "--yes", *place]) == 1
    assert "there is a server of that name already" in capfd.readouterr().out


def test_options_before_the_command_are_refused_and_not_forgotten(
    handrail: Program, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["mcp", "-C", str(handrail.workspace), "list"]) == 2
    assert "behind the command" in capfd.readouterr().err
