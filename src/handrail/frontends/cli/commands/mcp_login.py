"""``handrail mcp login``: signing in at a server that asks for it, once."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import note, out, out_json
from handrail.origins.programs import ProgramRefused, find_program, program_environment

_OF_DESKTOPS = (
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "DBUS_SESSION_BUS_ADDRESS",
    "XDG_CURRENT_DESKTOP",
    "BROWSER",
)


def launch(address: str) -> None:
    """Show an address in the person's browser, where this machine has a program for that."""
    try:
        program = find_program("open" if sys.platform == "darwin" else "xdg-open")
        subprocess.Popen(
            [program, address],
            cwd="/",
            env=program_environment(_OF_DESKTOPS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (ProgramRefused, OSError):
        pass  # the address is shown as well


@click.command("login")
@click.argument("name")
@click.option("--forget", is_flag=True, help="Forget what it was signed in with.")
@configured
def login_command(setting: Setting, name: str, forget: bool) -> int:
    """Sign in at an MCP server that asks for it.

    The address to visit is shown; once you have agreed there, the server is connected without you from then on. What it was
    signed in with is kept in the state folder, which only you can read, and shown nowhere.
    """
    from handrail.kernel.sign_in import sign_in, sign_out
    from handrail.store.folders import locate

    config = read(setting)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    if forget:
        gone = sign_out(config, folders, name)
        out_json({"name": name, "forgotten": gone}) if setting.json else out(
            f"{name} is signed out" if gone else f"{name} was not signed in"
        )
        return OUTPUT
    if setting.headless:
        raise click.UsageError("somebody has to sign in with a browser; leave --headless out")

    def show(address: str) -> None:
        note("handrail mcp login: visit this address")
        note(address)
        launch(address)

    tools = asyncio.run(sign_in(config, folders, name, show))
    if setting.json:
        out_json({"name": name, "tools": tools})
    else:
        out(f"{name} is signed in; it has {tools} tools. Look at them with: handrail sources review {name}")
    return OUTPUT
