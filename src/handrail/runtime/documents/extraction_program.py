"""A program that extracts the text of one web page in a process with its own limits.

The kernel starts this with ``python -c``, in a sandbox without files and network where there is one. It reads a line of
JSON and the page from its input, and prints one JSON object. The system ends the process at a limit.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CPU_SECONDS = 2
"""Processor time of one extraction, start-up included."""
MEMORY_MIB = 1024
"""Address space of the process."""


def main() -> None:
    """Extract the text of the page on the standard input and print it."""
    import resource  # the kernel imports this module also on systems without it

    from handrail.runtime.documents.page_text import decode_page, extract_page_text, strip_tags

    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY_MIB * 1024 * 1024,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    head: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    page = decode_page(sys.stdin.buffer.read(), head["charset"])
    if head["only_strip_tags"]:
        answer: dict[str, Any] = {"text": strip_tags(page), "part": "whole"}
    else:
        answer = extract_page_text(page, head["url"])._asdict()
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=True).encode())
