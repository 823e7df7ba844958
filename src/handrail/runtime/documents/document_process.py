"""The process that extracts the text of one document: its limits, its question, and its answer.

The process gets a line of JSON and then the document as its input. It prints one JSON value a line. The system ends it at a
limit, so lines may be missing.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module

from handrail.origins.bounded_program import set_process_limits


def main() -> None:
    """Answer the question on the standard input. The arguments are the module and the limits."""
    set_process_limits(int(sys.argv[2]), int(sys.argv[3]))
    logging.disable(logging.CRITICAL)  # a hostile document causes any number of warnings
    try:
        question = json.loads(sys.stdin.buffer.readline())
        for value in import_module(sys.argv[1]).extract_values(question, sys.stdin.buffer.read()):
            _print_value(value)
    except ImportError:
        _print_value({"error": "missing"})
    except (MemoryError, RecursionError):
        _print_value({"error": "limit"})
    except Exception as error:
        _print_value({"error": "failed", "text": f"{type(error).__name__}: {error}"[:300]})


def _print_value(value: dict[str, object]) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()
