"""The watchdogs that ship: what looks like carrying data out, secrets on their way out, and calls that only ever fail."""

from __future__ import annotations

from handrail.policy.watchdogs.shipped import Exfiltration, OutgoingSecrets, RepeatedFailures

__all__ = ["Exfiltration", "OutgoingSecrets", "RepeatedFailures"]
