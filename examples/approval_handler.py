"""Decide about calls in your own code, and store a rule for the session.

Output::

    asked about write plan.md
    plan.md: output
    plan.md again: output
    asked about write memo.md
    memo.md: denied
    asked: Continue?
    answer: yes
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from handrail import ApprovalAnswer, ApprovalRequest, UserQuestion, open_kernel


class ReviewDesk:
    """Take the place of a dialog, a chat or a web page. Here, a rule of thumb decides."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        path = request.arguments["path"]
        print(f"asked about {request.tool_id} {path}")
        if path == "plan.md":
            return ApprovalAnswer("session")  # allow, and store the rule `request.always` for this session
        return ApprovalAnswer("reject", "Write plans only.")  # the model reads this message

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        for question in questions:
            print(f"asked: {question.question}")
        return [["yes"] for _ in questions]


async def main(folder: Path) -> None:
    workspace = folder / "workspace"
    workspace.mkdir()
    async with open_kernel(workspace, state=folder / "state") as kernel:
        session = await kernel.session(approval_handler=ReviewDesk())

        first = await session.call("write", {"path": "plan.md", "content": "1. rest\n"})
        print(f"plan.md: {first.type}")

        # The stored rule decides. The handler is not asked again.
        second = await session.call("write", {"path": "plan.md", "content": "1. work\n"})
        print(f"plan.md again: {second.type}")

        rejected = await session.call("write", {"path": "memo.md", "content": "hello\n"})
        assert "Write plans only." in str(rejected.error_text)
        print(f"memo.md: {rejected.error_kind}")

        question = {"questions": [{"question": "Continue?", "header": "Next"}]}
        answered = await session.call("question", question)
        print(f"answer: {answered.data['answers'][0][0]}")


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        asyncio.run(main(Path(temporary)))
