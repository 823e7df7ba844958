"""Verdicts: capabilities first, then rules with the shipped ones last, and a second check at access."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy.desk import (
    ALL,
    BASH,
    EDIT,
    FETCH,
    GREP,
    MOVE,
    READ,
    TODO,
    TRANSFER,
    UPLOAD,
    WRITE,
    AuthorizerFixture,
    book,
    properties,
    rule,
)

from handrail.contract.tool.requires import (
    Capability,
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
from handrail.contract.tool.tool_ids_and_wire_names import SESSION_INTERNAL
from handrail.policy.call_targets import (
    CEILING_OWNER,
    DELEGATION_OWNER,
    agent_layer,
    build_ceiling_capability_layer,
    compute_call_capabilities,
    format_capability_denial,
    format_capability_grant_line,
)
from handrail.policy.rule_suggestions import suggest_rule
from handrail.policy.rules.rules_and_modes import (
    SECRET_FILE_NAMES,
    SECRET_NAME_EXCEPTIONS,
    RuleBook,
    build_default_rule_book,
    build_default_rules,
    make_folder_reading_rule,
    parse_rule,
)
from handrail.tools import BUILTINS

# ── the shipped rules ────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("P-03")
def test_the_default_rules_allow_only_reads_inside_the_roots_and_session_internal_tools(
    desk: AuthorizerFixture,
) -> None:
    assert desk.judge(READ, {"path": "src/a.py"}).action == "allow"
    assert desk.judge(GREP, {"pattern": "x"}).action == "allow"
    assert desk.judge(TODO, {"todos": "[]"}).action == "allow"
    for spec, arguments in (
        (WRITE, {"path": "src/a.py"}),
        (EDIT, {"path": "src/a.py"}),
        (BASH, {"command": "ls"}),
        (FETCH, {"url": "https://example.org/"}),
        (TRANSFER, {"amount": 1}),
        (UPLOAD, {"path": "src/a.py", "url": "https://a.example.org/"}),
    ):
        verdict = desk.judge(spec, arguments)
        assert verdict.action == "ask", spec.id
        assert "no rule allows it" in verdict.reason


@pytest.mark.proves("P-03")
@pytest.mark.parametrize(
    "path",
    [".env", ".env.local", "deep/er/.env", "key.pem", "a/id_backup", ".ssh/config", "x/.aws/credentials", ".netrc"],
)
def test_a_read_of_a_secret_like_file_asks_unless_a_rule_names_it(desk: AuthorizerFixture, path: str) -> None:
    assert desk.judge(READ, {"path": path}).action == "ask"
    assert desk.judge(READ, {"path": path}, f"allow fs.read {path}").action == "allow"
    assert desk.judge(READ, {"path": path}, f"allow read {path}").action == "allow"
    assert desk.judge(READ, {"path": path}, "allow fs.read other").action == "ask"


@pytest.mark.proves("P-03")
def test_the_default_read_rule_covers_only_tools_that_only_read(desk: AuthorizerFixture) -> None:
    assert desk.judge(UPLOAD, {"path": "src/a.py", "url": "https://a.example.org/"}, "allow net.fetch").action == "ask"
    assert desk.judge(MOVE, {"source": "src/a.py", "target": "b.py"}, "allow fs.write").action == "ask"
    assert desk.judge(EDIT, {"path": "src/a.py"}, "allow fs.*").action == "allow"
    assert desk.judge(EDIT, {"path": "src/a.py"}, "allow edit src/**").action == "allow"


def test_a_file_that_may_be_replaced_may_be_read_unless_a_read_rule_decides(desk: AuthorizerFixture) -> None:
    assert desk.judge(EDIT, {"path": "src/a.py"}, "allow fs.write src/**").action == "allow"
    assert desk.may(EDIT, {"path": "src/a.py"}, "allow fs.write src/**")("fs.read", desk.path("src/a.py")) is None
    assert desk.judge(EDIT, {"path": ".env"}, "allow fs.write").action == "ask"
    assert desk.judge(EDIT, {"path": "src/a.py"}, "allow fs.write", "deny fs.read src/**").action == "deny"
    asked = desk.judge(EDIT, {"path": "src/a.py"})
    assert asked.action == "ask" and asked.reason.startswith("Writing src/a.py")


@pytest.mark.proves("P-03")
def test_the_default_rules_have_texts_that_parse_back_to_the_same_rules() -> None:
    rules = build_default_rules(["/state/out [1]"])
    assert "allow fs.read **" in [r.text for r in rules]
    assert {f"allow {name}" for name in SESSION_INTERNAL} <= {r.text for r in rules}
    assert len([r for r in rules if r.action == "ask" and r.permission.startswith("fs.")]) == 2 * len(SECRET_FILE_NAMES)
    for one in rules:
        assert one.scope == "default"
        named = one.permission == "fs.read" and one.pattern.rpartition("**/")[2] in (
            *SECRET_FILE_NAMES,
            *SECRET_NAME_EXCEPTIONS,
        )
        assert replace(parse_rule(one.text, scope="default", source=one.source), any_case=named) == one


@pytest.mark.proves("P-03")
def test_a_further_readable_folder_gets_the_same_default_rules_as_the_workspace(desk: AuthorizerFixture) -> None:
    rules = build_default_rule_book(["/extra"])
    assert desk.judge(READ, {"path": "/extra/out.txt"}, rules).action == "allow"
    assert desk.judge(READ, {"path": "/extra/.env"}, rules).action == "ask"
    assert desk.judge(READ, {"path": "/extra/out.txt"}).action == "ask"


@pytest.mark.proves("P-03")
def test_a_session_rule_allows_reading_the_saved_outputs_of_that_session_only(desk: AuthorizerFixture) -> None:
    rules = build_default_rule_book().with_rules(make_folder_reading_rule("/extra/ses_1"))
    assert desk.judge(READ, {"path": "/extra/ses_1/out.txt"}, rules).action == "allow"
    assert desk.judge(READ, {"path": "/extra/ses_1"}, rules).action == "ask"
    assert desk.judge(READ, {"path": "/extra/ses_12/out.txt"}, rules).action == "ask"
    assert desk.judge(READ, {"path": "/extra/ses_2/out.txt"}, rules).action == "ask"


# ── two questions ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("P-02")
def test_every_target_of_a_call_is_checked_and_the_strictest_decision_holds(desk: AuthorizerFixture) -> None:
    arguments = {"source": "src/a.py", "target": "secrets/b"}
    assert desk.judge(MOVE, arguments, "allow move").action == "allow"
    assert desk.judge(MOVE, arguments, "allow move src/**").action == "ask"
    assert desk.judge(MOVE, arguments, "allow move", "deny fs.write secrets/**").action == "deny"
    assert desk.judge(MOVE, arguments, "allow move", "deny fs.read secrets/**").action == "allow"
    assert [t.value for t in desk.judge(MOVE, arguments).targets] == [desk.path("src/a.py"), desk.path("secrets/b")]


@pytest.mark.proves("P-02")
def test_each_of_several_targets_of_a_capability_is_checked(desk: AuthorizerFixture) -> None:
    both = replace(MOVE, targets={"fs.write": ["{source}", "{target}"]})
    arguments = {"source": "src/a.py", "target": "secrets/b"}
    assert desk.judge(both, arguments, "allow fs.write src/**").action == "ask"
    assert desk.judge(both, arguments, "allow fs.write src/**", "allow fs.write secrets/**").action == "allow"
    assert desk.judge(both, arguments, "allow move", "deny fs.write src/**").action == "deny"
    assert desk.judge(both, arguments, "allow move src/**").action == "ask"
    alone = desk.judge(both, {"source": "src/a.py"}, "allow fs.write src/**")
    assert alone.action == "allow" and [t.value for t in alone.targets] == [desk.path("src/a.py")]
    neither = desk.judge(both, {}, "allow fs.write src/**")
    assert neither.action == "ask" and [t.shown for t in neither.targets] == ["."]

    inferred = replace(MOVE, targets={}, parameters=properties(source="path", target="path"))
    assert desk.judge(inferred, arguments, "allow fs.write src/**").action == "ask"
    fetching = replace(FETCH, parameters=properties(url="uri", mirror="uri"))
    urls = {"url": "https://a.example.org/", "mirror": "https://b.example.org/"}
    assert desk.judge(fetching, urls, "allow net.fetch a.example.org").action == "ask"
    running = replace(BASH, parameters=properties(command="command", after="command"))
    assert desk.judge(running, {"command": "ls", "after": "rm x"}, "allow bash ls", "deny bash rm *").action == "deny"


@pytest.mark.proves("P-02")
def test_rules_match_a_tool_with_several_kinds_of_targets_by_argument_name(desk: AuthorizerFixture) -> None:
    arguments = {"path": "src/a.py", "url": "https://a.example.org/x"}
    assert desk.judge(UPLOAD, arguments, "allow upload url=https://a.example.org/* path=src/*").action == "allow"
    assert desk.judge(UPLOAD, arguments, "allow upload path=src/* *", "ask net.fetch").action == "ask"
    assert desk.judge(UPLOAD, arguments, "allow upload", "deny net.fetch *.example.org").action == "deny"
    assert desk.judge(UPLOAD, arguments, "allow fs.read src/**", "allow net.fetch a.example.org").action == "allow"


@pytest.mark.proves("P-02")
@pytest.mark.parametrize(
    ("url", "rules", "answer"),
    [
        ("https://example.org/x", ["allow net.fetch example.org"], "allow"),
        ("https://example.org/x", ["allow web_fetch example.org"], "allow"),
        ("https://EXAMPLE.org./x", ["allow net.fetch example.org"], "allow"),
        ("https://example.org:8443/x", ["allow net.fetch example.org:8443"], "allow"),
        ("https://example.org/x", ["allow net.fetch example.org:8443"], "ask"),
        ("https://a.example.org/x", ["allow net.fetch *.example.org"], "allow"),
        ("https://example.org/x", ["allow net.fetch *.example.org"], "ask"),
        ("https://example.org/x", ["allow web_fetch", "deny net.fetch example.org"], "deny"),
        ("http://[2606:4700::1]:80/x", ["allow net.fetch [2606:4700::1]:80"], "allow"),
        ("http://[::1]:80/x", ["allow net.fetch [::1]:80"], "deny"),
        ("http://127.0.0.1:3000/x", ["allow net.fetch 127.0.0.1:3000"], "deny"),
        ("http://10.0.0.5/x", ["allow net.fetch"], "deny"),
        ("http://localhost:3000/x", ["allow net.fetch localhost"], "deny"),
        ("https://user@example.org/", ["allow web_fetch"], "deny"),
        ("data:text/plain,hello", ["allow web_fetch"], "allow"),
        ("data:80", ["allow web_fetch", "deny net.fetch data"], "deny"),
        ("https://evil.example\\@example.org/", ["allow web_fetch"], "deny"),
        ("https://①②⑦.0.0.1/", ["allow web_fetch"], "deny"),
        ("https://exa\tmple.org/", ["allow web_fetch"], "deny"),
        ("file:///etc/passwd", ["allow web_fetch"], "deny"),
        ("https://example.org:99999/", ["allow web_fetch"], "deny"),
        ("https://", ["allow web_fetch"], "deny"),
        ("", ["allow web_fetch"], "deny"),
    ],
)
def test_rules_match_hosts_by_label_and_port_and_ambiguous_urls_are_refused(
    desk: AuthorizerFixture, url: str, rules: list[str], answer: str
) -> None:
    assert desk.judge(FETCH, {"url": url}, *rules).action == answer


def test_a_call_without_a_host_falls_back_to_rules_about_the_tool(desk: AuthorizerFixture) -> None:
    assert desk.judge(FETCH, {}, "allow web_fetch example.org").action == "ask"
    assert desk.judge(FETCH, {}, "allow web_fetch").action == "allow"
    assert desk.judge(FETCH, {}, "deny web_fetch").action == "deny"


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 10_000, "\ud800"])
def test_an_invalid_path_is_denied_with_the_reason(desk: AuthorizerFixture, path: str) -> None:
    verdict = desk.judge(READ, {"path": path}, "allow read")
    assert verdict.action == "deny"
    assert "path" in verdict.reason


# ── capabilities ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("P-01", "K-10")
@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "way-out/passwd", "src/../../x"])
def test_a_path_outside_all_capabilities_is_denied_before_rules_apply(desk: AuthorizerFixture, path: str) -> None:
    verdict = desk.judge(READ, {"path": path}, "allow read", "allow fs.read", "allow *")
    assert verdict.action == "deny"
    assert f"is outside the folders that tool read can read ({desk.roots.workspace}" in verdict.reason
    assert "ask the user to add the folder to [[roots]]" in verdict.reason


OUTSIDE: tuple[tuple[Capability, str, str | tuple[str, ...]], ...] = (
    ("fs.read", "/etc/passwd", "/etc/passwd"),
    ("fs.write", "/etc/passwd", "/etc/passwd"),
    ("net.fetch", "example.org", "example.org"),
    ("shell.run", "git push", ("git", "push")),
)


@pytest.mark.proves("P-01")
@pytest.mark.parametrize(("capability", "shown", "target"), OUTSIDE)
@pytest.mark.parametrize("spec", [tool.spec for tool in BUILTINS if tool.spec.id in ("read", "write", "bash", "wait")])
@pytest.mark.parametrize("bound", ["tool", "ceiling", "passed on", "nothing"])
def test_each_capability_refusal_gives_the_model_a_next_step_and_no_operator_details(
    capability: Capability, shown: str, target: str | tuple[str, ...], spec: ToolSpec, bound: str
) -> None:
    variables = PathVariables(workspace=("/ws",), ad_hoc=("/outputs",))
    everything = CapabilityLayer("all", ("/**", "/"), ("/**", "/"), ("**",), (ShellRequires(cmd="*"),))
    none = CapabilityLayer(
        {"ceiling": CEILING_OWNER, "passed on": f"{DELEGATION_OWNER} boss"}.get(bound, "nothing"), ("/ws",), ("/ws",)
    )
    own = (expand_requires(Requires(fs=spec.requires.fs), variables, f"tool {spec.id}"),)
    capabilities = CapabilitySet({"tool": own, "nothing": ()}.get(bound, (everything, none)))
    layer = capabilities.find_denying_layer(capability, target)
    assert layer is not None
    text = format_capability_denial(capabilities, layer, capability, shown, spec)
    assert shown in text and not re.search(r"author|operator would|requires:|\{\"", text)
    assert re.search(r"Use |Continue without it", text), "what the model does next"
    if capability in ("fs.read", "fs.write") and bound in ("tool", "passed on"):
        folders = layer.fs_read if capability == "fs.read" else layer.fs_write
        assert f"({', '.join(folders) or 'none'})" in text
        follows = bound == "tool" and bool(folders)
        assert ("ask the user to add the folder to [[roots]]" in text) == follows
    if bound == "ceiling":
        assert "/ws" not in text, "how a host is laid out is its operator's"
    assert "{" in format_capability_grant_line(layer, capability, spec), "the person is told the line"


@pytest.mark.proves("P-01")
def test_a_refusal_of_a_tool_limited_to_some_folders_names_those_folders(desk: AuthorizerFixture) -> None:
    narrow = replace(READ, requires=Requires(fs=FsRequires(read=("{workspace}/src/**",))))
    reason = desk.judge(narrow, {"path": "README.md"}, "allow *").reason
    assert f"({desk.roots.workspace}/src/**). Use a path inside these folders, or another tool." in reason


@pytest.mark.proves("P-01")
def test_a_sibling_folder_with_the_same_prefix_is_outside_the_workspace(desk: AuthorizerFixture) -> None:
    assert desk.judge(READ, {"path": f"{desk.roots.workspace}_secret/a"}, "allow *").action == "deny"


@pytest.mark.proves("K-10")
def test_an_agent_has_the_capabilities_that_it_and_its_tools_require() -> None:
    variables = PathVariables(workspace=("/ws",))
    own = Requires(net=NetRequires(hosts=("own.example",)))
    one = agent_layer("default", own, [READ], variables)
    both = agent_layer("default", own, [READ, FETCH], variables)
    assert CapabilitySet((one,)).allows("net.fetch", "own.example")
    assert not CapabilitySet((one,)).allows("net.fetch", "other.example")
    assert CapabilitySet((both,)).allows("net.fetch", "other.example")
    assert CapabilitySet((one,)).allows("fs.write", "/ws/a")


@pytest.mark.proves("K-10")
def test_one_tool_does_not_get_the_capabilities_of_another(desk: AuthorizerFixture) -> None:
    capabilities = desk.judge(READ, {"path": "src/a.py"}).capabilities
    assert not capabilities.may_allow_any_target("net.fetch")
    assert not capabilities.may_allow_any_target("shell.run")
    assert not desk.judge(BASH, {"command": "ls"}).capabilities.may_allow_any_target("net.fetch")


@pytest.mark.proves("K-10")
def test_the_ceiling_limits_the_capability_set_of_every_call(desk: AuthorizerFixture) -> None:
    low = AuthorizerFixture(desk.workspace, ceiling=Requires(fs=FsRequires(read=("src",))))
    assert low.judge(READ, {"path": "src/a.py"}).action == "allow"
    verdict = low.judge(READ, {"path": "README.md"}, "allow *")
    assert verdict.action == "deny"
    assert "ceiling" in verdict.reason
    assert low.judge(BASH, {"command": "ls"}, "allow bash").action == "deny"
    assert build_ceiling_capability_layer(None, low.variables) is None
    bounded = build_ceiling_capability_layer(Requires(fs=FsRequires(read=("src",))), low.variables)
    assert bounded is not None
    assert bounded.fs_read == (f"{low.roots.workspace}/src",)


@pytest.mark.proves("K-10", "P-01")
def test_a_nested_call_has_at_most_the_capabilities_of_its_parent(desk: AuthorizerFixture) -> None:
    parent = CapabilitySet((expand_requires(Requires(fs=FsRequires(read=("src",))), desk.variables, "tool parent"),))
    assert desk.judge(READ, {"path": "src/a.py"}, parent=parent).action == "allow"
    assert desk.judge(READ, {"path": "README.md"}, parent=parent).action == "deny"
    assert desk.judge(BASH, {"command": "ls"}, "allow bash", parent=parent).action == "deny"
    assert desk.judge(READ, {"path": "src/a.py"}, parent=CapabilitySet()).action == "deny"
    nothing = compute_call_capabilities(
        READ, desk.variables, agent_layer("default", Requires(), ALL, desk.variables), None, CapabilitySet()
    )
    assert not nothing.allows("fs.read", desk.path("src/a.py"))


# ── reasons, always ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.proves("P-13")
def test_the_reason_names_the_rule_with_its_scope_and_the_operator_reason_its_source(desk: AuthorizerFixture) -> None:
    verdict = desk.bash("rm x", book().with_rules(rule("deny bash rm *", "project", "/etc/handrail.toml")))
    assert "'deny bash rm *'" in verdict.reason
    assert "project scope" in verdict.reason
    assert "/etc/handrail.toml" not in verdict.reason
    assert "/etc/handrail.toml" in verdict.operator_reason
    assert verdict.reason.endswith(".")


ASKING: list[tuple[ToolSpec, dict[str, object], str | None]] = [
    (BASH, {"command": "git push 'a *'"}, "allow bash git push 'a *'"),
    (BASH, {"command": "ls && mkdir x"}, "allow bash mkdir x"),
    (BASH, {"command": "mkdir x && mkdir y"}, None),
    (BASH, {"command": "ls $X"}, None),
    (BASH, {"command": "python -c 'print(1)'"}, "allow bash python -c 'print(1)'"),
    (WRITE, {"path": "a*[b].txt"}, "allow write a[*][[]b].txt"),
    (WRITE, {"path": "./src/../src/a.py"}, "allow write src/a.py"),
    (WRITE, {"path": "a\nb"}, None),
    (WRITE, {"path": " a"}, None),
    (EDIT, {"path": "a.py"}, "allow edit a.py"),
    (TRANSFER, {"source": "a b", "amount": 5}, "allow bank.transfer 'source=a b' amount=5"),
    (TRANSFER, {"source": "*"}, "allow bank.transfer 'source=*'"),
    (TRANSFER, {"source": {"x": [1]}}, """allow bank.transfer 'source={"x":[1]}'"""),
    (TRANSFER, {"source": "x" * 5_000}, None),
    (TRANSFER, {}, None),
    (FETCH, {"url": "https://a.org/x"}, "allow web_fetch a.org:443"),
    (MOVE, {"source": "a", "target": "b"}, None),
]


@pytest.mark.proves("P-08")
@pytest.mark.parametrize(("spec", "arguments", "expected"), ASKING)
def test_a_suggested_rule_escapes_every_literal_and_allows_the_call(
    desk: AuthorizerFixture, spec: ToolSpec, arguments: dict[str, object], expected: str | None
) -> None:
    rules = book("allow bash ls")
    verdict = desk.judge(spec, arguments, rules)
    assert verdict.action == "ask"
    assert suggest_rule(verdict) == expected
    if expected is not None:
        stored = rules.with_rules(parse_rule(expected, scope="session", source="answered for this session"))
        assert desk.judge(spec, arguments, stored).action == "allow"


@pytest.mark.proves("P-08")
def test_a_suggested_rule_allows_no_other_call(desk: AuthorizerFixture) -> None:
    stored = suggest_rule(desk.judge(TRANSFER, {"source": "a", "amount": 5}))
    assert stored is not None
    assert desk.judge(TRANSFER, {"source": "a", "amount": 6}, stored).action == "ask"
    assert desk.judge(TRANSFER, {"source": "a"}, stored).action == "ask"
    assert desk.judge(TRANSFER, {"source": "a", "amount": 5, "target": "x"}, stored).action == "ask"
    stored = suggest_rule(desk.judge(WRITE, {"path": "a*b"}))
    assert stored is not None
    assert desk.judge(WRITE, {"path": "aXb"}, stored).action == "ask"


def test_a_suggested_rule_answers_a_question_of_a_capability_rule(desk: AuthorizerFixture) -> None:
    verdict = desk.judge(WRITE, {"path": "a.py"}, "allow write", "ask fs.write")
    assert suggest_rule(verdict) == "allow fs.write a.py"
    assert suggest_rule(desk.bash("mkdir x", "manifest: deny bash mkdir *")) is None


@given(st.text(max_size=12))
def test_a_suggested_path_rule_matches_only_that_path(desk: AuthorizerFixture, name: str) -> None:
    verdict = desk.judge(WRITE, {"path": f"d/{name}"})
    if verdict.action != "ask" or suggest_rule(verdict) is None:
        return
    assert desk.judge(WRITE, {"path": f"d/{name}"}, str(suggest_rule(verdict))).action == "allow"
    (target,) = verdict.targets
    assert desk.judge(WRITE, {"path": target.value + "x"}, str(suggest_rule(verdict))).action == "ask"


def test_a_decision_that_does_not_depend_on_arguments_is_cached(desk: AuthorizerFixture) -> None:
    rules = book("allow bank.transfer")
    assert desk.judge(TRANSFER, {"amount": 1}, rules) is desk.judge(TRANSFER, {"amount": 2}, rules)
    asking = book("allow bank.transfer amount=1")
    assert desk.judge(TRANSFER, {"amount": 1}, asking).action == "allow"
    assert desk.judge(TRANSFER, {"amount": 2}, asking).action == "ask"


def test_many_rule_books_do_not_grow_the_cache_of_an_authority_without_limit(desk: AuthorizerFixture) -> None:
    own = AuthorizerFixture(desk.workspace)
    for _ in range(5_000):
        own.judge(TRANSFER, {}, RuleBook())
    prepared: dict[object, object] = own.authority._prepared  # pyright: ignore[reportPrivateUsage, reportAssignmentType]
    assert len(prepared) <= 4_096


def test_a_tool_without_declarations_asks_and_the_suggested_rule_names_it(tmp_path: Path) -> None:
    own = AuthorizerFixture(tmp_path)
    spec = ToolSpec("new.tool", "New.", properties())
    assert own.judge(spec, {}).action == "ask"
    assert suggest_rule(own.judge(spec, {})) == "allow new.tool"
