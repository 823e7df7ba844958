"""A scripted model: it plays turns from a file, and checks each request that it receives.

A script is a TOML or JSON file (by its suffix)::

    version = 1

    [[turns]]                                # one reply of the model each, in order
    text = "Let me look."
    [[turns.calls]]
    name = "bash"
    arguments = { command = "pytest -q" }    # or: raw = '{"command": '  (sent unchanged)
    label = "tests"                          # so that later turns can refer to its result
    id = "call_1"                            # the provider's id; left out: one is made

    [[turns]]
    text = "All done: ${tests.data.exit_code}."
    [turns.expect]                           # checked before this turn is played
    tools = ["read", "bash"]                 # these are offered
    absent = ["web_fetch"]                   # these are not
    prompt = "regular expression"            # found in the system text
    task = "regular expression"              # found in the last user message
    results = 1                              # the number of results of the previous turn
    [[turns.expect.result]]
    of = "tests"                             # a label, or a position among the last results (default 0)
    at = "data.exit_code"                    # a path into the result; left out: the whole result
    equals = 0                               # or: contains = "text", matches = "regular expression", exists = true

``${tests.data.exit_code}`` or ``${0.metadata.output_path}`` in a text or an argument is replaced by the value at that path
of a result; an argument that is only such a reference keeps the value's type. ``$${`` is a plain ``${``.

A turn may also have ``finish`` (``"length"``, ``"refused"``, …), ``cut = true`` (the stream breaks off in the middle of its
last block) and ``usage = { input = 100, output = 20 }``, which may also have ``cache_read``, ``cache_write`` and
``cost``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from handrail.agent.model_protocol import (
    AssistantMessage,
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResult,
    CallResultsMessage,
    FinishReason,
    ModelRequest,
    ProviderError,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TokenUsage,
    UserMessage,
)
from handrail.catalog.provider_dialects import MCP, ProviderSchemaDialect
from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.text.text_encodings import decode_settings_text
from handrail.contract.tool.manifest import find_model_validation_faults
from handrail.contract.tool.tool_ids_and_wire_names import wire_name

# The script as data, and the reader of its file.

REFERENCE = re.compile(r"\$(\$?)\{([^{}]*)\}")
"""``${of.path}``, or ``$${`` for a plain ``${``."""


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ScriptedCall(_StrictModel):
    """A call of the scripted model; see the format in this module."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    raw: str | None = None
    id: str | None = None
    label: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")

    @model_validator(mode="after")
    def _one_form(self) -> ScriptedCall:
        if self.raw is not None and self.arguments:
            raise ValueError("Both `arguments` and `raw` are set. Set only one.")
        return self


class ResultExpectation(_StrictModel):
    """A check of one result; see the format in this module."""

    call: str | int = 0
    path: str = ""
    equals: Any = None
    contains: str | None = None
    matches: str | None = None
    exists: bool | None = None

    @model_validator(mode="after")
    def _one_check(self) -> ResultExpectation:
        if len(self.model_fields_set & {"equals", "contains", "matches", "exists"}) != 1:
            raise ValueError("Set exactly one of `equals`, `contains`, `matches` and `exists`.")
        _check_regex(self.matches)
        return self


class RequestExpectation(_StrictModel):
    """The checks of the request of one turn; see the format in this module."""

    tools: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    prompt: str | None = None
    task: str | None = None
    results: int | None = None
    result: tuple[ResultExpectation, ...] = ()

    @model_validator(mode="after")
    def _regexes(self) -> RequestExpectation:
        _check_regex(self.prompt)
        _check_regex(self.task)
        return self


class ScriptedUsage(_StrictModel):
    """The tokens that a scripted reply reports."""

    input: int = Field(ge=0)
    output: int = Field(ge=0)
    cache_read: int = Field(default=0, ge=0)
    cache_write: int = Field(default=0, ge=0)
    cost: float | None = Field(default=None, ge=0)


class ScriptedTurn(_StrictModel):
    """A reply of the scripted model; see the format in this module."""

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    expect: RequestExpectation = Field(default_factory=RequestExpectation)
    finish: FinishReason | None = None
    cut: bool = False
    usage: ScriptedUsage | None = None


class ModelScript(_StrictModel):
    """A whole script for a scripted model."""

    version: int = Field(default=1, ge=1, le=1)
    turns: tuple[ScriptedTurn, ...]

    @model_validator(mode="after")
    def _labels(self) -> ModelScript:
        if not self.turns:
            raise ValueError("The script has no turns. Add at least one.")
        known: set[str] = set()
        for number, turn in enumerate(self.turns, 1):
            for name in _find_references(turn):
                if name not in known and not name.isdecimal():
                    raise ValueError(
                        f"Turn {number} refers to {name!r}, which is not a label of an earlier call. Use an earlier label."
                    )
            for call in turn.calls:
                if call.label in known:
                    raise ValueError(f"Turn {number} uses the label {call.label!r} again. Use each label once.")
                if call.label is not None:
                    known.add(call.label)
        return self


def read_model_script(path: Path) -> ModelScript:
    """Read a script from a ``.toml`` or ``.json`` file.

    :raises LoadError: with every fault of the file
    """
    source = str(path)
    try:
        text = decode_settings_text(path.read_bytes())
        data: object = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise LoadError([Diagnostic(source, "", f"The file is not a valid script: {reason}.")]) from error
    try:
        return ModelScript.model_validate(data)
    except ValidationError as error:
        raise LoadError(
            [Diagnostic(source, place, problem) for place, problem in _describe_script_errors(data, error).items()]
        ) from None


def _describe_script_errors(data: Any, error: ValidationError) -> dict[str, str]:
    """Return the problems by their place, with the nearest known name for an unknown one."""
    try:
        found = find_model_validation_faults(ModelScript, data)
    except TypeError:  # it contains a date, which JSON does not have
        found = {}
    return found or {
        format_json_path(fault["loc"]): fault["msg"].removeprefix("Value error, ")
        for fault in error.errors(include_url=False, include_input=False)
    }


def _find_references(turn: ScriptedTurn) -> set[str]:
    """Return the labels and positions to which a turn refers."""
    names = {str(wanted.call) for wanted in turn.expect.result}
    texts = [turn.text, *(json.dumps(call.arguments, ensure_ascii=False, default=str) for call in turn.calls)]
    for text in texts:
        names |= {match[2].partition(".")[0] for match in REFERENCE.finditer(text) if not match[1]}
    return names


def _check_regex(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"The regular expression is invalid: {pattern!r}: {error}.") from None


_MISSING = object()
_SHOWN = 600


class ScriptMismatch(ProviderError):
    """The run differs from the script. The text has the expected and the actual values."""


class ScriptedModel:
    """A model that plays a :class:`ModelScript`, one turn per request.

    :param source: the name of the script in messages
    """

    takes_pictures = True

    def __init__(self, script: ModelScript, *, source: str = "script") -> None:
        self._script = script
        self._source = source
        self._played = 0
        self._labelled: dict[str, Any] = {}

    @staticmethod
    def from_file(path: Path) -> ScriptedModel:
        """Read a ``.toml`` or ``.json`` script.

        :raises LoadError: with every fault of the file
        """
        return ScriptedModel(read_model_script(path), source=str(path))

    @property
    def name(self) -> str:
        """The name of the model, with the source of its script."""
        return f"script:{self._source}"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        """The dialect of MCP clients, which changes no schema."""
        return MCP

    @property
    def remaining_turns(self) -> int:
        """The number of turns that are left; 0 if the run used the whole script."""
        return len(self._script.turns) - self._played

    async def aclose(self) -> None:
        """Do nothing: no connection is open."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Check the request and yield the reply of the next turn.

        :raises ScriptMismatch: if the request is not as expected, or the script has ended
        """
        if not self.remaining_turns:
            raise ScriptMismatch(
                f"{self.name} has {self._played} turns, but the run sent another request. "
                "End the script with a turn of text without calls."
            )
        number = self._played + 1
        turn = self._script.turns[self._played]
        results = _last_results(request)
        if self._played:
            for position, call in enumerate(self._script.turns[self._played - 1].calls):
                if call.label is not None and position < len(results):
                    self._labelled[call.label] = results[position]
        problems = self._problems(turn.expect, request, results)
        if problems:
            raise ScriptMismatch(f"{self.name}: turn {number}: " + "\n".join(problems))
        try:
            text = str(self._fill_references(turn.text, results, whole=False))
            calls = [
                call.raw
                if call.raw is not None
                else json.dumps(self._fill_references(call.arguments, results), ensure_ascii=False, default=str)
                for call in turn.calls
            ]
        except LookupError as error:
            raise ScriptMismatch(f"{self.name}: turn {number}: {error.args[0]}") from None
        self._played += 1
        for event in self._events(turn, number, text, calls):
            yield event
        if turn.cut:
            raise ReplyStreamCut(f"{self.name}: Turn {number} is interrupted here, as the script requires.")

    def _events(self, turn: ScriptedTurn, number: int, text: str, calls: Sequence[str]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        if turn.usage is not None:
            usage = turn.usage
            events.append(TokenUsage(usage.input, usage.output, usage.cache_read, usage.cache_write, usage.cost))
        events += [TextDelta(piece) for piece in re.findall(r"\S+\s*|\s+", text)]
        for index, (call, arguments) in enumerate(zip(turn.calls, calls, strict=True)):
            half = len(arguments) // 2
            events.append(CallBlockOpened(index, call.id or f"script{number:04d}x{index:02d}", call.name))
            events += [CallArgumentsDelta(index, piece) for piece in (arguments[:half], arguments[half:]) if piece]
            events.append(CallBlockClosed(index))
        if turn.cut:
            while events and isinstance(events[-1], CallBlockClosed):
                events.pop()
            return events[:-1]
        events.append(ReplyFinished(turn.finish or ("calls" if calls else "end")))
        return events

    def _problems(self, expect: RequestExpectation, request: ModelRequest, results: Sequence[Any]) -> list[str]:
        found: list[str] = []
        offered = {str(view["name"]) for view in request.tools}
        missing = [name for name in expect.tools if wire_name(name) not in offered]
        if missing:
            found.append(
                f"expected the tools {', '.join(missing)} to be offered; the request has {', '.join(sorted(offered))}"
            )
        present = [name for name in expect.absent if wire_name(name) in offered]
        if present:
            found.append(f"expected the tools {', '.join(present)} not to be offered, but they are")
        if expect.prompt is not None and not re.search(expect.prompt, request.system):
            found.append(f"expected the system text to match {expect.prompt!r}; it is {_short(request.system)}")
        tasks = [message.text for message in request.messages if isinstance(message, UserMessage)]
        if expect.task is not None and not (tasks and re.search(expect.task, tasks[-1])):
            found.append(f"expected the task to match {expect.task!r}; it is {_short(tasks[-1] if tasks else None)}")
        if expect.results is not None and len(results) != expect.results:
            found.append(f"expected {expect.results} results of the previous turn; the request has {len(results)}")
        for wanted in expect.result:
            problem = self._problem(wanted, results)
            if problem is not None:
                found.append(problem)
        return found

    def _problem(self, wanted: ResultExpectation, results: Sequence[Any]) -> str | None:
        place = f"{wanted.call}.{wanted.path}" if wanted.path else str(wanted.call)
        try:
            result = self._result(str(wanted.call), results)
        except LookupError as error:
            return str(error.args[0])
        seen = _value_at(result, wanted.path)
        if "exists" in wanted.model_fields_set:
            if (seen is not _MISSING) == wanted.exists:
                return None
            return f"expected {place} {'to exist' if wanted.exists else 'not to exist'}; the result is {_short(result)}"
        if seen is _MISSING:
            return f"expected a value at {place}; the result is {_short(result)}"
        text = seen if isinstance(seen, str) else _json(seen)
        if wanted.contains is not None:
            return (
                None
                if wanted.contains in text
                else f"expected {place} to contain {wanted.contains!r}; it is {_short(seen)}"
            )
        if wanted.matches is not None:
            return (
                None
                if re.search(wanted.matches, text)
                else f"expected {place} to match {wanted.matches!r}; it is {_short(seen)}"
            )
        return (
            None
            if _json(seen) == _json(wanted.equals)
            else f"expected {place} to be {_short(wanted.equals)}; it is {_short(seen)}"
        )

    def _result(self, of: str, results: Sequence[Any]) -> Any:
        if not of.isdecimal():
            if of not in self._labelled:
                raise LookupError(f"the call with label {of!r} has no result yet")
            return self._labelled[of]
        if int(of) >= len(results):
            raise LookupError(f"result {of} does not exist: the previous turn had {len(results)}")
        return results[int(of)]

    def _fill_references(self, value: Any, results: Sequence[Any], *, whole: bool = True) -> Any:
        """Return ``value`` with its references replaced."""
        if isinstance(value, str):
            alone = REFERENCE.fullmatch(value)
            if whole and alone is not None and not alone[1]:
                return self._resolve_reference(alone[2], results)

            def replaced(match: re.Match[str]) -> str:
                if match[1]:
                    return match[0][1:]
                found = self._resolve_reference(match[2], results)
                return found if isinstance(found, str) else _json(found)

            return REFERENCE.sub(replaced, value)
        if isinstance(value, dict):
            return {key: self._fill_references(item, results) for key, item in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [self._fill_references(item, results) for item in cast("list[Any]", value)]
        return value

    def _resolve_reference(self, reference: str, results: Sequence[Any]) -> Any:
        of, _, path = reference.partition(".")
        result = self._result(of, results)
        found = _value_at(result, path)
        if found is _MISSING:
            raise LookupError(f"${{{reference}}} is not in the result, which is {_short(result)}")
        return found


def _last_results(request: ModelRequest) -> list[Any]:
    """Return the results of the last reply as the model reads them; none if a text followed."""
    for message in reversed(request.messages):
        match message:
            case CallResultsMessage(results):
                return [_parse_result(result) for result in results]
            case AssistantMessage() | UserMessage():
                return []
    return []


def _parse_result(result: CallResult) -> Any:
    try:
        return json.loads(result.text)
    except ValueError:
        return result.text


def _value_at(value: Any, path: str) -> Any:
    """Return the value at ``path`` (keys and positions, joined by dots), or :data:`_MISSING`."""
    for step in path.split(".") if path else ():
        if isinstance(value, Mapping) and step in value:
            value = cast("Mapping[str, Any]", value)[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[int(step)]
        else:
            return _MISSING
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = _json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"
