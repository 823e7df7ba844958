"""The form of a call in an editor: its title, its kind, its files, its diff and its result."""

from __future__ import annotations

import json
import os.path
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from acp import schema

from handrail.contract.call import Result
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.cli.show import one_line, spelled_out

Content = schema.ContentToolCallContent | schema.FileEditToolCallContent | schema.TerminalToolCallContent

MOST_TITLE = 160
MOST_SHOWN = 20_000
"""Maximum characters of a shown result. The raw output is the same as the model's."""
MOST_PLACES = 20
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ONE_ARGUMENT = re.compile(r"\{(\w+)\}")
_NO_NEWLINE = "\\ "
_WRITTEN = ("output", "content", "text", "head")
"""Keys of the text in a result. The first one with a string counts."""
_ENDS = {"exit_code", "signal", "limit", "dropped_bytes", "notes"}
"""Further keys of a program's result."""
NO_OUTPUT = "(no output)"
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN = str.maketrans({code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)})


def plain(text: str) -> str:
    """Return text with control characters written out, so that it cannot control a terminal."""
    return text if _STEERING.search(text) is None else text.translate(_PLAIN)


def title_of(tool_id: str, arguments: Mapping[str, Any], by: str = "") -> str:
    """Return a one-line title of a call. It may be cut, because an approval request shows the full call.

    :param by: the sub-agent that makes the call; empty for the agent itself
    """
    command, path = arguments.get("command"), arguments.get("path")
    if isinstance(command, str) and command:
        title = command
    elif isinstance(path, str) and path:
        title = f"{tool_id} {path}"
    else:
        first = next((value for value in arguments.values() if isinstance(value, str) and value), "")
        title = f"{tool_id}: {first}" if first else tool_id
    return _cut(one_line(f"{by}: {title}" if by else title))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TITLE else f"{text[: MOST_TITLE - 1]}…"


def places_of(spec: ToolSpec | None, arguments: Mapping[str, Any], workdir: str) -> list[schema.ToolCallLocation]:
    """Return the files that a call names, as absolute paths."""
    if spec is None:
        return []
    found: dict[str, None] = {}
    for capability, template in spec.targets.items():
        named = _ONE_ARGUMENT.fullmatch(template) if capability.startswith("fs.") else None
        value: Any = arguments.get(named.group(1)) if named is not None else None
        several = cast("list[Any]", value) if isinstance(value, list) else [value]
        found |= dict.fromkeys(one for one in several if isinstance(one, str) and one and "\0" not in one)
    offset = arguments.get("offset")
    line = offset if spec.kind == "read" and isinstance(offset, int) and offset > 0 else None
    return [schema.ToolCallLocation(path=absolute(path, workdir), line=line) for path in [*found][:MOST_PLACES]]


def absolute(path: str, workdir: str) -> str:
    """Return a path in the form that the protocol requires."""
    return os.path.normpath(os.path.join(workdir, path))  # noqa: PTH118 - text only: nothing is looked up


class Differences(NamedTuple):
    """A unified diff in the form for an editor.

    :param line: the first changed line, in the new file
    :param whole: whether the diff is complete
    """

    parts: list[schema.FileEditToolCallContent]
    line: int | None
    whole: bool


def differences(text: str, path: str) -> Differences:
    """Parse the unified diff of one file.

    :param path: the absolute path of the file
    """
    parts: list[schema.FileEditToolCallContent] = []
    first: int | None = None
    created, whole, lines = False, True, text.split("\n")
    at = 0
    while at < len(lines):
        created = created or lines[at].startswith("--- /dev/null")
        found = _HUNK.match(lines[at])
        at += 1
        if found is None:
            continue
        hunk = _hunk_at(lines, at, found)
        at = hunk.end
        whole = whole and hunk.whole
        if first is None:
            first = max(int(found.group(3)), 1) + hunk.shift
        before = None if created else "\n".join(hunk.old)
        after = "\n".join(hunk.new)
        parts.append(schema.FileEditToolCallContent(type="diff", path=path, old_text=before, new_text=after))
    return Differences(parts, first, whole)


class _Hunk(NamedTuple):
    """The lines of one hunk.

    :param shift: number of unchanged lines before the first changed one
    :param whole: whether it has as many lines as its header says
    :param end: index of the line after it
    """

    old: list[str]
    new: list[str]
    shift: int
    whole: bool
    end: int


def _hunk_at(lines: Sequence[str], at: int, head: re.Match[str]) -> _Hunk:
    old_left, new_left = (int(head.group(n)) if head.group(n) is not None else 1 for n in (2, 4))
    old: list[str] = []
    new: list[str] = []
    leading = True
    shift = 0
    while at < len(lines) and (old_left > 0 or new_left > 0 or lines[at].startswith(_NO_NEWLINE)):
        sign, line = lines[at][:1], lines[at][1:]
        if sign not in ("", " ", "-", "+", "\\"):
            break
        at += 1
        if sign == "\\":
            continue
        leading = leading and sign in ("", " ")
        shift += leading
        if sign != "+":
            old.append(line)
            old_left -= 1
        if sign != "-":
            new.append(line)
            new_left -= 1
    return _Hunk(old, new, shift, old_left <= 0 and new_left <= 0, at)


def text(words: str) -> schema.ContentToolCallContent:
    """Return text as the content of a call."""
    return schema.ContentToolCallContent(
        type="content", content=schema.TextContentBlock(type="text", text=spelled_out(words))
    )


def fenced(words: str) -> schema.ContentToolCallContent:
    """Return untrusted text as the content of a call, fenced so that it is not read as markup."""
    cut = f"{words[:MOST_SHOWN]}\n… ({len(words) - MOST_SHOWN:,} more characters)"
    return fenced_whole(words if len(words) <= MOST_SHOWN else cut)


def fenced_whole(shown: str) -> schema.ContentToolCallContent:
    """Return untrusted text as fenced content without a length limit, for approval requests."""
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return text(f"{fence}\n{shown}\n{fence}")


def content_of(result: Result, workdir: str) -> tuple[list[Content], list[schema.ToolCallLocation]]:
    """Return the content of a result for an editor, and its more exact file locations."""
    data: Any = result.data
    if not result.ok:
        return [text(result.error_text or "The call failed without a message."), *_written(data)], []
    if isinstance(data, dict):
        fields = cast("dict[str, Any]", data)
        diff, path = fields.get("diff"), fields.get("path")
        if isinstance(diff, str) and isinstance(path, str):
            where = absolute(path, workdir)
            found = differences(diff, where)
            left_out = [] if found.whole else [text("Part of the change is not shown.")]
            return [*found.parts, *left_out], [schema.ToolCallLocation(path=where, line=found.line)]
        if (inner := _waited_for(fields)) is not None:
            content, places = content_of(inner, workdir)
            return [fenced(f"{fields['job_id']}: {fields['state']}"), *content], places
    shown, cut = _written(cast("object", data)), result.metadata.get("output_path")
    if _says_nothing(cast("object", data)):
        shown.insert(0, text(NO_OUTPUT))
    return [*shown, *([text(f"The output is truncated. It is complete in {cut}.")] if isinstance(cut, str) else [])], []


def _waited_for(fields: Mapping[str, Any]) -> Result | None:
    """Return the result of a job inside the result of a call that waited for it, or None."""
    found: object = fields.get("result")
    if not isinstance(found, dict) or not {"job_id", "state"} <= fields.keys():
        return None
    inner = cast("dict[str, Any]", found)
    match inner.get("type"), inner.get("error_text"):
        case "output", _:
            return Result("output", inner.get("data"))
        case "error", str() as words:
            return Result("error", inner.get("data"), words)
        case _:
            return None


def _says_nothing(data: object) -> bool:
    """Return whether the data contain no text.

    Without content, an editor would show the JSON of the result.
    """
    return data in (None, "", [], {}) or run_of(data).output == ""


def _written(data: object) -> list[Content]:
    """Return the readable content of data: its text, and the exit of the program that wrote it."""
    if data in (None, "", [], {}):
        return []
    if isinstance(data, dict):
        fields, run = cast("dict[str, Any]", data), run_of(cast("dict[str, Any]", data))
        if run.output is not None or fields.keys() <= _ENDS:
            return [*([fenced(run.output)] if run.output else []), *_end(run), *run.remarks]
        if all(isinstance(value, (str, int, float)) for value in fields.values()):
            return [fenced("\n".join(f"{name}: {value}" for name, value in fields.items()))]
    words = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, indent=1, default=str)
    return [fenced(words)]


class Run(NamedTuple):
    """The run of a program, as a result describes it.

    :param output: its output, perhaps only the beginning; None if the result has none
    :param code: its exit code; None if a signal ended it or the code is unknown
    :param by: the name of the signal that ended it
    :param remarks: further notes for the user
    """

    output: str | None
    code: int | None
    by: str | None
    remarks: list[Content]


def run_of(data: object) -> Run:
    """Return the run of a program that a result's data describe."""
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    output: str | None = next((fields[name] for name in _WRITTEN if isinstance(fields.get(name), str)), None)
    code, number, by = _number(fields.get("exit_code")), _number(fields.get("signal")), None
    if number is not None or (code is not None and code < 0):
        code, by = None, _signal(-(code or 0) if number is None else number)
    remarks: list[Content] = []
    if isinstance(limit := fields.get("limit"), str):
        remarks.append(text(limit))
    if dropped := _number(fields.get("dropped_bytes")):
        remarks.append(text(f"{dropped:,} bytes of the output were not saved."))
    if isinstance(notes := fields.get("notes"), list):
        remarks += [fenced(one) for one in cast("list[Any]", notes) if isinstance(one, str)]  # they name files
    return Run(output, code, by, remarks)


def _end(run: Run) -> list[Content]:
    """Return how a program ended. A successful exit is left out if there is output."""
    if run.by is not None:
        return [text(f"ended by {run.by}")]
    return [text(f"exit code {run.code}")] if run.code or (run.code is not None and not run.output) else []


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def plan_of(todos: object) -> schema.AgentPlanUpdate | None:
    """Return a session's todo list as a plan update, or None if it is not a list."""
    if not isinstance(todos, Sequence) or isinstance(todos, str):
        return None
    entries: list[schema.PlanEntry] = []
    for one in cast("Sequence[object]", todos):
        if not isinstance(one, Mapping):
            continue
        task = cast("Mapping[str, Any]", one)
        content, status = task.get("content"), task.get("status")
        if isinstance(content, str) and status in ("pending", "in_progress", "completed"):
            entries.append(schema.PlanEntry(content=spelled_out(content), priority="medium", status=status))
    return schema.AgentPlanUpdate(session_update="plan", entries=entries)
