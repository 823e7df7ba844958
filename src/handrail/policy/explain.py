"""``handrail explain``: the decision about a call, its reasons, and the change that would reverse it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from handrail.contract.doors.files import PathRoots
from handrail.contract.tool.requires import Capability, CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.authority import Authority
from handrail.policy.questions import Finding, Step, Verdict, reason_of
from handrail.policy.rules.matching import Ranked, Ranking, Subject
from handrail.policy.rules.rules import DEFAULT_MODE, MODES, Action, Rule, RuleBook, in_mode
from handrail.policy.shell import read_only
from handrail.policy.shell.parse import Script
from handrail.policy.suggestions import SOURCE, always, target_pattern
from handrail.policy.targets import Target, shown_argv

# The trace of a verdict, computed only on request.

_MAX_STEPS = 400
_MOST_STEPS_UNMATCHED = 60
"""The maximum number of rules without a match that get a step each, for one question."""


def trace(verdict: Verdict) -> tuple[Step, ...]:
    """Return the steps of a verdict: targets, capability layers, rules, programs and the outcome.

    The trace names every rule that could matter, and whether it won.
    """
    steps: list[Step] = []
    for step in _steps(verdict):
        if len(steps) == _MAX_STEPS:
            steps.append(Step("rule", "…", "further steps are omitted"))
            break
        steps.append(step)
    return (*steps, *verdict.notes)


def _steps(verdict: Verdict) -> Iterator[Step]:
    prepared = verdict.prepared
    for target in verdict.targets:
        how = {"": "", "plain": ", by a redirection", "guessed": ", perhaps by a redirection"}[target.redirected]
        yield Step("target", target.capability, f"{target.shown}{how}")
        yield from _layers(prepared.capabilities, target)
    if not verdict.targets:
        names = ", ".join(layer.owner for layer in prepared.capabilities.layers)
        yield Step(
            "capability",
            "no target",
            f"the call names no target; its runtime is limited by {names or 'an empty capability set'}",
        )
    for finding in verdict.findings:
        if finding.cause == "capability":
            yield Step("capability", "deny", finding.note)
            continue
        if finding.cause == "fault":
            yield Step("target", "deny", finding.note)
            continue
        for words in finding.wrapped:
            yield Step(
                "shell", "unwrapped", f"{shown_argv(words)} runs the command after it, which is evaluated instead"
            )
        yield from _rules(verdict, finding)
        if finding.cause == "unclear":
            yield Step("shell", "ask", f"cannot be evaluated: {finding.note}")
        elif finding.cause == "protected":
            yield Step("rule", "ask", f"protected: {finding.note}")
        elif finding.cause in ("program", "wait"):
            yield Step("program", finding.action, finding.note)
        yield Step("rule", finding.action, reason_of(finding, prepared.spec.id))


def _layers(capabilities: CapabilitySet, target: Target) -> Iterator[Step]:
    if not capabilities.layers:
        yield Step("capability", "refused", "the call has no capability layer, so it has no access")
    script = target.subject if isinstance(target.subject, Script) else None
    touches: Sequence[str | Sequence[str]] = (target.value,)
    if script is not None:
        touches = [c.argv for c in script.commands] if script.unclear is None else [("\0",)]
    for layer in capabilities.layers:
        alone = CapabilitySet((layer,))
        covered = all(alone.allows(target.capability, touch) for touch in touches)
        yield Step(
            "capability", "covered" if covered else "refused", f"{layer.owner}: {target.capability} {target.shown}"
        )


def _rules(verdict: Verdict, finding: Finding) -> Iterator[Step]:
    prepared = verdict.prepared
    subject = _subject_of(verdict, finding)
    capability: Capability | None = finding.target.capability if finding.target is not None else None
    redirected = finding.target is not None and bool(finding.target.redirected)
    tool_subject = verdict.arguments if prepared.kind == "arguments" else subject
    if tool_subject != () and not redirected:
        yield from _candidates("tool", prepared.tool, tool_subject)
        if capability is None:
            yield from _candidates("tool, shipped", prepared.tool_default, tool_subject)
    if capability is not None and subject != ():
        own, shipped = prepared.capability_rules(capability)
        yield from _candidates(capability, own, subject)
        if own.winner(subject) is None and finding.tool is None and not redirected:
            yield from _candidates(f"{capability}, shipped", shipped, subject, only_matching=True)


def _subject_of(verdict: Verdict, finding: Finding) -> Subject:
    """Return the subject that the rules were compared with."""
    if finding.judged is not None:
        return finding.judged
    if finding.target is None or isinstance(finding.target.subject, Script):
        return verdict.arguments if verdict.prepared.kind == "arguments" else ()
    return finding.target.subject


def _candidates(question: str, ranking: Ranking, subject: Subject, *, only_matching: bool = False) -> Iterator[Step]:
    winner: Ranked | None = ranking.winner(subject)
    unmatched = 0
    for candidate in ranking.ranked:
        if candidate is winner:
            yield Step("rule", "won", f"{question}: {candidate.rule}")
        elif candidate.matches(subject):
            yield Step("rule", "lost", f"{question}: {candidate.rule}: {why_lost(candidate, winner)}")
        elif not only_matching:
            unmatched += 1
            if unmatched <= _MOST_STEPS_UNMATCHED:
                yield Step("rule", "no match", f"{question}: {candidate.rule}")
    if unmatched > _MOST_STEPS_UNMATCHED:
        yield Step("rule", "no match", f"{question}: {unmatched - _MOST_STEPS_UNMATCHED} more rules")
    if not ranking.ranked and not only_matching:
        yield Step("rule", "none", f"{question}: no rule is about it")


def why_lost(candidate: Ranked, winner: Ranked | None) -> str:
    """Return the first part of the precedence in which another rule was ahead."""
    if winner is None:
        return "this rule was not consulted"
    if candidate.rank > winner.rank:
        return "the winner is stricter, and belongs to the parent session"
    names = (
        "the winner is a final deny",
        "the winner names its permission more exactly",
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


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one decision. :meth:`to_dict` returns it as JSON data.

    :param decided_by: the rule's text, the capability layer, the watchdog, or another cause
    :param changes: changes that would reverse the decision, each a sentence; a rule is written as the option takes it
    """

    tool_id: str
    action: Action
    effective: Action
    """The action of a headless session: ``deny`` in place of ``ask``."""
    reason: str
    decided_by: str
    rule: Rule | None
    steps: tuple[Step, ...]
    changes: tuple[str, ...]
    mode: str = DEFAULT_MODE
    """The mode of the session. Its rules have the scope ``mode``."""
    read_only: bool | None = None
    """Whether the call provably changes nothing, so that it runs read-only. None if the tool does not only run a command."""
    proof: str = ""
    """Why the call is not proved to be read-only."""

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as JSON data."""
        rule = self.rule
        return {
            "tool": self.tool_id,
            "action": self.action,
            "effective": self.effective,
            "reason": self.reason,
            "decided_by": self.decided_by,
            "rule": None
            if rule is None
            else {"text": rule.text, "scope": rule.scope, "source": rule.source, "final": rule.final},
            "steps": [{"stage": step.stage, "outcome": step.outcome, "text": step.text} for step in self.steps],
            "changes": list(self.changes),
            "mode": self.mode,
            "read_only": self.read_only,
            "proof": self.proof,
        }

    def __str__(self) -> str:
        """Return the plain text that ``handrail explain`` prints."""
        head = self.action if self.effective == self.action else f"{self.action} (headless: {self.effective})"
        lines = [f"{self.tool_id}: {head}", f"  {self.reason}", f"  decided by: {self.decided_by}"]
        lines.append(f"  mode: {self.mode}")
        if self.read_only is not None:
            said = (
                "proved, so it runs with everything mounted read-only"
                if self.read_only
                else f"not proved: {self.proof}"
            )
            lines.append(f"  read-only: {said}")
        lines += ["", "steps:"]
        widest = max((len(step.stage) for step in self.steps), default=0)
        lines += [f"  {step.stage:<{widest}}  {step.outcome:<9}  {step.text}" for step in _in_brief(self.steps)]
        if self.changes:
            lines += ["", "changes that would reverse it:", *(f"  - {change}" for change in self.changes)]
        return "\n".join(
            line.replace("\n", "\\n").replace("\t", "\\t") for line in lines
        )  # no name or text begins a line


def _in_brief(steps: Iterable[Step]) -> Iterator[Step]:
    """Return the steps with each long run of rules that do not match as one line."""
    for (stage, outcome), run in groupby(steps, lambda step: (step.stage, step.outcome)):
        alike = list(run)
        if outcome == "no match" and len(alike) > _MOST_UNMATCHED:
            yield Step(stage, outcome, f"{len(alike)} rules; --json lists each")
        else:
            yield from alike


async def explain(
    authority: Authority,
    spec: ToolSpec,
    arguments: Mapping[str, Any],
    *,
    rules: RuleBook,
    roots: PathRoots,
    parent: CapabilitySet | None = None,
    origin: str | None = None,
    behind: ToolSpec | None = None,
    session_id: str = "",
    headless: bool = False,
) -> Explanation:
    """Decide a call, watchdogs included, without running or recording anything.

    :param parent: the capability set of the call that makes this one
    :param origin: ``mcp:server:tool`` for a tool of an MCP server
    :param behind: the tool that answers in place of a locked id
    :param headless: whether the session denies calls that require approval
    """
    verdict = authority.judge(spec, arguments, rules=rules, roots=roots, parent=parent, origin=origin, behind=behind)
    verdict = await authority.watch(verdict, spec, arguments, session_id)
    effective: Action = "deny" if headless and verdict.action == "ask" else verdict.action
    return Explanation(
        spec.id,
        verdict.action,
        effective,
        verdict.detail,
        _decided_by(verdict),
        None if verdict.narrowed_by_watchdog else verdict.deciding.rule,
        trace(verdict),
        tuple(dict.fromkeys((*_changes(verdict, spec), *_other_modes(verdict, rules)))),
        rules.mode,
        *_proof(verdict),
    )


def _proof(verdict: Verdict) -> tuple[bool | None, str]:
    if not verdict.prepared.spec.only_its_command:
        return None, ""
    for target in verdict.targets:
        if isinstance(target.subject, Script) and (reason := read_only.of_script(target.subject)) is not None:
            return False, reason
    return verdict.reads_only, ""


def _other_modes(verdict: Verdict, rules: RuleBook) -> Iterator[str]:
    """Return the first wider mode that would allow the call."""
    if verdict.action == "allow" or verdict.narrowed_by_watchdog:
        return
    for mode in MODES:
        if mode == rules.mode:
            continue
        other = verdict.prepared.under(in_mode(rules, mode))
        if other.judge_targets(verdict.arguments, verdict.targets).action == "allow":
            yield f"--mode {mode}"
            return


def _decided_by(verdict: Verdict) -> str:
    if verdict.narrowed_by_watchdog:
        return f"watchdog {verdict.notes[-1].text}"
    deciding = verdict.deciding
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
            return "the shell parser: a text that it does not understand requires approval"
        case "program" if deciding.rule is not None and deciding.rule.action != "allow":
            return f"rule {deciding.rule}, because the program may run a command that the rule is about"
        case "program" if deciding.rule is None:
            return "the policy for programs that run their arguments"
        case "program":
            return f"the policy for this program (the rule alone would allow it: {deciding.rule})"
        case "wait":
            return "the policy for commands that only wait"
        case "fault":
            return "an invalid target"


def _changes(verdict: Verdict, spec: ToolSpec) -> Iterator[str]:
    deciding = verdict.deciding
    if verdict.narrowed_by_watchdog:
        yield "only another decision of the watchdog; no rule outweighs it"
    elif deciding.cause in ("capability", "fault", "wait"):
        yield deciding.remedy or deciding.note
    elif verdict.action == "allow":
        yield from _denials(verdict, spec)
    elif verdict.action == "ask" and (rule := always(verdict)) is not None:
        yield f"--rule {shlex.quote(rule)}"
    elif deciding.cause == "unclear":
        yield "write it as simple commands joined by &&, ||, | or ;, with every special character quoted"
    elif verdict.action == "deny" and deciding.rule is not None:
        yield from _ways_past(deciding.rule, verdict, spec)
    else:
        yield "approve it once, because no single rule of this session allows it"


def _ways_past(rule: Rule, verdict: Verdict, spec: ToolSpec) -> Iterator[str]:
    """Return the changes that would allow a call that ``rule`` denies."""
    place = rule.source or f"the {rule.scope} scope"
    if rule.final:
        yield f"only to remove {rule.text!r} from {place}: a deny of this scope is final"
        return
    yield f"remove {rule.text!r} from {place}"
    for text in _narrowest(verdict, spec):
        if _answers_with(verdict, text, "allow"):
            yield f"add a more specific rule: --rule {shlex.quote(text)}"
            return


def _denials(verdict: Verdict, spec: ToolSpec) -> Iterator[str]:
    for text in _narrowest(verdict, spec, "deny"):
        if _answers_with(verdict, text, "deny"):
            yield f"to deny it: --rule {shlex.quote(text)}"
            return


def _narrowest(verdict: Verdict, spec: ToolSpec, action: Action = "allow") -> Iterator[str]:
    """Return rules about exactly the deciding target, with the tool's first."""
    from handrail.policy.rules.words import literal_words

    finding = verdict.deciding
    pattern = literal_words(finding.argv) if finding.argv is not None else None
    if pattern is None and finding.target is not None:
        pattern = target_pattern(finding.target)
    if pattern is not None and verdict.prepared.kind != "arguments":
        yield f"{action} {spec.id} {pattern}"
    if pattern is not None and finding.target is not None:
        yield f"{action} {finding.target.capability} {pattern}"
    yield f"{action} {spec.id}"


def _answers_with(verdict: Verdict, text: str, action: Action) -> bool:
    """Return whether this rule, added to the session, would lead to this action."""
    from handrail.policy.rules.rules import parse_rule

    if not text.isprintable():
        return False
    try:
        rule = parse_rule(text, scope="session", source=SOURCE)
    except ValueError:
        return False
    return verdict.prepared.with_rule(rule).judge_targets(verdict.arguments, verdict.targets).action == action
