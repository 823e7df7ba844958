"""git.merge and git.stash: bringing together what was done apart, and putting aside what is not done yet."""

from __future__ import annotations

from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema
from handrail.tools.git import declaring, forms
from handrail.tools.git.answers import STATUS, check_conflicts
from handrail.tools.git.changing import check_writing, described, identity, in_the_way, refuse_hidden
from handrail.tools.git.declaring import FOLDER, MAX_OUTPUT, TIMEOUT_MS
from handrail.tools.git.repository import Repository, commitish, opened, text
from handrail.tools.git.showing import difference

_MOST_STASHES = 100


class Merge(Tool):
    spec = declaring.changing(
        id="git.merge",
        description=(
            "Merge a branch, tag or commit into the current branch. Conflicts are answered with the files: solve them, "
            "git.add each, then git.commit; or call again with `abort`."
        ),
        parameters=object_schema(
            {
                "repository": FOLDER,
                "ref": {"type": "string", "minLength": 1, "maxLength": 4096, "description": "What to merge"},
                "message": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "The merge commit's message; git's own if left out",
                },
                "fast_forward": {
                    "enum": ["auto", "only", "never"],
                    "default": "auto",
                    "description": "auto: move the branch on where that is enough; only: or else refuse; never: always commit",
                },
                "abort": {"type": "boolean", "default": False, "description": "Give up the merge under way instead"},
            }
        ),
        timeout_ms=TIMEOUT_MS,
        kind="edit",
    )

    def check(self, args: dict[str, Any]) -> None:
        if args.get("abort", False) == ("ref" in args):
            raise ToolError("give either `ref`, what to merge, or `abort`: true", kind="invalid_input")
        if "ref" in args:
            commitish(args["ref"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await opened(runtime, args.get("repository", "."), writing=True)
        if args.get("abort", False):
            await check_writing(repository, "HEAD", [repository.top])
            await repository.run("merge", "--abort")
            return {"result": "aborted", **await described(repository)}
        ref = commitish(args["ref"])
        await check_writing(repository, ref)
        before = await described(repository)
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
            done = await repository.run(*words, ref, codes=(0, 1), variables=identity(repository))
        except ToolError as error:
            raise in_the_way(error) from None
        if done.exit_code:
            then = "solve each and give it to git.add, then git.commit; or git.merge with abort"
            await check_conflicts(repository, "the merge left conflicts in {} files", then)
            raise in_the_way(await repository.failure((*words, ref), done))
        after = await described(repository)
        if before.get("commit") == after.get("commit"):
            return {"result": "already up to date", **after}
        parents = (await repository.output("rev-parse", "HEAD^@")).split()
        return {"result": "merged" if len(parents) > 1 else "fast-forwarded", **after}


class Stash(Tool):
    spec = declaring.changing(
        id="git.stash",
        description=(
            "Put changes that are not committed aside and take them back: push, list, show, apply (keeps the stash), pop "
            "(removes it), drop (discards it)."
        ),
        parameters=object_schema(
            {
                "repository": FOLDER,
                "action": {
                    "enum": ["push", "list", "show", "apply", "pop", "drop"],
                    "default": "push",
                    "description": "What to do; push if left out",
                },
                "index": {
                    "type": "integer",
                    "minimum": 0,
                    "maximum": 100_000,
                    "default": 0,
                    "description": "Which stash, 0 the last",
                },
                "message": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "For push: what it is",
                },
                "untracked": {"type": "boolean", "default": False, "description": "For push: new files too"},
            }
        ),
        timeout_ms=TIMEOUT_MS,
        max_output=MAX_OUTPUT,
        kind="edit",
    )

    def check(self, args: dict[str, Any]) -> None:
        action: str = args.get("action", "push")
        if action != "push" and ("message" in args or args.get("untracked", False)):
            raise ToolError("`message` and `untracked` are for push", kind="invalid_input")
        if action in ("push", "list") and args.get("index", 0):
            raise ToolError("`index` is for show, apply, pop and drop", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        action: str = args.get("action", "push")
        repository = await opened(runtime, args.get("repository", "."), writing=True)
        if action == "push":
            return await _push(repository, args)
        stashes = await _list(repository)
        if action == "list":
            return {"stashes": stashes[:_MOST_STASHES]}
        index: int = args.get("index", 0)
        if index >= len(stashes):
            there = f"there are {len(stashes)}, counted from 0" if stashes else "nothing is put aside"
            raise ToolError(f"there is no stash {index}; {there}", kind="invalid_input")
        chosen, stash = stashes[index], f"stash@{{{index}}}"
        if action == "show":
            return {**chosen, **await difference(repository, [f"{stash}^1", stash], {})}
        if action != "drop":
            await check_writing(repository, stash)
        try:
            done = await repository.run("stash", action, "--quiet", stash, codes=(0, 1))
        except ToolError as error:
            raise in_the_way(error) from None
        if done.exit_code:
            then = "the stash is kept; solve each and give it to git.add"
            await check_conflicts(repository, "taking the stash back left conflicts in {} files", then)
            raise in_the_way(await repository.failure(("stash", action), done))
        return {"done": action, **chosen}


async def _push(repository: Repository, args: dict[str, Any]) -> dict[str, Any]:
    # It looks into submodules, where their own configuration counts, and nothing of ours.
    if any(row.startswith(b"160000 ") for row in (await repository.output("ls-files", "--stage", "-z")).split(b"\0")):
        raise ToolError(
            "this repository has submodules, into which git stash looks with their own configuration, so it is not done "
            "here; commit to a branch of its own instead (git.create_branch, git.checkout, git.commit)",
            kind="unavailable",
        )
    state = await repository.read(forms.status, *STATUS, "--untracked-files=no")
    if state.headers.get("branch.oid") == "(initial)":
        raise ToolError(
            "there are no commits yet, and what is put aside is kept beside one; make the first with git.commit",
            kind="failed",
        )
    refuse_hidden(repository, await repository.hidden(one.path for one in state.changed if one.worktree != "."))
    before = len(await _list(repository))
    words = ["stash", "push", "--quiet"]
    words += ["--include-untracked"] if args.get("untracked", False) else []
    words += [f"--message={args['message']}"] if "message" in args else []
    await repository.run(*words, variables=identity(repository))
    stashes = await _list(repository)
    if len(stashes) == before:
        raise ToolError("there are no changes to put aside; new files are only with `untracked`", kind="failed")
    return {"done": "push", **stashes[0]}


async def _list(repository: Repository) -> list[dict[str, Any]]:
    if not await repository.is_there("refs/stash") and b"stash" not in await repository.output(
        "for-each-ref", "--format=%(refname)", "refs/stash"
    ):
        return []
    form = "%H%x00%cI%x00%gs"
    fields = (
        await repository.output(
            "log", "--walk-reflogs", "-z", f"--format={form}", "--no-color", "--no-show-signature", "refs/stash", "--"
        )
    ).split(b"\0")
    return [
        {"index": at // 3, "commit": text(fields[at]), "date": text(fields[at + 1]), "message": text(fields[at + 2])}
        for at in range(0, len(fields) - 2, 3)
    ]
