"""Artifacts: stored outputs, addressed by the hash of their content, written atomically and checked when read."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.struct import Struct
from handrail.store.unsupported_operations import sync_descriptor, sync_folder

_REF = re.compile(r"sha256:([0-9a-f]{64})")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100}(;[ -~]{0,200})?")
_DEFAULT_TYPE = "application/octet-stream"


class Artifact(Struct, frozen=True):
    """A stored output. ``media_type`` is the type that its first writer declared."""

    ref: str
    media_type: str
    data: bytes


class ArtifactStore:
    """The artifacts of one workspace.

    :param folder: an existing folder that only the kernel uses (``StateFolders.artifact_folder``)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes, media_type: str = _DEFAULT_TYPE) -> str:
        """Store ``data`` durably and return its reference ``sha256:<hex>``. The same content is stored once.

        Hashing and syncing block: call it in a thread for large data.

        :raises LogUnavailable: if it cannot be stored (full disk, read-only)
        """
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        # The type comes from a tool or a server, and is shown to clients later.
        if not _MEDIA_TYPE.fullmatch(media_type):
            media_type = _DEFAULT_TYPE
        try:
            # A damaged file is written again instead of being trusted for its name.
            if self._is_intact(path, digest):
                return f"sha256:{digest}"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # The type comes first: once the content is there, the artifact counts as complete.
            _write(path.with_suffix(".type"), media_type.encode())
            _write(path, data)
            sync_folder(path.parent)
            sync_folder(self._folder)
        except OSError as error:
            raise LogUnavailable(
                f"Cannot store an output of {len(data):,} bytes in {self._folder}: {error.strerror or error}. "
                "Free some space there, or choose another folder with --state DIR."
            ) from error
        return f"sha256:{digest}"

    def get(self, ref: str) -> Artifact:
        """Return the artifact, checked against its hash.

        :raises ToolError: ``invalid_input`` if ``ref`` is not a reference, ``unavailable`` if the artifact does not exist,
            ``backend`` if the stored content was changed
        """
        if (match := _REF.fullmatch(ref)) is None:
            raise ToolError(
                f"Invalid artifact reference: {ref[:100]!r}. Expected `sha256:` followed by 64 hexadecimal digits.",
                kind="invalid_input",
            )
        path = self._path(match.group(1))
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ToolError(
                f"Artifact `{ref}` does not exist in this workspace. It may have been removed with old log records.",
                kind="unavailable",
            ) from None
        except OSError as error:
            raise ToolError(
                f"Artifact `{ref}` cannot be read: {error.strerror or error}. Ask the user to check the state folder.",
                kind="unavailable",
            ) from error
        if hashlib.sha256(data).hexdigest() != match.group(1):
            raise ToolError(
                f"Artifact `{ref}` is damaged: its content does not match its hash. Run the call that produced it again.",
                kind="backend",
            )
        try:
            media_type = path.with_suffix(".type").read_text("ascii")
        except (OSError, ValueError):
            media_type = _DEFAULT_TYPE
        return Artifact(ref, media_type, data)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest[2:]

    @staticmethod
    def _is_intact(path: Path, digest: str) -> bool:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except FileNotFoundError:
            return False


def _write(path: Path, data: bytes) -> None:
    """Write the file atomically: the complete file or nothing."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            sync_descriptor(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
