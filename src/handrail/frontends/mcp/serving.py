"""The operator's settings for serving MCP clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Discovery = Literal["core", "all"]


@dataclass(frozen=True, slots=True)
class Serving:
    """How clients are served.

    :param discovery: which tools are listed: the core and the ways to the rest, or all
    :param wait_s: how long an approval or a question may keep a request of the older era open: it is parked then, before
        the client gives the request up and so the call, which most do after a minute
    :param hold_s: how long a call of the stateless era is held for its client to come back
    :param task_after_s: after which a running call of a promotable tool is answered with a task, where its client takes one
    :param headless: nobody is asked, whatever clients say that they can
    :param most_guests: sessions of the stateless era at once
    :param most_held: calls over all clients that wait for these to come back
    :param idle_s: after which a session of the stateless era is closed that nobody has used
    """

    discovery: Discovery = "core"
    wait_s: float = 50.0
    hold_s: float = 600.0
    task_after_s: float = 10.0
    headless: bool = False
    most_guests: int = 1_000
    most_held: int = 1_000
    idle_s: float = 1_800.0
