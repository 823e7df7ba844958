"""``handrail mcp``: the tools for an MCP client, on stdin and stdout."""

from __future__ import annotations

import sys

import click

from handrail.faces.cli.app import OUTPUT
from handrail.faces.cli.driving import Interruption, drive, opened
from handrail.faces.cli.options import Setting, common
from handrail.faces.cli.show import note


@click.command("mcp")
@common
def command(setting: Setting) -> int:
    """Serve the tools to an MCP client on stdin and stdout.

    Nobody is asked: what no rule allows is denied. Put it into a client's configuration as the command
    `handrail mcp --workspace DIR`.
    """
    try:
        import mcp.server.lowlevel  # noqa: F401 - only to say early and clearly that it is missing
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("mcp", "mcp_types"):
            raise click.UsageError("the MCP server needs the extra 'mcp': pip install 'handrail[mcp]'") from None
        raise
    if sys.stdin.isatty():
        note("handrail mcp: waiting for an MCP client on stdin; end with Ctrl-C or Ctrl-D")
    return drive(lambda interruption: _serve(setting, interruption))


async def _serve(setting: Setting, interruption: Interruption) -> int:
    from handrail.faces.mcp.server import serve

    async with opened(setting) as kernel:
        await serve(kernel)
    return OUTPUT
