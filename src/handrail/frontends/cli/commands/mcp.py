"""``handrail mcp``: the tools for MCP clients, on stdin and stdout or over HTTP."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import click
from click.core import ParameterSource

from handrail.frontends.cli.amounts import Amount
from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.mcp_login import login_command
from handrail.frontends.cli.commands.mcp_servers import import_command, install_command, list_command
from handrail.frontends.cli.completing import files
from handrail.frontends.cli.driving import drive, opened
from handrail.frontends.cli.options import Setting, common
from handrail.frontends.cli.show import note
from handrail.origins.imports import is_installed

if TYPE_CHECKING:
    from handrail.frontends.mcp.serving import Serving


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
        from handrail.frontends.mcp.serving import Serving

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
    from handrail.frontends.mcp.reception import serve

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
    from handrail.frontends.mcp.http.http import Listening, listen

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
