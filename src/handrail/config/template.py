"""A commented ``handrail.toml`` that explains every setting and changes none, and the JSON schema of the file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from handrail.config.operator_settings import (
    FILE_NAME,
    OPERATOR_ONLY,
    Settings,
    WatchdogSettings,
    get_setting_table_models,
)

SCHEMA_FILE = Path(__file__).parent.parent / "handrail.schema.json"
"""The file in the package, whose content :func:`build_config_json_schema` returns."""

_HEADER_TEXTS = {
    "configuration": (
        "Handrail's configuration for this user. Every setting is optional: a setting that is "
        "missing or behind a '#' has its default. A workspace's own handrail.toml, HANDRAIL_* "
        "variables and command-line flags override it; the rules of all of them apply together. To "
        "see the settings in force and their origins, run: handrail config"
    ),
    "workspace": (
        "Handrail's configuration for this workspace. Every setting is optional. Rules that deny or "
        "ask always apply. Rules that allow, and every other setting, apply only for users who have "
        "reviewed and trusted exactly this content: handrail trust. No tool can write this file. To "
        "see the settings in force and their origins, run: handrail config"
    ),
}
_EXAMPLES = {
    "language_servers": (
        'language_servers = { rust = { command = ["rust-analyzer"], files = ["*.rs"], folders = ["~/.cargo/registry"] }, '
        "go = { enabled = false } }",
    ),
    "rules": ('rules = ["allow bash git status", "ask bash git push *", "deny fs.write secrets/**"]',),
    "ceiling": ('ceiling = { fs = { read = ["{workspace}"], write = ["src"] }, shell = [{ cmd = "git" }] }',),
    "secrets": (
        'secrets = { GITHUB_TOKEN = { env = "GITHUB_TOKEN" }, MAIL = { file = "~/.config/mail-password" }, '
        'DEPLOY = { command = ["pass", "show", "deploy"] } }',
    ),
    "tools": (
        'tools = { "mail.send" = { timeout_ms = 20000, config = { sender = "me@example.org", '
        'password = { secret = "MAIL" } } }, bash = { max_output = 65536 }, glob = { max_entries = 200 } }',
    ),
}


def render_config_template(kind: Literal["configuration", "workspace"]) -> str:
    """Return the text of a new configuration file."""
    lines = [*_comment_lines(_HEADER_TEXTS[kind]), ""]
    inner = get_setting_table_models()
    for key, field in Settings.model_fields.items():
        if key in OPERATOR_ONLY and kind == "workspace":
            continue
        lines += _comment_lines(field.description or "")
        if key in inner:
            lines.append(f"# [{key}]")
            for name, setting in inner[key].model_fields.items():
                lines += [*_comment_lines(setting.description or ""), f"# {name} = {_toml(setting.default)}"]
        elif key == "watchdogs":
            lines += ["#   [[watchdogs]]", *_watchdog_lines()]
        else:
            if field.default is not None:
                lines.append(f"# {key} = {_toml(field.default)}")
            lines += [f"#   {example}" for example in _EXAMPLES.get(key, ())]
        lines.append("")
    return "\n".join(lines)


def build_config_json_schema() -> dict[str, Any]:
    """Return the JSON schema of the file, for editors and checks."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Settings.model_json_schema(),
        "title": FILE_NAME,
    }


def _watchdog_lines() -> Iterator[str]:
    examples: dict[str, Any] = {"use": "repeats", "command": ["/usr/local/bin/my-watchdog", "--strict"]}
    for name, field in WatchdogSettings.model_fields.items():
        if name == "command":
            yield "#   [[watchdogs]]"
        yield f"#   # {field.description}"
        yield f"#   {name} = {_toml(examples.get(name, field.default))}"


def _comment_lines(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 110)]


def _toml(value: Any) -> str:
    """Return a value as TOML; numbers, strings, lists and empty values look the same as in JSON."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    return json.dumps(value, ensure_ascii=False)
