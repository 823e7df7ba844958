"""The state folders: one private folder for each workspace, and separate ones for output and scratch of sessions.

Below the state folder (``--state``, else ``HANDRAIL_STATE``, else the platform's)::

    ws/<key>/                    database, journal, holder, artifacts, kept files (undo/), journals of joint changes (changes/);
                                 nothing here is ever shown to a tool
    output/<key>/<session>/      sidecars: a read-only root of that session
    scratch/<key>/<session>/     HOME in that session's sandbox
    heads/<key>                  how far the log of a workspace was written
    moved/<hash>                 the key of a workspace whose folder was moved, by the hash of its present path
    user-data/                   what tools keep for the user: a root of sessions with a tool that requires it
    search/                      vectors of tools' texts and words of catalogues, for every workspace

``<key>`` is a hash of the workspace's real path, so two spellings of one workspace share their state. If the folder is moved,
its state keeps the key, since records name files by it. A log that the agent's own tools could reach would prove nothing:
every check here fails closed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.contract.errors import StartError, ToolError, UsageError
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.tool_ids_and_wire_names import wire_name
from handrail.origins.listed_paths import canonicalize_path_spelling
from handrail.origins.program_lookup import locate_user_folder
from handrail.store.unsupported_operations import ignore_unsupported_operation

if TYPE_CHECKING:
    from handrail.contract.tool.requires import PathVariables


# Folders that are too broad for a workspace: homes, folders of keys and settings, and the system's own folders.
#
# A folder is recognised by its path and by the file system's identity of it and of each folder above it, so that a link, a
# bind mount or another case of letters does not hide it.

# ruff: noqa: PTH116, PTH117, PTH120


InodeIdentity = tuple[int, int]

_BASES = ("/home", "/Users", "/export/home", "/var/home", "/usr/home")
"""Folders that contain home folders."""
_PRIVATE_IN_A_HOME = (
    *(
        ".ssh",
        ".gnupg",
        ".pki",
        ".password-store",
        ".aws",
        ".azure",
        ".kube",
        ".docker",
        ".gcloud",
        ".oci",
        ".terraform.d",
    ),
    *(".config", ".local", ".cache", ".mozilla", ".thunderbird", ".claude", ".codex", ".cursor", ".gemini", ".vscode"),
    *(
        ".cargo",
        ".npm",
        ".m2",
        ".gradle",
        ".gem",
        ".netlify",
        ".putty",
        ".android",
        ".electrum",
        ".bitcoin",
        ".ethereum",
    ),
    *("Library", "AppData", "snap"),
)
"""Names that are followed if they are links. Any other name with a leading dot is recognised by its name."""
_NOT_HIDDEN = frozenset(name.casefold() for name in _PRIVATE_IN_A_HOME if not name.startswith("."))
_OF_DOCUMENTS = frozenset({"mobile documents", "cloudstorage"})
"""Folders of documents in macOS's Library."""
_VARIABLES = (
    *(
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "XDG_CACHE_HOME",
        "XDG_STATE_HOME",
        "XDG_RUNTIME_DIR",
        "GNUPGHOME",
        "CARGO_HOME",
    ),
    *("PASSWORD_STORE_DIR", "DOCKER_CONFIG", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "GH_CONFIG_DIR", "AZURE_CONFIG_DIR"),
    *("CLOUDSDK_CONFIG", "APPDATA", "LOCALAPPDATA"),
)
_ACCOUNTS = Path("/etc/passwd")
_SHARED = (
    *("/tmp", "/var/tmp", "/private/tmp", "/private/var/tmp", "/dev/shm"),  # noqa: S108 - refused, not used
    *("/var", "/private/var", "/var/lib", "/opt", "/mnt", "/media", "/Volumes", "/usr/src", "/usr/local/src"),
    *_BASES,
)
"""Folders that several users or programs share. A folder in them may be a project."""
_OF_THE_SYSTEM = (
    *(
        "/etc",
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib32",
        "/lib64",
        "/libx32",
        "/boot",
        "/efi",
        "/proc",
        "/sys",
        "/dev",
        "/run",
    ),
    *(
        "/nix",
        "/lost+found",
        "/var/log",
        "/var/spool",
        "/var/mail",
        "/var/cache",
        "/var/db",
        "/var/backups",
        "/var/run",
    ),
    *("/System", "/Library", "/Applications", "/cores", "/private/etc", "/private/var/db", "/private/var/log"),
)
_PROJECTS_IN_IT = ("/usr/src", "/usr/local/src", "/usr/home", "/dev/shm", "/run/media")  # noqa: S108 - no file is made
_DEVICES = ("/mnt", "/media", "/Volumes", "/run/media")
"""Folders in which the system mounts disks, directly or below a user's folder."""


_MOST_PASSWD_BYTES = 1024 * 1024
_OWN = "a folder for keys, settings or program files"

AncestorLine = list[tuple[str, InodeIdentity | None]]
"""A folder and all its parents but the root, each with its identity in the file system."""


def explain_too_broad_workspace(folder: Path) -> str | None:
    """Return why the canonical ``folder`` is broader than a project; None if it is not."""
    if (real := str(folder)) == folder.anchor:
        return "the whole file system"
    line = _ancestors_of(real)
    if (personal := _explain_personal_folder(real, line)) is not None:
        return personal
    if any(real == shared or _identity(shared) == line[0][1] is not None for shared in _SHARED):
        return "a folder that several users or programs share"
    mounted = any(_is_beneath(real, base) for base in _DEVICES) and os.path.ismount(real)
    return "a whole disk or a mount for a user" if mounted or _is_beneath(real, "/run/user") else None


def find_enclosing_system_folder(folder: Path) -> str | None:
    """Return which system folder the canonical ``folder`` is or lies in; None if neither."""
    real = str(folder)
    if any(real != base and _is_beneath(real, base) for base in _PROJECTS_IN_IT):
        return None
    line = _ancestors_of(real)
    return next((f"a system folder, {place}" for place in _OF_THE_SYSTEM if _is_within(line, place)), None)


def _is_in_documents(real: str, folder: str) -> bool:
    """Return whether a path is in a folder of documents of the macOS Library ``folder``."""
    within = [part.casefold() for part in real[len(folder) + 1 :].split("/")]
    return folder.rpartition("/")[2].casefold() == "library" and len(within) > 1 and within[0] in _OF_DOCUMENTS


def _explain_personal_folder(real: str, line: AncestorLine) -> str | None:
    """Return why a folder is or contains a user's private folder; None if it does not."""
    for home in _find_all_home_folders():
        if _is_beneath(home, real) or _identity(home) == line[0][1]:
            return "a home folder" if home == real else f"a folder that contains the home folder {home}"
        if (private := _find_private_home_folder(real, home, line)) is not None:
            return private
    above = os.path.dirname(real)
    if real == "/root" or any(_is_same(above, base) for base in _BASES):
        return "a home folder"
    for variable in _VARIABLES:
        place = os.environ.get(variable, "")
        if os.path.isabs(place) and _is_within(line, os.path.realpath(place)):
            return f"{_OWN}, {place} ({variable})"
    return None


def _find_private_home_folder(real: str, home: str, line: AncestorLine) -> str | None:
    """Return which folder of ``home`` for keys, settings or program files a folder is, contains or lies in."""
    own = _identity(home)
    for folder, _ in line:
        above, name = os.path.split(folder)
        hidden = name.startswith(".") or name.casefold() in _NOT_HIDDEN
        if hidden and (above == home or (own is not None and _identity(above) == own)):
            return None if _is_in_documents(real, folder) else f"{_OWN}, {folder}"
    for name in _PRIVATE_IN_A_HOME:
        place = f"{home}/{name}"
        if (found := _identity(place)) is None:
            continue
        leads_to = os.path.realpath(place)
        if any(identity == found for _, identity in line) or (leads_to != place and _is_beneath(leads_to, real)):
            return f"{_OWN}, {place}, or contains it"
    return None


def _find_all_home_folders() -> list[str]:
    """Return the home folders of this user, by environment and system, and those of other users."""
    found: dict[str, None] = {}
    for text in _read_homes():
        with contextlib.suppress(OSError, ValueError):
            home = os.path.realpath(text)
            if os.path.isabs(home) and home != Path(home).anchor:
                found[home] = None
    return list(found)


def _read_homes() -> Iterator[str]:
    with contextlib.suppress(RuntimeError):
        yield str(Path.home())
    try:
        import pwd
    except ImportError:  # Windows
        return
    with contextlib.suppress(KeyError, OSError):
        yield pwd.getpwuid(os.geteuid()).pw_dir
    try:
        with _ACCOUNTS.open(encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines(_MOST_PASSWD_BYTES)
    except OSError:
        return
    for line in lines:
        fields = line.rstrip("\n").split(":")
        # The home of a service account is a system folder, such as /var/www or /bin.
        if len(fields) == 7 and fields[2].isdigit() and (fields[2] == "0" or 1000 <= int(fields[2]) < 60_000):
            yield fields[5] if fields[5].startswith("/") else "/"


def _ancestors_of(real: str) -> AncestorLine:
    found: AncestorLine = []
    while (above := os.path.dirname(real)) != real:
        found.append((real, _identity(real)))
        real = above
    return found


def _is_beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def _is_within(line: AncestorLine, place: str) -> bool:
    """Return whether a folder is ``place`` or lies in it, by the folder and its parents."""
    found = _identity(place)
    return any(folder == place or (found is not None and identity == found) for folder, identity in line)


def _is_same(one: str, other: str) -> bool:
    return one == other or ((found := _identity(one)) is not None and found == _identity(other))


def _identity(path: str) -> InodeIdentity | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


STATE_VARIABLE = "HANDRAIL_STATE"
_SESSION_ID = compile_regex_lazily(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PARTS = ("ws", "output", "scratch", "user-data", "memory", "search", "sources", "mcp", "heads", "moved")
_KEY = compile_regex_lazily(rb"[0-9a-f]{24}")
_KEY_LENGTH = 24
"""96 bits in hexadecimal: free of collisions, and short enough for a socket path (108 bytes) below it."""


class StateFolders(Struct, frozen=True):
    """The state folders of one workspace. All paths are absolute and canonical.

    :param workspace: the real path of the workspace
    :param state: the root of all state
    :param key: the name of the workspace below ``state``
    """

    workspace: Path
    state: Path
    key: str

    @property
    def workspace_state_folder(self) -> Path:
        """The private folder of this workspace: database, journal, holder file, artifacts."""
        return self.state / "ws" / self.key

    @property
    def database_file(self) -> Path:
        """The file with the log of the workspace."""
        return self.workspace_state_folder / "handrail.db"

    @property
    def log_head_file(self) -> Path:
        """The file with the position of the log, outside the database."""
        return self.state / "heads" / self.key

    @property
    def workspace_path_file(self) -> Path:
        """The file with the path of the workspace, since the key is only a hash."""
        return self.workspace_state_folder / "workspace"

    @property
    def artifact_folder(self) -> Path:
        """The folder of the artifacts of the workspace."""
        return self.workspace_state_folder / "artifacts"

    @property
    def undo_folder(self) -> Path:
        """The folder with what calls changed in the workspace, created when it is first needed."""
        return self.workspace_state_folder / "undo"

    @property
    def change_journal_folder(self) -> Path:
        """The folder with the journals of changes of several files, created when it is first needed."""
        return self.workspace_state_folder / "changes"

    @property
    def search_cache_folder(self) -> Path:
        """The cache of search indexes, shared by all workspaces."""
        return self.state / "search"

    @property
    def user_data_folder(self) -> Path:
        """The folder behind ``{user-data}``, one for all workspaces of this user. It need not exist."""
        return self.state / "user-data"

    def prepare_user_data_folder(self) -> Path:
        """Create :attr:`user_data_folder` as a private folder.

        :raises StartError: if it cannot be created or is not private
        """
        _prepare_private(self.user_data_folder)
        return self.user_data_folder

    @property
    def requirement_path_variables(self) -> PathVariables:
        """The values of the variables in ``requires``. Rules and roots decide which outputs a session can reach."""
        from handrail.contract.tool.requires import (
            PathVariables,  # imports pydantic, which command completion does not need
        )

        return PathVariables(
            (str(self.workspace),), user_data=(str(self.user_data_folder),), output=(str(self.session_outputs_folder),)
        )

    @property
    def session_outputs_folder(self) -> Path:
        """The folder with the output folders of this workspace's sessions."""
        return self.state / "output" / self.key

    def locate_session_output(self, session_id: str) -> Path:
        """Return the session's output folder, which need not exist; see :meth:`prepare_session_output`."""
        return self._locate_session_folder("output", session_id)

    def locate_session_scratch(self, session_id: str) -> Path:
        """Return the session's scratch folder, which need not exist; see :meth:`prepare_session_scratch`."""
        return self._locate_session_folder("scratch", session_id)

    def prepare_session_output(self, session_id: str) -> Path:
        """Return the session's output folder, created as private on first use.

        :raises UsageError: for an id that cannot name a folder
        :raises StartError: if the folder cannot be created or is not private
        """
        return self._prepare_session_folder("output", session_id)

    def prepare_session_scratch(self, session_id: str) -> Path:
        """Return the session's scratch folder, which is HOME in its sandbox; see :meth:`prepare_session_output`."""
        return self._prepare_session_folder("scratch", session_id)

    def prepare_tool_home(self, tool_id: str) -> str:
        """Return the separate HOME of a tool's programs, which all sessions share; see :meth:`prepare_session_output`."""
        return str(self.prepare_session_scratch(f"tool-{wire_name(tool_id)[-59:]}"))

    def remove_sockets_except(self, name: str) -> None:
        """Remove the sockets of former holders, all but ``name``."""
        for path in self.workspace_state_folder.glob("kernel-*.sock"):
            if path.name != name:
                with contextlib.suppress(OSError):
                    path.unlink()

    def make_output_path_fragment(self, session_id: str) -> str:
        """Return the part of a path that identifies files in the session's output folder. JSON does not escape it."""
        return f"/output/{self.key}/{session_id}/"

    def link_output_for_fork(self, session_id: str, forked_id: str) -> None:
        """Link the files of a session's output folder into the folder of its fork, under the same names.

        :raises StartError: if they cannot be linked
        """
        source, target = self.prepare_session_output(session_id), self.prepare_session_output(forked_id)
        try:
            for entry in os.scandir(source):
                if entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileExistsError):
                        os.link(entry.path, target / entry.name, follow_symlinks=False)
        except OSError as error:
            raise make_unwritable_state_error(target, error) from None

    def remove_session_files(self, session_id: str) -> None:
        """Remove the files of a session that is closed for good. Follows no links; missing files are ignored."""
        check_session_id(session_id)
        for part in ("output", "scratch"):
            remove_tree(self.state / part / self.key / session_id)

    def _locate_session_folder(self, part: str, session_id: str) -> Path:
        check_session_id(session_id)
        return self.state / part / self.key / session_id

    def _prepare_session_folder(self, part: str, session_id: str) -> Path:
        folder = self._locate_session_folder(part, session_id)
        _prepare_private(self.state / part)
        _prepare_private(folder.parent)
        # Root gives the folder to the user that programs run as; only root can reach it through its parents.
        _prepare_private(folder, given_away=os.name != "nt" and os.geteuid() == 0)
        return folder


def locate_folders(workspace: str | Path, state: str | Path | None = None, *, allow_home: bool = False) -> StateFolders:
    """Return the state folders of a workspace without creating any, which is enough to read a log.

    :param workspace: an existing folder
    :param state: the root of all state; None: ``HANDRAIL_STATE``, else the state folder of the platform
    :param allow_home: accept a workspace that is not a project: a home folder, a folder of keys or settings, a system folder, the
        whole file system
    :raises StartError: if the workspace or the state folder is unsuitable, with the next step
    """
    real = resolve_workspace_path(Path(workspace), allow_home=allow_home)
    root = resolve_state_root(state)
    _check_apart(real, root)
    return StateFolders(real, root, find_state_key(root, real))


def resolve_state_root(state: str | Path | None = None) -> Path:
    """Return the canonical root of all state. It need not exist."""
    return Path(os.path.realpath(_state_root(state)))


def default_config_folder() -> Path:
    """Return the platform's configuration folder; one that does not exist if the user has no home folder."""
    from platformdirs import user_config_dir

    found = locate_user_folder(lambda: user_config_dir("handrail", appauthor=False), ".config/handrail")
    if found is None or _leads_through_file(found):  # services have HOME=/dev/null
        found = "/nonexistent/handrail"
    return Path(found)


def _leads_through_file(path: str) -> bool:
    try:
        os.stat(path)
    except NotADirectoryError:
        return True
    except OSError:
        pass
    return False


def compute_workspace_key(workspace: Path) -> str:
    """Return the name of a workspace below the state folder, from its real path, unless it was moved."""
    return hashlib.sha256(os.fsencode(workspace)).hexdigest()[:_KEY_LENGTH]


def find_state_key(state: Path, workspace: Path) -> str:
    """Return the key of a workspace's state: of its path, or of the state that was adopted for it.

    :raises StartError: if the record of an adoption cannot be trusted
    """
    own = compute_workspace_key(workspace)
    path = state / "moved" / own
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, NotADirectoryError):
        return own
    except OSError as error:
        if not os.access(path.parent, os.X_OK):
            raise make_unwritable_state_error(state, error) from None
        raise _unusable_redirect_error(path, error.strerror or str(error)) from None
    try:
        found, content = os.fstat(descriptor), os.read(descriptor, _KEY_LENGTH + 1)
    finally:
        os.close(descriptor)
    if os.name != "nt" and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
        raise _unusable_redirect_error(path, "other users can access it")
    if not _KEY.fullmatch(content):
        raise _unusable_redirect_error(path, "it contains no key")
    return content.decode()


def prepare_redirect_folder(state: Path) -> Path:
    """Return the folder with the keys of moved workspaces, created as private.

    :raises StartError: if it cannot be created or is not private
    """
    _prepare_root(state)
    _prepare_private(state / "moved")
    return state / "moved"


def prepare_knowledge_folder(state: Path) -> Path:
    """Return the folder with what agents stored for the user in all workspaces, created as private.

    :raises StartError: if it cannot be created or is not private
    """
    _prepare_root(state)
    _prepare_private(state / "memory")
    return state / "memory"


def _unusable_redirect_error(path: Path, reason: str) -> StartError:
    return StartError(
        f"{path} should name the state of a workspace that was moved, but cannot be used: {reason}. Check who changed it, "
        "remove it, and run `handrail state adopt` again."
    )


def prepare_folders(
    workspace: str | Path, state: str | Path | None = None, *, allow_home: bool = False
) -> StateFolders:
    """Return :func:`locate_folders`, create the private folders, and check that only this user can access them."""
    folders = locate_folders(workspace, state, allow_home=allow_home)
    _prepare_root(folders.state)
    _prepare_private(folders.state / "ws")
    _prepare_private(folders.workspace_state_folder)
    _prepare_private(folders.artifact_folder)
    _prepare_private(folders.state / "heads")
    _write_name(folders)
    return folders


def check_session_id(session_id: str) -> str:
    """Return the id if it can name a folder.

    :raises UsageError: if it cannot
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise UsageError(
            f"Invalid session id: {session_id[:80]!r}. Expected 1 to 64 letters, digits, '_' or '-', starting with a letter "
            "or digit."
        )
    return session_id


def make_unwritable_state_error(path: Path, error: OSError) -> StartError:
    """Return an error that says why the state folder cannot be used, with the next step."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        step = "Free some disk space there"
    elif error.errno == errno.EROFS:
        step = "Mount it writable"
    else:
        step = "Make it writable for this user"
    return StartError(
        f"The state folder {path} cannot be written: {reason}. Handrail stores its log there and runs no call without a log. "
        f"{step}, or choose another folder with --state DIR or {STATE_VARIABLE}."
    )


def _state_root(state: str | Path | None) -> Path:
    chosen = state if state is not None else os.environ.get(STATE_VARIABLE)
    if chosen is None or chosen == "":
        from platformdirs import user_state_dir

        found = locate_user_folder(lambda: user_state_dir("handrail", appauthor=False), ".local/state/handrail")
    else:
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            raise StartError(
                f"The state folder {str(chosen)!r} is not known: its home folder does not exist. Name the folder by its "
                f"absolute path with --state DIR or {STATE_VARIABLE}."
            ) from None
    if found is None:
        raise StartError(
            f"The state folder is not known: HOME is not set, and user {os.geteuid()} has no account here. Set HOME, or name "
            f"the folder with --state DIR or {STATE_VARIABLE}."
        )
    return Path(found)


def resolve_workspace_path(path: Path, *, allow_home: bool) -> Path:
    """Return the real path of a workspace.

    :raises StartError: if it is not an existing folder or, without ``allow_home``, not a project
    """
    try:
        real = Path(canonicalize_path_spelling(str(path.expanduser().resolve(strict=True))))
        is_folder = real.is_dir()
    except (OSError, RuntimeError, ToolError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"The workspace {str(path)!r} cannot be opened: {reason}. Pass an existing folder with --workspace DIR."
        ) from None
    if not is_folder:
        raise StartError(f"The workspace {real} is not a folder. Pass an existing folder with --workspace DIR.")
    if not allow_home and (what := explain_too_broad_workspace(real) or find_enclosing_system_folder(real)):
        raise StartError(
            f"The workspace {real} is {what}, so tools could reach everything in it. Choose a project folder with "
            "--workspace DIR, or pass --allow-home if you want that."
        )
    return real


def _check_apart(workspace: Path, state: Path) -> None:
    if _is_inside(state, workspace):
        raise StartError(
            f"The state folder {state} is inside the workspace {workspace}, where tools could change the log. "
            f"Choose a folder outside with --state DIR or {STATE_VARIABLE}."
        )
    for part in _PARTS:
        if _is_inside(workspace, state / part):
            raise StartError(
                f"The workspace {workspace} is inside the state folder {state} of Handrail. "
                "Choose a project folder with --workspace DIR."
            )


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path lies in a folder, also through a bind mount or with another letter case."""
    if path == folder or folder in path.parents:
        return True
    try:
        wanted = folder.stat()
    except OSError:
        return False
    for candidate in (path, *path.parents):
        try:
            found = candidate.stat()
        except OSError:
            continue
        if os.path.samestat(found, wanted):
            return True
    return False


def _prepare_root(path: Path) -> None:
    """Create the state folder as private, or check that it belongs to this user and others cannot write in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = _check_private(path)
    except OSError as error:
        raise make_unwritable_state_error(path, error) from None
    if os.name != "nt" and found.st_mode & 0o022:
        raise StartError(
            f"Other users can write in the state folder {path} (mode {stat.S_IMODE(found.st_mode):04o}). "
            f"Run `chmod 700 {path}`, or choose another folder with --state DIR."
        )


def _prepare_private(path: Path, *, given_away: bool = False) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = _check_private(path, given_away=given_away)
    except OSError as error:
        raise make_unwritable_state_error(path, error) from None
    if os.name != "nt" and found.st_mode & 0o077:
        raise StartError(
            f"Other users can access the state folder {path} (mode {stat.S_IMODE(found.st_mode):04o}). "
            f"Check whether its files were changed, then run `chmod 700 {path}`. If that has no effect, its file system has no "
            "permissions: choose another folder with --state DIR."
        )


def _write_name(folders: StateFolders) -> None:
    name = os.fsencode(folders.workspace)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)  # a pipe in its place is not waited for
    # The file only informs users. The database reports a folder that cannot be written.
    with contextlib.suppress(OSError):
        descriptor = os.open(folders.workspace_path_file, flags, 0o600)
        try:
            if os.read(descriptor, len(name) + 1) != name:
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, name)
        finally:
            os.close(descriptor)


def _check_private(path: Path, *, given_away: bool = False) -> os.stat_result:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(
            f"{path} should be a state folder, but is not a folder. Move it away, or choose another folder with --state DIR."
        )
    if os.name != "nt" and found.st_uid != os.geteuid() and not given_away:
        raise StartError(
            f"The state folder {path} belongs to user {found.st_uid}, not to you (user {os.geteuid()}). "
            "Choose a folder of yours with --state DIR."
        )
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder that programs wrote in, however deep it is, and despite its permissions where possible.

    It goes from folder to folder by descriptor, since a tree may be deeper than any recursion and any path.
    """
    if os.scandir not in os.supports_fd or os.unlink not in os.supports_dir_fd:
        shutil.rmtree(folder, ignore_errors=True)
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    here = -1
    way: list[str] = []
    try:
        here = os.open(folder, flags)
        while True:
            with ignore_unsupported_operation():
                os.fchmod(here, 0o700)
            if (below := _unlink_files(here)) is not None:
                with ignore_unsupported_operation():
                    os.chmod(below, 0o700, dir_fd=here)
                way.append(below)
                there = os.open(below, flags, dir_fd=here)
            elif way:
                above = os.open("..", flags, dir_fd=here)
                try:
                    os.rmdir(way.pop(), dir_fd=above)
                    there = os.open(".", flags, dir_fd=above)  # some file systems list a folder as it was when opened
                finally:
                    os.close(above)
            else:
                break
            os.close(here)
            here = there
        folder.rmdir()
    except OSError:
        pass  # already removed, or of another user: the rest stays private
    finally:
        if here >= 0:
            os.close(here)


def _unlink_files(descriptor: int) -> str | None:
    """Unlink files up to the first folder, and return its name; None if there is no folder."""
    with os.scandir(descriptor) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=descriptor)
    return None
