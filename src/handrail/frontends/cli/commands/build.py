"""``handrail build``: an agent with its tools, frozen by hash."""

from __future__ import annotations

from pathlib import Path

import click

from handrail.contract.errors import StartError
from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.shell_completion import agents, complete_folders
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json, print_stderr_block, print_stderr_note


@click.command("build")
@click.argument("name", metavar="AGENT", shell_complete=agents)
@click.option(
    "--output", "target", metavar="DIR", shell_complete=complete_folders, help="Output folder. Default: AGENT.bundle."
)
@add_configuration_options
def command(setting: CommandOptions, name: str, target: str | None) -> int:
    """Freeze an agent and its tools into a portable folder.

    The agent is validated first. A tool whose manifest has a build command is built from a copy of its folder, in a sandbox
    without network access. The output of the command is shown on stderr.

    The folder is a complete configuration: start it with --config DIR/handrail.toml. The hash of each file is recorded. If a
    file was changed, added or removed later, the agent does not start. Settings contain the names of secrets, never their
    values.
    """
    from handrail.kernel.agent_bundles import build_agent_bundle
    from handrail.kernel.sandbox_selection import make_limited_sandbox

    config = load_and_validate_configuration(setting)
    place = setting.folders
    folder = Path(target or f"{name}.bundle")
    try:
        made = build_agent_bundle(
            config,
            name,
            place,
            make_limited_sandbox(config),
            folder,
            lambda text: print_stderr_block(text.rstrip("\n")),
        )
    except OSError as error:
        raise StartError(
            f"Could not write {folder}: {error.strerror or error}. Check the folder and its permissions."
        ) from None
    if setting.json:
        print_json(
            {
                "folder": str(made.folder),
                "agent": made.agent,
                "hash": made.hash,
                "files": list(made.files),
                "tools": list(made.tools),
                "built": list(made.built_tools),
                "agents": list(made.agents),
                "beside": list(made.external_tools),
                "unavailable": made.unavailable,
            }
        )
        return OUTPUT
    print_escaped_line(f"built {made.folder}: {len(made.files)} files, {len(made.tools)} tools, {made.hash}")
    for tool_id, reason in made.unavailable.items():
        print_stderr_note(f"{tool_id} would be unavailable on this machine: {reason}")
    print_escaped_line(f"to start it: handrail run TASK --config {made.folder / 'handrail.toml'}")
    return OUTPUT
