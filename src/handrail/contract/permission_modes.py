"""The names of the modes, which say how much a session does without approval.

:mod:`handrail.policy.rules.rules_and_modes` defines their meanings. The command line offers the names without loading what checks rules.
"""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["plan", "ask", "accept-edits", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The modes, the narrowest first."""
DEFAULT_MODE: Mode = "ask"
