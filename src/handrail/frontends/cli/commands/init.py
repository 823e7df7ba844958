"""``handrail init``: a commented ``handrail.toml`` to begin with."""

from __future__ import annotations

import os
from pathlib import Path

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import note, out, out_json


@click.command("init")
@click.option("--global", "everywhere", is_flag=True, help="The configuration of this user instead of the workspace's.")
@configured
def command(setting: Setting, everywhere: bool) -> int:
    """Write a commented handrail.toml into the workspace, or the one of this user.

    It says what every setting means and changes nothing until you edit it. A file that is there already is never
    written over.
    """
    from handrail.config import FILE_NAME, default_folder
    from handrail.config.template import template
    from handrail.contract.errors import StartError
    from handrail.store.folders import locate

    if everywhere:
        path = Path(setting.config) if setting.config is not None else default_folder() / FILE_NAME
        kind = "configuration"
    else:
        path = locate(setting.workspace, setting.state, allow_home=setting.allow_home).workspace / FILE_NAME
        kind = "workspace"
    try:
        if everywhere:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        written = _written(path, template(kind).encode())
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror or error}") from None
    if not written:
        note(f"handrail init: {path} is there already; nothing was written. handrail config shows what it says")
        return ERROR
    if setting.json:
        out_json({"written": str(path)})
    else:
        out(f"wrote {path}")
    return OUTPUT


def _written(path: Path, content: bytes) -> bool:
    """Whether the file could be made; False where the name is taken, by whatever it is."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return True
