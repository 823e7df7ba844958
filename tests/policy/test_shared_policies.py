"""Compiled policies are shared by sessions with equal rules, and evicted one at a time."""

from __future__ import annotations

import pytest
from tests.policy.desk import BASH, GREP, READ, TODO, TRANSFER, WHOLE, WRITE, AuthorizerFixture, book, properties, rule

from handrail.contract.tool.spec import ToolSpec
from handrail.policy import call_authorizer
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.policy.rules.rules_and_modes import (
    Action,
    RuleBook,
    build_default_rule_book,
    limit_to_parent,
    make_folder_reading_rule,
    with_mode,
)

pytestmark = pytest.mark.proves("P-03")

_OWN, _OTHER = "/extra/ses_1", "/extra/ses_2"


def in_session(rules: RuleBook, folder: str = _OWN) -> RuleBook:
    return rules.with_folder_rule(make_folder_reading_rule(folder))


def test_sessions_with_equal_rules_share_the_prepared_policy_of_a_tool(desk: AuthorizerFixture) -> None:
    first, second = in_session(book("allow bash ls")), in_session(book("allow bash ls"), _OTHER)
    assert first is not second
    for spec, arguments in ((READ, {"path": "a"}), (BASH, {"command": "ls"}), (TODO, {"todos": "[]"})):
        verdicts = [desk.judge(spec, arguments, rules) for rules in (first, second)]
        assert [one.action for one in verdicts] == ["allow", "allow"]
        assert verdicts[0].prepared is verdicts[1].prepared


def test_equal_rules_give_the_same_book_in_any_order() -> None:
    once = book("allow bash ls", "deny bash rm")
    assert book("deny bash rm", "allow bash ls") is once
    assert book("allow bash ls").with_rules(rule("deny bash rm")) is once
    assert once.with_replaced_rules(*reversed(once.rules)) is once
    assert with_mode(with_mode(once, "plan"), "ask").rules == once.rules
    assert with_mode(once, "auto") is with_mode(book("deny bash rm", "allow bash ls"), "auto")
    above = in_session(book("deny bash"))
    assert limit_to_parent(once, above) is limit_to_parent(once, in_session(book("deny bash"), _OTHER))


def test_rule_books_with_different_rules_modes_or_parents_are_not_shared() -> None:
    once = book("allow bash ls")
    assert once is not book("allow bash ls -l")
    assert once is not book("project: allow bash ls")
    assert once is not with_mode(once, "auto")
    assert once is not limit_to_parent(once, book("deny bash"))


def test_a_rule_of_one_session_does_not_affect_another(desk: AuthorizerFixture) -> None:
    first, second = in_session(book()), in_session(book(), _OTHER)
    answered = first.with_rules(rule("allow bash ls"))
    assert desk.judge(BASH, {"command": "ls"}, answered).action == "allow"
    assert desk.judge(BASH, {"command": "ls"}, second).action == "ask"
    assert answered.folder_rule == first.folder_rule
    assert with_mode(answered, "auto").folder_rule == first.folder_rule
    kept = answered.with_replaced_rules(*(one for one in answered if one.text != "allow bash ls"))
    assert [one.text for one in kept] == [one.text for one in first]
    assert len(kept) == len(first) == len(book()) + 1


@pytest.mark.parametrize(
    ("spec", "own", "other"),
    [
        (READ, {"path": f"{_OWN}/out.txt"}, {"path": f"{_OTHER}/out.txt"}),
        (GREP, {"pattern": "x", "path": f"{_OWN}/a/b"}, {"pattern": "x", "path": f"{_OTHER}/a/b"}),
        (READ, {"path": f"{_OWN}/.env"}, {"path": f"{_OTHER}/.env"}),
        (BASH, {"command": f"cat < {_OWN}/out.txt"}, {"command": f"cat < {_OTHER}/out.txt"}),
    ],
)
def test_each_session_reads_its_own_folder_and_no_other_sessions_folder(
    desk: AuthorizerFixture, spec: ToolSpec, own: dict[str, str], other: dict[str, str]
) -> None:
    for folder, arguments, stranger in ((_OWN, own, other), (_OTHER, other, own)):
        rules = in_session(build_default_rule_book(), folder)
        exact = build_default_rule_book().with_rules(make_folder_reading_rule(folder))
        for asked in (arguments, stranger):
            found, wanted = desk.judge(spec, asked, rules), desk.judge(spec, asked, exact)
            assert (found.action, found.confinement, found.reason) == (
                wanted.action,
                wanted.confinement,
                wanted.reason,
            )
    if spec is not BASH:  # a redirection of a tool that may write is asked about
        assert desk.judge(spec, own, in_session(build_default_rule_book())).action == "allow"
        assert desk.judge(spec, other, in_session(build_default_rule_book())).action == "ask"


def test_a_running_call_reads_its_sessions_folder_and_no_other_sessions_folder(desk: AuthorizerFixture) -> None:
    touches = desk.may(READ, {"path": "a"}, in_session(book()))
    assert touches("fs.read", f"{_OWN}/out.txt") is None
    assert touches("fs.read", f"{_OTHER}/out.txt") is not None
    assert touches("fs.write", f"{_OWN}/out.txt") is not None
    denied = desk.may(READ, {"path": "a"}, in_session(book("deny fs.read /extra/**")))
    assert denied("fs.read", f"{_OWN}/out.txt") is not None


@pytest.mark.parametrize("scope", ["manifest", "project", "session"])
@pytest.mark.parametrize("action", ["deny", "ask"])
def test_a_rule_about_the_session_folder_overrides_the_default_rule(
    desk: AuthorizerFixture, action: Action, scope: str
) -> None:
    rules = in_session(book(f"{scope}: {action} fs.read {_OWN}/**"))
    assert desk.judge(READ, {"path": f"{_OWN}/out.txt"}, rules).action == action


def test_programs_of_a_session_see_only_its_own_session_folder(desk: AuthorizerFixture) -> None:
    first, second = (build_hidden_path_rules(in_session(book(), one), "/ws") for one in (_OWN, _OTHER))
    exact = build_hidden_path_rules(book().with_rules(make_folder_reading_rule(_OWN)), "/ws")
    for path in (f"{_OWN}/.env", f"{_OTHER}/.env", "/ws/.env", "/ws/a"):
        assert first.is_hidden(path) is exact.is_hidden(path), path
    assert not first.is_hidden(f"{_OWN}/.env") and second.is_hidden(f"{_OWN}/.env")
    assert first.key != second.key


def test_the_cache_of_prepared_policies_drops_one_old_entry_at_a_time(
    desk: AuthorizerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_authorizer, "_MAX_PREPARED", 3)
    own = AuthorizerFixture(desk.workspace)
    specs = [ToolSpec(f"tool{n}", "A tool.", properties(x=""), WHOLE, side_effect="read") for n in range(4)]
    rules = book("allow tool*")
    before = [own.judge(spec, {}, rules).prepared for spec in specs]
    watching = [own.authority.list_watchdogs_for(spec) for spec in specs]
    assert watching == [()] * 4
    kept = [own.judge(spec, {}, rules).prepared for spec in specs[1:]]
    assert all(one is other for one, other in zip(kept, before[1:], strict=True)), "only the oldest was dropped"
    assert own.judge(specs[0], {}, rules).prepared is not before[0]
    assert own.judge(specs[3], {}, rules).prepared is before[3], "the next one dropped the next oldest"


def test_the_rule_index_lists_every_rule_about_a_tool(desk: AuthorizerFixture) -> None:
    texts = (
        "allow bank.transfer source=a",
        "deny bank.* amount=9*",
        "ask effect:external",
        "allow bank.transfer amount=1",
        "allow *",
        "deny mcp:bank:transfer",
        "deny bash",
        "deny fs.write",
    )
    found = [one.text for one in book(*texts, shipped=False).list_rules_about_tool(TRANSFER, None)]
    assert found == [texts[0], texts[1], texts[2], texts[3], texts[4]]
    served = book(*texts, shipped=False).list_rules_about_tool(TRANSFER, "mcp:bank:transfer")
    assert [one.text for one in served] == [*texts[:5], texts[5]]
    assert desk.judge(WRITE, {"path": "a"}, book(*texts)).action == "deny"
