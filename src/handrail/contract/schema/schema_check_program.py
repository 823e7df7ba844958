"""The check of arguments by a schema, as a process with limits makes it: see :mod:`handrail.origins.bounded_program`.

The kernel starts the process if a check exceeds the budget of the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from handrail.contract.schema.argument_validation import compile_schema


def compute_values(question: Mapping[str, Any], data: bytes) -> Iterator[object]:
    """Yield whether the arguments match the schema, and then, if they do not, the problems.

    :param question: ``parameters``, the schema, and ``arguments``
    :param data: not used
    """
    schema, arguments = compile_schema(question["parameters"]), question["arguments"]
    fits = schema.matches_without_budget(arguments)
    yield fits
    if not fits:
        yield schema.list_problems_without_budget(arguments)
