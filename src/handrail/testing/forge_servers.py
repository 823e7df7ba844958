"""Forges on loopback with the part of GitHub's and Gitea's API that opens pull requests, and their refusals."""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit


class ForgeRequest(NamedTuple):
    """One request that a forge has received."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


class ForgeReply(NamedTuple):
    """An answer of a forge."""

    status: int
    body: Any
    headers: Mapping[str, str] = {}


@dataclass
class ForgeServer(abc.ABC):
    """A forge with one repository, which checks the token of each request.

    :param token: the only valid one
    :param repository: owner and name
    :param branches: by name, the commits of each; a pull request needs a commit that its base lacks
    :param forks: by owner and name, the branches of each fork of the repository
    :param replies: prepared answers, which are sent first, one for each request
    :ivar requests: what it has received
    :ivar pulls: its pull requests
    """

    token: str = "forge-token-0123456789"  # noqa: S105 - of no real service
    repository: str = "ann/project"
    default_branch: str = "main"
    branches: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"main": ("a",), "topic": ("a", "b")})
    forks: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict[str, Mapping[str, Sequence[str]]])
    replies: list[ForgeReply] = field(default_factory=list[ForgeReply])
    requests: list[ForgeRequest] = field(default_factory=list[ForgeRequest])
    pulls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    port: int = 0

    _prefix = ""
    _scheme = "Bearer"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def authority(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The address of its API."""
        return f"http://{self.authority}{self._prefix}"

    @property
    def clone_url(self) -> str:
        """The address of its repository."""
        return f"http://{self.authority}/{self.repository}.git"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            content = await reader.readexactly(int(headers.get("content-length", "0")))
            method, target, _ = head[0].split(" ")
            parts = urlsplit(target)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            request = ForgeRequest(
                method, unquote(parts.path), query, headers, json.loads(content) if content else None
            )
            self.requests.append(request)
            reply = self.replies.pop(0) if self.replies else self._answer(request)
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            lines = [f"HTTP/1.1 {reply.status} Answer", "content-type: application/json", "connection: close"]
            lines += [f"{name}: {value}" for name, value in reply.headers.items()]
            lines += [f"content-length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode("latin-1") + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, request: ForgeRequest) -> ForgeReply:
        if request.headers.get("authorization") != f"{self._scheme} {self.token}":
            return ForgeReply(401, {"message": self._refusal})
        for name, branches in {self.repository: self.branches, **self.forks}.items():
            top = f"{self._prefix}/repos/{name}"
            if request.path == top and request.method == "GET":
                return ForgeReply(200, {"full_name": name, "default_branch": self.default_branch})
            if request.path.startswith(f"{top}/branches/") and request.method == "GET":
                branch = request.path.removeprefix(f"{top}/branches/")
                return ForgeReply(200, {"name": branch}) if branch in branches else self._missing()
        top = f"{self._prefix}/repos/{self.repository}"
        if request.path == f"{top}/pulls" and request.method == "GET":
            return ForgeReply(200, self._list(request.query))
        if request.path == f"{top}/pulls" and request.method == "POST":
            return self._open(request.body)
        return self._missing()

    _refusal = "Bad credentials"

    def _missing(self) -> ForgeReply:
        return ForgeReply(404, {"message": "Not Found"})

    @abc.abstractmethod
    def _list(self, query: Mapping[str, str]) -> list[dict[str, Any]]: ...

    @abc.abstractmethod
    def _open(self, content: Any) -> ForgeReply: ...

    def _locate_head(self, head: str) -> tuple[str, str, Sequence[str] | None]:
        """Return the repository, the name and the commits of a head such as ``topic`` or ``owner:topic``."""
        owner, _, branch = head.rpartition(":")
        for name, branches in {self.repository: self.branches, **self.forks}.items():
            if owner in ("", name.partition("/")[0]):
                return name, branch, branches.get(branch)
        return "", branch, None

    def _is_open(self, base: str, head: str) -> bool:
        name, branch, _ = self._locate_head(head)
        return any(
            (one["base"]["ref"], one["head"]["ref"], one["head"]["repo"]["full_name"]) == (base, branch, name)
            for one in self.pulls
        )

    def _add(self, content: Mapping[str, Any], **further: Any) -> dict[str, Any]:
        number = len(self.pulls) + 1
        name, branch, _ = self._locate_head(content["head"])
        pull = {
            "number": number,
            "html_url": f"http://{self.authority}/{self.repository}/pull/{number}",
            "state": "open",
            "title": content["title"],
            "body": content.get("body") or "",
            "base": {"ref": content["base"], "repo": {"full_name": self.repository}},
            "head": {"ref": branch, "repo": {"full_name": name}},
            **further,
        }
        self.pulls.append(pull)
        return pull


@dataclass
class GitHubServer(ForgeServer):
    """A forge with GitHub's API.

    :param supports_drafts: whether the repository's plan has draft pull requests
    """

    supports_drafts: bool = True

    def _list(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        found = self.pulls
        if "head" in query:
            name, branch, _ = self._locate_head(query["head"])
            found = [one for one in found if (one["head"]["repo"]["full_name"], one["head"]["ref"]) == (name, branch)]
        if "base" in query:
            found = [one for one in found if one["base"]["ref"] == query["base"]]
        size, page = int(query.get("per_page", "30")), int(query.get("page", "1"))
        return found[(page - 1) * size : page * size]

    def _open(self, content: Any) -> ForgeReply:
        missing = [name for name in ("title", "head", "base") if not content.get(name)]
        commits = None if missing else self._locate_head(content["head"])[2]
        unknown = [] if commits is not None else ["head"]
        unknown += [] if content.get("base") in self.branches else ["base"]
        invalid = missing or unknown
        if invalid:
            errors = [{"resource": "PullRequest", "field": name, "code": "invalid"} for name in invalid]
            return ForgeReply(422, {"message": "Validation Failed", "errors": errors})
        base, head = content["base"], content["head"]
        message = ""
        if self._is_open(base, head):
            message = f"A pull request already exists for {self.repository.partition('/')[0]}:{head}."
        elif not {*(commits or ())} - {*self.branches[base]}:
            message = f"No commits between {base} and {head}"
        elif content.get("draft") and not self.supports_drafts:
            message = "Draft pull requests are not supported in this repository."
        if message:
            return ForgeReply(422, {"message": "Validation Failed", "errors": [{"code": "custom", "message": message}]})
        return ForgeReply(201, self._add(content, draft=bool(content.get("draft"))))


@dataclass
class GiteaServer(ForgeServer):
    """A forge with Gitea's API, in which a title that begins with WIP is a draft."""

    _prefix = "/api/v1"
    _scheme = "token"
    _refusal = "invalid username, password or token"

    def _missing(self) -> ForgeReply:
        return ForgeReply(404, {"message": "The target couldn't be found.", "url": f"{self.url}/swagger", "errors": []})

    def _list(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        size, page = min(int(query.get("limit", "30")), 50), int(query.get("page", "1"))
        return self.pulls[(page - 1) * size : page * size]

    def _open(self, content: Any) -> ForgeReply:
        commits = self._locate_head(content.get("head") or "")[2]
        if not content.get("title") or commits is None or content.get("base") not in self.branches:
            return self._missing()
        base, head = content["base"], content["head"]
        if self._is_open(base, head):
            message = f"pull request already exists for these targets [id: 1, head_branch: {head}, base_branch: {base}]"
            return ForgeReply(409, {"message": message})
        if not {*commits} - {*self.branches[base]}:
            return ForgeReply(422, {"message": f"No commits between {base} and {head}"})
        return ForgeReply(201, self._add(content))
