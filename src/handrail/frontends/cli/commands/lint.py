"""``handrail lint``: a check of one tool, a folder of tools, or all configured tools, for their authors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import ERROR, OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.completing import files
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import note, one_line, out, out_json

if TYPE_CHECKING:
    from handrail.authoring.linting import Finding
    from handrail.config import Configuration
    from handrail.contract.errors import Fault
    from handrail.contract.sandbox import Sandbox
    from handrail.kernel.agents import Surveyed


@click.command("lint")
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=files)
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@configured
def command(setting: Setting, paths: tuple[str, ...], strict: bool) -> int:
    """Check tools, agents and rules for problems.

    PATH is a manifest, a module, a folder of these, or a Python file with tools. Without a PATH, all configured tool folders,
    agents and rules are checked. An error prevents a tool from loading or an agent from starting, such as a rule that can
    never match. A warning is a likely mistake: an unclear description, a side effect or lock left to the strict default, an
    unused parameter.

    A named Python file with @tool functions or tool classes is imported, which runs its code. No other code runs.
    """
    from handrail.authoring.linting import lint
    from handrail.kernel.sandbox import sandbox_of

    config = read(setting)
    sandbox = sandbox_of(config)
    tools: list[str] = []
    findings: list[Finding] = []
    for path in [Path(path) for path in paths] or list(_folders(config)):
        seen, found = lint(path, sandbox)
        tools += seen
        findings += found
    if not paths:
        findings += list(_beyond_tools(setting, config, sandbox, findings))
    errors = sum(finding.severity == "error" for finding in findings)
    if setting.json:
        out_json({"tools": tools, "findings": [_whole(finding) for finding in findings]})
    else:
        for finding in findings:
            out(f"{finding.severity}: {one_line(str(finding))}")
        counted = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
        note(
            f"{counted}: {errors} error{'' if errors == 1 else 's'}, "
            f"{len(findings) - errors} warning{'' if len(findings) - errors == 1 else 's'}"
            if findings
            else f"{counted}: no problems"
        )
    return ERROR if errors or (strict and findings) else OUTPUT


def _beyond_tools(
    setting: Setting, config: Configuration, sandbox: Sandbox, found: Sequence[Finding]
) -> Iterator[Finding]:
    """Yield the findings about agents, rules and configuration that are not in ``found`` already."""
    from handrail.authoring.linting import Finding

    known = {(finding.source, finding.where, finding.text) for finding in found}
    agents = _surveyed(setting, config, sandbox)
    for fault in dict.fromkeys(_of_agents(config, agents)):  # several agents report the same rule
        if (fault.source, fault.where, fault.problem) not in known:
            yield Finding("error", fault.source, fault.where, fault.problem)
    yield from dict.fromkeys(_not_set_up(config, agents))


def _folders(config: Configuration) -> Iterator[Path]:
    """Yield the configured tool folders that contain tools."""
    from handrail.registry.agents import find_agents

    seen: set[Path] = set()
    for agent in find_agents(config.folder):
        for _, folder in config.tool_folders(agent):
            if folder not in seen and folder.is_dir() and any(folder.glob("*.json")) | any(folder.glob("*.py")):
                seen.add(folder)
                yield folder


def _surveyed(setting: Setting, config: Configuration, sandbox: Sandbox) -> list[Surveyed]:
    """Return every agent with its tools, validated."""
    from handrail.kernel.agents import survey
    from handrail.store.folders import locate

    return list(survey(config, locate(setting.workspace, setting.state, allow_home=setting.allow_home), sandbox))


def _of_agents(config: Configuration, agents: Iterable[Surveyed]) -> Iterator[Fault]:
    """Yield the faults of each agent, and the faults of the configured rules for its tools."""
    from handrail.kernel.doctor.kernel import faults_of_rules

    for agent in agents:
        yield from agent.faults
        yield from faults_of_rules(config, agent.generation)


def _not_set_up(config: Configuration, agents: Sequence[Surveyed]) -> Iterator[Finding]:
    """Yield findings about unavailable tools, unanswered locked IDs, and settings of unknown tools."""
    from handrail.authoring.linting import Finding
    from handrail.contract.schema.locked_shapes import LOCKED_SHAPES

    known: set[str] = set()
    for agent in agents:
        for entry in () if agent.generation is None else agent.generation.entries.values():
            known.add(entry.id)
            if entry.withheld is not None and (entry.status == "available" or entry.id in LOCKED_SHAPES):
                yield Finding("warning", entry.source, "", f"{entry.id} is unavailable: {entry.withheld}", entry.id)
    if all(agent.generation is not None for agent in agents):
        for layer in config.tool_settings:
            for tool in layer.tools.keys() - known:
                yield Finding("warning", layer.source, layer.fault(tool, "").where, f"Tool {tool!r} does not exist.")


def _whole(finding: Finding) -> dict[str, str]:
    return {
        "severity": finding.severity,
        "tool": finding.tool,
        "source": finding.source,
        "where": finding.where,
        "text": finding.text,
    }
