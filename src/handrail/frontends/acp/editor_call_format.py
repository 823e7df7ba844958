"""The form of a call in an editor: its title, its kind, its files, its diff and its result."""

from __future__ import annotations

import json
import os.path
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from acp import schema

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.text.neutralisation import unescape_displayed_path
from handrail.contract.text.patch_text import extract_patch_paths
from handrail.contract.tool.spec import ToolSpec, find_patch_arguments
from handrail.frontends.cli.terminal_output import escape_invisible_characters, escape_to_one_line

Content = schema.ContentToolCallContent | schema.FileEditToolCallContent | schema.TerminalToolCallContent

MAX_TITLE = 160
MAX_RESULT_CHARACTERS = 20_000
"""Maximum characters of a shown result. The raw output is the same as the model's."""
MAX_LOCATIONS = 20
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ONE_ARGUMENT = re.compile(r"\{(\w+)\}")
_NO_NEWLINE = "\\ "
_TEXT_KEYS = ("output", "content", "text", "head")
"""Keys of the text in a result. The first one with a string counts."""
_EXIT_KEYS = {"exit_code", "signal", "limit", "dropped_bytes", "notes"}
"""Further keys of a program's result."""
NO_OUTPUT = "(no output)"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PLAIN = str.maketrans({code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)})


def escape_control_characters(text: str) -> str:
    """Return text with control characters written out, so that it cannot control a terminal."""
    return text if _CONTROLS.search(text) is None else text.translate(_PLAIN)


def make_call_title(tool_id: str, arguments: Mapping[str, Any], by: str = "") -> str:
    """Return a one-line title of a call. It may be cut, because an approval request shows the full call.

    :param by: the sub-agent that makes the call; empty for the agent itself
    """
    command, path, patch = (arguments.get(name) for name in ("command", "path", "patch"))
    if isinstance(command, str) and command:
        title = command
    elif isinstance(patch, str) and (named := _list_patched_files(patch)):
        title = f"{tool_id} {', '.join(named)}"
    elif isinstance(path, str) and path:
        title = f"{tool_id} {path}"
    else:
        first = next((value for value in arguments.values() if isinstance(value, str) and value), "")
        title = f"{tool_id}: {first}" if first else tool_id
    return _cut_title(escape_to_one_line(f"{by}: {title}" if by else title))


def _list_patched_files(text: str) -> list[str]:
    """Return the files that a patch changes; none if it cannot be read."""
    try:
        return [*extract_patch_paths(text).written]
    except ToolError:
        return []


def _cut_title(text: str) -> str:
    return text if len(text) <= MAX_TITLE else f"{text[: MAX_TITLE - 1]}…"


def extract_call_file_locations(
    spec: ToolSpec | None, arguments: Mapping[str, Any], workdir: str
) -> list[schema.ToolCallLocation]:
    """Return the files that a call names, as absolute paths."""
    if spec is None:
        return []
    found: dict[str, None] = {}
    patches = find_patch_arguments(spec.parameters)
    fs = (templates for capability, templates in spec.effective_targets.items() if capability.startswith("fs."))
    for template in dict.fromkeys(template for templates in fs for template in templates):
        named = _ONE_ARGUMENT.fullmatch(template)
        value: Any = arguments.get(named.group(1)) if named is not None else None
        if named is not None and named.group(1) in patches and isinstance(value, str):
            value = _list_patched_files(value)
        several = cast("list[Any]", value) if isinstance(value, list) else [value]
        found |= dict.fromkeys(one for one in several if isinstance(one, str) and one and "\0" not in one)
    offset = arguments.get("offset")
    line = offset if spec.kind == "read" and isinstance(offset, int) and offset > 0 else None
    return [
        schema.ToolCallLocation(path=to_protocol_path(path, workdir), line=line) for path in [*found][:MAX_LOCATIONS]
    ]


def to_protocol_path(path: str, workdir: str) -> str:
    """Return an argument or a shown path in the form that the protocol requires."""
    real = unescape_displayed_path(path)
    if any("\ud800" <= char < "\ue000" for char in real):  # bytes that are not UTF-8, which JSON cannot hold
        real = path
    return os.path.normpath(os.path.join(workdir, real))  # noqa: PTH118 - text only: nothing is looked up


class EditorDiff(NamedTuple):
    """A unified diff in the form for an editor.

    :param first_line: the first changed line, in the new file
    :param is_complete: whether the diff is complete
    """

    parts: list[schema.FileEditToolCallContent]
    first_line: int | None
    is_complete: bool


def parse_unified_diff(text: str, path: str, workdir: str | None = None) -> EditorDiff:
    """Parse the unified diff of one file, or of several.

    :param path: the absolute path of the file
    :param workdir: the folder of the paths in a diff of several files; None for one file
    """
    parts: list[schema.FileEditToolCallContent] = []
    first: int | None = None
    created, whole, lines = False, True, text.split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        created = line == "--- /dev/null" if line.startswith("--- ") else created
        if workdir is not None:
            name = line.partition("/")[2] if line.startswith(("--- a/", "+++ b/")) else ""
            path = to_protocol_path(name, workdir) if name else path
            # A move, a new permission and a binary file are not drawn.
            whole = whole and not line.startswith(("rename ", "mode ", "Binary file ", "… "))
        found = _HUNK.match(line)
        at += 1
        if found is None:
            continue
        hunk = _parse_hunk(lines, at, found)
        at = hunk.end
        whole = whole and hunk.is_complete
        if first is None:
            first = max(int(found.group(3)), 1) + hunk.shift
        before = None if created else "\n".join(hunk.old)
        after = "\n".join(hunk.new)
        parts.append(schema.FileEditToolCallContent(type="diff", path=path, old_text=before, new_text=after))
    return EditorDiff(parts, first, whole)


class _DiffHunk(NamedTuple):
    """The lines of one hunk.

    :param shift: number of unchanged lines before the first changed one
    :param is_complete: whether it has as many lines as its header says
    :param end: index of the line after it
    """

    old: list[str]
    new: list[str]
    shift: int
    is_complete: bool
    end: int


def _parse_hunk(lines: Sequence[str], at: int, head: re.Match[str]) -> _DiffHunk:
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
    return _DiffHunk(old, new, shift, old_left <= 0 and new_left <= 0, at)


def make_text_content(words: str) -> schema.ContentToolCallContent:
    return schema.ContentToolCallContent(
        type="content", content=schema.TextContentBlock(type="text", text=escape_invisible_characters(words))
    )


def make_fenced_content(words: str) -> schema.ContentToolCallContent:
    """Return untrusted text as the content of a call, fenced so that it is not read as markup."""
    cut = f"{words[:MAX_RESULT_CHARACTERS]}\n… ({len(words) - MAX_RESULT_CHARACTERS:,} more characters)"
    return make_full_fenced_content(words if len(words) <= MAX_RESULT_CHARACTERS else cut)


def make_full_fenced_content(shown: str) -> schema.ContentToolCallContent:
    """Return untrusted text as fenced content without a length limit, for approval requests."""
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return make_text_content(f"{fence}\n{shown}\n{fence}")


def make_result_content(result: Result, workdir: str) -> tuple[list[Content], list[schema.ToolCallLocation]]:
    """Return the content of a result for an editor, and its more exact file locations."""
    data: Any = result.data
    if not result.ok:
        return [make_text_content(result.error_text or "The call failed without a message."), *_data_content(data)], []
    if isinstance(data, dict):
        fields = cast("dict[str, Any]", data)
        diff, path, files = (fields.get(name) for name in ("diff", "path", "files"))
        if isinstance(diff, str) and isinstance(files, list):
            found = parse_unified_diff(diff, "", workdir)
            left_out = [] if found.is_complete else [make_fenced_content(diff)]
            paths = dict.fromkeys(part.path for part in found.parts)
            return [*found.parts, *left_out], [schema.ToolCallLocation(path=one) for one in [*paths][:MAX_LOCATIONS]]
        if isinstance(diff, str) and isinstance(path, str):
            where = to_protocol_path(path, workdir)
            found = parse_unified_diff(diff, where)
            left_out = [] if found.is_complete else [make_text_content("Part of the change is not shown.")]
            return [*found.parts, *left_out], [schema.ToolCallLocation(path=where, line=found.first_line)]
        if (inner := _job_result(fields)) is not None:
            content, places = make_result_content(inner, workdir)
            return [make_fenced_content(f"{fields['job_id']}: {fields['state']}"), *content], places
    shown, cut = _data_content(cast("object", data)), result.metadata.get("output_path")
    if _has_no_text(cast("object", data)):
        shown.insert(0, make_text_content(NO_OUTPUT))
    return [
        *shown,
        *([make_text_content(f"The output is truncated. It is complete in {cut}.")] if isinstance(cut, str) else []),
    ], []


def _job_result(fields: Mapping[str, Any]) -> Result | None:
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


def _has_no_text(data: object) -> bool:
    """Return whether the data contain no text.

    Without content, an editor would show the JSON of the result.
    """
    return data in (None, "", [], {}) or parse_program_run(data).output == ""


def _data_content(data: object) -> list[Content]:
    """Return the readable content of data: its text, and the exit of the program that wrote it."""
    if data in (None, "", [], {}):
        return []
    if isinstance(data, dict):
        fields, run = cast("dict[str, Any]", data), parse_program_run(cast("dict[str, Any]", data))
        if run.output is not None or fields.keys() <= _EXIT_KEYS:
            return [*([make_fenced_content(run.output)] if run.output else []), *_exit_content(run), *run.notes]
        if all(isinstance(value, (str, int, float)) for value in fields.values()):
            return [make_fenced_content("\n".join(f"{name}: {value}" for name, value in fields.items()))]
    words = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, indent=1, default=str)
    return [make_fenced_content(words)]


class ProgramRunSummary(NamedTuple):
    """The run of a program, as a result describes it.

    :param output: its output, perhaps only the beginning; None if the result has none
    :param exit_code: its exit code; None if a signal ended it or the code is unknown
    :param signal_name: the name of the signal that ended it
    :param notes: further notes for the user
    """

    output: str | None
    exit_code: int | None
    signal_name: str | None
    notes: list[Content]


def parse_program_run(data: object) -> ProgramRunSummary:
    """Return the run of a program that a result's data describe."""
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    output: str | None = next((fields[name] for name in _TEXT_KEYS if isinstance(fields.get(name), str)), None)
    if output is not None and isinstance(tail := fields.get("tail"), str):  # the middle was left out
        output = f"{output}\n[…]\n{tail}"
    code, number, by = _number(fields.get("exit_code")), _number(fields.get("signal")), None
    if number is not None or (code is not None and code < 0):
        code, by = None, _signal_name(-(code or 0) if number is None else number)
    remarks: list[Content] = []
    if isinstance(limit := fields.get("limit"), str):
        remarks.append(make_text_content(limit))
    if dropped := _number(fields.get("dropped_bytes")):
        remarks.append(make_text_content(f"{dropped:,} bytes of the output were not saved."))
    if isinstance(notes := fields.get("notes"), list):
        remarks += [
            make_fenced_content(one) for one in cast("list[Any]", notes) if isinstance(one, str)
        ]  # they name files
    return ProgramRunSummary(output, code, by, remarks)


def _exit_content(run: ProgramRunSummary) -> list[Content]:
    """Return how a program ended. A successful exit is left out if there is output."""
    if run.signal_name is not None:
        return [make_text_content(f"ended by {run.signal_name}")]
    return (
        [make_text_content(f"exit code {run.exit_code}")]
        if run.exit_code or (run.exit_code is not None and not run.output)
        else []
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def make_plan_update(todos: object) -> schema.AgentPlanUpdate | None:
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
            entries.append(
                schema.PlanEntry(content=escape_invisible_characters(content), priority="medium", status=status)
            )
    return schema.AgentPlanUpdate(session_update="plan", entries=entries)
