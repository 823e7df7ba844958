"""Tools and rules for the policy tests, as users would declare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handrail.contract.tool.requires import (
    AccessCheck,
    CapabilityLayer,
    CapabilitySet,
    FsRequires,
    NetRequires,
    PathVariables,
    Requires,
    ShellRequires,
    expand_requires,
)
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.call_targets import agent_layer
from handrail.policy.rules.rules_and_modes import (
    CONFINED_RULE_TEXTS,
    Rule,
    RuleBook,
    Scope,
    build_default_rule_book,
    parse_rule,
)
from handrail.policy.watchdogs.api import Watchdog
from handrail.runtime.files.session_roots import SessionRoots


def properties(**formats: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "format": form} if form else {} for name, form in formats.items()},
    }


WHOLE = Requires(fs=FsRequires(read=("{workspace}", "/extra"), write=("{workspace}",)))

BASH = ToolSpec("bash", "Run.", properties(command="command"), Requires(fs=WHOLE.fs, shell=(ShellRequires(cmd="*"),)))
GIT = ToolSpec("git.status", "Git.", properties(argv="command"), Requires(shell=(ShellRequires(cmd="git"),)))
READ = ToolSpec("read", "Read.", properties(path="path"), WHOLE, side_effect="read")
GREP = ToolSpec("grep", "Search.", properties(pattern="", path="path"), WHOLE, side_effect="read")
WRITE = ToolSpec("write", "Write.", properties(path="path"), WHOLE, side_effect="write")
EDIT = ToolSpec(
    "edit", "Edit.", properties(path="path"), WHOLE, "write", targets={"fs.read": "{path}", "fs.write": "{path}"}
)
MOVE = ToolSpec(
    "move",
    "Move.",
    properties(source="", target=""),
    WHOLE,
    "write",
    targets={"fs.read": "{source}", "fs.write": "{target}"},
)
UPLOAD = ToolSpec(
    "upload",
    "Send a file.",
    properties(path="path", url="uri"),
    Requires(fs=WHOLE.fs, net=NetRequires(hosts=("*.example.org",))),
    targets={"fs.read": "{path}", "net.fetch": "{url}"},
)
FETCH = ToolSpec(
    "web_fetch", "Fetch.", properties(url="uri"), Requires(net=NetRequires(hosts=("*",))), side_effect="read"
)
TRANSFER = ToolSpec("bank.transfer", "Pay.", properties(source="", target="", amount=""))
TODO = ToolSpec("todo", "List.", properties(todos=""), side_effect="write")
HELPER = ToolSpec("helper", "Anything.", properties(x=""), Requires(fs=WHOLE.fs, shell=(ShellRequires(cmd="*"),)))
ALL = (BASH, GIT, READ, GREP, WRITE, EDIT, MOVE, UPLOAD, FETCH, TRANSFER, TODO, HELPER)


def rule(text: str, scope: Scope = "session", source: str = "--rule") -> Rule:
    """``text``, which may begin with its scope: ``manifest: deny bash``."""
    head, colon, rest = text.partition(": ")
    if colon and head in ("default", "manifest", "mode", "project", "session"):
        return parse_rule(rest, scope=head, source=source)
    return parse_rule(text, scope=scope, source=source)


def book(*texts: str, shipped: bool = True) -> RuleBook:
    """A book with these rules, and the shipped ones without those for confined calls, which would answer what no rule decides."""
    return (_SHIPPED if shipped else RuleBook()).with_rules(*map(rule, texts))


_SHIPPED = RuleBook(tuple(one for one in build_default_rule_book() if one.text not in CONFINED_RULE_TEXTS))


@dataclass
class AuthorizerFixture:
    """An authority over one workspace."""

    workspace: Path
    watchdogs: tuple[Watchdog, ...] = ()
    ceiling: Requires | None = None
    own: Requires = field(default_factory=Requires)

    def __post_init__(self) -> None:
        self.roots = SessionRoots(self.workspace)
        self.variables = PathVariables(workspace=(self.roots.workspace,))
        self.authority = CallAuthorizer(
            self.variables,
            agent_layer("default", self.own, ALL, self.variables),
            self.watchdogs,
            ceiling=None
            if self.ceiling is None
            else expand_requires(self.ceiling, self.variables, "the host's ceiling"),
        )

    def judge(
        self, spec: ToolSpec, arguments: Mapping[str, Any], *rules: str | RuleBook, parent: CapabilitySet | None = None
    ) -> PolicyVerdict:
        return self.authority.evaluate(spec, arguments, rules=self._book(rules), roots=self.roots, parent=parent)

    def bash(self, command: str, *rules: str | RuleBook) -> PolicyVerdict:
        return self.judge(BASH, {"command": command}, *rules)

    def may(self, spec: ToolSpec, arguments: Mapping[str, Any], *rules: str | RuleBook) -> AccessCheck:
        """Return the rights of a call after its decision and, if it asks, an approval."""
        chosen = self._book(rules)
        verdict = self.authority.evaluate(spec, arguments, rules=chosen, roots=self.roots)
        return self.authority.make_access_check(verdict, spec, rules=chosen, roots=self.roots)

    def path(self, relative: str) -> str:
        return f"{self.roots.workspace}/{relative}"

    @staticmethod
    def _book(rules: tuple[str | RuleBook, ...]) -> RuleBook:
        if len(rules) == 1 and isinstance(rules[0], RuleBook):
            return rules[0]
        return book(*(text for text in rules if isinstance(text, str)))


NOTHING = CapabilityLayer("nothing")
