"""A spec with values of wrong types is refused with all of them before it is used."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from handrail import ConfigKey, LoadError, LockSpec, Requires, ToolSpec, UsageError, tool
from handrail.contract.tool.spec import (
    _CHOICES,  # pyright: ignore[reportPrivateUsage]
    EXPECTED_TYPES,
    FIELDS,
    find_spec_type_faults,
)
from handrail.contract.tool.tool_protocol import check_spec
from handrail.testing.scripted_kernel import temporary_kernel

PLAIN = ToolSpec("a.b", "Do b to a.")


def test_every_spec_field_has_a_type_check() -> None:
    assert {one.name for one in fields(ToolSpec)} == {*EXPECTED_TYPES, *_CHOICES}
    nothing = {one.name for one in fields(ToolSpec) if one.default is None}
    assert nothing == {name for name, one in FIELDS.items() if one.is_optional}


def test_a_complete_spec_has_no_type_faults() -> None:
    full = replace(
        PLAIN,
        requires=Requires.model_validate({"fs": {"read": ["{workspace}"]}}),
        locks=(LockSpec("workspace", "S"),),
        targets={"fs.read": "{path}"},
        secrets=("KEY",),
        config={"units": ConfigKey("metric or imperial")},
        max_entries=3,
    )
    assert list(find_spec_type_faults(PLAIN)) == list(find_spec_type_faults(full)) == []


@pytest.mark.parametrize("name", EXPECTED_TYPES)
def test_a_field_value_with_the_wrong_type_is_named_with_the_expected_type(name: str) -> None:
    wrong: dict[str, Any] = {name: object()}
    ((place, problem),) = check_spec(replace(PLAIN, **wrong)).problems
    assert place.endswith(name) or (name, place) == ("id", "llm.name")
    assert problem.startswith("is <object object") and f"expected {EXPECTED_TYPES[name][1]}" in problem
    if not FIELDS[name].is_optional:
        assert list(find_spec_type_faults(replace(PLAIN, **{name: None})))


@pytest.mark.parametrize(
    "wrong",
    [
        {"secrets": "KEY"},
        {"secrets": (3,)},
        {"locks": ["file:{path}:S"]},
        {"locks": ("workspace:S",)},
        {"config": {"units": {"description": "metric or imperial"}}},
        {"targets": {"fs.read": 3}},
        {"timeout_ms": True},
        {"idempotent": "no"},
    ],
)
def test_a_value_of_a_similar_wrong_type_is_refused(wrong: dict[str, Any]) -> None:
    assert len(check_spec(replace(PLAIN, **wrong)).problems) == 1


def test_the_decorator_refuses_secrets_that_are_not_a_list() -> None:
    with pytest.raises(UsageError, match=r"`secrets` must be a list of names\. Write \['KEY'\]"):

        @tool(secrets="KEY")
        def one() -> None:  # pyright: ignore[reportUnusedFunction]
            """Do it."""


async def test_a_load_error_names_the_tool_and_the_wrong_value(tmp_path: Any) -> None:
    @tool
    def one() -> None:
        """Do it."""

    one.spec = replace(one.spec, timeout_ms="soon")  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=r"one: runtime\.timeout_ms: is 'soon'; expected a whole number"):
        async with temporary_kernel(tmp_path, tools=[one]):
            pass
