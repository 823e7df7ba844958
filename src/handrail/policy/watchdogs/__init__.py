"""The shipped watchdogs, which look for exfiltrated data, outgoing secrets and calls that always fail."""

from __future__ import annotations

from handrail.policy.watchdogs.builtin_watchdogs import (
    ExfiltrationWatchdog,
    OutgoingSecretsWatchdog,
    RepeatedFailuresWatchdog,
)

__all__ = ["ExfiltrationWatchdog", "OutgoingSecretsWatchdog", "RepeatedFailuresWatchdog"]
