"""Every door of the runtime as it goes over the wire: one closed table, the same on both sides.

A door is found by its name in this table and never by an attribute's. Its arguments are read, then the real runtime of
the call is asked, so that whatever is checked for a tool of the holder is checked here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from handrail.contract.call import Result
from handrail.contract.doors.files import FileBytes, FileLines, FileStat, Found, Match, Written
from handrail.contract.doors.jobs import BroughtIn, Category, Findings, Hit, Manual
from handrail.contract.doors.runtime import Option, Question, Response, Runtime
from handrail.contract.sandbox import Completed
from handrail.ipc import jobs
from handrail.ipc.codec.values import (
    Malformed,
    Reader,
    a_list,
    an_object,
    anything,
    each,
    either,
    flag,
    number,
    one_of,
    optional,
    shape,
    some_bytes,
    text,
    whole,
)
from handrail.ipc.peers import some_answers, some_asks

Given = dict[str, Any]
"""A door's arguments, read: exactly those of its table."""


@dataclass(frozen=True, slots=True)
class Door:
    """One thing that a tool asks of its runtime.

    :param takes: its arguments by name, all of them given, and how each is read by the holder
    :param ask: asks the call's own runtime
    :param gives: reads the answer in the process that asked
    """

    takes: Mapping[str, Reader[Any]]
    ask: Callable[[Runtime, Given], Awaitable[Any]]
    gives: Reader[Any]


_stat = shape(
    FileStat,
    path=text,
    kind=one_of("file", "directory", "symlink", "other"),
    size=whole,
    mtime_ns=whole,
)
_match = shape(Match, path=text, line=whole, text=text)
_found = shape(Found, matches=each(_match), paths=each(text), more=flag, skipped=whole)
_option = shape(Option, label=text, description=text)
_question = shape(Question, question=text, header=text, options=each(_option), multi_select=flag)
questions = each(_question)
_lines = shape(
    FileLines,
    path=text,
    lines=each(text),
    first=whole,
    next=optional(whole),
    total=optional(whole),
    size=whole,
    cut=each(whole),
)
_written = shape(Written, path=text, created=flag, size=whole, sha256=text, before=optional(some_bytes))
_pair = each(text)
_response = shape(Response, url=text, status=whole, headers=each(_pair), body=some_bytes, more=flag, passed=each(text))
_completed = shape(
    Completed,
    exit_code=whole,
    output=some_bytes,
    dropped=whole,
    signal=optional(whole),
    limit=optional(text),
    notes=each(text),
    errors=some_bytes,
)
_category = shape(Category, name=text, description=text, tool_count=whole)
_kind = one_of("category", "tool")
_brought_in = shape(BroughtIn, name=text, kind=_kind, tools=each(text), added=each(text), core=flag, left=each(text))
_hit = shape(
    Hit,
    tool_id=text,
    description=text,
    relevance=number,
    confidence=number,
    weak=flag,
    reason=text,
    source=text,
    tail=flag,
)
findings = shape(Findings, hits=each(_hit), nothing_fits=flag, means=text, unread=text, left=each(text))
_manual = shape(
    Manual,
    id=text,
    name=text,
    category=text,
    description=text,
    parameters=an_object,
    documentation=text,
    guidance=text,
    example=optional(an_object),
    source=text,
)


def _stats(value: Any) -> list[FileStat]:
    return list(each(_stat)(value))


def _result(value: Any) -> Result:
    told = an_object(value)
    if told.get("type") not in ("output", "error"):
        raise Malformed("a result is neither an output nor an error")
    return Result.from_dict(told)


def _nothing(value: Any) -> None:
    return None


def _texts(value: Any) -> dict[str, str]:
    return {text(name): text(one) for name, one in an_object(value).items()}


def _words(value: Any) -> list[str]:
    return [text(word) for word in a_list(value)]


async def _manual_of(on: Runtime, given: Given) -> Any:
    manual = await on.catalog.manual(**given)
    return replace(manual, parameters=dict(manual.parameters))


async def _called(on: Runtime, given: Given) -> Any:
    return (await on.call(**given)).to_dict()


async def _client_asked(on: Runtime, given: Given) -> Any:
    return dict(await on.peer.ask(given["asks"]))


def _of_jobs(op: str) -> Callable[[Runtime, Given], Awaitable[Any]]:
    return lambda on, given: jobs.asked(on.jobs, op, given)


SHELL_RUN, NET_REQUEST = "shell.run", "net.request"
STREAMS: Mapping[str, str] = MappingProxyType({SHELL_RUN: "on_output", NET_REQUEST: "on_body"})
"""The doors that say something before their answer, and the argument by which number; None there for silence."""

DOORS: Mapping[str, Door] = MappingProxyType(
    {
        "files.stat": Door({"path": text}, lambda on, given: on.files.stat(**given), _stat),
        "files.read_bytes": Door(
            {"path": text, "start": whole, "max_bytes": optional(whole)},
            lambda on, given: on.files.read_bytes(**given),
            shape(FileBytes, path=text, data=some_bytes, start=whole, size=whole),
        ),
        "files.read_lines": Door(
            {"path": text, "first": whole, "count": optional(whole), "max_bytes": whole, "max_line": whole},
            lambda on, given: on.files.read_lines(**given),
            _lines,
        ),
        "files.list": Door({"path": text}, lambda on, given: on.files.list(**given), _stats),
        "files.read_for_edit": Door(
            {"path": text, "max_bytes": whole},
            lambda on, given: on.files.read_for_edit(**given),
            some_bytes,
        ),
        "files.write": Door(
            {"path": text, "data": some_bytes, "over": either(one_of("new", "seen"), some_bytes)},
            lambda on, given: on.files.write(**given),
            _written,
        ),
        "search.grep": Door(
            {
                "pattern": text,
                "path": text,
                "glob": optional(text),
                "ignore_case": flag,
                "literal": flag,
                "max_matches": whole,
            },
            lambda on, given: on.search.grep(**given),
            _found,
        ),
        "search.glob": Door(
            {"pattern": text, "path": text, "hidden": flag, "max_paths": whole},
            lambda on, given: on.search.glob(**given),
            _found,
        ),
        SHELL_RUN: Door(
            {
                "command": either(text, each(text)),
                "cwd": optional(text),
                "stdin": some_bytes,
                "environment": optional(_texts),
                "apart": flag,
                "trusted": flag,
                "on_output": optional(whole),
            },
            lambda on, given: on.shell.run(**given),
            _completed,
        ),
        "shell.hidden": Door({"paths": each(text)}, lambda on, given: on.shell.hidden(**given), _words),
        NET_REQUEST: Door(
            {
                "method": text,
                "url": text,
                "headers": optional(_texts),
                "body": some_bytes,
                "max_bytes": whole,
                "timeout_ms": whole,
                "max_redirects": whole,
                "on_body": optional(whole),
            },
            lambda on, given: on.net.request(**given),
            _response,
        ),
        "state.get": Door({"key": text}, lambda on, given: on.state.get(**given), anything),
        "state.put": Door({"key": text, "value": anything}, lambda on, given: on.state.put(**given), _nothing),
        "people.answer": Door(
            {"questions": questions},
            lambda on, given: on.people.answer(**given),
            lambda v: [_words(a) for a in a_list(v)],
        ),
        "peer.ask": Door({"asks": some_asks}, _client_asked, some_answers),
        **{op: Door(takes, _of_jobs(op), jobs.GIVES[op]) for op, takes in jobs.TAKES.items()},
        "catalog.active": Door({}, lambda on, given: on.catalog.active(), _words),
        "catalog.categories": Door({}, lambda on, given: on.catalog.categories(), each(_category)),
        "catalog.load": Door(
            {"name": text, "kind": optional(_kind)}, lambda on, given: on.catalog.load(**given), _brought_in
        ),
        "catalog.search": Door(
            {"query": text, "limit": whole, "extensions_only": flag},
            lambda on, given: on.catalog.search(**given),
            findings,
        ),
        "catalog.manual": Door({"tool": text}, _manual_of, _manual),
        "call": Door({"tool_id": text, "arguments": an_object}, _called, _result),
    }
)
"""All that a tool may ask of its runtime and has to wait for."""

PREFIX = "runtime."
"""Before a door's name, in the name of its operation."""
