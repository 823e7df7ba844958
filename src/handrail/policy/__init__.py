"""The policy: the decision whether a call may run.

This package exports the API for authors of watchdogs: the call that a watchdog receives, and its decisions. Each name loads on
first use. Everything outside ``__all__`` is private by convention, the modules included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.contract import make_lazy_exports

if TYPE_CHECKING:
    from handrail.policy.watchdogs.api import (
        ExternalWatchdog,
        Watchdog,
        WatchdogCall,
        WatchdogDecision,
        allow,
        ask,
        deny,
    )

__all__ = [
    "ExternalWatchdog",
    "Watchdog",
    "WatchdogCall",
    "WatchdogDecision",
    "allow",
    "ask",
    "deny",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__, {"policy.watchdogs.api": "ExternalWatchdog Watchdog WatchdogCall WatchdogDecision allow ask deny"}
)
