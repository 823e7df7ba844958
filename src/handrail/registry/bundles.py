"""A frozen configuration folder: an agent with its tools, every file by its hash.

``bundle.json`` in a configuration folder says which files there are and what is in them. Where one stands, nothing is
loaded that differs: a file that was changed, added, taken away or made executable is a fault and stops start-up.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import Fault, LoadError
from handrail.contract.text.json import ArgumentText, parse_object
from handrail.registry.sources.folders import content_of
from handrail.registry.sources.source import Loaded, Rank

BUNDLE_FILE = "bundle.json"
FORMAT = 1
MAX_BUNDLE_BYTES = 16 * 1024 * 1024
_SEALED = ("handrail.toml", "tools", "agents", "skills")
"""What Handrail reads of a configuration folder."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One file of a bundle: the SHA-256 of its content, in hexadecimal, and whether it is a program."""

    sha256: str
    executable: bool


@dataclass(frozen=True, slots=True)
class BundleSource:
    """The seal of a configuration folder, as the first source of tools: it has none, only faults."""

    folder: Path
    rank: Rank = "built-in"
    foreign: bool = False

    def load(self) -> Loaded:
        path = self.folder / BUNDLE_FILE
        if not os.path.lexists(path):
            return Loaded()
        try:
            return Loaded(faults=tuple(Fault(str(path), where, problem) for where, problem in _faults(path)))
        except LoadError as error:
            return Loaded(faults=tuple(error.faults))


def seal_of(path: Path) -> Sealed:
    """:raises OSError: when it cannot be read, or is no regular file"""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "is not a regular file")
        return Sealed(hashlib.file_digest(file, "sha256").hexdigest(), bool(found.st_mode & 0o111))


def sealed_text(agent: str, version: str, files: dict[str, Sealed], tools: dict[str, dict[str, str]]) -> str:
    """The text of a bundle's own file: the same for the same files.

    :param files: by their path in the bundle
    :param tools: by agent: id to definition hash, of every tool that it has
    """
    listed = {name: {"sha256": one.sha256, "executable": one.executable} for name, one in sorted(files.items())}
    whole = {
        "format": FORMAT,
        "agent": agent,
        "handrail": version,
        "files": listed,
        "tools": {name: dict(sorted(of.items())) for name, of in sorted(tools.items())},
    }
    return json.dumps(whole, indent=1) + "\n"


def files_in(folder: Path) -> Iterator[str]:
    """The paths of all that Handrail may read in a configuration folder, links and oddities included."""
    for top in _SEALED:
        start = folder / top
        if start.is_dir() and not start.is_symlink():
            for parent, folders, names in os.walk(start):
                linked = [name for name in folders if (Path(parent) / name).is_symlink()]
                for name in (*names, *linked):
                    yield str((Path(parent) / name).relative_to(folder))
        elif os.path.lexists(start):
            yield top


def _faults(path: Path) -> Iterator[tuple[str, str]]:
    content = content_of(path, MAX_BUNDLE_BYTES)
    try:
        whole = parse_object(content, what="the bundle's contents", max_bytes=MAX_BUNDLE_BYTES)
    except ArgumentText as error:
        yield "", f"{error}; build it again with handrail build"
        return
    if whole.get("format") != FORMAT:
        yield (
            "format",
            f"is {whole.get('format')!r}, and this Handrail reads {FORMAT}; build it again with handrail build",
        )
        return
    given: Any = whole.get("files")
    listed = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    folder = path.parent
    for name in sorted(listed.keys() | set(files_in(folder))):
        if name not in listed:
            yield f"files.{name}", "is not of the bundle; take it away, or build the bundle again"
            continue
        try:
            found = seal_of(folder / name)
        except FileNotFoundError:
            yield f"files.{name}", "is gone; build the bundle again"
            continue
        except OSError as error:
            yield f"files.{name}", f"cannot be read: {error.strerror or error}"
            continue
        if found.sha256 != listed[name].get("sha256"):
            yield f"files.{name}", "was changed after the bundle was built; build it again, or put it back"
        elif found.executable != listed[name].get("executable"):
            how = "was made executable" if found.executable else "is not executable any more"
            yield f"files.{name}", f"{how} after the bundle was built"
