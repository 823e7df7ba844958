"""How one call was decided, with everything needed to say why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from handrail.contract.tool.requires import CapabilitySet
from handrail.policy.capabilities import VERBS
from handrail.policy.rules.rules import STRICTNESS, Action, Rule
from handrail.policy.targets import Target, shown_argv

if TYPE_CHECKING:
    from handrail.policy.questions import Prepared
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


class Verdict:
    """A decision. It can be narrowed, never widened.

    :ivar action: ``allow``, ``ask`` (a person, or refusal when headless), ``deny``
    :ivar capabilities: what the call may touch at most
    :ivar targets: what it would touch, canonical
    """

    __slots__ = (
        "_always",
        "_by_rules",
        "_reason",
        "action",
        "arguments",
        "capabilities",
        "deciding",
        "findings",
        "narrowed_by_watchdog",
        "notes",
        "prepared",
        "targets",
    )

    def __init__(
        self,
        prepared: Prepared,
        arguments: Mapping[str, Any],
        targets: Sequence[Target],
        findings: Sequence[Finding],
        deciding: Finding,
    ) -> None:
        self.prepared = prepared
        self.arguments = arguments
        self.targets = targets
        self.findings = findings
        self.deciding = deciding
        self.action: Action = deciding.action
        self.capabilities: CapabilitySet = prepared.capabilities
        self.notes: tuple[Step, ...] = ()
        self.narrowed_by_watchdog = False
        self._reason: str | None = None
        self._by_rules: dict[str, Any] | None = None
        self._always: str | Literal[False] | None = False

    @property
    def reason(self) -> str:
        """One sentence for the model: what decided, without places of the operator's machine."""
        if self._reason is None:
            self._reason = reason_of(self.deciding, self.prepared.spec.id)
        return self._reason

    @property
    def reads_only(self) -> bool:
        """Whether the call does nothing but run a command that is proved to change nothing, so that it runs read-only."""
        if not self.prepared.spec.only_its_command:
            return False
        from handrail.policy.questions import changes_nothing

        return changes_nothing(self.targets)

    @property
    def by_rules(self) -> dict[str, Any]:
        """The record of a call that rules alone allow, made once for a verdict that stands for many calls. Not to be
        changed."""
        if self._by_rules is None:
            self._by_rules = {"by": "rules", "reason": self.reason}
        return self._by_rules

    @property
    def detail(self) -> str:
        """One sentence for the operator: the same with the rule's source."""
        rule = self.deciding.rule
        if self.narrowed_by_watchdog or rule is None or not rule.source:
            return self.reason
        return f"{self.reason} The rule's source: {rule.source}."

    @property
    def always(self) -> str | None:
        """A rule that, added to the session, answers this very call with yes (a folder with what is in it); or None.

        Every literal in it is escaped. Only for a call that is asked about, and only where adding it was found to be
        enough.
        """
        if self._always is False:
            from handrail.policy.suggestions import always

            self._always = always(self) if self.action == "ask" else None
        return self._always

    @property
    def trace(self) -> tuple[Step, ...]:
        """Every step, in order: targets, capability layers, each candidate rule and how it fared, watchdogs."""
        from handrail.policy.tracing import trace

        return (*trace(self), *self.notes)

    def narrowed(self, action: Action, reason: str, note: Step) -> Verdict:
        """The same with a stricter ``action``, which no rule can answer."""
        assert STRICTNESS[action] > STRICTNESS[self.action]
        other = self.noted(note)
        other.action = action
        other.narrowed_by_watchdog = True
        other._reason = reason
        other._always = None
        return other

    def noted(self, note: Step) -> Verdict:
        """The same, with one more step in its trace."""
        other = Verdict(self.prepared, self.arguments, self.targets, self.findings, self.deciding)
        other.action = self.action
        other.notes = (*self.notes, note)
        other.narrowed_by_watchdog = self.narrowed_by_watchdog
        other._reason = self._reason
        other._always = self._always
        return other

    def __repr__(self) -> str:
        return f"Verdict({self.action}: {self.reason})"


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
