"""What the user sees of a call that requires approval: its parts, the worst first, and the rules that would allow it.

Each rule is verified before it is suggested.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from handrail.contract.tool.spec import extract_property_schemas
from handrail.policy.call_evaluation import PolicyVerdict, format_reason
from handrail.policy.call_targets import CallTarget
from handrail.policy.findings import PolicyFinding
from handrail.policy.rules.matchers import PathSubject, build_exact_server_request_pattern, format_value_for_rule
from handrail.policy.rules.pattern_faults import escape_as_path_pattern
from handrail.policy.rules.pattern_lexer import ANY_ARGUMENTS, build_exact_argv_pattern
from handrail.policy.rules.program_prefixes import find_program_prefix
from handrail.policy.rules.rules_and_modes import parse_rule
from handrail.policy.shell import destroying_forms, read_only_proof
from handrail.policy.shell.parser import ShellScript

SESSION_SOURCE = "answered for this session"
PROJECT_SOURCE = "answered for this project"
REJECTION_SOURCE = "rejected for this project"
_MAX_CHARACTERS = 2_000
_PROBE_WORDS = (
    (),
    ("x",),
    ("x", "y"),
    ("x", "y", "z"),
    ("/x",),
    ("x=y",),
    ("x:y",),
    ("@x",),
    ("!",),
    ("+x",),
    ("x", "add"),
)
"""Further words of a command, one for each form that some program reads in its own way."""


_CAUSES = ("fault", "capability", "protected", "destroys", "unclear", "program", "rule", "no rule", "wait")
"""The causes of a finding, from the one that the user should see first."""


def list_approval_reasons(verdict: PolicyVerdict) -> tuple[str, ...]:
    """Return why each part of a call requires approval, the worst part first.

    A command that destroys comes before one that may change something, and that before one that only reads.
    """
    asked = [finding for finding in verdict.findings if finding.action != "allow"]
    asked.sort(key=lambda one: (one.action != "deny", _rank_harmlessness(one), _CAUSES.index(one.cause)))
    reasons = [format_reason(finding, verdict.prepared.spec.id) for finding in asked]
    if verdict.confinement_objection and any(one.may_run_confined for one in asked):
        reasons.insert(1, f"The call does not stay confined: {verdict.confinement_objection}.")
    return tuple(dict.fromkeys((*reasons, *(() if asked else (verdict.reason,)))))


def _rank_harmlessness(finding: PolicyFinding) -> int:
    """Return 0 for a part that destroys, 1 for one that may change something, 2 for one that only reads."""
    argv = finding.evaluated_argv
    if not argv:
        return 1 if finding.target is None or finding.target.capability != "fs.read" else 2
    if finding.cause == "destroys" or destroying_forms.may_command_destroy_data(argv):
        return 0
    return 2 if read_only_proof.is_command_provably_read_only(argv) else 1


def suggest_rule(verdict: PolicyVerdict) -> str | None:
    """Return the narrowest rule that allows this call, or None.

    The rule is for the session. It is verified to allow the call, and every literal in it is escaped. A folder includes its
    content. The result is computed once for each verdict, and only for a call that requires approval.
    """
    if verdict.suggested_rule is False:
        verdict.suggested_rule = _find_sufficient_rule(verdict) if verdict.action == "ask" else None
    return verdict.suggested_rule


def _find_sufficient_rule(verdict: PolicyVerdict) -> str | None:
    for text in _candidate_rules(verdict):
        if len(text) > _MAX_CHARACTERS or not text.isprintable():
            continue
        try:
            rule = parse_rule(text, scope="session", source=SESSION_SOURCE)
        except ValueError:
            continue
        if rule.text == text and _is_rule_sufficient(verdict, text):
            return text
    return None


def suggest_wider_rule(verdict: PolicyVerdict) -> str | None:
    """Return a rule that allows this call and similar ones, or None if none is known to be safe.

    For writing a file, it covers the file's folder. For a command, it covers any further words that are not options, if the
    command provably changes nothing whatever these words are; else the beginning that names what the command does, with any
    arguments.
    """
    exact = suggest_rule(verdict)
    pattern = _wider_pattern(verdict)
    if pattern is None or (exact is None and not pattern.endswith(ANY_ARGUMENTS)):
        return None
    permission = verdict.prepared.spec.id if exact is None else exact.split(" ", 2)[1]
    text = f"allow {permission} {pattern}"
    if len(text) > _MAX_CHARACTERS or not text.isprintable() or text == exact:
        return None
    try:
        rule = parse_rule(text, scope="session", source=SESSION_SOURCE)
    except ValueError:
        return None
    return text if rule.text == text and _is_rule_sufficient(verdict, text) else None


def _wider_pattern(verdict: PolicyVerdict) -> str | None:
    asked = [finding for finding in verdict.findings if finding.action == "ask"]
    argvs = {tuple(finding.evaluated_argv or finding.argv) for finding in asked if finding.argv is not None}
    if argvs:
        argv = argvs.pop()
        return None if argvs else _command_with_any_words(argv) or _command_prefix(argv)
    targets = {finding.target for finding in asked if finding.target is not None}
    return _written_folder_pattern(targets.pop()) if len(targets) == 1 else None


def _written_folder_pattern(target: CallTarget) -> str | None:
    """Return the pattern for the folder of a written file and its content, or None.

    None is for the whole workspace, and for a folder with settings of programs.
    """
    if target.capability != "fs.write" or not isinstance(target.subject, PathSubject):
        return None
    folder, _, _ = (target.subject.relative or "").rpartition("/")
    if not folder or any(name.startswith(".") for name in folder.split("/")):
        return None
    return f"{escape_as_path_pattern(folder)}/**"


def _command_with_any_words(argv: Sequence[str]) -> str | None:
    """Return the command up to its last option, followed by any words, or None.

    None is for a command that changes something with some further words.
    """
    options = [place for place, word in enumerate(argv) if word[:1] == "-"]
    for length in range(max(options, default=0) + 1, len(argv) + 1):
        words = argv[:length]
        if all(_only_reads((*words, *further)) for further in _PROBE_WORDS):
            return f"{build_exact_argv_pattern(words)} *"
    return None


def _command_prefix(argv: Sequence[str]) -> str | None:
    """Return the beginning of a command that names what it does, with any arguments, or None.

    None is also for a command that only reads, which the shipped rules allow.
    """
    found = find_program_prefix(argv)
    return (
        None
        if found is None or read_only_proof.is_command_provably_read_only(argv)
        else f"{build_exact_argv_pattern(found.words)} {ANY_ARGUMENTS}"
    )


def describe_wider_rule_coverage(text: str | None) -> str:
    """Return what a suggested wider rule allows that its words do not say, as a sentence; empty if nothing."""
    words = [] if text is None else text.split()
    if words[-1:] != [ANY_ARGUMENTS]:
        return ""
    found = find_program_prefix(words[2:-1])
    more = "" if found is None or not found.note else f", and {found.note}"
    return f"The wider rule {text!r} covers this command with any arguments{more}."


def _only_reads(argv: Sequence[str]) -> bool:
    return (
        read_only_proof.is_command_provably_read_only(argv)
        and read_only_proof.explain_git_shows_stored_files(argv) is None
    )


def _is_rule_sufficient(verdict: PolicyVerdict, text: str) -> bool:
    rule = parse_rule(text, scope="session", source=SESSION_SOURCE)
    prepared = verdict.prepared.with_rule(rule)
    return prepared.evaluate_targets(verdict.arguments, verdict.targets).action == "allow"


def _candidate_rules(verdict: PolicyVerdict) -> Iterator[str]:
    spec = verdict.prepared.spec
    asked = [finding for finding in verdict.findings if finding.action == "ask"]
    if any(finding.cause == "unclear" for finding in asked):
        return
    by_arguments = verdict.prepared.kind == "arguments"
    if by_arguments:
        yield from _rules_by_arguments(verdict)
        if not verdict.targets:
            return
    subjects = {_subject_text(finding) for finding in asked}
    pattern = subjects.pop() if len(subjects) == 1 else None
    if pattern is None:
        return
    if not by_arguments:
        yield f"allow {spec.id} {pattern}"
    capabilities = {finding.target.capability for finding in asked if finding.target is not None}
    if len(capabilities) == 1:
        yield f"allow {capabilities.pop()} {pattern}"


def _rules_by_arguments(verdict: PolicyVerdict) -> Iterator[str]:
    prepared = verdict.prepared
    if (pattern := build_exact_server_request_pattern(prepared.origin, verdict.arguments)) is not None:
        yield f"allow {prepared.origin} {pattern}"
    words = _argument_words(verdict.arguments)
    if words or not extract_property_schemas(prepared.spec.parameters):
        yield f"allow {prepared.spec.id} {words}".rstrip(" ")


def _subject_text(finding: PolicyFinding) -> str | None:
    if finding.argv is not None:
        return build_exact_argv_pattern(finding.argv)
    return None if finding.target is None else build_exact_target_pattern(finding.target)


def build_exact_target_pattern(target: CallTarget) -> str | None:
    """Return a pattern that matches exactly this path or host, or None for a script."""
    subject = target.subject
    if isinstance(subject, ShellScript):
        return None
    if isinstance(subject, PathSubject):
        return escape_as_path_pattern(subject.absolute if subject.relative is None else subject.relative)
    return subject


def _argument_words(arguments: Mapping[str, Any]) -> str:
    if any("=" in key or json.dumps(key) != f'"{key}"' for key in arguments):
        return ""
    return build_exact_argv_pattern(f"{key}={format_value_for_rule(value)}" for key, value in arguments.items())


def suggest_exact_deny_rule(verdict: PolicyVerdict) -> str | None:
    """Return a rule that denies exactly this call, or None if no single rule does.

    It is the rule of :func:`suggest_rule` as a deny.
    """
    text = suggest_rule(verdict)
    if text is None:
        return None
    turned = f"deny{text.removeprefix('allow')}"
    prepared = verdict.prepared.with_rule(parse_rule(turned, scope="project", source=REJECTION_SOURCE))
    denied = prepared.evaluate_targets(verdict.arguments, verdict.targets).action == "deny"
    return turned if denied else None
