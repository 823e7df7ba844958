"""The state folders: one private folder for each workspace, and separate ones for output and scratch of sessions.

Below the state folder (``--state``, else ``HANDRAIL_STATE``, else the platform's)::

    ws/<key>/                    database, journal, holder, artifacts; nothing here is ever shown to a tool
    output/<key>/<session>/      sidecars: a read-only root of that session
    scratch/<key>/<session>/     HOME in that session's sandbox
    heads/<key>                  how far the log of a workspace was written
    user-data/                   what tools keep for the user: a root of sessions with a tool that requires it
    search/                      vectors of tools' texts and words of catalogues, for every workspace

``<key>`` is a hash of the workspace's real path, so two spellings of one workspace share their state. A log
that the agent's own tools could reach would prove nothing: every check here fails closed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.contract.errors import StartError, UsageError
from handrail.contract.tool.names import wire_name

if TYPE_CHECKING:
    from handrail.contract.tool.requires import Variables


# Folders that are too broad for a workspace: homes, folders of keys and settings, and the system's own folders.
#
# A folder is recognised by its path and by the file system's identity of it and of each folder above it, so that a link, a
# bind mount or another case of letters does not hide it.

# ruff: noqa: PTH116, PTH117, PTH120


Identity = tuple[int, int]

_BASES = ("/home", "/Users", "/export/home", "/var/home", "/usr/home")
"""Folders whose folders are homes."""
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
"""What is followed where it is a link: anything else with a dot in front is known by its name."""
_NOT_HIDDEN = frozenset(name.casefold() for name in _PRIVATE_IN_A_HOME if not name.startswith("."))
_OF_DOCUMENTS = frozenset({"mobile documents", "cloudstorage"})
"""In macOS's Library, what a person keeps documents in."""
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
"""What many put things into. A folder in it may be a project."""
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
"""Where the system mounts disks, each as a folder, or as one below a user's."""


_MOST_PASSWD_BYTES = 1024 * 1024
_OWN = "a place for keys, settings or other programs' own files"

Line = list[tuple[str, Identity | None]]
"""A folder and all above it but the root, each with what the file system knows it by."""


def too_broad(folder: Path) -> str | None:
    """What makes the canonical ``folder`` hold more than anybody's project, or None."""
    real = str(folder)
    if real == folder.anchor:
        return "the whole file system"
    line = _line(real)
    if (personal := _personal(real, line)) is not None:
        return personal
    if any(real == shared or _identity(shared) == line[0][1] is not None for shared in _SHARED):
        return "everybody's, as a folder that many put things into"
    mounted = any(_beneath(real, base) for base in _DEVICES) and os.path.ismount(real)
    return "a whole disk, or what the system mounts for a user" if mounted or _beneath(real, "/run/user") else None


def of_the_system(folder: Path) -> str | None:
    """Which folder of the system the canonical ``folder`` is or lies in, or None."""
    real = str(folder)
    if any(real != base and _beneath(real, base) for base in _PROJECTS_IN_IT):
        return None
    line = _line(real)
    return next((f"a folder of the system, {place}" for place in _OF_THE_SYSTEM if _within(line, place)), None)


def _is_in_documents(real: str, folder: str) -> bool:
    """Whether a path is in a folder of documents that macOS's Library, if ``folder`` is that, has."""
    within = [part.casefold() for part in real[len(folder) + 1 :].split("/")]
    return folder.rpartition("/")[2].casefold() == "library" and len(within) > 1 and within[0] in _OF_DOCUMENTS


def _personal(real: str, line: Line) -> str | None:
    """What a folder is or holds of what is one person's own, whatever they keep there."""
    for home in _homes():
        if _beneath(home, real) or _identity(home) == line[0][1]:
            return "a home folder" if home == real else f"a folder that holds the home folder {home}"
        if (private := _kept_apart(real, home, line)) is not None:
            return private
    above = os.path.dirname(real)
    if real == "/root" or any(_same(above, base) for base in _BASES):
        return "a home folder"
    for variable in _VARIABLES:
        place = os.environ.get(variable, "")
        if os.path.isabs(place) and _within(line, os.path.realpath(place)):
            return f"{_OWN}, {place} ({variable})"
    return None


def _kept_apart(real: str, home: str, line: Line) -> str | None:
    """What of ``home`` a folder is, lies in or holds that is for keys, settings or programs' own files."""
    own = _identity(home)
    for folder, _ in line:
        above, name = os.path.split(folder)
        hidden = name.startswith(".") or name.casefold() in _NOT_HIDDEN
        if hidden and (above == home or (own is not None and _identity(above) == own)):
            return None if _is_in_documents(real, folder) else f"{_OWN}, {folder}"
    for name in _PRIVATE_IN_A_HOME:
        place = f"{home}/{name}"
        found = _identity(place)
        if found is None:
            continue
        leads_to = os.path.realpath(place)
        if any(identity == found for _, identity in line) or (leads_to != place and _beneath(leads_to, real)):
            return f"{_OWN}, {place}, or holds it"
    return None


def _homes() -> list[str]:
    """The homes of whoever runs this, by the environment and by the system, and those of the other people."""
    found: dict[str, None] = {}
    for text in _home_texts():
        with contextlib.suppress(OSError, ValueError):
            home = os.path.realpath(text)
            if os.path.isabs(home) and home != Path(home).anchor:
                found[home] = None
    return list(found)


def _home_texts() -> Iterator[str]:
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
        # An account of a service has a folder of the system as its home, such as /var/www or /bin.
        if len(fields) == 7 and fields[2].isdigit() and (fields[2] == "0" or 1000 <= int(fields[2]) < 60_000):
            yield fields[5] if fields[5].startswith("/") else "/"


def _line(real: str) -> Line:
    found: Line = []
    while (above := os.path.dirname(real)) != real:
        found.append((real, _identity(real)))
        real = above
    return found


def _beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def _within(line: Line, place: str) -> bool:
    """Whether a folder is ``place`` or lies in it, by the folders above it."""
    found = _identity(place)
    return any(folder == place or (found is not None and identity == found) for folder, identity in line)


def _same(one: str, other: str) -> bool:
    return one == other or ((found := _identity(one)) is not None and found == _identity(other))


def _identity(path: str) -> Identity | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


STATE_VARIABLE = "HANDRAIL_STATE"
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PARTS = ("ws", "output", "scratch", "user-data", "search", "sources", "mcp", "heads")
_KEY_LENGTH = 24
"""96 bits in hexadecimal: no collisions, and short enough for a socket path (108 bytes) beneath it."""


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of one workspace. All paths are absolute and canonical.

    :param workspace: the real path of the workspace
    :param state: the root of all state
    :param key: names the workspace beneath ``state``
    """

    workspace: Path
    state: Path
    key: str

    @property
    def own(self) -> Path:
        """This workspace's private folder: database, journal, holder, artifacts."""
        return self.state / "ws" / self.key

    @property
    def database(self) -> Path:
        return self.own / "handrail.db"

    @property
    def head(self) -> Path:
        """How far the log was written, apart from the database."""
        return self.state / "heads" / self.key

    @property
    def name(self) -> Path:
        """A file that says which workspace this is: the key is a hash, which tells nobody."""
        return self.own / "workspace"

    @property
    def artifacts(self) -> Path:
        return self.own / "artifacts"

    @property
    def search(self) -> Path:
        """What searches keep between two starts: of every workspace, found by what it was made of."""
        return self.state / "search"

    @property
    def user_data(self) -> Path:
        """The folder that ``{user-data}`` means: one for all workspaces of this user. It need not exist."""
        return self.state / "user-data"

    def make_user_data(self) -> Path:
        """Make :attr:`user_data`, private.

        :raises StartError: when it cannot be made or is not private
        """
        _private(self.user_data)
        return self.user_data

    @property
    def variables(self) -> Variables:
        """The values of the variables of ``requires`` in this workspace. Which outputs a session reaches is a matter
        of its rules and roots."""
        from handrail.contract.tool.requires import (
            Variables,  # brings pydantic, which completing a command does without
        )

        return Variables((str(self.workspace),), user_data=(str(self.user_data),), output=(str(self.outputs),))

    @property
    def outputs(self) -> Path:
        """What holds the output folders of this workspace's sessions."""
        return self.state / "output" / self.key

    def output(self, session_id: str) -> Path:
        """The session's output folder, made private on first use.

        :raises UsageError: for an id that could not be a folder's name
        :raises StartError: when the folder cannot be made or is not private
        """
        return self._of_session("output", session_id)

    def scratch(self, session_id: str) -> Path:
        """The session's scratch folder (HOME in its sandbox); see :meth:`output`."""
        return self._of_session("scratch", session_id)

    def home_of(self, tool_id: str) -> str:
        """HOME of a tool's programs in every session, where they do not share the session's; see :meth:`output`."""
        return str(self.scratch(f"tool-{wire_name(tool_id)[-59:]}"))

    def clear_sockets(self, name: str) -> None:
        """Remove the sockets where former holders were joined, all but ``name``."""
        for path in self.own.glob("kernel-*.sock"):
            if path.name != name:
                with contextlib.suppress(OSError):
                    path.unlink()

    def in_output(self, session_id: str) -> str:
        """The part of a path by which a file in the session's output folder is known; it holds nothing that JSON escapes."""
        return f"/output/{self.key}/{session_id}/"

    def fork_output(self, session_id: str, forked_id: str) -> None:
        """Let a fork have what its session's output folder holds now, under the same names. Nothing is written twice.

        :raises StartError: when it cannot be made
        """
        source, target = self.output(session_id), self.output(forked_id)
        try:
            for entry in os.scandir(source):
                if entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileExistsError):
                        os.link(entry.path, target / entry.name, follow_symlinks=False)
        except OSError as error:
            raise unwritable(target, error) from None

    def discard(self, session_id: str) -> None:
        """Remove what a session wrote, once it is closed for good. Follows no links; what is gone already is fine."""
        check_session_id(session_id)
        for part in ("output", "scratch"):
            remove_tree(self.state / part / self.key / session_id)

    def _of_session(self, part: str, session_id: str) -> Path:
        check_session_id(session_id)
        folder = self.state / part / self.key / session_id
        _private(self.state / part)
        _private(folder.parent)
        # Root gives a scratch to the user as whom programs run; nobody but root gets to it through the folders around.
        _private(folder, given_away=part == "scratch" and os.name != "nt" and os.geteuid() == 0)
        return folder


def locate(workspace: str | Path, state: str | Path | None = None, *, allow_home: bool = False) -> Folders:
    """Which folders belong to a workspace, without making any: enough to read a log.

    :param workspace: an existing folder
    :param state: the root of all state; None: ``HANDRAIL_STATE``, else the platform's state folder
    :param allow_home: accept what is no project as the workspace: a home folder, a place of keys or settings, a folder of
        the system, the whole file system
    :raises StartError: when the workspace or the state folder is unfit, with what to do
    """
    real = workspace_folder(Path(workspace), allow_home=allow_home)
    root = state_root(state)
    _check_apart(real, root)
    return Folders(real, root, key_of(real))


def state_root(state: str | Path | None = None) -> Path:
    """The root of all state, canonical; it need not exist."""
    return Path(os.path.realpath(_state_root(state)))


def key_of(workspace: Path) -> str:
    """What names a workspace, given by its real path, beneath the state folder."""
    return hashlib.sha256(os.fsencode(workspace)).hexdigest()[:_KEY_LENGTH]


def prepare(workspace: str | Path, state: str | Path | None = None, *, allow_home: bool = False) -> Folders:
    """:func:`locate`, then make the private folders and check that they are ours alone."""
    folders = locate(workspace, state, allow_home=allow_home)
    _root(folders.state)
    _private(folders.state / "ws")
    _private(folders.own)
    _private(folders.artifacts)
    _private(folders.state / "heads")
    _name(folders)
    return folders


def check_session_id(session_id: str) -> str:
    """The id itself, if it can be a folder's name.

    :raises UsageError: when it cannot
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise UsageError(
            f"{session_id[:80]!r} is no session id; expected 1 to 64 letters, digits, '_' or '-', "
            "beginning with a letter or digit"
        )
    return session_id


def unwritable(path: Path, error: OSError) -> StartError:
    """Why the state folder cannot be used, and the next step."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        step = "free some space there"
    elif error.errno == errno.EROFS:
        step = "mount it writable"
    else:
        step = "make it writable for this user"
    return StartError(
        f"the state folder {path} cannot be written: {reason}. Handrail keeps its log there and runs no call "
        f"without one; {step}, or choose another folder with --state DIR or {STATE_VARIABLE}"
    )


def _state_root(state: str | Path | None) -> Path:
    chosen = state if state is not None else os.environ.get(STATE_VARIABLE)
    if chosen is None or chosen == "":
        from platformdirs import user_state_path

        return user_state_path("handrail", appauthor=False)
    return Path(chosen).expanduser()


def workspace_folder(path: Path, *, allow_home: bool) -> Path:
    """Return the real path of a workspace.

    :raises StartError: for what is not an existing folder, and without ``allow_home`` for what is not a project
    """
    try:
        real = path.expanduser().resolve(strict=True)
        is_folder = real.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StartError(
            f"the workspace {str(path)!r} cannot be opened: {reason}; pass an existing folder with --workspace DIR"
        ) from None
    if not is_folder:
        raise StartError(f"the workspace {real} is not a folder; pass an existing folder with --workspace DIR")
    if not allow_home and (what := too_broad(real) or of_the_system(real)):
        raise StartError(
            f"the workspace {real} is {what}, so tools would reach everything in it; choose a project folder with "
            "--workspace DIR, or pass --allow-home if that is what you want"
        )
    return real


def _check_apart(workspace: Path, state: Path) -> None:
    if _is_inside(state, workspace):
        raise StartError(
            f"the state folder {state} lies inside the workspace {workspace}, where tools could change the log; "
            f"choose one outside with --state DIR or {STATE_VARIABLE}"
        )
    for part in _PARTS:
        if _is_inside(workspace, state / part):
            raise StartError(
                f"the workspace {workspace} lies inside Handrail's own state folder {state}; "
                "choose a project folder with --workspace DIR"
            )


def _is_inside(path: Path, folder: Path) -> bool:
    """By the file system's own identity where both exist, so that letter case or a bind mount does not hide it."""
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


def _root(path: Path) -> None:
    """The state folder itself: made private, or found ours and not writable by others."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = _status(path)
    except OSError as error:
        raise unwritable(path, error) from None
    if os.name != "nt" and found.st_mode & 0o022:
        raise StartError(
            f"others may write in the state folder {path} (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"run chmod 700 {path}, or choose another with --state DIR"
        )


def _private(path: Path, *, given_away: bool = False) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = _status(path, given_away=given_away)
    except OSError as error:
        raise unwritable(path, error) from None
    if os.name != "nt" and found.st_mode & 0o077:
        raise StartError(
            f"the state folder {path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"look whether somebody changed it, then run chmod 700 {path}"
        )


def _name(folders: Folders) -> None:
    name = os.fsencode(folders.workspace)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(folders.name, flags, 0o600)
        try:
            if os.read(descriptor, len(name) + 1) != name:
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, name)
        finally:
            os.close(descriptor)
    except OSError:  # it is for people; whether anything can be written here is the database's to say
        pass


def _status(path: Path, *, given_away: bool = False) -> os.stat_result:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(
            f"{path} is not a folder but should be one of Handrail's state; move it away, or use --state DIR"
        )
    if os.name != "nt" and found.st_uid != os.geteuid() and not given_away:
        raise StartError(
            f"the state folder {path} belongs to user {found.st_uid}, not to you (user {os.geteuid()}); "
            "choose one of your own with --state DIR"
        )
    return found


def remove_tree(folder: Path) -> None:
    """Remove a folder that programs wrote in, as far as the system lets it: however deep, and without its permissions.

    Step by step from each folder to the next, since a tree may be deeper than any recursion and any path's length.
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
            os.fchmod(here, 0o700)
            if (below := _empty_until_a_folder(here)) is not None:
                os.chmod(below, 0o700, dir_fd=here)
                way.append(below)
                there = os.open(below, flags, dir_fd=here)
            elif way:
                there = os.open("..", flags, dir_fd=here)
                os.rmdir(way.pop(), dir_fd=there)
            else:
                break
            os.close(here)
            here = there
        folder.rmdir()
    except OSError:
        pass  # gone already, or somebody else's by now: what is left is private all the same
    finally:
        if here >= 0:
            os.close(here)


def _empty_until_a_folder(descriptor: int) -> str | None:
    """Unlink what is no folder; the name of the first folder, if there is one."""
    with os.scandir(descriptor) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=descriptor)
    return None
