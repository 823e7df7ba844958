"""The rules of parent agents also judge a sub-agent's calls, and no rule of the sub-agent overrides them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import BASH, FETCH, TRANSFER, WRITE, AuthorizerFixture, book

from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_authorizer import build_provider_tool_offer
from handrail.policy.decision_explanation import explain
from handrail.policy.path_denials import build_hidden_path_rules
from handrail.policy.rules.rules_and_modes import STRICTNESS, RuleBook, limit_to_parent, with_mode

pytestmark = pytest.mark.proves("P-12")


def below(above: RuleBook, *rules: str, depth: int = 1) -> RuleBook:
    """The book of a session ``depth`` levels below one with the book ``above``; those between them say nothing."""
    for _ in range(depth - 1):
        above = limit_to_parent(book(), above)
    return limit_to_parent(book(*rules), above)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("scope", ["manifest", "project", "session"])
@pytest.mark.parametrize("action", ["deny", "ask", "allow"])
def test_a_deny_or_ask_of_a_parent_overrides_a_more_specific_sub_agent_rule(
    desk: AuthorizerFixture, action: str, scope: str, depth: int
) -> None:
    above = book(f"{scope}: {action} fs.write keep/**", f"{scope}: {action} bash make", f"{scope}: {action} net.fetch")
    own = ("allow fs.write keep/open/a", "allow bash make all", "allow net.fetch a.example.org", "allow bash ls")
    bound = below(above, *(f"manifest: {text}" for text in own), depth=depth)
    assert desk.judge(WRITE, {"path": "keep/open/a"}, bound).action == action
    assert desk.judge(FETCH, {"url": "https://a.example.org/"}, bound).action == action
    assert desk.bash("make all", bound).action == "allow", "another command than the one above"
    assert desk.bash("ls", bound).action == "allow", "nothing is said of it above"
    further = below(above, "manifest: allow bash make *", depth=depth)
    assert desk.bash("make", further).action == action
    touches = desk.may(WRITE, {"path": "keep/open/a"}, bound)
    assert (touches("fs.write", desk.path("keep/open/a")) is None) is (action != "deny")
    assert touches("fs.write", desk.path("keep/b")) is not None, "an allow above gives nothing by itself"


@pytest.mark.parametrize("text", ["{scope}: deny *", "{scope}: deny effect:external", "{scope}: deny bank.*"])
@pytest.mark.parametrize("scope", ["manifest", "project", "session"])
def test_a_parents_rule_for_many_tools_overrides_a_sub_agents_allow_by_name(
    desk: AuthorizerFixture, text: str, scope: str
) -> None:
    bound = below(book(text.format(scope=scope)), "manifest: allow bank.transfer")
    verdict = desk.judge(TRANSFER, {"source": "a", "target": "b", "amount": "1"}, bound)
    assert verdict.action == "deny" and f"({scope} scope)" in verdict.reason


def test_an_exception_in_the_parents_rules_applies_to_a_sub_agent_that_allows_it(desk: AuthorizerFixture) -> None:
    above = book("project: deny fs.write keep/**", "project: allow fs.write keep/open/**")
    bound = below(above, "manifest: allow fs.write **")
    actions = [desk.judge(WRITE, {"path": path}, bound).action for path in ("keep/a", "keep/open/a", "b")]
    assert actions == ["deny", "allow", "allow"]


def test_a_wrapped_command_that_a_sub_agent_allows_still_asks_as_its_parent_does(desk: AuthorizerFixture) -> None:
    above = book("project: ask bash make deploy *")
    wrapped = ("timeout 5 make deploy now", "nice timeout 5 make deploy now")
    bound = below(above, *(f"manifest: allow bash {text}" for text in (*wrapped, "timeout 5 make test")), depth=2)
    assert [desk.bash(text, bound).action for text in wrapped] == ["ask", "ask"]
    assert desk.bash("timeout 5 make test", bound).action == "allow"
    named = below(above.with_rules(*book(f"project: allow bash {wrapped[0]}")), f"manifest: allow bash {wrapped[0]}")
    assert desk.bash(wrapped[0], named).action == "allow", "it is named above, too"


def test_a_wider_mode_of_the_parent_asks_no_more_often_than_a_narrower_one(desk: AuthorizerFixture) -> None:
    for mode in ("ask", "auto"):
        bound = below(with_mode(book("project: ask *"), mode), "manifest: allow bank.transfer")
        assert desk.judge(TRANSFER, {"amount": "1"}, bound).action == "ask", "by the project's rule"
        bound = below(with_mode(book(), mode), "manifest: allow bank.transfer")
        assert desk.judge(TRANSFER, {"amount": "1"}, bound).action == "allow"
    planned = below(with_mode(book(), "plan"), "manifest: allow bank.transfer", depth=3)
    assert planned.mode == "plan" and desk.judge(TRANSFER, {"amount": "1"}, planned).action == "deny"


def test_programs_of_a_sub_agent_cannot_see_files_hidden_from_its_parents_programs(desk: AuthorizerFixture) -> None:
    above = book("project: deny fs.read private/**", "project: ask fs.read named", "project: deny fs.write fixed/**")
    bound = below(above, "manifest: allow fs.read **", "manifest: allow fs.write fixed/open", depth=2)
    seen = build_hidden_path_rules(bound, desk.roots.workspace)
    assert [seen.is_hidden(desk.path(path)) for path in ("private/open", "named", "src")] == [True, True, False]
    assert [seen.is_read_only(desk.path(path)) for path in ("fixed/open", "src")] == [True, False]
    assert seen.key != build_hidden_path_rules(book("manifest: allow fs.read **"), desk.roots.workspace).key


def test_a_provider_tool_that_a_parent_denies_is_unavailable_to_its_sub_agents() -> None:
    search = ToolSpec("native.web_search", "Search.")
    bound = below(book("project: deny net.fetch"), "manifest: allow native.web_search", depth=2)
    assert build_provider_tool_offer(search, bound).unavailable_reason is not None


async def test_explain_names_the_parents_rule_and_suggests_no_rule_without_effect(desk: AuthorizerFixture) -> None:
    bound = below(book("project: ask bash make *"), "manifest: allow bash make all")
    said = await explain(desk.authority, BASH, {"command": "make all"}, rules=bound, roots=desk.roots)
    assert (said.action, said.rule and said.rule.text) == ("ask", "ask bash make *")
    assert "belongs to the parent session" in str(said)
    assert not any("--rule" in change for change in said.possible_changes)


_TEXTS = st.builds(
    "{}: {} {}".format,
    st.sampled_from(["manifest", "project", "session"]),
    st.sampled_from(["allow", "ask", "deny"]),
    st.sampled_from(
        ["*", "write", "write a/**", "fs.write", "fs.write **", "fs.write a/**", "fs.write a/b", "effect:write", "fs.*"]
    ),
)
_RULES = st.lists(_TEXTS, max_size=4, unique=True)
_SPEAKING = frozenset(("manifest", "project", "session"))


@given(above=_RULES, own=_RULES, path=st.sampled_from(["a/b", "a/c", "d"]))
def test_the_stricter_decision_of_parent_and_child_rules_holds(
    desk: AuthorizerFixture, above: list[str], own: list[str], path: str
) -> None:
    upper, alone = (desk.judge(WRITE, {"path": path}, book(*texts)) for texts in (above, own))
    bound = desk.judge(WRITE, {"path": path}, below(book(*above), *own))
    rule = upper.deciding_finding.rule
    least = STRICTNESS[upper.action] if rule is not None and rule.scope in _SPEAKING else 0
    assert STRICTNESS[bound.action] >= max(least, STRICTNESS[alone.action])
    assert STRICTNESS[bound.action] <= max(STRICTNESS[upper.action], STRICTNESS[alone.action])
