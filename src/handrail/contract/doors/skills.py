"""Skills: instructions for one kind of work, each in a folder with a ``SKILL.md``, told in one line and read on demand.

A skill is text. It grants nothing: what a model does because of one is judged like anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

SkillLayer = Literal["workspace", "user", "shipped"]
"""Who wrote it: whoever writes the workspace, which is nobody's word; the operator; Handrail's authors."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One skill as it was found.

    :param place: its ``SKILL.md``
    :param notes: what of its front matter has no effect here
    :param problem: why it cannot be read, or ``""``
    :param hidden_by: the place of a nearer one of the same name, or ``""``
    """

    name: str
    description: str
    layer: SkillLayer
    place: str
    notes: tuple[str, ...] = ()
    problem: str = ""
    hidden_by: str = ""

    @property
    def usable(self) -> bool:
        return not self.problem and not self.hidden_by


@dataclass(frozen=True, slots=True)
class SkillText:
    """A skill's instructions.

    :param files: what else lies in its folder, where the session's tools can read it: as they call it
    :param again: they were given in this session before; then ``body`` is empty
    :param changed: they are others than when the session began
    """

    skill: Skill
    body: str
    files: tuple[str, ...] = ()
    again: bool = False
    changed: bool = False


class Skills(Protocol):
    """The skills of one session, as they were found when it first asked."""

    @property
    def index(self) -> Sequence[Skill]:
        """Those that can be read, the nearest first."""
        ...

    async def give(self, name: str) -> SkillText:
        """One's instructions, once in a session.

        :raises ToolError: ``invalid_input`` for a name that there is not, with the nearest there are; ``unavailable`` where
            its file cannot be read any more
        """
        ...
