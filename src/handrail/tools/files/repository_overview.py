"""repo_overview: the folders, languages, entry points and test commands of a repository, and the files for a task."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from handrail.contract.services.file_services import FileSurvey, RankedFile
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.reading_and_search import FolderTreeNode
from handrail.tools.tool_declarations import MAX_PATH, file_read_spec, make_closed_object_schema

_DEFAULT_TOKENS = 2_000
_CHARACTERS_PER_TOKEN = 4
_RANKED_FILES = 10
_MOST_LANGUAGES = 12
_MOST_DOTS = 500
"""The most dots in a line of a manifest in TOML."""

_LANGUAGES: Mapping[str, str] = {
    **dict.fromkeys(("py", "pyi"), "Python"),
    **dict.fromkeys(("js", "jsx", "mjs", "cjs"), "JavaScript"),
    **dict.fromkeys(("ts", "tsx", "mts", "cts"), "TypeScript"),
    **dict.fromkeys(("c", "h"), "C"),
    **dict.fromkeys(("cc", "cpp", "cxx", "hpp", "hh"), "C++"),
    **dict.fromkeys(("sh", "bash", "zsh"), "Shell"),
    **dict.fromkeys(("md", "rst", "txt", "adoc"), "Text"),
    **dict.fromkeys(("html", "htm"), "HTML"),
    **dict.fromkeys(("css", "scss", "sass", "less"), "CSS"),
    **dict.fromkeys(("yml", "yaml"), "YAML"),
    **dict.fromkeys(("kt", "kts"), "Kotlin"),
    **dict.fromkeys(("ex", "exs"), "Elixir"),
    "go": "Go",
    "rs": "Rust",
    "java": "Java",
    "rb": "Ruby",
    "php": "PHP",
    "cs": "C#",
    "swift": "Swift",
    "scala": "Scala",
    "lua": "Lua",
    "sql": "SQL",
    "toml": "TOML",
    "json": "JSON",
    "vue": "Vue",
    "svelte": "Svelte",
    "dart": "Dart",
    "hs": "Haskell",
    "jl": "Julia",
    "r": "R",
}


class RepositoryOverviewTool(Tool):
    spec = file_read_spec(
        id="repo_overview",
        description=(
            "Show what is in a repository or folder: the folder tree with the number of files, languages by lines, entry points, "
            "and the commands for tests. With `focus`, also up to ten files that fit a task best, with their definitions. "
            "Use it first in an unknown repository. Skips hidden and ignored files."
        ),
        parameters=make_closed_object_schema(
            {
                "path": {
                    "type": "string",
                    "format": "path",
                    "minLength": 1,
                    "maxLength": MAX_PATH,
                    "default": ".",
                    "description": "Folder to describe",
                },
                "focus": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4_000,
                    "description": "Task or question in words, such as an error report. Default: none",
                },
                "max_tokens": {
                    "type": "integer",
                    "minimum": 200,
                    "maximum": 20_000,
                    "default": _DEFAULT_TOKENS,
                    "description": "Approximate size of the answer in tokens",
                },
            }
        ),
        category="project",
        kind="search",
        documentation=(
            "Returns `path`, `files` (their number), `tree`, `languages`, `entry_points` and `test_commands`; with `focus` also "
            "`matches`, at most ten files with `path` and `outline`, the best first.\n\n"
            "- The ranking compares the words of the task with paths, definitions and texts. A file also gains from good "
            "files that mention it, that it mentions, or that test it, and from earlier commits with similar messages that "
            "changed it. It runs no code.\n"
            "- An outline lists definitions with their lines. Files in an unknown language have none.\n"
            "- Entry points and commands come from manifests in that folder, such as pyproject.toml, package.json and Makefile."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        focus: str = args.get("focus", "")
        survey = await runtime.search.survey_files(
            args.get("path", "."), focus=focus, limit=_RANKED_FILES, read_names=tuple(_MANIFESTS)
        )
        return await asyncio.to_thread(_describe, survey, focus, args.get("max_tokens", _DEFAULT_TOKENS))


def _describe(survey: FileSurvey, focus: str, max_tokens: int) -> dict[str, object]:
    """Return the answer, in about ``max_tokens``."""
    room = max_tokens * _CHARACTERS_PER_TOKEN
    entry_points, commands = _read_manifests(survey.texts)
    answer: dict[str, object] = {
        "path": survey.path,
        "files": len(survey.files),
        "languages": _count_languages(survey),
        "entry_points": entry_points[:20],
        "test_commands": commands[:10],
    }
    left = room - len(json.dumps(answer, ensure_ascii=False))
    if focus:
        matches, used = _fit_matches(survey.ranked, left * 3 // 4)
        answer["matches"] = matches
        left -= used
    answer["tree"] = _draw_tree(survey, max(left, 200))
    notes: list[str] = []
    if survey.is_truncated:
        notes.append("The folder has more files than are listed. Use a narrower path.")
    if survey.is_partial:
        notes.append("Some files were ranked by their paths only, because the index is full. Use a narrower path.")
    if survey.denied_count:
        notes.append(f"{survey.denied_count:,} files are left out, because a rule hides them.")
    return {**answer, "notes": notes} if notes else answer


def _count_languages(survey: FileSurvey) -> list[dict[str, object]]:
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for one in survey.files:
        name = one.path.rpartition("/")[2]
        language = _LANGUAGES.get(name.rpartition(".")[2].lower()) if "." in name else None
        if language is not None and one.lines is not None:
            files[language] += 1
            lines[language] += one.lines
    return [
        {"name": language, "files": files[language], "lines": count}
        for language, count in sorted(lines.items(), key=lambda item: (-item[1], item[0]))[:_MOST_LANGUAGES]
    ]


def _fit_matches(ranked: Iterable[RankedFile], room: int) -> tuple[list[dict[str, object]], int]:
    """Return the matches with as much of their outlines as fits, and the characters that they take."""
    found = list(ranked)
    matches: list[dict[str, object]] = [{"path": one.path} for one in found]
    used = sum(len(one.path) + 16 for one in found)
    for number, (one, match) in enumerate(zip(found, matches, strict=True)):
        share = (room - used) // (len(found) - number)
        outline: list[str] = []
        for entry in one.outline:
            text = f"{entry.line}: {entry.text}"
            share -= len(text) + 4
            if share < 0:
                break
            used += len(text) + 4
            outline.append(text)
        if outline:
            match["outline"] = outline
    return matches, used


def _draw_tree(survey: FileSurvey, room: int) -> str:
    """Return the tree as deep as it fits, in lines."""
    below = "" if survey.path == "." else f"{survey.path.rstrip('/')}/"
    root = FolderTreeNode()
    for one in survey.files:
        root.put(one.path.removeprefix(below).split("/"))
    drawn = ""
    for depth in range(1, 9):
        lines: list[str] = []
        is_cut = root.add_tree_lines(lines, 0, depth, room // 8 + 1)
        text = "\n".join(lines)
        if len(text) > room or is_cut:
            break
        if text == drawn:
            return drawn
        drawn = text
    return drawn or "\n".join(_cut_lines(root, room))


def _cut_lines(root: FolderTreeNode, room: int) -> Iterator[str]:
    """Yield the lines of the top level that fit."""
    lines: list[str] = []
    root.add_tree_lines(lines, 0, 1, room // 4 + 1)
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            yield "…"
            return
        yield line


# Manifests: what starts a program of the repository, and what runs its tests. A manifest that cannot be read has neither.

_Facts = tuple[list[str], list[str]]
"""Entry points, and commands for tests."""


def _read_manifests(texts: Mapping[str, str]) -> _Facts:
    entry_points: list[str] = []
    commands: list[str] = []
    for name, read in _MANIFESTS.items():
        if name in texts:
            try:
                found, tests = read(texts[name])
            except (ValueError, RecursionError, AttributeError, TypeError):
                continue
            entry_points += found
            commands += tests
    return list(dict.fromkeys(entry_points)), list(dict.fromkeys(commands))


def _table(value: object, *path: str) -> dict[str, Any]:
    for name in path:
        value = cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a manifest.

    :raises ValueError: if it is not TOML, or may have a key with so many parts that reading it takes minutes
    """
    if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
        raise ValueError
    return tomllib.loads(text)


def _shorten(text: object) -> str:
    return " ".join(str(text).split())[:160]


def _read_pyproject(text: str) -> _Facts:
    data = _parse_toml(text)
    scripts = {**_table(data, "project", "scripts"), **_table(data, "tool", "poetry", "scripts")}
    found = [_shorten(f"{name} = {target}") for name, target in scripts.items()]
    names = json.dumps(
        [data.get("dependency-groups"), data.get("project"), _table(data, "tool", "poetry")], default=str
    )
    uses_pytest = "pytest" in _table(data, "tool") or re.search(r'"pytest\b', names) is not None
    return found, ["pytest"] if uses_pytest else []


def _read_setup_cfg(text: str) -> _Facts:
    return [], ["pytest"] if "[tool:pytest]" in text else []


def _read_package(text: str) -> _Facts:
    data = json.loads(text)
    scripts = _table(data, "scripts")
    found = [f"npm run {name}: {_shorten(scripts[name])}" for name in ("start", "dev", "build") if name in scripts]
    main = data.get("main")
    found += [f"main: {_shorten(main)}"] if isinstance(main, str) else []
    bins = data.get("bin")
    targets = {"bin": bins} if isinstance(bins, str) else _table(data, "bin")
    found += [_shorten(f"{name} = {target}") for name, target in targets.items()]
    return found, [f"npm test: {_shorten(scripts['test'])}"] if "test" in scripts else []


def _read_makefile(text: str) -> _Facts:
    targets = [match[1] for match in re.finditer(r"^([A-Za-z][\w-]*+)[^\S\n]*+:(?!=)", text, re.MULTILINE)]
    tests = [f"make {name}" for name in targets if name in ("test", "tests", "check")]
    return [f"make {name}" for name in targets if name in ("run", "start", "serve", "all", "build")], tests


def _read_justfile(text: str) -> _Facts:
    targets = [match[1] for match in re.finditer(r"^@?([A-Za-z][\w-]*+)[^\n:=]*+:(?!=)", text, re.MULTILINE)]
    tests = [f"just {name}" for name in targets if name in ("test", "tests", "check")]
    return [f"just {name}" for name in targets if name in ("run", "start", "serve", "build")], tests


def _read_cargo(text: str) -> _Facts:
    data = _parse_toml(text)
    bins = data.get("bin")
    named = [one.get("name") for one in cast("list[dict[str, Any]]", bins)] if isinstance(bins, list) else []
    package = _table(data, "package").get("name")
    found = [f"cargo run --bin {_shorten(name)}" for name in named if name]
    return found or ([f"cargo run ({_shorten(package)})"] if package else []), ["cargo test"]


def _read_go_module(text: str) -> _Facts:
    module = re.search(r"^module\s+(\S+)", text, re.MULTILINE)
    return [f"go module {module[1][:160]}"] if module else [], ["go test ./..."]


def _tests_with(command: str) -> Callable[[str], _Facts]:
    return lambda text: ([], [command])


_MANIFESTS: Mapping[str, Callable[[str], _Facts]] = {
    "Makefile": _read_makefile,
    "makefile": _read_makefile,
    "GNUmakefile": _read_makefile,
    "justfile": _read_justfile,
    "Justfile": _read_justfile,
    "pyproject.toml": _read_pyproject,
    "setup.cfg": _read_setup_cfg,
    "pytest.ini": _tests_with("pytest"),
    "tox.ini": _tests_with("tox"),
    "noxfile.py": _tests_with("nox"),
    "package.json": _read_package,
    "Cargo.toml": _read_cargo,
    "go.mod": _read_go_module,
    "pom.xml": _tests_with("mvn test"),
    "build.gradle": _tests_with("gradle test"),
    "build.gradle.kts": _tests_with("gradle test"),
    "mix.exs": _tests_with("mix test"),
    "Gemfile": _tests_with("bundle exec rake test"),
    "composer.json": _tests_with("composer test"),
    "CMakeLists.txt": _tests_with("ctest --test-dir build"),
}
