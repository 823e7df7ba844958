"""The stored part of a session: its messages, the output of provider tools, and loading or forking it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from handrail.arbiter.call_state import Lane
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.errors import HandrailError, LogUnavailable, UsageError
from handrail.contract.permission_modes import Mode
from handrail.contract.services.history_and_skill_services import HistoryEntry
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.rules.rules_and_modes import Rule, parse_rule
from handrail.record.artifacts import ArtifactStore
from handrail.record.commit_log import CommitLog, Record
from handrail.runtime.files.rooted_file_service import SeenFileHashes
from handrail.session.session_skills import SessionSkills
from handrail.store.database.group_writer import QueuedWrite
from handrail.store.tables.session_messages import SessionMessageTable
from handrail.store.tables.session_tables import SessionRow
from handrail.store.workspace_store import WorkspaceStore

# Output of a provider's own tool, as it is stored: its JSON, and the files that it carries as base64.

_DATA_URL = compile_regex_lazily(
    r"data:([A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100})(?:;[^,;]{0,100})*;base64,"
)
_MAX_DEPTH = 64
StoredFile = tuple[bytes, str]
"""The content of a file, and its media type."""


def extract_embedded_files(content: Any) -> tuple[Any, list[StoredFile]]:
    """Replace each file in ``content`` by ``{"file": n, "media_type", "bytes"}``, and return the files."""
    files: list[StoredFile] = []
    return _extract_from(content, files, 0), files


def _extract_from(value: Any, files: list[StoredFile], depth: int) -> Any:
    if isinstance(value, str):
        found = _DATA_URL.match(value)
        taken = None if found is None else _extract_file(value[found.end() :], found[1], files)
        return value if taken is None else taken
    if depth >= _MAX_DEPTH:
        return "(nested too deeply to be stored)" if isinstance(value, (dict, list)) else value
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value)
        data, media_type = inner.get("data"), inner.get("media_type")
        if inner.get("type") == "base64" and isinstance(data, str) and isinstance(media_type, str):
            taken = _extract_file(data, media_type, files)
            if taken is not None:
                return taken
        return {key: _extract_from(one, files, depth + 1) for key, one in inner.items()}
    if isinstance(value, list):
        return [_extract_from(one, files, depth + 1) for one in cast("list[Any]", value)]
    return value


def _extract_file(text: str, media_type: str, files: list[StoredFile]) -> dict[str, Any] | None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    files.append((data, media_type))
    return {"file": len(files), "media_type": media_type, "bytes": len(data)}


# The messages of a session, stored without registered secrets.


class SessionHistory:
    """The stored messages of one session, without registered secrets.

    Implements :class:`~handrail.contract.services.history_and_skill_services.ConversationHistory`.

    :param lane: the session's calls, which start after the messages before them are stored; None if it is not open
    :param clock: returns wall-clock time in nanoseconds
    """

    def __init__(
        self,
        session_id: str,
        messages: SessionMessageTable,
        redactor: SecretRedactor,
        log: CommitLog,
        artifacts: ArtifactStore,
        *,
        lane: Lane | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._log = log
        self._artifacts = artifacts
        self._lane = lane
        self._session_id = session_id
        self._messages = messages
        self._redactor = redactor
        self._clock = clock

    async def read_stored_messages(self) -> Sequence[HistoryEntry]:
        return await self._messages.read(self._session_id)

    def store_messages(self, entries: Sequence[HistoryEntry]) -> QueuedWrite:
        if self._redactor.active:
            entries = [(position, self._without_secrets(data)) for position, data in entries]
        kept = self._messages.queue_message_writes(self._session_id, entries, self._clock())
        if self._lane is not None:
            self._lane.last_message_write = kept
        return kept

    async def store_attachment(self, data: bytes, media_type: str) -> str:
        return await asyncio.to_thread(self._artifacts.put, self._redactor.redact_bytes(data), media_type)

    async def load_attachment(self, ref: str) -> bytes:
        return (await asyncio.to_thread(self._artifacts.get, ref)).data

    async def record_compaction(self, summary: Mapping[str, Any]) -> None:
        self._log.record_soon([Record("compacted", self._session_id, "", self._redactor.redact_json(dict(summary)))])
        if self._lane is not None and isinstance(skills := self._lane.skills, SessionSkills):
            await skills.reset_loaded_skills()

    async def record_turn(self, usage: Mapping[str, Any]) -> None:
        self._log.record_soon([Record("turn-finished", self._session_id, "", self._redactor.redact_json(dict(usage)))])

    async def record_provider_tool_use(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        plain, files = extract_embedded_files(content)  # before redaction, which would change a file's base64 text
        plain, redact = self._redactor.redact_json(plain), self._redactor.redact_bytes
        whole = json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass")
        stored = [(whole, "application/json"), *((redact(data), media_type) for data, media_type in files)]

        def keep() -> list[str]:
            return [self._artifacts.put(data, media_type) for data, media_type in stored]

        artifacts = await asyncio.to_thread(keep)
        topic = None if self._lane is None else self._lane.environment.topic
        plainly = dict(about) if topic is None else {**about, "topic": topic}
        fields = {**self._redactor.redact_json(plainly), "artifacts": artifacts}
        await self._log.commit([Record("provider-tool-used", self._session_id, "", fields)])
        return artifacts

    def _without_secrets(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        plain: dict[str, Any] = self._redactor.redact_json(dict(data))
        parts: object = data.get("parts")
        if isinstance(parts, list):
            # A redacted block would not match its provider's signature, so the whole block is left out.
            both = zip(cast("list[Any]", parts), cast("list[Any]", plain["parts"]), strict=True)
            kept = [now for was, now in both if now is was or "kept" not in was]
            plain = {**plain, "parts": kept}
        return plain


MAX_TOPIC = 500
"""The longest topic, in characters. The record of each call contains it."""


class SessionStore(Struct, frozen=True):
    """The stored sessions of one workspace, in the process that holds it.

    :param redactor: removes registered secrets from everything that is stored
    """

    store: WorkspaceStore
    redactor: SecretRedactor
    log: CommitLog

    def merge_row(self, opened: SessionRow) -> SessionRow:
        """Return the row by which a session is stored when it is opened.

        Stored values stay unless the opened row replaces them. The topic is redacted and cut to ``MAX_TOPIC``.

        :raises UsageError: if the session belongs to a sub-agent or to another agent
        """
        if opened.topic is not None:
            opened = replace(opened, topic=self.redactor.redact_text_head(opened.topic, MAX_TOPIC))
        if (known := self.store.sessions.get(opened.id)) is None or known.closed_ns is not None:
            return opened
        if known.parent_session is not None:  # opened directly, it would lose the limits of its parent
            raise UsageError(
                f"Session {opened.id} belongs to a sub-agent of call {known.parent_call} and cannot be opened directly. "
                "Fork it and continue with the fork."
            )
        if known.agent != opened.agent:
            raise UsageError(
                f"Session {opened.id} belongs to agent {known.agent!r}, not to {opened.agent!r}. "
                f"Open it with agent {known.agent!r}, or open another session."
            )
        topic = known.topic if opened.topic is None else opened.topic
        former = {key: value for key, value in known.details.items() if key != "client"}  # another client may open it
        return replace(opened, topic=topic, details={**former, **opened.details})

    def load_session_rules(self, session_id: str) -> list[Rule]:
        """Return the rules from the user's answers "for this session".

        :raises LogUnavailable: if the database cannot be read, or an unreadable rule may be one that denies
        """
        found: list[Rule] = []
        for text in self.store.session_rules.list_rules(session_id):
            try:
                found.append(parse_rule(text, scope="session", source="answered for this session"))
            except ValueError as error:
                if not text.startswith("allow "):
                    raise LogUnavailable(
                        f"A stored rule of session {session_id} cannot be read: {error}. Open another session."
                    ) from None
        return found

    def load_seen_files(self, session_id: str) -> SeenFileHashes:
        """Return the files that the session has read. Further reads are stored too.

        :raises LogUnavailable: if the database cannot be read
        """
        hashes, redact = self.store.read_hashes, self.redactor.redact_text

        def keep(path: str, sha256: str | None) -> None:
            if redact(path) == path:  # a path that contains a secret is not stored, so the file has to be read again
                hashes.queue_file_hash_write(session_id, path, sha256)

        return SeenFileHashes(known=hashes.list_path_hash_pairs(session_id), keep=keep)

    def open_history(self, session_id: str, lane: Lane | None = None) -> SessionHistory:
        """Return the stored conversation of a session.

        :param lane: the session's calls, if it is open
        """
        artifacts = ArtifactStore(self.store.folders.artifact_folder)
        return SessionHistory(session_id, self.store.messages, self.redactor, self.log, artifacts, lane=lane)

    def find_last_turn(self, session_id: str, recorded: int) -> int:
        """Return the highest turn of the session's calls, in the log or in the last stored replies.

        A reply is durable before its calls are, and no later call may take one of their ids.

        :param recorded: the highest turn in the log
        """
        for parts in (data.get("parts") for data in self.store.messages.read_latest_messages(session_id, 3)):
            for part in cast("list[object]", parts) if isinstance(parts, list) else []:
                known = cast("dict[str, object]", part).get("id") if isinstance(part, dict) else None
                turn = str(known).removeprefix(f"{session_id}/").partition(".")[0]
                if turn.isascii() and turn.isdigit() and len(turn) < 10:
                    recorded = max(recorded, int(turn))
        return recorded

    def record_mode(self, session_id: str, mode: Mode, before: Mode) -> None:
        """Record soon that a session has another mode. A reopened session keeps it if it is narrower."""
        self.store.sessions.record_mode(session_id, mode, before)
        body = {"mode": mode, "previous_mode": before}
        self.log.record_soon([Record("mode-changed", session_id, "", body)])

    async def record_suspended(self, session_id: str) -> None:
        """Record that no process has the session open.

        :raises LogUnavailable: if this cannot be made durable; the session is suspended anyway when this process ends
        """
        await self.store.sessions.record_suspended(session_id, time.time_ns())

    def require_unclosed_session(self, session_id: str) -> SessionRow:
        """Return the row of a session that is not closed.

        :raises UsageError: if the session does not exist or is closed
        """
        if (row := self.store.sessions.get(session_id)) is None:
            raise UsageError(f"Session {session_id[:80]!r} does not exist. List the sessions with `handrail sessions`.")
        if row.closed_ns is not None:
            raise UsageError(f"Session {session_id} is closed, and its conversation is deleted. Open another session.")
        return row

    async def fork(self, parent_id: str, forked_id: str, *, frontend: str) -> Mapping[str, Any]:
        """Store a copy of a session under another id, and return its details.

        The copy has the conversation, the stored outputs, the values of tools and the files that were read. Grants, answered
        rules and scratch folders are not copied. A fork that exists already and was never opened is left unchanged.

        :raises UsageError: if the session does not exist or is closed, or ``forked_id`` is in use
        :raises LogUnavailable: if the copy cannot be made durable
        """
        parent = self.require_unclosed_session(parent_id)
        if (there := self.store.sessions.get(forked_id)) is not None:
            if there.details.get("parent") == parent_id and there.holder is there.closed_ns is None:
                return there.details
            raise UsageError(f"Session {forked_id[:80]!r} already exists. Choose another id for the fork.")
        now = time.time_ns()
        details = {**parent.details, "parent": parent_id}
        forked = replace(
            parent,
            id=forked_id,
            opened_ns=now,
            used_ns=now,
            frontend=frontend,
            details=details,
            parent_session=None,
            parent_call=None,
        )
        await self.store.database.writer.flush()  # copies everything up to here, including queued writes
        folders = self.store.folders
        try:
            await asyncio.to_thread(folders.link_output_for_fork, parent_id, forked_id)
            await self.store.sessions.fork(
                parent_id,
                forked,
                (folders.make_output_path_fragment(parent_id), folders.make_output_path_fragment(forked_id)),
            )
        except HandrailError:
            await asyncio.to_thread(folders.remove_session_files, forked_id)
            raise
        return details
