"""The scripted model: it plays its file, inserts values from results, and stops at a mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import AssistantMessage, CallResultsMessage
from handrail.agent.providers import open_model
from handrail.agent.providers.scripted_model import ModelScript, ScriptedModel, read_model_script
from handrail.contract.calls_and_results import ProposedCall, Result
from handrail.contract.errors import LoadError


def model_of(*turns: dict[str, Any]) -> ScriptedModel:
    return ScriptedModel(ModelScript.model_validate({"turns": turns}))


def answering(**by_name: Result) -> RecordingSession:
    def answer(call: ProposedCall, arguments: dict[str, Any]) -> Result:
        return by_name.get(call.name) or Result.output(arguments)

    return RecordingSession(answer)


@pytest.mark.proves("A-02")
async def test_the_agent_loop_runs_a_toml_script(tmp_path: Path) -> None:
    path = tmp_path / "tour.toml"
    path.write_text(
        """
version = 1
[[turns]]
text = "Let me look."
expect = { tools = ["echo", "mail.send"], absent = ["bash"], task = "^fix", prompt = "tools" }
[[turns.calls]]
name = "echo"
arguments = { n = 3 }
label = "look"
[[turns]]
text = "It said ${look.data.n}."
[turns.expect]
results = 1
[[turns.expect.result]]
call = "look"
path = "data.n"
equals = 3
[[turns.expect.result]]
matches = '"n": ?3'
[[turns.expect.result]]
path = "metadata"
exists = false
"""
    )
    model = open_model(f"script:{path}")
    assert isinstance(model, ScriptedModel)
    outcome = await Agent(RecordingSession(), model).complete("fix it")
    assert outcome.detail == "" and outcome.text == "It said 3."
    assert model.remaining_turns == 0


async def test_later_arguments_can_use_result_values_with_their_types() -> None:
    session = answering(
        bash=Result.output({"head": "…"}, truncated=True, output_path="/out/1"), echo=Result.output({"n": 4})
    )
    model = model_of(
        {"calls": [{"name": "bash", "label": "tests"}, {"name": "echo"}]},
        {
            "calls": [
                {
                    "name": "read",
                    "arguments": {
                        "path": "${tests.metadata.output_path}",
                        "offset": "${1.data.n}",
                        "note": "at ${1.data.n}, not $${here}",
                        "list": ["${0.data.head}"],
                    },
                }
            ]
        },
        {"text": "ok ${tests.metadata.truncated}"},
    )
    outcome = await Agent(session, model).complete("go")
    assert outcome.text == "ok true", outcome.detail
    assert json.loads(str(session.calls[2].arguments)) == {
        "path": "/out/1",
        "offset": 4,
        "note": "at 4, not ${here}",
        "list": ["…"],
    }


@pytest.mark.parametrize(
    ("expect", "said"),
    [
        ({"tools": ["bash"]}, "expected the tools bash to be offered; the request has echo, mail__send"),
        ({"absent": ["mail.send"]}, "expected the tools mail.send not to be offered"),
        ({"task": "^stop"}, "expected the task to match '^stop'; it is \"go\""),
        ({"prompt": "no such words"}, "expected the system text to match 'no such words'"),
        ({"results": 2}, "expected 2 results of the previous turn; the request has 1"),
        ({"result": [{"path": "data.n", "equals": 2}]}, "expected 0.data.n to be 2; it is 1"),
        ({"result": [{"path": "data.n", "equals": True}]}, "expected 0.data.n to be true; it is 1"),
        ({"result": [{"path": "data.n", "equals": "1"}]}, 'expected 0.data.n to be "1"; it is 1'),
        ({"result": [{"contains": "xyz"}]}, "expected 0 to contain 'xyz'"),
        ({"result": [{"path": "type", "matches": "^err"}]}, "expected 0.type to match '^err'; it is \"output\""),
        ({"result": [{"path": "data.m", "contains": "x"}]}, "expected a value at 0.data.m"),
        ({"result": [{"path": "data.m", "exists": True}]}, "expected 0.data.m to exist"),
        ({"result": [{"path": "data.n", "exists": False}]}, "expected 0.data.n not to exist"),
        ({"result": [{"call": 1, "exists": True}]}, "result 1 does not exist: the previous turn had 1"),
    ],
)
async def test_a_failed_expectation_ends_the_run_and_the_detail_shows_the_difference(
    expect: dict[str, Any], said: str
) -> None:
    model = model_of({"calls": [{"name": "echo", "arguments": {"n": 1}}]}, {"text": "ok", "expect": expect})
    outcome = await Agent(RecordingSession(), model).complete("go")
    assert outcome.status == "failed"
    assert "turn 2" in outcome.detail and said in outcome.detail
    assert model.remaining_turns == 1


async def test_all_failed_expectations_of_a_turn_are_reported_together() -> None:
    model = model_of({"text": "ok", "expect": {"tools": ["bash"], "task": "^stop", "results": 1}})
    outcome = await Agent(RecordingSession(), model).complete("go")
    assert outcome.detail.count("expected") == 3


async def test_a_run_that_needs_more_turns_than_the_script_has_fails_with_that_reason() -> None:
    outcome = await Agent(RecordingSession(), model_of({"calls": [{"name": "echo"}]})).complete("go")
    assert outcome.status == "failed" and "has 1 turns, but the run sent another request" in outcome.detail


async def test_a_reference_to_a_missing_result_field_ends_the_run_and_names_the_field() -> None:
    model = model_of({"calls": [{"name": "echo"}]}, {"text": "${0.data.path}"})
    outcome = await Agent(RecordingSession(), model).complete("go")
    assert "${0.data.path} is not in the result" in outcome.detail


async def test_a_script_can_send_malformed_replies() -> None:
    session = RecordingSession()
    model = model_of(
        {"calls": [{"name": "echo", "raw": '{"n": '}, {"name": "", "id": "x"}, {"name": "echo", "id": "x"}]},
        {"calls": [{"name": "echo"}, {"name": "mail.send"}], "cut": True},
        {"text": "half of an answer", "finish": "length", "usage": {"input": 3, "output": 2}},
    )
    agent = Agent(session, model)
    outcome = await agent.complete("go")
    assert outcome.status == "length", outcome.detail
    assert [call.name for call in session.ran] == ["echo", "echo", "echo"]
    assert [bool(call.problem) for call in session.calls] == [False, True, False, False, True]
    parts = [m for m in agent.messages if isinstance(m, (AssistantMessage, CallResultsMessage))]
    answered = [len(m.results) if isinstance(m, CallResultsMessage) else len(m.calls) for m in parts]
    assert answered == [3, 3, 2, 2, 0]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("turns = 1", ["turns: "]),
        ("[[turns]]\ntxt = 1\n[[turns]]\ncalls = [{}]", ["turns[0].txt: ", "turns[1].calls[0].name: "]),
        ("version = 2\nturns = [{}]", ["version: "]),
        ("turns = []", ["has no turns"]),
        ('[[turns]]\ntext = "${later.data}"', ["refers to 'later', which is not a label of an earlier call"]),
        ("[[turns]]\ncalls = [{name='a', arguments={b=1}, raw='{}'}]", ["Both `arguments` and `raw`"]),
        ("[[turns]]\nexpect = {result = [{path = 'x'}]}", ["Set exactly one of"]),
        ("[[turns]]\nexpect = {task = '('}", ["The regular expression is invalid: '('"]),
        (
            "[[turns]]\ncalls = [{name='a', label='x'}]\n[[turns]]\ncalls = [{name='a', label='x'}]",
            ["the label 'x' again"],
        ),
        ("turns = [", ["not a valid script"]),
    ],
)
def test_a_faulty_script_is_refused_with_all_its_faults(tmp_path: Path, text: str, faults: list[str]) -> None:
    path = tmp_path / "script.toml"
    path.write_text(text)
    with pytest.raises(LoadError) as error:
        read_model_script(path)
    for fault in faults:
        assert fault in str(error.value)
    assert len(error.value.diagnostics) == len(faults)


def test_a_json_script_is_read_and_the_error_for_a_missing_one_names_it(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"turns": [{"text": "ok"}]}')
    assert read_model_script(path).turns[0].text == "ok"
    with pytest.raises(LoadError, match="nowhere"):
        read_model_script(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[[turn]]\ntext = 'a'", ["turns: is missing", "turn: unknown key; did you mean 'turns'?"]),
        ("[[turns]]\ntext = 3", ["turns[0].text: is 3; expected a valid string"]),
        ("turns = []\nat = 2020-01-01", ["at: Extra inputs are not permitted"]),
    ],
)
def test_the_load_error_lists_each_fault_of_a_script(tmp_path: Path, text: str, faults: list[str]) -> None:
    path = tmp_path / "script.toml"
    path.write_text(text)
    with pytest.raises(LoadError) as error:
        ScriptedModel.from_file(path)
    assert [str(fault).removeprefix(f"{path}: ") for fault in error.value.diagnostics] == faults
