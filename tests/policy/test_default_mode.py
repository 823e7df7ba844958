"""The default mode: confined commands run without a request, and all others ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.policy.desk import BASH, EDIT, WRITE, AuthorizerFixture, rule

from handrail.contract.permission_modes import Mode
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.rules.rules_and_modes import CONFINED_RULE_TEXTS, build_default_rule_book, with_mode

pytestmark = pytest.mark.proves("P-16", "P-18")

SPEC = replace(BASH, single_command=True)
PYTHON = ToolSpec(
    "python",
    "Run code.",
    {"type": "object", "properties": {"code": {"type": "string"}}},
    BASH.requires,
    single_command=True,
)
CONFINED = [
    "pytest -q", "make test", "echo x > src/new.py", "sed -i s/a/b/ src/a.py", "python - <<'E'\nprint(1)\nE", "for f in *; do pytest \"$f\"; done",
    "npm test 2>&1 | tail", "git add -A && git commit -m x", "x=1; run $x", "cp .env.example settings.example",
    "source .venv/bin/activate && pytest -q", "python -m venv .venv && . .venv/bin/activate && python -c 'print(1)'",
    "perl -pi -e 's/a/b/' src/a.py", "python -m venv build/v", "git -c user.name=x -c user.email=x@y commit -m x",
    "source .venv/bin/activate && bash run.sh", "awk '{s+=$1} END {print s}' <(wc -l src/a.py)", "> new.txt", "Rscript -e 'testthat::test_dir(\"tests\")'",
]  # fmt: skip
NOT_CONFINED = [
    "curl https://example.org", "git push", "pip install x", "npm install", "ssh host", "rm -rf src", "git reset --hard", "git clean -fdx", "rm -rf .git",
    "echo gone > src/a.py", "cat .env", "echo x > .env", "cp .env x", "touch .vscode/x", "python -c \"open('src/a.py', 'w').close()\"",
    "python -m pip install x", "python3 -m twine upload x", "rsync -a src host:x", "perl -ni -e '' src/a.py", "ruby -n -i -e '' src/a.py",
    "F=src/a.py; echo gone > $F", "source .env && make", "source x; echo gone > src/a.py", "source x && rm src/a.py",
    "source .venv/bin/activate && cp b.py src/a.py", "source x && tee src/a.py < y", "cd $X && cp b.py src/a.py", "source x && ln -sf y src/a.py",
    "source a.sh && mv x y", "cd .. && mv x y", "cd ~ && mv notes.txt x", "cd / && find . -name '*.o' -delete", "source x && xargs rm < y",
    "source /proc/self/fd/0 <<< 'rm -rf src'", "cd /proc/self && . fd/0 <<< 'rm -rf src'", "cd / && . dev/stdin <<< 'rm -rf src'",
    "bash /proc/self/fd/0 <<< 'rm -rf src'", "cd / && bash dev/stdin <<< 'rm -rf src'", "curl localhost example.org",
    "curl -o src/a.py localhost", "curl -w @fmt localhost", "curl localhost file:///etc/passwd", "curl -T src/a.py localhost", "awk '{print > \"src/a.py\"}' x",
    "cd $X && sh -c 'rm src/a.py'", "cd / && bash -c '> a'", "source x && sh -c 'rm src/a.py'", "bash -c 'echo x > src/a.py'", "> src/a.py", "awk '{print > \"src/a.py\"}' <(ls)", "awk 'BEGIN{system(\"x\")}' <(ls)", "python -c \"open('src/a.py', 'w')\"", "tar xf old.tar",
    "Rscript -e 'unlink(\"src\", recursive=TRUE)'", "julia -e 'rm(\"src\")'", "rm -rf src/*",
]  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path) -> AuthorizerFixture:
    folder = tmp_path / "ws"
    (folder / "src").mkdir(parents=True)
    (folder / "src/a.py").write_text("a = 1\n")
    return AuthorizerFixture(folder)


def judge(
    desk: AuthorizerFixture, command: str, *rules: str, mode: Mode = "ask", spec: ToolSpec = SPEC
) -> PolicyVerdict:
    name = "code" if spec is PYTHON else "command"
    book = with_mode(build_default_rule_book().with_rules(*map(rule, rules)), mode)
    return desk.authority.evaluate(spec, {name: command}, rules=book, roots=desk.roots)


@pytest.mark.parametrize("mode", ["ask", "accept-edits"])
@pytest.mark.parametrize("command", CONFINED)
def test_a_command_that_stays_confined_is_allowed_as_a_confined_call(
    desk: AuthorizerFixture, command: str, mode: Mode
) -> None:
    verdict = judge(desk, command, mode=mode)
    assert verdict.action == "allow" and verdict.confinement is not None, verdict.reason
    assert verdict.deciding_finding.rule is not None and verdict.deciding_finding.rule.scope == "default"
    assert "allowed by the rule 'allow bash {confined}' (default scope). It runs confined" in verdict.reason


@pytest.mark.parametrize("command", NOT_CONFINED)
def test_commands_that_need_a_host_destroy_data_or_name_a_secret_require_approval(
    desk: AuthorizerFixture, command: str
) -> None:
    assert judge(desk, command).action == "ask"


def test_a_sourced_file_is_code_so_the_repository_is_read_only(desk: AuthorizerFixture) -> None:
    for command, changes in (
        ("git commit -m x", True),
        ("source x && git commit -m x", False),
        (". x; git add a", False),
        ("find . -name a.sh -exec bash {} \\; ; git add x", False),
        ("find . -name a.sh -exec ./a.sh \\; ; git add x", False),
        ("tox; git add x", False),
        ("cmake --build build; git add x", False),
        ("eslint . && git add x", False),
        ("mkdir -p d && cp a d/ && ruff format d && git add d", True),
    ):
        confinement = judge(desk, command).confinement
        assert confinement is not None and confinement.changes_repository is changes, command


def test_python_code_also_runs_confined(desk: AuthorizerFixture) -> None:
    assert judge(desk, "print(1)", spec=PYTHON).action == "allow"
    assert judge(desk, "import shutil; shutil.rmtree('src')", spec=PYTHON).action == "ask"
    assert judge(desk, "print(1)", "ask python", spec=PYTHON).action == "ask"
    assert judge(desk, f"print('{'a' * 50_000}')", spec=PYTHON).action == "allow"
    assert judge(desk, f"print('{'a' * 100_000}')", spec=PYTHON).action == "ask"  # too long to search


@pytest.mark.parametrize("spec", [WRITE, EDIT])
def test_file_tools_still_require_approval(desk: AuthorizerFixture, spec: ToolSpec) -> None:
    book = build_default_rule_book()
    assert desk.authority.evaluate(spec, {"path": "src/a.py"}, rules=book, roots=desk.roots).action == "ask"


@pytest.mark.parametrize(
    "text",
    [
        "ask bash",
        "ask shell.run",
        "ask shell.*",
        "ask *",
        "ask effect:external",
        "ask b*",
        "project: ask bash",
        "manifest: ask bash",
    ],
)
def test_one_ask_rule_requires_approval_again_for_every_form_of_the_tool_name(
    desk: AuthorizerFixture, text: str
) -> None:
    assert judge(desk, "pytest -q", text).action == "ask"


@pytest.mark.parametrize(
    "text", ["deny bash", "deny shell.run", "deny *", "deny effect:external", "deny bash pytest …"]
)
def test_a_deny_rule_overrides_the_confined_default(desk: AuthorizerFixture, text: str) -> None:
    assert judge(desk, "pytest -q", text).action == "deny"


def test_the_documented_rules_ask_for_every_command_that_is_not_read_only(desk: AuthorizerFixture) -> None:
    rules = ("ask bash", "ask python", "allow bash {read-only}")
    assert judge(desk, "pytest -q", *rules).action == "ask"
    assert judge(desk, "git status && ls", *rules).action == "allow"
    assert judge(desk, "pytest -q", *rules, "allow bash pytest …").action == "allow"


def test_plan_mode_allows_only_read_only_commands(desk: AuthorizerFixture) -> None:
    assert judge(desk, "pytest -q", mode="plan").action == "deny"
    assert judge(desk, "ls", mode="plan").action == "allow"


def test_every_command_asks_if_the_sandbox_cannot_confine_it_fully(desk: AuthorizerFixture) -> None:
    verdict = judge(desk, "pytest -q", spec=replace(SPEC, confinement_gap="the sandbox has no limits"))
    assert verdict.action == "ask"
    assert judge(desk, "pytest -q", spec=BASH).action == "ask", "a call that does more than run its command"


def test_a_server_tool_named_bash_is_not_allowed_as_confined(desk: AuthorizerFixture) -> None:
    found = desk.authority.evaluate(
        SPEC, {"command": "pytest"}, rules=build_default_rule_book(), roots=desk.roots, origin="mcp:x:bash"
    )
    assert found.action == "ask"


def test_the_default_rules_list_the_rules_for_confined_calls() -> None:
    assert {one.text for one in build_default_rule_book() if one.text in CONFINED_RULE_TEXTS} == set(
        CONFINED_RULE_TEXTS
    )


FILTERED = [
    ("jq .a f.json > t && mv t f.json", True),
    ("sort < f.json > t; mv t f.json", True),
    ("sed s/a/b/ f.json > t && cp t f.json", True),
    ("echo f.json > t && mv t f.json", False),
    ("jq .a other > t && mv t f.json", False),
    ("cat f.json; echo x > t && mv t f.json", False),
    ("jq .a f.json > u && mv t f.json", False),
    ("jq .a f.json > t && mv t src/a.py", False),
]


@pytest.mark.parametrize(("command", "allowed"), FILTERED)
def test_a_file_replaced_by_its_own_changed_content_does_not_count_as_lost(
    desk: AuthorizerFixture, command: str, allowed: bool
) -> None:
    (desk.workspace / "f.json").write_text("{}\n")
    (desk.workspace / "t").write_text("")
    assert (judge(desk, command).action == "allow") is allowed


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("sqlite3 app.db 'SELECT 1'", True),
        ("sqlite3 app.db .tables", True),
        ("sqlite3 app.db 'DROP TABLE users'", False),
        ("sqlite3 app.db 'delete from users'", False),
        ("sqlite3 app.db '.shell rm -rf src'", False),
        ("sqlite3 app.db <<'E'\ndrop table x;\nE", False),
        ("sqlite3 app.db < schema.sql", True),
        ("hyperfine --warmup 1 'pytest -q' 'make test'", True),
        ("hyperfine --prepare 'rm -rf src' 'make'", False),
        ("hyperfine --prepare='git clean -fdx' make", False),
        ("hyperfine 'rm src/a.py'", False),
        ("hyperfine 'curl example.org'", False),
        ("watch -n 2 ls src", True),
        ("strace rm src/a.py", False),
        ("hyperfine $x", False),
        ("ls | xargs perl -pi -e 's/a/b/'", True),
        ("ls | xargs perl -e 'unlink'", False),
        ("find . -name '*.py' -exec perl -pi -e 's/a/b/' {} +", True),
        ('node -e \'require("fs").writeFileSync("src/a.py", "")\'', False),
        ("python3 -c \"import pathlib; pathlib.Path('src/a.py').write_text('')\"", False),
        ("python3 -c \"import pathlib; pathlib.Path('x').write_text('x')\"", True),
    ],
)
def test_a_program_that_runs_another_text_is_judged_by_that_text(
    desk: AuthorizerFixture, command: str, allowed: bool
) -> None:
    verdict = judge(desk, command)
    assert (verdict.action == "allow") is allowed, verdict.reason


@pytest.mark.parametrize("mode", ["ask", "auto"])
def test_the_reason_names_the_part_that_is_not_confined_even_if_the_mode_asks(
    desk: AuthorizerFixture, mode: Mode
) -> None:
    verdict = judge(desk, "set -e; make test; tee $x < notes.txt", mode=mode)
    assert verdict.action == "ask"
    assert "It does not stay confined: tee writes to files that the command does not name." in verdict.reason
