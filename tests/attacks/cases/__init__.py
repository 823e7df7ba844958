"""The table of attacks, with one file for each class."""

from __future__ import annotations

from importlib import import_module

from tests.attacks.case import Case

_FILES = (
    "files",
    "shell",
    "words",
    "configuration",
    "names",
    "network",
    "processes",
    "ipc",
    "environment",
    "own_programs",
    "model",
    "judgements",
    "permission",
    "pinned",
    "searching",
    "sandbox",
    "bounds",
    "mounts",
    "floods",
)


def every_case() -> list[Case]:
    """All of them, in the order in which they are tried: what wears the machine down comes last."""
    listed = [case for name in _FILES for case in import_module(f"tests.attacks.cases.{name}").CASES]
    from tests.attacks import layers

    return [*layers.CASES, *listed]


def suite_of(name: str) -> list[Case]:
    """The cases to try inside: ``cases``, or ``controls`` for what each would see where nothing confines it."""
    if name == "cases":
        return every_case()
    from tests.attacks.controls import controls

    return controls(every_case())


__all__ = ["every_case", "suite_of"]
