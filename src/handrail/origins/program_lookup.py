"""The lookup of programs that the kernel starts by itself, outside any sandbox, and the list of open workspaces.

:func:`find_program` is the only lookup of such a program. It refuses every program that a call could have written or
that another user of the machine could replace: one in an open workspace, by PATH also one in the current folder, one by a
relative entry of PATH or through a link in such a folder, one in a world-writable folder, and a script whose interpreter is
such a program.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.origins.listed_paths import make_spelling_independent_key

# The workspaces that are open in this process, and a check whether a path leads through one of them.
#
# A call can write in a workspace. So the kernel takes neither code nor a program from there, and every link on the way
# counts: a link in the workspace can change between a check and a start.

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
"""The system's own folders. They count as outside of a workspace that contains them, such as ``/``."""
_MOST_LINKS = 40
_lock = threading.Lock()
_opened_workspaces: Counter[str] = Counter()
_folders: tuple[str, ...] = ()
"""The canonical folders of open workspaces; a new tuple after each change."""


@contextmanager
def register_open_workspaces(*folders: str | os.PathLike[str]) -> Generator[None]:
    """Count ``folders`` as open workspaces until the block ends."""
    canonical = [os.path.realpath(folder) for folder in folders]
    _count(canonical, 1)
    try:
        yield
    finally:
        _count(canonical, -1)


def register_workspaces_until_exit(folders: Iterable[str]) -> None:
    """Count ``folders`` as open workspaces until the process ends, as for additional roots."""
    if canonical := {os.path.realpath(folder) for folder in folders}.difference(_folders):
        _count(canonical, 1)


def list_open_workspaces() -> tuple[str, ...]:
    """Return the canonical folders in which calls can write.

    The object is the same until a workspace is opened or closed.
    """
    return _folders


def get_current_project_folder() -> str | None:
    """Return the current folder if it may be a project, or None, as for ``/`` and system folders.

    A user often starts Handrail in their project, so programs from there are as untrusted as those of a workspace.
    """
    try:
        folder = os.getcwd()  # noqa: PTH109 - read at every lookup
    except OSError:
        return None
    broad = folder == "/" or any(is_inside_folder(home, folder) for home in list_home_folders())
    return None if broad or any(is_inside_folder(folder, system) for system in SYSTEM_FOLDERS) else folder


def _count(folders: Iterable[str], by: int) -> None:
    global _folders
    with _lock:
        for folder in folders:
            _opened_workspaces[folder] += by
        _folders = tuple(+_opened_workspaces)


def find_home_folder() -> str | None:
    """Return the absolute path of the user's home folder; None if HOME is not set and the user has no account."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return None
    return home if Path(home).is_absolute() else None


def locate_user_folder(find: Callable[[], str], default: str) -> str | None:
    """Return a folder for the user's files; None if it needs the home folder, which is not known.

    :param find: returns the folder of the platform. One that depends on the current folder is not used
    :param default: the folder in the home folder to use then
    """
    try:
        path = find()
    except RuntimeError:  # no home folder is known
        path = ""
    if Path(path).is_absolute():
        return path
    home = find_home_folder()
    return None if home is None else f"{home}/{default}"


@lru_cache(maxsize=1)
def list_home_folders() -> frozenset[str]:
    """Return the home folders of all users and of root."""
    import pwd

    own = find_home_folder()
    homes = set[str]() if own is None else {os.path.realpath(own)}
    for entry in pwd.getpwall():
        if entry.pw_uid == 0 or 1000 <= entry.pw_uid < 65_534:
            homes.add(os.path.realpath(entry.pw_dir))
    return frozenset(homes - {"/", "/nonexistent"})


def walk_folders_and_links(path: str) -> Iterator[str]:
    """Yield every place on the way to an absolute ``path``: each folder and link, and last the file.

    :raises OSError: if there are too many links
    """
    left = path.split("/")[::-1]
    at, links = "", 0
    while left:
        if (part := left.pop()) in ("", "."):
            continue
        if part == "..":
            at = at.rpartition("/")[0]
            continue
        yield (here := f"{at}/{part}")
        try:
            target = os.readlink(here)  # noqa: PTH115 - many of them, at each lookup
        except OSError:
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(f"too many links on the way to {path}")
        if target.startswith("/"):
            at = ""
        left.extend(reversed(target.split("/")))


def find_enclosing_folder(path: str, folders: Iterable[str]) -> str | None:
    """Return the first of the canonical ``folders`` that an absolute path leads through or into, or None.

    The path may be in another spelling. A path that cannot be followed counts as leading into the first one.
    """
    folders = tuple(folders)
    if not folders:
        return None
    try:
        places = tuple(walk_folders_and_links(path))
    except (OSError, ValueError):
        return folders[0]
    found = next((folder for folder in folders if any(_contains(folder, place) for place in places)), None)
    if found is None and (respelled := {make_spelling_independent_key(place) for place in places}.difference(places)):
        keys = ((folder, make_spelling_independent_key(folder)) for folder in folders)
        found = next((folder for folder, key in keys if any(_contains(key, place) for place in respelled)), None)
    return found


def is_inside_folder(path: str, folder: str) -> bool:
    """Return whether ``path`` is ``folder`` or in it, by their texts."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _contains(folder: str, path: str) -> bool:
    if not is_inside_folder(path, folder):
        return False
    return not any(is_inside_folder(path, system) and not is_inside_folder(folder, system) for system in SYSTEM_FOLDERS)


_MOST_INTERPRETERS = 4
"""The number of nested script interpreters that Linux follows."""
_SHEBANG_BYTES = 4096
_MISSING = "The file does not exist or is not executable. Check the path and its mode."
_PASSED_VARIABLES = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"),
        *("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"),
    )
)


class ProgramRefused(StartError):
    """A program that the kernel needs is missing, or a call could have written it."""


class ProgramNotFoundError(ProgramRefused):
    """No program of that name exists."""


def find_program(name: str, *, outside: Iterable[str] = (), path: Iterable[str] | None = None) -> str:
    """Return the absolute path of a program for the kernel to start.

    :param name: a name to look up on PATH, or an absolute path
    :param outside: additional folders that the program must not come from
    :param path: the folders to search; None for those of PATH
    :raises ProgramNotFoundError: if no such program exists
    :raises ProgramRefused: if every such program is refused, with the reason
    """
    if "/" in name:
        if (problem := _find_program_fault(name, _folders_to_refuse(outside))) is not None:
            refusal = ProgramNotFoundError if problem == _MISSING else ProgramRefused
            raise refusal(f"Program {name} cannot be started. {problem}")
        return name
    if not name or "\0" in name:
        raise ProgramRefused(f"Program {name!r} cannot be started. Use a name on PATH or an absolute path.")
    folders = _folders_to_skip(outside)
    passed_over: list[str] = []
    for folder in list_path_variable_folders() if path is None else path:
        candidate = f"{folder.rstrip('/')}/{name}"
        if not _is_program(candidate):
            continue
        if (problem := _find_program_fault(candidate, folders)) is None:
            return candidate
        passed_over.append(f"{candidate or name}: {problem}")
    why = f" Skipped: {'; '.join(passed_over)}" if passed_over else ""
    refusal = ProgramRefused if passed_over else ProgramNotFoundError
    raise refusal(
        f"Program {name} was not found. It must be on PATH, outside the workspace and the "
        f"current folder. Install it there, or use its absolute path.{why}"
    )


def resolve_command_program(command: Sequence[str], *, outside: Iterable[str] = ()) -> tuple[str, ...]:
    """Return an operator's command with the absolute path of its program.

    :raises ProgramRefused: as :func:`find_program`, and if an argument names a file in a workspace, which the program could
        run
    """
    if not command:
        raise ProgramRefused("The command is empty. Pass a program and its arguments.")
    folders = _folders_to_refuse(outside)
    program = find_program(command[0], outside=outside)
    for word in command[1:]:
        if (folder := _find_named_folder(word, folders)) is not None:
            raise ProgramRefused(
                f"Command {command[0]} cannot be started. Its argument {word!r} names a file in {folder}, "
                "where a call could change it. Move the file elsewhere."
            )
    return (program, *command[1:])


def build_clean_path(*, outside: Iterable[str] = ()) -> str:
    """Return PATH without the folders that :func:`find_program` skips, for programs that start others."""
    folders = _folders_to_skip(outside)
    kept = (folder for folder in list_path_variable_folders() if _fault_in_folder(folder, folders) is None)
    return os.pathsep.join(dict.fromkeys(kept)) or os.defpath.lstrip(":.")


def build_program_environment(
    names: Iterable[str] = (), *, prefixes: tuple[str, ...] = (), outside: Iterable[str] = ()
) -> dict[str, str]:
    """Return the environment of a program that the kernel starts: only a fixed list of variables.

    A variable that names a file in a workspace is left out.

    :param names: additional variables
    :param prefixes: prefixes of additional variables
    """
    folders = _folders_to_refuse(outside)
    wanted = _PASSED_VARIABLES.union(names)
    begin = ("LC_", *prefixes)
    found = {
        name: value
        for name, value in os.environ.items()
        if (name in wanted or name.startswith(begin)) and _find_named_folder(value, folders) is None
    }
    return {**found, "PATH": build_clean_path(outside=outside)}


def find_own_interpreter() -> str:
    """Return the Python of this process, for programs that need only its standard library.

    If it is that of a virtual environment in a workspace, return that of the base installation.

    :raises ProgramRefused: if the interpreter or its library is in an open workspace
    """
    folders = list_open_workspaces()
    base = str(getattr(sys, "_base_executable", ""))
    library = os.path.abspath(os.__file__)  # noqa: PTH100
    for candidate in (sys.executable, base):
        there = candidate.startswith("/") and os.access(candidate, os.X_OK)
        if there and all(find_enclosing_folder(place, folders) is None for place in (candidate, library)):
            return candidate
    raise ProgramRefused(
        f"Python {sys.executable} cannot be started. It is in a workspace, where a call could change "
        "it. Install Handrail with an interpreter outside the workspace."
    )


def find_untrusted_environment_entries(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield ``(variable, entry)`` for files in an open workspace that this process would load or trust."""
    folders = list_open_workspaces()
    given = sys.pycache_prefix  # also set by -X
    if given is not None and find_enclosing_folder(os.path.abspath(given), folders) is not None:  # noqa: PTH100
        yield "PYTHONPYCACHEPREFIX", given
    for name in _TRUSTED_BY_LIBRARIES:
        separators = (
            ":" if name.startswith("LD_LIBRARY") or name == "SSL_CERT_DIR" else " :" if name in _LIST_VARIABLES else ""
        )
        value = environment.get(name, "")
        for separator in separators:
            value = value.replace(separator, "\n")
        for entry in value.split("\n"):
            if entry and find_enclosing_folder(os.path.abspath(entry), folders) is not None:  # noqa: PTH100 - keeps links
                yield name, entry


_LIST_VARIABLES = ("LD_PRELOAD", "LD_AUDIT")
_TRUSTED_BY_LIBRARIES = (
    *(*_LIST_VARIABLES, "LD_LIBRARY_PATH", "OPENSSL_CONF", "OPENSSL_MODULES", "OPENSSL_ENGINES", "PYTHONPYCACHEPREFIX"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC", "HOSTALIASES"),
    *("GOOGLE_APPLICATION_CREDENTIALS", "HF_HOME", "FASTEMBED_CACHE_PATH", "TMPDIR", "TEMP", "TMP", "SQLITE_TMPDIR"),
)
"""Variables that make libraries in this process load code, store caches or secrets, or trust another machine."""


def _folders_to_refuse(outside: Iterable[str]) -> tuple[str, ...]:
    """Return the folders that an operator's absolute path must not lead through."""
    return tuple(dict.fromkeys((*map(os.path.realpath, outside), *list_open_workspaces())))


def _folders_to_skip(outside: Iterable[str]) -> tuple[str, ...]:
    """Return the folders that an entry of PATH must not lead through, including the current one."""
    here = get_current_project_folder()
    return (*_folders_to_refuse(outside), *((here,) if here else ()))


def list_path_variable_folders() -> Iterator[str]:
    """Return the absolute entries of PATH. An empty entry means the current folder."""
    return (folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder.startswith("/"))


def _is_program(path: str) -> bool:
    return os.access(path, os.X_OK) and Path(path).is_file()


def _find_program_fault(path: str, folders: tuple[str, ...], depth: int = 0) -> str | None:
    """Return the reason why a program must not be started, or None."""
    if not path.startswith("/"):
        return "The path is relative to the current folder. Use an absolute path."
    if "\0" in path:
        return _MISSING
    if (problem := _fault_in_place(path, folders)) is not None:
        return problem
    return _fault_in_interpreter(path, folders, depth)


def _fault_in_place(path: str, folders: tuple[str, ...]) -> str | None:
    if (folder := find_enclosing_folder(path, folders)) is not None:
        return (
            f"It is in the workspace {folder}, or a link there leads to it, so a call could change it. "
            "Move it elsewhere."
        )
    return _find_replaceable_fault(path) if os.path.exists(path) and os.access(path, os.X_OK) else _MISSING  # noqa: PTH110


def _find_replaceable_fault(path: str) -> str | None:
    """Return the reason why another user could replace the file at ``path``, or None."""
    try:
        places = tuple(walk_folders_and_links(path))
        for place in places:
            mode = os.lstat(place).st_mode
            if stat.S_ISLNK(mode) or place == places[-1]:
                holder = os.path.dirname(place) or "/"  # noqa: PTH120
                if not stat.S_ISLNK(mode) and not stat.S_ISDIR(mode) and mode & 0o002:
                    return f"Every user can write {place}. Run: chmod o-w {place}"
                if os.stat(holder).st_mode & 0o002:  # noqa: PTH116
                    return f"Every user can write to {holder}. Run: chmod o-w {holder}, or move the program elsewhere."
            elif mode & 0o002 and not mode & stat.S_ISVTX:
                return f"Every user can write to {place}. Run: chmod o-w {place}, or move the program elsewhere."
    except OSError as error:
        return f"It cannot be checked: {error.strerror or error}"
    return None


def _fault_in_folder(folder: str, folders: tuple[str, ...]) -> str | None:
    try:
        if os.stat(folder).st_mode & 0o002:  # noqa: PTH116
            return f"Every user can write to {folder}"
    except OSError:
        return f"{folder} does not exist"
    return _fault_in_place(folder, folders)


def _fault_in_interpreter(path: str, folders: tuple[str, ...], depth: int) -> str | None:
    try:
        with Path(path).open("rb") as file:
            line = file.read(_SHEBANG_BYTES).split(b"\n", 1)[0]
    except OSError:
        return None  # executable but not readable, so the system does not read an interpreter from it
    if not line.startswith(b"#!"):
        return None
    if depth == _MOST_INTERPRETERS:
        return "It has too many nested script interpreters. Use a program that is not a script."
    words = os.fsdecode(line[2:]).split()
    if not words:
        return "Its first line names no interpreter. Add an interpreter to it."
    interpreter, *arguments = words
    if (problem := _find_program_fault(interpreter, folders, depth + 1)) is not None:
        return f"Its interpreter is {interpreter}. {problem}"
    if os.path.basename(interpreter) == "env":  # noqa: PTH119
        return _find_env_fault(arguments, folders, depth + 1)
    if (word := next((one for one in arguments if _find_named_folder(one, folders)), None)) is not None:
        return f"Its first line names {word}, where a call could change it. Move that file elsewhere."
    return None


def _find_env_fault(arguments: Sequence[str], folders: tuple[str, ...], depth: int) -> str | None:
    """Return the reason against ``#!/usr/bin/env PROGRAM``, which searches the PATH that Handrail passes."""
    left = [word for word in arguments if word not in ("-S", "--split-string", "-i", "-", "--")]
    while left and "=" in left[0] and not left[0].startswith(("-", "PATH=")):
        left.pop(0)
    if not left or left[0].startswith(("-", "PATH=")):
        return "Its first line starts env with options. Use an absolute path to its interpreter."
    program = left[0]
    if "/" in program:
        problem = _find_program_fault(program, folders, depth)
        return None if problem is None else f"Its interpreter is {program}. {problem}"
    return _fault_on_path(program, folders, depth)


def _fault_on_path(program: str, folders: tuple[str, ...], depth: int) -> str | None:
    here = get_current_project_folder()
    doubtful = (*folders, *((here,) if here else ()))
    for folder in list_path_variable_folders():
        if _fault_in_folder(folder, doubtful) is None and _is_program(found := f"{folder.rstrip('/')}/{program}"):
            problem = _find_program_fault(found, doubtful, depth)
            return None if problem is None else f"Its interpreter is {found}. {problem}"
    return f"Its interpreter {program} is not on PATH outside the workspace and the current folder. Install it there."


def _find_named_folder(word: str, folders: tuple[str, ...]) -> str | None:
    """Return the first folder in which a file named in ``word`` is; the folder's own name does not count."""
    for folder in folders:
        if f"{folder.rstrip('/')}/" in word and folder != "/":
            return folder
    for part in (word, word.partition("=")[2], *word.split(os.pathsep)):
        if part.startswith("/") and part.rstrip("/") not in folders:
            folder = find_enclosing_folder(part, folders)
            if folder is not None and os.path.realpath(part) != folder:
                return folder
    return None
