"""The findings of an evaluation: one decision about one target or command, with its reason, and the steps of a trace."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Literal, NamedTuple

from handrail.contract.struct import Struct
from handrail.policy.call_targets import VERBS, CallTarget, format_argv_for_message
from handrail.policy.rules.rules_and_modes import STRICTNESS, Action, Rule
from handrail.policy.shell.read_only_proof import is_command_provably_read_only

if TYPE_CHECKING:
    from handrail.policy.rules.matchers import RankedRule
    from handrail.policy.shell.risky_options import CommandRisk

Cause = Literal["rule", "no rule", "capability", "protected", "unclear", "program", "destroys", "wait", "fault"]
Stage = Literal["target", "capability", "rule", "shell", "program", "watchdog"]


class TraceStep(Struct, frozen=True):
    """One line of a trace. ``outcome`` is an action, or ``won``, ``lost`` or ``no match``."""

    stage: Stage
    outcome: str
    text: str


class PolicyFinding(NamedTuple):
    """The decision about one target, or about one command of a script."""

    action: Action
    cause: Cause
    rule: Rule | None = None
    note: str = ""
    argv: tuple[str, ...] | None = None
    target: CallTarget | None = None
    tool: RankedRule | None = None
    """The matching rule about the tool, even if another rule decided."""
    concern: CommandRisk | None = None
    wrapped: tuple[tuple[str, ...], ...] = ()
    """The words of the wrappers around the evaluated command, outermost first."""
    reading: tuple[str, ...] | None = None
    """The command that the rule matched, if it is another spelling of ``argv`` or is run by it."""
    remedy: str = ""
    """If a capability is missing: the line that would grant it, for the author of the tool or the operator of the agent."""

    @property
    def evaluated_argv(self) -> tuple[str, ...] | None:
        """The command that was compared with the rules: ``argv`` without its wrappers, or ``reading``."""
        if self.reading is not None:
            return self.reading
        return None if self.argv is None else self.argv[sum(map(len, self.wrapped)) :]

    @property
    def may_run_confined(self) -> bool:
        """Whether a rule with ``{confined}`` answers this, if the call stays confined: no rule decides it, or only the mode."""
        by_mode = self.rule is not None and self.rule.scope == "mode" and self.action == "ask"
        return by_mode or self.cause in ("no rule", "unclear", "program")

    def only_reads_replaced_file(self, replaced: Set[str]) -> bool:
        """Return whether this is only about reading a file that the same call writes, without a rule."""
        target = self.target
        is_reading = target is not None and target.capability == "fs.read" and target.value in replaced
        return self.cause == "no rule" and is_reading

    def describe_subject(self, tool_id: str) -> str:
        """Describe the subject of the finding, for the beginning of a sentence."""
        if self.argv is not None:
            read = "" if self.reading is None else f" (read as {format_argv_for_message(self.reading)})"
            return f"{format_argv_for_message(self.argv)}{read}"
        if self.target is None:
            return f"`{tool_id}`"
        target = self.target
        if target.capability == "shell.run":
            return target.shown
        return f"{VERBS[target.capability].capitalize()} {target.shown} with {tool_id}"


def choose_deciding_finding(findings: Sequence[PolicyFinding]) -> PolicyFinding:
    """Return the first of the strictest findings.

    If one rule decides several commands alike, a command that may change something comes before those that only read: the
    reason then names what the user or the model can leave out.
    """
    deciding = max(findings, key=lambda one: STRICTNESS[one.action])
    if deciding.action == "allow" or deciding.cause != "rule" or deciding.argv is None:
        return deciding
    alike = (one for one in findings if one.action == deciding.action and one.rule is deciding.rule and one.argv)
    return next((one for one in alike if not is_command_provably_read_only(one.evaluated_argv or ())), deciding)


def format_reason(finding: PolicyFinding, tool_id: str) -> str:
    """Return the reason of a finding as full sentences, for the model and the user."""
    rule = finding.rule
    named = f"the rule {rule.text!r} ({rule.scope} scope)" if rule is not None else ""
    about = finding.describe_subject(tool_id)
    match finding.cause:
        case "rule" if finding.action == "allow":
            return f"{about} is allowed by {named}."
        case "rule" if finding.action == "deny":
            return f"{about} is denied by {named}."
        case "rule":
            return f"{about} requires approval by {named}."
        case "no rule":
            return f"{about} requires approval: no rule allows it."
        case "protected":
            return f"{about} requires approval: {finding.note.rstrip('.')}."
        case "unclear":
            return (
                f"{about} requires approval, because the rules cannot be applied to it: {finding.note}. "
                "Simple commands joined by &&, ||, | or ; are checked one by one."
            )
        case "program" | "destroys":
            return f"{about} requires approval: {finding.note}, and no rule names this form word by word."
        case "capability" | "fault" | "wait":
            return finding.note
