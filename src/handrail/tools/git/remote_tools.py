"""git.init, git.clone, git.push: new repositories, and the transfer of commits to others."""

from __future__ import annotations

import posixpath
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import build_git_server_option
from handrail.contract.services.tool_runtime import Runtime, resolve_intended_path, resolve_tool_path
from handrail.contract.text.neutralisation import escape_terminal_controls, unescape_displayed_path
from handrail.contract.tool.requires import NetRequires
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.git import git_output_parsers
from handrail.tools.git.change_tools import check_branch_name
from handrail.tools.git.git_output_parsers import FOLDER, WRITES_CONFIG
from handrail.tools.git.git_repository import (
    GitRepository,
    classify_git_transport,
    decode_git_output,
    is_beneath,
    is_same_web_url,
    make_git_environment,
    make_git_error,
    open_repository,
    parse_web_url,
    run_git_unchecked,
    strip_url_credentials,
)
from handrail.tools.tool_declarations import make_closed_object_schema

_TIMEOUT_MS = 600_000
_WEB, _PATH = "http:https", "file"
"""The transports that git may use for a web address, and for a path on this machine."""
_ONLINE = WRITES_CONFIG.model_copy(update={"net": NetRequires(hosts=("*",))})
"""Any public host may be requested. The rules or the user decide on each host by its name."""


class GitInitTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.init",
        description="Create a new, empty git repository in a folder of the workspace.",
        parameters=make_closed_object_schema(
            {
                "path": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": ".",
                    "description": "Folder, created if it does not exist",
                },
                "branch": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": "main",
                    "description": "Name of the first branch",
                },
            }
        ),
        requires=WRITES_CONFIG,
        kind="other",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        path = await resolve_intended_path(runtime, args.get("path", "."))
        branch = check_branch_name(args.get("branch", "main"))
        word = _folder_argument(runtime, path)
        try:
            await runtime.files.stat(f"{word}/.git")
        except ToolError as error:
            if error.kind != "failed":
                raise
        else:
            raise ToolError(
                f"{path} is already a git repository, or a part of one: it has a .git. Use it, or pass another `path`.",
                kind="conflict",
            )
        words = ("init", "--quiet", f"--initial-branch={branch}", "--", word)
        done = await run_git_unchecked(
            runtime, runtime.workdir, words, make_git_environment(runtime.workdir, writing=True)
        )
        if done.exit_code:
            raise make_git_error(words, done)
        return {"repository": escape_terminal_controls(path), "branch": branch}


class GitCloneTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.clone",
        description=(
            "Clone (download) a git repository into a new folder of the workspace, from an http(s) URL or, "
            "with `source`, from a folder of the workspace. Submodules are not fetched."
        ),
        parameters=make_closed_object_schema(
            {
                "url": {
                    "type": "string",
                    "format": "uri",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "URL, e.g. https://example.org/project.git. Required unless `source` is given",
                },
                "source": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Repository in the workspace. Required unless `url` is given",
                },
                "path": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "New folder. Default: the name of the repository",
                },
                "branch": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Branch or tag to check out. Default: that of the remote",
                },
                "depth": {
                    "type": "integer",
                    "minimum": 1,
                    "description": "Number of latest commits to fetch. Default: all",
                },
            }
        ),
        requires=_ONLINE,
        side_effect="external",
        targets={"net.fetch": "{url}"},
        timeout_ms=_TIMEOUT_MS,
        kind="fetch",
    )

    def check(self, args: dict[str, Any]) -> None:
        if ("url" in args) == ("source" in args):
            raise ToolError(
                "Pass either `url` (an http or https address) or `source` (a folder), but not both.",
                kind="invalid_input",
            )
        if "url" in args:
            parse_web_url(args["url"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if "url" in args:
            origin, protocols = str(parse_web_url(args["url"])), _WEB
        else:
            origin, protocols = resolve_tool_path(runtime, await resolve_intended_path(runtime, args["source"])), _PATH
            if not is_beneath(origin, runtime.workdir):
                raise ToolError(
                    f"`source` is outside the workspace: {args['source']}. Use a folder inside it.", kind="denied"
                )
        path = unescape_displayed_path(args.get("path", "")) or posixpath.basename(origin.rstrip("/")).removesuffix(
            ".git"
        )
        word = _folder_argument(runtime, path)
        words = ["clone", "--quiet", "--no-recurse-submodules", "--no-local", "--origin=origin"]
        words += [f"--branch={check_branch_name(args['branch'])}"] if "branch" in args else []
        words += [f"--depth={args['depth']}"] if "depth" in args else []
        words += [build_git_server_option("upload-pack", by_path=protocols == _PATH), "--", origin, word]
        around = make_git_environment(runtime.workdir, writing=True, protocols=protocols)
        done = await run_git_unchecked(runtime, runtime.workdir, words, around)
        if done.exit_code:
            raise _map_server_error(make_git_error(words, done), origin)
        found = await open_repository(runtime, word)
        state = (
            decode_git_output(
                await found.read_git_output("log", "-1", "--format=%H%x00%D", "--decorate=short", "--no-show-signature")
            ).strip("\n")
            if await _has_commits(found)
            else "\0"
        )
        commit, references = state.split("\0")
        branch = next(
            (one.removeprefix("HEAD -> ") for one in references.split(", ") if one.startswith("HEAD -> ")), None
        )
        return {
            "repository": found.display_top_folder,
            "from": strip_url_credentials(origin),
            "branch": branch,
            "commit": commit or None,
        }


async def _has_commits(repository: GitRepository) -> bool:
    return (await repository.run_git_command("rev-parse", "--quiet", "--verify", "HEAD", codes=(0, 1))).exit_code == 0


class GitPushTool(Tool):
    spec = git_output_parsers.git_change_spec(
        id="git.push",
        description=(
            "Push a branch: upload its commits to a remote. Never forces. For a remote on the web also pass "
            "its address as `url`, so that the user sees where commits go; git.branches lists addresses."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "remote": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": "origin",
                    "description": "Name of the remote",
                },
                "url": {
                    "type": "string",
                    "format": "uri",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "http(s) URL of the remote. Required for a remote on the web",
                },
                "branch": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Branch to push. Default: the current branch",
                },
                "set_upstream": {
                    "type": "boolean",
                    "default": False,
                    "description": "Set the remote branch as upstream",
                },
            }
        ),
        requires=_ONLINE,
        side_effect="external",
        targets={"net.fetch": "{url}"},
        timeout_ms=_TIMEOUT_MS,
        kind="other",
        guidance="Push only when the user asks for it.",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."), writing=True)
        remote: str = args.get("remote", "origin")
        address = await read_push_url(repository, remote)
        protocols = _allowed_protocols(repository, remote, address, args.get("url"))
        branch = (
            args.get("branch")
            or decode_git_output(
                await repository.read_git_output("symbolic-ref", "--quiet", "--short", "HEAD", codes=(0, 1))
            ).strip()
        )
        if not branch:
            raise ToolError("No branch is checked out. Pass the branch to push in `branch`.", kind="invalid_input")
        reference = f"refs/heads/{check_branch_name(branch)}"
        if (await repository.run_git_command("rev-parse", "--quiet", "--verify", reference, codes=(0, 1))).exit_code:
            known = decode_git_output(
                await repository.read_git_output("for-each-ref", "--format=%(refname:short)", "refs/heads")
            ).split()
            near = nearest_names(branch, known)
            hint = f"Did you mean {' or '.join(near)}?" if near else "List the branches with git.branches."
            raise ToolError(f"Branch {branch!r} does not exist or has no commit. {hint}", kind="invalid_input")
        words = ["push", "--porcelain", "--no-verify", "--no-signed", "--no-recurse-submodules", "--no-follow-tags"]
        words += ["--set-upstream"] if args.get("set_upstream", False) else []
        words += [build_git_server_option("receive-pack", by_path=protocols == _PATH)]
        try:
            done = await repository.run_git_command(
                *words, remote, f"{reference}:{reference}", codes=(0, 1), protocols=protocols
            )
        except ToolError as error:
            raise _map_server_error(error, address) from None
        return _parse_push(
            done.output,
            make_git_error(words, done),
            {"remote": remote, "url": strip_url_credentials(address), "branch": branch},
        )


async def read_push_url(repository: GitRepository, remote: str) -> str:
    """Return the address of a push to ``remote``, after git's configuration is applied.

    :raises ToolError: if the remote does not exist, or has several addresses
    """
    names = sorted(
        {
            one.key[len("remote.") : -len(".url")]
            for one in repository.entries
            if one.key.startswith("remote.") and one.key.endswith(".url")
        }
    )
    if remote not in names:
        near = nearest_names(remote, names) or names
        hint = f"Remotes: {', '.join(near[:5])}." if names else "Ask the user to add one with `git remote add`."
        raise ToolError(f"Remote {remote!r} does not exist. {hint}", kind="invalid_input")
    odd = [f"remote.{remote}.vcs", f"remote.{remote}.proxy", "http.proxy"]
    odd = [
        one.key
        for one in repository.entries
        if one.key in odd or (one.key.startswith("http.") and one.key.endswith(".proxy"))
    ]
    if odd:
        raise ToolError(
            f"The repository's configuration sets {', '.join(odd[:3])}, which could send the push elsewhere. "
            "Ask the user to remove that, or to push.",
            kind="denied",
        )
    output = (await repository.read_git_output("remote", "get-url", "--push", "--all", remote)).decode(
        "utf-8", "surrogateescape"
    )
    found = [line for line in output.split("\n") if line]
    if len(found) != 1:
        raise ToolError(
            f"Remote {remote} has {len(found)} push addresses. Only one is supported. Ask the user to push.",
            kind="unavailable",
        )
    return found[0]


def _allowed_protocols(repository: GitRepository, remote: str, address: str, given: str | None) -> str:
    """Return the transports for a push, if its address is the one that was allowed.

    :raises ToolError: if the address differs, or these tools cannot reach it
    """
    shown = strip_url_credentials(address)
    kind = classify_git_transport(address)
    if kind == "web":
        parse_web_url(shown)
        if given is None:
            raise ToolError(
                f"`url` is missing. Call git.push again with `url: {shown}`, the address of {remote}.",
                kind="invalid_input",
            )
        if not is_same_web_url(given, address):
            raise ToolError(f"`url` is not the address of {remote}: {given}. Pass {shown}.", kind="invalid_input")
        return _WEB
    if kind == "path":
        place = address.removeprefix("file://")
        if not is_beneath(posixpath.normpath(posixpath.join(repository.top, place)), repository.runtime.workdir):
            raise ToolError(f"Remote {remote} is outside the workspace: {shown}. Ask the user to push.", kind="denied")
        if given is not None:
            raise ToolError(f"Remote {remote} is on this machine: {shown}. Omit `url`.", kind="invalid_input")
        return _PATH
    parse_web_url(shown)
    raise ToolError(
        f"The transport of remote {remote} is not supported: {shown}. Ask the user to push.", kind="unavailable"
    )


def _parse_push(output: bytes, failed: ToolError, about: dict[str, Any]) -> dict[str, Any]:
    """Parse the output of ``git push --porcelain`` for the one reference."""
    for row in decode_git_output(output).splitlines():
        flag, _, rest = row.partition("\t")
        names, _, summary = rest.partition("\t")
        if len(flag) != 1 or ":" not in names:
            continue
        if flag == "!":
            raise ToolError(
                f"Remote {about['remote']} rejected {about['branch']}: {summary.strip()}. If it has commits that are missing "
                "here, fetch and merge them first. Pushes are never forced.",
                kind="conflict",
            )
        words = {"*": "new branch", "=": "already up to date", " ": "updated"}
        return about | {"result": words.get(flag, "updated"), "commits": summary.strip()}
    raise failed


def _map_server_error(error: ToolError, address: str) -> ToolError:
    """Return a failure to reach a server, with what can be done about it."""
    shown = strip_url_credentials(address)
    message = strip_url_credentials(error.text)
    if (
        "terminal prompts disabled" in message
        or "Authentication failed" in message
        or "could not read Username" in message
    ):
        return ToolError(
            f"{shown} requires a user name and password, which these tools do not support. "
            "Ask the user to do this, or to set http.extraHeader in the repository's configuration.",
            kind="unavailable",
        )
    if "already exists and is not an empty directory" in message:
        return ToolError("The target folder already exists and is not empty. Pass another `path`.", kind="conflict")
    if "403" in message and ("CONNECT" in message or "returned error: 403" in message):
        message += " The server or a rule rejected the request. metadata.network lists the hosts that rules denied."
    return ToolError(message, kind=error.kind, data=error.data)


def _folder_argument(runtime: Runtime, path: str) -> str:
    """Return a new folder as an argument for git, relative to the workspace and never an option.

    :raises ToolError: ``denied`` if the folder is outside the workspace
    """
    absolute = resolve_tool_path(runtime, path)
    if not is_beneath(absolute, runtime.workdir):
        raise ToolError(f"`path` is outside the workspace: {path}. Use a folder inside it.", kind="denied")
    return f"./{absolute[len(runtime.workdir.rstrip('/')) + 1 :]}"
