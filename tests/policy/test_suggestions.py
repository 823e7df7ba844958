"""The rule that "always" stores matches exactly the approved call after a round trip through text."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.policy.desk import BASH, READ, TRANSFER, WRITE, AuthorizerFixture

from handrail.policy.rule_suggestions import describe_wider_rule_coverage, suggest_rule, suggest_wider_rule
from handrail.policy.shell.read_only_proof import is_command_provably_read_only

pytestmark = pytest.mark.proves("P-08")

_NAMES = st.text(st.sampled_from("ab*?[]{}!-^ .'\"\\$é|&;>"), min_size=1, max_size=6)
_WORDS = st.lists(
    st.text(st.sampled_from("ab*?[]{}!-^ .'\"\\$é|&;>=/"), min_size=1, max_size=5), min_size=1, max_size=4
)


def _mutated(text: str) -> list[str]:
    """Yield variants of ``text`` with one character removed, added or changed."""
    return [
        text[1:],
        text[:-1],
        text + "x",
        "x" + text,
        text.replace("*", "aa"),
        text.replace("?", "a"),
        text.swapcase(),
    ]


@given(_NAMES)
def test_a_suggested_rule_for_a_path_allows_only_that_path(desk: AuthorizerFixture, name: str) -> None:
    path = f"src/{name}"
    verdict = desk.judge(WRITE, {"path": path})
    assume(verdict.action == "ask" and suggest_rule(verdict) is not None)
    rule = str(suggest_rule(verdict))
    assert desk.judge(WRITE, {"path": path}, rule).action == "allow"
    target = verdict.targets[0].value
    for other in _mutated(name):
        judged = desk.judge(WRITE, {"path": f"src/{other}"}, rule)
        if (
            judged.targets
            and judged.targets[0].value != target
            and not judged.targets[0].value.startswith(f"{target}/")
        ):
            assert judged.action != "allow", (rule, other)


@given(_WORDS)
def test_a_rule_suggested_for_a_command_allows_exactly_those_words(desk: AuthorizerFixture, words: list[str]) -> None:
    def quoted(argv: list[str]) -> str:
        return " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in argv)

    argv = ["tool", *words]
    verdict = desk.bash(quoted(argv))
    assume(verdict.action == "ask" and suggest_rule(verdict) is not None)
    rule = str(suggest_rule(verdict))
    assert desk.bash(quoted(argv), rule).action == "allow"
    others = [[*argv, "x"], argv[:-1], ["x", *argv], *([*argv[:-1], other] for other in _mutated(argv[-1]))]
    for other in others:
        if other != argv:
            assert desk.judge(BASH, {"command": quoted(other)}, rule).action != "allow", (rule, other)


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("git status", "allow bash git status *"),
        ("git log --oneline -5 src", "allow bash git log --oneline -5 *"),
        ("cat a b", "allow bash cat *"),
        ("sed -n 1p a", "allow bash sed -n 1p *"),
        ("git branch", None),  # any further word would make one
        ("git push origin main", None),
        ("rm -rf build", None),
        ("python3 x.py", "allow bash python3 x.py …"),
        ("uniq a", None),
        ("git status && ls", None),
        ("ls > found", None),
    ],
)
def test_a_wider_rule_is_offered_only_if_further_words_keep_the_command_harmless(
    desk: AuthorizerFixture, command: str, rule: str | None
) -> None:
    verdict = desk.bash(command)
    assert verdict.action == "ask" and suggest_wider_rule(verdict) == rule
    if rule is not None:
        assert (
            desk.bash(command, rule).action == "allow" and desk.bash(f"{command} more 'it''s'", rule).action == "allow"
        )
        assert rule.endswith("…") or desk.bash(f"{command} --output=x", rule).action == "ask"


@pytest.mark.proves("P-18")
@pytest.mark.parametrize(
    ("command", "rule", "said"),
    [
        ("git commit -m 'a long message'", "allow bash git commit …", "with any arguments."),
        ("npm run test -- --watch", "allow bash npm run test …", "runs code of the project"),
        ("uv run pytest -q", "allow bash uv run pytest …", "runs code of the project"),
        ("timeout 60 pytest -k x -q", "allow bash pytest …", "runs code of the project"),
        ("python3 -m pytest tests", "allow bash python3 -m pytest …", "runs code of the project"),
        ("cargo test --all", "allow bash cargo test …", "runs code of the project"),
        ("make test", "allow bash make test …", "runs code of the project"),
        ("pip install requests", "allow bash pip install …", "can install packages"),
        ("frobnicate --all", "allow bash frobnicate …", "does not know"),
    ],
)
def test_a_wider_rule_for_a_command_keeps_the_words_that_name_its_action(
    desk: AuthorizerFixture, command: str, rule: str, said: str
) -> None:
    verdict = desk.bash(command)
    assert verdict.action == "ask" and suggest_wider_rule(verdict) == rule
    assert said in describe_wider_rule_coverage(rule)
    for other in ("-x --yes", "a b", ""):
        assert desk.bash(f"{rule.removeprefix('allow bash ').removesuffix(' …')} {other}", rule).action == "allow"


@pytest.mark.proves("P-18")
@pytest.mark.parametrize(
    "command",
    [
        "python3 -c 'print(1)'",
        "bash x.sh",
        "npx tool",
        "npm exec tool",
        "uv run bash -c x",
        "sudo ls",
        "ssh host ls",
        "curl x.org",
        "git push origin",
        "git reset --hard",
        "rm -r build",
        "docker run x",
        "make CC=x",
        "xargs rm",
        "env A=b sh",
        "gh pr create",
    ],
)
def test_a_command_that_runs_programs_sends_or_destroys_gets_no_open_ended_wider_rule(
    desk: AuthorizerFixture, command: str
) -> None:
    verdict = desk.bash(command)
    assert verdict.action == "ask"
    rule = suggest_wider_rule(verdict)
    assert rule is None or not rule.endswith("…"), rule


_STARTS = [
    "git status",
    "git diff -U3",
    "ls -la",
    "sort",
    "find . -name",
    "sed -n 1p",
    "date",
    "xargs ls",
    "git show",
    "cut -f1",
]


@given(
    st.sampled_from(_STARTS),
    st.lists(st.text(st.sampled_from("ax-+=:/!@$*>|;&w() .'\""), min_size=1, max_size=5), max_size=4),
)
def test_a_wider_rule_allows_only_commands_proved_to_change_nothing(
    desk: AuthorizerFixture, start: str, words: list[str]
) -> None:
    verdict = desk.bash(start)
    rule = suggest_wider_rule(verdict)
    assume(rule is not None)
    argv = (*start.split(), *words)
    if desk.judge(BASH, {"command": shlex.join(argv)}, str(rule)).action == "allow":
        assert is_command_provably_read_only(argv), argv


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("src/a.py", "allow write src/**"),
        ("src/*x/[b]{c}.py", "allow write src/[*]x/**"),
        ("top.py", None),  # that would be the whole workspace
        (".github/workflows/x.yml", None),
        ("src/.config/x", None),
    ],
)
def test_a_wider_rule_for_a_write_covers_the_folder(desk: AuthorizerFixture, path: str, rule: str | None) -> None:
    verdict = desk.judge(WRITE, {"path": path})
    assert verdict.action == "ask" and suggest_wider_rule(verdict) == rule
    if rule is not None:
        folder = path.rpartition("/")[0]
        assert desk.judge(WRITE, {"path": f"{folder}/other"}, rule).action == "allow"
        for beside in (f"{folder}x/a", "other", f"x/{folder}/a", "src/yx/a"):
            if not beside.startswith(f"{folder}/"):
                assert desk.judge(WRITE, {"path": beside}, rule).action == "ask", beside


def test_secret_like_reads_and_calls_with_other_arguments_get_no_wider_rule(desk: AuthorizerFixture) -> None:
    for tool, arguments in ((READ, {"path": "src/.env"}), (TRANSFER, {"source": "a", "target": "b"})):
        verdict = desk.judge(tool, arguments)
        assert verdict.action == "ask" and suggest_rule(verdict) is not None and suggest_wider_rule(verdict) is None


@given(st.fixed_dictionaries({"source": _NAMES, "target": _NAMES}, optional={"amount": st.integers(0, 99)}))
def test_a_suggested_rule_for_other_arguments_allows_only_those_values(
    desk: AuthorizerFixture, arguments: dict[str, Any]
) -> None:
    verdict = desk.judge(TRANSFER, arguments)
    assume(suggest_rule(verdict) is not None)
    rule = str(suggest_rule(verdict))
    assert desk.judge(TRANSFER, arguments, rule).action == "allow"
    for other in _mutated(arguments["source"]):
        if other != arguments["source"]:
            assert desk.judge(TRANSFER, {**arguments, "source": other}, rule).action == "ask"
    assert desk.judge(TRANSFER, {**arguments, "amount": 100}, rule).action == "ask"
    assert desk.judge(TRANSFER, {**arguments, "more": 1}, rule).action == "ask"
