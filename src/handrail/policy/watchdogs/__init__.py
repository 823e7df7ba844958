"""The watchdogs that ship: what looks like carrying data out, secrets on their way out, and calls that only ever fail."""

from __future__ import annotations

from handrail.policy.watchdogs.exfiltration import Exfiltration
from handrail.policy.watchdogs.outgoing import OutgoingSecrets
from handrail.policy.watchdogs.repeats import RepeatedFailures

__all__ = ["Exfiltration", "OutgoingSecrets", "RepeatedFailures"]
