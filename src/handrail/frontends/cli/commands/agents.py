"""``handrail agents``: the agents, and the faults of those that cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import columns, one_line, out, out_json

if TYPE_CHECKING:
    from handrail.kernel.agents import Surveyed


@click.command("agents")
@configured
def command(setting: Setting) -> int:
    """List and validate agents.

    Lists each agent with its role and number of tools, and every fault of an agent that cannot be used here. A faulty agent
    does not affect other agents. Tools that a program registers in code are not included.
    """
    from handrail.kernel.agents import survey
    from handrail.kernel.sandbox import sandbox_of
    from handrail.store.folders import locate

    config = read(setting)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    found = list(survey(config, folders, sandbox_of(config)))
    if setting.json:
        out_json([_whole(agent) for agent in found])
        return OUTPUT
    for agent, line in zip(found, columns(_row(agent) for agent in found), strict=True):
        out(line)
        for fault in agent.faults:
            out(f"  {one_line(str(fault))}")
    return OUTPUT


def _row(agent: Surveyed) -> tuple[str, str, str, str]:
    checked = agent.appointed.checked
    count = len(agent.faults)
    if count:
        state = f"faulty ({count} fault{'s' if count > 1 else ''})"
    else:
        state = f"{agent.tools} tool{'' if agent.tools == 1 else 's'}"
    about = checked.manifest.description.strip().split("\n")[0]
    return checked.manifest.id, checked.manifest.effective_role, state, about or checked.source or "without a manifest"


def _whole(agent: Surveyed) -> dict[str, object]:
    checked = agent.appointed.checked
    faults = [{"source": fault.source, "where": fault.where, "problem": fault.problem} for fault in agent.faults]
    return {
        "id": checked.manifest.id,
        "source": checked.source or None,
        "tools": agent.tools,
        "role": checked.manifest.effective_role,
        "faults": faults,
        "manifest": checked.manifest.as_data(),
    }
