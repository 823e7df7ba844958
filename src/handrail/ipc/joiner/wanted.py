"""How a process that joined wants a session opened, now and with each next holder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from handrail.contract.doors.runtime import ClientContext
from handrail.contract.rules import Mode


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a session is opened, and opened again with the next holder."""

    headless: bool
    topic: str | None = None
    client: ClientContext | None = None
    agent: str | None = None
    """Where it is another than that of its process."""
    mode: Mode | None = None
    """Likewise."""
    shared: bool = False
    """Several clients share it."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "headless": self.headless,
            "topic": self.topic,
            "agent": self.agent,
            "mode": self.mode,
            "shared": self.shared,
            "client": None if self.client is None else asdict(self.client),
        }
