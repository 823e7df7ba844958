"""``lsp`` with the documented servers: ty, TypeScript, clangd and gopls, if installed.

``pip install ty`` puts the first one next to the tests. TypeScript is looked for on PATH, and where ``HANDRAIL_TSC`` says.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.sandbox.tier_probe import choose_sandbox
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = [
    pytest.mark.proves("T-06l"),
    pytest.mark.skipif(not choose_sandbox().tier.is_confining, reason="programs cannot be confined here"),
]


@dataclass(frozen=True)
class Language:
    """A language, its server, and a small project that uses ``launch`` in two files.

    :param program: where the server is; None if it is not installed
    :param defined: the file that defines it, and the line and column of its name
    :param broken: a line with a mistake
    """

    name: str
    program: str | None
    arguments: Sequence[str]
    files: Mapping[str, str]
    defined: tuple[str, int, int]
    broken: str


def find(name: str) -> str | None:
    beside = Path(sys.prefix, "bin", name)
    return str(beside) if beside.exists() else shutil.which(name)


LANGUAGES = (
    Language(
        "python",
        find("ty"),
        ("server",),
        {
            "ships.py": 'def launch(name: str) -> str:\n    """Launch a ship."""\n    return name\n',
            "harbour.py": 'from ships import launch\n\nlaunch("Argo")\n',
        },
        ("ships.py", 1, 5),
        "x: int = 'text'",
    ),
    Language(
        "typescript",
        os.environ.get("HANDRAIL_TSC") or find("tsc"),
        ("--lsp", "--stdio"),
        {
            "tsconfig.json": "{}",
            "ships.ts": "export function launch(name: string): string {\n  return name;\n}\n",
            "harbour.ts": 'import { launch } from "./ships";\n\nlaunch("Argo");\n',
        },
        ("ships.ts", 1, 17),
        "const x: number = 'text';",
    ),
    Language(
        "c",
        find("clangd"),
        (),
        {
            "ships.h": "int launch(int ship);\n",
            "ships.c": '#include "ships.h"\nint launch(int ship) { return ship; }\n',
            "harbour.c": '#include "ships.h"\n\nint main(void) { return launch(1); }\n',
        },
        ("ships.c", 2, 5),
        "int x = ;",
    ),
    Language(
        "go",
        find("gopls"),
        (),
        {
            "go.mod": "module example.org/ships\n\ngo 1.19\n",
            "ships.go": "package main\n\nfunc launch(name string) string { return name }\n",
            "harbour.go": 'package main\n\nfunc main() { println(launch("Argo")) }\n',
        },
        ("ships.go", 3, 6),
        "int x = ;",
    ),
)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda one: one.name)
async def test_a_documented_server_answers_offline_with_current_results(tmp_path: Path, language: Language) -> None:
    if language.program is None or (language.name == "go" and find("go") is None):
        pytest.skip(f"no server for {language.name} is installed; docs/how-to/work-on-code.md has the command")
    (tmp_path / "ws").mkdir()
    for name, text in language.files.items():
        (tmp_path / "ws" / name).write_text(text)
    settings = f"[language_servers.{language.name}]\ncommand = {json.dumps([language.program, *language.arguments])}\n"
    user = ScriptedApprovalHandler([ApprovalAnswer("once")] * 50)
    async with temporary_kernel(tmp_path, rules=["allow lsp", "allow bash"], settings=settings) as kernel:
        session = await kernel.session(approval_handler=user, headless=False)

        async def get(action: str, **arguments: object) -> Any:
            result = await session.call("lsp", {"action": action, **arguments})
            assert result.error_kind is None, result.error_text
            return result.data

        path, line, column = language.defined
        harbour = next(name for name in language.files if name.startswith("harbour"))
        (place,) = (await get("definition", path=harbour, symbol="launch"))["locations"]
        assert place["text"] == language.files[place["path"]].splitlines()[place["line"] - 1]
        assert "launch" in place["text"] and place["path"] in (path, "ships.h")
        assert (await get("definition", symbol="launch"))["total"] == 1
        uses = await get("references", path=path, line=line, symbol="launch")
        assert (path, line, column) in [(one["path"], one["line"], one["column"]) for one in uses["locations"]]
        assert harbour in [one["path"] for one in uses["locations"]]
        assert "launch" in (await get("hover", symbol="launch"))["hover"]
        assert "launch" in [one["name"] for one in (await get("symbols", path=path))["symbols"]]
        renaming = await get("rename_preview", path=path, symbol="launch", new_name="start")
        assert {one["path"] for one in renaming["edits"]} >= {path, harbour}
        assert uses.get("incomplete", False) == (language.name == "c"), "clangd has no list of files here"
        for number in range(6):
            broken = number % 2 == 0
            text = language.files[harbour] + (f"\n{language.broken}\n" if broken else "")
            script = tmp_path / "ws" / "edit.sh"
            script.write_text(f"cat > {harbour} <<'END'\n{text}END\n")
            done = await session.call("bash", {"command": "sh edit.sh"})
            assert done.error_kind is None, done.error_text
            found = await get("diagnostics", path=harbour)
            errors = [one for one in found["diagnostics"] if one["severity"] == "error"]
            assert (bool(errors), "stale" in found) == (broken, False), (number, found)
            assert all(one["text"] == language.broken for one in errors)
        other = "ships.h" if language.name == "c" else path
        (tmp_path / "ws" / other).write_text(language.files[other].replace("launch", "start"))
        assert (await get("diagnostics", path=harbour))["diagnostics"], "another file changed what is right here"
