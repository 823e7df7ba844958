"""Settings that keep git from running other programs, whatever a repository's configuration says.

A repository's own configuration can name hooks, filters, drivers, helpers and transports. None of it is taken from
anybody whom the operator trusts: a repository may come out of an archive. So git is run with the person's and the
machine's configuration left out, with settings of ours over the repository's (``GIT_CONFIG_COUNT``: they are read last,
and git takes the last of nearly all), and with one more for each entry of the repository's that would run something.
Where git takes the first, an option on its command line says it (:mod:`handrail.contract.protected.git_serving`). The sandbox is what holds should one have been
forgotten.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from handrail.contract.errors import ToolError

_MOST_OVERRIDES = 200

_FIXED: Mapping[str, str] = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.editor": ":",
    "core.pager": "cat",
    "core.askPass": "",
    "core.sshCommand": "false",
    "core.alternateRefsCommand": ":",
    "core.quotePath": "false",
    "credential.helper": "",
    "credential.interactive": "false",
    "protocol.ext.allow": "never",
    "protocol.file.allow": "user",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "push.gpgSign": "false",
    "log.showSignature": "false",
    "merge.verifySignatures": "false",
    "gpg.program": "false",
    # Never used where the options of ours are given; a failure that is seen where one of them was forgotten.
    "diff.external": "false",
    "diff.ignoreSubmodules": "dirty",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "push.recurseSubmodules": "no",
    # It would fetch first, by a git that is told nothing of what serves it.
    "push.negotiate": "false",
    "status.submoduleSummary": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "merge.autoStash": "false",
    "i18n.logOutputEncoding": "UTF-8",
    "color.ui": "false",
    "user.useConfigOnly": "true",
    "safe.directory": "*",
    "safe.bareRepository": "explicit",
}
_BY_FORM: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(form, re.DOTALL), value)
    for form, value in (
        (r"filter\..*\.(?:clean|smudge|process)", ""),
        # A driver that fails leaves a conflict for somebody to solve; one that does nothing would leave a wrong file.
        (r"merge\..*\.driver", "false"),
        (r"diff\..*\.(?:command|textconv)", "false"),
        (r"credential\..*\.helper", ""),
        (r"branch\..*\.mergeoptions", ""),
        (r"gpg\..*\.(?:program|defaultkeycommand)", "false"),
    )
)
"""By the key as ``git config --list`` names it; the value that runs nothing."""
_REQUIRED = re.compile(r"filter\..*\.required", re.DOTALL)
_HOOK = re.compile(r"hook\.(.*)\.[a-z]+", re.DOTALL)
_FILTER = re.compile(r"filter\.(.*)\.(clean|smudge|process)", re.DOTALL)

NO_PROTOCOL = "none"


class Entry(NamedTuple):
    """One line of configuration, as git read it.

    :param scope: ``local``, ``worktree``, ``command`` (ours), ``global``, ``system``
    :param value: None for a name without ``=``
    """

    scope: str
    key: str
    value: str | None


def entries(listed: bytes) -> tuple[Entry, ...]:
    """What ``git config --list --show-scope -z`` says."""
    words = listed.decode("utf-8", "surrogateescape").split("\0")
    found: list[Entry] = []
    for scope, entry in zip(words[::2], words[1::2], strict=False):
        key, newline, value = entry.partition("\n")
        found.append(Entry(scope, key, value if newline else None))
    return tuple(found)


def too_old(found: Sequence[Entry]) -> bool:
    """Whether this git does not heed our settings, or reads others than the repository's."""
    heeded = any(one.scope == "command" and one.key == "core.hookspath" for one in found)
    return not heeded or any(one.scope in ("global", "system") for one in found)


def filters(found: Sequence[Entry]) -> frozenset[str]:
    """The filters for which the repository's configuration names a program."""
    return frozenset(match[1] for one in found if one.value and (match := _FILTER.fullmatch(one.key)) is not None)


def environment(
    workdir: str,
    found: Sequence[Entry] = (),
    *,
    writing: bool = False,
    protocols: str = NO_PROTOCOL,
) -> dict[str, str]:
    """The variables that git is run with.

    :param found: the repository's configuration
    :param writing: fail where a filter that is not run would have changed what is stored, rather than store the other
    :param protocols: the transports that it may use, as in ``http:https``
    :raises ToolError: ``limit`` where the configuration names too many programs
    """
    settings = [*_FIXED.items(), *dict(_overrides(found, writing=writing)).items()]
    if len(settings) > len(_FIXED) + _MOST_OVERRIDES:
        raise ToolError(
            f"the repository's configuration names more than {_MOST_OVERRIDES} programs to run, which none of these tools "
            "does; a person looks at its .git/config",
            kind="limit",
        )
    variables = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": protocols,
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "GIT_SSH_COMMAND": "false",
        "GIT_EDITOR": ":",
        "GIT_SEQUENCE_EDITOR": ":",
        "GIT_PAGER": "cat",
        "GIT_MERGE_AUTOEDIT": "no",
        "GIT_TEMPLATE_DIR": "",
        "GIT_ADVICE": "0",
        "GIT_CEILING_DIRECTORIES": posixpath.dirname(workdir),
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "C",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    if not writing:
        variables["GIT_OPTIONAL_LOCKS"] = "0"
    for number, (key, value) in enumerate(settings):
        variables[f"GIT_CONFIG_KEY_{number}"] = key
        variables[f"GIT_CONFIG_VALUE_{number}"] = value
    return variables


def _overrides(found: Sequence[Entry], *, writing: bool) -> Iterator[tuple[str, str]]:
    keys = dict.fromkeys(one.key for one in found if one.scope != "command")
    for key in keys:
        for form, value in _BY_FORM:
            if form.fullmatch(key) is not None:
                yield key, value
        if not writing and _REQUIRED.fullmatch(key) is not None:
            yield key, "false"
        if (hook := _HOOK.fullmatch(key)) is not None:
            yield f"hook.{hook[1]}.enabled", "false"
            yield f"hook.{hook[1]}.event", ""
    for name in sorted(filters(found)):
        yield f"filter.{name}.required", "true" if writing else "false"
