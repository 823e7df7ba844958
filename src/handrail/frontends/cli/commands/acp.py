"""``handrail acp``: the agent in an editor, over the Agent Client Protocol on stdin and stdout."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, ModelOptions, add_call_options, add_model_options
from handrail.frontends.cli.command_runner import (
    open_configured_kernel,
    open_session_and_log_readers,
    run_on_event_loop,
)
from handrail.frontends.cli.terminal_output import print_stderr_note
from handrail.origins.import_guard import can_import_module
from handrail.origins.installed_package import build_extra_install_command

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from handrail.agent.model_protocol import Model
    from handrail.contract.agent_manifest import AgentManifest
    from handrail.frontends.acp.editor_session_setup import AcpFrontendSettings
    from handrail.kernel.kernel_interface import Kernel
    from handrail.session.transcript_search import StoredSessionReader


@click.command("acp")
@click.option(
    "--offer-model",
    "offered",
    multiple=True,
    metavar="MODEL",
    help="Further model that the editor can choose. Can be repeated.",
)
@add_model_options(" for each prompt")
@add_call_options
@click.pass_context
def command(context: click.Context, setting: CommandOptions, offered: tuple[str, ...], asked: ModelOptions) -> int:
    """Serve an editor over the Agent Client Protocol.

    Each session works in the folder that the editor names. With --workspace, only that folder is allowed. Calls that no rule
    allows require approval in the editor. Set the command `handrail acp --model MODEL` in the editor's settings. The protocol
    uses stdin and stdout.
    """
    if not can_import_module("acp"):
        command = build_extra_install_command("acp")
        raise click.UsageError(f"The ACP agent requires the extra 'acp'. Install it: {command}")
    from handrail.agent.providers import MODEL_FORMS
    from handrail.frontends.acp.editor_session_setup import AcpFrontendSettings

    def chosen(manifest: AgentManifest) -> Model:
        return asked.open_model_for(
            manifest,
            f"No model is set. Start handrail acp with --model {MODEL_FORMS}, or set HANDRAIL_MODEL or the agent's model.",
        )

    def models(manifest: AgentManifest) -> tuple[str, ...]:
        return tuple(dict.fromkeys((asked.model or manifest.model or "", *offered)))

    def named(name: str) -> Model:
        from handrail.agent.providers import open_model

        provider = name.partition(":")[0]
        same = (asked.model or "").partition(":")[0] == provider  # the server at that URL has only one provider's API
        return open_model(name, base_url=asked.base_url if same else None, text_calls=asked.text_calls)

    def opening(folder: str) -> AbstractAsyncContextManager[Kernel]:
        return open_configured_kernel(replace(setting, workspace=folder), frontend="acp")

    def kept(folder: str) -> AbstractContextManager[StoredSessionReader]:
        return _session_reader(replace(setting, workspace=folder))

    given = context.get_parameter_source("workspace") is ParameterSource.COMMANDLINE
    only = str(Path(setting.workspace).resolve()) if given else None
    serving = AcpFrontendSettings(opening, kept, chosen, asked.make_run_budget, only, setting.headless, models, named)
    if sys.stdin.isatty():
        print_stderr_note("handrail acp: waiting for an ACP client on stdin. Press Ctrl-C or Ctrl-D to stop.")
    return run_on_event_loop(lambda _: _serve(serving))


@contextmanager
def _session_reader(setting: CommandOptions) -> Generator[StoredSessionReader]:
    with open_session_and_log_readers(setting) as (reader, _):
        yield reader


async def _serve(serving: AcpFrontendSettings) -> int:
    from handrail.frontends.acp.acp_agent import serve_acp_client
    from handrail.frontends.acp.acp_transport import JsonLinesTransport
    from handrail.frontends.mcp.mcp_stdio_server import take_over_stdio_streams

    async with take_over_stdio_streams() as ends:
        if ends is None:
            raise click.UsageError(
                "Unsupported stdin or stdout. Expected pipes or a terminal, as an editor provides them."
            )
        await serve_acp_client(JsonLinesTransport(*ends), serving)
    return OUTPUT
