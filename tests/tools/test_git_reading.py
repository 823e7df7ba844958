"""git.status, log, diff, show, blame and branches, on real repositories in the sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.tools.desk import BuiltinToolFixture, refused
from tests.tools.repositories import Repo, create_repository

from handrail.contract.errors import ToolError

pytestmark = pytest.mark.proves("T-05a", "T-02a")


async def test_status_reports_staged_changed_and_new_files_and_the_branch_position(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    empty = await desk.call("git.status")
    assert (empty["branch"], empty["commit"], empty["clean"]) == ("main", None, True)
    first = repo.commit("first", a="one\n", b="two\n", c="three\n" * 9, d="x\n")
    repo.git("branch", "--quiet", "elsewhere")
    repo.commit("second", e="y\n")
    repo.git("branch", "--quiet", "--set-upstream-to=elsewhere")
    repo.put("a", "changed\n")
    repo.git("mv", "c", "moved")
    repo.git("rm", "--quiet", "b")
    repo.put("deep/new", "")
    repo.put("ignored", "")
    repo.put(".gitignore", "ignored\n")
    found = await desk.call("git.status")
    assert found["staged"] == [
        {"path": "b", "change": "deleted"},
        {"path": "moved", "change": "renamed", "from": "c"},
    ]
    assert found["unstaged"] == [{"path": "a", "change": "modified"}]
    assert found["untracked"] == [".gitignore", "deep/"]
    assert (found["upstream"], found["ahead"], found["behind"], found["clean"]) == ("elsewhere", 1, 0, False)
    assert "untracked" in found and (await desk.call("git.status", untracked=False))["untracked"] == []
    assert (await desk.call("git.status", repository="deep"))["repository"] == "."
    repo.git("stash", "--quiet")
    repo.git("checkout", "--quiet", first)
    loose = await desk.call("git.status")
    assert (loose["branch"], loose["detached"], loose["commit"], loose["stashes"]) == (None, True, first, 1)


async def test_file_names_and_messages_with_any_bytes_are_returned(desk: BuiltinToolFixture, repo: Repo) -> None:
    names = [b"caf\xe9", "snö".encode(), b"two\nlines", b"-dash", b" ?? blank", b'"quoted"\t']
    for name in names:
        repo.put(name, "x\n")
    found = await desk.call("git.status")
    assert set(found["untracked"]) == {
        "caf⟦U+DCE9⟧",
        "snö",
        "two⟦U+000A⟧lines",
        "-dash",
        "⟦U+0020⟧?? blank",
        '"quoted"⟦U+0009⟧',
    }
    added = await desk.call("git.add", paths=["caf⟦U+DCE9⟧", "-dash", "two⟦U+000A⟧lines"])
    assert set(added["staged"]) == {"caf⟦U+DCE9⟧", "-dash", "two⟦U+000A⟧lines"}
    assert set((await desk.call("git.add", all=True))["staged"]) == {"snö", "⟦U+0020⟧?? blank", '"quoted"⟦U+0009⟧'}
    tree = repo.git("write-tree")
    who = b"R\xe9my <r@example.org> 1700000000 +0530"
    message = b"caf\xe9 \xff\n\nbody\x1b[2J \xe2\x82\xac\n"
    raw = b"tree %b\nauthor %b\ncommitter %b\n\n%b" % (tree.encode(), who, who, message)
    head = repo.git("hash-object", "-t", "commit", "-w", "--stdin", stdin=raw)
    repo.git("reset", "--quiet", "--soft", head)
    commit = (await desk.call("git.log"))["commits"][0]
    assert (commit["subject"], commit["body"]) == ("caf\\xe9 \\xff", "body\x1b[2J €")
    assert (commit["author"], commit["date"]) == ("R\\xe9my <r@example.org>", "2023-11-15T03:43:20+05:30")
    assert {one["path"] for one in (await desk.call("git.show"))["files"]} >= {"caf⟦U+DCE9⟧", "two⟦U+000A⟧lines"}


async def test_a_folder_without_a_usable_repository_is_refused_with_the_reason(
    desk: BuiltinToolFixture, repo: Repo, tmp_path: Path
) -> None:
    outside = create_repository(tmp_path / "outside")
    outside.commit("secret", key="TOP-SECRET")
    (desk.workspace / ".git").rename(desk.workspace / "kept")
    await refused(desk.call("git.status"), "failed", "git.init")
    repo.put("linked/.git", f"gitdir: {outside.folder}/.git\n")
    await refused(desk.call("git.log", repository="linked"), "failed", "outside the workspace")
    await refused(desk.call("git.log", repository="../outside"), "denied")
    await refused(desk.call("git.log", repository="kept"), "failed", "has no work tree")
    await refused(desk.call("git.log", repository="nowhere"), "failed", "not a folder")
    inner = create_repository(desk.workspace / "inner")
    inner.configure("[core]\n\tworktree = ../..\n")
    await refused(desk.call("git.status", repository="inner"), "failed")


async def test_a_work_tree_outside_the_repository_is_refused(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.configure(f"[core]\n\tworktree = {desk.around.scratch}\n")
    await refused(desk.call("git.status"), "denied", "core.worktree")


async def test_log_pages_through_commits_of_a_branch_a_range_or_a_file(desk: BuiltinToolFixture, repo: Repo) -> None:
    assert (await desk.call("git.log"))["commits"] == []
    made_here = [repo.commit(f"number {n}", a=f"{n}\n", **({"b": "x"} if n == 2 else {})) for n in range(5)]
    first = await desk.call("git.log", limit=2)
    assert [one["commit"] for one in first["commits"]] == made_here[:2:-1]
    assert first["next_skip"] == 2
    assert first["commits"][0]["author"] == "Ann Author <ann@example.org>"
    assert first["commits"][0]["date"] == "2024-05-06T07:08:09+02:00"
    last = await desk.call("git.log", limit=2, skip=4)
    assert [one["commit"] for one in last["commits"]] == made_here[:1]
    assert "next_skip" not in last
    ranged = await desk.call("git.log", ref=f"{made_here[1]}..{made_here[3]}")
    assert [one["subject"] for one in ranged["commits"]] == ["number 3", "number 2"]
    assert [one["commit"] for one in (await desk.call("git.log", paths=["b"]))["commits"]] == [made_here[2]]
    repo.git("branch", "feature/login")
    await refused(desk.call("git.log", ref="feature/logim"), "invalid_input", "Did you mean feature/login")
    await refused(desk.call("git.log", paths=["../elsewhere"]), "invalid_input", "outside the repository")


async def test_diff_compares_files_staged_changes_and_commits(desk: BuiltinToolFixture, repo: Repo) -> None:
    first = repo.commit("first", a="1\n2\n3\n4\n5\n6\n7\n8\n", picture=b"\x00\x01")
    second = repo.commit("second", a="1\n2\n3\n4\nfive\n6\n7\n8\n")
    repo.put("a", "1\n2\n3\n4\nfive\n6\n7\neight\n")
    repo.put("picture", b"\x00\x02")
    found = await desk.call("git.diff")
    assert found["files"] == [
        {"path": "a", "change": "modified", "added": 1, "deleted": 1},
        {"path": "picture", "change": "modified", "binary": True},
    ]
    assert "-8\n+eight\n" in found["patch"]
    assert " 7\n" in found["patch"]
    assert " 7\n" not in (await desk.call("git.diff", context=0))["patch"]
    assert (await desk.call("git.diff", staged=True))["files"] == []
    repo.git("add", "a")
    staged = await desk.call("git.diff", staged=True, counts_only=True)
    assert [one["path"] for one in staged["files"]] == ["a"]
    assert "patch" not in staged
    between = await desk.call("git.diff", **{"from": first, "to": second})
    assert (between["added"], between["deleted"]) == (1, 1)
    assert "+five" in between["patch"] and "eight" not in between["patch"]
    both = await desk.call("git.diff", **{"from": first}, paths=["a"])
    assert "+five" in both["patch"] and "+eight" in both["patch"]
    await refused(desk.call("git.diff", to="main"), "invalid_input", "`from`")
    await refused(desk.call("git.diff", **{"from": "HEAD:a"}), "invalid_input", "The revision is invalid")
    await refused(desk.call("git.diff", **{"from": "--output=x"}), "invalid_input", "begin with '-'")
    assert not (desk.workspace / "x").exists()


async def test_files_that_rules_deny_are_left_out_and_named(desk: BuiltinToolFixture, repo: Repo) -> None:
    first = repo.commit("first", a="1\n", key="SECRET-1\n", gone="SECRET-2\n")
    (desk.workspace / "gone").unlink()
    repo.commit("second", a="2\n", key="SECRET-3\n")
    repo.put("key", "SECRET-4\n")
    repo.put("a", "3\n")
    for name in ("key", "gone"):
        desk.refuse[str(desk.workspace / name)] = "a rule denies it"
    calls = [
        await desk.call("git.diff"),
        await desk.call("git.diff", **{"from": first}),
        await desk.call("git.diff", **{"from": first, "to": "HEAD"}),
        await desk.call("git.show"),
        await desk.call("git.show", ref=first),
        await desk.call("git.status"),
    ]
    assert "SECRET" not in repr(calls)
    assert [one["redacted_paths"]["paths"] for one in calls] == [["key"], ["gone", "key"], ["gone", "key"], ["gone", "key"], ["gone", "key"], ["key"]]  # fmt: skip
    assert all([row["path"] for row in one["files"]] == ["a"] for one in calls[:5])
    assert calls[5]["unstaged"] == [{"path": "a", "change": "modified"}]
    added = await desk.call("git.add", all=True)
    assert (added["staged"], added["not_staged"]) == (["a"], {"key": "Rules deny reading this file."})


async def test_show_returns_a_commit_with_its_changes_or_an_earlier_file(desk: BuiltinToolFixture, repo: Repo) -> None:
    root = repo.commit("first\n\nthe reasons", a="one\n", deep="two\n", picture=b"\x00")
    shown = await desk.call("git.show", ref=root)
    assert (shown["subject"], shown["body"], shown["parents"]) == ("first", "the reasons", [])
    assert [one["change"] for one in shown["files"]] == ["added"] * 3
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("side", b="side\n")
    repo.git("checkout", "--quiet", "main")
    main = repo.commit("main", a="changed\n")
    repo.git("merge", "--quiet", "--no-edit", "side")
    merged = await desk.call("git.show")
    assert (merged["compared_to"], [one["path"] for one in merged["files"]]) == (main, ["b"])
    assert (await desk.call("git.show", ref=root, file="a"))["content"] == "one\n"
    assert (await desk.call("git.show", file="picture"))["binary"] is True
    await refused(desk.call("git.show", ref=root, file="b"), "failed", "b")
    await refused(desk.call("git.show", ref="HEAD", file="."), "invalid_input")
    await refused(desk.call("git.show", ref="HEAD:a"), "invalid_input")


async def test_git_tools_accept_only_commits_as_revisions(desk: BuiltinToolFixture, repo: Repo) -> None:
    """Rules are about paths from the top of the work tree, and in a tree, paths begin at another folder."""
    repo.commit("first", **{"private/list.txt": "one\n", "list.txt": "two\n"})
    tree, blob = (repo.git("rev-parse", f"HEAD:{path}").strip() for path in ("private", "private/list.txt"))
    repo.git("tag", "folder", tree)
    repo.git("tag", "file", blob)
    for name in (tree, "folder", blob, "file", "HEAD^{tree}"):
        for arguments in (
            {"from": name},
            {"from": name, "to": "HEAD"},
            {"from": "HEAD", "to": name},
            {"from": name, "staged": True},
        ):
            with pytest.raises(ToolError):
                await desk.call("git.diff", **arguments)
        for tool, more in (("git.show", {}), ("git.show", {"file": "list.txt"}), ("git.blame", {"path": "list.txt"})):
            with pytest.raises(ToolError):
                await desk.call(tool, ref=name, **more)
        with pytest.raises(ToolError):
            await desk.call("git.checkout", ref=name, paths=["list.txt"])
    assert (desk.workspace / "list.txt").read_text() == "two\n"


async def test_blame_names_the_commit_and_author_of_each_line(desk: BuiltinToolFixture, repo: Repo) -> None:
    first = repo.commit("first", a="1\n2\n3\n4\n")
    second = repo.commit("second", a="1\ntwo\n3\n4\n")
    repo.put("a", b"1\ntwo\n3\nfour \xff\n")
    found = await desk.call("git.blame", path="a")
    assert [line["commit"] for line in found["lines"]] == [first, second, first, "0" * 40]
    assert found["lines"][3] == {"line": 4, "commit": "0" * 40, "text": "four \\xff"}
    assert found["commits"][second] == {
        "author": "Ann Author <ann@example.org>",
        "date": "2024-05-06T07:08:09+02:00",
        "subject": "second",
    }
    part = await desk.call("git.blame", path="a", first=2, count=2, ref="main")
    assert [(line["line"], line["text"]) for line in part["lines"]] == [(2, "two"), (3, "3")]
    assert part["next_first"] == 4
    await refused(desk.call("git.blame", path="a", first=9), "invalid_input", "smaller")
    await refused(desk.call("git.blame", path="b"), "failed", "b")


async def test_blame_and_stash_report_that_the_repository_has_no_commits(desk: BuiltinToolFixture, repo: Repo) -> None:
    repo.put("a", "one\n")
    repo.git("add", "a")
    await refused(desk.call("git.blame", path="a"), "failed", "The repository has no commits yet")
    await refused(desk.call("git.stash"), "failed", "The repository has no commits yet")


async def test_branches_are_listed_with_their_upstreams_and_remotes(desk: BuiltinToolFixture, repo: Repo) -> None:
    head = repo.commit("first", a="1\n")
    repo.git("branch", "side")
    repo.git("remote", "add", "origin", "https://user:TOP-SECRET@example.org/x.git")
    repo.git("update-ref", "refs/remotes/origin/main", head)
    repo.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    repo.git("branch", "--quiet", "--set-upstream-to=origin/main")
    repo.commit("second", a="2\n")
    found = await desk.call("git.branches")
    main = next(one for one in found["branches"] if one["branch"] == "main")
    assert (main["current"], main["upstream"], main["compared"]) == (True, "origin/main", "ahead 1")
    assert {one["branch"] for one in found["branches"]} == {"main", "side"}
    assert [one["branch"] for one in found["remote_branches"]] == ["origin/main"]
    assert found["remotes"] == {"origin": "https://example.org/x.git"}
    assert "remote_branches" not in await desk.call("git.branches", remote=False)


async def test_paths_are_relative_to_the_workspace_when_the_repository_is_a_subfolder(
    desk: BuiltinToolFixture, repo: Repo
) -> None:
    inner = create_repository(desk.workspace / "inner")
    inner.commit("first", a="1\n")
    inner.put("a", "2\n")
    inner.put("src/b", "")
    status = await desk.call("git.status", repository="inner/src")
    assert (status["repository"], status["unstaged"][0]["path"], status["untracked"]) == (
        "inner",
        "inner/a",
        ["inner/src/"],
    )
    assert [one["path"] for one in (await desk.call("git.diff", repository="inner", paths=["inner/a"]))["files"]] == [
        "inner/a"
    ]
    assert (await desk.call("git.diff", repository="inner"))["files"][0]["path"] == "inner/a"
    assert (await desk.call("git.blame", path="inner/a"))["lines"][0]["commit"] == "0" * 40
    assert (await desk.call("git.add", repository="inner", paths=["inner/src"]))["staged"] == ["inner/src/b"]
    await refused(
        desk.call("git.add", repository="inner", paths=["a"]), "invalid_input", "outside the repository at inner"
    )
    assert os.listdir(desk.workspace) == [".git", "inner"] or set(os.listdir(desk.workspace)) == {".git", "inner"}
