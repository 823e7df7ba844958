"""How an error message quotes a text that somebody sent: whole, or not at all.

Where it is made nobody knows the registered secrets. They are taken out of the finished message, by their forms; what a cut
leaves of one has none of these.
"""

from __future__ import annotations


def excerpt(text: str, most: int) -> str:
    """``text`` in quotes, or its length where it is longer than ``most`` characters."""
    return repr(text) if len(text) <= most else f"a text of {len(text):,} characters"
