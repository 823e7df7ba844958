"""todo and question: what a session keeps, and what a person is asked."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tools.desk import Desk, Someone, refused

from handrail.contract.services.tool_runtime import QuestionOption, UserQuestion


@pytest.mark.proves("A-06")
async def test_a_list_is_kept_for_the_session_and_read_back(desk: Desk) -> None:
    assert await desk.call("todo") == {"todos": []}
    put = await desk.call(
        "todo", todos=[{"content": "look", "status": "completed"}, {"content": "mend", "status": "pending"}]
    )
    assert put == {
        "todos": [
            {"id": "1", "content": "look", "status": "completed"},
            {"id": "2", "content": "mend", "status": "pending"},
        ]
    }
    assert await desk.call("todo") == put
    assert await desk.call("todo", todos=[]) == {"todos": []}
    assert await desk.call("todo") == {"todos": []}


@pytest.mark.proves("A-06")
async def test_each_session_has_a_separate_todo_list(desk: Desk) -> None:
    await desk.call("todo", todos=[{"content": "mine", "status": "pending"}])
    desk.around.session_id = "session-2"
    assert await desk.call("todo") == {"todos": []}


async def test_given_ids_are_kept_and_missing_ones_do_not_clash(desk: Desk) -> None:
    todos = [{"content": c, "status": "pending"} for c in "abc"]
    put = await desk.call("todo", todos=[{**todos[0]}, {**todos[1], "id": "1"}, {**todos[2], "id": "x"}])
    assert [todo["id"] for todo in put["todos"]] == ["2", "1", "x"]
    twice = [{**todo, "id": "same"} for todo in todos]
    await refused(desk.call("todo", todos=twice), "invalid_input", "'same'", "3 tasks")


@pytest.mark.proves("A-05")
async def test_questions_reach_a_person_whole_and_their_answers_come_back(desk: Desk) -> None:
    someone = Someone([["blue", "red"], ["42"]])
    desk.around.approval_handler = someone
    answer = await desk.call(
        "question",
        questions=[
            {
                "question": "Which?",
                "header": "Colour",
                "options": [{"label": "blue"}, {"label": "red", "description": "warm"}],
                "multi_select": True,
            },
            {"question": "How many?"},
        ],
    )
    assert answer == {"answers": [["blue", "red"], ["42"]]}
    assert someone.asked == [
        UserQuestion("Which?", "Colour", (QuestionOption("blue"), QuestionOption("red", "warm")), True),
        UserQuestion("How many?"),
    ]


@pytest.mark.proves("A-05", "P-10")
async def test_without_a_person_the_answer_is_one_fixed_error(desk: Desk) -> None:
    error = await refused(desk.call("question", questions=[{"question": "?"}]), "unavailable")
    assert str(error) == "question is unavailable: no user is attached to this session"


@pytest.mark.parametrize("answers", [[], [["a"]], [["a"], ["b"], ["c"]]])
async def test_answers_that_do_not_fit_the_questions_are_not_guessed_at(desk: Desk, answers: list[Any]) -> None:
    desk.around.approval_handler = Someone(answers)
    await refused(desk.call("question", questions=[{"question": "1"}, {"question": "2"}]), "backend")
