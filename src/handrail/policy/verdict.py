"""The verdict on one call, with its steps and reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from handrail.policy.rules.rules import Action, Rule
from handrail.policy.targets import VERBS, Target, shown_argv

if TYPE_CHECKING:
    from handrail.policy.rules.matching import Ranked
    from handrail.policy.shell.forms import Concern

Cause = Literal["rule", "no rule", "capability", "protected", "unclear", "program", "wait", "fault"]
Stage = Literal["target", "capability", "rule", "shell", "program", "watchdog"]


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a trace. ``outcome``: an action, or how a candidate fared (``won``, ``lost``, ``no match``)."""

    stage: Stage
    outcome: str
    text: str


class Finding(NamedTuple):
    """The answer for one target, or one command of a script."""

    action: Action
    cause: Cause
    rule: Rule | None = None
    note: str = ""
    argv: tuple[str, ...] | None = None
    target: Target | None = None
    tool: Ranked | None = None
    """The rule about the tool that matched, whichever rule decided in the end."""
    concern: Concern | None = None
    wrapped: tuple[tuple[str, ...], ...] = ()
    """The words of the wrappers around the command that was judged, outermost first."""
    reading: tuple[str, ...] | None = None
    """The command that the rule matched, where that is another spelling of ``argv`` or is run by it."""
    remedy: str = ""
    """The line that would let it through, for the tool's author or the agent's operator, where a capability is missing."""

    @property
    def judged(self) -> tuple[str, ...] | None:
        """The command that the rules were compared with: ``argv`` without the wrappers around it, or its other reading."""
        if self.reading is not None:
            return self.reading
        return None if self.argv is None else self.argv[sum(map(len, self.wrapped)) :]

    def about(self, tool_id: str) -> str:
        """What it is the answer to, for the beginning of a sentence."""
        if self.argv is not None:
            read = "" if self.reading is None else f" (read as {shown_argv(self.reading)})"
            return f"running {shown_argv(self.argv)}{read}"
        if self.target is None:
            return tool_id
        target = self.target
        verb = VERBS[target.capability]
        return f"{verb} {target.shown}" if target.capability == "shell.run" else f"{verb} {target.shown} with {tool_id}"


def reason_of(finding: Finding, tool_id: str) -> str:
    rule = finding.rule
    named = f"the rule {rule.text!r} ({rule.scope} scope)" if rule is not None else ""
    about = finding.about(tool_id)
    match finding.cause:
        case "rule" if finding.action == "allow":
            return f"{about} is allowed by {named}."
        case "rule" if finding.action == "deny":
            return f"{about} is denied by {named}."
        case "rule":
            return f"{about} needs approval: {named} asks."
        case "no rule":
            return f"{about} needs approval: no rule allows it."
        case "protected":
            return f"{about} needs approval: {finding.note}."
        case "unclear":
            return f"{about} needs approval, because it cannot be judged: {finding.note}."
        case "program":
            return f"{about} needs approval: {finding.note}, and no rule names that form word by word."
        case "capability" | "fault" | "wait":
            return f"{tool_id}: {finding.note}"
