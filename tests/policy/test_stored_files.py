"""Commands that print what a git repository stores: they ask if it stores a file that the rules hide."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.policy.desk import BASH, Desk, rule

from handrail.policy import stored_paths
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.rules.rules_and_modes import default_book, with_mode
from handrail.policy.shell.parser import parse_script
from handrail.policy.shell.stored_file_forms import find_stored_file_accesses

pytestmark = [pytest.mark.proves("P-16"), pytest.mark.usefixtures("git_identity")]

SPEC = replace(BASH, single_command=True)


@pytest.fixture
def git_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "x")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "x@example.org")
    monkeypatch.setenv("HOME", str(tmp_path))


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True).stdout


def commit(folder: Path, files: dict[str, str], message: str = "x") -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-f", "-A", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, {"a.py": "1\n", "sub/deep/b.py": "2\n"})
    return folder


def judge(folder: Path, command: str, *rules: str, mode: str = "ask") -> PolicyVerdict:
    """The decision of a default session, after the history was read."""
    desk = Desk(folder)
    book = with_mode(default_book().with_rules(*map(rule, rules)), mode)  # type: ignore[arg-type]

    def evaluate() -> PolicyVerdict:
        return desk.authority.evaluate(SPEC, {"command": command}, rules=book, roots=desk.roots)

    verdict = evaluate()
    for one in desk.authority.list_unread_histories(verdict):
        assert verdict.action == "ask", "a history that was not read allows nothing"
        assert one.git_folder is not None
        stored_paths.load_history(one.git_folder)
    return evaluate()


def add_secret(folder: Path) -> None:
    commit(folder, {".env": "KEY=1\n"})


def take_secret_back(folder: Path) -> None:
    add_secret(folder)
    git(folder, "rm", "-q", ".env")
    commit(folder, {})


def take_secret_back_and_pack(folder: Path) -> None:
    take_secret_back(folder)
    git(folder, "gc", "-q")


def keep_secret_on_another_branch(folder: Path) -> None:
    git(folder, "switch", "-q", "-c", "other")
    add_secret(folder)
    git(folder, "switch", "-q", "main")


def stash_secret(folder: Path) -> None:
    (folder / ".env").write_text("KEY=1\n")
    git(folder, "stash", "-q", "--include-untracked")


def rename_folder_with_secret(folder: Path) -> None:
    commit(folder, {"old/conf/.npmrc": "token\n"})
    git(folder, "mv", "old", "new")
    commit(folder, {})
    git(folder, "rm", "-r", "-q", "new")
    commit(folder, {})


HISTORY = [
    "git log -p", "git log -p -1", "git show", "git show main", "git diff HEAD~1", "git diff --cached", "git stash show -p", "git grep KEY HEAD",
    "git -C sub log -p", "cd sub && git log -p", "git lg", "git archive HEAD", "sh -c 'git log -p'", "git rev-list HEAD | xargs git show",
    "diff <(git show HEAD:a.py) a.py", "git fast-export --all", "/usr/bin/git log -p", "timeout 5 git log -p", "x=1; git log -p $x",
    "git --git-dir=.git log -p", "git log -p --submodule=diff", "git reflog -p", "git diff-tree -p HEAD",
    "g\\it show", "g''it show", '"g"it log -p', "$'\\x67it' show", "g{i,}t show", "x=g; y=it; $x$y show", "$(echo g)it show", "X=it; g$X log -p", "bash -c $'\\x67it show'",
    "git worktree add wt HEAD", "git bisect view -p", "git update-index --add --cacheinfo 100644,HEAD,open.txt",
    "git update-index --cacheinfo=100644,HEAD,open.txt", "git update-index --index-info", "git read-tree --prefix=out HEAD:sub",
]  # fmt: skip
INDEX = ["git checkout-index a.py", "git diff", "git diff -- a.py", "git grep KEY", "git blame a.py"]
TRANSFERS = ["git clone . cl", "git clone -q sub cl", "git fetch ../ws main", "git pull -q .. main", "git push ./x.git main"]  # fmt: skip
"""Commands that copy the files of a repository to other paths."""
SUMMARIES = [
    "git status", "git status --short", "git log --oneline", "git log --oneline -5 | head", "git log --stat", "git diff --stat", "git diff --name-only HEAD~1",
    "git show --stat", "git branch -a", "git add -A", "git commit -m 'Show git log -p'", "git switch -c x", "git merge x", "git rev-parse HEAD",
    "grep -rn 'git show' .", "pytest -q", "git ls-files | wc -l", "git stash", "git tag v1", "git shortlog -sn",
]  # fmt: skip


def test_a_copy_of_a_repository_is_allowed_by_no_rule_that_leaves_words_open(repository: Path) -> None:
    rules = (
        "allow bash",
        *(f"allow bash git {verb} *" for verb in ("clone", "fetch", "pull", "push")),
    )
    assert {judge(repository, command, *rules).action for command in TRANSFERS} == {"allow"}
    add_secret(repository)
    assert {judge(repository, command, *rules).action for command in TRANSFERS} == {"ask"}


@pytest.mark.parametrize("mode", ["ask", "accept-edits", "auto"])
def test_a_repository_without_hidden_files_is_shown_unasked(repository: Path, mode: str) -> None:
    for command in (*HISTORY, *INDEX, *SUMMARIES):
        if "--git-dir" not in command and "--submodule" not in command:
            assert judge(repository, command, mode=mode).action == "allow", command


@pytest.mark.parametrize(
    "spoil",
    [
        add_secret,
        take_secret_back,
        take_secret_back_and_pack,
        keep_secret_on_another_branch,
        stash_secret,
        rename_folder_with_secret,
    ],
)
def test_a_hidden_file_in_the_history_asks_and_summaries_do_not(
    repository: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(repository)
    for command in HISTORY:
        verdict = judge(repository, command)
        assert verdict.action == "ask", command
    assert "as the repository stores" in judge(repository, "git log -p").reason
    for command in SUMMARIES:
        assert judge(repository, command).action == "allow", command


@pytest.mark.parametrize(
    "rules",
    [
        ("allow bash",),
        ("allow shell.run",),
        ("allow bash git …",),
        ("allow bash git log …", "allow bash git diff …", "allow bash git show …"),
        ("allow bash {confined}",),
        ("allow bash git log *", "allow bash git show *", "allow bash git diff *"),
    ],
)
def test_only_a_rule_that_names_every_word_allows_it(repository: Path, rules: tuple[str, ...]) -> None:
    add_secret(repository)
    for command in ("git log -p", "git show HEAD", "git diff HEAD~1", "git show", "git diff"):
        assert judge(repository, command, *rules).action == "ask", command
        assert judge(repository, command, f"allow bash {command}").action == "allow", command


def test_the_rules_of_the_operator_say_what_is_hidden(repository: Path) -> None:
    commit(repository, {"private/plan.txt": "x\n"})
    assert judge(repository, "git log -p").action == "allow"
    assert judge(repository, "git log -p", "deny fs.read private/**").action == "ask"
    assert judge(repository, "git log -p", "ask fs.read private/**").action == "ask"
    assert judge(repository, "git log -p", "deny fs.read elsewhere/**").action == "allow"
    add_secret(repository)
    assert judge(repository, "git log -p").action == "ask"
    assert judge(repository, "git log -p", "allow fs.read .env").action == "allow"
    assert judge(repository, "git log -p", "allow *").action == "allow"


def test_a_comparison_with_the_index_asks_only_about_the_index(repository: Path) -> None:
    take_secret_back(repository)
    for command in INDEX:
        assert judge(repository, command).action == "allow", command
    add_secret(repository)
    for command in INDEX:
        assert judge(repository, command).action == "ask", command


def test_an_example_of_a_secret_file_is_not_hidden(repository: Path) -> None:
    commit(repository, {".env.example": "KEY=\n"})
    assert judge(repository, "git log -p").action == "allow"
    assert judge(repository, "cp .env.example settings.example").action == "allow"
    assert judge(repository, "cp .env settings.example").action == "ask"


def test_what_is_committed_later_counts_at_once(repository: Path) -> None:
    assert judge(repository, "git log -p").action == "allow"
    add_secret(repository)
    assert judge(repository, "git log -p").action == "ask"


@pytest.mark.parametrize("name", ["HEAD", "pack", "index", "config", "alternate"])
def test_a_repository_that_cannot_be_read_asks(repository: Path, name: str) -> None:
    if name == "HEAD":
        (repository / ".git").rename(repository / "store")
        (repository / ".git").write_text("not a pointer\n")
    elif name == "pack":
        git(repository, "gc", "-q")
        for path in (repository / ".git/objects/pack").glob("*.pack"):
            path.chmod(0o600)
            path.write_bytes(b"PACK" + bytes(100))
    elif name == "index":
        (repository / ".git/index").write_bytes(b"DIRC\0\0\0\x09")
        assert judge(repository, "git diff").action == "ask"
    elif name == "config":
        with (repository / ".git/config").open("a") as file:
            file.write("[extensions]\n\tobjectFormat = sha256\n")
    else:
        other = repository.parent / "other"
        git(repository.parent, "clone", "-q", "--bare", str(repository), str(other))
        take_secret_back(repository)
        (repository / ".git/objects").rename(repository.parent / "kept")
        (repository / ".git/objects/info").mkdir(parents=True)
        (repository / ".git/objects/info/alternates").write_text(f"{repository.parent / 'kept'}\n")
    assert judge(repository, "git log -p").action == "ask"
    assert judge(repository, "git log --oneline").action == "allow"


def test_a_repository_in_a_folder_is_judged_by_its_own_files(repository: Path) -> None:
    inner = repository / "vendor/lib"
    inner.mkdir(parents=True)
    git(inner, "init", "-q")
    commit(inner, {".npmrc": "x\n"})
    assert judge(repository, "git log -p").action == "allow"
    for command in ("git -C vendor/lib log -p", "cd vendor/lib && git show", "(cd vendor && git -C lib diff)"):
        assert judge(repository, command).action == "ask", command


def test_a_linked_work_tree_is_judged_by_the_repository(repository: Path, tmp_path: Path) -> None:
    take_secret_back(repository)
    linked = tmp_path / "linked"
    git(repository, "worktree", "add", "-q", str(linked), "-b", "other")
    assert judge(linked, "git log -p").action == "ask"
    assert judge(linked, "git diff").action == "allow"


def test_the_stored_paths_are_those_that_git_names(repository: Path) -> None:
    for number in range(40):
        commit(
            repository, {f"src/pkg{number % 7}/module {number}.py": "x = 1\n" * number, "sub/deep/ü.txt": str(number)}
        )
    git(repository, "gc", "-q")
    commit(repository, {"loose/file": "x"})
    store = str(repository / ".git")
    stored_paths.load_history(store)
    named = git(repository, "log", "--all", "--format=", "--name-only", "-z").replace("\n", "").split("\0")
    assert stored_paths.list_history_paths(store) == (True, frozenset(named) - {""})
    indexed = git(repository, "ls-files", "-z").split("\0")
    assert stored_paths.list_indexed_paths(store) == frozenset(indexed) - {""}
    git(repository, "update-index", "--index-version", "4")
    assert stored_paths.list_indexed_paths(store) == frozenset(indexed) - {""}


def test_no_repository_prints_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    assert judge(folder, "git log -p").action == "allow"


@pytest.mark.parametrize(
    "text", ["ls", "echo digits", "git status", "cat .gitignore", "grep -rn 'git log' .", "git push"]
)
def test_a_text_that_prints_no_stored_file_reads_no_repository(text: str) -> None:
    assert find_stored_file_accesses(parse_script(text), text) == []
