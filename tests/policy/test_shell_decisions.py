"""Decisions about shell commands, each under rules that would otherwise allow it.

Nothing here runs any of them.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.policy.desk import GIT, HELPER, AuthorizerFixture, book
from tests.policy.shell_corpus import ALLOWED_BY_A_RULE_FOR_EVERYTHING, ASKED_EVEN_THEN

from handrail.policy.rule_suggestions import suggest_rule
from handrail.policy.rules.pattern_lexer import build_exact_argv_pattern
from handrail.policy.shell.destroying_forms import may_command_destroy_data
from handrail.policy.shell.program_risks import MAX_WAIT_S, find_hidden_program_risk
from handrail.tools.shell_tools import BashTool


@pytest.mark.proves("P-05")
@pytest.mark.parametrize("command", ALLOWED_BY_A_RULE_FOR_EVERYTHING)
def test_a_rule_that_allows_all_of_bash_allows_a_plain_command(desk: AuthorizerFixture, command: str) -> None:
    verdict = desk.bash(command, "allow bash")
    assert verdict.action == "allow", verdict.reason


@pytest.mark.proves("P-05")
@pytest.mark.parametrize("command", ASKED_EVEN_THEN)
def test_commands_that_run_or_write_something_else_need_approval_even_under_allow_everything(
    desk: AuthorizerFixture, command: str
) -> None:
    for rules in (
        ["allow bash"],
        ["allow shell.run"],
        ["allow *"],
        ["allow bash", "allow shell.run *", "allow shell.run"],
    ):
        verdict = desk.bash(command, *rules)
        assert verdict.action == "ask", (rules, verdict.reason)
    assert desk.bash(command).action == "ask"
    assert desk.bash(command, "deny bash").action == "deny"
    assert desk.bash(f"ls && {command}" if command else "ls &&", "allow bash").action == "ask"


def test_the_corpus_has_more_than_two_hundred_commands() -> None:
    assert len(ALLOWED_BY_A_RULE_FOR_EVERYTHING) + len(ASKED_EVEN_THEN) > 200


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(
    ("command", "rule", "answer"),
    [
        ("python -c 'print(1)'", "allow bash python -c 'print(1)'", "allow"),
        ("python -c 'print(2)'", "allow bash python -c 'print(1)'", "ask"),
        ("python -c 'print(1)'", "allow bash python -c *", "ask"),
        ("python -c 'print(1)'", "allow bash python -* *", "ask"),
        ("python -m pytest", "allow bash python -m pytest *", "allow"),
        ("python -m pytest tests", "allow bash python -m pytest *", "allow"),
        ("python -m pytest -q", "allow bash python -m pytest *", "ask"),
        ("python -m pytest -q", "allow bash python -m pytest -*", "allow"),
        ("python -m pytest -q tests", "allow bash python -m pytest -q *", "allow"),
        ("env X=1 make", "allow bash env X=1 make", "allow"),
        ("env X=1 make", "allow bash env X=1 *", "ask"),
        ("timeout 60 pytest", "allow bash timeout 60 pytest", "allow"),
        ("timeout 60 pytest", "allow bash timeout * pytest", "ask"),
        ("git -c a=b log", "allow bash git -c a=b log", "allow"),
        ("git -c a=b log HEAD", "allow bash git -c a=b log *", "allow"),
        ("git -c a=b log", "allow bash git -c * log", "ask"),
        ("git diff --output=f", "allow bash git diff --output=f *", "allow"),
        ("git diff --output=g", "allow bash git diff -*", "ask"),
        ("find . -delete", "allow bash find . -delete", "allow"),
        ("find . -delete", "allow bash find * -delete", "allow"),
        ("find . -exec grep x '{}' ';'", "allow bash find . -exec grep x '{}' ';'", "allow"),
        ("find . -exec rm x '{}' ';'", "allow bash find . -exec * x '{}' ';'", "ask"),
        ("sed -i s/a/b/ f", "allow bash sed -i s/a/b/ *", "allow"),
        ("sed -i 's/a/b/;e' f", "allow bash sed -i * f", "ask"),
        ("git clone --config a=b ext::x", "allow bash git clone --config a=b *", "ask"),
        ("git clone --config a=b ext::x", "allow bash git clone --config a=b ext::x *", "allow"),
        ("git clone --config a=b https://example.org/x", "allow bash git clone --config a=b *", "allow"),
        ("git clone -u ./x --template y z", "allow bash git clone -u ./x * * *", "ask"),
        ("git -c a=b config x y", "allow bash git -c a=b *", "ask"),
        ("git -c a=b config x y", "allow bash git -c a=b config x y", "allow"),
        ("git -C sub -c a=b log", "allow bash git -C sub -*", "ask"),
        ("git -C sub -c a=b log", "allow bash git -C sub * a=b log", "ask"),
        ("git -C sub fetch ext::x", "allow bash git -C sub *", "ask"),
        ("git -C sub fetch origin", "allow bash git -C sub *", "allow"),
        ("git --unheard-of x daemon", "allow bash git --unheard-of *", "ask"),
        ("sed -i 'w out' f", "allow bash sed -i *", "ask"),
        ("sed -i -e s/a/b/ -e 'w out' f", "allow bash sed -i -e s/a/b/ -e * *", "ask"),
        ("sed -l 5 'w out' f", "allow bash sed -l 5 *", "ask"),
        ("sed -l 5 p f", "allow bash sed -l 5 *", "allow"),
        ("curl file:///x -o out", "allow bash curl file:///x -o *", "ask"),
        ("curl file:///x -o out", "allow bash curl file:///x -o out", "allow"),
        ("printf -v a -v b x", "allow bash printf -v a -v * x", "ask"),
        ("sleep 300", "allow bash sleep 300", "allow"),
        ("sleep 300", "allow bash sleep *", "deny"),
    ],
)
def test_a_rule_overrides_a_program_policy_only_by_naming_the_risky_words(
    desk: AuthorizerFixture, command: str, rule: str, answer: str
) -> None:
    assert desk.bash(command, rule).action == answer
    if answer == "allow":
        assert desk.bash(command, rule.replace("allow bash", "allow shell.run"), "allow bash").action == "allow"


@pytest.mark.proves("P-05")
@given(st.sampled_from([c for c in ASKED_EVEN_THEN if c]))
def test_the_rule_stored_for_always_allows_exactly_the_approved_command(desk: AuthorizerFixture, command: str) -> None:
    verdict = desk.bash(command)
    if suggest_rule(verdict) is None:
        return
    assert desk.bash(command, str(suggest_rule(verdict))).action == "allow"
    assert desk.bash(command + " more", str(suggest_rule(verdict))).action == "ask"
    assert desk.bash(command + " -x", str(suggest_rule(verdict))).action == "ask"
    assert desk.bash("x " + command, str(suggest_rule(verdict))).action == "ask"


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(
    "command",
    [
        "rm -rf x",
        "ls && rm x",
        "ls; rm x",
        "ls | rm x",
        "ls\nrm x",
        "rm",
        "/bin/rm x",
        "\\rm x",
        "'rm' x",
        "r''m x",
        "sudo rm x",
        "env X=1 rm x",
        "env -u Y nice -n 3 rm x",
        "xargs rm",
        "timeout 5 /bin/rm x",
        "bash -c 'rm x'",
        "bash -c 'ls && rm x'",
        "sudo bash -c 'cd / && rm x'",
        "eval rm x",
        "eval 'rm x'",
        "find . -exec rm '{}' ';'",
        "rm $X",
        "rm *",
        "rm > f",
        "(rm x)",
        "if a; then rm x; fi",
        "echo $(rm x)",
        "X=1 rm x",
        "rm x &",
        "while true; do rm x; done",
    ],
)
def test_a_denied_program_is_denied_however_it_is_reached(desk: AuthorizerFixture, command: str) -> None:
    assert desk.bash(command, "allow bash", "deny bash rm *").action == "deny"
    assert desk.bash(command, "allow bash", "deny shell.run rm *").action == "deny"


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(
    "command",
    [
        "sleep 300",
        "sleep 5m",
        "sleep 1h; echo done",
        "sleep 6 && sleep 6",
        "/bin/sleep 60",
        "sleep infinity",
        "sleep 60 & wait",
        "(sleep 60 && echo done) & echo begun; wait",
        "sleep 1 & sleep 60",
        "sleep 9e9 9 || sleep 99",
    ],
)
def test_a_command_that_only_waits_is_denied_with_advice(desk: AuthorizerFixture, command: str) -> None:
    verdict = desk.bash(command, "allow bash")
    if "9e9" in command:  # not a duration of ours, so nothing is claimed about it
        assert verdict.action == "allow"
        return
    assert verdict.action == "deny"
    assert "only waits" in verdict.reason
    assert "Run the command" in verdict.reason


def test_a_job_that_only_waits_is_denied_with_a_hint_to_add_timer(desk: AuthorizerFixture) -> None:
    spec = BashTool().spec
    for background in (False, True):
        verdict = desk.judge(spec, {"command": "sleep 60", "background": background}, "allow bash")
        assert verdict.action == "deny" and "only waits (60 s)" in verdict.reason
        assert ("keeps the turn and the workspace busy" in verdict.reason) != background
        assert ("add_timer" in verdict.reason) == background
    assert desk.judge(spec, {"command": "sleep 60 && make", "background": True}, "allow bash").action == "allow"


def test_a_short_sleep_or_a_sleep_before_other_work_is_allowed(desk: AuthorizerFixture) -> None:
    assert desk.bash(f"sleep {MAX_WAIT_S}", "allow bash").action == "allow"
    assert desk.bash("sleep 30 && make", "allow bash").action == "allow"


@pytest.mark.parametrize("command", ["sleep 60 & echo done", "true && sleep 60 & date", "sleep 60 & sleep 2"])
def test_a_sleep_in_the_shells_background_is_allowed(desk: AuthorizerFixture, command: str) -> None:
    assert desk.bash(command, "allow bash").action == "allow"


@pytest.mark.proves("P-05")
def test_an_argument_list_without_a_shell_is_checked_as_a_single_command(desk: AuthorizerFixture) -> None:
    assert desk.judge(GIT, {"argv": ["git", "status"]}, "allow git.status git *").action == "allow"
    assert desk.judge(GIT, {"argv": ["git", "*", "$x"]}, "allow git.status git *").action == "allow"
    assert desk.judge(GIT, {"argv": ["git", "-c", "a=b", "x"]}, "allow git.status").action == "ask"
    assert desk.judge(GIT, {"argv": ["ls"]}, "allow git.status").action == "deny"
    assert desk.judge(GIT, {"argv": []}, "allow git.status").action == "deny"


@pytest.mark.proves("P-05", "K-10")
def test_a_tool_that_requires_one_program_cannot_run_an_unreadable_text(desk: AuthorizerFixture) -> None:
    verdict = desk.judge(GIT, {"argv": "git $(ls)"}, "allow git.status")
    assert verdict.action == "deny"
    assert "not among its programs" in verdict.reason


@given(st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_program_policies_never_raise_on_any_argv(argv: list[str]) -> None:
    found = find_hidden_program_risk(argv)
    assert found is None or found.words <= frozenset(range(len(argv)))


PROGRAMS = st.sampled_from(
    ["git", "sed", "awk", "tar", "find", "python", "bash", "node", "sort", "make", "less", "npm", "printf", "curl"]
)
OPTIONS = st.sampled_from(
    [
        "-c",
        "-e",
        "-i",
        "-o",
        "-I",
        "--",
        "-",
        "-m",
        "--output",
        "--outp=x",
        "x",
        "run",
        "-",
        "1e",
        "w f",
        "-exec",
        "=",
        "-Wx",
        "-W",
        "ext::x",
    ]
)


@given(PROGRAMS, st.lists(OPTIONS, max_size=6))
def test_a_command_with_a_risk_needs_approval_unless_a_rule_names_all_its_words(
    desk: AuthorizerFixture, program: str, words: list[str]
) -> None:
    argv = [program, *words]
    assume(not may_command_destroy_data(argv))  # such a command asks for what it destroys
    found = find_hidden_program_risk(argv)
    command = build_exact_argv_pattern(argv)
    assert desk.bash(command, "allow bash").action == ("allow" if found is None else "ask")
    assert desk.bash(command, f"allow bash {command}").action == "allow"
    if found is not None:
        assert found.words <= frozenset(range(len(argv)))
        assert found.reason


def test_another_tool_that_runs_programs_is_subject_to_the_same_policies(desk: AuthorizerFixture) -> None:
    may = desk.may(HELPER, {"x": 1}, book("allow helper", "deny shell.run rm *"))
    assert may("shell.run", ["ls", "-l"]) is None
    assert may("shell.run", "ls -l && git status") is None
    assert "rm" in (may("shell.run", ["rm", "x"]) or "")
    assert may("shell.run", "ls && rm x") is not None
    assert may("shell.run", ["sudo", "ls"]) is not None
    assert may("shell.run", "$(x) ls") is not None
    assert may("shell.run", "sed $(ls)") is not None
