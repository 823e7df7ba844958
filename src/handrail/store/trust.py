"""Which content of a workspace's own configuration a person has trusted: one hash per workspace, in its private state.

The record lies beside the workspace's database, outside the workspace, readable and writable by its owner alone. What
cannot be read as a record counts as none: then nothing is trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail.contract.errors import UsageError
from handrail.store import private
from handrail.store.folders import Folders, unwritable

FILE_NAME = "trust.json"
VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY = re.compile(r"[0-9a-f]{24}")
_MAX_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Trust:
    """One decision of a person.

    :param workspace: the real path it was made for
    :param sha256: of the trusted content, in hexadecimal
    :param at_ns: when, in nanoseconds of wall-clock time
    """

    workspace: str
    sha256: str
    at_ns: int


def of(folders: Folders) -> Trust | None:
    """What is trusted in this workspace, or None."""
    record = _read(folders.own / FILE_NAME)
    return record if record is not None and record.workspace == str(folders.workspace) else None


def grant(folders: Folders, sha256: str, *, clock: Callable[[], int]) -> Trust:
    """Trust this content from now on, instead of what was trusted before.

    :param folders: prepared
    :raises UsageError: when ``sha256`` is no hash
    :raises StartError: when the state folder cannot be written
    """
    if not _SHA256.fullmatch(sha256):
        raise UsageError(f"{sha256[:80]!r} is no SHA-256 hash; 64 hexadecimal digits were expected")
    trust = Trust(str(folders.workspace), sha256, clock())
    text = json.dumps(
        {"version": VERSION, "workspace": trust.workspace, "sha256": trust.sha256, "at_ns": trust.at_ns}
    ).encode("utf-8", "surrogateescape")
    private.write(folders.own / FILE_NAME, text)
    return trust


def revoke(folders: Folders) -> bool:
    """Trust nothing here any more; whether anything was trusted.

    :raises StartError: when the record cannot be removed
    """
    try:
        (folders.own / FILE_NAME).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unwritable(folders.own, error) from None
    return True


def everywhere(state: Path) -> list[Trust]:
    """The records of all workspaces, by path."""
    try:
        folders = [folder for folder in (state / "ws").iterdir() if _KEY.fullmatch(folder.name)]
    except OSError:
        return []
    found = [_read(folder / FILE_NAME) for folder in folders]
    return sorted((record for record in found if record is not None), key=lambda record: record.workspace)


def _read(path: Path) -> Trust | None:
    """A record that its owner alone could have written; anything else is none."""
    content = private.read(path, _MAX_BYTES)
    if content is None:
        return None
    try:
        data: Any = json.loads(content.decode("utf-8", "surrogateescape"))
        workspace, sha256, at_ns = data["workspace"], data["sha256"], data["at_ns"]
        known = data["version"] == VERSION
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (known and isinstance(workspace, str) and isinstance(sha256, str) and isinstance(at_ns, int)):
        return None
    return Trust(workspace, sha256, at_ns) if _SHA256.fullmatch(sha256) else None
