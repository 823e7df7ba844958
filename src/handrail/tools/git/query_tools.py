"""git.status, git.log, git.blame, git.branches, git.diff, git.show: the state and history of a repository."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.services.tool_runtime import Runtime, resolve_intended_path, resolve_intended_paths
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.git import git_output_parsers
from handrail.tools.git.git_output_parsers import (
    MOST_LISTED,
    PATHS,
    READ_FOLDER,
    STATUS,
    describe_conflict,
    describe_hidden_paths,
    describe_skipped_filters,
    make_limited_list_fields,
)
from handrail.tools.git.git_repository import (
    GitCommandError,
    GitRepository,
    check_revision,
    decode_git_output,
    make_commit_revision,
    open_repository,
    parse_git_output,
    run_in_thread_if_many,
    strip_url_credentials,
)
from handrail.tools.tool_declarations import make_closed_object_schema

_STATES = {
    "MERGE_HEAD": "merging",
    "CHERRY_PICK_HEAD": "cherry-picking",
    "REVERT_HEAD": "reverting",
    "rebase-merge": "rebasing",
    "rebase-apply": "rebasing",
    "BISECT_LOG": "bisecting",
}


class GitStatusTool(Tool):
    spec = git_output_parsers.git_read_spec(
        id="git.status",
        description=(
            "Show the status of a git repository (working tree): the current branch, upstream with ahead and "
            "behind, staged, modified (not committed) and untracked files, conflicts, and a merge or rebase "
            "in progress."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": READ_FOLDER,
                "untracked": {
                    "type": "boolean",
                    "default": True,
                    "description": "Include untracked files",
                },
            }
        ),
        targets={"fs.read": "{repository}"},
        guidance="Check git.status before you stage, commit, check out or merge.",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."))
        untracked = "normal" if args.get("untracked", True) else "no"
        state = await repository.run_and_parse_git(
            git_output_parsers.parse_status, *STATUS, "--show-stash", f"--untracked-files={untracked}"
        )
        count = len(state.changed)
        unstaged = (one for one in state.changed if one.worktree != ".")
        kept = await repository.find_rule_hidden_paths((one.path for one in unstaged if one.is_file), count)
        answer: dict[str, Any] = {"repository": repository.display_top_folder, **_branch_data(state)}
        for name, word in _STATES.items():
            if await repository.has_git_folder_entry(name):
                answer["state"] = word
                break
        answer |= await run_in_thread_if_many(count, lambda: _status_lists(repository, state, kept))
        if "stash" in state.headers:
            answer["stashes"] = int(state.headers["stash"])
        return answer | describe_skipped_filters(repository)


def _status_lists(
    repository: GitRepository, state: git_output_parsers.ParsedGitStatus, kept: set[bytes]
) -> dict[str, Any]:
    staged = [one for one in state.changed if one.index != "."]
    seen = [one for one in state.changed if one.worktree != "." and one.path not in kept]
    return {
        "clean": not (staged or seen or state.untracked or state.unmerged),
        **make_limited_list_fields("staged", staged, lambda one: _change_data(repository, one, one.index)),
        **make_limited_list_fields("unstaged", seen, lambda one: _change_data(repository, one, one.worktree)),
        **make_limited_list_fields("untracked", state.untracked, repository.to_display_path),
        **make_limited_list_fields("conflicts", state.unmerged, lambda one: describe_conflict(repository, one)),
        **describe_hidden_paths(repository, kept, "Their changes are unknown."),
    }


def _branch_data(state: git_output_parsers.ParsedGitStatus) -> dict[str, Any]:
    headers = state.headers
    commit, head = headers.get("branch.oid"), headers.get("branch.head")
    found: dict[str, Any] = {
        "branch": None if head == "(detached)" else head,
        "commit": None if commit == "(initial)" else commit,
    }
    if head == "(detached)":
        found["detached"] = True
    if "branch.upstream" in headers:
        found["upstream"] = headers["branch.upstream"]
        if "branch.ab" in headers:
            ahead, behind = headers["branch.ab"].split(" ")
            found["ahead"], found["behind"] = int(ahead), -int(behind)
        else:
            found["upstream_deleted"] = True
    return found


def _change_data(repository: GitRepository, one: git_output_parsers.ChangedGitPath, letter: str) -> dict[str, str]:
    found = {"path": repository.to_display_path(one.path), "change": git_output_parsers.describe_status_letter(letter)}
    if one.before is not None and letter in "RC":
        found["from"] = repository.to_display_path(one.before)
    return found


class GitLogTool(Tool):
    spec = git_output_parsers.git_read_spec(
        id="git.log",
        description=(
            "Show the commit history: commits, newest first, with author, date and message. `paths` limits "
            "it to certain files, `ref` sets a branch or a range such as main..feature, `skip` pages."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": READ_FOLDER,
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Branch, tag, commit or range. Default: the current commit",
                },
                "paths": {
                    **PATHS,
                    "description": "Only commits that changed these files or folders. Default: all",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 500,
                    "default": 20,
                    "description": "Maximum number of commits",
                },
                "skip": {"type": "integer", "minimum": 0, "default": 0, "description": "Number of commits to skip"},
            }
        ),
        targets={"fs.read": "{repository}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."))
        limit, skip = args.get("limit", 20), args.get("skip", 0)
        words = [
            "log",
            "-z",
            f"--format={git_output_parsers.COMMIT}",
            f"--max-count={limit + 1}",
            f"--skip={skip}",
            "--no-color",
        ]
        words += ["--no-show-signature", "--no-ext-diff", "--no-textconv", "--no-notes", "--decorate=short"]
        words += [check_revision(args["ref"])] if "ref" in args else []
        about = repository.make_pathspecs(await resolve_intended_paths(runtime, args.get("paths", ())))
        try:
            found = await repository.run_and_parse_git(git_output_parsers.parse_commit_log, *words, "--", *about)
        except GitCommandError as error:
            if "does not have any commits yet" not in error.message:
                raise
            found = []
        answer: dict[str, Any] = {"commits": found[:limit]}
        if len(found) > limit:
            answer["next_skip"] = skip + limit
        return answer


class GitBlameTool(Tool):
    spec = git_output_parsers.git_read_spec(
        id="git.blame",
        description="Show which commit last changed each line of a file, with its author and time.",
        parameters=make_closed_object_schema(
            {
                "path": {
                    "type": "string",
                    "format": "path",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Path of the file",
                },
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Commit, branch or tag. Default: the current file",
                },
                "first": {"type": "integer", "minimum": 1, "default": 1, "description": "First line, counted from 1"},
                "count": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 2000,
                    "default": 300,
                    "description": "Maximum number of lines",
                },
            },
            ["path"],
        ),
        targets={"fs.read": "{path}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path = await resolve_intended_path(runtime, args["path"])
        folder = path.rstrip("/").rpartition("/")[0]
        repository = await open_repository(runtime, folder or ("/" if path.startswith("/") else "."))
        first, count = args.get("first", 1), args.get("count", 300)
        words = ["blame", "--porcelain", "--no-textconv", "--no-progress", "-L", f"{first},+{count + 1}"]
        words += [make_commit_revision(args["ref"])] if "ref" in args else []
        try:
            output = await repository.read_git_output(*words, "--", f"./{repository.to_work_tree_path(path)}")
        except GitCommandError as error:
            if "has only" in error.message:  # fewer lines than the first
                raise ToolError(
                    f"`first` is too large: {error.message.rstrip('.')}. Use a smaller number.",
                    kind="invalid_input",
                ) from None
            if "no such ref: HEAD" in error.message:
                raise ToolError(
                    "The repository has no commits yet, so blame is not available. Create one with git.commit first.",
                    kind="failed",
                ) from None
            raise
        found = await parse_git_output(output, git_output_parsers.parse_blame)
        made: dict[str, Any] = {}
        for number, _, about, _ in found[:count]:
            if number not in made:
                made[number] = _author_data(number, about)
        answer: dict[str, Any] = {
            "path": escape_terminal_controls(path),
            "commits": made,
            "lines": [{"line": line, "commit": number, "text": row} for number, line, _, row in found[:count]],
        }
        if len(found) > count:
            answer["next_first"] = first + count
        return answer


def _author_data(number: str, about: dict[str, str]) -> dict[str, str]:
    if not number.strip("0"):
        return {"author": "not committed yet"}
    found = {"author": f"{about.get('author', '')} {about.get('author-mail', '')}".strip()}
    try:
        seconds, zone = int(about["author-time"]), about.get("author-tz", "+0000")
        offset = datetime.timedelta(hours=int(zone[:3]), minutes=int(f"{zone[0]}{zone[3:]}"))
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone(offset))
        found["date"] = moment.isoformat()
    except (KeyError, ValueError, OverflowError, OSError):
        pass  # a commit may contain any time
    return found | {"subject": about.get("summary", "")}


class GitBranchesTool(Tool):
    spec = git_output_parsers.git_read_spec(
        id="git.branches",
        description=(
            "List the branches of a repository with their upstream and last commit, and its remotes with "
            "their addresses."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": READ_FOLDER,
                "remote": {
                    "type": "boolean",
                    "default": True,
                    "description": "Include remote branches, as of the last fetch",
                },
            }
        ),
        targets={"fs.read": "{repository}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."))
        fields = (
            "refname HEAD objectname upstream:short upstream:track,nobracket committerdate:iso-strict subject symref"
        )
        form = "%00".join(f"%({field})" for field in fields.split(" "))
        kinds = ["refs/heads", *(["refs/remotes"] if args.get("remote", True) else [])]
        words = ("for-each-ref", f"--format={form}", f"--count={2 * MOST_LISTED + 1}", "--sort=-committerdate")
        output = await repository.read_git_output(*words, *kinds)
        local, remote = await parse_git_output(output, _parse_branches)
        answer: dict[str, Any] = {"branches": local[:MOST_LISTED]}
        if args.get("remote", True):
            answer["remote_branches"] = remote[:MOST_LISTED]
        if len(local) > MOST_LISTED or len(remote) > MOST_LISTED:
            answer["has_more"] = f"only the {MOST_LISTED} last changed of each are listed"
        return answer | {"remotes": _read_remotes(repository)}


def _parse_branches(output: bytes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    local: list[dict[str, Any]] = []
    remote: list[dict[str, Any]] = []
    for row in output.split(b"\n"):
        parts = decode_git_output(row).split("\0")
        if len(parts) != 8 or parts[7]:  # origin/HEAD only refers to another branch
            continue
        name, head, commit, upstream, track, date, subject, _ = parts
        one: dict[str, Any] = {
            "branch": name.removeprefix("refs/heads/").removeprefix("refs/remotes/"),
            "commit": commit,
            "date": date,
            "subject": subject,
        }
        if head == "*":
            one["current"] = True
        if upstream:
            one |= {"upstream": upstream, "compared": track or "up to date"}
        (local if name.startswith("refs/heads/") else remote).append(one)
    return local, remote


def _read_remotes(repository: GitRepository) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in repository.entries:
        if one.key.startswith("remote.") and one.key.endswith(".url") and one.value:
            name = one.key[len("remote.") : -len(".url")].encode("utf-8", "surrogateescape")
            found.setdefault(decode_git_output(name), strip_url_credentials(one.value))
    return found


# git.diff and git.show: changes as counts and as a patch, and a file's earlier content.
#
# Files that rules hide are listed by name only: git's stored content of such a file is as unreadable as the file itself.

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
"""The names of git's empty tree, by their length."""
_PATHS = {
    "type": "array",
    "maxItems": 2_000,
    "items": {"type": "string", "minLength": 1, "maxLength": 4096},
    "description": "Only these files or folders. Default: all",
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
    "description": "Return only files and counts, no patch",
}


class GitDiffTool(Tool):
    spec = git_output_parsers.git_read_spec(
        id="git.diff",
        description=(
            "Show changes (a diff) as a patch with counts per file. By default uncommitted changes that are "
            "not staged; `staged`: those that are; `from`: compared with a commit, branch or tag; `from` and "
            "`to`: between two."
        ),
        parameters=make_closed_object_schema(
            {
                "from": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": (
                        "Commit, branch or tag to compare with. Default: the staged state; with `staged`, the last "
                        "commit"
                    ),
                },
                "to": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Commit, branch or tag to compare `from` with. Default: the working tree",
                },
                "repository": READ_FOLDER,
                "staged": {"type": "boolean", "default": False, "description": "Show staged changes"},
                "paths": _PATHS,
                "context": _CONTEXT,
                "counts_only": _COUNTS_ONLY,
            }
        ),
        targets={"fs.read": "{paths}"},
    )

    def check(self, args: dict[str, Any]) -> None:
        if "to" in args and (args.get("staged", False) or "from" not in args):
            raise ToolError("`to` needs `from` and excludes `staged`. Pass `from` and `to`.", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        staged, base, to = args.get("staged", False), args.get("from"), args.get("to")
        repository = await open_repository(runtime, args.get("repository", "."))
        ends = [make_commit_revision(end) for end in (base, to) if end is not None]
        found = await read_diff_data(
            repository,
            ["--cached", *ends] if staged else ends,
            args,
            # What compares with files would read those that are hidden, and fail; their names are found without.
            names=None if staged or to is not None else (["diff-index", *ends] if ends else ["diff-files"]),
        )
        return found | describe_skipped_filters(repository)


class GitShowTool(Tool):
    spec = git_output_parsers.git_read_spec(
        id="git.show",
        description=(
            "Show one commit: message, author, date, and its changes as a patch. With `file`, show the "
            "contents of that file at the commit (an old version) instead."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": READ_FOLDER,
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": "HEAD",
                    "description": "Commit, branch or tag",
                },
                "file": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "File to show. Default: none",
                },
                "paths": _PATHS,
                "context": _CONTEXT,
                "counts_only": _COUNTS_ONLY,
            }
        ),
        targets={"fs.read": "{file}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."))
        ref = args.get("ref", "HEAD")
        commit_name = make_commit_revision(ref)
        if "file" in args:
            return await _file_data(repository, ref, args["file"])
        words = ("log", "-z", "--max-count=1", "--no-color", "--no-show-signature", "--no-notes", "--decorate=short")
        found = await repository.run_and_parse_git(
            git_output_parsers.parse_commit_log, *words, f"--format={git_output_parsers.COMMIT}", commit_name, "--"
        )
        if not found:
            raise ToolError(f"`ref` is not a commit: {ref}. Pass a commit, branch or tag.", kind="invalid_input")
        commit = found[0]
        parent = commit["parents"][0] if commit["parents"] else _EMPTY_TREES[len(commit["commit"])]
        changes = await read_diff_data(repository, [parent, commit["commit"]], args)
        if len(commit["parents"]) > 1:
            commit["compared_to"] = parent
        return {**commit, **changes}


async def _file_data(repository: GitRepository, ref: str, path: str) -> dict[str, Any]:
    inner = repository.to_work_tree_path(await resolve_intended_path(repository.runtime, path))
    at = f"{make_commit_revision(ref)}:{'' if inner == '.' else inner}"
    kind = decode_git_output(await repository.read_git_output("cat-file", "-t", at)).strip()
    if kind != "blob":
        what = "a folder" if kind == "tree" else f"a {kind}"
        raise ToolError(f"{path} is {what} in {ref}, not a file. Pass the path of a file.", kind="invalid_input")
    content = await repository.read_git_output("cat-file", "blob", at)
    found: dict[str, Any] = {"path": path, "ref": ref, "bytes": len(content)}
    if b"\0" in content[:8_000]:
        return found | {"binary": True}
    return found | {"content": await parse_git_output(content, decode_git_output)}


async def read_diff_data(
    repository: GitRepository, ends: Sequence[str], args: dict[str, Any], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the files of a diff with their counts, and its patch.

    :param ends: the git arguments that say what is compared
    :param args: the arguments of the call, with ``paths``, ``context`` and ``counts_only``
    :param names: a command that lists differing names without reading files, unlike ``git diff``
    """
    paths = await resolve_intended_paths(repository.runtime, args.get("paths", ()))
    about = repository.make_pathspecs(paths)
    listing = names or ["diff", *ends, "--no-renames", *_PLAIN]
    options = ("--raw", "-z", "--ignore-submodules=dirty")
    changed = await repository.run_and_parse_git(
        git_output_parsers.parse_raw_diff, listing[0], *options, *listing[1:], "--", *about
    )
    kept = await repository.find_rule_hidden_paths(
        (one.path for one in changed if one.is_file or names is None), len(changed)
    )
    about = repository.make_pathspecs(paths or [repository.top], kept)
    words = ["diff", *ends, *_PLAIN, "--find-renames"]
    counted, patch = await asyncio.gather(
        repository.run_and_parse_git(
            git_output_parsers.parse_raw_diff, *words, "--raw", "--numstat", "-z", "--", *about
        ),
        _read_patch(repository, [*words, f"--unified={args.get('context', 3)}", "--", *about], args),
    )

    def lists() -> dict[str, Any]:
        lines = [(one.added, one.deleted) for one in counted if one.added is not None and one.deleted is not None]
        return {
            **make_limited_list_fields("files", counted, lambda one: _diff_row(repository, one)),
            "added": sum(added for added, _ in lines),
            "deleted": sum(deleted for _, deleted in lines),
            **describe_hidden_paths(repository, kept, "Their changes are omitted."),
        }

    answer = await run_in_thread_if_many(len(counted) + len(kept), lists)
    if patch is not None:
        answer["patch"] = await parse_git_output(patch, decode_git_output)
    return answer


async def _read_patch(repository: GitRepository, words: Sequence[str], args: dict[str, Any]) -> bytes | None:
    if args.get("counts_only", False):
        return None
    return await repository.read_git_output(*words[:1], "--patch", "--src-prefix=a/", "--dst-prefix=b/", *words[1:])


def _diff_row(repository: GitRepository, one: git_output_parsers.DiffPathEntry) -> dict[str, Any]:
    found: dict[str, Any] = {"path": repository.to_display_path(one.path), "change": one.change}
    if one.before is not None:
        found["from"] = repository.to_display_path(one.before)
    if one.added is None or one.deleted is None:
        found["binary"] = True
    else:
        found |= {"added": one.added, "deleted": one.deleted}
    return found
