"""What is found out of a spec once, however many generations have it: its faults, its compiled schema, its hash.

A spec never changes. Most tools of a generation are those of the one before, so the next one is mostly looked up.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from handrail.contract.schema import InvalidSchema, Schema, compile_schema
from handrail.contract.spec import ToolSpec, faults_in


@dataclass(frozen=True, slots=True)
class Checked:
    """:param problems: ``(place, problem)``, all of them; with any, there is no schema to be used"""

    problems: tuple[tuple[str, str], ...]
    schema: Schema | None
    definition_hash: str


_known: dict[int, tuple[weakref.ref[ToolSpec], Checked]] = {}
"""By the identity of a spec that somebody still holds."""


def checked(spec: ToolSpec) -> Checked:
    """Everything about ``spec`` that no other tool and no machine changes. Safe in any thread."""
    found = _known.get(id(spec))
    if found is not None and found[0]() is spec:
        return found[1]
    problems = faults_in(spec)
    schema: Schema | None = None
    try:
        schema = compile_schema(spec.parameters)
    except InvalidSchema as error:
        problems += [(f"llm.parameters.{where}".rstrip("."), problem) for where, problem in error.problems]
    made = Checked(tuple(problems), schema, "" if problems else spec.definition_hash)
    if not problems:

        def forget(_: object, key: int = id(spec)) -> None:
            _known.pop(key, None)

        _known[id(spec)] = weakref.ref(spec, forget), made
    return made
