"""A verdict told step by step; worked out only when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from handrail.contract.tool.requires import Capability, CapabilitySet
from handrail.policy.questions import Verdict
from handrail.policy.rules.matching import Ranked, Ranking, Subject
from handrail.policy.shell.parse import Script
from handrail.policy.targets import Target, shown_argv
from handrail.policy.verdict import Finding, Step, reason_of

_MAX_STEPS = 400
_MOST_UNMATCHED = 60
"""Rules of one question that do not match, each with a step of its own."""


def trace(verdict: Verdict) -> tuple[Step, ...]:
    """Targets, capability layers, every rule that could matter and how it fared, programs, and what came of it."""
    steps: list[Step] = []
    for step in _steps(verdict):
        if len(steps) == _MAX_STEPS:
            steps.append(Step("rule", "…", "further steps are left out"))
            break
        steps.append(step)
    return (*steps, *verdict.notes)


def _steps(verdict: Verdict) -> Iterator[Step]:
    prepared = verdict.prepared
    for target in verdict.targets:
        how = {"": "", "plain": ", by a redirection", "guessed": ", perhaps, by a redirection"}[target.redirected]
        yield Step("target", target.capability, f"{target.shown}{how}")
        yield from _layers(prepared.capabilities, target)
    if not verdict.targets:
        names = ", ".join(layer.owner for layer in prepared.capabilities.layers)
        yield Step(
            "capability",
            "no target",
            f"the call names nothing to touch; its runtime is bound by {names or 'nothing at all'}",
        )
    for finding in verdict.findings:
        if finding.cause == "capability":
            yield Step("capability", "deny", finding.note)
            continue
        if finding.cause == "fault":
            yield Step("target", "deny", finding.note)
            continue
        for words in finding.wrapped:
            yield Step("shell", "unwrapped", f"{shown_argv(words)} runs the command behind it, which is judged")
        yield from _rules(verdict, finding)
        if finding.cause == "unclear":
            yield Step("shell", "ask", f"cannot be judged: {finding.note}")
        elif finding.cause == "protected":
            yield Step("rule", "ask", f"protected: {finding.note}")
        elif finding.cause in ("program", "wait"):
            yield Step("program", finding.action, finding.note)
        yield Step("rule", finding.action, reason_of(finding, prepared.spec.id))


def _layers(capabilities: CapabilitySet, target: Target) -> Iterator[Step]:
    if not capabilities.layers:
        yield Step("capability", "refused", "there is no layer, so nothing is allowed")
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
    subject: Subject
    capability: Capability | None = finding.target.capability if finding.target is not None else None
    if finding.judged is not None:
        subject = finding.judged
    elif finding.target is None or isinstance(finding.target.subject, Script):
        subject = verdict.arguments if prepared.kind == "arguments" else ()
    else:
        subject = finding.target.subject
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
            if unmatched <= _MOST_UNMATCHED:
                yield Step("rule", "no match", f"{question}: {candidate.rule}")
    if unmatched > _MOST_UNMATCHED:
        yield Step("rule", "no match", f"{question}: {unmatched - _MOST_UNMATCHED} more rules")
    if not ranking.ranked and not only_matching:
        yield Step("rule", "none", f"{question}: no rule speaks of it")


def why_lost(candidate: Ranked, winner: Ranked | None) -> str:
    """The first part of the precedence in which another rule was ahead."""
    if winner is None:
        return "it was not asked"
    if candidate.rank > winner.rank:
        return "the other is stricter, and holds in the session that handed the work over"
    names = (
        "the other is a deny that is final",
        "the other names its permission more exactly",
        "the other has more literal characters before its first wildcard",
        "the other's pattern is longer",
        "the other is stricter",
    )
    for name, mine, other in zip(names, candidate.rank, winner.rank, strict=True):
        if other > mine:
            return name
    return "the other says the same"
