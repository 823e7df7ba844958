"""Which program a server's command is. Nothing is fetched at run time: what would fetch is installed before, by a person.

``handrail mcp install NAME`` records what it installed in ``mcp/installed/NAME.json`` of the state root: the resolved
command, its arguments, the folder it lies in, the hashes of the files that are to stay as they are, and under ``of`` for
which command and arguments it was installed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from handrail.origins.places import folder_around, workspaces
from handrail.origins.programs import ProgramRefused, find_program
from handrail.sandbox.view.toolchains import around
from handrail.store import private
from handrail.upstream.definition import ServerDefinition

_FETCHING = frozenset({"npx", "bunx", "pnpx", "uvx", "pipx", "docker", "podman", "nerdctl"})
_FETCHING_BY = {
    "npm": {"exec", "x", "install", "i", "ci", "create", "init"},
    "pnpm": {"dlx", "exec", "install", "i", "add", "create"},
    "yarn": {"dlx", "create", "install", "add"},
    "bun": {"x", "install", "i", "add", "create"},
    "uv": {"run", "tool", "pip", "sync", "add"},
    "go": {"run", "install", "get"},
    "cargo": {"run", "install"},
    "pip": {"install", "download"},
    "pip3": {"install", "download"},
    "deno": {"run", "install", "x"},
}
_MAX_RECORD = 64 * 1024 * 1024
_PIECE = 1 << 20


class Refused(Exception):
    """A server's command cannot be started; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """:param argv: an absolute program and its arguments
    :param folders: what it lies in, to be read in its sandbox
    :param hashes: by path in ``folder``, what files are to be
    """

    argv: tuple[str, ...]
    folders: tuple[str, ...] = ()
    folder: str = ""
    hashes: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """
        :raises Refused: when a file is not what was installed
        """
        for name, wanted in self.hashes:
            path = Path(self.folder) / name
            try:
                found = _hash(path)
            except OSError as error:
                raise Refused(f"{path} cannot be read: {error.strerror}; install it again") from None
            if found != wanted:
                raise Refused(f"{path} is not what was installed any more; look why, and install it again")


def fetches(command: str, args: tuple[str, ...]) -> bool:
    """Whether a command would fetch what it runs."""
    name = os.path.basename(command).removesuffix(".cmd").removesuffix(".exe").lower()  # noqa: PTH119 - may be no path here
    first = next((one for one in args if not one.startswith("-")), "")
    return name in _FETCHING or first in _FETCHING_BY.get(name, ())


def resolve(definition: ServerDefinition, state: Path, workspace: str, *, to_start: bool = True) -> Resolved:
    """The program of a server.

    :param state: the root of all state
    :param to_start: whether its folders are needed too
    :raises Refused: where it would fetch something, lies where calls can write, or is not there
    """
    record = _installed(state, definition, workspace)
    if record is not None:
        return _apart(record, workspace)
    if fetches(definition.command, definition.args):
        raise Refused(
            f"{definition.command} would fetch its program when it is started, and nothing is installed at run time; "
            f"install it once with: handrail mcp install {definition.name}"
        )
    command = str(Path(definition.command).expanduser()) if definition.command.startswith("~") else definition.command
    try:
        program = find_program(command, outside=(workspace,))
    except ProgramRefused as error:
        raise Refused(str(error)) from None
    real = f"{os.path.realpath(os.path.dirname(program))}/{os.path.basename(program)}"  # noqa: PTH119, PTH120
    folders = around(program, workspace) if to_start else ()
    return _apart(Resolved((real, *definition.args), folders), workspace)


def _apart(found: Resolved, workspace: str) -> Resolved:
    """
    :raises Refused: for a program that a call could have written
    """
    if (folder := folder_around(found.argv[0], (workspace, *workspaces()))) is not None:
        raise Refused(
            f"{found.argv[0]} lies in the workspace {folder}, where a call could change it, and would be started with the "
            "server's variables; keep it elsewhere"
        )
    if not os.access(found.argv[0], os.X_OK):
        raise Refused(f"{found.argv[0]} is not there any more, or cannot be run; install it again")
    return found


def _installed(state: Path, definition: ServerDefinition, workspace: str) -> Resolved | None:
    """What was installed for a server; None where nothing was, for another command, or it cannot be read as that."""
    content = private.read(state / "mcp" / "installed" / f"{definition.name}.json", _MAX_RECORD)
    if content is None:
        return None
    try:
        data: Any = json.loads(content)
        command, folder = str(data["command"]), str(data["folder"])
        args = tuple(map(str, data["args"]))
        hashes = tuple((str(path), str(digest)) for path, digest in cast("dict[Any, Any]", data["hashes"]).items())
        of = data.get("of")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not command.startswith("/") or not folder.startswith("/"):
        return None
    if of is not None and of != [definition.command, *definition.args]:
        return None
    folders = tuple(dict.fromkeys((os.path.realpath(folder), *around(command, workspace))))
    return Resolved((command, *args), folders, folder, hashes)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
