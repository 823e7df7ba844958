"""The policy: the decision whether a call may run.

This package exports the API for authors of watchdogs: the call that a watchdog receives, and its decisions. Each name loads on
first use. Everything outside ``__all__`` is private by convention, the modules included.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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

_HOME = {
    "ExternalWatchdog": "policy.watchdogs.api",
    "WatchdogDecision": "policy.watchdogs.api",
    "Watchdog": "policy.watchdogs.api",
    "WatchdogCall": "policy.watchdogs.api",
    "allow": "policy.watchdogs.api",
    "ask": "policy.watchdogs.api",
    "deny": "policy.watchdogs.api",
}

__all__ = [
    "ExternalWatchdog",
    "Watchdog",
    "WatchdogCall",
    "WatchdogDecision",
    "allow",
    "ask",
    "deny",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
