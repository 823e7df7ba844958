"""What a script for the scripted model looks like, and how its file is read.

A script is a TOML or JSON file (by its suffix)::

    version = 1

    [[turns]]                                # one reply of the model each, in order
    text = "Let me look."
    [[turns.calls]]
    name = "bash"
    arguments = { command = "pytest -q" }    # or: raw = '{"command": '  (sent as it stands)
    label = "tests"                          # so that later turns can refer to its result
    id = "call_1"                            # the provider's id; left out: one is made

    [[turns]]
    text = "All done: ${tests.data.exit_code}."
    [turns.expect]                           # checked before this turn is played
    tools = ["read", "bash"]                 # these are offered
    absent = ["web_fetch"]                   # these are not
    prompt = "regular expression"            # found in the system text
    task = "regular expression"              # found in the last user message
    results = 1                              # so many results answer the turn before
    [[turns.expect.result]]
    of = "tests"                             # a label, or a position among the last results (default 0)
    at = "data.exit_code"                    # a path into the result; left out: the whole result
    equals = 0                               # or: contains = "text", matches = "regular expression", exists = true

``${tests.data.exit_code}`` or ``${0.metadata.output_path}`` in a text or an argument stands for what is at that
path of a result; an argument that is nothing but one keeps its type. ``$${`` is a plain ``${``.

A turn may also say ``finish`` (``"length"``, ``"refused"``, …), ``cut = true`` (the stream breaks off in the
middle of its last block) and ``usage = { input = 100, output = 20 }``.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from handrail.agent.model import FinishReason
from handrail.contract.errors import Fault, LoadError
from handrail.contract.schema.schema import path_text
from handrail.contract.tool.checked import faults_of

REFERENCE = re.compile(r"\$(\$?)\{([^{}]*)\}")
"""``${of.path}``, or ``$${`` for a plain ``${``."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ScriptedCall(_Strict):
    """A call that the script makes; see the module's docstring."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    raw: str | None = None
    id: str | None = None
    label: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")

    @model_validator(mode="after")
    def _one_form(self) -> ScriptedCall:
        if self.raw is not None and self.arguments:
            raise ValueError("has both arguments and raw; give one of them")
        return self


class ResultExpectation(_Strict):
    """What one result must hold; see the module's docstring."""

    of: str | int = 0
    at: str = ""
    equals: Any = None
    contains: str | None = None
    matches: str | None = None
    exists: bool | None = None

    @model_validator(mode="after")
    def _one_check(self) -> ResultExpectation:
        if len(self.model_fields_set & {"equals", "contains", "matches", "exists"}) != 1:
            raise ValueError("needs exactly one of equals, contains, matches and exists")
        _check_regex(self.matches)
        return self


class Expectation(_Strict):
    """What the request of one turn must hold; see the module's docstring."""

    tools: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    prompt: str | None = None
    task: str | None = None
    results: int | None = None
    result: tuple[ResultExpectation, ...] = ()

    @model_validator(mode="after")
    def _regexes(self) -> Expectation:
        _check_regex(self.prompt)
        _check_regex(self.task)
        return self


class ScriptedUsage(_Strict):
    """Tokens that the script says its reply took."""

    input: int = Field(ge=0)
    output: int = Field(ge=0)


class ScriptedTurn(_Strict):
    """One reply of the scripted model; see the module's docstring."""

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    expect: Expectation = Field(default_factory=Expectation)
    finish: FinishReason | None = None
    cut: bool = False
    usage: ScriptedUsage | None = None


class Script(_Strict):
    """A whole script."""

    version: int = Field(default=1, ge=1, le=1)
    turns: tuple[ScriptedTurn, ...]

    @model_validator(mode="after")
    def _labels(self) -> Script:
        if not self.turns:
            raise ValueError("has no turns; a run needs at least one reply")
        known: set[str] = set()
        for number, turn in enumerate(self.turns, 1):
            for name in _referred(turn):
                if name not in known and not name.isdecimal():
                    raise ValueError(
                        f"turn {number} refers to {name!r}, which no call of an earlier turn has as its label"
                    )
            for call in turn.calls:
                if call.label in known:
                    raise ValueError(f"turn {number} gives the label {call.label!r} a second time")
                if call.label is not None:
                    known.add(call.label)
        return self


def read_script(path: Path) -> Script:
    """The script in a ``.toml`` or ``.json`` file.

    :raises LoadError: with every fault of the file
    """
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8")
        data: object = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise LoadError([Fault(source, "", f"cannot be read as a script: {reason}")]) from error
    try:
        return Script.model_validate(data)
    except ValidationError as error:
        raise LoadError([Fault(source, place, problem) for place, problem in _faults(data, error).items()]) from None


def _faults(data: Any, error: ValidationError) -> dict[str, str]:
    """Place to problem, each in words, with the nearest name for one that nobody knows."""
    try:
        found = faults_of(Script, data)
    except TypeError:  # it holds a date, which is no JSON
        found = {}
    return found or {
        path_text(fault["loc"]): fault["msg"].removeprefix("Value error, ")
        for fault in error.errors(include_url=False, include_input=False)
    }


def _referred(turn: ScriptedTurn) -> set[str]:
    """The labels and positions that a turn refers to."""
    names = {str(wanted.of) for wanted in turn.expect.result}
    texts = [turn.text, *(json.dumps(call.arguments, ensure_ascii=False, default=str) for call in turn.calls)]
    for text in texts:
        names |= {match[2].partition(".")[0] for match in REFERENCE.finditer(text) if not match[1]}
    return names


def _check_regex(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
