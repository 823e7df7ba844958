"""The code blocks of the documentation, and a folder to run them in.

A block's first word is its language. A path after it (```` ```json tools/count.json ````) makes the block a file:
``tools/…``, ``agents/…`` and ``handrail.toml`` of the configuration folder, anything else of the workspace.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.prefork import command as prefork

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_EXITS = re.compile(r"exits with (\d+)")
PATIENCE_S = 300
"""When a program that says nothing is taken for stuck; no assertion hangs on it."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """``file`` is the name that the block gives itself, or ``""``."""

    language: str
    file: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a shell block, and its expected exit code."""

    line: str
    exits: int

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(text: str, language: str | None = None) -> list[Snippet]:
    """The blocks of a page, in order."""
    found = [Snippet(*match) for match in _BLOCK.findall(text)]
    return [snippet for snippet in found if language in (None, snippet.language)]


def commands(text: str) -> list[Command]:
    """The ``handrail`` command lines of a page's shell blocks."""
    found: list[Command] = []
    for snippet in snippets(text, "sh"):
        for line in "" if snippet.file else snippet.text.splitlines():
            command, _, remark = line.partition("   #")
            if command.startswith("handrail "):
                exits = _EXITS.search(remark)
                found.append(Command(command.strip(), int(exits[1]) if exits else 0))
    return found


@dataclass(frozen=True, slots=True)
class Folder:
    """A workspace with its own state and configuration."""

    path: Path

    @property
    def workspace(self) -> Path:
        return self.path / "workspace"

    def prepare(self, text: str) -> None:
        """Lay out the files of a page."""
        self.workspace.mkdir()
        for snippet in snippets(text):
            if snippet.file:
                ours = snippet.file.startswith(("tools/", "agents/")) or snippet.file == "handrail.toml"
                file = (self.path / "config" / "handrail" if ours else self.workspace) / snippet.file
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(snippet.text, encoding="utf-8")
                if snippet.text.startswith("#!"):
                    file.chmod(0o755)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the workspace with the configuration and state of this folder."""
        return self._done(sys.executable, *arguments)

    def program(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run a program that uses Handrail, as :meth:`python` does."""
        script = self.path / "program.py"
        script.write_text(text, encoding="utf-8")
        return self._done(*prefork.python(script))

    def _done(self, *argv: str) -> subprocess.CompletedProcess[str]:
        own = {"HANDRAIL_STATE": str(self.path / "state"), "XDG_CONFIG_HOME": str(self.path / "config")}
        own["HANDRAIL_HEADLESS"] = "0"  # as at somebody's desk, also where a build machine runs it
        return subprocess.run(
            argv,
            cwd=self.workspace,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        """Run one command line; another exit code than the expected one fails the test."""
        done = self._done(*prefork.handrail(), *command.words[1:])
        assert done.returncode == command.exits, f"{command.line}\n{done.stdout}{done.stderr}"
        return done
