"""git.pr: open a pull request on the forge of a remote, unless one is open already.

The operator binds each forge's address and token to the host of its repositories. The repository and the branch come from
git, and the default base from the forge, so no argument chooses where the token goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import quote, urlencode

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.services.tool_runtime import HttpResponse, Runtime
from handrail.contract.text.host_names import parse_http_url
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.requires import NetRequires
from handrail.contract.tool.spec import ConfigKey
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.git.change_tools import check_branch_name
from handrail.tools.git.git_output_parsers import FOLDER, READS, git_read_spec
from handrail.tools.git.git_repository import decode_git_output, open_repository, strip_url_credentials
from handrail.tools.git.remote_tools import read_push_url
from handrail.tools.tool_declarations import make_closed_object_schema

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_TIMEOUT_MS = 60_000
_TRUNKS = frozenset({"main", "master", "trunk", "develop", "release", "production"})
_SSH_ADDRESS = compile_regex_lazily(r"(?:[^@/\s]+@)?(?P<host>[^:/\s]+):(?P<path>[^/].*)\Z")
_SSH_URL = compile_regex_lazily(r"(?:git\+)?ssh://(?:[^@/\s]+@)?(?P<host>[^:/\s]+)(?::\d+)?/(?P<path>.+)\Z")
_PAGES = 10

ForgeKind = Literal["github", "gitea"]


class _BoundForge(NamedTuple):
    """A configured forge, and the repository on it."""

    kind: ForgeKind
    api: str
    token: str
    owner: str
    name: str

    @property
    def full_name(self) -> str:
        """The owner and the name of the repository."""
        return f"{self.owner}/{self.name}"

    def is_same_repository(self, other: _BoundForge) -> bool:
        return (self.api, self.full_name.lower()) == (other.api, other.full_name.lower())

    def url(self, *parts: str, **query: object) -> str:
        path = "/".join(quote(part, safe="") for part in ("repos", self.owner, self.name, *parts))
        return f"{self.api}/{path}" + (f"?{urlencode(query)}" if query else "")


def _make_config_keys() -> dict[str, ConfigKey]:
    keys: dict[str, ConfigKey] = {}
    for kind, api, host in (
        ("github", "Default: https://api.github.com", "Default: github.com"),
        ("gitea", "Such as https://gitea.example.org/api/v1", "Default: the host of gitea_url"),
    ):
        keys[f"{kind}_url"] = ConfigKey(description=f"Address of the API of {kind}. {api}", required=False)
        keys[f"{kind}_host"] = ConfigKey(
            description=f"Host of the remotes that belong to {kind}. {host}", required=False
        )
        keys[f"{kind}_token"] = ConfigKey(
            description=f"Token of {kind}, sent to its API only", secret=True, required=False
        )
    return keys


class GitPullRequestTool(Tool):
    spec = git_read_spec(
        id="git.pr",
        description=(
            "Open a pull request (merge request) for a pushed branch, on the GitHub or Gitea server of a remote. Push the branch "
            "with git.push first. If the branch is in a fork, pass `into`. If the branch has an open pull request, returns that one."
        ),
        parameters=make_closed_object_schema(
            {
                "repository": FOLDER,
                "title": {"type": "string", "minLength": 1, "maxLength": 256, "description": "Title in one line"},
                "body": {
                    "type": "string",
                    "maxLength": 60_000,
                    "default": "",
                    "description": "Description, as Markdown",
                },
                "base": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1_000,
                    "description": "Branch to merge into. Default: the default branch of the server's repository",
                },
                "head": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1_000,
                    "description": "Branch with the commits. Default: the current branch",
                },
                "draft": {"type": "boolean", "default": False, "description": "Open it as a draft"},
                "remote": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "default": "origin",
                    "description": "Remote with the branch",
                },
                "into": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Remote of the repository to merge into, such as upstream, if `remote` is a fork of it. Default: `remote`",
                },
            },
            ["title"],
        ),
        requires=READS.model_copy(update={"net": NetRequires(hosts=("*",))}),
        side_effect="external",
        idempotent=False,
        timeout_ms=3 * _TIMEOUT_MS,
        kind="other",
        config=_make_config_keys(),
        guidance="Open a pull request only when the user asks for it.",
        documentation=(
            "Returns `number`, `url`, `base`, `head`, `draft`, and `existing`: true if the pull request was open already.\n\n"
            "- It pushes nothing, and never forces.\n"
            "- A trunk such as main is not accepted as `head`, except from a fork.\n"
            "- A fork and the repository to merge into must be on the same server.\n"
            '- The operator sets the token under [tools."git.pr".config]. It is sent only to the API of its server.'
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        if not args["title"].strip() or "\n" in args["title"]:
            raise ToolError("`title` must be one line that is not empty. Change it.", kind="invalid_input")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        repository = await open_repository(runtime, args.get("repository", "."))
        head = args.get("head") or await _find_current_branch(repository)
        check_branch_name(head)
        source = _choose_forge(runtime, await read_push_url(repository, args.get("remote", "origin")))
        forge = source
        if "into" in args:
            forge = _choose_forge(runtime, await read_push_url(repository, args["into"]))
            if forge.api != source.api:
                text = f"{source.full_name} and {forge.full_name} are on different servers. Pass remotes on the same server."
                raise ToolError(text, kind="invalid_input")
        is_fork = not forge.is_same_repository(source)
        about = await _request(runtime, forge, "GET", forge.url())
        default = _text(about, "default_branch")
        base = args.get("base") or default
        if not is_fork and (head in (base, default) or head in _TRUNKS):
            text = f"`head` is {head!r}, a trunk of {forge.full_name}. Create another branch, push it, and pass it."
            raise ToolError(text, kind="invalid_input")
        await _require_branch(runtime, source, head, "head", "Push it with git.push first.")
        if base != default:
            await _require_branch(runtime, forge, base, "base", f"The default branch is {default!r}.")
        if (found := await _find_open(runtime, forge, base, source, head)) is not None:
            return _describe(forge, found, existing=True)
        draft: bool = args.get("draft", False)
        title: str = args["title"]
        content: dict[str, object] = {"title": title, "body": args.get("body", ""), "base": base}
        content["head"] = f"{source.owner}:{head}" if is_fork else head
        if forge.kind == "github":
            content["draft"] = draft
        elif draft and not title.lower().startswith(("wip:", "[wip]")):
            content["title"] = f"WIP: {title}"
        response = await _send(runtime, forge, "POST", forge.url("pulls"), content)
        if response.status == 201:
            return _describe(forge, _decode(forge, response), existing=False)
        explanation = _explain(response)
        if response.status in (409, 422) and "already exist" in explanation.lower():
            if (found := await _find_open(runtime, forge, base, source, head)) is not None:  # made meanwhile
                return _describe(forge, found, existing=True)
            raise ToolError(
                f"{forge.kind} refused the pull request: {explanation}. Check it on the server.", kind="conflict"
            )
        raise _make_error(forge, response, f"The pull request from {head!r} into {base!r}")


async def _find_current_branch(repository: Any) -> str:
    output = await repository.read_git_output("symbolic-ref", "--quiet", "--short", "HEAD", codes=(0, 1))
    if branch := decode_git_output(output).strip():
        return branch
    raise ToolError("No branch is checked out. Pass the pushed branch in `head`.", kind="invalid_input")


def _choose_forge(runtime: Runtime, address: str) -> _BoundForge:
    """Return the configured forge of a remote's address.

    :raises ToolError: ``unavailable`` if no forge or no token is configured for its host; ``denied`` if its API does not
        use https; ``invalid_input`` if the remote is not a repository on a forge
    """
    shown = strip_url_credentials(address)
    host, path = _split_address(address)
    parts = [part for part in path.removesuffix("/").removesuffix(".git").split("/") if part]
    if not host or len(parts) < 2 or not {".", ".."}.isdisjoint(parts):  # a path with dots would name another address
        text = f"The remote {shown} is not a repository on a GitHub or Gitea server. Use a remote such as https://github.com/OWNER/NAME.git."
        raise ToolError(text, kind="invalid_input")
    for kind, default_url, default_host in (("github", "https://api.github.com", "github.com"), ("gitea", "", "")):
        api = (runtime.config.get(f"{kind}_url") or default_url).rstrip("/")
        if not api:
            continue
        belongs = runtime.config.get(f"{kind}_host") or (default_host if api == default_url else _host_of(api))
        if host.lower() != belongs.lower():
            continue
        token = runtime.secrets.get(f"{kind}_token")
        target = parse_http_url(api).host
        is_here = target.name == "localhost" or (target.address is not None and target.address.is_loopback)
        if not api.lower().startswith("https://") and not is_here:
            text = f"The token of {kind} is sent with https only, and {kind}_url is {api}. Ask the user to change it."
            raise ToolError(text, kind="denied")
        return _BoundForge(cast("ForgeKind", kind), api, token, parts[-2], parts[-1])
    text = (
        f"No GitHub or Gitea server is configured for the host of the remote {shown}. Ask the user to set gitea_url or github_url, and a "
        'token, under [tools."git.pr".config] of handrail.toml.'
    )
    raise ToolError(text, kind="unavailable")


def _split_address(address: str) -> tuple[str, str]:
    """Return the host, with its port if it has one, and the path of a remote's address; empty if it has none."""
    if address.lower().startswith(("http://", "https://")):
        _, _, rest = address.partition("://")
        place, _, path = rest.partition("/")
        return place.rpartition("@")[2], path
    match = _SSH_URL.match(address) or _SSH_ADDRESS.match(address)
    return ("", "") if match is None else (match["host"], match["path"])


def _host_of(api: str) -> str:
    return _split_address(f"{api}/")[0]


async def _send(runtime: Runtime, forge: _BoundForge, method: str, url: str, content: object = None) -> HttpResponse:
    github = forge.kind == "github"
    headers = {
        "accept": "application/vnd.github+json" if github else "application/json",
        "authorization": f"Bearer {forge.token}" if github else f"token {forge.token}",
        **({"x-github-api-version": "2022-11-28"} if github else {}),
        **({} if content is None else {"content-type": "application/json"}),
    }
    return await runtime.net.request(
        method,
        url,
        headers=headers,
        body=b"" if content is None else json.dumps(content).encode(),
        max_bytes=_MAX_ANSWER_BYTES,
        timeout_ms=_TIMEOUT_MS - 5_000,
        max_redirects=0 if content is not None else 2,
    )


async def _request(runtime: Runtime, forge: _BoundForge, method: str, url: str) -> Any:
    response = await _send(runtime, forge, method, url)
    if response.status != 200:
        raise _make_error(forge, response, f"Repository {forge.full_name}")
    return _decode(forge, response)


async def _require_branch(runtime: Runtime, forge: _BoundForge, branch: str, argument: str, hint: str) -> None:
    response = await _send(runtime, forge, "GET", forge.url("branches", branch))
    if response.status == 404:
        text = f"Branch {branch!r} in `{argument}` is not on {forge.kind} in {forge.full_name}. {hint}"
        raise ToolError(text, kind="invalid_input")
    if response.status != 200:
        raise _make_error(forge, response, f"Branch {branch!r}")


async def _find_open(
    runtime: Runtime, forge: _BoundForge, base: str, source: _BoundForge, head: str
) -> Mapping[str, Any] | None:
    """Return the open pull request of a branch of ``source`` into a branch of ``forge``, or None."""
    owners = {source.full_name.lower()}
    if forge.is_same_repository(source):
        owners.add("")  # some servers leave out the repository
    for page in range(1, _PAGES + 1):
        if forge.kind == "github":
            url = forge.url("pulls", state="open", head=f"{source.owner}:{head}", base=base, per_page=100, page=page)
        else:
            url = forge.url("pulls", state="open", limit=50, page=page)
        items = _list(await _request(runtime, forge, "GET", url))
        for one in items:
            found = _object(one)
            branches = _text(found, "head", "ref"), _text(found, "base", "ref")
            if branches == (head, base) and _text(found, "head", "repo", "full_name").lower() in owners:
                return found
        if len(items) < (100 if forge.kind == "github" else 50):
            return None
    return None


def _object(value: object) -> Mapping[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _text(value: object, *path: str) -> str:
    for name in path:
        value = _object(value).get(name)
    return value if isinstance(value, str) else ""


def _describe(forge: _BoundForge, found: Mapping[str, Any], *, existing: bool) -> dict[str, object]:
    title = _text(found, "title")
    draft = found.get("draft")
    return {
        "number": found.get("number"),
        "url": _text(found, "html_url"),
        "repository": forge.full_name,
        "title": title,
        "base": _text(found, "base", "ref"),
        "head": _text(found, "head", "ref"),
        "draft": draft if isinstance(draft, bool) else title.lower().startswith(("wip:", "[wip]")),
        "existing": existing,
    }


def _decode(forge: _BoundForge, response: HttpResponse) -> Any:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        text = f'{forge.kind} did not send valid JSON. Ask the user to check {forge.kind}_url under [tools."git.pr".config].'
        raise ToolError(text, kind="backend") from None


def _explain(response: HttpResponse) -> str:
    """Return the reason that a forge gives for a failure, in one line."""
    try:
        answer = _object(json.loads(response.body))
    except (ValueError, RecursionError):
        return f"status {response.status}"
    further = [one if isinstance(one, str) else _text(one, "message") for one in _list(answer.get("errors"))]
    messages = "; ".join(part.rstrip(".") for part in (_text(answer, "message"), *further) if part)
    return quote_text_or_length(messages, 300) if messages else f"status {response.status}"


def _make_error(forge: _BoundForge, response: HttpResponse, subject: str) -> ToolError:
    """Return the error for an answer that is not the expected one."""
    status, explanation, kind = response.status, _explain(response), forge.kind
    wait = response.header("retry-after")
    if status == 429 or (status == 403 and (wait or response.header("x-ratelimit-remaining") == "0")):
        reset = response.header("x-ratelimit-reset")
        when = f" Retry after: {quote_text_or_length(wait, 40)} s." if wait else ""
        when = when or (f" The limit is reset at {quote_text_or_length(reset, 40)} (Unix time)." if reset else "")
        return ToolError(f"{kind} does not accept further requests now.{when} Try again later.", kind="limit")
    if status == 401:
        text = f'{kind} refused the token: {explanation}. Ask the user to renew {kind}_token under [tools."git.pr".config].'
        return ToolError(text, kind="unavailable")
    if status == 403:
        text = f"{kind} denied the request: {explanation}. Ask the user to grant {kind}_token permission to open pull requests."
        return ToolError(text, kind="denied")
    if status == 404:
        text = f"{subject} was not found on {kind}, or its token has no access to it. Check the remote, or ask the user about {kind}_token."
        return ToolError(text, kind="failed")
    if 300 <= status < 400:
        text = f"{subject} has moved: {kind} redirects to another address. Ask the user to change the remote."
        return ToolError(text, kind="failed")
    if status == 422 and "no commits between" in explanation.lower():
        return ToolError(f"{subject} has no new commits: {explanation}. Commit and push first.", kind="invalid_input")
    if status in (400, 409, 422):
        return ToolError(f"{subject} was refused by {kind}: {explanation}. Change the arguments.", kind="invalid_input")
    return ToolError(f"{kind} answered with status {status}: {explanation}. Try again later.", kind="backend")
