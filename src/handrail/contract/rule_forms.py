"""The forms of a rule in settings and code: a line of text, or a table with examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from handrail.contract.errors import UsageError

RuleExample = str | Sequence[str] | Mapping[str, Any]
"""A value that a rule is tried on when it is loaded.

It is a command as text or words, a path, a host or URL, or arguments by name.
"""


class RuleWithExamples(BaseModel):
    """A rule with examples that are checked when it is loaded.

    ``{ rule = "allow bash git diff *", match = ["git diff src"], not_match = ["git diff --output=f"] }``
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    rule: Annotated[str, Field(description="The rule, as 'ACTION PERMISSION [PATTERN]'.")]
    match: Annotated[tuple[Any, ...], Field(description="Examples that the rule must match to be loaded.")] = ()
    not_match: Annotated[tuple[Any, ...], Field(description="Examples that the rule must not match.")] = ()

    @field_validator("match", "not_match")
    @classmethod
    def _check_examples(cls, examples: tuple[Any, ...]) -> tuple[Any, ...]:
        for example in examples:
            words = isinstance(example, (list, tuple)) and all(
                isinstance(word, str) for word in cast("Sequence[object]", example)
            )
            if not (isinstance(example, (str, Mapping)) or words):
                raise ValueError(
                    f"{str(cast('object', example))[:80]!r} is not an example; expected a string, a list of words, or arguments by name"
                )
        return examples


RuleLike = str | RuleWithExamples | Mapping[str, Any]
"""A rule as text, or with examples that it must match."""


def _rule_form(value: object) -> str:
    return "<table>" if isinstance(value, (Mapping, RuleWithExamples)) else "<text>"


RuleInput = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[RuleWithExamples, Tag("<table>")], Discriminator(_rule_form)
]
"""A rule as text or as a :class:`RuleWithExamples`, for settings models."""


def extract_rule_line(given: object) -> str:
    if isinstance(given, RuleWithExamples):
        return given.rule
    if isinstance(given, Mapping):
        return str(cast("Mapping[str, object]", given).get("rule", ""))
    return str(given)


def rule_to_json_data(given: object) -> str | dict[str, Any]:
    """Return a rule as JSON-able data for another process: its line, or a table if it has examples."""
    entry = to_rule_with_examples(given)
    return entry.model_dump(mode="json") if entry.match or entry.not_match else entry.rule


def to_rule_with_examples(given: object) -> RuleWithExamples:
    """Return a rule with its examples, from any form.

    :raises ValueError: for a table that is not a rule
    """
    if isinstance(given, RuleWithExamples):
        return given
    return RuleWithExamples.model_validate(given) if isinstance(given, Mapping) else RuleWithExamples(rule=str(given))


def normalise_rules(rules: Iterable[RuleLike]) -> tuple[str | RuleWithExamples, ...]:
    """Return the rules of a program as texts or entries.

    :raises UsageError: for a single text, which Python would iterate by letters, and for a value that is not a rule
    """
    if isinstance(rules, str):
        raise UsageError(f"Invalid rules={rules!r}: expected a list, not one text. Write rules=[{rules!r}].")
    found: list[str | RuleWithExamples] = []
    for rule in rules:
        try:
            found.append(rule if isinstance(rule, str) else to_rule_with_examples(rule))
        except ValueError as error:
            raise UsageError(
                f"Invalid rule: {rule!r}. Expected a string, or a table with the key 'rule' ({error})."
            ) from None
    return tuple(found)
