"""Artifacts: stored outputs, addressed by the hash of their content, written atomically and checked when read."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from handrail.contract.errors import LogUnavailable, ToolError

_REF = re.compile(r"sha256:([0-9a-f]{64})")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100}(;[ -~]{0,200})?")
_DEFAULT_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A stored output. ``media_type`` is what its first writer said it is."""

    ref: str
    media_type: str
    data: bytes


class Artifacts:
    """The artifacts of one workspace.

    :param folder: private to the kernel, existing (``Folders.artifacts``)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, data: bytes, media_type: str = _DEFAULT_TYPE) -> str:
        """Store ``data`` durably and return its reference ``sha256:<hex>``. The same content is stored once.

        Blocks for hashing and syncing: large data belongs in a thread.

        :raises LogUnavailable: when it cannot be stored (full disk, read-only)
        """
        digest = hashlib.sha256(data).hexdigest()
        path = self._path(digest)
        if not _MEDIA_TYPE.fullmatch(media_type):
            media_type = _DEFAULT_TYPE
        try:
            if self._intact(path, digest):
                return f"sha256:{digest}"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path.with_suffix(".type"), media_type.encode())
            _write(path, data)
            _sync_folder(path.parent)
            _sync_folder(self._folder)
        except OSError as error:
            raise LogUnavailable(
                f"an output of {len(data):,} bytes cannot be stored in {self._folder}: {error.strerror or error}. "
                "Free some space there, or choose another folder with --state DIR"
            ) from error
        return f"sha256:{digest}"

    def get(self, ref: str) -> Artifact:
        """The artifact, checked against its hash.

        :raises ToolError: ``invalid_input`` for what is no reference, ``unavailable`` when there is none,
            ``backend`` when what is stored is not what was put
        """
        match = _REF.fullmatch(ref)
        if match is None:
            raise ToolError(
                f"{ref[:100]!r} is no artifact reference; expected 'sha256:' and 64 hexadecimal digits",
                kind="invalid_input",
            )
        path = self._path(match.group(1))
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ToolError(f"there is no artifact {ref} in this workspace", kind="unavailable") from None
        except OSError as error:
            raise ToolError(
                f"the artifact {ref} cannot be read: {error.strerror or error}", kind="unavailable"
            ) from error
        if hashlib.sha256(data).hexdigest() != match.group(1):
            raise ToolError(
                f"the artifact {ref} is damaged: its stored content no longer has that hash", kind="backend"
            )
        try:
            media_type = path.with_suffix(".type").read_text("ascii")
        except (OSError, ValueError):
            media_type = _DEFAULT_TYPE
        return Artifact(ref, media_type, data)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest[2:]

    @staticmethod
    def _intact(path: Path, digest: str) -> bool:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() == digest
        except FileNotFoundError:
            return False


def _write(path: Path, data: bytes) -> None:
    """The whole file or none of it, whatever happens in between."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
