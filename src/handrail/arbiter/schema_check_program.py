"""A program that checks arguments by a schema in a process with its own limits.

The kernel starts this with ``python -c`` if a check exceeds the budget of the event loop. The process reads one JSON
object from its input: ``parameters`` and ``arguments``. It prints whether the arguments fit, and the problems on a second
line. The system ends the process at a limit, so a line may be missing.
"""

from __future__ import annotations

import json
import sys

from handrail.contract.schema.argument_validation import compile_schema
from handrail.origins.bounded_program import set_process_limits

CPU_SECONDS = 2
"""Processor time of the process, start-up (0.2 s) included."""
MEMORY_MIB = 512
"""Address space of the process."""


def main() -> None:
    """Check the arguments on the standard input and print the answer."""
    set_process_limits(CPU_SECONDS, MEMORY_MIB)
    question = json.load(sys.stdin)
    schema, arguments = compile_schema(question["parameters"]), question["arguments"]
    fits = schema.fits_at_any_cost(arguments)
    sys.stdout.write(f"{json.dumps(fits)}\n")
    sys.stdout.flush()
    if not fits:
        sys.stdout.write(f"{json.dumps(schema.list_problems_at_any_cost(arguments))}\n")
