"""The generated references contain everything in the code: commands, settings, kinds, states and keys."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

import pytest
from tests import cli_reference, kind_reference, setting_reference
from tests.kind_reference import (
    CALL_STATES,
    ERRORS,
    EVENT_KINDS,
    METADATA,
    RECORD_KINDS,
    SESSION_STATES,
    Happening,
    keys_of,
)
from tests.written_keys import event_keys, metadata_keys, record_keys

from handrail.agent.run_events import ConversationCompacted
from handrail.config.layers import format_environment_variable_name
from handrail.config.operator_settings import OPERATOR_ONLY, Settings, list_setting_keys
from handrail.contract.calls_and_results import EventKind
from handrail.contract.errors import ErrorKind
from handrail.record.commit_log import RecordKind
from handrail.record.log_reader import CallState
from handrail.session.transcript_search import SessionState


@pytest.mark.parametrize(
    ("names", "meanings"),
    [
        (get_args(ErrorKind), ERRORS),
        (get_args(EventKind), EVENT_KINDS),
        (get_args(RecordKind), RECORD_KINDS),
        (get_args(CallState), CALL_STATES),
        (get_args(SessionState), SESSION_STATES),
    ],
    ids=["errors", "events", "records", "call states", "session states"],
)
def test_every_kind_and_state_is_described_and_every_description_names_one(
    names: tuple[str, ...], meanings: dict[str, object]
) -> None:
    assert set(meanings) == set(names)


def test_the_described_metadata_keys_are_the_keys_set_by_the_code() -> None:
    assert {key for keys in METADATA.values() for key in keys} == metadata_keys()


@pytest.mark.parametrize(("kind", "happening"), [*RECORD_KINDS.items()])
def test_every_key_of_a_record_is_described(kind: str, happening: Happening) -> None:
    assert not record_keys(kind) - set(keys_of(happening))


@pytest.mark.parametrize(("kind", "happening"), [*EVENT_KINDS.items()])
def test_every_key_of_an_event_is_described(kind: str, happening: Happening) -> None:
    assert not event_keys(kind) - set(keys_of(happening))


def test_the_described_keys_of_a_compaction_record_are_its_fields() -> None:
    assert list(keys_of(RECORD_KINDS["compacted"])) == [field.name for field in fields(ConversationCompacted)]


def test_the_key_scan_finds_known_keys_in_the_code() -> None:
    assert {"duration_ms", "truncated", "error_bytes", "stopped_by", "exit_code"} <= metadata_keys()
    assert {"tool", "topic", "side_effect"} <= record_keys("proposed")
    assert {"step", "kind", "text"} <= event_keys("rejected")


def test_the_api_pages_are_up_to_date() -> None:
    pages = {
        cli_reference.PAGE: cli_reference.render(),
        setting_reference.PAGE: setting_reference.render(),
        **kind_reference.pages(),
    }
    old = [page.name for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    assert not old, f"run: make docs ({', '.join(old)})"


def test_every_command_and_option_is_in_the_command_reference() -> None:
    text = cli_reference.render()
    for name, command, _ in cli_reference.commands():
        part = text.partition(f"\n## `{name}`\n")[2].partition("\n## ")[0]
        assert part, name
        for option in cli_reference.options(command):
            assert any(f"`{one}`" in part for one in option.opts), f"{name} {option.opts}"
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {0, 1, 2, 3, 4, 5, 130}


def test_every_setting_has_a_row_and_an_environment_variable_in_the_reference() -> None:
    text, found = setting_reference.render(), setting_reference.settings()
    assert set(found) == set(Settings.model_fields)
    for key in list_setting_keys():
        assert f"`{key}" in text and f"`{format_environment_variable_name(key)}`" in text
    for name in Settings.model_fields:
        part = text.partition(f"\n## `{name}` ")[2].partition("\n## ")[0]
        assert ("Workspace file: **no**" in part) == (name in OPERATOR_ONLY)
    assert all(one.meaning and one.type for rows in found.values() for one in rows)
