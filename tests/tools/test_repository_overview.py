"""``repo_overview``: the content of a repository, and the files for a task, as current as ``grep``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.tools.repositories import create_repository

from handrail.contract.session_protocols import Session
from handrail.runtime import repository_index
from handrail.runtime.repository_index import IndexedFileState, RepositoryWordIndex, decode_text, outline
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("T-06p")

FILES = {
    "src/parser.py": '"""Parse tabs and spaces."""\n\nclass Parser:\n    def parse_line(self, text):\n        return text\n',
    "src/writer.py": '"""Write reports."""\n\ndef write_report(rows):\n    return rows\n',
    "src/broken.py": "def half_written(:\n    pass\nclass Other:\n",
    "web/app.ts": "export class LoginForm {}\nexport const sendPassword = async (name: string) => {}\n",
    "docs/guide.md": "# Guide\n\nHow to write.\n",
    "data.bin": "\0\1\2",
    "notes.unknown": "tabs tabs",
}


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def overview(session: Session, **arguments: Any) -> dict[str, Any]:
    result = await session.call("repo_overview", arguments)
    assert result.ok, result.error_text
    return result.data


async def matches(session: Session, focus: str, **arguments: Any) -> list[str]:
    return [one["path"] for one in (await overview(session, focus=focus, **arguments))["matches"]]


async def test_an_overview_counts_files_and_lines_and_lists_the_commands_of_manifests(tmp_path: Path) -> None:
    put(
        tmp_path / "ws",
        {
            **FILES,
            "pyproject.toml": '[project]\nname = "x"\n[project.scripts]\nxtool = "x:main"\n[dependency-groups]\ndev = ["pytest>=8"]\n',
            "package.json": '{"scripts": {"test": "vitest", "start": "vite"}, "bin": {"cli": "cli.js"}}',
            "Makefile": "test: build\n\trun\nrun:\n\ttrue\nCC := gcc\n",
            "Cargo.toml": '[package]\nname = "rusty"\n',
            "go.mod": "module example.org/thing\n",
            "inner/package.json": '{"scripts": {"test": "jest"}}',
        },
    )
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        data = await overview(session)
        assert data["files"] == 13 and "src/ (3 files)" in data["tree"] and "parser.py" in data["tree"]
        assert {"name": "TypeScript", "files": 1, "lines": 2} in data["languages"]
        assert data["languages"][0] == {"name": "Python", "files": 3, "lines": 12}
        assert {"xtool = x:main", "npm run start: vite", "cli = cli.js", "make run", "cargo run (rusty)"} <= {
            *data["entry_points"]
        }
        assert data["test_commands"] == ["make test", "pytest", "npm test: vitest", "cargo test", "go test ./..."]
        assert "matches" not in data
        inner = await overview(session, path="inner")
        assert (inner["path"], inner["test_commands"]) == ("inner", ["npm test: jest"])


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", "null", '{"scripts": 3, "bin": [], "main": {}}', '{"scripts": {"test": null}}', "\ufeff{}"),
        pytest.param(f"{'a.' * 100_000}a = 1", id="a key with many parts"),
        pytest.param(f"[{'a.' * 100_000}a]", id="a table with many parts"),
        pytest.param(f"a = {'[' * 200_000}", id="many brackets"),
    ],
)
@pytest.mark.parametrize("name", ["package.json", "pyproject.toml", "Cargo.toml", "go.mod", "Makefile"])
async def test_an_unreadable_manifest_causes_no_error_in_the_overview(tmp_path: Path, name: str, text: str) -> None:
    from handrail.tools.files.repository_overview import _read_manifests  # pyright: ignore[reportPrivateUsage]

    entry_points, commands = _read_manifests({name: text})
    assert all(isinstance(one, str) for one in (*entry_points, *commands))


async def test_a_focus_finds_matching_files_by_words_with_an_outline(tmp_path: Path) -> None:
    put(tmp_path / "ws", FILES)
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        data = await overview(session, focus="Parsing of tabs fails in lines")
        assert data["matches"][0] == {
            "path": "src/parser.py",
            "outline": ["3: class Parser", "4: Parser.parse_line(text)"],
        }
        assert (await matches(session, "the login form sends no password"))[0] == "web/app.ts"
        broken = (await overview(session, focus="half written"))["matches"][0]
        assert broken["path"] == "src/broken.py" and "1: def half_written" in broken["outline"]
        assert await matches(session, "xyzzy") == []
        assert await matches(session, "the of and") == []
        assert await matches(session, "writing reports", path="docs") == ["docs/guide.md"]


def rank(files: dict[str, str], query: str) -> list[str]:
    index = RepositoryWordIndex()
    states = [(f"/r/{name}", name, IndexedFileState(1, at, 1, 1, 1)) for at, name in enumerate(files)]
    index.update(states, lambda at: files[states[at][1]].encode())
    return [path.removeprefix("/r/") for path, _ in index.rank([path for path, _, _ in states], query, 10)]


@pytest.mark.parametrize(
    "test", ["tests/test_harbour.py", "spec/harbour.spec.ts", "src/HarbourTest.java", "pkg/harbour_test.go"]
)
def test_the_test_of_a_matching_file_ranks_above_other_files(test: str) -> None:
    files = {f"other{number}.py": "ships pass\n" for number in range(4)}
    files |= {"src/harbour.py": "ships moor at night\n" * 3, test: "assert True\n"}
    assert rank(files, "mooring ships at night")[:2] == ["src/harbour.py", test]


@pytest.mark.parametrize("name", ["tide_table", "tideTable", "TideTable", "tide-table", "other.tide_table.read"])
def test_files_that_mention_a_matching_file_rank_above_other_files(name: str) -> None:
    files = {f"other{number}.py": f"{'plain words here ' * number}\n" for number in range(30)}
    files |= {"src/tide_table.py": "compute low water\n", "src/uses.py": f"use({name})\n"}
    assert rank(files, "compute low water")[:2] == ["src/tide_table.py", "src/uses.py"]
    files |= {"src/tide_table.py": "nothing\n", "src/uses.py": f"compute low water {name}\n"}
    assert rank(files, "compute low water")[:2] == ["src/uses.py", "src/tide_table.py"]


def test_a_name_in_the_task_finds_the_file_with_that_name_in_any_style() -> None:
    files = {f"other{number}.py": "parse every line, parse the line\n" for number in range(4)}
    files |= {"reader.ts": "export const x = parseLine(text)\n"}
    assert rank(files, "fix `parse_line`")[0] == "reader.ts"


async def test_commits_with_similar_messages_find_the_files_that_they_changed(tmp_path: Path) -> None:
    repository = create_repository(tmp_path / "ws")
    for name, message in (
        ("tides.py", "Round the giraffe to whole meters"),
        ("inner/harbour.py", "Moor ships at night"),
        ("private/keys.py", "Rotate zebra stripes"),
        ("a name\nin lines.py", "Fold the umbrella\n\nIn wet weather."),
    ):
        put(repository.folder, {name: "x = 1\n"})
        repository.commit(message)
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session(rules=["deny fs.read private/**"])
        assert await matches(session, "the giraffe is not whole") == ["tides.py"]
        assert await matches(session, "wet umbrella") == ["a name⟦U+000A⟧in lines.py"]
        assert await matches(session, "zebra stripes") == [], "a rule hides the file"
        assert await matches(session, "mooring ships", path="inner") == ["inner/harbour.py"]
        put(repository.folder, {"tides.py": "x = 2\n"})
        repository.commit("Sing to the walrus")
        assert await matches(session, "walrus song") == ["tides.py"], "a new commit"
        repository.git("checkout", "-q", "-b", "other", "HEAD~1")
        assert await matches(session, "walrus song") == [], "another branch"
        repository.git("pack-refs", "--all")
        repository.git("checkout", "-q", "-")
        assert await matches(session, "walrus song") == ["tides.py"], "a packed branch"


async def test_a_new_commit_is_found_where_the_branch_or_the_repository_is_a_link(tmp_path: Path) -> None:
    outer = create_repository(tmp_path / "ws")
    put(outer.folder, {"tides.py": "x = 1\n"})
    outer.commit("Round the giraffe")
    outer.git("branch", "real")
    outer.git("symbolic-ref", "refs/heads/main", "refs/heads/real")
    inner = create_repository(tmp_path / "ws" / "inner")
    put(inner.folder, {"harbour.py": "x = 1\n"})
    inner.commit("Moor ships at night")
    (inner.folder / ".git").rename(tmp_path / "ws" / "kept")
    (inner.folder / ".git").symlink_to("../kept")
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert await matches(session, "the giraffe") == ["tides.py"]
        assert await matches(session, "mooring ships", path="inner") == ["inner/harbour.py"]
        put(outer.folder, {"tides.py": "x = 2\n"})
        outer.git("commit", "--quiet", "--message", "Sing to the walrus", "tides.py")
        put(inner.folder, {"harbour.py": "x = 2\n"})
        inner.commit("Fold the umbrella")
        assert await matches(session, "walrus song") == ["tides.py"]
        assert await matches(session, "wet umbrella", path="inner") == ["inner/harbour.py"]


async def test_a_repository_that_git_cannot_read_has_an_overview_without_history(tmp_path: Path) -> None:
    put(
        tmp_path / "ws", {"giraffe.py": "", ".git/HEAD": "ref: refs/heads/../../../../etc/passwd\n", ".git/config": "["}
    )
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert await matches(session, "the giraffe") == ["giraffe.py"]
        (tmp_path / "ws" / ".git" / "HEAD").unlink()
        os.mkfifo(tmp_path / "ws" / ".git" / "HEAD")
        assert await matches(session, "the giraffe") == ["giraffe.py"]


def test_a_commit_of_many_files_and_a_message_with_marks_change_only_the_order() -> None:
    output = b"\x01A giraffe\n\x02\0\na.py\0b.py\0\0\x01\x01odd\x02 \xff\n\x02\0\nc.py\0\0\x01empty\n\x02\0"
    assert [*repository_index.parse_history(output)] == [
        ("A giraffe\n", ["a.py", "b.py"]),
        ("\x01odd\x02 \ufffd\n", ["c.py"]),
        ("empty\n", []),
    ]
    assert [*repository_index.parse_history(b"fatal: not a git repository\n")] == []
    many = ("giraffe", [f"{number}.py" for number in range(31)])
    history = repository_index.CommitHistory([("a giraffe", ["a.py"]), many, ("zebra", [])], str.split)
    assert [*history.score_files({"giraffe": 1.0})] == ["a.py"]
    assert history.score_files({}) == repository_index.CommitHistory([], str.split).score_files({"x": 1.0}) == {}


async def test_files_that_grep_does_not_show_are_not_in_the_overview(tmp_path: Path) -> None:
    folder = create_repository(tmp_path / "ws").folder
    put(
        folder,
        {
            "seen.py": "marker = 1\n",
            "kept/secret_notes.py": "marker = 2\n",
            ".hidden/marker.py": "marker = 3\n",
            "ignored/marker.py": "marker = 4\n",
            ".gitignore": "ignored/\n",
        },
    )
    os.symlink("seen.py", folder / "marker_link.py")
    os.link(folder / "kept" / "secret_notes.py", folder / "marker_alias.py")
    async with temporary_kernel(tmp_path) as kernel:
        free = await kernel.session()
        found = await matches(free, "marker notes")
        assert {*found} == {"seen.py", "kept/secret_notes.py", "marker_alias.py"}
        bound = await kernel.session(rules=["deny fs.read kept/**"])
        await bound.call("grep", {"pattern": "marker"})
        grepped = (await bound.call("grep", {"pattern": "marker"})).data["matches"]
        data = await overview(bound, focus="marker notes")
        assert [one["path"] for one in data["matches"]] == [one["path"] for one in grepped] == ["seen.py"]
        assert "secret_notes" not in str(data)
        assert {*await matches(free, "marker notes", path="ignored")} == {"ignored/marker.py"}


async def test_the_overview_index_follows_every_change_of_a_file(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    put(workspace, {"a.py": "old = 1\n", "b.py": "other = 1\n"})
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert await matches(session, "giraffe") == []
        before = (workspace / "a.py").stat()
        (workspace / "a.py").write_text("giraffe\n"[:8])
        os.utime(workspace / "a.py", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert await matches(session, "giraffe") == ["a.py"], "the same size and time of change"
        (workspace / "a.py").rename(workspace / "moved.py")
        assert await matches(session, "giraffe") == ["moved.py"]
        (workspace / "moved.py").unlink()
        assert await matches(session, "giraffe") == []
        put(workspace, {"new/giraffe.txt": ""})
        assert await matches(session, "giraffe") == ["new/giraffe.txt"], "also an empty file has a path"


@pytest.mark.parametrize("tokens", [200, 500, 2_000])
async def test_the_overview_stays_within_its_token_limit(tmp_path: Path, tokens: int) -> None:
    put(
        tmp_path / "ws",
        {
            f"package_{number % 30}/module_with_a_long_name_{number}.py": "".join(
                f"def some_function_{line}(first, second):\n    pass\n" for line in range(30)
            )
            for number in range(400)
        },
    )
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        data = await overview(session, focus="some function of module 7", max_tokens=tokens)
        assert len(str(data)) <= tokens * 4 * 1.3 + 600
        assert len(data["matches"]) == 10 and data["files"] == 400 and data["tree"]


@pytest.mark.parametrize(
    ("path", "kind"), [("a.txt", "invalid_input"), ("missing", "failed"), ("../outside", "denied"), ("/etc", "denied")]
)
async def test_a_path_that_is_not_a_workspace_folder_is_refused(tmp_path: Path, path: str, kind: str) -> None:
    put(tmp_path / "ws", {"a.txt": "x"})
    async with temporary_kernel(tmp_path) as kernel:
        result = await (await kernel.session()).call("repo_overview", {"path": path})
        assert result.error_kind == kind


async def test_an_overview_does_not_count_as_reading_a_file(tmp_path: Path) -> None:
    put(tmp_path / "ws", {"package.json": "{}"})
    async with temporary_kernel(tmp_path, rules=["allow write **"]) as kernel:
        session = await kernel.session()
        await overview(session, focus="package")
        assert (await session.call("write", {"path": "package.json", "content": "x"})).error_kind == "conflict"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.go",
            "package a\nfunc (s *Server) Serve() error {\ntype Server struct {\n",
            ["func (s *Server) Serve", "type Server"],
        ),
        ("a.rs", "pub async fn run(x: u8) {\nimpl Display for X {\n", ["pub async fn run", "impl Display for X"]),
        ("a.js", "export default function main() {\nconst f = (x) => x\n", ["export default function main"]),
        (
            "A.java",
            "public class A {\n  private static int add(int a) {\n",
            ["public class A", "private static int add"],
        ),
        ("a.c", "static int add(int a, int b) {\nstruct point {\n", ["static int add"]),
        ("a.rb", "module A\n  def b?\n", ["module A", "def b?"]),
        ("a.sh", "function go {\nstop() {\n", ["function go", "stop()"]),
        ("a.pyi", "async def f(a, b): ...\n", ["f(a, b)"]),
        ("a.unknown", "def f(): pass\n", []),
        ("Makefile", "def f(): pass\n", []),
        ("deep.py", "(" * 5_000 + "\ndef f(): pass\n", ["def f"]),
    ],
)
def test_definitions_are_found_in_each_language(name: str, text: str, expected: list[str]) -> None:
    found = [entry.text for entry in outline(name, text)]
    assert len(found) >= len(expected) and all(any(one.startswith(want) for one in found) for want in expected), found


def test_binary_content_is_not_decoded_as_text_and_utf_16_is() -> None:
    assert decode_text(b"a\0b") is None
    assert decode_text("\ufeffab".encode("utf-16-le")) == "ab"
    assert decode_text(b"\xef\xbb\xbfab\xff") == "ab\ufffd"


def test_replaced_and_absent_files_are_removed_from_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository_index, "_MOST_ABSENT", 10)
    index = RepositoryWordIndex()
    for turn in range(1_500):
        state = IndexedFileState(1, 1, 1, turn, turn)
        index.update([("/a.txt", "a.txt", state)], lambda _, turn=turn: f"word{turn}".encode())
    assert len(index._lengths) < 1_500  # pyright: ignore[reportPrivateUsage]
    assert [path for path, _ in index.rank(["/a.txt"], "word1499", 5)] == ["/a.txt"]
    assert index.rank(["/a.txt"], "word77", 5) == [] or index.rank(["/a.txt"], "1498", 5) == []
    many = [(f"/{n}.txt", f"{n}.txt", IndexedFileState(1, n, 1, 1, 1)) for n in range(50)]
    index.update(many, lambda n: b"zebra")
    index.update([("/a.txt", "a.txt", IndexedFileState(1, 1, 1, 9, 9))], lambda _: b"zebra")
    assert index.count_lines("/3.txt") is None and index.count_lines("/a.txt") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["justfile", "Makefile", "package.json", "pyproject.toml", "setup.cfg", "Cargo.toml", "go.mod"]
)
@pytest.mark.parametrize("unit", ["A", "a-", "a\n", "a ", "@a ", "[", '{"a":', "module "])
async def test_a_manifest_made_to_be_slow_is_read_in_one_pass(tmp_path: Path, name: str, unit: str) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        put(tmp_path / "ws", {name: unit * (250_000 // len(unit)), "src/parser.py": FILES["src/parser.py"]})
        await overview(await kernel.session())
