"""apply_patch: changes of several files in one call, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.text.patch_text import parse_patch
from handrail.contract.tool.spec import LockSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.files.editing_tools import describe_text_format
from handrail.tools.files.lines_and_diffs import UnifiedDiff
from handrail.tools.files.patch_plan import PatchedFile, PatchPlan, plan_patch
from handrail.tools.tool_declarations import file_change_spec, make_closed_object_schema


class ApplyPatchTool(Tool):
    spec = file_change_spec(
        id="apply_patch",
        description=(
            "Change several files in one call, all or none: create, update, move and delete them. Takes a unified diff or the "
            "`*** Begin Patch` format. The lines of each hunk must match exactly one place in the file; line numbers can be "
            "wrong. Returns a unified diff."
        ),
        parameters=make_closed_object_schema(
            {
                "patch": {
                    "type": "string",
                    "format": "patch",
                    "minLength": 1,
                    "description": (
                        "Unified diff, or `*** Begin Patch`, sections, `*** End Patch`. Sections: `*** Add File: PATH` with "
                        "lines that begin with `+`; `*** Delete File: PATH`; `*** Update File: PATH`, optionally "
                        "`*** Move to: PATH`, then hunks. A hunk begins with `@@`, optionally with a line before the place, "
                        "such as `@@ def name():`. Its lines begin with a space (unchanged), `-` or `+`. Paths are relative "
                        "to the workspace"
                    ),
                },
            },
            ["patch"],
        ),
        locks=(LockSpec("file:{patch}", "X"),),
        targets={"fs.read": "{patch}", "fs.write": "{patch}"},
        guidance=(
            "For changes in several files, or several places of a file, use apply_patch. Include three unchanged "
            "lines before and after each change. If a hunk fails, nothing was changed: send the whole patch again."
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        parse_patch(args["patch"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        plan = await plan_patch(args["patch"], runtime.files)
        changes = plan.list_changes()
        shown = await runtime.files.change_atomically(changes) if changes else ()
        names = dict(zip((change.path for change in changes), shown, strict=True))
        return await asyncio.to_thread(_make_answer, plan, names)


def format_patch_diffs(plan: PatchPlan) -> str:
    """Return the diffs of all files of a patch."""
    return "\n".join(diff.text for _, diff in _list_diffs(plan, {}) if diff.text)


def _list_diffs(plan: PatchPlan, names: dict[str, str]) -> Iterator[tuple[PatchedFile, UnifiedDiff]]:
    for file in plan.files:
        yield file, file.make_diff(_show(file.path, names), _show(file.section.path, names))


def _show(path: str, names: dict[str, str]) -> str:
    return names.get(path) or escape_terminal_controls(path)


def _make_answer(plan: PatchPlan, names: dict[str, str]) -> dict[str, object]:
    diffs = list(_list_diffs(plan, names))
    answer: dict[str, object] = {
        "files": [_describe_file(file, diff, names) for file, diff in diffs],
        **UnifiedDiff(
            "\n".join(diff.text for _, diff in diffs if diff.text),
            sum(diff.added for _, diff in diffs),
            sum(diff.removed for _, diff in diffs),
            sum(diff.left_out for _, diff in diffs),
        ).to_data(),
    }
    if not names:
        answer["already_applied"] = True
    return answer


def _describe_file(file: PatchedFile, diff: UnifiedDiff, names: dict[str, str]) -> dict[str, object]:
    """Return what happened to one file."""
    found: dict[str, object] = {"path": _show(file.path, names), "action": file.action}
    if file.action == "moved":
        found["from"] = _show(file.section.path, names)
    if file.is_applied:
        return {**found, "already_applied": True}
    found |= {"lines_added": diff.added, "lines_removed": diff.removed}
    if file.grade != "exact":
        found["matched"] = file.grade
    if file.applied_hunks:
        found["already_applied_hunks"] = list(file.applied_hunks)
    if file.before is not None and file.action != "deleted":
        return found | describe_text_format(file.before, file.text, file.notes)
    return found | file.notes.to_data()
