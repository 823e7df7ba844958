"""``handrail mcp``: the MCP server, on stdin and stdout or over HTTP, and the sign-in at upstream servers."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import click
from click.core import ParameterSource

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import (
    CommandOptions,
    DurationParamType,
    add_call_options,
    add_configuration_options,
)
from handrail.frontends.cli.command_runner import open_configured_kernel, run_on_event_loop
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.commands.mcp_import import export_command, import_command
from handrail.frontends.cli.commands.mcp_servers import install_command, list_command
from handrail.frontends.cli.shell_completion import complete_files
from handrail.frontends.cli.terminal_output import print_escaped_line, print_json, print_stderr_note
from handrail.origins.import_guard import can_import_module
from handrail.origins.installed_package import build_extra_install_command
from handrail.origins.program_lookup import ProgramRefused, build_program_environment, find_program

if TYPE_CHECKING:
    from handrail.frontends.mcp.startup_answers import EarlyAnswers
    from handrail.frontends.mcp.tool_listing import McpFrontendSettings


# ``handrail mcp login``: the sign-in at a server that requires it.

_DESKTOP_VARIABLES = (
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "DBUS_SESSION_BUS_ADDRESS",
    "XDG_CURRENT_DESKTOP",
    "BROWSER",
)


def open_browser(address: str) -> None:
    """Open an address in the user's browser, if this machine has a program for that."""
    try:
        program = find_program("open" if sys.platform == "darwin" else "xdg-open")
        subprocess.Popen(
            [program, address],
            cwd="/",
            env=build_program_environment(_DESKTOP_VARIABLES),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (ProgramRefused, OSError):
        pass  # the address is also printed


@click.command("login")
@click.argument("name")
@click.option("--sign-out", "is_sign_out", is_flag=True, help="Sign out: remove the stored credentials.")
@add_configuration_options
def login_command(setting: CommandOptions, name: str, is_sign_out: bool) -> int:
    """Sign in at an MCP server that requires it.

    The command prints an address to visit. After you agree there, Handrail connects to the server without you. The credentials
    are stored in the state folder, which only you can read, and are never shown.
    """
    from handrail.kernel.upstream_mcp_servers import delete_server_tokens, sign_in_to_server

    config = load_and_validate_configuration(setting)
    folders = setting.folders
    if is_sign_out:
        gone = delete_server_tokens(config, folders, name)
        print_json({"name": name, "signed_out": gone}) if setting.json else print_escaped_line(
            f"{name} is signed out" if gone else f"{name} was not signed in"
        )
        return OUTPUT
    if setting.headless:
        raise click.UsageError("Sign-in requires a user with a browser. Leave out `--headless`.")

    def show(address: str) -> None:
        print_stderr_note("handrail mcp login: visit this address:")
        print_stderr_note(address)
        open_browser(address)

    tools = asyncio.run(sign_in_to_server(config, folders, name, show))
    if setting.json:
        print_json({"name": name, "tools": tools})
    else:
        print_escaped_line(f"{name} is signed in and has {tools} tools. To review them: handrail sources review {name}")
    return OUTPUT


@click.group("mcp", invoke_without_command=True)
@add_call_options
@click.option(
    "--discovery",
    type=click.Choice(("core", "all")),
    default="core",
    show_default=True,
    help="Listed tools: the core tools and those that find others, or all.",
)
@click.option(
    "--wait",
    "wait_s",
    type=DurationParamType("seconds", 1, 86_400),
    default=50.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum time that a request stays open for the user's answer. Afterwards the client gets the answer if it repeats "
    "the call. Most clients end a request after a minute.",
)
@click.option(
    "--http",
    "address",
    metavar="HOST:PORT",
    help="Address to serve over HTTP, at http://HOST:PORT/mcp. Default: stdio.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    shell_complete=complete_files,
    help="File with accepted bearer tokens: TOKEN or NAME TOKEN per line. Other users must not be able to read it.",
)
@click.option(
    "--auth-server", metavar="URL", help="OAuth authorization server whose access tokens are accepted. Default: none."
)
@click.option(
    "--public-url", metavar="URL", help="URL of this server for clients, such as https://tools.example.org/mcp."
)
@click.option("--scope", "scopes", multiple=True, metavar="SCOPE", help="Required scope of a token. Can be repeated.")
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="ORIGIN", help="Allowed origin of web pages. Can be repeated."
)
@click.pass_context
def command(
    context: click.Context,
    setting: CommandOptions,
    discovery: Literal["core", "all"],
    wait_s: float,
    address: str | None,
    token_file: str | None,
    auth_server: str | None,
    public_url: str | None,
    scopes: tuple[str, ...],
    origins: tuple[str, ...],
) -> int:
    """Serve tools to MCP clients, and manage MCP servers.

    Without a command, serves on stdin and stdout, or with --http over HTTP. Calls that no rule allows require approval: the
    client shows a form to its user. If it does not support forms, the call waits for `handrail approve`. With `--headless`, such
    calls are denied. Set the command `handrail mcp --workspace DIR` in the client's configuration.

    Over HTTP, an address that other machines can reach requires --token-file, --auth-server, or tokens in [mcp.serve] of
    handrail.toml.
    """
    if (further := context.invoked_subcommand) is not None:
        given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
        if given:
            raise click.UsageError(f"Options must follow the command. Run: handrail mcp {further} …")
        return OUTPUT
    if not can_import_module("mcp"):
        command = build_extra_install_command("mcp")
        raise click.UsageError(f"The MCP server requires the extra 'mcp'. Install it: {command}")
    if address is None and (token_file or auth_server or public_url or scopes or origins):
        raise click.UsageError(
            "`--token-file`, `--auth-server`, `--public-url`, `--scope` and `--allow-origin` work only over HTTP. Add `--http`."
        )
    with defer_garbage_collection() as started, _answer_early(setting, discovery, address) as take_early_answers:
        from handrail.frontends.mcp.tool_listing import McpFrontendSettings

        serving = McpFrontendSettings(discovery=discovery, wait_s=wait_s, headless=setting.headless)
        if address is None:
            if sys.stdin.isatty():
                print_stderr_note("handrail mcp: waiting for an MCP client on stdin. Press Ctrl-C or Ctrl-D to stop.")
            return run_on_event_loop(lambda _: _serve(setting, serving, started, take_early_answers))
        given = _HttpOptions(address, token_file, auth_server, public_url, scopes, origins)
        return run_on_event_loop(lambda _: _serve_http(setting, serving, given, started))


@contextmanager
def defer_garbage_collection() -> Generator[Callable[[], None]]:
    """Disable garbage collection until the yielded function is called.

    Each collection would check all objects that are loaded at the start, and those stay.
    """
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


def _answer_early(
    setting: CommandOptions, discovery: str, address: str | None
) -> AbstractContextManager[Callable[[], EarlyAnswers]]:
    """Answer the first requests of a client on stdin with the answers of the last start, while the kernel is loaded."""
    from handrail.frontends.mcp.startup_answers import EarlyAnswers, answer_from_cache, locate_startup_cache

    if address is not None:
        return nullcontext(EarlyAnswers)
    options = setting.rules, setting.settings, setting.agent, setting.mode, setting.headless, discovery
    cache = locate_startup_cache(
        setting.workspace, setting.state, setting.config, options, allow_home=setting.allow_home
    )
    return answer_from_cache(cache)


async def _serve(
    setting: CommandOptions,
    serving: McpFrontendSettings,
    started: Callable[[], None],
    take_early_answers: Callable[[], EarlyAnswers],
) -> int:
    from handrail.frontends.mcp.mcp_stdio_server import serve_stdio

    async with open_configured_kernel(setting, frontend="mcp") as kernel:
        await serve_stdio(kernel, serving, started, take_early_answers)
    return OUTPUT


class _HttpOptions(NamedTuple):
    """The options for HTTP."""

    address: str
    token_file: str | None
    auth_server: str | None
    public_url: str | None
    scopes: tuple[str, ...]
    origins: tuple[str, ...]


async def _serve_http(
    setting: CommandOptions, serving: McpFrontendSettings, given: _HttpOptions, started: Callable[[], None]
) -> int:
    from handrail.config.secret_references import resolve_secrets
    from handrail.frontends.mcp.http.http_server import HttpFrontendSettings, serve_http

    async with open_configured_kernel(setting, frontend="mcp") as kernel:
        settings = kernel.config.settings
        own, named = settings.mcp.serve, settings.secrets
        needed = {one.secret for one in own.tokens.values()}
        needed |= {own.introspection.client_secret.secret} if own.introspection is not None else set()
        secrets = await resolve_secrets({name: named[name] for name in sorted(needed & named.keys())}, os.environ)
        listening = HttpFrontendSettings.from_options(*given, configured=own, secrets=secrets)
        started()
        await serve_http(
            kernel, serving, listening, lambda where: print_stderr_note(f"handrail mcp: serving at {where}")
        )
    return OUTPUT


for _further in (import_command, export_command, install_command, list_command, login_command):
    command.add_command(_further)
