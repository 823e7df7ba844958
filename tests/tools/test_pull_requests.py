"""``git.pr`` with forges of GitHub's and Gitea's form: created once, and each refusal explained."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_agents import put_agent
from tests.tools.repositories import Repo, create_repository

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.session_protocols import Session
from handrail.testing import ForgeReply, ForgeServer, GiteaServer, GitHubServer
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

pytestmark = pytest.mark.proves("T-05c")

FORGES: dict[str, type[ForgeServer]] = {"github": GitHubServer, "gitea": GiteaServer}
EACH = pytest.mark.parametrize("kind", FORGES)


@asynccontextmanager
async def working(
    folder: Path,
    kind: str,
    server: ForgeServer,
    *,
    settings: str = "",
    remote: str = "",
    rules: Sequence[str] = ("allow git.pr",),
    approval_handler: ScriptedApprovalHandler | None = None,
) -> AsyncGenerator[tuple[Session, Repo]]:
    repo = create_repository(folder / "ws")
    repo.commit("first", a__txt="a")
    repo.git("checkout", "-q", "-b", "topic")
    repo.configure(f'[remote "origin"]\n\turl = {remote or server.clone_url}\n')
    put_agent(folder, "coder", f'[requires.tools."git.pr".net]\nhosts = ["{server.authority}"]')
    settings = settings or (
        f'[tools."git.pr".config]\n{kind}_url = "{server.url}"\n{kind}_host = "{server.authority}"\n'
        f'{kind}_token = {{ secret = "FORGE" }}'
    )
    async with temporary_kernel(folder, settings=settings, secrets={"FORGE": server.token}, rules=rules) as kernel:
        yield await kernel.session(agent="coder", approval_handler=approval_handler), repo


@EACH
async def test_a_pull_request_from_the_current_into_the_default_branch_is_created_once(
    tmp_path: Path, kind: str
) -> None:
    async with (
        FORGES[kind](default_branch="next", branches={"next": ("a",), "main": ("a",), "topic": ("a", "b")}) as server,
        working(tmp_path, kind, server) as (session, _),
    ):
        first = await session.call("git.pr", {"title": "Mend tabs", "body": "Why."})
        assert first.ok, first.error_text
        assert first.data == {
            "number": 1,
            "url": f"http://{server.authority}/ann/project/pull/1",
            "repository": "ann/project",
            "title": "Mend tabs",
            "base": "next",
            "head": "topic",
            "draft": False,
            "existing": False,
        }
        again = await session.call("git.pr", {"title": "Mend tabs", "body": "Why."})
        assert again.data == {**first.data, "existing": True}
        other = await session.call("git.pr", {"title": "Another title"})
        assert other.data["number"] == 1 and other.data["existing"]
        assert len(server.pulls) == 1 and server.pulls[0]["body"] == "Why."
        assert len([one for one in server.requests if one.method == "POST"]) == 1
        into_main = await session.call("git.pr", {"title": "Backport", "base": "main"})
        assert (into_main.data["number"], into_main.data["base"]) == (2, "main")


@EACH
async def test_a_pull_request_from_a_fork_targets_the_repository_of_another_remote(tmp_path: Path, kind: str) -> None:
    forks = {"bob/copy": {"main": ("a", "c"), "topic": ("a", "b")}, "eve/project": {"topic": ("a", "b", "e")}}
    async with FORGES[kind](branches={"main": ("a",), "topic": ("a", "x")}, forks=forks) as server:
        top = f"http://{server.authority}"
        async with working(tmp_path, kind, server, remote=f"{top}/bob/copy.git") as (session, repo):
            repo.configure(f'[remote "upstream"]\n\turl = {server.clone_url}\n')
            repo.configure(f'[remote "eve"]\n\turl = {top}/eve/project.git\n')
            own = await session.call("git.pr", {"title": "Own", "remote": "upstream"})
            assert own.ok and own.data["number"] == 1, "the branch of the same name in the repository itself"
            first = await session.call("git.pr", {"title": "Mend tabs", "into": "upstream"})
            assert first.ok, first.error_text
            assert (first.data["number"], first.data["repository"], first.data["head"], first.data["existing"]) == (
                *(2, "ann/project", "topic"),
                False,
            )
            assert server.pulls[1]["head"] == {"ref": "topic", "repo": {"full_name": "bob/copy"}}
            again = await session.call("git.pr", {"title": "Mend tabs", "into": "upstream"})
            assert again.data == {**first.data, "existing": True}
            other = await session.call("git.pr", {"title": "Eve's", "remote": "eve", "into": "upstream"})
            assert (other.data["number"], other.data["existing"]) == (3, False)
            trunk = await session.call("git.pr", {"title": "Trunk", "head": "main", "into": "upstream"})
            assert trunk.ok and trunk.data["head"] == "main", trunk.error_text
            refused = await session.call("git.pr", {"title": "x", "head": "absent", "into": "upstream"})
            assert refused.error_kind == "invalid_input" and "bob/copy" in str(refused.error_text)


@EACH
async def test_a_fork_on_another_server_is_refused(tmp_path: Path, kind: str) -> None:
    other = "gitea" if kind == "github" else "github"
    async with FORGES[kind]() as server, FORGES[other]() as elsewhere:
        settings = "".join(
            f'{name}_url = "{one.url}"\n{name}_host = "{one.authority}"\n{name}_token = {{ secret = "FORGE" }}\n'
            for name, one in ((kind, server), (other, elsewhere))
        )
        settings = f'[tools."git.pr".config]\n{settings}'
        async with working(tmp_path, kind, server, settings=settings) as (session, repo):
            repo.configure(f'[remote "upstream"]\n\turl = {elsewhere.clone_url}\n')
            refused = await session.call("git.pr", {"title": "x", "into": "upstream"})
            assert refused.error_kind == "invalid_input" and "different servers" in str(refused.error_text)
            assert server.requests == elsewhere.requests == []


@EACH
async def test_a_draft_uses_the_draft_form_of_its_forge(tmp_path: Path, kind: str) -> None:
    async with FORGES[kind]() as server, working(tmp_path, kind, server) as (session, _):
        made_draft = await session.call("git.pr", {"title": "Mend tabs", "draft": True})
        assert made_draft.data["draft"] is True
        assert server.pulls[0]["title"] == ("Mend tabs" if kind == "github" else "WIP: Mend tabs")


@EACH
async def test_a_pull_request_created_concurrently_is_found_and_returned(tmp_path: Path, kind: str) -> None:
    async with FORGES[kind]() as server, working(tmp_path, kind, server) as (session, _):
        assert (await session.call("git.pr", {"title": "One"})).ok
        told = len(server.requests)
        answers = [server._answer(one) for one in server.requests[:2]]  # pyright: ignore[reportPrivateUsage]
        server.replies = [*answers, ForgeReply(200, [])]  # the list came before the other request was made
        found = await session.call("git.pr", {"title": "Two"})
        assert found.data["existing"] and found.data["number"] == 1 and found.data["title"] == "One"
        assert [one.method for one in server.requests[told:]] == ["GET", "GET", "GET", "POST", "GET"]


@EACH
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"head": "main"}, ("`head`", "trunk")),
        ({"head": "next", "base": "main"}, ("`head`", "trunk")),
        ({"head": "topic", "base": "topic"}, ("`head`", "trunk")),
        ({"head": "absent"}, ("'absent'", "git.push")),
        ({"base": "decoy"}, ("'decoy'", "'next'")),
        ({"head": "same"}, ("no new commits",)),
        ({"head": "-x"}, ("branch name",)),
        ({"head": "+topic"}, ("'+topic'",)),
        ({"title": " "}, ("`title`",)),
        ({"title": "a\nb"}, ("`title`",)),
        ({"remote": "upstream"}, ("'upstream'", "origin")),
    ],
)
async def test_arguments_that_allow_no_pull_request_are_refused_with_the_reason(
    tmp_path: Path, kind: str, arguments: dict[str, Any], parts: tuple[str, ...]
) -> None:
    branches = {"next": ("a",), "main": ("a",), "topic": ("a", "b"), "same": ("a",)}
    async with (
        FORGES[kind](default_branch="next", branches=branches) as server,
        working(tmp_path, kind, server) as (session, _),
    ):
        refused = await session.call("git.pr", {"title": "Mend tabs", **arguments})
        assert refused.error_kind == "invalid_input", refused
        assert all(part in str(refused.error_text) for part in parts), refused.error_text
        assert server.pulls == []


LIMITED = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000000"}


@EACH
@pytest.mark.parametrize(
    ("reply", "error", "part"),
    [
        (ForgeReply(401, {"message": "Bad credentials"}), "unavailable", "_token"),
        (ForgeReply(403, {"message": "Resource not accessible"}), "denied", "not accessible"),
        (ForgeReply(403, {"message": "API rate limit exceeded"}, LIMITED), "limit", "1700000000"),
        (ForgeReply(429, {"message": "Slow down"}, {"retry-after": "60"}), "limit", "60"),
        (ForgeReply(404, {"message": "Not Found"}), "failed", "ann/project"),
        (ForgeReply(301, b"", {"location": "https://elsewhere.example/"}), None, ""),
        (ForgeReply(500, b"<html>oops"), "backend", "500"),
        (ForgeReply(200, b"<html>sign in</html>"), "backend", "did not send valid JSON"),
        (ForgeReply(200, []), None, ""),
        (ForgeReply(422, {"message": "x" * 500, "errors": [None, 3, {"message": 1}]}), "invalid_input", "characters"),
    ],
)
async def test_each_refusal_of_a_forge_has_its_error_kind(
    tmp_path: Path, kind: str, reply: ForgeReply, error: str | None, part: str
) -> None:
    async with FORGES[kind]() as server, working(tmp_path, kind, server) as (session, _):
        server.replies = [reply]
        refused = await session.call("git.pr", {"title": "Mend tabs"})
        if error is not None:
            assert (refused.error_kind, part in str(refused.error_text)) == (error, True), refused
        assert server.token not in str(refused.to_dict())


async def test_drafts_that_a_repository_does_not_support_are_refused_with_the_reason(tmp_path: Path) -> None:
    async with GitHubServer(supports_drafts=False) as server, working(tmp_path, "github", server) as (session, _):
        refused = await session.call("git.pr", {"title": "x", "draft": True})
        assert refused.error_kind == "invalid_input" and "not supported in this repository" in str(refused.error_text)


@EACH
async def test_a_wrong_token_error_names_the_setting_and_not_the_token(tmp_path: Path, kind: str) -> None:
    async with FORGES[kind]() as server, working(tmp_path, kind, server) as (session, _):
        server.token = "another"
        refused = await session.call("git.pr", {"title": "x"})
        assert refused.error_kind == "unavailable" and f"{kind}_token" in str(refused.error_text)


@EACH
@pytest.mark.parametrize(
    "remote", ["git@{host}:ann/project.git", "ssh://git@{host}/ann/project", "http://u:p@{authority}/ann/project.git"]
)
async def test_the_repository_is_recognised_from_each_form_of_a_remote(tmp_path: Path, kind: str, remote: str) -> None:
    async with FORGES[kind]() as server:
        address = remote.format(host="127.0.0.1", authority=server.authority)
        belongs = server.authority if "http" in remote else "127.0.0.1"
        settings = (
            f'[tools."git.pr".config]\n{kind}_url = "{server.url}"\n{kind}_host = "{belongs}"\n'
            f'{kind}_token = {{ secret = "FORGE" }}'
        )
        async with working(tmp_path, kind, server, remote=address, settings=settings) as (session, _):
            result = await session.call("git.pr", {"title": "Mend tabs"})
            assert result.ok, result.error_text


@EACH
@pytest.mark.parametrize(
    "remote", ["https://github.com.evil.example/ann/project", "../elsewhere", "https://x.example/a"]
)
async def test_the_token_is_sent_to_no_other_host(tmp_path: Path, kind: str, remote: str) -> None:
    async with FORGES[kind]() as server, working(tmp_path, kind, server, remote=remote) as (session, _):
        refused = await session.call("git.pr", {"title": "x"})
        assert refused.error_kind in ("unavailable", "invalid_input") and not server.requests


@EACH
@pytest.mark.parametrize("path", ["../user", "ann/..", "./user", "../../user/.git"])
async def test_a_remote_with_dot_segments_in_its_path_is_refused(tmp_path: Path, kind: str, path: str) -> None:
    async with (
        FORGES[kind]() as server,
        working(tmp_path, kind, server, remote=f"http://{server.authority}/{path}") as (session, _),
    ):
        refused = await session.call("git.pr", {"title": "x"})
        assert refused.error_kind == "invalid_input" and not server.requests


async def test_a_token_is_not_sent_unencrypted_to_another_machine(tmp_path: Path) -> None:
    settings = '[tools."git.pr".config]\ngitea_url = "http://forge.example/api/v1"\ngitea_token = { secret = "FORGE" }'
    async with (
        GiteaServer() as server,
        working(tmp_path, "gitea", server, remote="http://forge.example/a/b", settings=settings) as (session, _),
    ):
        refused = await session.call("git.pr", {"title": "x"})
        assert refused.error_kind == "denied" and "https" in str(refused.error_text)


@EACH
async def test_a_redirect_does_not_take_the_token_or_the_request_to_another_server(tmp_path: Path, kind: str) -> None:
    async with (
        FORGES[kind]() as elsewhere,
        FORGES[kind]() as server,
        working(tmp_path, kind, server) as (session, _),
    ):
        moved = ForgeReply(307, b"", {"location": f"{elsewhere.url}/repos/ann/project/pulls"})
        top = [ForgeReply(200, {"default_branch": "main"}), ForgeReply(200, {}), ForgeReply(200, [])]
        server.replies = [*top, moved]
        refused = await session.call("git.pr", {"title": "x"})
        assert not refused.ok and not elsewhere.pulls
        assert all("authorization" not in one.headers for one in elsewhere.requests)


@EACH
async def test_a_pull_request_is_not_created_without_approval(tmp_path: Path, kind: str) -> None:
    async with FORGES[kind]() as server, working(tmp_path, kind, server, rules=()) as (session, _):
        assert (await session.call("git.pr", {"title": "x"})).error_kind == "denied"
        assert not server.requests


@EACH
async def test_one_approval_of_the_user_also_allows_the_host_of_the_forge(tmp_path: Path, kind: str) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    async with (
        FORGES[kind]() as server,
        working(tmp_path, kind, server, rules=(), approval_handler=person) as (session, _),
    ):
        result = await session.call("git.pr", {"title": "Mend tabs"})
        assert result.ok, result.error_text
        assert person.requests[0].arguments["title"] == "Mend tabs" and len(server.pulls) == 1
