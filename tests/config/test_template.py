"""The file that ``handrail init`` writes, and the shipped schema."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any, Literal

import jsonschema_rs
import pytest
from tests.config.places import Layers

from handrail.config import Settings, WatchdogSettings
from handrail.config.operator_settings import OPERATOR_ONLY, list_setting_keys
from handrail.config.template import SCHEMA_FILE, build_config_json_schema, render_config_template

pytestmark = pytest.mark.proves("F-11")
BOTH: tuple[Literal["configuration", "workspace"], ...] = ("configuration", "workspace")


@pytest.mark.parametrize("kind", BOTH)
def test_a_template_loads_without_faults_and_changes_no_setting(
    layers: Layers, kind: Literal["configuration", "workspace"]
) -> None:
    (layers.config if kind == "configuration" else layers.own).write_text(render_config_template(kind))
    config = layers.load()
    assert config.settings == Settings() and config.untrusted_workspace_warning is None
    assert tomllib.loads(render_config_template(kind)) == {}


@pytest.mark.parametrize("kind", BOTH)
def test_the_commented_settings_of_a_template_are_the_defaults(
    layers: Layers, kind: Literal["configuration", "workspace"]
) -> None:
    text = re.sub(r"^# (\[\w+\]|\w+ = .*)$", r"\1", render_config_template(kind), flags=re.MULTILINE)
    (layers.config if kind == "configuration" else layers.own).write_text(text)
    if kind == "workspace":
        layers.trust()
    config = layers.load()
    assert config.settings == Settings()
    given = {value.key for value in config.values if value.origin.kind == kind}
    left_out = {"rules", "ceiling", "watchdogs"}
    if kind == "workspace":
        left_out |= {key for key in list_setting_keys() if key.partition(".")[0] in OPERATOR_ONLY}
    assert given == set(list_setting_keys()) - left_out


def test_the_examples_of_the_template_are_valid_and_each_key_is_explained(layers: Layers) -> None:
    text = render_config_template("configuration")
    layers.config.write_text("\n".join(re.findall(r"^#   (.*)$", text, re.MULTILINE)))
    settings = layers.load().settings
    assert settings.rules and settings.ceiling is not None and settings.watchdogs
    named = set(re.findall(r"^# +(?:\[*)(\w+)(?: =|\])", text, re.MULTILINE))
    assert {part for key in list_setting_keys() for part in key.split(".")} | set(
        WatchdogSettings.model_fields
    ) <= named
    descriptions = [field.description for field in Settings.model_fields.values()]
    flat = " ".join(text.replace("# ", "").split())
    assert all(description and description in flat for description in descriptions)


def test_the_shipped_config_schema_is_the_one_generated_from_the_settings() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == build_config_json_schema(), (
        "run: handrail config --schema > src/handrail/handrail.schema.json"
    )


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        ({}, True),
        ({"rules": ["allow read"], "limits": {"grace_ms": 5}, "watchdogs": [{"command": ["w"]}]}, True),
        ({"rulez": []}, False),
        ({"limits": {"grace_ms": 0}}, False),
        ({"agent": "../x"}, False),
    ],
)
def test_the_config_schema_accepts_valid_settings_and_rejects_invalid_ones(data: dict[str, Any], fits: bool) -> None:
    assert jsonschema_rs.validator_for(build_config_json_schema()).is_valid(data) is fits
