"""A session's messages, kept in the store without any registered secret."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from handrail.arbiter.redaction import Redactor
from handrail.contract.history import Entry
from handrail.store.messages import Messages


class SessionHistory:
    """Implements :class:`~handrail.contract.history.History` for one session.

    :param clock: wall-clock time in nanoseconds
    """

    def __init__(
        self, session_id: str, messages: Messages, redactor: Redactor, *, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._session_id = session_id
        self._messages = messages
        self._redactor = redactor
        self._clock = clock

    async def read(self) -> Sequence[Entry]:
        return await self._messages.read(self._session_id)

    async def keep(self, entries: Sequence[Entry]) -> None:
        if self._redactor.active:
            entries = [(position, self._without_secrets(data)) for position, data in entries]
        await self._messages.keep(self._session_id, entries, self._clock())

    def _without_secrets(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        plain: dict[str, Any] = self._redactor.value(dict(data))
        parts: object = data.get("parts")
        if isinstance(parts, list):
            # What its provider signed would no longer be what was signed: such a block goes as a whole.
            both = zip(cast("list[Any]", parts), cast("list[Any]", plain["parts"]), strict=True)
            kept = [now for was, now in both if now is was or "kept" not in was]
            plain = {**plain, "parts": kept}
        return plain
