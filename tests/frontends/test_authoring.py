"""``handrail new`` and ``handrail lint``: from a template to a checked tool."""

from __future__ import annotations

import json

import pytest
from tests.frontends.conftest import Here, Program

from handrail.authoring.tool_templates import render_tool_files, write_tool_files
from handrail.frontends.cli.command_group import run_command_line
from handrail.sandbox import tier_probe


@pytest.mark.proves("R-13", "K-12")
def test_a_new_tool_is_written_and_passes_the_check(
    handrail: Program, here: Here, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = handrail.config / "tools"
    line = ["new", "tool", "text.words", "--kind", "module", "--directory", str(folder)]
    assert run_command_line(line) == 0
    assert f"wrote {folder}/text_words.py" in capfd.readouterr().out
    (handrail.config / "handrail.toml").write_text("")
    checked = here("lint", "--config", str(handrail.config / "handrail.toml"), "--json", str(folder))
    assert (checked.code, json.loads(checked.out)) == (0, {"tools": ["text.words"], "findings": []})
    assert run_command_line(line) == 2
    assert "Nothing was written" in capfd.readouterr().err


@pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason="programs cannot be confined on this machine"
)
@pytest.mark.proves("R-15")
def test_a_build_shows_its_commands_and_files_and_a_failure_shows_its_reason(handrail: Program, here: Here) -> None:
    config, tools = handrail.config / "handrail.toml", handrail.config / "tools"
    write_tool_files(tools, render_tool_files("source", "text.words"))
    (tools / "test_text_words.py").unlink()
    config.write_text("")
    script = tools / "text_words" / "build.sh"
    script.write_text(script.read_text() + "printf 'made \\033[31m it'\n")
    bundle = handrail.config.parent / "bundle"
    done = here("build", "default", "--output", str(bundle), "--config", str(config), "--json")
    assert done.code == 0 and json.loads(done.out)["built"] == ["text.words"]
    lines = done.err.splitlines()
    assert lines[0] == "text.words: sh build.sh" and lines[-1].startswith("text.words: made ")
    assert "\033" not in done.err
    called = here(
        "call", "text.words", '{"text": "a b"}', "--config", f"{bundle}/handrail.toml", "--rule", "allow text.words"
    )
    assert called.code == 0 and called.out == "words: 2\n"
    script.write_text("echo 'no such header'; exit 1\n")
    failed = here("build", "default", "--output", f"{bundle}2", "--config", str(config))
    assert (
        failed.code == 5
        and "`sh build.sh` ended with exit code 1. Last line of its output: no such header" in failed.err
    )


@pytest.mark.proves("K-12")
def test_lint_without_a_path_checks_the_whole_configuration_including_unmatchable_rules(
    handrail: Program, here: Here
) -> None:
    config = handrail.config / "handrail.toml"
    tools = handrail.config / "tools"
    tools.mkdir(parents=True, mode=0o755)
    config.write_text("")
    agent = handrail.config / "agents" / "helper"
    agent.mkdir(parents=True, mode=0o755)
    (agent / "agent.toml").write_text('id = "helper"\nrules = ["deny bahs"]\n')
    (tools / "t.py").write_text('METADATA = {"description": "t"}\ndef execute(topic, params): ...\n')
    found = here("lint", "--config", str(config))
    assert found.code == 1
    assert "error" in found.out and "bahs" in found.out
    assert "warning" in found.out and "description: has 1 characters" in found.out
    (agent / "agent.toml").write_text('id = "helper"\n')
    assert here("lint", "--config", str(config)).code == 0
    assert here("lint", "--config", str(config), "--strict").code == 1


def test_lint_reports_rules_that_prevent_a_start_once_and_in_the_same_words(handrail: Program, here: Here) -> None:
    config = handrail.config / "handrail.toml"
    for name in ("helper", "other"):
        agent = handrail.config / "agents" / name
        agent.mkdir(parents=True, mode=0o755)
        (agent / "agent.toml").write_text(f'id = "{name}"\n')
    config.write_text('rules = ["allow t.nothere", "allow bash git status", "deny bahs"]\n')
    config.chmod(0o600)
    started = here("call", "todo", "{}", "--config", str(config))
    found = here("lint", "--config", str(config), "--json")
    assert (started.code, found.code) == (5, 1)
    told = [finding for finding in json.loads(found.out)["findings"] if finding["severity"] == "error"]
    assert len(told) == 2
    for finding in told:
        assert finding["source"].startswith(str(config))
        assert finding["text"] in started.err
    config.write_text('rules = ["allow bash git status"]\n')
    assert here("lint", "--config", str(config)).code == 0


@pytest.mark.proves("K-12", "K-03")
def test_lint_without_a_path_checks_the_settings_of_tools(handrail: Program, here: Here) -> None:
    config, tools = handrail.config / "handrail.toml", handrail.config / "tools"
    tools.mkdir(parents=True, mode=0o755)
    schema = '{"station": {"description": "Its number"}, "token": {"description": "Of the account", "secret": true}}'
    (tools / "weather.py").write_text(
        "import json\n"
        'METADATA = {"description": "Give the weather at the station.", "parameters": {}, "side_effect": "read", "locks": [],\n'
        f'            "config_schema": {schema.replace("true", "True")}}}\n\n'
        "def execute(topic, params, config=None): ...\n"
    )
    config.write_text("")
    missing = here("lint", "--config", str(config), "--json")
    (finding,) = [one for one in json.loads(missing.out)["findings"] if one["severity"] == "warning"]
    assert finding["tool"] == "weather" and 'add station = "…" under [tools."weather".config]' in finding["text"]
    assert 'add token = { secret = "…" }' in finding["text"]
    whole = '[secrets]\nT = { env = "T" }\n[tools.weather.config]\nstation = "7"\ntoken = { secret = "T" }\n'
    config.write_text(whole)
    assert json.loads(here("lint", "--config", str(config), "--json").out)["findings"] == []
    config.write_text(f"{whole}sation = '8'\n[tools.wether]\nmax_output = 2000\n")
    wrong = here("lint", "--config", str(config), "--json")
    assert wrong.code == 1
    (fault,) = [one for one in json.loads(wrong.out)["findings"] if one["severity"] == "error"]
    assert fault["source"] == f"{config}:6" and "unknown key; did you mean 'station'?" in fault["text"]
    config.write_text(f"{whole}[tools.wether]\nmax_output = 2000\n")
    (unknown,) = json.loads(here("lint", "--config", str(config), "--json").out)["findings"]
    assert (unknown["severity"], unknown["source"]) == ("warning", f"{config}:7") and "'wether'" in unknown["text"]
