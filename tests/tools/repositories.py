"""Real repositories for the git tools, created by git outside the sandbox."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

PERSON = ("-c", "user.name=Ann Author", "-c", "user.email=ann@example.org")
_AROUND = {
    "PATH": os.environ.get("PATH", os.defpath),
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_DATE": "2024-05-06T07:08:09+02:00",
    "GIT_COMMITTER_DATE": "2024-05-06T07:08:09+02:00",
}


@dataclass(frozen=True)
class Repo:
    """A repository of a user."""

    folder: Path

    def git(self, *words: str, stdin: bytes = b"") -> str:
        done = subprocess.run(
            ["git", *PERSON, *words], cwd=self.folder, input=stdin, capture_output=True, check=True, env=_AROUND
        )
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def put(self, name: str | bytes, content: str | bytes) -> Path:
        path = self.folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def commit(self, message: str, **files: str | bytes) -> str:
        """Commit these files and return the commit's name; ``__`` in a file name stands for a dot."""
        for name, content in files.items():
            self.put(name.replace("__", "."), content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def configure(self, text: str) -> None:
        """Add to its configuration, without running git."""
        with (self.folder / ".git" / "config").open("a", encoding="utf-8") as file:
            file.write(text)


def create_repository(folder: Path) -> Repo:
    """A new repository on ``main``, with a name and an address to commit by."""
    folder.mkdir(parents=True, exist_ok=True)
    repo = Repo(folder)
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.configure("[user]\n\tname = Rita Repo\n\temail = rita@example.org\n")
    return repo
