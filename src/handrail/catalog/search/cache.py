"""The disk cache of the search: vectors by the text that they encode, and the words of whole catalogues."""

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

from handrail.catalog.search.lexical import WEIGHTS, Lexical

# Cache files, each either whole or absent.
#
# A file is a magic line, a JSON head (kind, version, length of each block), the blocks, and a digest of all before it. It is
# replaced atomically and readable by its owner alone. A file that is truncated, altered, of another version or of another
# kind is not used; it is made again, and the reason is reported.

_MAGIC = b"handrail search 1\n"
_DIGEST = 32
_LARGEST = 2 << 30


class Unusable(Exception):
    """The file cannot be used; the text says why."""


def write(path: Path, head: Mapping[str, Any], blocks: Sequence[bytes | memoryview]) -> None:
    """Replace ``path`` by a file of ``head`` and ``blocks``.

    :raises OSError: it cannot be written; what was there stays
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


def read(path: Path, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]] | None:
    """The head and the blocks of ``path``, or None where there is no such file.

    :param head: what the file's head must say, at least
    :raises Unusable: it is not such a file, or no longer whole
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"cannot be opened: {error.strerror}") from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
        os.close(descriptor)
        raise Unusable("is no file of this kind")
    if os.name != "nt" and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
        os.close(descriptor)
        raise Unusable("could have been written by somebody else")
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = memoryview(file.read())
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror}") from None
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise Unusable("is no file of this kind")
    if hashlib.blake2b(content[:-_DIGEST], digest_size=_DIGEST).digest() != bytes(content[-_DIGEST:]):
        raise Unusable("is not whole")
    return _taken_apart(content[len(_MAGIC) : -_DIGEST], head)


def _taken_apart(content: memoryview, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]]:
    try:
        end = bytes(content[: 64 << 10]).index(b"\n")
        found = cast(object, json.loads(bytes(content[:end])))
    except ValueError:
        raise Unusable("has no head") from None
    if not isinstance(found, dict):
        raise Unusable("has no head")
    held = cast(dict[str, Any], found)
    for name, value in head.items():
        if held.get(name) != value:
            raise Unusable(f"is of another {name}")
    sizes = held.get("sizes")
    rest = content[end + 1 :]
    if not isinstance(sizes, list) or not all(isinstance(n, int) and n >= 0 for n in cast(list[object], sizes)):
        raise Unusable("has no head")
    lengths = cast(list[int], sizes)
    if sum(lengths) != len(rest):
        raise Unusable("is not as long as it says")
    blocks: list[memoryview] = []
    for length in lengths:
        blocks.append(rest[:length])
        rest = rest[length:]
    return held, blocks


KEY = 16
"""Bytes of a text's key."""

_MOST_VECTORS = 200_000
_MOST_FILES = 8
"""Files of vectors of one embedder; of more, one is made."""
_MOST_CATALOGUES = 6
"""Files of words."""
_FORM = 3
"""Counted up when what is kept is made in another way."""
_WORDS = f"words{_FORM}-"

Tell = Callable[[str], None]
"""Told what was wrong with a file that is made again."""


def key_of(text: str) -> bytes:
    """The key of one text."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=KEY).digest()


class Cache:
    """One folder of the state, for every workspace of this user: what is kept in it is found by what it was made of.

    Nothing in it is missed: what is gone or no good is made again. Vectors stand in a few files, each written once, so that
    processes which encode at the same time do not write over one another's.

    :param tell: told in one sentence when a file was thrown away
    """

    def __init__(self, folder: Path, tell: Tell | None = None) -> None:
        self._folder = folder
        self._tell: Tell = tell or _silent

    def vectors(self, fingerprint: str, wanted: Collection[bytes] | None = None) -> dict[bytes, Any]:
        """The vectors that were kept of this embedder, by the key of their text (rows of 16-bit floats).

        :param wanted: the keys that are asked for; None for all
        """
        out: dict[bytes, Any] = {}
        width: int | None = None
        missing = None if wanted is None else set(wanted)
        for path in self._files(f"{self._vectors(fingerprint)}-"):
            if missing is not None and not missing:
                break
            for keys, rows in self._segment(path, fingerprint):
                width = width or rows.shape[1]
                if rows.shape[1] != width:  # of a server that has another model under the same name by now
                    continue
                places = {key: at for at, key in enumerate(keys) if missing is None or key in missing}
                taken = rows[list(places.values())]  # a copy, so that the rest of the file does not stay in memory
                out.update((key, row) for key, row in zip(places, taken, strict=True) if key not in out)
                if missing is not None:
                    missing -= places.keys()
        return out

    def keep_vectors(self, fingerprint: str, vectors: Mapping[bytes, Any]) -> bool:
        """Keep ``vectors`` for the next start, beside those that were kept before; whether they could be."""
        if not vectors:
            return True
        start = f"{self._vectors(fingerprint)}-"
        before = self._files(start)
        if len(before) < _MOST_FILES:
            return self._write_vectors(start, fingerprint, vectors)
        kept = dict(vectors)
        for path in before:
            for keys, rows in self._segment(path, fingerprint):
                kept.update((key, row) for key, row in zip(keys, rows, strict=True) if key not in kept)
        newest = dict(islice(kept.items(), _MOST_VECTORS))
        if not self._write_vectors(start, fingerprint, newest):
            return False
        for path in before:
            self._discard(path)
        return True

    def forget_vectors(self, fingerprint: str) -> None:
        """Keep none of this embedder's any more."""
        for path in self._files(f"{self._vectors(fingerprint)}-"):
            self._discard(path)

    def lexical(self, documents: Sequence[str]) -> Lexical | None:
        """The words of exactly these documents (their keys, in order), where they were kept."""
        head = self._words_head(documents)
        path = self._words(head)
        found = self._read(path, head)
        if found is None:
            return None
        _, blocks = found
        if len(blocks) != 5:
            return None
        with suppress(OSError):
            os.utime(path)  # those that are used stay longest
        names = cast(list[str], json.loads(bytes(blocks[0])))
        starts, numbers, weights, lengths = array("i"), array("i"), array("f"), array("f")
        for each, block in zip((starts, numbers, weights, lengths), blocks[1:], strict=True):
            each.frombytes(block)
        return Lexical({name: place for place, name in enumerate(names)}, starts, numbers, weights, lengths)

    def keep_lexical(self, documents: Sequence[str], found: Lexical) -> None:
        """Keep the words of these documents for the next start."""
        names = json.dumps(list(found.terms), ensure_ascii=False).encode("utf-8", "surrogatepass")
        blocks = [names, *(each.tobytes() for each in (found.starts, found.documents, found.weights, found.lengths))]
        head = self._words_head(documents)
        self._write(self._words(head), head, blocks)
        for path in self._files(_WORDS)[_MOST_CATALOGUES:]:
            self._discard(path)

    def _words_head(self, documents: Sequence[str]) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(documents).encode("utf-8", "replace"), digest_size=KEY).hexdigest()
        weights = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
        return {"kind": "words", "form": _FORM, "order": sys.byteorder, "weights": weights, "documents": digest}

    def _words(self, head: Mapping[str, Any]) -> Path:
        return self._folder / f"{_WORDS}{key_of(json.dumps(head)).hex()}"

    def _vectors(self, fingerprint: str) -> str:
        return f"vectors{_FORM}-{key_of(fingerprint).hex()[:12]}"

    def _files(self, start: str) -> list[Path]:
        """Those whose names begin so, the newest first."""
        found: list[tuple[int, Path]] = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.startswith(start):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
        except OSError:
            pass  # what cannot be listed is not there
        return [path for _, path in sorted(found, key=lambda one: (-one[0], one[1].name))]

    def _segment(self, path: Path, fingerprint: str) -> Iterator[tuple[list[bytes], Any]]:
        """The keys and rows of one file of vectors; nothing where it is no good."""
        import numpy

        found = self._read(path, {"kind": "vectors", "form": _FORM, "embedder": fingerprint})
        if found is None:
            return
        head, blocks = found
        width = head.get("width")
        if len(blocks) != 2 or not isinstance(width, int) or width < 1:
            return
        packed, content = bytes(blocks[0]), blocks[1]
        if len(packed) % KEY or len(content) != len(packed) // KEY * width * 2:
            return
        keys = [packed[at : at + KEY] for at in range(0, len(packed), KEY)]
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
            return read(path, head)
        except Unusable as reason:
            self._tell(f"{path} {reason}: it is made again")
            self._discard(path)
            return None

    def _write(self, path: Path, head: Mapping[str, Any], blocks: Sequence[bytes | memoryview]) -> bool:
        try:
            write(path, head, blocks)
        except OSError as error:
            self._tell(
                f"{path} cannot be written ({error.strerror}): what it would hold is made again at the next start"
            )
            return False
        return True

    def _discard(self, path: Path) -> None:
        with suppress(OSError):  # a folder, or gone already
            path.unlink()


def _silent(text: str) -> None:
    """Nobody wants to be told."""
