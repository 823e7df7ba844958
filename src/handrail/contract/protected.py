"""The one file of a workspace that no tool may write, whatever rules say: it holds the workspace's own rules."""

from __future__ import annotations

import unicodedata

WORKSPACE_FILE = "handrail.toml"
"""Directly in the workspace's root; what a person decides there, no call changes."""


def protected(relative: str) -> bool:
    """Whether a path relative to the workspace's root is that file, on any file system.

    Also as a file system may read it that ignores letter case, invisible characters, trailing dots or blanks, or
    takes what follows a colon for a stream of the file.
    """
    if relative == WORKSPACE_FILE:
        return True
    if "/" in relative or "\\" in relative:
        return False
    plain = "".join(c for c in unicodedata.normalize("NFKC", relative) if unicodedata.category(c) not in ("Cf", "Mn"))
    return plain.partition(":")[0].casefold().rstrip(". ") == WORKSPACE_FILE


def refusal(shown: str) -> str:
    """Why a write to it is refused, for the model."""
    return (
        f"{shown} holds the workspace's rules and settings: no tool can write it and no rule allows it. "
        "Only a person changes it; tell them what you would change"
    )
