"""``handrail new``: a new working tool, from a template."""

from __future__ import annotations

from pathlib import Path

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.shell_completion import complete_folders
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json


@click.group("new")
def command() -> None:
    """Create a tool from a template."""


@command.command("tool")
@click.argument("tool_id", metavar="ID")
@click.option(
    "--kind",
    type=click.Choice(("function", "class", "program", "persistent", "source", "module")),
    default="function",
    show_default=True,
    help="Kind of tool.",
)
@click.option(
    "--directory",
    "folder",
    default=".",
    metavar="DIR",
    shell_complete=complete_folders,
    help="Folder. Default: the current folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tool(tool_id: str, kind: str, folder: str, as_json: bool) -> int:
    """Create a working tool with its test.

    \b
    function    a typed Python function in your program
    class       a Python class, for a tool that keeps state between calls
    program     an executable in any language, started in a sandbox for each call
    persistent  an executable that keeps running between calls, in a sandbox
    source      a folder with source code, from which handrail build makes the executable
    module      a Python module with execute(topic, params, config, telemetry), in a sandbox

    To install a program or module, put it into the folder tools/ of the configuration. `handrail doctor` shows that folder.
    Existing files are never overwritten.
    """
    from handrail.authoring.tool_templates import render_tool_files, write_tool_files
    from handrail.contract.errors import StartError

    try:
        written = write_tool_files(Path(folder), render_tool_files(kind, tool_id))  # type: ignore[arg-type]
    except OSError as error:
        raise StartError(
            f"Could not write {folder}: {error.strerror or error}. Check the folder and its permissions."
        ) from None
    if as_json:
        print_json({"written": [str(path) for path in written]})
        return OUTPUT
    for path in written:
        print_escaped_line(f"wrote {path}")
    print_escaped_line(f"to test it:  python -m pytest {written[-1]}")
    print_escaped_line(f"to check it: handrail lint {written[0]}")
    return OUTPUT
