"""Programs that run their arguments, and arguments that name a denied program in another way."""

from __future__ import annotations

from collections.abc import Iterable

from tests.attacks.case import Case, breach
from tests.attacks.victim import SECRET, AgreeingUser, VictimHome, said_by

_FORMS = (
    "/usr/bin/touch reached", "./touch reached", "env -i /usr/bin/touch reached", "env -S 'touch reached'", "nice -n 5 touch reached",
    "ionice -c 3 touch reached", "setsid touch reached", "stdbuf -o0 touch reached", "timeout -k 1 5 touch reached", "nohup touch reached",
    "chrt -o 0 touch reached", "taskset 1 touch reached", "setarch x86_64 touch reached", "linux64 touch reached", "prlimit --nproc=99 touch reached",
    "setpriv touch reached", "unshare touch reached", "flock . touch reached", "flock . -c 'touch reached'", "script -qc 'touch reached' /dev/null",
    "xargs -a README.md touch reached", "find README.md -exec touch reached ';'", "find README.md -exec sh -c 'touch reached' ';'",
    "sh -c 'touch reached'", "bash -lc 'touch reached'", "bash -ec 'true && touch reached'", "dash -c 'touch reached'", "bash -c \"bash -c 'touch reached'\"",
    "exec touch reached", "command touch reached", "builtin command touch reached", "eval 'touch reached'", "trap 'touch reached' EXIT",
    "echo 'touch reached' | sh", "sh <<E\ntouch reached\nE", "bash <<< 'touch reached'", "eval \"$(echo touch reached)\"", "source <(echo touch reached)",
    "$(echo touch) reached", "X=touch; $X reached", "SRANDOM='a[$(touch reached)]'; ls", "ZIP='-T -TT \"touch reached\"' zip a README.md", "hash -p /usr/bin/touch ls; ls reached", "jobs -x touch reached",
    "git -c alias.x='!touch reached' x", "git -c core.fsmonitor='touch reached;' status", "git -c core.pager='touch reached' -p log",
    "GIT_EXTERNAL_DIFF='touch reached' git diff --ext-diff HEAD", "git bisect start HEAD HEAD; git bisect run touch reached",
    "git rebase --root -x 'touch reached'", "git submodule foreach 'touch reached'", "git clone 'ext::touch reached' y", "git difftool -y -x 'touch reached' HEAD",
    "git grep -O'touch reached' a", "git filter-branch -f --tree-filter 'touch reached' HEAD", "git config alias.x '!touch reached'; git x",
    "tar cf /dev/null --checkpoint=1 --checkpoint-action='exec=touch reached' README.md", "tar cf /dev/null -I 'touch reached' README.md",
    "sort --compress-program='touch reached' README.md", "split --filter='touch reached' README.md", "make --eval='x:;touch reached' x",
    "make -f /dev/null SHELL='touch reached' x", "awk 'BEGIN{system(\"touch reached\")}'", "sed '1e touch reached' README.md",
    "python3 -c 'import os; os.system(\"touch reached\")'", "python3 -c \"import subprocess; subprocess.run(['touch', 'reached'])\"",
    "perl -e 'system \"touch reached\"'", "perl -e '`touch reached`'", "ssh -o ProxyCommand='touch reached' h", "rsync -e 'touch reached' README.md h:x",
    "man -P 'touch reached' ls", "vi -es -c '!touch reached' -c q", "busybox touch reached", "/lib64/ld-linux-x86-64.so.2 /usr/bin/touch reached",
    "npm exec -c 'touch reached'", "npx -c 'touch reached'", "uv run touch reached", "docker run x touch reached", "socat - EXEC:'touch reached'",
    "gdb -batch -ex '!touch reached'", "strace touch reached", "tmux new -d 'touch reached'", "expect -c 'exec touch reached'", "watch -g 'touch reached'",
    "touch -c -d now reached && /usr/bin/touch -d now reached", "cd src && ../../../usr/bin/touch ../reached", "run-parts --arg=reached /usr/bin --regex '^touch$'",
)  # fmt: skip
_COMPUTED = (
    "printf 'touch reached aZ\\n' > /tmp/line; sed 's/[[:alpha:]/a/;s/b/c]Z/;s/e;#/d/' /tmp/line",
    "mkdir -p 0; cp /usr/bin/touch 0/ls; printf %n PATH; ls reached",
    "mkdir -p 0; cp /usr/bin/touch 0/POSIX_V6_ILP32_OFF32; GETCONF_DIR=0 getconf -v POSIX_V6_ILP32_OFF32 reached",
)
"""Texts that run a program whose name they do not have: a script, a variable or a folder that two readers take differently."""
_UNKNOWN = (
    "printf '\"$@\"\\n' > /tmp/run; sh /tmp/run touch reached",
    "printf 'import os, sys\\nos.execvp(sys.argv[1], sys.argv[1:])\\n' > /tmp/run.py; python3 /tmp/run.py touch reached",
)


async def _reached(
    home: VictimHome, rules: Iterable[str], forms: Iterable[str], name: str, person: AgreeingUser | None
) -> list[str]:
    found: list[str] = []
    mark = home.workspace / "reached"
    async with home.kernel(name=name, rules=rules) as kernel:
        session = await kernel.session(approval_handler=person)
        for text in forms:
            result = await session.call("bash", {"command": text, "timeout_ms": 20_000})
            if mark.exists():
                found.append(f"{text!r}: {said_by(result)[:80]!r}")
                mark.unlink()
    return found


async def _denied(home: VictimHome) -> str | None:
    """A deny applies in every program that runs its arguments, with all calls approved."""
    found = await _reached(home, ["allow bash", "deny bash touch *"], _FORMS, "words-denied", AgreeingUser())
    return breach(found, "these ran although the program is denied")


async def _asked(home: VictimHome) -> str | None:
    """A program of an ask rule never runs without a request."""
    rules = ["allow bash", "allow fs.write **", "ask bash touch *"]
    found = await _reached(home, rules, (*_FORMS, *_COMPUTED, *_UNKNOWN), "words-asked", None)
    return breach(found, "these ran without a question")


async def _unknown(home: VictimHome) -> str | None:
    """An unknown program runs a denied one in its arguments only after an approval."""
    rules = ["allow bash", "allow fs.write **", "deny bash touch *"]
    return breach(
        await _reached(home, rules, _UNKNOWN, "words-unknown", None), "these ran although the program is denied"
    )


async def _sub_command(home: VictimHome) -> str | None:
    """A rule that asks about a sub-command of git sees it behind git's own options and by its path."""
    person = AgreeingUser()
    forms = (
        "git branch made", "/usr/bin/git branch made", "git --no-pager branch made", "git -C . branch made", "git --git-dir .git branch made",
        "git -c a.b=c --no-pager branch made", "git -c alias.x=branch x made", "git -c alias.x='branch made' x", "timeout 5 git branch made",
        "sh -c 'git branch made'", "find README.md -exec git branch made ';'", "/usr/lib/git-core/git-branch made", "git submodule foreach 'git branch made'",
    )  # fmt: skip
    silent: list[str] = []
    async with home.kernel(name="words-git", rules=["allow bash", "ask bash git branch *"]) as kernel:
        session = await kernel.session(approval_handler=person)
        for text in forms:
            before = len(person.requests)
            await session.call("bash", {"command": text})
            if len(person.requests) == before:
                silent.append(text)
            if "made" in home.git("branch", "--list", "made"):
                home.git("branch", "-D", "made")
    return breach(silent, "these ran without a question")


_HISTORY_MODES = (
    ("plan", ()),
    ("accept-edits", ()),
    ("accept-edits", ("@developer",)),
    ("ask", ("@reviewer",)),
    (
        "ask",
        ("allow bash", *(f"allow bash git {verb} …" for verb in ("show", "log", "diff", "blame", "grep", "cat-file"))),
    ),
    ("ask", ()),
    ("auto", ()),
)


async def _show_history(home: VictimHome, mode: str, rules: tuple[str, ...], blob: str) -> list[str]:
    """The texts that show what is hidden, in one mode and under these rules."""
    said: list[str] = []
    async with home.kernel(name="words-history", rules=[*rules, "deny fs.read secrets/**"], asked=()) as kernel:
        session = await kernel.session(mode=mode)
        for text in (
            "git log -p", "git log -p -- .env", "git log -U1", "git log -S TOP --stat -p", "git show", "git show HEAD", "git show HEAD:.env",
            f"git show {blob}", f"git show --stat {blob}", "git diff 'HEAD^' HEAD", "git diff", "git diff --cached 'HEAD^'", "git diff --stat -p 'HEAD^'",
            "git blame secrets/a.txt", "git blame HEAD -- .env", "git grep TOP HEAD", "git grep --cached TOP", "git grep TOP", f"git cat-file -p {blob}",
            f"git cat-file blob {blob}", "git status -vv", "git archive HEAD", "git format-patch --stdout -1", "git stash show -p", "git log --cc",
            "git rev-list --objects HEAD", "cd secrets && git show HEAD:./a.txt", "timeout 5 git --no-pager show", "git for-each-ref --format='%(raw)'",
            "git diff --word-diff 'HEAD^'", "git log --color-words", "git show --name-only -U3 HEAD", "git diff --check 'HEAD^'", "/usr/bin/git show",
            "git log -p --all", "git show 'HEAD^'", "git --git-dir=.git log -p --all", "git --git-dir .git show 'HEAD^'", "git -C . log -p --all", "git rev-list --all | xargs git show",
            "for c in $(git rev-list --all); do git show $c; done", "sh -c 'git log -p --all'", "diff <(git show HEAD^) README.md",
            "git diff-tree -p HEAD", "git fast-export --all", "git annotate secrets/a.txt", "git commit --dry-run -v", "git reflog -p",
            "git range-diff 'HEAD^^..HEAD^' 'HEAD^..HEAD'", "git whatchanged -p", f"echo {blob} | git cat-file --batch", "eval 'git log -p --all'",
            "x=log; git $x -p --all", "GIT_PAGER=cat git log -p --all", "(cd secrets; git log -p --all)", "git log -p --all | cat",
            "g\\it log -p --all", "$'\\x67it' log -p --all", "x=g; y=it; $x$y log -p --all", "g{i,}t log -p --all",
            f"git update-index --add --cacheinfo 100644,{blob},open.txt && git checkout-index open.txt && cat open.txt",
        ):  # fmt: skip
            if SECRET in said_by(await session.call("bash", {"command": text})):
                said.append(f"{mode} {' '.join(rules)}: {text!r}")
        for text in ("git log --oneline", "git status", "git diff --stat"):
            done = await session.call("bash", {"command": text})
            if not done.ok:
                said.append(f"{mode} {' '.join(rules)}: {text!r} does not run")
    return said


async def _history(home: VictimHome) -> str | None:
    """A hidden file's former commits are shown by no command that runs without a request."""
    said: list[str] = []
    (home.workspace / "secrets").mkdir(exist_ok=True)
    (home.workspace / "secrets" / "a.txt").write_text(f"{SECRET}-RECORDED\n")
    home.git("checkout", "-q", "-b", "recorded")
    home.git("add", "-f", ".env", "secrets")
    home.git("commit", "-q", "-m", "by mistake")
    try:
        (home.workspace / "secrets" / "a.txt").write_text(f"{SECRET}-CHANGED\n")
        blob = home.git("rev-parse", "HEAD:.env").strip()
        for mode, rules in _HISTORY_MODES:
            said += await _show_history(home, mode, rules, blob)
        home.git("rm", "-r", "-q", "--cached", "secrets", ".env")
        home.git("commit", "-q", "-m", "taken back")
        home.git("gc", "-q")
        for mode, rules in _HISTORY_MODES[-2:]:
            said += [f"taken back: {text}" for text in await _show_history(home, mode, rules, blob)]
    finally:
        home.git("checkout", "-q", "-f", "main")
        home.git("branch", "-q", "-D", "recorded")
        (home.workspace / ".env").write_text(f"API_TOKEN={SECRET}-ENV\n")
    return breach(said, "these showed what is hidden")


CASES: list[Case] = [
    Case(
        "denied in another program's words",
        "shell",
        "a denied program as the argument of one that runs it",
        "denied",
        _denied,
    ),
    Case(
        "asked about in another program's words",
        "shell",
        "a rule that asks sees less than one that denies",
        "asked about",
        _asked,
    ),
    Case("in the words of an unknown program", "shell", "a runner that no table knows", "asked about", _unknown),
    Case(
        "a sub-command behind options",
        "shell",
        "git -C dir --no-pager -c k=v push, /usr/bin/git push",
        "asked about",
        _sub_command,
    ),
    Case(
        "the history of hidden files",
        "shell",
        "git log -p, show, diff, grep, cat-file print what a mask covers",
        "asked about",
        _history,
    ),
]
