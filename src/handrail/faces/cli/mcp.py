"""``handrail mcp``: the tools for an MCP client, on stdin and stdout."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from handrail.faces.cli.app import OUTPUT
from handrail.faces.cli.driving import Interruption, drive, opened
from handrail.faces.cli.options import Setting, common
from handrail.faces.cli.show import note


@click.group("mcp", invoke_without_command=True)
@common
def command(setting: Setting) -> int:
    """Serve the tools to an MCP client on stdin and stdout.

    Nobody is asked: what no rule allows is denied. Put it into a client's configuration as the command
    `handrail mcp --workspace DIR`.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return OUTPUT
    if find_spec("mcp") is None:
        raise click.UsageError("the MCP server needs the extra 'mcp': pip install 'handrail[mcp]'")
    if sys.stdin.isatty():
        note("handrail mcp: waiting for an MCP client on stdin; end with Ctrl-C or Ctrl-D")
    return drive(lambda interruption: _serve(setting, interruption))


async def _serve(setting: Setting, interruption: Interruption) -> int:
    from handrail.faces.mcp.server import serve

    async with opened(setting, face="mcp") as kernel:
        await serve(kernel)
    return OUTPUT
