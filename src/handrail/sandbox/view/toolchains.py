"""Interpreters and compilers that a project needs, found on PATH, to be mounted read-only; the locale of programs.

Mounting only the system's own folders would leave out common installations: pyenv, nvm, conda, cargo, a project's virtual
environment and the interpreter below it. Only installations are taken, never a home folder or a folder that holds one. The
workspace's files (``.python-version``, ``pyvenv.cfg``) can choose among installed interpreters and add nothing else.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.origins.program_lookup import (
    SYSTEM_FOLDERS,
    ProgramRefused,
    build_program_environment,
    find_program,
    list_home_folders,
)
from handrail.sandbox.view.cached_folder_tree import raise_if_resource_shortage
from handrail.sandbox.view.sandbox_user import LookupCache

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
_INSTALLATION_MARKS = ("lib", "lib64", "libexec", "include", "share", "pyvenv.cfg", "conda-meta")
"""With one of these next to ``bin``, its parent folder is an installation."""
_FOLDER_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME", "GOROOT", "NVM_BIN")
"""Variables with the folder of an installation, kept if programs see that folder."""
_PACKAGES = "node_modules"
_SHIM_FOLDERS = frozenset({"shims"})
_NEVER_WHOLE = frozenset({".local", ".config", ".cache", ".cargo", ".ssh", ".gnupg", ".aws", ".docker", ".kube"})
"""Folders that contain ``bin`` and also credentials. Only the ``bin`` is mounted."""


class ToolchainSet(Struct, frozen=True):
    """The toolchains of a workspace: mounts, PATH and variables.

    :param mounts: canonical folders to mount read-only, none within another
    :param path: canonical folders for PATH, in order; folders in the workspace come last
    """

    mounts: tuple[str, ...]
    path: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def find_toolchains(workspace: str, look: LookupCache | None = None) -> ToolchainSet:
    """Return the toolchains of a workspace, cached by the variables and the version files that choose them."""
    look = look or LookupCache()
    folders = tuple(look.read_environment_variable(name) or "" for name in _FOLDER_VARIABLES)
    files = [f"{workspace}/.python-version", f"{workspace}/.venv/pyvenv.cfg"]
    if folders[0].startswith("/"):
        files.append(f"{folders[0]}/pyvenv.cfg")
    chosen = tuple(look(_read_change_time, file) if look.identify(file) else None for file in files)
    return _find_toolchains_cached(
        workspace,
        look.read_environment_variable("PATH") or "",
        look.read_environment_variable("PYENV_VERSION") or "",
        folders,
        chosen,
    )


def _read_change_time(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - at every start
    except OSError:
        return None


@lru_cache(maxsize=64)
def _find_toolchains_cached(
    workspace: str, path: str, pyenv_version: str, chosen: tuple[str, ...], _stamps: tuple[int | None, ...]
) -> ToolchainSet:
    activated = _find_activated(chosen[0], path)
    homes = list_home_folders()
    keep_out = (*homes, workspace)
    mounts: list[str] = []
    first: list[str] = []
    last: list[str] = []
    environment: dict[str, str] = {}
    folders = [folder for folder in path.split(os.pathsep) if folder.startswith("/")]
    for folder in (*folders, f"{sys.base_prefix}/bin"):
        real = os.path.realpath(folder)
        if not _is_folder(real) or _contains_any(real, homes):
            continue
        if _is_beneath(real, workspace):
            (first if real == f"{activated}/bin" else last).append(real)
        elif not _is_beneath(workspace, real):
            if Path(real).name in _SHIM_FOLDERS:
                first += _resolve_shims(Path(real), workspace, pyenv_version)
                environment |= _build_pyenv_environment(Path(real).parent)
            first.append(real)
            mounts += _find_path_folder_mounts(real, keep_out, environment)
    if sys.prefix != sys.base_prefix:  # the environment Handrail itself runs in, for tools started by its interpreter
        mounts.append(_find_installation_root(os.path.realpath(f"{sys.prefix}/bin"), keep_out))
    for environment_folder in (f"{workspace}/.venv", f"{workspace}/venv", activated):
        if environment_folder is not None:
            mounts += _find_base_interpreter(Path(environment_folder), keep_out)
    outside = [mount for mount in mounts if not _is_beneath(mount, workspace) and not _is_system(mount)]
    shown = _keep_outermost(outside)
    for name, folder in zip(_FOLDER_VARIABLES, (activated or "", *chosen[1:]), strict=True):
        if folder.startswith("/") and any(
            _is_beneath(os.path.realpath(folder), one) for one in (*shown, workspace, *SYSTEM_FOLDERS)
        ):
            environment[name] = os.path.realpath(folder)
    return ToolchainSet(shown, tuple(dict.fromkeys((*first, *_SYSTEM_PATH, *last))), environment)


def _find_activated(folder: str, path: str) -> str | None:
    """Return the canonical folder of the virtual environment that the operator has activated; None without one.

    Its programs come from PATH, as the operator's shell takes them, also if it lies in the workspace.
    """
    real = os.path.realpath(folder) if folder.startswith("/") else ""
    if not real or not _is_folder(f"{real}/bin") or not Path(real, "pyvenv.cfg").is_file():
        return None
    return real if any(os.path.realpath(one) == f"{real}/bin" for one in path.split(os.pathsep)) else None


@lru_cache(maxsize=64)
def read_git_identity(workspace: str) -> Mapping[str, str]:
    """Return the operator's name and address for commits, from the environment or git's configuration.

    git runs outside the sandbox, in a folder without a repository.

    :raises ToolError: ``unavailable`` if the system is short of descriptors or memory
    """
    found = {
        name: os.environ[name]
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
        if (name := f"GIT_{who}_{what}") in os.environ
    }
    if len(found) == 4:
        return found
    git = "git"
    try:
        git = find_program(git, outside=(workspace,))
        answer = subprocess.run(
            [git, "config", "--global", "--null", "--get-regexp", r"^user\.(name|email)$"],
            cwd="/",
            env=build_program_environment(outside=(workspace,)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=5,
            check=False,
        ).stdout.decode("utf-8", "replace")
    except OSError as error:
        raise_if_resource_shortage(error, git)  # such an answer must not be cached
        return found
    except (ProgramRefused, subprocess.SubprocessError):
        return found
    for entry in answer.split("\0"):
        key, newline, value = entry.partition("\n")
        if newline and value:
            what = key.removeprefix("user.").upper()
            found.setdefault(f"GIT_AUTHOR_{what}", value)
            found.setdefault(f"GIT_COMMITTER_{what}", value)
    return found


def find_installation_mounts(program: str, workspace: str) -> tuple[str, ...]:
    """Return what to mount for a program at an absolute path.

    This is the installation around it and what that depends on; without an installation, the program's folder.
    """
    keep_out = (*list_home_folders(), workspace)
    found: list[str] = []
    for path in (os.path.realpath(Path(program).parent), Path(os.path.realpath(program)).parent):
        folder = str(path)
        if not _is_system(folder) and not _contains_any(folder, keep_out):
            found += [_find_installation_root(folder, keep_out), *_find_base_interpreter(Path(folder).parent, keep_out)]
    return _keep_outermost(found)


def _find_path_folder_mounts(folder: str, keep_out: Iterable[str], environment: dict[str, str]) -> list[str]:
    """Return what to mount for a folder of programs on PATH, with what its programs depend on."""
    if any(_is_beneath(folder, system) for system in SYSTEM_FOLDERS):
        return []
    found = [_find_installation_root(folder, keep_out), *_find_base_interpreter(Path(folder).parent, keep_out)]
    if folder.endswith("/.cargo/bin"):
        found += _find_rust_mounts(Path(folder).parent.parent, environment)
    if folder.startswith("/nix/") or _is_folder("/nix/store"):
        found.append("/nix/store")
    return found


def _find_installation_root(folder: str, keep_out: Iterable[str]) -> str:
    """Return the installation around a folder of programs if there clearly is one; else the folder."""
    parent = Path(folder).parent
    if _PACKAGES in (parts := Path(folder).parts):
        packages = str(Path(*parts[: parts.index(_PACKAGES) + 1]))  # a package of npm needs those next to it
        return folder if _contains_any(packages, keep_out) else packages
    if Path(folder).name in _SHIM_FOLDERS or (
        Path(folder).name in ("bin", "sbin", "condabin")
        and any((parent / mark).exists() for mark in _INSTALLATION_MARKS)
    ):
        whole = str(parent)
        if len(parent.parts) > 2 and parent.name not in _NEVER_WHOLE and not _contains_any(whole, keep_out):
            return whole
    return folder


def _build_pyenv_environment(root: Path) -> dict[str, str]:
    return {"PYENV_ROOT": str(root)} if (root / "libexec" / "pyenv").exists() else {}


def _resolve_shims(shims: Path, workspace: str, pyenv_version: str) -> list[str]:
    """Return the folders of the programs that pyenv's shims would run, to skip the shell script."""
    versions = shims.parent / "versions"
    chosen = (
        pyenv_version.replace(":", "\n")
        or _read_text(Path(workspace) / ".python-version")
        or _read_text(shims.parent / "version")
    )
    found: list[str] = []
    for name in chosen.split():
        if "/" not in name and name not in (".", "..") and _is_folder(f"{versions}/{name}/bin"):
            real = os.path.realpath(versions / name / "bin")
            if _is_beneath(real, str(shims.parent)):
                found.append(real)
    return found


def _find_base_interpreter(environment: Path, keep_out: Iterable[str]) -> list[str]:
    """Return the interpreter installation below a virtual environment, if it really is one."""
    found: list[str] = []
    for line in _read_text(environment / "pyvenv.cfg").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home" and value.strip().startswith("/"):
            found += _find_python_mounts(value.strip(), keep_out)
    return found


def _find_python_mounts(folder: str, keep_out: Iterable[str]) -> list[str]:
    real = Path(os.path.realpath(folder))
    python = real / "python3"
    try:
        target = Path(os.path.realpath(python)) if python.exists() else None
    except OSError:
        target = None
    if target is None or target.parent.name != "bin":
        return []
    prefix = target.parent.parent
    if not any(prefix.glob("lib/python3.*/os.py")) or _contains_any(str(prefix), keep_out):
        return []
    return [str(prefix)]


def _find_rust_mounts(home: Path, environment: dict[str, str]) -> list[str]:
    rustup = Path(os.environ.get("RUSTUP_HOME", home / ".rustup"))
    if not _is_folder(f"{rustup}/toolchains"):
        return []
    environment["RUSTUP_HOME"] = str(rustup)
    return [os.path.realpath(rustup)]


def _read_text(path: Path) -> str:
    """Return the beginning of a small text file, or an empty text. It never waits for a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return ""
    try:
        return (
            os.read(descriptor, 4096).decode("utf-8", "replace") if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
        )
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _contains_any(folder: str, others: Iterable[str]) -> bool:
    return any(_is_beneath(other, folder) for other in others)


def _is_folder(path: str) -> bool:
    """Return whether a path is a folder that can be entered."""
    return os.access(path, os.X_OK) and os.path.isdir(path)  # noqa: PTH112 - which raises nothing


def _is_system(path: str) -> bool:
    return any(_is_beneath(path, system) for system in SYSTEM_FOLDERS)


def _is_beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _keep_outermost(paths: Iterable[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(_is_beneath(path, other) for other in kept):
            kept.append(path)
    return tuple(kept)


# The locale variables that a program inherits: only character sets in which every reader finds the same backslashes.
#
# In GBK, Big5 and Shift-JIS the second byte of a character may be that of a backslash. A shell in such a locale reads a
# text differently from the parser that checked it.

DEFAULT_LOCALE = "C.UTF-8"
"""Replaces every other locale."""
_KEPT_LOCALES = ("LANG", "LC_ALL", "LC_CTYPE")
LOCALE_VARIABLES = (*_KEPT_LOCALES, "TZ")
"""The variables that :func:`select_locale_variables` reads."""
_READ_ALIKE = compile_regex_lazily(r"C|POSIX|[A-Za-z0-9_]+\.UTF-?8(?:@[A-Za-z0-9_]+)?", re.IGNORECASE)


def select_locale_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of locale and time zone that are set. Only UTF-8, ``C`` and ``POSIX`` are kept."""
    found = {
        name: value if _READ_ALIKE.fullmatch(value) else DEFAULT_LOCALE
        for name in _KEPT_LOCALES
        if (value := environment.get(name))
    }
    return found | ({"TZ": environment["TZ"]} if "TZ" in environment else {})
