"""git's configuration: our reader agrees with git, and harmless settings are a closed list."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.runtime.guard.git_config_reader import (
    GitConfigLine,
    UnreadableGitConfigError,
    find_changed_unsafe_keys,
    is_harmless_git_setting,
    is_harmless_url,
    parse_config,
)

pytestmark = pytest.mark.proves("S-07")
EMPTY = {"GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}


def inside(path: str) -> bool:
    return not path.startswith("/") and path.count("..") < 4


def as_git_reads(data: bytes, folder: Path) -> list[GitConfigLine] | None:
    """Return git's list of a configuration file, which runs no program; None if git refuses it."""
    file = folder / "config"
    file.write_bytes(data)
    done = subprocess.run(
        ["git", "config", "--no-includes", "--list", "-z", "--file", str(file)],
        capture_output=True,
        env=EMPTY,
        cwd=folder,
        check=False,
    )
    if done.returncode != 0:
        return None
    entries: list[GitConfigLine] = []
    for item in done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]:
        key, newline, value = item.partition("\n")
        entries.append(GitConfigLine(key, value if newline else None))
    return entries


READ = {
    '[core]\n\tbare = false\n[remote "origin"]\n\turl = /srv/x\n': [
        ("core.bare", "false"),
        ("remote.origin.url", "/srv/x"),
    ],
    "[a] b = c ; d\n[A]B=c # d\n": [("a.b", "c"), ("a.b", "c")],
    "[a]\nb\nc =\nd = \n": [("a.b", None), ("a.c", ""), ("a.d", "")],
    '[a]\nb = "x ; y" z "  "\n': [("a.b", "x ; y z   ")],
    "[a]\nb = one\\\n two \\\n\tthree\n": [("a.b", "one two  three")],
    '[a "S\\"u\\\\b"]\nb = \\t\\n\\"\\\\\n': [('a.S"u\\b.b', '\t\n"\\')],
    "[a.B.c]\nd = 1\n": [("a.b.c.d", "1")],
    "\ufeff[a]\r\nb = c\r\n": [("a.b", "c")],
    "[a]b=1\n[include]\npath = ../evil\n": [("a.b", "1"), ("include.path", "../evil")],
    "[a]\n  b   =   lots   of   room   \n": [("a.b", "lots   of   room")],
    "": [],
    "# only words": [],
}


@pytest.mark.parametrize("text", READ)
def test_the_parser_reads_a_git_configuration_as_git_does(text: str, tmp_path: Path) -> None:
    assert parse_config(text.encode()) == [GitConfigLine(*pair) for pair in READ[text]]
    assert parse_config(text.encode()) == as_git_reads(text.encode(), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[a\nb=c\n",
        "[a]\n=b\n",
        '[a "b]\nc=d\n',
        "[a]\nb = \\x\n",
        '[a]\nb = "c\n',
        "[a]\nb c\n",
        "[]\nb=c",
        "[a b]\nc=d",
    ],
)
def test_the_parser_refuses_a_configuration_that_git_refuses(text: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableGitConfigError):
        parse_config(text.encode())
    assert as_git_reads(text.encode(), tmp_path) is None


@pytest.mark.parametrize("data", [b"[a]\nb = c\0d\n", b"b = c\n", b"[a]\n" + b"b = c\n" * 200_000])
def test_an_ambiguous_or_oversized_configuration_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableGitConfigError):
        parse_config(data)


_TOKENS = [
    *(
        "[a]",
        '[a "b"]',
        "[core]",
        "[a.b]",
        "b",
        "=",
        " ",
        "\n",
        "\r\n",
        "\t",
        '"',
        "\\",
        "\\\n",
        "\\n",
        "\\t",
        "#",
        ";",
    ),
    *("x", "]", "[", "é", "include", "path", "fsmonitor", "-", ".", "'", "\\\\", '\\"', "  ", "\x0b", "\x7f"),
]


@settings(max_examples=3 * settings().max_examples)
@given(st.lists(st.sampled_from(_TOKENS), max_size=24))
def test_the_configuration_parser_agrees_with_git_or_refuses_the_text(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[str]
) -> None:
    data = "[s]\n" + "".join(tokens)
    theirs = as_git_reads(data.encode(), _folder(tmp_path_factory))
    try:
        ours = parse_config(data.encode())
    except UnreadableGitConfigError:
        assert theirs is None
        return
    assert theirs is not None and _blanks(ours) == _blanks(theirs)


def _blanks(entries: list[GitConfigLine]) -> list[GitConfigLine]:
    """Versions of git differ in whether a tab within a value stays one."""
    return [entry._replace(value=entry.value and entry.value.replace("\t", " ")) for entry in entries]


_made: list[Path] = []


def _folder(factory: pytest.TempPathFactory) -> Path:
    if not _made:
        _made.append(factory.mktemp("gitconfig"))
    return _made[0]


HARMLESS = [
    *("core.bare=false", "core.repositoryformatversion=0", "core.filemode=true", "core.logallrefupdates=always"),
    *("remote.origin.url=/srv/project.git", "remote.origin.url=https://example.org/x.git", "remote.o.url=../sibling"),
    *(
        "remote.origin.url=git@example.org:a/b.git",
        "remote.origin.url=ssh://git@example.org:22/a",
        "remote.o.url=file:///x",
    ),
    *("remote.origin.fetch=+refs/heads/*:refs/remotes/origin/*", "branch.main.remote=origin", "branch.main.remote=."),
    *(
        "branch.feature/x.merge=refs/heads/feature/x",
        "branch.main.rebase=true",
        "user.name=A. Person",
        "user.email=a@b.c",
    ),
    *(
        "init.defaultbranch=main",
        "submodule.lib.url=../lib",
        "submodule.lib.active=true",
        "core.worktree=../../../lib/x",
    ),
    "extensions.objectformat=sha256",
]
HARMFUL = [
    *("core.fsmonitor=evil", "core.hookspath=evil", "core.sshcommand=evil", "core.pager=evil", "core.editor=evil"),
    *("core.gitproxy=evil", "core.askpass=evil", "core.attributesfile=x", "alias.st=!evil", "diff.external=evil"),
    *(
        "filter.x.clean=evil",
        "filter.x.process=evil",
        "merge.x.driver=evil",
        "diff.x.textconv=evil",
        "include.path=evil",
    ),
    *(
        "includeif.gitdir:/.path=evil",
        "credential.helper=!evil",
        "credential.https://x.helper=evil",
        "gpg.program=evil",
    ),
    *("url.ext::evil.insteadof=https://", "remote.origin.url=ext::sh -c evil", "remote.o.url=ext::evil"),
    *(
        "remote.origin.url=-oProxyCommand=evil",
        "remote.origin.url=ssh://-oProxyCommand=evil/x",
        "remote.o.url=git@-x:y",
    ),
    *(
        "remote.origin.uploadpack=evil",
        "remote.origin.receivepack=evil",
        "remote.origin.vcs=ext",
        "remote.origin.proxy=x",
    ),
    *(
        "branch.main.remote=ext::evil",
        "branch.main.remote=-x",
        "submodule.lib.update=!evil",
        "submodule.lib.url=ext::evil",
    ),
    *(
        "core.worktree=/etc",
        "core.worktree=../../../../../etc",
        "http.proxy=x",
        "protocol.ext.allow=always",
        "core.bare=x",
    ),
    *("sequence.editor=evil", "uploadpack.packobjectshook=evil", "browser.x.cmd=evil", "sendemail.sendmailcmd=evil"),
    *("remote.origin.url=https://x\ny", "user.name=a\x1b]0;x\x07", "trailer.x.command=evil", "safe.directory=*"),
]


@pytest.mark.parametrize("text", HARMLESS)
def test_settings_written_by_ordinary_git_commands_are_harmless(text: str) -> None:
    key, _, value = text.partition("=")
    assert is_harmless_git_setting(GitConfigLine(key, value), inside)


@pytest.mark.parametrize("text", HARMFUL)
def test_settings_that_run_programs_are_not_harmless(text: str) -> None:
    key, _, value = text.partition("=")
    if key.startswith("url."):
        key, value = "url.ext::evil.insteadof", "https://"
    assert not is_harmless_git_setting(GitConfigLine(key, value), inside)


@given(st.text(max_size=30))
def test_a_url_for_a_git_helper_is_never_harmless(url: str) -> None:
    assert not is_harmless_url(f"ext::{url}")
    assert not is_harmless_url(f"{url}::{url}")
    assert not is_harmless_url(f"-{url}")


def test_an_existing_unsafe_setting_can_stay_but_not_change() -> None:
    theirs = [
        GitConfigLine("core.hookspath", "tools/hooks"),
        GitConfigLine("alias.a", "b"),
        GitConfigLine("core.bare", "false"),
    ]

    def plain(after: list[GitConfigLine]) -> list[str]:
        return find_changed_unsafe_keys(theirs, after, inside)

    assert plain([*theirs, GitConfigLine("remote.o.url", "/x")]) == []
    assert plain([*theirs[:2], GitConfigLine("core.bare", "true")]) == []
    assert plain(theirs[1:]) == ["core.hookspath"]
    assert plain([*theirs, GitConfigLine("core.fsmonitor", "x")]) == ["core.fsmonitor"]
    assert plain([*theirs, theirs[1]]) == ["core.hookspath", "alias.a"]
    assert plain([theirs[1], theirs[0]]) == ["alias.a", "core.hookspath"]
    assert plain([theirs[0]._replace(value="evil"), theirs[1]]) == ["core.hookspath"]
