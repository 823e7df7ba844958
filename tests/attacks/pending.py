"""Attacks that do not hold, each with what is missing. Empty is what this file is meant to be."""

from __future__ import annotations

PENDING: dict[str, str] = {}
