"""What an editor's user can choose: the mode, the model, and a skill by a slash command."""

from __future__ import annotations

import re
from collections.abc import Sequence

from acp import schema

from handrail.contract.doors.skills import Skill
from handrail.contract.modes import Mode
from handrail.contract.session import Session
from handrail.policy.rules.modes import MEANINGS, MODES

COMPACT = "compact"
"""The slash command by which a user asks for compaction."""
MODE, MODEL = "mode", "model"
"""The ids of the options."""
_COMMAND = re.compile(r"\s*/([^\s/]+)(?:\s+(.*))?", re.DOTALL)
Option = schema.SessionConfigOptionSelect | schema.SessionConfigOptionBoolean


def options(mode: Mode, model: str, models: Sequence[str]) -> list[Option]:
    """What can be chosen now, whole, as the protocol has it.

    :param models: those that there are; with fewer than two there is nothing to choose
    """
    modes = [schema.SessionConfigSelectOption(value=one, name=one, description=MEANINGS[one]) for one in MODES]
    found: list[Option] = [_select(MODE, "Mode", "How much is done without asking", mode, modes)]
    if len(models) > 1:
        known = [schema.SessionConfigSelectOption(value=one, name=one) for one in models]
        found.append(_select(MODEL, "Model", "Which model answers from the next prompt on", model, known))
    return found


def _select(
    id: str, name: str, about: str, now: str, values: list[schema.SessionConfigSelectOption]
) -> schema.SessionConfigOptionSelect:
    return schema.SessionConfigOptionSelect(
        type="select",
        id=id,
        name=name,
        description=about,
        category="mode" if id == MODE else "model",
        current_value=now,
        options=values,
    )


def commands(skills: Sequence[Skill]) -> schema.AvailableCommandsUpdate:
    """The slash commands: compaction, and the skills with whose words they are. A skill by the name of a command is left out."""
    about = "Make room in the context: an outline or a summary takes the place of older messages"
    found = [schema.AvailableCommand(name=COMPACT, description=about)]
    for skill in skills:
        if skill.name == COMPACT:
            continue
        brought = skill.layer == "workspace"
        found.append(
            schema.AvailableCommand(
                name=skill.name,
                description=f"{skill.description} (a skill {'of the workspace' if brought else 'of ' + _OF[skill.layer]})",
                input=schema.AvailableCommandInput(schema.UnstructuredCommandInput(hint="what is to be done by it")),
                field_meta={
                    "handrail/skill": skill.layer,
                    **({"handrail/untrusted": "it comes from the workspace"} if brought else {}),
                },
            )
        )
    return schema.AvailableCommandsUpdate(session_update="available_commands_update", available_commands=found)


_OF = {"user": "this installation", "shipped": "Handrail"}


def asks_to_compact(task: str) -> bool:
    """Return whether a prompt is the command for compaction, and nothing else."""
    return task.strip() == f"/{COMPACT}"


def picked(task: str, session: Session) -> str:
    """A task as the model is given it: one that begins with a skill's command names the skill.

    The model reads it by its tool, judged and labelled as ever: what a workspace wrote never becomes the user's words.
    """
    match = _COMMAND.fullmatch(task)
    if match is None or match[1] not in {skill.name for skill in session.skills}:
        return task  # a path, say
    rest = (match[2] or "").strip() or "Do what it is for."
    return f"[The user picked the skill {match[1]!r}: read it with the tool skill before anything else.]\n\n{rest}"
