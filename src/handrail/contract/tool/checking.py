"""What is computed once per spec, however many generations contain it: its faults, its compiled schema, its hash.

A spec never changes. Most tools of a generation are those of the one before, so the next one is mostly looked up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from handrail.contract.schema.schema import InvalidSchema, Schema, compile_schema, of_step
from handrail.contract.tool.spec import ToolSpec, faults_in
from handrail.contract.tool.spec_types import of_wrong_type

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checked:
    """:param problems: ``(place, problem)``, all of them; with any, there is no schema to be used"""

    problems: tuple[tuple[str, str], ...]
    schema: Schema | None
    definition_hash: str
    step: Schema | None = None
    """Of what a step is sent, as the argument ``input``; None where the spec says nothing of it."""


class OfSpecs(Generic[T]):
    """What was made of specs, as long as somebody holds them. Safe in any thread.

    :param make: is called once for each; a spec is known by its identity, since equal ones are rare and costly to tell
    :param keeps: what is not kept is made again
    """

    def __init__(self, make: Callable[[ToolSpec], T], keeps: Callable[[T], bool] = lambda made: True) -> None:
        self._make, self._keeps = make, keeps
        self._known: dict[int, tuple[weakref.ref[ToolSpec], T]] = {}

    def __call__(self, spec: ToolSpec) -> T:
        found = self._known.get(id(spec))
        if found is not None and found[0]() is spec:
            return found[1]
        made = self._make(spec)
        if self._keeps(made):
            known = self._known

            def forget(_: object, key: int = id(spec)) -> None:
                known.pop(key, None)

            known[id(spec)] = weakref.ref(spec, forget), made
        return made


def _check(spec: ToolSpec) -> Checked:
    if wrong := tuple(of_wrong_type(spec)):
        return Checked(wrong, None, "")
    problems = faults_in(spec)
    schema = step = None
    try:
        schema = compile_schema(spec.parameters)
    except InvalidSchema as error:
        problems += [(f"llm.parameters.{where}".rstrip("."), problem) for where, problem in error.problems]
    if spec.step_parameters is not None:
        try:
            step = compile_schema(of_step(spec.step_parameters))
        except InvalidSchema as error:
            faults = [
                (where.removeprefix("properties.input").lstrip("."), problem) for where, problem in error.problems
            ]
            problems += [(f"runtime.step_parameters.{where}".rstrip("."), problem) for where, problem in faults]
    return Checked(tuple(problems), schema, "" if problems else spec.definition_hash, step)


checked = OfSpecs(_check, keeps=lambda made: not made.problems)
"""Everything about a spec that no other tool and no machine changes."""
