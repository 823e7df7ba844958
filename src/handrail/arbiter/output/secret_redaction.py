"""Redaction: registered secrets are replaced by their names in text, bytes, JSON, stored values and Python logs.

Every occurrence is removed, in each of the forms of :mod:`handrail.arbiter.output.secret_encodings`. If occurrences overlap,
all their characters are removed. Without registered secrets, every method returns its input unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import orjson

from handrail.arbiter.output.secret_encodings import SecretEncodingMatcher
from handrail.contract.errors import UsageError
from handrail.contract.session_protocols import SessionValueStore
from handrail.contract.struct import Struct
from handrail.runtime.secret_store import explain_invalid_secret_name

MIN_SECRET_CHARACTERS = 4
"""Characters. A shorter value would occur in ordinary text, which would then be redacted."""


MAX_SECRET_CHARACTERS = 16 * 1024
"""Characters. A longer value is a document, and the search for all its encodings would delay every call."""


_LONG = 64 * 1024
"""Bytes from which a second search costs more than caching the searched text."""


class SecretRedactor:
    """The registered secrets of one kernel, including those of client processes, and their redaction."""

    __slots__ = ("_binary", "_clean", "_forms", "_numeric", "_secrets", "active")

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        """Register secrets.

        :param secrets: name to value; every reader may see a name
        :raises ValueError: for a value that cannot be redacted; the text contains the name and never the value
        """
        self._secrets: dict[str, frozenset[str]] = {}
        self.register_secrets(secrets or {})

    def register_secrets(self, secrets: Mapping[str, str]) -> None:
        """Register further secrets. A name may have several values.

        :raises ValueError: for a value that cannot be redacted; the text contains the name and never the value
        """
        # A copy: if one of the new secrets is invalid, none of them is registered.
        every = dict(self._secrets)
        for name, value in secrets.items():
            if problem := explain_invalid_secret_name(name):
                raise ValueError(problem)
            if fault := explain_unredactable(value):
                raise ValueError(f"Secret `{name}` {fault}.")
            every[name] = every.get(name, frozenset()) | {value}
        labelled = {f"[secret:{name}]": sorted(values) for name, values in every.items()}
        forms = SecretEncodingMatcher(labelled)
        for label in labelled:
            # Otherwise the placeholder itself would contain a secret, and each redaction would create new occurrences.
            for found in forms.find_secret_occurrences(label):
                raise ValueError(
                    f"Secret `{found.label[8:-1]}` has a value that is part of the placeholder `{label}`. Use a longer, "
                    "random value."
                )
        ascii_only = all(value.isascii() for values in every.values() for value in values)
        self._secrets, self._forms = every, forms
        self._clean = b""
        """The last long text without secrets, since arguments are searched once for the record and once for the user."""
        self._binary = forms if ascii_only else SecretEncodingMatcher(labelled, as_bytes=True)
        digits = set("0123456789.eE+-")
        self._numeric = any(
            set(form) <= digits
            for values in every.values()
            for value in values
            for form in (value, value.encode().hex())
        )
        self.active = bool(every)
        """Whether any secret is registered."""

    def redact_text(self, text: str) -> str:
        """Return ``text`` without secrets; the same object if it contains none."""
        if not self.active or not self._forms.may_contain_secret(text):
            return text
        return self._redact_occurrences_before(self._forms, text, len(text), 0)[0]

    def redact_text_head(self, text: str, most: int) -> str:
        """Return the first ``most`` characters of ``text`` without secrets.

        Only a fixed length is searched. A possible beginning of a secret at its end is left out.
        """
        if len(text) <= _LONG:
            return self.redact_text(text)[:most]
        # The stream holds back what may begin a secret, which a plain cut could show in part.
        return self.create_stream_redactor().redact_piece(text[:_LONG])[:most]

    def redact_bytes(self, data: bytes) -> bytes:
        """Return ``data`` without secrets in UTF-8."""
        if not self.active or not self._binary.may_bytes_contain_secret(data):
            return data
        text = data.decode("latin-1")
        shown = self._redact_occurrences_before(self._binary, text, len(text), 0)[0]
        return data if shown is text else shown.encode("latin-1")

    def contains_secret(self, data: bytes) -> bool:
        """Return whether UTF-8 or JSON text contains a secret."""
        if len(data) > _LONG and data == self._clean:
            return False
        if self._binary.may_bytes_contain_secret(data) and self._binary.find_secret_occurrences(data.decode("latin-1")):
            return True
        if len(data) > _LONG:
            self._clean = data
        return False

    def redact_record_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return ``body`` without secrets, with one search of the whole first: most bodies contain none."""
        try:
            if not self.contains_secret(orjson.dumps(body)):
                return body
        except TypeError:  # a value that only the walk below can handle
            pass
        return self._redact_parts(body)

    def redact_json(self, value: Any) -> Any:
        """Return plain JSON data without secrets, also in keys. Parts without secrets are the same objects.

        A number whose digits are a secret becomes its name. Keys that become equal get a count.
        """
        return self._redact_parts(value) if self.active else value

    def create_stream_redactor(self) -> StreamRedactor:
        """Return a redactor for text that arrives in pieces."""
        return StreamRedactor(self)

    def _redact_parts(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, dict):
            return self._redact_members(cast("dict[str, Any]", value))
        if isinstance(value, (list, tuple)):
            items = cast("list[Any] | tuple[Any, ...]", value)
            walked = [self._redact_parts(item) for item in items]
            return items if all(new is old for new, old in zip(walked, items, strict=True)) else walked
        if self._numeric and type(value) in (int, float):
            written = orjson.dumps(value).decode()
            return value if (redacted := self.redact_text(written)) is written else redacted
        return value

    def _redact_members(self, value: dict[str, Any]) -> dict[str, Any]:
        walked: dict[str, Any] = {}
        counts: dict[str, int] = {}
        changed = False
        for key, item in value.items():
            new_key, new_item = self.redact_text(key), self._redact_parts(item)
            changed = changed or new_key is not key or new_item is not item
            unique = new_key
            # Also not a later original key, which would otherwise be overwritten or would overwrite this one.
            while unique in walked or (unique is not key and unique in value):
                count = counts[new_key] = counts.get(new_key, 1) + 1
                unique = f"{new_key} ({count})"
            walked[unique] = new_item
        return walked if changed else value

    @staticmethod
    def _redact_occurrences_before(forms: SecretEncodingMatcher, text: str, upto: int, covered: int) -> tuple[str, int]:
        """Redact the occurrences that begin before ``upto``.

        :param covered: how many characters at the start belong to an occurrence whose label was already written
        :return: the redacted text, and how many characters after ``upto`` belong to its last occurrence
        """
        out: list[str] = []
        shown = covered
        for found in forms.find_secret_occurrences(text):
            if found.start >= upto:
                break
            if found.start >= shown:
                out += (text[shown : found.start], found.label)
            # Occurrences may overlap. Text that any of them covers must not be shown.
            shown = max(shown, found.end)
        if not shown and upto == len(text):
            return text, 0
        if shown < upto:
            out.append(text[shown:upto])
            shown = upto
        return "".join(out), shown - upto


class StreamRedactor:
    """A redactor of text in pieces, with the same result as for the whole text. It holds back possible beginnings of secrets."""

    __slots__ = ("_covered", "_pending", "_redactor")

    def __init__(self, redactor: SecretRedactor) -> None:
        self._redactor = redactor
        self._pending = ""
        self._covered = 0

    def redact_piece(self, chunk: str) -> str:
        """Take the next piece, and return the text that can be shown now."""
        return chunk if not self._redactor.active else self._advance(self._pending + chunk, end=False)

    def flush_held_text(self) -> str:
        """Return the rest, after the last piece."""
        return self._advance(self._pending, end=True) if self._pending else ""

    def _advance(self, text: str, *, end: bool) -> str:
        forms = self._redactor._forms  # pyright: ignore[reportPrivateUsage]
        upto = len(text) if end else forms.find_incomplete_secret_start(text)
        shown, self._covered = self._redactor._redact_occurrences_before(forms, text, upto, self._covered)  # pyright: ignore[reportPrivateUsage]
        self._pending = text[upto:]
        return shown


class RedactingSessionValueStore(Struct, frozen=True):
    """The values that tools keep in a session, redacted when they are stored (:class:`~handrail.contract.session_protocols.SessionValueStore`)."""

    values: SessionValueStore
    redactor: SecretRedactor

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        return await self.values.get(session_id, tool_id, self.redactor.redact_text(key))

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        await self.values.put(session_id, tool_id, self.redactor.redact_text(key), self.redactor.redact_json(value))


def create_redactor(given: Mapping[str, str] | None) -> SecretRedactor:
    """Return a redactor for the secrets that a program passed.

    :raises UsageError: for a name or value that cannot be redacted
    """
    try:
        return SecretRedactor(given)
    except ValueError as error:
        raise UsageError(f"Invalid `secrets`: {error}") from None


def explain_unredactable(value: object) -> str | None:
    """Return why a value cannot be redacted, without the value; None if it can."""
    if not isinstance(value, str):
        return f"is a {type(value).__name__}. Expected a string"
    if len(value) < MIN_SECRET_CHARACTERS:
        return f"has {len(value)} characters. Expected at least {MIN_SECRET_CHARACTERS}, since a shorter value occurs in ordinary text"
    if len(value) > MAX_SECRET_CHARACTERS:
        return f"has {len(value):,} characters. Expected at most {MAX_SECRET_CHARACTERS:,}"
    if not value.strip():
        return "is only white space. Expected a value that does not occur in ordinary text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair. Expected valid Unicode"
    return None


# Redaction of Handrail's own Python logging: the text of an error may contain data that a peer sent.

LOGGERS = (
    "handrail",
    "handrail.acp",
    "handrail.agent",
    "handrail.arbiter",
    "handrail.ipc",
    "handrail.mcp",
    "handrail.runtime",
    "handrail.session",
)
"""All loggers of Handrail: a filter on one does not apply to its children."""


@contextmanager
def redact_logs(redactor: SecretRedactor) -> Generator[None]:
    """Redact log messages until the block ends, also secrets that ``redactor`` learns meanwhile."""
    redaction = _RedactionFilter(redactor)
    for name in LOGGERS:
        # A filter on the logger works before all handlers, also those that the embedding program adds later.
        logging.getLogger(name).addFilter(redaction)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(redaction)


class _RedactionFilter(logging.Filter):
    def __init__(self, redactor: SecretRedactor) -> None:
        super().__init__()
        self._redactor = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._redactor.active:
            return True
        # The formatted message: a secret may be spread over the format and its arguments.
        message = record.getMessage()
        if (shown := self._redactor.redact_text(message)) is not message:
            record.msg, record.args = shown, ()
        if record.exc_info and (error := record.exc_info[1]) is not None:
            traced = record.exc_text or logging.Formatter().formatException(record.exc_info)
            if (shown := self._redactor.redact_text(traced)) is not traced:
                record.exc_text = shown
                # For handlers that use the exception: one of the same name, with its redacted text and no frames.
                redacted_error = type(type(error).__name__, (Exception,), {})(self._redactor.redact_text(str(error)))
                record.exc_info = (type(redacted_error), redacted_error, None)
        if record.stack_info:
            record.stack_info = self._redactor.redact_text(record.stack_info)
        return True
