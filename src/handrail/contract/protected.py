"""The protected paths, which no rule opens for writing: files that other programs execute or take orders from unasked.

Shell start-up files, keys, hooks and configuration of version control, of editors and of agents, and the workspace's
own ``handrail.toml``: whoever may write these decides what the next program started there does, so no tool writes
them and no rule allows it. Private keys are not read either. One table, by name, for every room: rules, file tools,
mounts, and the look that is taken once a program has ended.

What a repository's own *code* does when somebody runs it (a Makefile, a test's configuration, a workflow that runs
elsewhere once it was pushed) is not here: that is what the workspace is for.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

WORKSPACE_FILE = "handrail.toml"
"""Directly in the workspace's root; what a person decides there, no call changes."""

VCS_CONFIG = "vcs.config"
"""The capability of a tool whose programs may change version-control configuration, by an allow-list of keys."""

Kind = Literal["rules", "start-up", "key", "hook", "vcs", "editor"]

_WHAT: Mapping[Kind, str] = {
    "rules": "holds the workspace's rules and settings",
    "start-up": "is read by shells, interpreters and sessions as they start, and can make them run anything",
    "key": "is where keys are kept",
    "hook": "is what version control runs by itself",
    "vcs": "is version-control configuration, which can make git run anything",
    "editor": "is configuration by which editors and agents run programs",
}


@dataclass(frozen=True, slots=True)
class Protection:
    """Why a path is protected.

    :param kind: ``vcs`` is what a program with the capability ``vcs.config`` may change, by keys; nothing else is
    """

    kind: Kind

    @property
    def what(self) -> str:
        """What it is, to follow "it"."""
        return _WHAT[self.kind]

    def refusal(self, shown: str) -> str:
        """Why a write to it is refused, for the model."""
        return f"{shown} {self.what}: no tool can write it and no rule allows it. " + (
            "Only a person changes it; tell them what you would change"
        )


_RULES, _START_UP, _KEY, _HOOK, _VCS, _EDITOR = map(Protection, _WHAT)

_NAMES: Mapping[str, Protection] = {
    **dict.fromkeys(
        (
            *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".inputrc"),
            *(".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".mkshrc", ".cshrc", ".tcshrc"),
            *(".login", ".logout", ".xprofile", ".xinitrc", ".xsession", ".xsessionrc", ".pam_environment"),
            *(".envrc", "microsoft.powershell_profile.ps1"),
            *(".rprofile", ".renviron", ".pdbrc", ".irbrc", ".pryrc", ".iex.exs", ".ghci", ".octaverc"),
            *(".gdbinit", ".lldbinit"),
        ),
        _START_UP,
    ),
    **dict.fromkeys(
        (
            *(".ssh", ".gnupg", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
            *("id_xmss", "secring.gpg"),
        ),
        _KEY,
    ),
    **dict.fromkeys((".husky", ".githooks"), _HOOK),
    **dict.fromkeys((".gitconfig", ".hgrc"), _VCS),
    **dict.fromkeys(
        (
            *(".vscode", ".idea", ".zed", ".fleet", ".vs", ".devcontainer", ".devcontainer.json"),
            *(".vimrc", ".gvimrc", ".exrc", ".nvimrc", ".nvim.lua", ".dir-locals.el", ".dir-locals-2.el", ".emacs"),
            *(".mcp.json", ".claude", ".cursor", ".codex", ".gemini", ".windsurf", ".roo", ".kiro", ".continue"),
            *(".junie", ".amazonq", ".opencode", "opencode.json", "opencode.jsonc"),
            *(".helix", ".vim", ".emacs.d", ".trae", ".qwen", ".factory", ".crush.json", ".aider.conf.yml"),
        ),
        _EDITOR,
    ),
}
"""Protected wherever they are, with everything in them."""

_BELOW: Mapping[str, Mapping[str, Protection]] = {
    ".config": {
        **dict.fromkeys(("fish", "powershell", "autostart", "systemd", "environment.d"), _START_UP),
        **dict.fromkeys(("git", "hg", "jj"), _VCS),
    },
    ".hg": dict.fromkeys(("hgrc", "hgrc-not-shared", "sharedpath"), _VCS),
    ".jj": dict.fromkeys(("config.toml", "workspace-config.toml"), _VCS),
    ".bzr": dict.fromkeys(("branch.conf",), _VCS),
}
"""Protected beneath a folder of that name, at any depth."""

GIT = ".git"
GIT_NAMES: Mapping[str, Protection] = {
    "config": _VCS,
    "config.worktree": _VCS,
    "commondir": _VCS,
    "hooks": _HOOK,
}
"""What in a git directory decides what git runs. ``commondir`` says where the rest of it is."""
_GIT_DATA = frozenset(("objects", "refs", "logs"))
"""Folders of a git directory in which names are those of branches and objects."""

_OF_REPOSITORIES = frozenset((GIT, *_BELOW))
_PLAIN = frozenset(name for name in (*_NAMES, WORKSPACE_FILE) if not name.startswith("."))


def protection(relative: str) -> Protection | None:
    """Why no tool may write a path, given relative to its root; None where it is an ordinary one. On the way of each
    call that touches files.

    Names are compared as the least exact file system does: whatever the letter case, without invisible characters,
    trailing dots or blanks, without what follows a colon, compatibility forms as what they stand for.
    """
    if relative.isascii() and relative[:1] != "." and "/." not in relative:
        # The way of nearly every path: no name in it begins with a dot, and none of the others occurs.
        low = relative.lower()
        if (
            "id_" not in low
            and "handrail" not in low
            and "~" not in low
            and "opencode" not in low
            and "secring" not in low
            and "microsoft.p" not in low
        ):
            return None
    return _of_parts([plain(part) for part in relative.split("/") if part not in ("", ".")])


def protected(relative: str) -> bool:
    """Whether no tool may write it, see :func:`protection`."""
    return protection(relative) is not None


def is_key(relative: str) -> bool:
    """Whether it is a private key, which no tool reads either."""
    found = protection(relative)
    if found is not _KEY:
        return False
    parts = [plain(part) for part in relative.split("/") if part not in ("", ".")]
    if ".ssh" in parts:
        name = parts[-1]
        public = name in (".ssh", "config", "authorized_keys", "allowed_signers") or name.startswith("known_hosts")
        return not public and not name.endswith(".pub")
    if ".gnupg" in parts:
        return "private-keys-v1.d" in parts or parts[-1] in ("secring.gpg", ".gpg-v21-migrated")
    return True


def refusal(shown: str, relative: str | None = None) -> str:
    """Why a write to a protected path is refused, for the model.

    :param relative: the path as it was judged, where it is shown otherwise
    """
    found = protection(shown if relative is None else relative) or _RULES
    return found.refusal(shown)


def key_refusal(shown: str) -> str:
    """Why a private key is not read, for the model."""
    return f"{shown} is a private key or lies where keys are kept: no tool reads it and no rule allows it"


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """One name as the least exact file system reads it."""
    if not name.isascii():
        name = unicodedata.normalize("NFKC", name)
        name = "".join(c for c in name if unicodedata.category(c) not in ("Cf", "Mn"))
    name = name.partition(":")[0].casefold().rstrip(". ")
    return GIT if name.startswith("git~") else name


def suspicious(name: str) -> bool:
    """Whether an entry of this name has to be looked at with its whole path; quick, for walks over many."""
    if name.isascii():
        return name[:1] == "." or ":" in name or name[-1:] in ". " or name.lower() in _PLAIN or name[3:4] == "~"
    return True


def leads_on(name: str) -> bool:
    """Whether what is protected in a folder of this name is decided by its path, so each entry has to be looked at."""
    return plain(name) in _OF_REPOSITORIES


def _of_parts(parts: Sequence[str]) -> Protection | None:
    if parts == [WORKSPACE_FILE]:
        return _RULES
    for index, part in enumerate(parts):
        if (found := _NAMES.get(part)) is not None:
            return found
        rest = parts[index + 1 :]
        if part == GIT:
            return _in_git(rest)
        below = _BELOW.get(part)
        if below is not None:
            for name in rest[:1] if part == ".config" else rest:
                if (found := below.get(name)) is not None:
                    return found
    return None


def _in_git(rest: Sequence[str]) -> Protection | None:
    """Beneath a ``.git``, or the ``.git`` itself: as a file it says where the repository is."""
    if not rest:
        return _VCS
    if rest[0] in _GIT_DATA:
        return None
    for name in rest:
        if (found := GIT_NAMES.get(name)) is not None:
            return found
    return None
