"""``python -m handrail.frontends.cli``: the same as ``handrail``."""

from __future__ import annotations

from handrail.frontends.cli import main

main()
