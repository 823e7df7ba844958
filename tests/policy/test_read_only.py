"""Commands that are proved read-only; every doubt fails the proof."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import AuthorizerFixture, book
from tests.policy.shell_corpus import ASKED_EVEN_THEN

from handrail.policy.rules.rules_and_modes import Mode, with_mode
from handrail.policy.shell import read_only_proof
from handrail.policy.shell.parser import parse_script
from handrail.tools.shell_tools import BashTool

pytestmark = pytest.mark.proves("S-09")

PROVED = [
    "ls -la src",
    "cat a.txt | grep -n 'x y' | head -5",
    "grep -rn TODO src",
    "rg -n --hidden -g '*.py' TODO",
    "find . -name '*.py' -type f -not -path './x/*'",
    "find . -name '*.py' | xargs wc -l",
    "find . -print0 | xargs -0 -n 10 grep -l x",
    "git status",
    "git status -sb --porcelain",
    "git --no-pager log --oneline -20 --stat",
    "git diff --stat HEAD",
    "git diff --cached -U5 -- src",
    "git show HEAD:README.md",
    "git blame -w src/a.py",
    "git grep -n x",
    "git branch -a",
    "git config --get user.name",
    "git rev-parse --show-toplevel",
    "git ls-files -mo --exclude-standard",
    "sed -n '1,20p' a.py",
    "awk '{print $1}' a.txt",
    "sort -u -k2 names.txt | uniq -c",
    "sort < names.txt",
    "cd src && ls",
    "timeout 5 nice grep x f",
    "env LC_ALL=C sort f",
    "command -v git",
    "test -f a && cat a || echo none",
    "wc -l a 2>/dev/null",
    "date +%s",
    "jq -r .a f.json",
    "tree -L 2",
    "python3 --version",
    "true",
]
NOT_PROVED = [
    "touch a",
    "ls > f",
    "ls >> f",
    "ls 2> f",
    "cat a | tee b",
    "make",
    "pytest -q",
    "npm test",
    "python3 script.py",
    "./ls",
    "/bin/ls",
    "nohup ls",
    "git add .",
    "git commit -m x",
    "git branch -D x",
    "git branch topic",
    "git tag v1",
    "git tag -d v1",
    "git stash",
    "git stash pop",
    "git config user.name x",
    "git remote add x y",
    "git fetch",
    "git checkout -- .",
    "git log -O order",
    "git diff --ext-diff",
    "git log --textconv",
    "git reflog expire --all",
    "git worktree add x",
    "git submodule foreach ls",
    "git bisect start",
    "git notes add",
    "find . -delete",
    "find . -fls f",
    "find . -newpredicate",
    "sort -o f f",
    "sort -T /x f",
    "rg --pre x y",
    "sed -i s/a/b/ f",
    "sed 'w out' f",
    "awk '{print > \"f\"}' a",
    "uniq a b",
    "xargs rm",
    "xargs -a list cat",
    "xargs find",
    "date 01010101",
    "date -s now",
    "hostname x",
    "tree -o f",
    "fd -x rm",
    "file -C -m x",
    "curl http://x",
    "ssh host ls",
    "kill 1",
    "env PATH=. ls",
    "sed $x",
    "find $x",
    "sort *.txt",
    "rg x *",
    "for f in *; do touch $f; done",
    "if ls; then rm x; fi",
    "echo $(touch x)",
    "cat <(touch x)",
    "find . -exec rm {} ;",
    "find . -exec sh -c x {} ;",
    "export PATH=x",
    "read PATH",
    "git -C .. status",
    "git branch --list -D x",
    "git remote get-url --push x",
    "git stash show --oneline --textconv",
    "ls; rm x",
    "command ls -x; sudo ls",
    "mkdir -p a",
]


@pytest.mark.parametrize("command", PROVED)
def test_a_command_that_only_reads_is_proved_read_only(command: str) -> None:
    assert read_only_proof.explain_script_not_read_only(parse_script(command)) is None


@pytest.mark.parametrize("command", NOT_PROVED)
def test_a_command_that_may_change_something_is_not_proved_read_only(command: str) -> None:
    assert read_only_proof.explain_script_not_read_only(parse_script(command))


@pytest.mark.parametrize("command", ASKED_EVEN_THEN)
def test_commands_that_always_require_approval_are_not_proved_read_only(command: str) -> None:
    if command in ("command -v ls", "xargs ls", "env"):  # which only look, by a table of their own
        return
    assert read_only_proof.explain_script_not_read_only(parse_script(command)) is not None


@given(st.sampled_from(PROVED), st.sampled_from(NOT_PROVED), st.sampled_from(["; ", " && ", " || ", " | ", "\n"]))
def test_one_unproved_command_makes_the_whole_text_unproved(proved: str, other: str, joint: str) -> None:
    for text in (f"{proved}{joint}{other}", f"{other}{joint}{proved}"):
        assert read_only_proof.explain_script_not_read_only(parse_script(text)) is not None


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_the_read_only_proof_never_raises_and_unknown_programs_are_not_proved(argv: list[str]) -> None:
    assert read_only_proof.explain_command_not_read_only(argv) is None or read_only_proof.explain_command_not_read_only(
        argv
    )
    assert read_only_proof.explain_command_not_read_only(["no-such-program", *argv]) is not None


SHOW_STORED_CONTENTS = [
    "git log -p", "git log -p -- .env", "git log --patch", "git log -U3", "git log --unified=3", "git log -S TOKEN", "git log -G '^TOKEN=a'",
    "git log --stat -p", "git log -pn1", "git log -m", "git log --word-diff", "git log --color-words",
    "git log --binary", "git log --check", "git whatchanged -p", "git show", "git show HEAD", "git show HEAD:.env", "git show HEAD:secrets/a",
    "git show --stat HEAD:.env", "git show --name-only 1234abcd", "git show :0:.env", "git show -s stash", "git diff", "git diff HEAD", "git diff A B",
    "git diff --cached", "git diff -- src/a.py", "git diff --stat -p", "git diff --stat -U1", "git diff --check", "git diff --exit-code",
    "git diff -- --stat", "git --no-pager diff", "timeout 5 git log -p", "git status -v", "git status -vv", "git status -sv", "git status --verbose",
    "git grep TOKEN", "git grep TOKEN HEAD", "git grep --cached TOKEN", "git grep -c TOKEN HEAD", "git blame .env", "git blame src/a.py",
    "git cat-file -p HEAD:.env", "git cat-file blob HEAD:.env", "git ls-tree -r HEAD", "git rev-list --objects --all", "git stash show",
    "git for-each-ref '--format=%(raw)'", "git for-each-ref '--format=%(*raw)'", "git log --oneline | head && git show HEAD", "git diff 1234abcd 5678abcd",
]  # fmt: skip
SHOW_NONE = [
    "git status", "git status -sb", "git status --porcelain", "git log", "git log --oneline -20", "git log --stat", "git log --name-only -5",
    "git log --graph --all --decorate --format=%h", "git log -n 5 --author=x", "git log -- src", "git diff --stat", "git diff --stat HEAD^ -- src",
    "git diff --name-only A B", "git diff --cached --numstat", "git diff --quiet", "git show --stat", "git show --stat HEAD^", "git show -s HEAD",
    "git branch", "git branch -a", "git rev-parse HEAD", "git rev-parse --show-toplevel", "git ls-files", "git rev-list --count HEAD",
    "git cat-file -t HEAD", "git describe --tags", "git shortlog -sn", "git stash list", "git config --get user.name", "git merge-base A B",
    "git for-each-ref", "git show-ref", "git check-ignore x",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["plan", "accept-edits"])
@pytest.mark.parametrize("command", SHOW_STORED_CONTENTS)
def test_a_command_that_prints_contents_of_a_repository_asks(desk: AuthorizerFixture, command: str, mode: Mode) -> None:
    verdict = desk.judge(BashTool().spec, {"command": command}, with_mode(book(), mode))
    assert verdict.action == "ask", verdict.reason
    assert (
        "git.show, git.log and git.diff" in verdict.reason
        or "read-only" in verdict.reason
        or "fs.read" in verdict.reason
    )


@pytest.mark.parametrize("mode", ["plan", "accept-edits"])
@pytest.mark.parametrize("command", SHOW_NONE)
def test_a_git_command_that_prints_no_contents_is_allowed_as_read_only(
    desk: AuthorizerFixture, command: str, mode: Mode
) -> None:
    verdict = desk.judge(BashTool().spec, {"command": command}, with_mode(book(), mode))
    assert verdict.action == "allow", verdict.reason
    assert verdict.is_read_only


@pytest.mark.parametrize("command", ["git archive HEAD", "git format-patch -1", "git bundle create x HEAD", "git stash show -p", "git checkout HEAD -- .env",
                                     "git restore --source=HEAD .env", "git worktree add x", "git diff-tree -p HEAD", "git cat-file --batch",
                                     "git fast-export HEAD", "git annotate .env", "git diff-index -p HEAD", "git show-branch", "git range-diff A B C", "git log --cc", "git log -L1,5:.env"])  # fmt: skip
def test_indirect_ways_to_print_repository_contents_are_not_allowed(desk: AuthorizerFixture, command: str) -> None:
    for mode in ("plan", "accept-edits"):
        assert desk.judge(BashTool().spec, {"command": command}, with_mode(book(), mode)).action != "allow"


def test_a_deny_rule_for_a_file_also_covers_its_revisions(desk: AuthorizerFixture) -> None:
    rules = with_mode(book("deny fs.read secrets/**"), "plan")
    assert desk.judge(BashTool().spec, {"command": "cat secrets/a"}, rules).action == "deny"
    assert desk.judge(BashTool().spec, {"command": "git show HEAD:secrets/a"}, rules).action == "deny"
    assert desk.judge(BashTool().spec, {"command": "git blame HEAD -- secrets/a"}, rules).action == "deny"


def test_a_rule_for_read_only_tools_does_not_cover_contents_of_a_repository(desk: AuthorizerFixture) -> None:
    rules = book("allow effect:read")
    assert desk.judge(BashTool().spec, {"command": "git log -p"}, rules).action == "ask"
    assert desk.judge(BashTool().spec, {"command": "git log"}, rules).action == "allow"


def test_a_rule_that_names_the_command_allows_repository_contents(desk: AuthorizerFixture) -> None:
    rules = with_mode(book("allow bash git diff *"), "plan")
    assert desk.judge(BashTool().spec, {"command": "git diff src"}, rules).action == "allow"


@given(
    st.sampled_from(SHOW_NONE),
    st.sampled_from(
        ["-p", "--patch", "-U1", "--word-diff", "-S x", "--unknown", "-G x", "-c", "--textconv", "--ext-diff"]
    ),
)
def test_one_unknown_option_prevents_the_read_only_proof(desk: AuthorizerFixture, command: str, option: str) -> None:
    if command.split()[1] in ("log", "diff", "show"):
        head, *rest = command.partition(" -- ")
        verdict = desk.judge(
            BashTool().spec, {"command": "".join((f"{head} {option}", *rest))}, with_mode(book(), "plan")
        )
        assert verdict.action != "allow"


def test_the_default_mode_allows_reads_inside_the_workspace_except_of_hidden_files(desk: AuthorizerFixture) -> None:
    def decide(command: str) -> str:
        return desk.judge(BashTool().spec, {"command": command}, with_mode(book(), "ask")).action

    for command in (
        "ls *.py",
        "wc -l < src/a.py",
        "while read -r l; do echo $l; done < src/a.py",
        "cd src && git status",
    ):
        assert decide(command) == "allow", command
    for command in (
        "cat .env",
        "cat < .env",
        "cd src && cat ../.env",
        "cat .env*",
        "git show HEAD:.env",
        "git -C src diff",
    ):
        assert decide(command) == "ask", command
