"""``todo`` and ``question``: stored lists, and questions to the user."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tools.desk import BuiltinToolFixture, ScriptedUser, refused

from handrail.contract.services.tool_runtime import QuestionOption, UserQuestion


@pytest.mark.proves("A-06")
async def test_a_todo_list_is_stored_for_the_session_and_can_be_read(desk: BuiltinToolFixture) -> None:
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
async def test_each_session_has_a_separate_todo_list(desk: BuiltinToolFixture) -> None:
    await desk.call("todo", todos=[{"content": "mine", "status": "pending"}])
    desk.around.session_id = "session-2"
    assert await desk.call("todo") == {"todos": []}


async def test_todo_ids_are_kept_and_generated_ids_do_not_collide(desk: BuiltinToolFixture) -> None:
    todos = [{"content": c, "status": "pending"} for c in "abc"]
    put = await desk.call("todo", todos=[{**todos[0]}, {**todos[1], "id": "1"}, {**todos[2], "id": "x"}])
    assert [todo["id"] for todo in put["todos"]] == ["2", "1", "x"]
    twice = [{**todo, "id": "same"} for todo in todos]
    await refused(desk.call("todo", todos=twice), "invalid_input", "'same'", "3 tasks")


@pytest.mark.proves("A-05")
async def test_questions_reach_the_user_completely_and_the_answers_are_returned(desk: BuiltinToolFixture) -> None:
    someone = ScriptedUser([["blue", "red"], ["42"]])
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
async def test_a_question_without_an_attached_user_returns_a_fixed_error(desk: BuiltinToolFixture) -> None:
    error = await refused(desk.call("question", questions=[{"question": "?"}]), "unavailable")
    assert str(error) == "question is unavailable: no user is attached to this session"


@pytest.mark.parametrize("answers", [[], [["a"]], [["a"], ["b"], ["c"]]])
async def test_answers_that_do_not_match_the_questions_are_refused(
    desk: BuiltinToolFixture, answers: list[Any]
) -> None:
    desk.around.approval_handler = ScriptedUser(answers)
    await refused(desk.call("question", questions=[{"question": "1"}, {"question": "2"}]), "backend")
