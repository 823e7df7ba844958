"""``handrail doctor``: the confinement that this machine can enforce, missing parts, and their remedies."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import CANNOT_START, OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.shell_completion import agents
from handrail.frontends.cli.terminal_output import MAX_NAME, escape_to_one_line, print_escaped_line, print_json

if TYPE_CHECKING:
    from handrail.kernel.doctor import DoctorCheck
    from handrail.kernel.doctor.workspace_checks import CapabilityReport
    from handrail.sandbox.selfcheck import CheckOutcome

MARKS = {"ok": ("✓", "green"), "warning": ("·", "yellow"), "problem": ("✗", "red")}
OUTCOMES = {"held": MARKS["ok"], "not tried": MARKS["warning"], "open": MARKS["problem"]}


@click.command("doctor")
@click.option("--agent", "of_agent", metavar="NAME", shell_complete=agents, help="Agent whose capability set is shown.")
@click.option("--self-check", is_flag=True, help="Test the sandbox from inside.")
@add_configuration_options
def command(setting: CommandOptions, of_agent: str | None, self_check: bool) -> int:
    """Check the sandbox, configuration and state.

    Shows what this machine can enforce, and the remedy for each problem. It changes nothing, so it works while Handrail runs,
    and also if Handrail cannot start. Exits with 5 if Handrail could not start here, or could not confine programs.

    With --agent, shows the capabilities of that agent, and what each of its tools adds. With --self-check, runs the test
    suite that every sandbox provider must pass, and exits with 5 if the sandbox does not enforce something required.
    """
    if of_agent is not None and self_check:
        raise click.UsageError("`--agent` and `--self-check` exclude each other. Pass only one of them.")
    if of_agent is not None:
        return _check_agent(setting, of_agent)
    if self_check:
        return _self_check(setting)
    from handrail.kernel.doctor import run_doctor_checks

    checks = run_doctor_checks(
        setting.workspace, setting.state, setting.config, flags=setting.settings, allow_home=setting.allow_home
    )
    if setting.json:
        print_json([check.to_dict() for check in checks])
    else:
        _print_checks(checks)
    # An unavailable tool does not affect anything else.
    problems = [check for check in checks if check.state == "problem" and not check.name.startswith("tool ")]
    return CANNOT_START if problems else OUTPUT


def _print_checks(checks: list[DoctorCheck]) -> None:
    names = [escape_to_one_line(check.name, MAX_NAME) for check in checks]
    width = max(map(len, names))
    margin = " " * (width + 4)
    view = TerminalRenderer()
    for check, name in zip(checks, names, strict=True):
        mark, colour = MARKS[check.state]
        view.print_text((f"{mark} ", colour), (name.ljust(width), "bold"), f"  {check.detail}", further=margin)
        if check.remedy:
            view.print_text(("→ ", "cyan"), check.remedy, indent=margin, further=f"{margin}  ")


def _check_agent(setting: CommandOptions, agent: str) -> int:
    from handrail.frontends.cli.commands.config import load_and_validate_configuration
    from handrail.kernel.doctor.workspace_checks import compute_agent_capabilities

    found = compute_agent_capabilities(
        load_and_validate_configuration(setting),
        setting.folders,
        agent,
    )
    if setting.json:
        print_json(found.to_dict())
    else:
        _print_capabilities(found)
    return OUTPUT


def _print_capabilities(found: CapabilityReport) -> None:
    print_escaped_line(f"capabilities of agent {found.agent}")
    for line in found.whole or ("nothing",):
        print_escaped_line(f"  {line}{'  (its manifest)' if line in found.own else ''}")
    if found.ceiling is not None:
        print_escaped_line("limited by this machine's ceiling")
        for line in found.ceiling or ("nothing",):
            print_escaped_line(f"  {line}")
    print_escaped_line("tools (each call has only what its tool requires)")
    for tool in found.tools:
        unavailable = f", unavailable: {tool.unavailable_reason}" if tool.unavailable_reason else ""
        print_escaped_line(escape_to_one_line(f"  {tool.id}, sandbox: {tool.sandbox}{unavailable}"))
        for line in tool.has:
            print_escaped_line(f"    {'adds' if line in tool.adds else 'has '}  {line}")


def _self_check(setting: CommandOptions) -> int:
    from handrail.frontends.cli.commands.config import load_and_validate_configuration
    from handrail.kernel.sandbox_selection import choose_unlimited_sandbox
    from handrail.sandbox.selfcheck import count_check_states, self_check

    sandbox = choose_unlimited_sandbox(load_and_validate_configuration(setting))
    outcomes = asyncio.run(self_check(sandbox))
    counts = count_check_states(outcomes)
    if setting.json:
        print_json({"sandbox": sandbox.tier.name, "counts": counts, "checks": [one.to_dict() for one in outcomes]})
    else:
        _print_outcomes(outcomes)
        print_escaped_line(f"{sandbox.tier.name}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return CANNOT_START if counts["open"] else OUTPUT


def _print_outcomes(outcomes: list[CheckOutcome]) -> None:
    groups, names = (max(len(one.group) for one in outcomes), max(len(one.name) for one in outcomes))
    view = TerminalRenderer()
    for one in outcomes:
        mark, colour = OUTCOMES[one.state]
        detail = f": {one.detail}" if one.detail else ""
        line = f"  {one.name.ljust(names)}  {one.state}{detail}"
        view.print_text((f"{mark} ", colour), (one.group.ljust(groups), "bold"), line, further="    ")
