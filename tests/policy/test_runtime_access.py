"""The access check of a running call: each path and program again, where an ask rule denies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import BASH, EDIT, GREP, HELPER, MOVE, READ, WRITE, AuthorizerFixture, book, rule

from handrail.contract.tool.requires import FsRequires, NetRequires, Requires, ShellRequires
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rule_suggestions import list_approval_reasons


@pytest.mark.proves("P-01")
def test_a_running_call_is_checked_at_each_access_and_ask_means_deny(desk: AuthorizerFixture) -> None:
    may = desk.may(GREP, {"pattern": "x", "path": "."})
    assert may("fs.read", desk.path("src/a.py")) is None
    assert "no rule" not in (may("fs.read", desk.path(".env")) or "")
    assert "'ask fs.read **/.env*'" in (may("fs.read", desk.path(".env")) or "")
    assert "cannot ask" in (may("fs.read", desk.path("deep/id_backup")) or "")
    assert may("fs.read", "/etc/passwd") is not None
    assert may("fs.read", desk.roots.workspace + "_secret/a") is not None
    assert may("fs.write", desk.path("src/a.py")) is not None
    assert may("net.fetch", "example.org") is not None
    assert may("shell.run", ["ls"]) is not None


@pytest.mark.proves("P-01")
def test_a_deny_rule_also_covers_files_that_a_search_finds(desk: AuthorizerFixture) -> None:
    may = desk.may(GREP, {"pattern": "x"}, "allow grep", "deny fs.read private/**")
    assert may("fs.read", desk.path("src/a.py")) is None
    assert may("fs.read", desk.path("private/a")) is not None


@pytest.mark.proves("P-01")
def test_a_call_can_touch_its_decided_targets_and_no_others(desk: AuthorizerFixture) -> None:
    may = desk.may(WRITE, {"path": "src/a.py"})
    assert may("fs.write", desk.path("src/a.py")) is None
    assert may("fs.read", desk.path("src/a.py")) is None
    assert may("fs.write", desk.path("src/b.py")) is not None
    assert may("fs.read", desk.path("src/b.py")) is not None
    secret = desk.may(WRITE, {"path": ".env"})
    assert secret("fs.write", desk.path(".env")) is None
    assert secret("fs.read", desk.path(".env")) is not None


@pytest.mark.proves("P-01")
def test_an_approved_folder_covers_its_files_unless_a_rule_covers_them(desk: AuthorizerFixture) -> None:
    may = desk.may(GREP, {"pattern": "x", "path": "/extra/lib"})
    assert may("fs.read", "/extra/lib/a") is None
    assert may("fs.read", "/extra/lib/.env") is not None
    assert may("fs.read", "/extra/library/a") is not None


@pytest.mark.proves("P-01")
def test_an_approved_call_without_targets_accesses_its_requirements_unless_a_rule_forbids_it(
    desk: AuthorizerFixture,
) -> None:
    may = desk.may(HELPER, {"x": 1}, "deny fs.write private/**", "ask fs.write shared/**")
    assert may("fs.write", desk.path("a")) is None
    assert may("fs.write", desk.path("private/a")) is not None
    assert may("fs.write", desk.path("shared/a")) is not None
    assert may("fs.write", "/extra/a") is not None
    assert may("shell.run", ["ls"]) is None
    assert may("shell.run", ["sudo", "ls"]) is None  # asked about as any command here, and the call was answered
    allowed = desk.may(HELPER, {"x": 1}, "allow helper")
    assert allowed("shell.run", ["sudo", "ls"]) is not None


LINTER = ToolSpec(
    "lint",
    "Look for faults.",
    {"type": "object", "properties": {"path": {"type": "string", "format": "path"}}},
    Requires(fs=FsRequires(read=("{workspace}",), write=("{workspace}",)), shell=(ShellRequires(cmd="lint"),)),
    side_effect="read",
)
FORMATTER = replace(LINTER, id="format", side_effect="write")


@pytest.mark.proves("P-01")
def test_the_decision_on_a_call_covers_the_programs_that_its_tool_requires(desk: AuthorizerFixture) -> None:
    reads = desk.may(LINTER, {"path": "src"})
    assert reads("shell.run", ["lint", "--all", "src"]) is None
    assert reads("shell.run", ["other"]) is not None
    assert desk.may(LINTER, {"path": "src"}, "deny shell.run lint --all *")("shell.run", ["lint", "--all", "a"])
    assert desk.may(LINTER, {"path": "src"}, "ask shell.run lint")("shell.run", ["lint"])
    answered = desk.may(FORMATTER, {"path": "src"})
    assert answered("shell.run", ["lint", "src"]) is None
    assert answered("shell.run", ["other"]) is not None
    assert desk.may(FORMATTER, {"path": "src"}, "deny shell.run lint *")("shell.run", ["lint", "src"])
    ruled = desk.may(FORMATTER, {"path": "src"}, "allow format")
    assert ruled("shell.run", ["lint", "src"]) is None
    git = FORMATTER.requires.model_copy(update={"shell": (ShellRequires(cmd="git"),)})
    ruled = desk.may(replace(FORMATTER, requires=git), {"path": "src"}, "allow format")
    assert ruled("shell.run", ["git", "add", "src"]) is None
    assert ruled("shell.run", ["git", "-c", "core.fsmonitor=x", "add"]) is not None


@pytest.mark.proves("P-01")
def test_an_approval_covers_a_program_only_if_the_user_was_asked_about_its_rule(desk: AuthorizerFixture) -> None:
    call = {"path": "src"}
    unasked = desk.may(FORMATTER, call, "ask shell.run lint --fix")
    assert "cannot ask" in (unasked("shell.run", ["lint", "--fix"]) or "")
    assert unasked("shell.run", ["lint", "src"]) is None
    for text in ("ask shell.run lint …", "ask shell.run", "ask format"):
        reasons = list_approval_reasons(desk.judge(FORMATTER, call, text))
        assert any(text in reason for reason in reasons)
        assert desk.may(FORMATTER, call, text)("shell.run", ["lint", "--fix"]) is None


@pytest.mark.proves("P-01")
def test_a_rule_about_a_required_program_takes_no_right_from_a_rule_about_the_tool(desk: AuthorizerFixture) -> None:
    shift = replace(MOVE, id="shift", requires=FORMATTER.requires)
    call = {"source": "a", "target": "b"}
    assert desk.may(shift, call, "allow shift")("fs.write", desk.path("c/d")) is None
    assert desk.may(shift, call, "allow shift", "ask shell.run lint …")("fs.write", desk.path("c/d")) is None


@pytest.mark.proves("P-01")
def test_each_command_and_each_file_of_a_shell_text_is_judged_separately(desk: AuthorizerFixture) -> None:
    may = desk.may(LINTER, {"path": "src"}, "allow lint", "ask fs.write shared/**", "ask shell.run lint --fix")
    assert may("shell.run", "lint a && lint b") is None
    for text in ("lint a && lint --fix", "lint --fix && lint a", "lint a > shared/x", "lint a > other/x"):
        assert "cannot ask" in (may("shell.run", text) or "")


@pytest.mark.proves("P-01")
def test_an_allow_without_approval_covers_no_program_that_could_write_or_use_the_network(
    desk: AuthorizerFixture,
) -> None:
    assert desk.may(FORMATTER, {"path": "src"}, "allow fs.write")("shell.run", ["lint", "src"]) is not None
    online = LINTER.requires.model_copy(update={"net": NetRequires(hosts=("example.org",))})
    assert desk.may(replace(LINTER, requires=online), {"path": "src"})("shell.run", ["lint", "src"]) is not None
    anything = LINTER.requires.model_copy(update={"shell": (ShellRequires(cmd="*"),)})
    assert desk.may(replace(LINTER, requires=anything), {"path": "src"})("shell.run", ["lint", "src"]) is not None


@pytest.mark.proves("P-01")
def test_a_denied_call_can_touch_no_path(desk: AuthorizerFixture) -> None:
    may = desk.may(WRITE, {"path": "a"}, "deny write")
    assert may("fs.write", desk.path("a")) is not None
    assert may("fs.read", desk.path("a")) is not None


@pytest.mark.proves("P-01")
def test_a_rule_added_while_a_call_waits_applies_to_its_accesses(desk: AuthorizerFixture) -> None:
    before = book("allow write")
    verdict = desk.judge(WRITE, {"path": "a"}, before)
    later = before.with_rules(rule("deny fs.write a"))
    may = desk.authority.make_access_check(verdict, WRITE, rules=later, roots=desk.roots)
    assert may("fs.write", desk.path("a")) is not None
    shell = desk.bash("ls && mkdir x", before := book("allow bash"))
    may = desk.authority.make_access_check(shell, BASH, rules=before, roots=desk.roots)
    assert may("shell.run", "ls && mkdir x") is None
    may = desk.authority.make_access_check(
        shell, BASH, rules=before.with_rules(rule("deny bash mkdir *")), roots=desk.roots
    )
    assert may("shell.run", "ls && mkdir x") is not None


@pytest.mark.proves("P-01")
def test_a_shell_tool_may_run_only_the_text_that_was_checked(desk: AuthorizerFixture) -> None:
    may = desk.may(BASH, {"command": "mkdir x && ls $Y"})
    assert may("shell.run", "mkdir x && ls $Y") is None
    assert may("shell.run", "mkdir y") is not None
    assert may("shell.run", ["mkdir", "x"]) is not None


def test_a_file_name_cannot_put_control_characters_into_a_refusal(desk: AuthorizerFixture) -> None:
    may = desk.may(GREP, {"pattern": "x"}, "deny fs.read **/*bad*")
    assert "\x1b" not in (may("fs.read", desk.path("bad\x1b[2J\n")) or "")


STRICTNESS = {"allow": 0, "ask": 1, "deny": 2}
PATHS = st.sampled_from(["src/a.py", ".env", "private/a", "a", "way-out/passwd", "/extra/a", "../x", "."])
PATH_RULES = st.builds(
    "{}: {} {}".format,
    st.sampled_from(["manifest", "mode", "project", "session"]),
    st.sampled_from(["allow", "ask", "deny"]),
    st.sampled_from(
        [
            "read",
            "write",
            "edit",
            "fs.read",
            "fs.write src/**",
            "fs.read **/.env",
            "*",
            "fs.*",
            "read src",
            "write *",
            "edit /extra/**",
        ]
    ),
)


@pytest.mark.proves("P-01")
@given(
    st.sampled_from([READ, WRITE, EDIT]),
    PATHS,
    st.lists(PATH_RULES, max_size=4),
    st.sampled_from(["fs.read", "fs.write", "read", "*"]),
)
def test_an_added_deny_rule_never_widens_a_path_decision_or_the_touchable_paths(
    desk: AuthorizerFixture, spec: ToolSpec, path: str, rules: list[str], denied: str
) -> None:
    before = desk.judge(spec, {"path": path}, *rules)
    after = desk.judge(spec, {"path": path}, *rules, f"deny {denied}")
    assert STRICTNESS[after.action] >= STRICTNESS[before.action]
    if before.action == "deny":
        return
    touched = desk.path("src/a.py")
    first = desk.may(spec, {"path": path}, *rules)("fs.read", touched)
    second = desk.may(spec, {"path": path}, *rules, f"deny {denied}")("fs.read", touched)
    assert first is None or second is not None


@pytest.mark.proves("P-01")
@given(st.sampled_from([READ, WRITE, EDIT, GREP]), PATHS, st.lists(PATH_RULES, max_size=4))
def test_no_rule_allows_a_call_a_target_outside_its_capabilities(
    desk: AuthorizerFixture, spec: ToolSpec, path: str, rules: list[str]
) -> None:
    verdict = desk.judge(spec, {"path": path}, *rules)
    for target in verdict.targets:
        if not verdict.capabilities.allows(target.capability, target.value):
            assert verdict.action == "deny"
