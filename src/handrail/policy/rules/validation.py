"""Checks of rules at load time: rules that can never match, contradict each other, or fail their own examples.

A rule is refused only if no call can match it, so every refusal points at a real mistake. This module also loads the rules of
an agent manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.errors import ToolError
from handrail.contract.rule_forms import RuleExample, to_rule_with_examples
from handrail.contract.text.glob_patterns import compile_text_glob, extract_literal_prefix, has_wildcard
from handrail.contract.tool.requires import CAPABILITIES, CapabilityLayer
from handrail.contract.tool.spec import STEP_INPUT, ToolSpec, extract_property_schemas
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.policy.call_targets import extract_host_and_port, get_rule_subject_kind
from handrail.policy.rules.matchers import (
    SUBJECT_KINDS,
    PathSubject,
    RankedRule,
    SubjectKind,
    compile_ranked_rule,
    normalize_path_pattern,
)
from handrail.policy.rules.pattern_faults import (
    CONFINED_VARIABLE,
    READ_ONLY_VARIABLE,
    explain_command_pattern_fault,
    explain_host_pattern_fault,
    explain_path_pattern_fault,
)
from handrail.policy.rules.pattern_lexer import ANY_ARGUMENTS, ArgvPattern, PatternSyntaxError, split_pattern
from handrail.policy.rules.rule_sets import parse_entry, resolve_rule_set_reference
from handrail.policy.rules.rules_and_modes import (
    Rule,
    is_capability_glob,
    is_glob,
    parse_rule,
)
from handrail.policy.shell import command_wrappers, nested_commands, program_risks, read_only_proof
from handrail.policy.shell.parser import ShellScript, parse_script
from handrail.policy.shell.risky_options import SHELLS

_RUNS_OTHERS = program_risks.RUNNERS | SHELLS | {"find", "xargs"}


# Checks against the available tools.


def explain_rule_matches_no_tool(rule: Rule, specs: Mapping[str, ToolSpec]) -> str | None:
    """Return why a rule about tools can match no call of them, or None.

    None also means that the rule is not about these tools.
    """
    if not rule.pattern or rule.permission in CAPABILITIES or rule.permission.startswith("mcp:"):
        return None
    if is_capability_glob(rule.permission):
        return None
    if not is_glob(rule.permission):
        about = [specs[rule.permission]] if rule.permission in specs else []
    else:
        about = [spec for tool_id, spec in specs.items() if _permission_names_tool(rule.permission, tool_id)]
    if not about:
        return None
    faults = [_explain_rule_never_matches(rule, spec) for spec in about]
    if not all(faults):
        return None
    return f"Invalid rule {rule.text!r}: {faults[0]}"


def _permission_names_tool(permission: str, tool_id: str) -> bool:
    """Return whether a permission names this tool."""
    return permission in ("*", tool_id) or (
        is_glob(permission) and compile_text_glob(permission).match(tool_id) is not None
    )


def _explain_rule_never_matches(rule: Rule, spec: ToolSpec) -> str | None:
    """Return why no call of ``spec`` can match ``rule``, or None."""
    if rule.pattern == CONFINED_VARIABLE:
        one = f"{CONFINED_VARIABLE} is only for tools whose calls just run a command, such as bash. Calls of {spec.id} do more."
        return None if spec.single_command or spec.confinement_gap else one
    kind = get_rule_subject_kind(spec)
    name, sign, value = rule.pattern.partition("=")
    if kind in ("path", "command") and sign and name in extract_property_schemas(spec.parameters):
        meant = f"{rule.action} {spec.id} {value}"
        return f"a pattern of {spec.id} is a {kind}, without the name of the argument. Write {meant!r}."
    match kind:
        case "path":
            return explain_path_pattern_fault(rule.pattern)
        case "host":
            return explain_host_pattern_fault(rule.pattern)
        case "command":
            return explain_command_pattern_fault(rule.pattern) or _explain_undeclared_program(rule, spec)
        case "arguments":
            return _fault_in_arguments(rule, spec)


def _explain_undeclared_program(rule: Rule, spec: ToolSpec) -> str | None:
    """Return why a rule allows a program that the tool does not require, or None."""
    declared = {entry.cmd for entry in spec.requires.shell}
    if rule.action == "allow" and rule.pattern == READ_ONLY_VARIABLE and not spec.single_command:
        return (
            f"{READ_ONLY_VARIABLE} is only for tools whose calls run read-only. Calls of {spec.id} do more than run their command, or "
            "run without a sandbox."
        )
    if (
        rule.action == "deny"
        or rule.pattern == READ_ONLY_VARIABLE
        or "*" in declared
        or not _RUNS_OTHERS.isdisjoint(declared)
    ):
        return None
    if any(word in declared for word in (*command_wrappers.WRAPPER_NAMES, "uv", "npx")):
        return None
    first = split_pattern(rule.pattern)[0]
    if has_wildcard(first) or first in declared:
        return None
    return f"{spec.id} never runs {first!r}. Its programs: {', '.join(sorted(declared)) or 'none'}."


_PROBES: tuple[tuple[str, ...], ...] = (
    *(("x",), ("x", "y"), ("x.py",), ("run", "x"), ("list",), ("status",), ("build", "x"), ("./x/y", "z")),
    *(("-x",), ("--version",), ("-k", "x"), ("--help",), ("x", "-v")),
)
"""Further words of a command that an allow rule may match."""
_MOST_PROBES = 200


def _fault_in_program(rule: Rule) -> str | None:
    """Return why no command has the program of a rule about commands, or None.

    A rule from an answer may name such a program, because a call may try to run it.
    """
    if rule.permission not in ("bash", "shell.run") or not rule.pattern:
        return None
    first = split_pattern(rule.pattern)[0]
    program = extract_literal_prefix(first)
    if first[0] == "-":
        return f"Invalid rule {rule.text!r}: {first!r} is an option. Begin the pattern with the name of a program, or with '*'."
    if has_wildcard(first) or " " not in program or "/" in program:
        return None
    return f"Invalid rule {rule.text!r}: no program is called {program!r}. Write its words without the quotes: {program!r}."


def _fault_in_allowed_command(rule: Rule) -> str | None:
    """Return why every command that an allow rule matches requires approval nevertheless, or None.

    The commands are examples. If none of them runs, the program requires that a rule names its words.
    """
    if rule.action != "allow" or rule.permission not in ("bash", "shell.run") or not rule.pattern:
        return None
    if rule.pattern in (READ_ONLY_VARIABLE, CONFINED_VARIABLE):
        return None
    words = split_pattern(rule.pattern)
    pattern, reason = ArgvPattern(words, allowing=True), ""
    if pattern.program is None:
        return None
    for argv in islice(_example_commands(words), _MOST_PROBES):
        if not pattern.matches(argv):
            continue
        reason = _explain_required_approval(argv, pattern.literal_words)
        if not reason:
            return None
    if not reason:
        return None
    return f"Invalid rule {rule.text!r}: it applies to no call. {reason}. {_propose_command(rule, words)}"


def _example_commands(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield commands that a pattern of these words may match."""
    open_end = words[-1] in ("*", "-*", ANY_ARGUMENTS)
    fixed = words[:-1] if open_end else words
    for filler in ("x", "", "a.py", "xx"):
        start = tuple(_fill(word, filler) for word in fixed)
        yield from ((*start, *tail) for tail in (_PROBES if open_end else ((),)))


def _fill(word: str, filler: str) -> str:
    """Return a text that a word of a pattern matches, with ``filler`` for its wildcards."""
    return extract_literal_prefix(word) if not has_wildcard(word) else re.sub(r"\[.[^\]]*\]|[*?\[]", filler, word)


def _explain_required_approval(argv: tuple[str, ...], literal: frozenset[int]) -> str:
    """Return why a command requires approval although a rule matches it; empty if it does not."""
    if literal >= frozenset(range(len(argv))):
        return ""
    if command_wrappers.find_wrapped_command_start(argv) is not None:
        return f"A rule about {argv[0]!r} is compared with the command that it runs"
    risk = program_risks.find_hidden_program_risk(argv)
    if risk is None or risk.words <= literal:
        return ""
    return f"A call always requires approval, because {risk.reason}"


def _propose_command(rule: Rule, words: Sequence[str]) -> str:
    """Return what to write instead of a rule that matches no call."""
    confined = f"'allow {rule.permission} {CONFINED_VARIABLE}' for every call that stays confined"
    if words[0] in command_wrappers.ENVIRONMENT_MANAGERS and words[1:2] in (("run",), ("exec",)):
        return f"Name the program, as in 'allow {rule.permission} {words[0]} {words[1]} pytest {ANY_ARGUMENTS}', or write {confined}."
    if words[0] in command_wrappers.WRAPPER_NAMES:
        start = command_wrappers.find_wrapped_command_start(words)
        command = f"make {ANY_ARGUMENTS}" if start is None or has_wildcard(words[start]) else " ".join(words[start:])
        return f"Write a rule about that command alone, as in 'allow {rule.permission} {command}', or {confined}."
    return f"Write every word of the command, or {confined}."


def _fault_in_arguments(rule: Rule, spec: ToolSpec) -> str | None:
    try:
        words = split_pattern(rule.pattern)
    except PatternSyntaxError as fault:
        return str(fault)
    properties = extract_property_schemas(spec.parameters)
    if spec.mode == "stateful":
        properties = {**properties, STEP_INPUT: spec.step_parameters or {}}
    words = tuple("*" if word == ANY_ARGUMENTS else word for word in words)
    for word in words:
        if word != "*" and (fault := _fault_in_argument(word, spec, properties)) is not None:
            return fault
    named = {word.partition("=")[0] for word in words}
    required: Any = spec.parameters.get("required", ())
    missing = [name for name in cast("Iterable[str]", required) if name not in named]
    if rule.action == "allow" and "*" not in words and missing:
        return (
            f"{spec.id} also needs {', '.join(missing)}, but an allow rule names all arguments of a call. "
            "Name these too, or end the rule with ' *'."
        )
    return None


def _fault_in_argument(word: str, spec: ToolSpec, properties: Mapping[str, Any]) -> str | None:
    """Return why no argument of a tool with these properties matches a word of a pattern, or None."""
    name, sign, value = word.partition("=")
    if not sign:
        if has_wildcard(word):
            return f"{word!r} is not of the form name=value."
        known = ", ".join(f"{name}=…" for name in properties)
        return f"{word!r} is not of the form name=value. Arguments of {spec.id}: {known or 'none'}."
    if name in properties:
        return _fault_in_value(name, value, properties[name])
    if _may_allow_other_parameters(spec.parameters):
        return None
    near = nearest_names(name, properties, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Its parameters: {', '.join(properties) or 'none'}."
    return f"{spec.id} has no parameter {name!r}. {hint}"


def _may_allow_other_parameters(parameters: Mapping[str, Any]) -> bool:
    """Return whether a schema may allow parameters besides its own properties."""
    return parameters.get("additionalProperties", False) is not False or not _ALLOW_OTHERS.isdisjoint(parameters)


_ALLOW_OTHERS = frozenset({"unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"})


def _fault_in_value(name: str, pattern: str, schema: Mapping[str, Any]) -> str | None:
    """Return why no valid value matches ``pattern``, if the schema states that plainly, or None."""
    if "enum" in schema or "const" in schema:
        values: Any = schema.get("enum", [schema.get("const")])
        texts = [_text(value) for value in cast("Iterable[object]", values)]
        if not any(compile_text_glob(pattern).match(text) for text in texts):
            near = nearest_names(pattern, texts, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"{pattern!r} matches no value of {name}. Its values: {', '.join(texts)}.{hint}"
    declared = schema.get("type")
    if has_wildcard(pattern):
        return None
    if declared == "boolean" and pattern not in ("true", "false"):
        return f"{pattern!r} matches no value of {name}. Write true or false."
    if declared == "integer" and not re.fullmatch(r"-?\d+(?:\.0+)?(?:[eE][+-]?\d+)?", pattern):
        return f"{pattern!r} matches no value of {name}. Write an integer."
    if declared == "number" and not re.fullmatch(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|-?Infinity|NaN", pattern):
        return f"{pattern!r} matches no value of {name}. Write a number."
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def validate_rule_and_examples(
    rule: Rule, match: Sequence[RuleExample], not_match: Sequence[RuleExample], specs: Mapping[str, ToolSpec] | None
) -> None:
    """Check one rule by itself, and against the available tools.

    :raises ValueError: if the rule can match none of their calls, or fails one of its examples
    """
    problem = (
        _fault_in_program(rule)
        or _fault_in_allowed_command(rule)
        or (explain_rule_matches_no_tool(rule, specs) if specs is not None else None)
    )
    if not problem and (match or not_match):
        problem = find_failing_example(rule, match, not_match, specs)
    if problem:
        raise ValueError(problem)


def explain_inaccessible_rule_path(rule: Rule, layer: CapabilityLayer) -> str | None:
    """Return why no call can access the absolute path of a rule, or None.

    :param layer: what the agent and all of its tools may access
    """
    if rule.permission not in ("fs.read", "fs.write", "fs.*") or rule.pattern[:1] != "/":
        return None
    start = extract_literal_prefix(normalize_path_pattern(rule.pattern))
    folders = dict.fromkeys((*layer.fs_read, *layer.fs_write))
    tops = [extract_literal_prefix(folder).rstrip("/") for folder in folders]
    if any(top.startswith(start) or f"{start}/".startswith(f"{top}/") for top in tops):
        return None
    return (
        f"Invalid rule {rule.text!r}: no call can access this path, because it is outside all folders of the session. Remove the rule, "
        "or add the folder to [[roots]] in the agent's manifest."
    )


def iterate_missing_tool_warnings(
    rules: Iterable[Rule], tool_ids: Collection[str], servers: Collection[str]
) -> Iterator[str]:
    """Yield a warning for each rule about a server or a glob that names no tool now. Tools and servers may come later.

    :param servers: the names of the configured MCP servers
    """
    for rule in rules:
        permission = rule.permission
        if permission.startswith("mcp:"):
            name, known, what = permission.split(":")[1], servers, "an MCP server that is configured"
        elif is_glob(permission) and permission != "*" and not is_capability_glob(permission):
            name, known, what = permission, tool_ids, "any tool"
        else:
            continue
        if any(compile_text_glob(name).match(one) for one in known):
            continue
        literal = name.rstrip("*?.")
        near = nearest_names(literal, {*known, *(one.partition(".")[0] for one in known)}, 1)
        hint = f" Did you mean {permission.replace(literal, near[0], 1)!r}?" if literal and near else ""
        yield f"The rule {rule.text!r} matches no call now: {name!r} does not name {what}.{hint}"


# Checks of rules against each other.


def find_contradictions(rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """Return ``(index, problem)`` for each rule that contradicts an earlier one about the same subject.

    :param rules: the rules of one source and scope
    """
    seen: dict[tuple[str, str], Rule] = {}
    found: list[tuple[int, str]] = []
    for index, rule in enumerate(rules):
        earlier = seen.setdefault((rule.permission, _normalize_pattern(rule)), rule)
        if earlier.action != rule.action:
            found.append((index, f"The rule {rule.text!r} contradicts {earlier.text!r}. Keep one of them."))
    return found


def find_shadowed_rules(rules: Sequence[Rule]) -> list[tuple[int, str]]:
    """Return ``(index, problem)`` for each rule that a final deny of the same source makes useless."""
    final = [rule for rule in rules if rule.is_final]
    found: list[tuple[int, str]] = []
    for index, rule in enumerate(rules):
        over = next(
            (deny for deny in final if deny is not rule and rule.action != "deny" and _deny_covers_rule(deny, rule)),
            None,
        )
        if over is not None:
            found.append(
                (
                    index,
                    f"The rule {rule.text!r} never applies: {over.text!r} is final in this scope and covers it. Remove one of them.",
                )
            )
    return found


def _deny_covers_rule(deny: Rule, rule: Rule) -> bool:
    """Return whether ``deny`` certainly matches every call that ``rule`` matches."""
    if deny.pattern and _normalize_pattern(deny) != _normalize_pattern(rule):
        return False
    if deny.permission == rule.permission:
        return True
    if rule.permission in CAPABILITIES or is_capability_glob(rule.permission):
        return (
            is_capability_glob(deny.permission)
            and compile_text_glob(deny.permission).match(rule.permission) is not None
        )
    if (
        rule.governed_side_effect
        or deny.governed_side_effect
        or rule.permission.startswith("mcp:")
        or deny.permission in CAPABILITIES
    ):
        return False
    if deny.permission == "*":
        return not deny.pattern
    return (
        not is_glob(rule.permission)
        and is_glob(deny.permission)
        and compile_text_glob(deny.permission).match(rule.permission) is not None
    )


def _normalize_pattern(rule: Rule) -> str:
    """Return one spelling for patterns with the same meaning."""
    if rule.permission in ("fs.read", "fs.write", "fs.*"):
        return normalize_path_pattern(rule.pattern) if rule.pattern else ""
    if rule.permission in ("bash", "shell.run"):
        try:
            return "\0".join(split_pattern(rule.pattern))
        except PatternSyntaxError:
            return rule.pattern
    return rule.pattern.lower() if rule.permission == "net.fetch" else rule.pattern


# Checks of a rule against its own examples.


def find_failing_example(
    rule: Rule, match: Iterable[RuleExample], not_match: Iterable[RuleExample], specs: Mapping[str, ToolSpec] | None
) -> str | None:
    """Return the first example that fails, and what matched; None if all examples pass.

    :param specs: the available tools; None if unknown, so that only rules about capabilities and ``bash`` are tested
    """
    kinds = _subject_kinds(rule, specs)
    if kinds is None:
        return None
    tests = [compile_ranked_rule(rule, kind) for kind in kinds]
    for examples, wanted, place in ((match, True, "match"), (not_match, False, "not_match")):
        for example in examples:
            problems = [_explain_example_mismatch(test, kind, example) for test, kind in zip(tests, kinds, strict=True)]
            if wanted and all(problems):
                return f"The rule {rule.text!r} does not match its example {_format_example(example)} of {place}: {problems[0]}."
            if not wanted and not all(problems):
                pattern = f"the pattern {rule.pattern!r}" if rule.pattern else "a rule without a pattern"
                return (
                    f"The rule {rule.text!r} matches its example {_format_example(example)} of {place}: "
                    f"{pattern} matches {_describe_match(rule, example)}. Change the rule or the example."
                )
    return None


def _subject_kinds(rule: Rule, specs: Mapping[str, ToolSpec] | None) -> tuple[SubjectKind, ...] | None:
    permission = rule.permission
    if permission in CAPABILITIES:
        return (SUBJECT_KINDS[permission],)
    if is_capability_glob(permission):
        return tuple(
            dict.fromkeys(SUBJECT_KINDS[c] for c in CAPABILITIES if compile_text_glob(permission).match(cast("str", c)))
        )
    if specs is None:
        return ("command",) if permission == "bash" else None
    about: tuple[SubjectKind, ...] = tuple(
        dict.fromkeys(
            get_rule_subject_kind(spec)
            for tool_id, spec in specs.items()
            if _permission_names_tool(permission, tool_id)
        )
    )
    return about or None


def _explain_example_mismatch(test: RankedRule, kind: SubjectKind, example: RuleExample) -> str | None:
    """Return why ``example`` does not match, or None if it matches."""
    match kind:
        case "command":
            return _find_command_mismatch(test, example)
        case "path":
            if not isinstance(example, str):
                return "write the example of a path as text"
            path = normalize_path_pattern(example)
            relative = None if path[:1] == "/" else "." if path == "**" else path
            return None if test.matches(PathSubject(path, relative)) else "the pattern does not match this path"
        case "host":
            if not isinstance(example, str):
                return "write the example of a host as text"
            try:
                return None if test.matches(extract_host_and_port(example)) else "the pattern does not match this host"
            except ToolError as error:
                return error.text.rstrip(".")
        case "arguments":
            if not isinstance(example, Mapping):
                return 'write the example of a call as its arguments by name, as in { source = "a" }'
            return None if test.matches(example) else "the pattern does not match these arguments"


def _find_command_mismatch(test: RankedRule, example: RuleExample) -> str | None:
    if isinstance(example, Mapping):
        return "write the example of a command as text, or as a list of words"
    if not isinstance(example, str):
        argvs = [tuple(example)]
    else:
        script: ShellScript = parse_script(example)
        if script.unclear is not None:
            return script.unclear
        argvs = [command.argv for command in script.commands]
    for argv in argvs:
        if not argv or not _rule_matches_command(test, tuple(argv)):
            return _why_not(test, argv)
    return None


def _rule_matches_command(test: RankedRule, argv: tuple[str, ...]) -> bool:
    """Return whether a rule applies to a command, in any of the ways in which calls are compared with it."""
    if test.matches(argv):
        allows_reading = test.rule.pattern == READ_ONLY_VARIABLE and test.rule.action == "allow"
        return not allows_reading or read_only_proof.explain_git_shows_stored_files(argv) is None
    if test.argv is None:
        return False
    if test.rule.action == "allow":
        return test.matches(program_risks.normalize_argv(argv))
    watched = nested_commands.WatchedPrograms((test.argv.program_prefix,))
    return any(
        reading.certain and test.matches(reading.argv)
        for reading in nested_commands.find_possible_commands(argv, watched)
    )


def _why_not(test: RankedRule, argv: Sequence[str]) -> str:
    if test.rule.pattern == READ_ONLY_VARIABLE:
        return (
            read_only_proof.explain_command_not_read_only(argv)
            or read_only_proof.explain_git_shows_stored_files(argv)
            or "the command is proved read-only"
        )
    option = next((word for word in argv[1:] if word[:1] == "-"), None)
    if test.rule.action == "allow" and option is not None and "*" in test.rule.pattern:
        return f"in an allow rule, a wildcard never matches a word that begins with '-', such as {option!r}"
    return "the pattern does not match these words"


def _describe_match(rule: Rule, example: RuleExample) -> str:
    if isinstance(example, str) and rule.permission in ("bash", "shell.run"):
        script = parse_script(example)
        return " and ".join(repr(" ".join(command.argv)) for command in script.commands)
    return _format_example(example)


def _format_example(example: RuleExample) -> str:
    return repr(example if isinstance(example, (str, Mapping)) else list(example))


def extract_tool_specs(entries: Mapping[str, Any]) -> dict[str, ToolSpec]:
    """Return the specs of a generation's entries, by id."""
    return {tool_id: entry.spec for tool_id, entry in entries.items()}


# The rules of an agent manifest: their scope is *manifest*, so a deny among them is final.


def parse_agent_rules(
    agent: AgentManifest,
    source: str,
    known: Collection[str] | None,
    others: Collection[str] = (),
    specs: Mapping[str, ToolSpec] | None = None,
) -> tuple[list[Rule], list[tuple[str, str]]]:
    """Parse the rules of an agent manifest.

    :param source: the manifest's file
    :param known: the ids of the agent's tools; None if unknown
    :param others: the ids of tools that other agents may have and this one has not
    :param specs: the agent's tools; None if unknown
    :returns: the valid rules, and ``(place, problem)`` for each text that is invalid or can never match
    """
    rules: list[Rule] = []
    faults: list[tuple[str, str]] = []
    places: list[int] = []
    for index, given in enumerate(agent.rules):
        entry = to_rule_with_examples(given)
        text = entry.rule
        try:
            if resolve_rule_set_reference(text) is not None:
                chosen = parse_entry(text, scope="manifest", source=source, known=known)
                rules += chosen
                places += [index] * len(chosen)
                continue
            rule = parse_rule(text, scope="manifest", source=source, known=known)
            if known is not None:
                _check_glob_matches_a_tool(rule, known)
            validate_rule_and_examples(rule, entry.match, entry.not_match, specs)
        except ValueError as error:
            faults.append((f"rules[{index}]", _explain_in_agent_names(text, agent, others, str(error))))
        else:
            rules.append(rule)
            places.append(index)
    for at, problem in (*find_contradictions(rules), *find_shadowed_rules(rules)):
        faults.append((f"rules[{places[at]}]", problem))
    return rules, faults


def _check_glob_matches_a_tool(rule: Rule, known: Collection[str]) -> None:
    """Check that a glob over ids matches some tool of the agent.

    :raises ValueError: if it matches none
    """
    permission = rule.permission
    if permission == "*" or permission.startswith("mcp:") or not is_glob(permission) or is_capability_glob(permission):
        return
    pattern = compile_text_glob(permission)
    if not any(pattern.match(tool_id) for tool_id in known):
        raise ValueError(f"Invalid rule {rule.text!r}: {permission!r} matches none of this agent's tools.")


def _explain_in_agent_names(text: str, agent: AgentManifest, others: Collection[str], problem: str) -> str:
    """Return the problem with a rule, in terms of the agent's own names if they explain it."""
    words = text.split(None, 2)
    permission = words[1] if len(words) > 1 else ""
    if permission in agent.aliases:
        return f"Invalid rule {text!r}: {permission!r} is an alias. Write the tool's id: {agent.aliases[permission]!r}."
    if permission in others:
        return f"Invalid rule {text!r}: {permission!r} is not among this agent's tools, so the rule would never match."
    return problem
