"""The timeline of one call, from the log alone: its tool, decision, lock waits and end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, cast

from handrail.contract.struct import Struct
from handrail.record.log_reader import LoggedCallSummary, LoggedRecord, LogReader

_MAX_GENERATIONS = 1_000
"""The number of older generations that are searched. Each start and each change of tools creates one."""
_MAX_SHOWN_CHARS = 2_000


class CallTimelineStep(Struct, frozen=True):
    """One step of a call. ``detail`` names the decision or the subject."""

    at_ns: int
    what: str
    detail: str = ""


class CallTimeline(Struct, frozen=True):
    """The timeline of one call.

    :param call: the summary of the call
    :param arguments: the recorded arguments; None if they were removed from the log
    :param generation: the number of the registry generation in which the call was proposed
    :param definition: the hash of the tool's definition at that time
    :param source: the source of the tool
    :param session: ``agent``, ``frontend`` and ``topic`` of its session, if they are known
    :param happenings: all records of the call, in order
    :param locks: the locks that the call required
    :param lock_wait_ms: the time that the call waited for its locks
    :param sandbox: the sandbox of the tool
    :param result: the recorded result
    :param parent: the call whose tool made this call
    :param children: the calls that the tool of this call made
    """

    call: LoggedCallSummary
    arguments: Any
    generation: int | None
    definition: str | None
    source: str | None
    session: Mapping[str, Any]
    happenings: tuple[CallTimelineStep, ...]
    locks: tuple[str, ...]
    lock_wait_ms: float | None
    sandbox: str | None
    result: Mapping[str, Any] | None
    parent: str | None
    children: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Format the timeline for a user to read."""
        call = self.call
        lines = [f"{call.call_id}  {call.tool or '?'}: {call.state}"]
        lines += [f"  {name:<11}{value}" for name, value in self._list_facts()]
        lines += ["", "timeline:"]
        times = [f"+{(one.at_ns - call.proposed_ns) / 1e6:.1f} ms" for one in self.happenings]
        widest = max(map(len, times), default=0)
        for time, one in zip(times, self.happenings, strict=True):
            lines.append(f"  {time:>{widest}}  {one.what}{f': {one.detail}' if one.detail else ''}")
        if (hint := self._make_hint()) is not None:
            lines += ["", hint]
        return "\n".join(
            line.replace("\n", "\\n").replace("\t", "\\t") for line in lines
        )  # no name or text from the log starts a line

    def _list_facts(self) -> Iterator[tuple[str, str]]:
        at = datetime.fromtimestamp(self.call.proposed_ns / 1e9).astimezone()
        yield "proposed", at.isoformat(sep=" ", timespec="milliseconds")
        about = ", ".join(f"{name} {value}" for name, value in self.session.items() if value)
        yield "session", f"{self.call.session_id}{f' ({about})' if about else ''}"
        if self.parent is not None:
            yield "made by", self.parent
        if self.children:
            yield "made", ", ".join(self.children)
        yield "arguments", "removed from the log" if self.arguments is None else _truncate(_text(self.arguments))
        if self.generation is not None:
            yield "tools", f"generation {self.generation}: {self._tool_and_origin()}"
        if self.locks:
            waited = f", waited {self.lock_wait_ms:.1f} ms for them" if self.lock_wait_ms else ", without waiting"
            yield "locks", ", ".join(self.locks) + waited
        if self.sandbox:
            yield "sandbox", self.sandbox
        if (network := self._describe_network()) is not None:
            yield "network", network
        notes = _mapping(_mapping(self.result).get("data")).get("notes")
        for note in _items(notes):
            yield "note", _truncate(_text(note))
        for name in ("output_path", "artifact"):
            value = _mapping(_mapping(self.result).get("metadata")).get(name)
            if isinstance(value, str):
                yield name.partition("_")[0], value

    def _describe_network(self) -> str | None:
        """Return the hosts that the call reached or was refused, or why it had no network; None if that is unknown."""
        metadata = _mapping(_mapping(self.result).get("metadata"))
        if metadata.get("read_only") is True:
            return "none, since the call only read"
        report = _mapping(metadata.get("network"))
        if isinstance(unavailable := report.get("unavailable"), str):
            return f"none: {unavailable}"
        parts = [f"reached {_text(host)}" for host in _items(report.get("reached"))]
        for one in map(_mapping, _items(report.get("refused"))):
            parts.append(f"refused {_text(one.get('host'))} ({_text(one.get('reason'))})")
        return _truncate("; ".join(parts)) if parts else None

    def _tool_and_origin(self) -> str:
        source = f" from {self.source}" if self.source else ""
        definition = f", definition {self.definition[:12]}" if self.definition else ""
        return f"{self.call.tool or '?'}{source}{definition}"

    def _make_hint(self) -> str | None:
        if self.call.error_kind != "denied" or self.call.tool is None or self.arguments is None:
            return None
        again = shlex.join(["handrail", "explain", self.call.tool, _text(self.arguments)])
        return f"To see which rule would change this: {again}" if len(again) <= _MAX_SHOWN_CHARS else None


def read_timeline(reader: LogReader, call_id: str) -> CallTimeline | None:
    """Return the timeline of a call, or None if the log has no such call.

    :raises sqlite3.Error: if the log is damaged
    """
    rows = reader.calls(call=call_id, limit=1) if call_id else []
    if not rows:
        return None
    call = rows[0]
    records = list(reader.records(call=call_id))
    proposal = next((one for one in records if one.kind == "proposed"), None)
    proposed = _get_body(proposal)
    intent = next((one for one in reversed(records) if one.kind == "intended"), None)
    intended = _get_body(intent)
    result = _mapping(_get_body(reader.find_outcome(call_id)).get("result"))
    number = proposed.get("generation")
    generation = number if isinstance(number, int) else None
    listed = _find_listed_tool(reader, call, generation)
    wait, locks, parent = intended.get("lock_wait_ms"), intended.get("locks"), proposed.get("parent")
    return CallTimeline(
        call=call,
        arguments=proposed.get("arguments"),
        generation=generation,
        definition=_string(listed.get("definition")),
        source=_string(listed.get("source")),
        session=reader.describe_session(call.session_id) | ({} if call.topic is None else {"topic": call.topic}),
        happenings=tuple(_make_event(one) for one in records),
        locks=tuple(str(lock) for lock in cast("list[Any]", locks)) if isinstance(locks, list) else (),
        lock_wait_ms=float(wait) if isinstance(wait, int | float) else None,
        sandbox=_string(_mapping(result.get("metadata")).get("sandbox")),
        result=result or None,
        parent=_string(parent),
        children=tuple(reader.list_nested_call_ids(call_id)),
    )


def _find_listed_tool(reader: LogReader, call: LoggedCallSummary, number: int | None) -> Mapping[str, Any]:
    """Return what the record of the call's generation says of its tool, or that of the one that introduced the tool.

    Empty if neither is in the log any more.
    """
    for body in reader.generations(before=call.first, limit=_MAX_GENERATIONS):
        if body.get("number") == number:
            tool = _mapping(body.get("tools")).get(call.tool or "")
            if tool is not None or "after" not in body:
                return _mapping(tool)
            number = body["after"]
    return {}


def _make_event(entry: LoggedRecord) -> CallTimelineStep:
    if entry.body is None:
        return CallTimelineStep(entry.at_ns, entry.kind, "removed from the log")
    what, detail = _describe_record(entry.kind, entry.body)
    return CallTimelineStep(entry.at_ns, what, detail)


def _get_body(record: LoggedRecord | None) -> Mapping[str, Any]:
    return _mapping(None if record is None else record.body)


def _describe_record(kind: str, body: Mapping[str, Any]) -> tuple[str, str]:
    result = _mapping(body.get("result"))
    ended = _describe_result(result)
    match kind:
        case "authorised":
            choice = f" ({body['choice']})" if body.get("choice") else ""
            return f"authorised by {body.get('by', 'an unknown decider')}{choice}", _text(body.get("reason") or "")
        case "approval-requested":
            asked = "asked the user a question" if body.get("kind") == "question" else "requested approval"
            return f"{asked}{_describe_approval(body)}", _text(body.get("reason") or "")
        case "approval-responded":
            return f"answered{_describe_approval(body)}", _describe_answer(body)
        case "resumed":
            return "resumed", f"with the tools of generation {body.get('generation')}"
        case "intended":
            return "started", _describe_locks(body)
        case "rejected":
            return f"rejected at {body.get('step', 'an unknown step')}", ended
        case "committed" if body.get("late") is True:
            return "ended late, after the answer", ended
        case "committed":
            return "ended", ended
        case "undo-intended":
            return "undo began", _text(body.get("undo_id") or "")
        case "undone":
            return "undone", f"{body.get('undo_id')}, {body.get('path_count')} paths"
        case "interrupted":
            return "interrupted", f"{body.get('reason', 'the process ended')}; the outcome is {body.get('outcome')}"
        case _:
            return kind, ""


def _describe_locks(body: Mapping[str, Any]) -> str:
    locks, waited = body.get("locks"), body.get("lock_wait_ms")
    held = ", ".join(map(str, cast("list[Any]", locks))) if isinstance(locks, list) and locks else "none"
    return f"locks {held}" + (f", after {waited} ms" if waited else "")


def _describe_result(result: Mapping[str, Any]) -> str:
    if result.get("type") == "error":
        kind = _mapping(result.get("metadata")).get("error_kind")
        return _truncate(f"{kind}: {result.get('error_text')}")
    took = _mapping(result.get("metadata")).get("duration_ms")
    return f"output, after {took} ms" if took is not None else "output"


def _describe_answer(body: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {_text(value)}" for name, value in body.items() if value and name not in ("approval", "arguments_hash")
    ]
    return _truncate(", ".join(parts))


def _describe_approval(body: Mapping[str, Any]) -> str:
    asked = body.get("approval_id", body.get("approval"))
    return f" ({asked})" if isinstance(asked, str) else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _truncate(text: str) -> str:
    return (
        text
        if len(text) <= _MAX_SHOWN_CHARS
        else f"{text[:_MAX_SHOWN_CHARS]}… ({len(text):,} characters; --json shows all)"
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _items(value: object) -> Sequence[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None
