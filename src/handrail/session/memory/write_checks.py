"""The checks before an agent stores a fact, each with the reason for the model, and the trust in what it stores."""

from __future__ import annotations

import os
import re
import sqlite3
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from handrail.config.secret_detection import find_secrets_in_text_urls, is_ordinary_value, is_secret_value
from handrail.contract.agent_manifest import MANIFEST_KEYS
from handrail.contract.errors import ToolError
from handrail.contract.services.memory_service import MemoryWriteRequest
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.watchdogs.builtin_watchdogs import find_known_key_kind
from handrail.record.log_reader import LoggedRecord, LogReader
from handrail.session.instruction_files import iterate_parent_repository_folders
from handrail.store.memory.knowledge_store import NEAR_DUPLICATE, extract_trigrams, is_near_duplicate
from handrail.store.tables.session_tables import SessionRow, select_session_rows

MIN_CHARACTERS = 20
MAX_CHARACTERS = 2_000
_MOST_RECALLED = 500
_MOST_INSTRUCTION_BYTES = 128 * 1024
_PASSWORD = compile_regex_lazily(
    r"(?i)\b(?:pass(?:word|wd|phrase|code)|pwd|secret|token|credential|api[ _-]?key|access[ _-]?key|private[ _-]?key|pin)s?\b"
    r"[\"'`]*(?:\s+(?:for|of|to|on)\s+\S+(?:\s+\S+)?)?\s*(?P<how>[:=]|\bis\b|\bare\b|->|→)+\s*[\"'`]*(?P<value>[^\s\"'`]{4,})"
)
_TRUSTED_TOOLS = frozenset(
    [
        "todo",
        "question",
        "scratchpad",
        "search_memory",
        "memory.query",
        "memory.upsert",
        "memory.compact",
        "find_tools",
        "browse_tools",
        "load_tools",
        "tool_search",
        "tool_status",
        "info",
        "list_triggers",
        "add_timer",
        "add_schedule",
        "remove_trigger",
    ]
)
"""Tools whose results contain nothing but what the user and the model said, and descriptions of tools."""
_FOREIGN_PARTS = {
    b'"notices"': "the session had received notifications",
    b"<embedded uri=": "a message of the user embedded a file",
    b'"pictures":[': "a picture was in view",
}
"""What a stored message contains if not all of it is the user's or the model's words."""
_MOST_FORKS = 100
_UNREAD = frozenset(["Cf", "Mn", "Me"])
"""Categories of characters that are invisible, or that only mark the letter before."""


class RecalledTexts:
    """The texts that the memory tools have shown in a session, so that they are not stored again."""

    def __init__(self) -> None:
        self._texts: deque[tuple[str, str]] = deque(maxlen=_MOST_RECALLED)

    def add(self, id: str, text: str) -> None:
        """Remember that a text was shown."""
        self._texts.append((id, text))

    def find(self, text: str) -> str | None:
        """Return the id of a shown text that says the same or contains ``text``."""
        plain = _flatten(text)
        for id, shown in self._texts:
            if plain in _flatten(shown) or is_near_duplicate(text, shown):
                return id
        return None


def normalise_memory_write(write: MemoryWriteRequest) -> MemoryWriteRequest:
    """Return a write with valid texts, without surrounding spaces.

    :raises ToolError: ``invalid_input`` for a text that is too short or too long
    """
    text = _make_valid(write.text).strip()
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
        raise ToolError(
            f"The fact was not stored: `text` has {len(text):,} characters. Expected {MIN_CHARACTERS} to {MAX_CHARACTERS:,}. "
            "Write one fact in one or a few whole sentences.",
            kind="invalid_input",
        )
    tags = tuple(dict.fromkeys(stripped for tag in write.tags if (stripped := _make_valid(tag).strip())))
    key = _make_valid(write.key).strip() if write.key is not None else None
    return MemoryWriteRequest(text, key or None, tags, write.replaces)


def reject_secrets_in_write(write: MemoryWriteRequest, redact: Callable[[str], str]) -> None:
    """Check that a write contains no registered secret, and nothing with the form of one.

    :raises ToolError: ``denied`` otherwise, without the secret
    """
    parts = [reading for part in (write.text, write.key or "", *write.tags) for reading in _list_readings(part)]
    if any(redact(part) != part for part in parts):
        raise _secret_error("a registered secret")
    for part in parts:
        if (what := _find_secret_form(part)) is not None:
            raise _secret_error(what)


def reject_repeated_write(
    write: MemoryWriteRequest, recalled: RecalledTexts, instructions: Iterable[tuple[str, str]]
) -> None:
    """Check that a write repeats neither the instructions nor what this session recalled.

    :param instructions: texts that the model gets anyway, by their names
    :raises ToolError: ``invalid_input`` otherwise
    """
    if (id := recalled.find(write.text)) is not None:
        raise ToolError(
            f"The fact was not stored: this session recalled it from memory ({id}), so it is already known. Store only new "
            "facts, in your own words. To correct a stored fact, pass its ID as `replaces` with the new text.",
            kind="invalid_input",
        )
    for name, text in instructions:
        if _repeats(write.text, text):
            raise ToolError(
                f"The fact was not stored: it repeats the instructions in {name}, which every session reads. Store only facts "
                "that are not there.",
                kind="invalid_input",
            )


def read_instruction_files(workspace: Path) -> Iterator[tuple[str, str]]:
    """Yield the instruction files of a workspace and its repository, by path."""
    for folder in iterate_parent_repository_folders(workspace):
        for path in (folder / name for name in MANIFEST_KEYS):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
            except OSError:
                continue
            try:
                yield path.name, os.read(descriptor, _MOST_INSTRUCTION_BYTES).decode("utf-8", "replace")
            except OSError:
                continue
            finally:
                os.close(descriptor)


def find_untrusted_content_reason(reader: LogReader, session_id: str) -> str:
    """Return what a session's model saw that may not come from the user; empty if there is nothing.

    All that was ever in the session counts, since the model may still have it in its context. In doubt, it is untrusted.

    :raises sqlite3.Error: if the log cannot be read
    """
    for _ in range(_MOST_FORKS):
        rows = select_session_rows(reader.connection, "WHERE id = ?", (session_id,))
        if not rows:
            return "the session is unknown"
        if (why := _find_untrusted(reader, rows[0])) is not None:
            return why
        parent = rows[0].details.get("parent")
        if not isinstance(parent, str):
            return ""
        session_id = parent
    return "the session has too many ancestors"


def _find_untrusted(reader: LogReader, row: SessionRow) -> str | None:
    if row.parent_session is not None:
        return "a sub-agent stored it"
    if row.frontend == "mcp":
        return "the model of an MCP client stored it, and Handrail does not see what that model reads"
    for proposal in reader.records(session=row.id, kind="proposed", newest_first=True):
        if proposal.tool not in _TRUSTED_TOOLS:
            outcome = reader.find_outcome(proposal.call_id)
            if outcome is None or outcome.kind == "committed":
                return _describe_result(proposal, outcome)
        elif proposal.tool in ("memory.query", "memory.upsert"):  # the latter shows a fact that says nearly the same
            outcome = reader.find_outcome(proposal.call_id)
            if outcome is not None and (outcome.body is None or _get_untrusted_source(outcome) is not None):
                return "the session had recalled unconfirmed facts"
    return _find_foreign_message(reader.connection, row.id)


def _find_foreign_message(connection: sqlite3.Connection, session_id: str) -> str | None:
    sql = "SELECT 1 FROM record WHERE session = ? AND kinds = 'provider-tool-used' LIMIT 1"
    if connection.execute(sql, (session_id,)).fetchone() is not None:
        return "a tool of the model's provider had been used in the session"
    sql = "SELECT 1 FROM message WHERE session = ? AND instr(body, ?) > 0 LIMIT 1"
    for mark, why in _FOREIGN_PARTS.items():
        if connection.execute(sql, (session_id, mark)).fetchone() is not None:
            return why
    return None


def _describe_result(proposal: LoggedRecord, outcome: LoggedRecord | None) -> str:
    source = None if outcome is None else _get_untrusted_source(outcome)
    return (
        f"a result of {proposal.tool or 'a removed call'} was in view{'' if source is None else f' ({source[:200]})'}"
    )


def _get_untrusted_source(outcome: LoggedRecord) -> str | None:
    found: Any = outcome.body
    for name in ("result", "metadata", "untrusted_source"):
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None


def _list_readings(text: str) -> set[str]:
    """Return a text as it is, and as a model reads it: in plain letters, without marks and invisible characters."""
    plain = unicodedata.normalize("NFKC", text)
    return {text, "".join(one for one in plain if unicodedata.category(one) not in _UNREAD)}


def _find_secret_form(text: str) -> str | None:
    """Return what kind of secret a text seems to contain, or None."""
    if (kind := find_known_key_kind(text)) is not None:
        return f"text with the form of {kind}"
    if next(find_secrets_in_text_urls(text), None) is not None:
        return "a URL with a password or key"
    for found in _PASSWORD.finditer(text):
        value = found["value"].rstrip(".,;:!?)")
        plain = value.isalpha() and (value.islower() or value.istitle())
        if not (plain if found["how"] in ("is", "are") else is_ordinary_value(value)):
            return "a password or key"
    for word in re.findall(r"[^\s\"'`<>()\[\]{},;]+", text):
        if is_secret_value(word.strip(".:!?")):
            return "text with the form of a key"
    return None


def _secret_error(what: str) -> ToolError:
    return ToolError(
        f"The fact was not stored: it contains {what}. Memory never stores secrets. Store where the secret is kept instead, "
        "without its value.",
        kind="denied",
    )


def _repeats(text: str, instructions: str) -> bool:
    """Return whether instructions contain a text, or a paragraph that says nearly the same."""
    if _flatten(text) in _flatten(instructions):
        return True
    wanted = extract_trigrams(text)
    lines = instructions.splitlines()
    for start in range(len(lines)):
        for end in range(start + 1, min(start + 4, len(lines)) + 1):
            part = " ".join(line.strip(" >#*-\t") for line in lines[start:end])
            if len(part) > 2 * len(text) + 20:
                break
            found = extract_trigrams(part)
            if 2 * len(wanted & found) >= NEAR_DUPLICATE * (len(wanted) + len(found)):
                return True
    return False


def _flatten(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _make_valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\x00", " ")
