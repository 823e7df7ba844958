"""Attacks that do not hold, each with what is missing. Empty is what this file is meant to be."""

from __future__ import annotations

PENDING: dict[str, str] = {
    "shared memory without a name": "the limits of a process do not count shared memory, and cgroups are root's",
}
