"""git.add, git.commit, git.create_branch, git.checkout, git.merge, git.stash: changes to the index and branches."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.services.tool_runtime import Runtime, resolve_intended_paths
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.git import git_output_parsers
from handrail.tools.git.git_output_parsers import (
    FOLDER,
    MAX_OUTPUT,
    MOST_LISTED,
    PATHS,
    STATUS,
    TIMEOUT_MS,
    WRITES_CONFIG,
    make_limited_list_fields,
    require_conflict_free_status,
)
from handrail.tools.git.git_repository import (
    GitRepository,
    check_single_commit,
    decode_git_output,
    make_commit_revision,
    open_repository,
    parse_git_output,
    run_in_thread_if_many,
)
from handrail.tools.git.query_tools import read_diff_data
from handrail.tools.tool_declarations import make_closed_object_schema

_IN_THE_WAY = compile_regex_lazily(r"would be overwritten by (?:checkout|merge)|(?:commit your changes or stash them)")


class GitAddTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.add",
        description=(
            "Stage changes for the next commit: the given files and folders (new, changed or deleted), or "
            "everything with `all`. Also marks a conflict in a given file as resolved."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "paths": {
                    **PATHS,
                    "minItems": 1,
                    "description": "Files and folders to stage. Required unless `all` is true",
                },
                "all": {"type": "boolean", "default": False, "description": "Stage all changes, including new files"},
            }
        ),
        idempotent=True,
        timeout_ms=TIMEOUT_MS,
        kind="other",
        guidance="Check git.status first. Stage the files that belong together by name rather than all.",
    )

    def check(self, args: dict[str, Any]) -> None:
        if args.get("all", False) == ("paths" in args):
            raise ToolError("Pass either `paths` or `all: true`, but not both.", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."), writing=True)
        return await stage_changes(repository, await resolve_intended_paths(runtime, args.get("paths", [])))


async def stage_changes(repository: GitRepository, paths: Sequence[str], *, new: bool = True) -> dict[str, Any]:
    """Add changes to the index, file by file.

    ``git add`` itself would look into submodules, whose configuration is not trusted.

    :param paths: the files and folders; empty for all
    :param new: whether to include untracked files
    """
    about = repository.make_pathspecs(paths)
    untracked = "--untracked-files=all" if new else "--untracked-files=no"
    state = await repository.run_and_parse_git(git_output_parsers.parse_status, *STATUS, untracked, "--", *about)
    count = len(state.changed) + len(state.untracked) + len(state.unmerged)

    def wanted_paths() -> tuple[list[bytes], set[bytes]]:
        wanted = [one.path for one in state.changed if one.worktree != "."]
        wanted += [path for path in state.untracked if not path.endswith(b"/")]
        wanted += [path for path, _ in state.unmerged] if paths else []
        return wanted, {one.path for one in state.changed if not one.is_file}

    wanted, links = await run_in_thread_if_many(count, wanted_paths)
    hidden = await repository.find_rule_hidden_paths((path for path in wanted if path not in links), len(wanted))
    staged = await run_in_thread_if_many(count, lambda: [path for path in wanted if path not in hidden])
    if staged:
        names = await run_in_thread_if_many(count, lambda: b"".join(path + b"\0" for path in staged))
        await repository.run_git_command(
            *("update-index", "--add", "--remove", "--replace", "-z", "--stdin"), stdin=names
        )
    return await run_in_thread_if_many(
        count + len(paths), lambda: _describe_staged_files(repository, state, paths, staged, hidden)
    )


def _describe_staged_files(
    repository: GitRepository,
    state: git_output_parsers.ParsedGitStatus,
    paths: Sequence[str],
    staged: Sequence[bytes],
    hidden: Iterable[bytes],
) -> dict[str, Any]:
    """Return the staged files, and the reason for each one that was left out."""
    answer = make_limited_list_fields("staged", staged, repository.to_display_path)
    left: dict[str, Iterable[bytes]] = {
        "Rules deny reading this file.": hidden,
        "This folder is a separate repository.": [path for path in state.untracked if path.endswith(b"/")],
        "The file has a conflict. Resolve it and pass it in `paths`.": [] if paths else [p for p, _ in state.unmerged],
    }
    left_out = {
        repository.to_display_path(path): why for why, found in left.items() for path in islice(found, MOST_LISTED)
    }
    touched = sorted([*staged, *(path for found in left.values() for path in found)])
    for path in paths:
        inner = repository.to_work_tree_path(path).encode("utf-8", "surrogateescape")
        if inner != b"." and not (_first_from(touched, inner) == inner or _is_within(touched, inner)):
            left_out[escape_terminal_controls(path)] = (
                "The path has no unstaged changes, is ignored, or does not exist."
            )
    if left_out:
        answer["not_staged"] = dict(list(left_out.items())[:MOST_LISTED])
    return answer


def _first_from(ordered: Sequence[bytes], path: bytes) -> bytes:
    """Return the first of ``ordered`` that does not come before ``path``."""
    index = bisect_left(ordered, path)
    return ordered[index] if index < len(ordered) else b""


def _is_within(ordered: Sequence[bytes], folder: bytes) -> bool:
    return _first_from(ordered, folder + b"/").startswith(folder + b"/")


class GitCommitTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.commit",
        description=(
            "Create a commit from the staged changes, with a message. `all` first stages all changes of "
            "tracked files (new files need git.add); `amend` replaces the last commit, e.g. to fix its "
            "message. Runs no hooks and signs nothing."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "message": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "Subject line, blank line, reasons",
                },
                "all": {"type": "boolean", "default": False, "description": "Stage all changes of tracked files first"},
                "amend": {"type": "boolean", "default": False, "description": "Replace the last commit"},
            },
            ["message"],
        ),
        timeout_ms=TIMEOUT_MS,
        kind="other",
        guidance="Commit only when the user or the task asks for it. Never amend a pushed commit.",
    )

    def check(self, args: dict[str, Any]) -> None:
        if not args["message"].strip():
            raise ToolError("`message` is blank. Describe the changes.", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."), writing=True)
        amend = args.get("amend", False)
        if args.get("all", False):
            await stage_changes(repository, (), new=False)
        then = "Resolve each, and pass it to git.add."
        state = await require_conflict_free_status(repository, "{} files have conflicts.", then)
        if (
            not amend
            and not await run_in_thread_if_many(
                len(state.changed), lambda: any(one.index != "." for one in state.changed)
            )
            and not await repository.has_git_folder_entry("MERGE_HEAD")
        ):
            unstaged = await run_in_thread_if_many(
                len(state.changed), lambda: sum(one.worktree != "." for one in state.changed)
            )
            raise ToolError(
                "Nothing is staged. "
                + (
                    f"Stage the {unstaged} changed files with git.add, or set `all`."
                    if unstaged
                    else "No tracked file has changed; add new files with git.add."
                ),
                kind="failed",
            )
        words = [
            "commit",
            "--quiet",
            "--no-verify",
            "--no-gpg-sign",
            "--no-status",
            "--no-edit",
            "--cleanup=whitespace",
        ]
        words += ["--amend", "--allow-empty"] if amend else []
        message = args["message"].encode("utf-8", "surrogateescape")
        await repository.run_git_command(*words, "--file=-", stdin=message, variables=read_author_variables(repository))
        return await describe_head(repository, changes=True)


def read_author_variables(repository: GitRepository) -> dict[str, str]:
    """Return the author's name and address from the repository's configuration, as variables.

    Those of the user's configuration are variables in the sandbox already. They would override these.
    """
    found: dict[str, str] = {}
    for who in ("author", "committer"):
        for what in ("name", "email"):
            values = repository.get_config_values(f"{who}.{what}") or repository.get_config_values(f"user.{what}")
            if values and values[-1]:
                found[f"GIT_{who.upper()}_{what.upper()}"] = values[-1]
    return found


async def describe_head(repository: GitRepository, *, changes: bool = False) -> dict[str, Any]:
    """Return the branch, commit and subject of the work tree, and with ``changes`` its files."""
    words = (
        "log",
        "-z",
        "--max-count=1",
        "--no-color",
        "--no-show-signature",
        "--no-notes",
        f"--format={git_output_parsers.COMMIT}",
    )
    listing = ("diff-tree", "-r", "-z", "--root", "--no-commit-id", "--raw", "--find-renames", "--no-ext-diff", "HEAD")
    reading = [repository.run_git_command("symbolic-ref", "--quiet", "--short", "HEAD", codes=(0, 1))]
    reading.append(repository.run_git_command(*words, "HEAD", "--", codes=(0, 128)))
    if changes:
        reading.append(repository.run_git_command(*listing, "--"))
    head, log, *rest = [done.output for done in await asyncio.gather(*reading)]
    found: dict[str, Any] = {"branch": decode_git_output(head).strip() or None}
    if not head:
        found["detached"] = True
    commits = await parse_git_output(log, git_output_parsers.parse_commit_log)
    if commits:
        found |= {name: commits[0][name] for name in ("commit", "subject", "author")}
    for output in rest:
        differing = await parse_git_output(output, git_output_parsers.parse_raw_diff)
        found |= make_limited_list_fields(
            "files", differing, lambda one: {"path": repository.to_display_path(one.path), "change": one.change}
        )
    return found


class GitCreateBranchTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.create_branch",
        description="Create a new branch, without switching to it (see git.checkout).",
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "name": {"type": "string", "minLength": 1, "maxLength": 4096, "description": "Name of the new branch"},
                "start": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": "HEAD",
                    "description": "Commit, branch or tag to start from",
                },
                "track": {
                    "type": "boolean",
                    "default": False,
                    "description": "Track `start`, a remote branch such as origin/main",
                },
            },
            ["name"],
        ),
        requires=WRITES_CONFIG,
        timeout_ms=TIMEOUT_MS,
        kind="other",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        name = check_branch_name(args["name"])
        start = check_single_commit(args.get("start", "HEAD"))
        repository = await open_repository(runtime, args.get("repository", "."), writing=True)
        track = "--track" if args.get("track", False) else "--no-track"
        await repository.run_git_command("branch", track, name, start)
        fields = "%(objectname)%00%(upstream:short)"
        commit, upstream = (
            decode_git_output(
                await repository.read_git_output("for-each-ref", f"--format={fields}", f"refs/heads/{name}")
            )
            .strip("\n")
            .split("\0")
        )
        return {"branch": name, "commit": commit, **({"upstream": upstream} if upstream else {})}


def check_branch_name(given: str) -> str:
    fault = re.search(r"^[-/.]|[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|[/.]$|\.lock(?:/|$)|/\.|^@$|^HEAD$", given)
    if fault is not None:
        raise ToolError(
            f"The branch name is invalid: {given!r} contains {fault.group()!r}. "
            "Use words joined by '-' or '/', such as fix/login.",
            kind="invalid_input",
        )
    return given


class GitCheckoutTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.checkout",
        description=(
            "Switch to a branch, tag or commit. With `paths`, instead restore these files as in `ref` (or as "
            "staged) and throw away (discard) their changes. `track` creates a local branch that tracks a "
            "remote one (origin/feature)."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Branch, tag or commit. Required unless `paths` is given",
                },
                "track": {
                    "type": "boolean",
                    "default": False,
                    "description": "Create and switch to a local branch that tracks `ref`, a remote branch",
                },
                "paths": {
                    **PATHS,
                    "minItems": 1,
                    "description": "Files and folders to restore; the branch stays. Default: none",
                },
            }
        ),
        requires=WRITES_CONFIG,
        timeout_ms=TIMEOUT_MS,
        kind="edit",
        guidance="Uncommitted changes can block a checkout: commit or stash them first.",
    )

    def check(self, args: dict[str, Any]) -> None:
        track = args.get("track", False)
        if "ref" not in args and (track or "paths" not in args):
            raise ToolError("`ref` is missing. Pass the branch, tag or commit to switch to.", kind="invalid_input")
        if track and "paths" in args:
            raise ToolError("`track` and `paths` exclude each other. Pass only one.", kind="invalid_input")
        if "ref" in args:
            check_single_commit(args["ref"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        paths, track = await resolve_intended_paths(runtime, args.get("paths", [])), args.get("track", False)
        repository = await open_repository(runtime, args.get("repository", "."), writing=True, changes_files=True)
        ref = [check_single_commit(args["ref"])] if "ref" in args else []
        await check_checkout_content_unaltered(repository, ref[0] if ref else None, paths)
        if paths:
            ref = [make_commit_revision(args["ref"])] if ref else []
            names = b"".join(
                repository.to_work_tree_path(path).encode("utf-8", "surrogateescape") + b"\0" for path in paths
            )
            await repository.run_git_command(
                *(
                    "checkout",
                    "--quiet",
                    "--no-recurse-submodules",
                    "--pathspec-from-file=-",
                    "--pathspec-file-nul",
                    *ref,
                ),
                stdin=names,
                variables={"GIT_LITERAL_PATHSPECS": "1"},
            )
            return {**await describe_head(repository), "restored": paths}
        how = "--track" if track else "--no-guess"
        try:
            await repository.run_git_command("checkout", "--quiet", "--no-recurse-submodules", how, *ref, "--")
        except ToolError as error:
            raise map_overwrite_error(error) from None
        return await describe_head(repository)


def map_overwrite_error(error: ToolError) -> ToolError:
    """Return git's refusal to overwrite changes as a conflict with the files, or another error unchanged."""
    if _IN_THE_WAY.search(error.text) is None:
        return error
    files = [line.strip() for line in error.text.splitlines() if line.startswith("\t")]
    return ToolError(
        "Uncommitted changes would be overwritten. Commit them (git.add, git.commit), stash them (git.stash), "
        "or discard them (git.checkout with `paths`).",
        kind="conflict",
        data={"files": files[:MOST_LISTED]},
    )


async def check_checkout_content_unaltered(
    repository: GitRepository, ref: str | None, paths: Sequence[str] = ()
) -> None:
    """Refuse to write files that would get the wrong content.

    These are files that rules hide, which the sandbox covers, and files that a filter changes, whose program is not run.

    :param ref: the source of the files; None for the index
    :param paths: the files; empty for all that differ between the last commit and ``ref``
    :raises ToolError: ``denied`` or ``unavailable`` if there are such files
    """
    if ref is None:
        words = ["diff-files"]
    else:
        words = ["diff-index", ref] if paths else ["diff", "--no-renames", "--no-ext-diff", "HEAD", ref]
    options = ("--name-only", "-z", "--ignore-submodules=dirty")
    about = repository.make_pathspecs(paths)
    done = await repository.run_git_command(words[0], *options, *words[1:], "--", *about, codes=(0, 128))
    if done.exit_code:
        return  # the commit does not exist; the command itself reports that
    names = [name for name in done.output.split(b"\0") if name]
    await check_no_hidden_files(repository, await repository.find_rule_hidden_paths(names, len(names)))
    if not repository.unrun_filters or not names:
        return
    listed = b"\0".join((*names, b""))
    attribute_fields = (await repository.read_git_output("check-attr", "-z", "--stdin", "filter", stdin=listed)).split(
        b"\0"
    )
    used = {decode_git_output(value) for value in set(attribute_fields[2::3])} & repository.unrun_filters
    if used or any(name == b".gitattributes" or name.endswith(b"/.gitattributes") for name in names):
        raise ToolError(repository.make_filter_error_text(f"{len(names)} files"), kind="unavailable")


async def check_no_hidden_files(repository: GitRepository, hidden: Collection[bytes]) -> None:
    """Refuse to continue if there are hidden files.

    :raises ToolError: ``denied`` with the names
    """
    names = await run_in_thread_if_many(len(hidden), lambda: sorted(map(repository.to_display_path, hidden)))
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ToolError(
            f"Rules hide {', '.join(names[:5])}{more} from programs, and git needs to access them. "
            f"Ask the user to do this, or to add a rule such as 'allow fs.read {names[0]}'.",
            kind="denied",
        )


# git.merge and git.stash.

_MOST_STASHES = 100


class GitMergeTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.merge",
        description=(
            "Merge a branch, tag or commit into the current branch. On conflicts, returns the files: resolve "
            "them, git.add each, then git.commit, or call again with `abort`."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Branch, tag or commit to merge. Required unless `abort` is true",
                },
                "message": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "Message of the merge commit. Default: git's own",
                },
                "fast_forward": {
                    "enum": ["auto", "only", "never"],
                    "default": "auto",
                    "description": "auto: if possible. only: or fail. never: create a merge commit",
                },
                "abort": {"type": "boolean", "default": False, "description": "Abort the merge in progress"},
            }
        ),
        timeout_ms=TIMEOUT_MS,
        kind="edit",
    )

    def check(self, args: dict[str, Any]) -> None:
        if args.get("abort", False) == ("ref" in args):
            raise ToolError(
                "Pass either `ref` (the branch to merge) or `abort: true`, but not both.", kind="invalid_input"
            )
        if "ref" in args:
            check_single_commit(args["ref"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."), writing=True, changes_files=True)
        if args.get("abort", False):
            await check_checkout_content_unaltered(repository, "HEAD", [repository.top])
            await repository.run_git_command("merge", "--abort")
            return {"result": "aborted", **await describe_head(repository)}
        ref = check_single_commit(args["ref"])
        await check_checkout_content_unaltered(repository, ref)
        before = await describe_head(repository)
        how = {"auto": "--ff", "only": "--ff-only", "never": "--no-ff"}[args.get("fast_forward", "auto")]
        words = [
            "merge",
            "--quiet",
            how,
            "--no-verify",
            "--no-gpg-sign",
            "--no-verify-signatures",
            "--no-edit",
            "--no-stat",
        ]
        words += ["--no-autostash", "--no-squash", "--commit", "--strategy=ort", "--cleanup=whitespace"]
        words += [f"--message={args['message']}"] if "message" in args else []
        try:
            done = await repository.run_git_command(
                *words, ref, codes=(0, 1), variables=read_author_variables(repository)
            )
        except ToolError as error:
            raise map_overwrite_error(error) from None
        if done.exit_code:
            then = "Resolve each, pass it to git.add, then call git.commit; or call git.merge with `abort`."
            await require_conflict_free_status(repository, "The merge left conflicts in {} files.", then)
            raise map_overwrite_error(await repository.make_error_with_hints((*words, ref), done))
        after = await describe_head(repository)
        if before.get("commit") == after.get("commit"):
            return {"result": "already up to date", **after}
        parents = (await repository.read_git_output("rev-parse", "HEAD^@")).split()
        return {"result": "merged" if len(parents) > 1 else "fast-forwarded", **after}


class GitStashTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.stash",
        description=(
            "Stash uncommitted changes (put them aside, shelve them) and restore them: push, list, show, "
            "apply (keeps the stash), pop (removes it), drop (discards it)."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "action": {
                    "enum": ["push", "list", "show", "apply", "pop", "drop"],
                    "default": "push",
                    "description": "Operation to perform",
                },
                "index": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 100_000,
                    "default": 0,
                    "description": "Number of the stash, 0 is the latest",
                },
                "message": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "Description of the stash (push only). Default: git's own",
                },
                "untracked": {
                    "type": "boolean",
                    "default": False,
                    "description": "Include untracked files (push only)",
                },
            }
        ),
        timeout_ms=TIMEOUT_MS,
        max_output=MAX_OUTPUT,
        kind="edit",
    )

    def check(self, args: dict[str, Any]) -> None:
        action: str = args.get("action", "push")
        if action != "push" and ("message" in args or args.get("untracked", False)):
            raise ToolError("`message` and `untracked` apply only to push. Omit them.", kind="invalid_input")
        if action in ("push", "list") and args.get("index", 0):
            raise ToolError("`index` applies only to show, apply, pop and drop. Omit it.", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        action: str = args.get("action", "push")
        repository = await open_repository(
            runtime, args.get("repository", "."), writing=True, changes_files=action not in ("list", "show", "drop")
        )
        if action == "push":
            return await _push_stash(repository, args)
        stashes = await _list_stashes(repository)
        if action == "list":
            return {"stashes": stashes[:_MOST_STASHES]}
        index: int = args.get("index", 0)
        if index >= len(stashes):
            there = f"There are {len(stashes)}, counted from 0." if stashes else "The repository has no stashes."
            raise ToolError(f"Stash {index} does not exist. {there}", kind="invalid_input")
        chosen, stash = stashes[index], f"stash@{{{index}}}"
        if action == "show":
            return {**chosen, **await read_diff_data(repository, [f"{stash}^1", stash], {})}
        if action != "drop":
            await check_checkout_content_unaltered(repository, stash)
        try:
            done = await repository.run_git_command("stash", action, "--quiet", stash, codes=(0, 1))
        except ToolError as error:
            raise map_overwrite_error(error) from None
        if done.exit_code:
            then = "The stash is kept. Resolve each, and pass it to git.add."
            await require_conflict_free_status(repository, "Restoring the stash left conflicts in {} files.", then)
            raise map_overwrite_error(await repository.make_error_with_hints(("stash", action), done))
        return {"done": action, **chosen}


async def _push_stash(repository: GitRepository, args: dict[str, Any]) -> dict[str, Any]:
    # git stash looks into submodules, where their configuration applies instead of ours.
    listing = await repository.read_git_output("ls-files", "--stage", "-z")
    if listing.startswith(b"160000 ") or b"\x00160000 " in listing:
        raise ToolError(
            "Stashing is not available in a repository with submodules. "
            "Commit to a separate branch instead (git.create_branch, git.checkout, git.commit).",
            kind="unavailable",
        )
    state = await repository.run_and_parse_git(git_output_parsers.parse_status, *STATUS, "--untracked-files=no")
    if state.headers.get("branch.oid") == "(initial)":
        raise ToolError(
            "The repository has no commits yet, which a stash needs. Create the first with git.commit.",
            kind="failed",
        )
    unstaged = (one.path for one in state.changed if one.worktree != ".")
    await check_no_hidden_files(repository, await repository.find_rule_hidden_paths(unstaged, len(state.changed)))
    before = len(await _list_stashes(repository))
    words = ["stash", "push", "--quiet"]
    words += ["--include-untracked"] if args.get("untracked", False) else []
    words += [f"--message={args['message']}"] if "message" in args else []
    await repository.run_git_command(*words, variables=read_author_variables(repository))
    stashes = await _list_stashes(repository)
    if len(stashes) == before:
        raise ToolError("No changes were found to stash. Set `untracked` to include new files.", kind="failed")
    return {"done": "push", **stashes[0]}


async def _list_stashes(repository: GitRepository) -> list[dict[str, Any]]:
    if not await repository.has_git_folder_entry("refs/stash") and b"stash" not in await repository.read_git_output(
        "for-each-ref", "--format=%(refname)", "refs/stash"
    ):
        return []
    form = "%H%x00%cI%x00%gs"
    return await repository.run_and_parse_git(
        _parse_stashes,
        "log",
        "--walk-reflogs",
        "-z",
        f"--format={form}",
        "--no-color",
        "--no-show-signature",
        "refs/stash",
        "--",
    )


def _parse_stashes(output: bytes) -> list[dict[str, Any]]:
    fields = output.split(b"\0")
    return [
        {
            "index": at // 3,
            "commit": decode_git_output(fields[at]),
            "date": decode_git_output(fields[at + 1]),
            "message": decode_git_output(fields[at + 2]),
        }
        for at in range(0, len(fields) - 2, 3)
    ]
