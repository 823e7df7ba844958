"""What is proved to change nothing, and that every doubt is a no."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.shell_corpus import ASKED_EVEN_THEN

from handrail.policy import read_only
from handrail.policy.shell import parse

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
    "env X=1 ls",
    "ls $x",
    "ls; rm x",
    "export A=1",
    "command ls -x; sudo ls",
    "mkdir -p a",
]


@pytest.mark.parametrize("command", PROVED)
def test_a_command_that_only_looks_is_proved(command: str) -> None:
    assert read_only.of_script(parse(command)) is None


@pytest.mark.parametrize("command", NOT_PROVED)
def test_what_may_change_something_is_not(command: str) -> None:
    assert read_only.of_script(parse(command))


@pytest.mark.parametrize("command", ASKED_EVEN_THEN)
def test_what_is_asked_about_under_every_rule_is_no_proof_either(command: str) -> None:
    if command in ("command -v ls", "xargs ls"):  # which only look, by a table of their own
        return
    assert read_only.of_script(parse(command)) is not None


@given(st.sampled_from(PROVED), st.sampled_from(NOT_PROVED), st.sampled_from(["; ", " && ", " || ", " | ", "\n"]))
def test_one_command_that_is_not_proved_is_enough(proved: str, other: str, joint: str) -> None:
    for text in (f"{proved}{joint}{other}", f"{other}{joint}{proved}"):
        assert read_only.of_script(parse(text)) is not None


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_no_argv_makes_the_proof_raise_and_unknown_programs_have_none(argv: list[str]) -> None:
    assert read_only.why_not(argv) is None or read_only.why_not(argv)
    assert read_only.why_not(["no-such-program", *argv]) is not None
