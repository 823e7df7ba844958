"""The rule word ``{confined}``: whatever a call runs, as long as it stays confined.

A rule ``allow bash {confined}`` answers for a whole call, after all other rules. It answers only what no other rule decided:
a command without a rule, a text that the parser does not understand, a program that runs its arguments. It never answers for
a rule that denies or asks. The call then runs without network and Unix sockets. It writes only in the workspace and in its
scratch folder, and version control data is read-only unless a command of its text changes it and none runs other code. So the sandbox bounds what the
text does not show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from handrail.contract.sandbox_protocol import CallConfinement
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.requires import Capability, CapabilitySet, ShellRequires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_evaluation import PolicyVerdict, ToolPolicy, is_call_provably_read_only
from handrail.policy.call_targets import CallTarget, build_script_from_argv, format_argv_for_message
from handrail.policy.findings import PolicyFinding
from handrail.policy.rules.matchers import PathSubject, rank_permission_specificity
from handrail.policy.rules.pattern_faults import CONFINED_VARIABLE
from handrail.policy.rules.pattern_lexer import ANY_ARGUMENTS
from handrail.policy.rules.rules_and_modes import (
    STRICTNESS,
    Rule,
    RuleBook,
    rule_applies_to_capability,
    rule_applies_to_tool,
)
from handrail.policy.shell import (
    confinement_proof,
    destroying_forms,
    nested_commands,
    read_only_proof,
)
from handrail.policy.shell.executed_files import treats_words_as_data
from handrail.policy.shell.nested_commands import program_name
from handrail.policy.shell.parser import MAX_COMMANDS, ShellScript
from handrail.policy.shell.reader import CHANGES_FOLDER, is_marked

_MAX_UNCLEAR = 4_000
"""The maximum number of characters of an unclear text that may run confined."""
_PRIVATE_FOLDER = "/tmp/"  # noqa: S108 - nothing is made there


class ConfinedRuleToolPolicy(ToolPolicy):
    """The policy of one tool, in which a rule with ``{confined}`` answers after all other rules."""

    __slots__ = ("_confined", "_plain", "_required_access")

    def __init__(self, spec: ToolSpec, rules: RuleBook, capabilities: CapabilitySet, origin: str | None = None) -> None:
        self._required_access: PolicyFinding | Literal[False] | None = False
        """The objection to every call for what the tool requires; None without one, False before the first call."""
        super().__init__(spec, rules, capabilities, origin)
        self._confined = None
        # Only a call that does nothing but run a command can be confined as a whole.
        if spec.single_command and not spec.confinement_gap:
            self._confined = _find_confined_rule(rules, spec, origin)
        self._plain: ConfinedRuleToolPolicy | None = None
        """The policy of the rules that count next to the rule with ``{confined}``, made on first use."""

    def evaluate_targets(self, arguments: Mapping[str, Any], targets: Sequence[CallTarget]) -> PolicyVerdict:
        """Evaluate a call whose targets are known already."""
        if self._confined is None or (self._reading is not None and is_call_provably_read_only(targets)):
            return super().evaluate_targets(
                arguments, targets
            )  # the policy for calls that change nothing answers for itself
        if self._plain is None:
            kept = _list_rules_next_to(self._confined, self.rules, self.spec, self.origin)
            same = kept is self.rules
            self._plain = self if same else ConfinedRuleToolPolicy(self.spec, kept, self.capabilities, self.origin)
        plain = self._plain._evaluate(arguments, targets)
        objection = "" if plain.action == "allow" else self._plain._find_objection_to(plain, self._confined)
        if plain.action != "allow" and not objection:
            return self._answer(plain, self._confined)
        verdict = plain if self._plain is self else self._evaluate(arguments, targets)
        if plain.action == "allow" and verdict.action != "allow":
            objection = self._plain._find_objection_to(plain, self._confined)
            return self._answer(plain, self._confined) if not objection else verdict
        verdict.confinement_objection = objection
        return verdict

    def _evaluate(self, arguments: Mapping[str, Any], targets: Sequence[CallTarget]) -> PolicyVerdict:
        verdict = super()._evaluate(arguments, targets)
        if self._required_access is False:
            self._required_access = find_required_access_objection(self)
        found = self._required_access
        if found is None or STRICTNESS[found.action] < STRICTNESS[verdict.action]:
            return verdict
        # A user who is asked anyway is asked about this as well, because a running call cannot ask.
        deciding = max(verdict.deciding_finding, found, key=lambda one: STRICTNESS[one.action])
        return PolicyVerdict(self, arguments, targets, (*verdict.findings, found), deciding)

    def _answer(self, plain: PolicyVerdict, rule: Rule) -> PolicyVerdict:
        """Return the verdict with the answer of the rule to every finding that does not allow."""
        findings = [
            finding if finding.action == "allow" else finding._replace(action="allow", cause="rule", rule=rule, note="")
            for finding in plain.findings
        ]
        deciding = next((finding for finding in findings if finding.rule is rule), findings[0])
        answered = PolicyVerdict(self, plain.arguments, plain.targets, findings, deciding)
        # The sandbox is made from these capabilities, so a call that is allowed as confined cannot get a network.
        answered.capabilities = self.capabilities.without_hosts()
        answered.confinement = CallConfinement(_changes_repository(plain.targets))
        return answered

    def _find_objection_to(self, verdict: PolicyVerdict, rule: Rule) -> str:
        """Return why a rule with ``{confined}`` does not answer for a call; empty if it does."""
        for finding in verdict.findings:
            if finding.action != "allow" and (objection := _find_stricter(finding, rule)):
                return objection
        # Code in another language has no targets. It is searched for plain words that delete.
        if not verdict.targets and (objection := _find_objection_to_code(" ".join(_texts_in(verdict.arguments)))):
            return objection
        for target in verdict.targets:
            subject = target.subject
            if isinstance(subject, ShellScript):
                objection = self._find_objection_to_text(subject, target)
            else:
                objection = self._find_objection_to_place(target)
            if objection:
                return objection
        return ""

    def _find_objection_to_text(self, script: ShellScript, target: CallTarget) -> str:
        text = target.value
        if script.unclear is not None:
            if not _is_readable(script, text):
                return script.unclear
            if (reason := confinement_proof.explain_possible_destruction(script, text)) is not None:
                return reason
            # The rest of the text runs in an unknown folder, so its relative names can mean any file.
            if CHANGES_FOLDER in script.unclear:
                for command in script.commands:
                    if (reason := confinement_proof.explain_loss_elsewhere(command.argv, ())) is not None:
                        return reason
            if (rule := self._find_rule_in_text(text)) is not None:
                return f"{script.unclear}, and its words may run a command of the rule {rule.text!r}"
        elif (
            reason := confinement_proof.explain_script_not_confined(script)
        ) is not None and not _is_confined_except_code(script, text):
            return reason
        for command in script.commands:
            if (rule := self._find_name_question(command.argv, is_folding=target.is_folding)) is not None:
                return f"it names a file of the rule {rule.text!r}"
        return ""

    def _find_rule_in_text(self, text: str) -> Rule | None:
        """Return a rule that denies or asks about a command which an unclear text may run, by its words; None if none does.

        The name of the program suffices for a deny. For an ask, every word of the rule has to be in the text.
        """
        own, shipped = self.rank_capability_rules("shell.run")
        for ranking in (self.tool_rules, own, shipped):
            for ranked in ranking.ranked:
                if ranked.rule.action == "allow":
                    continue
                if ranked.argv is None or not ranked.argv.program_prefix:
                    return ranked.rule  # it may be about any command
                # The text is not understood, so only its words can be compared. Too many matches are the safe side.
                watched = nested_commands.WatchedPrograms((ranked.argv.program_prefix,))
                if not watched.may_text_contain_program(text):
                    continue
                if ranked.rule.action == "deny" or all(word in text for word in ranked.argv.literal_texts[1:]):
                    return ranked.rule
        return None

    def _find_objection_to_place(self, target: CallTarget) -> str:
        if not isinstance(target.subject, PathSubject):
            return ""
        rule = self._find_reading_rule(target.subject)
        if rule is not None and rule.action != "allow":
            return f"{target.shown} is a file of the rule {rule.text!r}"
        # Each call has a private /tmp, so a file there reaches no other program.
        inside = target.subject.relative is not None or target.subject.absolute.startswith(_PRIVATE_FOLDER)
        return "" if inside or target.capability != "fs.write" else f"{target.shown} is outside the workspace"


def describe_confinement(verdict: PolicyVerdict) -> tuple[bool | None, str]:
    """Return whether a call runs confined, and how, or why not; None if no rule with ``{confined}`` applies to its tool."""
    policy = verdict.prepared
    rule, spec = _find_confined_rule(policy.rules, policy.spec, policy.origin), policy.spec
    if rule is None:
        return None, ""
    if verdict.confinement is not None:
        kept = "can change" if verdict.confinement.changes_repository else "is read-only"
        return True, f"no network, writes in the workspace and scratch folders only, and version control data {kept}"
    if spec.confinement_gap:
        return False, f"the rule {rule.text!r} applies to no call here, because {spec.confinement_gap}"
    return False, verdict.confinement_objection or "other rules decide the call"


def _find_confined_rule(rules: RuleBook, spec: ToolSpec, origin: str | None) -> Rule | None:
    found = [
        rule
        for rule in rules
        if rule.pattern == CONFINED_VARIABLE
        and (rule_applies_to_tool(rule, spec, origin) or rule_applies_to_capability(rule, "shell.run"))
    ]
    # A rule of the operator is always preferred to a shipped one.
    confined = max(found, key=lambda rule: (rule.scope != "default", rank_permission_specificity(rule)), default=None)
    return None if confined is None or _is_overruled(confined, rules, spec, origin) else confined


_EVERY_COMMAND = frozenset({"", "*", ANY_ARGUMENTS})
"""The patterns of rules about every call of a tool that runs commands."""


def _is_overruled(confined: Rule, rules: RuleBook, spec: ToolSpec, origin: str | None) -> bool:
    """Return whether a rule about every call asks or denies, so that a rule with ``{confined}`` answers for none.

    Otherwise it would answer for a file that a command opens, although a more exact rule allows only the command.
    """
    return any(
        rule.action != "allow"
        and rule.scope != "default"
        and rule.pattern in _EVERY_COMMAND
        and (confined.scope == "default" or rank_permission_specificity(rule) >= rank_permission_specificity(confined))
        and (rule_applies_to_tool(rule, spec, origin) or rule_applies_to_capability(rule, "shell.run"))
        for rule in rules.own_and_parent_rules
    )


def _list_rules_next_to(confined: Rule, rules: RuleBook, spec: ToolSpec, origin: str | None) -> RuleBook:
    """Return the rules that count next to a rule with ``{confined}``.

    As among all rules, a rule that names its permission less exactly loses: ``ask effect:external`` to ``allow bash
    {confined}``. No rule loses to a shipped one, which answers only if no other rule does.
    """
    if confined.scope == "default":
        return rules
    about_capability = rule_applies_to_capability(confined, "shell.run")

    def loses(rule: Rule) -> bool:
        if rule.action == "allow" or rule.is_final or rule.scope == "default":
            return False
        if rank_permission_specificity(rule) >= rank_permission_specificity(confined):
            return False
        return (
            rule_applies_to_capability(rule, "shell.run")
            if about_capability
            else rule_applies_to_tool(rule, spec, origin)
        )

    kept = tuple(rule for rule in rules if not loses(rule))
    return rules if len(kept) == len(rules) else rules.with_replaced_rules(*kept)


def _find_stricter(finding: PolicyFinding, rule: Rule) -> str:
    """Return why a rule with ``{confined}`` does not answer a finding; empty if it does."""
    other = finding.rule
    # A rule that the operator wrote about this command is more exact than a general permission for confined calls.
    if other is not None and other.action != "allow":
        return f"the rule {other.text!r} is stricter than {rule.text!r}"
    if finding.cause in ("no rule", "unclear", "program"):
        return ""
    return finding.note.rstrip(".") or "another check is stricter"


_INTERPRETERS = frozenset(
    {
        "python",
        "python3",
        "node",
        "ruby",
        "perl",
        "php",
        "deno",
        "bun",
        "rscript",
        "julia",
        "lua",
        "awk",
        "gawk",
        "mawk",
        "sqlite3",
        "duckdb",
        "export",
    }
)
"""Programs that run code of their words or their input, and the command that sets a variable which may name code."""
_DESTROYING_CODE = compile_regex_lazily(
    r"\b(?:rmtree|unlink|unlinkSync|rmdir|rmdirSync|rmSync|removedirs|truncate|truncateSync|os\.(?:remove|rename|replace|system)|subprocess|popen"
    r"|child_process|execSync|shutil\.move|FileUtils|File\.delete|(?<!-)exec|eval|__import__|b64decode|fromhex)\b|\.(?:git|hg|svn|jj)\b|\brm\s"
    r"|\bopen\s*\([^()]*['\"]w[b+]*['\"]\s*\)\s*(?:\.close\b|[;'\"]|$)|\b(?:write_text|write_bytes)\s*\(\s*b?(?:''|\"\")\s*\)"
    r"|\b(?:writeFile|writeFileSync|File\.write)\s*\([^,()]*,\s*(?:''|\"\")\s*\)"
    r"|\brm\s*\(|\bfile\.remove\b|\bdrop\s+(?:table|view|index|trigger|schema|database)\b|\bdelete\s+from\b|(?:^|[\s'\"])\.(?:shell|system|save|restore|output|once)\b",
    re.IGNORECASE | re.MULTILINE,
)
"""Words of code that may delete something or hide what it does. Code that is hidden better is left to the sandbox."""
_MAX_CODE = 100_000
"""Characters of code that are searched, which takes up to 25 ms on the event loop."""


_VERSION_CONTROL = compile_regex_lazily(r"git|hg|jj|svn|bzr|fossil|sl|gt")
"""A quick test for the name of a version control program."""


def _is_confined_except_code(script: ShellScript, text: str) -> bool:
    """Return whether a text stays confined but for code that it gives to an interpreter, which deletes nothing in plain words."""
    if any(confinement_proof.explain_loss_elsewhere(command.argv, command.folders) for command in script.commands):
        return False
    for argv in (
        one for command in script.commands for one in confinement_proof.unwrap_executed_commands(command.argv)
    ):
        if confinement_proof.explain_not_confined(argv) is None:
            continue
        if not argv or is_marked(argv[0]) or program_name(argv) not in _INTERPRETERS:
            return False
        if (
            confinement_proof.explain_network_need(argv) or destroying_forms.explain_irreversible_destruction(argv)
        ) is not None:
            return False
    return bool(script.commands) and not _find_objection_to_code(text)


def _find_objection_to_code(text: str) -> str:
    if len(text) > _MAX_CODE:
        return f"its code is longer than {_MAX_CODE:,} characters"
    # The sandbox contains the damage to the workspace. This search protects the files in it that have no copy.
    match = _DESTROYING_CODE.search(text)
    return "" if match is None else f"its code contains {match.group()!r}"


def _texts_in(arguments: Mapping[str, Any]) -> Iterator[str]:
    return (value for value in arguments.values() if isinstance(value, str))


def _is_readable(script: ShellScript, text: str) -> bool:
    """Return whether an unclear text is short enough, and enough of it is understood, to find what it may destroy."""
    return 0 < len(script.commands) <= MAX_COMMANDS and len(text) <= _MAX_UNCLEAR


_FORMATTERS = frozenset({"ruff", "black", "isort", "gofmt", "rustfmt", "shfmt", "export", "unset", "set", "umask", "["})
"""Programs that run no code of the workspace, and commands that set the shell's own state."""


def _runs_code(argv: Sequence[str]) -> bool:
    """Return whether a command runs code that its words do not show: of the project, of its input, or of an unknown program."""
    if read_only_proof.is_command_provably_read_only(argv):
        return False
    return any(
        _VERSION_CONTROL.fullmatch(program_name(inner)) is None
        and program_name(inner) not in _FORMATTERS
        and not read_only_proof.is_command_provably_read_only(inner)
        and not treats_words_as_data(inner)
        for inner in confinement_proof.unwrap_executed_commands(argv)
    )


def _changes_repository(targets: Sequence[CallTarget]) -> bool:
    """Return whether the text of a call has a command that changes version control data, and none that runs other code."""
    return any(
        isinstance(target.subject, ShellScript)
        and target.subject.unclear is None
        and _VERSION_CONTROL.search(target.value) is not None
        and confinement_proof.changes_repository(target.subject)
        and not any(_runs_code(command.argv) for command in target.subject.commands)
        for target in targets
    )


# Access that a tool requires and that the arguments of its calls do not name, such as the program ``git`` of ``git.status``.
#
# The rules decide about it again while the call runs, and a running call cannot ask. So a rule that denies it, or asks about
# it, decides about the call.

_EVERYTHING = ("", "*", "**")
"""The patterns of rules about every path or host."""
_UNKNOWN_ARGUMENT = "\0"
"""An argument that no literal word of a pattern matches."""


def find_required_access_objection(policy: ToolPolicy) -> PolicyFinding | None:
    """Return the finding that denies or asks about every call of a tool, for what each of them needs; None if no rule does."""
    spec = policy.spec
    named = spec.effective_targets
    if "shell.run" in named or any(entry.cmd == "*" for entry in spec.requires.shell):
        return None
    found = [_find_rule_about_program(policy, entry) for entry in spec.requires.shell]
    rules = [rule for rule in found if rule is not None]
    if rules and len(rules) == len(found):
        program = spec.requires.shell[0].cmd
        shown = f"{format_argv_for_message((program,))}, which {spec.id} runs,"
        target = CallTarget("shell.run", program, shown, build_script_from_argv((program,)))
        rule = min(rules, key=lambda one: STRICTNESS[one.action])
        return PolicyFinding(rule.action, "rule", rule, target=target)
    for capability in _list_needed_capabilities(spec):
        ranked = policy.rank_capability_rules(capability)[0].ranked
        first = ranked[0].rule if ranked and capability not in named else None
        if first is not None and first.action == "deny" and first.pattern in _EVERYTHING:
            return PolicyFinding("deny", "rule", first)
    return None


def _list_needed_capabilities(spec: ToolSpec) -> Iterator[Capability]:
    if spec.single_command:
        return  # its programs may do without
    if spec.requires.net.hosts and not spec.requires.net.by_rule:
        yield "net.fetch"
    if spec.requires.fs.read and spec.requires.shell:
        yield "fs.read"
    if spec.requires.fs.write and spec.side_effect != "read":
        yield "fs.write"


def _find_rule_about_program(policy: ToolPolicy, entry: ShellRequires) -> Rule | None:
    """Return the rule that denies or asks about a program with any arguments, or with the subcommand that names the tool."""
    known = () if entry.args is None else entry.args
    words = [one if isinstance(one, str) else _UNKNOWN_ARGUMENT for one in known]
    forms = [(entry.cmd, *words)]
    if entry.args is None:
        program, _, subcommand = policy.spec.id.partition(".")
        forms = [(entry.cmd, _UNKNOWN_ARGUMENT)]
        forms += [(entry.cmd, subcommand, _UNKNOWN_ARGUMENT)] if program == entry.cmd and subcommand else []
    own = policy.rank_capability_rules("shell.run")[0]
    winners = [winner.rule for form in forms if (winner := own.find_winner(form)) is not None]
    strict = [rule for rule in winners if rule.action != "allow"]
    return max(strict, key=lambda one: STRICTNESS[one.action], default=None)
