"""The beginning of a command that names what it does, for a rule about the same command with any arguments.

``git commit -m x`` begins with ``git commit``, ``npm run test -- -w`` with ``npm run test``, ``uv run pytest -q`` with ``uv run
pytest``. A command has no such beginning if a rule about it would allow any program, code from its arguments, something that is
sent, or something that is destroyed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell.command_wrappers import ENVIRONMENT_MANAGERS, RUNNERS
from handrail.policy.shell.risky_options import SHELLS

PROJECT_CODE = "runs code of the project"
UNKNOWN_PROGRAM = "runs a program that Handrail does not know"

_CODE = frozenset(
    {
        "pytest",
        "tox",
        "nox",
        "make",
        "gmake",
        "just",
        "task",
        "gradle",
        "gradlew",
        "mvn",
        "mvnw",
        "ant",
        "sbt",
        "rake",
        "mix",
    }
    | {
        "cargo",
        "go",
        "zig",
        "swift",
        "dotnet",
        "bazel",
        "ninja",
        "meson",
        "cmake",
        "ctest",
        "stack",
        "cabal",
        "dune",
        "gleam",
    }
    | {
        "npm",
        "pnpm",
        "yarn",
        "bun",
        "deno",
        "jest",
        "vitest",
        "mocha",
        "tsx",
        "vite",
        "webpack",
        "next",
        "nx",
        "turbo",
        "playwright",
    }
    | {
        "python",
        "python3",
        "node",
        "ruby",
        "php",
        "perl",
        "pre-commit",
        "sphinx-build",
        "mkdocs",
        "flutter",
        "dart",
        "rspec",
    }
    | {"phpunit", "bundle", "unittest", "coverage"}
)
"""Programs that run code or recipes of the project."""
_TOOLS = frozenset(
    {
        "ruff",
        "black",
        "isort",
        "flake8",
        "mypy",
        "pyright",
        "pylint",
        "tsc",
        "eslint",
        "prettier",
        "biome",
        "stylelint",
        "gofmt",
    }
    | {
        "rustfmt",
        "clang-format",
        "shellcheck",
        "shfmt",
        "yamllint",
        "markdownlint",
        "hadolint",
        "jq",
        "yq",
        "tree",
        "ls",
        "grep",
    }
    | {
        "rg",
        "fd",
        "cat",
        "head",
        "tail",
        "wc",
        "sort",
        "uniq",
        "diff",
        "mkdir",
        "touch",
        "cp",
        "ln",
        "file",
        "stat",
        "du",
        "df",
    }
)
"""Programs whose work is known, and which run nothing of the project."""
_WITH_SUBCOMMANDS = frozenset(
    {
        "git",
        "hg",
        "jj",
        "cargo",
        "go",
        "npm",
        "pnpm",
        "yarn",
        "bun",
        "deno",
        "uv",
        "poetry",
        "pdm",
        "hatch",
        "rye",
        "pipenv",
        "pip",
    }
    | {
        "pip3",
        "gradle",
        "gradlew",
        "mvn",
        "mvnw",
        "dotnet",
        "just",
        "task",
        "rake",
        "bundle",
        "composer",
        "mix",
        "rustup",
        "ruff",
        "nox",
    }
    | {
        "tox",
        "pre-commit",
        "flutter",
        "dart",
        "swift",
        "zig",
        "nx",
        "turbo",
        "terraform",
        "make",
        "gmake",
        "bazel",
        "meson",
        "cmake",
    }
    | {"stack", "cabal", "dune", "alembic", "mkdocs", "playwright", "biome", "coverage"}
)
_SCRIPT_RUNNERS = frozenset({"npm", "pnpm", "yarn", "bun"})
_INTERPRETERS = frozenset({"python", "python3", "node", "ruby", "php", "perl", "deno", "bun", "tsx"})
_NEVER = (
    SHELLS
    | RUNNERS
    | frozenset(
        {
            "rm",
            "rmdir",
            "shred",
            "truncate",
            "dd",
            "mv",
            "sudo",
            "su",
            "doas",
            "kill",
            "pkill",
            "killall",
            "chmod",
            "chown",
        }
    )
    | frozenset(
        {
            "curl",
            "wget",
            "ssh",
            "scp",
            "sftp",
            "rsync",
            "nc",
            "ncat",
            "socat",
            "telnet",
            "ftp",
            "gh",
            "glab",
            "aws",
            "gcloud",
        }
    )
    | frozenset(
        {
            "az",
            "kubectl",
            "helm",
            "docker",
            "podman",
            "psql",
            "mysql",
            "redis-cli",
            "mongosh",
            "twine",
            "mail",
            "crontab",
        }
    )
    | frozenset(
        {
            "apt",
            "apt-get",
            "dnf",
            "yum",
            "pacman",
            "brew",
            "systemctl",
            "mount",
            "umount",
            "tee",
            "awk",
            "sed",
            "find",
            "tar",
        }
    )
)
"""Programs for which any arguments are too many: they run others, send, or destroy."""
_NEVER_SUBCOMMANDS: Mapping[str, frozenset[str]] = {
    "git": frozenset(
        {
            "push",
            "reset",
            "clean",
            "checkout",
            "restore",
            "rm",
            "filter-branch",
            "gc",
            "prune",
            "reflog",
            "update-ref",
            "config",
        }
        | {
            "remote",
            "clone",
            "fetch",
            "pull",
            "submodule",
            "bisect",
            "rebase",
            "send-email",
            "daemon",
            "worktree",
            "stash",
            "branch",
        }
    ),
    "npm": frozenset({"publish", "exec", "x", "config", "login", "token", "unpublish", "owner", "access"}),
    "pnpm": frozenset({"publish", "exec", "dlx", "config"}),
    "yarn": frozenset({"publish", "exec", "dlx", "config", "npm"}),
    "bun": frozenset({"x", "publish"}),
    "cargo": frozenset({"publish", "login", "owner", "yank"}),
    "uv": frozenset({"publish", "tool", "auth", "self"}),
    "poetry": frozenset({"publish", "config", "self"}),
    "terraform": frozenset({"apply", "destroy", "import", "state", "taint", "login"}),
    "mix": frozenset({"hex.publish", "do", "run"}),
    "bundle": frozenset({"exec", "config"}),
    "go": frozenset({"env", "tool"}),
}
_SUBCOMMAND = compile_regex_lazily(r"[A-Za-z][A-Za-z0-9_.:@/+-]*")
_MODULE = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_.]*")
_MOST_LEVELS = 3


class ProgramPrefix(NamedTuple):
    """The beginning of a command.

    :param note: what any arguments of it may do that its words do not say; empty if nothing
    """

    words: tuple[str, ...]
    note: str


def find_program_prefix(argv: Sequence[str], levels: int = _MOST_LEVELS) -> ProgramPrefix | None:
    """Return the beginning of a command for a rule with any arguments, or None."""
    if not argv or not levels:
        return None
    program, rest = argv[0], tuple(argv[1:])
    if program.startswith(("./", "../")) or ("/" in program and not program.startswith("/")):
        return ProgramPrefix((program,), PROJECT_CODE)
    if "/" in program or (program in _NEVER and program not in ENVIRONMENT_MANAGERS | _INTERPRETERS):
        return None
    first = rest[0] if rest else ""
    if program in ENVIRONMENT_MANAGERS and first in ("run", "exec"):
        inner = find_program_prefix(rest[1:], levels - 1)
        return None if inner is None else ProgramPrefix((program, first, *inner.words), inner.note or PROJECT_CODE)
    if program in _INTERPRETERS and first != "test":
        return _find_script(program, rest)
    if program in _WITH_SUBCOMMANDS:
        return _find_subcommand(program, rest)
    note = PROJECT_CODE if program in _CODE else "" if program in _TOOLS else UNKNOWN_PROGRAM
    return ProgramPrefix((program,), note)


def _find_script(program: str, rest: Sequence[str]) -> ProgramPrefix | None:
    """Return the beginning of a command that runs a script or a module."""
    if program in ("python", "python3") and rest[:1] == ("-m",) and len(rest) > 1 and _MODULE.fullmatch(rest[1]):
        return ProgramPrefix((program, "-m", rest[1]), PROJECT_CODE)
    if program in _SCRIPT_RUNNERS and rest[:1] == ("run",):
        return _find_subcommand(program, rest)
    if rest and re.fullmatch(r"[A-Za-z0-9_./@+-]+\.[a-z]{1,4}", rest[0]) and rest[0][:1] not in "-/":
        return ProgramPrefix((program, rest[0]), PROJECT_CODE)
    return None


def _find_subcommand(program: str, rest: Sequence[str]) -> ProgramPrefix | None:
    first = rest[0] if rest else ""
    if not _SUBCOMMAND.fullmatch(first) or first in _NEVER_SUBCOMMANDS.get(program, ()):
        return None
    note = (
        PROJECT_CODE
        if program in _CODE
        else ""
        if program in _TOOLS or program in ("git", "hg", "jj")
        else UNKNOWN_PROGRAM
    )
    if program == "git" and first == "commit":
        note = ""
    if program in _SCRIPT_RUNNERS and first in ("run", "run-script"):
        if len(rest) < 2 or not _SUBCOMMAND.fullmatch(rest[1]):
            return None
        return ProgramPrefix((program, first, rest[1]), PROJECT_CODE)
    if program in ("uv", "poetry", "pdm", "hatch", "rye", "pipenv", "pip", "pip3", "bundle", "composer"):
        note = "can install packages, whose code runs"
    return ProgramPrefix((program, first), note)
