"""A session's messages, kept in the store without any registered secret."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from handrail.arbiter.calls.call import Lane
from handrail.arbiter.secrets.redaction import Redactor
from handrail.contract.doors.history import Entry
from handrail.record.artifacts import Artifacts
from handrail.record.log import CommitLog, Record
from handrail.session.past.provided import split
from handrail.session.skills.skills import SessionSkills
from handrail.store.database.awaiting import Taken
from handrail.store.tables.messages import Messages


class SessionHistory:
    """Implements :class:`~handrail.contract.doors.history.History` for one session.

    :param lane: its calls, which stand behind what was said before them; None where it is not open
    :param clock: wall-clock time in nanoseconds
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
        plain, files = split(content)  # before what would cut a file's text into pieces
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
            # What its provider signed would no longer be what was signed: such a block goes as a whole.
            both = zip(cast("list[Any]", parts), cast("list[Any]", plain["parts"]), strict=True)
            kept = [now for was, now in both if now is was or "kept" not in was]
            plain = {**plain, "parts": kept}
        return plain
