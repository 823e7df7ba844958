"""Commands that print what a git repository stores: they ask if it stores a file that the rules hide."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.policy.desk import BASH, AuthorizerFixture, rule

from handrail.policy import stored_paths
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.rules.rules_and_modes import build_default_rule_book, with_mode
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
    desk = AuthorizerFixture(folder)
    book = with_mode(build_default_rule_book().with_rules(*map(rule, rules)), mode)  # type: ignore[arg-type]

    def evaluate() -> PolicyVerdict:
        return desk.authority.evaluate(SPEC, {"command": command}, rules=book, roots=desk.roots)

    verdict = evaluate()
    assert verdict.action != "allow" or not desk.authority.list_repositories_with_unread_history(verdict)
    asyncio.run(
        stored_paths.load_and_check_repository_histories(
            lambda: desk.authority.list_repositories_with_unread_history(evaluate())
        )
    )
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


def test_a_wildcard_rule_does_not_allow_transferring_a_repository_that_stores_a_secret(repository: Path) -> None:
    rules = (
        "allow bash",
        *(f"allow bash git {verb} *" for verb in ("clone", "fetch", "pull", "push")),
    )
    assert {judge(repository, command, *rules).action for command in TRANSFERS} == {"allow"}
    add_secret(repository)
    assert {judge(repository, command, *rules).action for command in TRANSFERS} == {"ask"}


@pytest.mark.parametrize("mode", ["ask", "accept-edits", "auto"])
def test_git_output_of_a_repository_without_hidden_files_is_allowed(repository: Path, mode: str) -> None:
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
def test_a_hidden_file_in_the_history_makes_history_commands_ask_but_not_summaries(
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
def test_only_a_rule_naming_every_word_allows_printing_from_a_repository_with_a_secret(
    repository: Path, rules: tuple[str, ...]
) -> None:
    add_secret(repository)
    for command in ("git log -p", "git show HEAD", "git diff HEAD~1", "git show", "git diff"):
        assert judge(repository, command, *rules).action == "ask", command
        assert judge(repository, command, f"allow bash {command}").action == "allow", command


def test_the_operators_rules_decide_which_stored_files_are_hidden(repository: Path) -> None:
    commit(repository, {"private/plan.txt": "x\n"})
    assert judge(repository, "git log -p").action == "allow"
    assert judge(repository, "git log -p", "deny fs.read private/**").action == "ask"
    assert judge(repository, "git log -p", "ask fs.read private/**").action == "ask"
    assert judge(repository, "git log -p", "deny fs.read elsewhere/**").action == "allow"
    add_secret(repository)
    assert judge(repository, "git log -p").action == "ask"
    assert judge(repository, "git log -p", "allow fs.read .env").action == "allow"
    assert judge(repository, "git log -p", "allow *").action == "allow"


def test_a_diff_against_the_index_asks_only_if_the_index_has_hidden_files(repository: Path) -> None:
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


def test_a_secret_committed_later_affects_the_next_decision(repository: Path) -> None:
    assert judge(repository, "git log -p").action == "allow"
    add_secret(repository)
    assert judge(repository, "git log -p").action == "ask"


@pytest.mark.parametrize("name", ["HEAD", "pack", "index", "config", "alternate"])
def test_an_unreadable_repository_makes_git_output_ask(repository: Path, name: str) -> None:
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


def test_a_nested_repository_is_checked_by_its_own_files(repository: Path) -> None:
    inner = repository / "vendor/lib"
    inner.mkdir(parents=True)
    git(inner, "init", "-q")
    commit(inner, {".npmrc": "x\n"})
    assert judge(repository, "git log -p").action == "allow"
    for command in ("git -C vendor/lib log -p", "cd vendor/lib && git show", "(cd vendor && git -C lib diff)"):
        assert judge(repository, command).action == "ask", command


def test_a_linked_work_tree_is_checked_by_its_main_repository(repository: Path, tmp_path: Path) -> None:
    take_secret_back(repository)
    linked = tmp_path / "linked"
    git(repository, "worktree", "add", "-q", str(linked), "-b", "other")
    assert judge(linked, "git log -p").action == "ask"
    assert judge(linked, "git diff").action == "allow"


def test_the_stored_paths_equal_the_paths_that_git_lists(repository: Path) -> None:
    for number in range(40):
        commit(
            repository, {f"src/pkg{number % 7}/module {number}.py": "x = 1\n" * number, "sub/deep/ü.txt": str(number)}
        )
    git(repository, "gc", "-q")
    commit(repository, {"loose/file": "x"})
    store = str(repository / ".git")
    stored_paths.load_and_check_repository_history(store)
    named = git(repository, "log", "--all", "--format=", "--name-only", "-z").replace("\n", "").split("\0")
    assert stored_paths.get_known_history_paths(store) == (True, frozenset(named) - {""})
    indexed = git(repository, "ls-files", "-z").split("\0")
    assert stored_paths.get_current_index_paths(store) == (True, frozenset(indexed) - {""})
    git(repository, "update-index", "--index-version", "4")
    assert stored_paths.get_current_index_paths(store) == (True, frozenset(indexed) - {""})


def test_a_git_log_outside_a_repository_is_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    assert judge(folder, "git log -p").action == "allow"


@pytest.mark.parametrize(
    "text", ["ls", "echo digits", "git status", "cat .gitignore", "grep -rn 'git log' .", "git push"]
)
def test_a_command_that_prints_no_stored_file_does_not_read_the_repository(text: str) -> None:
    assert find_stored_file_accesses(parse_script(text), text) == []


_READ_PLACES = {
    "the link to the store": ".git",
    "the index": ".git/index",
    "the folder of the objects": ".git/commondir",
    "borrowed objects": ".git/objects/info/alternates",
    "the configuration": ".git/config",
    "an object": f".git/objects/aa/{'b' * 38}",
    "the index of a pack": f".git/objects/pack/pack-{'c' * 40}.idx",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a pipe"])
@pytest.mark.parametrize("place", _READ_PLACES.values(), ids=_READ_PLACES)
@pytest.mark.parametrize("text", ["git log -p", "git grep x", "cd sub && git show HEAD~1"])
def test_no_file_of_a_repository_is_waited_for(repository: Path, place: str, kind: str, text: str) -> None:
    """A pipe can name another store when git reads it, so its stored files are unknown."""
    subject = repository / place
    subject.parent.mkdir(parents=True, exist_ok=True)
    if place == ".git":
        subject.rename(repository / ".moved")
    subject.unlink(missing_ok=True)
    if kind == "device":
        subject.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(subject)
    else:
        os.mkfifo(repository / ".pipe")
        subject.symlink_to(repository / ".pipe")
    needs_history = "grep" not in text or place in (".git", ".git/index")
    assert judge(repository, text).action == ("ask" if needs_history else "allow")


def test_a_pack_that_is_cut_while_it_is_read_makes_the_history_unknown(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        commit(repository, {f"f{number}": str(number) * 5_000})
    git(repository, "gc", "-q")
    (pack,) = (repository / ".git/objects/pack").glob("*.pack")
    pack.chmod(0o600)
    opened = stored_paths._PackFile  # pyright: ignore[reportPrivateUsage]

    def cut(index: bytes, descriptor: int, length: int) -> object:
        os.truncate(pack, 12)
        return opened(index, descriptor, length)

    monkeypatch.setattr(stored_paths, "_PackFile", cut)
    assert judge(repository, "git log -p").action == "ask"


def _pack(repository: Path, objects: list[tuple[int, bytes, bytes]]) -> None:
    """Write a pack of objects, each with its kind, the part of its header after the size, and its content, with its index."""
    data, places = b"PACK" + struct.pack(">II", 2, len(objects)), list[tuple[bytes, int]]()
    for number, (kind, rest, content) in enumerate(objects):
        places.append((struct.pack(">I", number) + b"\0" * 16, len(data)))
        size = len(content)
        head, size = [(kind << 4) | (size & 15)], size >> 4
        while size:
            head[-1] |= 0x80
            head.append(size & 0x7F)
            size >>= 7
        data += bytes(head) + rest + zlib.compress(content, 9)
    folder = repository / ".git/objects/pack"
    (folder / "pack-x.pack").write_bytes(data + b"\0" * 20)
    names = b"".join(name for name, _ in places)
    offsets = b"".join(struct.pack(">I", offset) for _, offset in places)
    fan = struct.pack(">256I", *[len(places)] * 256)
    (folder / "pack-x.idx").write_bytes(
        b"\xfftOc\0\0\0\2" + fan + names + b"\0" * 4 * len(places) + offsets + b"\0" * 40
    )


def _name(number: int) -> bytes:
    return struct.pack(">I", number) + b"\0" * 16


_TREE = b"100644 file\0" + b"\1" * 20
_HOSTILE_PACKS: dict[str, list[tuple[int, bytes, bytes]]] = {
    "a base that is elsewhere": [(7, b"\7" * 20, b"\1\1\x90\1")],
    "bases in a circle": [(7, _name(1), b"\1\1\x90\1"), (7, _name(0), b"\1\1\x90\1")],
    "large deltas": [(2, b"", _TREE), *((7, _name(number), b"\0" * 8_000_000) for number in range(40))],
    "a deep tree of long names": [
        *((2, b"", b"40000 %b\0%b100644 f\0%b" % (b"n" * 4_000, _name(at + 1), b"\1" * 20)) for at in range(3_000)),
        (2, b"", _TREE),
    ],
}


@pytest.mark.parametrize("objects", _HOSTILE_PACKS.values(), ids=_HOSTILE_PACKS)
def test_a_hostile_pack_takes_little_memory_and_makes_the_history_unknown(
    repository: Path, objects: list[tuple[int, bytes, bytes]]
) -> None:
    _pack(repository, objects)
    tracemalloc.start()
    try:
        assert judge(repository, "git log -p").action == "ask"
        assert tracemalloc.get_traced_memory()[1] < 600 * 2**20
    finally:
        tracemalloc.stop()


def test_a_change_that_keeps_size_and_time_is_read_again(repository: Path) -> None:
    commit(repository, {"b.txt": "1"})
    index = repository / ".git/index"
    assert "b.txt" in (stored_paths.get_current_index_paths(str(index.parent))[1] or ())
    before = index.stat()
    index.write_bytes(index.read_bytes().replace(b"b.txt\0", b".envx\0"))
    os.utime(index, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ".envx" in (stored_paths.get_current_index_paths(str(index.parent))[1] or ())


def test_a_long_index_is_read_before_the_decision_and_not_within_it(repository: Path) -> None:
    commit(repository, {f"folder/{number:04d}-{'x' * 200}": "" for number in range(2_500)})
    commit(repository, {".env": "KEY=1\n"})
    desk = AuthorizerFixture(repository)
    verdict = desk.authority.evaluate(
        SPEC, {"command": "git grep x"}, rules=build_default_rule_book(), roots=desk.roots
    )
    assert verdict.action == "ask" and "unknown" in str(verdict.reason)
    assert [one.scope for one in desk.authority.list_repositories_with_unread_history(verdict)] == ["index"]
    assert not [
        one for one in desk.authority.list_repositories_with_unread_history(verdict) if one.list_paths() is not None
    ]
    verdict = judge(repository, "git grep x")
    assert verdict.action == "ask" and ".env" in str(verdict.reason)


@pytest.mark.parametrize("count", [300, 5_000])
def test_the_rules_judge_many_stored_files_before_the_decision_and_not_within_it(repository: Path, count: int) -> None:
    """A decision blocks all other work, so it checks only a few names."""
    commit(repository, {f"d{number % 50}/{number}": "" for number in range(count)})
    desk = AuthorizerFixture(repository)

    def evaluate() -> PolicyVerdict:
        return desk.authority.evaluate(
            SPEC, {"command": "git log -p"}, rules=build_default_rule_book(), roots=desk.roots
        )

    stored_paths.load_and_check_repository_history(str(repository / ".git"))
    assert evaluate().action == "ask", "the names were not checked"
    asyncio.run(
        stored_paths.load_and_check_repository_histories(
            lambda: desk.authority.list_repositories_with_unread_history(evaluate())
        )
    )
    assert evaluate().action == "allow"
    take_secret_back(repository)
    asyncio.run(
        stored_paths.load_and_check_repository_histories(
            lambda: desk.authority.list_repositories_with_unread_history(evaluate())
        )
    )
    assert evaluate().action == "ask" and ".env" in evaluate().reason
