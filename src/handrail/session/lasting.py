"""The stored part of a session: its messages, the output of provider tools, and loading or forking it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from handrail.arbiter.call import Lane
from handrail.arbiter.output.redaction import Redactor
from handrail.contract.doors.memory import Entry
from handrail.contract.errors import HandrailError, LogUnavailable, UsageError
from handrail.policy.rules.rules import Rule, parse_rule
from handrail.record.artifacts import Artifacts
from handrail.record.log import CommitLog, Record
from handrail.runtime.files.files import SeenFiles
from handrail.session.skills import SessionSkills
from handrail.store.database.writer import Taken
from handrail.store.opening import Store
from handrail.store.tables.messages import Messages
from handrail.store.tables.sessions import SessionRow

# Output of a provider's own tool, as it is stored: its JSON, and the files that it carries as base64.

_DATA_URL = re.compile(r"data:([A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100})(?:;[^,;]{0,100})*;base64,")
_MAX_DEPTH = 64
File = tuple[bytes, str]
"""The content of a file, and its media type."""


def split(content: Any) -> tuple[Any, list[File]]:
    """Replace each file in ``content`` by ``{"file": n, "media_type", "bytes"}``, and return the files."""
    files: list[File] = []
    return _walk(content, files, 0), files


def _walk(value: Any, files: list[File], depth: int) -> Any:
    if isinstance(value, str):
        found = _DATA_URL.match(value)
        taken = None if found is None else _taken(value[found.end() :], found[1], files)
        return value if taken is None else taken
    if depth >= _MAX_DEPTH:
        return "(nested too deeply to be stored)" if isinstance(value, (dict, list)) else value
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value)
        data, media_type = inner.get("data"), inner.get("media_type")
        if inner.get("type") == "base64" and isinstance(data, str) and isinstance(media_type, str):
            taken = _taken(data, media_type, files)
            if taken is not None:
                return taken
        return {key: _walk(one, files, depth + 1) for key, one in inner.items()}
    if isinstance(value, list):
        return [_walk(one, files, depth + 1) for one in cast("list[Any]", value)]
    return value


def _taken(text: str, media_type: str, files: list[File]) -> dict[str, Any] | None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    files.append((data, media_type))
    return {"file": len(files), "media_type": media_type, "bytes": len(data)}


# The messages of a session, stored without registered secrets.


class SessionHistory:
    """The stored messages of one session, without registered secrets.

    Implements :class:`~handrail.contract.doors.memory.History`.

    :param lane: the session's calls, which start after the messages before them are stored; None if it is not open
    :param clock: returns wall-clock time in nanoseconds
    """

    def __init__(
        self,
        session_id: str,
        messages: Messages,
        redactor: Redactor,
        log: CommitLog,
        artifacts: Artifacts,
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

    async def read(self) -> Sequence[Entry]:
        return await self._messages.read(self._session_id)

    def keep(self, entries: Sequence[Entry]) -> Taken:
        if self._redactor.active:
            entries = [(position, self._without_secrets(data)) for position, data in entries]
        kept = self._messages.keep(self._session_id, entries, self._clock())
        if self._lane is not None:
            self._lane.kept = kept
        return kept

    async def attached(self, data: bytes, media_type: str) -> str:
        return await asyncio.to_thread(self._artifacts.put, self._redactor.binary(data), media_type)

    async def attachment(self, ref: str) -> bytes:
        return (await asyncio.to_thread(self._artifacts.get, ref)).data

    async def compacted(self, told: Mapping[str, Any]) -> None:
        self._log.append([Record("compacted", self._session_id, "", self._redactor.value(dict(told)))])
        if self._lane is not None and isinstance(skills := self._lane.skills, SessionSkills):
            await skills.forget_given()

    async def provided(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        plain, files = split(content)  # before redaction, which would change a file's base64 text
        plain, redact = self._redactor.value(plain), self._redactor.binary
        whole = json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass")
        stored = [(whole, "application/json"), *((redact(data), media_type) for data, media_type in files)]

        def keep() -> list[str]:
            return [self._artifacts.put(data, media_type) for data, media_type in stored]

        artifacts = await asyncio.to_thread(keep)
        topic = None if self._lane is None else self._lane.around.topic
        plainly = dict(about) if topic is None else {**about, "topic": topic}
        told = {**self._redactor.value(plainly), "artifacts": artifacts}
        await self._log.commit([Record("provided", self._session_id, "", told)])
        return artifacts

    def _without_secrets(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        plain: dict[str, Any] = self._redactor.value(dict(data))
        parts: object = data.get("parts")
        if isinstance(parts, list):
            # A redacted block would not match its provider's signature, so the whole block is left out.
            both = zip(cast("list[Any]", parts), cast("list[Any]", plain["parts"]), strict=True)
            kept = [now for was, now in both if now is was or "kept" not in was]
            plain = {**plain, "parts": kept}
        return plain


MAX_TOPIC = 500
"""The longest topic, in characters. The record of each call contains it."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """The stored sessions of one workspace, in the process that holds it.

    :param redactor: removes registered secrets from everything that is stored
    """

    store: Store
    redactor: Redactor
    log: CommitLog

    def row(self, opened: SessionRow) -> SessionRow:
        """Return the row by which a session is stored when it is opened.

        Stored values stay unless the opened row replaces them. The topic is redacted and cut to ``MAX_TOPIC``.

        :raises UsageError: if the session belongs to a sub-agent or to another agent
        """
        if opened.topic is not None:
            opened = replace(opened, topic=self.redactor.head(opened.topic, MAX_TOPIC))
        known = self.store.sessions.get(opened.id)
        if known is None or known.closed_ns is not None:
            return opened
        if known.under is not None:  # opened directly, it would lose the limits of its parent
            raise UsageError(
                f"Session {opened.id} belongs to a sub-agent of call {known.under_call} and cannot be opened directly. "
                "Fork it and continue with the fork."
            )
        if known.agent != opened.agent:
            raise UsageError(
                f"Session {opened.id} belongs to agent {known.agent!r}, not to {opened.agent!r}. "
                f"Open it with agent {known.agent!r}, or open another session."
            )
        topic = known.topic if opened.topic is None else opened.topic
        return replace(opened, topic=topic, details={**known.details, **opened.details})

    def rules(self, session_id: str) -> list[Rule]:
        """Return the rules from the user's answers "for this session".

        :raises LogUnavailable: if the database cannot be read, or an unreadable rule may be one that denies
        """
        found: list[Rule] = []
        for text in self.store.rules.of(session_id):
            try:
                found.append(parse_rule(text, scope="session", source="answered for this session"))
            except ValueError as error:
                if not text.startswith("allow "):
                    raise LogUnavailable(
                        f"A stored rule of session {session_id} cannot be read: {error}. Open another session."
                    ) from None
        return found

    def seen(self, session_id: str) -> SeenFiles:
        """Return the files that the session has read. Further reads are stored too.

        :raises LogUnavailable: if the database cannot be read
        """
        hashes, redact = self.store.seen, self.redactor.text

        def keep(path: str, sha256: str | None) -> None:
            if redact(path) == path:  # a path that contains a secret is not stored, so the file has to be read again
                hashes.note(session_id, path, sha256)

        return SeenFiles(known=hashes.of(session_id), keep=keep)

    def history(self, session_id: str, lane: Lane | None = None) -> SessionHistory:
        """Return the stored conversation of a session.

        :param lane: the session's calls, if it is open
        """
        artifacts = Artifacts(self.store.folders.artifacts)
        return SessionHistory(session_id, self.store.messages, self.redactor, self.log, artifacts, lane=lane)

    def last_turn(self, session_id: str, recorded: int) -> int:
        """Return the highest turn of the session's calls, in the log or in the last stored replies.

        A reply is durable before its calls are, and no later call may take one of their ids.

        :param recorded: the highest turn in the log
        """
        for parts in (data.get("parts") for data in self.store.messages.last(session_id, 3)):
            for part in cast("list[object]", parts) if isinstance(parts, list) else []:
                known = cast("dict[str, object]", part).get("id") if isinstance(part, dict) else None
                turn = str(known).removeprefix(f"{session_id}/").partition(".")[0]
                if turn.isascii() and turn.isdigit() and len(turn) < 10:
                    recorded = max(recorded, int(turn))
        return recorded

    async def suspend(self, session_id: str) -> None:
        """Record that no process has the session open.

        :raises LogUnavailable: if this cannot be made durable; the session is suspended anyway when this process ends
        """
        await self.store.sessions.suspend(session_id, time.time_ns())

    def existing(self, session_id: str) -> SessionRow:
        """Return the row of a session that is not closed.

        :raises UsageError: if the session does not exist or is closed
        """
        row = self.store.sessions.get(session_id)
        if row is None:
            raise UsageError(f"Session {session_id[:80]!r} does not exist. List the sessions with `handrail sessions`.")
        if row.closed_ns is not None:
            raise UsageError(f"Session {session_id} is closed, and its conversation is deleted. Open another session.")
        return row

    async def fork(self, parent_id: str, forked_id: str, *, face: str) -> Mapping[str, Any]:
        """Store a copy of a session under another id, and return its details.

        The copy has the conversation, the stored outputs, the values of tools and the files that were read. Grants, answered
        rules and scratch folders are not copied. A fork that exists already and was never opened is left unchanged.

        :raises UsageError: if the session does not exist or is closed, or ``forked_id`` is in use
        :raises LogUnavailable: if the copy cannot be made durable
        """
        parent = self.existing(parent_id)
        if (there := self.store.sessions.get(forked_id)) is not None:
            if there.details.get("parent") == parent_id and there.holder is there.closed_ns is None:
                return there.details
            raise UsageError(f"Session {forked_id[:80]!r} exists already. Choose another id for the fork.")
        now = time.time_ns()
        details = {**parent.details, "parent": parent_id}
        forked = replace(
            parent, id=forked_id, opened_ns=now, used_ns=now, face=face, details=details, under=None, under_call=None
        )
        await self.store.database.writer.flush()  # copies everything up to here, including queued writes
        folders = self.store.folders
        try:
            await asyncio.to_thread(folders.fork_output, parent_id, forked_id)
            await self.store.sessions.fork(
                parent_id, forked, (folders.in_output(parent_id), folders.in_output(forked_id))
            )
        except HandrailError:
            await asyncio.to_thread(folders.discard, forked_id)
            raise
        return details
