"""What is decided about shell texts, each under the rules that would let it through if anything did.

Nothing here runs any of them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import GIT, HELPER, Desk, book

from handrail.policy.programs import LONGEST_WAIT_S, concern
from handrail.policy.words import literal_words

ALLOWED_BY_A_RULE_FOR_EVERYTHING = [
    "ls -la",
    "git status && git diff --stat",
    "git log --oneline -5 -- src",
    "git --no-pager diff HEAD",
    "git commit -m 'fix: a'",
    "git switch -c topic",
    "git push origin main",
    "git config --get user.name",
    "git diff --output-indicator-new=+",
    "grep -rn 'a b' src | head -20",
    "rg -n TODO src",
    "find src -name '*.py' -type f",
    "sort -u names.txt | uniq -c",
    "sort -k2 -n names.txt",
    "sed -n '1,20p' a.py",
    "sed 's/a/b/g' a.py",
    "sed -e 's#a#b#' -e '3d' a.py",
    "awk '{print $1}' a.txt",
    "awk -F, '{print $2, NR}' a.csv",
    "tar -tzf a.tgz",
    "tar xzf a.tgz",
    "python -m pytest -q",
    "python script.py --flag",
    "python3.12 -B -W error manage.py check",
    "python --version",
    "node app.js",
    "node --test",
    "bash -eu run.sh",
    "perl -w script.pl",
    "make test",
    "npm test",
    "npm run build",
    "cargo test --release",
    "go test ./...".replace("...", "pkg"),
    "pytest -q tests",
    "rm -rf build",
    "kill -9 123",
    "cp a b; mv b c",
    "echo done >&2",
    "printf '%s' x",
    "test -f x && cat x",
    "curl -s http://127.0.0.1:8000/",
    "sleep 2",
    "sleep 1 && ls",
    "make build || echo failed",
    "cat a.txt 2>/dev/null",
    "man ls",
    "tree -L 2",
    "xxd a.bin",
    "uniq a.txt",
    "yq .a a.yml",
]

ASKED_EVEN_THEN = [
    # programs that run what their words say
    "env",
    "env X=1 git status",
    "sudo ls",
    "doas ls",
    "nice -n 5 make",
    "timeout 5 nice ls",
    "nohup ls",
    "time ls",
    "command ls",
    "builtin cd x",
    "exec ls",
    "eval ls",
    "xargs ls",
    "cat list | xargs -n1 rm",
    "stdbuf -o0 ls",
    "setsid ls",
    "strace ls",
    "script -c ls",
    "flock f ls",
    "watch ls",
    "busybox sh",
    "npx thing",
    "parallel ls",
    "unshare -r ls",
    "coproc ls",
    "/usr/bin/env ls",
    "./env ls",
    "'env' ls",
    "e\\nv ls",
    # changes to the shell
    "source x.sh",
    ". x.sh",
    "trap 'rm x' EXIT",
    "alias ls=rm",
    "hash -p ./evil git",
    "enable -f ./x.so ls",
    "shopt -s expand_aliases",
    "read PATH",
    "'export' PATH=.",
    "'declare' -x A=1",
    "printf -v PATH %s .",
    "mapfile -C 'rm x' -c 1 a",
    "test -v 'a[$(rm x)]'",
    "jobs -x rm",
    "complete -C rm x",
    # interpreters fed code
    "sh -c ls",
    "bash -c 'ls'",
    "bash -lc ls",
    "sh -xc ls",
    "bash",
    "cat x | sh",
    "sh -s",
    "bash /dev/stdin",
    "zsh -c ls",
    "python -c 'print(1)'",
    "python3 -Ic 'x'",
    "python",
    "python -",
    "cat x | python3",
    "python -i x.py",
    "python -m timeit x",
    "python -mtimeit x",
    "python3.11 -c x",
    "node -e x",
    "node -p x",
    "node --eval=x",
    "node -r ./x app.js",
    "node --require ./x app.js",
    "perl -e x",
    "perl -ne x f",
    "ruby -e x",
    "php -r x",
    "lua -e x",
    "deno eval x",
    "bun -e x",
    "npm exec thing",
    "npm config set x y",
    # options that run or write
    "find . -exec rm '{}' ';'",
    "find . -execdir rm '{}' +",
    "find . -ok rm '{}' ';'",
    "find . -delete",
    "find . -fprintf f x",
    "find . -fls f",
    "sed -i s/a/b/ f",
    "sed -ni p f",
    "sed --in-place s/a/b/ f",
    "sed --in-pl s/a/b/ f",
    "sed 1e f",
    "sed 's/a/b/e' f",
    "sed 's/a/b/w out' f",
    "sed 'w out' f",
    "sed '/x/w out' f",
    "sed -n -e p -e 'w out' f",
    "sed 's/[/]/x/w' f",
    "sed -f script f",
    "awk 'BEGIN{system(\"rm x\")}'",
    "awk '{print > \"f\"}' a",
    "awk '{print | \"sh\"}' a",
    "awk '\"cmd\" | getline' a",
    "awk -f prog a",
    "gawk '@load \"x\"' a",
    "rg --pre ./x a",
    "rg --pre=./x a",
    "rg -z a",
    "rg --hostname-bin x a",
    "sort -o f f",
    "sort -uo f f",
    "sort --output=f f",
    "sort --outp f f",
    "sort --compress-program=x f",
    "tar --checkpoint=1 --checkpoint-action=exec=x -cf a b",
    "tar -I ./x -xf a",
    "tar xIf ./x a",
    "tar --use-compress-program=x -xf a",
    "tar --to-command=x -xf a",
    "tar --to-comm x -xf a",
    "tar -F x -cf a b",
    "git -c core.fsmonitor=x status",
    "git -ccore.fsmonitor=x status",
    "git --exec-path=x status",
    "git --git-dir=x status",
    "git -C x status",
    "git -p log",
    "git --config-env=a=B status",
    "git diff --ext-diff",
    "git diff --output=f",
    "git diff --output f",
    "git diff --outp=f",
    "git log --textconv",
    "git grep -O x",
    "git grep -Oless x",
    "git grep --open-files-in-pager=x y",
    "git fetch --upload-pack=x origin",
    "git fetch --upload-p x origin",
    "git clone -u x y",
    "git clone -c a=b y",
    "git clone 'ext::sh -c x'",
    "git config core.pager x",
    "git rebase -x ls main",
    "git rebase --exec ls main",
    "git bisect run x",
    "git submodule foreach ls",
    "git filter-branch --tree-filter x",
    "git difftool -x y",
    "git archive -o f HEAD",
    "git send-email x",
    "ssh -o ProxyCommand=x host",
    "ssh -oProxyCommand=x host",
    "scp -S ./x a b",
    "rsync -e ./x a b",
    "rsync --rsh=./x a b",
    "man -P ./x ls",
    "man --pager=./x ls",
    "man -H./x ls",
    "less -o f g",
    "less '+!ls' g",
    "uniq a b",
    "xxd -r a b",
    "yq -i .a=1 f",
    "split --filter=x f",
    "shuf -o f",
    "tree -o f",
    "fd -x rm",
    "make CC=./x",
    "make --eval='x:;ls'",
    "go test -exec ./x pkg",
    "gcc -wrapper ./x a.c",
    "curl -o f http://x",
    "curl -K f",
    "wget -O f http://x",
    "vim a",
    "sqlite3 a.db .shell",
    "cargo --config a.toml build",
    # and whatever is not plain
    "echo $(ls)",
    "ls *",
    "ls > f",
    "ls & ls",
    "X=1 ls",
    "(ls)",
    "ls\u202e",
    "",
    "; ".join(["ls"] * 51),
]


@pytest.mark.proves("P-05a")
@pytest.mark.parametrize("command", ALLOWED_BY_A_RULE_FOR_EVERYTHING)
def test_a_plain_command_runs_under_a_rule_that_allows_everything(desk: Desk, command: str) -> None:
    verdict = desk.bash(command, "allow bash")
    assert verdict.action == "allow", verdict.reason


@pytest.mark.proves("P-05a")
@pytest.mark.parametrize("command", ASKED_EVEN_THEN)
def test_what_runs_or_writes_something_else_is_asked_about_even_under_a_rule_that_allows_everything(
    desk: Desk, command: str
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


def test_the_corpus_is_large() -> None:
    assert len(ALLOWED_BY_A_RULE_FOR_EVERYTHING) + len(ASKED_EVEN_THEN) > 200


@pytest.mark.proves("P-05a")
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
        ("sleep 300", "allow bash sleep 300", "allow"),
        ("sleep 300", "allow bash sleep *", "deny"),
    ],
)
def test_a_rule_lifts_the_policy_for_a_program_only_by_naming_its_words(
    desk: Desk, command: str, rule: str, answer: str
) -> None:
    assert desk.bash(command, rule).action == answer
    if answer == "allow":
        assert desk.bash(command, rule.replace("allow bash", "allow shell.run"), "allow bash").action == "allow"


@pytest.mark.proves("P-05a")
@given(st.sampled_from([c for c in ASKED_EVEN_THEN if c]))
def test_what_always_would_store_answers_exactly_that_command(desk: Desk, command: str) -> None:
    verdict = desk.bash(command)
    if verdict.always is None:
        return
    assert desk.bash(command, verdict.always).action == "allow"
    assert desk.bash(command + " more", verdict.always).action == "ask"
    assert desk.bash(command + " -x", verdict.always).action == "ask"
    assert desk.bash("x " + command, verdict.always).action == "ask"


@pytest.mark.proves("P-05a")
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
def test_a_denied_program_is_denied_however_it_is_reached(desk: Desk, command: str) -> None:
    assert desk.bash(command, "allow bash", "deny bash rm *").action == "deny"
    assert desk.bash(command, "allow bash", "deny shell.run rm *").action == "deny"


@pytest.mark.proves("P-05a")
@pytest.mark.parametrize(
    "command",
    [
        "sleep 300",
        "sleep 5m",
        "sleep 1h; echo done",
        "sleep 6 && sleep 6",
        "/bin/sleep 60",
        "sleep infinity",
        "sleep 9e9 9 || sleep 99",
    ],
)
def test_a_command_that_only_waits_is_answered_with_what_to_do_instead(desk: Desk, command: str) -> None:
    verdict = desk.bash(command, "allow bash")
    if "9e9" in command:  # not a duration of ours, so nothing is claimed about it
        assert verdict.action == "allow"
        return
    assert verdict.action == "deny"
    assert "only waits" in verdict.reason
    assert "Run the command" in verdict.reason


def test_a_short_wait_or_one_beside_work_is_no_pure_wait(desk: Desk) -> None:
    assert desk.bash(f"sleep {LONGEST_WAIT_S}", "allow bash").action == "allow"
    assert desk.bash("sleep 30 && make", "allow bash").action == "allow"


@pytest.mark.proves("P-05a")
def test_an_argv_without_a_shell_is_judged_as_the_one_command_it_is(desk: Desk) -> None:
    assert desk.judge(GIT, {"argv": ["git", "status"]}, "allow git.status git *").action == "allow"
    assert desk.judge(GIT, {"argv": ["git", "*", "$x"]}, "allow git.status git *").action == "allow"
    assert desk.judge(GIT, {"argv": ["git", "-c", "a=b", "x"]}, "allow git.status").action == "ask"
    assert desk.judge(GIT, {"argv": ["ls"]}, "allow git.status").action == "deny"
    assert desk.judge(GIT, {"argv": []}, "allow git.status").action == "deny"


@pytest.mark.proves("P-05a", "K-10a")
def test_a_tool_that_requires_one_program_may_not_run_a_text_that_cannot_be_read(desk: Desk) -> None:
    verdict = desk.judge(GIT, {"argv": "git $(ls)"}, "allow git.status")
    assert verdict.action == "deny"
    assert "requires" in verdict.reason


@given(st.lists(st.text(max_size=8), min_size=1, max_size=5))
def test_no_argv_makes_the_policies_for_programs_raise(argv: list[str]) -> None:
    found = concern(argv)
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
def test_the_words_of_a_concern_are_words_of_the_command_and_naming_all_of_them_lifts_it(
    desk: Desk, program: str, words: list[str]
) -> None:
    argv = [program, *words]
    found = concern(argv)
    command = literal_words(argv)
    assert desk.bash(command, "allow bash").action == ("allow" if found is None else "ask")
    assert desk.bash(command, f"allow bash {command}").action == "allow"
    if found is not None:
        assert found.words <= frozenset(range(len(argv)))
        assert found.reason


def test_a_tool_of_another_kind_that_runs_programs_is_held_to_the_same_policies(desk: Desk) -> None:
    may = desk.may(HELPER, {"x": 1}, book("allow helper", "deny shell.run rm *"))
    assert may("shell.run", ["ls", "-l"]) is None
    assert may("shell.run", "ls -l && git status") is None
    assert "rm" in (may("shell.run", ["rm", "x"]) or "")
    assert may("shell.run", "ls && rm x") is not None
    assert may("shell.run", ["sudo", "ls"]) is not None
    assert may("shell.run", "ls $(x)") is not None
