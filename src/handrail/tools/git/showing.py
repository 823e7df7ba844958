"""git.diff and git.show: what changed, as counts and as a patch, and what a file was.

Files that rules keep from being read are left out by name: what git holds of them is no more to be read than they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema
from handrail.tools.git import declaring, forms
from handrail.tools.git.answers import filters_noted, hidden, listed
from handrail.tools.git.declaring import READ_FOLDER
from handrail.tools.git.repository import Repository, commitish, opened, text

_PLAIN = (
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-relative",
    "--ignore-submodules=dirty",
    "--submodule=short",
)
_EMPTY_TREES = {
    40: "4b825dc642cb6eb9a060e54bf8d69288fbee4904",
    64: "6ef19b41225c5369f1c104d45d8d85efa9b057b53b14b4b9b939dd74decc5321",
}
"""What git calls a tree with nothing in it, by the length of its names."""
_PATHS = {
    "type": "array",
    "maxItems": 2_000,
    "items": {"type": "string", "minLength": 1, "maxLength": 4096},
    "description": "Only these files or folders",
}
_CONTEXT = {
    "type": "integer",
    "minimum": 0,
    "maximum": 100,
    "default": 3,
    "description": "Unchanged lines around each change",
}
_COUNTS_ONLY = {
    "type": "boolean",
    "default": False,
    "description": "Only the files with their counts, without the patch",
}


class Diff(Tool):
    spec = declaring.reading(
        id="git.diff",
        description=(
            "Show changes as a patch with counts per file. Without further arguments: what is changed and not staged. "
            "`staged`: what is staged; `from`: compared with a commit, branch or tag; `from` and `to`: between two."
        ),
        parameters=object_schema(
            {
                "from": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "The commit, branch or tag to compare with",
                },
                "to": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Compare `from` with this, not with the files",
                },
                "repository": READ_FOLDER,
                "staged": {"type": "boolean", "default": False, "description": "What is staged instead of what is not"},
                "paths": _PATHS,
                "context": _CONTEXT,
                "counts_only": _COUNTS_ONLY,
            }
        ),
        targets={"fs.read": "{paths}"},
    )

    def check(self, args: dict[str, Any]) -> None:
        if "to" in args and (args.get("staged", False) or "from" not in args):
            raise ToolError("`to` is compared with `from`; give both, without `staged`", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        staged, base, to = args.get("staged", False), args.get("from"), args.get("to")
        repository = await opened(runtime, args.get("repository", "."))
        ends = [commitish(end) for end in (base, to) if end is not None]
        found = await difference(
            repository,
            ["--cached", *ends] if staged else ends,
            args,
            # What compares with files would read those that are hidden, and fail; their names are found without.
            names=None if staged or to is not None else (["diff-index", *ends] if ends else ["diff-files"]),
        )
        return found | filters_noted(repository)


class Show(Tool):
    spec = declaring.reading(
        id="git.show",
        description=(
            "Show one commit: its message, author and date, and its changes as a patch. With `file`, show what that "
            "file held at the commit instead."
        ),
        parameters=object_schema(
            {
                "repository": READ_FOLDER,
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": "HEAD",
                    "description": "The commit, branch or tag; the current commit if left out",
                },
                "file": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Show this file as it was then",
                },
                "paths": _PATHS,
                "context": _CONTEXT,
                "counts_only": _COUNTS_ONLY,
            }
        ),
        targets={"fs.read": "{file}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await opened(runtime, args.get("repository", "."))
        ref = commitish(args.get("ref", "HEAD"))
        if "file" in args:
            return await _file(repository, ref, args["file"])
        words = ("log", "-z", "--max-count=1", "--no-color", "--no-show-signature", "--no-notes", "--decorate=short")
        found = await repository.read(forms.commits, *words, f"--format={forms.COMMIT}", ref, "--")
        if not found:
            raise ToolError(f"{ref} names no commit", kind="invalid_input")
        commit = found[0]
        parent = commit["parents"][0] if commit["parents"] else _EMPTY_TREES[len(commit["commit"])]
        changes = await difference(repository, [parent, commit["commit"]], args)
        if len(commit["parents"]) > 1:
            commit["compared_with"] = parent
        return {**commit, **changes}


async def _file(repository: Repository, ref: str, path: str) -> dict[str, Any]:
    inner = repository.within(path)
    at = f"{ref}:{'' if inner == '.' else inner}"
    kind = text(await repository.output("cat-file", "-t", at)).strip()
    if kind != "blob":
        what = "a folder" if kind == "tree" else f"a {kind}"
        raise ToolError(f"{path} is {what} in {ref}, not a file; name a file in it", kind="invalid_input")
    content = await repository.output("cat-file", "blob", at)
    found: dict[str, Any] = {"path": path, "ref": ref, "bytes": len(content)}
    if b"\0" in content[:8_000]:
        return found | {"binary": True}
    return found | {"content": text(content)}


async def difference(
    repository: Repository, ends: Sequence[str], args: dict[str, Any], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The files of a difference with their counts, and its patch.

    :param ends: the words that say what is compared
    :param args: a call's, with ``paths``, ``context`` and ``counts_only``
    :param names: the command that lists what differs without looking into files, where ``git diff`` would
    """
    paths = args.get("paths", ())
    about = repository.pathspecs(paths)
    listing = names or ["diff", *ends, "--no-renames", *_PLAIN]
    options = ("--raw", "-z", "--ignore-submodules=dirty")
    changed = await repository.read(forms.differences, listing[0], *options, *listing[1:], "--", *about)
    kept = await repository.hidden(one.path for one in changed if one.is_file or names is None)
    about = repository.pathspecs(paths or [repository.top], kept)
    words = ["diff", *ends, *_PLAIN, "--find-renames"]
    counted, patch = await asyncio.gather(
        repository.read(forms.differences, *words, "--raw", "--numstat", "-z", "--", *about),
        _patch(repository, [*words, f"--unified={args.get('context', 3)}", "--", *about], args),
    )
    answer = listed("files", counted, lambda one: _row(repository, one))
    lines = [(one.added, one.deleted) for one in counted if one.added is not None and one.deleted is not None]
    answer["added"], answer["deleted"] = sum(added for added, _ in lines), sum(deleted for _, deleted in lines)
    answer |= hidden(repository, kept, "their changes are left out")
    if patch is not None:
        answer["patch"] = text(patch)
    return answer


async def _patch(repository: Repository, words: Sequence[str], args: dict[str, Any]) -> bytes | None:
    if args.get("counts_only", False):
        return None
    return await repository.output(*words[:1], "--patch", "--src-prefix=a/", "--dst-prefix=b/", *words[1:])


def _row(repository: Repository, one: forms.Difference) -> dict[str, Any]:
    found: dict[str, Any] = {"path": repository.shown(one.path), "change": one.change}
    if one.before is not None:
        found["from"] = repository.shown(one.before)
    if one.added is None or one.deleted is None:
        found["binary"] = True
    else:
        found |= {"added": one.added, "deleted": one.deleted}
    return found
