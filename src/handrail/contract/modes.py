"""The names of the modes: how much a session does without asking. Their meanings are in :mod:`handrail.policy.rules.modes`."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["plan", "ask", "accept-edits", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The narrowest first."""
DEFAULT_MODE: Mode = "ask"
