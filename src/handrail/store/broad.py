"""Folders that are more than anybody's project: homes, places of keys and settings, and what the system keeps for itself.

A folder is known by its path and by the file system's own identity of it and of each folder above it, so that a link, a
bind mount or another case of letters does not hide it.
"""

# ruff: noqa: PTH116, PTH117, PTH120

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

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
    for home in _homes():
        if _beneath(home, real) or _identity(home) == line[0][1]:
            return "a home folder" if home == real else f"a folder that holds the home folder {home}"
        if (private := _private(real, home, line)) is not None:
            return private
    above = os.path.dirname(real)
    if real == "/root" or any(_same(above, base) for base in _BASES):
        return "a home folder"
    for variable in _VARIABLES:
        place = os.environ.get(variable, "")
        if os.path.isabs(place) and _within(line, os.path.realpath(place)):
            return f"{_OWN}, {place} ({variable})"
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


def _private(real: str, home: str, line: Line) -> str | None:
    """What of ``home`` a folder is, lies in or holds that is for keys, settings or programs' own files."""
    own = _identity(home)
    for folder, _ in line:
        above, name = os.path.split(folder)
        hidden = name.startswith(".") or name.casefold() in _NOT_HIDDEN
        if hidden and (above == home or (own is not None and _identity(above) == own)):
            within = [part.casefold() for part in real[len(folder) + 1 :].split("/")]
            documents = name.casefold() == "library" and len(within) > 1 and within[0] in _OF_DOCUMENTS
            return None if documents else f"{_OWN}, {folder}"
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
