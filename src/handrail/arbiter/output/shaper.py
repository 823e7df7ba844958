"""The stages that turn a tool's return value into three results: for the user, for the model, and for the log.

The stages always have this order: convert to plain JSON, take out binary parts as artifacts, redact, truncate to the
tool's limits with the whole in a sidecar, hide from each side the parts that the tool does not show it, and spell out
dangerous or imitating text for the model.
No stage raises: a value that cannot be shown, a full disk or a hostile object becomes a result that says so.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import orjson

from handrail.arbiter.output import output_files
from handrail.arbiter.output.audience_views import NEUTRALISED_KEY, make_audience_results, neutralise_for_model
from handrail.arbiter.output.json_conversion import (
    MAX_PARTS,
    JsonConversion,
    NotPlainJson,
    ValueTooLarge,
    copy_through_json,
    encode_if_plain_json,
    encode_indented_json,
    encode_json,
    is_estimated_within_size,
)
from handrail.arbiter.output.output_files import OutputFileQuota
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.calls_and_results import LONGEST_SECRET_BYTES, LargeText, Result
from handrail.contract.errors import ERROR_KINDS, HandrailError
from handrail.contract.result_conversions import list_artifact_refs
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import may_need_escaping
from handrail.contract.tool.spec import ToolSpec
from handrail.record.artifacts import ArtifactStore

# Truncation of one output to its tool's limits: a head for the reader of the result, the whole for the sidecar.
#
# A pure function from plain data to a :class:`TruncatedOutput`. Three shapes, in this order:
#
# - a list longer than ``max_entries``, alone or as the only list of an object: ``head`` is its first entries, and
#   the whole has one entry a line (``path:line:text`` for a match, the text itself for a text, else JSON);
# - a text, alone or as the one long text of an object: ``head`` is its beginning;
# - anything else: ``head`` is the beginning of its JSON text.
#
# Small values of the other keys of an object stay unchanged next to ``head``.

_SMALL = 4
"""The other keys may take at most one part in this many of the limit."""


class TruncatedOutput(NamedTuple):
    """A truncated output and its full text."""

    data: dict[str, Any]
    """``head``, ``tail`` of a text, and the small other keys."""
    counts: dict[str, Any]
    """Metadata: ``truncated_as``, and ``output_bytes``, ``omitted_bytes`` and ``omitted_at``, or ``entries`` and
    ``omitted_entries``."""
    whole: str
    """The text for the output file."""


def truncate_output(data: Any, encoded: bytes, spec: ToolSpec, redact: Callable[[str], str]) -> TruncatedOutput | None:
    """Truncate ``data`` to the limits of ``spec``; return None if it is within them.

    :param encoded: the compact JSON of ``data``
    :param redact: redacts a text that is built here, before it is cut
    """
    if spec.max_entries is not None and (
        found := _truncate_entries(data, encoded, spec.max_output, spec.max_entries, redact)
    ):
        return found
    if len(encoded) <= spec.max_output:
        return None
    if isinstance(data, str):
        return _truncate_text(data, None, {}, 0, spec.max_output)
    if isinstance(data, dict):
        members = cast("dict[str, Any]", data)
        if texts := [(len(value), key) for key, value in members.items() if isinstance(value, str)]:
            key = max(texts)[1]
            others, size = _other_members(members, key)
            # A tool's own `head` or `tail` would be overwritten, so such an object is shown as JSON text.
            if size <= spec.max_output // _SMALL and others.keys().isdisjoint(("head", "tail")):
                return _truncate_text(members[key], key, others, size, spec.max_output)
    # Indented, so that the sidecar can be read and searched by lines.
    return _truncate_text(
        redact(encode_indented_json(cast("object", data)).decode()), None, {}, 0, spec.max_output, "JSON text"
    )


def decode_truncated_utf8(encoded: bytes, count: int) -> str:
    """Return at most ``count`` bytes of UTF-8, ending at the end of a character."""
    return encoded[: max(0, count)].decode("utf-8", "ignore")


def _truncate_text(
    text: str, key: str | None, others: dict[str, Any], size: int, max_output: int, kind: str = "text"
) -> TruncatedOutput | None:
    encoded = text.encode()
    limit = max(0, max_output - size)
    if len(encoded) <= limit and kind == "text":
        return None  # only its escapes in JSON made it too long
    parts = {"head": decode_truncated_utf8(encoded, limit)}
    if kind == "text":  # a program says at the end how it went
        half = limit // 2
        parts = {
            "head": decode_truncated_utf8(encoded, limit - half),
            "tail": encoded[len(encoded) - half :].decode("utf-8", "ignore"),
        }
    counts = _count_omitted(kind if key is None else f"{kind} of {key!r}", len(encoded), parts)
    return TruncatedOutput({**parts, **others}, counts, text)


def _count_omitted(kind: str, size: int, parts: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata of a text of ``size`` bytes of which only these parts are shown."""
    shown = {name: len(part.encode()) for name, part in parts.items()}
    return {
        "truncated_as": kind,
        "output_bytes": size,
        "omitted_bytes": size - sum(shown.values()),
        "omitted_at": shown["head"],
    }


class _TextEnds:
    """The first and last bytes of a text that passes in pieces.

    :param limit: how many bytes both of them have together
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head_bytes = limit - self._half
        self._head = b""
        self._tail = b""
        self.size = 0

    def watch(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.size += len(piece)
            if len(self._head) < self._head_bytes:
                self._head += piece[: self._head_bytes - len(self._head)]
            self._tail = (self._tail + piece)[-self._half :] if self._half else b""
            yield piece

    def get_head_and_tail(self) -> dict[str, str]:
        after_head = self.size - len(self._head)
        return {
            "head": self._head.decode("utf-8", "ignore"),
            "tail": self._tail[-after_head:].decode("utf-8", "ignore") if after_head else "",
        }


def _truncate_entries(
    data: Any, encoded: bytes, max_output: int, max_entries: int, redact: Callable[[str], str]
) -> TruncatedOutput | None:
    entries, key = _find_only_list(data)
    if entries is None or (len(entries) <= max_entries and len(encoded) <= max_output):
        return None
    others, size = ({}, 0) if key is None else _other_members(data, key)
    if size > max_output // _SMALL or "head" in others:
        return None
    head: list[Any] = []
    size += 1  # two brackets, and one comma less than entries
    for entry in entries[:max_entries]:
        # Entries stay whole: half of a match or of a JSON object would mislead the model.
        size += len(orjson.dumps(entry)) + 1
        if size > max_output:
            break
        head.append(entry)
    if len(head) == len(entries):  # too long by its key only
        head.pop()
    if not head:
        return None
    whole = redact("\n".join(map(_entry_line, entries)) + "\n")
    counts = {
        "truncated_as": "entries" if key is None else f"entries of {key!r}",
        "entries": len(entries),
        "omitted_entries": len(entries) - len(head),
        "output_bytes": len(whole.encode()),
    }
    return TruncatedOutput({"head": head, **others}, counts, whole)


def _find_only_list(data: Any) -> tuple[list[Any] | None, str | None]:
    if isinstance(data, list):
        return cast("list[Any]", data), None
    if isinstance(data, dict):
        members = cast("dict[str, Any]", data)
        lists = [key for key, value in members.items() if isinstance(value, list)]
        # With two lists it is unclear which of them is the output.
        if len(lists) == 1:
            return members[lists[0]], lists[0]
    return None, None


def _other_members(data: dict[str, Any], key: str) -> tuple[dict[str, Any], int]:
    """Return the other keys, and the bytes of JSON that they take."""
    others = {other: value for other, value in data.items() if other != key}
    return others, len(orjson.dumps(others)) if others else 0


def _entry_line(entry: Any) -> str:
    text: str | None = entry if isinstance(entry, str) else None
    if isinstance(entry, dict):
        match = cast("dict[str, Any]", entry)
        if (
            match.keys() == {"path", "line", "text"}
            and isinstance(match["path"], str)
            and isinstance(match["text"], str)
        ):
            text = f"{match['path']}:{match['line']}:{match['text']}"
    if text is None or "\n" in text or "\r" in text:
        return orjson.dumps(entry).decode()
    return text


MAX_METADATA = 16 * 1024
"""Bytes of JSON that a tool's own metadata may take."""
_SCALARS = frozenset({bool, int, float})
_FEW_DIGITS, _SHORT = 10**9, 16
"""A bound for small integers, and the longest JSON text below it."""
_dumps = orjson.dumps
_INLINE_BYTES = 256 * 1024
_INLINE_SPELLED = 4 * 1024
"""Bytes that are neutralised on the event loop: a text of hidden characters takes 5 µs for each."""
_INLINE_PARTS = 2_000
"""How many parts of a value are converted on the event loop; a thread converts larger values."""
_PIECE_BYTES = 32 * 1024
"""Bytes of a large text that are read and redacted at once."""
_PLACED = "artifacts"
"""The metadata key of artifact references that the kernel itself put into the data.

A tool can write any text that looks like a reference, but not this key.
"""


class AudienceOutputs(Struct):
    """One output in three forms. ``logged`` is the body of the log record and never changes."""

    result: Result
    model: Result
    logged: dict[str, Any]


def shape_recorded_result(result: Result) -> AudienceOutputs:
    """Return a result of the arbiter itself, which is already recorded."""
    return AudienceOutputs(result, neutralise_for_model(result), {})


def make_call_end_event_data(result: Result) -> dict[str, Any]:
    """Return the data of the event for a call's end. Only the caller receives the result."""
    fields: dict[str, Any] = {"type": result.type, "error_kind": result.error_kind}
    data: object = result.data
    if isinstance(data, dict):
        ended = cast("dict[str, Any]", data)
        fields |= {name: ended[name] for name in ("exit_code", "signal") if isinstance(ended.get(name), int)}
    return fields


class OutputShaper:
    """The stages of output for one kernel.

    :param redactor: removes registered secrets
    :param artifacts: stores binary parts
    :param folder: returns the output folder of a session, which that session may read
    :ivar room: the quota of all output files together
    """

    def __init__(
        self,
        redactor: SecretRedactor,
        artifacts: ArtifactStore,
        folder: Callable[[str], str | os.PathLike[str]],
        room: OutputFileQuota,
    ) -> None:
        self.redactor, self._artifacts, self.folder, self.room = redactor, artifacts, folder, room
        # Separate threads: those of the loop are shared with synchronous tools, which may hang in them.
        self._threads = ThreadPoolExecutor(2, "handrail-output")

    def close(self) -> None:
        """Wait until everything is written, and end the threads."""
        self._threads.shutdown(wait=True)

    def try_shape_small_output(self, spec: ToolSpec, value: Any, metadata: dict[str, Any]) -> AudienceOutputs | None:
        """Shape a plain, small output that all audiences may see; return None for any other, which needs :meth:`shape_output`.

        :param metadata: the arbiter's metadata, plain JSON; the result takes it over
        """
        # This path hides nothing from any audience, so it is only for tools that have nothing to hide.
        if spec.exposure != "both" or spec.prompt_mask:
            return None
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        limit = spec.max_output
        is_flat = kind is dict
        if kind is dict:
            for item in value.values():
                if type(item) is str:
                    if len(item) > limit:
                        return None
                elif item is not None and type(item) not in _SCALARS:
                    is_flat = False
                    if (type(item) is dict or type(item) is list) and not is_estimated_within_size(item, limit):
                        return None
        elif kind is str or kind is list:
            if len(value) > limit or (kind is list and not is_estimated_within_size(value, limit)):
                return None
        elif value is None or kind is bool or (kind is int and -_FEW_DIGITS < value < _FEW_DIGITS):
            if limit > _SHORT and spec.max_entries is None and not self.redactor.active:
                result = Result("output", value, None, metadata)
                return AudienceOutputs(
                    result, result, {"result": {"type": "output", "data": value, "metadata": {**metadata}}}
                )
        elif kind not in _SCALARS:
            return None
        if (encoded := encode_if_plain_json(value)) is None or len(encoded) > limit:
            return None
        if self.redactor.active and self.redactor.contains_secret(encoded):
            return None
        if kind is dict or kind is list:
            # A copy: the tool may still change the object that it returned.
            data = dict(cast("dict[str, Any]", value)) if is_flat else orjson.loads(encoded)
            kept: Any = orjson.Fragment(bytes(memoryview(encoded)))  # the bytes of orjson keep a buffer of 4 KB alive
        else:
            data = kept = value
        if (
            spec.max_entries is not None
            and len(encoded) > 2 * spec.max_entries
            and truncate_output(data, encoded, spec, str)
        ):
            return None
        # The same object for both audiences, which saves most calls a copy.
        result = model = Result("output", data, None, metadata)
        if kind not in _SCALARS and may_need_escaping(encoded):
            if len(encoded) > _INLINE_SPELLED:
                return None
            model = neutralise_for_model(result, encoded)
            if model is not result:
                if len(_dumps(model.data)) > limit:
                    return None
                metadata[NEUTRALISED_KEY] = model.metadata[NEUTRALISED_KEY]
        logged = {"type": "output", "data": kept, "metadata": {**metadata}}
        return AudienceOutputs(result, model, {"result": logged})

    async def shape_output(
        self,
        spec: ToolSpec,
        value: object,
        metadata: Mapping[str, Any],
        *,
        call_id: str,
        session_id: str,
        nested: Sequence[str] = (),
    ) -> AudienceOutputs:
        """Shape any value, also a :class:`Result`. A thread handles large ones.

        Files are written even if the waiting task is cancelled.

        :param nested: artifacts in the answers to nested calls, which the tool may pass on
        """
        work = partial(self._shape, spec, value, metadata, call_id, session_id, nested)
        try:
            return work(inline=True)
        except _ThreadRequired:
            try:
                written = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, inline=False))
            except RuntimeError:  # closed already: the last call may block the loop, but is answered
                return work(inline=False)
            # Without the shield, a cancellation could drop the work before a thread begins it, and no file would have
            # the output.
            return await asyncio.shield(written)

    @overload
    def redact_to_json(self, value: str) -> str: ...
    @overload
    def redact_to_json(self, value: object) -> Any: ...
    def redact_to_json(self, value: object) -> Any:
        """Return a redacted copy of any value as plain JSON, for the log and for events."""
        if type(value) is str:
            return self.redactor.redact_text(value)
        if (encoded := encode_if_plain_json(value)) is not None and not self.redactor.contains_secret(encoded):
            return orjson.loads(encoded)
        try:
            return self.redactor.redact_json(JsonConversion(value).data)
        except (ValueTooLarge, MemoryError) as error:
            return f"<a {type(value).__name__} that cannot be shown ({type(error).__name__})>"

    def hash_canonical_json(self, value: object) -> str:
        """Return the SHA-256 of a value's canonical JSON, in hexadecimal, which an approval is bound to."""
        digest = hashlib.sha256()
        if encode_if_plain_json(value) is None:
            plain = JsonConversion(value)
            value = plain.data
            for binary in plain.binaries:
                digest.update(hashlib.sha256(binary.data).digest())
        # Sorted, since a model may send the same arguments in another order after the approval.
        digest.update(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
        return digest.hexdigest()

    # ── the stages ───────────────────────────────────────────────────────────────────────────────

    def _shape(
        self,
        spec: ToolSpec,
        value: object,
        metadata: Mapping[str, Any],
        call_id: str,
        session_id: str,
        nested: Sequence[str],
        *,
        inline: bool,
    ) -> AudienceOutputs:
        call = _ShapingContext(spec, call_id, session_id, inline, set(nested))
        try:
            result = self._build_full_result(call, value, metadata)
        # Before the general clause below: this is a request for a thread and no fault of the output.
        except _ThreadRequired:
            raise
        except ValueTooLarge:
            if inline:
                raise _ThreadRequired from None
            result = Result.error(
                "limit",
                f"`{spec.id}` ran, but its output has too many parts to be shown. Request less at a time.",
                **metadata,
            )
        except Exception as error:  # the tool ran, so the call is answered even if its output is faulty
            result = Result.error(
                "backend",
                f"`{spec.id}` ran, but its output cannot be shown ({type(error).__name__}). Check its effect before you repeat it.",
                **metadata,
            )
        encoded = orjson.dumps(result.data)
        # The data are within the limit already, but spelling out thousands of characters would still delay other calls.
        if inline and len(encoded) > _INLINE_SPELLED and may_need_escaping(encoded):
            raise _ThreadRequired
        at_face, model = make_audience_results(spec, result)
        if (flag := model.metadata.get(NEUTRALISED_KEY)) is not None:
            at_face, result = (
                at_face.with_metadata(**{NEUTRALISED_KEY: flag}),
                result.with_metadata(**{NEUTRALISED_KEY: flag}),
            )
            model = self._truncate_again(call, result, model)
        logged = result.to_dict()
        if "data" in logged:
            logged["data"] = orjson.Fragment(encoded)
        why = model.metadata.get("hidden_by")  # for later look-ups of this call for the model
        return AudienceOutputs(
            at_face, model, {"result": logged} if why is None else {"result": logged, "hidden_by": why}
        )

    def _truncate_again(self, call: _ShapingContext, result: Result, model: Result) -> Result:
        """Truncate a result again that neutralisation made too long. The output file has the original text."""
        limit, error_text, more = call.spec.max_output, model.error_text, dict(model.metadata)
        if error_text is not None and len(error_text) > limit:
            error_text = decode_truncated_utf8(error_text.encode(), limit)
            more["truncated"] = True
        found = truncate_output(model.data, orjson.dumps(model.data), call.spec, str)
        # The output was within the limit before, so no file has been written. Now the model needs one to read the rest.
        if found is not None and "output_path" not in more and result.data is not None:
            whole = result.data if isinstance(result.data, str) else encode_indented_json(result.data).decode()
            entries = {key: value for key, value in found.counts.items() if key not in ("omitted_bytes", "omitted_at")}
            more |= {"truncated": True, **entries, "output_bytes": len(whole.encode())}
            self._write_sidecar(call, whole, more)
        return Result(model.type, model.data if found is None else found.data, error_text, more)

    def _build_full_result(self, call: _ShapingContext, value: object, metadata: Mapping[str, Any]) -> Result:
        """Return the full result, before parts are hidden from audiences."""
        given = value if isinstance(value, Result) else Result("output", value)
        more = self._clean_tool_metadata(given.metadata, call) if given.metadata else {}
        key, large, others = _take_large_text(given.data)
        data, encoded = self._redact_data(self._data_to_plain_json(call, others, more))
        error_text = None
        if given.type == "error":
            error_text = self._error_text(call, str(given.error_text or f"`{call.spec.id}` failed."), more)
            if more.get("error_kind") not in ERROR_KINDS:
                more["error_kind"] = "failed"
        if call.spec.prompt_mask and data is not None:
            more["artifact"] = self._store_masked(call, data, encoded, more)
        if large is not None:
            ends = self._store_large_text(call, key, large, call.spec.max_output - len(encoded), more)
            data = {**ends, **cast("dict[str, Any]", data)}
        elif (found := truncate_output(data, encoded, call.spec, self.redactor.redact_text)) is not None:
            data = found.data
            more |= {"truncated": True, **found.counts}
            self._write_sidecar(call, found.whole, more)
        if call.placed and (placed := [ref for ref in list_artifact_refs(data) if ref in call.placed]):
            more[_PLACED] = placed
        return Result(given.type, data, error_text, {**more, **metadata})

    def _data_to_plain_json(self, call: _ShapingContext, value: object, more: dict[str, Any]) -> Any:
        """Return the data as plain JSON, with binary parts stored as artifacts."""
        if not call.inline and encode_if_plain_json(value, large=True) is not None:
            with suppress(NotPlainJson):
                return copy_through_json(value)
        plain = JsonConversion(value, call.max_parts)
        if plain.notes:
            extra = [f"and {plain.more_notes} more"] if plain.more_notes else []
            more["conversions"] = self.redactor.redact_json([*plain.notes, *extra])
        for binary in plain.binaries:
            call.require_worker_thread()
            # Before it is stored: an artifact is named by the hash of its content and cannot be changed later.
            content = self.redactor.redact_bytes(binary.data)
            binary.placeholder["bytes"] = len(content)
            try:
                binary.placeholder["artifact"] = ref = self._artifacts.put(content, binary.media_type)
                call.placed.add(ref)
            except (OSError, HandrailError) as error:
                binary.placeholder["save_error"] = self.redactor.redact_text(_error_reason(error))
        return plain.data

    def _redact_data(self, data: Any) -> tuple[Any, bytes]:
        encoded = encode_json(data)
        if self.redactor.active and self.redactor.contains_secret(encoded):
            data = self.redactor.redact_json(data)
            encoded = encode_json(data)
            if self.redactor.contains_secret(encoded):  # a secret spans several parts, so the whole becomes one text
                data = self.redactor.redact_text(encoded.decode())
                encoded = encode_json(data)
        return data, encoded

    def _clean_tool_metadata(self, given: Mapping[str, Any], call: _ShapingContext) -> dict[str, Any]:
        """Return a tool's own metadata: plain, redacted and limited."""
        kept: dict[str, Any] = {}
        dropped: list[str] = []
        left = MAX_METADATA
        for key, value in self.redactor.redact_json(JsonConversion(dict(given), call.max_parts).data).items():
            if key == _PLACED:
                continue  # only the kernel sets this key
            size = len(key) + len(orjson.dumps(value))
            if size <= left:
                left -= size
                kept[key] = value
            else:
                dropped.append(key[:100])
        if dropped:
            kept["dropped_metadata"] = dropped[:20]
        return kept

    def _error_text(self, call: _ShapingContext, text: str, more: dict[str, Any]) -> str:
        if len(text) > _INLINE_BYTES:
            call.require_worker_thread()
        text = self.redactor.redact_text(text.encode("utf-8", "backslashreplace").decode())
        encoded = text.encode()
        if len(encoded) <= call.spec.max_output:
            return text
        head = decode_truncated_utf8(encoded, call.spec.max_output)
        more |= {
            "truncated": True,
            "error_bytes": len(encoded),
            "error_omitted_bytes": len(encoded) - len(head.encode()),
        }
        self._write_sidecar(call, text, more, "error_", ".error.txt")
        return head

    def _store_large_text(
        self, call: _ShapingContext, key: str, text: LargeText, limit: int, more: dict[str, Any]
    ) -> dict[str, str]:
        """Write a large text into the output file in pieces, and return its ends."""
        call.require_worker_thread()
        ends = _TextEnds(max(0, limit))
        with text.file:
            pieces = ends.watch(iterate_redacted_pieces(text, self.redactor))
            written = self._write_pieces(call, pieces, more)
            for _ in pieces:  # what a failed write has left
                pass
        parts = ends.get_head_and_tail()
        more |= {"truncated": True, **_count_omitted(f"text of {key!r}", ends.size, parts)}
        if written is not None:
            self._note_output_file(written, more)
        return parts

    def _write_sidecar(
        self, call: _ShapingContext, text: str, more: dict[str, Any], prefix: str = "output_", ending: str = ".txt"
    ) -> None:
        """Write the output file; if that fails, add the reason to the metadata."""
        call.require_worker_thread()
        encoded = (text.encode("utf-8", "backslashreplace"),)
        if (written := self._write_pieces(call, encoded, more, prefix, ending)) is not None:
            self._note_output_file(written, more, prefix)

    def _write_pieces(
        self,
        call: _ShapingContext,
        pieces: Iterable[bytes],
        more: dict[str, Any],
        prefix: str = "output_",
        ending: str = ".txt",
    ) -> tuple[Path, int] | None:
        try:
            return output_files.write_output_file(
                self.room, Path(self.folder(call.session_id)), call.id, pieces, ending
            )
        except (OSError, HandrailError) as error:
            more[prefix + "save_error"] = (
                f"The full output could not be saved: {self.redactor.redact_text(_error_reason(error))}"
            )
            return None

    @staticmethod
    def _note_output_file(written: tuple[Path, int], more: dict[str, Any], prefix: str = "output_") -> None:
        path, kept = written
        more[prefix + "path"] = str(path)
        if kept < (whole := more[prefix + "bytes"]):
            more[prefix + "kept_bytes"] = kept
            more[prefix + "save_error"] = f"The file contains the first {kept:,} of {whole:,} bytes."

    def _store_masked(self, call: _ShapingContext, data: Any, encoded: bytes, more: dict[str, Any]) -> str | None:
        """Return a reference to data that the prompt leaves out."""
        if isinstance(data, dict) and (own := cast("dict[str, Any]", data).get("artifact")) is not None:
            return str(own)
        call.require_worker_thread()
        try:
            return self._artifacts.put(encoded, "application/json")
        except (OSError, HandrailError) as error:
            more["output_save_error"] = self.redactor.redact_text(_error_reason(error))
            return None


def _take_large_text(data: object) -> tuple[str, LargeText | None, object]:
    """Return the large text among the members of a tool's data with its key, and the other members."""
    if type(data) is dict:
        members = cast("dict[str, Any]", data)
        for key, value in members.items():
            if isinstance(value, LargeText):
                return key, value, {name: other for name, other in members.items() if name != key}
        return "", None, members
    return "", None, data


def iterate_redacted_pieces(text: LargeText, redactor: SecretRedactor) -> Iterator[bytes]:
    """Yield a large text without secrets, in pieces. A note stands for a part that is not there.

    A secret that the missing part cuts is not shown in part: what may begin one is left out before the note, and so is
    the first part of the end, which may have the rest of one.
    """
    text.file.seek(0)
    decoder, stream = codecs.getincrementaldecoder("utf-8")("replace"), redactor.create_stream_redactor()
    while piece := text.file.read(_PIECE_BYTES):
        yield stream.redact_piece(decoder.decode(piece)).encode()
    rest = text.tail[-text.rest_bytes :] if text.rest_bytes else b""
    if text.omitted_byte_count:
        decoder, stream = codecs.getincrementaldecoder("utf-8")("replace"), redactor.create_stream_redactor()
        yield f"\n[{text.omitted_byte_count:,} bytes are left out here]\n".encode()
    for at in range(0, len(rest), _PIECE_BYTES):
        shown = stream.redact_piece(decoder.decode(rest[at : at + _PIECE_BYTES]))
        if at >= LONGEST_SECRET_BYTES or not text.omitted_byte_count:
            yield shown.encode()
    yield (stream.redact_piece(decoder.decode(b"", final=True)) + stream.flush_held_text()).encode()


class _ThreadRequired(Exception):
    """The remaining work would block the event loop."""


class _ShapingContext:
    """The call whose output is shaped, and whether that happens on the event loop."""

    __slots__ = ("id", "inline", "placed", "session_id", "spec")

    def __init__(self, spec: ToolSpec, call_id: str, session_id: str, inline: bool, placed: set[str]) -> None:
        self.spec = spec
        self.id = call_id
        self.session_id = session_id
        self.inline = inline
        self.placed = placed

    @property
    def max_parts(self) -> int:
        return _INLINE_PARTS if self.inline else MAX_PARTS

    def require_worker_thread(self) -> None:
        if self.inline:
            raise _ThreadRequired


def _error_reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
