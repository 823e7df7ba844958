"""``handrail agents``: the agents, and the faults of those that cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.renderer import Cell, TerminalRenderer
from handrail.frontends.cli.terminal_output import print_json

if TYPE_CHECKING:
    from handrail.kernel.agent_loading import ValidatedAgent


@click.command("agents")
@click.argument("action", required=False, type=click.Choice(["list"]), metavar="[list]")
@add_configuration_options
def command(setting: CommandOptions, action: str | None) -> int:
    """List and validate agents.

    Lists each agent with its role and number of tools, and every fault of an agent that cannot be used here. A faulty agent
    does not affect other agents. Tools that a program registers in code are not included.
    """
    from handrail.kernel.agent_loading import validate_agents
    from handrail.kernel.sandbox_selection import make_limited_sandbox

    config = load_and_validate_configuration(setting)
    folders = setting.folders
    found = list(validate_agents(config, folders, make_limited_sandbox(config)))
    if setting.json:
        print_json([_agent_data(agent) for agent in found])
        return OUTPUT
    view = TerminalRenderer()
    view.print_table(("AGENT", "ROLE", "STATE", "DESCRIPTION"), [_row(agent) for agent in found])
    for agent in found:
        for fault in agent.faults:
            view.write_line()
            view.print_text((agent.loaded_agent.checked_agent.manifest.id, "bold"), f": {fault}", further="  ")
    return OUTPUT


def _row(agent: ValidatedAgent) -> tuple[Cell, ...]:
    checked = agent.loaded_agent.checked_agent
    if count := len(agent.faults):
        state = f"faulty ({count} fault{'s' if count > 1 else ''})"
    else:
        state = f"{agent.tool_count} tool{'' if agent.tool_count == 1 else 's'}"
    about = checked.manifest.description.strip().split("\n")[0]
    return checked.manifest.id, checked.manifest.effective_role, state, about or checked.source or "without a manifest"


def _agent_data(agent: ValidatedAgent) -> dict[str, object]:
    checked = agent.loaded_agent.checked_agent
    faults = [{"source": fault.source, "where": fault.location, "problem": fault.problem} for fault in agent.faults]
    return {
        "id": checked.manifest.id,
        "source": checked.source or None,
        "tools": agent.tool_count,
        "role": checked.manifest.effective_role,
        "faults": faults,
        "manifest": checked.manifest.to_data(),
    }
