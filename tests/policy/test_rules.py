"""Rules as text, and which of several applies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import BASH, READ, TRANSFER, WRITE, AuthorizerFixture, book, rule

from handrail.policy.rules.matchers import PathSubject, RuleRanking
from handrail.policy.rules.pattern_faults import escape_as_path_pattern
from handrail.policy.rules.pattern_lexer import ArgvPattern, PatternSyntaxError, build_exact_argv_pattern, split_pattern
from handrail.policy.rules.rules_and_modes import Action, Rule, RuleBook, parse_rule


@pytest.mark.proves("P-02")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("allow bash git status", ("allow", "bash", "git status")),
        ("  deny   fs.write   secrets/my file ", ("deny", "fs.write", "secrets/my file")),
        ("ask *", ("ask", "*", "")),
        ("allow bank.transfer", ("allow", "bank.transfer", "")),
        ("allow bash *", ("allow", "bash", "*")),
        ("deny mcp:github:delete_*", ("deny", "mcp:github:delete_*", "")),
        ("deny mcp:*:*", ("deny", "mcp:*:*", "")),
        ("allow github_* x=1", ("allow", "github_*", "x=1")),
        ("allow net.fetch *.example.org", ("allow", "net.fetch", "*.example.org")),
        ("ask fs.*", ("ask", "fs.*", "")),
        ("allow bash git commit -m 'a b'", ("allow", "bash", "git commit -m 'a b'")),
    ],
)
def test_a_rule_consists_of_action_permission_and_pattern(text: str, expected: tuple[str, str, str]) -> None:
    parsed = parse_rule(text, scope="project", source="handrail.toml")
    assert (parsed.action, parsed.permission, parsed.pattern) == expected
    assert (parsed.scope, parsed.source) == ("project", "handrail.toml")
    assert parse_rule(parsed.text, scope="project", source="handrail.toml") == parsed


@pytest.mark.proves("P-02")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["allow bash git status"]),
        ("allow", ["ACTION PERMISSION"]),
        ("alow bash", ["'alow'", "'allow'"]),
        ("permit bash", ["'permit'", "allow, ask or deny"]),
        ("allow fs.wirte src", ["'fs.wirte'", "'fs.write'"]),
        ("allow shell.runn", ["'shell.run'"]),
        ("allow ba/sh", ["'ba/sh'"]),
        ("allow 1tool", ["'1tool'"]),
        ("allow mcp:x", ["mcp:SERVER:TOOL"]),
        ("allow mcp::x", ["mcp:SERVER:TOOL"]),
        ("allow bash git 'x", ["quote"]),
        ("allow fs.read ../x", [".."]),
        ("allow fs.read [z-a]", ["backwards"]),
        ("allow net.fetch https://x.org/", ["host"]),
        ("deny fs.read a\0b", ["NUL"]),
    ],
)
def test_a_faulty_rule_is_refused_with_the_word_and_the_expected_form(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_rule(text, scope="session")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.proves("P-02")
def test_a_permission_that_names_no_known_tool_is_refused() -> None:
    assert parse_rule("allow bash", scope="session", known=["bash", "read"]).permission == "bash"
    with pytest.raises(ValueError, match="Did you mean 'bash'"):
        parse_rule("allow bsh", scope="session", known=["bash", "read"])
    assert parse_rule("allow gone_*", scope="session", known=["bash"]).permission == "gone_*"


@given(st.text(max_size=60))
def test_parsing_a_rule_fails_only_with_a_value_error(text: str) -> None:
    for candidate in (text, f"allow bash {text}", f"deny fs.read {text}", f"ask {text}"):
        try:
            found = parse_rule(candidate, scope="session")
        except ValueError:
            continue
        assert parse_rule(found.text, scope="session") == found


@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=12), min_size=1, max_size=5))
def test_a_quoted_argv_is_a_pattern_that_matches_exactly_those_words(argv: list[str]) -> None:
    (ranked,) = RuleRanking([Rule("allow", "bash", build_exact_argv_pattern(argv))], "command").ranked
    assert ranked.argv is not None
    assert ranked.matches(argv)
    assert ranked.argv.literal_words == frozenset(range(len(argv)))
    assert not ranked.matches([*argv, "more"])
    assert not ranked.matches([*argv[:-1], argv[-1] + "x"])


@pytest.mark.proves("P-02")
@given(
    st.lists(
        st.sampled_from(["git", "*", "-x", "a*b", "a b", "'", "[x]", "?", "", "--", "-*"]), min_size=1, max_size=4
    ),
    st.lists(
        st.sampled_from(["git", "*", "-x", "a*b", "aab", "a b", "'", "x", "[x]", "?", "", "--", "-*"]), max_size=4
    ),
)
def test_a_stored_escaped_rule_matches_only_its_own_arguments(stored: list[str], argv: list[str]) -> None:
    if not stored[0]:  # no program has an empty name, so it is no rule either
        return
    (ranked,) = RuleRanking(
        [parse_rule(f"allow bash {build_exact_argv_pattern(stored)}", scope="session")], "command"
    ).ranked
    assert ranked.matches(argv) is (argv == stored)


def test_an_unclosed_quote_is_a_syntax_error() -> None:
    with pytest.raises(PatternSyntaxError):
        split_pattern("git 'x")


@pytest.mark.proves("P-02")
@pytest.mark.parametrize(
    ("pattern", "argv", "allowing", "denying"),
    [
        ("git status", "git status", True, True),
        ("git status", "git status -s", False, False),
        ("git status", "git", False, False),
        ("git diff *", "git diff", True, True),
        ("git diff *", "git diff a b c", True, True),
        ("git diff *", "git diff --output=f", False, True),
        ("git diff *", "git diff a --output=f", False, True),
        ("git *", "git -c a=b status", False, True),
        ("git log -*", "git log --oneline", True, True),
        ("git log -*", "git log --oneline -3", True, True),
        ("git log -*", "git log -3 HEAD", False, True),
        ("git log -*", "git log", False, False),
        ("git log -* *", "git log -3 HEAD", True, True),
        ("git log -* *", "git log -3 --all", False, True),
        ("git * status", "git x status", True, True),
        ("git * status", "git -p status", False, True),
        ("git * status", "git x y status", False, False),
        ("rm *", "rm -rf x", False, True),
        ("*", "ls", True, True),
        ("*", "ls -l", False, True),
        ("py*", "pytest", True, True),
        ("py*", "python x", False, False),
        ("make test-*", "make test-unit", True, True),
        ("echo '*'", "echo *", True, True),
        ("echo '*'", "echo a", False, False),
        ("echo [*]", "echo a", False, False),
        ("ls ?x", "ls -x", False, True),
        ("ls -?", "ls -x", True, True),
        ("cat */a", "cat x/y/a", True, True),
    ],
)
def test_a_command_pattern_is_compared_word_by_word(pattern: str, argv: str, allowing: bool, denying: bool) -> None:
    for action, expected in (("allow", allowing), ("ask", denying), ("deny", denying)):
        (ranked,) = RuleRanking([parse_rule(f"{action} bash {pattern}", scope="session")], "command").ranked
        assert ranked.matches(argv.split()) is expected, action


PRECEDENCE: list[tuple[list[str], str]] = [
    # (rules, answer for `git push origin` by bash)
    ([], "ask"),
    (["allow bash git *"], "allow"),
    (["allow bash git *", "deny bash git push *"], "deny"),
    (["deny bash git *", "allow bash git push *"], "allow"),
    (["deny bash git *", "allow bash git push origin"], "allow"),
    (["manifest: deny bash git *", "allow bash git push origin"], "deny"),
    (["mode: deny bash git *", "allow bash git push origin"], "deny"),
    (["project: deny bash git *", "allow bash git push origin"], "allow"),
    (["manifest: ask bash git *", "allow bash git push origin"], "allow"),
    (["manifest: allow bash git push origin", "deny bash git *"], "allow"),
    (["allow *", "deny b*"], "deny"),
    (["deny *", "allow b*"], "allow"),
    (["deny b* git push origin", "allow bash *"], "allow"),
    (["deny *", "allow bash"], "allow"),
    (["manifest: deny *", "allow bash"], "deny"),
    (["allow bash", "ask bash *"], "ask"),
    (["allow bash git push *", "ask bash git pus* origin"], "allow"),
    (["allow bash git p* origin", "ask bash git p*gin *"], "allow"),
    (["allow bash git push origin", "deny bash git push origin"], "deny"),
    (["allow bash git push origin", "ask bash git push origin"], "ask"),
    (["ask bash git *", "deny bash git *"], "deny"),
    (["session: allow bash git *", "project: deny bash git *"], "deny"),
    (["default: allow bash", "ask bash git *"], "ask"),
    (["default: deny bash git push origin", "allow bash"], "allow"),
    (["allow shell.run git *"], "allow"),
    (["allow shell.*"], "allow"),
    (["allow s*"], "ask"),
    (["allow bash git *", "deny shell.run git push *"], "deny"),
    (["allow bash git *", "ask shell.run"], "ask"),
    (["deny bash", "allow shell.run git push origin"], "deny"),
    (["ask bash", "allow shell.run"], "ask"),
    (["deny mcp:*:*"], "ask"),
    (["deny fs.write", "deny net.fetch", "allow bash"], "allow"),
]


@pytest.mark.proves("P-02", "P-03")
@pytest.mark.parametrize(("rules", "answer"), PRECEDENCE, ids=[" + ".join(rules) or "none" for rules, _ in PRECEDENCE])
def test_the_most_specific_rule_for_tool_and_capability_holds_and_the_stricter_decision_wins(
    desk: AuthorizerFixture, rules: list[str], answer: str
) -> None:
    assert desk.bash("git push origin", *rules).action == answer
    assert desk.bash("git push origin", *reversed(rules)).action == answer


ON_PATHS = [
    (["allow write"], "src/a.py", "allow"),
    (["allow write src/**"], "src/a.py", "allow"),
    (["allow write src"], "src/a.py", "allow"),
    (["allow write ./src/"], "src/a.py", "allow"),
    (["allow write src"], "src2/a.py", "ask"),
    (["allow write *.py"], "src/a.py", "ask"),
    (["allow write **/*.py"], "src/a.py", "allow"),
    (["allow write src/../src/a.py"], "src/a.py", "ask"),
    (["allow write src/**"], "src/../.env", "ask"),
    (["allow write src/**"], "way-out/passwd", "deny"),
    (["allow fs.write src/**"], "src/a.py", "allow"),
    (["allow fs.write", "deny fs.write src/**"], "src/a.py", "deny"),
    (["allow write src/a.py", "deny fs.write src/**"], "src/a.py", "deny"),
    (["allow fs.write src/a.py", "deny fs.write src/**"], "src/a.py", "allow"),
    (["allow fs.write src/a.py", "manifest: deny fs.write src/**"], "src/a.py", "deny"),
    (["allow fs.*", "deny fs.write **/.env"], ".env", "deny"),
    (["allow write *"], "deep/er/a", "allow"),
    (["deny write [z-a]"], "a", "deny"),
    (["allow write [z-a]"], "a", "ask"),
    (["allow write 'quoted'"], "quoted", "ask"),
    (["allow write my file.txt"], "my file.txt", "allow"),
    (["allow write a[*]b"], "a*b", "allow"),
    (["allow write a[*]b"], "axb", "ask"),
]


@pytest.mark.proves("P-02", "P-03")
@pytest.mark.parametrize(("rules", "path", "answer"), ON_PATHS)
def test_path_rules_match_against_the_canonical_path(
    desk: AuthorizerFixture, rules: list[str], path: str, answer: str
) -> None:
    assert desk.judge(WRITE, {"path": path}, *rules).action == answer


@pytest.mark.proves("P-02")
def test_an_absolute_pattern_matches_the_absolute_path_inside_and_outside_the_workspace(
    desk: AuthorizerFixture,
) -> None:
    assert desk.judge(WRITE, {"path": "src/a.py"}, f"allow write {desk.path('src')}/**").action == "allow"
    assert desk.judge(WRITE, {"path": "src/a.py"}, "allow write /src/**").action == "ask"
    assert desk.judge(READ, {"path": "/extra/a.py"}, "allow fs.read **").action == "ask"
    assert desk.judge(READ, {"path": "/extra/a.py"}, "allow fs.read /extra/**").action == "allow"
    assert (
        desk.judge(READ, {"path": "/extra/.env"}, "allow fs.read /extra/**", "deny fs.read **/.env").action == "allow"
    )
    assert desk.judge(READ, {"path": "/extra/.env"}, "allow read", "deny fs.read **/.env").action == "deny"


ON_ARGUMENTS = [
    (["allow bank.transfer"], "allow"),
    (["allow bank.transfer *"], "allow"),
    (["allow bank.* *"], "allow"),
    (["allow bank.transfer source=alice *"], "allow"),
    (["allow bank.transfer source=alice"], "ask"),
    (["allow bank.transfer source=alice target=bob amount=5"], "allow"),
    (["allow bank.transfer source=a* target='bob' amount=?"], "allow"),
    (["allow bank.transfer source=bob *"], "ask"),
    (["allow bank.transfer", "deny bank.transfer source=alice"], "deny"),
    (["allow bank.transfer", "deny bank.transfer other=1"], "allow"),
    (["allow bank.transfer source=alice *", "ask bank.transfer amount=5"], "allow"),
    (["allow bank.transfer nonsense"], "ask"),
    (["allow bank.transfer", "deny bank.transfer nonsense"], "deny"),
]


@pytest.mark.proves("P-02")
@pytest.mark.parametrize(("rules", "answer"), ON_ARGUMENTS)
def test_other_rules_match_arguments_by_name(desk: AuthorizerFixture, rules: list[str], answer: str) -> None:
    assert desk.judge(TRANSFER, {"source": "alice", "target": "bob", "amount": 5}, *rules).action == answer


@pytest.mark.proves("P-02")
def test_rules_about_an_mcp_server_apply_only_to_its_tools(desk: AuthorizerFixture) -> None:
    def answer(origin: str | None, *rules: str) -> str:
        return desk.authority.evaluate(TRANSFER, {}, rules=book(*rules), roots=desk.roots, origin=origin).action

    assert answer("mcp:bank:transfer", "allow mcp:bank:transfer") == "allow"
    assert answer("mcp:bank:transfer", "allow mcp:bank:*", "deny mcp:bank:trans*") == "deny"
    assert answer("mcp:other:transfer", "allow mcp:bank:*") == "ask"
    assert answer(None, "allow mcp:*:*") == "ask"
    assert answer("mcp:bank:transfer", "deny mcp:bank:*", "allow mcp:bank:transfer") == "allow"


@pytest.mark.proves("P-03")
def test_a_rule_book_is_immutable(desk: AuthorizerFixture) -> None:
    first = book("allow bash ls")
    second = first.with_rules(rule("deny bash ls"))
    assert desk.judge(BASH, {"command": "ls"}, first).action == "allow"
    assert desk.judge(BASH, {"command": "ls"}, second).action == "deny"
    assert desk.judge(BASH, {"command": "ls"}, first).action == "allow"
    assert [r.text for r in second.list_rules_of_scope("session")] == ["allow bash ls", "deny bash ls"]
    assert len(second.with_rules(rule("deny bash ls"))) == len(second)
    assert len(RuleBook()) == 0


TEXTS = st.sampled_from(
    [
        "bash",
        "bash git *",
        "bash git push *",
        "bash git push origin",
        "shell.run",
        "shell.run git *",
        "*",
        "b*",
        "bash *",
        "bash -*",
        "shell.*",
        "bash rm *",
        "bash 'git' push *",
        "* git *",
    ]
)
RULES = st.builds(
    "{}: {} {}".format,
    st.sampled_from(["manifest", "mode", "project", "session", "default"]),
    st.sampled_from(["allow", "ask", "deny"]),
    TEXTS,
)
COMMANDS = st.sampled_from(
    [
        "git push origin",
        "git push --force",
        "git status",
        "rm -rf x",
        "env git push origin",
        "git $X",
        "git a && rm b",
        "git a > f",
    ]
)
STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}


@pytest.mark.proves("P-03")
@given(st.lists(RULES, max_size=5), st.sampled_from(["manifest", "mode", "project", "session"]), TEXTS, COMMANDS)
def test_adding_a_deny_rule_never_widens_a_decision(
    desk: AuthorizerFixture, rules: list[str], scope: str, text: str, command: str
) -> None:
    before = desk.bash(command, *rules).action
    after = desk.bash(command, *rules, f"{scope}: deny {text}").action
    assert STRICTNESS[after] >= STRICTNESS[before]


@pytest.mark.proves("P-03")
@given(st.lists(RULES, max_size=5), st.sampled_from(["manifest", "mode"]), COMMANDS)
def test_a_deny_rule_of_a_manifest_or_mode_is_final(
    desk: AuthorizerFixture, rules: list[str], scope: str, command: str
) -> None:
    assert desk.bash(command, *rules, f"{scope}: deny bash").action == "deny"
    assert desk.bash(command, *rules, f"{scope}: deny shell.run").action == "deny"


HOST_PATTERNS = st.sampled_from(
    ["", "*", "*:81", "a.org", "a.org:81", "*.org", "*.a.org", "*.a.org:80", "10.0.0.1", "??"]
)
HOSTS = st.sampled_from(
    ["a.org", "a.org:81", "b.a.org:80", "b.a.org", "c.b.a.org", "b.org:81", "org", "10.0.0.1:80", "?"]
)


@pytest.mark.proves("P-03")
@given(st.lists(st.tuples(st.sampled_from(["allow", "ask", "deny"]), HOST_PATTERNS), max_size=6), HOSTS)
def test_the_host_lookup_finds_the_first_rule_that_matches(rules: list[tuple[Action, str]], host: str) -> None:
    ranking = RuleRanking([Rule(action, "net.fetch", pattern) for action, pattern in rules], "host")
    assert ranking.find_winner(host) is next((one for one in ranking.ranked if one.matches(host)), None)


@pytest.mark.proves("P-18")
@pytest.mark.parametrize("word", ["…", "..."])
def test_an_ellipsis_matches_any_arguments(desk: AuthorizerFixture, word: str) -> None:
    rules = book(f"allow bash pytest {word}")
    for command in ("pytest", "pytest -k x -q", "pytest tests/a.py::b --lf", "timeout 60 pytest -x"):
        assert desk.bash(command, rules).action == "allow", command
    assert desk.bash("pytest -q && make", rules).action == "ask"
    assert desk.bash("pytest-3 -q", rules).action == "ask"


@pytest.mark.proves("P-18")
def test_an_ellipsis_ranks_no_higher_than_a_star(desk: AuthorizerFixture) -> None:
    for action in ("deny", "ask"):
        assert desk.bash("git push origin", book("allow bash git push …", f"{action} bash git push *")).action == action
        assert desk.bash("git push -f", book("allow bash git …", f"{action} bash git push …")).action == action
    assert desk.bash("git -c alias.x=!sh x", book("allow bash git …")).action == "ask"


@pytest.mark.proves("P-18")
@given(st.lists(st.sampled_from(["...", "…", "a", "-x", "*", "./..."]), min_size=1, max_size=4))
def test_a_quoted_command_with_dots_matches_only_itself(words: list[str]) -> None:
    argv = ("go", *words)
    pattern = ArgvPattern(split_pattern(build_exact_argv_pattern(argv)), allowing=True)
    assert pattern.matches(argv)
    assert not pattern.matches((*argv, "more"))
    assert not pattern.matches(argv[:-1])


_NAMES = st.text(st.sampled_from("ab '\"!^~$\\*?[]{},;|.x"), min_size=1, max_size=8).filter(
    lambda name: bool(name.strip(".")) and name == name.strip()
)


@pytest.mark.proves("P-02")
@given(st.lists(_NAMES, min_size=1, max_size=3))
def test_a_rule_for_exactly_a_path_loads_and_holds_for_it_alone(names: list[str]) -> None:
    path = "/".join(names)
    made = parse_rule(f"allow fs.write {escape_as_path_pattern(path)}", scope="session")
    (ranked,) = RuleRanking([made], "path").ranked
    assert ranked.matches(PathSubject(f"/ws/{path}", path))
    assert not ranked.matches(PathSubject(f"/ws/{path}x", f"{path}x"))
