"""``handrail explain``: the decision about a call, its reasons, and the change that would reverse it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from handrail.contract.services.file_services import PathResolver
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import Capability, CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.call_targets import CallTarget, format_argv_for_message, list_commands_needing_capability
from handrail.policy.confinement import describe_confinement
from handrail.policy.findings import PolicyFinding, TraceStep, format_reason
from handrail.policy.rule_suggestions import SESSION_SOURCE, build_exact_target_pattern, suggest_rule
from handrail.policy.rules.matchers import RankedRule, RuleRanking, RuleSubject
from handrail.policy.rules.rules_and_modes import DEFAULT_MODE, MODES, Action, Rule, RuleBook, with_mode
from handrail.policy.shell import read_only_proof
from handrail.policy.shell.parser import ShellScript
from handrail.policy.stored_paths import load_and_check_repository_histories

# The trace of a verdict, computed only on request.

_MAX_STEPS = 400
_MOST_STEPS_UNMATCHED = 60
"""The maximum number of rules without a match that get a step each, for one question."""


def trace_decision(verdict: PolicyVerdict) -> tuple[TraceStep, ...]:
    """Return the steps of a verdict: targets, capability layers, rules, programs and the outcome.

    The trace names every rule that could matter, and whether it won.
    """
    steps: list[TraceStep] = []
    for step in _steps(verdict):
        if len(steps) == _MAX_STEPS:
            steps.append(TraceStep("rule", "…", "further steps are omitted"))
            break
        steps.append(step)
    return (*steps, *verdict.notes)


def _steps(verdict: PolicyVerdict) -> Iterator[TraceStep]:
    prepared = verdict.prepared
    for target in verdict.targets:
        how = {"": "", "plain": ", by a redirection", "guessed": ", perhaps by a redirection"}[target.redirected]
        yield TraceStep("target", target.capability, f"{target.shown}{how}")
        yield from _layer_steps(prepared.capabilities, target)
    if not verdict.targets:
        names = ", ".join(layer.owner for layer in prepared.capabilities.layers)
        yield TraceStep(
            "capability",
            "no target",
            f"the call names no target; its runtime is limited by {names or 'an empty capability set'}",
        )
    for finding in verdict.findings:
        if finding.cause == "capability":
            yield TraceStep("capability", "deny", finding.note)
            continue
        if finding.cause == "fault":
            yield TraceStep("target", "deny", finding.note)
            continue
        for words in finding.wrapped:
            yield TraceStep(
                "shell",
                "unwrapped",
                f"{format_argv_for_message(words)} runs the command after it, which is evaluated instead",
            )
        yield from _rule_steps(verdict, finding)
        if finding.cause == "unclear":
            yield TraceStep("shell", "ask", f"cannot be evaluated: {finding.note}")
        elif finding.cause == "protected":
            yield TraceStep("rule", "ask", f"protected: {finding.note}")
        elif finding.cause in ("program", "destroys", "wait"):
            yield TraceStep("program", finding.action, finding.note)
        yield TraceStep("rule", finding.action, format_reason(finding, prepared.spec.id))


def _layer_steps(capabilities: CapabilitySet, target: CallTarget) -> Iterator[TraceStep]:
    if not capabilities.layers:
        yield TraceStep("capability", "refused", "the call has no capability layer, so it has no access")
    script = target.subject if isinstance(target.subject, ShellScript) else None
    touches: Sequence[str | Sequence[str]] = (target.value,)
    if script is not None:
        touches = list_commands_needing_capability(script)
    for layer in capabilities.layers:
        alone = CapabilitySet((layer,))
        covered = all(alone.allows(target.capability, touch) for touch in touches)
        yield TraceStep(
            "capability", "covered" if covered else "refused", f"{layer.owner}: {target.capability} {target.shown}"
        )


def _rule_steps(verdict: PolicyVerdict, finding: PolicyFinding) -> Iterator[TraceStep]:
    prepared = verdict.prepared
    subject = _subject_compared_with_rules(verdict, finding)
    capability: Capability | None = finding.target.capability if finding.target is not None else None
    redirected = finding.target is not None and bool(finding.target.redirected)
    tool_subject = verdict.arguments if prepared.kind == "arguments" else subject
    if tool_subject != () and not redirected:
        yield from _candidate_steps("tool", prepared.tool_rules, tool_subject)
        if capability is None:
            yield from _candidate_steps("tool, shipped", prepared.default_tool_rules, tool_subject)
    if capability is not None and subject != () and not isinstance(subject, Mapping):
        own, shipped = prepared.rank_capability_rules(capability)
        yield from _candidate_steps(capability, own, subject)
        if own.find_winner(subject) is None and finding.tool is None and not redirected:
            yield from _candidate_steps(f"{capability}, shipped", shipped, subject, only_matching=True)


def _subject_compared_with_rules(verdict: PolicyVerdict, finding: PolicyFinding) -> RuleSubject:
    """Return the subject that the rules were compared with."""
    if finding.evaluated_argv is not None:
        return finding.evaluated_argv
    if finding.target is None or isinstance(finding.target.subject, ShellScript):
        return verdict.arguments if verdict.prepared.kind == "arguments" else ()
    return finding.target.subject


def _candidate_steps(
    question: str, ranking: RuleRanking, subject: RuleSubject, *, only_matching: bool = False
) -> Iterator[TraceStep]:
    winner: RankedRule | None = ranking.find_winner(subject)
    unmatched = 0
    for candidate in ranking.ranked:
        if candidate is winner:
            yield TraceStep("rule", "won", f"{question}: {candidate.rule}")
        elif candidate.matches(subject):
            yield TraceStep(
                "rule", "lost", f"{question}: {candidate.rule}: {explain_lost_precedence(candidate, winner)}"
            )
        elif not only_matching:
            unmatched += 1
            if unmatched <= _MOST_STEPS_UNMATCHED:
                yield TraceStep("rule", "no match", f"{question}: {candidate.rule}")
    if unmatched > _MOST_STEPS_UNMATCHED:
        yield TraceStep("rule", "no match", f"{question}: {unmatched - _MOST_STEPS_UNMATCHED} more rules")
    if not ranking.ranked and not only_matching:
        yield TraceStep("rule", "none", f"{question}: no rule matches it")


def explain_lost_precedence(candidate: RankedRule, winner: RankedRule | None) -> str:
    """Return the first part of the precedence in which another rule was ahead."""
    if winner is None:
        return "this rule was not consulted"
    if candidate.rank > winner.rank:
        return "the winner is stricter, and belongs to the parent session"
    names = (
        "the winner is a final deny",
        "the winner names its permission more specifically",
        "the winner has more literal characters before its first wildcard",
        "the winner has a longer pattern",
        "the winner is stricter",
    )
    for name, mine, other in zip(names, candidate.rank, winner.rank, strict=True):
        if other > mine:
            return name
    return "the winner is equivalent"


_MOST_UNMATCHED = 4
"""The maximum number of successive rules without a match that get a line each."""


class PolicyExplanation(Struct, frozen=True):
    """The explanation of one decision. :meth:`to_dict` returns it as JSON data.

    :param decided_by: the rule's text, the capability layer, the watchdog, or another cause
    :param possible_changes: changes that would reverse the decision, each a sentence; a rule is written as the option takes it
    """

    tool_id: str
    action: Action
    effective_action: Action
    """The action of a headless session: ``deny`` in place of ``ask``."""
    reason: str
    decided_by: str
    rule: Rule | None
    steps: tuple[TraceStep, ...]
    possible_changes: tuple[str, ...]
    mode: str = DEFAULT_MODE
    """The mode of the session. Its rules have the scope ``mode``."""
    read_only: bool | None = None
    """Whether the call provably changes nothing, so that it runs read-only. None if the tool does not only run a command."""
    read_only_note: str = ""
    """Why the call is not proved to be read-only."""
    confined: bool | None = None
    """Whether the call runs confined, by a rule with ``{confined}``. None if no such rule applies to the tool."""
    confinement_note: str = ""
    """What the confinement is, or why the rule with ``{confined}`` does not answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        rule = self.rule
        return {
            "tool": self.tool_id,
            "action": self.action,
            "effective": self.effective_action,
            "reason": self.reason,
            "decided_by": self.decided_by,
            "rule": None
            if rule is None
            else {"text": rule.text, "scope": rule.scope, "source": rule.source, "final": rule.is_final},
            "steps": [{"stage": step.stage, "outcome": step.outcome, "text": step.text} for step in self.steps],
            "changes": list(self.possible_changes),
            "mode": self.mode,
            "read_only": self.read_only,
            "proof": self.read_only_note,
            "confined": self.confined,
            "confinement": self.confinement_note,
        }

    def __str__(self) -> str:
        """Return the plain text that ``handrail explain`` prints."""
        head = (
            self.action
            if self.effective_action == self.action
            else f"{self.action} (headless: {self.effective_action})"
        )
        lines = [f"{self.tool_id}: {head}", f"  {self.reason}", f"  decided by: {self.decided_by}"]
        lines.append(f"  mode: {self.mode}")
        if self.read_only is not None:
            message = (
                "proved, so it runs with everything mounted read-only"
                if self.read_only
                else f"not proved: {self.read_only_note}"
            )
            lines.append(f"  read-only: {message}")
        if self.confined is not None:
            lines.append(f"  confined: {'yes' if self.confined else 'no'}: {self.confinement_note}")
        lines += ["", "steps:"]
        widest = max((len(step.stage) for step in self.steps), default=0)
        lines += [
            f"  {step.stage:<{widest}}  {step.outcome:<9}  {step.text}"
            for step in _condense_unmatched_rules(self.steps)
        ]
        if self.possible_changes:
            lines += ["", "changes that would reverse it:", *(f"  - {change}" for change in self.possible_changes)]
        return "\n".join(
            line.replace("\n", "\\n").replace("\t", "\\t") for line in lines
        )  # no name or text begins a line


def _condense_unmatched_rules(steps: Iterable[TraceStep]) -> Iterator[TraceStep]:
    """Return the steps with each long run of rules that do not match as one line."""
    for (stage, outcome), run in groupby(steps, lambda step: (step.stage, step.outcome)):
        alike = list(run)
        if outcome == "no match" and len(alike) > _MOST_UNMATCHED:
            yield TraceStep(stage, outcome, f"{len(alike)} rules; --json lists each")
        else:
            yield from alike


async def explain(
    authority: CallAuthorizer,
    spec: ToolSpec,
    arguments: Mapping[str, Any],
    *,
    rules: RuleBook,
    roots: PathResolver,
    parent: CapabilitySet | None = None,
    origin: str | None = None,
    substitute: ToolSpec | None = None,
    session_id: str = "",
    headless: bool = False,
) -> PolicyExplanation:
    """Decide a call, watchdogs included, without running or recording anything.

    :param parent: the capability set of the call that makes this one
    :param origin: ``mcp:server:tool`` for a tool of an MCP server
    :param substitute: the tool that answers in place of a locked id
    :param headless: whether the session denies calls that require approval
    """

    def evaluate() -> PolicyVerdict:
        return authority.evaluate(
            spec, arguments, rules=rules, roots=roots, parent=parent, origin=origin, substitute=substitute
        )

    verdict = evaluate()
    if authority.list_repositories_with_unread_history(verdict):
        await load_and_check_repository_histories(lambda: authority.list_repositories_with_unread_history(evaluate()))
        verdict = evaluate()
    verdict = await authority.ask_watchdogs(verdict, spec, arguments, session_id)
    effective: Action = "deny" if headless and verdict.action == "ask" else verdict.action
    return PolicyExplanation(
        spec.id,
        verdict.action,
        effective,
        verdict.operator_reason,
        _find_deciding_part(verdict),
        None if verdict.narrowed_by_watchdog else verdict.deciding_finding.rule,
        trace_decision(verdict),
        tuple(dict.fromkeys((*_changes(verdict, spec), *_find_wider_allowing_mode(verdict, rules)))),
        rules.mode,
        *_read_only_proof(verdict),
        *describe_confinement(verdict),
    )


def _read_only_proof(verdict: PolicyVerdict) -> tuple[bool | None, str]:
    if not verdict.prepared.spec.single_command:
        return None, ""
    for target in verdict.targets:
        if (
            isinstance(target.subject, ShellScript)
            and (reason := read_only_proof.explain_script_not_read_only(target.subject)) is not None
        ):
            return False, reason
    return verdict.is_read_only, ""


def _find_wider_allowing_mode(verdict: PolicyVerdict, rules: RuleBook) -> Iterator[str]:
    """Return the first wider mode that would allow the call."""
    if verdict.action == "allow" or verdict.narrowed_by_watchdog:
        return
    for mode in MODES:
        if mode == rules.mode:
            continue
        other = verdict.prepared.with_rules(with_mode(rules, mode))
        if other.evaluate_targets(verdict.arguments, verdict.targets).action == "allow":
            yield f"--mode {mode}"
            return


def _find_deciding_part(verdict: PolicyVerdict) -> str:
    if verdict.narrowed_by_watchdog:
        return f"watchdog {verdict.notes[-1].text}"
    deciding = verdict.deciding_finding
    match deciding.cause:
        case "rule":
            return f"rule {deciding.rule}"
        case "no rule":
            return "no rule matches, so the call requires approval"
        case "capability":
            return "the capability check"
        case "protected":
            return f"the protected names: only a rule that names the path allows it (the rule alone would allow it: {deciding.rule})"
        case "unclear":
            return "the shell parser: a command that it does not understand requires approval"
        case "program" if deciding.rule is not None and deciding.rule.action != "allow":
            return f"rule {deciding.rule}, because the program may run a command that the rule matches"
        case "program" if deciding.rule is None:
            return "the policy for programs that run their arguments"
        case "program" | "destroys":
            return f"the policy for this program (the rule alone would allow it: {deciding.rule})"
        case "wait":
            return "the policy for commands that only wait"
        case "fault":
            return "an invalid target"


def _changes(verdict: PolicyVerdict, spec: ToolSpec) -> Iterator[str]:
    deciding = verdict.deciding_finding
    if verdict.narrowed_by_watchdog:
        yield "only another decision of the watchdog; no rule outweighs it"
    elif deciding.cause in ("capability", "fault", "wait"):
        yield deciding.remedy or deciding.note
    elif verdict.action == "allow":
        yield from _denying_rules(verdict, spec)
    elif verdict.action == "ask" and (rule := suggest_rule(verdict)) is not None:
        yield f"--rule {shlex.quote(rule)}"
    elif deciding.cause == "unclear":
        yield "write it as simple commands joined by &&, ||, | or ;, with every special character quoted"
    elif verdict.action == "deny" and deciding.rule is not None:
        yield from _changes_that_lift_denial(deciding.rule, verdict, spec)
    else:
        yield "approve it once, because no single rule of this session allows it"


def _changes_that_lift_denial(rule: Rule, verdict: PolicyVerdict, spec: ToolSpec) -> Iterator[str]:
    """Return the changes that would allow a call that ``rule`` denies."""
    place = rule.source or f"the {rule.scope} scope"
    if rule.is_final:
        yield f"only to remove {rule.text!r} from {place}: a deny of this scope is final"
        return
    yield f"remove {rule.text!r} from {place}"
    for text in _rules_for_deciding_target(verdict, spec):
        if _rule_would_lead_to(verdict, text, "allow"):
            yield f"add a more specific rule: --rule {shlex.quote(text)}"
            return


def _denying_rules(verdict: PolicyVerdict, spec: ToolSpec) -> Iterator[str]:
    for text in _rules_for_deciding_target(verdict, spec, "deny"):
        if _rule_would_lead_to(verdict, text, "deny"):
            yield f"to deny it: --rule {shlex.quote(text)}"
            return


def _rules_for_deciding_target(verdict: PolicyVerdict, spec: ToolSpec, action: Action = "allow") -> Iterator[str]:
    """Return rules about exactly the deciding target, with the tool's first."""
    from handrail.policy.rules.pattern_lexer import build_exact_argv_pattern

    finding = verdict.deciding_finding
    pattern = build_exact_argv_pattern(finding.argv) if finding.argv is not None else None
    if pattern is None and finding.target is not None:
        pattern = build_exact_target_pattern(finding.target)
    if pattern is not None and verdict.prepared.kind != "arguments":
        yield f"{action} {spec.id} {pattern}"
    if pattern is not None and finding.target is not None:
        yield f"{action} {finding.target.capability} {pattern}"
    yield f"{action} {spec.id}"


def _rule_would_lead_to(verdict: PolicyVerdict, text: str, action: Action) -> bool:
    """Return whether this rule, added to the session, would lead to this action."""
    from handrail.policy.rules.rules_and_modes import parse_rule

    if not text.isprintable():
        return False
    try:
        rule = parse_rule(text, scope="session", source=SESSION_SOURCE)
    except ValueError:
        return False
    return verdict.prepared.with_rule(rule).evaluate_targets(verdict.arguments, verdict.targets).action == action
