"""``handrail build``: an agent with its tools, frozen by hash."""

from __future__ import annotations

from pathlib import Path

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.completing import agents, folders
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import note, note_block, out, out_json


@click.command("build")
@click.argument("name", metavar="AGENT", shell_complete=agents)
@click.option(
    "--out", "target", metavar="DIR", shell_complete=folders, help="Where to write it. Default: AGENT.bundle here."
)
@configured
def command(setting: Setting, name: str, target: str | None) -> int:
    """Check an agent whole, and freeze it with its tools into a folder that starts anywhere.

    A tool whose manifest has a build command is built first, from a copy of its folder, in a sandbox without network; what the
    command writes is shown on stderr.

    The folder is a configuration by itself: start it with --config DIR/handrail.toml. Each file in it stands by its hash;
    one that was changed, added or taken away afterwards stops the start. Settings name secrets, and never hold their values.
    """
    from handrail.contract.errors import StartError
    from handrail.kernel.bundling import build
    from handrail.kernel.sandbox import sandbox_of
    from handrail.store.folders import locate

    config = read(setting)
    place = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    folder = Path(target or f"{name}.bundle")
    try:
        made = build(config, name, place, sandbox_of(config), folder, lambda text: note_block(text.rstrip("\n")))
    except OSError as error:
        raise StartError(f"{folder} cannot be written: {error.strerror or error}") from None
    if setting.json:
        out_json(
            {
                "folder": str(made.folder),
                "agent": made.agent,
                "hash": made.hash,
                "files": list(made.files),
                "tools": list(made.tools),
                "built": list(made.built),
                "agents": list(made.agents),
                "beside": list(made.beside),
                "withheld": made.withheld,
            }
        )
        return OUTPUT
    out(f"built {made.folder}: {len(made.files)} files, {len(made.tools)} tools of its own, {made.hash}")
    for tool_id, reason in made.withheld.items():
        note(f"{tool_id} would be withheld on this machine: {reason}")
    out(f"start it: handrail run TASK --config {made.folder / 'handrail.toml'}")
    return OUTPUT
