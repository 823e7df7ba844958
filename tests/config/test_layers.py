"""Defaults, files, variables and flags: precedence, origin, and all faults in one report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.config.places import Layers

from handrail.config import Settings, check_outside_workspace, load_configuration
from handrail.config.layers import OTHER_VARIABLES, format_environment_variable_name
from handrail.config.mcp_settings import McpServeSettings
from handrail.config.operator_settings import list_setting_keys
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.tool.operator_tool_settings import ToolSettings

pytestmark = pytest.mark.proves("F-11")


def test_each_layer_overrides_the_one_before_and_every_value_keeps_its_origin(layers: Layers) -> None:
    layers.config.write_text(
        "[limits]\nlock_wait_ms = 1\ngrace_ms = 1\n[approvals]\nrequest_days = 1\ngrant_hours = 1\n"
    )
    layers.own.write_text("[limits]\ngrace_ms = 2\n[approvals]\nrequest_days = 2\ngrant_hours = 2\n")
    layers.trust()
    variables = {"HANDRAIL_APPROVALS__REQUEST_DAYS": "3", "HANDRAIL_APPROVALS__GRANT_HOURS": "3"}
    config = layers.load(variables, ["approvals.grant_hours=4"])
    limits, approvals = config.settings.limits, config.settings.approvals
    assert (config.settings.agent, limits.lock_wait_ms, limits.grace_ms) == ("default", 1, 2)
    assert (approvals.request_days, approvals.grant_hours) == (3, 4)
    in_force = {value.key: str(value.origin) for value in config.values if not value.inactive_reason}
    tables = (
        "env.",
        "sandbox.",
        "state.",
        "catalog.",
        "search.",
        "undo.",
        "mcp.",
        "network.",
        "limits.tool_session",
        "limits.open_tool",
        "limits.job",
        "limits.output",
    )
    untouched = {
        "agent",
        "ceiling",
        "mode",
        "language_servers",
        "secrets",
        "tools",
        *(key for key in list_setting_keys() if key.startswith(tables)),
    }
    assert in_force == {
        **dict.fromkeys(untouched, "default"),
        "limits.lock_wait_ms": f"{layers.config}:2",
        "limits.grace_ms": f"{layers.own}:2",
        "approvals.request_days": "HANDRAIL_APPROVALS__REQUEST_DAYS",
        "approvals.grant_hours": "--set approvals.grant_hours",
    }
    beaten = [value for value in config.values if value.inactive_reason]
    assert len(beaten) == 6 and all(value.inactive_reason.endswith("overrides it") for value in beaten)


def test_rules_of_all_layers_apply_together_and_each_has_its_source_and_scope(layers: Layers) -> None:
    layers.config.write_text('rules = [\n  "allow bash git status",\n\n  "deny bash rm *",\n]\n')
    layers.own.write_text('rules = ["ask write"]\n')
    config = layers.load(
        {"HANDRAIL_RULES": "allow read\n\n  deny write\n"}, ['rules=["allow edit"]', 'rules=["ask glob"]']
    )
    assert [(rule.text, rule.scope, rule.source) for rule in config.rules] == [
        ("allow bash git status", "project", f"{layers.config}:2"),
        ("deny bash rm *", "project", f"{layers.config}:4"),
        ("ask write", "project", f"{layers.own}:1"),
        ("allow read", "session", "HANDRAIL_RULES"),
        ("deny write", "session", "HANDRAIL_RULES"),
        ("allow edit", "session", "--set rules"),
        ("ask glob", "session", "--set rules"),
    ]
    assert config.settings.rules == tuple(rule.text for rule in config.rules)
    assert config.project_rules == config.rules[:3] and config.process_wide_rules == config.rules[3:]
    assert config.client_registration_rules == (*config.rules[:2], *config.rules[3:])


def test_the_faults_of_all_layers_are_reported_together_with_places_and_near_names(layers: Layers) -> None:
    layers.config.write_text('rulez = []\n[limits]\nlock_wait_ms = "long"\ngrace = 5\n')
    layers.own.write_text('rules = ["deny read",\n"permit bash"]\n[aprovals]\n[[watchdogs]]\ncommand = ["x"]\n')
    environment = {
        "HANDRAIL_RULE": "allow read",
        "HANDRAIL_LIMITS__GRACE_MS": "0",
        "HANDRAIL_CEILING": '{"fs": {"raed": []}}',
    }
    faults = layers.faults(environment, ["limits.lock_wait=3", "agent=../../etc", 'ceiling={fs={read=["../x"]}}'])
    expected = [
        (f"{layers.config}:1: rulez:", "did you mean 'rules'?"),
        (f"{layers.config}:3: limits.lock_wait_ms:", "'long'; expected a valid integer"),
        (f"{layers.config}:4: limits.grace:", "did you mean 'grace_ms'?"),
        (f"{layers.own}:3: aprovals:", "did you mean 'approvals'?"),
        (f"{layers.own}:4: watchdogs:", "outside the sandbox"),
        (f"{layers.own}:2: rules[1]:", "allow, ask or deny"),
        ("HANDRAIL_RULE:", "did you mean HANDRAIL_RULES?"),
        ("HANDRAIL_LIMITS__GRACE_MS: limits.grace_ms:", "greater than 0"),
        ("HANDRAIL_CEILING: ceiling.fs.raed:", "did you mean 'read'?"),
        ("--set limits.lock_wait:", "did you mean 'limits.lock_wait_ms'?"),
        ("--set agent: agent:", "../../etc"),
    ]
    for place, text in expected:
        assert [fault for fault in faults if fault.startswith(place) and text in fault], (place, faults)
    assert len(faults) == len(expected)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rules = [\n", "is not TOML"),
        ("agent = 1979-05-27\n", "agent: is a date or a time"),
        ("[limits]\ngrace_ms = true\n", "limits.grace_ms: is true; expected a valid integer"),
        ("[limits]\ngrace_ms = 1.0\n", "limits.grace_ms: is 1.0; expected"),
        ("[limits]\ngrace_ms = nan\n", "limits.grace_ms: is nan"),
        ("[limits]\ngrace_ms = 99999999999999999999999\n", "expected less than or equal to 3600000"),
        ("[limits]\ngrace_ms = " + "9" * 5000, "is not TOML"),
        ('rules = "allow read"\n', "rules: is 'allow read'; expected"),
        ("rules = [1]\n", "rules[0]: is 1; expected a valid string"),
        ("limits = []\n", "limits: is []; expected"),
        ('[ceiling.fs]\nread = ["{somewhere}"]\n', "ceiling.fs.read[0]: unknown variable {somewhere}"),
        ("[[watchdogs]]\n", "expected either use"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("#" * 300_000, "the limit is 256 KiB"),
    ],
)
def test_a_fault_of_a_configuration_file_names_the_file_and_the_problem(layers: Layers, text: str, told: str) -> None:
    layers.config.write_text(text)
    (fault,) = layers.faults()
    assert fault.startswith(str(layers.config)) and told.lower() in fault.lower()


def test_a_configuration_path_that_is_not_a_regular_file_is_a_fault(layers: Layers) -> None:
    layers.config.unlink()
    assert "the file does not exist" in layers.faults()[0]
    os.mkfifo(layers.config)
    assert "is not a regular file" in layers.faults()[0]
    layers.config.unlink()
    layers.config.mkdir()
    assert "is not a regular file" in layers.faults()[0]
    with pytest.raises(LoadError, match="not a regular file"):
        load_configuration("/dev/zero", environment={})
    layers.config.rmdir()
    layers.config.write_bytes(b"\xff\xff")
    assert "is not TOML" in layers.faults()[0]


def test_a_configuration_file_may_be_a_symbolic_link(layers: Layers) -> None:
    real = layers.folder / "dotfiles.toml"
    layers.config.rename(real)
    real.write_text('agent = "reviewer"\n')
    layers.config.symlink_to(real)
    assert layers.load().settings.agent == "reviewer"


def test_every_value_is_the_default_without_any_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = load_configuration(None, environment={})
    assert config.settings == Settings() and config.file is None and config.folder == tmp_path / "handrail"
    assert {str(value.origin) for value in config.values} == {"default"}


def test_every_setting_has_an_environment_variable_and_a_flag(layers: Layers) -> None:
    given = {
        "agent": ("reviewer", "reviewer"),
        "mode": ("plan", "plan"),
        "rules": ('["allow read"]', ("allow read",)),
        "watchdogs": (
            '[{"command": ["w"]}]',
            [{"use": None, "action": "ask", "failures": 5, "command": ["w"], "timeout_ms": 5000}],
        ),
        "ceiling": ('{fs = {read = ["src"]}}', ["src"]),
        "sandbox.provider": ("podman", "podman"),
        "sandbox.unix_sockets": ("true", True),
        "env.pass": ('["JAVA_HOME"]', ["JAVA_HOME"]),
        "sandbox.without": ('["landlock"]', ["landlock"]),
        "sandbox.unconfined": ('["bash"]', ["bash"]),
        "state.store": ("vault", "vault"),
        "undo.enabled": ("false", False),
        "search.embedder": ("endpoint", "endpoint"),
        "search.url": ("https://vectors.example/v1", "https://vectors.example/v1"),
        "search.model": ("small", "small"),
        "search.secret": ("KEY", "KEY"),
        "catalog.categories": ('{email = "Letters."}', {"email": "Letters."}),
        "mcp.files": ('["~/mcp.json"]', ["~/mcp.json"]),
        "mcp.servers": ("{}", dict[str, str]()),
        "network.proxy": ("http://proxy.example:8080", "http://proxy.example:8080"),
        "network.no_proxy": ('["intranet.example"]', ["intranet.example"]),
        "network.ca_file": ("~/ca.pem", "~/ca.pem"),
        "mcp.proxy": ("http://proxy.example:8080", "http://proxy.example:8080"),
        "mcp.no_proxy": ('["intranet.example"]', ["intranet.example"]),
        "mcp.ca_file": ("~/ca.pem", "~/ca.pem"),
        "mcp.serve": (
            '{tokens = {a = {secret = "A"}}, scopes = ["tools"]}',
            {**McpServeSettings().model_dump(), "tokens": {"a": {"secret": "A", "prefix": ""}}, "scopes": ["tools"]},
        ),
        "tools": (
            '{"mail.send" = {config = {password = {secret = "MAIL"}}}}',
            {"mail.send": {**ToolSettings().model_dump(), "config": {"password": {"secret": "MAIL"}}}},
        ),
        "language_servers": (
            '{rust = {command = ["ra"]}}',
            {"rust": {"command": ["ra"], "files": [], "folders": [], "enabled": True}},
        ),
        "secrets": ('{A = {env = "B"}}', {"A": {"env": "B", "file": None, "command": None}}),
    }
    for key in list_setting_keys():
        text, expected = given.get(key, ("7", 7))
        for config in (
            layers.load({format_environment_variable_name(key): text}),
            layers.load(flags=[f"{key}={text}"]),
        ):
            node = config.settings.model_dump(mode="json")
            for part in key.split("."):
                node = node[part]
            if key == "ceiling":
                node = node["fs"]["read"]
            assert node == (list(expected) if isinstance(expected, tuple) else expected), key
            of = 'tools."mail.send".config.password' if key == "tools" else key
            (value,) = [one for one in config.values if one.key == of and not one.inactive_reason]
            assert str(value.origin) in (format_environment_variable_name(key), f"--set {key}")


def test_variables_for_tools_and_empty_variables_are_not_settings(
    layers: Layers,
) -> None:
    environment = dict.fromkeys(OTHER_VARIABLES, "x") | {
        "HANDRAIL_AGENT": "",
        "HANDRAILS": "x",
        "handrail_rules": "x",
        "PATH": "/",
    }
    assert layers.load(environment).settings == Settings()


def test_a_value_from_a_variable_or_flag_cannot_set_another_key(layers: Layers) -> None:
    (fault,) = layers.faults({"HANDRAIL_LIMITS__GRACE_MS": '1\nagent = "x"'})
    assert "expected a valid integer" in fault
    assert layers.load(flags=["agent=true"]).settings.agent == "true"


@pytest.mark.parametrize("text", ["agent", "=x", "", "limits.grace_ms"])
def test_a_flag_without_key_or_value_is_a_usage_error(layers: Layers, text: str) -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        layers.load(flags=[text])


def test_the_operators_ceiling_overrides_the_ceiling_of_a_trusted_workspace(
    layers: Layers,
) -> None:
    layers.own.write_text('ceiling = { fs = { read = ["{workspace}"], write = ["{workspace}"] } }\n')
    layers.trust()
    alone = layers.load().settings.ceiling
    assert alone is not None and alone.fs.write == ("{workspace}",)
    layers.config.write_text('ceiling = { fs = { read = ["src"] } }\n')
    config = layers.load()
    assert config.settings.ceiling is not None and config.settings.ceiling.fs.write == ()
    (refused,) = [value for value in config.values if value.inactive_reason]
    assert refused.origin.kind == "workspace" and "a workspace file cannot change it" in refused.inactive_reason
    wider = layers.load({"HANDRAIL_CEILING": json.dumps({"fs": {"read": ["docs"]}})}).settings.ceiling
    assert wider is not None and wider.fs.read == ("docs",)


def test_parent_segments_of_a_configuration_path_are_resolved_by_name_and_not_through_links(tmp_path: Path) -> None:
    for name in ("ws", "mine", "planted/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine" / "handrail.toml").write_text('mode = "plan"\n')
    (tmp_path / "planted" / "mine").mkdir()
    (tmp_path / "planted" / "mine" / "handrail.toml").write_text('mode = "auto"\n')
    (tmp_path / "ws" / "sub").symlink_to(tmp_path / "planted" / "deep")
    found = load_configuration(tmp_path / "ws" / "sub" / ".." / ".." / "mine" / "handrail.toml", environment={})
    assert found.settings.mode == "plan" and found.file == tmp_path / "mine" / "handrail.toml"
    check_outside_workspace(found, tmp_path / "ws")


@pytest.mark.proves("F-11", "O-01")
def test_each_tool_setting_is_overridden_separately_and_keeps_its_origin(layers: Layers) -> None:
    layers.config.write_text(
        '[tools.glob]\nenabled = false\nmax_entries = 5\n[tools."mail.send".config]\nsender = "ann"\nhost = "a"\n'
    )
    environment = {"HANDRAIL_TOOLS": '{"mail.send" = {config = {host = "b"}}}'}
    flags = ["tools.glob.max_entries=9", 'tools."mail.send".config.port=25', "tools.'mail.send'.timeout_ms=900"]
    config = layers.load(environment, flags)
    tools = config.settings.tools
    assert (tools["glob"].enabled, tools["glob"].max_entries) == (False, 9)
    assert tools["mail.send"].config == {"sender": "ann", "host": "b", "port": "25"}
    assert tools["mail.send"].timeout_ms == 900
    places = {
        one.key: str(one.origin) for one in config.values if one.key.startswith("tools") and not one.inactive_reason
    }
    assert places == {
        "tools.glob.enabled": f"{layers.config}:2",
        "tools.glob.max_entries": "--set tools.glob.max_entries",
        'tools."mail.send".config.sender': f"{layers.config}:5",
        'tools."mail.send".config.host': "HANDRAIL_TOOLS",
        'tools."mail.send".config.port': '--set tools."mail.send".config.port',
        'tools."mail.send".timeout_ms': '--set tools."mail.send".timeout_ms',
    }
    overridden = [one for one in config.values if one.key == "tools.glob.max_entries" and one.inactive_reason]
    assert [(one.value, str(one.origin)) for one in overridden] == [(5, f"{layers.config}:3")]


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("tools.glob.max_entries=0", "greater than or equal to 1"),
        ("tools.glob.max_entry=5", "did you mean 'max_entries'"),
        ("tools.mail.send.timeout_ms=500", "in quotes"),
        ("tools.glob=5", "unknown key"),
        ('tools."glob.max_entries=5', "unknown key"),
        ("tools..x=5", "unknown key"),
        ('tools."a"=1\nx."b"=5', "unknown key"),
    ],
)
def test_a_flag_for_an_unknown_or_invalid_tool_setting_is_refused(layers: Layers, flag: str, problem: str) -> None:
    faults = layers.faults(flags=[flag])
    assert len(faults) == 1 and problem in faults[0], faults


def test_flags_for_the_tools_table_and_for_one_tool_setting_exclude_each_other(layers: Layers) -> None:
    (fault,) = layers.faults(flags=["tools=5", "tools.glob.max_entries=5"])[:1]
    assert "is not a table" in fault or "also set to a value" in fault
