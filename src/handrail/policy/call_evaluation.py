"""The evaluation of a call: the rules decide whether its *tool* may run and whether it may use each *capability*.

The most specific matching rule answers each question, and the stricter answer counts. A :class:`ToolPolicy` is the part that
depends only on the tool and the rule book. It is made once and used for every call.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.sandbox_protocol import CallConfinement
from handrail.contract.services.file_services import PathResolver, ResolvedPath
from handrail.contract.tool.requires import Capability, CapabilitySet
from handrail.contract.tool.spec import ToolSpec, find_patch_arguments
from handrail.policy.call_targets import (
    UNNAMEABLE_ARGV,
    CallTarget,
    CallTargetExtractor,
    explain_mandatory_denial,
    find_path_write_protection,
    find_paths_lost_by_script,
    format_argv_for_message,
    format_capability_denial,
    format_capability_grant_line,
    get_rule_subject_kind,
    is_call_provably_read_only,
    is_in_private_tmp,
    list_commands_needing_capability,
)
from handrail.policy.findings import PolicyFinding, TraceStep, choose_deciding_finding, format_reason
from handrail.policy.path_denials import build_hidden_path_rules, list_implied_deletion_rules
from handrail.policy.rules.matchers import (
    SUBJECT_KINDS,
    PathSubject,
    RankedRule,
    RuleRanking,
    RuleSubject,
    SubjectKind,
    compile_ranked_rule,
    rank_rule_book,
    rank_rules,
    rule_names_protected_path,
)
from handrail.policy.rules.pattern_faults import READ_ONLY_VARIABLE
from handrail.policy.rules.pattern_lexer import split_pattern, strip_standard_program_folder
from handrail.policy.rules.rules_and_modes import (
    STRICTNESS,
    Action,
    Rule,
    RuleBook,
    rule_limits_call_effects,
)
from handrail.policy.shell import command_wrappers, destroying_forms, nested_commands, program_risks, read_only_proof
from handrail.policy.shell.parser import ShellScript
from handrail.policy.shell.simple_commands import ShellCommand, has_marks

CONFINED_TEXT = "It runs confined: no network, and writes in the workspace only."
"""What the reason of a verdict adds for a call that a rule with ``{confined}`` allows."""
_TOO_MANY_WORDS = "too many of its words may begin a command that a rule denies or asks for"


class ToolPolicy:
    """The policy of one tool: one rule book and one capability set, prepared for its calls."""

    __slots__ = (
        "_caps",
        "_constant",
        "_covered",
        "_deleting",
        "_reader",
        "_reading",
        "_shipped_reading",
        "_watched",
        "capabilities",
        "default_tool_rules",
        "kind",
        "origin",
        "rules",
        "spec",
        "tool_rules",
    )

    def __init__(self, spec: ToolSpec, rules: RuleBook, capabilities: CapabilitySet, origin: str | None = None) -> None:
        self.spec = spec
        self.rules = rules
        self.capabilities = capabilities
        self.origin = origin
        self.kind: SubjectKind = get_rule_subject_kind(spec)

        def pick(book: RuleBook) -> Iterable[Rule]:
            return (rule for rule in book.list_rules_about_tool(spec, origin) if rule_limits_call_effects(rule, spec))

        self.tool_rules = rank_rule_book(
            rules, lambda book: (rule for rule in pick(book) if rule.scope != "default"), self.kind
        )
        self.default_tool_rules = rank_rules(tuple(rule for rule in pick(rules) if rule.scope == "default"), self.kind)
        self._caps: dict[Capability, tuple[RuleRanking, RuleRanking]] = {}
        self._covered: dict[str, Callable[[str], object]] = {}
        self._watched: nested_commands.WatchedPrograms | None = None
        self._shipped_reading: RuleRanking | None = None
        self._deleting: RuleRanking | None = None
        if find_patch_arguments(spec.parameters):
            self._deleting = rank_rule_book(
                rules, lambda book: list_implied_deletion_rules(book, spec, pick(book)), "path"
            )
        self._reader = CallTargetExtractor(spec)
        self._reading: ToolPolicy | None = None
        """For calls that provably change nothing: the policy of the tool as a read-only one. None without rules about effects."""
        if (
            spec.single_command
            and spec.side_effect != "read"
            and any(rule.governed_side_effect for rule in rules.own_and_parent_rules)
        ):
            self._reading = type(self)(replace(spec, side_effect="read"), rules, capabilities, origin)
        self._constant: PolicyVerdict | None = None
        if not self._reader and self.tool_rules.has_one_answer and self.default_tool_rules.has_one_answer:
            verdict = self._evaluate({}, ())
            if verdict.action != "ask":  # an approval request shows the arguments of its call
                self._constant = verdict

    def with_rule(self, rule: Rule) -> ToolPolicy:
        """Return the policy of the same tool with one more rule."""
        return self.with_rules(self.rules.with_rules(rule))

    def with_rules(self, rules: RuleBook) -> ToolPolicy:
        """Return the policy of the same tool with another rule book."""
        return type(self)(self.spec, rules, self.capabilities, self.origin)

    def evaluate(
        self, arguments: Mapping[str, Any], roots: PathResolver, located: dict[str, ResolvedPath]
    ) -> PolicyVerdict:
        """Evaluate a call. Never raises for arguments that a model sent.

        :param arguments: the validated arguments
        :param located: paths resolved for this call already, by their texts; this method adds further ones
        """
        if self._constant is not None:
            return self._constant
        try:
            targets = self._reader.extract_call_targets(arguments, roots, located)
        except ToolError as error:
            finding = PolicyFinding("deny", "fault", note=error.text)
            return PolicyVerdict(self, arguments, (), (finding,), finding)
        return self.evaluate_targets(arguments, targets)

    def evaluate_targets(self, arguments: Mapping[str, Any], targets: Sequence[CallTarget]) -> PolicyVerdict:
        """Evaluate a call whose targets are known already."""
        if self._reading is not None and is_call_provably_read_only(targets):
            return self._reading.evaluate_targets(arguments, targets)
        return self._evaluate(arguments, targets)

    def _evaluate(self, arguments: Mapping[str, Any], targets: Sequence[CallTarget]) -> PolicyVerdict:
        for target in targets:
            if (refused := self.find_capability_denial(target)) is not None:
                return PolicyVerdict(self, arguments, targets, (refused,), refused)
        if len(targets) == 1 and not (only := targets[0]).redirected and not isinstance(only.subject, ShellScript):
            by_arguments = self.tool_rules.find_winner(arguments) if self.kind == "arguments" else None
            finding = self._evaluate_target(only, only.subject, by_arguments)
            return PolicyVerdict(self, arguments, targets, (finding,), finding)
        findings: list[PolicyFinding] = []
        by_arguments = self.tool_rules.find_winner(arguments) if self.kind == "arguments" else None
        for target in targets:
            if isinstance(target.subject, ShellScript):
                findings += self.evaluate_script(
                    target, target.subject, by_arguments, as_job=self._is_answered_with_job(arguments)
                )
            elif target.redirected:
                findings += self.evaluate_redirection(target, targets)
            else:
                findings.append(self._evaluate_target(target, target.subject, by_arguments))
        if not findings:
            findings.append(self._evaluate_without_targets(arguments))
        replaced = {target.value for target in targets if target.capability == "fs.write"}
        findings = [finding for finding in findings if not finding.only_reads_replaced_file(replaced)]
        return PolicyVerdict(self, arguments, targets, findings, choose_deciding_finding(findings))

    # ── capabilities ─────────────────────────────────────────────────────────────────────────────

    def find_capability_denial(self, target: CallTarget) -> PolicyFinding | None:
        """Return the refusal of the first layer that does not cover ``target``, or None."""
        capability, value, shown, subject, redirected, *_ = target
        if (fixed := explain_mandatory_denial(capability, subject, shown)) is not None:
            return PolicyFinding("deny", "capability", note=f"{fixed.rstrip('.')}.", target=target)
        if capability != "shell.run" and self.is_covered_by_capabilities(capability, value):
            return None
        if redirected and (redirected == "guessed" or is_in_private_tmp(target)):
            return None  # it requires approval, whatever the layers have
        touches: Iterable[str | Sequence[str]] = (value,)
        if isinstance(subject, ShellScript):
            # An unclear text may run any program, so only a layer with every program covers it.
            touches = list_commands_needing_capability(subject)
        for touch in touches:
            layer = self.capabilities.find_denying_layer(capability, touch)
            if layer is not None:
                named = shown if isinstance(touch, str) or touch == UNNAMEABLE_ARGV else format_argv_for_message(touch)
                note = format_capability_denial(self.capabilities, layer, capability, named, self.spec)
                return PolicyFinding(
                    "deny",
                    "capability",
                    note=note,
                    target=target,
                    remedy=format_capability_grant_line(layer, capability, self.spec),
                )
        return None

    def is_covered_by_capabilities(self, capability: Literal["fs.read", "fs.write", "net.fetch"], target: str) -> bool:
        """Return whether every layer certainly covers a path or host; if not, ``refusing_layer`` decides."""
        test = self._covered.get(capability)
        if test is None:
            test = self._covered[capability] = self.capabilities.build_fast_coverage_predicate(capability)
        return bool(test(target))

    # ── rules ────────────────────────────────────────────────────────────────────────────────────

    def rank_capability_rules(self, capability: Capability) -> tuple[RuleRanking, RuleRanking]:
        """Return the rules about a capability, and the shipped ones. Both are made on the first call."""
        found = self._caps.get(capability)
        if found is None:
            reads, single = self.spec.side_effect == "read", self.spec.single_command
            # Two tools that are alike in this share the rankings, which take long to make.
            found = self.rules.prepare((capability, reads, single), lambda: self._rank_capability_rules(capability))
            self._caps[capability] = found
        return found

    def _rank_capability_rules(self, capability: Capability) -> tuple[RuleRanking, RuleRanking]:
        def pick(book: RuleBook) -> Iterable[Rule]:
            return (
                rule
                for rule in book.list_rules_about_capability(capability)
                if rule_limits_call_effects(rule, self.spec)
            )

        shipped = [rule for rule in pick(self.rules) if rule.scope == "default"]
        if self.spec.side_effect != "read":  # the shipped permission to read is for tools that only read
            shipped = [rule for rule in shipped if rule.action != "allow"]
        kind = SUBJECT_KINDS[capability]
        own = rank_rule_book(self.rules, lambda book: (rule for rule in pick(book) if rule.scope != "default"), kind)
        return own, rank_rules(tuple(shipped), kind)

    def decide_by_rules(
        self, tool: RankedRule | None, capability: Capability, subject: RuleSubject
    ) -> tuple[Literal["allow", "ask", "deny"], Rule | None]:
        """Return the stricter answer of both questions, and the rule that gave it.

        :param tool: the matching rule about the tool, shipped ones left out
        :returns: the action, and None in place of a rule if no rule matches
        """
        own, shipped = self.rank_capability_rules(capability)
        used = own.find_winner(subject) if own.ranked else None
        if used is None:
            if tool is not None:
                return tool.rule.action, tool.rule
            used = shipped.find_winner(subject)
            if used is None:
                used = self.default_tool_rules.find_winner(subject) if self.kind == SUBJECT_KINDS[capability] else None
            return ("ask", None) if used is None else (used.rule.action, used.rule)
        if tool is not None and STRICTNESS[tool.rule.action] > STRICTNESS[used.rule.action]:
            return tool.rule.action, tool.rule
        return used.rule.action, used.rule

    def _evaluate_target(
        self, target: CallTarget, subject: PathSubject | str, by_arguments: RankedRule | None
    ) -> PolicyFinding:
        tool = by_arguments
        if self.kind != "arguments":
            tool = self.tool_rules.find_winner(subject) if self.tool_rules.ranked else None
        action, rule = self.decide_by_rules(tool, target.capability, subject)
        bound = self._find_patch_rule(target, subject, tool)
        if bound is not None and STRICTNESS[bound.action] > STRICTNESS[action]:
            action, rule = bound.action, bound
        if (
            action == "allow"
            and target.capability == "fs.write"
            and (question := self.explain_protected_write_approval(target, tool)) is not None
        ):
            return PolicyFinding("ask", "protected", rule, question, None, target, tool)
        if action == "allow" and target.losses and not _is_path_named((tool and tool.rule, rule), subject):
            note = "it deletes a folder with content, or a file that git has no copy of"
            return PolicyFinding("ask", "destroys", rule, note, None, target, tool)
        return PolicyFinding(action, "no rule" if rule is None else "rule", rule, "", None, target, tool)

    def _find_patch_rule(self, target: CallTarget, subject: PathSubject | str, tool: RankedRule | None) -> Rule | None:
        """Return the further rule that bounds a file of a patch: about its deletion, or about reading what the diff shows."""
        if self._deleting is None or not isinstance(subject, PathSubject):
            return None
        if target.capability == "fs.read":
            return None if _is_path_named((tool and tool.rule,), subject) else self._find_reading_rule(subject)
        found = None if target.losses is None else self._deleting.find_winner(subject)
        return found and found.rule

    def explain_protected_write_approval(self, target: CallTarget, tool: RankedRule | None) -> str | None:
        """Return why a write to a protected path requires approval although a rule allows it, or None.

        :param tool: the matching rule about the tool
        """
        found = find_path_write_protection(target.capability, target.subject)
        if found is None:
            return None
        assert isinstance(target.subject, PathSubject)
        own = self.rank_capability_rules(target.capability)[0].find_winner(target.subject)
        if any(one is not None and rule_names_protected_path(one.rule, target.subject) for one in (tool, own)):
            return None
        return found.format_approval_reason(target.shown)

    def evaluate_redirection(self, target: CallTarget, targets: Sequence[CallTarget] = ()) -> list[PolicyFinding]:
        """Evaluate a file that the shell opens. Only a rule about the file itself allows it, never the tool's.

        For a call that provably changes nothing, the shipped rules for reading count, as for a tool that reads.

        :param targets: all targets of the call
        """
        assert not isinstance(target.subject, ShellScript)
        used = self.rank_capability_rules(target.capability)[0].find_winner(target.subject)
        reads = used is None and target.capability == "fs.read" and self.spec.single_command
        if reads and is_call_provably_read_only(targets):
            used = self._shipped_reading_rules.find_winner(target.subject)
        action, rule = ("ask", None) if used is None else (used.rule.action, used.rule)
        if target.redirected == "guessed" and action != "deny":
            return []  # the whole text requires approval
        if action == "allow" and (question := self.explain_protected_write_approval(target, None)) is not None:
            return [PolicyFinding("ask", "protected", rule, question, target=target)]
        return [PolicyFinding(action, "no rule" if rule is None else "rule", rule, target=target)]

    def _evaluate_without_targets(self, arguments: Mapping[str, Any]) -> PolicyFinding:
        if self.kind == "arguments":
            used = self.tool_rules.find_winner(arguments) or self.default_tool_rules.find_winner(arguments)
        else:  # no pattern can be compared with a call that names nothing
            used = self.tool_rules.find_unconditional() or self.default_tool_rules.find_unconditional()
        if used is None:
            return PolicyFinding("ask", "no rule")
        return PolicyFinding(used.rule.action, "rule", used.rule, tool=used if used.rule.scope != "default" else None)

    # ── scripts ──────────────────────────────────────────────────────────────────────────────────

    def _is_answered_with_job(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the call is answered with a job, and not with the result of its command."""
        asked = self.spec.background_argument
        return self.spec.mode == "background" or (asked is not None and arguments.get(asked) is True)

    def evaluate_script(
        self, target: CallTarget, script: ShellScript, by_arguments: RankedRule | None, *, as_job: bool = False
    ) -> list[PolicyFinding]:
        """Evaluate every command of a shell text, and the text as a whole.

        :param by_arguments: the matching rule about the tool's arguments
        """
        found = [self.evaluate_command(command, target, by_arguments) for command in script.commands]
        if script.unclear is not None:
            denied = [finding for finding in found if finding.action == "deny"]
            if not denied and (finding := self._find_denial(UNNAMEABLE_ARGV, target, by_arguments)) is not None:
                denied = [finding]
            if not denied and (finding := self._find_hidden_objection(target, script, by_arguments)) is not None:
                denied = [finding] if finding.action == "deny" else []
            unclear = PolicyFinding("ask", "unclear", note=script.unclear, target=target)
            return denied or [unclear, *self._find_printed_hidden_files(target)]
        if not any(finding.action == "deny" for finding in found):
            hidden = self._find_hidden_objection(target, script, by_arguments)
            found += [] if hidden is None else [hidden]
        if not any(finding.action == "deny" for finding in found):
            seconds = program_risks.pure_sleep_seconds(script.commands)
            if seconds is not None and not all(_rule_names_whole_command(finding) for finding in found):
                note = program_risks.SleepCommandDenial(seconds, as_job).denial_text_for_model
                return [PolicyFinding("deny", "wait", note=note, target=target)]
        losses = find_paths_lost_by_script(target, script)
        if losses and not (found and all(map(_rule_names_whole_command, found))):
            note = f"it removes or replaces {', '.join(quote_text_or_length(path, 80) for path in losses)}, which cannot be restored"
            found.append(PolicyFinding("ask", "destroys", note=note, target=target))
        if target.printed and not (found and all(map(_rule_names_only_this_command, found))):
            found += self._find_printed_hidden_files(target)
        return found

    def _find_printed_hidden_files(self, target: CallTarget) -> list[PolicyFinding]:
        """Return a finding that asks if a text may print what a repository stores of a file that rules hide."""
        for one in target.printed:
            denials = build_hidden_path_rules(self.rules, one.work_tree)
            hidden = one.find_hidden(denials.find_hidden, denials.is_hidden_path_search_cheap)
            if hidden is None:
                note = f"{one.shown} can print hidden files as the repository stores them, and its stored files are unknown"
            elif hidden:
                note = f"{one.shown} can print {quote_text_or_length(hidden, 80)} as the repository stores it, and the rules hide that file"
            else:
                continue
            note = f"{note}. The tools git.diff, git.log and git.show omit hidden files"
            return [PolicyFinding("ask", "protected", note=note, target=target)]
        return []

    def evaluate_command(
        self, command: ShellCommand, target: CallTarget | None, by_arguments: RankedRule | None
    ) -> PolicyFinding:
        """Evaluate one simple command: the strictest answer for it and for every command that it may run."""
        argv = command.argv
        found = self._evaluate_unwrapped(argv, target, by_arguments)
        watched = self._watched_programs
        if found.action == "deny" or not watched.may_text_contain_program("\n".join(argv)):
            return found
        asked = self._find_possible_objection(argv, target) if has_marks(argv) else None
        for reading in nested_commands.find_possible_commands(argv, watched):
            if reading is nested_commands.TOO_MANY_READINGS:
                asked = asked or PolicyFinding("ask", "program", None, _TOO_MANY_WORDS, argv, target)
                continue
            objection = self._find_objecting_rule(reading, target, by_arguments)
            if objection is None:
                continue
            if objection.action == "deny":
                return objection._replace(argv=argv)
            asked = asked or objection._replace(argv=argv)
        if asked is None or (found.action == "ask" and (found.cause == "rule" or asked.cause != "rule")):
            return found
        if found.action == "ask":
            return asked
        if self._is_whole_argv_allowed(argv, by_arguments):
            return self._find_parent_objection(argv, target, by_arguments) or found
        return asked

    def _find_possible_objection(self, argv: tuple[str, ...], target: CallTarget | None) -> PolicyFinding | None:
        """Return the objection of a rule about a command that the shell may make of this one, or None."""
        readings = [argv, *(one.argv for one in nested_commands.find_possible_commands(argv, self._watched_programs))]
        for one in self._strict_rules():
            if one.argv is None or not _has_non_wildcard_word(one):
                continue
            if any(reading and one.argv.may_match_after_expansion(reading) for reading in readings):
                verb = "denies" if one.rule.action == "deny" else "asks about"
                note = f"the shell may make it a command that the rule {one.rule.text!r} {verb}"
                return PolicyFinding("ask", "program", one.rule, note, argv, target)
        return None

    def _strict_rules(self) -> list[RankedRule]:
        """Return the rules about commands that deny or ask."""
        own, shipped = self.rank_capability_rules("shell.run")
        return [
            one for ranking in (self.tool_rules, own, shipped) for one in ranking.ranked if one.rule.action != "allow"
        ]

    def _find_hidden_objection(
        self, target: CallTarget, script: ShellScript, by_arguments: RankedRule | None
    ) -> PolicyFinding | None:
        """Return the strictest objection to a command that only the text of a script contains, or None."""
        if not self._watched_programs.may_text_contain_program(target.value):
            return None
        is_fed = "|" in target.value or "<" in target.value
        fed = any(nested_commands.executes_its_input(command.argv, is_fed=is_fed) for command in script.commands)
        if not fed and (script.is_plain or "=" not in target.value):
            return None
        asked: PolicyFinding | None = None
        for reading in nested_commands.find_possible_commands_in_text(target.value, self._watched_programs, fed=fed):
            if reading is nested_commands.TOO_MANY_READINGS:
                asked = asked or PolicyFinding("ask", "program", None, _TOO_MANY_WORDS, target=target)
            elif (objection := self._find_objecting_rule(reading, target, by_arguments)) is not None:
                if objection.action == "deny":
                    return objection
                asked = asked or objection
        return asked

    @property
    def _watched_programs(self) -> nested_commands.WatchedPrograms:
        """The programs that a rule about commands denies or asks about."""
        if self._watched is None:
            strict = self._strict_rules()
            names = {one.argv.program_prefix for one in strict if one.argv is not None} - {""}
            everything = any(
                (one.argv is None or not one.argv.program_prefix)
                and (one.rule.action == "deny" or _has_non_wildcard_word(one))
                for one in strict
            )
            self._watched = nested_commands.WatchedPrograms(names, everything=everything)
        return self._watched

    def _find_objecting_rule(
        self, reading: nested_commands.PossibleCommand, target: CallTarget | None, by_arguments: RankedRule | None
    ) -> PolicyFinding | None:
        """Return the rule that denies one reading of a command, or asks about it; None if no rule does.

        A guess leads to approval at most: the program may take for data what looks like a command.
        """
        argv = reading.argv
        tool = (
            by_arguments
            if self.kind == "arguments"
            else self.tool_rules.find_winner(argv)
            if self.kind == "command"
            else None
        )
        action, rule = self.decide_by_rules(tool, "shell.run", argv)
        if action == "allow" or rule is None:
            return None
        used = self.rank_capability_rules("shell.run")[0].find_winner(argv)
        by = next((one for one in (tool, used) if one is not None and one.rule is rule), None)
        if by is None or (reading.spelling_of is not None and by.argv is not None and by.matches(reading.spelling_of)):
            return None  # a more specific rule already decided about the command as written
        if action == "deny" and reading.certain:
            return PolicyFinding("deny", "rule", rule, target=target, tool=tool, reading=argv)
        if not _has_non_wildcard_word(by):
            return None
        if reading.certain:
            return PolicyFinding("ask", "rule", rule, target=target, tool=tool, reading=argv)
        verb = "denies" if action == "deny" else "asks about"
        note = f"the command may run {format_argv_for_message(argv)}, which the rule {rule.text!r} {verb}"
        return PolicyFinding("ask", "program", rule, note, target=target, tool=tool, reading=argv)

    def _is_whole_argv_allowed(self, argv: tuple[str, ...], by_arguments: RankedRule | None) -> bool:
        """Return whether a rule allows exactly this argv, every word of it."""
        tool = (
            by_arguments
            if self.kind == "arguments"
            else self.tool_rules.find_winner(argv)
            if self.kind == "command"
            else None
        )
        used = self.rank_capability_rules("shell.run")[0].find_winner(argv)
        return any(_rule_names_words(one, frozenset(range(len(argv)))) for one in (tool, used))

    def _evaluate_unwrapped(
        self,
        argv: Sequence[str],
        target: CallTarget | None,
        by_arguments: RankedRule | None,
        depth: int = command_wrappers.MAX_DEPTH,
    ) -> PolicyFinding:
        """Evaluate an argv. For a wrapper, evaluate the command in it, unless a rule names the wrapper.

        A rule that allows has to name all words of the wrapper. A rule that asks or denies has to name only the wrapper.
        """
        argv = tuple(argv)
        tool = (
            by_arguments
            if self.kind == "arguments"
            else self.tool_rules.find_winner(argv)
            if self.kind == "command"
            else None
        )
        action, rule = self.decide_by_rules(tool, "shell.run", argv)
        plain = PolicyFinding(action, "no rule" if rule is None else "rule", rule, "", argv, target, tool)
        if action == "deny":
            return plain
        used = self.rank_capability_rules("shell.run")[0].find_winner(argv)
        at = command_wrappers.find_wrapped_command_start(argv) if depth else None
        if at is not None:
            if action == "allow" and any(_rule_names_words(one, frozenset(range(len(argv)))) for one in (tool, used)):
                return self._find_parent_objection(argv, target, by_arguments) or plain
            if action == "ask" and any(
                one is not None and one.rule is rule and _rule_names_program(one, argv) for one in (tool, used)
            ):
                return plain
            found = self._evaluate_unwrapped(argv[at:], target, by_arguments, depth - 1)
            return found._replace(argv=argv, wrapped=(argv[:at], *found.wrapped))
        normal = program_risks.normalize_argv(argv) if action == "ask" else argv
        if normal != argv and not any(
            one is not None and one.rule is rule and _rule_names_program(one, argv) and not one.matches(normal)
            for one in (tool, used)
        ):
            found = self._evaluate_unwrapped(normal, target, by_arguments, 0)
            if found.action == "allow" and found.rule is not None and _is_about_certain_commands(found.rule):
                return found._replace(argv=argv, reading=normal)
        if action == "allow" and rule is not None and self._allows_reading_only(rule):
            return self._ask_about_protected_reading(plain)
        concern = program_risks.find_hidden_program_risk(argv) if action == "allow" else None
        if concern is None or any(_rule_names_words(candidate, concern.words) for candidate in (tool, used)):
            return plain
        cause = "program" if destroying_forms.explain_irreversible_destruction(argv) is None else "destroys"
        return plain._replace(action="ask", cause=cause, note=concern.reason, concern=concern)

    def _find_parent_objection(
        self, argv: Sequence[str], target: CallTarget | None, by_arguments: RankedRule | None
    ) -> PolicyFinding | None:
        """Return the objection of a parent session's rule to the command in a wrapper, or None.

        It counts if a rule of this session names the wrapper. It is rarely needed, so nothing is prepared for it.
        """
        if (above := self.rules.parent) is None:
            return None
        found = self.with_rules(above.inheritable_rule_book).evaluate_command(
            ShellCommand(tuple(argv)), target, by_arguments
        )
        return found if found.rule is not None and found.action != "allow" else None

    def _allows_reading_only(self, rule: Rule) -> bool:
        """Return whether a rule allows a command only because the command changes nothing."""
        return rule.pattern == READ_ONLY_VARIABLE or (bool(rule.governed_side_effect) and self.spec.single_command)

    def _ask_about_protected_reading(self, found: PolicyFinding) -> PolicyFinding:
        """Return ``found``, or a stricter finding if a read-only command names a file that requires approval.

        Only names count. The sandbox masks such files for a command that searches. It cannot mask what a repository stores, so a
        command that shows stored files requires approval.

        :param found: the finding for a command that is allowed because it only reads
        """
        argv = found.argv
        assert argv is not None
        if (reason := read_only_proof.explain_git_shows_stored_files(argv)) is not None:
            note = f"{reason}; the tools git.show, git.log and git.diff omit those files"
            found = found._replace(action="ask", cause="program", note=note)
        rule = self._find_name_question(argv, is_folding=found.target is not None and found.target.is_folding)
        if rule is not None and STRICTNESS[rule.action] > STRICTNESS[found.action]:
            return found._replace(action=rule.action, cause="rule", rule=rule, note="")
        return found

    def _find_name_question(self, argv: Sequence[str], *, is_folding: bool) -> Rule | None:
        """Return the rule that asks about reading a file that a command names, or denies it, the strictest; None if none does."""
        exact = 0 if is_folding else None
        found: Rule | None = None
        for word in read_only_proof.find_possible_path_words(argv):
            path = posixpath.normpath(word)
            outside = path[:1] == "/" or path[:2] == ".."
            subject = PathSubject(path, None, exact) if outside else PathSubject(f"./{path}", path, exact)
            rule = self._find_reading_rule(subject)
            if rule is not None and STRICTNESS[rule.action] > (0 if found is None else STRICTNESS[found.action]):
                found = rule
        return found

    def _find_reading_rule(self, path: PathSubject) -> Rule | None:
        used = self.rank_capability_rules("fs.read")[0].find_winner(path) or self._shipped_reading_rules.find_winner(
            path
        )
        return None if used is None else used.rule

    @property
    def _shipped_reading_rules(self) -> RuleRanking:
        """The shipped rules about reading, also those that allow what a name of a secret file would otherwise match."""
        if self._shipped_reading is None:
            shipped = (rule for rule in self.rules if rule.scope == "default" and rule.permission == "fs.read")
            self._shipped_reading = rank_rules(tuple(shipped), "path")
        return self._shipped_reading

    def _find_denial(
        self, argv: Sequence[str], target: CallTarget | None, by_arguments: RankedRule | None
    ) -> PolicyFinding | None:
        tool = (
            by_arguments
            if self.kind == "arguments"
            else self.tool_rules.find_winner(argv)
            if self.kind == "command"
            else None
        )
        action, rule = self.decide_by_rules(tool, "shell.run", argv)
        if action != "deny":
            return None
        return PolicyFinding("deny", "rule", rule, target=target, tool=tool)


def _rule_names_words(rule: RankedRule | None, words: frozenset[int]) -> bool:
    """Return whether an allow rule names these words of the argv literally."""
    return (
        rule is not None and rule.rule.action == "allow" and rule.argv is not None and words <= rule.argv.literal_words
    )


def _rule_names_program(rule: RankedRule, argv: Sequence[str]) -> bool:
    """Return whether a rule's pattern names the program of this argv literally."""
    return rule.argv is not None and rule.argv.program in (argv[0], strip_standard_program_folder(argv[0]))


def _is_about_certain_commands(rule: Rule) -> bool:
    """Return whether a rule applies to certain commands, and not to all, or all that provably only read."""
    return rule.pattern not in ("", READ_ONLY_VARIABLE)


def _has_non_wildcard_word(rule: RankedRule) -> bool:
    """Return whether a rule's pattern has at least one word that is not only a wildcard."""
    return rule.argv is not None and (bool(rule.argv.literal_words) or rule.argv.program_prefix != "")


def _is_path_named(rules: Iterable[Rule | None], subject: PathSubject | str) -> bool:
    """Return whether one of the rules names a path without a wildcard."""
    return isinstance(subject, PathSubject) and any(
        rule is not None and rule_names_protected_path(rule, subject) for rule in rules
    )


def _rule_names_only_this_command(finding: PolicyFinding) -> bool:
    """Return whether a rule allows exactly this command, and no other one: its pattern has no word for further arguments."""
    rules = (finding.rule, None if finding.tool is None else finding.tool.rule)
    return _rule_names_whole_command(finding) and any(
        tuple(split_pattern(rule.pattern)) == finding.argv for rule in rules if rule is not None and rule.pattern
    )


def _rule_names_whole_command(finding: PolicyFinding) -> bool:
    """Return whether a rule allows exactly this command, every word of it."""
    words = frozenset(range(len(finding.argv or ())))
    rules = {finding.rule, None if finding.tool is None else finding.tool.rule} - {None}
    return finding.action == "allow" and any(
        _rule_names_words(compile_ranked_rule(rule, "command"), words) for rule in rules if rule is not None
    )


class PolicyVerdict:
    """A decision about one call. It can be narrowed, never widened.

    :ivar action: ``allow``, ``ask`` (approval by the user; a refusal if headless) or ``deny``
    :ivar capabilities: the most that the call may access
    :ivar targets: what the call would access, in canonical form
    """

    __slots__ = (
        "_reason",
        "action",
        "arguments",
        "capabilities",
        "confinement",
        "confinement_objection",
        "deciding_finding",
        "encoded_approval_record",
        "findings",
        "narrowed_by_watchdog",
        "notes",
        "prepared",
        "suggested_rule",
        "targets",
    )

    def __init__(
        self,
        prepared: ToolPolicy,
        arguments: Mapping[str, Any],
        targets: Sequence[CallTarget],
        findings: Sequence[PolicyFinding],
        deciding: PolicyFinding,
    ) -> None:
        self.prepared = prepared
        self.arguments = arguments
        self.targets = targets
        self.findings = findings
        self.deciding_finding = deciding
        self.action: Action = deciding.action
        self.capabilities: CapabilitySet = prepared.capabilities
        self.confinement: CallConfinement | None = None
        """The narrow sandbox of a call that a rule with ``{confined}`` allows."""
        self.confinement_objection = ""
        """Why a rule with ``{confined}`` does not allow the call; empty if there is no such rule, or if it allows it."""
        self.notes: tuple[TraceStep, ...] = ()
        self.narrowed_by_watchdog = False
        self._reason: str | None = None
        self.encoded_approval_record: bytes | None = None
        """:attr:`approval_record` as JSON, once a call has been recorded with it."""
        self.suggested_rule: str | Literal[False] | None = False
        """The result of :func:`~handrail.policy.rule_suggestions.suggest_rule`; False before the first call."""

    @property
    def reason(self) -> str:
        """The reason as full sentences for the model, without paths of the operator's machine."""
        if self._reason is None:
            reason = format_reason(self.deciding_finding, self.prepared.spec.id)
            if self.confinement:
                reason = f"{reason} {CONFINED_TEXT}"
            elif self.confinement_objection and self.deciding_finding.may_run_confined:
                reason = f"{reason} It does not stay confined: {self.confinement_objection}."
            self._reason = reason
        return self._reason

    @property
    def is_read_only(self) -> bool:
        """Whether the call only runs a command that provably changes nothing, so that it runs read-only."""
        if not self.prepared.spec.single_command:
            return False
        return is_call_provably_read_only(self.targets)

    @property
    def approval_record(self) -> dict[str, Any]:
        """The record of a call that rules alone allow."""
        record = {"by": "rules", "reason": self.reason}
        if (rule := self.deciding_finding.rule) is not None:
            record |= {"rule": rule.text, "scope": rule.scope, "source": rule.source}
        return record

    @property
    def operator_reason(self) -> str:
        """The reason for the operator: :attr:`reason`, and the source of the rule."""
        rule = self.deciding_finding.rule
        if self.narrowed_by_watchdog or rule is None or not rule.source:
            return self.reason
        return f"{self.reason} The rule's source: {rule.source}."

    def narrow(self, action: Action, reason: str, note: TraceStep) -> PolicyVerdict:
        """Return the same verdict with a stricter ``action``, which no rule can answer."""
        assert STRICTNESS[action] > STRICTNESS[self.action]
        other = self.with_trace_note(note)
        other.action = action
        other.narrowed_by_watchdog = True
        other._reason = reason
        other.suggested_rule = None
        return other

    def with_trace_note(self, note: TraceStep) -> PolicyVerdict:
        """Return the same verdict with one more step in its trace."""
        other = PolicyVerdict(self.prepared, self.arguments, self.targets, self.findings, self.deciding_finding)
        other.action, other.capabilities = self.action, self.capabilities
        other.confinement, other.confinement_objection = self.confinement, self.confinement_objection
        other.notes = (*self.notes, note)
        other.narrowed_by_watchdog = self.narrowed_by_watchdog
        other._reason = self._reason
        other.suggested_rule = self.suggested_rule
        return other

    def __repr__(self) -> str:
        return f"Verdict({self.action}: {self.reason})"
