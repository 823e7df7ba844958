"""Attacks that still succeed, each with the missing defence. The list should be empty."""

from __future__ import annotations

PENDING: dict[str, str] = {}
