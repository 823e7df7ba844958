"""``handrail skills``: the skills that a session's model finds in this workspace, with origin and faults."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.command_group import OUTPUT
from handrail.frontends.cli.command_options import CommandOptions, add_configuration_options
from handrail.frontends.cli.commands.config import load_and_validate_configuration
from handrail.frontends.cli.renderer import TerminalRenderer
from handrail.frontends.cli.terminal_output import print_json, print_terminal_safe_text

if TYPE_CHECKING:
    from handrail.contract.services.history_and_skill_services import SkillInfo
    from handrail.session.session_skills import FoundSkill


@click.command("skills")
@click.argument("name", metavar="[list|NAME]", required=False)
@add_configuration_options
def command(setting: CommandOptions, name: str | None) -> int:
    """List skills, or print the text of one.

    Handrail searches for skills in .agents/skills and .claude/skills of the workspace and of its parent folders, up to the
    root of its repository, then in skills/ of the configuration, then among the built-in ones. Of several skills with one
    name, the nearest applies, and the nearest are listed first. A skill grants no permissions. It is text for the model.
    """
    from handrail.session.session_skills import find_skills

    config = load_and_validate_configuration(setting)
    folders = setting.folders
    found = find_skills(Path(folders.workspace), config.folder)
    if name is not None and name != "list":
        return _print_skill(setting, name, found)
    if setting.json:
        for one in found:
            print_json(asdict(one.skill), lines=True)
        return OUTPUT
    view = TerminalRenderer()
    view.print_table(("SKILL", "LAYER", "DESCRIPTION"), [_row(one.skill) for one in found])
    for one in found:
        for note in (f"fault: {one.skill.problem}" if one.skill.problem else "", *one.skill.notes):
            if note:
                view.print_text((one.skill.name, "bold"), f": {note}", further="  ")
    return OUTPUT


def _row(skill: SkillInfo) -> tuple[str, str, str]:
    about = f"hidden by {skill.shadowed_by}" if skill.shadowed_by else skill.description or skill.path
    return skill.name, skill.layer, about if len(about) <= 160 else f"{about[:159]}…"


def _print_skill(setting: CommandOptions, name: str, found: list[FoundSkill]) -> int:
    from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
    from handrail.session.session_skills import read_skill

    usable = {one.skill.name: one for one in found if one.skill.is_usable}
    if name not in usable:
        near = nearest_names(name, usable, 1)
        hint = f"Did you mean {near[0]}?" if near else "`handrail skills` lists the skills."
        raise click.UsageError(f"Skill {name[:80]!r} does not exist. {hint}")
    try:
        body, _, files = read_skill(usable[name])
    except ValueError as error:
        raise click.UsageError(f"Could not read skill {name}: its SKILL.md {error}. Correct the file") from None
    if setting.json:
        whole = {**asdict(usable[name].skill), "body": body, "files": list(files)}
        print_json(whole, lines=True)
        return OUTPUT
    print_terminal_safe_text(body)
    return OUTPUT
