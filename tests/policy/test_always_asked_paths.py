"""Paths that configure other agents and tools: a write needs the user or a rule that names the path."""

from __future__ import annotations

import pytest
from tests.policy.desk import BASH, EDIT, MOVE, WRITE, AuthorizerFixture, book, rule

from handrail.contract.permission_modes import MODES
from handrail.contract.tool.requires import FsRequires, Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.decision_explanation import explain
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.policy.rule_suggestions import suggest_rule
from handrail.policy.rules.rules_and_modes import RuleBook, with_mode

pytestmark = pytest.mark.proves("P-15")

WITHOUT_TARGETS = ToolSpec(
    "notes", "Keep notes.", {"type": "object", "properties": {}}, Requires(fs=FsRequires(write=(".",))), "write"
)
PATHS = (
    "AGENTS.md",
    "sub/CLAUDE.md",
    ".github/workflows/ci.yml",
    ".npmrc",
    "eslint.config.js",
    "agents.MD",
    "a/.cursorrules",
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "rules",
    [
        ("allow fs.write",),
        ("allow *",),
        ("allow write", "allow fs.*"),
        ("allow fs.write **",),
        ("allow write **", "allow fs.write sub", "allow fs.write .github", "allow fs.write a/**"),
        ("allow effect:write", "allow fs.write *.md", "allow fs.write **/[!x]*"),
        ("allow fs.write ?GENTS.md", "allow fs.write sub/*", "allow fs.write .github/**"),
    ],
)
def test_a_rule_that_does_not_name_the_sensitive_path_does_not_allow_a_write(
    desk: AuthorizerFixture, path: str, rules: tuple[str, ...]
) -> None:
    verdict = desk.judge(WRITE, {"path": path}, *rules)
    assert verdict.action == "ask"
    if path == "AGENTS.md" and rules == ("allow fs.write",):
        assert "AGENTS.md contains instructions for agents, and no rule names it" in verdict.reason


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plan"])
@pytest.mark.parametrize("path", PATHS)
def test_a_write_to_an_instruction_path_is_asked_about_in_every_mode(
    desk: AuthorizerFixture, mode: str, path: str
) -> None:
    for spec in (WRITE, EDIT):
        assert desk.judge(spec, {"path": path}, with_mode(book(), mode)).action == "ask"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "rules"),
    [
        ("AGENTS.md", ("allow fs.write AGENTS.md",)),
        ("AGENTS.md", ("allow write AGENTS.md",)),
        ("AGENTS.md", ("allow write", "allow fs.write ./AGENTS.md")),
        ("AGENTS.md", ("allow fs.write {workspace}/AGENTS.md",)),
        ("sub/CLAUDE.md", ("allow fs.write sub/CLAUDE.md",)),
        (".github/workflows/ci.yml", ("allow fs.write .github/workflows",)),
        (".github/workflows/ci.yml", ("allow fs.write .github/workflows/ci.yml",)),
        (".agents/skills/a/SKILL.md", ("allow fs.write .agents/skills",)),
    ],
)
def test_a_rule_that_names_the_sensitive_path_allows_a_write(
    desk: AuthorizerFixture, path: str, rules: tuple[str, ...]
) -> None:
    assert desk.judge(WRITE, {"path": path}, *rules).action == "allow"
    assert desk.judge(WRITE, {"path": f"other/{path}"}, *rules).action == "ask"


def test_a_deny_holds_and_protected_paths_stay_denied(desk: AuthorizerFixture) -> None:
    assert (
        desk.judge(WRITE, {"path": "AGENTS.md"}, "allow fs.write AGENTS.md", "manifest: deny fs.write").action == "deny"
    )
    assert desk.judge(WRITE, {"path": ".envrc"}, "allow fs.write .envrc").action == "deny"
    assert desk.judge(WRITE, {"path": ".agents/.envrc"}, "allow fs.write .agents").action == "deny"
    assert desk.judge(WRITE, {"path": ".git/index"}, "allow fs.write .git/index").action == "deny"


def test_a_move_that_only_reads_a_sensitive_path_needs_no_approval(desk: AuthorizerFixture) -> None:
    assert desk.judge(MOVE, {"source": "AGENTS.md", "target": "b.md"}, "allow move").action == "allow"
    assert desk.judge(MOVE, {"source": "b.md", "target": "AGENTS.md"}, "allow move").action == "ask"


def test_a_redirection_into_a_sensitive_path_asks_like_a_tool_call(desk: AuthorizerFixture) -> None:
    rules = ("allow bash", "allow fs.write")
    assert desk.bash("echo x > notes.txt", *rules).action == "allow"
    assert desk.bash("echo x > AGENTS.md", *rules).action == "ask"
    assert desk.bash("echo x >> .github/workflows/ci.yml", *rules).action == "ask"
    assert desk.bash("echo x > AGENTS.md", *rules, "allow fs.write AGENTS.md").action == "allow"


def test_a_running_call_needs_the_same_approval_for_instruction_paths(desk: AuthorizerFixture) -> None:
    may = desk.may(WITHOUT_TARGETS, {}, "allow notes", "allow fs.write")
    assert may("fs.write", desk.path("a.txt")) is None
    refused = may("fs.write", desk.path("AGENTS.md"))
    assert refused is not None and "allow fs.write AGENTS.md" in refused
    answered = desk.may(WITHOUT_TARGETS, {})  # a person said yes to the call, and saw no path
    assert answered("fs.write", desk.path("a.txt")) is None and answered("fs.write", desk.path("AGENTS.md")) is not None
    named = desk.may(WITHOUT_TARGETS, {}, "allow notes", "allow fs.write AGENTS.md")
    assert named("fs.write", desk.path("AGENTS.md")) is None
    exact = desk.may(WRITE, {"path": "AGENTS.md"}, "allow fs.write")  # asked about, and answered with yes
    assert exact("fs.write", desk.path("AGENTS.md")) is None and exact("fs.write", desk.path("CLAUDE.md")) is not None


def test_the_suggested_rule_names_the_sensitive_path_and_allows_it(desk: AuthorizerFixture) -> None:
    verdict = desk.judge(WRITE, {"path": "AGENTS.md"}, "allow fs.write")
    assert suggest_rule(verdict) == "allow write AGENTS.md"
    assert desk.judge(WRITE, {"path": "AGENTS.md"}, "allow fs.write", str(suggest_rule(verdict))).action == "allow"


async def test_explain_names_the_deciding_rule_and_a_rule_that_would_allow_the_call(desk: AuthorizerFixture) -> None:
    said = await explain(
        desk.authority, WRITE, {"path": "AGENTS.md"}, rules=with_mode(book(), "auto"), roots=desk.roots, headless=True
    )
    assert said.action == "ask" and said.effective_action == "deny"
    assert "only a rule that names the path allows it" in said.decided_by
    assert said.possible_changes[0] == "--rule 'allow write AGENTS.md'"
    assert "protected: AGENTS.md contains instructions for agents" in str(said)


def test_a_folder_outside_the_workspace_does_not_bypass_the_question(desk: AuthorizerFixture) -> None:
    for path in ("/extra/AGENTS.md", "/extra/.github/workflows/ci.yml"):
        assert desk.authority.evaluate(
            MOVE, {"source": "a", "target": path}, rules=book("allow fs.*", "allow fs.write /extra"), roots=desk.roots
        ).action in ("ask", "deny")


def test_programs_write_a_sensitive_path_only_if_an_fs_write_rule_names_it(desk: AuthorizerFixture) -> None:
    def opens(path: str, *rules: str) -> bool:
        return build_hidden_path_rules(book(*rules), desk.roots.workspace).is_protected_write_allowed(desk.path(path))

    assert not opens(
        "AGENTS.md", "allow fs.write", "allow *", "allow bash", "allow write AGENTS.md", "allow fs.write *.md"
    )
    assert opens("AGENTS.md", "allow fs.write AGENTS.md")
    assert opens(".github/workflows/ci.yml", "allow fs.write .github/workflows")
    assert not opens("AGENTS.md", "allow fs.write AGENTS.md", "manifest: deny fs.write")


def test_a_parent_sessions_rule_overrides_a_child_rule_that_names_the_path(desk: AuthorizerFixture) -> None:
    for text in ("deny fs.write AGENTS.md", "ask fs.write AGENTS.md", "ask fs.write **"):
        above = RuleBook((rule(text),))
        below = RuleBook((rule("allow fs.write AGENTS.md"),), parent=above)
        assert not build_hidden_path_rules(below, desk.roots.workspace).is_protected_write_allowed(
            desk.path("AGENTS.md")
        )
        assert desk.judge(WRITE, {"path": "AGENTS.md"}, below).action == text.partition(" ")[0]


def test_a_bash_call_does_not_ask_for_paths_that_its_program_might_write(desk: AuthorizerFixture) -> None:
    """The sandbox restricts the program; see the tests of the guard."""
    assert desk.judge(BASH, {"command": "touch AGENTS.md"}, "allow bash").action == "allow"
