"""Modes: how much a session does without asking, each a set of rules in a scope of its own, visible like any other.

A deny of a mode is final, as one of the agent's manifest is. Everything else in a mode is an ordinary rule: a more
specific one of the project or the session holds against it. Protected paths, watchdogs, capabilities and the policies
for single programs hold in every mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import cast

from handrail.contract.errors import UsageError
from handrail.contract.modes import DEFAULT_MODE, MODES, Mode
from handrail.contract.tool.names import nearest
from handrail.policy.rules.defaults import SECRET_LIKE
from handrail.policy.rules.rules import READ_ONLY, Action, Rule, RuleBook
from handrail.policy.secret_names import EXCEPT

_FILE_TOOLS = ("write", "edit", "multi_edit", "file.patch", "json_write")
"""The built-in tools that change files of the workspace and nothing else."""
_GIT_TOOLS = ("git.add", "git.commit", "git.create_branch", "git.checkout", "git.merge", "git.stash", "git.init")
"""Those that stay in the workspace, as the commands would that this mode lets run."""
_SECRETS = tuple(f"ask fs.write **/{name}" for name in SECRET_LIKE)
_EXAMPLES = tuple(f"allow fs.write **/{name}" for name in EXCEPT)
_NAMES = frozenset((*_SECRETS, *_EXAMPLES))
_READING = f"allow bash {READ_ONLY}"

MEANINGS: Mapping[Mode, str] = {
    "plan": "Looks and thinks: nothing runs that writes or changes anything outside; commands proved read-only do, and a tool that "
    "only reads reaches the hosts that a rule allows.",
    "ask": "Asks about whatever no rule allows. Adds no rule of its own.",
    "accept-edits": "File tools write in the workspace without asking, and commands proved read-only run; the rest is asked about.",
    "auto": "Also runs every command that is understood, since the sandbox holds it; what is unclear is still asked about.",
}
TEXTS: Mapping[Mode, tuple[str, ...]] = {
    "plan": ("deny effect:write", "deny effect:external", "deny fs.write", _READING),
    "ask": (),
    "accept-edits": (*(f"allow {tool} **" for tool in _FILE_TOOLS), *_SECRETS, _READING),
    "auto": (
        "allow fs.write **",
        *_SECRETS,
        *_EXAMPLES,
        "allow bash",
        _READING,
        *(f"allow {tool}" for tool in _GIT_TOOLS),
        "ask effect:external",
    ),
}
"""The rules of each mode."""


def in_brief(mode: Mode) -> list[str]:
    """Return the rules of a mode as lines for a person, with those about secret-like names as one."""
    lines = [text for text in TEXTS[mode] if text not in _NAMES]
    if not _NAMES.isdisjoint(TEXTS[mode]):
        lines.append(
            f"ask fs.write **/NAME, for each of {len(_SECRETS)} names that look like secrets (--json lists them)"
        )
    return lines


def read_mode(text: str) -> Mode:
    """:raises ValueError: naming the modes there are"""
    for mode in MODES:
        if mode == text:
            return mode
    near = nearest(text, MODES, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{text[:40]!r} is no mode; there are {', '.join(MODES)}{hint}")


@lru_cache(maxsize=len(MODES))
def rules_of(mode: Mode) -> tuple[Rule, ...]:
    """The rules of a mode, in its scope."""
    found: list[Rule] = []
    for text in TEXTS[mode]:
        action, permission, pattern = (*text.split(" ", 2), "")[:3]
        named = text in _NAMES
        found.append(Rule(cast("Action", action), permission, pattern, "mode", f"mode {mode}", any_case=named))
    return tuple(found)


def in_mode(book: RuleBook, mode: Mode) -> RuleBook:
    """The same book in another mode."""
    kept = (rule for rule in book if rule.scope != "mode")
    return RuleBook((*kept, *rules_of(mode)), mode, book.above)


def within(book: RuleBook, above: RuleBook) -> RuleBook:
    """``book`` for the session of a sub-agent, below one whose book is ``above``: in a mode that is no wider, and with
    nothing opened that is kept from that one."""
    bound = read_mode(above.mode)
    if MODES.index(read_mode(book.mode)) > MODES.index(bound):
        book = in_mode(book, bound)
    return RuleBook(book.rules, book.mode, above)


def given(text: str | None) -> Mode | None:
    """A mode as a program names it.

    :raises UsageError: naming the modes there are
    """
    if text is None:
        return None
    try:
        return read_mode(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


__all__ = ["DEFAULT_MODE", "MEANINGS", "MODES", "TEXTS", "Mode", "given", "in_mode", "read_mode", "rules_of", "within"]
