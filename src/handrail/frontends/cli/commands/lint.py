"""``handrail lint``: a check of one tool, a folder of tools, or all configured tools, for their authors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import ERROR, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.shell_completion import complete_files
from handrail.frontends.cli.terminal_output import escape_to_one_line, print_escaped_line, print_json, print_stderr_note

if TYPE_CHECKING:
    from handrail.authoring.tool_linter import LintFinding
    from handrail.config import MergedConfiguration
    from handrail.contract.errors import Diagnostic
    from handrail.contract.sandbox_protocol import Sandbox
    from handrail.kernel.agent_loading import ValidatedAgent


@click.command("lint")
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=complete_files)
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@add_configuration_options
def command(setting: CommandOptions, paths: tuple[str, ...], strict: bool) -> int:
    """Check tools, agents and rules for problems.

    PATH is a manifest, a module, a folder of these, or a Python file with tools. Without a PATH, all configured tool folders,
    agents and rules are checked. An error prevents a tool from loading or an agent from starting, such as a rule that can
    never match. A warning is a likely mistake: an unclear description, a side effect or lock left to the strict default, an
    unused parameter.

    A named Python file with @tool functions or tool classes is imported, which runs its code. No other code runs.
    """
    from handrail.authoring.tool_linter import lint_tools
    from handrail.kernel.sandbox_selection import make_limited_sandbox

    config = load_and_validate_configuration(setting)
    sandbox = make_limited_sandbox(config)
    tools: list[str] = []
    findings: list[LintFinding] = []
    for path in [Path(path) for path in paths] or list(_folders(config)):
        seen, found = lint_tools(path, sandbox)
        tools += seen
        findings += found
    if not paths:
        findings += list(_other_findings(setting, config, sandbox, findings))
    errors = sum(finding.severity == "error" for finding in findings)
    if setting.json:
        print_json({"tools": tools, "findings": [_finding_data(finding) for finding in findings]})
    else:
        for finding in findings:
            print_escaped_line(f"{finding.severity}: {escape_to_one_line(str(finding))}")
        counted = f"{len(tools)} tool{'' if len(tools) == 1 else 's'}"
        print_stderr_note(
            f"{counted}: {errors} error{'' if errors == 1 else 's'}, "
            f"{len(findings) - errors} warning{'' if len(findings) - errors == 1 else 's'}"
            if findings
            else f"{counted}: no problems"
        )
    return ERROR if errors or (strict and findings) else OUTPUT


def _other_findings(
    setting: CommandOptions, config: MergedConfiguration, sandbox: Sandbox, found: Sequence[LintFinding]
) -> Iterator[LintFinding]:
    """Yield the findings about agents, rules and configuration that are not in ``found`` already."""
    from handrail.authoring.tool_linter import LintFinding

    known = {(finding.source, finding.path, finding.text) for finding in found}
    agents = _validate_agents(setting, config, sandbox)
    for fault in dict.fromkeys(_agent_faults(config, agents)):  # several agents report the same rule
        if (fault.source, fault.location, fault.problem) not in known:
            yield LintFinding("error", fault.source, fault.location, fault.problem)
    yield from dict.fromkeys(_setup_findings(config, agents))


def _folders(config: MergedConfiguration) -> Iterator[Path]:
    """Yield the configured tool folders that contain tools."""
    from handrail.registry.agent_folders import load_agent_manifests

    seen: set[Path] = set()
    for agent in load_agent_manifests(config.folder):
        for _, folder in config.list_tool_folders(agent):
            if folder not in seen and folder.is_dir() and any(folder.glob("*.json")) | any(folder.glob("*.py")):
                seen.add(folder)
                yield folder


def _validate_agents(setting: CommandOptions, config: MergedConfiguration, sandbox: Sandbox) -> list[ValidatedAgent]:
    """Return every agent with its tools, validated."""
    from handrail.kernel.agent_loading import validate_agents

    return list(validate_agents(config, setting.folders, sandbox))


def _agent_faults(config: MergedConfiguration, agents: Iterable[ValidatedAgent]) -> Iterator[Diagnostic]:
    """Yield the faults of each agent, and the faults of the configured rules for its tools."""
    from handrail.kernel.doctor.workspace_checks import find_config_rule_faults

    for agent in agents:
        yield from agent.faults
        yield from find_config_rule_faults(config, agent.generation)


def _setup_findings(config: MergedConfiguration, agents: Sequence[ValidatedAgent]) -> Iterator[LintFinding]:
    """Yield findings about unavailable tools, unanswered locked IDs, and settings of unknown tools."""
    from handrail.authoring.tool_linter import LintFinding
    from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
    from handrail.contract.tool_generation import BUILT_IN

    known: set[str] = set()
    configured = {tool for layer in config.tool_setting_layers for tool in layer.tools}
    for agent in agents:
        for entry in () if agent.generation is None else agent.generation.entries.values():
            known.add(entry.id)
            if entry.source == BUILT_IN and entry.id not in configured:
                continue  # a shipped tool that this operator does not use
            if entry.unavailable_reason is not None and (entry.status == "available" or entry.id in LOCKED_SHAPES):
                yield LintFinding(
                    "warning", entry.source, "", f"{entry.id} is unavailable: {entry.unavailable_reason}", entry.id
                )
    if all(agent.generation is not None for agent in agents):
        for layer in config.tool_setting_layers:
            for tool in layer.tools.keys() - known:
                yield LintFinding(
                    "warning",
                    layer.source,
                    layer.build_setting_fault(tool, "").location,
                    f"Tool {tool!r} does not exist.",
                )


def _finding_data(finding: LintFinding) -> dict[str, str]:
    return {
        "severity": finding.severity,
        "tool": finding.tool,
        "source": finding.source,
        "where": finding.path,
        "text": finding.text,
    }
