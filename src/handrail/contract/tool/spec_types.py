"""Whether the fields of a spec hold what they are declared to hold: in Python nobody is held to an annotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ConfigKey, LockSpec, ToolSpec


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) for one in cast("tuple[Any, ...]", value))


def _locks(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, LockSpec) for one in cast("tuple[Any, ...]", value))


def _number(value: object) -> bool:
    return type(value) is int


def _flag(value: object) -> bool:
    return value is True or value is False


def _text(value: object) -> bool:
    return isinstance(value, str)


def _object(value: object) -> bool:
    return isinstance(value, Mapping)


def _settings(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(one, ConfigKey) for one in cast("Mapping[Any, Any]", value).values()
    )


def _templates(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, str) for one in cast("Mapping[Any, Any]", value).values())


_LOCKS = 'a tuple of LockSpec, as in (LockSpec.parse("file:{path}:S"),)'
_NUMBER, _FLAG, _TEXT, _OBJECT = "a whole number", "True or False", "text", "a mapping"

EXPECTED: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "id": (_text, _TEXT),
    "description": (_text, _TEXT),
    "parameters": (_object, "a mapping: the JSON Schema of one object"),
    "requires": (lambda value: isinstance(value, Requires), "Requires, as in Requires.model_validate({…})"),
    "locks": (_locks, _LOCKS),
    "targets": (_templates, 'a mapping of texts, as in {"fs.read": "{path}"}'),
    "timeout_ms": (_number, _NUMBER),
    "timeout_argument": (_text, _TEXT),
    "idempotent": (_flag, _FLAG),
    "step_parameters": (_object, _OBJECT),
    "background_argument": (_text, _TEXT),
    "concurrency_safe": (_flag, _FLAG),
    "promotable": (_flag, _FLAG),
    "locks_background": (_locks, _LOCKS),
    "persistent": (_flag, _FLAG),
    "open_ended": (_flag, _FLAG),
    "only_its_command": (_flag, _FLAG),
    "secrets": (_texts, 'a tuple of names, as in ("API_KEY",)'),
    "config": (_settings, 'a mapping of ConfigKey, as in {"units": ConfigKey("metric or imperial")}'),
    "exec_path": (_text, _TEXT),
    "build": (_texts, 'a tuple of words, as in ("make", "run")'),
    "build_timeout_ms": (_number, _NUMBER),
    "output_schema": (_object, _OBJECT),
    "provider_support": (_object, _OBJECT),
    "max_output": (_number, _NUMBER),
    "max_entries": (_number, _NUMBER),
    "prompt_mask": (_flag, _FLAG),
    "version": (_text, _TEXT),
    "category": (_text, _TEXT),
    "tier": (_text, _TEXT),
    "guidance": (_text, _TEXT),
    "documentation": (_text, _TEXT),
    "manual_first": (_flag, _FLAG),
}
"""By field: the test of a value that is not None, and what to say was expected. Fields of fixed words are judged by these."""

MAY_BE_NONE = frozenset(
    {
        "locks",
        "timeout_argument",
        "step_parameters",
        "background_argument",
        "exec_path",
        "output_schema",
        "max_entries",
        "category",
        "tier",
    }
)
_OF_A_MODEL = {"id": "llm.name", "description": "llm.description", "parameters": "llm.parameters"}


def of_wrong_type(spec: ToolSpec) -> Iterator[tuple[str, str]]:
    """``(place, problem)`` for each field whose value is none that it can have. With any, the rest cannot be judged."""
    for name, (fits, expected) in EXPECTED.items():
        value: object = getattr(spec, name)
        if not (name in MAY_BE_NONE if value is None else fits(value)):
            place = _OF_A_MODEL.get(name) or f"runtime.{name}"
            yield place, f"is {_shown(value)}; expected {expected}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
