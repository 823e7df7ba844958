"""The pages of the Python API: every public name is in a group and has a docstring."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
from tests.api_reference import FACADES, documented, groups, homes, members, pages


def undocumented() -> set[str]:
    found: set[str] = set()
    for facade in FACADES:
        module = import_module(facade)
        for member in members(facade):
            name, _, inner = member.name.removeprefix(f"{facade}.").partition(".")
            inherited = inspect.getdoc(getattr(getattr(module, name), inner)) if inner else ""
            if not member.text and not inherited:
                found.add(member.name)
    return found


def test_every_public_member_has_a_docstring() -> None:
    found = undocumented()
    assert not found, f"write a docstring: {', '.join(sorted(found))}"


@pytest.mark.parametrize("facade", FACADES)
def test_every_exported_name_is_in_one_group_and_has_a_purpose(facade: str) -> None:
    named = [name for names in groups(facade).values() for name in names]
    assert sorted(named) == sorted(homes(facade)) == sorted(import_module(facade).__all__)
    assert all(groups(facade).values()), "a group without names"
    assert all(documented(facade, name) for name in named)


def test_the_api_pages_are_up_to_date() -> None:
    old = [path.name for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    assert not old, f"run: make docs ({', '.join(old)})"
