"""The shipped watchdogs, which look for exfiltrated data, outgoing secrets and calls that always fail."""

from __future__ import annotations

from handrail.policy.watchdogs.shipped import Exfiltration, OutgoingSecrets, RepeatedFailures

__all__ = ["Exfiltration", "OutgoingSecrets", "RepeatedFailures"]
