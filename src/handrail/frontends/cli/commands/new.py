"""``handrail new``: a new tool that works, to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.completing import folders
from handrail.frontends.cli.show import out, out_json


@click.group("new")
def command() -> None:
    """Write something that works, to begin with."""


@command.command("tool")
@click.argument("tool_id", metavar="ID")
@click.option(
    "--kind",
    type=click.Choice(("function", "class", "program", "persistent", "source", "module")),
    default="function",
    show_default=True,
    help="The form that the tool has.",
)
@click.option(
    "--in", "folder", default=".", metavar="DIR", shell_complete=folders, help="Where to write it. Default: here."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tool(tool_id: str, kind: str, folder: str, as_json: bool) -> int:
    """Write a tool that works, and its test.

    \b
    function    a typed Python function, in the program that gives it to the kernel
    class       a Python class, for a tool that holds something between calls
    program     an executable in any language, started for each call in a sandbox
    persistent  an executable that stays up between calls, in a sandbox of its own
    source      a folder of sources, of which handrail build makes the executable
    module      a Python module with execute(topic, params, config, telemetry), in a sandbox

    A program or module becomes a tool in the folder tools/ of the configuration (handrail doctor names it). Nothing that is
    there already is written over.
    """
    from handrail.authoring.templates import files_of, write
    from handrail.contract.errors import StartError

    try:
        written = write(Path(folder), files_of(kind, tool_id))  # type: ignore[arg-type]
    except OSError as error:
        raise StartError(f"{folder} cannot be written: {error.strerror or error}") from None
    if as_json:
        out_json({"written": [str(path) for path in written]})
        return OUTPUT
    for path in written:
        out(f"wrote {path}")
    out(f"try it:   python -m pytest {written[-1]}")
    out(f"check it: handrail lint {written[0]}")
    return OUTPUT
