"""``handrail init``: a new commented ``handrail.toml``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from handrail.contract.errors import StartError
from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json, print_stderr_note


@click.command("init")
@click.option("--global", "everywhere", is_flag=True, help="Write your own configuration, not the workspace's.")
@add_configuration_options
def command(setting: CommandOptions, everywhere: bool) -> int:
    """Write a commented handrail.toml.

    The file explains every setting, and has no effect until you edit it. It is written into the workspace, or with --global
    into your configuration folder. An existing file is never overwritten.
    """
    from handrail.config import FILE_NAME
    from handrail.config.template import render_config_template
    from handrail.store.state_folders import default_config_folder

    if everywhere:
        path = Path(setting.config) if setting.config is not None else default_config_folder() / FILE_NAME
        kind = "configuration"
    else:
        path = setting.folders.workspace / FILE_NAME
        kind = "workspace"
    try:
        if everywhere:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = _write_new(path, render_config_template(kind).encode())
    except OSError as error:
        raise StartError(
            f"Could not write {path}: {error.strerror or error}. Check the folder and its permissions."
        ) from None
    if not written:
        print_stderr_note(
            f"handrail init: {path} already exists, and was not changed. `handrail config` shows its settings."
        )
        return ERROR
    if setting.json:
        print_json({"written": str(path)})
    else:
        print_escaped_line(f"wrote {path}")
    return OUTPUT


def _write_new(path: Path, content: bytes) -> bool:
    """Create the file, and return False if the name already exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return True
