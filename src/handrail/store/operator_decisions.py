"""Small files with the operator's own decisions: approved tool definitions, and trust in a workspace's configuration.

They are written whole, and read only if no other user could have written them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import StartError, UsageError
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.store.state_folders import StateFolders, make_unwritable_state_error
from handrail.store.unsupported_operations import sync_descriptor


def read_private_file(path: Path, max_bytes: int) -> bytes | None:
    """Return the content of a file that only its owner could have written; None otherwise, or if it is longer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
            return None
        if os.name != "nt" and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def write_private_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably.

    :raises StartError: if its folder cannot be written
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), stat.S_IRUSR | stat.S_IWUSR
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                sync_descriptor(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise make_unwritable_state_error(path.parent, error) from None


def create_private_file(path: Path, content: bytes) -> bytes | None:
    """Create a file unless it exists, and return its content; None if the content cannot be trusted.

    Concurrent callers all get the same content.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    if not path.exists():
        with suppress(StartError, OSError):
            write_private_file(temporary, content)
            try:
                os.link(temporary, path)
            finally:
                temporary.unlink()
    return read_private_file(path, len(content))


# Approved tool definitions of third-party sources: one file for each source, for all workspaces of this user.
#
# An unreadable record counts as absent: then nothing of the source is approved.

PINS_VERSION = 1
MAX_PINS_BYTES = 64 * 1024 * 1024


def read_approved_definitions(state: Path, source: str) -> bytes | None:
    """Return the record of the approved tools of a source; None if there is none.

    :param state: the root of all state
    """
    return read_private_file(_pins_path(state, source), MAX_PINS_BYTES)


def parse_approved_definitions(content: bytes, source: str) -> dict[str, dict[str, Any]]:
    """Return the approved tools in a record by id; empty if it is not a record of ``source``."""
    try:
        data: Any = json.loads(content)
        tools: Any = data["tools"] if data["version"] == PINS_VERSION and data["source"] == source else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(tools, dict):
        return {}
    held = cast("dict[str, Any]", tools)
    return {tool_id: cast("dict[str, Any]", kept) for tool_id, kept in held.items() if isinstance(kept, dict)}


def write_approved_definitions(state: Path, source: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the record of the approved tools of a source.

    :raises StartError: if the state folder cannot be written
    """
    path = _pins_path(state, source)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise make_unwritable_state_error(path.parent, error) from None
    whole = {"version": PINS_VERSION, "source": source, "tools": dict(tools)}
    write_private_file(path, json.dumps(whole, ensure_ascii=True, sort_keys=True).encode())


def _pins_path(state: Path, source: str) -> Path:
    name = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return state / "sources" / f"{name}.json"


# Trust in a workspace's own configuration: the hash of the content that a user has trusted, in private state.
#
# The record lies next to the workspace's database, outside the workspace, accessible to its owner alone. An unreadable
# record counts as absent: then nothing is trusted.

FILE_NAME = "trust.json"
_SHA256 = compile_regex_lazily(r"[0-9a-f]{64}")
_KEY = compile_regex_lazily(r"[0-9a-f]{24}")
_MAX_BYTES = 16 * 1024


class WorkspaceTrust(Struct, frozen=True):
    """A user's decision to trust a workspace's configuration.

    :param workspace: the real path of the workspace
    :param sha256: the hash of the trusted content, in hexadecimal
    :param at_ns: wall-clock time in nanoseconds
    """

    workspace: str
    sha256: str
    at_ns: int


def read_workspace_trust(folders: StateFolders) -> WorkspaceTrust | None:
    """Return what is trusted in this workspace; None if nothing is."""
    record = _read_private_record(folders.workspace_state_folder / FILE_NAME)
    return record if record is not None and record.workspace == str(folders.workspace) else None


def trust_workspace_content(folders: StateFolders, sha256: str, *, clock: Callable[[], int]) -> WorkspaceTrust:
    """Trust this content from now on, instead of earlier content.

    :param folders: prepared folders
    :raises UsageError: if ``sha256`` is not a hash
    :raises StartError: if the state folder cannot be written
    """
    if not _SHA256.fullmatch(sha256):
        raise UsageError(f"Invalid SHA-256 hash: {sha256[:80]!r}. Expected 64 hexadecimal digits.")
    trust = WorkspaceTrust(str(folders.workspace), sha256, clock())
    text = json.dumps(
        {"version": PINS_VERSION, "workspace": trust.workspace, "sha256": trust.sha256, "at_ns": trust.at_ns}
    ).encode("utf-8", "surrogateescape")
    write_private_file(folders.workspace_state_folder / FILE_NAME, text)
    return trust


def revoke_workspace_trust(folders: StateFolders) -> bool:
    """Revoke the trust in this workspace, and return whether there was any.

    :raises StartError: if the record cannot be removed
    """
    try:
        (folders.workspace_state_folder / FILE_NAME).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise make_unwritable_state_error(folders.workspace_state_folder, error) from None
    return True


def list_trusted_workspaces(state: Path) -> list[WorkspaceTrust]:
    """Return the records of all workspaces, sorted by path."""
    try:
        folders = [folder for folder in (state / "ws").iterdir() if _KEY.fullmatch(folder.name)]
    except OSError:
        return []
    found = [_read_private_record(folder / FILE_NAME) for folder in folders]
    return sorted((record for record in found if record is not None), key=lambda record: record.workspace)


def _read_private_record(path: Path) -> WorkspaceTrust | None:
    """Return a record that only its owner could have written; None otherwise."""
    if (content := read_private_file(path, _MAX_BYTES)) is None:
        return None
    try:
        data: Any = json.loads(content.decode("utf-8", "surrogateescape"))
        workspace, sha256, at_ns = data["workspace"], data["sha256"], data["at_ns"]
        known = data["version"] == PINS_VERSION
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (known and isinstance(workspace, str) and isinstance(sha256, str) and isinstance(at_ns, int)):
        return None
    return WorkspaceTrust(workspace, sha256, at_ns) if _SHA256.fullmatch(sha256) else None
