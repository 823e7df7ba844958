"""The languages with a known server, the operator's own servers, and where the program of a server is. Nothing is downloaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct, field
from handrail.origins.program_lookup import (
    ProgramNotFoundError,
    ProgramRefused,
    find_program,
    list_path_variable_folders,
)
from handrail.sandbox.view.toolchains import find_installation_mounts


class LanguageDefinition(Struct, frozen=True):
    """A language and its server.

    :param language: its name, such as ``python``
    :param commands: programs with their arguments; the first one that is installed is used
    :param files: patterns for the names of its files
    :param language_ids: the protocol's names of file types, by suffix; the language's name for others
    :param install: the command that installs a server; empty for the operator's own server
    :param project_files: a file that marks the root of a project, if the server needs that
    :param index_files: files of which the server needs one to know all files of a project
    :param folders: further folders that the server can read
    """

    language: str
    commands: tuple[tuple[str, ...], ...]
    files: tuple[str, ...]
    language_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    install: str = ""
    project_files: tuple[str, ...] = ()
    index_files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    def matches_file_name(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        return any(fnmatchcase(name, pattern) for pattern in self.files)

    def get_language_id(self, path: str) -> str:
        """Return the protocol's name of the type of a file."""
        return self.language_ids.get(f".{path.rpartition('.')[2]}", self.language)


KNOWN_LANGUAGES = (
    LanguageDefinition(
        "python",
        (("ty", "server"), ("basedpyright-langserver", "--stdio"), ("pyright-langserver", "--stdio")),
        ("*.py", "*.pyi"),
        install="pip install ty",
    ),
    LanguageDefinition(
        "typescript",
        (("tsc", "--lsp", "--stdio"),),
        ("*.ts", "*.tsx", "*.mts", "*.cts", "*.js", "*.jsx", "*.mjs", "*.cjs"),
        {
            ".tsx": "typescriptreact",
            ".jsx": "javascriptreact",
            ".js": "javascript",
            ".mjs": "javascript",
            ".cjs": "javascript",
        },
        install="npm install --global typescript@7",
    ),
    LanguageDefinition(
        "c",
        (("clangd",),),
        ("*.c", "*.h", "*.cc", "*.cpp", "*.cxx", "*.hh", "*.hpp", "*.hxx"),
        {".cc": "cpp", ".cpp": "cpp", ".cxx": "cpp", ".hh": "cpp", ".hpp": "cpp", ".hxx": "cpp"},
        install="apt install clangd",
        index_files=("compile_commands.json", "build/compile_commands.json"),
    ),
    LanguageDefinition(
        "go", (("gopls",),), ("*.go",), install="apt install gopls golang-go", project_files=("go.work", "go.mod")
    ),
)
"""The languages whose servers work without settings. The first program of each is the one that is tested."""


class ConfiguredServer(Struct, frozen=True):
    """A server that the operator named in ``[language_servers]``, with what differs from the known language.

    :param command: its program and arguments; empty for the known ones
    :param files: patterns for the names of its files; empty for the known ones
    """

    command: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    enabled: bool = True


class ServerProgram(Struct, frozen=True):
    """The program of a server, ready to start.

    :param argv: an absolute program and its arguments
    :param folders: the folders that its sandbox shows
    """

    argv: tuple[str, ...]
    folders: tuple[str, ...]


def merge_configured_languages(configured: Mapping[str, ConfiguredServer]) -> tuple[LanguageDefinition, ...]:
    """Return all languages with a server: the known ones, as far as the operator did not change them, and the operator's."""
    known = {one.language: one for one in KNOWN_LANGUAGES}
    for language, own in configured.items():
        base = known.get(language) or LanguageDefinition(language, (), ())
        known[language] = replace(
            base,
            commands=(own.command,) if own.command else base.commands,
            install="" if own.command else base.install,
            files=own.files or base.files,
            folders=own.folders,
        )
    return tuple(one for one in known.values() if one.language not in configured or configured[one.language].enabled)


def find_server_program(definition: LanguageDefinition, workspace: str) -> ServerProgram:
    """Return the program of a language's server: on PATH, or next to Handrail's own Python. It is never in the workspace.

    :raises ToolError: ``unavailable`` if none is installed, with the command that installs one
    """
    refused: list[str] = []
    folders = [*list_path_variable_folders(), f"{sys.prefix}/bin"]
    for command in definition.commands:
        name = str(Path(command[0]).expanduser()) if command[0].startswith("~") else command[0]
        try:
            program = find_program(name, outside=(workspace,), path=folders)
        except ProgramNotFoundError:
            continue
        except ProgramRefused as error:
            refused.append(str(error))
            continue
        further = tuple(os.path.realpath(Path(one).expanduser()) for one in definition.folders)
        argv = (f"{os.path.realpath(os.path.dirname(program))}/{os.path.basename(program)}", *command[1:])  # noqa: PTH119, PTH120
        return ServerProgram(argv, tuple(dict.fromkeys((*find_installation_mounts(program, workspace), *further))))
    raise ToolError(explain_missing_program(definition, refused), kind="unavailable")


def explain_missing_program(definition: LanguageDefinition, refused: Sequence[str]) -> str:
    """Return why a language has no server, with the next step."""
    names = ", ".join(dict.fromkeys(one[0] for one in definition.commands)) or "none"
    where = (
        "The program does not exist or cannot run."
        if "/" in names
        else "None of them is on PATH outside the workspace."
    )
    how = (
        f"Ask the user to run {definition.install}"
        if definition.install
        else f"Ask the user to correct [language_servers.{definition.language}]"
    )
    why = refused[0] if refused else where
    return f"No language server for {definition.language} is available. Looked for: {names}. {why} {how}, or use grep and read."
