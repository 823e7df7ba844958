"""question: ask the people at the session, and wait for what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handrail.contract.approvals import question_of
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import object_schema

_DAY_MS = 24 * 60 * 60 * 1000


class Ask(Tool):
    spec = ToolSpec(
        id="question",
        description=(
            "Ask the user one or more questions and wait for the answers. Only for what you cannot find out yourself "
            "and what the work depends on. Returns one list of answers per question."
        ),
        parameters=object_schema(
            {
                "questions": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 20,
                    "items": object_schema(
                        {
                            "question": {"type": "string", "minLength": 1, "maxLength": 10_000},
                            "header": {
                                "type": "string",
                                "maxLength": 200,
                                "description": "A word or two above the question",
                            },
                            "options": {
                                "type": "array",
                                "maxItems": 100,
                                "items": object_schema(
                                    {
                                        "label": {"type": "string", "minLength": 1, "maxLength": 1_000},
                                        "description": {"type": "string", "maxLength": 2_000},
                                    },
                                    ["label"],
                                ),
                            },
                            "multi_select": {"type": "boolean", "description": "Several options may be chosen"},
                        },
                        ["question"],
                    ),
                }
            },
            ["questions"],
        ),
        requires=Requires(capabilities=("ask",)),
        side_effect="read",
        locks=(),
        timeout_ms=7 * _DAY_MS,
        category="system",
        tier="core",
        kind="other",
    )

    def questions(self, args: dict[str, Any]) -> Sequence[Question]:
        return tuple(question_of(asked) for asked in args["questions"])

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        questions = self.questions(args)
        answers = await runtime.people.answer(questions)
        if len(answers) != len(questions):
            raise ToolError(
                f"{len(questions)} questions were asked and the face gave {len(answers)} answers, so none can be told apart",
                kind="backend",
            )
        return {"answers": [list(answer) for answer in answers]}
