"""git.status, git.log, git.blame, git.branches: what there is, and since when."""

from __future__ import annotations

import datetime
from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema
from handrail.tools.git import declaring, forms
from handrail.tools.git.answers import MOST_LISTED, STATUS, conflicts, filters_noted, hidden, listed
from handrail.tools.git.declaring import PATHS, READ_FOLDER
from handrail.tools.git.repository import Repository, commitish, opened, revision, text
from handrail.tools.git.urls import without_credentials

_STATES = {
    "MERGE_HEAD": "merging",
    "CHERRY_PICK_HEAD": "cherry-picking",
    "REVERT_HEAD": "reverting",
    "rebase-merge": "rebasing",
    "rebase-apply": "rebasing",
    "BISECT_LOG": "bisecting",
}


class Status(Tool):
    spec = declaring.reading(
        id="git.status",
        description=(
            "Show the state of a git repository: branch, upstream with ahead and behind, staged and unstaged changes, "
            "untracked files, conflicts, and whether a merge or rebase is under way."
        ),
        parameters=object_schema(
            {
                "repository": READ_FOLDER,
                "untracked": {
                    "type": "boolean",
                    "default": True,
                    "description": "Also list files that git does not track",
                },
            }
        ),
        targets={"fs.read": "{repository}"},
        guidance="Look at git.status before you stage, commit, check out or merge.",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await opened(runtime, args.get("repository", "."))
        untracked = "normal" if args.get("untracked", True) else "no"
        state = await repository.read(forms.status, *STATUS, "--show-stash", f"--untracked-files={untracked}")
        unstaged = [one for one in state.changed if one.worktree != "."]
        kept = await repository.hidden(one.path for one in unstaged if one.is_file)
        answer: dict[str, Any] = {"repository": repository.shown_top, **_branch(state)}
        for name, word in _STATES.items():
            if await repository.is_there(name):
                answer["state"] = word
                break
        staged = [one for one in state.changed if one.index != "."]
        seen = [one for one in unstaged if one.path not in kept]
        answer["clean"] = not (staged or seen or state.untracked or state.unmerged)
        answer |= listed("staged", staged, lambda one: _change(repository, one, one.index))
        answer |= listed("unstaged", seen, lambda one: _change(repository, one, one.worktree))
        answer |= listed("untracked", state.untracked, repository.shown)
        answer |= listed("conflicts", conflicts(repository, state), dict)
        answer |= hidden(repository, kept, "whether they changed cannot be told")
        if "stash" in state.headers:
            answer["stashes"] = int(state.headers["stash"])
        return answer | filters_noted(repository)


def _branch(state: forms.State) -> dict[str, Any]:
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
            found["upstream_gone"] = True
    return found


def _change(repository: Repository, one: forms.Changed, letter: str) -> dict[str, str]:
    found = {"path": repository.shown(one.path), "change": forms.change(letter)}
    if one.before is not None and letter in "RC":
        found["from"] = repository.shown(one.before)
    return found


class Log(Tool):
    spec = declaring.reading(
        id="git.log",
        description=(
            "List commits, newest first, with author, date and message. Give `paths` for those that changed certain "
            "files, `ref` for another branch or a range such as main..feature; page on with `skip`."
        ),
        parameters=object_schema(
            {
                "repository": READ_FOLDER,
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "A branch, tag, commit or range (main..feature); the current commit if left out",
                },
                "paths": {
                    **PATHS,
                    "description": "Only commits that changed these files or folders",
                },
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 500,
                    "default": 20,
                    "description": "At most so many commits",
                },
                "skip": {"type": "integer", "minimum": 0, "default": 0, "description": "Leave out so many first"},
            }
        ),
        targets={"fs.read": "{repository}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await opened(runtime, args.get("repository", "."))
        limit, skip = args.get("limit", 20), args.get("skip", 0)
        words = ["log", "-z", f"--format={forms.COMMIT}", f"--max-count={limit + 1}", f"--skip={skip}", "--no-color"]
        words += ["--no-show-signature", "--no-ext-diff", "--no-textconv", "--no-notes", "--decorate=short"]
        words += [revision(args["ref"])] if "ref" in args else []
        try:
            found = await repository.read(forms.commits, *words, "--", *repository.pathspecs(args.get("paths", ())))
        except ToolError as error:
            if "does not have any commits yet" not in error.text:
                raise
            found = []
        answer: dict[str, Any] = {"commits": found[:limit]}
        if len(found) > limit:
            answer["next_skip"] = skip + limit
        return answer


class Blame(Tool):
    spec = declaring.reading(
        id="git.blame",
        description="Show which commit last changed each line of a file, and who made it when.",
        parameters=object_schema(
            {
                "path": {
                    "type": "string",
                    "format": "path",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "The file",
                },
                "ref": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "The file as of this commit, branch or tag; as it is now if left out",
                },
                "first": {"type": "integer", "minimum": 1, "default": 1, "description": "The first line"},
                "count": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 2000,
                    "default": 300,
                    "description": "At most so many lines",
                },
            },
            ["path"],
        ),
        targets={"fs.read": "{path}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path: str = args["path"]
        folder = path.rstrip("/").rpartition("/")[0]
        repository = await opened(runtime, folder or ("/" if path.startswith("/") else "."))
        first, count = args.get("first", 1), args.get("count", 300)
        words = ["blame", "--porcelain", "--no-textconv", "--no-progress", "-L", f"{first},+{count + 1}"]
        words += [commitish(args["ref"])] if "ref" in args else []
        try:
            output = await repository.output(*words, "--", f"./{repository.within(path)}")
        except ToolError as error:
            if "has only" in error.text:  # fewer lines than the first
                raise ToolError(f"{path}: {error.text}; give a smaller `first`", kind="invalid_input") from None
            if "no such ref: HEAD" in error.text:
                raise ToolError("there are no commits yet, so no line was changed by one", kind="failed") from None
            raise
        found = list(forms.blamed(output))
        made: dict[str, Any] = {}
        for number, _, about, _ in found[:count]:
            if number not in made:
                made[number] = _author(number, about)
        answer: dict[str, Any] = {
            "path": path,
            "commits": made,
            "lines": [{"line": line, "commit": number, "text": text(row)} for number, line, _, row in found[:count]],
        }
        if len(found) > count:
            answer["next_first"] = first + count
        return answer


def _author(number: str, about: dict[str, str]) -> dict[str, str]:
    if not number.strip("0"):
        return {"author": "not committed yet"}
    found = {"author": f"{about.get('author', '')} {about.get('author-mail', '')}".strip()}
    try:
        seconds, zone = int(about["author-time"]), about.get("author-tz", "+0000")
        offset = datetime.timedelta(hours=int(zone[:3]), minutes=int(f"{zone[0]}{zone[3:]}"))
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone(offset))
        found["date"] = moment.isoformat()
    except (KeyError, ValueError, OverflowError, OSError):
        pass  # a commit may say anything of its time
    return found | {"subject": about.get("summary", "")}


class Branches(Tool):
    spec = declaring.reading(
        id="git.branches",
        description="List the branches of a repository, with their upstream, last commit and the remotes there are.",
        parameters=object_schema(
            {
                "repository": READ_FOLDER,
                "remote": {
                    "type": "boolean",
                    "default": True,
                    "description": "Also list the remotes' branches, as last fetched",
                },
            }
        ),
        targets={"fs.read": "{repository}"},
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await opened(runtime, args.get("repository", "."))
        fields = (
            "refname HEAD objectname upstream:short upstream:track,nobracket committerdate:iso-strict subject symref"
        )
        form = "%00".join(f"%({field})" for field in fields.split(" "))
        kinds = ["refs/heads", *(["refs/remotes"] if args.get("remote", True) else [])]
        words = ("for-each-ref", f"--format={form}", f"--count={2 * MOST_LISTED + 1}", "--sort=-committerdate")
        output = await repository.output(*words, *kinds)
        local: list[dict[str, Any]] = []
        remote: list[dict[str, Any]] = []
        for row in output.split(b"\n"):
            parts = text(row).split("\0")
            if len(parts) != 8 or parts[7]:  # origin/HEAD only names another
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
        answer: dict[str, Any] = {"branches": local[:MOST_LISTED]}
        if args.get("remote", True):
            answer["remote_branches"] = remote[:MOST_LISTED]
        if len(local) > MOST_LISTED or len(remote) > MOST_LISTED:
            answer["more"] = f"only the {MOST_LISTED} last changed of each are listed"
        return answer | {"remotes": _remotes(repository)}


def _remotes(repository: Repository) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in repository.entries:
        if one.key.startswith("remote.") and one.key.endswith(".url") and one.value:
            name = one.key[len("remote.") : -len(".url")].encode("utf-8", "surrogateescape")
            found.setdefault(text(name), without_credentials(one.value))
    return found
