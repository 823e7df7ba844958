"""The skills of one session: found when it first asks, and the same from then on; each given once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from handrail.contract.doors.skills import Skill, SkillText
from handrail.contract.errors import ToolError
from handrail.contract.tool.names import nearest
from handrail.runtime.surface import Values
from handrail.session.skills.files import FoundSkill, find_skills, read_skill

_KEPT = ("skill", "given")
"""The tool and the key by which a session keeps which of them were given."""
_MOST_NAMED = 30


class SessionSkills:
    """Implements :class:`~handrail.contract.doors.skills.Skills`.

    :param config: the operator's configuration folder
    :param values: where the session keeps which were given
    """

    def __init__(self, session_id: str, workspace: str, config: Path, values: Values) -> None:
        self._session_id = session_id
        self._workspace = workspace
        self._config = config
        self._values = values

    @cached_property
    def _usable(self) -> Mapping[str, FoundSkill]:
        found = find_skills(Path(self._workspace), self._config)
        return {one.skill.name: one for one in found if one.skill.usable}

    @property
    def index(self) -> Sequence[Skill]:
        return tuple(one.skill for one in self._usable.values())

    async def give(self, name: str) -> SkillText:
        found = self._usable.get(name)
        if found is None:
            raise ToolError(self._unknown(name), kind="invalid_input")
        kept: object = await self._values.get(self._session_id, *_KEPT)
        given = cast("list[object]", kept) if isinstance(kept, list) else []
        if name in given:
            return SkillText(found.skill, "", again=True)
        try:
            body, sha256, files = read_skill(found)
        except ValueError as error:
            text = f"the skill {name!r} cannot be read any more: its SKILL.md {error}"
            raise ToolError(text, kind="unavailable") from None
        await self._values.put(self._session_id, *_KEPT, [*given, name])
        return SkillText(found.skill, body, self._readable(found, files), changed=sha256 != found.sha256)

    async def forget_given(self) -> None:
        """What was given is not in the conversation any more, as after it was compacted: each is given once again."""
        await self._values.put(self._session_id, *_KEPT, None)

    def _readable(self, found: FoundSkill, files: Sequence[str]) -> tuple[str, ...]:
        """Those files that the session's tools can read: the ones in the workspace, as they are called there."""
        folder = found.at.folder / found.folder
        if found.skill.layer != "workspace" or not folder.is_relative_to(self._workspace):
            return ()
        return tuple(str(folder.relative_to(self._workspace) / file) for file in files)

    def _unknown(self, name: str) -> str:
        names = list(self._usable)
        close = nearest(name, names, 2)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return f"there is no skill {name[:80]!r}{hint} There are: {', '.join(names[:_MOST_NAMED]) or 'none'}{more}"
