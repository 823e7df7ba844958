"""The program behind a server's command, and its installation by the user. Nothing is fetched at run time.

``handrail mcp install NAME`` records the installation in ``mcp/installed/NAME.json`` of the state root: the resolved
command, its arguments, its folder, the hashes of the files that must not change, and under ``of`` the command and arguments
that it was installed for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from handrail.contract.errors import UsageError
from handrail.contract.struct import Struct
from handrail.origins.program_lookup import (
    ProgramRefused,
    build_program_environment,
    find_enclosing_folder,
    find_own_interpreter,
    find_program,
    list_open_workspaces,
)
from handrail.sandbox.view.toolchains import find_installation_mounts
from handrail.store import operator_decisions
from handrail.upstream.server_definition import ServerDefinition

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


class ServerCommandRejected(Exception):
    """A server's command cannot be started; the text has the reason and the next step."""


class ResolvedServerProgram(Struct, frozen=True):
    """The program of a server, ready to start.

    :param argv: an absolute program and its arguments
    :param folders: the folders that its sandbox shows
    :param hashes: the expected hashes of files, by path in ``folder``
    """

    argv: tuple[str, ...]
    folders: tuple[str, ...] = ()
    folder: str = ""
    hashes: tuple[tuple[str, str], ...] = ()

    def verify_file_hashes(self) -> None:
        """Check the hashes of the installed files.

        :raises ServerCommandRejected: if a file has changed since the installation
        """
        for name, wanted in self.hashes:
            path = Path(self.folder) / name
            try:
                found = _hash(path)
            except OSError as error:
                raise ServerCommandRejected(
                    f"{path} cannot be read: {error.strerror}; install the server again"
                ) from None
            if found != wanted:
                raise ServerCommandRejected(
                    f"{path} has changed since the installation; find out why, and install the server again"
                )


def would_fetch_package(command: str, args: tuple[str, ...]) -> bool:
    """Return whether a command would fetch the program that it runs."""
    name = os.path.basename(command).removesuffix(".cmd").removesuffix(".exe").lower()  # noqa: PTH119 - may be no path here
    first = next((one for one in args if not one.startswith("-")), "")
    return name in _FETCHING or first in _FETCHING_BY.get(name, ())


def resolve_server_program(
    definition: ServerDefinition, state: Path, workspace: str, *, to_start: bool = True
) -> ResolvedServerProgram:
    """Return the program of a server.

    :param state: the root folder of all state
    :param to_start: whether the folders for its sandbox are needed too
    :raises ServerCommandRejected: if the command would fetch a program, or its program is missing or is where calls can write
    """
    record = _read_install_record(state, definition, workspace)
    if record is not None:
        return _require_safe_program(record, workspace)
    if would_fetch_package(definition.command, definition.args):
        raise ServerCommandRejected(
            f"{definition.command} would fetch its program at each start, which is not allowed; install "
            f"it once with: handrail mcp install {definition.name}"
        )
    command = str(Path(definition.command).expanduser()) if definition.command.startswith("~") else definition.command
    try:
        program = find_program(command, outside=(workspace,))
    except ProgramRefused as error:
        raise ServerCommandRejected(str(error)) from None
    real = f"{os.path.realpath(os.path.dirname(program))}/{os.path.basename(program)}"  # noqa: PTH119, PTH120
    folders = find_installation_mounts(program, workspace) if to_start else ()
    return _require_safe_program(ResolvedServerProgram((real, *definition.args), folders), workspace)


def _require_safe_program(found: ResolvedServerProgram, workspace: str) -> ResolvedServerProgram:
    """Check that a program can run and that no call could have written it.

    :raises ServerCommandRejected: otherwise
    """
    if (folder := find_enclosing_folder(found.argv[0], (workspace, *list_open_workspaces()))) is not None:
        raise ServerCommandRejected(
            f"{found.argv[0]} is in the workspace {folder}, where a call could change it; move it out of the workspace"
        )
    if not os.access(found.argv[0], os.X_OK):
        raise ServerCommandRejected(f"{found.argv[0]} is missing or cannot be run; install it again")
    return found


def _read_install_record(state: Path, definition: ServerDefinition, workspace: str) -> ResolvedServerProgram | None:
    """Return the installed program of a server's present command; None if there is no valid record."""
    content = operator_decisions.read_private_file(state / "mcp" / "installed" / f"{definition.name}.json", _MAX_RECORD)
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
    folders = tuple(dict.fromkeys((os.path.realpath(folder), *find_installation_mounts(command, workspace))))
    return ResolvedServerProgram((command, *args), folders, folder, hashes)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


# Installation of packages that ``npx``, ``uvx`` and similar programs would fetch at each start: once, if the user agrees.
#
# A package goes into a separate folder in the state root, with exact versions and a recorded hash of every file. From then
# on the server starts from there and fetches nothing.

_NPM = re.compile(
    r"(?P<name>(?:@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*)(?:@(?P<version>[\w.^~><=|*+-]+))?", re.I
)
_PYPI = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?P<extras>\[[\w,.-]+\])?(?P<version>(?:==|>=|<=|~=|!=|<|>|@)[\w.,*<>=!~+ -]+)?"
)
_TIMEOUT_S = 900
_MANAGER_VARIABLES = (
    *("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "NETRC"),
)
_MANAGER_PREFIXES = ("PIP_", "npm_config_", "NPM_CONFIG_", "NPM_TOKEN")
"""The environment variables that package managers need to reach their registries."""

PackageKind = Literal["npm", "pypi"]


class ServerPackage(Struct, frozen=True):
    """The package that a command would fetch.

    :param spec: the package and version, in the form of the package manager
    :param program: the program of the package to run; empty for the only or the main one
    :param extra_packages: packages to install with it
    :param args: the arguments of the program
    """

    kind: PackageKind
    name: str
    spec: str
    program: str
    args: tuple[str, ...]
    extra_packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        beside = f" with {', '.join(self.extra_packages)}" if self.extra_packages else ""
        return f"{self.spec} from {'npm' if self.kind == 'npm' else 'PyPI'}{beside}"


class InstalledServer(Struct, frozen=True):
    """The result of an installation.

    :param versions: the versions of all installed packages, by name
    """

    package: ServerPackage
    version: str
    versions: Mapping[str, str]
    folder: Path
    argv: tuple[str, ...]
    files: int


def identify_server_package(definition: ServerDefinition) -> ServerPackage | None:
    """Return the package that a server's command would fetch, or None if it fetches nothing.

    :raises UsageError: for a command that fetches in an unknown way
    """
    words = (definition.command, *definition.args)
    if not definition.command or not would_fetch_package(definition.command, definition.args):
        return None
    name = Path(definition.command).name.lower().removesuffix(".cmd").removesuffix(".exe")
    rest = list(definition.args)
    two = {"npm": ("exec", "x"), "pnpm": ("dlx",), "yarn": ("dlx",), "bun": ("x",)}
    if name in two and rest and rest[0] in two[name]:
        return _parse_npm_words(rest[1:])
    if name in ("npx", "bunx", "pnpx"):
        return _parse_npm_words(rest)
    if name == "uvx":
        return _parse_pypi_words(rest, "--from")
    if name == "uv" and rest[:2] == ["tool", "run"]:
        return _parse_pypi_words(rest[2:], "--from")
    if name == "pipx" and rest[:1] == ["run"]:
        return _parse_pypi_words(rest[1:], "--spec")
    raise UsageError(
        f"Handrail cannot install what {' '.join(words)} fetches. Install the server yourself, "
        "outside the workspace, and set its absolute path as command."
    )


def _parse_npm_words(words: Sequence[str]) -> ServerPackage:
    options, program, args = _split_options(
        words, {"-p": "package", "--package": "package", "-c": "call", "--call": "call"}
    )
    if "call" in options:
        raise UsageError("A shell command (-c) cannot be installed. Name the package and its arguments instead.")
    named = options.get("package", [])
    if not named and not program:
        raise UsageError("The command names no package. Add NAME or NAME@VERSION.")
    specs = named or [program]
    match = _NPM.fullmatch(specs[0])
    if match is None:
        raise UsageError(f"{specs[0]!r} is not a package in the npm registry. Expected NAME or NAME@VERSION.")
    for one in specs[1:]:
        if _NPM.fullmatch(one) is None:
            raise UsageError(f"{one!r} is not a package in the npm registry. Expected NAME or NAME@VERSION.")
    return ServerPackage("npm", match["name"], specs[0], program if named else "", tuple(args), tuple(specs[1:]))


def _parse_pypi_words(words: Sequence[str], source: str) -> ServerPackage:
    valued = {source: "from", "--with": "with", "-w": "with", "--python": "python", "-p": "python"}
    options, program, args = _split_options(words, valued)
    if not program:
        raise UsageError("The command names no package. Add NAME or NAME==VERSION.")
    spec = _to_requirement(options.get("from", [program])[-1])
    program_name = re.split(r"[@\[=<>~!]", program)[0]
    match = _PYPI.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} is not a PyPI package. Expected NAME or NAME==VERSION.")
    beside = tuple(_to_requirement(one.strip()) for given in options.get("with", []) for one in given.split(","))
    for one in beside:
        if _PYPI.fullmatch(one) is None:
            raise UsageError(f"{one!r} is not a PyPI package. Expected NAME or NAME==VERSION.")
    return ServerPackage("pypi", match["name"], spec, program_name, tuple(args), beside)


def _to_requirement(spec: str) -> str:
    """Return a requirement of pip for one of uvx, which also has ``NAME@latest`` and ``NAME@VERSION``."""
    name, at, version = spec.partition("@")
    if not at or "/" in version or ":" in version:
        return spec
    return name.strip() if version.strip() in ("", "latest") else f"{name.strip()}=={version.strip()}"


def _split_options(words: Sequence[str], valued: Mapping[str, str]) -> tuple[dict[str, list[str]], str, list[str]]:
    """Return the options before the program, by their meaning; the program; and its arguments."""
    found: dict[str, list[str]] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        option = left.pop(0)
        if option == "--":
            break
        key, equals, value = option.partition("=")
        if key in valued:
            if not equals:
                if not left:
                    raise UsageError(f"Option {key} has no value. Add one.")
                value = left.pop(0)
            found.setdefault(valued[key], []).append(value)
    program = left.pop(0) if left else ""
    if left[:1] == ["--"]:
        left.pop(0)
    return found, program, left


def install_server(
    definition: ServerDefinition, package: ServerPackage, state: Path, workspace: str, *, scripts: bool = False
) -> InstalledServer:
    """Fetch a server's package and record its command.

    An earlier installation of the server is replaced after this one has succeeded.

    :param state: the root folder of all state
    :param scripts: whether packages of npm may run programs of their own during the installation
    :raises UsageError: with the reason; nothing has changed then
    """
    base = state / "mcp" / "packages"
    folder = base / f"{definition.name}-{secrets.token_hex(4)}"
    records = state / "mcp" / "installed"
    for made in (base, records):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = records / f"{definition.name}.json"
    before = _recorded_folder(record)
    folder.mkdir(mode=0o700)
    try:
        done = (_install_with_npm if package.kind == "npm" else _install_with_pip)(package, folder, workspace, scripts)
        hashes = _hash_folder_files(folder)
        entry = {
            "command": done[0][0],
            "args": [*done[0][1:], *package.args],
            "folder": str(folder),
            "hashes": hashes,
            "of": [definition.command, *definition.args],
            "package": str(package),
            "versions": done[1],
        }
        operator_decisions.write_private_file(record, json.dumps(entry).encode())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if before is not None and before.parent == base and before != folder:
        shutil.rmtree(before, ignore_errors=True)
    name = _normalize_name(package.name) if package.kind == "pypi" else package.name
    return InstalledServer(package, done[1].get(name, ""), done[1], folder, done[0], len(hashes))


def find_installed_package(definition: ServerDefinition, state: Path) -> tuple[str, str] | None:
    """Return the package installed for a server's present command, and its version; None if there is none."""
    content = operator_decisions.read_private_file(
        state / "mcp" / "installed" / f"{definition.name}.json", 64 * 1024 * 1024
    )
    try:
        data: Any = json.loads(content or b"null")
        if data["of"] != [definition.command, *definition.args]:
            return None
        package = str(data["package"])
        bare = package.partition(" from ")[0]
        for name, version in cast("dict[str, str]", data["versions"]).items():
            if bare == name or re.match(
                re.escape(name) + r"[@=<>~!\[]", _normalize_name(bare) if "@" not in bare[:1] else bare
            ):
                return name, version
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return package, ""


def _install_with_npm(
    package: ServerPackage, folder: Path, workspace: str, scripts: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    npm, node = (_find_manager(name, workspace, package) for name in ("npm", "node"))
    (folder / "package.json").write_text("{}")
    options = ["--no-audit", "--no-fund", "--save-exact", *([] if scripts else ["--ignore-scripts"])]
    _run_package_manager(
        [npm, "install", *options, "--", package.spec, *package.extra_packages], folder, Path(node).parent
    )
    modules = folder / "node_modules"
    lock = json.loads((modules / ".package-lock.json").read_text())["packages"]
    versions = {path.rpartition("node_modules/")[2]: str(one.get("version", "")) for path, one in lock.items() if path}
    fields = json.loads((modules / package.name / "package.json").read_text())
    programs: Any = fields.get("bin") or {}
    if isinstance(programs, str):
        programs = {package.name.rpartition("/")[2]: programs}
    wanted = package.program or package.name.rpartition("/")[2]
    entry = programs.get(wanted) or (next(iter(programs.values())) if len(programs) == 1 else None)
    if entry is None:
        names = ", ".join(programs) or "none"
        raise UsageError(
            f"{package.name} has no program {wanted!r}. Its programs: {names}. Name one with -p {package.name} PROGRAM."
        )
    script = (modules / package.name / entry).resolve()
    if not script.is_relative_to(folder.resolve()) or not script.is_file():
        raise UsageError(
            f"The program {entry} that {package.name} names is not in the package. Ask the package's "
            "author to correct it."
        )
    return (os.path.realpath(node), str(script)), versions


def _install_with_pip(
    package: ServerPackage, folder: Path, workspace: str, _scripts: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    python = folder / "bin" / "python"
    _run_package_manager([find_own_interpreter(), "-I", "-m", "venv", str(folder)], folder, None)
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-compile"]
    _run_package_manager(
        [str(python), "-I", "-m", "pip", "install", *quiet, package.spec, *package.extra_packages], folder, None
    )
    output_text = _run_package_manager(
        [str(python), "-I", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"], folder, None
    )
    versions = {_normalize_name(str(one["name"])): str(one["version"]) for one in json.loads(output_text)}
    program = folder / "bin" / (package.program or package.name)
    if not program.is_file():
        raise UsageError(
            f"{package.name} has no program {program.name!r}. Name its program after --from {package.spec}."
        )
    return (str(python), str(program)), versions


def _find_manager(name: str, workspace: str, package: ServerPackage) -> str:
    try:
        return find_program(name, outside=(workspace,))
    except ProgramRefused as error:
        raise UsageError(f"{package} requires {name}: {error}") from None


def _run_package_manager(command: Sequence[str], folder: Path, first: Path | None) -> str:
    """Run a package manager and return its stdout.

    :raises UsageError: with the end of its output, if it failed
    """
    environment = {
        **build_program_environment(_MANAGER_VARIABLES, prefixes=_MANAGER_PREFIXES),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if first is not None:
        environment["PATH"] = f"{first}{os.pathsep}{environment['PATH']}"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{Path(command[0]).name} could not run: {error}. Nothing was installed. Check that it works in your terminal, then try again."
        ) from None
    if done.returncode != 0:
        output_text = (done.stderr.strip() or done.stdout.strip())[-800:]
        raise UsageError(
            f"{Path(command[0]).name} could not install the package. Correct the name, or try it in your terminal: {output_text}"
        )
    return done.stdout


def _hash_folder_files(folder: Path) -> dict[str, str]:
    """Return the hashes of all files in ``folder``, by path, without Python's caches."""
    found: dict[str, str] = {}
    for at, inner, files in os.walk(folder):
        inner[:] = sorted(name for name in inner if name != "__pycache__")
        for name in sorted(files):
            path = Path(at) / name
            if path.is_symlink() or not path.is_file():
                continue
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
            found[str(path.relative_to(folder))] = digest.hexdigest()
    return found


def _recorded_folder(record: Path) -> Path | None:
    try:
        return Path(str(json.loads(record.read_bytes())["folder"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _normalize_name(name: str) -> str:
    """Return a project's name in PyPI's normalised form."""
    return re.sub(r"[-_.]+", "-", name).lower()
