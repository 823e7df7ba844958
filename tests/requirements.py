"""The behaviours that work, one sentence each; a row enters when a test shows it.

A letter after the number (``P-05a``) names the part of a row that is done while the rest is not.
"""

from __future__ import annotations

ROWS: dict[str, str] = {}
"""Row id to what can be seen to hold."""
