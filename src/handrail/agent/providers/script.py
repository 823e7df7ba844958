"""A scripted model: plays turns from a file, and checks what a model in its place would have seen.

The format is described in :mod:`handrail.agent.providers.script_file`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from handrail.agent.model import (
    AssistantMessage,
    BlockEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    CallResult,
    Finished,
    ModelRequest,
    ProviderError,
    ResultsMessage,
    StreamCut,
    TextDelta,
    Usage,
    UserMessage,
)
from handrail.agent.providers.script_file import (
    REFERENCE,
    Expectation,
    ResultExpectation,
    Script,
    ScriptedTurn,
    read_script,
)
from handrail.catalog.forms.dialects import MCP, Dialect
from handrail.contract.tool.names import wire_name

_MISSING = object()
_SHOWN = 600


class ScriptFailed(ProviderError):
    """The run went another way than the script: the text says what was expected and what was seen."""


class ScriptModel:
    """Plays a :class:`Script`, one turn a request.

    :param source: how messages name the script
    """

    takes_pictures = True

    def __init__(self, script: Script, *, source: str = "script") -> None:
        self._script = script
        self._source = source
        self._played = 0
        self._labelled: dict[str, Any] = {}

    @staticmethod
    def from_file(path: Path) -> ScriptModel:
        """Read a ``.toml`` or ``.json`` script.

        :raises LoadError: with every fault of the file
        """
        return ScriptModel(read_script(path), source=str(path))

    @property
    def name(self) -> str:
        return f"script:{self._source}"

    @property
    def dialect(self) -> Dialect:
        """It is shown what an MCP client is: every tool as it is."""
        return MCP

    @property
    def unplayed(self) -> int:
        """How many turns are left; 0 when the run went as far as the script."""
        return len(self._script.turns) - self._played

    async def aclose(self) -> None:
        """Nothing is held."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """See :meth:`handrail.agent.model.Model.stream`.

        :raises ScriptFailed: when the request is not what the script expects, or the script has ended
        """
        if not self.unplayed:
            raise ScriptFailed(
                f"{self.name} has {self._played} turns, and the run asked for one more; "
                "its last turn should be a text without calls"
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
            raise ScriptFailed(f"{self.name}: turn {number}: " + "\n".join(problems))
        try:
            text = str(self._filled(turn.text, results, whole=False))
            calls = [
                call.raw
                if call.raw is not None
                else json.dumps(self._filled(call.arguments, results), ensure_ascii=False, default=str)
                for call in turn.calls
            ]
        except LookupError as error:
            raise ScriptFailed(f"{self.name}: turn {number}: {error.args[0]}") from None
        self._played += 1
        for event in self._events(turn, number, text, calls):
            yield event
        if turn.cut:
            raise StreamCut(f"{self.name}: turn {number} is cut here, as the script says")

    def _events(self, turn: ScriptedTurn, number: int, text: str, calls: Sequence[str]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        if turn.usage is not None:
            events.append(Usage(turn.usage.input, turn.usage.output))
        events += [TextDelta(piece) for piece in re.findall(r"\S+\s*|\s+", text)]
        for index, (call, arguments) in enumerate(zip(turn.calls, calls, strict=True)):
            half = len(arguments) // 2
            events.append(CallOpened(index, call.id or f"script{number:04d}x{index:02d}", call.name))
            events += [CallArguments(index, piece) for piece in (arguments[:half], arguments[half:]) if piece]
            events.append(CallClosed(index))
        if turn.cut:
            while events and isinstance(events[-1], CallClosed):
                events.pop()
            return events[:-1]
        events.append(Finished(turn.finish or ("calls" if calls else "end")))
        return events

    def _problems(self, expect: Expectation, request: ModelRequest, results: Sequence[Any]) -> list[str]:
        found: list[str] = []
        offered = {str(view["name"]) for view in request.tools}
        missing = [name for name in expect.tools if wire_name(name) not in offered]
        if missing:
            found.append(
                f"expected the tools {', '.join(missing)} to be offered; there are {', '.join(sorted(offered))}"
            )
        present = [name for name in expect.absent if wire_name(name) in offered]
        if present:
            found.append(f"expected the tools {', '.join(present)} not to be offered, and they are")
        if expect.prompt is not None and not re.search(expect.prompt, request.system):
            found.append(f"expected the system text to match {expect.prompt!r}; it is {_short(request.system)}")
        tasks = [message.text for message in request.messages if isinstance(message, UserMessage)]
        if expect.task is not None and not (tasks and re.search(expect.task, tasks[-1])):
            found.append(f"expected the task to match {expect.task!r}; it is {_short(tasks[-1] if tasks else None)}")
        if expect.results is not None and len(results) != expect.results:
            found.append(f"expected {expect.results} results of the turn before; there are {len(results)}")
        for wanted in expect.result:
            problem = self._problem(wanted, results)
            if problem is not None:
                found.append(problem)
        return found

    def _problem(self, wanted: ResultExpectation, results: Sequence[Any]) -> str | None:
        place = f"{wanted.of}.{wanted.at}" if wanted.at else str(wanted.of)
        try:
            result = self._result(str(wanted.of), results)
        except LookupError as error:
            return str(error.args[0])
        seen = _at(result, wanted.at)
        if "exists" in wanted.model_fields_set:
            if (seen is not _MISSING) == wanted.exists:
                return None
            return f"expected {place} {'to be there' if wanted.exists else 'not to be there'}; the result is {_short(result)}"
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
                raise LookupError(f"the call labelled {of!r} has no result so far")
            return self._labelled[of]
        if int(of) >= len(results):
            raise LookupError(f"there is no result {of}: the turn before had {len(results)}")
        return results[int(of)]

    def _filled(self, value: Any, results: Sequence[Any], *, whole: bool = True) -> Any:
        """``value`` with its references replaced."""
        if isinstance(value, str):
            alone = REFERENCE.fullmatch(value)
            if whole and alone is not None and not alone[1]:
                return self._referred(alone[2], results)

            def replaced(match: re.Match[str]) -> str:
                if match[1]:
                    return match[0][1:]
                found = self._referred(match[2], results)
                return found if isinstance(found, str) else _json(found)

            return REFERENCE.sub(replaced, value)
        if isinstance(value, dict):
            return {key: self._filled(item, results) for key, item in cast("dict[str, Any]", value).items()}
        if isinstance(value, list):
            return [self._filled(item, results) for item in cast("list[Any]", value)]
        return value

    def _referred(self, reference: str, results: Sequence[Any]) -> Any:
        of, _, path = reference.partition(".")
        result = self._result(of, results)
        found = _at(result, path)
        if found is _MISSING:
            raise LookupError(f"${{{reference}}} is not in the result, which is {_short(result)}")
        return found


def _last_results(request: ModelRequest) -> list[Any]:
    """The results that answer the last reply, as the model reads them; none when a text came since."""
    for message in reversed(request.messages):
        match message:
            case ResultsMessage(results):
                return [_parsed(result) for result in results]
            case AssistantMessage() | UserMessage():
                return []
    return []


def _parsed(result: CallResult) -> Any:
    try:
        return json.loads(result.text)
    except ValueError:
        return result.text


def _at(value: Any, path: str) -> Any:
    """What ``path`` (keys and list positions, joined by dots) leads to, or :data:`_MISSING`."""
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
