"""Files that a shell opens for a command are checked as file access, not as part of the command."""

from __future__ import annotations

import pytest
from tests.policy.desk import ALL, BASH, HELPER, AuthorizerFixture, book

from handrail.policy.decision_explanation import trace_decision
from handrail.policy.rule_suggestions import suggest_rule

pytestmark = pytest.mark.proves("P-05")


@pytest.mark.parametrize(
    ("command", "rules", "answer"),
    [
        # without a rule about the file it asks, whatever the tool's rule says
        ("ls > out", ["allow bash"], "ask"),
        ("ls > out", ["allow *"], "ask"),
        ("ls > out", ["allow bash ls *"], "ask"),
        ("ls > out", ["allow shell.run"], "ask"),
        ("sort < in", ["allow bash"], "ask"),
        ("ls > /dev/null 2>&1", ["allow bash"], "allow"),
        # a rule about the file answers for the file, not for the command
        ("ls > out", ["allow fs.write out"], "ask"),
        ("ls > out", ["allow bash", "allow fs.write out"], "allow"),
        ("ls >> src/log", ["allow bash", "allow fs.write src"], "allow"),
        ("ls 2>| 'src/log'", ["allow bash", "allow fs.write src"], "allow"),
        ("ls &> ./src/../src/log", ["allow bash", "allow fs.write src/**"], "allow"),
        ("ls > src/log", ["allow bash", "allow fs.*"], "allow"),
        ("ls > src/log", ["allow bash", "allow fs.read"], "ask"),
        ("sort < src/a.py", ["allow bash", "allow fs.read src"], "allow"),
        ("sort < src/a.py", ["allow bash", "allow fs.write src"], "ask"),
        ("sort < src/a.py > src/b.py", ["allow bash", "allow fs.*"], "allow"),
        ("sort < src/a.py > b.py", ["allow bash", "allow fs.* src"], "ask"),
        ("ls > src/log | wc > out", ["allow bash", "allow fs.write src"], "ask"),
        # a deny of the file holds, however the rest is allowed, and in a text that cannot be read too
        ("ls > src/log", ["allow bash", "allow fs.*", "deny fs.write src"], "deny"),
        ("echo $(date) > src/log", ["allow bash", "deny fs.write src"], "deny"),
        ("for a in b; do echo $a >> src/log; done", ["allow bash", "deny fs.write src"], "deny"),
        ("echo $(date) > out", ["allow bash", "deny fs.write src"], "ask"),
        ("echo $X > $Y", ["allow bash", "allow fs.*"], "ask"),
        # where it leads is what counts
        ("ls > way-out/passwd", ["allow bash", "allow fs.*"], "deny"),
        ("cat < way-out/passwd", ["allow bash", "allow fs.*"], "deny"),
        ("ls > ../../../../../../../../../../../../elsewhere", ["allow bash", "allow fs.*"], "deny"),
        ("ls > /etc/cron.d/x", ["allow bash", "allow fs.*"], "deny"),
        ("ls > '/dev/sda'", ["allow bash", "allow fs.*"], "deny"),
        # what no rule opens
        ("ls > handrail.toml", ["allow bash", "allow fs.*"], "deny"),
        ("ls >> .git/hooks/pre-commit", ["allow bash", "allow fs.*"], "deny"),
        ("echo $(date) > .git/hooks/pre-commit", ["allow bash", "allow fs.*"], "deny"),
        # the sandbox's own temporary folder: nobody's file, and no rule of its own either
        ("ls > /tmp/x-of-nobody", ["allow bash"], "ask"),
        ("ls > /tmp/x-of-nobody", ["allow bash", "allow fs.write /tmp/**"], "allow"),
    ],
)
def test_a_redirection_needs_a_rule_about_its_file(
    desk: AuthorizerFixture, command: str, rules: list[str], answer: str
) -> None:
    verdict = desk.bash(command, *rules)
    assert verdict.action == answer, verdict.reason


def test_the_reason_names_the_redirected_file_and_the_trace_names_the_redirection(desk: AuthorizerFixture) -> None:
    verdict = desk.bash("ls > src/log", "allow bash")
    assert verdict.reason == "Writing src/log with bash requires approval: no rule allows it."
    assert suggest_rule(verdict) == "allow fs.write src/log"
    steps = "\n".join(str(step) for step in trace_decision(verdict))
    assert "by a redirection" in steps


def test_the_targets_of_a_call_name_the_files_that_it_redirects_to(desk: AuthorizerFixture) -> None:
    targets = desk.bash("sort < src/a.py >> out").targets
    assert [(t.capability, t.value) for t in targets][1:] == [
        ("fs.read", desk.path("src/a.py")),
        ("fs.write", desk.path("out")),
    ]


def test_a_command_that_a_running_tool_passes_to_the_shell_gets_the_same_check(desk: AuthorizerFixture) -> None:
    may = desk.may(HELPER, {"x": 1}, book("allow helper"))
    assert may("shell.run", "ls") is None
    assert "out" in (may("shell.run", "ls > out") or "")
    assert may("shell.run", "ls > /etc/x") is not None
    assert desk.may(HELPER, {"x": 1}, book("allow helper", "allow fs.write out"))("shell.run", "ls > out") is None


def test_an_approved_redirection_opens_its_file_until_a_rule_denies_it(desk: AuthorizerFixture) -> None:
    verdict = desk.bash("ls > out")
    same = verdict.prepared.rules
    roots, authority = desk.roots, desk.authority
    assert authority.make_access_check(verdict, BASH, rules=same, roots=roots)("shell.run", "ls > out") is None
    denying = same.with_rules(*book("deny fs.write out", shipped=False))
    assert authority.make_access_check(verdict, BASH, rules=denying, roots=roots)("shell.run", "ls > out") is not None
    assert authority.make_access_check(verdict, BASH, rules=same, roots=roots)("shell.run", "ls > other") is not None


def test_the_shell_tool_of_these_tests_is_among_the_shared_tools() -> None:
    assert BASH in ALL
