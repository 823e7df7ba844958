"""Access that a tool requires and that the arguments of its calls do not name, such as the program ``git`` of ``git.status``.

The rules decide about it again while the call runs, and a running call cannot ask. So a rule that denies it, or asks about it,
decides about the call.
"""

from __future__ import annotations

from collections.abc import Iterator

from handrail.contract.tool.requires import Capability, ShellRequires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_evaluation import ToolPolicy
from handrail.policy.call_targets import CallTarget, build_script_from_argv, format_argv_for_message
from handrail.policy.findings import PolicyFinding
from handrail.policy.rules.rules_and_modes import STRICTNESS, Rule

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
