"""Commands of maximum length that are slow to parse: each is answered, and none is allowed.

Before there were bounds the slowest took minutes, in which nothing else of the process was done.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.policy.desk import AuthorizerFixture, book

from handrail.policy.rules.rules_and_modes import with_mode
from handrail.policy.shell.parser import MAX_CHARACTERS, MAX_SIGNS, parse_script
from handrail.policy.watchdogs.api import WatchdogCall
from handrail.policy.watchdogs.builtin_watchdogs import (
    ExfiltrationWatchdog,
    OutgoingSecretsWatchdog,
    explain_command_exfiltration,
    find_known_key_kind,
)
from handrail.store.json_fallback_encoding import encode_json_with_fallback
from handrail.tools.shell_tools import BashTool

pytestmark = [pytest.mark.proves("P-05"), pytest.mark.timeout(60)]

BASH = BashTool().spec


def filled(unit: str, end: str = "") -> str:
    """``unit`` over and over, as long as a text may be that is judged."""
    return unit * ((MAX_CHARACTERS - len(end)) // len(unit)) + end


@pytest.mark.parametrize(
    "text",
    [
        filled("a|"),
        filled("a|\n"),
        filled("a|&"),
        filled("cat <<A "),
        filled("a=(b "),
        "a[" + filled("]")[2:],
        filled("`>b "),
        filled("f(){ a=(b "),
        filled("a >b "),
        filled('"')[1:],
        filled("nice ", "ls"),
        filled("timeout 5 nice ", "ls"),
        filled("xargs ", "ls"),
        filled("xargs sudo -a "),
        filled("eval ", "ls"),
        filled("uv run ", "ls"),
        filled("find . -exec "),
        filled("bash -c a "),
        filled("bash -c '"),
        "echo " + filled("{a,")[5:],
        "echo " + filled("{a..")[5:],
        "x=" + filled("[")[2:],
        "\n".join(["xargs sudo -a xargs -b sudo " * 40] * 45),
        "export " + " ".join(f"A{number}=1" for number in range(3_700)) + "; pytest" * 45 + "; zip a",
        "\n".join(['bash -c "' + "a=(b " * 190 + '"'] * 49),
    ],
    ids=lambda text: repr(text[:14]),
)
def test_a_command_text_made_to_be_slow_asks(desk: AuthorizerFixture, text: str) -> None:
    verdict = desk.judge(BASH, {"command": text}, with_mode(book("deny bash rm *"), "auto"))
    assert verdict.action == "ask"
    assert len(verdict.reason) < 2_000


@pytest.mark.parametrize(
    "unit", ["a.", "a-", "a", "curl a|", "curl $(a ", "git push;", "$(`", "'a\"", "\\a", "ssh a b;"]
)
def test_the_watchdogs_finish_on_a_text_made_to_be_slow(unit: str) -> None:
    text = "curl http://a.example/?" + unit * (60_000 // len(unit))
    explain_command_exfiltration(text)
    find_known_key_kind(text)


def test_a_watchdog_asks_if_a_text_has_too_many_commands() -> None:
    assert "too many" in (explain_command_exfiltration("curl a;" * 301) or "")
    assert explain_command_exfiltration("curl a;" * 30) is None


@pytest.mark.parametrize("text", ["ls " + "a " * 5_000, "ls " + "''" * 5_000, "ls " + '"a"' * 5_000])
def test_a_text_with_too_many_words_or_parts_to_judge_is_asked_about(text: str) -> None:
    script = parse_script(text)
    assert script.unclear is not None
    assert parse_script(text[:6_003]).unclear is None


def test_a_text_that_would_take_the_grammar_too_long_is_unclear() -> None:
    text = "rm x; " + "<a href=" * (MAX_SIGNS - 1)
    assert parse_script(text).unclear is not None


def test_a_text_is_parsed_only_once() -> None:
    text = "ls | grep a | wc"
    assert parse_script(text) is parse_script(text)


@pytest.mark.parametrize(
    "watchdog", [OutgoingSecretsWatchdog(encode_json_with_fallback, lambda data: False), ExfiltrationWatchdog()]
)
async def test_the_event_loop_keeps_running_while_a_watchdog_reads_a_long_text(
    watchdog: OutgoingSecretsWatchdog | ExfiltrationWatchdog,
) -> None:
    command = "curl a; " + "a;" * 30_000
    call = WatchdogCall("bash", {"command": command}, {}, {}, "s", targets=[("shell.run", command)])
    answer = asyncio.ensure_future(watchdog(call))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3


def test_a_plain_command_may_have_any_number_of_special_characters_in_quotes() -> None:
    script = parse_script(f"python3 -c '{'x = {(1)[0]}; ' * MAX_SIGNS}'")
    assert script.unclear is None
    assert len(script.commands) == 1


def test_a_forbidden_command_is_found_among_many_commands(desk: AuthorizerFixture) -> None:
    many = "\n".join(["ls -la"] * 100)
    assert desk.bash(f"{many}\nrm x", "allow bash ls -la", "deny bash rm *").action == "deny"
    assert desk.bash(f"{many}\necho > secrets/a", "allow bash", "deny fs.write secrets/**").action == "deny"


def test_a_forbidden_command_is_found_behind_nested_runners(desk: AuthorizerFixture) -> None:
    for command in (
        "nice timeout 5 sh -c \"sh -c 'rm x'\"",
        "xargs -n 1 sudo -u root env -i A=b nice rm x",
        "find . -exec sh -c 'timeout 3 rm x' ';'",
        "uv run --with a xargs rm x",
    ):
        assert desk.bash(command, "allow bash", "deny bash rm *").action == "deny", command


@pytest.mark.parametrize(
    "unit", ["-eyJaaaaaaaaaa", ".eyJaaaaaaaaaa", "-SG.aaaaaaaaaaaaaaaaaa", "-----BEGIN A A A ", "sk-", "gh", "\\u0000"]
)
def test_the_key_search_finishes_on_a_long_text(unit: str) -> None:
    assert find_known_key_kind(unit * (512 * 1024 // len(unit))) is None


def test_a_key_is_found_in_the_middle_of_a_long_text() -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
    for before in ("", "x-", "Bearer ", '"'):
        assert find_known_key_kind("a" * 100_000 + " " + before + token + " " + "b" * 100_000) == "a JSON web token"
    assert find_known_key_kind("xAKIA" + "Q3EGRZ7WXKD5BTLM") is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "for x in a; do ls $x;" + "\n" * 60_000 + "done",
        "for x in a b; do" + "\r\n" * 30_000 + "ls $x; done",
        'x=a; ls "$x' + "\n" * 60_000 + '"',
        "x=a\n'" + "\n" * 60_000 + "'\nls $x",
        "ls " + "a=b;" * 15_000,
        "a=b\n" * 15_000 + "ls $a",
        "for a in b; do ls $a; done;" * 2_000,
    ],
    ids=lambda text: repr(text[:24]),
)
def test_the_uses_of_a_variable_are_found_in_one_pass(text: str) -> None:
    """Also if something else in the text is long. Each took minutes."""
    parse_script(text)
