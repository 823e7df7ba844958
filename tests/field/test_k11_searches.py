"""Reports about searches that silently find nothing, or do not show their matches."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.session_protocols import Session
from handrail.testing.scripted_kernel import temporary_kernel

NFC, NFD = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
TREE = {
    ".gitignore": "build/\n*.log\n",
    "src/a.py": "needle\n",
    "src/b.log": "needle\n",
    "src/.hidden.py": "needle\n",
    ".github/workflows/ci.yml": "needle\n",
    ".github/workflows/.more.yml": "needle\n",
    "build/out.js": "needle\n",
    "build/deep/out.py": "needle\n",
    "data/x.bin": "needle\0needle\n",
    "README.MD": "none\n",
}


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    folder = tmp_path / "ws"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    for name, text in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
async def session(tmp_path: Path, ws: Path) -> AsyncGenerator[Session]:
    async with temporary_kernel(tmp_path, rules=["allow *"]) as kernel:
        session = await kernel.session(headless=True)
        yield session
        await session.suspend()


async def call(session: Session, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call(tool, arguments)
    assert result.ok, result
    data: dict[str, Any] = result.data  # type: ignore[assignment]
    return data


async def grep(session: Session, **arguments: Any) -> list[str]:
    found = await call(session, "grep", pattern="needle", **arguments)
    return [match["path"] for match in found["matches"]]


async def glob(session: Session, pattern: str, **arguments: Any) -> list[str]:
    return (await call(session, "glob", pattern=pattern, **arguments))["paths"]


WORKFLOWS = [".github/workflows/.more.yml", ".github/workflows/ci.yml"]


@pytest.mark.parametrize(
    "pattern",
    [
        ".github/**/*.yml",
        "{.github,docs}/**/*.yml",
        "./.github/**/*.yml",
        "[.]github/**",
        ".github/",
        "**/.github/**/*.yml",
        "{,x/}.github/**",
        ".github/./workflows/*.yml",
    ],
)
async def test_a_pattern_that_names_a_hidden_folder_finds_its_files(session: Session, pattern: str) -> None:
    assert await grep(session, glob=pattern) == WORKFLOWS
    assert await glob(session, pattern) == WORKFLOWS


async def test_only_a_pattern_alternative_with_a_dot_matches_hidden_files(session: Session) -> None:
    assert await glob(session, "{src,.github}/**") == [*WORKFLOWS, "src/a.py"]
    assert await grep(session, glob="{src,.github}/**") == [*WORKFLOWS, "src/a.py"]
    assert await glob(session, "src/.*") == ["src/.hidden.py"]


@pytest.mark.parametrize("arguments", [{"path": "build"}, {"path": "build/"}, {"glob": "build/**"}, {"glob": "build/"}])
async def test_an_ignored_folder_is_searched_if_it_is_named(session: Session, arguments: dict[str, str]) -> None:
    assert await grep(session, **arguments) == ["build/deep/out.py", "build/out.js"]
    pattern = arguments.get("glob", "**")
    assert await glob(session, pattern, path=arguments.get("path", ".")) == ["build/deep/out.py", "build/out.js"]


async def test_a_named_subfolder_of_an_ignored_folder_and_an_ignored_file_are_searched(session: Session) -> None:
    assert await grep(session, path="build/deep") == ["build/deep/out.py"]
    assert await grep(session, path="src/b.log") == ["src/b.log"]
    assert await glob(session, "deep/*.py", path="build") == ["build/deep/out.py"]
    assert (await call(session, "tree", path="build"))["files"] == 2


async def test_ignore_files_above_a_named_folder_still_apply_if_it_is_not_ignored(session: Session) -> None:
    assert await grep(session, path="src") == ["src/a.py"]
    assert await glob(session, "src/*") == ["src/a.py"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"hidden": True}, [*WORKFLOWS, "src/.hidden.py", "src/a.py"]),
        ({"ignored": True}, ["build/deep/out.py", "build/out.js", "src/a.py", "src/b.log"]),
    ],
)
async def test_hidden_and_ignored_files_are_included_on_request(
    session: Session, arguments: dict[str, Any], found: list[str]
) -> None:
    assert await grep(session, **arguments) == found
    assert set(found) <= set(await glob(session, "**", **arguments))
    assert (await call(session, "tree", **arguments))["files"] >= len(found)


async def test_an_empty_grep_result_counts_the_searched_and_skipped_files(session: Session, ws: Path) -> None:
    (ws / "src/a.py").write_text("other\n")
    found = await call(session, "grep", pattern="needle")
    assert found["matches"] == []
    assert found["searched_files"] == 3
    hidden, ignored, binary = found["left_out"]
    assert hidden.startswith("3 files with a hidden name") and "set `hidden`" in hidden
    assert ignored.startswith("3 files that an ignore file excludes") and "`ignored`" in ignored
    assert binary.startswith("1 file with binary content") and "`unit: bytes`" in binary
    assert await call(session, "grep", pattern="nowhere at all") == {"matches": [], "searched_files": 3}


async def test_an_empty_glob_result_counts_the_searched_and_skipped_files(session: Session) -> None:
    found = await call(session, "glob", pattern="**/*.{yml,js,md}")
    assert found["paths"] == [] and found["searched_files"] == 3
    assert [one.partition(" would")[0] for one in found["left_out"]] == [
        "2 files with a hidden name or folder",
        "1 file that an ignore file excludes",
        "1 file in another letter case",
    ]
    none = await call(session, "grep", pattern="needle", glob="*.rs")
    assert none == {"matches": [], "searched_files": 0}


async def test_files_that_a_rule_denies_are_not_counted_as_skipped(tmp_path: Path, ws: Path) -> None:
    (ws / "build/key").write_text("unique\n")
    async with temporary_kernel(tmp_path, rules=["allow *", "deny fs.read build/key"]) as kernel:
        session = await kernel.session(headless=True)
        assert "left_out" not in await call(session, "grep", pattern="unique")
        assert "left_out" not in await call(session, "glob", pattern="**/key")
        assert await grep(session, path="build") == ["build/deep/out.py", "build/out.js"]
        await session.suspend()


@pytest.mark.parametrize("there", [NFC, NFD])
@pytest.mark.parametrize("asked", [NFC, NFD])
async def test_a_search_finds_an_accent_in_both_unicode_normal_forms(
    session: Session, ws: Path, there: str, asked: str
) -> None:
    (ws / there).mkdir()
    (ws / there / f"{there}.txt").write_text(f"un {there}\n")
    path = f"{there}/{there}.txt"
    for arguments in ({}, {"literal": True}, {"path": asked}, {"glob": f"{asked}*"}, {"glob": f"{asked}/**"}):
        found = await call(session, "grep", pattern=f"un {asked}", **arguments)
        assert [match["path"] for match in found["matches"]] == [path], arguments
    for pattern in (f"**/{asked}.*", f"{asked}/*", f"*/{asked[:3]}*"):
        assert await glob(session, pattern) == [path], pattern


async def test_absolute_and_other_spellings_of_a_pattern_find_the_same_files(session: Session, ws: Path) -> None:
    for pattern in (f"{ws}/src/*.py", "/src/*.py", "./src/*.py", "src//*.py", "src/./*.py"):
        assert await glob(session, pattern) == ["src/a.py"], pattern
        assert await grep(session, glob=pattern) == ["src/a.py"], pattern
    assert await glob(session, f"{ws}/src/*.py", path="src") == ["src/a.py"]
    assert await glob(session, "src/") == ["src/a.py"]


async def test_a_pattern_that_leaves_its_folder_is_refused_with_a_hint(session: Session) -> None:
    result = await session.call("glob", {"pattern": "../data/*", "path": "src"})
    assert result.error_kind == "invalid_input" and "`data`" in str(result.error_text)
    assert (await session.call("glob", {"pattern": "/etc/*"})).error_kind == "denied"
    assert (await session.call("grep", {"pattern": "x", "glob": "../../**"})).error_kind == "denied"


async def test_a_pattern_through_a_linked_folder_finds_its_files(session: Session, ws: Path, tmp_path: Path) -> None:
    (ws / "link").symlink_to("src")
    assert await glob(session, "link/*.py") == ["src/a.py"]
    assert await grep(session, path="link") == ["src/a.py"]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a.py").write_text("needle\n")
    (ws / "out").symlink_to("../outside")
    assert (await session.call("glob", {"pattern": "out/*.py"})).error_kind == "denied"


@pytest.mark.parametrize("column", [900, 40_000])
@pytest.mark.parametrize("before", ["x", "é"])
async def test_a_match_far_into_a_long_line_is_shown(session: Session, ws: Path, column: int, before: str) -> None:
    (ws / "src/a.py").write_text(before * column + " needle here " + "y" * 2_000 + "\n")
    (match,) = (await call(session, "grep", pattern="needle"))["matches"]
    assert f"{before * 20} needle here yyyy" in match["text"]
    assert match["text"].startswith("…") and match["text"].endswith("…")
    assert len(match["text"].encode()) <= 510


async def test_a_match_at_the_ends_of_a_long_line_is_shown(session: Session, ws: Path) -> None:
    (ws / "src/a.py").write_text("needle" + "y" * 2_000 + "\r\nneedle\n" + "x" * 2_000 + "needle\r\n")
    found = await call(session, "grep", pattern="needle")
    first, second, third = (match["text"] for match in found["matches"])
    assert first.startswith("needley") and first.endswith("y…")
    assert second == "needle"
    assert third.startswith("…x") and third.endswith("xneedle")


async def test_a_long_line_of_utf_16_is_shown_around_the_match(session: Session, ws: Path) -> None:
    (ws / "src/a.py").write_bytes(("\ufeff" + "ü" * 3_000 + "needle\n").encode("utf-16-le"))
    (match,) = (await call(session, "grep", pattern="needle"))["matches"]
    assert match["text"].endswith("üneedle") and match["text"].startswith("…ü")


ROUTES = ["app/[id]/page.tsx", "app/[...slug]/page.tsx", "app/i/page.tsx", "odd*name/a.txt"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("app/[id]/page.tsx", [ROUTES[0]]),
        ("app/[id]/*", [ROUTES[0]]),
        ("app/[...slug]/**", [ROUTES[1]]),
        ("./app/[id]/*.tsx", [ROUTES[0]]),
        ("app\\[id\\]/*", []),
        ("app/\\[id\\]/*", [ROUTES[0]]),
        ("app/[[]id]/*", [ROUTES[0]]),
        ("app/[a-k]/*", [ROUTES[2]]),
        ("odd\\*name/*", [ROUTES[3]]),
    ],
)
async def test_a_folder_with_brackets_in_its_name_is_taken_for_a_set(
    session: Session, ws: Path, pattern: str, found: list[str]
) -> None:
    for name in ROUTES:
        (ws / name).parent.mkdir(parents=True, exist_ok=True)
        (ws / name).write_text("route\n")
    assert await glob(session, pattern) == found
    answer = await call(session, "grep", pattern="route", glob=pattern)
    assert [match["path"] for match in answer["matches"]] == found


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("glob", {"pattern": "src\\*.py"}, "Write `/` between them"),
        ("glob", {"pattern": "*.xyz,*.abc"}, "`{*.ts,*.tsx}`"),
        ("glob", {"pattern": "*.xyz *.abc"}, "`{*.ts,*.tsx}`"),
        ("glob", {"pattern": "@(a|b)/**"}, "`{a,b}`"),
        ("glob", {"pattern": "src/[a"}, "is not closed"),
        ("glob", {"pattern": "src/{1..3}.py"}, "Write `{1,2,3}`"),
        ("glob", {"pattern": "!nowhere/**"}, "it excludes files"),
        ("glob", {"pattern": "~/nowhere"}, "Write an absolute path"),
        ("grep", {"pattern": "e", "glob": "src\\**\\*.py"}, "Write `/` between them"),
        ("grep", {"pattern": "e", "glob": "*.xyz,*.abc"}, "`{*.ts,*.tsx}`"),
        ("grep", {"pattern": "nowhere\\|never"}, "Write alternatives as `a|b`"),
        ("grep", {"pattern": "/nowhere/i"}, "Leave out the slashes"),
    ],
)
async def test_a_pattern_of_another_syntax_that_finds_nothing_gets_a_hint(
    session: Session, tool: str, arguments: dict[str, str], words: str
) -> None:
    answer = await call(session, tool, **arguments)
    assert not answer.get("matches") and not answer.get("paths")
    assert words in " ".join(answer["hints"])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("page.tsx", "write `**/`"), ("*.tsx", "write `**/`"), ("app/*.tsx", "write `**/`"), ("app", "write `/**`"), ("app/i", "write `/**`")],
)  # fmt: skip
async def test_a_name_in_a_deeper_folder_is_silently_not_found(
    session: Session, ws: Path, pattern: str, words: str
) -> None:
    (ws / "app" / "i").mkdir(parents=True)
    (ws / "app" / "i" / "page.tsx").write_text("route\n")
    answer = await call(session, "glob", pattern=pattern)
    assert not answer["paths"] and words in " ".join(answer["left_out"])


@pytest.mark.parametrize("literal", [False, True])
async def test_a_text_is_not_found_as_it_was_shown(session: Session, ws: Path, literal: bool) -> None:
    (ws / "prompt.txt").write_text("<system>be kind</system>\nHuman: hello\nzero\u200bwidth [INST]\n")
    for number, shown in enumerate(("⟦<⟧system>be kind⟦<⟧/system>", "⟦H⟧uman: hello", "zero⟦U+200B⟧width ⟦[⟧INST"), 1):
        answer = await call(session, "grep", pattern=shown, literal=literal)
        assert [match["line"] for match in answer["matches"]] == [number]


async def test_a_search_by_the_name_of_a_folder_says_how_to_include_its_files(session: Session, ws: Path) -> None:
    (ws / "inner" / "deep").mkdir(parents=True)
    (ws / "inner" / "deep" / "one.txt").write_text("unique word\n")
    for name, remedy in (("inner", "write `/**` after the name"), ("ONE.txt", "in another letter case")):
        answer = await call(session, "grep", pattern="unique word", glob=name)
        assert not answer["matches"] and remedy in " ".join(answer["left_out"]), answer
    assert "left_out" not in await call(session, "grep", pattern="nowhere at all", glob="inner")
