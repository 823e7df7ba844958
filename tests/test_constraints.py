"""The two lists of versions contain each installed package at a compatible version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
NAMED = "handrail"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def needed(
    name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> Iterator[tuple[str, Requirement]]:
    """Everything that ``name`` needs on this machine, with who asks for it."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        asked = [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:
        return
    for one in asked:
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            if canonical(one.name) != NAMED:
                yield name, one
            yield from needed(canonical(one.name), frozenset(one.extras), seen)


@pytest.mark.parametrize("place", ["constraints.txt", "bench/constraints.txt"])
def test_each_pinned_version_satisfies_the_requirements_of_the_other_packages(place: str) -> None:
    held = pins(ROOT / place)
    found = list(needed(NAMED, frozenset({"all"}), set()))
    assert {"pydantic", "mcp", "google-genai", "numpy"} <= {canonical(one.name) for _, one in found}
    wrong = [
        f"{by} asks for {one}, {place} holds {held.get(canonical(one.name), 'none')}"
        for by, one in found
        if canonical(one.name) not in held or not one.specifier.contains(held[canonical(one.name)], prereleases=True)
    ]
    assert not wrong, "\n".join(wrong)


def test_each_pinned_package_runs_on_the_oldest_supported_python() -> None:
    """Debian 12 has Python 3.11.2: a package that asks for a later patch release stops ``make setup`` there."""
    held = pins(ROOT / "constraints.txt")
    too_new: list[str] = []
    for name in held:
        try:
            metadata = distribution(name).metadata
        except PackageNotFoundError:
            continue
        asked = metadata["Requires-Python"] if "Requires-Python" in metadata else ""  # noqa: SIM401 - has no typed `get`
        if not SpecifierSet(asked).contains("3.11.0"):
            too_new.append(f"{name} {metadata['Version']} asks for Python {asked}")
    assert not too_new, "\n".join(too_new)
