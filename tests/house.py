"""The exceptions from the rules of :mod:`tests.test_house`. Each list may only become shorter."""

from __future__ import annotations

CIRCLES: tuple[frozenset[str], ...] = ()
"""Files that import each other."""

FULL: frozenset[str] = frozenset()
"""Folders with more files than a reader takes in."""

LONG: frozenset[str] = frozenset()
"""Files with more lines than one thing should need."""

SMALL: frozenset[str] = frozenset(("frontends.acp.terminal_viewer",))
"""Small files that one neighbour alone imports, and that could be a part of it."""
