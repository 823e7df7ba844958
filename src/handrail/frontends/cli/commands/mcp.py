"""``handrail mcp``: the tools for MCP clients, on stdin and stdout or over HTTP, and sign-in at upstream servers."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import click
from click.core import ParameterSource

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.commands.mcp_servers import import_command, install_command, list_command
from handrail.frontends.cli.completing import files
from handrail.frontends.cli.driving import drive, opened
from handrail.frontends.cli.options import Amount, Setting, common, configured
from handrail.frontends.cli.show import note, out, out_json
from handrail.origins.imports import is_installed
from handrail.origins.programs import ProgramRefused, find_program, program_environment

if TYPE_CHECKING:
    from handrail.frontends.mcp.tools import Serving


# ``handrail mcp login``: one sign-in at a server that asks for it.

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
    from handrail.kernel.servers import sign_in, sign_out
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


@click.group("mcp", invoke_without_command=True)
@common
@click.option(
    "--discovery",
    type=click.Choice(("core", "all")),
    default="core",
    show_default=True,
    help="Which tools are listed: the core and the ways to the rest, or all.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Amount("seconds", 1, 86_400),
    default=50.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a request stays open for its user's answer: an approval is parked then, and collected by the same call again. Most clients give a request up after a minute.",
)
@click.option("--http", "address", metavar="HOST:PORT", help="Serve over streamable HTTP, at http://HOST:PORT/mcp.")
@click.option(
    "--token-file",
    metavar="FILE",
    shell_complete=files,
    help="Bearer tokens that are taken, one on a line, each with a name before it or alone. Nobody else may read the file.",
)
@click.option(
    "--auth-server", metavar="URL", help="The OAuth authorization server whose access tokens for this one are taken."
)
@click.option(
    "--public-url", metavar="URL", help="What clients reach this server by, such as https://tools.example.org/mcp."
)
@click.option(
    "--scope", "scopes", multiple=True, metavar="SCOPE", help="A scope that a token must have. Can be repeated."
)
@click.option("--allow-origin", "origins", multiple=True, metavar="ORIGIN", help="A web page's origin that may come.")
@click.pass_context
def command(
    context: click.Context,
    setting: Setting,
    discovery: Literal["core", "all"],
    wait_s: float,
    address: str | None,
    token_file: str | None,
    auth_server: str | None,
    public_url: str | None,
    scopes: tuple[str, ...],
    origins: tuple[str, ...],
) -> int:
    """Serve the tools to MCP clients, on stdin and stdout or over HTTP.

    What no rule allows is asked through the client where that can put a form to its user, and denied elsewhere, or
    everywhere with `--headless`. Put it into a client's configuration as the command `handrail mcp --workspace DIR`.

    Over HTTP, an address beyond this machine takes --token-file or --auth-server, or tokens under [mcp.serve] of
    handrail.toml.
    """
    if (further := context.invoked_subcommand) is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"options go behind the command here: handrail mcp {further} …")
        return OUTPUT
    if not is_installed("mcp"):
        raise click.UsageError("the MCP server needs the extra 'mcp': pip install 'handrail[mcp]'")
    if address is None and (token_file or auth_server or public_url or scopes or origins):
        raise click.UsageError("--token-file, --auth-server, --public-url, --scope and --allow-origin are for --http")
    with collecting_later() as started:
        from handrail.frontends.mcp.tools import Serving

        serving = Serving(discovery=discovery, wait_s=wait_s, headless=setting.headless)
        if address is None:
            if sys.stdin.isatty():
                note("handrail mcp: waiting for an MCP client on stdin; end with Ctrl-C or Ctrl-D")
            return drive(lambda _: _serve(setting, serving, started))
        given = _Given(address, token_file, auth_server, public_url, scopes, origins)
        return drive(lambda _: _listen(setting, serving, given, started))


@contextmanager
def collecting_later() -> Generator[Callable[[], None]]:
    """Have no garbage looked for until what is given is called: each look would pass again over all that is loaded and
    listed at the start, which stays."""
    enabled = gc.isenabled()

    def started() -> None:
        gc.freeze()
        if enabled:
            gc.enable()

    gc.disable()
    try:
        yield started
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


async def _serve(setting: Setting, serving: Serving, started: Callable[[], None]) -> int:
    from handrail.frontends.mcp.stdio import serve

    async with opened(setting, face="mcp") as kernel:
        await serve(kernel, serving, started)
    return OUTPUT


class _Given(NamedTuple):
    """What the options say of who may come over HTTP."""

    address: str
    token_file: str | None
    auth_server: str | None
    public_url: str | None
    scopes: tuple[str, ...]
    origins: tuple[str, ...]


async def _listen(setting: Setting, serving: Serving, given: _Given, started: Callable[[], None]) -> int:
    from handrail.config.secrets import resolve
    from handrail.frontends.mcp.http import Listening, listen

    async with opened(setting, face="mcp") as kernel:
        settings = kernel.config.settings
        own, named = settings.mcp.serve, settings.secrets
        needed = {one.secret for one in own.tokens.values()}
        needed |= {own.introspection.client_secret.secret} if own.introspection is not None else set()
        secrets = await resolve({name: named[name] for name in sorted(needed & named.keys())}, os.environ)
        listening = Listening.of(*given, configured=own, secrets=secrets)
        started()
        await listen(kernel, serving, listening, lambda where: note(f"handrail mcp: serving at {where}"))
    return OUTPUT


for _further in (import_command, install_command, list_command, login_command):
    command.add_command(_further)
