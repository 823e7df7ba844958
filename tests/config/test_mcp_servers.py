"""Settings of upstream servers: tables, files of other programs, and all faults in one report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.config.places import Layers

from handrail.upstream.server_config_loader import list_general_config_faults, load_enabled_servers
from handrail.upstream.server_programs import would_fetch_package

FILE = {
    "mcpServers": {
        "files": {"command": "mcp-files", "args": ["${ROOT:-/data}"], "env": {"TOKEN": "${KEY}"}, "autoApprove": ["*"]},
        "web": {"type": "streamable-http", "url": "https://web.example/mcp"},
        "old": {"url": "https://old.example/sse", "type": "sse", "disabled": True},
    }
}


def test_a_foreign_file_defines_servers_and_a_table_with_the_same_name_grants_capabilities(layers: Layers) -> None:
    (layers.config.parent / "mcp.json").write_text(json.dumps(FILE))
    layers.config.write_text('[mcp]\nfiles = ["mcp.json"]\n[mcp.servers.files]\nread = ["docs"]\nelicitation = true\n')
    learned: list[str] = []
    found = {
        one.name: one
        for one in load_enabled_servers(
            layers.load(), register_secret=learned.append, environment={"KEY": "sesame-1234"}
        )
    }
    assert set(found) == {"files", "web"}, "what is disabled is not there"
    files, web = found["files"], found["web"]
    assert (files.command, files.args, files.environment) == ("mcp-files", ("/data",), {"TOKEN": "sesame-1234"})
    assert files.read == ("docs",) and files.grants == {"elicitation"} and not files.hosts and "sesame-1234" in learned
    assert (web.transport, web.client_egress_hosts) == ("http", ("web.example:443",))
    assert "sesame" not in repr(files)


def test_no_file_that_a_model_can_write_gives_servers_or_their_variables(layers: Layers, tmp_path: Path) -> None:
    """Also in a workspace that has no ``handrail.toml``."""
    cfg, workspace = layers.config.parent, layers.folders.workspace
    own = {"mcpServers": {"own": {"command": "x"}}}
    (workspace / "mcp.json").write_text(json.dumps(own))
    (cfg / "link.json").symlink_to(workspace / "mcp.json")
    for folder in (cfg, workspace):
        (folder / ".env").write_text(f"PLACE={folder.name}\n")
    (cfg / "link.env").symlink_to(workspace / ".env")
    files = {"near": ".env", "far": str(workspace / ".env"), "link": "link.env"}
    servers = {name: {"command": "x", "envFile": file} for name, file in files.items()}
    (cfg / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    layers.config.write_text(f'[mcp]\nfiles = ["mcp.json", "link.json", "{workspace}/mcp.json"]\n')
    config = layers.load()
    found = {one.name: one for one in load_enabled_servers(config)}
    assert found.keys() == files.keys() and found["near"].environment == {"PLACE": cfg.name}
    for name in ("far", "link"):
        assert "is in the workspace" in found[name].missing_reason and not found[name].environment
    assert str(list_general_config_faults(config)).count("is in the workspace") == 2


def test_a_faulty_server_is_disabled_with_all_its_faults_and_others_stay_enabled(layers: Layers) -> None:
    (layers.config.parent / "mcp.json").write_text(
        '{"mcpServers": {"bad name": {"command": "x"}, "none": {}, "var": {"command": "${NO}"}, "good": {"command": "g"}}}'
    )
    tables = '[mcp.servers.a]\n[mcp.servers.b]\ncommand = "x"\nprefix = ""\nhosts = ["ho st"]\nread = ["../up"]\n'
    tables += '[mcp.servers.two]\ncommand = "x"\nurl = "https://x.example"\n[mcp.servers.key]\ncommand = "x"\ncolour = "red"\n'
    layers.config.write_text('[mcp]\nfiles = ["mcp.json", "gone.json"]\n' + tables + '[mcp.servers.c]\ncommand = "y"\n')
    config = layers.load()
    reasons = {one.name: one.missing_reason for one in load_enabled_servers(config, environment={})}
    assert [name for name, reason in reasons.items() if not reason] == ["good", "c"]
    for name, parts in {
        "none": ["neither command nor url"],
        "var": ["variable NO"],
        "a": ["neither command nor url"],
        "b": ["ho st", "contains '..'"],
        "two": ["expected either command or url"],
        "key": ["colour"],
    }.items():
        assert all(part in reasons[name] for part in parts), (name, reasons[name])
    general = "\n".join(map(str, list_general_config_faults(config)))
    assert "bad name" in general and "gone.json" in general


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [("", "", True), ('prefix = "hub"', "", False), ("", 'prefix = "hub"', False), ('prefix = ""', "", False)],
)
@pytest.mark.parametrize("names", [("git", "git_hub"), ("git_hub", "git")])
def test_two_servers_cannot_give_their_tools_the_same_id(
    layers: Layers, names: tuple[str, str], first: str, second: str, is_refused: bool
) -> None:
    more = {"git": first, "git_hub": second}
    layers.config.write_text("".join(f'[mcp.servers.{name}]\ncommand = "x"\n{more[name]}\n' for name in names))
    if not is_refused:
        assert {one.name for one in load_enabled_servers(layers.load())} == set(names)
        return
    reasons = {one.name: one.missing_reason for one in load_enabled_servers(layers.load())}
    assert reasons["git"] == ""
    assert reasons["git_hub"].startswith("prefix: 'git_hub' begins with 'git_', as the tools of git do")
    assert "set another prefix for one of the two servers" in reasons["git_hub"]
    layers.config.write_text(layers.config.read_text() + "enabled = false\n")
    assert [one.name for one in load_enabled_servers(layers.load())] == [names[0]]


def test_a_workspace_file_cannot_name_mcp_servers(layers: Layers) -> None:
    layers.own.write_text('[mcp.servers.a]\ncommand = "x"\n')
    assert any("cannot name MCP servers" in text for text in layers.faults())


@pytest.mark.parametrize(
    ("argv", "does"),
    [
        (("npx", "-y", "some-server"), True),
        (("/usr/bin/uvx", "mcp-server-git"), True),
        (("uv", "run", "server.py"), True),
        (("docker", "run", "image"), True),
        (("npm", "exec", "server"), True),
        (("node", "/opt/server/index.js"), False),
        (("python3", "-m", "server"), False),
        (("npm", "start"), False),
    ],
)
def test_a_command_that_would_fetch_its_program_is_recognised(argv: tuple[str, ...], does: bool) -> None:
    assert would_fetch_package(argv[0], argv[1:]) is does


def test_an_installation_record_applies_only_to_the_command_that_it_was_made_for(tmp_path: Path) -> None:
    from handrail.upstream.server_definition import ServerDefinition
    from handrail.upstream.server_programs import ServerCommandRejected, resolve_server_program

    folder, state = tmp_path / "pkg", tmp_path / "state"
    folder.mkdir()
    program = folder / "server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    record = state / "mcp" / "installed" / "s.json"
    record.parent.mkdir(parents=True)
    digest = "0" * 64
    held = {
        "of": ["npx", "s"],
        "command": str(program),
        "args": ["--x"],
        "folder": str(folder),
        "hashes": {"server": digest},
    }
    record.write_text(json.dumps(held))
    record.chmod(0o600)
    found = resolve_server_program(
        ServerDefinition("s", "", "stdio", command="npx", args=("s",)), state, str(tmp_path / "ws")
    )
    assert found.argv == (str(program), "--x") and str(folder) in found.folders
    with pytest.raises(ServerCommandRejected, match="has changed since the installation"):
        found.verify_file_hashes()
    with pytest.raises(ServerCommandRejected, match="handrail mcp install s"):
        resolve_server_program(
            ServerDefinition("s", "", "stdio", command="npx", args=("other",)), state, str(tmp_path / "ws")
        )
    with pytest.raises(ServerCommandRejected, match="is in the workspace"):
        resolve_server_program(ServerDefinition("p", "", "stdio", command=str(program)), state, str(folder))
