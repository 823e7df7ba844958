"""The disk cache of the search: vectors by the text that they encode, and word indexes of whole catalogues."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

from handrail.catalog.search.lexical_index import WEIGHTS, LexicalIndex

# Cache files, each either whole or absent.
#
# A file has a magic line, a JSON head (kind, version, length of each block), the blocks, and a digest of everything before it.
# It is replaced atomically, and only its owner can read it. A file that is truncated, altered, of another version or of another
# kind is not used. It is made again, and the reason is reported.

_MAGIC = b"handrail search 1\n"
_DIGEST = 32
_LARGEST = 2 << 30


class UnusableCacheFile(Exception):
    """The cache file cannot be used. The text says why."""


def write_cache_file(path: Path, head: Mapping[str, Any], blocks: Sequence[bytes | memoryview]) -> None:
    """Replace ``path`` by a file of ``head`` and ``blocks``.

    :raises OSError: if the file cannot be written; the old one stays
    """
    sizes = [len(block) for block in blocks]
    line = json.dumps({**head, "sizes": sizes}).encode() + b"\n"
    digest = hashlib.blake2b(digest_size=_DIGEST)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for block in (_MAGIC, line, *blocks):
                digest.update(block)
                file.write(block)
            file.write(digest.digest())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_cache_file(path: Path, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]] | None:
    """Return the head and the blocks of ``path``, or None if the file does not exist.

    :param head: values that the file's head must have
    :raises UnusableCacheFile: if it is another kind of file, or incomplete
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableCacheFile(f"cannot be opened: {error.strerror}") from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
        os.close(descriptor)
        raise UnusableCacheFile("is not a cache file of the search")
    if os.name != "nt" and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
        os.close(descriptor)
        raise UnusableCacheFile("can be written by another user")
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = memoryview(file.read())
        except OSError as error:
            raise UnusableCacheFile(f"cannot be read: {error.strerror}") from None
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise UnusableCacheFile("is not a cache file of the search")
    if hashlib.blake2b(content[:-_DIGEST], digest_size=_DIGEST).digest() != bytes(content[-_DIGEST:]):
        raise UnusableCacheFile("is incomplete or altered")
    return _parse_content(content[len(_MAGIC) : -_DIGEST], head)


def _parse_content(content: memoryview, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]]:
    try:
        end = bytes(content[: 64 << 10]).index(b"\n")
        found = cast(object, json.loads(bytes(content[:end])))
    except ValueError:
        raise UnusableCacheFile("has no head") from None
    if not isinstance(found, dict):
        raise UnusableCacheFile("has no head")
    held = cast(dict[str, Any], found)
    for name, value in head.items():
        if held.get(name) != value:
            raise UnusableCacheFile(f"has another {name}")
    sizes = held.get("sizes")
    rest = content[end + 1 :]
    if not isinstance(sizes, list) or not all(isinstance(n, int) and n >= 0 for n in cast(list[object], sizes)):
        raise UnusableCacheFile("has no head")
    lengths = cast(list[int], sizes)
    if sum(lengths) != len(rest):
        raise UnusableCacheFile("has a different length than its header states")
    blocks: list[memoryview] = []
    for length in lengths:
        blocks.append(rest[:length])
        rest = rest[length:]
    return held, blocks


KEY_BYTES = 16
"""The length of a text's key in bytes."""

_MOST_VECTORS = 200_000
_MOST_FILES = 8
"""The maximum number of vector files of one embedder. More are merged into one."""
_MOST_CATALOGUES = 6
"""The maximum number of files with word indexes."""
_FORM = 3
"""The version of the cached data. Increase it if the data is made in another way."""
_WORDS = f"words{_FORM}-"

ReportCallback = Callable[[str], None]
"""A callback for the problem with a file that is made again."""


def hash_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=KEY_BYTES).digest()


class SearchCache:
    """A folder with cached vectors and word indexes, shared by all workspaces of the user.

    Entries are found by what they were made from, and a lost one is made again. Vectors are in a few files, each written once, so
    that processes that encode at the same time do not overwrite each other's.

    :param report: called with a sentence when a file is discarded
    """

    def __init__(self, folder: Path, report: ReportCallback | None = None) -> None:
        self._folder = folder
        self._tell: ReportCallback = report or _ignore_report

    def load_vectors(self, fingerprint: str, wanted: Collection[bytes] | None = None) -> dict[bytes, Any]:
        """Return the stored vectors of an embedder, by the key of their text (rows of 16-bit floats).

        :param wanted: the keys to return; None for all
        """
        out: dict[bytes, Any] = {}
        width: int | None = None
        missing = None if wanted is None else set(wanted)
        for path in self._files(f"{self._vectors(fingerprint)}-"):
            if missing is not None and not missing:
                break
            for keys, rows in self._read_vector_file(path, fingerprint):
                width = width or rows.shape[1]
                if rows.shape[1] != width:  # a server now has another model under the same name
                    continue
                places = {key: at for at, key in enumerate(keys) if missing is None or key in missing}
                taken = rows[list(places.values())]  # a copy, so that the rest of the file does not stay in memory
                out.update((key, row) for key, row in zip(places, taken, strict=True) if key not in out)
                if missing is not None:
                    missing -= places.keys()
        return out

    def store_vectors(self, fingerprint: str, vectors: Mapping[bytes, Any]) -> bool:
        """Store ``vectors`` in addition to the stored ones. Return whether that succeeded."""
        if not vectors:
            return True
        start = f"{self._vectors(fingerprint)}-"
        before = self._files(start)
        if len(before) < _MOST_FILES:
            return self._write_vectors(start, fingerprint, vectors)
        kept = dict(vectors)
        for path in before:
            for keys, rows in self._read_vector_file(path, fingerprint):
                kept.update((key, row) for key, row in zip(keys, rows, strict=True) if key not in kept)
        newest = dict(islice(kept.items(), _MOST_VECTORS))
        if not self._write_vectors(start, fingerprint, newest):
            return False
        for path in before:
            self._discard(path)
        return True

    def delete_vectors(self, fingerprint: str) -> None:
        """Delete the stored vectors of an embedder."""
        for path in self._files(f"{self._vectors(fingerprint)}-"):
            self._discard(path)

    def load_word_index(self, documents: Sequence[str]) -> LexicalIndex | None:
        """Return the stored word index of exactly these documents, or None.

        :param documents: the keys of the documents, in order
        """
        head = self._words_head(documents)
        path = self._words(head)
        if (found := self._read(path, head)) is None:
            return None
        _, blocks = found
        if len(blocks) != 5:
            return None
        with suppress(OSError):
            os.utime(path)  # the most recently used files stay longest
        names = cast(list[str], json.loads(bytes(blocks[0])))
        starts, numbers, weights, lengths = array("i"), array("i"), array("f"), array("f")
        for each, block in zip((starts, numbers, weights, lengths), blocks[1:], strict=True):
            each.frombytes(block)
        return LexicalIndex({name: place for place, name in enumerate(names)}, starts, numbers, weights, lengths)

    def store_word_index(self, documents: Sequence[str], found: LexicalIndex) -> None:
        names = json.dumps(list(found.terms), ensure_ascii=False).encode("utf-8", "surrogatepass")
        blocks = [names, *(each.tobytes() for each in (found.starts, found.documents, found.weights, found.lengths))]
        head = self._words_head(documents)
        self._write(self._words(head), head, blocks)
        for path in self._files(_WORDS)[_MOST_CATALOGUES:]:
            self._discard(path)

    def _words_head(self, documents: Sequence[str]) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(documents).encode("utf-8", "replace"), digest_size=KEY_BYTES).hexdigest()
        weights = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
        return {"kind": "words", "form": _FORM, "order": sys.byteorder, "weights": weights, "documents": digest}

    def _words(self, head: Mapping[str, Any]) -> Path:
        return self._folder / f"{_WORDS}{hash_text(json.dumps(head)).hex()}"

    def _vectors(self, fingerprint: str) -> str:
        return f"vectors{_FORM}-{hash_text(fingerprint).hex()[:12]}"

    def _files(self, start: str) -> list[Path]:
        """Return the files whose names begin with ``start``, the newest first."""
        found: list[tuple[int, Path]] = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.startswith(start):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
        except OSError:
            pass  # a folder that cannot be listed counts as empty
        return [path for _, path in sorted(found, key=lambda one: (-one[0], one[1].name))]

    def _read_vector_file(self, path: Path, fingerprint: str) -> Iterator[tuple[list[bytes], Any]]:
        """Yield the keys and rows of one file of vectors; nothing if it is unusable."""
        import numpy

        if (found := self._read(path, {"kind": "vectors", "form": _FORM, "embedder": fingerprint})) is None:
            return
        head, blocks = found
        width = head.get("width")
        if len(blocks) != 2 or not isinstance(width, int) or width < 1:
            return
        packed, content = bytes(blocks[0]), blocks[1]
        if len(packed) % KEY_BYTES or len(content) != len(packed) // KEY_BYTES * width * 2:
            return
        keys = [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
        yield keys, numpy.frombuffer(content, numpy.float16).reshape(-1, width)

    def _write_vectors(self, start: str, fingerprint: str, vectors: Mapping[bytes, Any]) -> bool:
        import numpy

        rows = numpy.stack(list(vectors.values())).astype(numpy.float16)
        keys = b"".join(vectors)
        head = {"kind": "vectors", "form": _FORM, "embedder": fingerprint, "width": rows.shape[1]}
        path = self._folder / f"{start}{hashlib.blake2b(keys, digest_size=6).hexdigest()}"
        return self._write(path, head, [keys, rows.tobytes()])

    def _read(self, path: Path, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]] | None:
        try:
            return read_cache_file(path, head)
        except UnusableCacheFile as reason:
            self._tell(f"The cache file {path} {reason}. It is rebuilt.")
            self._discard(path)
            return None

    def _write(self, path: Path, head: Mapping[str, Any], blocks: Sequence[bytes | memoryview]) -> bool:
        try:
            write_cache_file(path, head, blocks)
        except OSError as error:
            self._tell(f"The cache file {path} cannot be written ({error.strerror}). It is rebuilt at the next start.")
            return False
        return True

    def _discard(self, path: Path) -> None:
        with suppress(OSError):  # a folder, or already deleted
            path.unlink()


def _ignore_report(text: str) -> None:
    """Ignore a report."""
