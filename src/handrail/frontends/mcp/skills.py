"""The skills of a client's session as prompts: what a person picks in the client, where a model would call ``skill``.

Getting one is a call of that tool, judged and recorded like any. The tool gives a skill's text once in a session; a client's
prompts are asked for again, and in the stateless era several clients share a session, so what was given is kept here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

if TYPE_CHECKING:
    from handrail.contract.doors.skills import Skill
    from handrail.contract.result import Result
    from handrail.frontends.mcp.clients.guest import Guest
    from handrail.kernel.kernel import Kernel

TOOL = "skill"
APART = "skill:"
"""Before the name of a skill where a source has a prompt of that name."""
MOST_KEPT = 100
"""Texts of one client; a skill read before these is read from its file again by a new session only."""
_TASK = "task"
_ARGUMENTS = [{"name": _TASK, "description": "What is to be done by it, in your words", "required": False}]
_UNTRUSTED = "it comes from the workspace"


class SkillPrompts:
    """See the module. Those of one client."""

    def __init__(self, kernel: Kernel, guest: Guest) -> None:
        self._kernel = kernel
        self._guest = guest
        self._given: dict[str, dict[str, Any]] = {}
        """What the tool gave, by the skill."""

    def listed(self, taken: Collection[str]) -> list[dict[str, Any]]:
        """As MCP lists prompts.

        :param taken: the names of those that sources offer
        """
        return [_prompt(skill, name) for name, skill in self._named(taken).items()]

    def named(self, name: str, taken: Collection[str]) -> Skill | None:
        """The skill that a prompt's name stands for, or None."""
        return self._named(taken).get(name)

    def _named(self, taken: Collection[str]) -> dict[str, Skill]:
        if self._kernel.generation.resolve(TOOL) is None:
            return {}
        return {APART + one.name if one.name in taken else one.name: one for one in self._guest.session.skills}

    @staticmethod
    def check(arguments: Mapping[str, str]) -> str:
        """The task that goes with it.

        :raises MCPError: for what is no argument of such a prompt
        """
        if unknown := arguments.keys() - {_TASK}:
            raise MCPError(INVALID_PARAMS, f"{sorted(unknown)[0][:80]!r} is no argument of a skill; it takes {_TASK}")
        return arguments.get(_TASK, "")

    def whole(self, result: Result) -> Result:
        """A result of the tool with the text in it, also where the session was given that before."""
        given: object = result.data
        if not result.ok or not isinstance(given, dict):
            return result
        data = cast("dict[str, Any]", given)
        name = data.get("name")
        if not isinstance(name, str):
            return result
        if data.get("content"):
            while len(self._given) >= MOST_KEPT:
                del self._given[next(iter(self._given))]
            self._given[name] = data
        return replace(result, data=self._given.get(name, data))

    @staticmethod
    def messages(skill: Skill, data: Mapping[str, Any], task: str) -> dict[str, Any]:
        """What the tool gave, as a prompt."""
        lines = [f"The skill {skill.name}, from {data['from']}.", str(data["content"])]
        if data.get("note"):
            lines.append(f"Note: {data['note']}")
        if files := data.get("files"):
            lines.append(f"Files beside it: {', '.join(map(str, files))}")
        said = [_said("\n\n".join(lines)), *([_said(task)] if task else [])]
        return {"description": skill.description, "messages": said, "_meta": _labels(skill)}


def _prompt(skill: Skill, name: str) -> dict[str, Any]:
    return {"name": name, "description": skill.description, "arguments": _ARGUMENTS, "_meta": _labels(skill)}


def _labels(skill: Skill) -> dict[str, Any]:
    untrusted = {"handrail/untrusted": _UNTRUSTED} if skill.layer == "workspace" else {}
    return {"handrail/skill": skill.layer, **untrusted}


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": {"type": "text", "text": text}}
