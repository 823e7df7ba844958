"""``handrail skills``: the skills that a session's model finds in this workspace, with origin and faults."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from handrail.frontends.cli.app import OUTPUT
from handrail.frontends.cli.commands.config import read
from handrail.frontends.cli.options import Setting, configured
from handrail.frontends.cli.show import columns, one_line, out, out_json, out_payload

if TYPE_CHECKING:
    from handrail.contract.doors.memory import Skill
    from handrail.session.skills import FoundSkill


@click.command("skills")
@click.argument("name", required=False)
@configured
def command(setting: Setting, name: str | None) -> int:
    """List skills, or print the text of one.

    Handrail searches for skills in .agents/skills and .claude/skills of the workspace and of its parent folders, up to the
    root of its repository, then in skills/ of the configuration, then among the built-in ones. Of several skills with one
    name, the nearest applies, and the nearest are listed first. A skill grants no permissions. It is text for the model.
    """
    from handrail.session.skills import find_skills
    from handrail.store.folders import locate

    config = read(setting)
    folders = locate(setting.workspace, setting.state, allow_home=setting.allow_home)
    found = find_skills(Path(folders.workspace), config.folder)
    if name is not None:
        return _print(setting, name, found)
    if setting.json:
        for one in found:
            out_json(asdict(one.skill), lines=True)
        return OUTPUT
    for one, line in zip(found, columns(_row(one.skill) for one in found), strict=True):
        out(line)
        for note in (f"fault: {one.skill.problem}" if one.skill.problem else "", *one.skill.notes):
            if note:
                out(f"  {one_line(note)}")
    return OUTPUT


def _row(skill: Skill) -> tuple[str, str, str]:
    about = f"hidden by {skill.hidden_by}" if skill.hidden_by else skill.description or skill.place
    return skill.name, skill.layer, about if len(about) <= 160 else f"{about[:159]}…"


def _print(setting: Setting, name: str, found: list[FoundSkill]) -> int:
    from handrail.contract.tool.names import nearest
    from handrail.session.skills import read_skill

    usable = {one.skill.name: one for one in found if one.skill.usable}
    if name not in usable:
        near = nearest(name, usable, 1)
        hint = f"Did you mean {near[0]}?" if near else "`handrail skills` lists the skills."
        raise click.UsageError(f"Skill {name[:80]!r} does not exist. {hint}")
    try:
        body, _, files = read_skill(usable[name])
    except ValueError as error:
        raise click.UsageError(f"Could not read skill {name}: its SKILL.md {error}") from None
    if setting.json:
        whole = {**asdict(usable[name].skill), "body": body, "files": list(files)}
        out_json(whole, lines=True)
        return OUTPUT
    out_payload(body)
    return OUTPUT
