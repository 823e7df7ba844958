"""``python -m handrail.faces.cli``: the same as ``handrail``."""

from __future__ import annotations

from handrail.faces.cli import main

main()
