"""A rule that denies a command or asks about it also matches indirect ways to run it, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy import ordinary_commands
from tests.policy.desk import GIT, AuthorizerFixture, book, rule
from tests.policy.runner_cases import CERTAIN, DATA, DATA_IN_THE_TEXT, GUESSED, IN_THE_TEXT

from handrail.policy.decision_explanation import trace_decision
from handrail.policy.rule_suggestions import suggest_rule
from handrail.policy.rules.matchers import compile_ranked_rule
from handrail.policy.rules.pattern_lexer import build_exact_argv_pattern
from handrail.policy.rules.rules_and_modes import limit_to_parent
from handrail.policy.shell import nested_commands
from handrail.policy.shell.command_wrappers import DATA_PROGRAMS as DATA_PROGRAMS
from handrail.policy.shell.command_wrappers import RUNNERS

pytestmark = pytest.mark.proves("P-05")


@pytest.mark.parametrize("command", CERTAIN)
def test_a_denied_program_is_denied_behind_every_runner(desk: AuthorizerFixture, command: str) -> None:
    assert desk.bash(command, "allow bash", "deny bash rm *").action == "deny"
    assert desk.bash(command, "allow bash", "deny shell.run rm *").action == "deny"


@pytest.mark.parametrize("command", CERTAIN)
def test_an_ask_rule_for_a_program_applies_behind_every_runner(desk: AuthorizerFixture, command: str) -> None:
    assert desk.bash(command, "allow bash", "ask bash rm *").action == "ask"
    assert desk.bash(command, "allow shell.run", "ask shell.run rm *").action == "ask"


def test_rules_find_a_sub_command_behind_the_same_runners_as_a_program(desk: AuthorizerFixture) -> None:
    denied, asked = book("allow bash", "deny bash gitx push *"), book("allow bash", "ask bash gitx push *")
    for command in CERTAIN:
        if "rm -rf x" in command or "rm -rf ::: x" in command:  # elsewhere the words are apart, as in a list
            text = command.replace("rm -rf", "gitx push", 1)
            assert desk.bash(text, denied).action == "deny", text
            assert desk.bash(text, asked).action == "ask", text


def test_an_allow_rule_for_a_runner_does_not_allow_the_program_that_it_runs(desk: AuthorizerFixture) -> None:
    for command in CERTAIN + GUESSED:
        program = build_exact_argv_pattern([command.split()[0]])
        for objection in ("deny bash rm *", "ask bash rm *"):
            assert desk.bash(command, f"allow bash {program} *", objection).action != "allow", command


@pytest.mark.parametrize("command", IN_THE_TEXT)
def test_a_denied_program_is_denied_if_a_script_pipes_it_to_an_interpreter(
    desk: AuthorizerFixture, command: str
) -> None:
    assert desk.bash(command, "allow bash", "deny bash rm *").action == "deny"
    assert desk.bash(command, "allow bash", "ask bash rm *").action == "ask"


@pytest.mark.parametrize("command", DATA_IN_THE_TEXT)
def test_a_text_that_the_script_does_not_run_is_not_denied(desk: AuthorizerFixture, command: str) -> None:
    assert desk.bash(command, "allow bash", "deny bash rm *").action == desk.bash(command, "allow bash").action


@pytest.mark.parametrize("command", GUESSED)
def test_a_watched_command_that_an_unknown_program_may_run_is_asked_about(
    desk: AuthorizerFixture, command: str
) -> None:
    for objection in ("deny bash rm *", "ask bash rm *"):
        verdict = desk.bash(command, "allow bash", objection)
        assert verdict.action == "ask"
        assert "may run" in verdict.reason and objection in verdict.reason
        assert suggest_rule(verdict) is not None
        assert desk.bash(command, "allow bash", objection, str(suggest_rule(verdict))).action == "allow"
    assert desk.bash(command, "allow bash").action == "allow"


@pytest.mark.parametrize("command", DATA)
def test_arguments_that_no_program_runs_are_not_asked_about(desk: AuthorizerFixture, command: str) -> None:
    for objection in ("deny bash rm *", "ask bash rm *"):
        assert desk.bash(command, "allow bash", objection).action == desk.bash(command, "allow bash").action


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/git push origin", "/usr/local/bin/git push", "./git push", "git --no-pager push", "git -C sub push origin",
        "git -c a=b -C sub --no-pager push origin main", "git --git-dir=x push", "git --git-dir x --work-tree y push", "git -P push",
        "git -c alias.up=push up origin", "git -c 'alias.up=push origin' up", "git -c alias.up='!git push' up", "git send-pack x",
        "git subtree push origin", "git-push origin", "/usr/lib/git-core/git-push origin", "timeout 5 git push", "nice /usr/bin/git push",
        "env git push", "env A=1 git -C x push", "sudo git push", "sh -c 'git push'", "bash -lc 'cd x && git --no-pager push'", "'git' 'push'",
        "g\\it push", "xargs git push", "find . -exec git push ';'", "git submodule foreach 'git push'", "git bisect run git push",
        "git push -- origin", "git push --force", "someprog git push", "someprog -- git -C x push",
    ],
)  # fmt: skip
@pytest.mark.parametrize("action", ["deny", "ask"])
def test_a_rule_about_a_sub_command_covers_all_its_spellings(
    desk: AuthorizerFixture, command: str, action: str
) -> None:
    verdict = desk.bash(command, "allow bash", f"{action} bash git push *")
    assert verdict.action in ((action,) if "someprog" not in command else ("ask",)), verdict.reason
    assert "git push *" in verdict.reason


@pytest.mark.parametrize(
    ("rule", "command"),
    [
        ("python *", "python3.11 x"), ("python3 *", "/usr/bin/python3.12 x"), ("python *", "python3.13t x"), ("python *", "python3.11-dbg x"),
        ("python *", "python3-intel64 x"), ("python *", "python3d x"), ("pip install *", "pip3.11 install x"), ("pip install *", "pip-3 install x"), ("gcc *", "gcc-12 a.c"),
        ("ruby *", "ruby3.1 x"), ("git push *", "git.exe push"), ("curl *", "curl.exe u"), ("npm publish *", "npm.cmd publish"), ("git push *", "hub push"),
        ("npm publish *", "npm publ x"), ("npm uninstall *", "npm unin x"), ("hg push *", "hg pus"), ("make deploy *", "gmake deploy"),
        ("kubectl delete *", "oc delete p"), ("kubectl delete *", "kubecolor -n x delete p"), ("kubectl delete *", "k3s kubectl delete p"),
        ("kubectl delete *", "microk8s kubectl delete p"), ("kubectl delete *", "microk8s.kubectl delete p"), ("kubectl delete *", "minikube kubectl -- delete p"),
        ("terraform destroy *", "terraform apply --destroy"), ("terraform destroy *", "terraform apply -auto-approve -destroy"),
        ("terraform destroy *", "terraform apply -destroy=true"), ("docker rm *", "docker.exe rm c"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("action", ["deny", "ask"])
def test_a_rule_covers_versioned_suffixed_and_shortened_names_of_its_program(
    desk: AuthorizerFixture, rule: str, command: str, action: str
) -> None:
    assert desk.bash(command, "allow bash", f"{action} bash {rule}").action == action


@pytest.mark.parametrize("command", ["git --no-pager log", "git -C push log", "git log push", "git stash push", "echo git push",
                                     "git commit -m 'git push'", "grep 'git push' f", "git --namespace push status"])  # fmt: skip
def test_a_rule_about_a_sub_command_does_not_affect_other_commands(desk: AuthorizerFixture, command: str) -> None:
    for action in ("deny", "ask"):
        assert (
            desk.bash(command, "allow bash", f"{action} bash git push *").action
            == desk.bash(command, "allow bash").action
        )


@pytest.mark.parametrize(
    ("rule", "command", "answer"),
    [
        ("allow bash git push *", "/usr/bin/git push origin", "allow"),
        ("allow bash git push *", "/bin/git push origin", "allow"),
        ("allow bash git push *", "git --no-pager push origin", "allow"),
        ("allow bash git push *", "/usr/bin/git -P push origin", "allow"),
        ("allow bash git push *", "timeout 5 /usr/bin/git push origin", "allow"),
        ("allow bash git push *", "./git push origin", "ask"),
        ("allow bash git push *", "/tmp/evil/git push origin", "ask"),
        ("allow bash git push *", "/usr/bin/../../tmp/git push", "ask"),
        ("allow bash git push *", "/usr/bin/x/git push", "ask"),
        ("allow bash git push *", "git -C sub push origin", "ask"),
        ("allow bash git push *", "git -c core.sshCommand=x push origin", "ask"),
        ("allow bash git push *", "git --exec-path=x push origin", "ask"),
        ("allow bash git push *", "git -p push origin", "ask"),
        ("allow bash git push *", "git send-pack origin", "ask"),
        ("allow bash git push *", "git-push origin", "ask"),
        ("allow bash git push *", "git push --force origin", "ask"),
        ("allow bash git push --force *", "git push origin --force", "ask"),
        ("allow bash rm -rf build", "rm -fr build", "ask"),
        ("allow bash npm exec x", "npx x", "ask"),
        ("allow bash {read-only}", "/bin/ls", "ask"),
        ("allow bash command -v *", "/usr/bin/command -v x", "ask"),
    ],
)
def test_an_allow_rule_does_not_cover_options_that_can_change_the_program_run(
    desk: AuthorizerFixture, rule: str, command: str, answer: str
) -> None:
    assert desk.bash(command, rule).action == answer


@pytest.mark.parametrize(
    ("pattern", "command", "matched"),
    [
        ("rm -rf *", "rm -rf x", True),
        ("rm -rf *", "rm -fr x", True),
        ("rm -rf *", "rm -r -f x", True),
        ("rm -rf *", "rm x -r -f", True),
        ("rm -rf *", "rm -rvf x", True),
        ("rm -rf *", "rm --recursive --force x", True),
        ("rm -rf *", "rm -R --forc x", True),
        ("rm -rf *", "rm -r x", False),
        ("rm -rf *", "rm -r -- -f", False),
        ("git push --force *", "git push origin main --force", True),
        ("git push --force *", "git push -f origin", True),
        ("git push --force *", "git push --forc origin", True),
        ("git push --force *", "git push origin", False),
        ("git push --force *", "git push --follow-tags", False),
        ("git push --force *", "git pull --force", False),
        ("docker run --network host *", "docker run --rm --network=host x", True),
        ("docker run --network host *", "docker run --network none x", False),
        ("find * -delete *", "find . -name x -delete", True),
        ("find * -delete *", "find . -type l -empty", False),
        ("curl -X POST *", "curl -s -X POST u", True),
        ("rm -rf /", "rm -fr /", True),
        ("rm -rf /", "rm -rf / x", False),
        ("git log -p", "git log -p --stat", False),
        ("/usr/bin/rm -rf *", "rm -fr x", True),
        ("rm -rf *", "/bin/rm -fr x", True),
    ],
)
def test_a_deny_rule_matches_its_options_in_any_order(pattern: str, command: str, matched: bool) -> None:
    argv = command.split()
    assert compile_ranked_rule(rule(f"deny bash {pattern}"), "command").matches(argv) is matched


@pytest.mark.parametrize(
    ("rules", "command", "answer"),
    [
        (("allow bash", "deny bash npm exec *"), "npx thing", "deny"),
        (("allow bash", "ask bash npm install *"), "npm i left-pad", "ask"),
        (("allow bash", "deny bash npm i *"), "npm --silent install left-pad", "deny"),
        (("allow bash", "deny bash pip install *"), "python3 -m pip install x", "deny"),
        (("allow bash", "deny bash pip install *"), "pip3 --quiet install x", "deny"),
        (("allow bash", "deny bash yarn install *"), "yarn build", "allow"),
        (("allow bash", "deny bash docker run *"), "docker container run x", "deny"),
        (("allow bash", "deny bash docker rm *"), "docker --host h container rm x", "deny"),
        (("allow bash", "deny bash docker compose up *"), "docker compose -f y up", "deny"),
        (("allow bash", "deny bash docker compose up *"), "docker-compose -f y up", "deny"),
        (("allow bash", "deny bash kubectl delete *"), "kubectl -n x --context y delete pod z", "deny"),
        (("allow bash", "deny bash terraform apply *"), "terraform -chdir=x apply", "deny"),
        (("allow bash", "deny bash cargo publish *"), "cargo +nightly publish", "deny"),
        (("allow bash", "ask bash gh pr merge *"), "gh pr -R o/r merge 5", "ask"),
        (("allow bash", "deny bash ./deploy.sh *"), "bash deploy.sh prod", "deny"),
        (("allow bash", "deny bash ./deploy.sh *"), "sh -x ./deploy.sh prod", "deny"),
        (("allow bash", "deny bash Rscript *"), "/opt/r/Rscript x.R", "deny"),
        (("allow bash", "deny bash reboot"), "systemctl reboot", "deny"),
        (("allow bash", "ask bash /usr/bin/curl *"), "curl http://h/", "ask"),
        (("allow bash", "ask bash curl *"), "ssh h curl http://h/", "ask"),
        (("allow bash ssh *", "deny bash curl *"), "ssh h whoami", "allow"),
        (("allow bash ssh *", "deny bash curl *"), "ssh h 'eval \"$(cat x)\"'", "ask"),
        (("allow bash ssh *",), "ssh h", "ask"),
        (("allow bash ssh *",), "ssh h bash", "ask"),
        (("allow bash docker exec c *",), "docker exec c sh", "ask"),
        (("allow bash",), "docker exec db psql -c 'select count(*) from x'", "allow"),
        (("allow bash",), "kubectl exec p -- jq '.a[] | select(.b == 1)' f", "allow"),
        (("allow bash",), "docker exec c sh -c 'ls && pwd'", "allow"),
        (("allow bash",), "docker exec c sh -c 'case x in x) ls;; esac'", "ask"),
        (("allow bash",), "docker compose exec app bash", "ask"),
        (("allow bash",), "ssh h 'case x in x) ls;; esac'", "ask"),
        # a more specific rule about the very command holds against a wider one, also in its other spellings
        (("deny bash git *", "allow bash git status"), "git status", "allow"),
        (("deny bash git *", "allow bash git push"), "git push", "allow"),
        (("ask bash git *", "allow bash git push origin"), "sudo git push", "ask"),
        (("ask bash git push *", "allow bash git *"), "git push", "ask"),
        (("ask bash git *", "allow bash git log *"), "/usr/bin/git --no-pager log src", "allow"),
        (("ask bash /usr/bin/git *", "allow bash git log *"), "/usr/bin/git log src", "allow"),
        (("ask bash /usr/bin/git *", "deny bash git push *"), "git push", "deny"),
        (("ask bash /usr/bin/git *", "deny bash git push *"), "/usr/bin/git push", "deny"),
        (("ask bash git --no-pager *", "allow bash git log *"), "git --no-pager log src", "ask"),
        (("ask bash git push *", "allow bash timeout 5 git push"), "timeout 5 git push", "allow"),
        (("ask bash git push *", "allow bash sudo git push"), "sudo git push", "allow"),
        (("ask bash git push *", "allow bash sudo *"), "sudo git push", "ask"),
        (("deny bash git push *", "allow bash sudo git push"), "sudo git push", "deny"),
        (("allow bash", "ask bash"), "someprog git push", "ask"),
        (("ask bash", "allow bash make *"), "make test", "allow"),
        (("deny bash", "allow bash someprog *"), "someprog git push", "allow"),
        (("deny bash", "allow bash sudo ls"), "sudo ls", "deny"),
    ],
)
def test_deny_ask_and_allow_rules_use_the_same_readings_of_a_command(
    desk: AuthorizerFixture, rules: tuple[str, ...], command: str, answer: str
) -> None:
    verdict = desk.bash(command, *rules)
    assert verdict.action == answer, verdict.reason


def test_an_exact_child_session_rule_does_not_override_an_ask_rule_of_its_parent(desk: AuthorizerFixture) -> None:
    above = book("allow bash", "ask bash git push *")
    own = limit_to_parent(book("allow bash sudo git push", "allow bash someprog git push"), above)
    for command in ("sudo git push", "someprog git push"):
        assert desk.bash(command, own).action == "ask"
        assert desk.bash(command, *(one.text for one in own)).action == "allow"


@pytest.mark.parametrize("padding", ["a ", "-a ", "sudo ", "'x; y' ", "rm-x ", "'rm-x; y' ", "sh "])
@pytest.mark.parametrize("program", ["someprog", "sudo", "xargs", "python run.py"])
def test_padding_does_not_hide_a_command(desk: AuthorizerFixture, program: str, padding: str) -> None:
    for count in (1, 63, 64, 65, 300, 2_000):
        command = f"{program} {padding * count}rm -rf y"
        assert desk.bash(command, "allow bash", "deny bash rm *").action in ("ask", "deny")


def test_many_harmless_arguments_do_not_cause_a_question(desk: AuthorizerFixture) -> None:
    command = "someprog " + " ".join(f"file-{number}.txt" for number in range(2_000))
    assert desk.bash(command, "allow bash", "deny bash rm *").action == "allow"


def test_a_verdict_names_the_command_it_recognised(desk: AuthorizerFixture) -> None:
    verdict = desk.bash("sudo git -C x push", "allow bash", "ask bash git push *")
    assert "git push" in verdict.reason and "'ask bash git push *'" in verdict.reason
    assert any(step.outcome == "won" and "git push" in step.text for step in trace_decision(verdict))


def test_ask_and_deny_rules_for_commands_apply_to_a_tool_that_runs_a_program(desk: AuthorizerFixture) -> None:
    argv = ["git", "--no-pager", "push"]
    assert desk.judge(GIT, {"argv": argv}, "allow git.status", "ask shell.run git push *").action == "ask"
    assert desk.judge(GIT, {"argv": argv}, "allow git.status", "deny shell.run git push *").action == "deny"


def test_ordinary_commands_rarely_need_approval_because_of_their_arguments(desk: AuthorizerFixture) -> None:
    asked = {text for text in ordinary_commands.COMMANDS if desk.bash(text, *ordinary_commands.RULES).action != "allow"}
    alone = {text for text in ordinary_commands.COMMANDS if desk.bash(text, "allow bash").action != "allow"}
    assert len(ordinary_commands.COMMANDS) > 200
    assert asked - alone == {"python script.py --name node"}


def test_no_program_is_listed_both_as_a_runner_and_as_a_data_program() -> None:
    assert not RUNNERS & DATA_PROGRAMS


WORDS = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["rm", "sudo", "sh", "-c", "rm x", "git", "docker", "run", "--", "a=rm x", "python", "-m"])),
    min_size=1,
    max_size=8,
)  # fmt: skip


@given(WORDS, st.booleans())
def test_the_search_for_nested_commands_neither_raises_nor_runs_away_on_any_argv(
    argv: list[str], everything: bool
) -> None:
    watched = nested_commands.WatchedPrograms(("rm",), everything=everything)
    assert sum(1 for _ in nested_commands.find_possible_commands(argv, watched)) < 20_000


@given(WORDS)
def test_a_runner_prefix_does_not_weaken_a_deny(desk: AuthorizerFixture, argv: list[str]) -> None:
    text = build_exact_argv_pattern(["sudo", *argv])
    if desk.bash(build_exact_argv_pattern(argv), "allow bash", rule_text).action == "deny":
        assert desk.bash(text, "allow bash", rule_text).action == "deny"


rule_text = rule("deny bash rm *").text
