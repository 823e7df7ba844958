"""Rules that never match, contradict each other or fail their examples are reported when they are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.policy.desk import ALL, BASH

from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.tool.requires import Requires, ShellRequires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_targets import get_rule_subject_kind
from handrail.policy.rules.matchers import PathSubject, compile_ranked_rule
from handrail.policy.rules.rules_and_modes import Rule, parse_rule
from handrail.policy.rules.validation import (
    explain_rule_matches_no_tool,
    find_contradictions,
    find_failing_example,
    find_shadowed_rules,
    parse_agent_rules,
    validate_rule_and_examples,
)

pytestmark = pytest.mark.proves("P-04")

PAY = ToolSpec(
    "pay",
    "Pay.",
    {
        "type": "object",
        "properties": {
            "to": {"enum": ["alice", "bob"]},
            "amount": {"type": "integer"},
            "urgent": {"type": "boolean"},
            "note": {"type": "string"},
        },
        "required": ["to", "amount"],
        "additionalProperties": False,
    },
)
CARGO = ToolSpec(
    "cargo",
    "Build.",
    {"type": "object", "properties": {"argv": {"type": "array", "format": "command"}}},
    Requires(shell=(ShellRequires(cmd="cargo"), ShellRequires(cmd="rustc"))),
    targets={"shell.run": "{argv}"},
)
SPECS = {spec.id: spec for spec in (*ALL, PAY, CARGO)} | {"bash": replace(BASH, single_command=True)}


def rule(text: str, scope: Any = "session") -> Rule:
    return parse_rule(text, scope=scope, known=SPECS)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("deny net.fetch https://example.org", "not a host pattern"),
        ("deny net.fetch /etc/passwd", "not a host pattern"),
        ("deny web_fetch /etc/**", "not a host pattern"),
        ("allow fs.read ../x", "contains '..'"),
        ("allow write ../x", "contains '..'"),
        ("deny fs.read https://example.org/x", "is a URL"),
        ("allow write ~/x", "Write the path: "),
        ("allow fs.write ~root/x", "does not expand"),
        ("allow fs.write $DATA/x", "does not expand"),
        ("allow fs.write src/${DATA}/x", "does not expand"),
        (r"allow fs.write src\**", "escapes nothing"),
        ("allow bash $HOME/bin/tool", "a shell expands"),
        ("allow bash ls ~", "a shell expands"),
        ("deny bash git {push,pull}", "a shell expands"),
        ("allow bash pytest … -q", "the last word after a program"),
        ("allow bash ...", "the last word after a program"),
        ("allow bash for *", "a word of the shell"),
        ("allow bash npx *", "every word of the command"),
        ("allow shell.run npx …", "every word of the command"),
        ("allow bash sudo *", "runs the command that its arguments name"),
        ("allow bash python -c *", "code given on the command line"),
        ("allow bash bash -c …", "code given on the command line"),
        ("allow bash uv run *", "uv run pytest …"),
        ("allow bash npm exec *", "every word of the command"),
        ("allow bash timeout 5 make *", "about that command alone"),
        ("allow bash find . -exec *", "runs a program on each file"),
        ("allow bash git -c *", "every word of the command"),
        ("allow Bash(git diff:*)", "Write 'allow bash git diff …'"),
        ("allow Read(~/notes/**)", "Write 'allow fs.read ~/notes/**'"),
        ("deny WebFetch(domain:x.org)", "Write 'deny net.fetch x.org'"),
        ("allow bash git:*", "Write 'git …'"),
        ("deny bash git push:*", "Write 'git push …'"),
        ("allow bash make test; make lint", "one simple command"),
        ("deny bash git push|pull", "one simple command"),
        ("deny bash make& ls", "one simple command"),
        ("allow bash FOO=1 pytest …", "Write 'pytest …'"),
        ("deny bash command=ls", "Write 'ls'"),
        ("allow bash -*", "is an option"),
        ("allow bash confined", "Write the variable with its braces: '{confined}'"),
        ("deny bash confined …", "For a program of that name, write \"'confined'\""),
        ("deny bash if …", "For a program of that name, write \"'if'\""),
        ("allow bash readonly", "'{read-only}'"),
        ("allow bash 'git status'", "without the quotes: 'git status'"),
        ("deny bash ^git push$", "not a regular expression"),
        ("allow bash timeout 60 pytest …", "as in 'allow bash pytest …'"),
        ("allow write 'my docs/**'", "Write 'my docs/**'"),
        ('deny fs.read "my docs"/a', "Write 'my docs/a'"),
        (r"deny fs.read my\ docs/**", "Write 'my docs/**'"),
        (r"deny fs.write src\a.py", "Write 'src/a.py'"),
        (r"deny fs.write C:\a.py", "relative to the workspace"),
        ("deny fs.write !src/a.py", "no negation"),
        ("deny fs.write ^src/.*", "not a regular expression"),
        ("allow fs.write {src,docs}/**", "one rule for each path"),
        ("allow write src/**, docs/**", "one rule for each path"),
        ("allow write src/** docs/**", "one rule for each path"),
        ("deny fs.write src/a, b", "in brackets, such as [,]"),
        ("deny fs.write src/a,src/b", "one rule for each path"),
        ("deny fs.read .env,.npmrc", "one rule for each path"),
        ("deny fs.read .env .npmrc", "one rule for each path"),
        ("deny fs.read .env; .npmrc", "one rule for each path"),
        ("deny write a.py|b.py", "one rule for each path"),
        ("deny write path=src/**", "Write 'deny write src/**'"),
        ("allow web_fetch url=https://x.org/", "Write 'x.org'"),
        ("allow net.fetch *example.org", "Write '*.example.org'"),
        ("allow net.fetch .example.org", "Write '*.example.org'"),
        ("deny net.fetch **.example.org", "Write '*.example.org'"),
        ("allow net.fetch 'x.org'", "Write 'x.org'"),
        ("allow net.fetch domain:x.org", "Write 'x.org'"),
        ("allow net.fetch ::1", "Write '[::1]'"),
        ("allow net.fetch münchen.example", "Write 'xn--mnchen-3ya.example'"),
        ("allow net.fetch x.org, y.org", "one rule for each host"),
        ("allow net.fetch 10.0.0.0/8", "not a host pattern"),
        ("allow git status", "write 'allow bash git status'"),
        ("deny net x.org", "Capabilities are fs.read"),
        ("bash git status", "Write 'allow bash git status'"),
        ("allow mcp__github__issue", "Write 'mcp:github:issue'"),
        ("allow write {confined}", "only for tools whose calls just run a command"),
        ("allow net.fetch https://pypi.org/simple", "Write 'pypi.org'"),
        ("allow fs.write {workspcae}/src", "Did you mean '{workspace}'"),
        ("allow fs.write {user-data}/src", "unknown variable {user-data}"),
        ("allow write src/{workspace}", "only part of a name"),
        ("allow bash git status && ls", "one simple command"),
        ("allow bash cat a | head", "one simple command"),
        ("allow bash ls > out", "rules of fs.read and fs.write"),
        ("allow bash ls 2>&1", "one simple command"),
        ("allow bash {readonly}", "have {read-only}, for commands"),
        ("allow bash {confined} ls", "whole pattern"),
        ("deny bash {confined}", "only allow rules have {confined}"),
        ("allow bash ''", "the name of a program"),
        ("deny bash git 'push", "not closed"),
        ("allow fs.write src/[z-a]", "runs backwards"),
        ("deny effect:writes", "Did you mean 'effect:write'"),
        ("deny effect:write src", "takes no pattern"),
        ("alow bash", "Did you mean 'allow'"),
        ("allow wriet", "Did you mean 'write'"),
        ("allow pay alice", "not of the form name=value"),
        ("allow pay target=alice *", "has no parameter 'target'"),
        ("deny pay too=alice", "Did you mean 'to'"),
        ("deny pay to=alise", "Did you mean 'alice'"),
        ("deny pay amount=much", "an integer"),
        ("deny pay urgent=yes", "true or false"),
        ("allow pay to=alice", "also needs amount"),
        ("allow cargo git status", "never runs 'git'"),
    ],
)
def test_a_rule_that_can_never_match_is_refused_with_the_reason(text: str, named: str) -> None:
    with pytest.raises(ValueError) as refused:
        validate_rule_and_examples(rule(text), (), (), SPECS)
    assert named in str(refused.value)
    assert text.split()[-1].replace("\\", "\\\\") in str(refused.value) or "''" in text


@pytest.mark.parametrize(
    "text",
    [
        "allow pay to=alice *",
        "allow pay to=alice amount=5",
        "deny pay to=al*",
        "deny pay amount=5*",
        "allow cargo cargo test *",
        "deny cargo git *",
        "allow bash echo '|' '&&' a",
        "allow bash find . -exec grep x '{}' ';'",
        "allow write a - b/c",
        "deny * pay",
        "deny bank.* source=eve",
        "allow fs.write {workspace}/src/**",
        "allow fs.read [{]x}/**",
        "allow bash {read-only}",
        "deny fs.read **",
        "allow bash pytest …",
        "allow bash pytest ...",
        "allow bash npx prettier --check .",
        "allow bash uv run pytest …",
        "allow bash npm run *",
        "allow bash python *",
        "allow bash git …",
        "allow bash echo '...'",
        "allow bash {confined}",
        "allow fs.write src/A$B.class",
        "allow fs.write my docs/a[,] b.txt",
        "deny fs.write src/a,b",
        "deny fs.write src/[a|b, ].py",
        "deny bash 'confined' …",
        "deny bash 'if' …",
        "deny bash readonly x",
        "allow fs.write ./!a",
        "deny fs.write it's *.txt",
        r"deny fs.write a[\]b",
        "deny fs.write *,v",
        "allow bash npm run test:*",
        "allow bash 'my tools/run' …",
        "deny bash curl 'a;b'",
        "allow bash git commit -m 'a; b'",
        "allow bash pip install x>=2",
        "deny bash timeout *",
    ],
)
def test_a_rule_that_can_match_is_accepted(text: str) -> None:
    validate_rule_and_examples(rule(text), (), (), SPECS)


_WORDS = st.sampled_from(["git", "a", "src", "**", "*", "a=b", "to=alice", "amount=5", "x.org", "..", "~", "|", "'|'", "{x}",
                          "https://x.org", "-rf", "urgent=maybe", "note=*", "/etc", "[z]", "note", "''"])  # fmt: skip
_ARGUMENTS = st.fixed_dictionaries(
    {"to": st.sampled_from(["alice", "bob"]), "amount": st.integers(0, 9)},
    optional={"urgent": st.booleans(), "note": st.sampled_from(["x", "a=b", ""])},
)


@given(
    st.sampled_from(["allow", "deny", "ask"]),
    st.sampled_from(["pay", "write", "web_fetch", "cargo"]),
    st.lists(_WORDS, min_size=1, max_size=3),
    _ARGUMENTS,
    st.lists(st.sampled_from(["cargo", "rustc", "test", "a", "*", "-rf", "|"]), min_size=1, max_size=3),
    st.sampled_from(["a", "src/a", "x.org", "git a", "src **"]),
)
@example("ask", "cargo", ["-rf", "-rf"], {"to": "alice", "amount": 0}, ["cargo"], "a")
def test_a_refused_rule_matches_no_call(
    action: str, tool: str, words: list[str], arguments: dict[str, Any], argv: list[str], path: str
) -> None:
    """For all arguments that the capability check allows."""
    text = f"{action} {tool} {' '.join(words)}"
    try:
        made = parse_rule(text, scope="session", known=SPECS)
    except ValueError:
        return
    if explain_rule_matches_no_tool(made, SPECS) is None or ("'" not in text and "|" in words):
        return
    kind = get_rule_subject_kind(SPECS[tool])
    test = compile_ranked_rule(made, kind)
    if action == "deny" and kind in ("path", "host", "arguments"):
        return  # one that makes no sense denies everything, which is why it is refused rather than kept
    subject: Any = {"arguments": arguments, "path": PathSubject(f"/ws/{path}", path), "host": "x.org", "command": argv}[
        kind
    ]
    if kind == "command" and argv[0] not in ("cargo", "rustc"):
        return
    assert not test.matches(subject), text


def test_rules_with_different_actions_for_the_same_pattern_contradict_each_other() -> None:
    rules = [
        rule(text)
        for text in ("allow bash git  status", "deny bash git status", "allow fs.write ./src/", "ask fs.write src")
    ]
    assert [at for at, _ in find_contradictions(rules)] == [1, 3]
    assert "contradicts 'allow bash git  status'" in find_contradictions(rules)[0][1]
    assert not find_contradictions(
        [rule("allow bash git *"), rule("deny bash git push *"), rule("ask write"), rule("ask write")]
    )


def test_a_rule_shadowed_by_a_final_deny_is_reported() -> None:
    manifest = [
        rule(text, "manifest")
        for text in ("deny bash", "allow bash git status", "deny fs.write src", "ask fs.write src/")
    ]
    assert [at for at, _ in find_shadowed_rules(manifest)] == [1, 3]
    assert "'deny bash' is final" in find_shadowed_rules(manifest)[0][1]
    assert not find_shadowed_rules([rule("deny bash"), rule("allow bash git status")]), "of a session no deny is final"
    assert not find_shadowed_rules([rule("deny bash git *", "manifest"), rule("allow bash", "manifest")])


def test_a_manifest_check_reports_all_faulty_rules() -> None:
    agent = AgentManifest(
        rules=(
            "deny bash",
            "allow bash git status",
            "allow pay to=eve *",
            {"rule": "allow shell.run git *", "match": ["git push", "git push -f"]},  # pyright: ignore[reportArgumentType]
        )
    )
    _, faults = parse_agent_rules(agent, "agent.toml", SPECS, (), SPECS)
    assert sorted(place for place, _ in faults) == ["rules[1]", "rules[2]", "rules[3]"]


@pytest.mark.parametrize(
    ("text", "match", "not_match", "named"),
    [
        ("allow bash git diff *", ["git diff src"], ["git diff --output=f", "git push"], None),
        ("allow bash git diff *", ["git diff --stat"], [], "'--stat'"),
        ("allow bash git diff *", [], ["git diff a"], "'git diff a'"),
        ("allow bash git *", ["git status && git log"], ["git status && ls", "echo $(git x)", "git $x"], None),
        ("allow bash git *", ["ls; git status"], [], "the pattern does not match these words"),
        ("allow bash git *", ["git $x"], [], "the pattern does not match these words"),
        ("allow bash git *", [["git", "a b"]], [["ls"]], None),
        ("allow bash {read-only}", ["git status"], ["touch x"], None),
        ("allow bash {read-only}", ["touch x"], [], "touch may change something"),
        ("allow bash {read-only}", ["git diff --stat"], ["git diff"], None),
        ("allow bash {read-only}", ["git show HEAD:a"], [], "can show hidden files"),
        ("allow bash git status", ["/usr/bin/git --no-pager status"], ["./git status", "git -C x status"], None),
        (
            "deny bash git push *",
            ["/usr/bin/git push", "git -C x push", "sudo git push"],
            ["git log push", "someprog git push"],
            None,
        ),
        ("ask bash rm -rf *", ["rm x -f -r", "sh -c 'rm -fr x'"], ["rm -r x"], None),
        ("deny bash git push *", [], ["sh -c 'git push'"], "git push"),
        ("allow fs.write src/**", ["src/a.py", "./src/b/c"], ["docs/a", "/etc/x"], None),
        ("allow fs.write src/*.py", ["src/a/b.py"], [], "does not match this path"),
        ("deny net.fetch *.example.org", ["api.example.org", "https://a.example.org/x"], ["example.org"], None),
        ("allow pay to=alice *", [{"to": "alice", "amount": 5}], [{"to": "bob", "amount": 5}], None),
        ("allow pay to=alice *", [{"to": "bob", "amount": 5}], [], "the pattern does not match these arguments"),
        ("allow pay to=alice *", ["to=alice"], [], "arguments by name"),
    ],
)
def test_a_rule_whose_examples_fail_is_reported_with_the_example(
    text: str, match: list[Any], not_match: list[Any], named: str | None
) -> None:
    problem = find_failing_example(rule(text), match, not_match, SPECS)
    if named is None:
        assert problem is None
    else:
        assert problem is not None
        assert named in problem
        assert repr(text) in problem
