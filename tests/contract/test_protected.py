"""Protected names in every spelling that a file system may treat as equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.protected.path_protection import (
    find_path_protection,
    find_tool_write_protection,
    has_path_dependent_entries,
    is_private_key_path,
    needs_full_path_check,
    normalise_file_name,
)

pytestmark = pytest.mark.proves("P-15")


@pytest.mark.parametrize(
    "name",
    [
        *("handrail.toml", "HANDRAIL.TOML", "Handrail.Toml", "handrail.toml.", "handrail.toml .", "handrail.toml "),
        *("handrail.toml::$DATA", "hand\u200crail.toml", "handrail.toml\u200b", "ｈandrail.toml", "handrail\uff0etoml"),
    ],
)
def test_every_spelling_of_the_workspace_file_name_is_protected(name: str) -> None:
    found = find_path_protection(name)
    assert found is not None and not found.requires_approval


@pytest.mark.parametrize(
    "name",
    ["handrail.tom", "handrail.toml.bak", "my-handrail.toml", "src/handrail.toml", ".", "handrail", "handráil.toml2"],
)
def test_other_names_and_folders_are_not_protected_as_the_workspace_file(name: str) -> None:
    found = find_path_protection(name)
    assert found is None or found.requires_approval


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (".git/hooks/pre-commit", "hook"),
        (".git/config", "vcs"),
        (".git", "vcs"),
        ("deep/er/.git/config", "vcs"),
        (".git/config.worktree", "vcs"),
        (".git/commondir", "vcs"),
        (".git/modules/lib/config", "vcs"),
        (".git/modules/lib/hooks/post-checkout", "hook"),
        (".git/worktrees/w/config.worktree", "vcs"),
        (".GIT/Config", "vcs"),
        (".git./config ", "vcs"),
        (".git::$INDEX_ALLOCATION/config", "vcs"),
        ("GIT~1/config", "vcs"),
        (".g\u200cit/config", "vcs"),
        (".ｇit/config", "vcs"),
        (".git/con\u00adfig", "vcs"),
        (".hg/hgrc", "vcs"),
        (".jj/repo/config.toml", "vcs"),
        (".gitconfig", "vcs"),
        (".config/git/config", "vcs"),
        (".husky/pre-commit", "hook"),
        (".bashrc", "start-up"),
        ("home/.zshenv", "start-up"),
        (".config/fish/config.fish", "start-up"),
        (".envrc", "start-up"),
        ("a/.envrc", "start-up"),
        ("analysis/.Rprofile", "start-up"),
        ("a/.pdbrc", "start-up"),
        (".irbrc", "start-up"),
        (".iex.exs", "start-up"),
        (".ghci", "start-up"),
        (".gdbinit", "start-up"),
        (".helix/languages.toml", "editor"),
        ("a/.emacs.d/init.el", "editor"),
        (".aider.conf.yml", "editor"),
        (".ssh/authorized_keys", "key"),
        ("keys/id_ed25519", "key"),
        (".gnupg/gpg.conf", "key"),
        (".vscode/tasks.json", "editor"),
        ("packages/a/.vscode/settings.json", "editor"),
        (".idea/workspace.xml", "editor"),
        (".mcp.json", "editor"),
        (".claude/settings.json", "editor"),
        (".cursor/mcp.json", "editor"),
        (".devcontainer/devcontainer.json", "editor"),
    ],
)
def test_files_that_make_other_programs_run_code_are_protected(path: str, kind: str) -> None:
    found = find_path_protection(path)
    assert found is not None and found.kind == kind
    assert path in found.format_write_denial(path) and "no rule can allow it" in found.format_write_denial(path)


@pytest.mark.parametrize(
    "path",
    [
        *("src/config", "hooks/useThing.ts", "config", "git/config", ".gitignore", ".github/CODEOWNERS", ".git/HEAD"),
        *(".git/index", ".git/refs/heads/config", ".git/objects/ab/hooks"),
        *(".git/logs/refs/heads/hooks", ".git/info/exclude", ".config/app/fish", "id_rsa.pub", "docs/ssh", "Makefile"),
        *("src/.hidden/x.py", "a.git/description", "bashrc", "..", "...", "", "a//b", ".g\u0131t/config"),
    ],
)
def test_ordinary_paths_are_not_protected(path: str) -> None:
    assert find_path_protection(path) is None


@pytest.mark.parametrize(
    "path",
    [
        *(
            ".git/HEAD",
            ".git/index",
            ".git/refs/heads/main",
            ".git/objects/ab/cd",
            ".git/logs/HEAD",
            ".git/info/exclude",
        ),
        *(".git/rebase-merge/git-rebase-todo", ".git/sequencer/todo", ".git/MERGE_MSG", ".git/worktrees/w/gitdir"),
        *(
            ".git/modules/lib/HEAD",
            ".git/BISECT_RUN",
            ".GIT/index",
            "git~1/index",
            "sub/.git/packed-refs",
            ".hg/dirstate",
        ),
        *(".svn/wc.db", ".jj/repo/store/x", ".bzr/branch/y", "_darcs/inventory", ".sl/store", ".pijul/pristine"),
    ],
)
def test_file_tools_cannot_write_the_state_of_version_control(path: str) -> None:
    found = find_tool_write_protection(path)
    assert found is not None and not found.requires_approval
    assert "No tool can write it, and no rule can allow it" in found.format_write_denial(path)


@pytest.mark.parametrize("path", [".git/objects/ab/cd", ".git/index", ".git/HEAD", ".hg/store/x", ".svn/wc.db"])
def test_version_control_programs_may_write_their_own_state(path: str) -> None:
    assert find_path_protection(path) is None


@pytest.mark.parametrize(
    "path", ["id_rsa", "a/ID_ED25519", ".ssh/work", ".ssh/x/key", ".gnupg/private-keys-v1.d/A.key"]
)
def test_private_key_files_are_recognised(path: str) -> None:
    assert is_private_key_path(path)


@pytest.mark.parametrize(
    "path", [".ssh/config", ".ssh/known_hosts", ".ssh/id_rsa.pub", ".gnupg/pubring.kbx", ".bashrc"]
)
def test_public_keys_and_ssh_settings_are_not_private_keys(path: str) -> None:
    assert not is_private_key_path(path)


_PIECES = [
    "AGENTS.md",
    ".github",
    "workflows",
    "gradle",
    "wrapper",
    "x.code-workspace",
    "node_modules",
    "mise.dev.toml",
    ".git",
    "config",
    "hooks",
    ".vscode",
    "handrail.toml",
    "id_rsa",
    "src",
    ".config",
    "fish",
    ".hg",
    "hgrc",
    "GIT~1",
]
_NAME = st.one_of(
    st.sampled_from(_PIECES),
    st.sampled_from(_PIECES).map(str.upper),
    st.sampled_from(_PIECES).map(lambda name: name + ". "),
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8),
)


@given(st.lists(_NAME, min_size=1, max_size=4))
def test_a_walk_by_single_names_misses_no_protected_path(names: list[str]) -> None:
    """A walk looks at whole paths only where one name gives reason to: that must never miss any."""
    path = "/".join(names)
    if find_path_protection(path) is not None:
        reason = [needs_full_path_check(name) for name in names] + [
            has_path_dependent_entries(name) for name in names[:-1]
        ]
        assert any(reason)


@given(st.lists(_NAME, min_size=1, max_size=4))
def test_paths_in_a_protected_folder_are_protected_in_any_letter_case(names: list[str]) -> None:
    path = "/".join(names)
    found = find_path_protection(path)
    if found is not None and normalise_file_name(names[-1]) != ".git" and path != "handrail.toml" and len(names) > 1:
        below = find_path_protection(f"{path}/x/y")
        assert below is not None and (found.requires_approval or not below.requires_approval)
    spelled = "/".join(name.swapcase() if name.isascii() else name for name in names)
    assert find_path_protection(spelled) == found
