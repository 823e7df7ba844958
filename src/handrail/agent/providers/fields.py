"""Reads fields of the SDKs' objects, which are built from what a server sent without any check."""

from __future__ import annotations


def get(value: object, name: str) -> object:
    """The field, or None where it is missing."""
    return getattr(value, name, None)


def text(value: object, name: str) -> str | None:
    """The field if it is a text of at least one character."""
    found = get(value, name)
    return found if isinstance(found, str) and found else None


def count(value: object, name: str) -> int:
    """The field if it is a positive integer, else 0."""
    found = get(value, name)
    return found if isinstance(found, int) and found > 0 else 0
